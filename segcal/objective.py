"""The objective: a weighted sum of losses and penalties that forwards the three verbs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from torch import Tensor, nn

from segcal.io import config
from segcal.losses.cross_entropy import CrossEntropy
from segcal.penalty import DualStep, Penalty, Reduce
from segcal.sweep.fused import supports, sweep
from segcal.sweep.terms import CrossEntropyTerm, Residual
from segcal.tensors import check_background


class Objective(nn.Module):
    """``sum_name weight * term(logits, labels)``.

    Args:
        terms: modules that take ``(logits, labels)`` and return a scalar, by name.
        weights: weight by name; 1 where missing.

    Raises:
        ValueError: no term, or a weight without a term.
    """

    def __init__(
        self, terms: Mapping[str, nn.Module], weights: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        weights = dict(weights or {})
        if not terms:
            raise ValueError("terms: expected at least one loss or penalty, got none")
        if unknown := set(weights) - set(terms):
            raise ValueError(
                f"weights: no term of that name: {sorted(unknown)}; terms are {sorted(terms)}"
            )
        self.terms = nn.ModuleDict(terms)
        self.weights = {name: float(weights.get(name, 1.0)) for name in terms}

    def evaluate(
        self, logits: Tensor, labels: Tensor, image: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar objective, and every term without its weight and gradient, by name.

        Cross-entropy and a penalty that can be swept (:mod:`segcal.sweep`) share one sweep. A term
        that compares two views (BWCR) is left out in eval mode.

        Args:
            logits: ``(N, K, *S)``.
            labels: ``(N, *S)``; per channel ``(N, K, *S)``.
            image: ``(N, C, *S)``, for terms that need it (NACL with kernels that weigh by
                intensities).

        Raises:
            ValueError: in training mode, if a term compares two views.
        """
        if self.training and (two := self._two_views()):
            raise ValueError(
                f"{', '.join(two)}: compares two views, for which the model is called twice; train "
                "with objective.step(model, images, labels), and call objective.eval() to evaluate "
                "one set of logits without it"
            )
        return self._evaluate(logits, labels, image)

    def _evaluate(
        self, logits: Tensor, labels: Tensor, image: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Evaluate all terms of one set of logits."""
        if not isinstance(logits, Tensor):
            raise ValueError(
                f"logits: expected a tensor (N, K, *S), got {type(logits).__name__}; of a network "
                "with deep supervision give the full-resolution head"
            )
        two = self._two_views()
        values: dict[str, Tensor] = {}
        parts: list[Tensor] = []
        if (pair := self._pair(logits)) is not None:
            (loss, cross_entropy), (penalty, residual) = pair
            part, values[loss], values[penalty] = sweep(
                logits,
                labels,
                residual,
                weight=self.weights[penalty],
                cross_entropy=cross_entropy,
                cross_entropy_weight=self.weights[loss],
            )
            parts.append(part)
        for name, term in self.terms.items():
            if name not in values and name not in two:
                needs_image = getattr(term, "needs_image", False)
                value = term(logits, labels, image) if needs_image else term(logits, labels)
                values[name] = value.detach()
                parts.append(self.weights[name] * value)
        total = sum(parts[1:], start=parts[0]) if parts else 0 * logits.sum()
        return total, {name: values[name] for name in self.terms if name in values}

    def step(
        self, model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Call the model on a training batch and return what :meth:`evaluate` does.

        With a term that compares two views the model is called on both, and the objective is
        ``(L(view 1) + L(view 2) + a L_con) / (2 + a)``, L being all other terms and a the weight of
        the consistency; the terms' values are means over the views.

        Args:
            model: takes images ``(N, C, *S)``, returns logits ``(N, K, *S)``.
            images: ``(N, C, *S)``.
            labels: ``(N, *S)``.

        Raises:
            ValueError: logits that are no tensor; two terms that compare views.
        """
        two = self._two_views()
        if not two:
            return self.evaluate(model(images), labels, images)
        if len(two) > 1:
            raise ValueError(f"{', '.join(two)}: only one term can compare two views")
        term: Any = self.terms[two[0]]
        views = term.draw(images)
        seen = [view.image(images) for view in views]
        logits = [model(x) for x in seen]
        (loss_a, values_a), (loss_b, values_b) = (
            self._evaluate(z, view.labels(labels), x)
            for view, x, z in zip(views, seen, logits, strict=True)
        )
        a, b = (view.back(z) for view, z in zip(views, logits, strict=True))
        value = term(a, b, labels, views[0].inside(a) & views[1].inside(b))
        weight = self.weights[two[0]]
        total = (loss_a + loss_b + weight * value) / (2 + weight * term.alpha)
        means = {name: (values_a[name] + values_b[name]) / 2 for name in values_a}
        return total, {**means, two[0]: value.detach()}

    def _two_views(self) -> list[str]:
        """Names of terms that compare two views."""
        return [name for name, term in self.terms.items() if getattr(term, "two_views", False)]

    def _pair(
        self, logits: Tensor
    ) -> tuple[tuple[str, CrossEntropyTerm], tuple[str, Residual]] | None:
        """Names and descriptions of a cross-entropy and a penalty that can share a sweep."""
        losses, penalties = [], []
        for name, term in self.terms.items():
            swept = getattr(term, "swept", None)
            description = swept() if callable(swept) else None
            if isinstance(description, CrossEntropyTerm):
                losses.append((name, description))
            elif isinstance(description, Residual) and supports(logits, description):
                penalties.append((name, description))
        for loss in losses:
            for penalty in penalties:
                if loss[1].ignore_index == penalty[1].ignore_index:
                    return loss, penalty
        return None

    def forward(self, logits: Tensor, labels: Tensor, image: Tensor | None = None) -> Tensor:
        """Return the scalar objective, see :meth:`evaluate`."""
        return self.evaluate(logits, labels, image)[0]

    def observe(self, logits: Tensor, labels: Tensor) -> None:
        """Hand a validation batch to every penalty."""
        for term in self.terms.values():
            if isinstance(term, Penalty):
                term.observe(logits, labels)

    def start_pass(self) -> None:
        """Let every penalty forget what it observed since its last update."""
        for term in self.terms.values():
            if isinstance(term, Penalty):
                term.start_pass()

    def dual_step(self, reduce: Reduce | None = None) -> dict[str, DualStep]:
        """Let every penalty update its weights; return what they did, by name."""
        steps = {
            name: term.dual_step(reduce)
            for name, term in self.terms.items()
            if isinstance(term, Penalty)
        }
        return {name: step for name, step in steps.items() if step is not None}


def build(
    name: str | PathLike[str],
    num_classes: int,
    *,
    ignore_index: int | None = None,
    per_channel: bool = False,
    include_background: bool = True,
    **overrides: Mapping[str, Any],
) -> Objective:
    """Build the objective of a recipe, or of a single loss or penalty.

    Example::

        objective = build("crac", num_classes=4, crac={"margin_inner": 3.0})
        loss = objective(logits, labels)        # (N, K, *S), (N, *S)
        objective.observe(logits, labels)       # every validation batch, under no_grad
        objective.dual_step()                   # once after the last

    Args:
        name: of a shipped recipe; of a loss or penalty (``losses/NAME`` or ``penalties/NAME`` where
            a recipe has the same name); or a YAML file with a recipe.
        num_classes: K.
        ignore_index: label that every term leaves out.
        per_channel: labels ``(N, K, *S)`` of 0 and 1 that may overlap, a sigmoid per channel
            (nnU-Net's regions); for the methods that have this form.
        include_background: False leaves class 0 out of all that is summed up by class: Dice and the
            penalties. Cross-entropy still sees every voxel, or nothing would learn background.
        **overrides: arguments of a term, by its name. (Weights are those of the recipe; a YAML
            file of your own sets others.)

    Returns:
        a module with the three verbs ``forward``, ``observe`` and ``dual_step``.

    Raises:
        ValueError: an unknown name, term or argument, with what there is instead; a term without a
            form per channel, or without background.
    """
    check_background(include_background, per_channel)
    if ignore_index is not None and not isinstance(ignore_index, int):
        raise ValueError(f"ignore_index: expected an integer or None, got {ignore_index!r}")
    if wrong := [term for term, value in overrides.items() if not isinstance(value, Mapping)]:
        raise ValueError(
            f"{', '.join(wrong)}: arguments belong to a term, e.g. crac={{'margin_inner': 3.0}}"
        )
    recipe = config.load_objective(name)
    runtime = {
        "num_classes": num_classes,
        "ignore_index": ignore_index,
        "per_channel": per_channel or None,
        "include_background": None if include_background else False,
    }
    terms = {
        term: config.build(component, **runtime)
        for term, component in config.resolve_terms(recipe, overrides=overrides).items()
    }
    if not include_background:
        _check_without_background(terms)
    return Objective(terms, {**recipe.base, **recipe.penalties})


def _check_without_background(terms: Mapping[str, nn.Module]) -> None:
    """Raise ValueError unless class 0 is out of all terms but cross-entropy."""
    by_class = {n: t for n, t in terms.items() if not isinstance(t, CrossEntropy)}
    whole = [n for n, t in by_class.items() if getattr(t, "include_background", True)]
    if whole or not by_class:
        raise ValueError(
            f"include_background: {', '.join(whole or terms)} cannot leave class 0 out; choose a "
            "method that can, or keep it"
        )

"""The objective of a training: a weighted sum of losses and penalties (terms).

:func:`segcal.recipes.build` makes an objective from the name of a recipe. ``forward`` gives the
loss of a batch, ``observe`` takes a validation batch, and ``dual_step`` updates what terms learn in
validation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from segcal.heads import HEADS, Head, split_heads
from segcal.late_checks import raise_wrong_labels
from segcal.schedule import Ramp, Schedules
from segcal.sweep.fused import Weights, supports, sweep
from segcal.sweep.terms import (
    BinTerm,
    ConfidenceTerm,
    CrossEntropyTerm,
    OverlapTerm,
    Residual,
    Together,
)
from segcal.tensors import check_logits, double_needed, is_soft
from segcal.term import Capabilities, DualStep, OtherTerm, Reduce, Term, TwoViewTerm, View

__all__ = ["Objective", "TwoHeads", "two_view_loss"]


_KINDS: dict[str, Any] = {
    "penalty": Residual | ConfidenceTerm,
    "cross_entropy": CrossEntropyTerm,
    "overlap": OverlapTerm,
    "bins": BinTerm,
}
"""What one sweep computes, by the names that :class:`segcal.sweep.terms.Together` has for it and in
their order."""


class Objective(nn.Module):
    """``sum_name weight * term(logits, labels)``.

    Args:
        terms: losses and penalties by name; a module of another library that takes
            ``(logits, labels)`` and returns a scalar becomes a :class:`segcal.term.OtherTerm`.
        weights: weight by name; 1 where missing.
        schedules: factors on weights that change during training, by the name of the term; the
            training loop calls :meth:`advance` before every epoch.

    Attributes:
        weights: weights by name, without the factors of schedules.
        in_force: weights by name, as they are now.
        num_heads: number of heads; a network for K classes has ``num_heads * K`` output channels.

    Raises:
        ValueError: no term, or a weight or a schedule without a term.
    """

    num_heads = 1
    in_force: dict[str, float]

    def __init__(
        self,
        terms: Mapping[str, nn.Module],
        weights: Mapping[str, float] | None = None,
        schedules: Mapping[str, Ramp] | None = None,
    ) -> None:
        super().__init__()
        weights, schedules = dict(weights or {}), dict(schedules or {})
        if not terms:
            raise ValueError("terms: expected at least one loss or penalty, got none")
        for what, given in (("weights", weights), ("schedules", schedules)):
            if unknown := set(given) - set(terms):
                raise ValueError(
                    f"{what}: no term of that name: {sorted(unknown)}; terms are {sorted(terms)}"
                )
        self.terms = nn.ModuleDict(
            {n: t if isinstance(t, Term) else OtherTerm(t) for n, t in terms.items()}
        )
        self.weights = {name: float(weights.get(name, 1.0)) for name in terms}
        self.schedules = Schedules(schedules)
        self.in_force = dict(self.weights)
        self._checked = False
        self.advance(0.0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move everything; explain where a device has no float64."""
        with double_needed(type(self).__name__):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def advance(self, progress: float, dice: float = math.nan) -> dict[str, float]:
        """Set the factors of the schedules for the next epoch.

        Args:
            progress: share of the epochs that are done, in [0, 1].
            dice: Dice of the last validation pass, mean over the foreground classes; NaN for none.

        Returns:
            weights in force of the terms that have a schedule, by name.
        """
        return self.weigh(self.schedules.factors(progress, dice))

    def see_gap(self, gap: float) -> None:
        """Take in the generalisation gap (:func:`segcal.schedule.generalisation_gap`).

        If a schedule depends on the gap, the training loop calls this before :meth:`advance`, with
        0 before the first epoch. The gap is kept in the state.
        """
        self.schedules.see_gap(gap)

    def weigh(self, factors: Mapping[str, float]) -> dict[str, float]:
        """Set factors on the weights.

        Args:
            factors: factors by name; terms without a factor keep their weight, names of no term are
                left out.

        Returns:
            weights in force of the terms that are named.
        """
        self.in_force = {name: w * factors.get(name, 1.0) for name, w in self.weights.items()}
        return {name: self.in_force[name] for name in factors if name in self.in_force}

    def by_head(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits ``(N, K, *S)`` that decide, and the logits that give probabilities.

        Both are the same here; with :class:`TwoHeads` they are the two halves of the channels.
        """
        return logits, logits

    def loss_and_terms(
        self, logits: Tensor, labels: Tensor, image: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar objective, and every term without its weight and gradient, by name.

        Where several of cross-entropy, a penalty, soft Dice and mL1-ACE can be computed in one
        sweep over the voxels (:mod:`segcal.sweep`), they are; the sum is the same but for rounding.
        A term that compares two views (BWCR) is left out in eval mode.

        Args:
            logits: ``(N, K, *S)``.
            labels: ``(N, *S)``; per channel ``(N, K, *S)``.
            image: ``(N, C, *S)``, for terms that need it (NACL with kernels that weigh by
                intensities).

        Raises:
            ValueError: in training mode, if a term compares two views; probabilities in place of
                logits (checked in the first call).
        """
        if self.training and (two := self._two_views()):
            raise ValueError(
                f"{', '.join(two)}: compares two views, for which the model is called twice; train "
                "with objective.step(model, images, labels), and call objective.eval() to evaluate "
                "one set of logits without it"
            )
        return self._of_one_view(logits, labels, image)

    def _of_one_view(
        self, logits: Tensor, labels: Tensor, image: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum up all terms of one set of logits."""
        if not isinstance(logits, Tensor):
            raise ValueError(
                f"logits: expected a tensor (N, K, *S), got {type(logits).__name__}; of a network "
                "with deep supervision give the full-resolution head"
            )
        if not self._checked and not torch.compiler.is_compiling():
            check_logits(logits, per_channel=any(t.per_channel for t in self.declared().values()))
            self._checked = True  # once, as the host waits for a GPU that it asks
        two = self._two_views()
        values: dict[str, Tensor] = {}
        parts: list[Tensor] = []
        shared = {} if is_soft(logits, labels) else self._shared(logits)
        if shared:
            together = Together(**{kind: what for kind, (_, what) in shared.items()})
            weights = {kind: self.in_force.get(name, 0.0) for kind, (name, _) in shared.items()}
            part, found = sweep(logits, labels, together, Weights(**weights))
            by_kind = dict(zip(_KINDS, found, strict=True))
            values = {name: by_kind[kind] for kind, (name, _) in shared.items()}
            parts.append(part)
        declared = self.declared()
        for name, term in self.terms.items():
            if name not in values and name not in two:
                seen = (image,) if declared[name].needs_image else ()
                value = term(logits, labels, *seen)
                values[name] = value.detach()
                parts.append(self.in_force[name] * value)
        total = sum(parts[1:], start=parts[0]) if parts else 0 * logits.sum()
        return total, {name: values[name] for name in self.terms if name in values}

    def step(
        self, model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Call the model on a training batch and return what :meth:`loss_and_terms` does.

        With a term that compares two views the model is called on both, and the objective is
        ``(L(view 1) + L(view 2) + a L_con) / (2 + a)``, where L is the sum of all other terms and a
        the weight of the consistency; the terms' values are means over the views.

        Args:
            model: takes images ``(N, C, *S)``, returns logits ``(N, K, *S)``.
            images: ``(N, C, *S)``.
            labels: ``(N, *S)``.

        Raises:
            ValueError: logits that are no tensor; two terms that compare views.
        """
        two = self._two_views()
        if not two:
            return self.loss_and_terms(model(images), labels, images)
        if len(two) > 1:
            raise ValueError(f"{', '.join(two)}: only one term can compare two views")
        term = cast(TwoViewTerm, self.terms[two[0]])
        views = term.draw(images)
        seen = [view.image(images) for view in views]
        logits = [model(x) for x in seen]
        losses = [
            self._of_one_view(z, view.labels(labels), x)
            for view, x, z in zip(views, seen, logits, strict=True)
        ]
        return two_view_loss(two[0], term, self.in_force[two[0]], views, logits, labels, losses)

    def declared(self) -> dict[str, Capabilities]:
        """What each term declares of itself, by name."""
        return dict(self._terms())

    def shares_sweep(self, logits: Tensor) -> bool:
        """Whether some terms share a sweep over logits ``(N, K, *S)``."""
        return bool(self._shared(logits))

    def _two_views(self) -> list[str]:
        """Names of terms that compare two views."""
        return [name for name, term in self.declared().items() if term.two_views]

    def _shared(self, logits: Tensor) -> dict[str, tuple[str, Any]]:
        """Terms that share a sweep, by their kind: name and description; none if it is one."""
        groups: dict[Any, dict[str, tuple[str, Any]]] = {}
        for name, term in self.declared().items():
            what = term.swept()
            if what is not None:
                kind = next(kind for kind, types in _KINDS.items() if isinstance(what, types))
                group = groups.setdefault((what.num_classes, what.ignore_index), {})
                group.setdefault(kind, (name, what))
        largest: dict[str, tuple[str, Any]] = {}
        for group in groups.values():
            if len(group) > max(1, len(largest)):  # else nothing is tried, which compiles
                able: dict[str, tuple[str, Any]] = {}
                for kind in sorted(group, key=list(_KINDS).index):  # the penalty first
                    _, beside = able.get("penalty", (None, None))
                    if supports(logits, group[kind][1], beside=beside):
                        able[kind] = group[kind]
                largest = max(largest, able, key=len)
        return largest if len(largest) > 1 else {}

    def forward(self, logits: Tensor, labels: Tensor, image: Tensor | None = None) -> Tensor:
        """Return the scalar objective; :meth:`loss_and_terms` also returns its terms."""
        return self.loss_and_terms(logits, labels, image)[0]

    def observe(self, logits: Tensor, labels: Tensor) -> None:
        """Hand a validation batch to every term."""
        for term in self._terms().values():
            term.observe(logits, labels)

    def start_pass(self) -> None:
        """Let every term forget what it observed since its last update.

        Raises:
            ValueError: wrong labels that a GPU has seen since the last check.
        """
        raise_wrong_labels()
        for term in self._terms().values():
            term.start_pass()

    def dual_step(self, reduce: Reduce | None = None) -> dict[str, DualStep]:
        """Let every term update what it learns, and return the updates by name.

        A term whose weight is 0 at present goes on learning, so that it is ready when a schedule
        raises its weight; its notes then say that it has no effect.
        """
        found = {}
        for name, term in self._terms().items():
            if (step := term.dual_step(reduce)) is None:
                continue
            if not self.in_force.get(name, 1.0):
                notes = [f"{note}; its weight is 0 now, so it has no effect" for note in step.notes]
                step = replace(step, notes=notes)
            found[name] = step
        return found

    def _terms(self) -> dict[str, Term]:
        return {name: cast(Term, term) for name, term in self.terms.items()}


class TwoHeads(Objective):
    """The objective of a network with two heads (:mod:`segcal.heads`).

    L is the sum of the decision's terms on the first K channels plus the sum of the probability's
    terms on the other K channels. Each penalty learns from the head that it belongs to.

    Args:
        decision: objective of the first K channels.
        probability: objective of the other K channels.

    Attributes:
        heads: both objectives, by the name of their head.
        weights: weights of all terms, whose names begin with the name of their head, such as
            ``probability/confidence``.

    Raises:
        ValueError: a term that compares two views, which is not possible with two heads.
    """

    num_heads = 2

    def __init__(self, decision: Objective, probability: Objective) -> None:
        nn.Module.__init__(self)
        self.heads = nn.ModuleDict(dict(zip(HEADS, (decision, probability), strict=True)))
        if two := self._two_views():
            raise ValueError(
                f"{', '.join(two)}: compares two views, and has no form with two heads"
            )

    def _objectives(self) -> dict[Head, Objective]:
        return {head: cast(Objective, self.heads[head]) for head in HEADS}

    @property
    def terms(self) -> dict[str, Term]:  # type: ignore[override]
        """All terms, by names that begin with the name of their head."""
        return self._terms()

    @property
    def weights(self) -> dict[str, float]:  # type: ignore[override]
        """Weights of all terms, without the factors of schedules."""
        return _named({head: one.weights for head, one in self._objectives().items()})

    @property
    def in_force(self) -> dict[str, float]:  # type: ignore[override]
        """Weights of all terms, as they are now."""
        return _named({head: one.in_force for head, one in self._objectives().items()})

    def advance(self, progress: float, dice: float = math.nan) -> dict[str, float]:
        """Set the factors of the schedules of both heads, as :meth:`Objective.advance` does."""
        return _named({h: one.advance(progress, dice) for h, one in self._objectives().items()})

    def see_gap(self, gap: float) -> None:
        """Take in the generalisation gap, as :meth:`Objective.see_gap` does."""
        for one in self._objectives().values():
            one.see_gap(gap)

    def weigh(self, factors: Mapping[str, float]) -> dict[str, float]:
        """Set factors on the weights of both heads, as :meth:`Objective.weigh` does."""
        found = {}
        for head, one in self._objectives().items():
            start = f"{head}/"
            found[head] = one.weigh(
                {n.removeprefix(start): f for n, f in factors.items() if n.startswith(start)}
            )
        return _named(found)

    def by_head(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the decision and of the probability head of ``(N, 2 K, *S)``.

        Raises:
            ValueError: another number of channels.
        """
        told = (getattr(term, "num_classes", None) for term in self._terms().values())
        known = next((k for k in told if isinstance(k, int)), None)
        return split_heads(logits, known)

    def shares_sweep(self, logits: Tensor) -> bool:
        """Whether some terms of a head share a sweep over its logits."""
        both = zip(self._objectives().values(), self.by_head(logits), strict=True)
        return any(one.shares_sweep(of_head) for one, of_head in both)

    def _of_one_view(
        self, logits: Tensor, labels: Tensor, image: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        totals, values = [], {}
        both = zip(self._objectives().items(), self.by_head(logits), strict=True)
        for (head, one), of_head in both:
            total, values[head] = one.loss_and_terms(of_head, labels, image)
            totals.append(total)
        return totals[0] + totals[1], _named(values)

    def observe(self, logits: Tensor, labels: Tensor) -> None:
        """Hand the channels of each head of a validation batch ``(N, 2 K, *S)`` to its terms."""
        for one, of_head in zip(self._objectives().values(), self.by_head(logits), strict=True):
            one.observe(of_head, labels)

    def _terms(self) -> dict[str, Term]:
        return _named({head: one._terms() for head, one in self._objectives().items()})


Value = TypeVar("Value")


def _named(by_head: Mapping[Head, Mapping[str, Value]]) -> dict[str, Value]:
    """Values of the terms of both heads, by names that begin with the name of the head."""
    return {f"{head}/{name}": v for head, of in by_head.items() for name, v in of.items()}


def two_view_loss(
    name: str,
    term: TwoViewTerm,
    weight: float,
    views: tuple[View, View],
    logits: Sequence[Tensor],
    labels: Tensor,
    losses: Sequence[tuple[Tensor, dict[str, Tensor]]],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``(L(view 1) + L(view 2) + w L_con) / (2 + w alpha)``, and its terms by name.

    Args:
        name: name of the term.
        term: term that computes L_con, with its own factor alpha.
        weight: w.
        views: the two views that the model saw.
        logits: logits of both views, ``(N, K, *S)`` each, as the model returned them.
        labels: ``(N, *S)`` in the original frame.
        losses: L of both views and its terms by name, whose means over the views are returned.
    """
    a, b = (view.back(z) for view, z in zip(views, logits, strict=True))
    value = term(a, b, labels, views[0].inside(a) & views[1].inside(b))
    (loss_a, values_a), (loss_b, values_b) = losses
    total = (loss_a + loss_b + weight * value) / (2 + weight * term.alpha)
    means = {key: (values_a[key] + values_b[key]) / 2 for key in values_a}
    return total, {**means, name: value.detach()}


def __getattr__(name: str) -> Any:
    """Offer ``build`` here too; it is defined in :mod:`segcal.recipes`, which loads yaml."""
    if name == "build":
        return resolve_name("segcal.recipes:build")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

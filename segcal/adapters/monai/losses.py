"""segcal's recipes as MONAI losses: ``loss(input, target)`` with MONAI's layouts and options."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, TypeVar

from torch import Tensor
from torch.nn.modules.loss import _Loss

from segcal.objective import Objective
from segcal.recipes import build
from segcal.tensors import full_precision, one_hot
from segcal.term import Capabilities, DualStep, OtherTerm, Reduce

__all__ = ["SegcalLoss"]

Declared = TypeVar("Declared", bool, int | None)


class SegcalLoss(_Loss):
    """A recipe as a MONAI loss that learns its multipliers.

    Example::

        loss = SegcalLoss("crac", num_classes=4, to_onehot_y=True)
        trainer = SupervisedTrainer(..., loss_function=loss)
        DualStepHandler(loss).attach(evaluator)

    Without engines, call ``loss(input, target)`` in training, ``loss.observe(input, target)`` on
    every validation batch and ``loss.dual_step()`` after the last one. That step updates the
    multipliers, the learned weights of the penalties. Multipliers, rho and counters are in
    ``state_dict``: put the loss beside the network into CheckpointSaver's dictionary.

    With a recipe for two heads, such as ``two_heads_confidence``, `input` has the ``2 N`` channels
    of both heads (:mod:`segcal.heads`; ``loss.num_heads`` says how many heads there are), and
    ``loss.by_head(input)`` separates the channels that decide from the channels that give
    probabilities. If the recipe has a schedule, call ``loss.advance(epoch / epochs)`` before every
    epoch.

    Give it logits: the terms apply softmax or sigmoid themselves. Under autocast, or with logits in
    half precision, the loss is computed in float32. MetaTensors are accepted and give a plain
    tensor. The loss follows its input to another device. Inside ``DeepSupervisionLoss`` all terms
    see every head; give float targets there, as MONAI's transforms do, because it cannot make int64
    targets smaller.

    Args:
        objective: name of a recipe, loss or penalty, or a YAML file, see
            :func:`segcal.recipes.build`; or the objective that ``build`` returned.
        num_classes: K; needed with a name or file, refused with a ready-made objective.
        include_background: False leaves channel 0 out of everything that is summed up by class
            (Dice and the penalties); as in MONAI's DiceCELoss, cross-entropy still sees every
            voxel. Only with a name or file, and only for terms that can leave the background out.
        to_onehot_y: True: `target` holds label indices ``B1H[WD]``. False: it is one-hot
            ``BNH[WD]``, or label indices if that is the only way to read it.
        reduction: only ``mean``, because Dice and learned penalties have no value per voxel.
        ignore_index: label to leave out. In a one-hot target this means the voxels of that channel,
            or the voxels without any label if there is no such channel. With `per_channel` it is
            the value that marks a channel of a voxel as unknown.
        per_channel: a sigmoid per channel; channels of `target` may overlap. Only with a name or
            file.
        **overrides: arguments of a term, by its name: ``crac={"margin_inner": 3.0}``. Only with a
            name or file.

    Raises:
        ValueError: an unknown name or option; options that a ready-made objective has fixed
            already; a recipe that needs more than logits and target.
    """

    def __init__(
        self,
        objective: Objective | str | PathLike[str],
        *,
        num_classes: int | None = None,
        include_background: bool = True,
        to_onehot_y: bool = False,
        reduction: str = "mean",
        ignore_index: int | None = None,
        per_channel: bool = False,
        **overrides: Mapping[str, Any],
    ) -> None:
        super().__init__(reduction="mean")
        if reduction != "mean":
            raise ValueError(
                f"reduction: expected 'mean', got {reduction!r}; Dice and penalties with learned "
                "weights are means over voxels or ratios of sums, which have no other form"
            )
        if isinstance(objective, Objective):
            given = {
                "num_classes": num_classes is not None,
                "include_background": not include_background,
                "per_channel": per_channel,
                **dict.fromkeys(overrides, True),
            }
            if named := [name for name, is_given in given.items() if is_given]:
                raise ValueError(
                    f"{', '.join(named)}: cannot be set for a ready-made objective; "
                    "hand it to segcal.recipes.build, or give SegcalLoss the name of a recipe"
                )
        else:
            if num_classes is None:
                raise ValueError(f"num_classes: needed to build {str(objective)!r}")
            objective = build(
                objective,
                num_classes,
                ignore_index=ignore_index,
                per_channel=per_channel,
                include_background=include_background,
                **overrides,
            )
        self.objective = objective
        self.num_heads = objective.num_heads
        self.to_onehot_y = to_onehot_y
        declared = objective.declared()
        ours = [t for t in declared.values() if not isinstance(t, OtherTerm)]  # the rest is silent
        self.per_channel = _agreed("per_channel", {t.per_channel for t in ours}, False)
        self.ignore_index = _agreed("ignore_index", {t.ignore_index for t in ours}, None)
        if ignore_index not in (None, self.ignore_index):
            raise ValueError(
                f"ignore_index: {ignore_index} here, {self.ignore_index} in the objective; give it "
                "to segcal.recipes.build"
            )
        _check_needs(declared)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the scalar loss, see :meth:`loss_and_terms`."""
        return self.loss_and_terms(input, target)[0]

    def loss_and_terms(self, input: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar loss, and every term without its weight and gradient, by name.

        Args:
            input: logits ``BNH[WD]``.
            target: ``B1H[WD]`` or ``BNH[WD]``, see the class; ``BH[WD]`` is taken for indices.

        Raises:
            ValueError: shapes or values that do not fit; soft targets; probabilities in place of
                logits (looked at in the first call).
        """
        logits, labels = self._canonical(input, target)
        with full_precision(logits) as x:
            return self.objective.loss_and_terms(x, labels)

    def observe(self, input: Tensor | Sequence[Tensor], target: Tensor) -> None:
        """Take in a validation batch; with deep supervision only the first head counts.

        Args:
            input: logits ``BNH[WD]``.
            target: see :meth:`loss_and_terms`.
        """
        head = input if isinstance(input, Tensor) else input[0]
        self.objective.observe(*self._canonical(head.detach(), target))

    def dual_step(self, reduce: Reduce | None = None) -> dict[str, DualStep]:
        """Update the multipliers after the last validation batch; return what was done, by term.

        Args:
            reduce: sums a tensor over ranks, e.g. :func:`segcal.term.sum_over_ranks`; None for
                one process.
        """
        return self.objective.dual_step(reduce)

    def start_pass(self) -> None:
        """Forget the batches that were observed since the last update."""
        self.objective.start_pass()

    def advance(self, progress: float, dice: float = math.nan) -> dict[str, float]:
        """Set the weights of terms that have a schedule, see :meth:`Objective.advance`."""
        return self.objective.advance(progress, dice)

    def see_gap(self, gap: float) -> None:
        """Take in the generalisation gap, see :meth:`Objective.see_gap`."""
        self.objective.see_gap(gap)

    def by_head(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Channels ``BNH[WD]`` that decide and that give probabilities; one head does both."""
        return self.objective.by_head(input)

    def _canonical(self, input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``(N, K, *S)`` and labels ``(N, *S)``, per channel ``(N, K, *S)``."""
        if not isinstance(input, Tensor):
            raise ValueError(
                f"input: expected a tensor BNH[WD], got {type(input).__name__}; for the heads of "
                "deep supervision put this loss into monai.losses.DeepSupervisionLoss"
            )
        logits, target = input.as_subclass(Tensor), target.as_subclass(Tensor)
        if any(state.device != logits.device for state in self.buffers()):
            self.to(logits.device)
        return logits, self._labels(self.by_head(logits)[0], target)

    def _labels(self, logits: Tensor, target: Tensor) -> Tensor:
        k = logits.shape[1]
        if self.to_onehot_y and k == 1:
            warnings.warn("single channel prediction, `to_onehot_y=True` ignored.", stacklevel=4)
        elif self._holds_indices(logits, target):
            indices = target if target.ndim < logits.ndim else target[:, 0]
            labels = _whole(indices, "label indices")
            if not self.per_channel:
                return labels
            if not self.to_onehot_y:
                raise ValueError(
                    f"target: label indices {tuple(target.shape)}, but {k} channels that may "
                    "overlap were asked for (per_channel); say to_onehot_y=True to convert them"
                )
            channels = one_hot(labels, k, ignore_index=self.ignore_index, dtype=labels.dtype)
            if self.ignore_index is None:
                return channels
            return channels.masked_fill((labels == self.ignore_index)[:, None], self.ignore_index)
        if target.shape != logits.shape:
            raise ValueError(
                f"target: expected label indices {(len(logits), 1, *logits.shape[2:])} or one-hot "
                f"{tuple(logits.shape)} like input, got {tuple(target.shape)}"
            )
        channels = _whole(target, "one-hot channels")
        return channels if self.per_channel else _exclusive(channels, self.ignore_index)

    def _holds_indices(self, logits: Tensor, target: Tensor) -> bool:
        k = logits.shape[1]
        if target.ndim == logits.ndim - 1 or (target.ndim == logits.ndim and target.shape[1] == 1):
            return self.to_onehot_y or k > 1
        if self.to_onehot_y:
            raise ValueError(
                f"target: expected label indices {(len(logits), 1, *logits.shape[2:])}, got "
                f"{tuple(target.shape)}; for a one-hot target say to_onehot_y=False"
            )
        return False


def _check_needs(declared: Mapping[str, Capabilities]) -> None:
    """Raise ValueError if a term needs more than logits and target."""
    for needs, named in (
        ("the image", [n for n, t in declared.items() if t.needs_image]),
        ("two views of a batch", [n for n, t in declared.items() if t.two_views]),
    ):
        if named:
            raise ValueError(
                f"{', '.join(named)}: needs {needs}, and a MONAI loss gets logits and target; "
                "train with objective.step(model, images, labels) in a loop of your own"
            )


def _agreed(name: str, found: set[Declared], otherwise: Declared) -> Declared:
    """What all terms of an objective declare; `otherwise` where none declares anything.

    Raises:
        ValueError: they do not agree.
    """
    if len(found) > 1:
        raise ValueError(f"objective: its terms differ in {name}: {sorted(map(str, found))}")
    return next(iter(found), otherwise)


def _whole(target: Tensor, what: str) -> Tensor:
    """Integers of a target that MONAI delivers as floats."""
    if target.is_floating_point() and not bool((target == target.round()).all()):
        raise ValueError(
            f"target: expected {what}, got values that are not whole numbers; segcal's terms need "
            "hard labels (interpolate label maps with mode='nearest')"
        )
    return target.long()


def _exclusive(channels: Tensor, ignore_index: int | None) -> Tensor:
    """Labels ``(N, *S)`` of one-hot channels ``(N, K, *S)``."""
    if channels.numel() and not bool(((channels == 0) | (channels == 1)).all()):
        raise ValueError("target: expected one-hot channels of 0 and 1, got other values")
    count, labels = channels.sum(1), channels.argmax(1)
    if bool((count > 1).any()):
        raise ValueError(
            f"target: {int((count > 1).sum())} voxels belong to several classes; channels may "
            "overlap with per_channel=True, which gives each a sigmoid"
        )
    without = count == 0
    if not bool(without.any()):
        return labels
    if ignore_index is None or 0 <= ignore_index < channels.shape[1]:
        raise ValueError(
            f"target: {int(without.sum())} voxels belong to no class; keep the background as "
            "channel 0, or give an ignore_index that is no class to leave them out"
        )
    return labels.masked_fill(without, ignore_index)

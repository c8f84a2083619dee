"""Confidence held to accuracy per predicted class and region, with weights found in validation.

The mean confidence of a network is asked to equal its accuracy in every group of voxels. Groups are
made of what is known at test time: the predicted class, and the region of the predicted map (inner,
where all voxels around a voxel have its prediction, or outer). In validation,

    gap_g = mean(confidence - [prediction right])

is measured per group g. The multiplier ``lam_g``, a weight per group, follows this gap, and in
training ``lam_g`` times the log-odds of the prediction is added to the loss. The log-odds have
slope 1 in the predicted logit even where the prediction is confident, so that with a posterior q of
the training data the optimum is ``p = q - lam``. This is label smoothing whose strength is found
per group, and which stays as it is once the gap has closed. With ``lam = 0`` the loss is unchanged.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segcal.late_checks import raise_wrong_labels
from segcal.neighbourhood import KernelSize, check_options, outer_region
from segcal.sweep.fused import confidence_statistics, supports, sweep
from segcal.sweep.terms import ConfidenceTerm, Together
from segcal.tensors import (
    check_background,
    check_channels,
    check_logits_labels,
    check_shares,
    full_precision,
    is_soft,
    valid_mask,
)
from segcal.term import DualStep, LearnedTerm, Reduce

__all__ = ["Confidence", "Decisions", "confidence_gaps", "decide", "log_odds", "log_odds_mean"]

CLIP = 30.0
"""Log-odds above this, a probability within 1e-13 of 1, have no gradient."""
NOTHING = -1
"""Stands for the label of voxels whose shares are all 0."""
REGIONS = ("inner", "outer")
SIDES = ("in", "out")


class Decisions(NamedTuple):
    """Decision at every voxel; C is 1, or K where every channel is decided on its own.

    Attributes:
        odds: log-odds of the decision ``(N, C, *S)``, differentiable.
        row: int64 ``(N, C, *S)``: 0 in the inner and 1 in the outer region of the decided map; with
            channels, 2 more where the voxel is decided to lie outside; -1 where it does not count.
        column: int64, the decided class ``(N, 1, *S)``, or every channel's number ``(1, K, ...)``.
        hit: bool ``(N, C, *S)``: whether the decision is the label; with shares of the classes, the
            share of the decided class.
    """

    odds: Tensor
    row: Tensor
    column: Tensor
    hit: Tensor


def log_odds(logits: Tensor, chosen: Tensor) -> Tensor:
    """Log-odds ``log p_c / (1 - p_c)`` of class c under the softmax: ``l_c - log sum_j e^l_j``.

    The sum runs over the other classes.

    Args:
        logits: floating ``(N, K, *S)``.
        chosen: int64 ``(N, *S)``, c.

    Returns:
        ``(N, *S)``.
    """
    index = chosen.unsqueeze(1)
    others = logits.scatter(1, index, -math.inf).logsumexp(1)
    return logits.gather(1, index).squeeze(1) - others


def decide(
    logits: Tensor,
    labels: Tensor,
    *,
    kernel_size: KernelSize = 3,
    per_channel: bool = False,
    ignore_index: int | None = None,
) -> Decisions:
    """Return the decisions of a batch, with the group and the log-odds of each.

    The decision at a voxel is the class with the largest logit (the first of equal ones); in a
    channel it is "in" where the sigmoid is above 1/2. Region 0, inner, is where the patch of the
    decided map around a voxel holds one value, and region 1, outer, is where it holds several. The
    map is replicated at the border of the image. Ignored voxels are in no patch.

    Args:
        logits: ``(N, K, *S)``, at least float32, S of 1 to 3 axes.
        labels: integer ``(N, *S)``; per channel 0 and 1 ``(N, K, *S)``; or shares of the classes,
            floating like `logits`, all 0 in voxels that do not count.
        kernel_size: odd size of the patch, one number or one per spatial axis.
        per_channel: whether every channel is decided on its own.
        ignore_index: label of voxels that do not count.
    """
    x = logits.detach()
    if per_channel:
        valid, inside = valid_mask(labels, ignore_index), x > 0
        outer = _outer(inside.flatten(0, 1), valid.flatten(0, 1), kernel_size, ignore_index, 2)
        row = outer.view(x.shape).long() + 2 * (~inside).long()
        channels = torch.arange(x.shape[1], device=x.device)
        return Decisions(
            odds=torch.where(inside, logits, -logits),
            row=torch.where(valid, row, -1),
            column=channels.view(1, -1, *(1,) * (x.ndim - 2)),
            hit=inside == labels.bool(),
        )
    predicted = x.argmax(1)
    if is_soft(logits, labels):
        valid, ignore_index = labels.sum(1) > 0, NOTHING
        hit = labels.gather(1, predicted.unsqueeze(1))
    else:
        valid = valid_mask(labels, ignore_index)
        hit = (predicted == labels).unsqueeze(1)
    row = _outer(predicted, valid, kernel_size, ignore_index, x.shape[1]).long()
    return Decisions(
        odds=log_odds(logits, predicted).unsqueeze(1),
        row=torch.where(valid, row, -1).unsqueeze(1),
        column=predicted.unsqueeze(1),
        hit=hit,
    )


def _outer(
    decided: Tensor,
    valid: Tensor,
    kernel_size: KernelSize,
    ignore_index: int | None,
    values: int,
) -> Tensor:
    """Bool: the patch around a voxel of a map ``(N, *S)`` of 0 to `values` - 1 is mixed."""
    nothing = None if ignore_index is None else max(values, 255)
    decided = decided.byte() if values < 256 else decided
    if nothing is not None:
        decided = decided.masked_fill(~valid, nothing)
    return outer_region(decided, kernel_size=kernel_size, ignore_index=nothing)


def log_odds_mean(decisions: Decisions, lam: Tensor) -> Tensor:
    """Return ``(1 / N) sum_i lam[row(i), column(i)] min(odds(i), 30)`` over the voxels that count.

    Args:
        decisions: decisions of a batch, from :func:`decide`.
        lam: multipliers ``(R, K)``.

    Returns:
        scalar; 0 with zero gradient where no voxel counts.
    """
    counts = decisions.row >= 0
    weight = lam.to(decisions.odds)[decisions.row.clamp(min=0), decisions.column]
    clipped = torch.where(decisions.odds > CLIP, CLIP, decisions.odds)
    kept = torch.where(counts, weight * clipped, 0.0)
    return kept.sum() / counts.sum().clamp(min=1)


def group_sums(decisions: Decisions, rows: int, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums of confidence, of hits (float64) and voxels (int64) per group, ``(R, K)`` each.

    Confidence is the probability of the decision: the largest softmax probability, or the larger of
    p and 1 - p.
    """
    classes = torch.arange(num_classes, device=decisions.row.device)
    chosen = decisions.column == classes.view(1, -1, *(1,) * (decisions.row.ndim - 2))
    axes = [0, *range(2, decisions.row.ndim)]
    confidence = torch.sigmoid(decisions.odds.detach()).double()
    hit = decisions.hit.double()
    sums = []
    for r in range(rows):
        group = chosen & (decisions.row == r)
        sums.append(
            (
                torch.where(group, confidence, 0.0).sum(axes),
                torch.where(group, hit, 0.0).sum(axes),
                group.sum(axes),
            )
        )
    confidences, hits, voxels = zip(*sums, strict=True)
    return torch.stack(confidences), torch.stack(hits), torch.stack(voxels)


def confidence_gaps(confidence: Tensor, hits: Tensor, count: Tensor) -> Tensor:
    """Return mean confidence minus accuracy, float64; 0 in a group without voxels.

    Args:
        confidence: sum of the confidences per group.
        hits: number of right decisions per group.
        count: number of decisions per group.
    """
    return (confidence.double() - hits.double()) / count.double().clamp(min=1)


class Confidence(LearnedTerm):
    """Log-odds of the prediction, weighed by multipliers per predicted class and region.

    The penalty is ``(1 / N) sum_i lam[r(i), c(i)] min(log p_c / (1 - p_c), 30)``, where c is the
    predicted class and r the region of the predicted map (:func:`decide`); no gradient flows
    through c and r. Labels are used in validation alone, where after every pass

        lam <- clip(lam + eta gap, floor, cap),   gap = mean(confidence - [prediction right])

    in the groups that hold a share of at least `min_share` of the voxels; the multipliers of other
    groups stay. A multiplier is the probability by which confidence is lowered.

    ``lam`` is ``(2, K)``, with a row for the inner and one for the outer region. With `per_channel`
    it is ``(4, K)``: inner and outer region of what is decided in, then of what is decided out.

    Add it to a loss without Dice: Dice makes networks overconfident faster than the multipliers can
    follow.

    Args:
        num_classes: K.
        eta: step of the multipliers.
        cap: upper bound of the multipliers.
        floor: lower bound of the multipliers, 0 or negative; with a negative floor, the confidence
            of groups that are less confident than accurate is raised.
        decay: factor on a multiplier whose gap does not have its sign, before the step is taken,
            so that the multiplier comes back to 0 faster; 1 for no decay.
        min_share: smallest share of the voxels (per channel, of the voxels of the channel) at which
            a group learns.
        start_epoch: passes to wait; until then multipliers are 0 and the penalty is 0.
        patience: passes after which a multiplier at its bound whose gap does not shrink is
            reported.
        kernel_size: odd size of the patch that decides the region, one number or one per spatial
            axis (``(1, 3, 3)`` for thick slices).
        include_background: whether groups of predicted class 0 have multipliers; if not, their
            multipliers stay 0.
        inner_background: False leaves out only the inner group of predicted class 0, which holds
            most voxels of most images; per channel, the inner group of what is decided out.
        per_channel: labels are ``(N, K, *S)`` of 0 and 1 that may overlap. Every channel is decided
            in or out and has groups of its own; the log-odds of the decision are ``|l|``.
        ignore_index: label to leave out of the penalty, of neighbourhoods and of statistics.
        fused: compute value and gradient in one sweep, a single pass over the voxels, where that is
            possible (:mod:`segcal.sweep`); False keeps to ordinary torch operations, which can be
            differentiated twice.

    Raises:
        ValueError: options out of range.
    """

    lam: Tensor
    step: Tensor
    confidence_sum: Tensor
    hits: Tensor
    count: Tensor
    smallest: Tensor
    stuck: Tensor
    told: Tensor

    def __init__(
        self,
        num_classes: int,
        *,
        eta: float = 0.3,
        cap: float = 0.3,
        floor: float = 0.0,
        decay: float = 1.0,
        min_share: float = 1e-3,
        start_epoch: int = 0,
        patience: int = 10,
        kernel_size: KernelSize = 3,
        include_background: bool = True,
        inner_background: bool = True,
        per_channel: bool = False,
        ignore_index: int | None = None,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.eta = eta
        self.bounds = (floor, cap)
        self.decay = decay
        self.min_share = min_share
        self.start_epoch = start_epoch
        self.patience = patience
        self.kernel_size = kernel_size
        self.include_background = include_background
        self.regions_of_background = (include_background and inner_background, include_background)
        self.per_channel = per_channel
        self.ignore_index = ignore_index
        self.fused = fused
        self._check()
        rows = len(REGIONS) * (len(SIDES) if per_channel else 1)
        for name, start, dtype in (
            ("lam", 0, torch.float64),
            ("confidence_sum", 0, torch.float64),
            ("hits", 0, torch.float64),
            ("count", 0, torch.int64),
            ("smallest", math.inf, torch.float64),
            ("stuck", 0, torch.int64),
        ):
            self.register_buffer(name, torch.full((rows, num_classes), start, dtype=dtype))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("told", torch.zeros((), dtype=torch.bool))

    def _check(self) -> None:
        fewest = 1 if self.per_channel else 2
        if self.num_classes < fewest:
            raise ValueError(f"num_classes: expected at least {fewest}, got {self.num_classes}")
        check_options(self.kernel_size, "mean", "replicate")
        check_background(self.include_background, self.per_channel)
        floor, cap = self.bounds
        if not -math.inf < floor <= 0 < cap < math.inf:
            raise ValueError(f"floor, cap: expected floor <= 0 < cap, got {floor} and {cap}")
        if not 0 < self.eta < math.inf:
            raise ValueError(f"eta: expected a positive number, got {self.eta}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay: expected a number from 0 to 1, got {self.decay}")
        if not 0 <= self.min_share < 1:
            raise ValueError(f"min_share: expected at least 0 and below 1, got {self.min_share}")
        if self.start_epoch < 0:
            raise ValueError(f"start_epoch: expected >= 0, got {self.start_epoch}")
        if self.patience < 1:
            raise ValueError(f"patience: expected >= 1, got {self.patience}")

    def identity(self) -> dict[str, Any]:
        """Classes, whether channels are decided on their own, and which groups are left out."""
        return {
            **super().identity(),
            "num_classes": self.num_classes,
            "per_channel": self.per_channel,
            **({} if self.include_background else {"include_background": False}),
            **({} if all(self.regions_of_background) else {"inner_background": False}),
        }

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Bounds of the multipliers, and of the smallest gap, which is infinite at first."""
        return {"lam": self.bounds, "smallest": (0.0, math.inf)}

    def decisions(self, logits: Tensor, labels: Tensor) -> Decisions:
        """Check a batch and return the decisions that :func:`decide` makes in it."""
        if not self.per_channel and is_soft(logits, labels):
            check_shares(logits, labels, self.num_classes)
        else:
            check = check_channels if self.per_channel else check_logits_labels
            check(logits, labels, self.num_classes, self.ignore_index)
        return decide(
            logits,
            labels,
            kernel_size=self.kernel_size,
            per_channel=self.per_channel,
            ignore_index=self.ignore_index,
        )

    def multipliers_in_force(self) -> Tensor:
        """Return lam ``(R, K)``; 0 before `start_epoch`, and in groups that are left out."""
        lam = self.lam
        if self.start_epoch:
            lam = lam * (self.step >= self.start_epoch)  # on its device: the host does not wait
        return lam if all(self.regions_of_background) else lam * self._penalised()

    def swept(self) -> ConfidenceTerm | None:
        """Describe the penalty to :mod:`segcal.sweep`; None per channel."""
        if not self.fused or self.per_channel:
            return None
        return ConfidenceTerm(
            lam=self.multipliers_in_force(),
            clip=CLIP,
            kernel_size=self.kernel_size,
            ignore_index=self.ignore_index,
        )

    def _penalised(self) -> Tensor:
        """Bool ``(R, K)``: which groups have a multiplier."""
        penalised = torch.ones_like(self.lam, dtype=torch.bool)
        for region, kept in enumerate(self.regions_of_background):
            if not kept:
                penalised[(2 + region,) if self.per_channel else (region, 0)] = False
        return penalised

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the penalty of `logits` ``(N, K, *S)``; 0 where no voxel is valid.

        Args:
            logits: floating; half precision is promoted to float32.
            labels: integer ``(N, *S)``, per channel ``(N, K, *S)``, or shares
                (:func:`segcal.tensors.check_shares`); they only say which voxels count.
        """
        term = self.swept()
        if term is not None and supports(logits, term) and not is_soft(logits, labels):
            return sweep(logits, labels, Together(term))[0]
        with full_precision(logits) as x:
            return log_odds_mean(self.decisions(x, labels), self.multipliers_in_force())

    @torch.no_grad()
    def observe(self, logits: Tensor, labels: Tensor) -> None:
        """Add a validation batch to the sums.

        Raises:
            ValueError: labels that do not fit, or logits that are not finite, neither of which must
                reach the multipliers.
        """
        confidence, hits, count = self._statistics(logits, labels)
        raise_wrong_labels()
        if not bool(torch.isfinite(confidence).all()):
            raise ValueError(
                "logits: not finite in a validation batch; this penalty's sums and multipliers "
                "were not changed. Look for a diverged training or an fp16 overflow"
            )
        self.confidence_sum += confidence
        self.hits += hits
        self.count += count

    def _statistics(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of confidence, NaN where a logit is NaN or infinite, of hits and of voxels."""
        term = self.swept()
        if (
            term is not None
            and supports(logits, term, statistics=True)
            and not is_soft(logits, labels)
        ):
            return confidence_statistics(logits, labels, term)
        with full_precision(logits) as x:
            made = self.decisions(x, labels)
            confidence, hits, count = group_sums(made, *self.lam.shape)
            below = x < math.inf
            wrong = (made.row >= 0) & ~(below if self.per_channel else below.all(1, keepdim=True))
            return torch.where(wrong.any(), math.nan, confidence), hits, count

    @torch.no_grad()
    def dual_step(self, reduce: Reduce | None = None) -> DualStep:
        """Move the multipliers by the gaps of the pass just observed, and start a new pass.

        A pass without any voxel changes nothing and does not count as a pass.

        Args:
            reduce: sums a float64 vector over ranks (``all_reduce`` with SUM); None for one rank.

        Returns:
            the new multipliers, the gaps as `constraint`, no rho.
        """
        own = (self.confidence_sum, self.hits, self.count)
        packed = torch.cat([x.flatten().double() for x in own])
        packed = packed if reduce is None else reduce(packed)
        confidence, hits, n = (p.view_as(self.lam) for p in packed.chunk(3))
        gap = confidence_gaps(confidence, hits, n)
        notes = []
        if not n.any():
            notes.append("no voxel was observed in validation; nothing is updated")
        elif int(self.step) < self.start_epoch:
            self.step += 1
            left = self.start_epoch - int(self.step)
            notes.append(
                f"the penalty starts after {left} more passes" if left else "the penalty starts now"
            )
        else:
            of_all = n.sum(0) if self.per_channel else n.sum()
            notes += self._learn(gap, n / of_all.clamp(min=1))
        self.start_pass()
        return DualStep(
            step=int(self.step),
            lam=self.lam.tolist(),
            rho=[],
            constraint=gap.tolist(),
            count=[int(v) for v in n.sum(1)],
            notes=notes,
            quantity="confidence less accuracy",
        )

    def _learn(self, gap: Tensor, share: Tensor) -> list[str]:
        """Move the multipliers, and say which have reached a bound or stay there to no effect."""
        floor, cap = self.bounds
        learns = self._penalised() & (share >= self.min_share) & (share > 0)
        before = self._at_bound(learns, gap)
        notes = self._watch(gap, share, before)
        start = torch.where(self.lam * gap <= 0, self.decay * self.lam, self.lam)
        moved = (start + self.eta * gap).clamp(floor, cap)
        self.lam.copy_(torch.where(learns, moved, self.lam))
        self.step += 1
        reached = self._at_bound(learns, gap) & ~before
        if reached.any():
            notes.append(
                "a multiplier has reached its bound: "
                + "; ".join(
                    f"{self._name(r, k)} ({float(self.lam[r, k]):g}, gap {float(gap[r, k]):+.3f})"
                    for r, k in reached.nonzero().tolist()
                )
            )
        return notes

    def _at_bound(self, learns: Tensor, gap: Tensor) -> Tensor:
        """Bool ``(R, K)``: the multiplier cannot follow its gap any further."""
        floor, cap = self.bounds
        down = (self.lam <= floor) & (gap < 0) if floor < 0 else torch.zeros_like(learns)
        return learns & ((self.lam >= cap) & (gap > 0) | down)

    def _watch(self, gap: Tensor, share: Tensor, at_bound: Tensor) -> list[str]:
        """Say once which multiplier has long been at a bound while its gap does not shrink.

        Of several multipliers, the one with the largest gap times share of voxels is named.
        """
        size = gap.abs()
        shrinks = size < self.smallest
        self.stuck.copy_(torch.where(at_bound & ~shrinks, self.stuck + 1, 0))
        self.smallest.copy_(torch.where(at_bound, torch.minimum(size, self.smallest), torch.inf))
        hopeless = self.stuck >= self.patience
        if bool(self.told) or not hopeless.any():
            return []
        self.told.fill_(True)
        place = int(torch.where(hopeless, size * share, -1.0).argmax())
        r, k = divmod(place, self.num_classes)
        others = int(hopeless.sum()) - 1
        return [
            f"the constraint cannot be met for {self._name(r, k)}"
            + (f" and {others} more" if others else "")
            + f": its multiplier has been at its bound for {self.patience} passes and the gap of "
            f"{float(gap[r, k]):+.3f} does not shrink. Take a base loss without Dice on this head "
            "(cross-entropy or svls) or use two heads; if there are few validation cases, add more"
        ]

    def _name(self, row: int, column: int) -> str:
        region = f"{REGIONS[row % len(REGIONS)]} region"
        if self.per_channel:
            return f"channel {column}, decided {SIDES[row // len(REGIONS)]}, {region}"
        return f"predicted class {column}, {region}"

    def start_pass(self) -> None:
        """Forget what was observed since the last update."""
        for sums in (self.confidence_sum, self.hits, self.count):
            sums.zero_()

    def extra_repr(self) -> str:
        """Name what distinguishes this penalty when it is printed."""
        settings = {
            "num_classes": self.num_classes,
            "eta": self.eta,
            "bounds": self.bounds,
            "decay": self.decay,
            "start_epoch": self.start_epoch,
            "kernel_size": self.kernel_size,
            "per_channel": self.per_channel,
            "fused": self.fused,
        }
        return ", ".join(f"{k}={v}" for k, v in settings.items())

"""AdaFocal: focal loss whose gammas follow the gaps between confidence and accuracy."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.tensors import (
    check_logits_labels,
    full_precision,
    label_index,
    reduce_voxels,
    valid_mask,
)
from segcal.term import DualStep, LearnedTerm, Reduce

__all__ = ["AdaFocal"]

CELLS_PER_OCTAVE, OCTAVES = 40, 24
"""Probabilities are sorted into 40 cells each time that their distance to 1 halves, down to the
smallest distance in float32. Most voxels of a segmentation lie very near to 1."""
SLOPE_GUARD = 1e-12
"""Added to 1 - p, because the slope of a small power of 1 - p is infinite at p = 1."""


class AdaFocal(LearnedTerm):
    """Focal loss with a gamma per bin of probability, learned on the validation set.

    ``L = -(1/N) sum_i (1 - p_y)^gamma log p_y`` where gamma > 0, else the inverse focal loss
    ``-(1/N) sum_i (1 + p_y)^|gamma| log p_y``. Every voxel takes the gamma of the bin that holds
    its ``p_y``, and no gradient flows through this choice. After each validation pass, with
    ``gap_b`` the mean confidence minus the accuracy in bin b::

        gamma_b <- gamma_b exp(rate gap_b), with -rate where gamma_b < 0
        gamma_b <- -switch or switch, where |gamma_b| has fallen below it from above or below 0
        gamma_b <- clip(gamma_b, low, high)

    so that an overconfident bin is regularised more, and an underconfident bin less and in the end
    not at all (Ghosh et al. 2022, "AdaFocal: Calibration-aware Adaptive Focal Loss"). The bins hold
    equal shares of the validation voxels, sorted by confidence, and are cut anew after every pass;
    before the first pass they have equal widths. The defaults are those of the published code.

    The published code interpolates the bounds of a bin between sorted confidences. Here voxels are
    sorted into 960 narrow cells, and a whole cell goes to the bin that holds its middle, so that
    the sums of batches and of processes can be added. The published code sums the loss over
    samples, ours is the mean. In a segmentation nearly all voxels are background and confident,
    which leaves few bins to the other voxels.

    :class:`segcal.term.DualStep` reports, by predicted class, the mean gamma of the validation
    voxels as ``lam`` and their gap as ``constraint``.

    Args:
        num_classes: K.
        bins: number of bins, each with its gamma.
        rate: how fast the gammas follow the gaps.
        gamma0: gamma to begin with; its absolute value is at least `switch`.
        gamma_bounds: the bounds (low, high) of every gamma, low <= -switch and high >= switch.
        switch: absolute value of gamma below which the loss changes between focal and inverse.
        ignore_index: label to leave out of the loss and of the gaps.

    Raises:
        ValueError: options out of range.
    """

    gamma: Tensor
    bin_of_cell: Tensor
    step: Tensor
    count: Tensor
    confidence_sum: Tensor
    hit_sum: Tensor

    def __init__(
        self,
        num_classes: int,
        *,
        bins: int = 15,
        rate: float = 1.0,
        gamma0: float = 1.0,
        gamma_bounds: tuple[float, float] = (-2.0, 20.0),
        switch: float = 0.2,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        low, high = gamma_bounds
        _check(bins, rate, gamma0, (low, high), switch)
        self.num_classes = num_classes
        self.rate = rate
        self.gamma_bounds = (low, high)
        self.switch = switch
        self.ignore_index = ignore_index
        cells = CELLS_PER_OCTAVE * OCTAVES
        middle = 1 - 2 ** -((torch.arange(cells, dtype=torch.float64) + 0.5) / CELLS_PER_OCTAVE)
        sums = torch.zeros(cells, num_classes, dtype=torch.float64)
        self.register_buffer("gamma", torch.full((bins,), gamma0, dtype=torch.float64))
        self.register_buffer("bin_of_cell", (bins * middle).long())
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("count", sums.clone())
        self.register_buffer("confidence_sum", sums.clone())
        self.register_buffer("hit_sum", sums)

    def identity(self) -> dict[str, Any]:
        """Number of classes and of bins."""
        return {
            **super().identity(),
            "num_classes": self.num_classes,
            "bins": len(self.gamma),
        }

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Bounds of the gammas."""
        return {"gamma": self.gamma_bounds}

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the scalar loss of `logits` ``(N, K, *S)`` against `labels` ``(N, *S)``."""
        check_logits_labels(logits, labels, self.num_classes, self.ignore_index)
        valid = valid_mask(labels, self.ignore_index)
        index = label_index(labels, valid, self.num_classes)
        with full_precision(logits) as x:
            nll = F.nll_loss(F.log_softmax(x, dim=1), index, reduction="none")
            miss = (-torch.expm1(-nll)).clamp(min=0)  # 1 - p_y, exact near p_y = 1
            cell = _cell(torch.where(valid, miss.detach(), 1.0))
            gamma = self.gamma.to(x)[self.bin_of_cell[cell]]
            base = torch.where(gamma > 0, miss + SLOPE_GUARD, 2 - miss)
            return reduce_voxels(base ** gamma.abs() * nll, valid)

    @torch.no_grad()
    def observe(self, logits: Tensor, labels: Tensor) -> None:
        """Add a validation batch to the sums.

        Raises:
            ValueError: logits that are not finite.
        """
        check_logits_labels(logits, labels, self.num_classes, self.ignore_index)
        valid = valid_mask(labels, self.ignore_index)
        with full_precision(logits) as x:
            top, predicted = F.log_softmax(x, dim=1).max(1)
            top, predicted = top[valid], predicted[valid]
            if not bool(torch.isfinite(top).all()):
                raise ValueError("logits: not finite in a validation batch; nothing was changed")
            index = _cell(-torch.expm1(top)) * self.num_classes + predicted
            right = (predicted == labels[valid]).double()
            for sums, values in (
                (self.count, torch.ones_like(right)),
                (self.confidence_sum, top.double().exp()),
                (self.hit_sum, right),
            ):
                sums.view(-1).scatter_add_(0, index, values)

    @torch.no_grad()
    def dual_step(self, reduce: Reduce | None = None) -> DualStep:
        """Move the gammas by the gaps of the pass just observed, and start a new pass.

        A pass without voxels changes nothing, and neither does a bin without voxels.

        Args:
            reduce: sums a float64 vector over ranks; None for one rank.
        """
        packed = torch.stack([self.count, self.confidence_sum, self.hit_sum])
        packed = packed if reduce is None else reduce(packed.flatten()).view_as(packed)
        count, gap = packed[0], packed[1] - packed[2]
        n = count.sum()
        if n > 0:
            self._learn(count.sum(1), gap.sum(1))
            self.step += 1
        self.start_pass()
        of_class = count.sum(0).clamp(min=1)
        gamma = self.gamma[self.bin_of_cell].unsqueeze(1)
        return DualStep(
            step=int(self.step),
            lam=[((count * gamma).sum(0) / of_class).tolist()],
            rho=[],
            constraint=[(gap.sum(0) / of_class).tolist()],
            count=[int(n)],
            notes=[] if n > 0 else ["no voxel in validation; its gammas stay"],
            quantity="confidence less accuracy",
        )

    def _learn(self, mass: Tensor, gap: Tensor) -> None:
        """Cut the cells into bins anew, and move the gammas by the gaps of these bins."""
        bins = len(self.gamma)
        middle = mass.cumsum(0) - mass / 2
        self.bin_of_cell.copy_((middle * bins / mass.sum()).long().clamp(max=bins - 1))
        n, gaps = (torch.zeros_like(self.gamma).index_add_(0, self.bin_of_cell, v)
                   for v in (mass, gap))  # fmt: skip
        gamma = self.gamma * torch.exp(self.gamma.sign() * self.rate * gaps / n.clamp(min=1))
        gamma = torch.where(gamma.abs() < self.switch, -gamma.sign() * self.switch, gamma)
        self.gamma.copy_(gamma.clamp(*self.gamma_bounds))

    def start_pass(self) -> None:
        """Forget what was observed since the last update."""
        for sums in (self.count, self.confidence_sum, self.hit_sum):
            sums.zero_()


def _cell(miss: Tensor) -> Tensor:
    """Cell of every probability, int64, given its distance `miss` to 1."""
    cells = CELLS_PER_OCTAVE * OCTAVES
    position = (-torch.log2(miss) * CELLS_PER_OCTAVE).clamp(0, cells)
    return position.long().clamp(0, cells - 1)  # of NaN, long() makes an integer of any size


def _check(
    bins: int, rate: float, gamma0: float, bounds: tuple[float, float], switch: float
) -> None:
    if bins < 1:
        raise ValueError(f"bins: expected at least 1, got {bins}")
    if not 0 < rate < math.inf:
        raise ValueError(f"rate: expected a positive number, got {rate}")
    low, high = bounds
    if not (0 < switch < math.inf and -math.inf < low <= -switch and switch <= high < math.inf):
        raise ValueError(
            "gamma_bounds, switch: expected low <= -switch < 0 < switch <= high, "
            f"got {bounds}, {switch}"
        )
    if not (low <= gamma0 <= high and abs(gamma0) >= switch):
        raise ValueError(
            f"gamma0: expected a number within {bounds} with an absolute value of at least "
            f"{switch}, got {gamma0}"
        )

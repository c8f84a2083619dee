"""mL1-ACE: a differentiable average calibration error per image and class."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from segcal.arrays import check_choice
from segcal.binning import equal_width_index
from segcal.sweep.fused import supports, sweep
from segcal.sweep.terms import BinTerm, Together
from segcal.tensors import (
    check_channels,
    check_logits_labels,
    check_num_classes,
    full_precision,
    one_hot,
    valid_mask,
)
from segcal.term import Term

__all__ = ["ML1ACE", "ml1_ace"]

Binning = Literal["hard", "soft"]
Membership = list[tuple[Tensor, Tensor]]
"""Bins of every value and how much of it belongs to them."""


def ml1_ace(
    logits: Tensor,
    labels: Tensor,
    *,
    bins: int = 20,
    binning: Binning = "hard",
    empty_weight: float = 0.01,
    skip_empty: bool = False,
    include_background: bool = True,
    per_channel: bool = False,
    ignore_index: int | None = None,
    fused: bool = True,
) -> Tensor:
    """Mean over images and classes of the unweighted calibration gap of the non-empty bins.

    ``L = mean_{b,k} (1 / M+) sum_m |conf_m - acc_m|``, where M+ counts the non-empty bins. In bin m
    of image b, ``conf_m = sum_i w_im p_i / sum_i w_im`` is the mean ``p_k``, and ``acc_m`` is the
    share of label k, weighted likewise. It is a companion of Dice or cross-entropy, not a loss on
    its own.

    ``hard`` bins (Barfoot et al. 2024, ACE-DLIRIS): w is 1 in the voxel's bin and constant, so each
    voxel's gradient is ``sign(conf - acc) / n_m``. Bins are (lo, hi], as in the published code
    (its docstring says otherwise).

    ``soft`` bins (Barfoot et al. 2025, "Average Calibration Losses for Reliable Uncertainty in
    Medical Image Segmentation"): ``w_im = max(0, 1 - M |p_i - c_m|)`` with centres
    ``c_m = (m + 1/2) / M``, so that a voxel is shared by the two nearest bins, and the gradient
    also flows through w. A voxel below the first centre or above the last belongs wholly to the
    first or last bin. The published runs have `skip_empty`. We differ from the published code by
    rounding alone: its last edge is 1 + 1.2e-7, its memberships at the ends are at least 1 - 1e-4,
    and its sums are float32.

    Args:
        logits: floating ``(N, K, *S)``; half precision is promoted to float32.
        labels: integer ``(N, *S)``, or see `per_channel`.
        bins: M.
        binning: ``hard`` or ``soft``.
        empty_weight: soft bins with a smaller total weight, in voxels, count as empty.
        skip_empty: whether a class without a labelled voxel in an image counts as a gap of 0.
        include_background: whether class 0 takes part.
        per_channel: `labels` are ``(N, K, *S)`` of 0 and 1 that may overlap; p is the sigmoid
            of every channel, none of which is background.
        ignore_index: label to leave out.
        fused: use compiled loops where that is possible (see :mod:`segcal.sweep`). False is the
            readable version, which has a second derivative.

    Returns:
        scalar; images without a valid voxel are left out; 0 if no image has a valid voxel.

    Raises:
        ValueError: shapes, label values or options that do not fit.
    """
    _check(bins, binning, empty_weight)
    options = _Options.of(binning, empty_weight, skip_empty, include_background or per_channel)
    if fused and not per_channel and logits.ndim > 2:
        term = options.term(logits.shape[1], bins, binning, ignore_index)
        if supports(logits, term):
            return sweep(logits, labels, Together(bins=term))[0]
    check = check_channels if per_channel else check_logits_labels
    check(logits, labels, ignore_index=ignore_index)
    with full_precision(logits) as x:
        if not x.numel():
            return x.sum()
        sums = _sums(x, labels, bins, binning, per_channel, ignore_index)
        return options.value(*sums).to(x.dtype)


class _Options(NamedTuple):
    """How the loss follows from sums by bin: W, C and A, float64 ``(N, K, M)`` each.

    Attributes:
        first: first class that takes part.
        least: bins of a smaller weight count as empty.
        skip_empty: whether a class without a labelled voxel in an image counts as a gap of 0.
    """

    first: int
    least: float
    skip_empty: bool

    @classmethod
    def of(
        cls, binning: Binning, empty_weight: float, skip_empty: bool, include_background: bool
    ) -> _Options:
        """Options from those of :func:`ml1_ace`."""
        least = empty_weight if binning == "soft" else 1.0
        return cls(0 if include_background else 1, least, skip_empty)

    def term(
        self, num_classes: int, bins: int, binning: Binning, ignore_index: int | None
    ) -> BinTerm:
        """Describe the loss to :mod:`segcal.sweep`."""
        return BinTerm(num_classes, bins, binning == "soft", self.with_slopes, ignore_index)

    def value(self, weight: Tensor, confidence: Tensor, accuracy: Tensor) -> Tensor:
        """Return the loss."""
        share, gap = self._shares(weight, accuracy), (confidence - accuracy).abs()
        return torch.where(share == 0, 0.0, share * gap).sum()

    def with_slopes(
        self, weight: Tensor, confidence: Tensor, accuracy: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the loss, and its derivatives by W, C and A."""
        share, difference = self._shares(weight, accuracy), confidence - accuracy
        each = torch.where(share == 0, 0.0, share * difference.abs())
        by_confidence = torch.where(share == 0, 0.0, share * difference.sign())
        return each.sum(), -each / weight.clamp(min=self.least), by_confidence, -by_confidence

    def _shares(self, weight: Tensor, accuracy: Tensor) -> Tensor:
        """``1 / (W M+ B)``, which is the loss per ``|C - A|``; 0 where a bin takes no part.

        B is the number of images and classes that have a bin which is not empty.
        """
        found = ~(weight < self.least)  # NaN goes on to the loss, as in others
        found[:, : self.first] = False
        filled = found.sum(2, keepdim=True)
        pairs = filled * (filled > 0).sum().clamp(min=1)
        if self.skip_empty:
            found = found & (accuracy.sum(2, keepdim=True) != 0)
        share = 1 / (torch.where(found, weight, 1.0) * pairs.clamp(min=1))
        return torch.where(found, share, 0.0)


def _sums(
    x: Tensor,
    labels: Tensor,
    bins: int,
    binning: Binning,
    per_channel: bool,
    ignore_index: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight of every bin, and its sums of probability and of hits: float64 ``(N, K, M)`` each.

    In classification, where logits are ``(N, K)``, the whole batch counts as one image.
    """
    valid = valid_mask(labels, ignore_index)
    if per_channel:
        p, hits, counted = torch.sigmoid(x), ((labels == 1) & valid).double(), valid
    else:
        p = torch.softmax(x, dim=1)
        hits = one_hot(labels, x.shape[1], ignore_index=ignore_index, dtype=torch.float64)
        counted = valid.unsqueeze(1).expand_as(x)
    if x.ndim == 2:
        p, hits, counted = p.t()[None], hits.t()[None], counted.t()[None]
    p, hits, counted = p.flatten(2), hits.flatten(2), counted.flatten(2)
    p = torch.where(counted, p, 0.0)
    weight = torch.zeros(*p.shape[:2], bins, dtype=torch.float64, device=p.device)
    confidence, accuracy = weight, weight
    for index, share in _soft(p, bins) if binning == "soft" else _hard(p, bins):
        own = share * counted
        weight = weight.scatter_add(2, index, own)
        confidence = confidence.scatter_add(2, index, own * p)
        accuracy = accuracy.scatter_add(2, index, own * hits)
    return weight, confidence, accuracy


def _hard(p: Tensor, bins: int) -> Membership:
    return [(equal_width_index(p.detach(), bins), torch.ones_like(p, dtype=torch.float64))]


def _soft(p: Tensor, bins: int) -> Membership:
    position = (p * bins - 0.5).clamp(0, bins - 1)  # in widths from the first centre
    left = position.detach().floor().long().clamp(0, bins - 1)  # of NaN, any integer
    share = (position - left).double()
    return [(left, 1 - share), ((left + 1).clamp(max=bins - 1), share)]


class ML1ACE(Term):
    """Module form of :func:`ml1_ace`.

    Raises:
        ValueError: options out of range.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        bins: int = 20,
        binning: Binning = "hard",
        empty_weight: float = 0.01,
        skip_empty: bool = False,
        include_background: bool = True,
        per_channel: bool = False,
        ignore_index: int | None = None,
        fused: bool = True,
    ) -> None:
        super().__init__()
        _check(bins, binning, empty_weight)
        self.num_classes = num_classes
        self.bins = bins
        self.binning: Binning = binning
        self.empty_weight = empty_weight
        self.skip_empty = skip_empty
        self.include_background = include_background
        self.per_channel = per_channel
        self.ignore_index = ignore_index
        self.fused = fused

    def swept(self) -> BinTerm | None:
        """Describe the loss to :mod:`segcal.sweep`; None where it has no fast form."""
        if not self.fused or self.per_channel:
            return None
        options = _Options.of(
            self.binning, self.empty_weight, self.skip_empty, self.include_background
        )
        return options.term(self.num_classes, self.bins, self.binning, self.ignore_index)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the scalar loss of `logits` ``(N, K, *S)`` against `labels` ``(N, *S)``."""
        check_num_classes(logits, self.num_classes)
        return ml1_ace(
            logits,
            labels,
            bins=self.bins,
            binning=self.binning,
            empty_weight=self.empty_weight,
            skip_empty=self.skip_empty,
            include_background=self.include_background,
            per_channel=self.per_channel,
            ignore_index=self.ignore_index,
            fused=self.fused,
        )


def _check(bins: int, binning: str, empty_weight: float) -> None:
    if bins < 1:
        raise ValueError(f"bins: expected at least 1, got {bins}")
    check_choice("binning", binning, get_args(Binning))
    if not 0 < empty_weight < math.inf:
        raise ValueError(f"empty_weight: expected a positive number, got {empty_weight}")

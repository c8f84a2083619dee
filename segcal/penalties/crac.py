"""CRaC: class and region adaptive constraints, with weights learned on the validation set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from segcal.alm import AugmentedLagrangian
from segcal.arrays import check_choice
from segcal.neighbourhood import (
    Kernel,
    KernelSize,
    Padding,
    channel_proportions,
    check_options,
    check_reaches,
    class_proportions,
    distance_bands,
    outer_region,
    share_proportions,
)
from segcal.sweep.terms import Residual, Shape
from segcal.tensors import check_channels, check_logits_labels, check_shares, is_soft, valid_mask

__all__ = ["CRaC", "from_reference"]

Constraint = Literal["abs", "signed"]
Space = Literal["logit", "probability"]
Target = Literal["tau", "smoothed"]
KERNELS: dict[str, Kernel] = {"tau": "mean", "smoothed": "svls"}
"""Kernel that weighs the voxels of a patch, by target."""
UNMIXED = 1e-6
"""Share of other classes in a patch up to which the patch counts as all of one class."""
SHAPES: dict[str, Shape] = {"abs": "abs", "signed": "lower"}


def from_reference(vector: Tensor) -> Tensor:
    """Turn a vector ``(2K,)`` of the published code, outer before inner, into our ``(2, K)``.

    Raises:
        ValueError: not a vector of even length.
    """
    if vector.ndim != 1 or len(vector) % 2:
        raise ValueError(f"vector: expected (2K,), got {tuple(vector.shape)}")
    return vector.view(2, -1).flip(0)


class CRaC(AugmentedLagrangian):
    """Distance of logits to the neighbourhood's class proportions, weighted per class and region.

    ``z_k(i) = |t_k(i) - l_k(i)|`` with target ``t = margin_inner * tau`` in the inner region, where
    the patch around voxel i holds one class, and ``t = margin_outer * tau`` in the outer region,
    where it holds several. tau are the class proportions in the patch. The penalty is
    ``(1 / (N K 2)) sum_i sum_k P(z_k(i); lam[r(i), k], rho[r(i), k])``, where r(i) is the region of
    voxel i; it is added to a base loss. The multipliers ``lam`` and the penalty parameters ``rho``
    are ``(2, K)`` (row 0 inner, 1 outer); :meth:`observe` on every validation batch and
    :meth:`dual_step` after the last batch update them.

    Class k is the logit channel: every voxel of a region constrains all K channels.

    Source: "Class and Region-Adaptive Constraints for Network Calibration" (CRaC). Where poster
    and published code differ we follow the code: the absolute value (``constraint="signed"`` is
    the poster's ``tau - l``), the margins (none on the poster), an upper bound of rho, and
    multipliers averaged over all voxels, so that the multipliers of a region move in proportion to
    its share of the voxels. The defaults are those of the published run lines; the published
    configuration files have margin 1 and rho0 1. The vectors of the published code hold the outer
    region first, those of the poster and ours the inner region; :func:`from_reference` converts
    them. Where the code is at fault we do not follow it. Its region test is rounding noise, ours is
    exact. Its labels are padded with background, ours are replicated (``padding="background"`` does
    what the code does). Its option ``normalize`` does nothing, and is not here.

    With `bands` the regions are bands of the distance to the nearest voxel of another class instead
    (two distances give three bands: at the boundary, near it, far from it; row 0 is the boundary),
    each with a margin of its own. The bands are our addition, from no paper.

    The target is in general not reached by the logits of any distribution: where
    ``tau = (.5, .5, 0, 0)`` with margin 1, logits at their targets have the softmax
    (.31, .31, .19, .19). ``space="probability"``, also our addition, compares probabilities
    instead: ``z_k(i) = |t_k(i) - p_k(i)|``, without margins, where t is tau or the soft label of
    SVLS (``target="smoothed"``), whose centre has half the weight.

    On data where foreground is rare, the published setting can collapse to predicting background
    alone: within a few epochs with plain cross-entropy as the base loss, and on small training sets
    with Dice + CE too.

    Args:
        num_classes: K.
        margin_inner: factor on tau in the inner region (5 in the code, 1 on the poster).
        margin_outer: factor on tau in the outer region.
        rho0: initial penalty parameter (0.1 in the published run lines).
        constraint: ``abs`` holds the logit at its target. ``signed``, ``t - l``, holds it only from
            below, so that overconfident logits are not penalised, z may be negative and multipliers
            can fall; it is kept to reproduce the poster.
        space: ``logit``, or ``probability``, where margins are not used and the fast path is not
            available.
        target: in probability space, ``tau`` or ``smoothed``.
        kernel_size: odd size of the patch, one number or one per spatial axis.
        padding: labels outside the image, as in
            :func:`segcal.neighbourhood.class_proportions`.
        bands: largest distance of every band but the last, in voxels, ascending; a distance is the
            largest of the distances along the axes, so that the band up to 1 is the outer region of
            a patch of size 3. None takes the inner and the outer region.
        margins: one margin per band, from the boundary on; None spaces them evenly from
            `margin_outer` to `margin_inner`.
        per_channel: labels are ``(N, K, *S)`` of 0 and 1 that may overlap: tau_k is the proportion
            of 1 in channel k, and every channel has an inner and an outer region of its own.
        ignore_index: label to leave out of the penalty, of neighbourhoods and of statistics.
        **alm: further arguments of :class:`segcal.alm.AugmentedLagrangian`.

    Raises:
        ValueError: options out of range.
    """

    def __init__(
        self,
        num_classes: int,
        margin_inner: float = 5.0,
        margin_outer: float = 1.0,
        rho0: float = 0.1,
        *,
        constraint: Constraint = "abs",
        space: Space = "logit",
        target: Target = "tau",
        kernel_size: KernelSize = 3,
        padding: Padding = "replicate",
        bands: Sequence[int] | None = None,
        margins: Sequence[float] | None = None,
        per_channel: bool = False,
        ignore_index: int | None = None,
        **alm: Any,
    ) -> None:
        regions = 2 if bands is None else len(bands) + 1
        super().__init__(num_classes, regions, per_channel, rho0=rho0, **alm)
        check_options(kernel_size, "mean", padding)
        check_choice("constraint", constraint, get_args(Constraint))
        check_choice("space", space, get_args(Space))
        check_choice("target", target, get_args(Target) if space == "probability" else ("tau",))
        if not (math.isfinite(margin_inner) and math.isfinite(margin_outer)):
            raise ValueError(
                "margin_inner, margin_outer: expected finite numbers, "
                f"got {margin_inner} and {margin_outer}"
            )
        self.bands = None if bands is None else tuple(bands)
        self.margins = _margins(self.bands, margins, (margin_inner, margin_outer))
        self.constraint: Constraint = constraint
        self.space: Space = space
        self.target: Target = target
        self.kernel_size = kernel_size
        self.padding: Padding = padding
        self.ignore_index = ignore_index

    def constraints(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return z of ``t - l``, or ``t - p``, ``(N, K, *S)``, and regions, -1 ignored.

        Region 0 is the inner and 1 the outer region; or regions are bands, with 0 at the boundary.
        """
        patch: dict[str, Any] = {
            "kernel_size": self.kernel_size,
            "padding": self.padding,
            "ignore_index": self.ignore_index,
        }
        weights: dict[str, Any] = {**patch, "dtype": logits.dtype, "kernel": KERNELS[self.target]}
        valid = valid_mask(labels, self.ignore_index)
        if not self.per_channel and is_soft(logits, labels):
            valid = check_shares(logits, labels, self.num_classes)
            tau, index = self._of_shares(labels, weights)
        elif self.per_channel:
            check_channels(logits, labels, self.num_classes, self.ignore_index)
            index = self._region(labels.flatten(0, 1), patch).view(labels.shape)
            tau = channel_proportions(labels, **weights)
        else:
            check_logits_labels(logits, labels, self.num_classes, self.ignore_index)
            index = self._region(labels, patch)
            tau = class_proportions(labels, self.num_classes, validate=False, **weights)
        region = torch.where(valid, index, -1)
        if self.space == "probability":
            u = (logits.sigmoid() if self.per_channel else logits.softmax(1)) - tau
        else:
            margin = torch.tensor(self.margins).to(tau)[index]
            u = logits - (margin if self.per_channel else margin.unsqueeze(1)) * tau
        return u.abs() if self.constraint == "abs" else -u, region

    def _of_shares(self, shares: Tensor, weights: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Tau of the raters' shares, and regions: outer where a patch is not all of one class."""
        if self.bands is not None:
            raise ValueError(
                "labels: bands are distances to another class, which shares of the classes do not "
                "have; build CRaC without bands"
            )
        weights = {key: value for key, value in weights.items() if key != "ignore_index"}
        tau = share_proportions(shares, **weights)
        return tau, (tau.amax(1) < tau.sum(1) - UNMIXED).long()

    def _region(self, labels: Tensor, patch: dict[str, Any]) -> Tensor:
        """Region of every voxel of `labels` ``(N, *S)``; at ignored voxels it has no meaning."""
        if self.bands is None:
            return outer_region(labels, **patch).long()
        return distance_bands(labels, self.bands, **patch)

    def swept(self) -> Residual | None:
        """Describe the penalty to :mod:`segcal.sweep`, which knows regions by patch, not bands."""
        readable = self.per_channel or self.bands is not None or self.space != "logit"
        if not self.fused or readable:
            return None
        lam, rho = self.weights_in_force()
        return Residual(
            lam=lam,
            rho=rho,
            function=self.function,
            shape=SHAPES[self.constraint],
            margins=self.margins,
            patch=(self.kernel_size, self.padding),
            divisor=self.num_penalised * self.num_regions,
            ignore_index=self.ignore_index,
            clip=self.lambda_bounds if self.clamp_elementwise else (-math.inf, math.inf),
        )

    def identity(self) -> dict[str, Any]:
        """What a saved state must have in common; also constraint, bands and space."""
        space = {"space": self.space, "target": self.target}
        return {
            **super().identity(),
            "constraint": self.constraint,
            **({} if self.bands is None else {"bands": list(self.bands)}),
            **({} if self.space == "logit" else space),
        }

    def extra_repr(self) -> str:
        """Name what distinguishes this penalty when it is printed."""
        return (
            f"margins={self.margins}, bands={self.bands}, constraint={self.constraint!r}, "
            f"space={self.space!r}, target={self.target!r}, "
            f"kernel_size={self.kernel_size}, padding={self.padding!r}, "
            f"{super().extra_repr()}"
        )


def _margins(
    bands: Sequence[int] | None, margins: Sequence[float] | None, ends: tuple[float, float]
) -> tuple[float, ...]:
    """Return the margin of every region: inner and outer, or from the boundary outwards.

    Raises:
        ValueError: bands or margins that do not fit.
    """
    if bands is None:
        if margins is not None:
            raise ValueError(f"margins: need bands, which are not given; got {margins}")
        return ends
    check_reaches(bands)
    inner, outer = ends
    if margins is None:
        return tuple(outer + (inner - outer) * i / len(bands) for i in range(len(bands) + 1))
    if len(margins) != len(bands) + 1 or not all(map(math.isfinite, margins)):
        raise ValueError(
            f"margins: expected {len(bands) + 1} finite numbers, one per band, got {list(margins)}"
        )
    return tuple(margins)

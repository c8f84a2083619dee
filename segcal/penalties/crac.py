"""CRaC: class and region adaptive constraints, weights learned on the validation set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from segcal.alm import AugmentedLagrangian
from segcal.neighbourhood import (
    Kernel,
    KernelSize,
    Padding,
    channel_proportions,
    check_options,
    class_proportions,
)
from segcal.sweep.terms import RegionMap, Residual, Shape, region_map
from segcal.tensors import check_channels, check_choice, check_logits_labels

INNER, OUTER = 0, 1
"""Rows of every ``(2, K)`` tensor: 0 the inner region, 1 the outer (mixed patches)."""
Constraint = Literal["abs", "signed", "upper", "equality"]
SHAPES: dict[str, Shape] = {
    "abs": "abs", "signed": "lower", "upper": "upper", "equality": "upper"
}  # fmt: skip


def from_reference(vector: Tensor) -> Tensor:
    """Turn a vector ``(2K,)`` of the published code, outer then inner, into ``(2, K)``.

    Raises:
        ValueError: not a vector of even length.
    """
    if vector.ndim != 1 or len(vector) % 2:
        raise ValueError(f"vector: expected (2K,), got {tuple(vector.shape)}")
    return vector.view(2, -1).flip(0)


class CRaC(AugmentedLagrangian):
    """Distance of the logits to the neighbourhood's class proportions, weighted per class, region.

    ``z_k(i) = |t_k(i) - l_k(i)|`` with target ``t = margin_inner * tau`` where the patch holds one
    class and ``t = margin_outer * tau`` where it holds several; the penalty is
    ``(1 / (N K 2)) sum_i sum_k P(z_k(i); lam[r(i), k], rho[r(i), k])``. It is added to a base loss;
    ``lam`` and ``rho`` ``(2, K)`` (row 0 inner, 1 outer) are updated by :meth:`observe` on every
    validation batch and :meth:`dual_step` after the last.

    Class k is the logit channel: every voxel of a region constrains all K channels.

    Source: "Class and Region-Adaptive Constraints for Network Calibration" (CRaC). Where poster
    and published code differ we follow the code: the absolute value (``constraint="signed"`` is
    the poster's ``tau - l``), the margins (none on the poster), an upper bound of rho, and
    multipliers averaged over all voxels, so that a region moves with its share of them. Settings
    are those of the published run lines; its configuration files have margin 1 and rho0 1. Its
    vectors hold the outer region first, its poster and we the inner: :func:`from_reference`
    turns them. Where the code is at fault we do not follow: its region test is rounding noise,
    ours is exact; its labels are padded with background, ours are replicated
    (``padding="background"`` gives the code's); its ``normalize`` does nothing, and is not here.

    With plain cross-entropy as base the published setting can collapse to background on data
    where foreground is rare; with Dice + CE it does not.

    Args:
        num_classes: K.
        margin_inner: factor on tau in the inner region (5 in the code, 1 on the poster).
        margin_outer: factor on tau in the outer region.
        rho0: initial penalty parameter (0.1 in the published run lines).
        constraint: ``abs`` holds the logit at its target; ``signed``, ``t - l``, only from below,
            so that overconfident logits go free; ``upper``, ``l - t``, only from above. With the
            last two z may be negative and multipliers can fall. ``equality``, ``l - t = 0`` with
            multipliers of both signs, is the textbook method; deviations of different voxels
            cancel in its averages (experimental).
        kernel_size: see :func:`segcal.neighbourhood.class_proportions`, as the next two.
        kernel: see there.
        padding: see there.
        regions: ``patch`` (inner and outer), or a function of the labels ``(N, *S)`` that gives
            every voxel's region in [0, R), -1 for none, e.g. bands of distance to a boundary.
        margins: factor on tau for each of those R regions.
        per_channel: labels are ``(N, K, *S)`` of 0 and 1 that may overlap: tau_k is the proportion
            of 1 in channel k, and every channel has an inner and an outer region of its own. A
            function `regions` gets the channels as so many label maps, ``(N K, *S)``.
        ignore_index: label to leave out, of voxels, neighbourhoods and statistics.
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
        kernel_size: KernelSize = 3,
        kernel: Kernel = "mean",
        padding: Padding = "replicate",
        regions: Literal["patch"] | RegionMap = "patch",
        margins: Sequence[float] | None = None,
        per_channel: bool = False,
        ignore_index: int | None = None,
        **alm: Any,
    ) -> None:
        if regions != "patch" and not callable(regions):
            raise ValueError(f"regions: expected 'patch' or a function, got {regions!r}")
        if (margins is None) != (regions == "patch"):
            raise ValueError(
                "regions, margins: a region map takes one margin per region in margins; the two "
                f"regions of the patch take margin_inner and margin_outer; got {regions} with "
                f"margins {margins}"
            )
        factors = (margin_inner, margin_outer) if margins is None else tuple(margins)
        if constraint == "equality" and alm.setdefault("function", "equality") != "equality":
            raise ValueError(f"function: {alm['function']!r} is not for constraint 'equality'")
        super().__init__(num_classes, len(factors), per_channel, rho0=rho0, **alm)
        check_options(kernel_size, kernel, padding)
        check_choice("constraint", constraint, get_args(Constraint))
        if constraint != "equality" and self.function == "equality":
            raise ValueError(f"function: 'equality' is not for constraint {constraint!r}")
        if not all(map(math.isfinite, factors)):
            raise ValueError(
                f"margin_inner, margin_outer, margins: expected finite numbers, got {factors}"
            )
        self.margins = factors
        self.regions = regions
        self.constraint: Constraint = constraint
        self.kernel_size = kernel_size
        self.kernel: Kernel = kernel
        self.padding: Padding = padding
        self.ignore_index = ignore_index

    def constraints(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return z of ``t - l``, ``(N, K, *S)``, and regions: 0 inner, 1 outer, -1 ignored."""
        options: dict[str, Any] = {
            "kernel_size": self.kernel_size,
            "kernel": self.kernel,
            "padding": self.padding,
            "ignore_index": self.ignore_index,
            "dtype": logits.dtype,
        }
        if self.per_channel:
            check_channels(logits, labels, self.num_classes, self.ignore_index)
            binary = labels.flatten(0, 1).long()
            region = region_map(binary, self._residual()).view(labels.shape)
            tau = channel_proportions(labels, **options)
        else:
            check_logits_labels(logits, labels, self.num_classes, self.ignore_index)
            region = region_map(labels, self._residual())
            tau = class_proportions(labels, self.num_classes, validate=False, **options)
        margin = torch.tensor(self.margins).to(tau)[region.clamp(min=0)]
        u = logits - (margin if self.per_channel else margin.unsqueeze(1)) * tau
        shape = SHAPES[self.constraint]
        return u.abs() if shape == "abs" else u if shape == "upper" else -u, region

    def swept(self) -> Residual | None:
        """Describe the penalty to :mod:`segcal.sweep`, which counts neighbours (kernel mean)."""
        possible = self.fused and self.kernel == "mean" and not self.per_channel
        return self._residual() if possible else None

    def _residual(self) -> Residual:
        lam, rho = self.weights_in_force()
        return Residual(
            lam=lam,
            rho=rho,
            function=self.function,
            shape=SHAPES[self.constraint],
            margins=self.margins,
            patch=(self.kernel_size, self.padding),
            regions=self.regions,
            normaliser=self.normaliser,
            divisor=self.num_penalised * self.num_regions,
            ignore_index=self.ignore_index,
            clip=self.lambda_bounds if self.clamp_elementwise else (-math.inf, math.inf),
        )

    def identity(self) -> dict[str, Any]:
        """What a state must have in common with this penalty: also its constraint and regions."""
        return {
            **super().identity(),
            "constraint": self.constraint,
            "regions": "inner, outer" if self.regions == "patch" else "own",
        }

    def extra_repr(self) -> str:
        """Name what distinguishes this penalty when it is printed."""
        return (
            f"margins={self.margins}, constraint={self.constraint!r}, "
            f"kernel_size={self.kernel_size}, kernel={self.kernel!r}, padding={self.padding!r}, "
            f"{super().extra_repr()}"
        )

"""CRaC: class and region adaptive constraints, weights learned on the validation set."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from segcal.alm import AugmentedLagrangian
from segcal.neighbourhood import (
    Kernel,
    KernelSize,
    Padding,
    check_options,
    class_proportions,
    outer_region,
)
from segcal.tensors import check_logits_labels, valid_mask

INNER, OUTER = 0, 1
"""Rows of every ``(2, K)`` tensor: 0 the inner region, 1 the outer (mixed patches)."""
Constraint = Literal["abs", "signed", "upper"]


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
    the poster's ``tau - l``) and the margins (none on the poster). Where the
    code is at fault we do not: its region test is rounding noise, ours is exact; its labels are
    padded with background, ours are replicated (``padding="background"`` gives the code's).

    With plain cross-entropy as base the published setting can collapse to background on data
    where foreground is rare; with Dice + CE it does not.

    Args:
        num_classes: K.
        margin_inner: factor on tau in the inner region (5 in the code, 1 on the poster).
        margin_outer: factor on tau in the outer region.
        rho0: initial penalty parameter (0.1 in the published run lines).
        constraint: ``abs`` holds the logit at its target; ``signed``, ``t - l``, only from below,
            so that overconfident logits go free; ``upper``, ``l - t``, only from above. With the
            last two z may be negative and multipliers can fall.
        kernel_size: see :func:`segcal.neighbourhood.class_proportions`, as the next two.
        kernel: see there.
        padding: see there.
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
        ignore_index: int | None = None,
        **alm: Any,
    ) -> None:
        super().__init__(num_classes, 2, rho0=rho0, **alm)
        check_options(kernel_size, kernel, padding)
        if constraint not in get_args(Constraint):
            raise ValueError(
                f"constraint: expected one of {get_args(Constraint)}, got {constraint!r}"
            )
        if not (math.isfinite(margin_inner) and math.isfinite(margin_outer)):
            raise ValueError(
                f"margin_inner, margin_outer: expected finite numbers, "
                f"got {margin_inner} and {margin_outer}"
            )
        self.margins = (margin_inner, margin_outer)
        self.constraint: Constraint = constraint
        self.kernel_size = kernel_size
        self.kernel: Kernel = kernel
        self.padding: Padding = padding
        self.ignore_index = ignore_index

    def constraints(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return z of ``t - l``, ``(N, K, *S)``, and regions: 0 inner, 1 outer, -1 ignored."""
        check_logits_labels(logits, labels, self.num_classes, self.ignore_index)
        outer = outer_region(
            labels,
            kernel_size=self.kernel_size,
            padding=self.padding,
            ignore_index=self.ignore_index,
        )
        region = torch.where(valid_mask(labels, self.ignore_index), outer.long(), -1)
        tau = class_proportions(
            labels,
            self.num_classes,
            kernel_size=self.kernel_size,
            kernel=self.kernel,
            padding=self.padding,
            ignore_index=self.ignore_index,
            dtype=logits.dtype,
            validate=False,
        )
        inner_margin, outer_margin = self.margins
        margin = torch.where(outer, outer_margin, inner_margin).to(tau).unsqueeze(1)
        residual = margin * tau - logits
        if self.constraint == "abs":
            return residual.abs(), region
        return residual if self.constraint == "signed" else -residual, region

    def extra_repr(self) -> str:
        """Name what distinguishes this penalty when it is printed."""
        return f"margins={self.margins}, padding={self.padding!r}, {super().extra_repr()}"

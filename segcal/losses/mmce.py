"""Maximum mean calibration error (MMCE), a kernel measure of miscalibration."""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.tensors import (
    check_logits_labels,
    check_num_classes,
    full_precision,
    valid_mask,
)
from segcal.term import Term

__all__ = ["MMCE", "mmce"]

KERNEL_WIDTH = 0.4
ROOT_GUARD = 1e-10


def mmce(
    logits: Tensor,
    labels: Tensor,
    *,
    weighted: bool = False,
    sqrt: bool = False,
    max_samples: int = 4096,
    ignore_index: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Squared MMCE of the top label's confidence.

    ``(1/N^2) sum_ij (c_i - r_i)(c_j - r_j) exp(-|r_i - r_j| / 0.4)``, r the largest probability and
    c whether its class is the label (Kumar et al. 2018). The published code adds the square,
    without the root. `weighted` is MMCE_w,
    ``sum_{right pairs} (1-r)(1-r')k / m^2 + sum_{wrong pairs} r r' k / n^2
    - 2 sum_{right, wrong} (1-r) r' k / (m n)``, where k is the exponential above, and m and n count
    the right and the wrong voxels. It is 0 when all are right or all are wrong. The
    published code normalises it twice, which we do not copy.

    The cost grows with the square of the number of voxels, so at most `max_samples` are used.

    Args:
        logits: floating ``(N, K, *S)``; half precision is promoted to float32.
        labels: integer ``(N, *S)``.
        weighted: MMCE_w instead of MMCE.
        sqrt: return the root (not smooth at 0).
        max_samples: largest number of voxels; of more, a random subset is drawn uniformly.
        ignore_index: label to leave out.
        generator: random generator of the draw; None takes torch's global generator.

    Returns:
        scalar; 0 with zero gradient when no voxel is valid.

    Raises:
        ValueError: shapes, label values or options that do not fit.
    """
    if max_samples < 1:
        raise ValueError(f"max_samples: expected at least 1, got {max_samples}")
    check_logits_labels(logits, labels, ignore_index=ignore_index)
    chosen = valid_mask(labels, ignore_index).flatten().nonzero().squeeze(1)
    if len(chosen) > max_samples:
        order = torch.randperm(len(chosen), generator=generator, device=chosen.device)
        chosen = chosen[order[:max_samples]]
    with full_precision(logits) as x:
        flat = x.movedim(1, -1).reshape(-1, x.shape[1])[chosen]
        if not len(chosen):
            return flat.sum()
        r, predicted = torch.softmax(flat, dim=1).max(dim=1)
        right = predicted == labels.flatten()[chosen]
        kernel = torch.exp(-(r[:, None] - r[None]).abs() / KERNEL_WIDTH)
        if weighted:
            m, n = right.sum(), (~right).sum()
            if m == 0 or n == 0:
                return (r * 0).sum()
            signed = torch.where(right, (1 - r) / m, -r / n)
        else:
            signed = (right.to(r.dtype) - r) / len(chosen)
        # a quadratic form of a positive definite kernel; rounding may leave it just below 0
        square = (signed @ kernel @ signed).clamp(min=0)
        return torch.sqrt(square + ROOT_GUARD) if sqrt else square


class MMCE(Term):
    """Module form of :func:`mmce`, to be added to cross-entropy.

    The CALS paper weighs it by 0.1, its code by 1.

    Args:
        num_classes: K.
        weighted: MMCE_w instead of MMCE.
        sqrt: return the root (not smooth at 0).
        max_samples: largest number of voxels; of more, a random subset is drawn uniformly.
        ignore_index: label to leave out.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        weighted: bool = False,
        sqrt: bool = False,
        max_samples: int = 4096,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.weighted = weighted
        self.sqrt = sqrt
        self.max_samples = max_samples
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the scalar term of `logits` ``(N, K, *S)`` against `labels` ``(N, *S)``."""
        check_num_classes(logits, self.num_classes)
        return mmce(
            logits,
            labels,
            weighted=self.weighted,
            sqrt=self.sqrt,
            max_samples=self.max_samples,
            ignore_index=self.ignore_index,
        )

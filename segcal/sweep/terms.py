"""What one sweep over the logits can compute: a cross-entropy and a penalty."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from segcal.neighbourhood import KernelSize, Padding

Shape = Literal["abs", "upper", "lower"]

NOTHING = 255
"""Code of a voxel that does not count, as a centre or as a neighbour."""
NO_CLASS = 254
"""Code of what lies outside the image under padding ``zeros``: it counts, but has no class."""
Z_LINEAR = 1e6
"""Above this constraint value the penalties continue along their tangent, which keeps value and
slope inside float32 (P2 grows with the cube of z)."""
PHR, P2, P3, RELU = range(4)
ABS, UPPER, LOWER = range(3)
FUNCTION_CODES = {"phr": PHR, "p2": P2, "p3": P3, "relu": RELU}
SHAPE_CODES = {"abs": ABS, "upper": UPPER, "lower": LOWER}


@dataclass(frozen=True)
class CrossEntropyTerm:
    """Cross-entropy, weighted by the class of the voxel.

    Attributes:
        num_classes: K.
        ignore_index: label of voxels that do not count.
        class_weight: ``(K,)``, or None for 1.
    """

    num_classes: int
    ignore_index: int | None = None
    class_weight: Tensor | None = None


@dataclass(frozen=True)
class Residual:
    """A penalty ``sum_i sum_k P(z_k(i); lam[r(i), k], rho[r(i), k]) / (N d)`` on a residual u.

    ``u_k = l_k - m_r tau_k`` (`patch` given) or ``(max_j l_j - l_k - m_r) scale`` (None); N are the
    voxels that count.

    Attributes:
        lam: ``(R, K)``.
        rho: ``(R, K)``.
        function: name of P in :mod:`segcal.alm.functions`.
        shape: z is the size of u (``abs``), u (``upper``), or -u (``lower``).
        margins: m of the only region, or of two: r is 0 where the patch holds one class and 1
            where it holds several.
        scale: see above.
        patch: size and padding of the patch of the class proportions tau.
        divisor: d.
        ignore_index: label of voxels that do not count.
        clip: bounds of every P' in the statistics.

    Raises:
        ValueError: two margins without a patch, more than two, or none.
    """

    lam: Tensor
    rho: Tensor
    function: str
    shape: Shape
    margins: tuple[float, ...]
    scale: float = 1.0
    patch: tuple[KernelSize, Padding] | None = None
    divisor: float = 1.0
    ignore_index: int | None = None
    clip: tuple[float, float] = (-math.inf, math.inf)

    def __post_init__(self) -> None:
        most = 1 if self.patch is None else 2
        if not 1 <= len(self.margins) <= most:
            raise ValueError(
                f"margins: expected 1{' or 2' if most == 2 else ' without a patch'}, one per "
                f"region, got {self.margins}"
            )


@dataclass(frozen=True)
class ConfidenceTerm:
    """A penalty ``(1 / N) sum_i lam[r(i), c(i)] min(o(i), clip)`` on the log-odds of predictions.

    c is the first class with the largest logit and ``o = log p_c / (1 - p_c)``; N are the voxels
    that count; r is 0 where the patch of the predicted map holds one class, among the voxels that
    count, and 1 where it holds several. The map is replicated at the border of the image.

    Attributes:
        lam: ``(2, K)``.
        clip: of the log-odds.
        kernel_size: of the patch.
        ignore_index: label of voxels that do not count.
    """

    lam: Tensor
    clip: float
    kernel_size: KernelSize = 3
    ignore_index: int | None = None


Penalty = Residual | ConfidenceTerm


@dataclass(frozen=True)
class SweepPlan:
    """One sweep with everything looked up.

    Attributes:
        residual: the penalty.
        penalty_weight: float64 scalar, ``1 / (N d)``, 0 where nothing counts.
        cross_entropy_weight: float64 ``(K,)``, factor on a voxel's cross-entropy by label; None
            leaves it out.
        factors: of cross-entropy and penalty in the gradient.
        sizes: of the patch along Z, Y, X.
        gaps: some codes are :data:`NOTHING`.
        gradient: compute the gradient.
        statistics: compute the sums of P' and z per region and class.
    """

    residual: Residual
    penalty_weight: Tensor
    cross_entropy_weight: Tensor | None
    factors: tuple[float, float]
    sizes: tuple[int, int, int]
    gaps: bool
    gradient: bool
    statistics: bool


@dataclass(frozen=True)
class ConfidencePlan:
    """One sweep on log-odds with everything looked up.

    Attributes:
        term: the penalty.
        penalty_weight: float64 scalar, ``1 / N``, 0 where nothing counts.
        cross_entropy_weight: as in :class:`SweepPlan`, like the next two.
        factors: see there.
        gradient: see there.
        statistics: compute the sums of confidence and of hits, and the voxels, per region and
            predicted class.
    """

    term: ConfidenceTerm
    penalty_weight: Tensor
    cross_entropy_weight: Tensor | None
    factors: tuple[float, float]
    gradient: bool
    statistics: bool

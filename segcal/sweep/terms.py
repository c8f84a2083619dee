"""What one sweep can compute: a cross-entropy, a penalty, and losses of sums over the voxels."""

from __future__ import annotations

import math
from collections.abc import Callable
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
        class_weight: ``(K,)``; None gives all classes the weight 1.
    """

    num_classes: int
    ignore_index: int | None = None
    class_weight: Tensor | None = None


@dataclass(frozen=True)
class OverlapTerm:
    """A loss of sums over the voxels of every image and class, such as soft Dice.

    Attributes:
        num_classes: K.
        loss: function that takes ``sum_i p_k(i)``, ``sum_i p_k(i) [k = y(i)]`` and
            ``sum_i [k = y(i)]`` over the voxels that count, float64 ``(N, K)`` each, and returns a
            scalar and its derivatives by the first two; p is the softmax.
        ignore_index: label of voxels that do not count.
    """

    num_classes: int
    loss: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    ignore_index: int | None = None


@dataclass(frozen=True)
class BinTerm:
    """A loss of sums by bin of every image's and class's probabilities, such as mL1-ACE.

    Voxel i belongs to bin m of class k by a weight w, of its probability p alone.

    Attributes:
        num_classes: K.
        bins: M.
        soft: whether a probability is shared, in proportion, by the two bins whose centres are
            nearest, instead of belonging to the bin that it falls into.
        loss: function that takes ``sum_i w_m(i)``, ``sum_i w_m(i) p_k(i)`` and
            ``sum_i w_m(i) [k = y(i)]`` over the voxels that count, float64 ``(N, K, M)`` each, and
            returns a scalar and its derivatives by all three; p is the softmax.
        ignore_index: label of voxels that do not count.
    """

    num_classes: int
    bins: int
    soft: bool
    loss: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
    ignore_index: int | None = None


@dataclass(frozen=True)
class Residual:
    """A penalty ``sum_i sum_k P(z_k(i); lam[r(i), k], rho[r(i), k]) / (N d)`` on a residual u.

    With a `patch`, ``u_k = l_k - m_r tau_k``; without, ``u_k = (max_j l_j - l_k - m_r) scale``. N
    is the number of voxels that count.

    Attributes:
        lam: multipliers ``(R, K)``.
        rho: penalty parameters ``(R, K)``.
        function: name of P in :mod:`segcal.alm.functions`.
        shape: z is the absolute value of u (``abs``), u (``upper``), or -u (``lower``).
        margins: m of the only region, or of two regions: r is 0 where the patch holds one class and
            1 where it holds several.
        scale: factor on u without a patch.
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

    @property
    def num_classes(self) -> int:
        """K."""
        return self.lam.shape[1]

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

    c is the first class with the largest logit and ``o = log p_c / (1 - p_c)``. N is the number of
    voxels that count. r is 0 where the patch of the predicted map holds one class, among the voxels
    that count, and 1 where it holds several. The map is replicated at the border of the image.

    Attributes:
        lam: multipliers ``(2, K)``.
        clip: upper bound of the log-odds.
        kernel_size: size of the patch.
        ignore_index: label of voxels that do not count.
    """

    lam: Tensor
    clip: float
    kernel_size: KernelSize = 3
    ignore_index: int | None = None

    @property
    def num_classes(self) -> int:
        """K."""
        return self.lam.shape[1]


Penalty = Residual | ConfidenceTerm
Swept = CrossEntropyTerm | OverlapTerm | BinTerm | Penalty


@dataclass(frozen=True)
class Together:
    """What one sweep computes; None leaves a part out.

    Attributes:
        penalty: the penalty.
        cross_entropy: the cross-entropy.
        overlap: the loss of overlaps.
        bins: the loss of bins.

    Raises:
        ValueError: nothing to compute, or parts with different numbers of classes or ignore labels.
    """

    penalty: Penalty | None = None
    cross_entropy: CrossEntropyTerm | None = None
    overlap: OverlapTerm | None = None
    bins: BinTerm | None = None

    def __post_init__(self) -> None:
        if len(self._shared()) != 1:
            raise ValueError(
                "terms: expected one number of classes and one ignore label, got "
                f"{sorted(self._shared(), key=str)}"
            )

    def _shared(self) -> set[tuple[int, int | None]]:
        return {(one.num_classes, one.ignore_index) for one in self.parts if one is not None}

    @property
    def parts(self) -> tuple[Swept | None, ...]:
        """All four."""
        return self.penalty, self.cross_entropy, self.overlap, self.bins

    @property
    def num_classes(self) -> int:
        """K."""
        return next(iter(self._shared()))[0]

    @property
    def ignore_index(self) -> int | None:
        """Label of voxels that do not count."""
        return next(iter(self._shared()))[1]


@dataclass(frozen=True, kw_only=True)
class SumsPlan:
    """What the pass over the voxels for losses of sums needs.

    Attributes:
        cross_entropy_weight: as in :class:`SharedPlan`.
        overlaps: whether to sum overlaps.
        bins: the loss of bins; None leaves its sums out.
        gaps: whether some codes are :data:`NOTHING`.
        predicted: whether to find the first class of the largest logit.
        softmax: whether to keep the softmax.
    """

    cross_entropy_weight: Tensor | None
    overlaps: bool
    bins: BinTerm | None
    gaps: bool
    predicted: bool
    softmax: bool


@dataclass(frozen=True, kw_only=True)
class SharedPlan:
    """Everything that a sweep needs except for its penalty.

    Attributes:
        penalty_weight: float64 scalar, factor on a voxel's penalty: ``1 / N``, or ``1 / (N d)`` for
            a residual; 0 where nothing counts.
        cross_entropy_weight: float64 ``(K,)``, factor on a voxel's cross-entropy by label; None
            leaves it out.
        factors: factors of cross-entropy and penalty in the gradient.
        softmax: softmax like the logits, which the sweep turns into the gradient in place, together
            with the slopes of losses of sums; the value of the cross-entropy is then not computed.
        overlap_slopes: float64 ``(N, 2, K)``, derivatives of a loss of overlaps by its first two
            sums, times its weight; None leaves it out.
        bin_slopes: float64 ``(3, N, K, M)``, derivatives of a loss of bins, times its weight; None
            leaves it out.
        bins: the loss of bins.
        gradient: whether to compute the gradient.
        statistics: whether to compute the sums from which multipliers are learned.
    """

    penalty_weight: Tensor
    cross_entropy_weight: Tensor | None
    factors: tuple[float, float]
    gradient: bool
    statistics: bool
    softmax: Tensor | None = None
    overlap_slopes: Tensor | None = None
    bin_slopes: Tensor | None = None
    bins: BinTerm | None = None


@dataclass(frozen=True, kw_only=True)
class SweepPlan(SharedPlan):
    """A plan with a penalty on residuals; statistics are sums of P' and z per region and class.

    Attributes:
        residual: the penalty; None leaves it out.
        sizes: sizes of the patch along Z, Y, X.
        gaps: whether some codes are :data:`NOTHING`.
    """

    residual: Residual | None
    sizes: tuple[int, int, int]
    gaps: bool


@dataclass(frozen=True, kw_only=True)
class ConfidencePlan(SharedPlan):
    """A plan with the penalty on log-odds.

    The statistics are sums of confidence and of hits, and numbers of voxels, per region and
    predicted class.

    Attributes:
        term: the penalty.
    """

    term: ConfidenceTerm

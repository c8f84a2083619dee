"""segcal's metrics as MONAI metrics: called per batch, buffered, gathered and aggregated.

``metric(y_pred, y)`` takes batches ``(B, K, *S)`` or lists of decollated channel-first tensors; a
single channel holds label indices, K channels are one-hot. Every case gives a row of C values. Rows
``(B, C)`` are float64 on the CPU, MONAI gathers them over ranks, and ``aggregate`` reduces them.

``convention="segcal"``, the default, gives what the functions of :mod:`segcal.metrics` give, and
reduces in float64; where nothing is defined the result is NaN. ``convention="monai"`` gives the
values of MONAI's own metric instead, whose reduction is float32 and turns "nothing is defined" into
0, which for distances is the best possible value.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from monai.metrics import CumulativeIterationMetric, do_metric_reduction
from monai.utils import convert_to_tensor
from numpy.typing import NDArray
from torch import Tensor

from segcal.arrays import MANY, applied_twice, check_choice, holds_masks
from segcal.binning import BinStatistics, equal_width_statistics
from segcal.binning import Reduction as CalibrationReduction
from segcal.metrics.dice import dice
from segcal.metrics.ece import reliability
from segcal.metrics.hausdorff import AssdDefinition, Definition, assd_of, hausdorff_of, nsd_of
from segcal.metrics.tace import tace
from segcal.surface import SurfaceDistances, surface_distances
from segcal.tensors import HALF, check_label_values, check_probabilities

__all__ = [
    "ASSDMetric",
    "BinnedMetric",
    "CaseMetric",
    "ClasswiseECEMetric",
    "DSCMetric",
    "ECEMetric",
    "HausdorffMetric",
    "MaskMetric",
    "NSDMetric",
    "ProbabilityMetric",
    "SurfaceMetric",
    "TACEMetric",
]

Convention = Literal["segcal", "monai"]
BatchReduction = Literal[
    "none", "mean", "sum", "mean_batch", "sum_batch", "mean_channel", "sum_channel"
]
Spacing = float | Sequence[float] | Sequence[Sequence[float]] | Literal["meta"]
Mask = NDArray[np.bool_]
Mm = NDArray[np.float64]


class CaseMetric(CumulativeIterationMetric):
    """Base of all metrics; a subclass says what the row of a case is.

    Args:
        num_classes: K; None takes the number of channels of prediction or reference, whichever is
            larger; one channel in both is one binary mask.
        ignore_index: label to leave out. In a one-hot reference this means the voxels of that
            channel, or the voxels without any label if there is no such channel.
        reduction: how :meth:`aggregate` reduces ``(B, C)``; MONAI's names: ``mean`` (over the
            defined channels of each case, then over cases), ``none``, ``sum``, ``mean_batch``,
            ``sum_batch``, ``mean_channel`` or ``sum_channel``.
        get_not_nans: whether :meth:`aggregate` returns the number of defined values, too.
        convention: ``segcal`` or ``monai``, see the module.

    Raises:
        ValueError: an unknown option.
    """

    def __init__(
        self,
        *,
        num_classes: int | None = None,
        ignore_index: int | None = None,
        reduction: BatchReduction = "mean",
        get_not_nans: bool = False,
        convention: Convention = "segcal",
    ) -> None:
        super().__init__()
        check_choice("reduction", str(reduction), get_args(BatchReduction))
        check_choice("convention", convention, get_args(Convention))
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.get_not_nans = get_not_nans
        self.convention = convention

    def aggregate(self, reduction: BatchReduction | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Reduce the rows of all cases, of all ranks.

        Args:
            reduction: None takes the constructor's.

        Returns:
            the metric, or ``(metric, not_nans)``.

        Raises:
            ValueError: no case yet, or an unknown reduction.
        """
        reduction = reduction or self.reduction
        check_choice("reduction", str(reduction), get_args(BatchReduction))
        buffer = self.get_buffer()
        if buffer is None:
            raise ValueError(f"{type(self).__name__}: no case to aggregate; call it on some first")
        reduce = do_metric_reduction if self.convention == "monai" else _reduce
        value, not_nans = reduce(self._values(buffer), str(reduction))
        return (value, not_nans) if self.get_not_nans else value

    def _values(self, buffer: Tensor) -> Tensor:
        """Values ``(B, C)`` to reduce, from the buffered rows."""
        return buffer

    def _compute_tensor(self, y_pred: Tensor, y: Tensor | None = None, **kwargs: Any) -> Tensor:
        return self._compute_list(list(y_pred), None if y is None else list(y), **kwargs)

    def _compute_list(self, y_pred: Any, y: Any = None, *, spacing: Any = None) -> Tensor:
        if y is None or len(y_pred) != len(y):
            raise ValueError(
                f"y_pred and y: expected as many cases in both, got {len(y_pred)} and "
                f"{'no y' if y is None else len(y)}"
            )
        for p, r in zip(y_pred, y, strict=True):
            if p.shape[1:] != r.shape[1:]:
                raise ValueError(
                    f"y_pred {tuple(p.shape)} and y {tuple(r.shape)}: expected channels first and "
                    "one shape after them"
                )
        rows = [
            self._row(_plain(p), _plain(r), of_case)
            for p, r, of_case in zip(y_pred, y, self._spacings(spacing, y_pred, y), strict=True)
        ]
        return torch.stack(rows)

    def _spacings(self, spacing: Any, y_pred: Any, y: Any) -> Sequence[Mm]:
        return [np.ones(r.ndim - 1) for r in y]

    @abstractmethod
    def _row(self, y_pred: Tensor, y: Tensor, spacing: Mm) -> Tensor: ...


class MaskMetric(CaseMetric):
    """Metrics of one binary mask per class, from one-hot masks or label indices.

    Args:
        include_background: whether class 0 takes part; a single binary mask always does.
        **options: see :class:`CaseMetric`.
    """

    def __init__(self, *, include_background: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.include_background = include_background

    def _row(self, y_pred: Tensor, y: Tensor, spacing: Mm) -> Tensor:
        classes = self._classes(y_pred, y)
        p, _ = _channels("y_pred", y_pred, classes.stop, None)
        r, valid = _channels("y", y, classes.stop, self.ignore_index)
        masks = [(m & valid)[classes.start :].numpy(force=True) for m in (p, r)]
        values = [
            self._value(a, b, channel, spacing)
            for channel, (a, b) in enumerate(zip(*masks, strict=True))
        ]
        return torch.tensor(values, dtype=torch.float64)

    @abstractmethod
    def _value(self, p: Mask, r: Mask, channel: int, spacing: Mm) -> float: ...

    def _classes(self, y_pred: Tensor, y: Tensor) -> range:
        k = self.num_classes or max(len(y_pred), len(y))
        return range(0 if self.include_background or k == 1 else 1, k)


class DSCMetric(MaskMetric):
    """Dice of every class, see :func:`segcal.metrics.dice.dice`.

    NaN where a class is in neither mask, 0 where it is in one of them. With ``convention="monai"``
    it is NaN wherever the reference is empty, as in MONAI's DiceMetric, so that false alarms do not
    count.
    """

    def _value(self, p: Mask, r: Mask, channel: int, spacing: Mm) -> float:
        if self.convention == "monai" and not r.any():
            return float("nan")
        return dice(p, r, 1)


class SurfaceMetric(MaskMetric):
    """Metrics of surface distances.

    Args:
        spacing: voxel size in mm along the axes of the arrays: one number, one per axis, or one
            sequence per case. ``meta`` takes it from `y` or `y_pred`, which must be MetaTensors.
            The argument ``spacing=`` of a call goes before this one; MONAI's handlers cannot give
            it. With None every call needs ``spacing=``; with MONAI's convention None counts voxels.
        **options: see :class:`MaskMetric`.
    """

    def __init__(self, *, spacing: Spacing | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.spacing = spacing

    def _spacings(self, spacing: Any, y_pred: Any, y: Any) -> Sequence[Mm]:
        spacing = self.spacing if spacing is None else spacing
        if spacing is None and self.convention == "monai":
            spacing = 1.0
        if spacing is None:
            raise ValueError(
                "spacing: distances are in mm, but none is given; pass spacing=(...) in the order "
                'of the axes to the call or the metric, spacing="meta" for that of MetaTensors, '
                "or 1 for voxels"
            )
        axes = y[0].ndim - 1
        if isinstance(spacing, str):
            check_choice("spacing", spacing, ("meta",))
            return [_meta_spacing(p, r)[:axes] for p, r in zip(y_pred, y, strict=True)]
        mm = np.asarray(spacing, dtype=np.float64)
        if mm.shape not in ((), (axes,), (len(y), axes), (len(y), 1)):
            raise ValueError(
                f"spacing: expected a number, {axes} of them, or {axes} per case of {len(y)}, "
                f"got {mm.tolist()}"
            )
        return list(np.broadcast_to(mm, (len(y), axes)))

    def _value(self, p: Mask, r: Mask, channel: int, spacing: Mm) -> float:
        return self._of(surface_distances(p, r, spacing_mm=spacing), channel)

    @abstractmethod
    def _of(self, distances: SurfaceDistances, channel: int) -> float: ...


class HausdorffMetric(SurfaceMetric):
    """Hausdorff distance in mm, or its percentile, see :func:`segcal.metrics.hausdorff.hausdorff`.

    inf where one mask is empty, NaN where both are. With MONAI's convention a percentile is NaN in
    either case, so a missed structure does not count in the mean.

    Args:
        percentile: None takes the maximum, 95 gives HD95 (MONAI takes 0 for the maximum, too).
        definition: ``pooled`` takes the percentile of the distances of both directions together,
            ``max_directed`` the larger of the percentiles of both directions. None takes
            ``pooled``, with MONAI's convention ``max_directed``.
        **options: see :class:`SurfaceMetric`.
    """

    def __init__(
        self,
        *,
        percentile: float | None = None,
        definition: Definition | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        own: Definition = "max_directed" if self.convention == "monai" else "pooled"
        self.percentile = percentile
        self.definition: Definition = definition or own

    def _of(self, distances: SurfaceDistances, channel: int) -> float:
        percentile = self.percentile
        if self.convention == "monai" and percentile is not None:
            if distances.undefined() is not None and percentile > 0:
                return float("nan")
            percentile = percentile or None
        return hausdorff_of(distances, percentile=percentile, definition=self.definition)


class ASSDMetric(SurfaceMetric):
    """Average symmetric surface distance in mm, see :func:`segcal.metrics.hausdorff.assd`.

    inf where one mask is empty, NaN where both are.

    Args:
        definition: ``pooled`` (MONAI's symmetric SurfaceDistanceMetric) or ``mean_of_means``.
        **options: see :class:`SurfaceMetric`.
    """

    def __init__(self, *, definition: AssdDefinition = "pooled", **options: Any) -> None:
        super().__init__(**options)
        self.definition: AssdDefinition = definition

    def _of(self, distances: SurfaceDistances, channel: int) -> float:
        return assd_of(distances, definition=self.definition)


class NSDMetric(SurfaceMetric):
    """Normalised surface distance (surface Dice), see :func:`segcal.metrics.hausdorff.nsd`.

    0 where one mask is empty, NaN where both are.

    Args:
        tolerance_mm: how far off a surface may lie: one number, or one per class that takes part.
        **options: see :class:`SurfaceMetric`.
    """

    def __init__(self, *, tolerance_mm: float | Sequence[float], **options: Any) -> None:
        super().__init__(**options)
        self.tolerance_mm = tolerance_mm

    def _row(self, y_pred: Tensor, y: Tensor, spacing: Mm) -> Tensor:
        n, given = len(self._classes(y_pred, y)), self.tolerance_mm
        if isinstance(given, Sequence) and len(given) != n:
            raise ValueError(f"tolerance_mm: expected one, or {n} (class by class), got {given}")
        return super()._row(y_pred, y, spacing)

    def _of(self, distances: SurfaceDistances, channel: int) -> float:
        given = self.tolerance_mm
        tolerance = given[channel] if isinstance(given, Sequence) else given
        return nsd_of(distances, tolerance_mm=tolerance)


class ProbabilityMetric(CaseMetric):
    """Metrics of probabilities: `y_pred` is ``(B, K, *S)`` after a softmax or sigmoid.

    Args:
        foreground_only: whether to count only voxels whose label is not background, as in the
            published tables; false positives in the background are then never seen.
        **options: see :class:`CaseMetric`.
    """

    def __init__(self, *, foreground_only: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.foreground_only = foreground_only

    def _selected(self, y_pred: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities, and bool whether they came true, ``(K, n)``, of voxels that count."""
        k = len(y_pred)
        if not y_pred.is_floating_point() or self.num_classes not in (None, k):
            raise ValueError(
                f"y_pred: expected probabilities of {self.num_classes or 'K'} channels, got "
                f"{y_pred.dtype} {tuple(y_pred.shape)}"
            )
        hits, keep = _channels("y", y, k, self.ignore_index)
        if self.foreground_only:
            keep = keep & (hits[1:] if k > 1 else hits).any(0)
        p = (y_pred.float() if y_pred.dtype in HALF else y_pred)[:, keep]
        self._check_kind(p)
        return p, hits[:, keep]

    def _check_kind(self, p: Tensor) -> None:
        """Refuse masks, and warn of a sigmoid applied twice; a softmax is checked elsewhere."""
        low, high = check_probabilities(p)
        if holds_masks(p):
            raise ValueError(
                "y_pred: holds 0 and 1 alone, a one-hot mask whose ECE is 1 - accuracy; give "
                "probabilities: call this metric before AsDiscrete(argmax=True, to_onehot=...), or "
                "keep its input under another key"
            )
        if p.numel() >= MANY and (said := applied_twice(low, high, len(p), regions=True)):
            warnings.warn(f"y_pred: {said}", stacklevel=6)


class TACEMetric(ProbabilityMetric):
    """TACE of a case, see :func:`segcal.metrics.tace.tace`; C is 1.

    Args:
        threshold: probabilities up to this value are left out.
        bins: ranges of equal mass per class.
        **options: see :class:`ProbabilityMetric`.
    """

    def __init__(self, *, threshold: float = 1e-3, bins: int = 15, **options: Any) -> None:
        super().__init__(**options)
        self.threshold = threshold
        self.bins = bins

    def _row(self, y_pred: Tensor, y: Tensor, spacing: Mm) -> Tensor:
        p, labels = _labelled(*self._selected(y_pred, y))
        value = tace(p, labels, threshold=self.threshold, bins=self.bins)
        return torch.tensor([value], dtype=torch.float64)


class BinnedMetric(ProbabilityMetric):
    """Calibration errors from bins of equal width.

    Args:
        bins: their number M; None takes 15, with MONAI's convention 20.
        calibration_reduction: ``expected`` weighs bins by their voxels (ECE), ``average`` takes
            the mean of the non-empty bins (ACE), ``maximum`` the largest gap (MCE).
        pooled: whether the voxels of all cases share their bins. ``aggregate`` then adds the sums
            of the cases, so that large cases weigh more. The buffer then holds the sums of voxels,
            confidence and hits, ``(B, C, M, 3)``.
        **options: see :class:`ProbabilityMetric`.
    """

    def __init__(
        self,
        *,
        bins: int | None = None,
        calibration_reduction: CalibrationReduction = "expected",
        pooled: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_choice("calibration_reduction", calibration_reduction, get_args(CalibrationReduction))
        self.bins = bins or (20 if self.convention == "monai" else 15)
        self.calibration_reduction: CalibrationReduction = calibration_reduction
        self.pooled = pooled

    def _row(self, y_pred: Tensor, y: Tensor, spacing: Mm) -> Tensor:
        channels = self._statistics(*self._selected(y_pred, y))
        if not self.pooled:
            return self._errors(channels)
        sums = [np.stack([s.count, s.confidence_sum, s.hit_sum], axis=-1) for s in channels]
        return torch.as_tensor(np.stack(sums), dtype=torch.float64)

    def _values(self, buffer: Tensor) -> Tensor:
        if not self.pooled:
            return buffer
        sums = buffer.sum(0).numpy(force=True)
        return self._errors([BinStatistics(c[:, 0], c[:, 1], c[:, 2]) for c in sums])[None]

    def _errors(self, channels: Sequence[BinStatistics]) -> Tensor:
        errors = [s.error(self.calibration_reduction) for s in channels]
        return torch.tensor(errors, dtype=torch.float64)

    @abstractmethod
    def _statistics(self, p: Tensor, hits: Tensor) -> list[BinStatistics]: ...


class ECEMetric(BinnedMetric):
    """Top-label calibration error, see :func:`segcal.metrics.ece.ece`; C is 1."""

    def _statistics(self, p: Tensor, hits: Tensor) -> list[BinStatistics]:
        return [reliability(*_labelled(p, hits), bins=self.bins)]


class ClasswiseECEMetric(BinnedMetric):
    """Calibration error of every class, :func:`segcal.metrics.calibration_error.calibration_error`.

    Channels may overlap or be all 0 in `y` (sigmoid outputs). With MONAI's convention the values
    are those of its CalibrationErrorMetric, whose counters are float32.

    Args:
        include_background: whether class 0 takes part; a single binary mask always does.
        **options: see :class:`BinnedMetric`.
    """

    def __init__(self, *, include_background: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.include_background = include_background

    def _statistics(self, p: Tensor, hits: Tensor) -> list[BinStatistics]:
        first = 0 if self.include_background or len(p) == 1 else 1
        return [equal_width_statistics(p[c], hits[c], self.bins) for c in range(first, len(p))]


def _reduce(values: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    """Reduction of `values` ``(B, C)`` in their own precision, and how many are defined.

    NaN is left out; a mean of nothing is NaN.
    """
    defined = (~values.isnan()).to(values.dtype)
    if reduction == "none":
        return values, defined
    if reduction == "mean":
        return values.nanmean(1).nanmean(), defined.amax(1).sum()
    if reduction == "sum":
        return values.nansum(), defined.sum()
    kind, _, over = reduction.partition("_")
    axis = {"batch": 0, "channel": 1}[over]
    reduced = values.nanmean(axis) if kind == "mean" else values.nansum(axis)
    return reduced, defined.sum(axis)


def _plain(x: Any) -> Tensor:
    """`x` without MetaTensor's bookkeeping."""
    return convert_to_tensor(x, track_meta=False)


def _meta_spacing(*tensors: Any) -> Mm:
    """Voxel size along the axes of the last MetaTensor among `tensors`."""
    for x in reversed(tensors):
        if hasattr(x, "pixdim"):
            return np.asarray(x.pixdim, dtype=np.float64)
    raise ValueError(
        'spacing: "meta" needs y or y_pred to be MetaTensors; pass spacing=(...) in mm'
    )


def _channels(name: str, x: Tensor, k: int, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """Masks ``(K, *S)`` of label indices or one-hot channels, and which voxels count ``(*S)``."""
    if len(x) not in (1, k):
        raise ValueError(
            f"{name}: expected label indices (one channel) or {k} channels, got {tuple(x.shape)}"
        )
    valid = torch.ones(x.shape[1:], dtype=torch.bool, device=x.device)
    if len(x) == k:
        if ignore_index is not None:
            valid = _labelled_voxels(x, ignore_index)
        masks = torch.where(valid, x, 0)
        if not bool(((masks == 0) | (masks == 1)).all()):
            raise ValueError(
                f"{name}: expected masks of 0 and 1, got other values in {k} channel(s); "
                "AsDiscrete(argmax=True, to_onehot=K) makes masks from probabilities, and "
                "num_classes says that a single channel holds label indices"
            )
        return masks == 1, valid
    if x.is_floating_point() and not bool((x == x.round()).all()):
        raise ValueError(f"{name}: expected label indices, got values that are not whole numbers")
    labels = x[0].long()
    check_label_values(labels, k, ignore_index)
    if ignore_index is not None:
        valid = labels != ignore_index
    classes = torch.arange(k, device=x.device).reshape(k, *(1,) * labels.ndim)
    return labels == classes, valid


def _labelled_voxels(x: Tensor, ignore_index: int) -> Tensor:
    if len(x) == 1:
        return x[0] != ignore_index
    if 0 <= ignore_index < len(x):
        return x[ignore_index] == 0
    return (x != 0).any(0)


def _labelled(p: Tensor, hits: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities ``(1, K, n)`` and the labels ``(1, n)`` that one-hot `hits` stand for."""
    if len(p) < 2 or not bool((hits.sum(0) == 1).all()):
        raise ValueError(
            f"y: expected one label per voxel among at least 2 classes, got {len(p)} channel(s) "
            "with none or several; use ClasswiseECEMetric for channels that overlap"
        )
    return p[None], hits.int().argmax(0)[None]

"""Hausdorff distance and its percentiles, average and normalised surface distance, in mm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from segcal.arrays import check_choice
from segcal.surface import SurfaceDistances, surface_distances

__all__ = ["assd", "assd_of", "hausdorff", "hausdorff_of", "nsd", "nsd_of"]

Definition = Literal["pooled", "max_directed"]
AssdDefinition = Literal["pooled", "mean_of_means"]


def hausdorff(
    prediction: ArrayLike,
    reference: ArrayLike,
    *,
    spacing_mm: Sequence[float] | ArrayLike,
    percentile: float | None = None,
    definition: Definition = "pooled",
) -> float:
    """Hausdorff distance (or a percentile of it) between the surfaces of two masks, in mm.

    Args:
        prediction: bool ``(*S)``.
        reference: bool, same shape.
        spacing_mm: voxel size along each axis of the arrays, in their order.
        percentile: None takes the maximum; 95 gives HD95 (linear interpolation).
        definition: definition of a percentile. ``pooled`` takes it of all distances of both
            directions together (medpy); ``max_directed`` takes the larger of the two directions'
            percentiles (MONAI). The two differ by tens of mm on outliers, so name the one you use.

    Returns:
        mm; inf when one mask is empty, NaN when both are.

    Raises:
        ValueError: as :func:`segcal.surface.surface_distances`, or options out of range.
    """
    return hausdorff_of(
        surface_distances(prediction, reference, spacing_mm=spacing_mm),
        percentile=percentile,
        definition=definition,
    )


def hausdorff_of(
    distances: SurfaceDistances,
    *,
    percentile: float | None = None,
    definition: Definition = "pooled",
) -> float:
    """Hausdorff distance from surface distances; the options are those of :func:`hausdorff`.

    Raises:
        ValueError: options out of range.
    """
    check_choice("definition", definition, get_args(Definition))
    if percentile is not None and not 0 <= percentile <= 100:
        raise ValueError(f"percentile: expected 0 to 100, got {percentile}")
    if (undefined := distances.undefined()) is not None:
        return undefined
    q = 100.0 if percentile is None else percentile
    both = (distances.prediction_to_reference, distances.reference_to_prediction)
    if definition == "pooled":
        return float(np.percentile(np.concatenate(both), q))
    return float(max(np.percentile(d, q) for d in both))


def nsd(
    prediction: ArrayLike,
    reference: ArrayLike,
    *,
    spacing_mm: Sequence[float] | ArrayLike,
    tolerance_mm: float,
) -> float:
    """Normalised surface distance: share of each surface within a tolerance of the other.

    ``(|{d_PG <= t}| + |{d_GP <= t}|) / (|surface P| + |surface G|)`` over surface voxels (Nikolov
    et al. 2018 weigh by surface area instead).

    Args:
        prediction: bool ``(*S)``.
        reference: bool, same shape.
        spacing_mm: voxel size along each axis of the arrays, in their order.
        tolerance_mm: t >= 0.

    Returns:
        a fraction of 1; 0 when one mask is empty, NaN when both are.

    Raises:
        ValueError: as :func:`hausdorff`.
    """
    distances = surface_distances(prediction, reference, spacing_mm=spacing_mm)
    return nsd_of(distances, tolerance_mm=tolerance_mm)


def nsd_of(distances: SurfaceDistances, *, tolerance_mm: float) -> float:
    """Normalised surface distance, as in :func:`nsd`, from surface distances.

    Raises:
        ValueError: a tolerance below 0.
    """
    if not tolerance_mm >= 0:
        raise ValueError(f"tolerance_mm: expected a number >= 0, got {tolerance_mm}")
    if (undefined := distances.undefined()) is not None:
        return 0.0 if undefined == np.inf else undefined
    both = np.concatenate([distances.prediction_to_reference, distances.reference_to_prediction])
    return float(np.mean(both <= tolerance_mm))


def assd(
    prediction: ArrayLike,
    reference: ArrayLike,
    *,
    spacing_mm: Sequence[float] | ArrayLike,
    definition: AssdDefinition = "pooled",
) -> float:
    """Average symmetric surface distance between two masks, in mm.

    Args:
        prediction: bool ``(*S)``.
        reference: bool, same shape.
        spacing_mm: voxel size along each axis of the arrays, in their order.
        definition: ``pooled`` is the mean of all distances of both directions (medpy 0.5);
            ``mean_of_means`` is the mean of the two directions' means.

    Returns:
        mm; inf when one mask is empty, NaN when both are.

    Raises:
        ValueError: as :func:`hausdorff`.
    """
    return assd_of(
        surface_distances(prediction, reference, spacing_mm=spacing_mm), definition=definition
    )


def assd_of(distances: SurfaceDistances, *, definition: AssdDefinition = "pooled") -> float:
    """Average surface distance from surface distances; the options are those of :func:`assd`.

    Raises:
        ValueError: an unknown definition.
    """
    check_choice("definition", definition, get_args(AssdDefinition))
    if (undefined := distances.undefined()) is not None:
        return undefined
    both = (distances.prediction_to_reference, distances.reference_to_prediction)
    if definition == "pooled":
        return float(np.concatenate(both).mean())
    return float(np.mean([d.mean() for d in both]))

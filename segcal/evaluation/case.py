"""One case: arrays in, one row of numbers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from segcal.binning import BinStatistics
from segcal.metrics.aece import aece
from segcal.metrics.brier import brier
from segcal.metrics.classwise_ece import classwise_ece
from segcal.metrics.dice import dice
from segcal.metrics.ece import reliability
from segcal.metrics.hausdorff import assd_of, hausdorff_of
from segcal.metrics.nll import nll
from segcal.metrics.tace import tace, tace_ref
from segcal.metrics.volume_difference import volume_difference
from segcal.surface import surface_distances
from segcal.tensors import select_voxels


@dataclass(frozen=True)
class Settings:
    """What the numbers depend on; written beside them.

    Attributes:
        bins: bins of ECE, classwise ECE, TACE and tace_ref.
        tace_threshold: probabilities up to this are left out of TACE and tace_ref.
        dilation: voxels by which the dilated scope reaches beyond the labelled foreground.
        tolerance: how far, in voxels, a prediction may lie off its reference.

    Raises:
        ValueError: values out of range.
    """

    bins: int = 15
    tace_threshold: float = 1e-3
    dilation: int = 5
    tolerance: float = 1e-2

    def __post_init__(self) -> None:
        if self.bins < 1 or self.dilation < 1:
            raise ValueError(
                f"bins, dilation: expected at least 1, got {self.bins}, {self.dilation}"
            )
        if not 0 <= self.tace_threshold <= 1 or not 0 <= self.tolerance < np.inf:
            raise ValueError(
                f"tace_threshold, tolerance: expected a probability and a finite number of voxels, "
                f"got {self.tace_threshold}, {self.tolerance}"
            )

    @property
    def scopes(self) -> tuple[str, str, str]:
        """Names of the voxel selections, as they appear in the keys of results."""
        return ("fg", f"dilated{self.dilation}", "all")

    @property
    def scope_titles(self) -> dict[str, str]:
        """A title per scope, for figures."""
        titles = ("labelled foreground", f"within {self.dilation} voxels of it", "all voxels")
        return {k: f"{k}: {title}" for k, title in zip(self.scopes, titles, strict=True)}

    def conventions(self) -> dict[str, str]:
        """Say in words what every key means."""
        return {
            "dsc": "2|P&G|/(|P|+|G|); undefined where the label is in neither map, 0 if in one",
            "hd_mm": "largest surface distance, mm; a miss and a false alarm are infinite",
            "hd95_pooled_mm": "95th percentile of both directions' distances together (medpy)",
            "hd95_max_directed_mm": "larger of the two directions' 95th percentiles (MONAI)",
            "assd_pooled_mm": "mean of both directions' distances together",
            "iou": "|P&G|/|P or G|; undefined where the label is in neither map",
            "volume_difference_ml": "predicted less reference volume",
            "surface": "voxels with a face neighbour outside; distances between voxel centres",
            "penalised_mean": "mean in which a miss or false alarm costs the image diagonal",
            "bins": f"{self.bins} equal-width bins (lo, hi], 0 in the first",
            "ece": "top label, sum of n_m/n |accuracy - confidence|, fraction of 1",
            "over, under": "parts of ece from bins that promise too much, and too little",
            "ace, mce": "mean, and largest, |accuracy - confidence| of the non-empty bins",
            "aece": f"ece of {self.bins} groups of equal mass, ties shared pro rata",
            "cece": "classwise ECE, mean over all classes, background included",
            "tace": f"Nixon: {self.bins} equal-mass ranges a class, p > {self.tace_threshold:g}",
            "tace_ref": "CRaC poster: equal-width classwise ECE over p > "
            f"{self.tace_threshold:g}, foreground-labelled voxels",
            "nll": "mean -log p of the label, nats, p floored at 1e-12",
            "brier": "mean over voxels of the squared error summed over classes, 0 to 2",
            "scope fg": "voxels whose reference label is not background",
            f"scope dilated{self.dilation}": "foreground-labelled voxels and those within "
            f"{self.dilation} voxels of one (box)",
            "scope all": "every voxel of the volume",
            "ignore label": "in no metric; a structure that it cuts has a surface along the cut",
            "mean over cases": "each case's value, then the plain mean; undefined cases left out "
            "and counted",
        }


@dataclass(frozen=True)
class CaseResult:
    """Numbers of one case.

    Attributes:
        row: scalar results by key; per-class ones are ``metric/label``. NaN is undefined.
        reliability: bin statistics of the top label by scope; empty without probabilities.
    """

    row: dict[str, float]
    reliability: dict[str, BinStatistics] = field(default_factory=dict)


def evaluate_case(
    prediction: NDArray[Any],
    reference: NDArray[Any],
    *,
    spacing_mm: Sequence[float],
    labels: Mapping[int, str],
    probabilities: NDArray[Any] | None = None,
    ignore_index: int | None = None,
    settings: Settings | None = None,
) -> CaseResult:
    """Evaluate a label map, and its probabilities if there are some.

    Args:
        prediction: integer ``(*S)``.
        reference: integer ``(*S)``.
        spacing_mm: voxel size along the axes of the arrays.
        labels: foreground labels to report, name by value.
        probabilities: ``(K, *S)``; None gives overlap and surface metrics only.
        ignore_index: reference label that is left out of everything.
        settings: bins, thresholds and scopes; None takes the defaults.

    Raises:
        ValueError: arrays that do not fit each other.
    """
    settings = settings or Settings()
    if prediction.shape != reference.shape:
        raise ValueError(
            f"prediction {prediction.shape} and reference {reference.shape}: expected one shape"
        )
    valid = None if ignore_index is None else reference != ignore_index
    extent = np.asarray(spacing_mm) * reference.shape
    row: dict[str, float] = {"diagonal_mm": float(np.linalg.norm(extent))}
    for value, name in labels.items():
        row.update(_overlap(prediction, reference, value, name, spacing_mm, valid))
    scores = np.array([row[f"dsc/{name}"] for name in labels.values()])
    defined = ~np.isnan(scores)
    row["dsc"] = float(scores[defined].mean()) if defined.any() else np.nan
    diagrams: dict[str, BinStatistics] = {}
    if probabilities is not None:
        for scope, mask in _scopes(reference, ignore_index, settings).items():
            m = None if mask is None else mask[None]
            p, y = select_voxels(probabilities[None], reference[None], m, ignore_index)
            diagrams[scope] = reliability(p[None], y[None], bins=settings.bins)
            row[f"voxels_{scope}"] = float(y.numel())
            row[f"ece_{scope}"] = diagrams[scope].expected_error()
            row[f"over_{scope}"] = diagrams[scope].overconfidence()
            row[f"under_{scope}"] = diagrams[scope].underconfidence()
            row[f"ace_{scope}"] = diagrams[scope].average_error()
            row[f"mce_{scope}"] = diagrams[scope].maximum_error()
            row[f"aece_{scope}"] = aece(p[None], y[None], bins=settings.bins)
            row[f"cece_{scope}"] = classwise_ece(p[None], y[None], bins=settings.bins)
            row[f"tace_{scope}"] = tace(
                p[None], y[None], threshold=settings.tace_threshold, bins=settings.bins
            )
            if scope == "fg":
                row["tace_ref"] = tace_ref(
                    p[None], y[None], threshold=settings.tace_threshold, bins=settings.bins
                )
            row[f"nll_{scope}"] = nll(p[None], y[None])
            row[f"brier_{scope}"] = brier(p[None], y[None])
    return CaseResult(row, diagrams)


def _overlap(
    prediction: NDArray[Any],
    reference: NDArray[Any],
    value: int,
    name: str,
    spacing_mm: Sequence[float],
    valid: NDArray[np.bool_] | None,
) -> dict[str, float]:
    p, r = prediction == value, reference == value
    if valid is not None:
        p, r = p & valid, r & valid
    distances = surface_distances(p, r, spacing_mm=spacing_mm)
    dsc = dice(p.view(np.uint8), r.view(np.uint8), 1)
    return {
        f"voxels_prediction/{name}": float(np.count_nonzero(p)),
        f"voxels_reference/{name}": float(np.count_nonzero(r)),
        f"dsc/{name}": dsc,
        f"iou/{name}": dsc / (2 - dsc),
        f"volume_difference_ml/{name}": volume_difference(p, r, spacing_mm=spacing_mm),
        f"hd_mm/{name}": hausdorff_of(distances),
        f"hd95_pooled_mm/{name}": hausdorff_of(distances, percentile=95),
        f"hd95_max_directed_mm/{name}": hausdorff_of(
            distances, percentile=95, definition="max_directed"
        ),
        f"assd_pooled_mm/{name}": assd_of(distances),
    }


def _scopes(
    reference: NDArray[Any], ignore_index: int | None, settings: Settings
) -> dict[str, NDArray[np.bool_] | None]:
    foreground = reference != 0
    if ignore_index is not None:
        foreground &= reference != ignore_index
    near = foreground
    for axis in range(reference.ndim):  # a box is separable
        near = ndimage.maximum_filter1d(near, 2 * settings.dilation + 1, axis, mode="constant")
    return dict(zip(settings.scopes, (foreground, near, None), strict=True))

"""One case: arrays in, one row of numbers out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from segcal.metrics.dice import dice
from segcal.metrics.hausdorff import assd_of, hausdorff_of, nsd_of
from segcal.metrics.volume_difference import volume_difference
from segcal.reproduction.marginloss import CONVENTIONS as OF_MARGINLOSS
from segcal.reproduction.marginloss import evaluate_case_marginloss
from segcal.surface import Box, label_boxes, surface_distances
from segcal.tally import Tally, Voxels, predicted_classes
from segcal.tensors import check_choice

Compat = Literal["marginloss"]
SCOPES = {
    "fg": "labelled foreground",
    "union": "labelled or predicted foreground",
    "dilated": "within {dilation} voxels of the labelled foreground",
    "crop": "where a foreground probability is not 0",
    "roi": "region of interest",
    "all": "all voxels",
}
"""What each selection of voxels holds."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the numbers depend on; written beside them.

    Attributes:
        bins: bins of ECE, classwise ECE, TACE and tace_ref.
        tace_threshold: probabilities up to this are left out of TACE and tace_ref.
        dilation: voxels by which the dilated scope reaches beyond the labelled foreground.
        nsd_tolerance_mm: distance up to which the normalised surface distance lets surfaces agree.
        tolerance: how far, in voxels, a prediction may lie off its reference.
        chosen: selections of voxels that calibration is reported for, keys of :data:`SCOPES`.
        compat: ``marginloss`` adds columns of that name, by the rules of
            :mod:`segcal.reproduction.marginloss`.

    Raises:
        ValueError: values out of range.
    """

    bins: int = 15
    tace_threshold: float = 1e-3
    dilation: int = 5
    nsd_tolerance_mm: float = 2.0
    tolerance: float = 1e-2
    chosen: tuple[str, ...] = ("fg", "union", "dilated", "all")
    compat: Compat | None = None

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
        if not 0 <= self.nsd_tolerance_mm < np.inf:
            raise ValueError(f"nsd_tolerance_mm: expected mm >= 0, got {self.nsd_tolerance_mm}")
        if self.compat is not None:
            check_choice("compat", self.compat, get_args(Compat))
        for scope in self.chosen:
            check_choice("scopes", scope, tuple(SCOPES))
        if not self.chosen or len(set(self.chosen)) < len(self.chosen):
            raise ValueError(f"scopes: expected different ones, got {', '.join(self.chosen)}")

    @property
    def scopes(self) -> tuple[str, ...]:
        """Names of the voxel selections, as they appear in the keys of results."""
        return tuple(f"dilated{self.dilation}" if s == "dilated" else s for s in self.chosen)

    @property
    def scope_titles(self) -> dict[str, str]:
        """A title per scope, for figures."""
        return {
            key: f"{key}: {SCOPES[scope].format(dilation=self.dilation)}"
            for key, scope in zip(self.scopes, self.chosen, strict=True)
        }

    def conventions(self) -> dict[str, str]:
        """Say in words what every key means."""
        return {
            "dsc": "2|P&G|/(|P|+|G|); undefined where the label is in neither map, 0 if in one",
            "hd_mm": "largest surface distance, mm; a miss and a false alarm are infinite",
            "hd95_pooled_mm": "95th percentile of both directions' distances together (medpy)",
            "hd95_max_directed_mm": "larger of the two directions' 95th percentiles (MONAI)",
            "assd_pooled_mm": "mean of both directions' distances together (medpy)",
            "assd_mean_of_means_mm": "mean of the two directions' mean distances",
            "nsd": f"share of both surfaces within {self.nsd_tolerance_mm:g} mm of the other, by "
            "surface voxels; 0 where one mask is empty",
            "iou": "|P&G|/|P or G|; undefined where the label is in neither map",
            "volume_difference_ml": "predicted less reference volume",
            "surface": "voxels with a face neighbour outside; distances between voxel centres",
            "hd95_penalised_mm, assd_penalised_mm": "mean over the labels of a case of "
            "hd95_pooled_mm, assd_pooled_mm, in which a miss or false alarm costs the image "
            "diagonal",
            "penalised_mean": "mean in which a miss or false alarm costs the image diagonal",
            "bins": f"{self.bins} equal-width bins (lo, hi], 0 in the first",
            "ece": "top label, sum of n_m/n |accuracy - confidence|, fraction of 1",
            "over": "part of ece from bins that promise too much",
            "under": "part of ece from bins that promise too little",
            "ace": "mean |accuracy - confidence| of the non-empty bins",
            "mce": "largest |accuracy - confidence| of a non-empty bin",
            "aece_bound": "how far the pooled aece can be from that of single voxels",
            "aece": f"ece of {self.bins} groups of equal mass, ties shared pro rata",
            "cece": "classwise ECE, mean over all classes, background included",
            "accuracy": "share of voxels whose most likely label is right",
            "tace": f"Nixon: {self.bins} equal-mass ranges a class, p > {self.tace_threshold:g}",
            "tace_ref": "CRaC poster: equal-width classwise ECE over p > "
            f"{self.tace_threshold:g}, foreground-labelled voxels",
            "nll": "mean -log p of the label, nats, p floored at 1e-12",
            "brier": "mean over voxels of the squared error summed over classes, 0 to 2",
            "brier_reliability, brier_resolution": "parts of brier over the bins (Murphy), summed "
            "over the classes; small and large are good",
            **{
                f"scope {key}": _SCOPE_CONVENTIONS[scope].format(dilation=self.dilation)
                for key, scope in zip(self.scopes, self.chosen, strict=True)
            },
            "regions": "where labels overlap, every region is a question of its own (in it or "
            "not): calibration is the mean over regions, and cece the error of its probability",
            "ignore label": "in no metric; a structure that it cuts has a surface along the cut",
            **(
                {f"marginloss {key}": text for key, text in OF_MARGINLOSS.items()}
                if self.compat == "marginloss"
                else {}
            ),
            "pooled": "all voxels of all cases together; equal-mass groups from 2^16 cells",
            "mean over cases": "each case's value, then the plain mean; undefined cases left out "
            "and counted",
        }


OVER_LABELS = {
    "dsc": "dsc",
    "iou": "iou",
    "nsd": "nsd",
    "hd95_penalised_mm": "hd95_pooled_mm",
    "assd_penalised_mm": "assd_pooled_mm",
}
"""Means over the labels of a case, and of what."""
IGNORED = 255
"""Stands for the ignore label among the 0 and 1 of a region."""
_SCOPE_CONVENTIONS = {
    "fg": "voxels whose reference label is not background",
    "union": "voxels whose reference label or most likely label is not background",
    "dilated": "foreground-labelled voxels and those within {dilation} voxels of one (box)",
    "crop": "smallest box around the voxels with a foreground probability above 0 or a foreground "
    "label: nnU-Net writes exact zeros outside its crop",
    "roi": "voxels of the mask that was given with the case",
    "all": "every voxel of the volume",
}


@dataclass(frozen=True)
class CaseResult:
    """Numbers of one case.

    Attributes:
        row: scalar results by key; per-class ones are ``metric/label``. NaN is undefined.
        calibration: sums over voxels by scope, of regions over the regions, too; empty without
            probabilities.
    """

    row: dict[str, float]
    calibration: dict[str, Tally] = field(default_factory=dict)


@dataclass(frozen=True)
class Structure:
    """What is compared as one: a label, or a region of several.

    Attributes:
        name: of the column.
        labels: values it consists of.
        channel: of the probabilities.
    """

    name: str
    labels: tuple[int, ...]
    channel: int


def evaluate_case(
    prediction: NDArray[Any],
    reference: NDArray[Any],
    *,
    spacing_mm: Sequence[float],
    structures: Sequence[Structure],
    probabilities: NDArray[Any] | None = None,
    regions: bool = False,
    ignore_index: int | None = None,
    roi: NDArray[np.bool_] | None = None,
    settings: Settings | None = None,
) -> CaseResult:
    """Evaluate a label map, and its probabilities if there are some.

    Args:
        prediction: integer ``(*S)``.
        reference: integer ``(*S)``.
        spacing_mm: voxel size along the axes of the arrays.
        structures: foreground labels or regions to report.
        probabilities: ``(K, *S)``, background first; with `regions` one channel per structure,
            which need not sum to one. None gives overlap and surface metrics only.
        regions: whether labels overlap in the probabilities.
        ignore_index: reference label that is left out of everything.
        roi: voxels of the scope ``roi``.
        settings: bins, thresholds and scopes; None takes the defaults.

    Raises:
        ValueError: arrays that do not fit each other, a scope ``roi`` without a mask.
    """
    settings = settings or Settings()
    if prediction.shape != reference.shape:
        raise ValueError(
            f"prediction {prediction.shape} and reference {reference.shape}: expected one shape"
        )
    valid = None if ignore_index is None else reference != ignore_index
    extent = np.asarray(spacing_mm) * reference.shape
    row: dict[str, float] = {"diagonal_mm": float(np.linalg.norm(extent))}
    boxes = label_boxes((prediction, reference), [k for one in structures for k in one.labels])
    for one in structures:
        box = _around([boxes[k] for k in one.labels])
        inside = None if valid is None else valid[box]
        row.update(_overlap(prediction[box], reference[box], one, spacing_mm, inside, settings))
    for key, metric in OVER_LABELS.items():
        scores = np.array([row[f"{metric}/{one.name}"] for one in structures])
        scores = np.where(np.isinf(scores), row["diagonal_mm"], scores)
        defined = scores[~np.isnan(scores)]
        row[key] = float(defined.mean()) if defined.size else np.nan
    if settings.compat == "marginloss":
        published = evaluate_case_marginloss(
            prediction, reference, probabilities=probabilities,
            labels={one.labels[0]: one.name for one in structures},
        )  # fmt: skip
        row.update({f"marginloss_{key}": value for key, value in published.items()})
    if probabilities is None:
        return CaseResult(row)
    masks = partial(_scopes, reference, probabilities, regions, ignore_index, roi, settings)
    if not regions:
        voxels = Voxels(probabilities, reference, masks(), ignore_index=ignore_index)
        values, tallies = _calibration(voxels, settings)
        return CaseResult({**row, **values}, tallies)
    scopes = dict(masks())
    total: dict[str, Tally] = {}
    rows = []
    for one in structures:
        inside = np.isin(reference, one.labels).astype(np.uint8)
        if valid is not None:
            inside[~valid] = IGNORED
        voxels = Voxels(
            probabilities[one.channel : one.channel + 1], inside, scopes,
            ignore_index=None if valid is None else IGNORED,
        )  # fmt: skip
        values, tallies = _calibration(voxels, settings)
        rows.append(values)
        row.update({f"{k}/{one.name}": v for k, v in values.items() if k.startswith("cece")})
        total = {k: total[k] + t if k in total else t for k, t in tallies.items()}
    row.update({k: float(np.mean([values[k] for values in rows])) for k in rows[0]})
    return CaseResult(row, total)


def _calibration(voxels: Voxels, settings: Settings) -> tuple[dict[str, float], dict[str, Tally]]:
    tallies = voxels.tally(bins=settings.bins, threshold=settings.tace_threshold)
    groups = voxels.equal_mass_groups(tallies, settings.bins)
    row: dict[str, float] = {}
    for scope, one in tallies.items():
        row[f"voxels_{scope}"] = float(one.voxels)
        found = one.metrics(settings.bins, groups[scope])
        row.update({f"{metric}_{scope}": value for metric, value in found.items()})
        if scope == "fg":
            row["tace_ref"] = one.tace_ref()
    return row, tallies


def _overlap(
    prediction: NDArray[Any],
    reference: NDArray[Any],
    structure: Structure,
    spacing_mm: Sequence[float],
    valid: NDArray[np.bool_] | None,
    settings: Settings,
) -> dict[str, float]:
    p, r = (
        x == structure.labels[0] if len(structure.labels) == 1 else np.isin(x, structure.labels)
        for x in (prediction, reference)
    )
    if valid is not None:
        p, r = p & valid, r & valid
    distances = surface_distances(p, r, spacing_mm=spacing_mm)
    dsc = dice(p.view(np.uint8), r.view(np.uint8), 1)
    name = structure.name
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
        f"assd_mean_of_means_mm/{name}": assd_of(distances, definition="mean_of_means"),
        f"nsd/{name}": nsd_of(distances, tolerance_mm=settings.nsd_tolerance_mm),
    }


def _around(boxes: list[Box]) -> Box:
    """Smallest box around boxes, of which those of absent labels are empty."""
    found = [box for box in boxes if all(s.stop > s.start for s in box)] or boxes[:1]
    return tuple(
        slice(min(s.start for s in sides), max(s.stop for s in sides))
        for sides in zip(*found, strict=True)
    )


def _scopes(
    reference: NDArray[Any],
    probabilities: NDArray[Any],
    regions: bool,
    ignore_index: int | None,
    roi: NDArray[np.bool_] | None,
    settings: Settings,
) -> Iterator[tuple[str, NDArray[np.bool_] | None]]:
    """Name and mask of each of the chosen scopes, one at a time; None is every voxel."""
    foreground = reference != 0
    if ignore_index is not None:
        foreground &= reference != ignore_index
    for key, scope in zip(settings.scopes, settings.chosen, strict=True):
        if scope == "fg":
            yield key, foreground
        elif scope == "union":
            if not regions:
                yield key, foreground | (predicted_classes(probabilities) != 0)
                continue
            union = foreground.copy()
            for channel in probabilities:
                union |= channel > 0.5
            yield key, union
        elif scope == "dilated":
            yield key, _near(foreground, settings.dilation)
        elif scope == "crop":
            used = foreground.copy()
            for channel in probabilities if regions else probabilities[1:]:
                used |= channel > 0
            used[label_boxes((used.view(np.uint8),), [1])[1]] = True
            yield key, used
        elif scope == "roi":
            if roi is None:
                raise ValueError("scope roi: no mask was given")
            yield key, roi
        else:
            yield key, None


def _near(mask: NDArray[np.bool_], reach: int) -> NDArray[np.bool_]:
    """Dilate by a box of `reach` voxels to every side."""
    near = np.zeros_like(mask)
    box = label_boxes((mask.view(np.uint8),), [1])[1]
    if not mask[box].size:
        return near
    around = tuple(
        slice(max(0, s.start - reach), min(n, s.stop + reach))
        for s, n in zip(box, mask.shape, strict=True)
    )
    part = mask[around]
    for axis in range(mask.ndim):  # a box is separable
        part = ndimage.maximum_filter1d(part, 2 * reach + 1, axis, mode="constant")
    near[around] = part
    return near

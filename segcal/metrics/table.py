"""Table of all reported numbers, with a row for each: its name, its meaning and its function.

Console, CSV, JSON, HTML, Markdown and LaTeX, and the definitions in them, come from these rows, in
this order. A new number of a label or region is a row of :data:`STRUCTURE`, a new calibration error
a row of :data:`CALIBRATION`; nothing else needs to change. A scope is a set of voxels over which
calibration is measured, such as all voxels or the voxels near a boundary. A pooled number is
computed from the voxels of all cases together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from segcal.binning import BinStatistics, mean_gap
from segcal.metrics.aurc import aurc, excess_aurc
from segcal.metrics.crps import crps_empirical, crps_gaussian
from segcal.metrics.dice import dice
from segcal.metrics.ece_floor import EceFloor
from segcal.metrics.hausdorff import assd_of, hausdorff_of, nsd_of
from segcal.metrics.isotonic_ece import isotonic_error
from segcal.metrics.rater_agreement import RaterSums
from segcal.metrics.soft_dice_confidence import soft_dice_of
from segcal.metrics.structure_sums import StructureSums
from segcal.metrics.volume_difference import volume_difference
from segcal.surface import SurfaceDistances, surface_distances
from segcal.tally import Tally

__all__ = [
    "BRIER_SOFT",
    "CALIBRATION",
    "CONFIDENCE",
    "ENERGY",
    "FLOOR",
    "PENALISED",
    "RATERS",
    "STRUCTURE",
    "CalibrationMetric",
    "ConfidenceMetric",
    "FloorMetric",
    "MaskPair",
    "Metric",
    "PenalisedMean",
    "RaterMetric",
    "ScopeMetric",
    "StructureMetric",
    "calibration_of",
    "top_risk",
]

Direction = Literal["higher", "lower"]
Groups = Sequence[BinStatistics]
"""Groups of equal mass: of the top label, then of every class."""
Where = Literal["everywhere", "cases", "pooled"]
IN_PIXELS = {"mm": "px", "ml": "1000 px"}
"""Units of images without a physical size, whose voxels have a size of 1 px."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Names of a reported number, and where it is printed.

    Attributes:
        key: its name in files, and the beginning of the names of its columns.
        meaning: its definition. ``{bins}``, ``{tace_threshold}``, ``{nsd_tolerance_mm}`` and
            ``{level}`` stand for the options of the evaluation, ``{unit}`` for the unit of lengths.
            Rows with the same meaning are defined together.
        heading: its readable name.
        brief: its name in the tables of the console, which have 80 columns; an empty name leaves it
            out there, unless it is asked for.
        shown: whether the tables of a report have it without being asked.
        unit: its unit; empty for a fraction of 1.
        digits: decimal places in the tables of a report.
        better: direction of the better values; None where neither direction is better.
        compared: whether a comparison of methods shows it first.
        in_cases: whether the report's table of cases has it.
        only_asked: whether it is left out, unless it is asked for, even where all are listed.
    """

    key: str
    meaning: str
    heading: str
    brief: str = ""
    shown: bool = True
    unit: str = ""
    digits: int = 4
    better: Direction | None = "lower"
    compared: bool = False
    in_cases: bool = False
    only_asked: bool = False

    def unit_of(self, length: str) -> str:
        """Unit where lengths are in ``mm``, or in ``px`` of images, which state no size."""
        return self.unit if length == "mm" else IN_PIXELS.get(self.unit, self.unit)

    @property
    def names(self) -> set[str]:
        """Names by which a user can ask for it, in small letters."""
        key = self.key.removesuffix(f"_{self.unit}")
        return {self.key, key, self.heading.lower(), self.heading.lower().replace(" ", "_")}

    def is_shown(self, asked: Collection[str] | None) -> bool:
        """Whether a table has it.

        Args:
            asked: keys that are asked for; None asks for what every table has.
        """
        return self.shown if asked is None else self.key in asked


@dataclass(frozen=True)
class MaskPair:
    """Predicted and reference mask of a label or region, from which its numbers are computed.

    Attributes:
        prediction: bool ``(*S)``.
        reference: bool, same shape.
        spacing_mm: voxel size along the axes.
        nsd_tolerance_mm: distance up to which surfaces agree in the normalised surface distance.
    """

    prediction: NDArray[np.bool_]
    reference: NDArray[np.bool_]
    spacing_mm: Sequence[float]
    nsd_tolerance_mm: float = 2.0

    @cached_property
    def distances(self) -> SurfaceDistances:
        """Directed distances between the surfaces, computed once."""
        return surface_distances(self.prediction, self.reference, spacing_mm=self.spacing_mm)

    @cached_property
    def dsc(self) -> float:
        """Dice similarity coefficient, computed once."""
        return dice(self.prediction.view(np.uint8), self.reference.view(np.uint8), 1)


@dataclass(frozen=True, kw_only=True)
class StructureMetric(Metric):
    """A number of one label or region.

    Attributes:
        function: computes it; NaN stands for undefined, inf for a miss or a false alarm.
        distance: whether it can be infinite; a summary then counts misses and false alarms, and
            takes the mean over the rest.
        mean_of_labels: whether a case has its mean over the labels, under the same key.
    """

    function: Callable[[MaskPair], float]
    distance: bool = False
    mean_of_labels: bool = False


@dataclass(frozen=True, kw_only=True)
class PenalisedMean(Metric):
    """Mean of a distance over the labels of a case, where a miss costs the image diagonal.

    Attributes:
        of: key of the distance.
    """

    of: str


@dataclass(frozen=True, kw_only=True)
class ConfidenceMetric(Metric):
    """A number of one label or region that needs no reference.

    Attributes:
        function: computes it; NaN stands for undefined.
    """

    function: Callable[[StructureSums], float]


@dataclass(frozen=True, kw_only=True)
class RaterMetric(Metric):
    """A number of one label or region that several raters drew.

    Attributes:
        function: computes it; NaN stands for undefined.
        of_probabilities: whether it needs probabilities and is undefined for a label map.
    """

    function: Callable[[RaterSums], float]
    of_probabilities: bool = False


@dataclass(frozen=True, kw_only=True)
class ScopeMetric(Metric):
    """A number of the voxels of a scope.

    Attributes:
        where: ``cases`` reports it only for each case, ``pooled`` only for all voxels together.
        scope: the one scope that it is reported for, which its column does not name; None reports
            it for every scope.
        show_pooled: whether tables also show it for all voxels together.
    """

    where: Where = "everywhere"
    scope: str | None = None
    show_pooled: bool = False

    def column(self, scope: str) -> str:
        """Name of its column for a scope."""
        return self.key if self.scope else f"{self.key}_{scope}"

    @property
    def ways(self) -> list[bool]:
        """Its columns or lines in a table: False for the cases, True for all voxels together."""
        if self.where == "pooled":
            return [True]
        return [False, True] if self.show_pooled and self.where == "everywhere" else [False]

    def is_of(self, scope: str, *, pooled: bool = False) -> bool:
        """Whether it is reported for a scope, for each case or for all voxels together."""
        return self.scope in (None, scope) and self.where in (
            "everywhere",
            "pooled" if pooled else "cases",
        )


@dataclass(frozen=True, kw_only=True)
class CalibrationMetric(ScopeMetric):
    """A number of the voxels of a scope that follows from their sums.

    Attributes:
        function: computes it from the sums over the voxels and their groups of equal mass; NaN
            stands for undefined.
    """

    function: Callable[[Tally, Groups], float]


@dataclass(frozen=True, kw_only=True)
class FloorMetric(ScopeMetric):
    """A number of all voxels of a scope together that follows from how the cases differ.

    Attributes:
        function: computes it from the floor of ECE; NaN stands for undefined.
    """

    function: Callable[[EceFloor], float]
    where: Where = "pooled"


def calibration_of(
    tally: Tally,
    metrics: Iterable[CalibrationMetric],
    *,
    groups: int,
    exact: Groups | None = None,
) -> dict[str, float]:
    """Calibration numbers by key; fractions of 1, NLL in nats, NaN without voxels.

    Args:
        tally: sums over the voxels from which the numbers are computed.
        metrics: which numbers.
        groups: how many groups of equal mass AECE and TACE have.
        exact: the groups, as from :meth:`segcal.tally.Voxels.equal_mass_groups`. None takes them
            from the cells of the tally, which moves a probability by at most the width of a cell.
    """
    cut = exact or tally.equal_mass_groups(groups)
    return {metric.key: metric.function(tally, cut) for metric in metrics}


STRUCTURE: tuple[StructureMetric, ...] = (
    StructureMetric(
        key="dsc",
        heading="DSC",
        brief="DSC",
        meaning="2|P&G|/(|P|+|G|); undefined where the label is in neither map, 0 if in one",
        better="higher",
        digits=3,
        function=lambda pair: pair.dsc,
        mean_of_labels=True,
        compared=True,
        in_cases=True,
    ),
    StructureMetric(
        key="iou",
        heading="IoU",
        meaning="|P&G|/|P or G|; undefined where the label is in neither map",
        better="higher",
        digits=3,
        function=lambda pair: pair.dsc / (2 - pair.dsc),
        mean_of_labels=True,
    ),
    StructureMetric(
        key="hd_mm",
        heading="HD",
        brief="HD",
        meaning="largest surface distance, {unit}; infinite for a miss or a false alarm",
        unit="mm",
        digits=2,
        function=lambda pair: hausdorff_of(pair.distances),
        distance=True,
    ),
    StructureMetric(
        key="hd95_pooled_mm",
        heading="HD95",
        brief="HD95",
        meaning="95th percentile of the distances of both directions together (medpy)",
        unit="mm",
        digits=2,
        function=lambda pair: hausdorff_of(pair.distances, percentile=95),
        distance=True,
    ),
    StructureMetric(
        key="hd95_max_directed_mm",
        heading="HD95 max-directed",
        shown=False,
        meaning="larger of the two directions' 95th percentiles (MONAI)",
        unit="mm",
        digits=2,
        function=lambda pair: hausdorff_of(
            pair.distances, percentile=95, definition="max_directed"
        ),
        distance=True,
    ),
    StructureMetric(
        key="assd_pooled_mm",
        heading="ASSD",
        brief="ASSD",
        meaning="mean of the distances of both directions together (medpy)",
        unit="mm",
        digits=2,
        function=lambda pair: assd_of(pair.distances),
        distance=True,
    ),
    StructureMetric(
        key="assd_mean_of_means_mm",
        heading="ASSD mean of means",
        shown=False,
        meaning="mean of the two directions' mean distances",
        unit="mm",
        digits=2,
        function=lambda pair: assd_of(pair.distances, definition="mean_of_means"),
        distance=True,
    ),
    StructureMetric(
        key="nsd",
        heading="NSD",
        meaning="share of both surfaces within {nsd_tolerance_mm:g} {unit} of the other, by "
        "surface voxels; 0 where one mask is empty",
        better="higher",
        digits=3,
        function=lambda pair: nsd_of(pair.distances, tolerance_mm=pair.nsd_tolerance_mm),
        mean_of_labels=True,
    ),
    StructureMetric(
        key="volume_difference_ml",
        heading="volume difference",
        meaning="predicted minus reference volume",
        unit="ml",
        digits=2,
        better=None,
        function=lambda pair: volume_difference(
            pair.prediction, pair.reference, spacing_mm=pair.spacing_mm
        ),
    ),
)
"""Numbers of every label or region."""

_PENALISED = (
    "mean of HD95 or ASSD (pooled) over the labels of a case, where a miss or a false "
    "alarm counts as the image diagonal"
)
PENALISED: tuple[PenalisedMean, ...] = (
    PenalisedMean(
        key="hd95_penalised_mm",
        of="hd95_pooled_mm",
        heading="HD95 penalised",
        brief="HD95 pen.",
        meaning=_PENALISED,
        unit="mm",
        digits=2,
        compared=True,
    ),
    PenalisedMean(
        key="assd_penalised_mm",
        of="assd_pooled_mm",
        heading="ASSD penalised",
        shown=False,
        meaning=_PENALISED,
        unit="mm",
        digits=2,
    ),
)
"""Means over the labels of a case, where a miss or a false alarm counts as the image diagonal."""

TIE = 0.1
"""Largest difference of a probability and its strongest rival at which a voxel is undecided."""

CONFIDENCE: tuple[ConfidenceMetric, ...] = (
    ConfidenceMetric(
        key="soft_dice_confidence",
        heading="soft Dice confidence",
        meaning="DSC expected of the mask M by the probabilities p, 2 sum_M p/(sum p + |M|)",
        better="higher",
        digits=3,
        function=lambda sums: soft_dice_of(sums.in_mask, sums.total, sums.mask_voxels),
    ),
    ConfidenceMetric(
        key="volume_ml",
        heading="expected volume",
        meaning="sum p, times the size of a voxel",
        unit="ml",
        digits=2,
        better=None,
        function=lambda sums: sums.total * sums.voxel_ml,
    ),
    ConfidenceMetric(
        key="volume_low_ml",
        heading="from",
        meaning="lower end of the interval of the volume",
        unit="ml",
        digits=2,
        better=None,
        function=lambda sums: sums.range_ml[0],
    ),
    ConfidenceMetric(
        key="volume_high_ml",
        heading="to",
        meaning="upper end of the interval of the volume",
        unit="ml",
        digits=2,
        better=None,
        function=lambda sums: sums.range_ml[1],
    ),
    ConfidenceMetric(
        key="mask_volume_ml",
        heading="volume of the mask",
        meaning="voxels of the mask, times their size",
        unit="ml",
        digits=2,
        better=None,
        function=lambda sums: sums.mask_voxels * sums.voxel_ml,
    ),
    ConfidenceMetric(
        key="volume_sd_ml",
        heading="independent SD",
        shown=False,
        meaning="sqrt(sum p(1-p)), the standard deviation of the volume if voxels erred "
        "independently; it is far too small by itself, but fitted intervals are multiples of it",
        unit="ml",
        digits=2,
        better=None,
        function=lambda sums: math.sqrt(sums.variance) * sums.voxel_ml,
    ),
    ConfidenceMetric(
        key="volume_swing",
        heading="volume swing",
        meaning="share of the mask's volume by which it would shrink or grow, whichever is more, "
        "if the undecided voxels went the other way",
        digits=3,
        function=lambda sums: sums.volume_swing,
    ),
    ConfidenceMetric(
        key="undecided_share",
        heading="undecided",
        meaning="share of undecided voxels among those in the mask or undecided; a voxel is "
        f"undecided if p and its strongest rival (for a region: 1 - p) differ by {TIE:g} or less",
        digits=3,
        function=lambda sums: sums.undecided_share,
    ),
    ConfidenceMetric(
        key="shell_entropy",
        heading="entropy in the shell",
        meaning="mean binary entropy of p, in bits, over the voxels whose 3^d patch is partly in "
        "the mask",
        digits=3,
        function=lambda sums: sums.shell_entropy,
    ),
    ConfidenceMetric(
        key="largest_probability",
        heading="largest p",
        meaning="largest p of all voxels; an empty mask is right with at most the probability "
        "1 minus this",
        digits=3,
        better=None,
        function=lambda sums: sums.largest,
    ),
)
"""Numbers of every label or region from its probabilities alone."""

_MURPHY = (
    "parts of brier over the bins (Murphy), summed over the classes; a small reliability and a "
    "large resolution are good"
)
CALIBRATION: tuple[CalibrationMetric, ...] = (
    CalibrationMetric(
        key="accuracy",
        heading="accuracy",
        shown=False,
        meaning="share of voxels whose most likely label is right",
        better="higher",
        function=lambda tally, groups: _share(float(tally.top.hit_sum.sum()), tally),
    ),
    CalibrationMetric(
        key="ece",
        heading="ECE",
        brief="ECE",
        meaning="top label, sum of n_m/n |accuracy - confidence|, fraction of 1",
        function=lambda tally, groups: tally.top.expected_error(),
        show_pooled=True,
        compared=True,
        in_cases=True,
    ),
    CalibrationMetric(
        key="over",
        heading="over",
        meaning="part of ece from bins whose confidence is above their accuracy",
        function=lambda tally, groups: tally.top.overconfidence(),
    ),
    CalibrationMetric(
        key="under",
        heading="under",
        meaning="part of ece from bins whose confidence is below their accuracy",
        function=lambda tally, groups: tally.top.underconfidence(),
    ),
    CalibrationMetric(
        key="aece",
        heading="AECE",
        meaning="ece over {bins} groups of equally many voxels; ties are shared in proportion",
        function=lambda tally, groups: groups[0].expected_error(),
    ),
    CalibrationMetric(
        key="ace",
        heading="ACE",
        meaning="mean |accuracy - confidence| of the non-empty bins",
        function=lambda tally, groups: tally.top.average_error(),
    ),
    CalibrationMetric(
        key="mce",
        heading="MCE",
        meaning="largest |accuracy - confidence| of a non-empty bin",
        function=lambda tally, groups: tally.top.maximum_error(),
    ),
    CalibrationMetric(
        key="cece",
        heading="CECE",
        brief="CECE",
        meaning="classwise ECE, mean over all classes, background included",
        function=lambda tally, groups: float(
            np.mean([one.expected_error() for one in tally.classes])
        ),
    ),
    CalibrationMetric(
        key="tace",
        heading="TACE",
        brief="TACE",
        meaning="mean gap of the {bins} equal-mass ranges of each class, p > {tace_threshold:g} "
        "(Nixon)",
        function=lambda tally, groups: mean_gap(groups[1:]),
        compared=True,
        in_cases=True,
    ),
    CalibrationMetric(
        key="nll",
        heading="NLL",
        brief="NLL",
        meaning="mean -log p of the label, nats, p floored at 1e-12",
        function=lambda tally, groups: _share(tally.nll_sum, tally),
        in_cases=True,
    ),
    CalibrationMetric(
        key="brier",
        heading="Brier",
        brief="Brier",
        meaning="mean over voxels of the squared error summed over classes, 0 to 2",
        function=lambda tally, groups: _share(tally.brier_sum, tally),
    ),
    CalibrationMetric(
        key="brier_reliability",
        heading="Brier reliability",
        shown=False,
        meaning=_MURPHY,
        function=lambda tally, groups: sum(one.murphy().reliability for one in tally.classes),
    ),
    CalibrationMetric(
        key="brier_resolution",
        heading="Brier resolution",
        shown=False,
        meaning=_MURPHY,
        better="higher",
        function=lambda tally, groups: sum(one.murphy().resolution for one in tally.classes),
    ),
    CalibrationMetric(
        key="aurc",
        heading="AURC",
        meaning="share of wrong voxels among the most confident ones, averaged over how many are "
        "kept; confidence in 2^16 cells, mean over all orders of ties; 1 - accuracy if confidence "
        "tells nothing",
        function=lambda tally, groups: _selective(aurc, tally),
    ),
    CalibrationMetric(
        key="aurc_excess",
        heading="excess AURC",
        meaning="aurc minus the aurc of the ideal order, in which all wrong voxels come last",
        function=lambda tally, groups: _selective(excess_aurc, tally),
    ),
    CalibrationMetric(
        key="aece_bound",
        heading="AECE bound",
        shown=False,
        meaning="how far the pooled aece can be from the aece of unrounded probabilities",
        function=lambda tally, groups: tally.top_mass.error_bound(len(groups[0].count)),
        where="pooled",
    ),
    CalibrationMetric(
        key="ece_isotonic",
        heading="ECE without bins",
        meaning="top label, mean |c - confidence|, where c is the increasing curve that best fits "
        "whether the label is right (isotonic regression); compared with the pooled ece it shows "
        "how much the choice of bins matters",
        function=lambda tally, groups: isotonic_error(tally.top_mass.statistics),
        where="pooled",
    ),
)
"""Numbers of the voxels of every scope."""

FLOOR: tuple[FloorMetric, ...] = (
    FloorMetric(
        key="ece_floor",
        heading="ECE floor",
        meaning="pooled ece that calibrated probabilities would have here by chance: mean of a "
        "wild bootstrap over cases, at least the value for independent voxels; too low with fewer "
        "than 10 cases",
        better=None,
        function=lambda floor: floor.expected,
    ),
    FloorMetric(
        key="ece_floor_q95",
        heading="ECE floor, 95 %",
        meaning="95 % quantile of the distribution whose mean is ece_floor",
        better=None,
        function=lambda floor: floor.q95,
    ),
    FloorMetric(
        key="ece_p",
        heading="p if calibrated",
        meaning="share of calibrated data with at least this pooled ece, by drawing the signs of "
        "the cases' gaps; never below 2^(1 - cases). Voxels chosen by their label (fg, union) are "
        "not calibrated even for true probabilities",
        better=None,
        function=lambda floor: floor.p,
    ),
    FloorMetric(
        key="ece_floor_independent",
        heading="ECE floor, independent",
        shown=False,
        meaning="ece_floor if voxels were independent",
        better=None,
        function=lambda floor: floor.independent,
    ),
    FloorMetric(
        key="ece_effective_share",
        heading="effective share",
        shown=False,
        meaning="share of the voxels that would give ece_floor if they were independent",
        better=None,
        function=lambda floor: floor.effective_share,
    ),
)
"""How large the pooled ECE of calibrated probabilities would be."""


RATERS: tuple[RaterMetric, ...] = (
    RaterMetric(
        key="dsc_agreed",
        heading="DSC where raters agree",
        meaning="DSC over the voxels that all raters, or no rater, put in the label",
        better="higher",
        digits=3,
        function=lambda sums: sums.dsc_agreed,
    ),
    RaterMetric(
        key="p_agreed",
        heading="p where raters agree",
        meaning="mean probability of the label where all raters see it",
        better="higher",
        digits=3,
        function=lambda sums: sums.p_agreed,
        of_probabilities=True,
    ),
    RaterMetric(
        key="confidence_disagreed",
        heading="confidence where they do not",
        meaning="mean of max(p, 1 - p) where raters disagree on the label",
        digits=3,
        better=None,
        function=lambda sums: sums.confidence_disagreed,
        of_probabilities=True,
    ),
    RaterMetric(
        key="gap_disagreed",
        heading="gap to their share",
        meaning="mean of |p - share of the raters that see the label| where they disagree",
        digits=3,
        function=lambda sums: sums.gap_disagreed,
        of_probabilities=True,
    ),
    RaterMetric(
        key="crps_raters_ml",
        heading="CRPS",
        meaning="CRPS of the expected volume (sum of p) against the raters' volumes, with equal "
        "weights, exact",
        unit="ml",
        digits=2,
        function=lambda sums: sums.voxel_ml * crps_empirical(sums.volumes, sums.total),
    ),
    RaterMetric(
        key="crps_gaussian_ml",
        heading="CRPS, Gaussian",
        meaning="CRPS of the expected volume against a normal distribution with the mean and SD "
        "(population) of the raters' volumes, closed form",
        unit="ml",
        digits=2,
        function=lambda sums: (
            sums.voxel_ml
            * crps_gaussian(float(sums.volumes.mean()), float(sums.volumes.std()), sums.total)
        ),
    ),
    RaterMetric(
        key="crps_forecast_ml",
        heading="CRPS of the forecast",
        shown=False,
        meaning="CRPS of a normal forecast with the expected volume and its SD if voxels err "
        "independently, mean over the raters",
        unit="ml",
        digits=2,
        function=lambda sums: (
            sums.voxel_ml
            * float(
                np.mean(
                    [
                        crps_gaussian(sums.total, max(sums.variance, 0.0) ** 0.5, float(v))
                        for v in sums.volumes
                    ]
                )
            )
        ),
        of_probabilities=True,
    ),
)
"""Numbers of every label or region of cases that several raters labelled."""

ENERGY = Metric(
    key="energy_distance",
    heading="energy distance",
    meaning="squared generalised energy distance of the samples and the raters, d = 1 - IoU; 0 for "
    "the same masks, slightly above 0 for few masks of the same distribution",
    digits=3,
)
"""Number of a label or region for which there are samples."""

BRIER_SOFT = ScopeMetric(
    key="brier_soft",
    heading="Brier, soft labels",
    meaning="mean squared distance to the shares of the raters, summed over classes; equals brier, "
    "which is averaged over the raters, minus the disagreement among the raters",
    where="cases",
)
"""Number of a scope of cases that several raters labelled."""


def top_risk(tally: Tally) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Confidence, loss and count of the voxels of a tally: right voxels, then wrong voxels."""
    cells = tally.top_mass.statistics
    used = cells.count > 0
    right, count = cells.hit_sum[used], cells.count[used]
    entries = np.concatenate([right, count - right])
    loss = np.repeat([0, 1], len(count))
    return np.tile(cells.confidence[used], 2), loss, entries


def _selective(area: Callable[..., float], tally: Tally) -> float:
    confidence, loss, counts = top_risk(tally)
    return area(confidence, loss, counts=counts)


def _share(total: float, tally: Tally) -> float:
    """Total per voxel; NaN without voxels."""
    return total / tally.voxels if tally.voxels else float("nan")

"""Evaluates many cases: takes paired files, and returns a table with a row per case."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import pandas as pd

from segcal.binning import BinStatistics
from segcal.evaluation.case import CaseResult, evaluate_case
from segcal.evaluation.confidence import confidence_row
from segcal.evaluation.early import EarlyCounts
from segcal.evaluation.engine import run
from segcal.evaluation.raters import rater_row
from segcal.evaluation.reading import CaseArrays, read_case
from segcal.evaluation.settings import EvaluationSettings
from segcal.evaluation.store import CaseOutcome, Store
from segcal.io.label_sets import LabelSet
from segcal.io.pairing import Case, Pairing
from segcal.metrics.ece_floor import EceFloor, floor_over_cases
from segcal.tally import Tally
from segcal.threads import in_threads


@dataclass
class Cohort:
    """Results of all cases that could be evaluated.

    Attributes:
        rows: one row per case, indexed by case name; columns as in
            :class:`segcal.evaluation.case.CaseResult`.
        calibration: sums over the voxels of all cases, by scope (selection of voxels).
        failed: why a case could not be evaluated, by name.
        notes: anything unusual about a case that was evaluated, by name.
        pairing: which predictions and references were matched.
        interrupted: whether the user stopped before the last case.
        reliability: bins of the top label (the most likely class) of every case with
            probabilities, by scope.
    """

    rows: pd.DataFrame
    calibration: dict[str, Tally]
    failed: dict[str, str]
    notes: dict[str, list[str]]
    pairing: Pairing
    interrupted: bool = False
    reliability: dict[str, list[BinStatistics]] = field(default_factory=dict)

    @property
    def calibrated(self) -> pd.Series[bool]:
        """Which cases have probabilities; at least one must."""
        return self.rows[f"voxels_{next(iter(self.calibration))}"].notna()

    @cached_property
    def floors(self) -> dict[str, EceFloor]:
        """ECE of all voxels together by scope, and its value if they were perfectly calibrated."""

        def floor(scope: str) -> EceFloor:
            cells = self.calibration[scope].top_mass.statistics
            return floor_over_cases(cells, self.reliability[scope])

        scopes = list(self.calibration)
        return dict(zip(scopes, in_threads(floor, scopes), strict=True))

    @property
    def label_names(self) -> list[str]:
        """Foreground labels with results, in the order of the table."""
        return [c.removeprefix("dsc/") for c in self.rows.columns if c.startswith("dsc/")]


def evaluate_cohort(
    pairing: Pairing,
    *,
    label_set: LabelSet | None = None,
    reader: str | None = None,
    settings: EvaluationSettings | None = None,
    jobs: int = 1,
    engine: Callable[..., Generator[tuple[int, CaseOutcome]]] = run,
    store: Store | None = None,
    progress: Callable[[Case], None] = lambda case: None,
) -> Cohort:
    """Evaluate every case; a case that fails is noted and does not stop the others.

    After Ctrl-C, the cases that are done are returned. The result does not depend on `jobs`,
    `engine`, or on which results come from the store. Memory grows only by a row of numbers per
    case.

    Args:
        pairing: cases to evaluate.
        label_set: names and ignore label; None names labels by their value.
        reader: see :func:`segcal.io.probabilities.read_probabilities`.
        settings: bins, thresholds, scopes and tolerance.
        jobs: number of processes.
        engine: called like :func:`segcal.evaluation.engine.run` to run the cases.
        store: keeps results of cases until all are done, and returns results it already has.
        progress: called after each case.
    """
    measure = partial(
        evaluate_files, label_set=label_set, reader=reader,
        settings=settings or EvaluationSettings(),
    )  # fmt: skip
    return run_cases(pairing, measure, jobs=jobs, engine=engine, store=store, progress=progress)


def run_cases(
    pairing: Pairing,
    measure: Callable[..., CaseResult],
    *,
    jobs: int = 1,
    engine: Callable[..., Generator[tuple[int, CaseOutcome]]] = run,
    store: Store | None = None,
    progress: Callable[[Case], None] = lambda case: None,
) -> Cohort:
    """Measure every case with any function, as :func:`evaluate_cohort` does.

    Args:
        pairing: cases to measure.
        measure: takes a case and ``note``; raises ValueError if a case cannot be measured. It can
            be pickled.
        jobs: number of processes.
        engine: called like :func:`segcal.evaluation.engine.run` to run the cases.
        store: keeps results of cases until all are done, and returns results it already has.
        progress: called after each case.
    """
    one = partial(_outcome, measure=measure)
    known = [store is not None and store.holds(case) for case in pairing.cases]
    unknown = [case for case, there in zip(pairing.cases, known, strict=True) if not there]
    fresh = engine(one, unknown, lost=lost, jobs=jobs)
    cohort = Cohort(pd.DataFrame(), {}, {}, {}, pairing)
    rows: dict[str, dict[str, float]] = {}
    try:
        for case, there in zip(pairing.cases, known, strict=True):
            outcome = store.load(case) if store is not None and there else None
            if outcome is None:  # or what is stored is damaged
                outcome = one(case) if there else next(fresh)[1]
                if store is not None:
                    store.save(case, outcome)
            _add(cohort, rows, case.name, outcome)
            progress(case)
    except KeyboardInterrupt:
        cohort.interrupted = True
    finally:
        fresh.close()
    cohort.rows = pd.DataFrame.from_dict(rows, orient="index")
    cohort.rows.index.name = "case"
    if cohort.calibration:
        for name in cohort.rows.index[~cohort.calibrated]:
            cohort.notes.setdefault(name, []).append(
                "is a label map, so it is left out of the calibration errors"
            )
    return cohort


def _add(
    cohort: Cohort, rows: dict[str, dict[str, float]], name: str, outcome: CaseOutcome
) -> None:
    if outcome.notes:
        cohort.notes[name] = outcome.notes
    if isinstance(outcome.result, str):
        cohort.failed[name] = outcome.result
        return
    pooled = cohort.calibration
    for scope, arrays in outcome.calibration.items():
        one = Tally.from_arrays(arrays)
        if scope in pooled and one.num_classes != pooled[scope].num_classes:
            cohort.failed[name] = (
                f"has {one.num_classes} classes where the cases before have "
                f"{pooled[scope].num_classes}; give the dataset.json that says what they are"
            )
            return
        pooled[scope] = pooled[scope] + one if scope in pooled else one
        cohort.reliability.setdefault(scope, []).append(one.top)
    rows[name] = outcome.result


def _outcome(case: Case, *, measure: Callable[..., CaseResult]) -> CaseOutcome:
    notes: list[str] = []
    try:
        result = measure(case, note=notes.append)
    except ValueError as error:
        return CaseOutcome(str(error), [])
    except Exception as error:  # noqa: BLE001 - hours of other cases must not be lost
        return CaseOutcome(f"{case.prediction}: {type(error).__name__}: {error}", [])
    return CaseOutcome(result.row, notes, {k: t.to_arrays() for k, t in result.calibration.items()})


def _of_raters(arrays: CaseArrays, settings: EvaluationSettings) -> dict[str, float]:
    """Numbers that only a case with several raters has."""
    reference, spacing = arrays.reference.array, arrays.reference.geometry.spacing_mm
    valid = None if arrays.ignore_index is None else reference != arrays.ignore_index
    row = rater_row(
        arrays.prediction, arrays.raters, structures=arrays.structures, spacing_mm=spacing,
        probabilities=arrays.probabilities, samples=arrays.samples, valid=valid,
    )  # fmt: skip
    if settings.compat == "curvas" and arrays.probabilities is not None:
        from segcal.reproduction.curvas import evaluate_case_curvas  # which needs torch

        published = evaluate_case_curvas(
            arrays.prediction, arrays.raters, arrays.probabilities,
            labels={one.labels[0]: one.name for one in arrays.structures},
            voxel_mm3=float(np.prod(spacing)), roi=arrays.roi,
        )  # fmt: skip
        row.update({f"curvas_{key}": value for key, value in published.items()})
    return row


def lost(case: Case, why: str) -> CaseOutcome:
    """Outcome of a case that has no result."""
    return CaseOutcome(f"{case.prediction}: {why}", [])


def evaluate_files(
    case: Case,
    label_set: LabelSet | None,
    *,
    settings: EvaluationSettings,
    reader: str | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> CaseResult:
    """Read one case and evaluate it.

    Args:
        case: files to read.
        label_set: names and ignore label; None names labels by their value.
        settings: bins, thresholds, scopes and tolerance.
        reader: see :func:`segcal.io.probabilities.read_probabilities`.
        note: called with a sentence on anything unusual, and how it was read.

    Raises:
        ValueError: names the file and what is wrong with it.
    """
    with EarlyCounts(settings) as early:
        arrays = read_case(
            case, label_set, tolerance=settings.tolerance, reader=reader,
            threshold=settings.threshold, arrived=early.arrived if early.possible else None,
            note=note,
        )  # fmt: skip
        geometry = arrays.reference.geometry
        result = evaluate_case(
            arrays.prediction,
            arrays.reference.array,
            spacing_mm=geometry.spacing_mm,
            structures=arrays.structures,
            probabilities=arrays.probabilities,
            regions=arrays.regions,
            ignore_index=arrays.ignore_index,
            roi=arrays.roi,
            raters=arrays.raters,
            most_likely=arrays.most_likely,
            counted=partial(early.voxels, arrays.probabilities),
            settings=settings,
        )
    row = {f"spacing_{a}_mm": s for a, s in zip("zyx", geometry.spacing_mm, strict=True)}
    row.update(result.row)
    if arrays.probabilities is not None:
        reference, ignored = arrays.reference.array, arrays.ignore_index
        row |= confidence_row(
            arrays.probabilities, arrays.prediction, structures=arrays.structures,
            spacing_mm=geometry.spacing_mm, regions=arrays.regions,
            valid=None if ignored is None else reference != ignored, level=settings.level,
        )  # fmt: skip
    if arrays.raters:
        row |= _of_raters(arrays, settings)
    return replace(result, row=row)

"""Which repair helps: every method cross-validated over cases, and against cases from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from segcal.binning import BinStatistics
from segcal.evaluation.api import Comparison, Report, Runner, comparison_of
from segcal.evaluation.case import evaluate_mask, evaluate_probabilities
from segcal.evaluation.cohort import Cohort
from segcal.evaluation.compare import compare, paired
from segcal.evaluation.engine import default_jobs, run
from segcal.evaluation.job import Job
from segcal.evaluation.summary import summarise
from segcal.io.pairing import Case
from segcal.posthoc.calibrator import Calibrator, PointwiseCalibrator, SampledCalibrator
from segcal.posthoc.decision import Rule, decide
from segcal.posthoc.rows import Rows
from segcal.recipes import names
from segcal.repair.fitting import (
    build_calibrator,
    channels_of,
    collect,
    numbered,
    owners,
)
from segcal.repair.inputs import CaseLogits, read_case_logits
from segcal.tally import Tally

__all__ = [
    "UNCALIBRATED",
    "Entry",
    "Recommendation",
    "Repair",
    "compare_methods",
    "planned_steps",
    "recommend",
]

UNCALIBRATED = "uncalibrated"
"""Name of the predictions without a repair."""
FOLDS = 5
MOST_LOST = 0.002
"""Of DSC, that a method may lose."""
LEVEL = 0.05
"""Of the tests, over all questions."""
FEWEST = 5
"""Patients below which nothing is recommended."""
SIMPLEST = (
    "temperature", "class_region", "vector", "class_region_bias", "beta", "histogram", "isotonic",
    "matrix", "dirichlet", "local",
)  # fmt: skip
"""Methods from the simplest on."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """A row of the comparison: a method, and how its label map is decided.

    Attributes:
        name: of the row.
        method: name of its config; empty for the predictions as they are.
        decision: ``argmax`` or ``dice``.
    """

    name: str
    method: str = ""
    decision: Rule = "argmax"


@dataclass(frozen=True)
class Recommendation:
    """What to do.

    Attributes:
        method: name of its config; None recommends none.
        reasons: sentences that say why.
    """

    method: str | None
    reasons: list[str]


@dataclass(frozen=True)
class Repair:
    """How methods compare.

    Attributes:
        entries: rows, the predictions as they are first.
        comparison: cross-validated over the cases.
        recommendation: from it.
        test: of methods that were fitted to all of the cases, on others; or None.
        facts: of those fits, by method.
        patients: number of groups of cases that the folds and intervals are of.
        folds: of the cross-validation.
    """

    entries: list[Entry]
    comparison: Comparison
    recommendation: Recommendation
    test: Comparison | None
    facts: dict[str, dict[str, Any]]
    patients: int
    folds: int


def compare_methods(
    job: Job,
    *,
    methods: Sequence[str] | None = None,
    test: Job | None = None,
    patients: str | None = None,
    resamples: int = 2000,
    processes: int | None = None,
    runner: Runner = run,
    collected: Progress = lambda name: None,
    fitted: Progress = lambda name: None,
    evaluated: Progress = lambda name: None,
) -> Repair:
    """Fit every method to some of the cases and evaluate it on the others, each case once.

    Args:
        job: validation cases; see :func:`segcal.repair.fitting.plan_fit`.
        methods: names of configs; None takes all that fit so many classes.
        test: cases from elsewhere, on which methods fitted to all validation cases are evaluated.
        patients: see :func:`segcal.repair.fitting.owners`; cases of one patient are never parted
            and count as one.
        resamples: of the bootstrap over patients.
        processes: cases at the same time; None takes one a core, of four cases or more each.
        runner: see :func:`segcal.evaluation.api.runner_of`.
        collected: called with the name of each case whose voxels were read.
        fitted: called with the name of each method that was fitted to a fold.
        evaluated: called with the name of each case that was evaluated.

    Raises:
        ValueError: an unknown method, a file that cannot be read, fewer than two patients, a
            pattern that does not find a patient in every name.
    """
    chosen = _chosen(job, methods)
    entries = _entries(chosen)
    owner, fold_of = _parted(job, patients)
    folds = max(fold_of) + 1
    options = {"processes": processes, "runner": runner, "progress": collected}
    fits = _Fits.of(chosen, job, numbered(owner), **options)
    by_fold = []
    for fold in range(folds):
        cases = [i for i, of in enumerate(fold_of) if of != fold]
        by_fold.append(fits.to_cases(cases, fitted))
    calibrators = [by_fold[fold] for fold in fold_of]
    form = _Evaluation(entries, resamples, processes, runner, evaluated)
    comparison = form.of(job, calibrators)
    whole = fits.to_cases(range(len(owner)), fitted) if test is not None else {}
    on_test = None if test is None else form.of(test, [whole] * len(test.pairing.cases))
    grouped = _by_patient(comparison, job, patients)
    return Repair(
        entries,
        _over_patients(comparison, job, patients, resamples),
        _with_notes(recommend(grouped, entries, _near(job)), by_fold),
        None
        if on_test is None or test is None
        else _over_patients(on_test, test, patients, resamples),
        {method: dict(one.facts) for method, one in whole.items()},
        len(set(owner)),
        folds,
    )


def _with_notes(
    advice: Recommendation, by_fold: Sequence[Mapping[str, Calibrator]]
) -> Recommendation:
    """The advice with what was odd about the fits of the method."""
    if advice.method is None:
        return advice
    notes = dict.fromkeys(n for of in by_fold for n in of[advice.method].facts["notes"])
    return replace(advice, reasons=[*advice.reasons, *(f"{advice.method}: {n}." for n in notes)])


def planned_steps(
    job: Job, methods: Sequence[str] | None, patients: str | None, test: Job | None
) -> tuple[int, int, int]:
    """How often :func:`compare_methods` will call `collected`, `fitted` and `evaluated`.

    Args:
        job: see there.
        methods: see there.
        patients: see there.
        test: see there.

    Raises:
        ValueError: as there.
    """
    chosen = _chosen(job, methods)
    cases = len(job.pairing.cases)
    pointwise = [isinstance(build_calibrator(name), PointwiseCalibrator) for name in chosen]
    passes = pointwise.count(False) + any(pointwise)
    folds = max(_parted(job, patients)[1]) + 1
    return (
        cases * passes,
        len(chosen) * (folds + (test is not None)),
        cases + (0 if test is None else len(test.pairing.cases)),
    )


def _parted(job: Job, pattern: str | None) -> tuple[list[str], list[int]]:
    """Patient and fold of every case."""
    owner = owners([case.name for case in job.pairing.cases], pattern)
    numbers = numbered(owner)
    if max(numbers) < 1:
        raise ValueError(
            f"{job.predictions}: 1 patient; to compare methods, they are fitted to "
            "some patients and evaluated on others"
        )
    return owner, [of % FOLDS for of in numbers]


@dataclass(frozen=True)
class _Fits:
    """Methods, and the voxels of all cases that each is fitted to."""

    methods: dict[str, SampledCalibrator]
    rows: dict[str, list[Rows]]
    owner: list[int]

    @classmethod
    def of(cls, methods: Sequence[str], job: Job, owner: list[int], **options: Any) -> _Fits:
        """Read the cases: once for all methods that look at one voxel at a time."""
        regions = job.label_set is not None and bool(job.label_set.regions)
        unfitted = {method: build_calibrator(method, regions=regions) for method in methods}
        rows: dict[str, list[Rows]] = {}
        shared: list[Rows] | None = None
        for name, one in unfitted.items():
            if not isinstance(one, PointwiseCalibrator):
                rows[name] = collect(job, one, **options).rows
                continue
            shared = shared or collect(job, one, **options).rows
            rows[name] = shared
        return cls(unfitted, rows, owner)

    def to_cases(self, numbers: Sequence[int], fitted: Progress) -> dict[str, Calibrator]:
        """Every method, fitted to the cases of these numbers."""
        found: dict[str, Calibrator] = {}
        for name, method in self.methods.items():
            some = [of.of_cases(numbers).of_patients(self.owner) for of in self.rows[name]]
            found[name] = deepcopy(method).fit_rows(some)
            fitted(name)
        return found


@dataclass(frozen=True)
class _Item:
    case: Case
    calibrators: Mapping[str, Calibrator]


@dataclass(frozen=True)
class _OfCase:
    """Rows and sums of a case by entry, or why there are none."""

    rows: dict[str, dict[str, float]]
    tallies: dict[str, dict[str, Tally]]
    notes: list[str]
    failed: str = ""


@dataclass(frozen=True)
class _Evaluation:
    entries: list[Entry]
    resamples: int
    processes: int | None
    runner: Runner
    progress: Progress

    def of(self, job: Job, calibrators: Sequence[Mapping[str, Calibrator]]) -> Comparison:
        """Evaluate every case with the calibrators of its own."""
        items = [_Item(*one) for one in zip(job.pairing.cases, calibrators, strict=True)]
        one = partial(_evaluate, job=job, entries=self.entries)
        jobs = self.processes or default_jobs(len(items))
        outcomes: dict[str, _OfCase] = {}
        for index, outcome in self.runner(one, items, lost=_lost, jobs=jobs):
            if outcome.failed:
                raise ValueError(outcome.failed)
            outcomes[items[index].case.name] = outcome
            self.progress(items[index].case.name)
        reports = {entry.name: self._report(job, entry, outcomes) for entry in self.entries}
        return comparison_of(reports)

    def _report(self, job: Job, entry: Entry, outcomes: Mapping[str, _OfCase]) -> Report:
        rows = pd.DataFrame.from_dict(
            {name: one.rows[entry.name] for name, one in outcomes.items()}, orient="index"
        )
        rows.index.name = "case"
        total: dict[str, Tally] = {}
        reliability: dict[str, list[BinStatistics]] = {}
        for one in outcomes.values():
            for scope, tally in one.tallies[entry.name].items():
                total[scope] = total[scope] + tally if scope in total else tally
                reliability.setdefault(scope, []).append(tally.top)
        notes = {name: one.notes for name, one in outcomes.items() if one.notes}
        cohort = Cohort(rows, total, {}, notes, job.pairing, reliability=reliability)
        named = replace(job, name=entry.name)
        summary = {**named.header(), **summarise(cohort, resamples=self.resamples)}
        return Report(named, cohort, summary, self.resamples)


def _lost(item: _Item, why: str) -> _OfCase:
    return _OfCase({}, {}, [], f"{item.case.prediction}: {why}")


def _evaluate(item: _Item, *, job: Job, entries: Sequence[Entry]) -> _OfCase:
    """Numbers of a case by entry; a label map that several share is measured once."""
    notes: list[str] = []
    try:
        read = read_case_logits(item.case, job, note=notes.append)
    except ValueError as error:
        return _OfCase({}, {}, [], str(error))
    arrays = read.arrays
    masks: list[tuple[NDArray[Any], dict[str, float]]] = []
    rows, tallies = {}, {}
    last: str | None = None
    for entry in entries:
        if entry.method != last:  # rows of a method stand together: one is in memory at a time
            probs = _probabilities(read, item.calibrators.get(entry.method))
            found = evaluate_probabilities(
                probs, arrays.reference.array, structures=arrays.structures,
                regions=arrays.regions, ignore_index=arrays.ignore_index, roi=arrays.roi,
                settings=job.settings,
            )  # fmt: skip
            last = entry.method
        label_map = arrays.prediction if not entry.method else _decided(entry, read, probs, job)
        of_mask = next((of for mask, of in masks if np.array_equal(mask, label_map)), None)
        if of_mask is None:
            of_mask = evaluate_mask(
                label_map, arrays.reference.array, spacing_mm=read.spacing_mm,
                structures=arrays.structures, ignore_index=arrays.ignore_index,
                settings=job.settings,
            )  # fmt: skip
            masks.append((label_map, of_mask))
        rows[entry.name] = {**of_mask, **found.row}
        tallies[entry.name] = found.calibration
    return _OfCase(rows, tallies, notes)


def _probabilities(read: CaseLogits, calibrator: Calibrator | None) -> NDArray[Any]:
    if calibrator is None:
        if read.arrays.probabilities is None:
            raise ValueError("no probabilities")
        return read.arrays.probabilities
    return calibrator.apply(read.logits, spacing_mm=read.spacing_mm)[0].numpy()


def _decided(entry: Entry, read: CaseLogits, probs: NDArray[Any], job: Job) -> NDArray[Any]:
    """The label map, new where the calibrated probabilities decide otherwise than the first."""
    order = None
    if job.label_set is not None and job.label_set.regions:
        order = job.label_set.class_order
    was = decide(read.arrays.probabilities, "argmax", class_order=order)
    now = decide(probs, entry.decision, class_order=order)
    return np.where(was == now, read.arrays.prediction, now)


def _near(job: Job) -> str:
    """Name of the scope near the foreground."""
    return next((s for s in job.settings.scopes if s.startswith("dilated")), "all")


def _chosen(job: Job, methods: Sequence[str] | None) -> list[str]:
    """The methods that are asked for, or all that fit so many classes."""
    known = names("posthoc")
    unknown = [name for name in methods or () if name not in known]
    if unknown:
        raise ValueError(
            f"methods: no post-hoc method {', '.join(unknown)}; there are {', '.join(known)}"
        )
    classes = channels_of(job) or 2
    if methods is not None:
        chosen = list(dict.fromkeys(methods))
        for name in chosen:
            build_calibrator(name).check_classes(classes)
        return chosen
    every = [name for name in SIMPLEST if name in known] + sorted(set(known) - set(SIMPLEST))
    most = {name: build_calibrator(name).most_classes for name in every}
    return [name for name in every if classes <= (most[name] or classes)]


def _entries(methods: Sequence[str]) -> list[Entry]:
    decided = "class_region" if "class_region" in methods else methods[0]
    entries = [Entry(UNCALIBRATED)]
    for name in methods:
        entries.append(Entry(name, name))
        if name == decided:
            entries.append(Entry(f"{name}, dice", name, "dice"))
    return entries


def _by_patient(comparison: Comparison, job: Job, patients: str | None) -> dict[str, pd.DataFrame]:
    """Mean over the cases of every patient, so that intervals are over patients."""
    cases = [case.name for case in job.pairing.cases]
    if patients is not None and not any(re.search(patients, case) for case in cases):
        patients = None  # cases from elsewhere are named in another way
    owner = dict(zip(cases, owners(cases, patients), strict=True))
    return {
        name: report.cases.groupby(lambda case: owner[str(case)]).mean()
        for name, report in comparison.reports.items()
    }


def _over_patients(
    comparison: Comparison, job: Job, patients: str | None, resamples: int
) -> Comparison:
    grouped = _by_patient(comparison, job, patients)
    return replace(comparison, differences=compare(grouped, resamples=resamples))


def recommend(
    tables: Mapping[str, pd.DataFrame],
    entries: Sequence[Entry],
    near: str,
) -> Recommendation:
    """Choose the method to take, or none.

    A method helps if it lowers the NLL over all voxels, or the ECE near the foreground with an NLL
    that is not higher on average: by one-sided paired t-tests over patients, whose p-values are
    corrected for the number of methods and of the two questions (Holm 1979), at the level 0.05. It
    must not lose more than 0.002 of DSC. Of the methods that help the simplest is taken, unless
    another is better than it by the same tests.

    Args:
        tables: rows by entry, a patient each.
        entries: of the comparison, simple methods first.
        near: name of the scope whose ECE decides.
    """
    base = tables[UNCALIBRATED]
    if len(base) < FEWEST:
        return Recommendation(
            None,
            [f"{len(base)} patients are too few to tell a repair from chance; {FEWEST} or more"],
        )
    nll, ece = "nll_all", f"ece_{near}"
    candidates = [one.method for one in entries if one.method and one.decision == "argmax"]
    lost = {m: float(paired(base, tables[m], "dsc").mean()) for m in candidates}
    losses = [
        f"{m} loses {-change:.4f} of DSC." for m, change in lost.items() if change < -MOST_LOST
    ]
    kept = [m for m in candidates if not lost[m] < -MOST_LOST]
    helping = [m for m in kept if m in _better(base, {m: tables[m] for m in kept}, nll, ece)]
    if not helping:
        return Recommendation(
            None,
            [
                "No method lowers NLL, or ECE near the foreground at no cost in NLL, beyond chance "
                "(5 %, corrected for the number of methods): leave the probabilities as they are.",
                *losses,
            ],
        )
    chosen, *rest = helping
    for other in rest:
        if _better(tables[chosen], {other: tables[other]}, nll, ece, questions=2 * len(rest)):
            chosen = other
    reasons = []
    for key, what in ((nll, "NLL over all voxels"), (ece, "ECE near the foreground")):
        change = paired(base, tables[chosen], key)
        reasons.append(
            f"{chosen}: {what} {base[key].mean():.4f} -> {tables[chosen][key].mean():.4f} "
            f"({change.mean():+.4f}; lower in {int((change < 0).sum())} of {len(change)} patients)."
        )
    if alike := [m for m in helping if m != chosen]:
        reasons.append(f"These help, too: {', '.join(alike)}.")
    return Recommendation(chosen, [*reasons, *losses])


def _better(
    base: pd.DataFrame,
    others: Mapping[str, pd.DataFrame],
    nll: str,
    ece: str,
    *,
    questions: int | None = None,
) -> set[str]:
    """Which of others lower NLL, or ECE at no cost in NLL, beyond chance.

    Args:
        base: a row a patient.
        others: likewise, by method.
        nll: column.
        ece: column.
        questions: that the p-values are corrected for; None: two for each of the others.
    """
    asked = [(method, key) for method in others for key in (nll, ece)]
    p = {(m, key): _p_lower(paired(base, others[m], key)) for m, key in asked}
    sure, left = set(), questions or len(p)
    for (method, key), value in sorted(p.items(), key=lambda item: item[1]):  # Holm's steps down
        if value > LEVEL / left:
            break
        left -= 1
        if key == nll or paired(base, others[method], nll).mean() <= 0:
            sure.add(method)
    return sure


def _p_lower(change: NDArray[np.float64]) -> float:
    """One-sided paired t-test: how likely such a fall is without a difference."""
    if len(change) < 2 or not np.ptp(change):  # the same in all patients: no chance in it
        return 0.0 if len(change) and change[0] < 0 else 1.0
    return float(stats.ttest_1samp(change, 0, alternative="less").pvalue)

"""Finds out which repair helps: cross-validates every post-hoc calibration method over patients.

A repair is a post-hoc calibration of finished predictions.
"""

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
    METHOD,
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
"""Largest loss of DSC that a method may cause."""
LEVEL = 0.05
"""Significance level of the tests, over all questions together."""
FEWEST = 5
"""Fewest patients for a recommendation."""
SIMPLEST = (
    "temperature", "class_region", "class_region_case", "vector", "class_region_bias", "beta",
    "histogram", "isotonic", "matrix", "dirichlet", "local",
)  # fmt: skip
"""Methods, from the simplest to the most complex."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """A row of the comparison: a method, and the rule that makes its label map.

    Attributes:
        name: name of the row.
        method: name of its config; empty for the uncalibrated predictions.
        decision: ``argmax`` or ``dice``.
    """

    name: str
    method: str = ""
    decision: Rule = "argmax"


@dataclass(frozen=True)
class Recommendation:
    """Recommended method.

    Attributes:
        method: name of its config; None if no method is recommended.
        reasons: sentences that say why.
    """

    method: str | None
    reasons: list[str]


@dataclass(frozen=True)
class Repair:
    """Comparison of methods.

    Attributes:
        entries: rows, of which the uncalibrated predictions are the first.
        comparison: results of the cross-validation.
        recommendation: recommendation from the cross-validation.
        test: results on other cases of methods that were fitted to all validation cases, or None.
        facts: numbers of these fits, by method.
        patients: number of patients, over whom folds and intervals are formed.
        folds: number of folds of the cross-validation.
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
        methods: names of configs; None uses all methods that suit the number of classes.
        test: other cases, on which methods fitted to all validation cases are evaluated.
        patients: regular expression that finds the patient in the name of a case, see
            :func:`segcal.repair.fitting.owners`; cases of one patient stay in one fold and count
            as one.
        resamples: number of bootstrap resamples over patients.
        processes: number of cases evaluated at the same time; None uses one process per core, if
            each gets four cases or more.
        runner: see :func:`segcal.evaluation.api.runner_of`.
        collected: called with the name of each case whose voxels were read.
        fitted: called with the name of each method that was fitted to a fold.
        evaluated: called with the name of each case that was evaluated.

    Raises:
        ValueError: a method is unknown, a file cannot be read, there are fewer than two patients,
            or the pattern does not find a patient in every name.
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
    """The advice, with notes on the fits of the recommended method."""
    if advice.method is None:
        return advice
    notes = dict.fromkeys(n for of in by_fold for n in of[advice.method].facts["notes"])
    return replace(advice, reasons=[*advice.reasons, *(f"{advice.method}: {n}." for n in notes)])


def planned_steps(
    job: Job, methods: Sequence[str] | None, patients: str | None, test: Job | None
) -> tuple[int, int, int]:
    """How often :func:`compare_methods` will call `collected`, `fitted` and `evaluated`.

    Args:
        job: validation cases.
        methods: names of configs; None uses all methods that suit the number of classes.
        patients: regular expression that finds the patient in the name of a case.
        test: other cases, or None.

    Raises:
        ValueError: a method is unknown, there are fewer than two patients, or the pattern does not
            find a patient in every name.
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
            f"{job.predictions}: expected two patients or more, got 1; to compare methods, they "
            "are fitted to some patients and evaluated on others"
        )
    return owner, [of % FOLDS for of in numbers]


@dataclass(frozen=True)
class _Fits:
    """Methods, and the voxels of all cases that each method is fitted to."""

    methods: dict[str, SampledCalibrator]
    rows: dict[str, list[Rows]]
    owner: list[int]

    @classmethod
    def of(cls, methods: Sequence[str], job: Job, owner: list[int], **options: Any) -> _Fits:
        """Read the cases: once for all methods that calibrate each voxel on its own."""
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
    """Rows and sums of a case by entry, or the reason why there are none."""

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
        """Evaluate every case with its own calibrators."""
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
    """Numbers of a case by entry; a label map that several entries share is measured once."""
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
    """The label map, changed only where calibration changes the decision."""
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
    """The methods that are asked for, or all that suit the number of classes."""
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
    decided = next((n for n in (METHOD, "class_region") if n in methods), methods[0])
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
    """Choose the method to use, or none.

    A method helps if it lowers the NLL over all voxels, or if it lowers the ECE near the foreground
    and does not raise the NLL on average. Both questions are answered by one-sided paired t-tests
    over patients at the level 0.05, with p-values corrected for the number of methods and questions
    (Holm 1979). A method must not lose more than 0.002 of DSC. Of the methods that help, the
    simplest is chosen, unless another method is better by the same tests.

    Args:
        tables: tables by entry, with one row per patient.
        entries: entries of the comparison, simple methods first.
        near: name of the scope (selection of voxels) whose ECE decides.
    """
    base = tables[UNCALIBRATED]
    if len(base) < FEWEST:
        return Recommendation(
            None,
            [
                f"{len(base)} patients are too few to tell a repair from chance; {FEWEST} or more "
                "are needed"
            ],
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
        reasons.append(f"These methods help, too: {', '.join(alike)}.")
    return Recommendation(chosen, [*reasons, *losses])


def _better(
    base: pd.DataFrame,
    others: Mapping[str, pd.DataFrame],
    nll: str,
    ece: str,
    *,
    questions: int | None = None,
) -> set[str]:
    """Methods that lower NLL, or ECE at no cost in NLL, beyond chance.

    Args:
        base: table with one row per patient.
        others: such a table for each method to compare.
        nll: column of the NLL.
        ece: column of the ECE.
        questions: number of questions that the p-values are corrected for; None means two for each
            method.
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
    """P-value of a one-sided paired t-test that the mean change is negative."""
    if len(change) < 2 or not np.ptp(change):  # the same in all patients: no chance in it
        return 0.0 if len(change) and change[0] < 0 else 1.0
    return float(stats.ttest_1samp(change, 0, alternative="less").pvalue)

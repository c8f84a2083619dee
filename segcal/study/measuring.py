"""Measuring a trained network on test patients: raw and repaired, with two decision rules.

Test patients were used for no choice; repairs are fitted to the validation patients. The decision
``mask`` is the label map that the network's host wrote beside the probabilities (with two heads it
is not their argmax); ``dice`` is the mask of the largest expected Dice of the (repaired)
probabilities.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy import ndimage

from segcal.binning import BinStatistics
from segcal.evaluation.case import evaluate_mask, evaluate_probabilities
from segcal.evaluation.job import Job
from segcal.evaluation.settings import EvaluationSettings
from segcal.io.pairing import Case
from segcal.io.volumes import read_labels
from segcal.metrics.dice import dice
from segcal.metrics.ece import ece
from segcal.metrics.nll import nll
from segcal.neighbourhood import outer_region
from segcal.posthoc.calibrator import Calibrator, PointwiseCalibrator
from segcal.posthoc.decision import decide
from segcal.repair.fitting import build_calibrator, collect, numbered, plan_fit
from segcal.repair.inputs import CaseLogits, read_case_logits
from segcal.study.plan import StudyCell
from segcal.study.preparing import owner_of
from segcal.study.results import TRUTH

__all__ = ["RAW", "CellNumbers", "divergence", "fit_repairs", "measure", "near_foreground"]

RAW = "raw"
"""Name for probabilities without a repair."""
MASK, DICE = "mask", "dice"
NEAR = "dilated5"
REACH = 5
MASK_COLUMNS = ("dsc", "hd95_penalised_mm")
PROBABILITY_COLUMNS = (
    "ece_fg", "ece_union", f"ece_{NEAR}", "ece_all", "nll_all", f"nll_{NEAR}", "tace_all",
    "cece_all", "brier_all", "tace_ref",
)  # fmt: skip
FLOOR = 1e-12
"""Smaller probabilities count as this value in divergences, as in NLL."""
REGIONS = ("inner", "outer")


@dataclass
class CellNumbers:
    """Results of a cell (one training of the study).

    Attributes:
        rows: one for every test case, repair and decision.
        reliability: bins summed over the voxels of all test cases, by repair and scope, that is the
            voxels counted (``near``, ``all``).
        logits: a row for every region, true class and channel.
        val: means over the validation cases, of the unrepaired probabilities.
        fits: facts that the repairs report on their fit.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    reliability: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    logits: list[dict[str, Any]] = field(default_factory=list)
    val: dict[str, float | None] = field(default_factory=dict)
    fits: dict[str, dict[str, Any]] = field(default_factory=dict)


def measure(cell: StudyCell) -> CellNumbers:
    """Fit the repairs of a cell and measure it.

    Args:
        cell: whose validation and test patients have been predicted.

    Raises:
        ValueError: a file cannot be read; the message names it.
    """
    fit = plan_fit(cell.predictions("fit"), cell.labels("fit"))
    repairs = fit_repairs(cell.repairs, fit, owner_of(cell, (c.name for c in fit.pairing.cases)))
    test = plan_fit(cell.predictions("test"), cell.labels("test"))
    known: dict[str, Case] = {}
    truth = test
    if cell.posterior("test").is_dir():
        truth = plan_fit(cell.posterior("test"), cell.labels("test"))
        known = {case.name: case for case in truth.pairing.cases}
    owner = owner_of(cell, (case.name for case in test.pairing.cases))
    found = CellNumbers(val=_scores(fit), fits={k: dict(one.facts) for k, one in repairs.items()})
    bins: dict[tuple[str, str], BinStatistics] = {}
    means = _LogitMeans()
    for case in test.pairing.cases:
        read = _read(case, test)
        posterior = None
        if case.name in known:
            posterior = _raw(_read(known[case.name], truth))
        for row, near, everywhere in _rows(read, _mask(case, read), repairs, posterior):
            found.rows.append({"case": case.name, "patient": owner[case.name], **row})
            if row["decision"] != MASK or row["repair"] == TRUTH:
                continue
            for scope, one in (("near", near), ("all", everywhere)):
                key = (row["repair"], scope)
                bins[key] = bins[key] + one if key in bins else one
        means.add(read)
    for (repair, scope), one in bins.items():
        found.reliability.setdefault(repair, {})[scope] = {
            key: getattr(one, key).tolist() for key in ("count", "confidence_sum", "hit_sum")
        }
    found.logits = means.rows()
    return found


def fit_repairs(
    methods: Sequence[str], job: Job, owner: Mapping[str, str]
) -> dict[str, Calibrator]:
    """Fit post-hoc methods; methods that treat voxels separately share one sample of voxels.

    Args:
        methods: names of their configs.
        job: cases to fit to.
        owner: patient of every case, for cross-validation over patients.
    """
    numbers = numbered([owner[case.name] for case in job.pairing.cases])
    shared = None
    found: dict[str, Calibrator] = {}
    for method in methods:
        one = build_calibrator(method)
        pointwise = isinstance(one, PointwiseCalibrator)
        rows = shared if pointwise and shared else collect(job, one, processes=1).rows
        shared = rows if pointwise else shared
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its facts say the same
            found[method] = one.fit_rows([of.of_patients(numbers) for of in rows])
    return found


def near_foreground(reference: NDArray[Any]) -> NDArray[np.bool_]:
    """Voxels of the scope ``dilated5``: the labelled foreground and 5 voxels around it."""
    near: NDArray[np.bool_] = ndimage.maximum_filter(reference != 0, 2 * REACH + 1, mode="constant")
    return near


def divergence(known: NDArray[Any], probs: NDArray[Any]) -> NDArray[np.float64]:
    """KL from the true posterior to a prediction by voxel, nats; floored as NLL is, at 1e-12.

    Args:
        known: ``(K, *S)``.
        probs: ``(K, *S)``.
    """
    p = known.astype(np.float64)
    p /= p.sum(0)
    log_ratio = np.log(np.maximum(p, FLOOR)) - np.log(np.maximum(probs.astype(np.float64), FLOOR))
    found: NDArray[np.float64] = (p * log_ratio).sum(0)
    return found


def _read(case: Case, job: Job) -> CaseLogits:
    """Case without its mask, which another head than the probabilities' may have decided."""
    return read_case_logits(replace(case, label_map=None), job)


def _raw(read: CaseLogits) -> NDArray[Any]:
    if read.arrays.probabilities is None:
        raise ValueError("probabilities: expected some, got a label map")
    return read.arrays.probabilities


def _mask(case: Case, read: CaseLogits) -> NDArray[Any]:
    """The label map that was written beside the probabilities; without one, their argmax."""
    return read.arrays.prediction if case.label_map is None else read_labels(case.label_map).array


def _rows(
    read: CaseLogits,
    mask: NDArray[Any],
    repairs: Mapping[str, Calibrator],
    posterior: NDArray[Any] | None,
) -> Iterator[tuple[dict[str, Any], BinStatistics, BinStatistics]]:
    """Metrics of a case by repair and decision, and its bins near the foreground and everywhere."""
    arrays, settings = read.arrays, EvaluationSettings()
    reference, structures = arrays.reference.array, arrays.structures
    near = near_foreground(reference)
    measured: list[tuple[NDArray[Any], dict[str, float]]] = []

    def overlap(labels: NDArray[Any]) -> dict[str, float]:
        for before, row in measured:
            if np.array_equal(before, labels):
                return row
        row = evaluate_mask(
            labels, reference, spacing_mm=read.spacing_mm, structures=structures,
            ignore_index=arrays.ignore_index, settings=settings,
        )  # fmt: skip
        kept = {k: row[k] for k in (*MASK_COLUMNS, *(f"dsc/{one.name}" for one in structures))}
        measured.append((labels, kept))
        return kept

    for repair in (RAW, *repairs, *(() if posterior is None else (TRUTH,))):
        probs = _raw(read)
        if repair == TRUTH and posterior is not None:
            probs = posterior
        elif repair != RAW:
            applied = repairs[repair].apply(read.logits, spacing_mm=read.spacing_mm)
            probs = applied[0].float().numpy()
        result = evaluate_probabilities(
            probs, reference, structures=structures, ignore_index=arrays.ignore_index,
            settings=settings,
        )  # fmt: skip
        numbers = {key: result.row[key] for key in PROBABILITY_COLUMNS}
        if posterior is not None:
            kl = divergence(posterior, probs)
            numbers |= {"kl_all": float(kl.mean()), f"kl_{NEAR}": float(kl[near].mean())}
        bins = (result.calibration[NEAR].top, result.calibration["all"].top)
        for decision in (MASK, DICE):
            labels = decide(probs, "dice") if decision == DICE else mask
            if decision == MASK and repair == TRUTH:
                labels = decide(probs, "argmax")
            found = overlap(labels)
            of_mask = {key: found[key] for key in MASK_COLUMNS}
            of_labels = {key: value for key, value in found.items() if key not in of_mask}
            row = {"repair": repair, "decision": decision, **of_mask, **numbers, **of_labels}
            yield row, *bins


def _scores(job: Job) -> dict[str, float | None]:
    """Means over the validation cases; None where no case defines a score."""
    found: dict[str, list[float]] = {"dsc": [], f"ece_{NEAR}": [], "nll_all": []}
    for case in job.pairing.cases:
        read = _read(case, job)
        reference, probs, mask = read.arrays.reference.array, _raw(read), _mask(case, read)
        ignored = read.arrays.ignore_index
        valid = np.ones(reference.shape, bool) if ignored is None else reference != ignored
        overlaps = [
            dice(mask[valid], reference[valid], one.labels[0]) for one in read.arrays.structures
        ]
        defined = [value for value in overlaps if np.isfinite(value)]
        found["dsc"].append(float(np.mean(defined)) if defined else np.nan)
        near = near_foreground(np.where(valid, reference, 0))
        found[f"ece_{NEAR}"].append(ece(probs, reference, mask=near, ignore_index=ignored))
        found["nll_all"].append(nll(probs, reference, ignore_index=ignored))
    finite = {key: [v for v in values if np.isfinite(v)] for key, values in found.items()}
    return {key: float(np.mean(v)) if v else None for key, v in finite.items()}


class _LogitMeans:
    """Mean logits by region of the label, true class and channel.

    Files hold probabilities, so a logit here is the log-probability minus its mean over the
    channels of the voxel; a softmax preserves no more. The region is outer where the 3 x 3 labels
    around the voxel, in its slice, belong to several classes.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], tuple[NDArray[np.float64], int]] = {}

    def add(self, read: CaseLogits) -> None:
        """Take in a case."""
        logits = read.logits[0].double()
        logits = (logits - logits.mean(0)).flatten(1)
        labels = torch.from_numpy(read.arrays.reference.array.astype(np.int64))
        outer = outer_region(labels, ignore_index=read.arrays.ignore_index).flatten()
        labels = labels.flatten()
        for region in range(len(REGIONS)):
            for label in range(len(logits)):
                chosen = (labels == label) & (outer == bool(region))
                total, count = self._sums.get((region, label), (np.zeros(len(logits)), 0))
                total = total + logits[:, chosen].sum(1).numpy()
                self._sums[region, label] = total, count + int(chosen.sum())

    def rows(self) -> list[dict[str, Any]]:
        """A row for every region, true class and channel that has voxels."""
        return [
            {
                "region": REGIONS[region], "label": label, "channel": channel,
                "mean_logit": float(value) / count, "voxels": count,
            }
            for (region, label), (total, count) in self._sums.items()
            if count
            for channel, value in enumerate(total)
        ]  # fmt: skip


def tables_of(measured: CellNumbers) -> dict[str, pd.DataFrame]:
    """Content of a cell's files, by name of the file."""
    return {"cases.csv": pd.DataFrame(measured.rows), "logits.csv": pd.DataFrame(measured.logits)}

"""Plans evaluations: pairs predictions with references, and checks them with the settings."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from segcal.evaluation.intervals import VolumeIntervals
from segcal.evaluation.labels import FoundLabels, find_labels
from segcal.evaluation.settings import EvaluationSettings
from segcal.evaluation.store import Store
from segcal.io.case_patterns import Patterns
from segcal.io.files import is_image
from segcal.io.label_sets import LabelSet
from segcal.io.pairing import Pairing, find_reader, pair, scan, with_cases, with_rois, with_samples

LIBRARIES = ("segcal", "torch", "numpy", "scipy", "nibabel", "SimpleITK", "pandas")


STORE = ".segcal-results"
"""Sub-folder in which results of cases are kept until the last case is done."""


@dataclass(frozen=True)
class Job:
    """One set of predictions, checked and ready to be evaluated.

    Attributes:
        name: name in headings.
        predictions: folder or file.
        references: folder or file.
        settings: settings of the evaluation.
        pairing: which prediction belongs to which reference.
        labels: what the labels mean.
        reader: nnU-Net's reader that the predictions were made with, or None.
        intervals: intervals of volumes that were fitted to validation cases, or None.
    """

    name: str
    predictions: Path
    references: Path
    settings: EvaluationSettings
    pairing: Pairing
    labels: FoundLabels
    reader: str | None
    intervals: VolumeIntervals | None = None

    @property
    def label_set(self) -> LabelSet | None:
        """Names and ignore label, or None."""
        return self.labels.label_set

    def store(self, folder: Path) -> Store:
        """Store that keeps results of cases until all cases are done.

        Args:
            folder: folder in which they get a sub-folder of their own, :data:`STORE`.
        """
        labels = None if self.label_set is None else vars(self.label_set)
        making = [vars(self.settings), labels, self.reader, version("segcal")]
        return Store(folder / STORE, json.dumps(making, default=str))

    @property
    def unit(self) -> str:
        """Unit of the lengths: ``px`` if the references are images, which state no size."""
        return unit_of(self.pairing)

    def header(self) -> dict[str, Any]:
        """Part of the summary that says how it was made."""
        return {
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "predictions": str(self.predictions.resolve()),
            "references": str(self.references.resolve()),
            "labels": None if self.label_set is None else self.label_set.source,
            "reader": self.reader,
            "settings": vars(self.settings),
            "versions": versions(),
            "unit": self.unit,
            "intervals": None if self.intervals is None else self.intervals.fitted_on,
            "conventions": self.settings.conventions(self.unit, fitted=self.intervals is not None),
        }


def unit_of(pairing: Pairing) -> str:
    """Unit of the lengths: ``mm``, or ``px`` if the references are images, which state no size."""
    found = [case.reference for case in pairing.cases]
    files = [
        file
        for one in found
        for file in (scan(one, arrays=False).values() if one.is_dir() else [one])
    ]
    return "px" if files and all(map(is_image, files)) else "mm"


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that the numbers are computed with."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def plan(
    predictions: Mapping[str, Path],
    references: Path,
    *,
    settings: EvaluationSettings | None = None,
    dataset_json: Path | LabelSet | None = None,
    roi: Path | None = None,
    patterns: Patterns | None = None,
    samples: Path | None = None,
    cases: Sequence[str] = (),
    found: Callable[[FoundLabels], None] = lambda labels: None,
) -> list[Job]:
    """Check everything that is given, before the first case is read.

    Args:
        predictions: folders or files by name.
        references: folder or file of the label maps.
        settings: settings of the evaluation; None uses the defaults.
        dataset_json: see :func:`segcal.evaluation.labels.find_labels`.
        roi: folder of masks named like the cases, which adds the scope ``roi``.
        patterns: see :func:`segcal.io.pairing.pair`.
        samples: folder of label maps that were drawn from the model, for cases with several raters.
        cases: names of the cases to evaluate; empty evaluates all.
        found: called for each set of predictions with what its labels mean.

    Raises:
        ValueError: files do not fit each other or the settings.
    """
    settings = settings or EvaluationSettings()
    if roi is not None and "roi" not in settings.chosen:
        settings = replace(settings, chosen=(*settings.chosen, "roi"))
    jobs = []
    for name, one in predictions.items():
        pairing = pair(one, references, patterns)
        if cases:
            pairing = with_cases(pairing, cases)
        if roi is not None:
            pairing = with_rois(pairing, roi)
        if samples is not None:
            pairing = with_samples(pairing, samples)
        labels = find_labels(dataset_json, one, references)
        found(labels)
        jobs.append(Job(name, one, references, settings, pairing, labels, find_reader(one)))
    if "roi" in settings.chosen and roi is None:
        raise ValueError("roi: expected the folder of the masks for the scope roi, got none")
    for job in jobs:
        _check_compat(settings.compat, job.label_set, job.pairing)
    return jobs


def with_thresholds(jobs: Sequence[Job], thresholds: Sequence[float]) -> list[Job]:
    """Every job with every threshold; several thresholds are appended to the jobs' names.

    Args:
        jobs: result of :func:`plan`.
        thresholds: see :class:`segcal.evaluation.settings.EvaluationSettings`.

    Raises:
        ValueError: a threshold is not a probability, or occurs twice.
    """
    if len(set(thresholds)) < len(thresholds):
        raise ValueError(
            f"threshold: expected different values, got {', '.join(map(str, thresholds))}"
        )
    return [
        replace(
            job,
            name=job.name if len(thresholds) == 1 else f"{job.name}@{t:g}",
            settings=replace(job.settings, threshold=t),
        )
        for job in jobs
        for t in thresholds
    ]


def named(predictions: Sequence[Path], names: Sequence[str] | None = None) -> dict[str, Path]:
    """Give every set of predictions a name that can also name a folder.

    Args:
        predictions: folders or files, at least one.
        names: one name for each; None uses the names of the folders.

    Raises:
        ValueError: names are missing or equal, or one of several cannot name a folder.
    """
    if not predictions:
        raise ValueError("predictions: expected at least one folder of predictions, got none")
    chosen = [p.resolve().name if p.is_dir() else p.stem for p in predictions]
    if names is not None:
        chosen = [name.strip() for name in names]
    if len(chosen) != len(predictions) or len(set(chosen)) != len(chosen) or "" in chosen:
        raise ValueError(
            f"names: expected {len(predictions)} different names, got {', '.join(chosen)}"
        )
    unfit = [name for name in chosen if Path(name).name != name or name in (".", "..")]
    if unfit and len(predictions) > 1:
        raise ValueError(f"names: {', '.join(unfit)} cannot name a folder")
    return dict(zip(chosen, predictions, strict=True))


def _check_compat(compat: str | None, labels: LabelSet | None, pairing: Pairing) -> None:
    alone = [case.name for case in pairing.cases if not case.raters]
    if compat == "curvas" and alone:
        raise ValueError(
            f"compat {compat}: compares with two raters or more, which {len(alone)} cases lack, "
            f"e.g. {alone[0]}; name their label maps {alone[0]}_rater1.nii.gz, ... (or say where "
            "{rater} stands in the pattern of the references)"
        )
    if compat and labels is None:
        raise ValueError(
            f"compat {compat}: its mean is over all labels, present or not, so a dataset.json is "
            "needed to name them"
        )
    if compat and labels and (labels.regions or labels.ignore_index is not None):
        raise ValueError(
            f"compat {compat}: the published evaluation supports neither regions nor an ignore "
            f"label, but {labels.source} defines them"
        )

"""What one evaluation is of: a folder of predictions, their references, and where results go."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from segcal.evaluation.case import Settings
from segcal.evaluation.store import Store
from segcal.io.label_sets import LabelSet
from segcal.io.pairing import Pairing

STORE = ".segcal-results"
"""Folder in the report's, where results of cases wait for the last."""
LIBRARIES = ("segcal", "torch", "numpy", "scipy", "nibabel", "SimpleITK", "pandas")


@dataclass(frozen=True)
class Job:
    """One set of predictions, checked and ready to be evaluated."""

    name: str
    predictions: Path
    references: Path
    output: Path
    pairing: Pairing
    label_set: LabelSet | None
    reader: str | None

    def store(self, settings: Settings) -> Store:
        """Where results of cases are until all of them are there."""
        labels = None if self.label_set is None else vars(self.label_set)
        making = [vars(settings), labels, self.reader, version("segcal")]
        return Store(self.output / STORE, json.dumps(making, default=str))

    def check(self, settings: Settings) -> None:
        """See to it that these labels can be evaluated by these settings.

        Raises:
            ValueError: they cannot.
        """
        labels = self.label_set
        if settings.compat and labels is None:
            raise ValueError(
                f"--compat {settings.compat}: its mean is over all labels, present or not, so a "
                "dataset.json is needed that names them"
            )
        if settings.compat and labels and (labels.regions or labels.ignore_index is not None):
            raise ValueError(
                f"--compat {settings.compat}: the published evaluation knows no regions and no "
                f"ignore label, which {labels.source} defines"
            )

    def header(self, settings: Settings) -> dict[str, Any]:
        """What a summary says about its making."""
        return {
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "predictions": str(self.predictions.resolve()),
            "references": str(self.references.resolve()),
            "labels": None if self.label_set is None else self.label_set.source,
            "reader": self.reader,
            "settings": vars(settings),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in LIBRARIES},
            },
            "conventions": settings.conventions(),
        }

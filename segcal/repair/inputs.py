"""Reads logits and labels of a case from the files that an evaluation reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.evaluation.job import Job
from segcal.evaluation.reading import CaseArrays, read_case
from segcal.io.pairing import Case
from segcal.io.probabilities import read_logits
from segcal.posthoc.calibrator import HeldOut
from segcal.posthoc.links import floor_of, floored_share, logits_of, normalised

__all__ = ["CaseLogits", "check_same", "read_case_logits"]

IGNORED = 255
"""Value of ignored voxels among the 0 and 1 of a region."""
DISAGREEMENT = 0.01
"""Largest share of voxels in which logits may predict another class than the probabilities."""


@dataclass(frozen=True)
class CaseLogits:
    """A case in the form that calibrators need.

    Attributes:
        arrays: content of its files.
        logits: ``(1, K, z, y, x)``: log-probabilities from saved logits or from probabilities; for
            regions, log-odds.
        floor: value that replaces smaller probabilities, see
            :func:`segcal.posthoc.links.floor_of`; None if logits were saved.
        floored: share of voxels with such a small probability.
    """

    arrays: CaseArrays
    logits: Tensor
    floor: float | None
    floored: float

    @property
    def spacing_mm(self) -> tuple[float, ...]:
        """Voxel size along the axes of the arrays."""
        return self.arrays.reference.geometry.spacing_mm

    @property
    def ignore_index(self) -> int | None:
        """Ignored label in :attr:`held_out`."""
        if self.arrays.ignore_index is None:
            return None
        return IGNORED if self.arrays.regions else self.arrays.ignore_index

    @property
    def held_out(self) -> HeldOut:
        """Logits and labels; for regions, one label per region."""
        reference = self.arrays.reference.array
        if not self.arrays.regions:
            labels = reference[None].astype(np.int64)
        else:
            inside = [np.isin(reference, one.labels) for one in self.arrays.structures]
            labels = np.stack(inside)[None].astype(np.uint8)
            if self.arrays.ignore_index is not None:
                labels[:, :, reference == self.arrays.ignore_index] = IGNORED
        return HeldOut(self.logits, torch.from_numpy(labels), self.spacing_mm)


def read_case_logits(
    case: Case, job: Job, *, note: Callable[[str], None] = lambda text: None
) -> CaseLogits:
    """Read one case.

    Args:
        case: files to read.
        job: job that the case belongs to.
        note: called with a sentence on anything unusual, and how it was read.

    Raises:
        ValueError: names the file: :func:`segcal.evaluation.reading.read_case` refuses it, it is a
            label map without probabilities, or logits do not belong to the probabilities.
    """
    arrays = read_case(
        case, job.label_set, tolerance=job.settings.tolerance, reader=job.reader, note=note
    )
    if arrays.probabilities is None:
        raise ValueError(
            f"{case.prediction}: holds no probabilities, which calibration needs; nnU-Net writes "
            "them with --save_probabilities, and in validation with --npz"
        )
    if case.logits is None:
        probs = torch.from_numpy(arrays.probabilities)
        logits = logits_of(probs, regions=arrays.regions)
        return CaseLogits(arrays, logits[None], floor_of(probs.dtype), floored_share(probs))
    array = read_logits(
        case.logits,
        arrays.reference.geometry,
        num_classes=len(arrays.probabilities),
        regions=arrays.regions,
        reader=job.reader,
    )
    check_same(case.logits, array, case.prediction, arrays.probabilities, regions=arrays.regions)
    logits = normalised(torch.from_numpy(array), regions=arrays.regions)
    return CaseLogits(arrays, logits[None], None, 0.0)


def check_same(
    path: Path,
    logits: NDArray[Any],
    prediction: Path,
    probabilities: NDArray[Any],
    *,
    regions: bool,
) -> None:
    """Refuse logits that an earlier run left beside other probabilities.

    Args:
        path: path of the logits.
        logits: floating ``(K, *S)``.
        prediction: path of the probabilities.
        probabilities: ``(K, *S)``.
        regions: whether the channels are regions, with a probability each.

    Raises:
        ValueError: names the file: shapes differ, values are not finite, or predictions differ.
    """
    if logits.shape != probabilities.shape:
        raise ValueError(
            f"{path}: logits {logits.shape} beside probabilities {probabilities.shape} of "
            f"{prediction}; are these the logits of another run?"
        )
    if not all(np.isfinite(channel).all() for channel in logits):
        raise ValueError(f"{path}: some logits are NaN or infinite")
    if regions:
        differ = float(np.mean((logits > 0) != (probabilities > 0.5)))
    else:
        differ = float(np.mean(logits.argmax(0) != probabilities.argmax(0)))
    if differ > DISAGREEMENT:
        raise ValueError(
            f"{path}: predicts another class than {prediction} in {differ:.1%} of the "
            "voxels; are these the logits of another run? Remove them, or predict again"
        )

"""Writing a case as nnU-Net does; on request also its logits and folds, and calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nnunetv2.inference.export_prediction import export_prediction_from_logits
from numpy.typing import NDArray
from torch import Tensor

from segcal.io.archives import save_arrays
from segcal.io.files import whole_file
from segcal.io.pairing import LOGITS_FOLDER
from segcal.posthoc.calibrator import Calibrator
from segcal.posthoc.links import logits_of, normalised

OUTSIDE = -110.0
"""Logit of a class that is impossible outside nnU-Net's crop: e^-110 is 0 in single precision."""


def export(
    predicted: Any,
    properties: dict[str, Any],
    configuration_manager: Any,
    plans_manager: Any,
    dataset_json: Any,
    output: str,
    save_probabilities: bool = False,
    *,
    fold_names: Sequence[str] = (),
    save_logits: bool = False,
    calibrator: Calibrator | None = None,
) -> None:
    """Write a case as nnU-Net does, and on request its logits and each fold's prediction.

    The calibrator gets logits in the resolution and the frame that nnU-Net writes. If `predicted`
    holds folds, it calibrates each fold, and the mean of their probabilities is written; the saved
    logits are the uncalibrated mean. With two heads the decision head gives the label map, and the
    probability head gives everything else.

    Args:
        predicted: ``(C, *S)``, or ``(1 + folds, C, *S)`` with the mean of the folds first; C is K,
            or 2 K for two heads, with the decision head first.
        properties: of the case, from nnU-Net's preprocessing.
        configuration_manager: nnU-Net's.
        plans_manager: nnU-Net's.
        dataset_json: nnU-Net's.
        output: path of the case without ending.
        save_probabilities: whether probabilities are written.
        fold_names: sub-folders for the predictions of single folds, or none.
        save_logits: whether logits are written.
        calibrator: turns logits into probabilities; None takes nnU-Net's softmax or sigmoid.
    """
    looks = predicted if predicted.ndim == 5 else predicted[None]
    labels = plans_manager.get_label_manager(dataset_json)
    heads = looks.shape[1] // labels.num_segmentation_heads
    frame = _Frame(properties, tuple(plans_manager.transpose_backward), labels.has_regions)

    def write(values: Any, place: Path) -> Any:
        watched = _Resampling(configuration_manager, frame, calibrator, heads, keep=save_logits)
        plans = plans_manager if heads == 1 else _Deciding(plans_manager, watched)
        export_prediction_from_logits(
            values, properties, watched, plans, dataset_json, str(place), save_probabilities
        )
        return watched.logits

    if fold_names:
        for fold, values in zip(fold_names, looks[1:], strict=True):
            write(values[None], Path(output).parent / fold / Path(output).name)
    logits = write(looks, Path(output))
    if save_logits:
        with whole_file(logits_path(output)) as temporary:
            save_arrays(temporary, {"logits": frame.written(logits)})


@dataclass(frozen=True)
class _Frame:
    """Position of nnU-Net's crop of a case in the array that nnU-Net writes.

    Attributes:
        properties: of the case.
        backward: order of the network's axes in the array.
        regions: whether channels are regions.
    """

    properties: dict[str, Any]
    backward: tuple[int, ...]
    regions: bool

    @property
    def _box(self) -> tuple[slice, ...]:
        return (slice(None), *(slice(*side) for side in self.properties["bbox_used_for_cropping"]))

    def written(self, cropped: Any) -> NDArray[np.float32]:
        """Logits ``(K, *S)`` of the crop, surrounded by background, or by no region."""
        shape = (len(cropped), *self.properties["shape_before_cropping"])
        full = np.full(shape, OUTSIDE, np.float32)
        if not self.regions:
            full[0] = 0
        full[self._box] = np.asarray(cropped, np.float32)
        return full.transpose([0, *(axis + 1 for axis in self.backward)])

    def calibrated(self, calibrator: Calibrator, cropped: Any) -> Tensor:
        """Probabilities ``(K, *S)`` of logits of the crop.

        The calibrator sees the surroundings of the crop too, as it does when it is fitted to files.
        """
        logits = normalised(torch.from_numpy(self.written(cropped)), regions=self.regions)
        probs = calibrator.apply(logits[None], spacing_mm=self.properties["spacing"])[0]
        forward = [self.backward.index(axis) for axis in range(len(self.backward))]
        return probs.permute([0, *(axis + 1 for axis in forward)])[self._box]


class _Resampling:
    """nnU-Net's configuration with a resampling that also calibrates and keeps the logits.

    Args:
        configuration_manager: nnU-Net's.
        frame: of the case.
        calibrator: see :func:`export`.
        heads: of the network.
        keep: whether the logits of the mean are needed beside calibrated folds.
    """

    def __init__(
        self,
        configuration_manager: Any,
        frame: _Frame,
        calibrator: Calibrator | None,
        heads: int,
        *,
        keep: bool,
    ) -> None:
        self.host = configuration_manager
        self.frame = frame
        self.calibrator = calibrator
        self.heads = heads
        self.keep = keep
        self.logits: Any = None
        self.decision: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)

    def resampling_fn_probabilities(self, looks: Any, *args: Any) -> Any:
        """Logits ``(K, *S)`` for nnU-Net's probabilities, from the mean and the folds."""
        if self.heads == 2:
            channels = looks.shape[1] // 2
            self.decision = self.host.resampling_fn_probabilities(looks[0, :channels], *args)
            looks = looks[:, channels:]
        mean, of_folds = looks[0], looks[1:]
        if self.calibrator is None or self.keep or not len(of_folds):
            self.logits = self.host.resampling_fn_probabilities(mean, *args)
        if self.calibrator is None:
            return self.logits
        if not len(of_folds):
            probs = self.frame.calibrated(self.calibrator, self.logits)
            return logits_of(probs, regions=self.frame.regions)
        total = torch.zeros(())
        for values in of_folds:  # one after the other: a volume of many classes is large
            logits = self.host.resampling_fn_probabilities(values, *args)
            total = total + self.frame.calibrated(self.calibrator, logits)
        return logits_of(total / len(of_folds), regions=self.frame.regions)


class _Deciding:
    """nnU-Net's plans, or their labels, with label maps from the decision head.

    Args:
        host: nnU-Net's plans, or labels.
        watched: holds the decision head's logits as soon as they are resampled.
    """

    def __init__(self, host: Any, watched: _Resampling) -> None:
        self.host = host
        self.watched = watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)

    def get_label_manager(self, *args: Any) -> _Deciding:
        """Labels of the plans."""
        return _Deciding(self.host.get_label_manager(*args), self.watched)

    def convert_probabilities_to_segmentation(self, _: Any) -> Any:
        """Label map of the decision head, whatever the probabilities are."""
        return self.host.convert_logits_to_segmentation(self.watched.decision)

    convert_logits_to_segmentation = convert_probabilities_to_segmentation


def logits_path(output: str) -> Path:
    """File for the logits of a case whose probabilities are in ``output.npz``.

    They have a folder of their own, because nnU-Net's ensembling and segcal's evaluation take every
    ``.npz`` beside the predictions for a case.
    """
    return Path(output).parent / LOGITS_FOLDER / f"{Path(output).name}.npz"

"""Prediction with a trained experiment: probabilities on the grid of the image's own file.

Windows have the size that the network was trained on; where windows overlap, their probabilities
are averaged in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from monai.inferers import sliding_window_inference
from torch import Tensor, nn

from segcal import __version__
from segcal.adapters.monai.building import build_network
from segcal.adapters.monai.checkpoints import experiment_of, read_training
from segcal.adapters.monai.data import Preprocess, resample
from segcal.adapters.monai.dataset import CaseFiles, check_images, find_cases, find_images
from segcal.adapters.monai.experiment import AXES, SegmentationExperiment, VolumeData
from segcal.heads import split_heads
from segcal.io.archives import save_arrays
from segcal.io.files import check_writable, is_image, whole_file, write_json
from segcal.io.label_sets import LabelSet
from segcal.io.pairing import DECISION_HEAD, RECORD_NAME
from segcal.io.volumes import Geometry, write_nifti, write_volume
from segcal.posthoc.links import logits_of
from segcal.repair.saved import SavedCalibrator
from segcal.training.checkpoints import BEST_NAME, LAST_NAME, weights_digest
from segcal.training.devices import choose_device
from segcal.training.experiments import check_same

MASKS = "masks"
"""Folder of the decision head's label maps, used if files of probabilities have their names."""
PREDICTED = ("data", "network")
"""Parts of an experiment that a prediction depends on."""


class Predictor:
    """A trained network and what it was trained on.

    Args:
        experiment: what was trained; it must have the network and preprocessing of the checkpoint.
        checkpoint: which state of the training, the best or the last.

    Raises:
        ValueError: no checkpoint, or a checkpoint of something else.
    """

    def __init__(
        self, experiment: SegmentationExperiment, checkpoint: Literal["best", "last"]
    ) -> None:
        name = BEST_NAME if checkpoint == "best" else LAST_NAME
        self.path = experiment.folder / name
        if not self.path.is_file():
            raise ValueError(f"{self.path}: no such file; train first")
        content = read_training(self.path)
        trained = experiment_of(content, self.path)
        check_same(trained, experiment, self.path, PREDICTED)
        self.experiment = experiment
        self.classes: list[str] = content["classes"]
        self.ignore_label: int | None = content["ignore_label"]
        self.channels: int = content["channels"]
        self.two_heads: bool = content["heads"] == 2
        self.epoch: int = content["epoch"] - 1
        self.recipe = Path(trained.recipe).stem
        self.weights = weights_digest(content["network"])
        self.device = choose_device(experiment.training.device)
        self.network: nn.Module = build_network(
            trained, self.channels, content["heads"] * len(self.classes), fresh=False
        )
        self.network.load_state_dict(content["network"])
        self.network.to(self.device).eval()
        self.preprocess = Preprocess(experiment.data)

    def cases(
        self, folder: Path | None, *, validation: bool = False, names: Collection[str] = ()
    ) -> list[CaseFiles]:
        """Images to predict, checked.

        Args:
            folder: of the images; None takes ``imagesTs`` of the data set.
            validation: take the validation cases of the experiment instead.
            names: of the cases to predict; empty takes all cases.

        Raises:
            ValueError: no folder, an empty folder, an unknown case, or another number of channels.
        """
        data = self.experiment.data
        if validation:
            found = list(find_cases(data).val)
        else:
            if folder is None and data.root is not None:
                folder = data.root / "imagesTs"
            if folder is None or not folder.is_dir():
                where = "" if folder is None else f"{folder}: no such folder; "
                raise ValueError(f"{where}name a folder of images, or take the validation cases")
            images = find_images(folder, self.channels)
            found = [CaseFiles(name, paths) for name, paths in sorted(images.items())]
        if unknown := sorted(set(names) - {case.name for case in found}):
            raise ValueError(f"{folder or 'validation'}: no image of {', '.join(unknown[:3])}")
        found = [case for case in found if not names or case.name in names]
        if not found:
            raise ValueError(f"{folder}: holds no volumes (.nii.gz, .nrrd, .mha, ...)")
        for case in found:
            check_images(case, self.channels)
        return found

    def check_calibrator(
        self, calibrator: SavedCalibrator, cases: Sequence[CaseFiles], *, any_model: bool = False
    ) -> list[str]:
        """Check that a calibrator belongs to this network, before anything is predicted.

        Args:
            calibrator: what :func:`predict_cases` will apply.
            cases: what will be predicted.
            any_model: whether a calibrator that was fitted to another network is accepted.

        Returns:
            sentences on differences that are no error.

        Raises:
            ValueError: other classes, or another network.
        """
        what = str(self.path)
        labels = LabelSet(dict(enumerate(self.classes)), self.ignore_label, what)
        calibrator.check_labels(labels, len(self.classes), what)
        notes = [] if any_model else calibrator.check_model(self.record(), what)
        if shared := {case.name for case in cases} & set(calibrator.fitted_on.get("cases", ())):
            notes.append(
                f"{len(shared)} of {len(cases)} cases are among those that the calibrator was "
                "fitted to; its calibration will look better there than on new cases"
            )
        return notes

    def record(self) -> dict[str, Any]:
        """What made the predictions: the network, its state, and how its windows are averaged."""
        return {
            "trainer": self.recipe,
            "folder": str(self.path.parent.resolve()),
            "checkpoint": self.path.name,
            "weights": self.weights,
            "epoch": self.epoch,
            "members": 1,
            "heads": 2 if self.two_heads else 1,
            "average": "prob",
            **self.experiment.inference.model_dump(),
            "segcal": __version__,
            "torch": torch.__version__,
        }

    @torch.inference_mode()
    def predict(self, case: CaseFiles) -> tuple[Tensor, Tensor, Geometry]:
        """Reported and deciding probabilities, both ``(K, z, y, x)`` float32, on the image's grid.

        They are the same with one head; with two heads the decision head's probabilities decide.

        Raises:
            ValueError: an image that cannot be read, naming the file.
        """
        geometry = check_images(case, self.channels)
        image = self.preprocess(CaseFiles(case.name, case.images))["image"]
        data, settings = self.experiment.data, self.experiment.inference
        axis = 1 + AXES.index(data.axis)
        # slices become the batch; a volume is a batch of one
        batch = image.movedim(axis, 0) if data.units == "slices" else image[None]
        parts = [
            sliding_window_inference(
                part.to(self.device),
                data.size,
                self.experiment.training.val_batch_size,
                self._probabilities,
                overlap=settings.overlap,
                mode=settings.blend,
            ).cpu()
            for part in torch.split(batch, self.experiment.training.val_batch_size)
        ]
        probs = torch.cat(parts)
        probs = probs.movedim(0, axis) if data.units == "slices" else probs[0]
        probs = resample(probs, geometry.shape)
        if not self.two_heads:
            return probs, probs, geometry
        decision, probability = split_heads(probs[None])
        return probability[0], decision[0], geometry

    def _probabilities(self, images: Tensor) -> Tensor:
        logits = self.network(images).float()
        if not self.two_heads:
            return torch.softmax(logits, 1)
        return torch.cat([torch.softmax(head, 1) for head in split_heads(logits)], 1)


def check_output(folder: Path, data: VolumeData, cases: Sequence[CaseFiles]) -> None:
    """Check that predictions will not be written among images or labels, or beside dataset.json.

    Raises:
        ValueError: `folder` holds files that are read, or cannot be written to.
    """
    check_writable(folder)
    read = {p for p in (data.root, data.images, data.labels) if p is not None}
    if data.root is not None:
        read |= {path for kind in ("images", "labels") for path in data.root.glob(f"{kind}T*")}
    read |= {path.parent for case in cases for path in case.images}
    if folder.resolve() in {path.resolve() for path in read}:
        raise ValueError(
            f"{folder}: holds images, labels or the data set's dataset.json, which predictions "
            "could replace; choose another folder for them"
        )


def predict_cases(
    predictor: Predictor,
    cases: list[CaseFiles],
    output: Path,
    form: Literal["npz", "nifti"],
    *,
    calibrator: SavedCalibrator | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> None:
    """Predict cases and write them, with all that ``segcal evaluate`` needs to know about them.

    Args:
        predictor: what predicts.
        cases: what is predicted.
        output: folder. It gets CASE.npz (``probabilities (K, z, y, x)``, as nnU-Net writes them)
            and the label map CASE.nii.gz (CASE.png for pictures); or CASE.nii.gz with the classes
            as its fourth axis, and for a network with two heads masks/CASE.nii.gz, the decision
            head's label map. ``dataset.json`` gets the names of the labels, and
            ``segcal_predict.json`` says how the predictions were made.
        form: ``npz`` or ``nifti``, see `output`.
        calibrator: applied to the probabilities on the grid of the image before they are written;
            see :meth:`Predictor.check_calibrator`.
        progress: called with the name of every finished case.

    Raises:
        ValueError: pictures, which have no voxel size, cannot be written as NIfTI.
    """
    pictures = all(is_image(case.images[0]) for case in cases)
    if pictures and form == "nifti":
        raise ValueError("form nifti: pictures have no voxel size, which NIfTI needs; take npz")
    ending = ".png" if pictures else ".nii.gz"
    output.mkdir(parents=True, exist_ok=True)
    (output / RECORD_NAME).unlink(missing_ok=True)  # of a run before; half of both has none
    for case in cases:
        probs, decision, geometry = predictor.predict(case)
        if calibrator is not None:
            probs = _calibrated(probs, geometry, calibrator)
        array, mask = probs.numpy(), decision.argmax(0).numpy().astype(np.uint8)
        volume = output / f"{case.name}{ending}"
        stored = output / f"{case.name}.npz"
        if form == "nifti":
            stored.unlink(missing_ok=True)  # of a run before, which would be evaluated instead
            write_nifti(volume, array, geometry)
            if predictor.two_heads:
                (output / MASKS).mkdir(exist_ok=True)
                write_nifti(output / MASKS / volume.name, mask, geometry)
        else:
            write_volume(volume, mask, geometry)
            with whole_file(stored) as temporary:
                save_arrays(temporary, {"probabilities": array})
        progress(case.name)
    labels = {name: k for k, name in enumerate(predictor.classes)}
    if predictor.ignore_label is not None:
        labels["ignore"] = predictor.ignore_label
    write_json(output / "dataset.json", {"labels": labels, "file_ending": ending})
    record = predictor.record()
    if predictor.two_heads:
        record["decision"] = DECISION_HEAD
    if calibrator is not None:
        record["calibrator"] = calibrator.summary()
    write_json(output / RECORD_NAME, record)


def _calibrated(probs: Tensor, geometry: Geometry, saved: SavedCalibrator) -> Tensor:
    """Calibrated probabilities ``(K, z, y, x)``, float32, as if read from a file."""
    logits = logits_of(probs, regions=False)[None]
    return saved.calibrator.apply(logits, spacing_mm=geometry.spacing_mm)[0].float()

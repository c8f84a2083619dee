"""An experiment: one YAML file that describes a training fully and is checked before it starts.

Relative paths are relative to the working directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from segcal.components import Component
from segcal.io.yaml import Pattern, Strict
from segcal.training.experiments import Experiment, TrainingSettings, filled, load

KIND = "experiments"
"""Folder of the shipped experiments."""
AXES = ("z", "y", "x")


class CaseSplit(Strict):
    """Which cases train and which validate.

    Attributes:
        file: nnU-Net's ``splits_final.json``; None looks for it in the data set's folder if a
            `fold` is given.
        fold: entry of the file; None takes a share of the patients instead.
        validation: share of the patients that validate, without a fold.
        seed: of the choice of these patients.
        patient: regular expression whose match at the beginning of a case's name is its patient;
            None treats every case as a patient of its own.
        train: instead of a fold, a text file with the names of the training cases, one per line, as
            PASCAL VOC has them; cases that no list names are left out.
        val: such a file for the validation cases; None takes the share `validation` of the patients
            in `train`.
    """

    file: Path | None = None
    fold: int | None = Field(default=None, ge=0)
    validation: float = Field(default=0.2, gt=0, lt=1)
    seed: int = 0
    patient: Pattern = None
    train: Path | None = None
    val: Path | None = None

    @model_validator(mode="after")
    def _one_way(self) -> CaseSplit:
        if self.file is not None and self.fold is None:
            raise ValueError("file: give also the fold to take from it")
        if self.train is None and self.val is not None:
            raise ValueError("val: give also train, the list of training cases")
        if self.train is not None and self.fold is not None:
            raise ValueError("give either a fold or lists of cases (train, val), not both")
        return self


class VolumeData(Strict):
    """The volumes, and how they are split, preprocessed and cut.

    Attributes:
        root: folder in nnU-Net's raw layout: ``imagesTr``, ``labelsTr``, ``dataset.json``.
        images: in place of `root`, a folder of images CASE.nii.gz, or of one file CASE_0000.nii.gz
            per channel, or of pictures CASE.jpg or CASE.png, whose colours are channels.
        labels: with `images`, a folder of label maps CASE.nii.gz, or CASE.png, grey or with a
            palette.
        classes: with `images`, the names of the labels 0, 1, ..., background first.
        ignore: with `images`, the label that is left out of everything, or None.
        split: see :class:`CaseSplit`.
        units: ``slices`` trains a 2-D network on all slices, with and without foreground;
            ``patches`` a 3-D network.
        axis: along which slices follow each other, as the file stores them: z is the last.
        size: of the network's input in training, in voxels: (y, x) for slices (the two axes other
            than `axis`, slowest first), (z, y, x) for patches. Smaller images are padded with 0;
            padding takes no part in losses and metrics.
        crop: ``center`` takes the middle of every slice or volume, in validation too; ``random``
            crops anywhere, and validation uses sliding windows over the whole.
        foreground: share of random crops that are centred on a foreground voxel, where there is
            one.
        per_volume: number of patches that an epoch draws from a volume.
        intensity: ``zscore`` scales every channel of a volume to mean 0 and standard deviation 1;
            ``window`` scales the range of `window` to 0..1 and clips values beyond; ``fixed``
            subtracts `mean` and divides by `std`.
        window: low and high intensity, e.g. of Hounsfield units.
        mean: of every channel of all volumes, in intensities of the files.
        std: of every channel, likewise.
        spacing_mm: voxel size (z, y, x) to resample to; None, or null for an axis, keeps the voxel
            size of the files. Predictions are resampled back to the grid of the files.
        augment: MONAI transforms of training crops, in their dictionary versions with the keys
            ``image`` and ``label``; the published trainings have none.
        cache: share of the volumes that each process keeps in memory; the other volumes are read
            again for each of their slices.
        on_device: whether the samples of training and validation are put into the memory of the
            GPU once, and augmented there, which needs `crop` center and `cache` 1. ``auto`` does so
            if they take at most a quarter of the memory that is free there, and if there is no
            augmentation that training.workers could do; true does so on any device.
    """

    root: Path | None = None
    images: Path | None = None
    labels: Path | None = None
    classes: tuple[str, ...] | None = Field(default=None, min_length=2)
    ignore: int | None = Field(default=None, ge=1, le=32767)
    split: CaseSplit = CaseSplit()
    units: Literal["slices", "patches"] = "slices"
    axis: Literal["z", "y", "x"] = "z"
    size: tuple[int, ...]
    crop: Literal["center", "random"] = "center"
    foreground: float = Field(default=0.0, ge=0, le=1)
    per_volume: int = Field(default=1, ge=1)
    intensity: Literal["zscore", "window", "fixed"] = "zscore"
    window: tuple[float, float] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    spacing_mm: tuple[float | None, float | None, float | None] | None = None
    augment: tuple[Component, ...] = ()
    cache: float = Field(default=1.0, ge=0, le=1)
    on_device: bool | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _consistent(self) -> VolumeData:
        folders = [self.images, self.labels, self.classes]
        if (self.root is None) == all(f is None for f in folders) or (
            self.root is None and None in folders
        ):
            raise ValueError("give root, or images, labels and classes")
        if self.ignore is not None and (self.classes is None or self.ignore < len(self.classes)):
            raise ValueError(
                f"ignore: expected a label that is none of the classes, got {self.ignore}; "
                "with data.root, the ignore label comes from dataset.json"
            )
        if len(self.size) != self.axes or min(self.size) < 1:
            raise ValueError(f"size: expected {self.axes} sizes for {self.units}, got {self.size}")
        if any(mm is not None and not mm > 0 for mm in self.spacing_mm or ()):
            raise ValueError(f"spacing_mm: expected positive voxel sizes, got {self.spacing_mm}")
        if self.crop == "center" and (self.foreground or self.per_volume > 1):
            raise ValueError("foreground and per_volume need crop: random")
        if self.on_device is True and (self.crop != "center" or self.cache < 1):
            raise ValueError("on_device: true needs crop: center and cache: 1")
        if self.units == "slices" and self.per_volume > 1:
            raise ValueError("per_volume needs units: patches; every slice is taken once")
        return self

    @model_validator(mode="after")
    def _intensities(self) -> VolumeData:
        if (self.intensity == "window") != (self.window is not None):
            raise ValueError("intensity 'window' needs window: [low, high]; others take none")
        if self.window is not None and not self.window[0] < self.window[1]:
            raise ValueError(f"window: expected low < high, got {self.window}")
        fixed = (self.intensity == "fixed",) * 2
        if fixed != (self.mean is not None, self.std is not None):
            raise ValueError("intensity 'fixed' needs mean and std of every channel; others none")
        if len(self.mean or ()) != len(self.std or ()) or min(self.std or (1.0,)) <= 0:
            raise ValueError(
                f"mean, std: expected as many of both and std > 0, got {self.mean}, {self.std}"
            )
        return self

    @property
    def axes(self) -> int:
        """Spatial axes of the network."""
        return 2 if self.units == "slices" else 3


class SegmentationTraining(TrainingSettings):
    """How long the training takes, and on which batches and devices.

    Attributes:
        epochs: number of passes over all slices, or over `per_volume` patches of every volume.
        batch_size: of all processes together.
        val_batch_size: number of slices, or of windows, that validation computes at once.
        precision: of the network: ``fp32``, ``bf16``, or on a GPU ``fp16``; losses, penalties and
            validation are always in float32.
        early_stop: training ends after so many epochs without a better validation mean IoU; None
            trains all epochs.
        workers: number of processes that load data, for each training process.
        find_unused_parameters: option of DistributedDataParallel, for networks that do not use all
            of their parameters.
    """

    epochs: int = Field(default=75, ge=1)
    batch_size: int = Field(default=4, ge=1)
    val_batch_size: int = Field(default=16, ge=1)
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    workers: int = Field(default=0, ge=0)
    find_unused_parameters: bool = False


class Inference(Strict):
    """How the probabilities of overlapping windows are averaged to a prediction.

    Validation with random crops averages the logits of windows instead, since penalties need
    logits. Its numbers are therefore close to the numbers of predictions, but not equal.

    Attributes:
        overlap: of neighbouring windows.
        blend: ``gaussian`` gives the middle of a window more weight, ``constant`` does not.
    """

    overlap: float = Field(default=0.5, ge=0, lt=1)
    blend: Literal["gaussian", "constant"] = "gaussian"


class SegmentationExperiment(Experiment):
    """A training of a MONAI network, described fully.

    Attributes:
        data: volumes, split, preprocessing.
        network: a class of MONAI, torch or segcal that maps ``(N, C, *S)`` to logits
            ``(N, K, *S)``; spatial_dims, in_channels and out_channels are filled in.
        scheduler: a class of torch.optim.lr_scheduler that steps every epoch, or None.
            ReduceLROnPlateau follows the validation mean IoU.
        training: see :class:`SegmentationTraining`.
        inference: see :class:`Inference`.
        output: folder of the results; ``{recipe}``, ``{fold}`` and ``{seed}`` are replaced.
    """

    must_be_same: ClassVar[Mapping[str, Sequence[str]]] = {
        **Experiment.must_be_same,
        "data": ("cache", "on_device", "root", "images", "labels"),  # their cases are compared
        "inference": (),
        "training": (
            *Experiment.must_be_same["training"],
            "workers", "val_batch_size", "find_unused_parameters",
        ),
    }  # fmt: skip

    data: VolumeData
    training: SegmentationTraining = SegmentationTraining()
    inference: Inference = Inference()

    @property
    def folder(self) -> Path:
        """Folder of the results."""
        fold = "none" if self.data.split.fold is None else self.data.split.fold
        return filled(str(super().folder), fold=fold)


def load_experiment(config: str | Path, settings: Sequence[str] = ()) -> SegmentationExperiment:
    """Read an experiment.

    Args:
        config: a YAML file, or the name of a shipped one (``acdc/unet``).
        settings: ``key=value``, keys with dots (``training.epochs=3``), values as in YAML.

    Raises:
        ValueError: no such file or name, or values that do not fit; the message lists all errors.
    """
    return load(config, SegmentationExperiment, KIND, settings)

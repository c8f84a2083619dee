"""An experiment of classification: one YAML file that describes it fully, checked before it starts.

Relative paths are relative to the working directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from segcal.components import Component, build_component
from segcal.io.yaml import Strict
from segcal.recipes import load_objective, names
from segcal.training.experiments import Experiment, TrainingSettings, load

KIND = "classify"
"""Folder of the shipped experiments."""
_READERS = "segcal.classify.readers"
SOURCES = {
    "arff": f"{_READERS}.arff.read_arff",
    "cifar10": f"{_READERS}.cifar.read_cifar10",
    "coco": f"{_READERS}.coco.read_coco",
    "csv": f"{_READERS}.csv.read_csv",
    "digit_mosaics": f"{_READERS}.digits.read_digit_mosaics",
    "digits": f"{_READERS}.digits.read_digits",
    "docstrings": f"{_READERS}.texts.read_docstrings",
    "image_folder": f"{_READERS}.image_files.read_image_folder",
    "image_list": f"{_READERS}.image_files.read_image_list",
    "images": f"{_READERS}.images.read_images",
    "npz": f"{_READERS}.archives.read_npz",
    "nus_wide": f"{_READERS}.nus_wide.read_nus_wide",
    "texts": f"{_READERS}.texts.read_texts",
    "tiny_imagenet": f"{_READERS}.image_files.read_tiny_imagenet",
    "vaw": f"{_READERS}.vaw.read_vaw",
    "vispr": f"{_READERS}.vispr.read_vispr",
    "voc": f"{_READERS}.voc.read_voc",
    "wider": f"{_READERS}.wider.read_wider",
}
"""Readers by the name of their source."""
STREAMED = frozenset(
    {
        "coco", "image_folder", "image_list", "nus_wide", "tiny_imagenet", "vaw", "vispr", "voc",
        "wider",
    }
)  # fmt: skip
"""Sources whose images stay on disk: their readers return
:func:`segcal.classify.readers.streamed.streamed`."""
MetricName = Literal["accuracy", "nll", "map_class", "map_sample"]


class SampleSplit(Strict):
    """Which samples train, validate and test, if the data set does not say.

    Attributes:
        validation: share of samples that validate, update multipliers (learned penalty weights) and
            choose the epoch.
        test: share of samples that are evaluated at the end.
        test_from: samples from which the test share is drawn, if the data set has no test samples:
            ``train`` or ``validation`` (e.g. for ImageNet, whose test set has no classes).
        seed: of the choice.
        folds: cross-validation: all samples are split into so many folds, whatever the data set
            says about them, and one fold tests; None takes the share `test`.
        fold: the fold that tests, counted from 0.
    """

    validation: float = Field(default=0.2, gt=0, lt=1)
    test: float = Field(default=0.2, gt=0, lt=1)
    test_from: Literal["train", "validation"] = "train"
    seed: int = Field(default=0, ge=0)
    folds: int | None = Field(default=None, ge=2)
    fold: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _is_one(self) -> SampleSplit:
        if self.fold >= (self.folds or 1):
            raise ValueError(f"fold: expected one of {self.folds or 1}, from 0, got {self.fold}")
        return self


class Standard(Strict):
    """Mean and deviation by which images with values 0 to 1 are standardised; default ImageNet's.

    Attributes:
        mean: of every channel, or one number for all.
        std: standard deviation of every channel, or one number for all.
    """

    mean: tuple[float, ...] = Field(default=(0.485, 0.456, 0.406), min_length=1)
    std: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=(0.229, 0.224, 0.225), min_length=1
    )


class SampleData(Strict):
    """The samples, and how they are split and preprocessed.

    Attributes:
        source: kind of the data set, a key of :data:`SOURCES`.
        args: of its reader, e.g. `path`.
        split: see :class:`SampleSplit`.
        long_tail: ratio of the largest to the smallest class that is made by leaving out training
            samples; None leaves nothing out. Validation and test samples stay as they are.
        channels: of images; 3 repeats grey ones for networks that need colours.
        augment: transforms of ``torchvision.transforms.v2`` for training images, drawn for every
            image separately. They must bring images streamed from disk, which may differ in size,
            to one size; without `augment`, `resize` is applied to training images too.
        resize: transforms that bring validation and test images streamed from disk to one size.
        standardise: mean and deviation that images are standardised by; None takes the training
            set's, and ImageNet's for images streamed from disk.
    """

    source: str
    args: dict[str, Any] = Field(default={})
    split: SampleSplit = SampleSplit()
    long_tail: float | None = Field(default=None, gt=1)
    channels: int | None = Field(default=None, ge=1)
    augment: tuple[Component, ...] = ()
    resize: tuple[Component, ...] = ()
    standardise: Standard | None = None

    @property
    def streams(self) -> bool:
        """Whether images stay on disk."""
        return self.source in STREAMED

    @model_validator(mode="after")
    def _only_streamed(self) -> SampleData:
        if self.resize and not self.streams:
            raise ValueError(
                f"resize: is for images streamed from disk ({', '.join(sorted(STREAMED))}),"
                f" and {self.source} is read as a whole"
            )
        return self

    @field_validator("source")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in SOURCES:
            raise ValueError(f"expected one of {', '.join(SOURCES)}, got {value!r}")
        return value

    def read(self) -> Any:
        """Read the samples.

        Raises:
            ValueError: arguments that the reader does not take or lacks, or files that do not fit.
        """
        path = self.args.get("path")
        if isinstance(path, str) and not Path(path).exists():
            raise ValueError(f"data.args.path: {path}: no such file or folder")
        try:
            return build_component(Component(target=SOURCES[self.source], args=self.args))
        except ValueError as error:
            raise ValueError(f"data: {error}") from None


class ClassificationTraining(TrainingSettings):
    """How long the training takes, and on which batches and devices.

    Attributes:
        epochs: number of passes over all training samples.
        batch_size: number of samples of a step.
        precision: ``fp32`` or ``bf16`` for the network; losses, penalties and validation are always
            in float32.
        clip_grad: norm to which gradients are clipped; None does not clip.
        head_lr: learning rate of the network's last layer, if it differs from the other layers'
            (``optimizer.args.lr``), e.g. for a network with pretrained weights; schedules multiply
            both.
        metric: validation metric that chooses the best epoch (the last of equal ones); None takes
            ``nll``, and ``map_class`` for losses whose scores are no probabilities. On a small set
            many epochs tie in accuracy and mAP, which also ignore calibration.
        test_curves: whether to measure the test samples after every epoch too, for curves over the
            epochs; they choose nothing.
        workers: number of processes that decode images streamed from disk; 0 decodes them in the
            training process, None takes one per core minus one, at most 8.
    """

    epochs: int = Field(default=60, ge=1)
    batch_size: int = Field(default=64, ge=1)
    precision: Literal["fp32", "bf16"] = "fp32"
    clip_grad: float | None = Field(default=None, gt=0)
    head_lr: float | None = Field(default=None, gt=0)
    metric: MetricName | None = None
    test_curves: bool = False
    workers: int | None = Field(default=None, ge=0)


def check_recipe(name: str) -> None:
    """Raise ValueError unless a loss of classes or a multi-label loss has this name."""
    if name not in names("multilabel"):
        try:
            load_objective(name)
        except ValueError as error:
            raise ValueError(f"{error}; of labels {', '.join(names('multilabel'))}") from None


class ClassificationExperiment(Experiment):
    """A training of a classifier, described fully.

    Attributes:
        data: samples, split, preprocessing.
        network: a class or function of timm, torchvision, MONAI, torch or segcal whose network
            gives logits ``(N, K)``; numbers of classes, channels and features are filled in if it
            has such arguments.
        recipe: the loss: for classes a recipe, loss or penalty, or a YAML file; for labels the name
            of a multi-label loss.
        training: see :class:`ClassificationTraining`.
        bins: number of bins of equal width for calibration errors and reliability diagrams; None
            takes 15 for classes and 10 for labels.
    """

    must_be_same: ClassVar[Mapping[str, Sequence[str]]] = {
        **Experiment.must_be_same,
        "data": ("args",),  # their samples are compared
        "training": (*Experiment.must_be_same["training"], "test_curves", "workers"),
    }

    data: SampleData
    training: ClassificationTraining = ClassificationTraining()
    bins: int | None = Field(default=None, ge=1)

    @staticmethod
    def check_recipe(name: str) -> None:
        """Raise ValueError unless a loss of classes or a multi-label loss has this name."""
        check_recipe(name)


def load_experiment(config: str | Path, settings: Sequence[str] = ()) -> ClassificationExperiment:
    """Read an experiment.

    Args:
        config: a YAML file, or the name of a shipped one (``digits``).
        settings: ``key=value``, keys with dots (``training.epochs=3``), values as in YAML.

    Raises:
        ValueError: no such file or name, or values that do not fit; the message lists all errors.
    """
    return load(config, ClassificationExperiment, KIND, settings)

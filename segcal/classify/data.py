"""Samples of an experiment as tensors: parted, cut to a long tail, in batches."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from segcal.classify.experiment import SampleData
from segcal.classify.readers.samples import PARTS, Samples, long_tailed, split
from segcal.components import Component
from segcal.training.building import build_part

FILE_ARGUMENTS = ("path", "labels")
"""Arguments of readers that may name files."""
SUMMED_AT_ONCE = 1024
"""Samples whose bytes are brought in a row for a checksum."""


@dataclass(frozen=True)
class Part:
    """Samples that train, validate or test.

    Attributes:
        inputs: ``(N, ...)``.
        targets: ``(N,)`` classes or ``(N, T)`` labels.
        index: their numbers in the data set ``(N,)``.
    """

    inputs: Tensor
    targets: Tensor
    index: Tensor

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.targets)

    def to(self, device: torch.device) -> Part:
        """Bring the samples to a device."""
        return Part(self.inputs.to(device), self.targets.to(device), self.index)

    def batches(self, size: int) -> Iterator[Part]:
        """Yield the samples in order, at most `size` at a time."""
        for begin in range(0, len(self), size):
            chosen = slice(begin, begin + size)
            yield Part(self.inputs[chosen], self.targets[chosen], self.index[chosen])

    def shuffled(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets in random order; a last batch of one sample is left out.

        Args:
            size: of a batch.
            seed: of the order.
        """
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=generator).to(self.targets.device)
        for chosen in torch.split(order, size):
            if len(chosen) > 1 or len(self) == 1:  # of one, batch normalisation makes nothing
                yield self.inputs[chosen], self.targets[chosen]


@dataclass(frozen=True)
class Parted:
    """A data set, ready to be trained on.

    Attributes:
        parts: by name: train, validation, test.
        names: of the classes or labels.
        multilabel: whether a sample may have several.
        num_words: of the vocabulary, of texts.
        checksum: of which samples train, validate and test, with all they hold, or the files that
            they come from.
    """

    parts: Mapping[str, Part]
    names: tuple[str, ...]
    multilabel: bool
    num_words: int | None
    checksum: int

    def counts(self) -> tuple[Tensor, Tensor]:
        """How many training samples have each label, and how many lack it."""
        targets = self.parts["train"].targets
        return (targets == 1).sum(0), (targets == 0).sum(0)

    def frequencies(self) -> dict[str, int]:
        """Training samples of every class or label."""
        targets = self.parts["train"].targets
        if self.multilabel:
            found = self.counts()[0]
        else:
            found = torch.bincount(targets, minlength=len(self.names))
        return dict(zip(self.names, found.tolist(), strict=True))


def load(data: SampleData) -> Parted:
    """Read and part the samples of an experiment; those read last are kept in memory.

    Raises:
        ValueError: files or settings that do not fit.
    """
    return _load(data.model_dump_json(), _stamp(data))


def check_data(content: Mapping[str, Any], data: Parted, path: Path) -> None:
    """Raise ValueError unless a checkpoint's samples and their parts are those of the data.

    With others, what was trained on could be tested on.
    """
    if content["data"] != data.checksum:
        raise ValueError(
            f"{path}: was trained when its data set had other samples, targets or parts; bring "
            "back the files it was trained on, or train anew"
        )


def _stamp(data: SampleData) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of the files that are read, or of those in a folder."""
    given = [data.args.get(name) for name in FILE_ARGUMENTS]
    named = [Path(v) for v in given if isinstance(v, str)]
    files = [file for path in named for file in (path, *sorted(path.rglob("*")))]
    return tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.exists())


@lru_cache(maxsize=2)
def _load(settings: str, stamp: object) -> Parted:
    data = SampleData.model_validate_json(settings)
    samples: Samples = data.read()
    images = samples.inputs.ndim == 4
    if not images and (data.channels is not None or data.augment):
        raise ValueError(f"data: channels and augment are of images, and {data.source} has none")
    chosen = split(
        samples,
        validation=data.split.validation,
        test=data.split.test,
        seed=data.split.seed,
        fold=None if data.split.folds is None else (data.split.fold, data.split.folds),
    )
    parts = {}
    for number, name in enumerate(PARTS):
        index = np.flatnonzero(chosen == number)
        if name == "train" and data.long_tail is not None:
            if samples.multilabel:
                raise ValueError("data.long_tail: is of classes, and these are labels")
            seed = data.split.seed
            index = index[
                long_tailed(samples.targets[index], len(samples.names), data.long_tail, seed)
            ]
        part = samples.take(index)
        inputs = torch.from_numpy(part.inputs)
        if images and data.channels is not None:
            inputs = _with_channels(inputs, data.channels)
        parts[name] = Part(
            inputs, torch.from_numpy(part.targets.astype(np.int64)), torch.from_numpy(index)
        )
    words = int(samples.inputs.max()) + 1 if samples.inputs.dtype == np.int64 else None
    checksum = _checksum(parts, samples.names, samples.checksum)
    return Parted(parts, samples.names, samples.multilabel, words, checksum)


def _checksum(parts: Mapping[str, Part], names: tuple[str, ...], files: int | None) -> int:
    found = zlib.crc32(repr((names, files)).encode())
    for part in parts.values():
        found = zlib.crc32(repr(tuple(part.inputs.shape)).encode(), found)
        for tensor in (part.index, part.targets, part.inputs if files is None else part.inputs[:0]):
            for some in torch.split(tensor, SUMMED_AT_ONCE):
                found = zlib.crc32(some.contiguous().numpy().data, found)
    return found


def _with_channels(images: Tensor, channels: int) -> Tensor:
    if images.shape[1] not in (1, channels):
        raise ValueError(f"data.channels: {channels} of images with {images.shape[1]}")
    return images.expand(-1, channels, -1, -1)


class Augment:
    """Draws transforms for every image of a batch.

    Args:
        components: classes of ``torchvision.transforms.v2``.

    Raises:
        ValueError: what is none, or arguments that do not fit.
    """

    def __init__(self, components: tuple[Component, ...]) -> None:
        self.transforms = [build_part(c, nn.Module, "data.augment") for c in components]

    def __call__(self, images: Tensor) -> Tensor:
        """Return images of the same size."""
        if not self.transforms:
            return images
        changed = []
        for image in images:
            for transform in self.transforms:
                image = transform(image)
            changed.append(image)
        return torch.stack(changed)

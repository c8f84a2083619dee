"""Samples of an experiment as tensors: split into parts, optionally long-tailed, in batches."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.classify.augmenting import Augment
from segcal.classify.experiment import SampleData
from segcal.classify.readers.decoding import ImageFiles
from segcal.classify.readers.samples import PARTS, Samples, long_tailed, split
from segcal.classify.streaming import StreamedImages

FILE_ARGUMENTS = ("path", "labels", "vectors")
"""Arguments of readers that may name files."""
SUMMED_AT_ONCE = 1024
"""Number of samples whose bytes go into a checksum at a time."""


@dataclass(frozen=True)
class Part:
    """Samples that train, validate or test.

    Attributes:
        inputs: ``(N, ...)``, or images that stay on disk.
        targets: ``(N,)`` classes or ``(N, T)`` labels.
        index: their numbers in the data set ``(N,)``.
    """

    inputs: Tensor | StreamedImages
    targets: Tensor
    index: Tensor

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.targets)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an input as it is evaluated."""
        return tuple(self.inputs[:1].shape[1:])

    def some(self, numbers: Sequence[int]) -> Tensor:
        """Inputs of some samples, as they are evaluated."""
        return next(self._inputs([torch.tensor(numbers)]))

    def to(self, device: torch.device, workers: int = 0) -> Part:
        """Move the samples to a device; images on disk follow batch by batch."""
        inputs = self.inputs
        brought = inputs.to(device) if isinstance(inputs, Tensor) else inputs.to(device, workers)
        return Part(brought, self.targets.to(device), self.index)

    def batches(self, size: int) -> Iterator[Part]:
        """Yield the samples in order, at most `size` at a time."""
        chosen = torch.split(torch.arange(len(self), device=self.targets.device), size)
        for some, inputs in zip(chosen, self._inputs(chosen), strict=True):
            yield Part(inputs, self.targets[some], self.index[some])

    def shuffled(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets in random order; a last batch of one sample is left out.

        Images from disk get the transforms of training.

        Args:
            size: of a batch.
            seed: of the order, and of transforms of images from disk.
        """
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=generator).to(self.targets.device)
        chosen = [
            some
            for some in torch.split(order, size)
            if len(some) > 1 or len(self) == 1  # of one, batch normalisation makes nothing
        ]
        for some, inputs in zip(chosen, self._inputs(chosen, seed), strict=True):
            yield inputs, self.targets[some]

    def some_trained_on(self) -> Tensor:
        """Two inputs, as they are in training."""
        return next(self._inputs([torch.arange(min(2, len(self)))], seed=0))

    def _inputs(self, chosen: Sequence[Tensor], seed: int | None = None) -> Iterator[Tensor]:
        if isinstance(self.inputs, Tensor):
            return (self.inputs[some] for some in chosen)
        return self.inputs.batches([some.tolist() for some in chosen], seed)


@dataclass(frozen=True)
class Parted:
    """A data set, ready to be trained on.

    Attributes:
        parts: by name: train, validation, test.
        names: of the classes or labels.
        multilabel: whether a sample may have several labels.
        num_words: size of the vocabulary, for texts.
        checksum: of the samples of every part with their content, or with the files that they come
            from.
        vectors: of the words ``(W, D)``, NaN for words without a vector; None for no vectors.
    """

    parts: Mapping[str, Part]
    names: tuple[str, ...]
    multilabel: bool
    num_words: int | None
    checksum: int
    vectors: Tensor | None = None

    def counts(self) -> tuple[Tensor, Tensor]:
        """Numbers of training samples with and without each class or label."""
        targets = self.parts["train"].targets
        if not self.multilabel:
            found = torch.bincount(targets, minlength=len(self.names))
            return found, len(targets) - found
        return (targets == 1).sum(0), (targets == 0).sum(0)

    @property
    def tested(self) -> int:
        """Checksum of which samples test."""
        return zlib.crc32(self.parts["test"].index.numpy().data)

    def frequencies(self) -> dict[str, int]:
        """Number of training samples of every class or label."""
        return dict(zip(self.names, self.counts()[0].tolist(), strict=True))


def load(data: SampleData) -> Parted:
    """Read and split the samples of an experiment; the last data sets stay in memory.

    Raises:
        ValueError: files or settings that do not fit.
    """
    return _load(data.model_dump_json(), _stamp(data))


def check_data(content: Mapping[str, Any], data: Parted, path: Path) -> None:
    """Raise ValueError unless a checkpoint was trained with the same samples and parts.

    Otherwise, samples that were trained on could be tested on.
    """
    if content["data"] != data.checksum:
        raise ValueError(
            f"{path}: was trained when its data set had other samples, targets or parts; restore "
            "the files it was trained on, or train again"
        )


def _stamp(data: SampleData) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of the files that are read, or of the files in a folder.

    For a folder of streamed images only of the folder itself, since a checksum covers the files.
    """
    given = data.args.values() if data.streams else map(data.args.get, FILE_ARGUMENTS)
    named = [Path(v) for v in given if isinstance(v, str)]
    files = [
        file
        for path in named
        for file in (path, *(() if data.streams else sorted(path.rglob("*"))))
    ]
    return tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.exists())


@lru_cache(maxsize=2)
def _load(settings: str, stamp: object) -> Parted:
    data = SampleData.model_validate_json(settings)
    samples: Samples = data.read()
    images = samples.inputs.ndim == 4
    if data.streams != isinstance(samples.inputs, ImageFiles):
        raise ValueError(f"data.source: {data.source} is listed wrongly in STREAMED")
    if not images and (data.channels is not None or data.augment):
        raise ValueError(f"data: channels and augment are for images, and {data.source} has none")
    chosen = split(
        samples,
        validation=data.split.validation,
        test=data.split.test,
        test_from=data.split.test_from,
        seed=data.split.seed,
        fold=None if data.split.folds is None else (data.split.fold, data.split.folds),
    )
    parts = {}
    for number, name in enumerate(PARTS):
        index = np.flatnonzero(chosen == number)
        if name == "train" and data.long_tail is not None:
            if samples.multilabel:
                raise ValueError("data.long_tail: needs classes, but samples have labels here")
            seed = data.split.seed
            index = index[
                long_tailed(samples.targets[index], len(samples.names), data.long_tail, seed)
            ]
        part = samples.take(index)
        parts[name] = Part(
            _inputs(part.inputs, data),
            torch.from_numpy(part.targets.astype(np.int64)),
            torch.from_numpy(index),
        )
    words = None
    if isinstance(samples.inputs, np.ndarray) and samples.inputs.dtype == np.int64:
        words = int(samples.inputs.max()) + 1 if samples.vectors is None else len(samples.vectors)
    vectors = None if samples.vectors is None else torch.from_numpy(samples.vectors)
    checksum = _checksum(parts, samples.names, samples.checksum)
    return Parted(parts, samples.names, samples.multilabel, words, checksum, vectors)


def _inputs(inputs: NDArray[Any] | ImageFiles, data: SampleData) -> Tensor | StreamedImages:
    """Inputs as tensors, or images that are decoded when needed."""
    if isinstance(inputs, ImageFiles):
        if data.channels not in (None, inputs.channels):
            raise ValueError(
                f"data.channels: {data.channels}, but images are read with {inputs.channels}"
            )
        evaluation = Augment(data.resize, "data.resize")
        return StreamedImages(inputs, Augment(data.augment or data.resize), evaluation)
    tensor = torch.from_numpy(inputs)
    return tensor if data.channels is None else _with_channels(tensor, data.channels)


def _checksum(parts: Mapping[str, Part], names: tuple[str, ...], files: int | None) -> int:
    found = zlib.crc32(repr((names, files)).encode())
    for part in parts.values():
        summed = [part.index, part.targets]
        if isinstance(part.inputs, Tensor):
            found = zlib.crc32(repr(tuple(part.inputs.shape)).encode(), found)
            summed += [part.inputs] if files is None else []
        for tensor in summed:
            for some in torch.split(tensor, SUMMED_AT_ONCE):
                found = zlib.crc32(some.contiguous().numpy().data, found)
    return found


def _with_channels(images: Tensor, channels: int) -> Tensor:
    if images.shape[1] not in (1, channels):
        raise ValueError(f"data.channels: {channels}, but images have {images.shape[1]}")
    return images.expand(-1, channels, -1, -1)

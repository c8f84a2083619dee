"""Images of a data set that stay on disk and are decoded batch by batch in other processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from segcal.classify.augmenting import Augment
from segcal.classify.readers.decoding import ImageError, ImageFiles

__all__ = ["StreamedImages", "decoders"]

AHEAD = 2
"""Number of batches that every process prepares in advance."""
CPU = torch.device("cpu")
MOST_DECODERS = 8
"""Largest default number of processes that decode."""


def decoders(workers: int | None) -> int:
    """Number of processes that decode images: as asked, or one per core minus one."""
    if workers is not None:
        return workers
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min((found or 1) - 1, MOST_DECODERS)


@dataclass(frozen=True)
class StreamedImages:
    """Images in files, in place of a tensor of them ``(N, C, H, W)``.

    Memory holds only the images of one batch, and of :data:`AHEAD` batches for every process.
    Random transforms depend only on the seed of the epoch and the number of the image, not on the
    process that decodes it.

    Attributes:
        files: the image files.
        training: transforms of training images.
        evaluation: transforms of validation and test images, which bring all to one size.
        workers: number of processes that decode; 0 decodes in the calling process.
        device: that batches are moved to.
    """

    files: ImageFiles
    training: Augment
    evaluation: Augment
    workers: int = 0
    device: torch.device = CPU

    ndim = 4

    def __len__(self) -> int:
        """Number of images."""
        return len(self.files)

    def __getitem__(self, index: slice) -> Tensor:
        """Images ``(n, C, H, W)`` as they are evaluated."""
        return next(self.batches([range(len(self))[index]]))

    def to(self, device: torch.device, workers: int) -> StreamedImages:
        """Move batches to a device, decoded by so many processes."""
        return replace(self, device=device, workers=workers)

    def batches(self, chosen: Sequence[Sequence[int]], seed: int | None = None) -> Iterator[Tensor]:
        """Yield images ``(n, C, H, W)``.

        Args:
            chosen: numbers of the images of every batch.
            seed: of the transforms of training; None takes the transforms of evaluation.

        Raises:
            ImageError: a file is no image, images of a batch differ in size, or transforms fail;
                the message names the file.
        """
        loader = DataLoader(
            _Decoding(self.files, self.evaluation if seed is None else self.training, seed),
            sampler=chosen,
            batch_size=None,  # the sampler gives whole batches
            num_workers=self.workers if len(chosen) > 1 else 0,
            prefetch_factor=AHEAD if self.workers and len(chosen) > 1 else None,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # of its own: torch's is that of dropout
        )
        for batch in loader:
            if isinstance(batch, ImageError):  # raised here, without what a process puts around it
                raise batch
            yield batch.to(self.device, non_blocking=True)


@dataclass(frozen=True)
class _Decoding(Dataset[Any]):
    """Batches by the numbers of their images; for a damaged image an error replaces the batch."""

    files: ImageFiles
    transform: Augment
    seed: int | None

    def __getitem__(self, numbers: Sequence[int]) -> Tensor | ImageError:
        images: list[Tensor] = []
        try:
            for number in numbers:
                images.append(self._image(int(number)))
                if images[-1].shape != images[0].shape:
                    sizes = [" x ".join(map(str, x.shape[1:])) for x in (images[0], images[-1])]
                    files = [self.files.file(int(n)) for n in (numbers[0], number)]
                    raise ImageError(
                        f"{files[0]} is {sizes[0]} and {files[1]} {sizes[1]}: bring all images to "
                        "one size, with data.resize for evaluation and data.augment for training"
                    )
        except ImageError as error:
            return error
        return torch.stack(images)

    def _image(self, number: int) -> Tensor:
        image = torch.from_numpy(self.files.decode(number))
        state = torch.get_rng_state()
        if self.seed is not None:
            drawn = np.random.SeedSequence((self.seed, number)).generate_state(1)
            torch.default_generator.manual_seed(int(drawn[0]))
        try:
            return self.transform.of_one(image)
        except Exception as error:  # noqa: BLE001 - whatever it says, it does not work
            where = "data.resize" if self.seed is None else "data.augment"
            raise ImageError(
                f"{where}: fails on {self.files.file(number)} ({type(error).__name__}: {error})"
            ) from None
        finally:
            torch.set_rng_state(state)

"""Volumes of an experiment, which MONAI's transforms read, preprocess and cut up.

Arrays are ``(C, z, y, x)`` in the order of the file; nothing is rotated, so a slice is a slice of
the file. Random numbers are drawn from the seed, the epoch and the number of a sample, and so do
not depend on workers, processes or an interruption.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from monai.data import CacheDataset
from monai.transforms import (
    Compose,
    NormalizeIntensityd,
    Randomizable,
    ResizeWithPadOrCropd,
    ScaleIntensityRanged,
    SpatialPadd,
    Transform,
)
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset, Sampler

from segcal.adapters.monai.dataset import CaseFiles
from segcal.adapters.monai.experiment import AXES, VolumeData
from segcal.io.volumes import Geometry, read_geometry, read_labels, read_volume
from segcal.training.building import build_part

Item = dict[str, Tensor]


class ReadCase(Transform):
    """Read the files of a case: ``image (C, z, y, x)`` float32 and ``label (1, z, y, x)``."""

    def __call__(self, case: CaseFiles) -> Item:
        """Read a case.

        Raises:
            ValueError: the file is not readable, or holds values that are not finite; its name is
                given.
        """
        channels: list[NDArray[np.float32]] = []
        for path in case.images:
            array = read_volume(path).array
            if array.dtype.kind not in "iufb":
                raise ValueError(f"{path}: expected intensities, got values of type {array.dtype}")
            array = array.astype(np.float32)
            if not np.isfinite(array).all():
                raise ValueError(f"{path}: holds NaN or infinite values")
            channels.extend(array if array.ndim > 3 else array[None])
        item = {"image": torch.from_numpy(np.stack(channels))}
        if case.label is not None:
            label = read_labels(case.label).array.astype(np.int16)
            item["label"] = torch.from_numpy(label[None])
        return item


class Resample(Transform):
    """Resample the volumes of an item to another size, edge to edge; labels by nearest neighbours.

    Args:
        shape: of the grid of a case ``(z, y, x)``.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __call__(self, item: Item) -> Item:
        """Resample image and label."""
        done = {"image": resample(item["image"], self.shape)}
        if "label" in item:
            label = interpolate(item["label"][None].float(), self.shape, mode="nearest-exact")
            done["label"] = label[0].to(item["label"].dtype)
        return done


def resample(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Resample ``(C, z, y, x)`` to another size, edge to edge, by linear interpolation."""
    if tuple(x.shape[1:]) == tuple(shape):
        return x
    return interpolate(x[None], shape, mode="trilinear", align_corners=False)[0]


class Plain(Transform):
    """Remove the metadata of tensors, which costs time in every later operation."""

    def __call__(self, item: Mapping[str, Tensor]) -> Item:
        """Return plain tensors."""
        return {k: v.as_subclass(Tensor).contiguous() for k, v in item.items()}


class Copy(Transform):
    """Copy tensors, since some transforms write into their input, a view of a cached volume."""

    def __call__(self, item: Mapping[str, Tensor]) -> Item:
        """Return copies."""
        return {k: v.clone() for k, v in item.items()}


class Preprocess(Transform):
    """From the files of a case to the input of a network, uncropped: read, resample, normalise.

    Args:
        data: says how.
    """

    def __init__(self, data: VolumeData) -> None:
        self.data = data
        if data.window is None:
            self.normalise = NormalizeIntensityd("image", data.mean, data.std, channel_wise=True)
        else:
            low, high = data.window
            self.normalise = ScaleIntensityRanged("image", low, high, 0.0, 1.0, clip=True)

    def __call__(self, case: CaseFiles) -> Item:
        """Read and prepare a case.

        Raises:
            ValueError: see :class:`ReadCase`.
        """
        item = ReadCase()(case)
        geometry, _ = read_geometry(case.images[0])
        item = Resample(network_shape(geometry, self.data))(item)
        return Plain()(self.normalise(item))


def network_shape(geometry: Geometry, data: VolumeData) -> tuple[int, ...]:
    """Size ``(z, y, x)`` of a volume as the network sees it."""
    if data.spacing_mm is None:
        return geometry.shape
    sides = zip(geometry.shape, geometry.spacing_mm, data.spacing_mm, strict=True)
    return tuple(n if new is None else max(1, round(n * mm / new)) for n, mm, new in sides)


def cached(cases: Sequence[CaseFiles], data: VolumeData, workers: int) -> CacheDataset:
    """Preprocessed volumes, kept in memory.

    Raises:
        ValueError: see :class:`ReadCase`.
    """
    try:
        return CacheDataset(
            list(cases),
            Preprocess(data),
            cache_rate=data.cache,
            num_workers=max(workers, 1),
            progress=False,
            copy_cache=False,  # nothing writes into it, and a slice would copy its volume
        )
    except RuntimeError as error:  # MONAI's account of the ValueError of a transform
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ValueError):
            cause = cause.__cause__
        raise (error if cause is None else cause) from None


class RandomCrop(Randomizable, Transform):
    """Cut a random box, centred on a foreground voxel if drawn so and the image is large enough.

    Args:
        data: size of the box and share of foreground.
        num_classes: labels from 1 to below this are foreground.
    """

    def __init__(self, data: VolumeData, num_classes: int) -> None:
        self.size = data.size
        self.foreground = data.foreground
        self.num_classes = num_classes

    def __call__(self, item: Item) -> Item:
        """Cut image and label, which are as large as the box or larger."""
        label = item["label"][0]
        room = [n - size for n, size in zip(label.shape, self.size, strict=True)]
        wants = self.R.random_sample() < self.foreground
        if wants and len(voxels := torch.nonzero((label > 0) & (label < self.num_classes))):
            centre = voxels[self.R.randint(len(voxels))].tolist()
            corner = [
                min(max(c - size // 2, 0), free)
                for c, size, free in zip(centre, self.size, room, strict=True)
            ]
        else:
            corner = [int(self.R.randint(free + 1)) for free in room]
        box = (slice(None), *(slice(c, c + n) for c, n in zip(corner, self.size, strict=True)))
        return {key: value[box] for key, value in item.items()}


def crop_transforms(data: VolumeData, num_classes: int, padding: int) -> Compose:
    """Transforms from a whole slice or volume to a training sample."""
    pad = ResizeWithPadOrCropd if data.crop == "center" else SpatialPadd
    steps = [
        pad("image", data.size, mode="constant", value=0.0),
        pad("label", data.size, mode="constant", value=padding),
    ]
    if data.crop == "random":
        steps.append(RandomCrop(data, num_classes))
    if data.augment:
        steps.append(Copy())
    for i, component in enumerate(data.augment):
        steps.append(build_part(component, Transform, f"data.augment.{i}"))
    return Compose([*steps, Plain()])


@dataclass(frozen=True)
class Unit:
    """A slice of a volume, or a random crop of it.

    Attributes:
        case: number of the volume.
        place: number of the slice, or of the crop.
    """

    case: int
    place: int


def units(geometries: Sequence[Geometry], data: VolumeData) -> list[Unit]:
    """All slices of all volumes, or all crops of an epoch."""
    if data.units == "patches":
        counts = [data.per_volume] * len(geometries)
    else:
        axis = AXES.index(data.axis)
        counts = [network_shape(geometry, data)[axis] for geometry in geometries]
    return [Unit(case, place) for case, n in enumerate(counts) for place in range(n)]


def take_slice(item: Item, axis: str, place: int) -> Item:
    """A slice ``(C, a, b)`` of every volume ``(C, z, y, x)`` of an item."""
    return {key: value.select(1 + AXES.index(axis), place) for key, value in item.items()}


SHARE_OF_GPU = 0.25
"""Of the free memory of a GPU: larger data sets are not kept there unless the user asks for it."""


def kept_on(
    data: VolumeData, samples: int, channels: int, workers: int, device: torch.device
) -> torch.device | None:
    """Where samples are kept that are cut once for all epochs; None where they are cut anew.

    Cutting small slices again in every epoch would take longer than the network does.

    Args:
        data: how they are cut.
        samples: how many there are, of training and validation.
        channels: of an image.
        workers: processes that load data; where there are some, augmentation is left to them.
        device: that trains.
    """
    if data.crop != "center" or data.cache < 1:
        return None
    if data.on_device is True:
        return device
    size = samples * math.prod(data.size) * (4 * channels + 2)  # float32 images, int16 labels
    if (
        data.on_device == "auto"
        and device.type == "cuda"
        and not (data.augment and workers)
        and size <= SHARE_OF_GPU * torch.cuda.mem_get_info(device)[0]
    ):
        return device
    return None if data.augment else torch.device("cpu")


def together(items: Iterable[Item], count: int, device: torch.device | None = None) -> Item:
    """Items of one shape, stacked one by one, so that memory holds them once.

    Args:
        items: what is stacked.
        count: how many there are.
        device: where; None leaves them where they are.
    """
    found: Item = {}
    for i, item in enumerate(items):
        for key, value in item.items():
            if i == 0:
                found[key] = value.new_empty((count, *value.shape), device=device)
            found[key][i] = value
    return found


class Crops(Dataset[Item]):
    """Training samples; a key is the number of a unit and the seed of its random numbers.

    Args:
        volumes: preprocessed, by number.
        listed: slices or crops of the volumes.
        data: says how they are cut.
        transform: see :func:`crop_transforms`.
    """

    def __init__(
        self, volumes: CacheDataset, listed: Sequence[Unit], data: VolumeData, transform: Compose
    ) -> None:
        self.volumes = volumes
        self.units = listed
        self.data = data
        self.transform = transform

    def __getitem__(self, key: tuple[int, int]) -> Item:
        """Cut a sample.

        Raises:
            ValueError: `transform` interpolates between labels.
        """
        number, seed = key
        return self.finish(self.whole(number), seed)

    def whole(self, number: int) -> Item:
        """The slice or volume that a sample is cut out of."""
        unit = self.units[number]
        item: Item = self.volumes[unit.case]
        if self.data.units == "slices":
            item = take_slice(item, self.data.axis, unit.place)
        return item

    def finish(self, item: Item, seed: int, start: int = 0) -> Item:
        """Transform an item, from a step on.

        Raises:
            ValueError: `transform` interpolates between labels.
        """
        self.transform.set_random_state(seed)
        done: Item = self.transform(item, start=start)
        label = done["label"]
        if label.is_floating_point() and not bool((label == label.round()).all()):
            raise ValueError(
                "data.augment: a transform interpolates between labels, which gives values that "
                "are no labels; let it take the nearest label, e.g. keys: [image, label], mode: "
                "[bilinear, nearest]"
            )
        return done


class KeptBatches(Dataset[Item]):
    """Batches of training samples that were cut once and lie in the memory of a device.

    They equal batches of `crops`. Augmentation, if there is any, is done where the samples lie,
    with the seed of each sample.

    Args:
        crops: training samples that are not cut at random.
        device: where they are kept.
    """

    def __init__(self, crops: Crops, device: torch.device) -> None:
        self.crops = crops
        steps, plain = crops.transform, Plain()
        self.start = steps.get_index_of_first(lambda step: isinstance(step, Copy))  # augmentation
        count = len(crops.units)
        cut = (plain(steps(crops.whole(i), end=self.start)) for i in range(count))
        self.device = device
        self.kept = together(cut, count, device)

    def __getitem__(self, keys: list[tuple[int, int]]) -> Item:
        """A batch, ``(N, C, *S)`` and ``(N, 1, *S)``, by the keys of its samples.

        Raises:
            ValueError: a transform interpolates between labels.
        """
        chosen = torch.tensor([number for number, _ in keys], device=self.device)
        batch = {name: value.index_select(0, chosen) for name, value in self.kept.items()}
        if self.start is None:
            return batch
        items = (
            self.crops.finish({name: value[i] for name, value in batch.items()}, seed, self.start)
            for i, (_, seed) in enumerate(keys)
        )
        return together(items, len(keys))


@dataclass(frozen=True)
class Share:
    """Part of a batch that one rank gets.

    Attributes:
        samples: how many.
        weight: factor of their mean, so that the mean over ranks equals the mean over the batch.
    """

    samples: int
    weight: float


class EpochBatches(Sampler[list[tuple[int, int]]]):
    """A rank's shares of the batches of an epoch; every epoch has its own order.

    The order of all samples is cut into batches; each rank gets every n-th sample of a batch. The
    last batch may be smaller, and shares then differ by one; a rank without a sample gets the first
    one with weight 0, because all ranks must take part.

    Args:
        count: number of units.
        batch_size: of all ranks.
        seed: of the order and of the samples.
        rank: of this process.
        ranks: number of processes.

    Raises:
        ValueError: fewer samples in a batch than ranks.
    """

    def __init__(self, count: int, batch_size: int, seed: int, rank: int, ranks: int) -> None:
        if batch_size < ranks:
            raise ValueError(
                f"training.batch_size: all processes share it, and {batch_size} samples are fewer "
                f"than {ranks} processes"
            )
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self.rank, self.ranks = rank, ranks
        self.epoch = 0

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)

    def share(self, batch: int) -> Share:
        """This rank's part of a batch."""
        size = min(self.batch_size, self.count - batch * self.batch_size)
        samples = len(range(self.rank, size, self.ranks))
        return Share(samples, samples * self.ranks / size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.count)
        seeds = np.random.SeedSequence([self.seed, self.epoch, 1]).generate_state(self.count)
        keys = [(int(i), int(seeds[i])) for i in order]
        for start in range(0, self.count, self.batch_size):
            batch = keys[start : start + self.batch_size]
            yield batch[self.rank :: self.ranks] or batch[:1]


class ValidationBatches(Dataset[Item]):
    """Batches of validation: slices of a volume that follow each other, or a whole volume.

    Args:
        volumes: preprocessed, by number.
        geometries: their grids.
        data: says how they are cut.
        batch_size: slices at once.
        padding: label that padding gets.
        device: where all batches are kept; None cuts them anew in every epoch.
    """

    def __init__(
        self,
        volumes: CacheDataset,
        geometries: Sequence[Geometry],
        data: VolumeData,
        batch_size: int,
        padding: int,
        device: torch.device | None = None,
    ) -> None:
        self.volumes = volumes
        self.data = data
        steps = []
        if data.crop == "center":
            steps = [
                ResizeWithPadOrCropd("image", data.size, mode="constant", value=0.0),
                ResizeWithPadOrCropd("label", data.size, mode="constant", value=padding),
            ]
        self.transform = Compose([*steps, Plain()])
        self.batches: list[tuple[int, range]] = []
        for case, geometry in enumerate(geometries):
            n = 1
            if data.units == "slices":
                n = network_shape(geometry, data)[AXES.index(data.axis)]
            self.batches += [
                (case, range(start, min(start + batch_size, n)))
                for start in range(0, n, batch_size)
            ]
        self.kept: list[Item] | None = None
        if device is not None:
            cut = (self._cut(*batch) for batch in self.batches)
            self.kept = [{k: v.to(device) for k, v in batch.items()} for batch in cut]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Item:
        """A batch, ``(N, C, *S)`` and ``(N, 1, *S)``."""
        if self.kept is not None:  # a network may write into what it is given
            return {key: value.clone() for key, value in self.kept[number].items()}
        return self._cut(*self.batches[number])

    def _cut(self, case: int, places: range) -> Item:
        item = self.volumes[case]
        if self.data.units == "patches":
            cut = [self.transform(item)]
        else:
            cut = [self.transform(take_slice(item, self.data.axis, place)) for place in places]
        return {key: torch.stack([one[key] for one in cut]) for key in cut[0]}

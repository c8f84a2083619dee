"""Other data on which multipliers are updated than nnU-Net's validation: fixed patches, volumes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nnunetv2.training.dataloading.data_loader import crop_and_pad_nd
from torch import Tensor

from segcal.io.files import read_json

Box = tuple[slice, ...]


def calibration_cases(
    split: Mapping[str, Sequence[str]], train: Sequence[str], val: Sequence[str]
) -> list[str]:
    """Return the ``calib`` cases of a fold of ``splits_final.json``; empty if it lists none.

    Raises:
        ValueError: an empty list, or a case that is also in train or val.
    """
    if "calib" not in split:
        return []
    cases = list(split["calib"])
    if not cases:
        raise ValueError('splits_final.json: "calib" is empty; name cases, or leave it out')
    if twice := sorted(set(cases) & {*train, *val}):
        raise ValueError(
            f'splits_final.json: "calib" cases are also in train or val: {", ".join(twice)}; '
            "multipliers must learn from cases of their own"
        )
    return cases


def calibration_cases_of(trainer: Any, train: Sequence[str], val: Sequence[str]) -> list[str]:
    """Return the ``calib`` cases of the fold of nnU-Net's trainer; empty for fold ``all``.

    Raises:
        ValueError: see :func:`calibration_cases`.
    """
    path = Path(trainer.preprocessed_dataset_folder_base) / "splits_final.json"
    splits = read_json(path) if trainer.fold != "all" and path.is_file() else []
    if trainer.fold == "all" or trainer.fold >= len(splits):
        return []
    return calibration_cases(splits[trainer.fold], train, val)


def patches(loader: Any, batches: int, seed: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield batches of nnU-Net's loader that depend only on `seed`.

    nnU-Net draws from NumPy's global generator, whose state is restored after each batch.
    """
    for i in range(batches):
        before = np.random.get_state()  # noqa: NPY002
        np.random.seed([*seed, i])  # noqa: NPY002
        try:
            batch = loader.generate_train_batch()
        finally:
            np.random.set_state(before)  # noqa: NPY002
        yield batch


def tiles(shape: Sequence[int], patch: Sequence[int]) -> Iterator[tuple[Box, Box]]:
    """Cover a volume with patches so that every voxel is kept exactly once.

    Args:
        shape: ``(*S)`` of the volume.
        patch: ``(*S)``; where it is larger than the volume, it extends beyond both sides.

    Yields:
        the patch's position in the volume (it can begin below 0), and the part of the patch to
        keep.
    """
    axes = []
    for size, length in zip(shape, patch, strict=True):
        if size <= length:
            before = (length - size) // 2
            axes.append([(slice(-before, length - before), slice(before, before + size))])
            continue
        starts = [(s, min(s, size - length)) for s in range(0, size, length)]
        axes.append([(slice(t, t + length), slice(s - t, length)) for s, t in starts])
    for chosen in itertools.product(*axes):
        yield tuple(place for place, _ in chosen), tuple(keep for _, keep in chosen)


def volumes(
    dataset: Any, cases: Iterable[str], patch: Sequence[int], transforms: Any
) -> Iterator[tuple[Tensor, Tensor, Box]]:
    """Yield images ``(1, C, *S)`` and targets ``(1, R, *S)`` of patches that cover all cases.

    Args:
        dataset: nnU-Net's.
        cases: their names.
        patch: patch size; two axes for a two-dimensional network.
        transforms: nnU-Net's for validation, without deep supervision.

    Yields:
        image, target, and the part of the last axes to keep.
    """
    flat = len(patch) == 2
    size = (1, *patch) if flat else tuple(patch)
    for case in cases:
        data, seg, previous, _ = dataset.load_case(case)
        for place, keep in tiles(data.shape[1:], size):
            box = [[s.start, s.stop] for s in place]
            image = torch.from_numpy(crop_and_pad_nd(data, box, 0)).float()
            target = torch.from_numpy(crop_and_pad_nd(seg, box, -1)).to(torch.int16)
            if previous is not None:
                before = torch.from_numpy(crop_and_pad_nd(previous, box, -1)).to(torch.int16)
                target = torch.cat((target, before[None]))
            if flat:
                image, target, keep = image[:, 0], target[:, 0], keep[1:]
            done = transforms(image=image, segmentation=target)
            yield done["image"][None], done["segmentation"][None], keep

"""Samples in one ``.npz`` file, in MedMNIST's or segcal's format.

Nothing in these files is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.classify.readers.samples import PARTS, Samples
from segcal.io.files import whole_file

MEDMNIST_PARTS = ("train", "val", "test")
"""MedMNIST's names of the parts."""
MOST_CLASSES = 1000
"""Largest number of classes without names if there are fewer samples than classes."""


def read_npz(path: str | Path, names: tuple[str, ...] | None = None) -> Samples:
    """Read an archive.

    It holds either MedMNIST's ``train_images``, ``train_labels``, ``val_images``, ... or segcal's
    ``inputs`` ``(N, F)``, ``(N, H, W)`` or ``(N, C, H, W)`` and ``targets`` ``(N,)`` of classes or
    ``(N, T)`` of labels. segcal's archives may also have ``names``, ``parts`` (train, validation,
    test, or 0, 1, 2) and ``groups`` whose samples stay together.

    Args:
        path: of the file.
        names: of the classes or labels, if the file has none.

    Raises:
        ValueError: the file, which is named, is not readable, an array is missing, has another
            shape or holds objects, or targets are no whole numbers.
    """
    arrays = _arrays(Path(path))
    for name in ("names", "parts", "groups"):
        if name in arrays and arrays[name].ndim != 1:
            raise ValueError(f"{path}: {name}: expected a list, got shape {arrays[name].shape}")
    parts: NDArray[np.int64] | None
    if {f"{part}_images" for part in MEDMNIST_PARTS} <= arrays.keys():
        inputs, targets, parts = _medmnist(Path(path), arrays)
    elif {"inputs", "targets"} <= arrays.keys():
        inputs, targets = arrays["inputs"], arrays["targets"]
        parts = _parts(Path(path), arrays.get("parts"))
    else:
        raise ValueError(
            f"{path}: expected train_images, train_labels, val_images, ... or inputs and targets, "
            f"got {', '.join(arrays) or 'nothing'}"
        )
    targets = _targets(Path(path), targets)
    if "names" in arrays:
        names = tuple(map(str, arrays["names"].astype(str)))
    groups = arrays.get("groups")
    return Samples(
        inputs=_inputs(Path(path), inputs),
        targets=targets,
        names=_numbers(Path(path), targets) if names is None else tuple(names),
        parts=parts,
        groups=None if groups is None else np.unique(groups, return_inverse=True)[1],
    ).check(str(path))


def write_npz(path: Path, samples: Samples) -> None:
    """Write an archive that :func:`read_npz` reads."""
    arrays: dict[str, Any] = {
        "inputs": samples.inputs,
        "targets": samples.targets,
        "names": np.array(samples.names),
    }
    if samples.parts is not None:
        arrays["parts"] = samples.parts
    if samples.groups is not None:
        arrays["groups"] = samples.groups
    with whole_file(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def check_new(path: Path, *, overwrite: bool = False) -> None:
    """Check, before hours of work, that an archive can be written, and make its folder.

    Args:
        path: of the file.
        overwrite: whether the file may exist already.

    Raises:
        ValueError: not the name of an archive, a file that exists, or a folder that cannot be
            written to.
    """
    if path.suffix != ".npz":
        raise ValueError(f"{path}: expected the name of a file that ends in .npz")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a file")
    if path.exists() and not overwrite:
        raise ValueError(f"{path}: exists already; remove it, overwrite it, or name another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"{path}: cannot write to {path.parent} ({error})") from None


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # noqa: BLE001 - a damaged file fails anywhere in the readers
        raise ValueError(f"{path}: not an .npz of plain arrays ({error})") from None
    return {name: one for name, one in arrays.items() if isinstance(one, np.ndarray)}


def _medmnist(
    path: Path, arrays: Mapping[str, NDArray[Any]]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
    images = [arrays[f"{part}_images"] for part in MEDMNIST_PARTS]
    missing = [part for part in MEDMNIST_PARTS if f"{part}_labels" not in arrays]
    if missing:
        raise ValueError(f"{path}: has no {missing[0]}_labels")
    labels = [arrays[f"{part}_labels"] for part in MEDMNIST_PARTS]
    if len({a.shape[1:] for a in images}) > 1 or len({a.shape[1:] for a in labels}) > 1:
        raise ValueError(f"{path}: images or labels of its parts differ in shape")
    if images[0].ndim == 4 and images[0].shape[3] in (1, 3):  # colours are last
        images = [np.moveaxis(a, 3, 1) for a in images]
    elif images[0].ndim != 3:
        raise ValueError(f"{path}: expected images in 2-D, got {images[0].shape}")
    targets = np.concatenate(labels)
    if targets.ndim == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    parts = np.repeat(np.arange(3), [len(a) for a in images])
    return np.concatenate(images), targets, parts


def _numbers(path: Path, targets: NDArray[Any]) -> tuple[str, ...]:
    """Names of classes or labels without names: their numbers."""
    count = targets.shape[1] if targets.ndim == 2 else int(targets.max(initial=-1)) + 1
    if targets.ndim == 1 and count > max(MOST_CLASSES, len(targets)):
        raise ValueError(
            f"{path}: targets: expected classes numbered from 0, got {count - 1} in "
            f"{len(targets)} samples; number the classes that occur, or add names"
        )
    return tuple(map(str, range(count)))


def _parts(path: Path, parts: NDArray[Any] | None) -> NDArray[np.int64] | None:
    if parts is None:
        return None
    if parts.dtype.kind == "U":
        numbers = {name: i for i, name in enumerate(PARTS)}
        parts = np.array([numbers.get(name, -2) for name in parts.tolist()])
    if parts.dtype.kind not in "iu" or not np.isin(parts, (-1, 0, 1, 2)).all():
        raise ValueError(f"{path}: parts: expected {', '.join(PARTS)}")
    return parts.astype(np.int64)


def _targets(path: Path, targets: NDArray[Any]) -> NDArray[Any]:
    if (
        targets.ndim not in (1, 2)
        or targets.dtype.kind not in "biuf"
        or not (np.isfinite(targets) & (targets == np.rint(targets))).all()
    ):
        raise ValueError(
            f"{path}: targets: expected whole numbers, classes (N,) or labels (N, T) of 0, 1 and "
            f"-1 (unknown), got {targets.dtype} {targets.shape}"
        )
    if targets.ndim == 1:
        return targets.astype(np.int64)
    return targets.astype(np.int64).clip(-2, 2).astype(np.int8)  # 256 stays wrong, and no 0


def _inputs(path: Path, inputs: NDArray[Any]) -> NDArray[Any]:
    if inputs.ndim == 3:
        inputs = inputs[:, None]
    if inputs.ndim not in (2, 4) or inputs.dtype.kind not in "biuf":
        raise ValueError(
            f"{path}: inputs: expected numbers (N, F), (N, H, W) or (N, C, H, W), got "
            f"{inputs.dtype} {inputs.shape}"
        )
    keep = inputs.dtype == np.uint8 and inputs.ndim == 4
    return np.ascontiguousarray(inputs if keep else inputs.astype(np.float32))

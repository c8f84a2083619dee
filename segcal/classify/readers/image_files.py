"""Images of classes, streamed from disk: folders, lists of files, Tiny-ImageNet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from segcal.classify.readers.folders import PARTS, files_of_classes
from segcal.classify.readers.images import ENDINGS
from segcal.classify.readers.samples import PARTS as PART_NAMES
from segcal.classify.readers.samples import UNSAID, Samples
from segcal.classify.readers.streamed import streamed

TINY_VALIDATION = "val_annotations.txt"
"""Tiny-ImageNet's file with the classes of its validation images."""


def read_image_folder(path: str | Path, colour: bool = True) -> Samples:
    """Find ``CLASS/IMAGE.jpg``, or ``train/CLASS/IMAGE.jpg`` with ``val`` and ``test``.

    Args:
        path: the folder, such as that of ImageNet with folders ``train`` and ``val`` of classes.
        colour: three channels; False makes one of grey values.

    Raises:
        ValueError: the folder, which is named, is empty or has no image.
    """
    root = Path(path)
    found = [
        (file, name, part)
        for file, name, part in files_of_classes(root, lambda name: PARTS.get(name.lower(), UNSAID))
        if file.suffix.lower() in ENDINGS
    ]
    if not found:
        raise ValueError(f"{root}: expected folders of images, one per class; found no image")
    return _of_classes(found, sorted({name for _, name, _ in found}), colour, str(root))


def read_image_list(
    path: str | Path,
    train: str | Path,
    validation: str | Path | None = None,
    test: str | Path | None = None,
    names: str | Path | Sequence[str] | None = None,
    colour: bool = True,
) -> Samples:
    """Find the images in lists with one line per image: its file and the number of its class.

    ImageNet-LT and Places-LT have such lists: ``train/n01440764/n01440764_190.JPEG 0``. Names of
    files may contain spaces.

    Args:
        path: folder that contains the files of the lists.
        train: list of the training images.
        validation: list of the validation images; None draws a share of the training images.
        test: list of the test images; None draws a share of the training images.
        names: of the classes, or a file with one name per line; None uses their numbers.
        colour: three channels; False makes one of grey values.

    Raises:
        ValueError: a line, which is named, is not a file and the number of a class, or files are
            missing.
    """
    found = []
    for part, given in enumerate((train, validation, test)):
        if given is not None:
            rows = list(_rows(Path(given)))
            if not rows:
                raise ValueError(f"{given}: expected images to {PART_NAMES[part]}, a line for each")
            found += [(Path(path) / file, number, part) for file, number in rows]
    if names is None:
        named = [str(k) for k in range(max(number for _, number, _ in found) + 1)]
    elif isinstance(names, str | Path):
        named = [line.strip() for line in _lines(Path(names)) if line.strip()]
    else:
        named = list(names)
    if beyond := [number for _, number, _ in found if number >= len(named)]:
        raise ValueError(f"names: {len(named)} of classes up to number {max(beyond)}, from 0")
    classes = np.array([number for _, number, _ in found], np.int64)
    parts = np.array([part for _, _, part in found], np.int64)
    files = [file for file, _, _ in found]
    return streamed(files, classes, named, parts=parts, colour=colour, source=str(path))


def read_tiny_imagenet(path: str | Path) -> Samples:
    """Find Tiny-ImageNet's images as downloaded: 200 classes with 500 training and 50 test images.

    ``train/CLASS/images/NAME.JPEG``, and ``val/images/NAME.JPEG`` with their classes in
    ``val/val_annotations.txt`` (name, class, and a box, with tabs between). Images in ``test`` have
    no classes. As usual, the images of ``val`` are the test part; a share of ``train`` is the
    validation part.

    Args:
        path: the folder ``tiny-imagenet-200``.

    Raises:
        ValueError: a file or folder, which is named, is missing or unexpected.
    """
    root = Path(path)
    said = root / "val" / TINY_VALIDATION
    names = sorted(f.name for f in (root / "train").glob("n*") if f.is_dir())
    found = [
        (file, name, UNSAID)
        for name in names
        for file in sorted((root / "train" / name / "images").glob("*.JPEG"))
    ]
    if not found:
        raise ValueError(
            f"{root}: expected train/CLASS/images/NAME.JPEG; set path to tiny-imagenet-200"
        )
    for number, line in enumerate(_lines(said), 1):
        name, _, rest = line.partition("\t")
        kind = rest.partition("\t")[0]
        if kind not in names:
            raise ValueError(
                f"{said}: line {number}: expected the name of an image, a tab and a class that is "
                f"a folder of train, got {line[:80]!r}"
            )
        found.append((root / "val" / "images" / name, kind, PART_NAMES.index("test")))
    return _of_classes(found, names, True, str(root))


def _of_classes(
    found: Sequence[tuple[Path, str, int]], names: Sequence[str], colour: bool, source: str
) -> Samples:
    numbers = {name: i for i, name in enumerate(names)}
    classes = np.array([numbers[name] for _, name, _ in found], np.int64)
    parts = np.array([part for _, _, part in found], np.int64)
    said = None if (parts == UNSAID).all() else parts
    files = [file for file, _, _ in found]
    return streamed(files, classes, names, parts=said, colour=colour, source=source)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None


def _rows(path: Path) -> Iterator[tuple[str, int]]:
    """File and class of every line of a list."""
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        file, _, kind = line.strip().rpartition(" ")
        if not file or not kind.isdecimal():
            raise ValueError(
                f"{path}: line {number}: expected a file, a space and the number of its class, "
                f"from 0; got {line[:80]!r}"
            )
        yield file, int(kind)

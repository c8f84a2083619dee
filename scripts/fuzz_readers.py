"""Damaged files of every format that segcal reads: each must be refused in words or read right.

For each format a good file is written and damaged in many ways: bits flipped, the file cut, pieces
inserted, left out, doubled and zeroed, numbers and words of headers and texts replaced. A separate
process reads each file. These faults are counted:

    traceback   anything but a ValueError that names a file, or a process that died
    hang        no answer within --patience seconds
    memory      more than 1 GiB taken for a file of a few thousand bytes
    silent      values that differ from those of the good file, where a checksum covers what was
                damaged, or the file was cut short
    code run    something in the file was run: it would have made a file

The exit code is 0 without faults and 1 otherwise; --keep names a folder for the files that caused
them.

    python scripts/fuzz_readers.py                       # 2,000 inputs, seed 0
    python scripts/fuzz_readers.py --inputs 300 --formats .mha .nrrd --seed 7 --keep found
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import SimpleITK as sitk  # noqa: N813
import torch
import yaml
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.table import Table

from segcal.classify.readers.archives import read_npz
from segcal.classify.readers.arff import read_arff
from segcal.classify.readers.cifar import read_cifar10
from segcal.classify.readers.csv import read_csv
from segcal.classify.readers.images import read_images
from segcal.io.files import read_json
from segcal.io.label_sets import read_label_set
from segcal.io.nnunet_v1 import read_crop
from segcal.io.probabilities import read_probabilities
from segcal.io.volumes import Geometry, read_volume
from segcal.posthoc.temperature import Temperature
from segcal.recipes import load_recipe
from segcal.repair.saved import SavedCalibrator, read_calibrator, write_calibrator
from segcal.training.checkpoints import read_checkpoint

SHAPE = (6, 7, 8)
"""z, y, x of the volumes."""
KINDS = ("traceback", "hang", "memory", "silent", "code run")
MOST_MEMORY = 1 << 20
"""Memory in KiB by which one file may make the reader grow."""
WORDS = (
    b"0", b"-1", b"1e999", b"nan", b"99999999999999999999", b"65535", b"null", b"True", b"[]",
    b"{}", b"''", b"%s%n", b"\xff\xfe", b"../../etc", b"=", b":", b"\n", b"[" * 3000, b"&a [*a]",
    b"!!python/object/apply:os.system ['true']", b"9" * 6000,
)  # fmt: skip
"""Replacements of numbers and words."""


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        write: writes a good file under a name; further files may lie beside it.
        read: function with which a user of segcal would read it.
        name: of the damaged file, if it is not the file that is read.
        covered: first byte that a checksum covers, in the good file; None if there is none.
        whole: whether a file that is cut short can be told from a whole one.
    """

    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    name: str = ""
    covered: Callable[[bytes], int] | None = None
    whole: bool = False


class Creates:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


def marker(folder: Path) -> Path:
    """File that exists once code from a file has run."""
    return folder / "code-has-run"


def labels() -> NDArray[np.uint8]:
    """Label map of the volumes."""
    return np.random.default_rng(0).integers(0, 4, SHAPE).astype(np.uint8)


def by_itk(path: Path, *, packed: bool = False) -> None:
    """Write the label map with SimpleITK."""
    image = sitk.GetImageFromArray(labels())
    image.SetSpacing((1.25, 1.5, 8.0))
    sitk.WriteImage(image, str(path), useCompression=packed)


def packed_by_itk(path: Path) -> None:
    by_itk(path, packed=True)


def boxed_by_itk(path: Path) -> None:
    """Write a part of the label map as 3D Slicer writes segments, with the image's position."""
    box = sitk.GetImageFromArray(labels()[1:, 2:, 3:])
    box.SetOrigin((3, 2, 1))
    ends = ";".join(f"0;{n - 1}" for n in SHAPE[::-1])
    said = f"Reference image geometry|-1;0;0;0;0;-1;0;0;0;0;1;0;0;0;0;1;{ends};|Of the image.&"
    box.SetMetaData("Segmentation_ConversionParameters", said)
    sitk.WriteImage(box, str(path), useCompression=True)


def by_nibabel(kind: Any) -> Callable[[Path], None]:
    """Write the label map with nibabel."""
    return lambda path: nib.save(kind(labels().transpose(), np.diag([1.25, 1.5, 8, 1])), path)


def by_pillow(path: Path) -> None:
    Image.fromarray(np.tile(labels()[0], (4, 4))).save(path)


def probabilities() -> NDArray[np.float32]:
    return np.random.default_rng(0).dirichlet(np.ones(3), SHAPE).transpose(3, 0, 1, 2).astype("f4")


def archive(**more: Any) -> Callable[[Path], None]:
    return lambda path: np.savez_compressed(path, **more)


def predicted(path: Path) -> Any:
    geometry = Geometry(SHAPE, (8.0, 1.5, 1.25), (0.0, 0.0, 0.0), np.eye(3))
    return read_probabilities(path, geometry)


def crop_of(path: Path) -> Any:
    return read_crop(path.with_suffix(".npz"))


def write_crop(path: Path, *more: Any) -> None:
    box = [[0, 6], [0, 7], [0, 8]]
    content = {"crop_bbox": box, "original_size_of_raw_data": np.array(SHAPE), "more": more}
    path.write_bytes(pickle.dumps(content))


def write_cifar(path: Path) -> None:
    """A batch as in cifar-10-python; the others are the same."""
    batch = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [3, 4]}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (path.parent / name).write_bytes(pickle.dumps(batch, protocol=2))


def write_classes(path: Path) -> None:
    """A folder for each of two classes, with the image that is damaged in one of them."""
    for name in ("a", "b"):
        (path.parent / "classes" / name).mkdir(parents=True, exist_ok=True)
        by_pillow(path.parent / "classes" / name / path.name)


def write_saved(path: Path) -> None:
    rng = np.random.default_rng(0)
    logits, chosen = rng.normal(size=(200, 3)), rng.integers(0, 3, 200)
    fitted = Temperature().fit(torch.from_numpy(logits), torch.from_numpy(chosen))
    names = ("background", "a", "b")
    write_calibrator(path, SavedCalibrator("temperature", fitted, names, False, (), {}, {}, None))


def weights(path: Path, **more: Any) -> None:
    torch.save({"segcal": "0", "model": {"w": torch.zeros(3)}, "epoch": 3, **more}, path)


DATASET = {
    "channel_names": {"0": "CT"}, "labels": {"background": 0, "whole": [1, 2], "core": 2},
    "regions_class_order": [1, 2], "numTraining": 3, "file_ending": ".nii.gz",
}  # fmt: skip
RECIPE = {
    "summary": "Dice + cross-entropy + CRaC",
    "base": {"cross_entropy": 1.0, "soft_dice": 1.0}, "penalties": {"crac": 1.0},
}  # fmt: skip
ARFF = "@relation r\n@attribute a numeric\n@attribute b {0,1}\n@data\n0.5,1\n1.5,0\n2.5,1\n"


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def at(mark: bytes) -> Callable[[bytes], int]:
    """The byte behind a mark."""
    return lambda content: content.index(mark) + len(mark)


def everything(content: bytes) -> int:
    return 0


FORMATS: dict[str, Format] = {
    "a.nii": Format(by_nibabel(nib.Nifti1Image), read_volume, whole=True),
    "a.nii.gz": Format(by_nibabel(nib.Nifti1Image), read_volume, covered=everything, whole=True),
    "b.nii.gz": Format(by_nibabel(nib.Nifti2Image), read_volume, covered=everything, whole=True),
    "a.hdr": Format(by_nibabel(nib.Nifti1Pair), read_volume, whole=True),
    "a.hdr of a.img": Format(by_nibabel(nib.Nifti1Pair), read_volume, "a.img", whole=True),
    "a.mgz": Format(by_nibabel(nib.MGHImage), read_volume, covered=everything, whole=True),
    "a.mha": Format(
        packed_by_itk, read_volume, covered=at(b"ElementDataFile = LOCAL\n"), whole=True
    ),
    "b.mha": Format(by_itk, read_volume, whole=True),
    "a.mhd": Format(packed_by_itk, read_volume),
    "a.mhd of a.zraw": Format(packed_by_itk, read_volume, "a.zraw", everything, True),
    "a.nrrd": Format(packed_by_itk, read_volume, covered=at(b"\n\n"), whole=True),
    "b.nrrd": Format(by_itk, read_volume, whole=True),
    "a.seg.nrrd": Format(boxed_by_itk, read_volume, covered=at(b"\n\n"), whole=True),
    "a.nhdr": Format(packed_by_itk, read_volume),
    "a.nhdr of a.raw.gz": Format(packed_by_itk, read_volume, "a.raw.gz", everything, True),
    "a.gipl": Format(by_itk, read_volume, whole=True),
    "a.png": Format(by_pillow, read_volume, covered=everything, whole=True),
    "a.bmp": Format(by_pillow, read_volume, whole=True),
    "a.tif": Format(by_pillow, read_volume, whole=True),
    "a.npz": Format(archive(probabilities=probabilities()), predicted, covered=everything),
    "b.npz": Format(lambda p: archive(probabilities=np.array([Creates(marker(p.parent))]))(p),
                    predicted),
    "a.npy": Format(lambda p: np.save(p, probabilities()), predicted, whole=True),
    "b.npy": Format(lambda p: np.save(p, np.array([Creates(marker(p.parent))])), predicted),
    "a.pkl": Format(write_crop, crop_of),
    "b.pkl": Format(lambda p: write_crop(p, Creates(marker(p.parent))), crop_of),
    "dataset.json": Format(text(json.dumps(DATASET)), read_label_set, whole=True),
    "a.json": Format(text(json.dumps([DATASET] * 3)), read_json, whole=True),
    "calibrator.json": Format(write_saved, read_calibrator, whole=True),
    "recipe.yaml": Format(text(yaml.safe_dump(RECIPE)), load_recipe),
    "a.pth": Format(weights, lambda p: read_checkpoint(p, ("model",))),
    "b.pth": Format(lambda p: weights(p, more=Creates(marker(p.parent))),
                    lambda p: read_checkpoint(p, ("model",))),
    "samples.npz": Format(archive(inputs=np.zeros((9, 4)), targets=np.arange(9) % 3), read_npz,
                          covered=everything),
    "a.csv": Format(text("a,b,y\n1,2,x\n3,4,y\n5,6,x\n"), lambda p: read_csv(p, "y")),
    "a.arff": Format(text(ARFF), lambda p: read_arff(p, 1)),
    "data_batch_1": Format(write_cifar, lambda p: read_cifar10(p.parent)),
    "classes/a/x.png": Format(
        lambda p: write_classes(p.parents[2] / p.name), lambda p: read_images(p.parents[1], 8)
    ),
}  # fmt: skip
"""Formats by the name of the good file, or of the file that is read and the damaged file."""


def mutated(content: bytes, rng: random.Random) -> tuple[bytes, int, bool]:
    """Damaged content of a file, the first byte that changed, and whether the file is cut."""
    n = len(content)
    kind = rng.choice(("bit", "bit", "byte", "cut", "insert", "remove", "double", "zero", "word",
                       "word", "stretch"))  # fmt: skip
    i = rng.randrange(n)
    j = min(n, i + 1 + int(rng.expovariate(1 / 16)))
    if kind == "cut":
        return content[:i], i, True
    if kind == "word" and (tokens := list(words(content))):
        start, stop = rng.choice(tokens)
        new = content[:start] + rng.choice(WORDS) + content[stop:]
    elif kind == "insert":
        new = content[:i] + rng.randbytes(j - i) + content[i:]
    elif kind == "remove":
        new = content[:i] + content[j:]
    elif kind == "double":
        new = content[:j] + content[i:]
    elif kind == "zero":
        new = content[:i] + bytes(j - i) + content[j:]
    elif kind == "stretch":
        new = content[:i] + rng.randbytes(j - i) + content[j:]
    elif kind == "byte":
        new = content[:i] + bytes([rng.choice((0, 1, 127, 128, 255))]) + content[i + 1 :]
    else:
        new = content[:i] + bytes([content[i] ^ 1 << rng.randrange(8)]) + content[i + 1 :]
    same = zip(new, content, strict=False)
    first = next((k for k, (a, b) in enumerate(same) if a != b), min(len(new), n))
    return new, first, False


def words(content: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of numbers and words in the first 4,096 bytes."""
    start = None
    for i, byte in enumerate(content[:4096] + b" "):
        letter = chr(byte).isalnum() and byte < 128
        if letter and start is None:
            start = i
        elif not letter and start is not None:
            yield start, i
            start = None


def values_of(result: Any) -> Any:
    """The parts of a result to compare: arrays and geometries of volumes, texts of others."""
    if hasattr(result, "array"):
        return result.array, repr(result.geometry)
    if hasattr(result, "inputs"):
        return result.inputs, result.targets
    if isinstance(result, SavedCalibrator):
        return repr((result.method, result.channels, result.calibrator.state()))
    return result if isinstance(result, np.ndarray) else repr(result)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return all(equal(*pair) for pair in zip(a, b, strict=True))
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)


def serve(pipe: Connection, name: str, folder: Path) -> None:
    """Read the requested files and answer with the results; the good file comes first."""
    os.chdir(folder)
    with Path(os.devnull).open("w") as nowhere:  # ITK speaks to the streams themselves
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    sitk.ProcessObject.SetGlobalWarningDisplay(False)
    kind, path = FORMATS[name], folder / name.split(" of ")[0]
    good: Any = None
    while (asked := pipe.recv()) is not None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            values = values_of(kind.read(path))
            answer, text = "read", ""
            if asked == "good":
                good = values
            elif good is None or not equal(values, good):
                answer = "changed"
        except ValueError as error:
            answer, text = "refused", str(error)
            if str(folder) not in text:
                answer, text = "traceback", f"names no file: {text}"
        except BaseException as error:  # noqa: BLE001 - it is what we look for
            answer, text = "traceback", f"{type(error).__name__}: {error}"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        pipe.send((answer, text[:300], grown))


class Reader:
    """A process that reads files, restarted when it dies or does not answer."""

    def __init__(self, name: str, folder: Path, patience: float) -> None:
        self.arguments, self.patience = (name, folder), patience
        self.process: Any = None

    def ask(self, what: str) -> tuple[str, str, int]:
        """Have the file read; return the answer, a text, and the KiB that it took."""
        if self.process is None:
            context = multiprocessing.get_context("fork")
            self.pipe, other = context.Pipe()
            self.process = context.Process(target=serve, args=(other, *self.arguments), daemon=True)
            self.process.start()
            other.close()
        try:
            self.pipe.send(what)
            if self.pipe.poll(self.patience):
                return self.pipe.recv()
            found = ("hang", f"no answer in {self.patience} s", 0)
        except (EOFError, OSError):
            found = ("traceback", "the process died", 0)
        self.close()
        return found

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None


def fuzz(
    name: str, count: int, seed: int, patience: float, keep: Path | None
) -> tuple[Counter[str], dict[str, str]]:
    """Read damaged files of one format; return the number and first text of each kind of answer."""
    kind, rng = FORMATS[name], random.Random(f"{seed} {name}")
    found: Counter[str] = Counter()
    told: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="segcal-fuzz-") as place:
        folder = Path(place)
        (folder / name.split(" of ")[0]).parent.mkdir(parents=True, exist_ok=True)
        kind.write(folder / name.split(" of ")[0])
        target = folder / (kind.name or name)
        if name.endswith(".pkl"):
            archive(softmax=probabilities())(target.with_suffix(".npz"))
        content = target.read_bytes()
        reader = Reader(name, folder, patience)
        first = reader.ask("good")
        for number in range(count):
            damaged, start, cut = (
                mutated(content, rng) if number else (content, len(content), False)
            )
            target.write_bytes(damaged)
            if reader.process is None:  # it has died: the next one must know the good file
                target.write_bytes(content)
                reader.ask("good")
                target.write_bytes(damaged)
            answer, text, grown = reader.ask("damaged")
            knowable = (kind.covered and start >= kind.covered(content)) or (cut and kind.whole)
            seen = [answer] if answer in ("traceback", "hang") else []
            seen += ["silent"] if answer == "changed" and knowable and first[0] == "read" else []
            seen += ["memory"] if grown > MOST_MEMORY else []
            if marker(folder).exists():
                marker(folder).unlink()
                seen.append("code run")
            found[answer if answer in ("read", "refused", "changed") else "none"] += 1
            for one in seen:
                found[one] += 1
                told.setdefault(one, text or f"first byte changed: {start} of {len(content)}")
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    shutil.copy(target, keep / f"{number:04d}-{one}-{target.name}")
        reader.close()
    return found, told


def chosen(endings: list[str] | None) -> list[str]:
    """Formats whose name ends in one of these endings; all formats if there are none."""
    names = [n for n in FORMATS if not endings or n.endswith(tuple(endings))]
    if not names:
        raise SystemExit(f"--formats: expected endings of {', '.join(FORMATS)}")
    return names


def main() -> int:
    """Fuzz all formats and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=2000, help="number of inputs in all")
    parser.add_argument("--formats", nargs="+", help="endings, e.g. .mha .nrrd; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=20.0, help="seconds for one file")
    parser.add_argument("--keep", type=Path, help="folder to keep files that showed a fault")
    arguments = parser.parse_args()
    names = chosen(arguments.formats)
    table = Table("format", "inputs", "refused", "read right", "read other values", *KINDS)
    total: Counter[str] = Counter()
    texts = []
    torch.set_num_threads(1)
    for place, name in enumerate(names):
        count = arguments.inputs // len(names) + (place < arguments.inputs % len(names))
        found, told = fuzz(name, count, arguments.seed, arguments.patience, arguments.keep)
        numbers = [found[k] for k in ("refused", "read", "changed", *KINDS)]
        table.add_row(name, str(count), *map(str, numbers))
        texts += [f"{name}: {kind}: {text}" for kind, text in told.items()]
        total += found
    numbers = [total[k] for k in ("refused", "read", "changed", *KINDS)]
    table.add_section()
    table.add_row("all", str(arguments.inputs), *map(str, numbers))
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table)
    for line in texts:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return int(any(total[kind] for kind in KINDS))


if __name__ == "__main__":
    raise SystemExit(main())

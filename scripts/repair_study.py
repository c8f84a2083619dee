"""Networks whose probabilities are to be repaired, with and without a calibration loss.

`train` trains small 2-D networks as ``segcal train`` does, with several recipes and seeds, and
predicts as ``segcal predict`` does. The patients of a seed are parted in three: those that train,
those that validate the training and later fit a calibrator, and those that only test it. Of
phantoms the true posterior is known, and is written beside.

    python scripts/repair_study.py train -o study                          # phantoms alone
    python scripts/repair_study.py train -o study --acdc $nnUNet_raw/Dataset027_ACDC \\
        --hippocampus $nnUNet_raw/Dataset004_Hippocampus --seeds 0 1 2

ACDC and the hippocampus are folders in nnU-Net's raw layout (``segcal convert acdc``). What is done
already is skipped, and a training that was stopped goes on. The output is, for each SET::

    SET/data_sSEED                     the data set of the training, in nnU-Net's raw layout
    SET/RECIPE_sSEED/training          as of segcal train
    SET/RECIPE_sSEED/{fit,test}        as of segcal predict
    SET/RECIPE_sSEED/done.json         that it is done, and its scores in short
    SET/labels_sSEED/{fit,test}        label maps and dataset.json
    phantom/posterior_sSEED/{fit,test} true posteriors, in the format of predictions
"""

from __future__ import annotations

import argparse
import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segcal.adapters.monai.experiment import SegmentationExperiment
from segcal.adapters.monai.inference import Predictor, predict_cases
from segcal.adapters.monai.training import SegmentationRun
from segcal.datasets.phantom import write_phantom_dataset
from segcal.io.files import read_json, write_json
from segcal.io.volumes import Geometry, read_labels, read_volume, write_nifti
from segcal.metrics.dice import dice
from segcal.metrics.ece import ece
from segcal.metrics.nll import nll

RECIPES = ("dice_ce", "crac", "svls", "cals")
PARTS = ("fit", "test")
SUBFOLDERS = {"Tr": "fit", "Ts": "test"}


@dataclass(frozen=True)
class Material:
    """A data set and how a small network is trained on it.

    Attributes:
        name: of the set.
        patient: the patient of a case, by its name.
        counts: patients that train, that fit, and that test; None takes all that are left.
        size: of what the network sees, in voxels ``(y, x)``.
        epochs: passes over the slices.
        spacing_mm: in plane, of what the network sees; None leaves the voxels as they are.
        middle_mm: side of the middle that is cut out of every slice; None cuts nothing.
    """

    name: str
    patient: Callable[[str], str]
    counts: tuple[int, int, int | None]
    size: tuple[int, int]
    epochs: int
    spacing_mm: float | None = None
    middle_mm: float | None = None


def _before_frame(case: str) -> str:
    return case.split("_frame", maxsplit=1)[0]


def _subject(case: str) -> str:
    """Cases 2k - 1 and 2k of the hippocampus are the two sides of one person."""
    number = re.search(r"\d+$", case)
    return case if number is None else str((int(number[0]) + 1) // 2)


MATERIALS = {
    material.name: material
    for material in (
        # 5 volumes for 600 steps: a network that knows them by heart
        Material("phantom", str, (5, 12, 12), (64, 64), 120),
        Material("hippocampus", _subject, (8, 10, None), (64, 48), 14),
        Material("acdc", _before_frame, (30, 20, 40), (128, 128), 21, 1.5, 192.0),
    )
}


def main() -> None:
    options = _parser().parse_args()
    torch.set_num_threads(options.threads)
    train(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    training = commands.add_parser("train", help="train, and predict the patients that do not")
    training.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    training.add_argument("--acdc", type=Path, metavar="FOLDER", help="nnU-Net raw layout")
    training.add_argument("--hippocampus", type=Path, metavar="FOLDER", help="nnU-Net raw layout")
    training.add_argument("--recipes", nargs="+", default=list(RECIPES), metavar="NAME")
    training.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    training.add_argument("--epochs", type=int, help="in place of each set's own number")
    training.add_argument(
        "--patients", nargs=3, type=int, metavar=("TRAIN", "FIT", "TEST"),
        help="in place of each set's own numbers",
    )  # fmt: skip
    training.add_argument("--checkpoint", choices=("last", "best"), default="last")
    training.add_argument("--threads", type=int, default=1, help="of torch")
    return parser


def train(options: argparse.Namespace) -> None:
    """Train and predict with every recipe on every set, seed by seed."""
    sources = {"phantom": None, "hippocampus": options.hippocampus, "acdc": options.acdc}
    for seed in options.seeds:
        for name, material in MATERIALS.items():
            source = sources[name]
            if source is None and name != "phantom":
                continue
            if options.patients is not None:
                material = replace(material, counts=tuple(options.patients))
            if options.epochs is not None:
                material = replace(material, epochs=options.epochs)
            prepare(material, source, options.output / name, seed)
            for recipe in options.recipes:
                work(material, options.output / name, recipe, seed, options.checkpoint)


# Data.


def prepare(material: Material, source: Path | None, folder: Path, seed: int) -> None:
    """Write the data set of a seed, and beside it the label maps by part; once.

    Args:
        material: what it is of.
        source: folder in nnU-Net's raw layout; None generates phantoms.
        folder: of the set.
        seed: which patients do what.
    """
    root = folder / f"data_s{seed}"
    if not root.exists():
        temporary = folder / f".data_s{seed}"
        shutil.rmtree(temporary, ignore_errors=True)
        if source is None:
            _generate(material, temporary, seed)
        else:
            _draw(material, source, temporary, seed, folder / "middle")
        temporary.rename(root)
    fold = read_json(root / "splits_final.json")[0]
    names = {"fit": fold["val"], "test": fold["test"]}
    for part, subset in (("fit", "Tr"), ("test", "Ts")):
        _link(
            (root / f"labels{subset}" / f"{case}.nii.gz" for case in names[part]),
            folder / f"labels_s{seed}" / part,
        )
        _copy(root / "dataset.json", folder / f"labels_s{seed}" / part)
        if (root / "posteriorTr").is_dir():
            _link(
                (root / f"posterior{subset}" / f"{case}.npz" for case in names[part]),
                folder / f"posterior_s{seed}" / part,
            )
            _copy(root / "dataset.json", folder / f"posterior_s{seed}" / part)


def _generate(material: Material, root: Path, seed: int) -> None:
    train_count, fit_count, test_count = material.counts
    write_phantom_dataset(root, train=train_count + fit_count, test=test_count or 12, seed=seed)
    _write_split(root, [p.name[:-7] for p in sorted((root / "labelsTr").iterdir())], train_count)


def _draw(material: Material, source: Path, root: Path, seed: int, middle: Path) -> None:
    """Part the patients of both folders of a data set anew."""
    files = {
        label.name[:-7]: (source / f"images{subset}" / f"{label.name[:-7]}_0000.nii.gz", label)
        for subset in SUBFOLDERS
        for label in sorted((source / f"labels{subset}").glob("*.nii.gz"))
    }
    patients: dict[str, list[str]] = {}
    for case in sorted(files):
        patients.setdefault(material.patient(case), []).append(case)
    order = [list(patients)[i] for i in np.random.default_rng(seed).permutation(len(patients))]
    train_count, fit_count, test_count = material.counts
    left = order[train_count + fit_count :]
    groups = (
        order[:train_count],
        order[train_count : train_count + fit_count],
        left if test_count is None else left[:test_count],
    )
    cases = [[case for patient in group for case in patients[patient]] for group in groups]
    for subset, chosen in (("Tr", cases[0] + cases[1]), ("Ts", cases[2])):
        pairs = [_middle(files[case], middle, material.middle_mm) for case in chosen]
        _link((image for image, _ in pairs), root / f"images{subset}")
        _link((label for _, label in pairs), root / f"labels{subset}")
    _copy(source / "dataset.json", root)
    _write_split(root, cases[0] + cases[1], len(cases[0]))


def _write_split(root: Path, names: list[str], train_count: int) -> None:
    test = [p.name[:-7] for p in sorted((root / "labelsTs").iterdir())]
    fold = {"train": names[:train_count], "val": names[train_count:], "test": test}
    write_json(root / "splits_final.json", [fold])


def _middle(pair: tuple[Path, Path], folder: Path, side_mm: float | None) -> tuple[Path, Path]:
    """Image and label map of a case, cut to the middle of the slices."""
    if side_mm is None:
        return pair
    image, label = (folder / path.name for path in pair)
    if not label.exists():
        for source, target in zip(pair, (image, label), strict=True):
            volume = read_labels(source) if target is label else read_volume(source)
            box, geometry = _middle_box(volume.geometry, side_mm)
            write_nifti(target, volume.array[box], geometry)
    return image, label


def _middle_box(geometry: Geometry, side_mm: float) -> tuple[tuple[slice, ...], Geometry]:
    size = [
        min(n, round(side_mm / mm))
        for n, mm in zip(geometry.shape[1:], geometry.spacing_mm[1:], strict=True)
    ]
    start = [(n - m) // 2 for n, m in zip(geometry.shape[1:], size, strict=True)]
    corner = geometry.affine @ np.array([start[1], start[0], 0, 1])
    box = (slice(None), *(slice(a, a + m) for a, m in zip(start, size, strict=True)))
    shape = (geometry.shape[0], *size)
    return box, replace(geometry, shape=shape, origin_mm=tuple(corner[:3].tolist()))


def _link(files: Iterable[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        link = folder / file.name
        if not link.is_symlink():
            link.symlink_to(file.resolve())


def _copy(file: Path, folder: Path) -> None:
    """Copy a small file, which may be read-only, so that it can be replaced."""
    shutil.copyfile(file, folder / file.name)


# Training and prediction.


def work(material: Material, folder: Path, recipe: str, seed: int, checkpoint: Any) -> None:
    """Train, predict and say how it went; nothing if that is done."""
    output = folder / f"{recipe}_s{seed}"
    done = output / "done.json"
    name = f"{material.name} {recipe} seed {seed}"
    if done.exists():
        print(f"{name}: done before", flush=True)
        return
    experiment = experiment_of(material, folder / f"data_s{seed}", output, recipe, seed)
    start = time.perf_counter()
    try:
        trained = SegmentationRun(experiment, resume=True).run()
    except FloatingPointError as error:
        print(f"{name}: diverged ({error})", flush=True)
        return
    middle = time.perf_counter()
    predictor = Predictor(experiment, checkpoint)
    predict_cases(predictor, predictor.cases(None, validation=True), output / "fit", "npz")
    predict_cases(predictor, predictor.cases(None), output / "test", "npz")
    end = time.perf_counter()
    scores = {part: score(output / part, folder / f"labels_s{seed}" / part) for part in PARTS}
    record = {
        "epochs": trained.epochs,
        "best_epoch": trained.best_epoch,
        "train_s": round(middle - start, 1),
        "predict_s": round(end - middle, 1),
        **scores,
    }
    write_json(done, record)
    shown = "; ".join(
        f"{part} " + " ".join(f"{key} {value:.4f}" for key, value in scores[part].items())
        for part in PARTS
    )
    seconds = f"{record['train_s']:.0f} + {record['predict_s']:.0f} s"
    print(f"{time.strftime('%H:%M:%S')} {name}: {shown}; {seconds}", flush=True)


def experiment_of(
    material: Material, root: Path, output: Path, recipe: str, seed: int
) -> SegmentationExperiment:
    """The experiment that ``segcal train`` would read from a file."""
    spacing = None
    if material.spacing_mm is not None:
        spacing = [None, material.spacing_mm, material.spacing_mm]
    content = {
        "summary": f"{material.name}, a small network for studies of calibrators",
        "recipe": recipe,
        "data": {
            "root": root,
            "split": {"fold": 0},
            "size": material.size,
            "spacing_mm": spacing,
        },
        "network": {
            "target": "monai.networks.nets.UNet",
            "args": {"channels": [16, 32, 64, 128], "strides": [2, 2, 2], "num_res_units": 1},
        },
        "optimizer": {"target": "torch.optim.Adam", "args": {"lr": 1e-3}},
        "scheduler": {
            "target": "torch.optim.lr_scheduler.CosineAnnealingLR",
            "args": {"T_max": material.epochs},
        },
        "training": {"epochs": material.epochs, "batch_size": 8, "seed": seed, "device": "cpu"},
        "output": str(output / "training"),
    }
    return SegmentationExperiment.model_validate(content)


def score(predictions: Path, labels: Path) -> dict[str, float]:
    """Means over cases: ``dsc`` over the classes, ``ece`` and ``nll`` over all voxels."""
    rows = []
    classes = len(read_json(labels / "dataset.json")["labels"])
    for path in sorted(predictions.glob("*.npz")):
        reference = read_labels(labels / f"{path.stem}.nii.gz").array.astype(np.int64)
        with np.load(path) as file:
            probs = file["probabilities"]
        overlaps = [dice(probs.argmax(0), reference, k) for k in range(1, classes)]
        overlap = float(np.nanmean(overlaps)) if np.isfinite(overlaps).any() else np.nan
        rows.append((overlap, ece(probs, reference), nll(probs, reference)))
    return dict(zip(("dsc", "ece", "nll"), np.nanmean(rows, axis=0).tolist(), strict=True))


if __name__ == "__main__":
    main()

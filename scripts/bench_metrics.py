"""Time of surface distances, calibration errors and a whole case, beside other packages.

Every round runs every candidate once, in a new order, in one process on the same input; the
tables give the fastest run of each, how many times as long it took as segcal, and the values, so
that agreement can be seen. A candidate that has used up its share of seconds sits out the later
rounds. MedPy, MONAI, seg-metrics, surface-distance and torchmetrics take part where they are
installed.

    python scripts/bench_metrics.py                      # volumes of full size, minutes
    python scripts/bench_metrics.py --quick              # a 32nd of the voxels
    python scripts/bench_metrics.py --section surface --without MedPy --json bench.json
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy import ndimage

from segcal.binning import mean_gap
from segcal.evaluation.cohort import evaluate_cohort, evaluate_files
from segcal.evaluation.settings import EvaluationSettings
from segcal.io.archives import save_arrays
from segcal.io.label_sets import LabelSet
from segcal.io.pairing import Case, pair
from segcal.io.volumes import Geometry, write_nifti
from segcal.metrics.dice import dice
from segcal.metrics.hausdorff import hausdorff_of, nsd_of
from segcal.surface import label_boxes, surface_distances
from segcal.tally import Voxels

PACKAGES = {
    "MedPy": "medpy",
    "MONAI": "monai",
    "seg-metrics": "seg_metrics.seg_metrics",
    "surface-distance": "surface_distance",
    "torchmetrics": "torchmetrics",
}
BINS = 15
TOLERANCE_MM = 2.0
WITHOUT_DSC = "seg-metrics, HD alone"
Masks = tuple[NDArray[np.bool_], NDArray[np.bool_]]
Values = dict[str, float]

# ml, and the centre as fractions of the volume; later ones lie over earlier ones
LIVER = (1500, (0.5, 0.45, 0.35))
SPLEEN, PANCREAS = (220, (0.55, 0.55, 0.8)), (80, (0.45, 0.45, 0.55))
RIGHT_KIDNEY, LEFT_KIDNEY = (160, (0.3, 0.65, 0.3)), (160, (0.35, 0.65, 0.7))
FLARE_5 = (LIVER, RIGHT_KIDNEY, SPLEEN, PANCREAS)
FLARE_14 = (
    LIVER, RIGHT_KIDNEY, SPLEEN, PANCREAS, (100, (0.5, 0.6, 0.52)), (80, (0.5, 0.58, 0.46)),
    (5, (0.45, 0.6, 0.42)), (5, (0.45, 0.6, 0.6)), (40, (0.4, 0.38, 0.42)), (25, (0.85, 0.55, 0.5)),
    (300, (0.6, 0.35, 0.65)), (80, (0.35, 0.45, 0.48)), LEFT_KIDNEY,
)  # fmt: skip
HEART = ((140, (0.5, 0.45, 0.4)), (260, (0.5, 0.5, 0.55)), (130, (0.5, 0.5, 0.55)))
CLASSES = {5: FLARE_5, 14: FLARE_14}
BODY = tuple(
    zip(
        np.geomspace(1500, 2, 117),
        np.random.default_rng(2).uniform(0.12, 0.88, (117, 3)),
        strict=True,
    )
)
"""Structures as many and as unlike in size as those of a whole-body CT."""
ERRORS = "errors"
SCENES = {"liver": ((LIVER,),), "heart": (HEART, True), "13 organs": (FLARE_14,)}


@dataclass(frozen=True)
class Scene:
    """Label maps of a made-up patient: what was predicted, and the reference."""

    prediction: NDArray[np.uint8]
    reference: NDArray[np.uint8]
    spacing_mm: tuple[float, float, float]
    num_classes: int


def scene(quick: bool, organs: tuple[Any, ...], heart: bool = False, body: bool = False) -> Scene:
    """Wobbly ellipsoids; predictions are moved, a little too big, rough, and have stray islands."""
    rng = np.random.default_rng(0)
    if heart:
        shape, spacing = (10, 256, 216), (10.0, 1.4, 1.4)
    elif body and quick:
        shape, spacing = (150, 128, 128), (3.0, 3.2, 3.2)
    elif body:
        shape, spacing = (300, 512, 512), (1.5, 0.8, 0.8)
    elif quick:
        shape, spacing = (50, 128, 128), (5.0, 3.2, 3.2)
    else:
        shape, spacing = (100, 512, 512), (2.5, 0.8, 0.8)

    def noise(mm: float) -> NDArray[np.float32]:
        coarse = [max(2, round(n * s / mm)) for n, s in zip(shape, spacing, strict=True)]
        values = rng.standard_normal(coarse).astype(np.float32)
        factors = [n / m for n, m in zip(shape, coarse, strict=True)]
        return ndimage.zoom(values, factors, order=1, mode="nearest", grid_mode=True)

    wobble, roughness = 0.12 * noise(30), 0.03 * noise(8)
    prediction, reference = np.zeros((2, *shape), np.uint8)
    for label, (ml, centre) in enumerate(organs, 1):
        radius = (3000 * ml / (4 * np.pi)) ** (1 / 3)
        stretch = np.exp(rng.uniform(-0.25, 0.25, 3))
        semi = radius * stretch / np.cbrt(stretch.prod())
        middle = np.multiply(centre, shape)
        for moved in (np.zeros(3), np.array([0, 1, -1])):
            at = middle + moved
            low = np.maximum(at - 1.5 * semi / spacing, 0).astype(int)
            high = np.minimum(at + 1.5 * semi / spacing, shape).astype(int)
            box = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
            squares = [
                ((np.arange(b.start, b.stop) - c) * s / r) ** 2
                for b, c, s, r in zip(box, at, spacing, semi, strict=True)
            ]
            far = np.sqrt(sum(np.ix_(*squares))).astype(np.float32) + wobble[box]
            if moved.any():
                prediction[box][far + roughness[box] < 1.01] = label
            else:
                reference[box][far < 1] = label
        for _ in range(2):
            reach = np.array([10, 3, 3] if heart else [3, 6, 6]) / spacing
            at = middle + rng.uniform(-60, 60, 3) / spacing
            low = np.clip((at - reach).astype(int), 0, np.array(shape) - 1)
            high = np.maximum((at + reach).astype(int), low + 1)
            prediction[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] = label
    return Scene(prediction, reference, spacing, len(organs) + 1)


def probabilities(made: Scene) -> NDArray[np.float32]:
    """Softmax ``(K, z, y, x)`` that follows the predicted labels: sure inside, soft at borders."""
    rng = np.random.default_rng(1)
    p = np.empty((made.num_classes, *made.prediction.shape), np.float32)
    for k, plane in enumerate(p):
        rng.standard_normal(dtype=np.float32, out=plane)
        plane += 9 * ndimage.uniform_filter((made.prediction == k).astype(np.float32), (1, 5, 5))
        np.exp(plane, out=plane)
    total = p.sum(0)
    for plane in p:
        plane /= total
    return p


def installed(package: str, without: list[str], console: Console) -> bool:
    if package in without:
        return False
    try:
        importlib.import_module(PACKAGES[package])
    except ImportError as error:  # itself, or what it needs but does not bring along
        console.print(f"{package} is left out, since it cannot be imported: {error}")
        return False
    return True


def rounds_of(
    candidates: dict[str, Callable[[], Values]], rounds: int, seconds: float
) -> dict[str, tuple[list[float], Values]]:
    """Times and values of every candidate; the first run of each, which compiles, does not count
    unless it was too long for another.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    values = {}
    order = list(candidates)
    shuffle = random.Random(0)
    for _ in range(rounds + 1):
        shuffle.shuffle(order)
        for name in order:
            if sum(times[name]) > seconds:
                continue
            start = time.perf_counter()
            values[name] = candidates[name]()
            times[name].append(time.perf_counter() - start)
    return {name: (t[1:] or t, values[name]) for name, t in times.items()}


def show(
    title: str, results: dict[str, tuple[list[float], Values]], console: Console
) -> dict[str, Any]:
    columns = list(dict.fromkeys(key for _, values in results.values() for key in values))
    table = Table(title=title)
    for column in ("", "ms", "runs", "x segcal", *columns):
        table.add_column(column, justify="right" if column else "left")
    ours = min(results["segcal"][0])
    found = {}
    for name, (times, values) in results.items():
        cells = [f"{values[c]:.6g}" if c in values else "" for c in columns]
        ratio = min(times) / ours
        table.add_row(name, f"{1e3 * min(times):.1f}", str(len(times)), f"{ratio:.1f}", *cells)
        found[name] = {"ms": 1e3 * min(times), "runs": len(times), "ratio": ratio, **values}
    console.print(table)
    return found


def surface_candidates(
    spacing: tuple[float, ...], without: list[str], console: Console
) -> dict[str, Callable[[Masks], Values]]:
    """What each package makes of a pair of masks; segcal gives all that the others give."""

    def ours(masks: Masks) -> Values:
        distances = surface_distances(*masks, spacing_mm=spacing)
        directed = hausdorff_of(distances, percentile=95, definition="max_directed")
        return {
            "HD": hausdorff_of(distances),
            "HD95 pooled": hausdorff_of(distances, percentile=95),
            "HD95 directed": directed,
            "NSD": nsd_of(distances, tolerance_mm=TOLERANCE_MM),
        }

    found: dict[str, Callable[[Masks], Values]] = {"segcal": ours}
    if installed("MedPy", without, console):
        from medpy.metric.binary import hd, hd95

        found["MedPy"] = lambda masks: {
            "HD": hd(*masks, voxelspacing=spacing),
            "HD95 pooled": hd95(*masks, voxelspacing=spacing),
        }
    if installed("MONAI", without, console):
        from monai.metrics import HausdorffDistanceMetric

        metrics = {
            name: HausdorffDistanceMetric(include_background=True, percentile=percentile)
            for name, percentile in (("HD", None), ("HD95 directed", 95))
        }

        def monai(masks: Masks) -> Values:
            p, r = (torch.from_numpy(m)[None, None] for m in masks)
            return {name: float(m(p, r, spacing=spacing)) for name, m in metrics.items()}

        found["MONAI"] = monai
    if installed("surface-distance", without, console):
        import surface_distance

        def deepmind(masks: Masks) -> Values:
            d = surface_distance.compute_surface_distances(*masks[::-1], spacing)
            return {
                "HD": surface_distance.compute_robust_hausdorff(d, 100),
                "HD95 directed": surface_distance.compute_robust_hausdorff(d, 95),
                "NSD": surface_distance.compute_surface_dice_at_tolerance(d, TOLERANCE_MM),
            }

        found["surface-distance"] = deepmind
    return found


def bench_surface(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    console.print(
        f"HD and HD95 in mm; NSD at {TOLERANCE_MM:g} mm (surface-distance weighs by area, and its "
        "surface lies between the voxels)"
    )
    found = {}
    for name in options.scene or (*SCENES, ERRORS):
        if name == ERRORS:
            found |= bench_errors(options, console)
            continue
        made = scene(options.quick, *SCENES[name])
        candidates = {}
        for package, one in surface_candidates(made.spacing_mm, options.without, console).items():
            if name == "liver":  # masks are at hand
                masks = (made.prediction == 1, made.reference == 1)
                candidates[package] = partial(one, masks)
            else:
                candidates[package] = partial(mean_values, one, made, package == "segcal")
        results = rounds_of(candidates, options.rounds, options.seconds)
        title = f"{name}, {made.prediction.shape} {made.spacing_mm} mm"
        title += ", masks" if name == "liver" else ", from label maps; means"
        found[name] = show(title, results, console)
    return found


def errors(quick: bool) -> dict[str, Masks]:
    """An ellipsoid, and predictions of it that are wrong in one way each; two structures apart."""
    shape = (50, 128, 128) if quick else (100, 512, 512)
    rng = np.random.default_rng(0)

    def ellipsoid(centre: tuple[float, ...], radii: tuple[float, ...], rough: float = 0.0) -> Any:
        grid = np.ogrid[tuple(slice(0, n) for n in shape)]
        squares = sum(
            ((x - c * n) / (r * n)) ** 2
            for x, c, r, n in zip(grid, centre, radii, shape, strict=True)
        )
        if rough:
            coarse = rng.standard_normal([max(2, n // 13) for n in shape])
            squares = squares + rough * ndimage.zoom(
                coarse, [n / m for n, m in zip(shape, coarse.shape, strict=True)], order=1
            )
        return squares < 1

    middle, radii = (0.5, 0.5, 0.5), (0.3, 80 / 512, 90 / 512)
    reference = ellipsoid(middle, radii)
    blob = ellipsoid((0.9, 0.94, 0.94), (0.04, 0.02, 0.02))
    small = (0.04, 40 / 512, 40 / 512)
    return {
        "shifted by 1 %": (ellipsoid((0.5, 0.51, 0.5), radii), reference),
        "shifted by 12 %": (ellipsoid((0.5, 0.617, 0.5), radii), reference),
        "a far blob besides": (reference | blob, reference),
        "0.1 % scattered voxels": (reference | (rng.random(shape) < 0.001), reference),
        "a third of its size": (ellipsoid(middle, tuple(r / 3 for r in radii)), reference),
        "two rough blobs apart": (
            ellipsoid((0.5, 0.4, 0.4), small, 0.3), ellipsoid((0.5, 0.4, 0.6), small, 0.3)),
    }  # fmt: skip


def bench_errors(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The same distances where prediction and reference lie far apart."""
    found = {}
    candidates = surface_candidates((2.5, 0.8, 0.8), options.without, console)
    for name, masks in errors(options.quick).items():
        each = {package: partial(one, masks) for package, one in candidates.items()}
        results = rounds_of(each, options.rounds, options.seconds)
        found[name] = show(f"{name}, {masks[0].shape} (2.5, 0.8, 0.8) mm", results, console)
    return found


def many_candidates(
    spacing: tuple[float, ...], without: list[str], quick: bool, console: Console
) -> dict[str, list[Callable[[Masks], Values]]]:
    """What gives DSC, HD, HD95 and NSD of two masks in each package, as far as it has them."""
    found = {name: [one] for name, one in surface_candidates(spacing, without, console).items()}
    found["segcal"].append(lambda masks: {"DSC": dice(*masks, 1)})
    if "MedPy" in found:
        from medpy.metric.binary import dc

        found["MedPy"].append(lambda masks: {"DSC": dc(*masks)})
    if "MONAI" in found:
        from monai.metrics import compute_dice, compute_surface_dice

        def monai(masks: Masks) -> Values:
            p, r = (torch.from_numpy(m)[None, None] for m in masks)
            nsd = compute_surface_dice(
                p, r, [TOLERANCE_MM], include_background=True, spacing=spacing
            )
            return {"DSC": float(compute_dice(p, r)), "NSD": float(nsd)}

        found["MONAI"].append(monai)
    if "surface-distance" in found:
        from surface_distance import compute_dice_coefficient

        found["surface-distance"].append(
            lambda masks: {"DSC": compute_dice_coefficient(*masks[::-1])}
        )
    if installed("seg-metrics", without, console):
        from seg_metrics.seg_metrics import write_metrics

        keys = {"hd": "HD", "hd95": "HD95 pooled", "dice": "DSC"}

        def theirs(masks: Masks, metrics: list[str]) -> Values:
            p, r = (m.astype(np.uint8) for m in masks)
            (of,) = write_metrics(
                [1], gdth_img=r, pred_img=p, metrics=metrics, spacing=spacing, fully_connected=False
            )
            return {keys[metric]: float(of[metric][0]) for metric in metrics}

        found[WITHOUT_DSC] = [partial(theirs, metrics=["hd", "hd95"])]
        if quick:
            found["seg-metrics"] = [partial(theirs, metrics=list(keys))]
    return found


def of_label(
    parts: list[Callable[[Masks], Values]], made: Scene, label: int, box: tuple[slice, ...] | None
) -> Values:
    """All of a package's numbers of a label; in a box for segcal, else of the whole volume."""
    cut = ... if box is None else box
    masks = (made.prediction[cut] == label, made.reference[cut] == label)
    return {key: value for part in parts for key, value in part(masks).items()}


def bench_many(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """DSC, HD, HD95 and NSD of the many labels of a whole body, label by label.

    Labels come in an order that mixes sizes, the largest first; a package that has used up its
    share of seconds leaves out the rest, and is compared with segcal on those that it did.
    """
    made = scene(options.quick, BODY, body=True)
    maps = (made.prediction, made.reference)
    present = set.intersection(*(set(np.unique(m).tolist()) for m in maps)) - {0}
    order = sorted(present, key=lambda k: f"{k - 1:07b}"[::-1])
    candidates = many_candidates(made.spacing_mm, options.without, options.quick, console)
    boxes = warm_up_many(candidates, made, order)
    start = time.perf_counter()
    label_boxes(maps, order)
    finding = time.perf_counter() - start
    times: dict[str, dict[int, float]] = {name: {} for name in candidates}
    values: dict[str, dict[int, Values]] = {name: {} for name in candidates}
    names, shuffle = list(candidates), random.Random(0)
    for label in order:
        shuffle.shuffle(names)
        for name in names:
            ours = name == "segcal"
            if not ours and sum(times[name].values()) > options.seconds:
                continue
            start = time.perf_counter()
            found = of_label(candidates[name], made, label, boxes[label] if ours else None)
            times[name][label], values[name][label] = time.perf_counter() - start, found
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "maps.npz"
        np.savez(path, **dataclasses.asdict(made), order=order)
        quick = ["--quick"] if options.quick else []
        peaks = {
            name: in_fresh_process("--many", name, path, *quick)["peak"] for name in candidates
        }
    return show_many(made, times, values, finding, peaks, console)


def warm_up_many(
    candidates: dict[str, list[Callable[[Masks], Values]]], made: Scene, order: list[int]
) -> dict[int, tuple[slice, ...]]:
    """Boxes of the labels, when imports are done and all that is compiled is in memory."""
    for parts in candidates.values():
        of_cube(parts, made.spacing_mm)
    boxes = label_boxes((made.prediction, made.reference), order)
    for label in order:
        of_label(candidates["segcal"], made, label, boxes[label])
    return boxes


def of_cube(parts: list[Callable[[Masks], Values]], spacing_mm: tuple[float, float, float]) -> None:
    cube = np.zeros((8, 16, 16), np.uint8)
    cube[2:6, 4:9, 4:9] = 1
    of_label(parts, Scene(cube, cube, spacing_mm, 2), 1, None)


def show_many(
    made: Scene,
    times: dict[str, dict[int, float]],
    values: dict[str, dict[int, Values]],
    finding: float,
    peaks: dict[str, int],
    console: Console,
) -> dict[str, Any]:
    """Times on the labels that each package did, beside segcal's on the same; to which the search
    for the boxes of all labels is added every time.
    """
    ours = values["segcal"]
    columns = list(ours[next(iter(ours))])
    table = Table(title=f"{len(ours)} labels, {made.prediction.shape} {made.spacing_mm} mm")
    for column in ("", "labels", "s", "s a label", "x segcal", "peak, MB", *columns):
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    found = {}
    for name, of in times.items():
        seconds = sum(of.values())
        same = finding + sum(times["segcal"][label] for label in of)
        if name == "segcal":
            seconds = same
            numbers = {c: float(np.mean([v[c] for v in ours.values()])) for c in columns}
        else:
            numbers = {
                c: max(abs(v[c] - ours[label][c]) for label, v in values[name].items())
                for c in columns if c in next(iter(values[name].values()))
            }  # fmt: skip
        digits = ".3g" if name == "segcal" else ".1g"
        cells = [f"{numbers[c]:{digits}}" if c in numbers else "" for c in columns]
        table.add_row(
            name, str(len(of)), f"{seconds:.2f}", f"{seconds / len(of):.3f}",
            f"{seconds / same:.1f}", f"{peaks[name] / 1e6:.0f}", *cells,
        )  # fmt: skip
        found[name] = {
            "labels": len(of), "s": seconds, "ratio": seconds / same, "peak_mb": peaks[name] / 1e6,
            "means" if name == "segcal" else "largest_difference": numbers,
        }  # fmt: skip
    console.print(table)
    console.print(
        "x segcal: on the same labels. peak: memory beyond the label maps, in a process of its "
        "own, of all labels (segcal) or the largest. Last columns: means (segcal), or the largest "
        "difference from segcal in a label. surface-distance weighs HD95 and NSD by area, and its "
        "surface lies between the voxels. seg-metrics measures to ITK's contour; its DSC, which "
        "adds up voxels in Python, is taken with --quick alone."
    )
    return found


def mean_values(one: Callable[[Masks], Values], made: Scene, boxes: bool) -> Values:
    """Means over the labels; segcal's way to masks is by boxes."""
    labels = range(1, made.num_classes)
    maps = (made.prediction, made.reference)
    cuts = label_boxes(maps, labels) if boxes else dict.fromkeys(labels, (slice(None),) * 3)
    rows = [one(tuple(m[cuts[label]] == label for m in maps)) for label in labels]
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def ours_calibration(probs: NDArray[np.float32], labels: NDArray[np.uint8]) -> Values:
    voxels = Voxels(probs, labels, bins=BINS)
    tallies = voxels.tally()
    groups = voxels.equal_mass_groups(tallies, BINS, range(1, 1 + len(probs)))["all"]
    return {
        "ECE": tallies["all"].top.expected_error(),
        "classwise ECE": float(np.mean([c.expected_error() for c in tallies["all"].classes])),
        "TACE": mean_gap(groups),
    }


def their_calibration(metric: Any, probs: torch.Tensor, labels: torch.Tensor) -> Values:
    metric.reset()
    metric.update(probs, labels)
    return {"ECE": float(metric.compute())}


def bench_calibration(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    found = {}
    console.print(
        "torchmetrics adds up in float32: its ECE is segcal's on some thousand voxels and drifts "
        "away on millions"
    )
    for k in options.classes or CLASSES:
        made = scene(options.quick, CLASSES[k])
        probs = probabilities(made)
        candidates = {"segcal": partial(ours_calibration, probs, made.reference)}
        if installed("torchmetrics", options.without, console):
            from torchmetrics.classification import MulticlassCalibrationError

            y = torch.from_numpy(made.reference.astype(np.int64))[None]
            theirs = MulticlassCalibrationError(k, n_bins=BINS, norm="l1", validate_args=False)
            candidates["torchmetrics, ECE alone"] = partial(
                their_calibration, theirs, torch.from_numpy(probs)[None], y
            )
        title = f"calibration, {k} classes, {made.reference.size / 1e6:.1f} million voxels"
        results = rounds_of(candidates, options.rounds, options.seconds)
        found[f"{k} classes"] = show(title, results, console)
        del probs, candidates
    return found


def bench_case(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    made = scene(options.quick, FLARE_5)
    probs = probabilities(made)
    geometry = Geometry(made.reference.shape, made.spacing_mm, (0.0, 0.0, 0.0), np.eye(3))
    with tempfile.TemporaryDirectory() as folder:
        prediction, reference = Path(folder) / "case.npz", Path(folder) / "case.nii.gz"
        packed = prediction.with_stem("packed")
        seconds = {
            "numpy": timed(partial(np.savez_compressed, prediction, probabilities=probs)),
            "segcal": timed(partial(save_arrays, packed, {"probabilities": probs})),
        }
        larger = packed.stat().st_size / prediction.stat().st_size
        write_nifti(reference, made.reference, geometry)
        size = probs.nbytes
        del probs
        runs, reads = [], []
        for _ in range(options.rounds):
            runs.append(in_fresh_process("--worker", prediction, reference))
            reads.append(in_fresh_process("--reader", prediction, reference))
    whole, reading = (min(run["s"] for run in of) for of in (runs, reads))
    peak = max(run["peak"] - run["before"] for run in runs)
    table = Table(title=f"a case of {made.num_classes} classes from a file, {size / 1e6:.0f} MB")
    for column in ("np.load, s", "evaluated, s", "x np.load", "peak memory, MB", "x array"):
        table.add_column(column, justify="right")
    found = {
        "np_load_s": reading,
        "evaluated_s": whole,
        "x_np_load": whole / reading,
        "peak_mb": peak / 1e6,
        "x_array": peak / size,
    }
    table.add_row(*(f"{value:.2f}" for value in found.values()))
    console.print(table)
    slower = seconds["numpy"] / seconds["segcal"]
    console.print(
        f"packed in {seconds['segcal']:.1f} s; numpy.savez_compressed takes {slower:.1f} times as "
        f"long, and segcal's file is {larger:.2f} times as large"
    )
    return {
        **found, "mb": size / 1e6, "packed_s": seconds["segcal"], "numpy_x_packed": slower,
        "x_size_of_numpy": larger,
    }  # fmt: skip


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def bench_stream(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Peak memory while many cases go through one process."""
    n, side = (12, 48) if options.quick else (60, 128)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        predictions, references = Path(folder) / "p", Path(folder) / "r"
        predictions.mkdir()
        for i in range(6):  # the others are links to these
            logits = ndimage.gaussian_filter(
                rng.standard_normal((4, side, side, side)), (0, 4, 4, 4)
            )
            p = np.exp(40 * logits.astype(np.float32))
            p /= p.sum(0)
            labels = (np.cumsum(p, 0) < rng.random(p.shape[1:], np.float32)).sum(0).clip(0, 3)
            np.savez(predictions / f"case{i:02}.npz", probabilities=p)
            geometry = Geometry(labels.shape, (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), np.eye(3))
            write_nifti(references / f"case{i:02}.nii.gz", labels, geometry)
        for i in range(6, n):
            for where, end in ((predictions, ".npz"), (references, ".nii.gz")):
                (where / f"case{i:02}{end}").hardlink_to(where / f"case{i % 6:02}{end}")
        found = in_fresh_process("--stream", predictions, references)
    table = Table(title=f"{n} cases of {side}^3 voxels and 4 classes, {p.nbytes / 1e6:.0f} MB each")
    marks = sorted({0, n // 6 - 1, n // 2 - 1, n - 1})
    for i in marks:
        table.add_column(f"after {i + 1}, MB", justify="right")
    table.add_column("s a case", justify="right")
    table.add_row(*(f"{found['peaks'][i] / 1e6:.0f}" for i in marks), f"{found['s'] / n:.2f}")
    console.print(table)
    return found


def in_fresh_process(*arguments: str | Path) -> dict[str, Any]:
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def most() -> int:
    """Bytes at most so far; getrusage would start from those of the process before exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def stream(predictions: Path, references: Path) -> None:
    """Evaluate many cases in this process, and print the peak memory after each as JSON."""
    labels = LabelSet({k: str(k) for k in range(4)}, None, "benchmark")
    warm_up(labels)
    before, start, peaks = most(), time.perf_counter(), []
    evaluate_cohort(
        pair(predictions, references), label_set=labels,
        progress=lambda case: peaks.append(most() - before),
    )  # fmt: skip
    print(json.dumps({"peaks": peaks, "s": time.perf_counter() - start}))


def warm_up(label_set: LabelSet) -> None:
    """Evaluate a tiny case of the same types, so that the compiler and its code are in memory."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, label_set.num_channels, (8, 16, 16), np.uint8)
    shape = (label_set.num_channels, *labels.shape)
    probs = np.full(shape, 1 / label_set.num_channels, np.float32)  # masks would not be calibrated
    with tempfile.TemporaryDirectory() as folder:
        prediction, reference = Path(folder) / "case.npz", Path(folder) / "case.nii.gz"
        np.savez_compressed(prediction, probabilities=probs)
        geometry = Geometry(labels.shape, (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), np.eye(3))
        write_nifti(reference, labels, geometry)
        evaluate_files(
            Case("case", prediction, reference), label_set, settings=EvaluationSettings()
        )


def worker(prediction: Path, reference: Path) -> None:
    """Evaluate one case, and print seconds and bytes as JSON."""
    names = {k: str(k) for k in range(len(FLARE_5) + 1)}
    warm_up(LabelSet(names, None, "benchmark"))
    before = most()
    case = Case("case", prediction, reference)
    start = time.perf_counter()
    evaluate_files(case, LabelSet(names, None, "benchmark"), settings=EvaluationSettings())
    print(json.dumps({"before": before, "s": time.perf_counter() - start, "peak": most()}))


def reader(prediction: Path, reference: Path) -> None:
    """Read the probabilities of one case with NumPy alone, and print seconds as JSON.

    In a process of its own: memory that a process had before is faster to come by.
    """
    start = time.perf_counter()
    with np.load(prediction) as archive:
        archive["probabilities"]
    print(json.dumps({"s": time.perf_counter() - start}))


def many(package: str, maps: Path, quick: bool) -> None:
    """Print the bytes that the labels need in one package, at most, as JSON."""
    with np.load(maps) as archive:
        arrays = {key: archive[key] for key in archive}
    order, spacing = arrays.pop("order").tolist(), tuple(arrays.pop("spacing_mm").tolist())
    made = Scene(arrays["prediction"], arrays["reference"], spacing, len(BODY) + 1)
    parts = many_candidates(spacing, [], quick, Console(quiet=True))[package]
    of_cube(parts, spacing)
    label_boxes((made.prediction[:1], made.reference[:1]), order)
    before = most()
    if package == "segcal":
        boxes = label_boxes((made.prediction, made.reference), order)
        for label in order:
            of_label(parts, made, label, boxes[label])
    else:
        of_label(parts, made, order[0], None)
    print(json.dumps({"peak": most() - before}))


SECTIONS = {
    "surface": bench_surface,
    "many": bench_many,
    "calibration": bench_calibration,
    "case": bench_case,
    "stream": bench_stream,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--section", action="append", choices=SECTIONS, help="may be repeated")
    parser.add_argument(
        "--scene", action="append", choices=(*SCENES, ERRORS), help="of the surfaces"
    )
    parser.add_argument(
        "--classes", action="append", type=int, choices=CLASSES, help="of the calibration's section"
    )
    parser.add_argument("--quick", action="store_true", help="small volumes")
    parser.add_argument("--rounds", type=int, default=5, help="after a first one to warm up")
    parser.add_argument(
        "--seconds", type=float, default=60, help="after which a candidate sits out"
    )
    parser.add_argument("--without", action="append", default=[], choices=PACKAGES)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--reader", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stream", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--many", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker)
        return
    if options.reader:
        reader(*options.reader)
        return
    if options.stream:
        stream(*options.stream)
        return
    warnings.simplefilter("ignore")
    if options.many:
        many(options.many[0], Path(options.many[1]), options.quick)
        return
    console = Console(width=120)
    console.print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    found = {name: SECTIONS[name](options, console) for name in options.section or SECTIONS}
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

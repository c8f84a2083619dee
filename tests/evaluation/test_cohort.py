"""Cases and cohorts: conventions, misses, failures, real pairs."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from dataclasses import replace

import nibabel as nib
import numpy as np
import pandas as pd
import pytest
import SimpleITK as sitk  # noqa: N813
from PIL import Image
from scipy import ndimage
from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.evaluation.case import Structure, _near, evaluate_case
from segcal.evaluation.cohort import evaluate_cohort, evaluate_files
from segcal.evaluation.reported import label_means
from segcal.evaluation.settings import EvaluationSettings
from segcal.evaluation.summary import summarise
from segcal.io.label_sets import LabelSet, read_label_set
from segcal.io.pairing import pair
from segcal.io.volumes import Geometry, read_labels, write_nifti
from segcal.metrics.aece import aece
from segcal.metrics.brier import brier
from segcal.metrics.classwise_ece import classwise_ece
from segcal.metrics.dice import dice
from segcal.metrics.ece import ece
from segcal.metrics.ece_floor import floor_over_cases
from segcal.metrics.hausdorff import assd, hausdorff, nsd
from segcal.metrics.nll import nll
from segcal.metrics.table import FLOOR
from segcal.metrics.tace import tace
from segcal.posthoc.decision import regions_to_labels
from segcal.reproduction.crac import tace_ref
from tests.conftest import close
from tests.data_paths import real_data
from tests.io.test_formats import FLIPPED, by_itk, two_forms
from tests.io.test_volumes import peak
from tests.test_tally import expected as one_by_one

AB = (Structure("a", (1,), 1), Structure("b", (2,), 2))


def geometry(shape, spacing=(1.0, 1.0, 1.0)):
    return Geometry(shape, spacing, (0.0, 0.0, 0.0), np.eye(3))


def soft(labels, k, certainty=0.9):
    """Probabilities whose argmax is `labels`."""
    p = np.full((k, *labels.shape), (1 - certainty) / (k - 1), np.float32)
    np.put_along_axis(p, labels[None].astype(int), certainty, 0)
    return p


def run(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def test_row_is_what_the_metrics_say():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(3), (4, 10, 12)).transpose(3, 0, 1, 2)
    y = rng.integers(0, 3, (4, 10, 12))
    y[0, 0] = 9
    result = evaluate_case(
        p.argmax(0), y, spacing_mm=(2, 1, 1), structures=AB, probabilities=p,
        ignore_index=9,
    )  # fmt: skip
    row, fg = result.row, (y > 0) & (y != 9)
    close(row["ece_all"], ece(p, y, ignore_index=9))
    close(row["ece_fg"], ece(p, y, mask=fg, ignore_index=9))
    close(row["tace_fg"], tace(p, y, mask=fg, ignore_index=9))
    close(row["tace_ref"], tace_ref(p, y, mask=fg, ignore_index=9))
    assert row["voxels_all"] == (y != 9).sum()
    close(result.calibration["all"].top.expected_error(), row["ece_all"])
    close(row["diagonal_mm"], math.sqrt(8**2 + 10**2 + 12**2))


def test_every_column_is_its_metric_at_other_settings():
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.full(3, 0.4), (5, 9, 8)).transpose(3, 0, 1, 2)
    y = np.zeros((5, 9, 8), int)
    y[1:3, 2:5, 2:5], y[3, 5:8, 4:7], y[0, 0] = 1, 2, 9
    prediction = np.where(y == 9, 1, y)
    prediction[4, 8, 5:] = prediction[0, 5, 0] = 1  # outliers: the two HD95 differ
    prediction[0, 7, :2] = prediction[4, 0, 7] = 2
    mm, valid = (3.0, 1.0, 0.5), y != 9
    settings = EvaluationSettings(
        bins=7, tace_threshold=0.05, dilation=2, nsd_tolerance_mm=1.2,
        chosen=("fg", "union", "dilated", "crop", "roi", "all"),
    )  # fmt: skip
    roi = rng.random(y.shape) < 0.3
    p[:, 0], p[0, 0] = 0, 1  # as nnU-Net writes it outside its crop
    row = evaluate_case(
        prediction, y, spacing_mm=mm, structures=AB, probabilities=p, ignore_index=9,
        settings=settings, roi=roi,
    ).row  # fmt: skip
    foreground = (y > 0) & valid
    near = ndimage.binary_dilation(foreground, np.ones((5, 5, 5)))  # never grown from ignored ones
    columns = {
        "diagonal_mm", "dsc", "iou", "nsd", "hd95_penalised_mm", "assd_penalised_mm", "tace_ref",
    }  # fmt: skip
    crop = np.ones_like(valid)
    crop[0] = False
    masks = {
        "fg": foreground, "dilated2": near, "all": np.ones_like(valid), "roi": roi, "crop": crop,
        "union": foreground | (p.argmax(0) > 0),
    }  # fmt: skip
    for scope, mask in masks.items():
        kwargs = {"mask": mask, "ignore_index": 9}
        expected = {
            "voxels": (mask & valid).sum(),
            **one_by_one(p, y, 7, 0.05, **kwargs),
        }
        for name, value in expected.items():
            close(row[f"{name}_{scope}"], value, atol=1e-5 if name.startswith("aurc") else 1e-12)
            columns.add(f"{name}_{scope}")
    reference = tace_ref(p, y, bins=7, threshold=0.05, mask=foreground, ignore_index=9)
    close(row["tace_ref"], reference)
    for value, name in ((1, "a"), (2, "b")):
        a, b = (prediction == value) & valid, y == value
        expected = {
            "voxels_prediction": a.sum(),
            "voxels_reference": b.sum(),
            "dsc": dice(prediction, y, value, mask=valid),
            "iou": (a & b).sum() / (a | b).sum(),
            "volume_difference_ml": (int(a.sum()) - int(b.sum())) * 1.5 / 1000,
            "hd_mm": hausdorff(a, b, spacing_mm=mm),
            "hd95_pooled_mm": hausdorff(a, b, spacing_mm=mm, percentile=95),
            "hd95_max_directed_mm": hausdorff(
                a, b, spacing_mm=mm, percentile=95, definition="max_directed"
            ),
            "assd_pooled_mm": assd(a, b, spacing_mm=mm),
            "assd_mean_of_means_mm": assd(a, b, spacing_mm=mm, definition="mean_of_means"),
            "nsd": nsd(a, b, spacing_mm=mm, tolerance_mm=1.2),
        }
        assert expected["hd95_pooled_mm"] != expected["hd95_max_directed_mm"]
        for key, number in expected.items():
            close(row[f"{key}/{name}"], number)
            columns.add(f"{key}/{name}")
    for key, metric in label_means().items():
        close(row[key], (row[f"{metric}/a"] + row[f"{metric}/b"]) / 2)
    assert set(row) == columns  # nothing that this test does not know


def test_summary_of_two_cases(tmp_path):
    """Numbers of the summary from those of the cases, and pooled bins over both."""
    y = np.zeros((2, 20, 20), int)
    y[:, 5:10, 5:10] = 1
    shifted, probabilities = np.roll(y, 2, axis=2), {}
    (tmp_path / "p").mkdir()
    for name, prediction, certainty in (("a", y, 0.9), ("b", shifted, 0.7)):
        write_nifti(tmp_path / "gt" / f"{name}.nii.gz", y, geometry(y.shape))
        probabilities[name] = soft(prediction, 2, certainty)
        np.savez(tmp_path / "p" / f"{name}.npz", probabilities=probabilities[name])
    cohort = evaluate_cohort(pair(tmp_path / "p", tmp_path / "gt"))
    got = summarise(cohort)
    both = np.concatenate(list(probabilities.values()), axis=1)
    close(got["pooled"]["ece_all"], ece(both, np.concatenate([y, y])))
    eces = [ece(p, y) for p in probabilities.values()]
    block = got["metrics"]["ece_all"]
    close([block["mean"], block["std"], block["median"]],
          [np.mean(eces), np.std(eces, ddof=1), np.mean(eces)])  # fmt: skip
    assert (block["n"], block["undefined"]) == (2, 0)
    dsc = 2 * 15 / 50  # 3 of 5 columns overlap
    close(got["metrics"]["dsc"]["mean"], (1 + dsc) / 2)
    for surface in (got["classes"]["1"]["hd_mm"], got["surface_over_classes"]["hd_mm"]):
        close([surface["mean_of_found"], surface["penalised_mean"]], [1.0, 1.0])  # 0 and 2 mm


@pytest.mark.parametrize("ignore", [255, -1, -100])
def test_ignored_voxels_leave_every_number(ignore):
    """Gaps of .1, .2 and .7 in three voxels; one of two predicted voxels is labelled."""
    p = np.array([[0.1, 0.8], [0.4, 0.7]])[None]
    y = np.array([[[0, 1], [ignore, 0]]], np.int16)
    rows = [
        evaluate_case(
            prediction.astype(np.uint8), y, spacing_mm=(1, 1, 1), structures=AB[:1],
            probabilities=np.stack([1 - p, p]), ignore_index=ignore,
            settings=EvaluationSettings(bins=10),
        ).row
        for prediction in (p > 0.5, p > 0.3)
    ]  # fmt: skip
    close(rows[0]["ece_all"], 1 / 3)
    close(rows[0]["dsc/a"], 2 / 3)
    assert rows[0]["voxels_all"] == 3
    assert rows[0] == rows[1]


def test_background_hides_the_foreground_and_scopes_do_not():
    """9900 sure and right voxels beside 100 labelled ones, predicted with .99 and half right."""
    y, p = np.zeros((1, 100, 100), int), np.zeros((3, 1, 100, 100))
    y[0, 0], p[0], p[1:, 0, 0] = 1, 1, [[0.99], [0.005]]
    p[0, 0, 0] = 0.005
    y[0, 0, :50] = 2
    row = evaluate_case(p.argmax(0), y, spacing_mm=(1, 1, 1), structures=AB, probabilities=p).row
    close([row["ece_all"], row["ece_fg"], row["ece_union"]], [0.0049, 0.49, 0.49])


@pytest.mark.parametrize("reach", [1, 2, 3, 4, 5, 9, 40])
@pytest.mark.parametrize("shape", [(6, 17, 23), (1, 30, 9), (25,)])
def test_near_is_within_a_box(reach, shape):
    rng = np.random.default_rng(reach)
    for share in (0, 0.01, 0.2):
        mask = rng.random(shape) < share
        before = mask.copy()
        wanted = ndimage.maximum_filter(mask, 2 * reach + 1, mode="constant")
        assert (_near(mask, reach) == wanted).all()
        assert (mask == before).all()


def test_most_likely_classes_that_are_known_change_nothing():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(3), (4, 10, 12)).transpose(3, 0, 1, 2)
    y = rng.integers(0, 3, (4, 10, 12))
    options = {"spacing_mm": (2, 1, 1), "structures": AB, "probabilities": p}
    found = [evaluate_case(y, y, most_likely=known, **options).row for known in (None, p.argmax(0))]
    assert found[0] == found[1]
    assert found[0]["voxels_union"] == ((y > 0) | (p.argmax(0) > 0)).sum()


def test_dilated_scope_is_a_box():
    y = np.zeros((1, 30, 30), int)
    y[0, 15, 15] = 1
    row = evaluate_case(
        y, y, spacing_mm=(1, 1, 1), structures=AB[:1], probabilities=soft(y, 2),
        settings=EvaluationSettings(dilation=3),
    ).row  # fmt: skip
    assert row["voxels_dilated3"] == 49
    assert row["voxels_fg"] == 1


def test_regions_are_questions_of_their_own():
    """Nested sigmoids: whole {1, 2, 3}, core {2, 3}, enhancing {3}; worked out by hand."""
    p = np.array([(0.9, 0.8, 0.2), (0.6, 0.7, 0.9), (0.4, 0.9, 0.1), (0.2, 0.1, 0.05)]).T
    p = p.reshape(3, 1, 2, 2)
    y = np.array([2, 3, 0, 1]).reshape(1, 2, 2)
    names = {"whole": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}
    structures = [Structure(name, labels, i) for i, (name, labels) in enumerate(names.items())]
    prediction = regions_to_labels(p, (1, 2, 3))
    assert prediction.ravel().tolist() == [2, 3, 2, 0]
    result = evaluate_case(
        prediction, y, spacing_mm=(1, 1, 1), structures=structures, probabilities=p, regions=True,
        settings=EvaluationSettings(bins=10),
    )  # fmt: skip
    row = result.row
    close([row[f"cece_all/{name}"] for name in names], [0.425, 0.375, 0.1125])
    close(row["cece_all"], (0.425 + 0.375 + 0.1125) / 3)
    close(row["dsc/whole"], 2 * 2 / (3 + 3))
    assert result.calibration["all"].voxels == 3 * 4
    ignored = y.copy()
    ignored[0, 1, 0] = 9
    row = evaluate_case(
        prediction, ignored, spacing_mm=(1, 1, 1), structures=structures, probabilities=p,
        regions=True, ignore_index=9, settings=EvaluationSettings(bins=10),
    ).row  # fmt: skip
    close(row["cece_all/whole"], (0.1 + 0.4 + 0.8) / 3)
    assert row["voxels_all"] == 3


def test_a_scope_without_its_mask():
    y = np.zeros((1, 4, 4), int)
    with pytest.raises(ValueError, match="scope roi: no mask"):
        evaluate_case(y, y, spacing_mm=(1, 1, 1), structures=AB[:1], probabilities=soft(y, 2),
                      settings=EvaluationSettings(chosen=("roi",)))  # fmt: skip
    for chosen in ((), ("fg", "fg"), ("air",)):
        with pytest.raises(ValueError, match="chosen: expected"):
            EvaluationSettings(chosen=chosen)


def test_a_miss_is_never_dropped(tmp_path):
    """The reference three times; predictions shifted by 4, again, and nothing."""
    y = np.zeros((1, 64, 64), int)
    y[0, 20:28, 20:28] = 1
    shifted = np.roll(y, 4, axis=2)
    for i, prediction in enumerate((shifted, shifted, np.zeros_like(y))):
        write_nifti(tmp_path / "gt" / f"{i}.nii.gz", y, geometry(y.shape))
        write_nifti(tmp_path / "p" / f"{i}.nii.gz", prediction, geometry(y.shape))
    cohort = evaluate_cohort(pair(tmp_path / "p", tmp_path / "gt"))
    assert cohort.rows["hd_mm/1"].tolist() == cohort.rows["hd95_pooled_mm/1"].tolist()
    assert cohort.rows["hd_mm/1"].tolist() == [4, 4, math.inf]
    block = summarise(cohort)["classes"]["1"]["hd95_pooled_mm"]
    assert (block["n"], block["found"], block["missed"], block["false_alarms"]) == (3, 2, 1, 0)
    assert block["mean_of_found"] == 4
    diagonal = math.sqrt(64**2 + 64**2 + 1)
    close(block["penalised_mean"], (4 + 4 + diagonal) / 3)
    out = run(tmp_path / "p", tmp_path / "gt", "-o", tmp_path / "out")
    assert out.exit_code == 0, out.output
    assert not (tmp_path / "out" / "reliability.png").exists()  # label maps have no confidence


def test_absent_and_false_alarm():
    none, some = np.zeros((2, 8, 8), int), np.zeros((2, 8, 8), int)
    some[0, 2:4, 2:4] = 1
    kwargs = {"spacing_mm": (1, 1, 1), "structures": AB[:1]}
    absent = evaluate_case(none, none, **kwargs).row
    assert math.isnan(absent["dsc/a"])
    assert math.isnan(absent["hd_mm/a"])
    alarm = evaluate_case(some, none, **kwargs).row
    assert alarm["dsc/a"] == 0
    assert alarm["hd_mm/a"] == math.inf


@pytest.mark.parametrize("named", [True, False])
def test_what_is_in_neither_map_is_counted_and_never_scored(tmp_path, named):
    """Found, absent, missed and false alarm: each is counted, whether labels are known or not."""
    some = np.zeros((1, 64, 64), int)
    some[0, 2:4, 2:4] = 1
    for i, (prediction, reference) in enumerate(
        ((some, some), (0 * some, 0 * some), (0 * some, some), (some, 0 * some))
    ):
        write_nifti(tmp_path / "gt" / f"{i}.nii.gz", reference, geometry(some.shape))
        write_nifti(tmp_path / "p" / f"{i}.nii.gz", prediction, geometry(some.shape))
    label_set = LabelSet({0: "background", 1: "1"}, None, "dataset.json") if named else None
    cohort = evaluate_cohort(pair(tmp_path / "p", tmp_path / "gt"), label_set=label_set)
    assert cohort.failed == {}
    got = summarise(cohort)["classes"]["1"]
    close(cohort.rows["dsc/1"].drop("1").tolist(), [1, 0, 0])
    assert cohort.rows.loc["1", ["dsc/1", "hd_mm/1", "hd95_pooled_mm/1"]].isna().all()
    assert (got["dsc"]["n"], got["dsc"]["undefined"]) == (3, 1)
    close(got["dsc"]["mean"], 1 / 3)
    for metric in ("hd_mm", "hd95_pooled_mm", "hd95_max_directed_mm", "assd_pooled_mm"):
        block = got[metric]
        counts = [block[k] for k in ("n", "found", "missed", "false_alarms", "absent")]
        assert counts == [3, 1, 1, 1, 1]
        assert cohort.rows[f"{metric}/1"].tolist()[2:] == [math.inf, math.inf]
        close(block["penalised_mean"], 2 * math.sqrt(64**2 + 64**2 + 1) / 3)


def test_every_label_has_its_row(tmp_path):
    """A map of several labels is never one mask, and a missed one neither leaves nor stops it."""
    y = np.zeros((4, 12, 12), int)
    y[0, 1:4, 1:4], y[1, 5:8, 5:8], y[2, 8:11, 2:5] = 1, 2, 3
    write_nifti(tmp_path / "gt" / "a.nii.gz", y, geometry(y.shape))
    write_nifti(tmp_path / "p" / "a.nii.gz", np.where(y == 3, 0, y), geometry(y.shape))
    cohort = evaluate_cohort(pair(tmp_path / "p", tmp_path / "gt"))
    assert cohort.label_names == ["1", "2", "3"]
    close(cohort.rows.loc["a", ["dsc/1", "dsc/2", "dsc/3", "dsc"]].tolist(), [1, 1, 0, 2 / 3])
    got = summarise(cohort)["classes"]
    assert [got[k]["hd_mm"]["missed"] for k in "123"] == [0, 0, 1]
    assert cohort.rows.loc["a", "hd_mm/3"] == math.inf


def test_memory_of_surfaces_is_that_of_the_labels():
    """13 organs of one size in volumes of two: nothing of the size of the volume is made."""
    structures = [Structure(str(k), (k,), k) for k in range(1, 14)]
    used, rows = [], []
    for n in (96, 160):
        y = np.zeros((n, n, n), np.uint8)
        for k in range(13):
            z, i, j = (4 + n // 3 * at for at in np.unravel_index(k, (3, 3, 3)))
            y[z : z + 20, i : i + 20, j : j + 20] = k + 1
        moved = np.roll(y, 1, axis=2)
        result, most = peak(
            lambda p=moved, r=y: evaluate_case(p, r, spacing_mm=(2, 1, 1), structures=structures)
        )
        used.append(most)
        rows.append({k: v for k, v in result.row.items() if k != "diagonal_mm"})
    assert rows[0] == rows[1]
    assert rows[0]["hd_mm/13"] == 1
    assert used[1] < 0.1 * y.nbytes
    assert used[1] < used[0] + 2**14


def test_memory_of_a_case_is_one_copy_and_little_more(tmp_path):
    """14 half-precision classes: what a larger volume takes more is that volume, once."""
    used, stored, voxels = [], [], []
    for shape in ((16, 48, 48), (16, 48, 48), (40, 96, 96)):  # the first imports and compiles
        y = np.zeros(shape, np.uint8)
        y[4:14, 10:24, 10:24], y[4:14, 26:40, 26:40] = 1, 2
        p = soft(y, 14).astype(np.float16)
        folder = tmp_path / str(len(used))
        (folder / "p").mkdir(parents=True)
        np.savez(folder / "p" / "a.npz", probabilities=p)
        write_nifti(folder / "gt" / "a.nii.gz", y, geometry(shape))
        (case,) = pair(folder / "p", folder / "gt").cases
        result, most = peak(
            lambda case=case: evaluate_files(case, None, settings=EvaluationSettings())
        )
        close(result.row["ece_all"], 0.1, atol=1e-3)
        used.append(most)
        stored.append(p.nbytes)
        voxels.append(y.size)
    assert used[2] - used[1] < (stored[2] - stored[1]) + 8 * (voxels[2] - voxels[1])


def test_memory_does_not_grow_with_the_cases(tmp_path):
    rng = np.random.default_rng(0)
    shape, p, y = (32, 64, 64), [], []
    (tmp_path / "p").mkdir()
    for i in range(24):
        of_one = rng.random(shape, np.float32)
        p.append(np.stack([1 - of_one, of_one]))
        y.append((rng.random(shape) < of_one ** (1 + i / 24)).astype(np.uint8))
        np.savez(tmp_path / "p" / f"{i:02}.npz", probabilities=p[-1])
        write_nifti(tmp_path / "gt" / f"{i:02}.nii.gz", y[-1], geometry(shape))
    pairing, settings = pair(tmp_path / "p", tmp_path / "gt"), EvaluationSettings(chosen=("all",))
    whole_p, whole_y = np.stack(p, 1), np.stack(y)
    del p, y

    def cohort_of(n):
        return evaluate_cohort(replace(pairing, cases=pairing.cases[:n]), settings=settings)

    cohort_of(1)  # imports and compiles
    _, few = peak(lambda: cohort_of(4))
    cohort, many = peak(lambda: cohort_of(24))
    assert len(cohort.rows) == 24
    assert many < 1.1 * few
    pooled = summarise(cohort)["pooled"]
    for name, metric in (("ece", ece), ("cece", classwise_ece), ("nll", nll), ("brier", brier)):
        close(pooled[f"{name}_all"], metric(whole_p, whole_y), rtol=0, atol=1e-9)
    off = abs(pooled["aece_all"] - aece(whole_p, whole_y))
    assert off <= pooled["aece_bound_all"] + 1e-9


def test_the_floor_of_ece_stands_beside_it(tmp_path):
    """Twelve cases whose labels are drawn from their probabilities, all columns of voxels alike."""
    rng = np.random.default_rng(0)
    (tmp_path / "p").mkdir()
    for i in range(12):
        of_one = np.repeat(rng.random((4, 8, 1), np.float32), 32, axis=2)
        y = (np.repeat(rng.random((4, 8, 1)), 32, axis=2) < of_one).astype(np.uint8)
        np.savez(tmp_path / "p" / f"{i:02}.npz", probabilities=np.stack([1 - of_one, of_one]))
        write_nifti(tmp_path / "gt" / f"{i:02}.nii.gz", y, geometry(y.shape))
    write_nifti(tmp_path / "p" / "map.nii.gz", y, geometry(y.shape))  # without probabilities
    write_nifti(tmp_path / "gt" / "map.nii.gz", y, geometry(y.shape))
    pairing = pair(tmp_path / "p", tmp_path / "gt")
    cohort = evaluate_cohort(pairing, settings=EvaluationSettings(chosen=("all",)))
    pooled, (cases,) = summarise(cohort)["pooled"], cohort.reliability.values()
    assert [int(one.count.sum()) for one in cases] == [1024] * 12
    floor = floor_over_cases(cohort.calibration["all"].top_mass.statistics, cases)
    for row in FLOOR:
        assert pooled[f"{row.key}_all"] == row.function(floor)
    assert pooled["ece_floor_all"] > 3 * pooled["ece_floor_independent_all"]  # sqrt(32) in truth
    assert pooled["ece_p_all"] > 0.05
    assert pooled["ece_isotonic_all"] > 0


def disc_and_ellipse():
    """A disc of radius 40, and an ellipse of semi-axes 30 and 44, in 128 x 128 pixels."""
    y, x = np.mgrid[:128, :128] - 64
    return (x**2 + y**2 < 40**2).astype(np.uint8), ((x / 30) ** 2 + (y / 44) ** 2 < 1).astype(
        np.uint8
    )


@pytest.mark.parametrize("axes", ["2-D", "z", "y", "x"])
def test_one_slice_is_an_image_of_two_axes(tmp_path, axes):
    """MONAI says 10.0, too; with every pixel taken for surface it was 5.0, and ASSD 0.563."""
    pair_ = disc_and_ellipse()
    mm = (1.0, 1.0)
    p, r = (mask == 1 for mask in pair_)
    assert hausdorff(p, r, spacing_mm=mm, percentile=95) == 10.0
    close(assd(p, r, spacing_mm=mm), 5.252, atol=5e-4)
    for name, mask in zip(("predicted", "labels"), pair_, strict=True):
        path = tmp_path / name / "a.nii.gz"
        if axes == "2-D":
            path.parent.mkdir()
            nib.save(nib.Nifti1Image(mask.T, np.eye(4)), path)
            continue
        array = np.expand_dims(mask, "zyx".index(axes))
        spacing = [7.0 if axis == axes else 1.0 for axis in "zyx"]
        write_nifti(path, array, geometry(array.shape, tuple(spacing)))
    done = run(tmp_path / "predicted", tmp_path / "labels", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    row = pd.read_csv(tmp_path / "out" / "cases.csv").iloc[0]
    assert row["hd95_pooled_mm/1"] == 10.0
    close(row["assd_pooled_mm/1"], 5.252, atol=5e-4)


def test_a_label_in_one_slice_of_many_has_neighbours_in_the_others():
    """So all of its voxels are surface, unlike those of an image of one slice."""
    p, r = (np.pad(mask[None], ((1, 2), (0, 0), (0, 0))) for mask in disc_and_ellipse())
    row = evaluate_case(p, r, spacing_mm=(2.0, 1.0, 1.0), structures=AB[:1]).row
    close(row["assd_pooled_mm/a"], assd(p == 1, r == 1, spacing_mm=(2.0, 1.0, 1.0)))
    close(row["assd_pooled_mm/a"], 0.563, atol=5e-4)


@pytest.mark.parametrize("shape", [(3, 3, 3), (3, 4, 5)])
def test_axis_order_of_npz(tmp_path, shape):
    """npz is (class, z, y, x); a missing transpose would give Dice 1/3 without a shape error."""
    y = np.zeros(shape, np.uint8)
    y[:, :, 0] = 1  # x == 0
    (tmp_path / "gt").mkdir()
    nib.save(nib.Nifti1Image(y.transpose(), np.eye(4)), tmp_path / "gt" / "a.nii.gz")
    (tmp_path / "p").mkdir()
    np.savez(tmp_path / "p" / "a.npz", probabilities=soft(y, 2))
    out = run(tmp_path / "p", tmp_path / "gt", "-o", tmp_path / "out", "--bins", 10)
    assert out.exit_code == 0, out.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    close(summary["metrics"]["dsc"]["mean"], 1.0)
    close(summary["metrics"]["ece_fg"]["mean"], 0.1, atol=1e-6)
    close(summary["metrics"]["cece_all"]["mean"], 0.1, atol=1e-6)
    np.savez(tmp_path / "p" / "a.npz", probabilities=soft(y, 2).transpose(0, 3, 2, 1))
    cohort = evaluate_cohort(
        pair(tmp_path / "p", tmp_path / "gt"), settings=EvaluationSettings(bins=10)
    )
    if shape == (3, 3, 3):  # nothing tells
        close(cohort.rows.loc["a", ["dsc", "cece_all"]].tolist(), [1 / 3, 9.3 / 27], atol=1e-6)
    else:
        assert "the axes look reversed" in cohort.failed["a"]


def test_trailing_axes_of_length_one(tmp_path):
    y = np.zeros((6, 5, 4), np.uint8)
    y[1:4, 2, 1:3] = 1
    for folder, array in (("gt", y), ("p", y[..., None])):
        (tmp_path / folder).mkdir()
        image = nib.Nifti1Image(array, np.diag([2.0, 3.0, 4.0, 1.0]))
        nib.save(image, tmp_path / folder / "a.nii.gz")
    for folders in (("p", "gt"), ("gt", "p")):
        cohort = evaluate_cohort(pair(*(tmp_path / folder for folder in folders)))
        assert cohort.failed == {}
        row = cohort.rows.loc["a"]
        assert [row[f"spacing_{axis}_mm"] for axis in "zyx"] == [4, 3, 2]
        assert (row["dsc"], row["hd_mm/1"]) == (1, 0)


def test_failures_are_named_and_the_rest_is_evaluated(tmp_path):
    y = np.zeros((2, 40, 40), int)
    y[0, 10:20, 10:20] = 1
    for name in ("good", "logits", "moved", "unmatched"):
        write_nifti(tmp_path / "gt" / f"{name}.nii.gz", y, geometry(y.shape))
    (tmp_path / "p").mkdir()
    np.savez(tmp_path / "p" / "good.npz", probabilities=soft(y, 2))
    np.savez(tmp_path / "p" / "logits.npz", probabilities=5 * soft(y, 2))
    write_nifti(
        tmp_path / "p" / "moved.nii.gz", y,
        Geometry(y.shape, (1.0, 1.0, 1.0), (0.0, 0.0, 3.0), np.eye(3)),
    )  # fmt: skip
    out = run(tmp_path / "p", tmp_path / "gt", "-o", tmp_path / "out")
    assert out.exit_code == 1
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["cases"]["evaluated"] == 1
    assert "apply a softmax" in summary["cases"]["failed"]["logits"]
    assert "3 mm apart" in summary["cases"]["failed"]["moved"]
    assert summary["cases"]["without_prediction"] == ["unmatched"]
    assert summary["conventions"]["hd95_pooled_mm"].endswith("(medpy)")
    assert (tmp_path / "out" / "reliability.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "cases.csv").read_text().count("\n") == 2
    assert "FAILED logits" in out.output


def test_ignore_label_from_dataset_json(tmp_path):
    y = np.zeros((2, 12, 12), int)
    y[0, 2:6, 2:6], y[1] = 1, 2
    prediction = y.copy()
    prediction[1] = 1  # wrong, but ignored
    write_nifti(tmp_path / "gt" / "a.nii.gz", y, geometry(y.shape))
    (tmp_path / "p").mkdir()
    np.savez(tmp_path / "p" / "a.npz", probabilities=soft(prediction, 2))
    labels = {"labels": {"background": 0, "organ": 1, "ignore": 2}}
    (tmp_path / "dataset.json").write_text(json.dumps(labels))
    out = run(tmp_path / "p", tmp_path / "gt", "-o", tmp_path / "out")
    assert out.exit_code == 0, out.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["classes"]["organ"]["dsc"]["mean"] == 1
    close(summary["metrics"]["ece_all"]["mean"], 0.1, atol=1e-6)
    (tmp_path / "dataset.json").unlink()
    out = run(tmp_path / "p", tmp_path / "gt", "-o", tmp_path / "out2")
    assert out.exit_code == 1
    assert "labels [2] are not among the classes 0, 1" in out.output


def test_wrong_usage_is_two(tmp_path):
    assert run(tmp_path / "none", tmp_path, "-o", tmp_path / "out").exit_code == 2
    assert run(tmp_path).exit_code == 2


def test_a_real_prediction():
    """Spine MRI: the prediction swaps labels 60 and 61."""
    folder = real_data("spine_pair")
    cohort = evaluate_cohort(pair(folder / "pred.nii.gz", folder / "ref.nii.gz"))
    assert cohort.failed == {}
    row = cohort.rows.loc["ref"]
    assert row["voxels_reference/60"] == 38431
    assert row["voxels_prediction/61"] == 39763
    close([row["dsc/60"], row["dsc/61"], row["dsc/62"]], [0.02, 0.03, 0.68], atol=0.006)
    for label in (26, 41, 100):
        assert 0.87 <= row[f"dsc/{label}"] <= 0.975
        assert 0 < row[f"hd95_pooled_mm/{label}"] <= row[f"hd_mm/{label}"] < 100


def test_acdc_distances_are_in_true_millimetres(tmp_path):
    """The affine of this file says 1 mm; one slice up is 10 mm, one column 1.5625 mm."""
    reference = real_data("acdc") / "training" / "patient001" / "patient001_frame01_gt.nii.gz"
    at = read_labels(reference).geometry
    masks = np.zeros((3, *at.shape), np.uint8)
    masks[0, 5, 100, 100] = masks[1, 6, 100, 100] = masks[2, 5, 100, 103] = 1
    for name, mask in zip("abc", masks, strict=True):
        write_nifti(tmp_path / f"{name}.nii.gz", mask, at)
    for name, mm in (("b", 10), ("c", 3 * 1.5625)):
        cohort = evaluate_cohort(pair(tmp_path / f"{name}.nii.gz", tmp_path / "a.nii.gz"))
        close(cohort.rows.iloc[0]["hd_mm/1"], mm, rtol=1e-6)
    copy = tmp_path / "copy.nii.gz"  # what SimpleITK writes after reading the original
    sitk.WriteImage(sitk.ReadImage(str(reference)), str(copy))
    cohort = evaluate_cohort(pair(copy, reference))
    assert cohort.failed == {}
    assert cohort.rows.iloc[0]["dsc"] == 1


def test_every_layout_gives_the_same_numbers(tmp_path):
    """One prediction: v2 and v1 of nnU-Net, 4-D with turned axes, one file per class, two folds."""
    rng = np.random.default_rng(0)
    y = np.zeros((4, 14, 12), int)
    y[1:3, 3:9, 4:9], y[2, 5:8, 5:8] = 1, 2
    at = Geometry(y.shape, (4.0, 1.5, 1.25), (-3.0, 7.0, 11.0), np.diag([-1.0, -1.0, 1.0]))
    p = np.zeros((3, *y.shape), np.float32)
    p[0] = 1
    inside = soft(y, 3)[:, 1:4, 2:10, 3:10] + rng.random((3, 3, 8, 7), np.float32) / 5
    p[:, 1:4, 2:10, 3:10] = inside / inside.sum(0)
    names = {"labels": {"background": 0, "myo": 1, "lv": 2}}
    (tmp_path / "dataset.json").write_text(json.dumps(names))
    write_nifti(tmp_path / "gt" / "a.nii.gz", y, at)
    for folder in ("v1", "v2", "model/fold_3/validation"):
        (tmp_path / folder).mkdir(parents=True)
    np.savez(tmp_path / "v2" / "a.npz", probabilities=p)
    np.savez(tmp_path / "model" / "fold_3" / "validation" / "a.npz", probabilities=p)
    np.savez(tmp_path / "v1" / "a.npz", softmax=p[:, 1:4, 2:10, 3:10])
    box = {"crop_bbox": [[1, 4], [2, 10], [3, 10]], "original_size_of_raw_data": np.array(y.shape)}
    (tmp_path / "v1" / "a.pkl").write_bytes(pickle.dumps(box))
    canonical = Geometry(  # RAS: both axes of the plane run the other way
        y.shape, (3.999999, 1.5, 1.25), (-3.0 - 11 * 1.25, 7.0 - 13 * 1.5, 11.0), np.eye(3)
    )
    write_nifti(tmp_path / "turned" / "a.nii", p[:, :, ::-1, ::-1], canonical)
    for k, name in ((1, "myo"), (2, "lv")):
        write_nifti(tmp_path / "classes" / "a" / f"{name}.nii.gz", p[k], at)
    label_set = read_label_set(tmp_path / "dataset.json")
    cohorts = {
        folder: evaluate_cohort(pair(tmp_path / folder, tmp_path / "gt"), label_set=label_set)
        for folder in ("v2", "v1", "turned", "classes", "model")
    }
    expected = cohorts["v2"].rows.loc["a"]
    assert 0 < expected["ece_all"] < 0.3
    assert expected["dsc/myo"] > 0.5
    for folder, cohort in cohorts.items():
        assert cohort.failed == {}
        np.testing.assert_allclose(cohort.rows.loc["a"], expected, rtol=1e-5, atol=1e-6)
        turned = {"a": ["a.nii: stored as RAS, re-ordered to the reference's LPS"]}
        assert cohort.notes == (turned if folder == "turned" else {})


def test_masks_and_turned_label_maps(tmp_path):
    y = np.zeros((3, 9, 8), int)
    y[1, 2:6, 2:5], y[2, 5:8, 4:7] = 1, 2
    at = geometry(y.shape, (2.0, 1.0, 1.0))
    write_nifti(tmp_path / "gt" / "a.nii.gz", y, at)
    write_nifti(tmp_path / "gt" / "b.nii.gz", y, at)
    write_nifti(tmp_path / "gt" / "c.nii.gz", y, at)
    names = {"labels": {"background": 0, "liver": 1, "spleen": 2}}
    (tmp_path / "dataset.json").write_text(json.dumps(names))
    for k, name in ((1, "liver"), (2, "spleen")):
        write_nifti(tmp_path / "p" / "a" / f"{name}.nii.gz", y == k, at)
    upside_down = Geometry(y.shape, (2.0, 1.0, 1.0), (0.0, 0.0, 4.0), np.diag([1.0, 1.0, -1.0]))
    write_nifti(tmp_path / "p" / "b" / "liver.nii.gz", (y == 1)[::-1], upside_down)
    write_nifti(tmp_path / "p" / "b" / "spleen.nii.gz", y == 2, upside_down)
    write_nifti(tmp_path / "p" / "c.nii", y[::-1], upside_down)
    label_set = read_label_set(tmp_path / "dataset.json")
    cohort = evaluate_cohort(pair(tmp_path / "p", tmp_path / "gt"), label_set=label_set)
    assert cohort.failed == {}
    assert cohort.rows["dsc/liver"].tolist() == [1, 1, 1]
    assert cohort.rows["dsc/spleen"].tolist() == [1, 0, 1]  # its slices are in the wrong order
    assert "stored as RAI, re-ordered to the reference's RAS" in cohort.notes["b"][0]
    assert evaluate_cohort(pair(tmp_path / "p", tmp_path / "gt")).failed.keys() == {"a", "b"}


def test_means_over_labels_charge_a_miss():
    """a is moved by 3 mm, b is missed and costs the diagonal, c is absent and costs nothing."""
    y = np.zeros((1, 30, 40), int)
    y[0, 5:10, 5:10], y[0, 20:25, 20:25] = 1, 2
    prediction = np.roll(np.where(y == 1, 1, 0), 3, axis=2)
    row = evaluate_case(
        prediction, y, spacing_mm=(5, 1, 1), structures=(*AB, Structure("c", (3,), 3))
    ).row
    diagonal = math.sqrt(5**2 + 30**2 + 40**2)
    close(row["hd95_penalised_mm"], (3 + diagonal) / 2)
    close(row["assd_penalised_mm"], (row["assd_pooled_mm/a"] + diagonal) / 2)
    close(row["nsd"], (row["nsd/a"] + 0) / 2)
    close(row["dsc"], (2 * 10 / 50 + 0) / 2)


def test_references_in_folders_of_images_are_measured_in_pixels(tmp_path):
    predicted, reference = disc_and_ellipse()
    (tmp_path / "l" / "a").mkdir(parents=True)
    (tmp_path / "p").mkdir()
    Image.fromarray(reference).save(tmp_path / "l" / "a" / "disc.png")
    Image.fromarray(predicted).save(tmp_path / "p" / "a.png")
    done = run(tmp_path / "p", tmp_path / "l", "-o", tmp_path / "out", "--labels", "disc=1")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["unit"] == "px"


@pytest.mark.parametrize("ending", ["png", "bmp", "tif"])
def test_a_data_set_of_images_is_measured_in_pixels(tmp_path, ending):
    """As nnU-Net's NaturalImage2DIO writes it: label maps, and ``.npz`` of ``(K, 1, y, x)``."""
    predicted, reference = disc_and_ellipse()
    for folder, mask in (("p", predicted), ("l", reference)):
        (tmp_path / folder).mkdir()
        Image.fromarray(mask).save(tmp_path / folder / f"a.{ending}")
    np.savez(tmp_path / "p" / "a.npz", probabilities=soft(predicted[None], 2))
    done = run(tmp_path / "p", tmp_path / "l", "-o", tmp_path / "out", "--format", "markdown")
    assert done.exit_code == 0, done.output
    assert "px; HD" in done.output
    row = pd.read_csv(tmp_path / "out" / "cases.csv").iloc[0]
    assert row["hd95_pooled_mm/1"] == 10.0
    close(row["assd_pooled_mm/1"], 5.252, atol=5e-4)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["unit"] == "px"
    assert summary["cases"]["notes"] == {}
    assert "distance, px;" in summary["conventions"]["hd_mm"]
    table = (tmp_path / "out" / "tables.md").read_text()
    page = (tmp_path / "out" / "index.html").read_text()
    for text in (table, page):
        assert "HD95 (px)" in text
        assert "volume difference (1000 px)" in text
        assert "(mm)" not in text
    checked = CliRunner().invoke(app, ["check", str(tmp_path / "p"), str(tmp_path / "l")])
    assert checked.exit_code == 0, checked.output
    assert "1 of 1 cases can be evaluated" in checked.output


def test_pictures_beside_volumes_are_no_cases(tmp_path):
    predicted, reference = (mask[None] for mask in disc_and_ellipse())
    for folder, mask in (("p", predicted), ("l", reference)):
        write_nifti(tmp_path / folder / "a.nii.gz", mask, geometry(mask.shape))
        for name in ("a.png", "overview.png"):
            Image.fromarray(mask[0] * 255).save(tmp_path / folder / name)
    (found,) = pair(tmp_path / "p", tmp_path / "l").cases
    assert (found.prediction.name, found.reference.name) == ("a.nii.gz", "a.nii.gz")
    (tmp_path / "p" / "a.nii.gz").unlink()
    np.savez(tmp_path / "p" / "a.npz", probabilities=soft(predicted, 2))
    done = run(tmp_path / "p", tmp_path / "l", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert pd.read_csv(tmp_path / "out" / "cases.csv").iloc[0]["hd95_pooled_mm/1"] == 10.0


def test_two_forms_that_disagree_are_warned_of(tmp_path):
    """A prediction that SimpleITK wrote for such a reference had DSC 0, with exit code 0."""
    for name in ("l", "p"):
        (tmp_path / name).mkdir()
    reference = two_forms(tmp_path / "l" / "a.nii.gz", FLIPPED, 2, np.eye(4), 1)
    by_itk(tmp_path / "p" / "a.nii.gz", reference)
    done = run(tmp_path / "p", tmp_path / "l", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    row = pd.read_csv(tmp_path / "out" / "cases.csv").iloc[0]
    assert [row[f"dsc/{k}"] for k in (1, 2, 3)] == [1, 1, 1]
    told = "its qform and its sform disagree (origin (0, 0, 0) and (8, 0, 0) mm, 8 mm apart; dir"
    assert told in done.output
    checked = CliRunner().invoke(app, ["check", str(tmp_path / "p"), str(tmp_path / "l")])
    assert checked.exit_code == 0, checked.output
    assert told in checked.output
    shutil.copy(reference, tmp_path / "p" / "a.nii.gz")
    done = run(tmp_path / "p", tmp_path / "l", "-o", tmp_path / "out")
    assert done.output.count(told) == 2  # of the prediction, too


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("ending", [".npz", ".npy", ".nii.gz"])
def test_masks_given_as_probabilities_have_no_calibration(tmp_path, axes, ending):
    """Their ECE would be 1 - accuracy: overlap and surfaces are those of the label map."""
    y = np.zeros((6, 20, 20), np.uint8)
    y[2:4, 5:12, 5:12] = 1
    mask = np.roll(y, 2, 2).astype(np.float32)
    given = mask if axes == 3 else np.stack([1 - mask, mask])
    write_nifti(tmp_path / "gt" / "a.nii.gz", y, geometry(y.shape))
    write_nifti(tmp_path / "m" / "a.nii.gz", mask, geometry(y.shape))
    (tmp_path / "p").mkdir()
    path = tmp_path / "p" / f"a{ending}"
    if ending == ".npz":
        np.savez(path, probabilities=given)
    elif ending == ".npy":
        np.save(path, given)
    else:
        write_nifti(path, given, geometry(y.shape))
    cohort = evaluate_cohort(pair(tmp_path / "p", tmp_path / "gt"))
    pd.testing.assert_frame_equal(
        cohort.rows, evaluate_cohort(pair(tmp_path / "m", tmp_path / "gt")).rows
    )
    assert "ece_fg" not in cohort.rows
    if axes == 4 or ending != ".nii.gz":
        said = "; ".join(cohort.notes["a"])
        assert "holds only 0 and 1, so these are masks and not probabilities" in said
        assert "read as a label map, so its calibration is left out" in said

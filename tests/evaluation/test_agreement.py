"""Whether confidence and volumes hold: numbers by hand, against plain loops, in the report."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.evaluation.agreement import (
    MEAN,
    Predicted,
    curve,
    dsc_agreement,
    in_words,
    predicted_dsc,
    volume_agreement,
    volumes,
)
from segcal.io.files import write_json
from segcal.io.volumes import write_nifti
from segcal.metrics.dice import dice
from segcal.metrics.soft_dice_confidence import soft_dice_confidence
from segcal.metrics.table import CALIBRATION, calibration_of
from segcal.tally import Voxels
from tests.evaluation.test_cohort import geometry, soft
from tests.oracles import calibration as oracle

MM = (4.0, 1.0, 1.0)
SHAPE = (2, 16, 16)


def table(**columns):
    return pd.DataFrame(columns, index=["x", "y", "z"]).rename(
        columns=lambda c: c.replace("__", "/")
    )


def test_predicted_and_true_dsc_where_both_are_defined():
    rows = table(
        soft_dice_confidence__a=[0.9, 0.8, 0.7], dsc__a=[0.8, 0.8, math.nan],
        soft_dice_confidence__b=[0.5, math.nan, 0.6], dsc__b=[0.4, 0.9, 0.6],
    )  # fmt: skip
    found = predicted_dsc(rows)
    assert list(found) == ["a", "b", MEAN]
    assert found["a"].cases == ["x", "y"]
    assert found["b"].cases == ["x", "z"]
    np.testing.assert_allclose(found[MEAN].predicted, [0.7, 0.8, 0.6])
    np.testing.assert_allclose(found[MEAN].true, [0.6, 0.8, 0.6])
    assert list(predicted_dsc(rows[["soft_dice_confidence/a", "dsc/a"]])) == ["a"]
    assert predicted_dsc(rows[["dsc/a"]]) == {}


def test_agreement_of_dsc_by_hand():
    of = Predicted(["x", "y", "z"], np.array([0.9, 0.8, 0.6]), np.array([0.8, 0.9, 0.5]))
    found = dsc_agreement(of)
    assert "0.033 above the true DSC" in in_words(found)
    assert "error 0.100, rank correlation 0.500; over 3 cases" in in_words(found)
    assert found["n"] == 3
    assert found["spearman"] == pytest.approx(0.5)
    assert found["mae"] == pytest.approx(0.1)
    assert found["bias"] == pytest.approx(0.1 / 3)
    # losses in the order of confidence: .2, .1, .5; ideal: .1, .2, .5
    assert found["aurc"] == pytest.approx((0.2 + 0.15 + 0.8 / 3) / 3)
    assert found["aurc_ideal"] == pytest.approx((0.1 + 0.15 + 0.8 / 3) / 3)
    assert found["aurc_random"] == pytest.approx(0.8 / 3)
    assert found["aurc_excess"] == pytest.approx(0.1 / 3)


@pytest.mark.parametrize("true", [[], [0.5], [0.5, 0.5, 0.5]])
def test_too_little_for_a_rank_is_undefined(true):
    of = Predicted([], np.full(len(true), 0.7), np.array(true))
    found = dsc_agreement(of)
    assert found["spearman"] is None
    assert (found["mae"] is None) == (not true)
    assert ("undefined" in in_words(found)) == bool(true)
    json.dumps(found, allow_nan=False)


def test_the_curve_is_of_groups_of_like_prediction():
    predicted = np.linspace(0.5, 0.9, 12)[::-1]
    found = curve(Predicted([""] * 12, predicted, predicted - 0.1))
    assert [group["n"] for group in found] == [6, 6]
    assert found[0]["predicted"] < found[1]["predicted"]
    assert all(g["true"] == pytest.approx(g["predicted"] - 0.1) for g in found)
    assert sum(g["n"] for g in curve(Predicted([], np.arange(99.0), np.arange(99.0)))) == 99
    assert curve(Predicted([], np.ones(4), np.ones(4))) == []


def test_volumes_by_hand():
    rows = table(
        spacing_z_mm=[10, 10, 10], spacing_y_mm=[10, 10, 10], spacing_x_mm=[10, 10, 10],
        voxels_reference__a=[10, 20, 30], volume_ml__a=[11, 19, 33], volume_low_ml__a=[8, 19, 31],
        volume_high_ml__a=[12, 20, math.inf], soft_dice_confidence__a=[1, 1, 1],
    )  # fmt: skip
    of = volumes(rows)["a"]
    np.testing.assert_allclose(of["true"], [10, 20, 30])
    found = volume_agreement(of)
    assert found["bias_ml"] == pytest.approx(1)  # 1, -1, 3: standard deviation 2
    assert found["limits_ml"] == pytest.approx([1 - 3.92, 1 + 3.92])
    assert found["mae_ml"] == pytest.approx(5 / 3)
    assert found["coverage"] == pytest.approx(2 / 3)
    assert found["median_width_ml"] == 4
    json.dumps(volume_agreement(of[:0]), allow_nan=False)


def test_aurc_of_voxels_is_that_of_each_voxel():
    rng = np.random.default_rng(0)
    p = rng.integers(1, 9, (3, 4, 8, 8)).astype(np.float64)
    p /= p.sum(0)
    y = rng.integers(0, 3, p.shape[1:])
    tally = Voxels(p, y, [("all", None)]).tally()["all"]
    found = calibration_of(tally, [m for m in CALIBRATION if m.key.startswith("aurc")], groups=15)
    confidence, wrong = p.max(0).ravel().round(12), (p.argmax(0) != y).ravel().astype(float)
    expected, ideal = oracle.aurc(confidence, wrong), oracle.aurc(-wrong, wrong)
    assert found["aurc"] == pytest.approx(expected)
    assert found["aurc_excess"] == pytest.approx(expected - ideal)


@pytest.fixture
def data(tmp_path):
    """Seven cases with labels a and b, b being absent in the last."""
    rng = np.random.default_rng(3)
    write_json(tmp_path / "p" / "dataset.json", {"labels": {"background": 0, "a": 1, "b": 2}})
    truth = {}
    for i in range(7):
        y = np.zeros(SHAPE, np.uint8)
        y[:, 2:8, 2 : 6 + i] = 1
        if i < 6:
            y[0, 10:14, 3:12] = 2
        decided = np.where(rng.random(SHAPE) < 0.02 * i, 1, y).astype(np.uint8)
        p = soft(decided, 3, 0.95 - 0.04 * i)
        write_nifti(tmp_path / "y" / f"c{i}.nii.gz", y, geometry(SHAPE, MM))
        np.savez_compressed(tmp_path / "p" / f"c{i}.npz", probabilities=p)
        truth[f"c{i}"] = (p.astype(np.float64), decided, y)
    return tmp_path, truth


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_report_says_whether_it_holds(data):
    folder, truth = data
    done = run("evaluate", folder / "p", folder / "y", "-o", folder / "out")
    assert done.exit_code == 0, done.output
    summary = json.loads((folder / "out" / "summary.json").read_text())
    predicted, true, expected, volume = [], [], [], []
    for p, decided, y in truth.values():
        if (dsc := dice(decided, y, 2)) == dsc:  # the last has none
            predicted.append(soft_dice_confidence(p[2], decided == 2))
            true.append(dsc)
        expected.append(p[2].sum() * 0.004)
        volume.append((y == 2).sum() * 0.004)
    of = summary["predicted_dsc"]["b"]
    assert of["n"] == len(true) == 6
    assert of["mae"] == pytest.approx(np.mean(np.abs(np.subtract(predicted, true))), abs=1e-6)
    assert of["spearman"] == pytest.approx(stats.spearmanr(predicted, true).statistic)
    of = summary["volumes"]["b"]
    assert of["n"] == 7
    assert of["bias_ml"] == pytest.approx(np.mean(np.subtract(expected, volume)), abs=1e-6)
    assert {"aurc_all", "aurc_excess_fg"} <= set(summary["metrics"])
    assert "aurc_all" in summary["pooled"]
    page = (folder / "out" / "index.html").read_text()
    assert "Does the confidence hold?" in page
    assert ">Volumes<" in page
    for name in ("predicted_dsc", "risk_coverage", "volumes"):
        assert (folder / "out" / f"{name}.png").is_file()
    columns = pd.read_csv(folder / "out" / "cases.csv").columns
    assert "soft_dice_confidence/a" in columns


def test_fitted_intervals_take_the_place_of_the_widest(data):
    folder, _ = data
    fit = run("trust", "fit", folder / "p", folder / "y", "-o", folder / "iv.json")
    assert fit.exit_code == 0, fit.output
    common = ["evaluate", folder / "p", folder / "y", "--intervals", folder / "iv.json"]
    done = run(*common, "--level", 0.8, "-o", folder / "out")
    assert done.exit_code == 0, done.output
    summary = json.loads((folder / "out" / "summary.json").read_text())
    # the cases of the fit: the 7-th smallest of 7 scores at 0.8 is ceil(8 * 0.8) = 7, all of them
    assert summary["volumes"]["a"]["coverage"] == 1
    assert "80 %" in summary["conventions"]["intervals"]
    assert "conformal" in summary["conventions"]["intervals"]
    assert summary["intervals"]["cases"] == [f"c{i}" for i in range(7)]
    done = run(*common, "-o", folder / "few")
    assert "too few for conformal" in (folder / "few" / "index.html").read_text()
    assert (
        json.loads((folder / "few" / "summary.json").read_text())["volumes"]["a"]["median_width_ml"]
        is None
    )
    assert run(*common, "--level", 2, "-o", folder / "no").exit_code == 2


def test_label_maps_alone_have_no_confidence(data):
    folder, truth = data
    for name, (_, decided, _) in truth.items():
        write_nifti(folder / "maps" / f"{name}.nii.gz", decided, geometry(SHAPE, MM))
    assert run("evaluate", folder / "maps", folder / "y", "-o", folder / "out").exit_code == 0
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert "predicted_dsc" not in summary
    assert "Does the confidence hold?" not in (folder / "out" / "index.html").read_text()


def test_ignored_voxels_are_in_no_confidence(data):
    folder, truth = data
    labels = {"background": 0, "a": 1, "b": 2, "ignore": 3}
    write_json(folder / "p" / "dataset.json", {"labels": labels})
    p, decided, y = truth["c2"]
    y = y.copy()
    y[1] = 3
    write_nifti(folder / "y" / "c2.nii.gz", y, geometry(SHAPE, MM))
    assert run("evaluate", folder / "p", folder / "y", "-o", folder / "out").exit_code == 0
    rows = pd.read_csv(folder / "out" / "cases.csv", index_col="case")
    expected = soft_dice_confidence(p[1][:1], decided[:1] == 1)
    assert rows.loc["c2", "soft_dice_confidence/a"] == pytest.approx(expected, abs=1e-6)
    assert rows.loc["c2", "volume_ml/a"] == pytest.approx(p[1][0].sum() * 0.004, abs=1e-6)

"""Intervals of volumes: known correlation, coverage on phantoms, files, other models, too few."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.datasets.phantom import LABELS, PhantomSettings, make_phantom, write_phantom_dataset
from segcal.evaluation.case import Structure
from segcal.evaluation.confidence import confidence_row
from segcal.evaluation.intervals import VolumeIntervals, read_intervals, with_intervals
from segcal.io.files import write_json
from segcal.trust.fitting import fit_rows

HEART = [Structure(name, (k,), k) for name, k in LABELS.items() if k]


def row_of(probabilities, labels, structures, mm):
    ml = math.prod(mm) / 1000
    return {
        "voxel_ml": ml,
        **confidence_row(
            probabilities, probabilities.argmax(0), structures=structures, spacing_mm=mm
        ),
        **{f"true_volume_ml/{s.name}": ml * (labels == s.labels[0]).sum() for s in structures},
    }


def test_voxels_that_err_in_groups_inflate_the_variance_by_their_number():
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(400):
        p = np.repeat(rng.uniform(0.2, 0.8, (1, 30, 10)), 4, axis=2)
        y = np.repeat(rng.random((1, 30, 10)), 4, axis=2) < p  # four voxels, one draw
        rows.append(row_of(np.stack([1 - p, p]), y, [Structure("a", (1,), 1)], (1, 1, 1)))
    (found,) = fit_rows(pd.DataFrame(rows)).values()
    assert found.inflation == pytest.approx(4, rel=0.2)  # standard error of kappa: sqrt(2 / 400)
    coins = np.mean([4 * (row["volume_sd_ml/a"] * 1000) ** 2 for row in rows])
    assert found.effective_voxels == pytest.approx(coins / found.inflation)


@pytest.fixture(scope="module")
def phantoms():
    """200 hearts whose probabilities are the true posterior, 40 of them for the fit."""
    settings = PhantomSettings(shape=(4, 40, 40))
    found = [make_phantom(np.random.default_rng([7, i]), settings) for i in range(240)]
    return pd.DataFrame(
        [row_of(one.posterior, one.labels, HEART, settings.spacing_mm) for one in found]
    )


def coverage(rows, structure):
    true = rows[f"true_volume_ml/{structure}"]
    low, high = rows[f"volume_low_ml/{structure}"], rows[f"volume_high_ml/{structure}"]
    return ((low <= true) & (true <= high)).mean()


@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_coverage_on_phantoms_whose_posterior_is_known(phantoms, level):
    fit, test = phantoms[:40], phantoms[40:]
    fitted = VolumeIntervals(fit_rows(fit))
    normal = stats.norm.ppf((1 + level) / 2)
    naive = test.copy()
    chance = 3 * math.sqrt(level * (1 - level) * (1 / 200 + 1 / 40))  # of the test and of the fit
    for one in HEART:
        assert coverage(test, one.name) == 1  # as if all voxels erred together
        reach = normal * test[f"volume_sd_ml/{one.name}"]
        naive[f"volume_low_ml/{one.name}"] = test[f"volume_ml/{one.name}"] - reach
        naive[f"volume_high_ml/{one.name}"] = test[f"volume_ml/{one.name}"] + reach
        assert coverage(naive, one.name) < level - 0.2  # far too narrow
        for kind in ("inflated", "conformal"):
            found = coverage(with_intervals(test, fitted, kind, level), one.name)
            assert abs(found - level) < chance, (kind, one.name, found)


def run(*arguments):
    return CliRunner().invoke(app, ["trust", *map(str, arguments)])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phantom") / "data"
    write_phantom_dataset(folder, train=9, test=2, settings=PhantomSettings(shape=(4, 40, 40)))
    return folder


def test_from_files_to_intervals(data, tmp_path):
    file = tmp_path / "intervals.json"
    done = run("fit", data / "posteriorTr", data / "labelsTr", "-o", file)
    assert done.exit_code == 0, done.output
    assert "9 validation cases" in done.output
    assert "which need 19" in done.output
    fitted = read_intervals(file)
    assert list(fitted.structures) == [s.name for s in HEART]
    assert len(fitted.fitted_on["cases"]) == 9

    images = data / "imagesTs"
    common = [data / "posteriorTs", "--images", images, "--intervals", file]
    done = run(*common, "-o", tmp_path / "few")
    assert done.exit_code == 0, done.output
    assert "too few for conformal intervals of 95 %" in done.output
    assert "allow a level of 0.90" in done.output
    assert "too few" in (tmp_path / "few" / "index.html").read_text()
    assert np.isinf(pd.read_csv(tmp_path / "few" / "trust.csv")["volume_high_ml"]).all()

    assert run(*common, "--level", 0.9, "-o", tmp_path / "out").exit_code == 0
    for row in pd.read_csv(tmp_path / "out" / "trust.csv").itertuples():
        reach = max(fitted.structures[row.label].scores) * row.volume_sd_ml
        assert row.volume_high_ml == pytest.approx(row.volume_ml + reach)
        assert row.volume_low_ml == pytest.approx(max(0, row.volume_ml - reach))
    summary = json.loads((tmp_path / "out" / "trust.json").read_text())
    assert summary["intervals"]["predictions"] == str((data / "posteriorTr").resolve())


def test_intervals_of_another_model_are_refused(data, tmp_path):
    fitted_to = {"dataset": "Dataset900", "trainer": "A", "plans": "p", "configuration": "2d"}
    file = tmp_path / "intervals.json"
    assert run("fit", data / "posteriorTr", data / "labelsTr", "-o", file).exit_code == 0
    content = json.loads(file.read_text())
    record = data / "posteriorTs" / "segcal_predict.json"
    common = [data / "posteriorTs", "--images", data / "imagesTs", "--intervals", file]
    common += ["--interval", "inflated", "-o", tmp_path / "out"]
    try:
        for theirs, said in (
            (
                {**fitted_to, "trainer": "B"},
                "trainer B, but the intervals were fitted to trainer A",
            ),
            (
                {**fitted_to, "calibrator": {"method": "temperature", "fitted_on": "v"}},
                "calibrated by temperature fitted on v, but the intervals were fitted to uncalib",
            ),
        ):
            write_json(file, {**content, "model": fitted_to})
            write_json(record, theirs)
            done = run(*common)
            assert done.exit_code == 2
            assert said in done.output
            assert run(*common, "--any-model").exit_code == 0
    finally:
        record.unlink()


def test_structures_that_were_not_fitted_are_refused(data, tmp_path):
    file = tmp_path / "intervals.json"
    assert run("fit", data / "posteriorTr", data / "labelsTr", "-o", file).exit_code == 0
    content = json.loads(file.read_text())
    del content["structures"]["myocardium"]
    write_json(file, content)
    done = run(
        data / "posteriorTs",
        "--images",
        data / "imagesTs",
        "--intervals",
        file,
        "-o",
        tmp_path / "o",
    )
    assert done.exit_code == 2
    assert "not for myocardium" in done.output


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "expected intervals of volumes"),
        ({"structures": {}, "format": 0}, "got 0"),
        ({"structures": {"a": {}}, "format": 1}, "damaged"),
        (
            {"structures": {"a": {"inflation": 1, "effective_voxels": 1, "scores": []}},
             "format": 1, "model": {}, "fitted_on": {}},
            "damaged",
        ),
    ],
)  # fmt: skip
def test_files_that_are_no_intervals(tmp_path, content, said):
    write_json(tmp_path / "x.json", content)
    with pytest.raises(ValueError, match=f"x.json.*{said}"):
        read_intervals(tmp_path / "x.json")


def test_masks_of_0_and_1_are_refused(phantoms):
    rows = phantoms[:3].copy()
    rows["volume_sd_ml/myocardium"] = 0.0
    with pytest.raises(ValueError, match="0: myocardium: the probabilities are only 0 and 1"):
        fit_rows(rows)
    intervals = VolumeIntervals(fit_rows(phantoms[:19]))
    assert not intervals.too_few("conformal", 0.95)
    assert replace(intervals, structures={}).factors("inflated", 0.9) == {}

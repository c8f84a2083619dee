"""Calibrators fitted to files equal those fitted to the arrays in them."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from segcal.io.volumes import write_nifti
from segcal.posthoc.class_region import ClassRegionTemperature
from segcal.posthoc.temperature import Temperature
from segcal.repair.fitting import build_calibrator, collect, fit_calibrator, plan_fit
from segcal.repair.saved import read_calibrator, write_calibrator
from tests.conftest import close
from tests.repair.conftest import SHAPE, SHARPENED, cohort, geometry, softmax


def arrays(folders):
    return [
        (torch.from_numpy(folders.stored(name)).log()[None], torch.from_numpy(y)[None].long())
        for name, y in folders.reference.items()
    ]


def test_files_and_arrays_give_the_same_calibrator(shared):
    for method, kind in (("temperature", Temperature), ("class_region", ClassRegionTemperature)):
        saved = fit_calibrator(shared.predictions, shared.labels, method=method)
        expected = kind().fit(arrays(shared))
        assert saved.calibrator.state()["learned"] == expected.state()["learned"]
        assert saved.calibrator.facts == expected.facts
        assert saved.channels == ("background", "organ", "tumour")
        assert saved.fitted_on["cases"] == list(shared.reference)
    assert saved.calibrator.global_temperature == pytest.approx(SHARPENED, rel=0.05)


def test_two_processes_give_what_one_gives(shared):
    one, two = (
        fit_calibrator(shared.predictions, shared.labels, processes=n).calibrator.state()
        for n in (1, 2)
    )
    assert one == two


def test_saved_logits_are_used_where_they_are(folders):
    rounded = cohort(folders.root / "half", dtype=np.float16)
    probabilities = fit_calibrator(rounded.predictions, rounded.labels, method="temperature")
    assert probabilities.fitted_on["saved_logits"] == 0
    assert probabilities.fitted_on["floor"] == 2.0**-24
    assert 0 < probabilities.fitted_on["floored_share"] < 1
    (rounded.predictions / "logits").mkdir()
    for name, x in rounded.logits.items():
        np.savez(rounded.predictions / "logits" / f"{name}.npz", logits=x.astype(np.float32))
    saved = fit_calibrator(rounded.predictions, rounded.labels, method="temperature")
    assert saved.fitted_on["saved_logits"] == 6
    assert saved.fitted_on["floored_share"] == 0
    exact = fit_calibrator(folders.predictions, folders.labels, method="temperature")
    close(saved.calibrator.value, exact.calibrator.value, rtol=1e-4)
    assert probabilities.calibrator.value == pytest.approx(exact.calibrator.value, rel=0.02)


def test_logits_of_another_run_are_refused(folders):
    (folders.predictions / "logits").mkdir()
    np.savez(folders.predictions / "logits" / "case_00.npz", logits=folders.logits["case_01"])
    with pytest.raises(ValueError, match=r"logits/case_00\.npz: predicts another class"):
        fit_calibrator(folders.predictions, folders.labels)
    np.savez(
        folders.predictions / "logits" / "case_00.npz", probabilities=folders.stored("case_00")
    )
    with pytest.raises(ValueError, match="expected the array 'logits'"):
        fit_calibrator(folders.predictions, folders.labels)
    bad = folders.logits["case_00"].copy()
    bad[0, 0, 0, 0] = np.inf
    np.savez(folders.predictions / "logits" / "case_00.npz", logits=bad)
    with pytest.raises(ValueError, match=r"case_00\.npz: 1 logits are NaN or infinite"):
        fit_calibrator(folders.predictions, folders.labels)


def test_ignored_voxels_are_left_out(folders):
    labels = {"background": 0, "organ": 1, "tumour": 2, "ignore": 3}
    (folders.predictions / "dataset.json").write_text(json.dumps({"labels": labels}))
    expected = []
    for name, y in folders.reference.items():
        y[:, :4] = 3
        write_nifti(folders.labels / f"{name}.nii.gz", y.astype(np.uint8), geometry())
        expected.append(
            (torch.from_numpy(folders.stored(name)).log()[None], torch.from_numpy(y)[None].long())
        )
    saved = fit_calibrator(folders.predictions, folders.labels)
    other = ClassRegionTemperature(per_case=True).fit(expected, ignore_index=3)
    assert saved.calibrator.state()["learned"] == other.state()["learned"]


def test_a_case_without_a_labelled_voxel_is_no_loss(folders):
    labels = {"background": 0, "organ": 1, "tumour": 2, "ignore": 3}
    (folders.predictions / "dataset.json").write_text(json.dumps({"labels": labels}))
    write_nifti(folders.labels / "case_00.nii.gz", np.full(SHAPE, 3, np.uint8), geometry())
    saved = fit_calibrator(folders.predictions, folders.labels, method="temperature")
    assert saved.calibrator.facts["cases"] == 5


@pytest.mark.parametrize("ignored", [False, True])
def test_regions_have_a_calibrator_each(tmp_path, ignored):
    labels = {"background": 0, "whole": [1, 2], "core": [2]}
    if ignored:
        labels["ignore"] = 3
    rng = np.random.default_rng(0)
    predictions, pairs = tmp_path / "p", []
    predictions.mkdir()
    (predictions / "dataset.json").write_text(
        json.dumps({"labels": labels, "regions_class_order": [1, 2]})
    )
    for i in range(4):
        x = rng.normal(size=(2, *SHAPE)) * 2
        inside = rng.random(x.shape) < 1 / (1 + np.exp(-x))
        inside[1] &= inside[0]
        y = inside.sum(0)
        if ignored:
            y[0] = 3
        p = (1 / (1 + np.exp(-2 * x))).astype(np.float32)
        np.savez(predictions / f"c{i}.npz", probabilities=p)
        write_nifti(tmp_path / "gt" / f"c{i}.nii.gz", y.astype(np.uint8), geometry())
        per_channel = np.where(y == 3, 255, np.stack([(y == 1) | (y == 2), y == 2]))
        p = torch.from_numpy(p)
        pairs.append(((p.log() - torch.log1p(-p))[None], torch.from_numpy(per_channel)[None]))
    saved = fit_calibrator(predictions, tmp_path / "gt", method="temperature")
    assert (saved.regions, saved.channels) == (True, ("whole", "core"))
    expected = Temperature(per_channel=True).fit(pairs, ignore_index=255)
    for ours, other in zip(saved.calibrator.channels, expected.channels, strict=True):
        close(ours.value, other.value, rtol=1e-4)
    assert saved.calibrator.channels[0].value == pytest.approx(2, rel=0.1)


def test_memory_is_bounded_by_a_sample(shared, monkeypatch):
    job = plan_fit(shared.predictions, shared.labels)
    whole = collect(job, Temperature())
    monkeypatch.setattr("segcal.posthoc.calibrator.MOST_VOXELS", 6 * 1000)
    some = collect(job, Temperature())
    (rows,), (every,) = some.rows, whole.rows
    assert len(rows) < 6 * 1100 < len(every)
    assert rows.voxels == every.voxels
    few, all_of_them = (Temperature().fit_rows([r]) for r in (rows, every))
    assert 0 < few.facts["nll_error"] < 0.05
    assert all_of_them.facts["nll_error"] == 0
    error = abs(few.facts["nll_before"] - all_of_them.facts["nll_before"])
    assert error < 4 * few.facts["nll_error"]


def test_a_method_cross_validates_over_patients(shared, monkeypatch):
    seen = []
    fit_rows = ClassRegionTemperature.fit_rows
    monkeypatch.setattr(
        ClassRegionTemperature,
        "fit_rows",
        lambda self, rows: seen.append(set(rows[0].patients.tolist())) or fit_rows(self, rows),
    )
    fit_calibrator(shared.predictions, shared.labels, patients="_0([0-9])", processes=1)
    fit_calibrator(shared.predictions, shared.labels, patients="case_0", processes=1)
    assert seen == [set(range(6)), {0}]


def test_offsets_are_chosen_on_the_cases(shared):
    saved = fit_calibrator(shared.predictions, shared.labels, offsets=True)
    assert saved.offsets is not None
    assert json.loads(json.dumps(saved.offsets)) == saved.offsets


def test_what_cannot_be_fitted_is_refused(folders, tmp_path):
    with pytest.raises(ValueError, match="no config named 'platt'"):
        fit_calibrator(folders.predictions, folders.labels, method="platt")
    with pytest.raises(ValueError, match="takes no bins"):
        build_calibrator("temperature", arguments={"bins": 3})
    with pytest.raises(ValueError, match="ascending"):
        build_calibrator("class_region", arguments={"bands": [2, 1]})
    maps = tmp_path / "maps"
    maps.mkdir()
    for path in folders.predictions.glob("*.nii.gz"):
        shutil.copy(path, maps)
    with pytest.raises(ValueError, match=r"case_00\.nii\.gz: holds no probabilities"):
        fit_calibrator(maps, folders.labels)
    p = folders.stored("case_03")
    p[:, 0, 0, 0] = np.nan
    np.savez(folders.predictions / "case_03.npz", probabilities=p)
    with pytest.raises(ValueError, match=r"case_03\.npz.*NaN"):
        fit_calibrator(folders.predictions, folders.labels)
    four = softmax(np.zeros((4, *SHAPE))).astype(np.float32)
    np.savez(folders.predictions / "case_03.npz", probabilities=four)
    (folders.predictions / "dataset.json").unlink()
    (folders.predictions / "case_03.nii.gz").unlink()
    with pytest.raises(ValueError, match=r"case_03\.npz: 4 channels, unlike"):
        fit_calibrator(folders.predictions, folders.labels)


def test_one_case_is_enough_to_fit(tmp_path):
    folders = cohort(tmp_path, cases=1)
    saved = fit_calibrator(folders.predictions, folders.labels)
    path = tmp_path / "calibrator.json"
    write_calibrator(path, saved)
    again = read_calibrator(path)
    x = torch.from_numpy(folders.stored("case_00")).log()[None]
    assert torch.equal(again.calibrator.apply(x), saved.calibrator.apply(x))

"""Calibrated folders: the same files, which an evaluation reads, and nothing half written."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
import torch

from segcal.evaluation.api import evaluate, runner_of
from segcal.evaluation.engine import run
from segcal.io.volumes import (
    from_canonical,
    read_labels,
    read_volume,
    to_canonical,
    write_nifti,
    write_volume,
)
from segcal.posthoc.decision import decide_dice
from segcal.repair import applying
from segcal.repair.applying import apply_job, plan_apply
from segcal.repair.fitting import fit_calibrator
from segcal.repair.saved import write_calibrator
from tests.conftest import close
from tests.repair.conftest import CLASSES, SHAPE, cohort, geometry, record, smooth_logits, softmax


@pytest.fixture(scope="module")
def saved(shared):
    return fit_calibrator(shared.predictions, shared.labels, processes=1)


@pytest.fixture
def test_set(tmp_path):
    return cohort(tmp_path / "test", cases=3, seed=5, first=50)


def applied(folder, saved, out, **options):
    job = plan_apply(folder, saved, out, **options)
    return apply_job(job, processes=1)


def stored(path):
    with np.load(path) as file:
        return {key: file[key] for key in file.files}


def expected(saved, probabilities, spacing=(3.0, 1.0, 1.0)):
    x = torch.from_numpy(probabilities).log()[None]
    return saved.calibrator.apply(x, spacing_mm=spacing)[0].numpy()


def test_nnunets_files(test_set, saved, tmp_path):
    out = tmp_path / "out"
    done = applied(test_set.predictions, saved, out)
    assert [one.changed for one in done.values()] == [0, 0, 0]
    for name in test_set.reference:
        before, after = test_set.stored(name), stored(out / f"{name}.npz")
        assert list(after) == ["probabilities"]
        assert after["probabilities"].dtype == np.float32
        close(after["probabilities"], expected(saved, before), rtol=1e-6)
        ours, theirs = (f / f"{name}.nii.gz" for f in (out, test_set.predictions))
        assert ours.read_bytes() == theirs.read_bytes()
    assert (out / "dataset.json").read_text() == (test_set.predictions / "dataset.json").read_text()
    made = json.loads((out / "segcal_predict.json").read_text())
    assert made["calibrator"]["method"] == "class_region_case"
    assert made["decision"] == "argmax"
    before, after = (evaluate(f, test_set.labels) for f in (test_set.predictions, out))
    assert not after.failed
    assert (
        after.summary["metrics"]["nll_all"]["mean"] < before.summary["metrics"]["nll_all"]["mean"]
    )
    assert after.summary["metrics"]["dsc"]["mean"] == before.summary["metrics"]["dsc"]["mean"]


@pytest.mark.parametrize("precision", ["same", "float16", "float32"])
def test_types(tmp_path, saved, precision):
    half = cohort(tmp_path / "half", cases=1, dtype=np.float16)
    applied(half.predictions, saved, tmp_path / "out", precision=precision)
    array = stored(tmp_path / "out" / "case_00.npz")["probabilities"]
    assert array.dtype == (np.float32 if precision == "float32" else np.float16)


def test_a_post_processed_label_map_stays_where_the_decision_does(test_set, saved, tmp_path):
    path = test_set.predictions / "case_50.nii.gz"
    label_map = read_labels(path).array.copy()
    label_map[0] = 0
    write_nifti(path, label_map, geometry())
    applied(test_set.predictions, saved, tmp_path / "argmax")
    assert (tmp_path / "argmax" / path.name).read_bytes() == path.read_bytes()
    done = applied(test_set.predictions, saved, tmp_path / "dice", decide="dice")
    p = expected(saved, test_set.stored("case_50"))
    was, now = test_set.stored("case_50").argmax(0), decide_dice(p).labels
    after = read_labels(tmp_path / "dice" / path.name).array
    assert np.array_equal(after, np.where(was == now, label_map, now))
    assert done["case_50"].changed == np.count_nonzero(after != label_map) > 0
    report = evaluate(tmp_path / "dice", test_set.labels)
    assert not report.failed
    assert "decided by dice" in report.notes["case_50"][0]


def test_a_label_map_of_another_frame_fails(test_set, saved, tmp_path):
    path = test_set.predictions / "case_50.nii.gz"
    flipped = read_labels(path)
    write_nifti(path, np.ascontiguousarray(flipped.array[:, ::-1, ::-1]), flipped.geometry)
    done = applied(test_set.predictions, saved, tmp_path / "out", decide="dice")
    assert "have another label here" in done["case_50"].failed
    assert not done["case_51"].failed


def test_a_decision_far_from_argmax_is_evaluated(tmp_path, saved):
    """A structure that argmax never gives, which the evaluation took for another frame."""
    p = np.full((3, *SHAPE), 0.001, np.float32)
    p[1, :, 5:9] = 0.45
    p[0] = 1 - p[1] - p[2]
    y = np.zeros(SHAPE, np.uint8)
    y[:, 5:9] = 1
    folder = tmp_path / "p"
    folder.mkdir()
    np.savez(folder / "a.npz", probabilities=p)
    write_nifti(folder / "a.nii.gz", np.zeros(SHAPE, np.uint8), geometry())
    write_nifti(tmp_path / "gt" / "a.nii.gz", y, geometry())
    identity = replace(saved, calibrator=type(saved.calibrator)(strength=0.0))
    identity.calibrator.facts = {**saved.calibrator.facts}
    identity.calibrator.improved = False
    applied(folder, identity, tmp_path / "out", decide="dice")
    report = evaluate(tmp_path / "out", tmp_path / "gt")
    assert not report.failed
    assert report.cases["dsc/1"]["a"] == 1


def test_four_axes_and_files_a_class(test_set, saved, tmp_path):
    volumes, classes = tmp_path / "volumes", tmp_path / "classes"
    for name in test_set.reference:
        p = test_set.stored(name)
        write_nifti(volumes / f"{name}.nii.gz", p, geometry())
        for k, label in enumerate(CLASSES[1:], start=1):  # background is what they leave
            write_nifti(classes / name / f"{label}.nii.gz", p[k], geometry())
    for folder in (volumes, classes):
        shutil.copy(test_set.predictions / "dataset.json", folder)
    applied(volumes, saved, tmp_path / "v")
    applied(classes, saved, tmp_path / "c")
    for name in test_set.reference:
        wanted = expected(saved, test_set.stored(name))
        close(read_volume(tmp_path / "v" / f"{name}.nii.gz").array, wanted, atol=1e-6)
        assert sorted(f.name for f in (tmp_path / "c" / name).iterdir()) == [
            "organ.nii.gz", "tumour.nii.gz",
        ]  # fmt: skip
        organ = read_volume(tmp_path / "c" / name / "organ.nii.gz").array
        close(organ, wanted[1], atol=5e-3)  # a background of 1e-6 is lost in 1 - the others
    for out in ("v", "c"):
        assert not evaluate(tmp_path / out, test_set.labels).failed
    applied(volumes, saved, tmp_path / "dice", decide="dice")
    assert (tmp_path / "dice" / "case_50.npz").is_file()
    assert read_labels(tmp_path / "dice" / "case_50.nii.gz").array.shape == SHAPE
    assert not evaluate(tmp_path / "dice", test_set.labels).failed


@pytest.mark.parametrize("decide", ["argmax", "dice"])
def test_frames_of_readers_that_reorient(tmp_path, saved, decide):
    """The array lies in RAS, the label map as the image does; bands see the array's own axes."""
    full = cohort(tmp_path / "all", cases=1)
    at = replace(geometry(), direction=np.diag([-1.0, 1.0, 1.0])[:, [1, 0, 2]])
    reader = "NibabelIOWithReorient"
    folder = tmp_path / "p"
    folder.mkdir()
    p = full.stored("case_00")
    ras = to_canonical(at, reader=reader)
    (folder / "plans.json").write_text(json.dumps({"image_reader_writer": reader}))
    shutil.copy(full.predictions / "dataset.json", folder)
    rng = np.random.default_rng(0)
    stored_p = softmax(rng.normal(size=(3, *ras.shape)) * 3).astype(np.float32)
    p = from_canonical(stored_p, at, reader=reader)
    np.savez(folder / "a.npz", probabilities=stored_p)
    write_nifti(folder / "a.nii.gz", p.argmax(0).astype(np.uint8), at)
    write_nifti(tmp_path / "gt" / "a.nii.gz", p.argmax(0).astype(np.uint8), at)
    bands = fit_calibrator(
        full.predictions, full.labels, arguments={"bands": [1.5, 2.5]}, processes=1
    )
    applied(folder, bands, tmp_path / "out", decide=decide)
    after = stored(tmp_path / "out" / "a.npz")["probabilities"]
    after = from_canonical(after, at, reader=reader).copy()
    close(after, expected(bands, np.ascontiguousarray(p)), rtol=1e-5)
    assert not evaluate(tmp_path / "out", tmp_path / "gt").failed
    labels = read_labels(tmp_path / "out" / "a.nii.gz").array
    wanted = p.argmax(0) if decide == "argmax" else decide_dice(after).labels
    assert np.array_equal(labels, wanted)


def test_saved_logits_are_taken_and_logits_alone_will_do(test_set, saved, tmp_path):
    logits = test_set.predictions / "logits"
    logits.mkdir()
    for name, x in test_set.logits.items():
        np.savez(logits / f"{name}.npz", logits=x)
    applied(test_set.predictions, saved, tmp_path / "out")
    x = torch.from_numpy(test_set.logits["case_50"])[None]
    wanted = saved.calibrator.apply(x)[0].numpy()
    close(stored(tmp_path / "out" / "case_50.npz")["probabilities"], wanted, rtol=1e-5)
    applied(logits, saved, tmp_path / "alone")
    close(stored(tmp_path / "alone" / "case_50.npz")["probabilities"], wanted, rtol=1e-5)


def test_what_was_calibrated_is_calibrated_on_top(test_set, saved, tmp_path):
    """A last temperature of calibrated probabilities; the logits beside are those before."""
    out = tmp_path / "out"
    applied(test_set.predictions, saved, out)
    (out / "logits").mkdir()
    for name, x in test_set.logits.items():
        np.savez(out / "logits" / f"{name}.npz", logits=x)
    last = fit_calibrator(out, test_set.labels, method="temperature", processes=1)
    assert last.fitted_on["saved_logits"] == 0
    assert last.calibrator.value == pytest.approx(1, abs=0.1)
    assert last.model["calibrator"]["method"] == "class_region_case"
    job = plan_apply(out, last, tmp_path / "twice")
    assert any("was calibrated before (class_region_case)" in note for note in job.notes)
    apply_job(job, processes=1)
    before = stored(out / "case_50.npz")["probabilities"]
    close(
        stored(tmp_path / "twice" / "case_50.npz")["probabilities"],
        expected(last, before),
        rtol=1e-5,
    )


def test_members_are_calibrated_before_they_are_averaged(test_set, saved, tmp_path):
    members = {}
    for fold in (0, 1):
        other = cohort(tmp_path / f"f{fold}", cases=3, seed=10 + fold, first=50)
        members[fold] = other
        shutil.copytree(other.predictions, test_set.predictions / f"fold_{fold}")
    record(test_set.predictions, trainer="T", folds=["fold_0", "fold_1"])
    single = replace(saved, model={"trainer": "T", "folds": ["fold_0"]})
    applied(test_set.predictions, single, tmp_path / "out")
    wanted = sum(expected(saved, members[f].stored("case_51")) for f in (0, 1)) / 2
    close(stored(tmp_path / "out" / "case_51.npz")["probabilities"], wanted, rtol=1e-5)
    for fold in (0, 1):
        shutil.rmtree(test_set.predictions / f"fold_{fold}")
    with pytest.raises(ValueError, match="mean of 2 networks"):
        plan_apply(test_set.predictions, single, tmp_path / "again")
    assert plan_apply(test_set.predictions, single, tmp_path / "again", any_model=True).notes


def test_what_does_not_fit_is_refused_before_anything_is_written(test_set, saved, tmp_path):
    predictions, out = test_set.predictions, tmp_path / "out"
    with pytest.raises(ValueError, match="holds the predictions"):
        plan_apply(predictions, saved, predictions)
    with pytest.raises(ValueError, match="no such folder"):
        plan_apply(tmp_path / "none", saved, out)
    with pytest.raises(ValueError, match="fitted without offsets"):
        plan_apply(predictions, saved, out, decide="offsets")
    with pytest.raises(ValueError, match="holds no probabilities"):
        plan_apply(test_set.labels, saved, out)
    record(predictions, trainer="B")
    with pytest.raises(ValueError, match="trainer B, but the calibrator was fitted to trainer A"):
        plan_apply(predictions, replace(saved, model={"trainer": "A"}), out)
    for labels in (
        {"background": 0, "tumour": 1, "organ": 2},
        {"background": 0, "organ": 1},
        {"background": 0, "organ": [1, 2], "tumour": [2]},
    ):
        content = {"labels": labels, "regions_class_order": [1, 2]}
        (predictions / "dataset.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match="the calibrator was fitted to"):
            plan_apply(predictions, saved, out)
    assert not out.exists()


def test_a_folder_of_others_files_is_refused(test_set, saved, tmp_path):
    labels = {path.name: path.read_bytes() for path in test_set.labels.iterdir()}
    with pytest.raises(ValueError, match=r"holds case_50\.nii\.gz, which calibrate apply did not"):
        plan_apply(test_set.predictions, saved, test_set.labels)
    assert {path.name: path.read_bytes() for path in test_set.labels.iterdir()} == labels
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "dataset.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds dataset\.json"):
        plan_apply(test_set.predictions, saved, tmp_path / "set")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        plan_apply(test_set.predictions, saved, tmp_path / "file")
    applied(test_set.predictions, saved, tmp_path / "out")
    applied(test_set.predictions, saved, tmp_path / "out", decide="dice")  # its own are replaced


def test_offsets_that_are_none_are_refused_at_once(test_set, saved, tmp_path):
    with pytest.raises(ValueError, match="state: expected that of Offsets"):
        plan_apply(
            test_set.predictions,
            replace(saved, offsets={"a": 1}),
            tmp_path / "out",
            decide="offsets",
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: -x, "predicts another class than"),
        (lambda x: x[:, :-1], "logits .* beside probabilities"),
        (lambda x: np.where(x == x.max(), np.inf, x), "NaN or infinite"),
    ],
)
def test_logits_of_another_run_fail(test_set, saved, tmp_path, change, message):
    (test_set.predictions / "logits").mkdir()
    path = test_set.predictions / "logits" / "case_50.npz"
    np.savez(path, logits=change(test_set.logits["case_50"]))
    failed = applied(test_set.predictions, saved, tmp_path / "out")["case_50"].failed
    assert re.search(rf"case_50\.npz: .*{message}", failed)


@pytest.mark.parametrize("method", ["vector", "matrix"])
def test_a_constant_of_the_logits_does_not_matter(shared, test_set, tmp_path, method):
    """Fitted to probabilities, applied where logits were saved."""
    saved = fit_calibrator(shared.predictions, shared.labels, method=method, processes=1)
    applied(test_set.predictions, saved, tmp_path / "without")
    rng = np.random.default_rng(0)
    (test_set.predictions / "logits").mkdir()
    for name, x in test_set.logits.items():
        shifted = x + 5 * rng.normal(size=SHAPE)
        np.savez(test_set.predictions / "logits" / f"{name}.npz", logits=shifted)
    applied(test_set.predictions, saved, tmp_path / "out")
    found, wanted = (
        stored(tmp_path / folder / "case_50.npz")["probabilities"] for folder in ("out", "without")
    )
    close(found, wanted, atol=1e-5)


def test_a_case_that_fails_does_not_stop_the_others(test_set, saved, tmp_path):
    (test_set.predictions / "dataset.json").unlink()
    two = softmax(np.zeros((2, *SHAPE))).astype(np.float32)
    np.savez(test_set.predictions / "case_51.npz", probabilities=two)
    bad = test_set.stored("case_52")
    bad[0, 0, 0, 0] = np.nan
    np.savez(test_set.predictions / "case_52.npz", probabilities=bad)
    done = applied(test_set.predictions, saved, tmp_path / "out")
    assert "has 2 channels, but the calibrator was fitted to 3" in done["case_51"].failed
    assert "NaN" in done["case_52"].failed
    assert not done["case_50"].failed
    written = {f.name for f in (tmp_path / "out").iterdir()}
    assert "case_50.npz" in written
    assert not written & {"case_51.npz", "case_52.npz", "case_51.nii.gz", "case_52.nii.gz"}


def test_the_cases_of_the_fit_are_pointed_out(shared, saved, tmp_path):
    notes = plan_apply(shared.predictions, saved, tmp_path / "out").notes
    assert any("the calibrator was fitted on these predictions" in note for note in notes)


def test_resume_takes_what_the_same_calibrator_wrote(test_set, saved, tmp_path, monkeypatch):
    out = tmp_path / "out"
    applied(test_set.predictions, saved, out)
    times = {f.name: f.stat().st_mtime_ns for f in out.glob("*.npz")}
    job = plan_apply(test_set.predictions, saved, out)
    worked = []
    monkeypatch.setattr(
        applying, "_apply", lambda source, job: worked.append(source.name) or applying.Applied(0)
    )
    done = apply_job(job, resume=True, processes=1)
    assert worked == []
    assert list(done) == list(test_set.reference)
    assert {f.name: f.stat().st_mtime_ns for f in out.glob("*.npz")} == times
    (out / "case_50.npz").unlink()
    (out / "case_50.nii.gz").unlink()
    os.utime(test_set.predictions / "case_51.npz")
    apply_job(job, resume=True, processes=1)
    assert worked == ["case_50", "case_51"]  # lost, and of another file
    other = plan_apply(test_set.predictions, saved, out, precision="float16")
    with pytest.raises(ValueError, match="leave --resume out to start again"):
        apply_job(other, resume=True, processes=1)
    apply_job(other, processes=1)
    assert worked[2:] == list(test_set.reference)
    assert not list(out.glob("*.npz"))  # what was there is not of this run


def test_a_cluster_writes_what_processes_write(test_set, saved, tmp_path):
    for name, runner in (("one", run), ("two", run), ("dask", runner_of("dask"))):
        job = plan_apply(test_set.predictions, saved, tmp_path / name)
        done = apply_job(job, processes=1 if name == "one" else 2, runner=runner)
        assert [one.failed for one in done.values()] == [""] * 3
    for name in test_set.reference:
        one, *others = (
            stored(tmp_path / f / f"{name}.npz")["probabilities"] for f in ("one", "two", "dask")
        )
        assert all(np.array_equal(one, other) for other in others)


def test_a_killed_run_leaves_whole_files_and_goes_on(test_set, saved, tmp_path):
    out, path = tmp_path / "out", tmp_path / "c.json"
    write_calibrator(path, saved)
    command = [
        sys.executable, "-m", "segcal", "calibrate", "apply", str(test_set.predictions), str(path),
        "-o", str(out), "-p", "1",
    ]  # fmt: skip
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (out / "case_50.npz").exists() and running.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    for file in out.glob("case_*.npz"):
        assert np.isfinite(stored(file)["probabilities"]).all()
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in test_set.reference:
        got = stored(out / f"{name}.npz")["probabilities"]
        close(got, expected(saved, test_set.stored(name)), rtol=1e-6)
    assert not list(out.glob(".segcal-*"))


@pytest.mark.parametrize("decide", ["argmax", "dice"])
def test_the_crop_of_nnunet_v1_stays_a_crop(test_set, saved, tmp_path, decide):
    folder, box = tmp_path / "v1", ((1, 5), (2, 18), (3, 15))
    folder.mkdir()
    z, y, x = (slice(*side) for side in box)
    p = test_set.stored("case_50")[:, z, y, x]
    np.savez(folder / "a.npz", softmax=p)
    properties = {"crop_bbox": [list(side) for side in box], "original_size_of_raw_data": SHAPE}
    (folder / "a.pkl").write_bytes(pickle.dumps(properties))
    shutil.copy(test_set.predictions / "dataset.json", folder)
    label_map = np.zeros(SHAPE, np.uint8)
    label_map[z, y, x] = p.argmax(0)
    write_nifti(folder / "a.nii.gz", label_map, geometry())
    done = applied(folder, saved, tmp_path / "out", decide=decide)
    assert not done["a"].failed, done["a"].failed
    after = stored(tmp_path / "out" / "a.npz")
    assert list(after) == ["softmax"]
    close(after["softmax"], expected(saved, p), rtol=1e-5)
    labels = read_labels(tmp_path / "out" / "a.nii.gz").array
    inside = p.argmax(0) if decide == "argmax" else decide_dice(after["softmax"]).labels
    assert np.array_equal(labels[z, y, x], inside)
    assert np.count_nonzero(labels) == np.count_nonzero(inside)
    write_nifti(tmp_path / "gt" / "a.nii.gz", label_map, geometry())
    assert not evaluate(tmp_path / "out", tmp_path / "gt").failed


def test_other_volumes_are_written_as_nifti(test_set, saved, tmp_path):
    folder = tmp_path / "p"
    folder.mkdir()
    p = test_set.stored("case_50")
    image = sitk.GetImageFromArray(np.moveaxis(p, 0, -1), isVector=True)
    image.SetSpacing((1.0, 1.0, 3.0))
    sitk.WriteImage(image, str(folder / "a.nrrd"))
    shutil.copy(test_set.predictions / "dataset.json", folder)
    done = applied(folder, saved, tmp_path / "out")
    assert done["a"].notes == ["a.nrrd is written as NIfTI"]
    close(read_volume(tmp_path / "out" / "a.nii.gz").array, expected(saved, p), atol=1e-6)


@pytest.mark.parametrize("decide", ["argmax", "dice"])
@pytest.mark.parametrize("ending", [".nii.gz", ".npz", ".npy", ".tif"])
def test_one_map_of_foreground_stays_one(tmp_path, ending, decide):
    """Three axes, the probability of foreground alone: in its format, or as the decision wants."""
    rng = np.random.default_rng(0)
    shape = (1, *SHAPE[1:]) if ending == ".tif" else SHAPE
    where = replace(geometry(shape), unit="px", spacing_mm=(1.0, 1.0, 1.0), stated=False)
    where = where if ending == ".tif" else geometry(shape)
    predictions, labels, maps = tmp_path / "p", tmp_path / "gt", {}
    predictions.mkdir()
    of_labels = ".png" if ending == ".tif" else ".nii.gz"
    for name in "ab":
        x = smooth_logits(rng, 1, shape)[0]
        p = (1 / (1 + np.exp(-3 * x))).astype(np.float32)
        y = (rng.random(shape) < 1 / (1 + np.exp(-x))).astype(np.uint8)
        write_volume(labels / f"{name}{of_labels}", y, where)
        maps[name] = p
        if ending == ".npz":
            np.savez(predictions / f"{name}.npz", probabilities=p)
        elif ending == ".npy":
            np.save(predictions / f"{name}.npy", p)
        else:
            write_volume(predictions / f"{name}{ending}", p, where)
    fitted = fit_calibrator(predictions, labels, method="temperature", processes=1)
    done = applied(predictions, fitted, tmp_path / "out", decide=decide)
    assert not any(one.failed for one in done.values()), done
    for name, p in maps.items():
        both = torch.from_numpy(np.stack([1 - p, p])).log()[None]
        wanted = fitted.calibrator.apply(both, spacing_mm=where.spacing_mm)[0, 1].numpy()
        if ending in (".nii.gz", ".tif") and decide == "argmax":
            got = read_volume(tmp_path / "out" / f"{name}{ending}").array
        else:
            got = stored(tmp_path / "out" / f"{name}.npz")["probabilities"]
            if ending in (".nii.gz", ".tif"):  # the label map of another rule
                assert read_labels(tmp_path / "out" / f"{name}{ending}").array.max() == 1
        close(got, wanted, atol=1e-6)
    before, after = (evaluate(f, labels) for f in (predictions, tmp_path / "out"))
    assert not after.failed, after.failed
    nll = [one.summary["metrics"]["nll_all"]["mean"] for one in (before, after)]
    assert nll[1] < nll[0]
    assert not set(done["a"].notes) & {"a.tif is written as NIfTI"}


def test_a_volume_of_whole_numbers_is_no_map(tmp_path, test_set, saved):
    folder = tmp_path / "p"
    folder.mkdir()
    labels = test_set.reference["case_50"].astype(np.float32)
    write_nifti(folder / "a.nii.gz", labels, geometry())
    np.savez(folder / "b.npz", probabilities=test_set.stored("case_50"))
    done = applied(folder, saved, tmp_path / "out")
    assert "a.nii.gz: holds labels, not probabilities" in done["a"].failed
    assert not done["b"].failed


def test_label_maps_of_images_stay_images(tmp_path):
    """As nnU-Net writes them: CASE.npz and CASE.png; the mask of another rule is a PNG, too."""
    rng = np.random.default_rng(0)
    shape = (1, 20, 18)
    where = replace(geometry(shape), unit="px", spacing_mm=(1.0, 1.0, 1.0), stated=False)
    predictions, labels = tmp_path / "p", tmp_path / "gt"
    predictions.mkdir()
    for name in "ab":
        x = smooth_logits(rng, 3, shape)
        p = softmax(3 * x).astype(np.float32)
        y = (softmax(x).cumsum(0) < rng.random(shape)).sum(0).astype(np.uint8)
        np.savez(predictions / f"{name}.npz", probabilities=p)
        write_volume(predictions / f"{name}.png", p.argmax(0).astype(np.uint8), where)
        write_volume(labels / f"{name}.png", y, where)
    fitted = fit_calibrator(predictions, labels, method="temperature", processes=1)
    for decide in ("argmax", "dice"):
        out = tmp_path / decide
        done = applied(predictions, fitted, out, decide=decide)
        assert not any(one.failed for one in done.values()), done
        assert {p.name for p in out.iterdir() if p.suffix != ".json"} == {
            "a.npz", "a.png", "b.npz", "b.png",
        }  # fmt: skip
        report = evaluate(out, labels)
        assert not report.failed
        assert report.job.unit == "px"
    after = stored(tmp_path / "dice" / "a.npz")["probabilities"]
    close(read_labels(tmp_path / "dice" / "a.png").array, decide_dice(after).labels)
    assert done["a"].changed

"""Which case to look at first: order, numbers, inputs, failures, resuming, the command."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.io.files import write_json
from segcal.io.volumes import write_nifti
from segcal.metrics.soft_dice_confidence import soft_dice_confidence
from segcal.trust.triage import least_sure_first, plan_trust, run_trust, trust
from tests.evaluation.test_cohort import geometry, soft

MM = (4.0, 1.0, 1.0)
SHAPE = (3, 20, 24)
NAMES = {"background": 0, "a": 1, "b": 2}
SURE = {"one": 0.95, "two": 0.7, "three": 0.85}
"""Probability of the decided label, by case."""


def labels():
    found = np.zeros(SHAPE, np.uint8)
    found[1, 4:10, 4:12], found[:2, 12:18, 8:20] = 1, 2
    return found


@pytest.fixture
def folder(tmp_path):
    """Predictions as nnU-Net writes them, and no references anywhere."""
    made = tmp_path / "predictions"
    for name, certainty in SURE.items():
        write_nifti(made / f"{name}.nii.gz", labels(), geometry(SHAPE, MM))
        np.savez_compressed(made / f"{name}.npz", probabilities=soft(labels(), 3, certainty))
    write_json(made / "dataset.json", {"labels": NAMES})
    return made


def run(*arguments):
    return CliRunner().invoke(app, ["trust", *map(str, arguments)])


def test_the_least_sure_case_stands_first(folder, tmp_path):
    out = tmp_path / "out"
    done = run(folder, "-o", out)
    assert done.exit_code == 0, done.output
    table = pd.read_csv(out / "trust.csv")
    assert table.columns[:6].tolist() == [
        "case", "label", "soft_dice_confidence", "volume_ml", "volume_low_ml", "volume_high_ml",
    ]  # fmt: skip
    assert list(dict.fromkeys(table["case"])) == ["two", "three", "one"]
    assert table["soft_dice_confidence"].is_monotonic_increasing
    for row in table.itertuples():
        p = soft(labels(), 3, SURE[row.case])[NAMES[row.label]].astype(np.float64)
        mask = labels() == NAMES[row.label]
        assert row.soft_dice_confidence == pytest.approx(soft_dice_confidence(p, mask))
        assert row.volume_ml == pytest.approx(p.sum() * 0.004)
        assert row.mask_volume_ml == pytest.approx(mask.sum() * 0.004)
        assert row.volume_low_ml <= row.volume_ml <= row.volume_high_ml
    summary = json.loads((out / "trust.json").read_text())
    assert summary["cases"]["evaluated"] == 3
    assert [one["case"] for one in summary["rows"]] == table["case"].tolist()
    assert set(summary["rows"][0]) <= {
        "case", "label", "flag", *",".join(summary["conventions"]).replace(" ", "").split(",")
    }  # fmt: skip
    page = (out / "index.html").read_text()
    assert page.index("Look at these first") < page.index("All cases and structures")
    assert "against" not in page[: page.index("<nav>")]
    assert {path.name for path in (out / "unsure").iterdir()} == {f"{n}.png" for n in SURE}
    assert not (out / ".segcal-results").exists()
    assert "Look at these first (3 of 3 cases)" in done.output


def test_what_the_mask_is_is_what_lies_beside(folder):
    """A label map that was post-processed is what somebody will use: it is what is judged."""
    kept = np.where(labels() == 1, 0, labels())
    write_nifti(folder / "one.nii.gz", kept, geometry(SHAPE, MM))
    rows = trust(folder).rows.set_index(["case", "label"])
    assert rows.loc[("one", "a"), "mask_volume_ml"] == 0
    assert rows.loc[("one", "a"), "soft_dice_confidence"] == 0


def test_an_undecided_volume_is_flagged(folder):
    p = soft(labels(), 3, 0.95)
    p[:, 1, 4:10, 10:12] = np.array([0.46, 0.5, 0.04])[:, None, None]  # a quarter of a
    np.savez_compressed(folder / "one.npz", probabilities=p)
    found = trust(folder)
    flagged = found.rows[found.rows["flag"] != ""]
    assert flagged[["case", "label"]].to_numpy().tolist() == [["one", "a"]]
    assert flagged["volume_swing"].iloc[0] == pytest.approx(0.25)
    assert found.summary["flagged"] == 1


def test_an_empty_mask_is_as_sure_as_its_largest_probability_is_small():
    numbers = dict.fromkeys(
        ["volume_low_ml", "volume_high_ml", "volume_sd_ml", "undecided_share", "shell_entropy"], 0.0
    )

    def row(**given):
        return {f"{k}/a": v for k, v in {**numbers, "volume_swing": 0.0, **given}.items()}

    cases = {
        "absent": row(
            soft_dice_confidence=0.0, volume_ml=0.1, mask_volume_ml=0.0, largest_probability=0.02
        ),
        "missed": row(
            soft_dice_confidence=0.0, volume_ml=5.0, mask_volume_ml=0.0, largest_probability=0.49
        ),
        "there": row(
            soft_dice_confidence=0.9, volume_ml=9.0, mask_volume_ml=9.0, largest_probability=1.0
        ),
        "unknown": dict.fromkeys(row(soft_dice_confidence=0, volume_ml=0, mask_volume_ml=0,
                                     largest_probability=0), math.nan),
    }  # fmt: skip
    found = least_sure_first(pd.DataFrame.from_dict(cases, orient="index"), 0.1)
    assert found["case"].tolist() == ["missed", "there", "absent"]


def test_an_array_without_a_label_map_needs_an_image(folder, tmp_path):
    (folder / "two.nii.gz").unlink()
    done = run(folder, "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "two.npz: its voxel size and position are unknown" in done.output
    assert "--images" in done.output
    images = tmp_path / "images"
    for name in SURE:
        write_nifti(images / f"{name}_0000.nii.gz", np.ones(SHAPE, np.float32), geometry(SHAPE, MM))
    done = run(folder, "-o", tmp_path / "out", "--images", images)
    assert done.exit_code == 0, done.output
    assert pd.read_csv(tmp_path / "out" / "trust.csv")["case"].iloc[0] == "two"


def test_what_evaluate_reads_is_read(tmp_path):
    """4-D volumes, a folder a case with a file per class, and the probability of foreground."""
    p = soft(labels(), 3, 0.8)
    for k, name in enumerate(NAMES):
        write_nifti(tmp_path / "files" / "x" / f"{name}.nii.gz", p[k], geometry(SHAPE, MM))
    write_nifti(tmp_path / "four" / "x.nii.gz", p, geometry(SHAPE, MM))
    write_json(tmp_path / "dataset.json", {"labels": NAMES})
    write_nifti(tmp_path / "binary" / "b" / "x.nii.gz", p[1], geometry(SHAPE, MM))
    four, files = (trust(tmp_path / kind) for kind in ("four", "files"))
    pd.testing.assert_frame_equal(four.rows, files.rows)
    assert four.rows["label"].tolist() == ["a", "b"]
    (row,) = trust(tmp_path / "binary" / "b" / "x.nii.gz").rows.to_dict("records")
    assert row["label"] == "1"
    assert row["volume_ml"] == pytest.approx(p[1].sum() * 0.004, rel=1e-5)


def test_regions_are_measured_each(tmp_path):
    p = np.zeros((2, *SHAPE), np.float32) + 0.05
    p[0][labels() > 0], p[1][labels() == 2] = 0.9, 0.8
    write_nifti(tmp_path / "p" / "x.nii.gz", p, geometry(SHAPE, MM))
    regions = {"background": 0, "whole": [1, 2], "core": [2]}
    write_json(tmp_path / "p" / "dataset.json", {"labels": regions, "regions_class_order": [1, 2]})
    rows = trust(tmp_path / "p").rows.set_index("label")
    for k, name in enumerate(("whole", "core")):
        expected = soft_dice_confidence(p[k].astype(np.float64), p[k] > 0.5)
        assert rows.loc[name, "soft_dice_confidence"] == pytest.approx(expected)


def test_a_case_that_fails_does_not_stop_the_others(folder, tmp_path):
    (folder / "two.npz").write_bytes(b"no zip")
    write_nifti(folder / "masks.nii.gz", labels(), geometry(SHAPE, MM))
    out = tmp_path / "out"
    done = run(folder, "-o", out)
    assert done.exit_code == 1
    assert "FAILED two" in done.output
    assert "masks.nii.gz: holds no probabilities" in done.output
    assert list(dict.fromkeys(pd.read_csv(out / "trust.csv")["case"])) == ["three", "one"]
    # taken up again, only what failed is measured: the others need not even be readable
    np.savez_compressed(folder / "two.npz", probabilities=soft(labels(), 3, 0.7))
    (folder / "masks.nii.gz").unlink()
    kept = sorted(path.stem for path in (out / ".segcal-results").glob("*.npz"))
    assert kept == ["one", "three"]
    assert run(folder, "-o", out, "--resume").exit_code == 0
    assert pd.read_csv(out / "trust.csv")["case"].iloc[0] == "two"
    assert not (out / ".segcal-results").exists()


def test_several_processes_give_the_same(folder):
    job = plan_trust(folder)
    pd.testing.assert_frame_equal(
        run_trust(job, processes=2).rows, run_trust(job, processes=1).rows
    )


def test_the_folder_of_predictions_is_no_place_for_the_report(folder, tmp_path):
    done = run(folder, "-o", folder)
    assert done.exit_code == 2
    assert "holds the files to evaluate" in done.output
    assert run(tmp_path / "nowhere", "-o", tmp_path / "out").exit_code == 2


def test_the_verb_need_not_be_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "again")
    assert run("-o", tmp_path / "a", folder).exit_code == 0
    assert run("report", folder, "-o", tmp_path / "b").exit_code == 0
    assert (tmp_path / "a" / "trust.csv").read_text() == (tmp_path / "b" / "trust.csv").read_text()
    assert "report" in run("--help").output

"""``segcal check`` sees in headers what the evaluation would stumble over."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.io.files import write_json
from segcal.io.volumes import read_geometry, read_volume, write_nifti
from tests.commands.test_evaluate import REGIONS, region_case
from tests.evaluation.test_cohort import geometry, soft


def run(root, *options):
    return CliRunner().invoke(app, ["check", str(root / "p"), str(root / "gt"), *map(str, options)])


@pytest.fixture
def folders(tmp_path):
    y = np.zeros((3, 12, 10), int)
    y[0, 2:6, 2:6], y[1, 6:9, 6:9] = 1, 2
    (tmp_path / "p").mkdir()
    for name in "abcdefg":
        write_nifti(tmp_path / "gt" / f"{name}.nii.gz", y, geometry(y.shape))
        np.savez(tmp_path / "p" / f"{name}.npz", probabilities=soft(y, 3))
    return tmp_path, y


def test_a_good_folder(folders):
    root, _ = folders
    done = run(root)
    assert done.exit_code == 0, done.output
    assert "7 of 7 cases can be evaluated" in done.output


def test_every_problem_is_listed(folders):
    root, y = folders
    p = root / "p"
    np.savez(p / "a.npz", probabilities=soft(y, 3)[:, :, :-1])
    np.savez(p / "b.npz", probabilities=soft(y, 3)[:2])
    (p / "c.npz").write_bytes((p / "c.npz").read_bytes()[:100])
    np.savez(p / "d.npz", softmax=soft(y, 3)[:, :, :-1])
    moved = replace(geometry(y.shape), origin_mm=(9.0, 0.0, 0.0))
    write_nifti(p / "e.nii.gz", y, moved)  # the label map beside e.npz
    (p / "f.npz").unlink()
    np.savez(p / "z.npz", probabilities=soft(y, 3))
    labels = {"background": 0, "a": 1, "b": 2}
    write_json(root / "dataset.json", {"labels": labels, "file_ending": ".nii.gz"})
    done = run(root, "--dataset-json", root / "dataset.json")
    assert done.exit_code == 1
    text = " ".join(done.output.split())
    for part in (
        "a: ", "like the reference, got (3, 3, 11, 10)", "b: ", "expected 3 classes (background",
        "c: ", "not a complete .npz", "d: ", "needs d.pkl beside it", "e: ", "9 mm apart",
        "1 references without a prediction: f", "1 predictions without a reference: z",
        "1 of 6 cases can be evaluated",
    ):  # fmt: skip
        assert part in text, part


def test_volumes(folders):
    root, y = folders
    for path in (root / "p").iterdir():
        path.unlink()
    write_nifti(root / "p" / "a.nii.gz", soft(y, 3), geometry(y.shape))
    write_nifti(root / "p" / "b.nii.gz", y, geometry(y.shape))
    write_nifti(root / "p" / "c.nii.gz", y[:, 1:], geometry((3, 11, 10)))
    (root / "gt" / "b.nii.gz").write_bytes(b"")
    done = run(root)
    text = " ".join(done.output.split())
    assert done.exit_code == 1
    assert "1 of 3 cases can be evaluated" in text
    assert "b.nii.gz: cannot be read as a volume" in text
    assert "c.nii.gz: does not lie on the reference: size (z, y, x) (3, 11, 10)" in text


def test_label_maps_need_no_consecutive_labels(folders):
    """Only channels of probabilities must be 0 to K - 1, for check as for evaluate."""
    root, y = folders
    labels = {"background": 0, "a": 1, "b": 4}
    write_json(root / "dataset.json", {"labels": labels, "file_ending": ".nii.gz"})
    done = run(root, "--dataset-json", root / "dataset.json")
    assert done.exit_code == 1
    assert "are not 0 to K - 1" in " ".join(done.output.split())
    for path in (root / "p").iterdir():
        path.unlink()
    write_nifti(root / "p" / "a.nii.gz", y, geometry(y.shape))
    done = run(root, "--dataset-json", root / "dataset.json")
    assert "1 of 1 cases can be evaluated" in done.output


def test_one_file_per_class(folders):
    root, y = folders
    write_json(root / "dataset.json", {"labels": {"background": 0, "liver": 1, "spleen": 2}})
    p = root / "classes"
    for case in "abcd":
        for k, name in enumerate(("liver", "spleen"), 1):
            write_nifti(p / case / f"{name}.nii.gz", y == k, geometry(y.shape))
    (p / "b" / "liver.nii.gz").unlink()
    write_nifti(p / "c" / "spleen.nii.gz", y[:, 1:], geometry((3, 11, 10)))
    write_nifti(p / "d" / "spleen.nii.gz", soft(y, 3), geometry(y.shape))
    done = CliRunner().invoke(app, ["check", str(p), str(root / "gt")])
    text = " ".join(done.output.split())
    assert done.exit_code == 1
    for part in (
        "Note on b: ", "label liver has no file", "c: ",
        "spleen.nii.gz: does not lie on the reference",
        "d: ", "spleen.nii.gz: expected a volume of one class, got 3 channels",
        "2 of 4 cases can be evaluated",
    ):  # fmt: skip
        assert part in text, part
    for case in "cd":
        shutil.rmtree(p / case)
        (root / "gt" / f"{case}.nii.gz").unlink()
    for case in "efg":
        (root / "gt" / f"{case}.nii.gz").unlink()
    for command in (["check"], ["evaluate", "-o", str(root / "out"), "--bootstrap", "0"]):
        done = CliRunner().invoke(app, [*command, str(p), str(root / "gt")])
        assert done.exit_code == 0, done.output  # what is an error is one for both
        assert "label liver has no file" in " ".join(done.output.split())


def test_nnunet_v1_and_turned_volumes(folders):
    root, y = folders
    for path in (root / "p").iterdir():
        path.unlink()
    for name in "ab":
        np.savez(root / "p" / f"{name}.npz", softmax=soft(y[1:3, 2:9, 3:8], 3))
    for name, box in (("a", [[1, 3], [2, 9], [3, 8]]), ("b", [[1, 3], [2, 9], [3, 9]])):
        (root / "p" / f"{name}.pkl").write_bytes(pickle.dumps({"crop_bbox": box}))
    flipped = replace(
        geometry(y.shape), origin_mm=(9.0, 0.0, 0.0), direction=np.diag([-1.0, 1.0, 1.0])
    )
    write_nifti(root / "p" / "c.nii.gz", y[:, :, ::-1], flipped)
    write_nifti(root / "p" / "d.nii.gz", y, replace(flipped, origin_mm=(5.0, 0.0, 0.0)))
    done = run(root)
    text = " ".join(done.output.split())
    assert "(K, 2, 7, 6) like the crop_bbox in b.pkl, got (3, 2, 7, 5)" in text
    assert "d.nii.gz: does not lie on the reference, not even with its axes in the same" in text
    assert "4 mm apart" in text
    assert "2 of 4 cases can be evaluated" in text


@pytest.mark.parametrize("ignore", [{}, {"ignore": 4}])
def test_regions_have_a_channel_each(tmp_path, ignore):
    """Neither the background nor what is ignored has one."""
    for name in "abc":
        region_case(tmp_path, name, {**REGIONS, **ignore})
    done = run(tmp_path)
    assert done.exit_code == 0, done.output
    assert "3 of 3 cases can be evaluated" in done.output
    assert ("4 is left out (ignore)" in done.output) == bool(ignore)
    with np.load(tmp_path / "p" / "a.npz") as stored:
        p = stored["probabilities"]
    np.savez(tmp_path / "p" / "a.npz", probabilities=np.concatenate([1 - p[:1], p]))
    moved = replace(geometry(p.shape[1:]), origin_mm=(3.0, 0.0, 0.0))
    write_nifti(tmp_path / "p" / "b.nii.gz", p[0] > 0.5, moved)
    done = run(tmp_path)
    text = " ".join(done.output.split())
    assert done.exit_code == 1
    assert "a.npz: expected 3 regions, got 4" in text
    assert "b.nii.gz: does not lie on the reference: origin" in text
    assert "1 of 3 cases can be evaluated" in text


def test_an_ignore_label_has_no_channel(folders):
    root, y = folders
    labels = {"background": 0, "a": 1, "b": 2, "ignore": 3}
    write_json(root / "dataset.json", {"labels": labels})
    np.savez(root / "p" / "a.npz", probabilities=soft(y, 4))
    done = run(root)
    assert done.exit_code == 1
    assert "a.npz: expected 3 classes (background included), got 4" in " ".join(done.output.split())
    assert "6 of 7 cases can be evaluated" in done.output


def test_wrong_usage(tmp_path):
    assert run(tmp_path).exit_code == 2


def test_headers_say_what_the_whole_file_says(folders):
    root, y = folders
    for ending in (".nii.gz", ".nii"):
        for array, channels in ((y, 1), (soft(y, 3), 3), (y[:1], 1)):
            shape = array.shape[-3:]
            path = root / f"one{ending}"
            write_nifti(path, array, geometry(shape))
            found, k = read_geometry(path)
            whole = read_volume(path).geometry
            assert (found.shape, found.spacing_mm, found.origin_mm, found.stated, k) == (
                whole.shape, whole.spacing_mm, whole.origin_mm, whole.stated, channels,
            )  # fmt: skip
            np.testing.assert_array_equal(found.direction, whole.direction)


def test_an_order_that_contradicts_the_regions_is_said(tmp_path):
    region_case(tmp_path, "a", {**REGIONS, "core": [1, 2], "enhancing": 1})
    done = run(tmp_path)
    assert done.exit_code == 0
    assert "'regions_class_order' [1, 2, 3] contradicts the regions" in done.output

"""Maps of predictions: their values, their place, and files of others that stay."""

from __future__ import annotations

import json
import math

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy
from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.io.files import write_json
from segcal.io.volumes import Geometry, read_geometry, read_volume, write_nifti, write_share_map
from segcal.metrics.uncertainty import confidence_map, entropy_map
from segcal.trust.maps import RECORD, plan_maps, write_maps
from tests.conftest import close

SHAPE, MM = (3, 8, 10), (4.0, 1.0, 0.5)
TURNED = np.array([[0.0, 1, 0], [1, 0, 0], [0, 0, -1]])
STEP = 1 / 255


def place():
    return Geometry(SHAPE, MM, (10.0, -20.0, 5.0), TURNED)


def probabilities(seed, k=3):
    p = np.random.default_rng(seed).dirichlet(np.full(k, 0.5), SHAPE)
    return p.transpose(3, 0, 1, 2).astype(np.float32)


@pytest.fixture
def folder(tmp_path):
    """Two cases as nnU-Net writes them, in an oblique frame; a label that no file can be called."""
    made = tmp_path / "predictions"
    for i, name in enumerate(("one", "two")):
        p = probabilities(i)
        write_nifti(made / f"{name}.nii.gz", p.argmax(0), place())
        np.savez_compressed(made / f"{name}.npz", probabilities=p)
    write_json(made / "dataset.json", {"labels": {"background": 0, "edema/core": 1, "b": 2}})
    return made


def run(*arguments):
    return CliRunner().invoke(app, ["maps", *map(str, arguments)])


def test_maps_hold_what_they_say_where_the_image_is(folder, tmp_path):
    out = tmp_path / "maps"
    done = run(folder, "-o", out)
    assert done.exit_code == 0, done.output
    assert "8 maps of 2 cases written" in done.output
    for i, name in enumerate(("one", "two")):
        p = probabilities(i).astype(np.float64)
        wanted = {
            "entropy": entropy(p, axis=0) / math.log(3),
            "confidence": p.max(0),
            "probability_edema%2Fcore": p[1],
            "probability_b": p[2],
        }
        found = {path.name.removesuffix(".nii.gz"): path for path in (out / name).iterdir()}
        assert found.keys() == wanted.keys()
        for key, values in wanted.items():
            volume = read_volume(found[key])
            assert np.abs(volume.array - values).max() <= STEP / 2 + 1e-6
            assert not volume.geometry.differences(place())
            seen = sitk.GetArrayFromImage(sitk.ReadImage(str(found[key])))  # as the viewers do
            assert np.abs(seen - values).max() <= STEP / 2 + 1e-6
            assert nib.load(found[key]).header.get_data_dtype() == np.uint8
    record = json.loads((out / RECORD).read_text())
    assert "0 if one class is certain, 1" in record["maps"]["CASE/entropy.nii.gz"]
    assert not (out / ".segcal-results").exists()


def test_of_volumes_of_their_own_and_of_regions(tmp_path):
    p = np.random.default_rng(0).random((2, *SHAPE), np.float32)
    write_nifti(tmp_path / "p" / "a.nii.gz", p, place())
    write_json(
        tmp_path / "p" / "dataset.json",
        {"labels": {"background": 0, "whole": [1, 2], "core": 2}, "regions_class_order": [1, 2]},
    )
    assert run(tmp_path / "p", "-o", tmp_path / "maps").exit_code == 0
    read = {
        path.name.removesuffix(".nii.gz"): read_volume(path).array
        for path in (tmp_path / "maps" / "a").iterdir()
    }
    close(read["probability_whole"], p[0], atol=STEP / 2 + 1e-6)
    close(read["probability_core"], p[1], atol=STEP / 2 + 1e-6)
    close(read["confidence"], np.maximum(p, 1 - p).min(0), atol=STEP / 2 + 1e-6)
    bits = entropy(np.stack([p, 1 - p]), base=2, axis=0).mean(0)
    close(read["entropy"], bits, atol=STEP / 2 + 1e-6)


def test_an_array_needs_a_place(folder, tmp_path):
    (folder / "one.nii.gz").unlink()
    done = run(folder, "-o", tmp_path / "maps")
    assert done.exit_code == 2
    assert "--images" in done.output
    for name in ("one", "two"):
        write_nifti(tmp_path / "images" / f"{name}_0000.nii.gz", np.zeros(SHAPE), place())
    assert run(folder, "-o", tmp_path / "maps", "--images", tmp_path / "images").exit_code == 0
    got, _ = read_geometry(tmp_path / "maps" / "one" / "entropy.nii.gz")
    assert not got.differences(place())


def test_one_that_fails_does_not_stop_the_others_and_is_taken_up(folder, tmp_path):
    out = tmp_path / "maps"
    whole = (folder / "two.npz").read_bytes()
    (folder / "two.npz").write_bytes(whole[:100])
    done = run(folder, "-o", out)
    assert done.exit_code == 1
    assert "FAILED two:" in done.output
    before = (out / "one" / "entropy.nii.gz").stat()
    (folder / "two.npz").write_bytes(whole)
    done = run(folder, "-o", out, "--resume")
    assert done.exit_code == 0
    assert "8 maps of 2 cases" in done.output
    assert (out / "one" / "entropy.nii.gz").stat().st_mtime_ns == before.st_mtime_ns
    assert (out / "two" / "entropy.nii.gz").is_file()


def test_files_of_others_stay(folder, tmp_path):
    out = tmp_path / "maps"
    write_nifti(out / "one" / "entropy.nii.gz", np.zeros(SHAPE, np.uint8), place())
    done = run(folder, "-o", out)
    assert done.exit_code == 2
    assert "was not written by segcal maps" in done.output
    assert run(folder, "-o", folder).exit_code == 2
    (out / "one" / "entropy.nii.gz").unlink()
    (out / "one" / "notes.txt").write_text("mine")
    assert run(folder, "-o", out).exit_code == 0
    (folder / "two.npz").unlink(), (folder / "two.nii.gz").unlink()
    assert run(folder, "-o", out).exit_code == 0
    assert not list((out / "two").iterdir())  # maps of an earlier run are gone
    assert (out / "one" / "notes.txt").read_text() == "mine"


def test_label_maps_hold_no_probabilities(folder, tmp_path):
    for path in folder.glob("*.npz"):
        path.unlink()
    done = run(folder, "-o", tmp_path / "maps")
    assert done.exit_code == 1
    assert "holds no probabilities" in done.output


def test_several_processes_write_the_same(folder, tmp_path):
    for processes, name in ((1, "alone"), (2, "two")):
        assert not write_maps(plan_maps(folder, tmp_path / name), processes=processes).failed
    for path in (tmp_path / "alone").glob("*/*.nii.gz"):
        other = tmp_path / "two" / path.relative_to(tmp_path / "alone")
        assert (read_volume(path).array == read_volume(other).array).all()


def test_a_shape_that_does_not_fit(tmp_path):
    with pytest.raises(ValueError, match="does not fit geometry"):
        write_share_map(tmp_path / "a.nii.gz", np.zeros((2, 2, 2)), place())


@settings(max_examples=50, deadline=None)
@given(k=st.integers(2, 6), seed=st.integers(0, 999), concentration=st.floats(0.01, 10))
def test_bounds_of_entropy_and_confidence(k, seed, concentration):
    p = np.random.default_rng(seed).dirichlet(np.full(k, concentration), 20).T
    e, c = entropy_map(p), confidence_map(p)
    close(e, entropy(p, axis=0) / math.log(k), atol=1e-6)
    close(c, p.max(0), atol=1e-6)
    assert (c >= 1 / k - 1e-6).all()


def test_certain_and_undecided():
    p = np.array([[1.0, 1 / 3], [0.0, 1 / 3], [0.0, 1 / 3]])
    close(entropy_map(p), [0.0, 1.0], atol=1e-6)
    close(confidence_map(p, regions=True), [1.0, 2 / 3], atol=1e-6)
    for wrong in (np.zeros((1, 4)), np.zeros((2, 3), int), np.zeros(3)):
        with pytest.raises(ValueError, match="probs: expected floating"):
            entropy_map(wrong)

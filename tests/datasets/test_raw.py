"""Cases are checked, then written whole; a second run does only what is left."""

from __future__ import annotations

import json
from collections import Counter

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from hypothesis import given
from hypothesis import strategies as st

from segcal.datasets.raw import (
    Plan,
    RawCase,
    Skipped,
    check_apart,
    check_case,
    deal,
    present_splits,
    raw_folder,
    write_dataset,
)
from segcal.io.sources import find_sources
from tests.datasets.sources import AFFINE, SHAPE, files, image, labels, lie, save

LABELS = {"background": 0, "a": 1, "b": 2}


@pytest.fixture
def source(tmp_path):
    """Two training cases and a test case without a label."""
    root = tmp_path / "src"
    for number, name in enumerate("abc"):
        save(root / f"i/{name}.nii.gz", image(number))
        if name != "c":
            save(root / f"l/{name}.nii.gz", labels(3, number))
    return root


def plan(cases="abc", **more):
    dataset = {"channel_names": {"0": "MRI"}, "labels": LABELS, "file_ending": ".nii.gz"}
    made = []
    for c in cases:
        label = None if c == "c" else f"l/{c}.nii.gz"
        made.append(RawCase(c, "Tr" if label else "Ts", (f"i/{c}.nii.gz",), label))
    return Plan("test", tuple(made), dataset, **more)


def write(root, folder, wanted=None, **options):
    return write_dataset(find_sources(root), wanted or plan(), folder, **options)


WRITTEN = [
    "conversion.json", "dataset.json", "imagesTr/a_0000.nii.gz", "imagesTr/b_0000.nii.gz",
    "imagesTs/c_0000.nii.gz", "labelsTr/a.nii.gz", "labelsTr/b.nii.gz",
]  # fmt: skip


def check(root, *, channels=1, known=(0, 1, 2), image="i/a.nii.gz", label="l/a.nii.gz"):
    return check_case(
        [root / image], root / label, channels=channels, labels=frozenset(known)
    )  # fmt: skip


def test_good_files_are_copied_bit_for_bit(tmp_path, source):
    folder = tmp_path / "Dataset001_X"
    done = write(source, folder)
    assert (done.training, done.test, done.unchanged, done.rewritten) == (2, 1, 0, 0)
    assert done.skipped == ()
    assert files(folder) == WRITTEN
    for name in "abc":
        subset = "Ts" if name == "c" else "Tr"
        copied = (folder / f"images{subset}/{name}_0000.nii.gz").read_bytes()
        assert copied == (source / f"i/{name}.nii.gz").read_bytes()
    assert (folder / "labelsTr/a.nii.gz").read_bytes() == (source / "l/a.nii.gz").read_bytes()
    dataset = json.loads((folder / "dataset.json").read_text())
    assert dataset["numTraining"] == 2
    assert dataset["labels"] == LABELS


def test_a_second_run_writes_what_changed_and_no_more(tmp_path, source):
    folder = tmp_path / "Dataset001_X"
    write(source, folder)
    before = {name: (folder / name).stat().st_mtime_ns for name in WRITTEN}
    save(source / "i/b.nii.gz", image(9, (*SHAPE,), np.float32))
    (folder / "imagesTs/c_0000.nii.gz").unlink()
    assert write(source, folder).unchanged == 1
    after = {name: (folder / name).stat().st_mtime_ns for name in WRITTEN}
    same = {name for name in WRITTEN if before[name] == after[name]}
    assert same == {"imagesTr/a_0000.nii.gz", "labelsTr/a.nii.gz"}
    assert nib.load(folder / "imagesTr/b_0000.nii.gz").get_data_dtype() == np.float32
    assert write(source, folder).unchanged == 3
    assert write(source, folder, force=True).unchanged == 0


def test_a_run_that_was_stopped_goes_on(tmp_path, source):
    folder = tmp_path / "Dataset001_X"

    def stop(name):
        if name == "b":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(source, folder, progress=stop)
    assert "dataset.json" not in files(folder)
    (folder / "imagesTr" / ".segcal-abcdefgh-x.nii.gz").write_bytes(b"left by a killed process")
    (folder / "imagesTs").mkdir()
    (folder / "imagesTs/c_0000.nii.gz").write_bytes(b"written, but not yet in the record")
    assert write(source, folder).unchanged == 2
    assert files(folder) == WRITTEN
    assert nib.load(folder / "imagesTs/c_0000.nii.gz").shape == SHAPE


def test_killed_before_the_first_case(tmp_path, source):
    folder = tmp_path / "Dataset001_X"
    folder.mkdir()
    (folder / ".segcal-abcdefgh-conversion.json").write_bytes(b"")
    write(source, folder)
    assert files(folder) == WRITTEN


def test_a_bad_case_is_absent_and_the_rest_is_there(tmp_path, source):
    folder = tmp_path / "Dataset001_X"
    splits = ({"train": ["a"], "val": ["b"]}, {"train": ["b"], "val": ["a"]})
    write(source, folder, plan(splits=splits))
    assert json.loads((folder / "splits_final.json").read_text()) == list(splits)
    save(source / "l/b.nii.gz", labels(4))
    done = write(source, folder, plan(splits=splits, skipped=(Skipped("d", "lost"),)))
    assert [one.name for one in done.skipped] == ["d", "b"]
    assert "holds the unknown label 3; expected 0, 1, 2" in done.skipped[1].reason
    assert files(folder) == [name for name in WRITTEN if "/b" not in name]
    assert json.loads((folder / "dataset.json").read_text())["numTraining"] == 1
    record = json.loads((folder / "conversion.json").read_text())
    assert set(record["cases"]) == {"a", "c"}
    assert [one["name"] for one in record["skipped"]] == ["d", "b"]
    save(source / "l/b.nii.gz", labels(3))
    assert write(source, folder).training == 2


def test_without_a_training_case_there_is_no_data_set(tmp_path, source):
    for name in "ab":
        (source / f"l/{name}.nii.gz").write_bytes(b"")
    done = write(source, tmp_path / "Dataset001_X", plan(splits=({"train": ["a"], "val": ["b"]},)))
    assert (done.training, done.test, done.splits) == (0, 1, 0)
    assert files(tmp_path / "Dataset001_X") == ["conversion.json", "imagesTs/c_0000.nii.gz"]


def test_a_folder_of_something_else_is_refused(tmp_path, source):
    folder = tmp_path / "Dataset001_X"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something other than a conversion of test"):
        write(source, folder, force=True)
    assert files(folder) == ["notes.txt"]
    (folder / "notes.txt").unlink()
    (folder / "conversion.json").write_text('{"converter": "acdc", "cases": {}}')
    with pytest.raises(ValueError, match="holds something other"):
        write(source, folder, force=True)
    (folder / "conversion.json").unlink()
    write(source, folder)
    (folder / "labelsTr" / "mine.nii.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"labelsTr/mine.nii.gz, which no conversion wrote"):
        write(source, folder, force=True)
    with pytest.raises(ValueError, match="something other"):
        write(source, source / "i/a.nii.gz")


def test_cases_that_are_no_more_planned_need_force(tmp_path, source):
    folder = tmp_path / "Dataset001_X"
    write(source, folder)
    with pytest.raises(ValueError, match=r"imagesTr/b_0000.nii.gz.* from an earlier conversion"):
        write(source, folder, plan("ac"))
    assert files(folder) == WRITTEN
    write(source, folder, plan("ac"), force=True)
    assert files(folder) == [name for name in WRITTEN if "/b" not in name]


def test_a_record_that_names_other_files_removes_none(tmp_path, source):
    folder = tmp_path / "Dataset001_X"
    write(source, folder)
    (tmp_path / "mine.txt").write_text("")
    record = json.loads((folder / "conversion.json").read_text())
    record["cases"]["a"]["files"]["../mine.txt"] = 0
    record["cases"]["z"] = "nothing"
    (folder / "conversion.json").write_text(json.dumps(record))
    write(source, folder, force=True)
    assert (tmp_path / "mine.txt").exists()


@pytest.mark.parametrize(
    ("message", "spoil"),
    [
        ("3 voxels are NaN or infinite", lambda r: save(r / "i/a.nii.gz", spoilt(np.float32))),
        ("got values of type complex64", lambda r: save(r / "i/a.nii.gz", image(0).astype("c8"))),
        ("cannot be read as a volume", lambda r: cut(r / "i/a.nii.gz")),
        ("cannot be read as a volume", lambda r: cut(r / "l/a.nii.gz")),
        ("expected 1 channels, got 2", lambda r: save(r / "i/a.nii.gz", image(0, (*SHAPE, 2)))),
        ("does not lie on the reference: size", lambda r: save(r / "l/a.nii.gz", labels(3)[1:])),
        ("origin .* 3 mm apart", lambda r: save(r / "l/a.nii.gz", labels(3), shifted(3))),
        (
            "holds the unknown label 7; expected 0, 1, 2",
            lambda r: save(r / "l/a.nii.gz", 7 * labels(2)),
        ),
        ("do not hold labels", lambda r: save(r / "l/a.nii.gz", labels(3) * np.float32(0.5))),
        ("expected a 3-D label map", lambda r: save(r / "l/a.nii.gz", labels(3, 0, (*SHAPE, 2)))),
        ("not at right angles", lambda r: save(r / "i/a.nii.gz", image(0), sheared(5e-3))),
    ],
)
def test_what_is_wrong_is_said(source, message, spoil):
    spoil(source)
    with pytest.raises(ValueError, match=message):
        check(source)


def spoilt(dtype):
    array = image(0).astype(dtype)
    array[0, 0, :3] = np.nan, np.inf, -np.inf
    return array


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def shifted(mm):
    affine = AFFINE.copy()
    affine[2, 3] += mm
    return affine


def sheared(angle):
    affine = AFFINE.copy()
    affine[0, 1] = angle * affine[1, 1]
    return affine


@pytest.mark.parametrize(
    ("change", "spoil"),
    [
        ("the header's is used", lambda r: save(r / "i/a.nii.gz", image(0), change=lie)),
        ("states no orientation", lambda r: save(r / "i/a.nii.gz", image(0), change=bare)),
        ("all readers agree", lambda r: save(r / "i/a.nii.gz", image(0)[..., None])),
        ("axes brought to right angles", lambda r: shear_both(r)),
    ],
)
def test_images_are_rewritten_where_readers_would_differ(tmp_path, source, change, spoil):
    spoil(source)
    if change == "states no orientation":
        save(source / "l/a.nii.gz", labels(3), change=bare)
    if change == "the header's is used":
        save(source / "l/a.nii.gz", labels(3), change=lie)
    before = sitk.ReadImage(str(source / "l/b.nii.gz"))
    write(source, tmp_path / "Dataset001_X", plan("a"))
    record = json.loads((tmp_path / "Dataset001_X/conversion.json").read_text())
    assert change in record["cases"]["a"]["changes"]["imagesTr/a_0000.nii.gz"]
    path = tmp_path / "Dataset001_X/imagesTr/a_0000.nii.gz"
    read = sitk.ReadImage(str(path))
    assert (sitk.GetArrayFromImage(read) == image(0).transpose()).all()
    np.testing.assert_allclose(read.GetSpacing(), before.GetSpacing(), rtol=1e-6)
    norms = np.linalg.norm(nib.load(path).affine[:3, :3], axis=0)
    np.testing.assert_allclose(norms, [1.5, 1.25, 8], rtol=1e-6)
    again = sitk.ReadImage(str(tmp_path / "Dataset001_X/labelsTr/a.nii.gz"))
    np.testing.assert_allclose(again.GetDirection(), read.GetDirection(), atol=1e-6)
    np.testing.assert_allclose(again.GetOrigin(), read.GetOrigin(), atol=1e-6)


def bare(image):
    image.set_sform(None, 0)
    image.set_qform(None, 0)


def shear_both(root):
    """By more than SimpleITK reads."""
    for path, array in ((root / "i/a.nii.gz", image(0)), (root / "l/a.nii.gz", labels(3))):
        save(path, array, sheared(5e-4))
        with pytest.raises(RuntimeError, match="orthonormal"):
            sitk.ReadImage(str(path))


@pytest.mark.parametrize(
    ("change", "array", "affine"),
    [
        ("labels rounded to integers", labels(3, 0) * np.float32(1.01), AFFINE),
        ("exactly the grid of the image", labels(3, 0), shifted(0.004)),
        ("stored as RPS, re-ordered", labels(3, 0)[::-1], None),
        ("", labels(3, 0).astype(np.float32), AFFINE),
    ],
)
def test_labels_are_put_on_the_grid_of_the_image(tmp_path, source, change, array, affine):
    if affine is None:
        affine = AFFINE @ np.diag([-1.0, 1, 1, 1])
        affine[0, 3] += AFFINE[0, 0] * (SHAPE[0] - 1)
    path = save(source / "l/a.nii.gz", array, affine)
    write(source, tmp_path / "Dataset001_X", plan("a"))
    changes = json.loads((tmp_path / "Dataset001_X/conversion.json").read_text())["cases"]["a"]
    assert set(changes["changes"]) == ({"labelsTr/a.nii.gz"} if change else set())
    assert change in changes["changes"].get("labelsTr/a.nii.gz", "")
    written = tmp_path / "Dataset001_X/labelsTr/a.nii.gz"
    assert (written.read_bytes() == path.read_bytes()) == (not change)
    got = nib.load(written)
    np.testing.assert_array_equal(got.get_fdata(), labels(3, 0))
    np.testing.assert_allclose(got.affine, AFFINE)


def test_nnunet_takes_what_is_written(tmp_path, source):
    """Its own checks of the files, with its own reader."""
    from nnunetv2.experiment_planning.verify_dataset_integrity import check_cases, verify_labels
    from nnunetv2.imageio.simpleitk_reader_writer import SimpleITKIO

    shear_both(source)
    save(source / "i/b.nii.gz", image(1), change=lie)
    save(source / "l/b.nii.gz", labels(3, 1), change=lie)
    folder = tmp_path / "Dataset001_X"
    write(source, folder)
    for name in "ab":
        paths = (
            [str(folder / f"imagesTr/{name}_0000.nii.gz")],
            str(folder / f"labelsTr/{name}.nii.gz"),
        )
        assert check_cases(*paths, 1, SimpleITKIO)
        assert verify_labels(paths[1], SimpleITKIO, [0, 1, 2])


def test_channels_in_one_file(tmp_path, source):
    array = image(3, (*SHAPE, 2))
    save(source / "i/a.nii.gz", array)
    dataset = {**plan().dataset, "channel_names": {"0": "T2", "1": "ADC"}}
    write(source, tmp_path / "Dataset001_X", Plan("test", plan("a").cases, dataset))
    for channel in range(2):
        got = nib.load(tmp_path / f"Dataset001_X/imagesTr/a_{channel:04d}.nii.gz")
        np.testing.assert_array_equal(got.get_fdata(), array[..., channel])
        np.testing.assert_allclose(got.affine, AFFINE)


@given(
    st.dictionaries(st.text("abcdef", min_size=1), st.sampled_from("XYZ"), min_size=1),
    st.integers(1, 10),
    st.integers(0, 3),
)
def test_parts_are_alike(groups, parts, seed):
    dealt = deal(groups, parts, seed)
    assert sorted(name for part in dealt for name in part) == sorted(groups)
    counts = [Counter(groups[name] for name in part) for part in dealt]
    for group in set(groups.values()):
        sizes = [count[group] for count in counts]
        assert max(sizes) - min(sizes) <= 1
    sizes = [len(part) for part in dealt]
    assert max(sizes) - min(sizes) <= 1


def test_the_seed_matters_and_is_all_that_does():
    groups = {f"p{i}": "XY"[i % 2] for i in range(20)}
    turned = dict(reversed(groups.items()))
    assert deal(groups, 5, 0) == deal(turned, 5, 0) != deal(groups, 5, 1)


def test_splits_without_what_is_not_there():
    splits = [{"train": ["a", "b"], "val": ["c"]}, {"train": ["a", "c"], "val": ["b"]}]
    assert present_splits(splits, {"a": "Tr", "b": "Tr"}) == [{"train": ["a"], "val": ["b"]}]


def test_where_a_data_set_goes(tmp_path):
    assert raw_folder(tmp_path, None, 27, "ACDC") == tmp_path / "Dataset027_ACDC"
    assert raw_folder(tmp_path, 5, 27, "ACDC") == tmp_path / "Dataset005_ACDC"
    named = tmp_path / "Dataset042_Hearts"
    assert raw_folder(named, None, 27, "ACDC") == raw_folder(named, 42, 27, "ACDC") == named
    with pytest.raises(ValueError, match="is the folder of 042"):
        raw_folder(named, 41, 27, "ACDC")
    for number in (0, 1000):
        with pytest.raises(ValueError, match="expected 1 to 999"):
            raw_folder(tmp_path, number, 27, "ACDC")
    named.mkdir()
    with pytest.raises(ValueError, match="Dataset042_Hearts has the number of Dataset042_ACDC"):
        raw_folder(tmp_path, 42, 27, "ACDC")


def test_source_and_target_lie_apart(tmp_path):
    check_apart(tmp_path / "a", tmp_path / "ab")
    for a, b in (("a", "a"), ("a", "a/b"), ("a/b/c", "a")):
        with pytest.raises(ValueError, match="the output would be read as input"):
            check_apart(tmp_path / a, tmp_path / b)

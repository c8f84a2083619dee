"""Reading and writing volumes: geometry, label types, odd headers."""

from __future__ import annotations

import gzip
import itertools
import tracemalloc
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813

from segcal.io.files import BULK
from segcal.io.volumes import (
    Geometry,
    check_place,
    from_canonical,
    put_on,
    read_geometry,
    read_labels,
    read_volume,
    reads_alike,
    stored_axes,
    to_canonical,
    write_nifti,
)
from tests.data_paths import real_data

GEOMETRY = Geometry((3, 4, 5), (8.0, 1.5, 1.25), (10.0, -20.0, 30.0), np.diag([-1.0, -1.0, 1.0]))


def peak(function):
    """What `function` returns, and the bytes in use at most while it runs beyond those before."""
    tracemalloc.start()
    try:
        result = function()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def save(path, array, affine=None, **header):
    image = nib.Nifti1Image(array, np.eye(4) if affine is None else affine, **header)
    nib.save(image, path)
    return path


def test_round_trip_and_simpleitk_agrees(tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, (3, 4, 5))
    path = tmp_path / "a.nii.gz"
    write_nifti(path, labels, GEOMETRY)
    volume = read_labels(path)
    assert (volume.array == labels).all()
    assert volume.geometry.differences(GEOMETRY) == []
    np.testing.assert_allclose(volume.geometry.spacing_mm, GEOMETRY.spacing_mm)
    other = sitk.ReadImage(str(path))
    assert (sitk.GetArrayFromImage(other) == labels).all()
    np.testing.assert_allclose(other.GetSpacing()[::-1], GEOMETRY.spacing_mm)
    assert nib.load(path).get_data_dtype() == np.uint8
    mha = tmp_path / "a.mha"  # the same image through SimpleITK
    sitk.WriteImage(other, str(mha))
    again = read_labels(mha)
    assert (again.array == labels).all()
    assert again.geometry.differences(volume.geometry) == []
    assert stored_axes(mha) == stored_axes(path) == 3


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([0, 255], np.uint8), ([0, 256], np.uint16), ([-1, 3], np.int16), ([0, 70000], np.int32)],
)
def test_smallest_type_is_written(tmp_path, values, dtype):
    array = np.zeros((3, 4, 5), np.int64)
    array[0, 0, :2] = values
    write_nifti(tmp_path / "a.nii.gz", array, GEOMETRY)
    image = nib.load(tmp_path / "a.nii.gz")
    assert image.get_data_dtype() == dtype
    assert (image.dataobj.slope, image.dataobj.inter) == (1, 0)
    assert (read_labels(tmp_path / "a.nii.gz").array == array).all()


def test_probabilities_round_trip(tmp_path):
    p = np.random.default_rng(0).dirichlet(np.ones(4), (3, 4, 5)).transpose(3, 0, 1, 2)
    write_nifti(tmp_path / "p.nii.gz", p, GEOMETRY)
    volume = read_volume(tmp_path / "p.nii.gz")
    assert volume.array.shape == (4, 3, 4, 5)
    np.testing.assert_allclose(volume.array, p, atol=1e-7)
    image = nib.load(tmp_path / "p.nii.gz")
    assert image.get_data_dtype() == np.float32
    assert (image.dataobj.slope, image.dataobj.inter) == (1, 0)
    assert stored_axes(tmp_path / "p.nii.gz") == 4


def test_labels_scaled_by_the_header_are_rounded(tmp_path):
    """Labels 0..12 as float64 through a uint8 header come back up to 0.0235 off."""
    labels = np.tile(np.arange(13.0), (4, 4, 1))
    image = nib.Nifti1Image(labels, np.eye(4))
    image.set_data_dtype(np.uint8)
    nib.save(image, tmp_path / "a.nii.gz")
    raw = np.asanyarray(nib.load(tmp_path / "a.nii.gz").dataobj)
    assert np.abs(raw - labels).max() > 0.01
    assert np.unique(read_labels(tmp_path / "a.nii.gz").array).tolist() == list(range(13))


@pytest.mark.parametrize("bad", [1.5, np.nan, np.inf])
def test_values_that_are_no_labels(tmp_path, bad):
    array = np.zeros((2, 2, 2))
    array[0, 0, 0] = bad
    with pytest.raises(ValueError, match=r"a\.nii\.gz: 1 voxels do not hold labels"):
        read_labels(save(tmp_path / "a.nii.gz", array))


def test_trailing_axes(tmp_path):
    labels = np.arange(120, dtype=np.uint8).reshape(6, 5, 4)
    path = save(tmp_path / "a.nii.gz", labels[..., None], np.diag([2, 3, 4, 1]))
    volume = read_labels(path)
    assert volume.geometry.shape == (4, 5, 6)
    np.testing.assert_allclose(volume.geometry.spacing_mm, (4, 3, 2))
    assert (volume.array == labels.transpose()).all()
    four = save(tmp_path / "b.nii.gz", np.zeros((6, 5, 4, 3), np.uint8))
    with pytest.raises(ValueError, match=r"expected a 3-D label map, got shape \(6, 5, 4, 3\)"):
        read_labels(four)
    vectors = save(tmp_path / "c.nii.gz", np.zeros((6, 5, 4, 1, 3), np.float32))
    assert read_volume(vectors).array.shape == (3, 4, 5, 6)
    flat = save(tmp_path / "d.nii.gz", np.zeros((6, 5), np.uint8))
    assert read_volume(flat).array.shape == (1, 5, 6)


def shifted(**changes):
    values = {**vars(GEOMETRY), **changes}
    return Geometry(**values)


def test_headers_that_differ_by_rounding(tmp_path):
    """The last digits of an origin, of a spacing and of a direction differ between programs."""
    image = sitk.GetImageFromArray(np.zeros((3, 4, 5), np.uint8))
    image.SetSpacing((0.977, 0.977, 4.0))
    image.SetOrigin((-341.66461, 12.5, 700.25))
    a = np.radians(10)
    for sign, name in ((1, "a.mha"), (-1, "b.mha")):
        turned = a + sign * 1e-8
        image.SetDirection(
            (np.cos(turned), -np.sin(turned), 0, np.sin(turned), np.cos(turned), 0, 0, 0, 1)
        )
        sitk.WriteImage(image, str(tmp_path / name))
        image.SetSpacing((0.977, 0.977, 3.999999))
        image.SetOrigin((-341.66462, 12.5, 700.25))
    here, there = (read_geometry(tmp_path / name)[0] for name in ("a.mha", "b.mha"))
    assert here.origin_mm != there.origin_mm
    assert here.spacing_mm != there.spacing_mm
    assert (here.direction != there.direction).any()
    assert check_place(tmp_path / "b.mha", here) == 1
    with pytest.raises(ValueError, match=r"spacing .* origin .* 1e-05 mm apart"):
        check_place(tmp_path / "b.mha", here, tolerance=1e-7)


def test_differences_are_named():
    assert GEOMETRY.differences(shifted(origin_mm=(10.00001, -20.0, 30.0))) == []
    assert GEOMETRY.differences(shifted(spacing_mm=(7.999999, 1.5, 1.25))) == []
    (text,) = GEOMETRY.differences(shifted(origin_mm=(10.0, -20.0, 33.0)))
    assert "origin" in text
    assert "3 mm apart" in text
    (text,) = GEOMETRY.differences(shifted(spacing_mm=(4.07, 1.5, 1.25)))
    assert "spacing (z, y, x) (8, 1.5, 1.25) and (4.07, 1.5, 1.25) mm" in text
    assert GEOMETRY.differences(shifted(origin_mm=(10.0, -20.0, 33.0)), tolerance=3) == []
    angle = np.radians(10)
    turn = np.array(
        [[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]]
    )
    (text,) = GEOMETRY.differences(shifted(direction=turn @ GEOMETRY.direction))
    assert "direction, by 10 degrees" in text
    (text,) = GEOMETRY.differences(shifted(shape=(3, 4, 6)))
    assert "size" in text


@pytest.mark.parametrize("axes", ["RAS", "LPS", "PIR", "ASL", "SRP"])
def test_from_canonical_undoes_nibabel(axes):
    rng = np.random.default_rng(0)
    array = rng.random((2, 4, 5, 6))  # K, z, y, x of the file
    ornt = nib.orientations.axcodes2ornt(axes)
    affine = nib.orientations.inv_ornt_aff(ornt, (6, 5, 4)) @ np.eye(4)
    image = nib.Nifti1Image(array.transpose(), np.linalg.inv(np.linalg.inv(affine)))
    canonical = nib.as_closest_canonical(image)
    geometry = Geometry(
        (4, 5, 6), (1.0, 1.0, 1.0), tuple(affine[:3, 3]), np.asarray(affine[:3, :3])
    )
    back = from_canonical(
        np.asarray(canonical.dataobj).transpose(), geometry, reader="NibabelIOWithReorient"
    )
    np.testing.assert_array_equal(back, array)
    shape = to_canonical(geometry, reader="NibabelIOWithReorient").shape
    assert shape == canonical.shape[2::-1]


def oblique(shear=0.0):
    """Affine of 0.7 x 0.9 x 5 mm voxels, turned by 20 and 10 degrees, the third axis leaning."""
    a, b = np.radians([20, 10])
    turn = np.array([[np.cos(a), -np.sin(a), 0], [np.sin(a), np.cos(a), 0], [0, 0, 1]]) @ np.array(
        [[1, 0, 0], [0, np.cos(b), -np.sin(b)], [0, np.sin(b), np.cos(b)]]
    )
    lean = np.eye(3)
    lean[1, 2], lean[2, 2] = np.sin(shear), np.cos(shear)
    affine = np.eye(4)
    affine[:3, :3] = turn @ lean @ np.diag([0.7, 0.9, 5.0])
    affine[:3, 3] = (-341.66461, 12.5, 700.25)
    return affine


ORDERS = [
    np.array(list(zip(order, flips, strict=True)))
    for order in itertools.permutations(range(3))
    for flips in itertools.product((1, -1), repeat=3)
]


@pytest.mark.parametrize("shear", [0.0, 0.3])
def test_every_order_of_axes_is_put_on_the_reference(tmp_path, shear):
    labels = np.random.default_rng(0).integers(0, 9, (6, 5, 4)).astype(np.uint8)
    image = nib.Nifti1Image(labels, oblique(shear))
    nib.save(image, tmp_path / "reference.nii.gz")
    reference = read_labels(tmp_path / "reference.nii.gz")
    assert len(ORDERS) == 48
    path = tmp_path / "a.nii.gz"
    for order in ORDERS:
        nib.save(image.as_reoriented(order), path)
        array, done = put_on(path, read_labels(path), reference.geometry)
        np.testing.assert_array_equal(array, reference.array)
        same = np.array_equal(order, ORDERS[0])
        assert done == "" if same else "re-ordered to the reference's" in done
        assert check_place(path, reference.geometry) == 1


def test_simpleitk_orders_axes_alike(tmp_path):
    write_nifti(tmp_path / "a.nii.gz", np.arange(60).reshape(3, 4, 5), GEOMETRY)
    reference = read_labels(tmp_path / "a.nii.gz")
    for code in ("RAS", "PIR", "SAL", "IPL"):  # its letters say where axes come from, or go to
        turned = sitk.DICOMOrient(sitk.ReadImage(str(tmp_path / "a.nii.gz")), code)
        sitk.WriteImage(turned, str(tmp_path / "b.mha"))
        volume = read_labels(tmp_path / "b.mha")
        array, done = put_on(tmp_path / "b.mha", volume, reference.geometry)
        np.testing.assert_array_equal(array, reference.array)
        assert done


def test_nothing_else_is_put_on_the_reference(tmp_path):
    labels = np.arange(120, dtype=np.uint8).reshape(6, 5, 4)
    reference = read_labels(save(tmp_path / "r.nii.gz", labels, oblique())).geometry
    turned = nib.load(tmp_path / "r.nii.gz").as_reoriented(ORDERS[13])
    path = tmp_path / "a.nii.gz"
    origin, smaller, coarser = turned.affine.copy(), turned.affine.copy(), turned.affine.copy()
    origin[2, 3] += 3
    smaller[:3, :3] *= 0.98
    for affine, array, message in (
        (origin, turned.dataobj, "same order: origin .* 3 mm apart"),
        (smaller, turned.dataobj, r"same order: spacing .*\(4.9, 0.882, 0.686\) and \(5, 0.9, 0.7"),
        (turned.affine, turned.dataobj[1:], r"same order: size \(z, y, x\) "),
        (oblique(0.05), labels, "reference: direction, by 2.86 degrees"),
    ):
        save(path, np.asarray(array), affine)
        with pytest.raises(ValueError, match=message):
            put_on(path, read_labels(path), reference)
        with pytest.raises(ValueError, match=message):
            check_place(path, reference)
    coarser[:3, 3] += 1e-3  # within a hundredth of a voxel
    save(path, np.asarray(turned.dataobj), coarser)
    assert put_on(path, read_labels(path), reference)[1]
    image = nib.Nifti1Image(np.asarray(turned.dataobj), turned.affine)
    image.set_qform(None, 0)
    image.set_sform(None, 0)
    nib.save(image, path)
    with pytest.raises(ValueError, match="does not lie on the reference: "):
        put_on(path, read_labels(path), reference)


@pytest.mark.parametrize("degrees", [0.5, 10, 40])
def test_a_shear_survives(tmp_path, degrees):
    affine = oblique(np.radians(degrees))
    volume = read_labels(save(tmp_path / "a.nii.gz", np.ones((6, 5, 4), np.uint8), affine))
    assert f"{90 - degrees:.4g} instead of 90 degrees apart" in volume.note
    np.testing.assert_allclose(volume.geometry.affine, affine, rtol=1e-6, atol=1e-6)
    write_nifti(tmp_path / "b.nii.gz", volume.array, volume.geometry)
    again = read_geometry(tmp_path / "b.nii.gz")[0]
    assert again.differences(volume.geometry) == []
    np.testing.assert_allclose(again.affine, affine, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(nib.load(tmp_path / "b.nii.gz").affine, affine, rtol=1e-6, atol=1e-6)
    upright = read_labels(save(tmp_path / "c.nii.gz", np.ones((6, 5, 4), np.uint8), oblique()))
    assert upright.note == ""
    assert "direction" in str(volume.geometry.differences(upright.geometry))


def test_axes_that_span_no_volume(tmp_path):
    flat = np.diag([1.0, 1.0, 1.0, 1.0])
    flat[:3, 2] = (1, 1, 0)
    header = nib.Nifti1Header()
    header.set_data_shape((2, 2, 2))
    header.set_sform(flat, 1)
    header["magic"], header["vox_offset"] = b"n+1", 352
    content = header.binaryblock + bytes(4) + np.zeros(8, np.float32).tobytes()
    (tmp_path / "a.nii").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.nii: its affine is singular"):
        read_volume(tmp_path / "a.nii")


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.nii\.gz: no such file"):
        read_volume(tmp_path / "none.nii.gz")
    (tmp_path / "text.nii.gz").write_text("not an image")
    (tmp_path / "text.mha").write_text("not an image")
    for name in ("text.nii.gz", "text.mha"):
        with pytest.raises(ValueError, match=f"{name}: cannot be read as a volume"):
            read_volume(tmp_path / name)
        with pytest.raises(ValueError, match=f"{name}: cannot be read as a volume"):
            stored_axes(tmp_path / name)
    whole = save(tmp_path / "whole.nii.gz", np.random.default_rng(0).random((20, 20, 20)))
    (tmp_path / "cut.nii.gz").write_bytes(whole.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cut\.nii\.gz: cannot be read as a volume"):
        read_volume(tmp_path / "cut.nii.gz")


@pytest.mark.parametrize("damage", ["flip", "header"])
def test_damage_is_noticed(tmp_path, damage):
    """nibabel alone stops reading before the checksum of a .gz file."""
    noise = np.random.default_rng(0).integers(0, 3, (30, 30, 30)).astype(np.uint8)
    whole = save(tmp_path / "a.nii.gz", noise)
    content = bytearray(gzip.decompress(whole.read_bytes()))
    if damage == "header":
        content[70:72] = (9999).to_bytes(2, "little")  # data type
        whole.write_bytes(gzip.compress(bytes(content)))
    else:
        packed = bytearray(whole.read_bytes())
        packed[-8] ^= 1  # in the checksum
        whole.write_bytes(bytes(packed))
    with pytest.raises(ValueError, match=r"a\.nii\.gz: cannot be read as a volume"):
        read_volume(whole)


def test_nothing_is_unpacked_that_the_header_does_not_tell_of(tmp_path):
    whole = save(tmp_path / "a.nii", np.ones((6, 5, 4), np.uint8))
    content, path = whole.read_bytes(), tmp_path / "a.nii.gz"
    with gzip.open(path, "wb") as file:
        file.write(content)
        for _ in range(64):
            file.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 17

    def refused():
        with pytest.raises(ValueError, match=r"more data after the 472 bytes"):
            read_volume(path)

    _, used = peak(refused)
    assert used < 1 << 22
    wide = nib.Nifti1Image(np.zeros((2, 2, 2), np.uint8), np.eye(4))
    wide.header.set_data_shape((30000, 30000, 30000))
    header = wide.header.copy()
    header["magic"], header["vox_offset"] = b"n+1", 352
    path.write_bytes(gzip.compress(header.binaryblock + bytes(4 + 8)))
    with pytest.raises(ValueError, match=r"a\.nii\.gz: cannot be read as a volume"):
        read_volume(path)
    with pytest.raises(ValueError, match=r"size \(z, y, x\) \(30000, 30000, 30000\) and \(3, 4, 5"):
        check_place(path, GEOMETRY)
    whole.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"a\.nii: cannot be read as a volume"):
        read_volume(whole)
    path.write_bytes(gzip.compress(content[:-1]))
    with pytest.raises(ValueError, match="ends after 119 of 120 bytes"):
        read_volume(path)


def test_a_cut_or_damaged_file_never_gives_other_values(tmp_path):
    labels = np.random.default_rng(0).integers(0, 3, (6, 5, 4)).astype(np.uint8)
    path = save(tmp_path / "a.nii.gz", labels)
    content = path.read_bytes()
    for length in range(0, len(content), 3):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"a\.nii\.gz: cannot be read as a volume"):
            read_labels(path)
    refused = 0
    for position, byte in enumerate(content):
        path.write_bytes(content[:position] + bytes([byte ^ 0x5A]) + content[position + 1 :])
        error = ""
        try:
            array = read_labels(path).array
        except ValueError as raised:
            error = str(raised)
            refused += 1
        assert str(path) in error if error else (array == labels.transpose()).all()
    assert refused > 0.8 * len(content)  # the header of gzip holds a name and a time


def test_reading_takes_one_copy(tmp_path):
    many = np.random.default_rng(0).random((8, 32, 96, 96), np.float32)
    geometry = Geometry(many.shape[1:], (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), np.eye(3))
    write_nifti(tmp_path / "a.nii.gz", many, geometry)
    read_volume(tmp_path / "a.nii.gz")
    volume, used = peak(lambda: read_volume(tmp_path / "a.nii.gz"))
    np.testing.assert_array_equal(volume.array, many)
    assert used < 1.1 * many.nbytes + 4 * BULK, used / many.nbytes


def test_a_header_extension_is_passed_over(tmp_path):
    labels = np.arange(120, dtype=np.int16).reshape(6, 5, 4)
    image = nib.Nifti1Image(labels, np.eye(4))
    image.header.extensions.append(nib.nifti1.Nifti1Extension("comment", b"x" * 5000))
    for name in ("a.nii", "a.nii.gz"):
        nib.save(image, tmp_path / name)
        assert (read_labels(tmp_path / name).array == labels.transpose()).all()


@pytest.mark.parametrize(("unit", "scale"), [("micron", 1e3), ("meter", 1e-3), ("mm", 1)])
def test_units_of_the_header(tmp_path, unit, scale):
    """1500 micron are 1.5 mm, as SimpleITK reads it."""
    affine = np.diag([1.5, 2.0, 3.0, 1])
    affine[:3, 3] = (-10, 20, 30)
    affine[:3] *= scale
    image = nib.Nifti1Image(np.zeros((4, 5, 6), np.uint8), affine)
    image.header.set_xyzt_units(unit)
    nib.save(image, tmp_path / "a.nii.gz")
    geometry = read_volume(tmp_path / "a.nii.gz").geometry
    np.testing.assert_allclose(geometry.spacing_mm, (3, 2, 1.5), rtol=1e-6)
    np.testing.assert_allclose(geometry.origin_mm, (-10, 20, 30), rtol=1e-6)
    other = sitk.ReadImage(str(tmp_path / "a.nii.gz"))
    np.testing.assert_allclose(other.GetSpacing()[::-1], geometry.spacing_mm, rtol=1e-6)
    np.testing.assert_allclose(other.GetOrigin(), (10, -20, 30), rtol=1e-6)  # LPS


@pytest.mark.parametrize("dtype", [">i2", ">f4", np.uint16, np.uint32, np.int64, np.float64])
def test_labels_of_every_type(tmp_path, dtype):
    labels = np.arange(60).reshape(3, 4, 5) % 7
    image = nib.Nifti1Image(labels.astype(dtype).transpose(), np.eye(4), dtype=np.dtype(dtype))
    nib.save(image, tmp_path / "a.nii.gz")
    array = read_labels(tmp_path / "a.nii.gz").array
    assert (array == labels).all()
    assert array.dtype.isnative


def test_huge_values_are_no_labels(tmp_path):
    array = np.zeros((2, 2, 2))
    array[0, 0, 0] = 3e10
    with pytest.raises(ValueError, match=r"values up to 3e\+10 are not labels"):
        read_labels(save(tmp_path / "a.nii.gz", array))


def test_nothing_half_written_is_left(tmp_path):
    with pytest.raises(ValueError, match="does not fit geometry"):
        write_nifti(tmp_path / "a.nii.gz", np.zeros((1, 1, 1)), GEOMETRY)
    array = np.zeros((3, 4, 5), np.int64)
    array[0, 0, 0] = 2**40
    with pytest.raises(ValueError, match="do not fit 32 bits"):
        write_nifti(tmp_path / "a.nii.gz", array, GEOMETRY)
    assert list(tmp_path.iterdir()) == []


def test_acdc_spacing_is_the_headers():
    """The affine of every ACDC file says 1 x 1 x 1 mm; the voxels measure 1.56 x 1.56 x 10."""
    folder = real_data("acdc") / "training" / "patient001"
    volume = read_labels(folder / "patient001_frame01_gt.nii.gz")
    assert volume.geometry.shape == (10, 256, 216)
    np.testing.assert_allclose(volume.geometry.spacing_mm, (10, 1.5625, 1.5625), atol=1e-3)
    assert "1, 1, 1" in volume.note.replace(")", "")
    assert [int((volume.array == k).sum()) for k in (1, 2, 3)] == [5723, 6728, 12104]


def test_odd_real_files():
    hippocampus = real_data("hippocampus") / "labelsTs" / "hippocampus_003.nii.gz"
    assert read_labels(hippocampus).array.dtype.kind == "i"  # stored as float32
    ct = read_labels(real_data("abdomen_ct") / "seg_512.nii.gz")  # has a header extension
    assert len(np.unique(ct.array)) == 32


def test_headers_that_every_reader_takes_alike(tmp_path):
    array = np.zeros((5, 4, 3), np.uint8)
    affine = np.diag([1.25, 1.5, 8.0, 1.0])
    path = tmp_path / "a.nii.gz"

    def write(change=lambda image: None, array=array):
        image = nib.Nifti1Image(array, affine)
        image.header.set_xyzt_units("mm")
        change(image)
        nib.save(image, path)
        return reads_alike(path)

    def zooms(image):
        image.set_sform(np.diag([1.0, 1.0, 1.0, 1.0]), 2)

    def other_qform(image):
        image.set_qform(np.diag([-1.25, -1.5, 8.0, 1.0]), 1)

    assert write()
    assert write(lambda image: image.set_qform(affine, 1))
    assert not write(zooms)
    assert not write(other_qform)
    assert not write(lambda image: image.header.set_xyzt_units("micron"))
    assert not write(lambda image: image.set_sform(None, 0))
    assert not write(array=array[..., None])
    assert not write(array=np.zeros((5, 4, 3, 2), np.uint8))

    def no_rotation(image):
        image.set_qform(affine, 1)
        image.header["quatern_b"] = 3

    assert not write(no_rotation)


def test_axes_are_brought_to_right_angles():
    """Sheared by a, the nearest right-angled axes are turned by a / 2 each."""
    shear = 2e-3
    direction = np.eye(3)
    direction[:2, 1] = np.sin(shear), np.cos(shear)
    geometry = replace(GEOMETRY, direction=direction)
    np.testing.assert_allclose(geometry.skew, np.sin(shear))
    squared = geometry.squared()
    assert squared.skew < 1e-12
    half = shear / 2
    expected = [[np.cos(half), np.sin(half)], [-np.sin(half), np.cos(half)]]
    np.testing.assert_allclose(squared.direction[:2, :2], expected, atol=1e-12)
    assert squared.spacing_mm == geometry.spacing_mm
    mirrored = replace(GEOMETRY, direction=np.diag([-1.0, 1.0, 1.0]) @ direction).squared()
    assert np.linalg.det(mirrored.direction) < 0

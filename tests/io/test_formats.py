"""What people have: every format read right, or refused with the reason."""

from __future__ import annotations

import gzip
import zlib

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from PIL import Image

from segcal.io.volumes import (
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
from tests.io.test_volumes import GEOMETRY

LABELS = np.random.default_rng(0).integers(0, 4, (5, 6, 9)).astype(np.uint8)
"""``(z, y, x)``, as all arrays here."""
FLIPPED = np.diag([-1.0, 1.0, 1.0, 1.0])
FLIPPED[0, 3] = 8


def two_forms(path, sform, sform_code, qform, qform_code, array=LABELS):
    image = nib.Nifti1Image(array.transpose(), np.eye(4))
    image.header.set_xyzt_units("mm")
    image.set_sform(sform, sform_code)
    image.set_qform(qform, qform_code)
    nib.save(image, path)
    return path


def by_itk(path, like, array=LABELS):
    """A prediction as tools of SimpleITK write it."""
    image = sitk.GetImageFromArray(array)
    image.CopyInformation(sitk.ReadImage(str(like)))
    sitk.WriteImage(image, str(path))
    return path


SHIFTED, SKEWED = np.eye(4), np.eye(4)
SHIFTED[2, 3] = 40
SKEWED[0, 1] = 0.2


@pytest.mark.parametrize("other", [FLIPPED, SHIFTED, SKEWED], ids=["flipped", "shifted", "skewed"])
@pytest.mark.parametrize("sform_code", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("qform_code", [0, 1, 2, 4])
def test_the_form_that_itk_takes(tmp_path, other, sform_code, qform_code):
    if sform_code and not qform_code and other is SKEWED:
        return  # ITK refuses those
    reference = two_forms(tmp_path / "r.nii.gz", other, sform_code, np.eye(4), qform_code)
    volume = read_labels(reference)
    image = sitk.ReadImage(str(reference))
    close = np.testing.assert_allclose
    close(np.multiply(volume.geometry.origin_mm, (-1, -1, 1)), image.GetOrigin(), atol=1e-6)
    lps = np.diag([-1, -1, 1]) @ volume.geometry.direction
    close(lps.ravel(), image.GetDirection(), atol=1e-6)
    both = bool(sform_code and qform_code)
    assert ("disagree" in volume.note) == both == ("disagree" in volume.geometry.conflict)
    if both:
        assert "as ITK does; rewrite the header" in volume.note
        assert not reads_alike(reference)


@pytest.mark.parametrize("sform_code", [1, 2, 3, 4])
@pytest.mark.parametrize("tool", ["SimpleITK", "nibabel", "nibabel with the header"])
def test_a_prediction_lies_on_its_reference_whatever_tool_wrote_it(tmp_path, sform_code, tool):
    """Label 9 x 6 x 5 whose sform is flipped in x and whose qform is the identity: DSC was 0."""
    reference = two_forms(tmp_path / "r.nii.gz", FLIPPED, sform_code, np.eye(4), 1)
    path = tmp_path / "p.nii.gz"
    if tool == "SimpleITK":
        by_itk(path, reference)
    else:
        like = nib.load(reference)
        header = like.header if tool != "nibabel" else None
        nib.save(nib.Nifti1Image(LABELS.transpose(), like.affine, header), path)
    at = read_geometry(reference)[0]
    assert check_place(path, at) == 1
    array, done = put_on(path, read_labels(path), at)
    np.testing.assert_array_equal(array, LABELS)
    assert done == ""


def test_a_turned_prediction_is_turned_by_the_form_that_itk_takes(tmp_path):
    reference = two_forms(tmp_path / "r.nii.gz", SHIFTED, 2, np.eye(4), 1)
    turned = sitk.Flip(sitk.ReadImage(str(reference)), (False, True, False))
    sitk.WriteImage(turned, str(tmp_path / "p.mha"))
    at = read_geometry(reference)[0]
    array, done = put_on(tmp_path / "p.mha", read_labels(tmp_path / "p.mha"), at)
    np.testing.assert_array_equal(array, LABELS)
    assert "re-ordered" in done


@pytest.mark.parametrize("reader", ["NibabelIOWithReorient", "SimpleITKIOWithReorient"])
def test_frames_of_readers_that_take_different_forms(tmp_path, reader):
    reference = two_forms(tmp_path / "r.nii.gz", FLIPPED, 2, np.eye(4), 1)
    geometry = read_geometry(reference)[0]
    canonical = nib.as_closest_canonical(nib.load(reference)).get_fdata().transpose()
    if reader.startswith("SimpleITK"):
        turned = sitk.DICOMOrient(sitk.ReadImage(str(reference)), "LPS")
        canonical = sitk.GetArrayFromImage(turned)[:, ::-1, ::-1]
    back = from_canonical(canonical[None], geometry, reader=reader)
    np.testing.assert_array_equal(back[0], LABELS)
    assert to_canonical(geometry, reader=reader).shape == canonical.shape


def written(path, labels=LABELS, **options):
    image = sitk.GetImageFromArray(labels)
    image.SetSpacing((1.25, 1.5, 8.0))
    image.SetOrigin((-10, 20, 30))
    sitk.WriteImage(image, str(path), **options)
    return path


def stream_of(path):
    """File and first byte of the compressed voxels."""
    if path.suffix == ".mhd":
        return path.with_suffix(".zraw"), 0
    if path.suffix == ".nhdr":
        return path.with_suffix(".raw.gz"), 0
    mark = b"ElementDataFile = LOCAL\n" if path.suffix == ".mha" else b"\n\n"
    content = path.read_bytes()
    return path, content.index(mark) + len(mark)


COMPRESSED = ["a.mha", "a.mhd", "a.nrrd", "a.nhdr"]


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_damaged_stream_is_refused(tmp_path, name):
    path = written(tmp_path / name, np.repeat(LABELS, 4, 0), useCompression=True)
    labels = read_labels(path).array
    np.testing.assert_array_equal(labels, np.repeat(LABELS, 4, 0))
    file, start = stream_of(path)
    whole = file.read_bytes()
    for position in range(start, len(whole), 7):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        try:  # a few bits of gzip's header mean nothing
            np.testing.assert_array_equal(read_labels(path).array, labels)
            assert position < start + 10
        except ValueError as error:
            assert f"{path}: cannot be read as a volume" in str(error)  # noqa: PT017
    for length in range(start, len(whole) - 1, 50):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cannot be read as a volume"):
            read_labels(path)
    file.write_bytes(whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:])
    with pytest.raises(ValueError, match="cannot be read as a volume"):
        read_labels(path)


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_stream_of_another_length_is_refused(tmp_path, name):
    path = written(tmp_path / name, useCompression=True)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(x for x in lines if not x.startswith(b"CompressedDataSize")))
    file, start = stream_of(path)
    head = file.read_bytes()[:start]
    packed = zlib.compress if name in ("a.mha", "a.mhd") else gzip.compress
    for content, message in (
        (LABELS.tobytes()[:-1], "ends after 269 of the 270 bytes"),
        (LABELS.tobytes() + b"x", "is longer than the 270 bytes"),
        (bytes(1 << 22), "is longer than the 270 bytes"),
    ):
        file.write_bytes(head + packed(content))
        with pytest.raises(ValueError, match=message):
            read_labels(path)
        assert read_geometry(path)[0].shape == (5, 6, 9)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])
@pytest.mark.parametrize("components", [1, 3])
def test_every_type_of_voxels_in_compressed_files(tmp_path, dtype, components):
    array = np.random.default_rng(0).integers(0, 100, (5, 6, 9, components)).astype(dtype)
    image = sitk.GetImageFromArray(array if components > 1 else array[..., 0], components > 1)
    for name in COMPRESSED:
        sitk.WriteImage(image, str(tmp_path / name), useCompression=True)
        read = read_volume(tmp_path / name).array
        expected = np.moveaxis(array, -1, 0) if components > 1 else array[..., 0]
        np.testing.assert_array_equal(read, expected)
        assert stored_axes(tmp_path / name) == (4 if components > 1 else 3)


def test_formats_of_volumes(tmp_path):
    """Each is written by a tool that people write it with, and lies where the NIfTI does."""
    nifti = written(tmp_path / "a.nii.gz")
    for name in ("a.mha", "a.mhd", "a.nrrd", "a.nhdr", "a.seg.nrrd", "a.gipl", "a.hdr"):
        written(tmp_path / name)
    image = nib.load(nifti)
    nib.save(nib.MGHImage(LABELS.transpose(), image.affine), tmp_path / "a.mgz")
    nib.save(nib.MGHImage(LABELS.transpose(), image.affine), tmp_path / "a.mgh")
    nib.save(nib.Nifti1Pair(LABELS.transpose(), image.affine), tmp_path / "b.hdr")
    nib.save(nib.Nifti1Pair(LABELS.transpose(), image.affine), tmp_path / "c.img.gz")
    at = read_geometry(nifti)[0]
    for name in (
        "a.mha", "a.mhd", "a.nrrd", "a.nhdr", "a.seg.nrrd", "a.hdr", "a.img", "a.mgz", "a.mgh",
        "b.hdr", "b.img", "c.hdr.gz", "c.img.gz",
    ):  # fmt: skip
        volume = read_labels(tmp_path / name)
        np.testing.assert_array_equal(volume.array, LABELS)
        assert volume.geometry.differences(at) == [], name
        assert check_place(tmp_path / name, at) == 1
        assert volume.note == "", name
    gipl = read_labels(tmp_path / "a.gipl")  # which keeps an origin, but no direction
    np.testing.assert_array_equal(gipl.array, LABELS)
    assert gipl.geometry.spacing_mm == at.spacing_mm
    (tmp_path / "b.img").unlink()
    with pytest.raises(ValueError, match=r"b\.hdr: cannot be read .* there is no b\.img beside it"):
        read_labels(tmp_path / "b.hdr")


def test_analyze_states_no_orientation(tmp_path):
    image = nib.AnalyzeImage(LABELS.transpose(), np.diag([1.25, 1.5, 8, 1]))
    nib.save(image, tmp_path / "a.hdr")
    volume = read_labels(tmp_path / "a.img")
    np.testing.assert_array_equal(volume.array, LABELS)
    assert volume.geometry.spacing_mm == (8.0, 1.5, 1.25)
    assert "states no orientation" in volume.note


def test_a_damaged_mgz_is_refused(tmp_path):
    nib.save(nib.MGHImage(LABELS.transpose(), np.eye(4)), tmp_path / "a.mgz")
    whole = (tmp_path / "a.mgz").read_bytes()
    for position in (len(whole) // 2, len(whole) - 7):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        (tmp_path / "a.mgz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.mgz: cannot be read as a volume"):
            read_labels(tmp_path / "a.mgz")


def test_a_nifti_by_the_name_of_a_gzip_and_the_other_way_round(tmp_path):
    write_nifti(tmp_path / "a.nii", LABELS, GEOMETRY_OF_LABELS)
    content = (tmp_path / "a.nii").read_bytes()
    (tmp_path / "plain.nii.gz").write_bytes(content)
    (tmp_path / "packed.nii").write_bytes(gzip.compress(content))
    for name in ("plain.nii.gz", "packed.nii"):
        np.testing.assert_array_equal(read_labels(tmp_path / name).array, LABELS)
        assert read_geometry(tmp_path / name)[0].shape == LABELS.shape
    assert not reads_alike(tmp_path / "plain.nii.gz")  # not by nibabel, which nnU-Net may use


def test_bytes_behind_the_voxels_are_left_out(tmp_path):
    write_nifti(tmp_path / "a.nii", LABELS, GEOMETRY_OF_LABELS)
    content = (tmp_path / "a.nii").read_bytes()
    (tmp_path / "b.nii").write_bytes(content + b"and more")
    (tmp_path / "c.nii.gz").write_bytes(gzip.compress(content + b"and more"))
    (tmp_path / "d.nii.gz").write_bytes(gzip.compress(content) + b"and more")
    for name in ("b.nii", "c.nii.gz", "d.nii.gz"):
        volume = read_labels(tmp_path / name)
        np.testing.assert_array_equal(volume.array, LABELS)
        assert "more data after the voxels" in volume.note
    padded = tmp_path / "e.nii.gz"
    padded.write_bytes(gzip.compress(content) + bytes(512))  # as tapes do
    assert read_labels(padded).note == ""
    damaged = bytearray(gzip.compress(content) + b"and more")
    damaged[-16] ^= 1  # of the checksum
    (tmp_path / "d.nii.gz").write_bytes(damaged)
    with pytest.raises(ValueError, match="CRC"):
        read_labels(tmp_path / "d.nii.gz")


@pytest.mark.parametrize("name", [*COMPRESSED, "a.seg.nrrd"])
@pytest.mark.parametrize("packed", [False, True])
def test_bytes_behind_the_voxels_of_itks_formats_are_told(tmp_path, name, packed):
    path = written(tmp_path / name, useCompression=packed)
    assert read_labels(path).note == ""
    voxels = next((p for p in tmp_path.iterdir() if p != path), path)
    with voxels.open("ab") as file:
        file.write(b"and more")
    volume = read_labels(path)
    np.testing.assert_array_equal(volume.array, LABELS)
    assert (
        volume.note
        == "holds more data after the voxels that its header describes, which is left out"
    )


@pytest.mark.parametrize("name", ["a.mha", "a.mhd"])
@pytest.mark.parametrize("kind", ["LONG", "ULONG"])
def test_a_metaimage_of_long_has_four_bytes_a_voxel(tmp_path, name, kind):
    """Of one with 8, which old programs wrote, ITK took every other half for a voxel."""
    for dtype in ("i4", "i8"):
        path = written(tmp_path / name, LABELS.astype(dtype))
        content = path.read_bytes()
        old = b"MET_INT" if dtype == "i4" else b"MET_LONG_LONG"
        path.write_bytes(content.replace(old, f"MET_{kind}".encode()))
        if dtype == "i4":
            np.testing.assert_array_equal(read_labels(path).array, LABELS)
    with pytest.raises(ValueError, match=f"8 bytes, but MET_{kind} means 4; state MET_{kind}_LONG"):
        read_labels(path)


GEOMETRY_OF_LABELS = type(GEOMETRY)(
    LABELS.shape, GEOMETRY.spacing_mm, GEOMETRY.origin_mm, GEOMETRY.direction
)


@pytest.mark.parametrize("code", range(256))
def test_units_of_any_code(tmp_path, code):
    write_nifti(tmp_path / "a.nii", LABELS, GEOMETRY_OF_LABELS)
    content = bytearray((tmp_path / "a.nii").read_bytes())
    content[123] = code
    (tmp_path / "a.nii").write_bytes(content)
    volume = read_labels(tmp_path / "a.nii")
    scale = {1: 1e3, 3: 1e-3}.get(code % 8, 1)
    np.testing.assert_allclose(volume.geometry.spacing_mm, np.multiply(GEOMETRY.spacing_mm, scale))
    assert ("unknown code" in volume.note) == (code % 8 > 3)
    assert read_geometry(tmp_path / "a.nii")[0].differences(volume.geometry) == []
    assert reads_alike(tmp_path / "a.nii") == (code % 8 in (0, 2))


PIXELS = LABELS[0]


@pytest.mark.parametrize("ending", ["png", "bmp", "tif", "tiff", "PNG"])
def test_images_are_label_maps_of_one_slice_in_pixels(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    Image.fromarray(PIXELS).save(path)
    volume = read_labels(path)
    np.testing.assert_array_equal(volume.array, PIXELS[None])
    assert volume.geometry.spacing_mm == (1, 1, 1)
    assert (volume.geometry.unit, volume.note) == ("px", "")
    assert stored_axes(path) == 3
    assert check_place(path, volume.geometry) == 1
    with pytest.raises(ValueError, match="unit px and mm"):
        check_place(path, GEOMETRY)


def test_modes_of_images(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(PIXELS).convert("P").save(path)  # as VOC's labels
    image = Image.fromarray(PIXELS, "L").convert("P")
    image.putdata(PIXELS.ravel().tolist())
    image.save(path)
    volume = read_labels(path)
    np.testing.assert_array_equal(volume.array[0], PIXELS)
    assert "palette" in volume.note
    Image.fromarray(PIXELS > 1).save(path)
    np.testing.assert_array_equal(read_labels(path).array[0], PIXELS > 1)
    Image.fromarray(PIXELS.astype(np.uint16) * 300).save(path)
    np.testing.assert_array_equal(read_labels(path).array[0], PIXELS.astype(int) * 300)
    Image.fromarray(PIXELS.astype(np.float32) / 3).save(tmp_path / "p.tif")
    np.testing.assert_array_equal(
        read_volume(tmp_path / "p.tif").array[0], PIXELS.astype(np.float32) / 3
    )
    colours = np.stack([PIXELS, PIXELS * 2, PIXELS * 3], -1)
    Image.fromarray(colours).save(path)
    np.testing.assert_array_equal(read_volume(path).array[:, 0], np.moveaxis(colours, -1, 0))
    for mode, ending in (("RGB", "png"), ("RGBA", "png"), ("LA", "png"), ("RGB", "bmp")):
        grey = tmp_path / f"g.{ending}"
        Image.fromarray(PIXELS).convert(mode).save(grey)
        volume = read_labels(grey)
        np.testing.assert_array_equal(volume.array[0], PIXELS)
        assert volume.note == "grey values saved as colours"
    red = np.stack([PIXELS // 2 * 255, PIXELS * 0, PIXELS * 0], -1)
    Image.fromarray(red).save(path)
    with pytest.raises(
        ValueError,
        match=r"a\.png: .* got 3 channels with 2 colours .*, e\.g\. 0 for \(0, 0, 0\), 1 for",
    ):
        read_labels(path)
    frames = [Image.fromarray(PIXELS)] * 3
    frames[0].save(tmp_path / "s.tif", save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match=r"s\.tif: .* 3 images in one file.* write it as a volume"):
        read_volume(tmp_path / "s.tif")


def test_a_damaged_png_is_refused(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(np.tile(PIXELS, (9, 9))).save(path)
    whole = path.read_bytes()
    for position in range(8, len(whole), 5):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        try:
            np.testing.assert_array_equal(read_volume(path).array[0], np.tile(PIXELS, (9, 9)))
            assert position >= len(whole) - 12  # in the mark of the end, which holds nothing
        except ValueError as error:
            assert f"{path}: cannot be read as a volume" in str(error)  # noqa: PT017


def test_segments_that_overlap_are_refused_in_words(tmp_path):
    layers = np.stack([LABELS, LABELS], -1)
    path = tmp_path / "a.seg.nrrd"
    sitk.WriteImage(sitk.GetImageFromArray(layers, True), str(path))
    with pytest.raises(ValueError, match=r"a\.seg\.nrrd: its segments overlap.* lie in 2 layers"):
        read_labels(path)


def box_of_segments(path, image, extent=True):
    """What 3D Slicer stores of a label map: the box of its foreground, and where the image lies."""
    index = np.argwhere(sitk.GetArrayFromImage(image))[:, ::-1]
    low, size = index.min(0), np.ptp(index, axis=0) + 1
    box = sitk.RegionOfInterest(image, size.tolist(), low.tolist())
    if extent:
        matrix = np.eye(4)
        matrix[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
        matrix[:3, 3] = image.GetOrigin()
        matrix[:2] *= -1
        ends = [n for length in image.GetSize() for n in (0, length - 1)]
        numbers = ";".join(map(str, [*matrix.ravel(), *ends]))
        said = f"Oversampling factor|1|What.&Reference image geometry|{numbers};|Which image.&"
        box.SetMetaData("Segmentation_ConversionParameters", said)
    sitk.WriteImage(box, str(path), useCompression=True)
    return path


def oblique(array):
    image = sitk.GetImageFromArray(array)
    image.SetSpacing((1.25, 1.5, 8.0))
    image.SetOrigin((-10, 20, 30))
    turn = sitk.Euler3DTransform()
    turn.SetRotation(0.1, -0.2, 0.3)
    image.SetDirection(turn.GetMatrix())
    return image


BOXED = np.zeros_like(LABELS)
BOXED[1:4, 2:5, 3:7] = LABELS[1:4, 2:5, 3:7] + 1


@pytest.mark.parametrize("extent", [True, False], ids=["image stated", "not stated"])
@pytest.mark.parametrize("turned", [False, True])
def test_segments_stored_as_their_box_are_put_into_the_image(tmp_path, extent, turned):
    image = oblique(BOXED)
    path = box_of_segments(tmp_path / "a.seg.nrrd", image, extent)
    sitk.WriteImage(sitk.DICOMOrient(image, "RPI") if turned else image, str(tmp_path / "r.nii.gz"))
    reference = read_labels(tmp_path / "r.nii.gz")
    assert stored_axes(path) == 3
    assert check_place(path, reference.geometry) == 1
    volume = read_labels(path)
    assert volume.array.shape == ((5, 6, 9) if extent else (3, 3, 4))
    array, done = put_on(path, volume, reference.geometry)
    np.testing.assert_array_equal(array, reference.array)
    assert ("re-ordered" in done) == turned
    if extent:
        np.testing.assert_array_equal(volume.array, BOXED)
        assert read_geometry(path)[0].differences(volume.geometry) == []


def test_segments_outside_of_the_image_are_refused(tmp_path):
    path = box_of_segments(tmp_path / "a.seg.nrrd", oblique(BOXED), extent=False)
    sitk.WriteImage(oblique(BOXED)[:, :, :3], str(tmp_path / "r.nrrd"))
    at = read_geometry(tmp_path / "r.nrrd")[0]
    with pytest.raises(ValueError, match=r"a\.seg\.nrrd: 12 voxels of its segments lie outside"):
        put_on(path, read_labels(path), at)
    moved = oblique(BOXED)
    moved.SetOrigin((-10.5, 20, 30))
    sitk.WriteImage(moved, str(tmp_path / "r.nrrd"))
    with pytest.raises(ValueError, match=r"a\.seg\.nrrd: does not lie on the reference: size"):
        check_place(path, read_geometry(tmp_path / "r.nrrd")[0])


@pytest.mark.parametrize("said", ["1;2;3;", "x;", ";".join(["nan"] * 22), "0;" * 22, "1e9;" * 22])
def test_an_image_that_a_header_states_wrongly_is_not_believed(tmp_path, said):
    path = box_of_segments(tmp_path / "a.seg.nrrd", oblique(BOXED), extent=False)
    image = sitk.ReadImage(str(path))
    image.SetMetaData("Segmentation_ConversionParameters", f"Reference image geometry|{said}|.&")
    sitk.WriteImage(image, str(path))
    assert read_labels(path).array.shape == (3, 3, 4)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("a.mha", b"NDims = 3", b"NDims = 99999999999999999999", "expected NDims of 1 to 9"),
        ("a.mhd", b"NDims = 3", b"NDims = 99999999999999999999", "expected NDims of 1 to 9"),
        ("a.nrrd", b"sizes: 9", b"[" * 3000 + b" 9", "a line of 3006 bytes in its header"),
        ("a.nhdr", b"sizes: 9", b"[" * 3000 + b" 9", "a line of 3006 bytes in its header"),
        ("a.gipl", b"", b"", "ends after 269 of the 270 bytes"),
    ],
)
def test_headers_that_itk_dies_of_are_refused(tmp_path, name, old, new, message):
    """The process was gone, without a word; a short GIPL was read with other values."""
    path = written(tmp_path / name)
    content = path.read_bytes()
    path.write_bytes(content.replace(old, new) if old else content[:-1])
    with pytest.raises(ValueError, match=message):
        read_volume(path)
    if old:
        with pytest.raises(ValueError, match=message):
            read_geometry(path)

"""Values and headers of volumes, format by format.

NIfTI (also as ``.hdr`` and ``.img``, and Analyze) and FreeSurfer's ``.mgz`` are read by nibabel,
PNG, BMP, TIF and JPEG by Pillow, others (MetaImage, NRRD, GIPL) by SimpleITK. Arrays and shapes are
in the order of the file, ``(x, y, z, ...)``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import nibabel as nib
import nibabel.volumeutils
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from segcal.io.files import is_image, is_segmentation, read_exactly
from segcal.io.streams import check_header, check_stream, count_behind, is_gzip, open_unpacked

Array = NDArray[Any]
Affine = NDArray[np.float64]
NIFTI = (".nii", ".nii.gz", ".hdr", ".img", ".hdr.gz", ".img.gz")
MGH = (".mgz", ".mgh")
NIFTI_HEADERS = {348: nib.Nifti1Header, 540: nib.Nifti2Header}
MM_PER_UNIT = {0: 1.0, 1: 1e3, 2: 1.0, 3: 1e-3}
"""Scale to mm by NIfTI's code of the unit: unknown, m, mm, um."""
UNIT_BITS = 7
BEHIND = "holds more data after the voxels that its header describes, which is left out"
CONVERSION = "Segmentation_ConversionParameters"
"""Entry in the header of 3D Slicer's segments."""
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
"""Affine of SimpleITK where a file states no orientation."""


@dataclass(frozen=True)
class Frame:
    """What a header says about the grid of the voxels.

    Attributes:
        spacing: voxel size along x, y, z, or fewer axes, in `unit`.
        affines: affines from indices to RAS, by the part of the header that states them; for a
            NIfTI, ``sform`` and ``qform``. Empty if the header states no orientation.
        sform_code: ``sform_code`` of a NIfTI.
        unit: ``mm``, or ``px`` for images, which state no size.
        notes: what is unusual about the header.
        image: shape ``(x, y, z)`` and affine of the image that this box is cut from, if stated.
    """

    spacing: list[float]
    affines: Mapping[str, Affine] = field(default_factory=dict)
    sform_code: int = 0
    unit: str = "mm"
    notes: tuple[str, ...] = ()
    image: tuple[tuple[int, ...], Affine] | None = None


def read_file(path: Path) -> tuple[Array, Frame]:
    """Read the values and the header of a file, which is checked to its end.

    Raises:
        Exception: whatever a damaged file makes the readers raise.
    """
    if path.name.endswith(NIFTI):
        return _read_nifti(path)
    if path.name.endswith(MGH):
        return _read_mgh(path)
    if is_image(path):
        return _read_image(path)
    return _read_itk(path)


def read_header(path: Path) -> tuple[tuple[int, ...], Frame]:
    """Read the shape ``(x, y, z, ...)`` and the rest of the header of a file.

    Raises:
        Exception: as :func:`read_file`; damage after the header is not noticed.
    """
    if path.name.endswith(NIFTI):
        with open_unpacked(_beside(path, ".hdr")) as file:
            header, shape = _nifti_header(file)
        return shape, _nifti_frame(header)
    if path.name.endswith(MGH):
        with open_unpacked(path) as file:
            image = nib.MGHImage.from_stream(file)
        return image.shape, _mgh_frame(image)
    if is_image(path):
        with Image.open(path) as image:
            _check_single(image)
            bands = len(image.getbands())
            return (*image.size, *((1, bands) if bands > 1 else ())), Frame([1.0, 1.0], unit="px")
    shape, frame, _ = _itk_header(path)
    return shape, frame


def stored_type(path: Path) -> np.dtype[Any]:
    """Data type of the values of a file, by its header; float64 if the header scales them.

    Raises:
        Exception: as :func:`read_header`.
    """
    if path.name.endswith(NIFTI):
        with open_unpacked(_beside(path, ".hdr")) as file:
            header, _ = _nifti_header(file)
        scaled = header.get_slope_inter() not in ((None, None), (1.0, 0.0))
        return np.dtype(np.float64) if scaled else header.get_data_dtype()
    if path.name.endswith(MGH):
        with open_unpacked(path) as file:
            return nib.MGHImage.from_stream(file).get_data_dtype()
    if is_image(path):
        with Image.open(path) as image:
            wide = {"F": np.float32, "I": np.int32}
            return np.dtype(wide.get(image.mode, np.uint16 if "16" in image.mode else np.uint8))
    kind = _itk().GetPixelIDValueAsString(_itk_reader(path).GetPixelID())
    letter = "f" if "float" in kind else "u" if "unsigned" in kind else "i"
    return np.dtype(f"{letter}{_bits(kind) // 8}")


def write_image(path: Path, array: Array) -> None:
    """Write ``(y, x)`` of uint8, uint16 or float32 in the image format that the name ends with.

    Raises:
        OSError: the format cannot hold the type.
    """
    Image.fromarray(array).save(path)


def agrees(path: Path) -> bool:
    """Whether every reader finds the same grid in a NIfTI as segcal does.

    They do if the header has three axes, in mm, and states one orientation, whose affine has the
    header's voxel size. For other files, nnU-Net's readers fail or find another grid.
    """
    with open_unpacked(path) as file:
        header, shape = _nifti_header(file)
    frame = _nifti_frame(header)
    stated = list(frame.affines.values())
    return (
        len(shape) == 3
        and path.name.endswith(".gz") == is_gzip(path)
        and MM_PER_UNIT.get(_unit_code(header)) == 1.0
        and not frame.notes
        and len(stated) > 0
        and all(np.allclose(affine, stated[0], rtol=0, atol=1e-4) for affine in stated)
        and np.allclose(np.linalg.norm(stated[0][:3, :3], axis=0), header.get_zooms(), rtol=1e-4)
    )


def _beside(path: Path, ending: str) -> Path:
    """The ``.hdr`` or ``.img`` of a NIfTI in two files; `path` itself for a NIfTI in one."""
    if path.name.endswith((".nii", ".nii.gz")):
        return path
    stem = re.sub(r"\.(hdr|img)(\.gz)?$", "", path.name)
    found = [path.with_name(f"{stem}{ending}{packed}") for packed in ("", ".gz")]
    other = next((one for one in found if one.is_file()), None)
    if other is None:
        raise ValueError(f"a NIfTI in two files, but there is no {found[0].name} beside it")
    return other


def _nifti_header(file: IO[bytes]) -> tuple[Any, tuple[int, ...]]:
    """Header at the beginning of a file, and the shape it states."""
    start = file.read(4)
    sizes = (int.from_bytes(start, "little"), int.from_bytes(start, "big"))
    size = next((n for n in sizes if n in NIFTI_HEADERS), None)
    if size is None:
        raise ValueError("no NIfTI header")
    content = start + read_exactly(file, size - 4).tobytes()
    analyze = size == 348 and content[344:348] == bytes(4)
    header = (nib.Spm99AnalyzeHeader if analyze else NIFTI_HEADERS[size])(content)
    shape = tuple(int(n) for n in header.get_data_shape())
    if min(shape, default=0) < 1:
        raise ValueError(f"a header of shape {shape}, which holds no voxels")
    return header, shape


def _read_nifti(path: Path) -> tuple[Array, Frame]:
    with open_unpacked(_beside(path, ".hdr")) as file:
        header, shape = _nifti_header(file)
    frame, dtype, offset = (
        _nifti_frame(header), header.get_data_dtype(), int(header.get_data_offset()),
    )  # fmt: skip
    voxels, size = _beside(path, ".img"), math.prod(shape) * dtype.itemsize
    if is_gzip(voxels):
        with open_unpacked(voxels) as file:
            file.seek(offset)
            raw = read_exactly(file, size).view(dtype).reshape(shape, order="F")
            behind = count_behind(file, offset + size)
    else:
        raw = np.memmap(voxels, dtype, "c", offset, shape, order="F")
        behind = voxels.stat().st_size - offset - size
    if behind:
        frame = replace(frame, notes=(*frame.notes, BEHIND))
    slope, inter = header.get_slope_inter()
    return nib.volumeutils.apply_read_scaling(raw, slope, inter), frame


def _unit_code(header: Any) -> int:
    return int(header["xyzt_units"]) & UNIT_BITS


def _nifti_frame(header: Any) -> Frame:
    if isinstance(header, nib.Spm99AnalyzeHeader):
        return Frame([float(s) for s in header.get_zooms()[:3]])
    notes = []
    scale = MM_PER_UNIT.get(_unit_code(header))
    if scale is None:
        notes.append(
            f"states a unit of length with the unknown code {_unit_code(header)}, read as mm"
        )
        scale = 1.0
    affines = {}
    if header["sform_code"] > 0:
        affines["sform"] = header.get_sform()
    if header["qform_code"] > 0:
        try:
            affines["qform"] = header.get_qform()
        except ValueError:  # a quaternion that is none
            if not affines:
                raise
            notes.append("its qform is not a rotation; the sform is used")
    for affine in affines.values():
        affine[:3] *= scale
    spacing = [scale * float(s) for s in header.get_zooms()[:3]]
    return Frame(spacing, affines, int(header["sform_code"]), notes=tuple(notes))


def _read_mgh(path: Path) -> tuple[Array, Frame]:
    with open_unpacked(path) as file:
        image = nib.MGHImage.from_stream(file)
        array = np.asanyarray(image.dataobj)
        count_behind(file, array.nbytes)
    return array, _mgh_frame(image)


def _mgh_frame(image: Any) -> Frame:
    stated = {"affine": np.array(image.affine)} if image.header["goodRASFlag"] > 0 else {}
    return Frame([float(s) for s in image.header.get_zooms()[:3]], stated)


def _check_single(image: Image.Image) -> None:
    if (frames := getattr(image, "n_frames", 1)) > 1:
        raise ValueError(
            f"{frames} images in one file, expected one; a stack of images does not state the "
            "distance between slices: write it as a volume with its spacing, .nii.gz or .nrrd, or "
            "write each image to a file of its own"
        )


def _read_image(path: Path) -> tuple[Array, Frame]:
    """Read a 2-D image; colours become channels, and an image with a palette gives its indices."""
    with Image.open(path) as image:
        image.verify()  # the checksums, which reading alone passes over
    with Image.open(path) as image:
        _check_single(image)
        array = np.array(image)  # which can be written to, as torch wants it
        notes = ("read as the indices of its palette",) if image.mode == "P" else ()
    frame = Frame([1.0, 1.0], unit="px", notes=notes)
    return array.transpose(1, 0, 2)[:, :, None] if array.ndim > 2 else array.transpose(), frame


def _read_itk(path: Path) -> tuple[Array, Frame]:
    _, frame, size = _itk_header(path)
    if check_stream(path, size):
        frame = replace(frame, notes=(*frame.notes, BEHIND))
    sitk = _itk()
    image = sitk.ReadImage(str(path))
    array = sitk.GetArrayFromImage(image)
    if image.GetNumberOfComponentsPerPixel() > 1:  # stored last: make them the slowest axis
        array = np.moveaxis(array, -1, 0)
    return array.transpose(), frame


def _itk() -> Any:
    """SimpleITK, which is imported when a file needs it: its library is large, most are NIfTI."""
    import SimpleITK

    return SimpleITK


def _itk_reader(path: Path) -> Any:
    """ITK's reader of a file, which has read the header."""
    check_header(path)
    reader = _itk().ImageFileReader()
    reader.SetFileName(str(path))
    reader.ReadImageInformation()
    return reader


def _itk_header(path: Path) -> tuple[tuple[int, ...], Frame, int]:
    """Shape, frame, and number of bytes of the voxels."""
    reader = _itk_reader(path)
    components = reader.GetNumberOfComponents()
    shape = (*reader.GetSize(), *((components,) if components > 1 else ()))
    kind = _itk().GetPixelIDValueAsString(reader.GetPixelID())
    itemsize = _bits(kind) // 8 * (2 if "complex" in kind else 1)
    d = reader.GetDimension()
    axes = min(d, 3)
    affine = np.eye(4)
    direction = np.asarray(reader.GetDirection()).reshape(d, d)[:axes, :axes]
    affine[:axes, :axes] = direction * np.asarray(reader.GetSpacing()[:axes])
    affine[:axes, 3] = reader.GetOrigin()[:axes]
    affine[:2] *= -1  # LPS to RAS
    image = _segmented_image(reader) if is_segmentation(path) else None
    frame = Frame(list(reader.GetSpacing()), {"header": affine}, image=image)
    return shape, frame, math.prod(shape) * itemsize


def _bits(kind: str) -> int:
    """Bits of a number of one of ITK's types, by its name."""
    bits = re.search(r"(\d+)-bit", kind)
    return int(bits[1]) if bits else 8


def _segmented_image(reader: Any) -> tuple[tuple[int, ...], Affine] | None:
    """Grid of the image that 3D Slicer's segments belong to; the file holds only the box they fill.

    The header states it as the 16 numbers of the affine (RAS) and each axis's first and last index.
    """
    if not reader.HasMetaDataKey(CONVERSION):
        return None
    match = re.search(r"Reference image geometry\|([^|]*)\|", reader.GetMetaData(CONVERSION))
    try:
        numbers = np.array([float(n) for n in match[1].split(";") if n] if match else [])
    except ValueError:
        return None
    if len(numbers) != 22 or not np.isfinite(numbers).all():
        return None
    affine, ends = numbers[:16].reshape(4, 4), numbers[16:].reshape(3, 2)
    affine[:3, 3] += affine[:3, :3] @ ends[:, 0]
    return tuple(int(n) + 1 for n in ends[:, 1] - ends[:, 0]), affine

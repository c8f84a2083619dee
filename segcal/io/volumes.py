"""Volumes: label maps, images and probability maps as arrays, with their geometry.

Arrays are ``(z, y, x)`` (the order of SimpleITK and nnU-Net), affines map ``(x, y, z)`` indices to
RAS millimetres (nibabel's). Spacing is the header's voxel size in its unit, which is what SimpleITK
uses too: ACDC's affines, for one, say 1 mm while the voxels measure 1.4 x 1.4 x 10 mm. A NIfTI
that states no orientation (both codes 0) gets SimpleITK's: identity in LPS, origin 0.
"""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import nibabel as nib
import nibabel.orientations
import nibabel.volumeutils
import numpy as np
import SimpleITK as sitk  # noqa: N813 - as everybody writes it
from numpy.typing import NDArray

from segcal.io.files import read_exactly, whole_file

Array = NDArray[Any]
LABEL_ROUNDING = 0.05
"""Label values this near an integer are rounded to it (scaled headers give 2.0235 for 2)."""
NIFTI = (".nii", ".nii.gz")
MM_PER_UNIT = {"mm": 1.0, "micron": 1e-3, "meter": 1e3, "unknown": 1.0}
NIFTI_HEADERS = {348: nib.Nifti1Header, 540: nib.Nifti2Header}
SINGULAR = 1e-6
"""Determinant of the unit axes below which they span no volume."""
SKEWED = 1e-3
"""Cosine between two axes from which a grid is noted as not rectangular."""


@dataclass(frozen=True)
class Geometry:
    """Where a grid of voxels lies in the patient.

    Attributes:
        shape: ``(z, y, x)``.
        spacing_mm: voxel size ``(z, y, x)``.
        origin_mm: RAS position of voxel (0, 0, 0), in x, y, z.
        direction: unit vectors of the x, y, z index axes as columns ``(3, 3)``, RAS; at right
            angles unless the file is sheared.
        stated: whether the file states an orientation; nibabel and SimpleITK make up different
            ones where it does not.
    """

    shape: tuple[int, ...]
    spacing_mm: tuple[float, ...]
    origin_mm: tuple[float, float, float]
    direction: NDArray[np.float64]
    stated: bool = True

    @property
    def affine(self) -> NDArray[np.float64]:
        """Affine ``(4, 4)`` from x, y, z indices to RAS mm, with the true spacing."""
        affine = np.eye(4)
        affine[:3, :3] = self.direction * np.asarray(self.spacing_mm[::-1])
        affine[:3, 3] = self.origin_mm
        return affine

    @property
    def skew(self) -> float:
        """Largest cosine between two axes: 0 where they are at right angles."""
        return float(np.abs(self.direction.T @ self.direction - np.eye(3)).max())

    def squared(self) -> Geometry:
        """Geometry with the nearest axes at right angles."""
        u, _, v = np.linalg.svd(self.direction)
        return replace(self, direction=u @ v)

    def differences(self, other: Geometry, tolerance: float = 1e-2) -> list[str]:
        """Sentences on what differs from `other`, by more than `tolerance` of a voxel.

        Directions are compared by the angle at which the far corner has moved that much.
        """
        if self.shape != other.shape:
            return [f"size (z, y, x) {self.shape} and {other.shape}"]
        found = []
        spacing = np.asarray(self.spacing_mm)
        if np.any(np.abs(spacing - other.spacing_mm) * self.shape > tolerance * spacing):
            found.append(f"spacing (z, y, x) {_mm(self.spacing_mm)} and {_mm(other.spacing_mm)} mm")
        moved = float(np.linalg.norm(np.subtract(self.origin_mm, other.origin_mm)))
        if moved > tolerance * spacing.min():
            found.append(
                f"origin {_mm(self.origin_mm)} and {_mm(other.origin_mm)} mm, {moved:.4g} mm apart"
            )
        turned = float(np.abs(self.direction - other.direction).max())
        if turned * max(self.shape) > tolerance:
            cosine = np.clip((self.direction * other.direction).sum(0), -1, 1)
            found.append(f"direction, by {np.degrees(np.arccos(cosine)).max():.3g} degrees")
        return found

    def reordered(self, orientation: NDArray[Any]) -> Geometry:
        """Geometry of the same voxels when nibabel re-orders their x, y, z axes that way."""
        size = self.shape[::-1]
        affine = self.affine @ nib.orientations.inv_ornt_aff(orientation, size)
        order = np.argsort(orientation[:, 0])
        spacing = np.asarray(self.spacing_mm[::-1])[order]
        return replace(
            self,
            shape=tuple(int(size[i]) for i in order[::-1]),
            spacing_mm=tuple(spacing[::-1].tolist()),
            origin_mm=tuple(affine[:3, 3].tolist()),
            direction=affine[:3, :3] / spacing,
        )


@dataclass(frozen=True)
class Volume:
    """An array and where it lies.

    Attributes:
        array: ``(z, y, x)``, or ``(K, z, y, x)`` of a 4-D file.
        geometry: of the spatial axes.
        note: what is odd about the file and was decided; empty if nothing is.
    """

    array: Array
    geometry: Geometry
    note: str = ""


def read_volume(path: Path) -> Volume:
    """Read a 2-D, 3-D or 4-D file (NIfTI by nibabel, other formats by SimpleITK).

    Trailing axes of length 1 are dropped; a 2-D image gets a z axis of length 1 (spacing 1 mm); a
    fourth axis comes first in the array.

    Raises:
        ValueError: not a file that can be read, or a shape that is no volume.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        if path.name.endswith(NIFTI):
            array, spacing, affine, stated = _read_nifti(path)
        else:
            (array, spacing, affine), stated = _read_sitk(path), True
    except Exception as error:  # noqa: BLE001 - a damaged file fails anywhere in the readers
        raise _unreadable(path, error) from None
    array = array.reshape(_significant(array.shape))
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.ndim == 2:
        array = array[:, :, None]
    geometry, note = _geometry(path, array.shape, spacing, affine, stated)
    return Volume(array.transpose(), geometry, note)


def read_geometry(path: Path) -> tuple[Geometry, int]:
    """Where a file's grid lies, and the size of its fourth axis (1 without), from the header alone.

    Raises:
        ValueError: as :func:`read_volume`, but for damage behind the header.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        if path.name.endswith(NIFTI):
            with _open_nifti(path) as file:
                header, shape = _nifti_header(file)
            spacing, affine, stated = _nifti_frame(header)
        else:
            (shape, spacing, affine), stated = _sitk_header(path), True
    except Exception as error:  # noqa: BLE001 - as above
        raise _unreadable(path, error) from None
    shape = _significant(shape)
    shape = (*shape, 1) if len(shape) == 2 else shape
    geometry, _ = _geometry(path, shape, spacing, affine, stated)
    return geometry, shape[3] if len(shape) > 3 else 1


def _geometry(
    path: Path,
    shape: tuple[int, ...],
    spacing: list[float],
    affine: NDArray[np.float64],
    stated: bool,
) -> tuple[Geometry, str]:
    """Geometry of a grid of ``shape`` (x, y, z, ...), and what is odd about it."""
    if not 3 <= len(shape) <= 4:
        raise ValueError(f"{path}: expected 2 to 4 axes, got shape {shape}")
    spacing = [abs(float(s)) for s in [*spacing, 1.0][:3]]
    if not all(np.isfinite(s) and s > 0 for s in spacing):
        raise ValueError(f"{path}: voxel sizes {spacing} mm are not all positive")
    norms = np.linalg.norm(affine[:3, :3], axis=0)
    if (
        not np.all(np.isfinite(affine))
        or np.any(norms == 0)
        or abs(np.linalg.det(affine[:3, :3] / norms)) < SINGULAR
    ):
        raise ValueError(f"{path}: its affine is singular; repair the header")
    geometry = Geometry(
        shape=tuple(shape[2::-1]),
        spacing_mm=tuple(spacing[::-1]),
        origin_mm=(float(affine[0, 3]), float(affine[1, 3]), float(affine[2, 3])),
        direction=affine[:3, :3] / norms,
        stated=stated,
    )
    notes = (
        [] if stated else ["states no orientation; identity in LPS is assumed, as SimpleITK does"]
    )
    if stated and not np.allclose(norms, spacing, rtol=1e-2):
        notes.append(
            f"voxel size {_mm(tuple(spacing))} mm in the header, {_mm(tuple(norms))} mm in the "
            "affine (x, y, z); the header's is used"
        )
    if geometry.skew > SKEWED:
        angle = 90 - np.degrees(np.arcsin(min(geometry.skew, 1)))
        notes.append(
            f"its axes are {angle:.4g} instead of 90 degrees "
            "apart; distances in mm are computed as if they were at right angles"
        )
    return geometry, "; ".join(notes)


def find_orientation(
    path: Path, geometry: Geometry, reference: Geometry, tolerance: float = 1e-2
) -> NDArray[Any] | None:
    """How the axes of a file must be re-ordered to be the reference's; None if they are.

    Only permutations and flips are considered, and only if both files state an orientation.

    Returns:
        orientation as nibabel's ``apply_orientation`` takes it, or None.

    Raises:
        ValueError: the voxels lie elsewhere, which is said in numbers.
    """
    orientation = nib.orientations.io_orientation(_turn(geometry, reference))
    same = np.array_equal(orientation, [[0, 1], [1, 1], [2, 1]])
    if same or not (geometry.stated and reference.stated) or np.isnan(orientation).any():
        if found := geometry.differences(reference, tolerance):
            raise ValueError(f"{path}: does not lie on the reference: {'; '.join(found)}")
        return None
    if found := geometry.reordered(orientation).differences(reference, tolerance):
        raise ValueError(
            f"{path}: does not lie on the reference, not even with its axes in the same order: "
            f"{'; '.join(found)}"
        )
    return orientation


def check_place(path: Path, reference: Geometry, tolerance: float = 1e-2) -> int:
    """Check from the header that a file lies on the reference, if need be with axes re-ordered.

    Returns:
        size of its fourth axis, 1 without.

    Raises:
        ValueError: as :func:`read_geometry` and :func:`find_orientation`.
    """
    geometry, channels = read_geometry(path)
    find_orientation(path, geometry, reference, tolerance)
    return channels


def put_on(
    path: Path, volume: Volume, reference: Geometry, tolerance: float = 1e-2
) -> tuple[Array, str]:
    """The array of a volume on the reference's grid, and what was done to it (mostly nothing).

    Raises:
        ValueError: as :func:`find_orientation`.
    """
    orientation = find_orientation(path, volume.geometry, reference, tolerance)
    if orientation is None:
        return volume.array, ""
    codes = ["".join(nib.orientations.aff2axcodes(g.affine)) for g in (volume.geometry, reference)]
    note = f"stored as {codes[0]}, re-ordered to the reference's {codes[1]}"
    return _reorder(volume.array, orientation), note


def stored_axes(path: Path) -> int:
    """Number of axes of a file, as :func:`read_volume` would give it, from the header alone.

    Raises:
        ValueError: not a file that can be read.
    """
    _, channels = read_geometry(path)
    return 3 if channels == 1 else 4


def stores_bytes(path: Path) -> bool:
    """Whether a file's values are bytes as they are, by its header; False if that is not known."""
    try:
        if path.name.endswith(NIFTI):
            header = cast(Any, nib.load(path)).header
            plain = header.get_slope_inter() in ((None, None), (1.0, 0.0))
            return plain and header.get_data_dtype() == np.uint8
        reader = sitk.ImageFileReader()
        reader.SetFileName(str(path))
        reader.ReadImageInformation()
        return reader.GetPixelID() in (sitk.sitkUInt8, sitk.sitkVectorUInt8)
    except Exception:  # noqa: BLE001 - what reads the file says what is wrong with it
        return False


def read_labels(path: Path) -> Volume:
    """Read a label map ``(z, y, x)``; the array is of an integer type.

    Values stored as floats, or scaled by the header, are rounded when they lie within 0.05 of an
    integer.

    Raises:
        ValueError: as :func:`read_volume`; 4-D; values that are no labels.
    """
    return to_labels(path, read_volume(path))


def to_labels(path: Path, volume: Volume) -> Volume:
    """The label map of a volume read from `path`, see :func:`read_labels`.

    Raises:
        ValueError: 4-D; values that are no labels.
    """
    array = volume.array
    if array.ndim != 3:
        raise ValueError(
            f"{path}: expected a 3-D label map, got shape {array.shape[::-1]} (x, y, z, ...)"
        )
    if array.dtype.kind == "f":
        rounded = np.rint(array)
        with np.errstate(invalid="ignore"):
            off = ~(np.abs(array - rounded) <= LABEL_ROUNDING)  # NaN is off, too
        if off.any():
            raise ValueError(
                f"{path}: {np.count_nonzero(off)} voxels are no labels, e.g. "
                f"{array[off][:3].tolist()}; resample label maps with nearest neighbours"
            )
        if array.size and np.abs(rounded).max() > np.iinfo(np.int32).max:
            raise ValueError(f"{path}: values up to {np.abs(rounded).max():.3g} are no labels")
        array = rounded.astype(np.int32)
    elif array.dtype.kind not in "iub":
        raise ValueError(f"{path}: expected labels, got values of type {array.dtype}")
    elif array.dtype.kind == "b":
        array = array.astype(np.uint8)
    return Volume(np.ascontiguousarray(array), volume.geometry, volume.note)


def reads_alike(path: Path) -> bool:
    """Whether every reader takes a NIfTI's grid for what :func:`read_geometry` says.

    They do where the header has three axes, in mm, and states one orientation, whose affine has
    the header's voxel size. nnU-Net's readers fail, or differ, in other files.
    """
    with _open_nifti(path) as file:
        header, shape = _nifti_header(file)
    try:
        stated = [
            affine
            for affine in (header.get_sform(coded=True)[0], header.get_qform(coded=True)[0])
            if affine is not None
        ]
    except ValueError:  # a quaternion that is none
        return False
    return (
        len(shape) == 3
        and header.get_xyzt_units()[0] in ("mm", "unknown")
        and len(stated) > 0
        and all(np.allclose(affine, stated[0], rtol=0, atol=1e-4) for affine in stated)
        and np.allclose(np.linalg.norm(stated[0][:3, :3], axis=0), header.get_zooms(), rtol=1e-4)
    )


def from_canonical(array: Array, geometry: Geometry, *, reader: str) -> Array:
    """Turn ``(..., z, y, x)`` of a RAS-reoriented grid into the grid of `geometry`.

    nnU-Net's ``*WithReorient`` readers bring every image to RAS before anything else, and save
    probabilities in that frame.

    Args:
        array: what the reader's frame holds.
        geometry: of the file.
        reader: name of nnU-Net's reader; nibabel's takes a file that states no orientation for
            LAS, SimpleITK's for LPS.
    """
    to_canonical = _to_canonical(geometry, reader)
    back = nib.orientations.ornt_transform(nib.orientations.axcodes2ornt("RAS"), to_canonical)
    return _reorder(array, back)


def to_canonical(geometry: Geometry, *, reader: str) -> Geometry:
    """Geometry of a grid in the frame of :func:`from_canonical`."""
    return geometry.reordered(_to_canonical(geometry, reader))


def _to_canonical(geometry: Geometry, reader: str) -> NDArray[Any]:
    affine = geometry.affine
    if not geometry.stated and reader.startswith("Nibabel"):
        affine = np.diag([-1.0, 1.0, 1.0, 1.0])
    orientation: NDArray[Any] = nib.orientations.io_orientation(affine)
    return orientation


def _turn(geometry: Geometry, reference: Geometry) -> NDArray[np.float64]:
    """Affine from unit steps along a grid's axes to unit steps along the reference's."""
    turn = np.eye(4)
    turn[:3, :3] = np.linalg.solve(reference.direction, geometry.direction)
    return turn


def _reorder(array: Array, orientation: NDArray[Any]) -> Array:
    """View of ``(..., z, y, x)`` with its axes re-ordered."""
    return nib.orientations.apply_orientation(array.transpose(), orientation).transpose()


def write_nifti(path: Path, array: Array, geometry: Geometry) -> None:
    """Write ``(z, y, x)`` or ``(K, z, y, x)`` as NIfTI, whole or not at all.

    Integers are stored in the smallest of uint8, uint16, int16, int32 that holds them, floats as
    float32, without scaling.

    Raises:
        ValueError: shape other than that of `geometry`.
    """
    if array.shape[-3:] != geometry.shape:
        raise ValueError(f"{path}: array {array.shape} does not fit geometry {geometry.shape}")
    data = array.transpose()
    dtype = _label_type(path, data) if data.dtype.kind in "iub" else np.float32
    image = nib.Nifti1Image(np.ascontiguousarray(data, dtype=dtype), geometry.affine)
    image.header.set_xyzt_units("mm")
    with whole_file(path) as temporary:
        nib.save(image, temporary)


def _significant(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape (x, y, z, ...) without axes of length 1 behind the third."""
    return shape[:3] + tuple(n for n in shape[3:] if n != 1)


def _unreadable(path: Path, error: Exception) -> ValueError:
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
    return ValueError(f"{path}: cannot be read as a volume ({reason})")


def _open_nifti(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _nifti_header(file: IO[bytes]) -> tuple[Any, tuple[int, ...]]:
    """Header at the beginning of a file, and the shape it states."""
    start = file.read(4)
    sizes = (int.from_bytes(start, "little"), int.from_bytes(start, "big"))
    size = next((n for n in sizes if n in NIFTI_HEADERS), None)
    if size is None:
        raise ValueError("no NIfTI header")
    header = NIFTI_HEADERS[size](start + read_exactly(file, size - 4).tobytes())
    shape = tuple(int(n) for n in header.get_data_shape())
    if min(shape, default=0) < 1:
        raise ValueError(f"a header of shape {shape}, which holds no voxels")
    return header, shape


def _read_nifti(path: Path) -> tuple[Array, list[float], NDArray[np.float64], bool]:
    """Read a file that is as long as its header says, a compressed one up to its checksum."""
    with _open_nifti(path) as file:
        header, shape = _nifti_header(file)
        dtype, offset = header.get_data_dtype(), int(header.get_data_offset())
        if path.suffix == ".gz":
            file.seek(offset)
            content = read_exactly(file, math.prod(shape) * dtype.itemsize)
            if file.read(1):
                raise ValueError(
                    f"more behind the {offset + content.size} bytes that its header tells of"
                )
            raw = content.view(dtype).reshape(shape, order="F")
        else:
            raw = np.memmap(path, dtype, "c", offset, shape, order="F")
    scaled = nib.volumeutils.apply_read_scaling(raw, *header.get_slope_inter())
    return scaled, *_nifti_frame(header)


def _nifti_frame(header: Any) -> tuple[list[float], NDArray[np.float64], bool]:
    """Voxel size in mm, affine to RAS mm, and whether the header states an orientation."""
    scale = MM_PER_UNIT.get(header.get_xyzt_units()[0], 1.0)
    spacing = [scale * float(s) for s in header.get_zooms()[:3]]
    stated = bool(header["qform_code"] or header["sform_code"])
    affine = header.get_best_affine() if stated else np.diag([-1.0, -1.0, 1.0, 1.0])
    affine[:3] *= scale
    return spacing, affine, stated


def _read_sitk(path: Path) -> tuple[Array, list[float], NDArray[np.float64]]:
    image = sitk.ReadImage(str(path))
    array = sitk.GetArrayFromImage(image)
    if image.GetNumberOfComponentsPerPixel() > 1:  # stored last: make them the slowest axis
        array = np.moveaxis(array, -1, 0)
    return array.transpose(), *_sitk_frame(image)


def _sitk_header(path: Path) -> tuple[tuple[int, ...], list[float], NDArray[np.float64]]:
    reader = sitk.ImageFileReader()
    reader.SetFileName(str(path))
    reader.ReadImageInformation()
    components = reader.GetNumberOfComponents()
    shape = (*reader.GetSize(), *((components,) if components > 1 else ()))
    return shape, *_sitk_frame(reader)


def _sitk_frame(image: Any) -> tuple[list[float], NDArray[np.float64]]:
    """Voxel size in mm and affine to RAS mm, of an image or of a reader that knows its header."""
    d = image.GetDimension()
    axes = min(d, 3)
    affine = np.eye(4)
    direction = np.asarray(image.GetDirection()).reshape(d, d)[:axes, :axes]
    affine[:axes, :axes] = direction * np.asarray(image.GetSpacing()[:axes])
    affine[:axes, 3] = image.GetOrigin()[:axes]
    affine[:2] *= -1  # LPS to RAS
    return list(image.GetSpacing()), affine


def _label_type(path: Path, data: Array) -> type[np.generic]:
    low, high = (int(data.min()), int(data.max())) if data.size else (0, 0)
    for dtype in (np.uint8, np.uint16, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return dtype
    raise ValueError(f"{path}: labels {low} to {high} do not fit 32 bits")


def _mm(values: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{v:.5g}" for v in values) + ")"

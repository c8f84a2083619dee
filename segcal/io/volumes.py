"""Volumes: label maps, images and probability maps as arrays, with their geometry.

Arrays are ``(z, y, x)`` (the order of SimpleITK and nnU-Net), affines map ``(x, y, z)`` indices to
RAS millimetres (nibabel's). Spacing is the voxel size that the header states, which SimpleITK uses,
too. The affine may disagree: in ACDC, it says 1 mm while the voxels measure 1.4 x 1.4 x 10 mm. A
NIfTI that states no orientation (both codes 0) gets SimpleITK's default: identity in LPS, origin 0.

A NIfTI may state two orientations, its sform and its qform. If they differ, segcal chooses as ITK
does: the sform if its code is 1 (scanner) and its axes are at right angles, else the qform. The
difference is noted. nibabel always uses the sform, so a file that fits the reference by either
form is accepted without reordering: it was written with one tool or the other.

Images (PNG, BMP, TIF, JPEG) state no voxel size and no position: a pixel measures 1 px, and
distances are in px.

3D Slicer may store segments (``.seg.nrrd``) only within the box that they fill. They are put back
into the grid of the image that the header describes, or of the reference that contains the box.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nibabel as nib
import nibabel.orientations
import numpy as np
from numpy.typing import NDArray

from segcal.io.files import is_image, is_jpeg, is_segmentation, whole_file
from segcal.io.formats import LPS, Frame, agrees, read_file, read_header, stored_type, write_image
from segcal.io.rounding import round_labels

Array = NDArray[Any]
SCANNER = 1
"""NIfTI's code of an orientation in the scanner's coordinate system."""
SINGULAR = 1e-6
"""Smallest determinant of the unit axes of a grid; below, they lie in one plane."""
MOST_VOXELS = 1 << 31
"""Largest image that the header of a box of segments may claim."""
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
        stated: whether the file states an orientation; if it does not, nibabel and SimpleITK
            assume different ones.
        unit: unit of the lengths: ``mm``, or ``px`` for images, which state no size.
        form: which part of the header states the orientation; for a NIfTI, ``sform`` or ``qform``.
        other: geometry by the other form of a NIfTI; None if both forms agree.
    """

    shape: tuple[int, ...]
    spacing_mm: tuple[float, ...]
    origin_mm: tuple[float, float, float]
    direction: NDArray[np.float64]
    stated: bool = True
    unit: str = "mm"
    form: str = ""
    other: Geometry | None = None

    @property
    def forms(self) -> tuple[Geometry, ...]:
        """Geometries that the header states: this one, and the other form's if it differs."""
        return (self,) if self.other is None else (self, self.other)

    @property
    def conflict(self) -> str:
        """How a NIfTI's two forms disagree, and which one is used; empty if they agree."""
        if self.other is None:
            return ""
        return (
            f"its {self.form} and its {self.other.form} disagree "
            f"({'; '.join(self._differences(self.other, 1e-2))}); the {self.form} is used, as ITK "
            f"does; rewrite the header so that both agree"
        )

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
        """Sentences on what differs from `other` by more than `tolerance`, in voxels.

        A direction differs if it moves the far corner by more than that. If a NIfTI has two forms
        that disagree, it is enough that one of them fits.
        """
        found = [a._differences(b, tolerance) for a in self.forms for b in other.forms]
        return found[0] if all(found) else []

    def _differences(self, other: Geometry, tolerance: float) -> list[str]:
        if self.unit != other.unit:
            return [f"unit {self.unit} and {other.unit}"]
        if self.shape != other.shape:
            return [f"size (z, y, x) {self.shape} and {other.shape}"]
        found = []
        spacing = np.asarray(self.spacing_mm)
        if np.any(np.abs(spacing - other.spacing_mm) * self.shape > tolerance * spacing):
            found.append(
                f"spacing (z, y, x) {_mm(self.spacing_mm)} and {_mm(other.spacing_mm)} {self.unit}"
            )
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

    def start_in(self, image: Geometry) -> tuple[int, ...] | None:
        """Index ``(z, y, x)`` in an image of this grid's first voxel; None if the grids differ.

        The grid may begin before the image, or end beyond it.
        """
        index = np.linalg.solve(image.affine, [*self.origin_mm, 1.0])[:3].round()
        origin = self.origin_mm - self.affine[:3, :3] @ index
        whole = replace(self, shape=image.shape, origin_mm=tuple(origin.tolist()), other=None)
        return None if whole._differences(image, 1e-2) else tuple(map(int, index[::-1]))

    def reordered(self, orientation: NDArray[Any]) -> Geometry:
        """Geometry of the same voxels after nibabel re-ordered their x, y, z axes."""
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
            other=None,
        )


@dataclass(frozen=True)
class Volume:
    """An array and where it lies.

    Attributes:
        array: ``(z, y, x)``, or ``(K, z, y, x)`` for a 4-D file.
        geometry: geometry of the spatial axes.
        note: what is unusual about the file, and how it was read; empty if nothing is.
    """

    array: Array
    geometry: Geometry
    note: str = ""


def read_volume(path: Path) -> Volume:
    """Read a 2-D, 3-D or 4-D file, see :mod:`segcal.io.formats`.

    Trailing axes of length 1 are dropped; a 2-D image gets a z axis of length 1 (spacing 1 mm); a
    fourth axis comes first in the array.

    Raises:
        ValueError: the file cannot be read, or its shape is not that of a volume.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        array, frame = read_file(path)
    except Exception as error:  # noqa: BLE001 - a damaged file fails anywhere in the readers
        raise _unreadable(path, error) from None
    array = array.reshape(_significant(array.shape))
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.ndim == 2:
        array = array[:, :, None]
    geometry, note = _geometry(path, array.shape, frame)
    volume = Volume(array.transpose(), geometry, note)
    image = _image_around(geometry, frame)
    return volume if image is None else put_into(path, volume, image)


def read_geometry(path: Path) -> tuple[Geometry, int]:
    """Geometry of a file and the size of its fourth axis (1 if absent), from the header alone.

    Raises:
        ValueError: as :func:`read_volume`; damage after the header is not noticed.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        shape, frame = read_header(path)
    except Exception as error:  # noqa: BLE001 - as above
        raise _unreadable(path, error) from None
    shape = _significant(shape)
    shape = (*shape, 1) if len(shape) == 2 else shape
    geometry, _ = _geometry(path, shape, frame)
    geometry = _image_around(geometry, frame) or geometry
    return geometry, shape[3] if len(shape) > 3 else 1


def _image_around(box: Geometry, frame: Frame) -> Geometry | None:
    """Grid of the image that a box is cut from, by its header; None if unstated or not cut."""
    if frame.image is None:
        return None
    shape, affine = frame.image
    if min(shape) < 1 or math.prod(shape) > MOST_VOXELS or not _spans(affine):
        return None
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    x, y, z = affine[:3, 3].tolist()
    image = Geometry(
        shape[::-1], tuple(spacing[::-1].tolist()), (x, y, z), affine[:3, :3] / spacing, form="box"
    )
    return None if box.shape == image.shape else grid_around(box, image)


def grid_around(box: Geometry, image: Geometry) -> Geometry | None:
    """Grid of an image, with its axes in the order of a box; None if the box is not part of it."""
    orientation = nib.orientations.io_orientation(_turn(image, box))
    if np.isnan(orientation).any():
        return None
    whole = image.reordered(orientation)
    return None if box.start_in(whole) is None else whole


def put_into(path: Path, volume: Volume, image: Geometry) -> Volume:
    """Put a volume that covers a box of an image into the whole image, with 0 elsewhere.

    Raises:
        ValueError: some labelled voxels lie outside of the image.
    """
    array, start = volume.array, volume.geometry.start_in(image)
    if start is None:
        return volume
    stop = [i + n for i, n in zip(start, array.shape[-3:], strict=True)]
    inside = [(max(i, 0), min(j, n)) for i, j, n in zip(start, stop, image.shape, strict=True)]
    z, y, x = (slice(i - a, max(i, j) - a) for (i, j), a in zip(inside, start, strict=True))
    part = array[..., z, y, x]
    if lost := int(np.count_nonzero(array)) - int(np.count_nonzero(part)):
        raise ValueError(
            f"{path}: {lost} voxels of its segments lie outside of the image that they "
            "are compared on; export the segments as a label map in the geometry of that image"
        )
    whole = np.zeros((*array.shape[:-3], *image.shape), array.dtype)
    z, y, x = (slice(i, max(i, j)) for i, j in inside)
    whole[..., z, y, x] = part
    return Volume(whole, image, volume.note)


def _geometry(path: Path, shape: tuple[int, ...], frame: Frame) -> tuple[Geometry, str]:
    """Geometry of a grid of ``shape`` (x, y, z, ...), and notes on anything unusual about it."""
    if not 3 <= len(shape) <= 4:
        raise ValueError(f"{path}: expected 2 to 4 axes, got shape {shape}")
    spacing = [abs(float(s)) for s in [*frame.spacing, 1.0][:3]]
    if not all(np.isfinite(s) and s > 0 for s in spacing):
        raise ValueError(f"{path}: voxel sizes {spacing} {frame.unit} are not all positive")
    size, mm = tuple(shape[2::-1]), tuple(spacing[::-1])
    forms = {
        form: Geometry(
            shape=size,
            spacing_mm=mm,
            origin_mm=(float(affine[0, 3]), float(affine[1, 3]), float(affine[2, 3])),
            direction=affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0),
            form=form,
        )
        for form, affine in frame.affines.items()
        if _spans(affine)
    }
    if not forms and frame.affines:
        raise ValueError(f"{path}: its affine is singular; repair the header")
    notes = list(frame.notes)
    if not forms:
        if frame.unit == "mm":
            notes.append("states no orientation; identity in LPS is assumed, as SimpleITK does")
        geometry = Geometry(size, mm, (0.0, 0.0, 0.0), LPS[:3, :3], stated=False, unit=frame.unit)
        return geometry, "; ".join(notes)
    geometry = _preferred(forms, frame.sform_code)
    if conflict := geometry.conflict:
        notes.append(conflict)
    norms = np.linalg.norm(frame.affines[geometry.form][:3, :3], axis=0)
    if not np.allclose(norms, spacing, rtol=1e-2):
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


def _spans(affine: NDArray[np.float64]) -> bool:
    """Whether the axes of an affine span a volume."""
    if not np.all(np.isfinite(affine)):
        return False
    norms = np.linalg.norm(affine[:3, :3], axis=0)
    return bool(np.all(norms > 0) and abs(np.linalg.det(affine[:3, :3] / norms)) >= SINGULAR)


def _preferred(forms: dict[str, Geometry], sform_code: int) -> Geometry:
    """The one of a NIfTI's two forms that ITK uses, with the other attached if it differs.

    ITK uses the sform if its code is "scanner" and its axes are at right angles, else the qform.
    """
    first, *others = forms.values()
    if not others or not first.differences(others[0]):
        return first
    if sform_code == SCANNER and first.skew <= SKEWED:
        return replace(first, other=others[0])
    return replace(others[0], other=first)


def find_orientation(
    path: Path, geometry: Geometry, reference: Geometry, tolerance: float = 1e-2
) -> NDArray[Any] | None:
    """How a file's axes must be re-ordered to match the reference; None if they match already.

    Only permutations and flips are considered, and only if both files state an orientation.

    Returns:
        orientation as nibabel's ``apply_orientation`` takes it, or None.

    Raises:
        ValueError: the voxels lie elsewhere; the message states the differences.
    """
    if not geometry.differences(reference, tolerance):
        return None
    orientation = nib.orientations.io_orientation(_turn(geometry, reference))
    same = np.array_equal(orientation, [[0, 1], [1, 1], [2, 1]])
    if same or not (geometry.stated and reference.stated) or np.isnan(orientation).any():
        found = geometry.differences(reference, tolerance)
        raise ValueError(f"{path}: does not lie on the reference: {'; '.join(found)}")
    if found := geometry.reordered(orientation).differences(reference, tolerance):
        raise ValueError(
            f"{path}: does not lie on the reference, not even with its axes in the same order: "
            f"{'; '.join(found)}"
        )
    return orientation


def check_place(path: Path, reference: Geometry, tolerance: float = 1e-2) -> int:
    """Check from the header that a file lies on the reference, if need be with axes re-ordered.

    Returns:
        size of its fourth axis; 1 if it has none.

    Raises:
        ValueError: as :func:`read_geometry` and :func:`find_orientation`.
    """
    geometry, channels = read_geometry(path)
    if is_segmentation(path):
        geometry = grid_around(geometry, reference) or geometry
    find_orientation(path, geometry, reference, tolerance)
    return channels


def put_on(
    path: Path, volume: Volume, reference: Geometry, tolerance: float = 1e-2
) -> tuple[Array, str]:
    """The array of a volume on the reference's grid, and a note if its axes were re-ordered.

    Raises:
        ValueError: as :func:`find_orientation`.
    """
    if is_segmentation(path) and (image := grid_around(volume.geometry, reference)) is not None:
        volume = put_into(path, volume, image)
    orientation = find_orientation(path, volume.geometry, reference, tolerance)
    if orientation is None:
        return volume.array, ""
    codes = ["".join(nib.orientations.aff2axcodes(g.affine)) for g in (volume.geometry, reference)]
    note = f"stored as {codes[0]}, re-ordered to the reference's {codes[1]}"
    return _reorder(volume.array, orientation), note


def stored_axes(path: Path) -> int:
    """Number of axes that :func:`read_volume` would return for a file, from the header alone.

    Raises:
        ValueError: the file cannot be read.
    """
    _, channels = read_geometry(path)
    return 3 if channels == 1 else 4


def value_type(path: Path) -> np.dtype[Any] | None:
    """Data type of the values of a file, from its header; None if the header cannot be read."""
    try:
        return stored_type(path)
    except Exception:  # noqa: BLE001 - what reads the file says what is wrong with it
        return None


def read_labels(path: Path) -> Volume:
    """Read a label map ``(z, y, x)``; the array is of an integer type.

    Values stored as floats, or scaled by the header, are rounded if they lie within 0.05 of an
    integer and no two distinct values round to the same integer
    (:func:`segcal.io.rounding.round_labels`).

    Raises:
        ValueError: as :func:`read_volume`; the file is 4-D, or its values are not labels.
    """
    return to_labels(path, read_volume(path))


def to_labels(path: Path, volume: Volume) -> Volume:
    """The label map of a volume read from `path`, see :func:`read_labels`.

    Raises:
        ValueError: the volume is 4-D, its values are not labels, or the file is a JPEG.
    """
    array = volume.array
    if is_jpeg(path):
        raise ValueError(
            f"{path}: a JPEG does not keep the exact values of its pixels, so it cannot hold "
            "labels; export the label map again, as PNG"
        )
    if array.ndim != 3:
        if volume.geometry.unit == "px":
            return _uncoloured(path, volume)
        if is_segmentation(path):
            raise ValueError(
                f"{path}: its segments overlap, so they lie in {len(array)} layers; export them "
                "as a label map"
            )
        raise ValueError(
            f"{path}: expected a 3-D label map, got shape {array.shape[::-1]} (x, y, z, ...)"
        )
    if array.dtype.kind == "f":
        array = round_labels(array, str(path))
    elif array.dtype.kind not in "iub":
        raise ValueError(f"{path}: expected labels, got values of type {array.dtype}")
    elif array.dtype.kind == "b":
        array = array.astype(np.uint8)
    return Volume(np.ascontiguousarray(array), volume.geometry, volume.note)


def _uncoloured(path: Path, volume: Volume) -> Volume:
    """The grey values of a label map that was saved with equal red, green and blue channels.

    Raises:
        ValueError: the channels differ, so the file holds colours.
    """
    array = volume.array[:3] if len(volume.array) > 2 else volume.array[:1]  # without opacity
    if (array == array[0]).all():
        note = "; ".join(filter(None, (volume.note, "grey values saved as colours")))
        return Volume(np.ascontiguousarray(array[0]), volume.geometry, note)
    colours = np.unique(array.reshape(3, -1), axis=1).T
    shown = ", ".join(f"{k} for {tuple(map(int, c))}" for k, c in enumerate(colours[:4]))
    raise ValueError(
        f"{path}: expected a label map of grey values, got {len(volume.array)} channels with "
        f"{len(colours)} colours (red, green, blue); save a label number in place of each colour, "
        f"e.g. {shown}{', ...' if len(colours) > 4 else ''}"
    )


def reads_alike(path: Path) -> bool:
    """Whether every reader finds the same grid in a NIfTI as :func:`read_geometry`."""
    return agrees(path)


def from_canonical(array: Array, geometry: Geometry, *, reader: str) -> Array:
    """Turn ``(..., z, y, x)`` of a RAS-reoriented grid into the grid of `geometry`.

    nnU-Net's ``*WithReorient`` readers bring every image to RAS before anything else, and save
    probabilities in that orientation.

    Args:
        array: the array as the reader orients it.
        geometry: geometry of the file.
        reader: name of nnU-Net's reader; for a file that states no orientation, the nibabel reader
            assumes LAS and the SimpleITK reader LPS.
    """
    to_canonical = _to_canonical(geometry, reader)
    back = nib.orientations.ornt_transform(nib.orientations.axcodes2ornt("RAS"), to_canonical)
    return _reorder(array, back)


def to_canonical(geometry: Geometry, *, reader: str) -> Geometry:
    """Geometry of the RAS-reoriented grid that :func:`from_canonical` starts from."""
    return geometry.reordered(_to_canonical(geometry, reader))


def _to_canonical(geometry: Geometry, reader: str) -> NDArray[Any]:
    affine = geometry.affine
    if reader.startswith("Nibabel"):
        if geometry.form == "qform" and geometry.other is not None:
            affine = geometry.other.affine
        if not geometry.stated:
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
        ValueError: the array has another shape than `geometry`.
    """
    if array.shape[-3:] != geometry.shape:
        raise ValueError(f"{path}: array {array.shape} does not fit geometry {geometry.shape}")
    data = array.transpose()
    dtype = _label_type(path, data) if data.dtype.kind in "iub" else np.float32
    _save(path, nib.Nifti1Image(np.ascontiguousarray(data, dtype=dtype), geometry.affine), geometry)


def write_share_map(path: Path, array: Array, geometry: Geometry) -> None:
    """Write values from 0 to 1, ``(z, y, x)``, as NIfTI with a byte per voxel, whole or not at all.

    The header states the scale 1/255, which readers apply, and 0 and 1 as the range to display.

    Raises:
        ValueError: the array has another shape than `geometry`.
    """
    if array.shape != geometry.shape:
        raise ValueError(f"{path}: array {array.shape} does not fit geometry {geometry.shape}")
    levels = np.empty(array.shape, np.uint8)
    for level, values in zip(levels, array, strict=True):  # a slice at a time
        level[...] = np.rint(255 * np.clip(values.astype(np.float32, copy=False), 0, 1))
    image = nib.Nifti1Image(np.ascontiguousarray(levels.transpose()), geometry.affine)
    image.header.set_slope_inter(1 / 255, 0)
    image.header["cal_min"], image.header["cal_max"] = 0, 1
    _save(path, image, geometry)


def _save(path: Path, image: nib.Nifti1Image, geometry: Geometry) -> None:
    image.header.set_xyzt_units("mm" if geometry.unit == "mm" else "unknown")
    with whole_file(path) as temporary:
        nib.save(image, temporary)


def write_volume(path: Path, array: Array, geometry: Geometry) -> None:
    """Write ``(z, y, x)`` as an image if the path ends so, else as NIfTI; whole or not at all.

    Raises:
        ValueError: as :func:`write_nifti`; or the image format cannot hold the values.
    """
    if not is_image(path):
        write_nifti(path, array, geometry)
        return
    if array.shape != geometry.shape or len(array) != 1:
        raise ValueError(f"{path}: array {array.shape} does not fit an image")
    dtype = _label_type(path, array) if array.dtype.kind in "iub" else np.float32
    with whole_file(path) as temporary:
        try:
            write_image(temporary, array[0].astype(dtype))
        except (OSError, TypeError) as error:
            raise ValueError(
                f"{path}: such values cannot be written as an image ({error})"
            ) from None


def _significant(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape (x, y, z, ...) without axes of length 1 after the third."""
    return shape[:3] + tuple(n for n in shape[3:] if n != 1)


def _unreadable(path: Path, error: Exception) -> ValueError:
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
    return ValueError(f"{path}: cannot be read as a volume ({reason})")


def _label_type(path: Path, data: Array) -> type[np.generic]:
    low, high = (int(data.min()), int(data.max())) if data.size else (0, 0)
    for dtype in (np.uint8, np.uint16, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return dtype
    raise ValueError(f"{path}: labels {low} to {high} do not fit 32 bits")


def _mm(values: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{v:.5g}" for v in values) + ")"

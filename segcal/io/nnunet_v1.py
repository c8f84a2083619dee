"""Where the cropped softmax of nnU-Net v1 lies in its image, from the ``.pkl`` beside it."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import reprlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

KEY = "softmax"
MAX_BYTES = 1 << 26
PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
"""Operations of a pickle that name a place in its memo."""
PLAIN_DTYPE = re.compile(r"[biuf][0-9]+")


@dataclass(frozen=True)
class Crop:
    """Where the array of a case lies in its image.

    Attributes:
        box: start and stop index along z, y, x; the stop is exclusive.
        full_shape: shape of the image ``(z, y, x)``; None if the file does not state it.
    """

    box: tuple[tuple[int, int], ...]
    full_shape: tuple[int, ...] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of the crop ``(z, y, x)``."""
        return tuple(stop - start for start, stop in self.box)


def read_crop(npz: Path) -> Crop:
    """Read where the softmax of `npz` belongs, from ``CASE.pkl`` beside it.

    No code in the pickle is run: only plain containers, strings and numbers are created, and
    stand-ins for NumPy's types.

    Raises:
        ValueError: the file is missing, holds anything else, or has no crop box.
    """
    path = npz.with_suffix(".pkl")
    if not path.is_file():
        raise ValueError(
            f"{npz}: holds the cropped softmax of nnU-Net v1, which needs {path.name} beside it to "
            "be put back into the image"
        )
    content = _read_plain(path)
    box: Any = content.get("crop_bbox") if isinstance(content, dict) else None
    if not _is_box(box):
        raise ValueError(
            f"{path}: expected nnU-Net v1's crop_bbox [[z0, z1], [y0, y1], [x0, x1]], got "
            f"{reprlib.repr(box)}"
        )
    shape = content.get("original_size_of_raw_data")
    if isinstance(shape, _Array):
        shape = shape.values
    known = isinstance(shape, (list, tuple)) and all(isinstance(n, int) for n in shape)
    return Crop(
        tuple((start, stop) for start, stop in box), tuple(shape) if known and shape else None
    )


def _is_box(box: Any) -> bool:
    return (
        isinstance(box, (list, tuple))
        and len(box) == 3
        and all(isinstance(side, (list, tuple)) and len(side) == 2 for side in box)
        and all(isinstance(n, int) for side in box for n in side)
        and all(0 <= start < stop for start, stop in box)
    )


def _read_plain(path: Path) -> Any:
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path}: {size} bytes; a .pkl of nnU-Net v1 has a few thousand")
    content = path.read_bytes()
    try:
        _check_memo(content)
        return _Plain(io.BytesIO(content)).load()
    except Exception as error:  # noqa: BLE001 - a damaged pickle fails anywhere
        raise ValueError(f"{path}: not a plain pickle file ({error})") from None


def _check_memo(content: bytes) -> None:
    """Refuse memo indices that are too large for a pickle of this size.

    The unpickler takes memory for all smaller indices, too.

    Raises:
        pickle.UnpicklingError: an index is too large.
    """
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in PUTS and int(argument or 0) > len(content):
            raise pickle.UnpicklingError(f"place {argument} of its memo, in {len(content)} bytes")


class _Dtype:
    """Stand-in for a NumPy type; `code` is None unless it is a type of plain numbers."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code = code if PLAIN_DTYPE.fullmatch(code) else None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Take the byte order, which is all that matters for plain numbers."""
        if self.code and state[1] == ">":
            self.code = f">{self.code}"

    def read(self, content: Any) -> list[Any]:
        """Values in `content`; empty if they are not plain numbers."""
        return np.frombuffer(content, self.code).tolist() if self.code else []


class _Array:
    """Stand-in for a NumPy array; only the values of one-dimensional arrays are kept."""

    values: Sequence[Any] = ()

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Take the values."""
        _, shape, dtype, _, content = state
        if len(shape) == 1:
            self.values = dtype.read(content)


def _scalar(dtype: _Dtype, content: Any) -> Any:
    return next(iter(dtype.read(content)), None)


class _Plain(pickle.Unpickler):
    """Unpickler that creates plain objects only, whatever the file asks for."""

    ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {  # noqa: RUF012 - never changed
        ("collections", "OrderedDict"): OrderedDict,
        ("numpy", "dtype"): _Dtype,
        ("numpy", "ndarray"): _Array,
        **{
            (f"numpy.{core}.multiarray", name): made
            for core in ("core", "_core")
            for name, made in (("_reconstruct", _Array), ("scalar", _scalar))
        },
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name in the file.

        Raises:
            pickle.UnpicklingError: the name is not one of numbers or plain containers.
        """
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it wants {module}.{name}, which is refused")
        return self.ALLOWED[module, name]

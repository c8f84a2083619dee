"""Reading nnU-Net's checkpoints as plain values, without running code that is in them."""

from __future__ import annotations

import _codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core.multiarray import scalar

from segcal.adapters.nnunet.patching import RefusedError

# What numpy's scalars are pickled as, which nnU-Net's logs hold; numpy 1 had another name for it.
NUMPY_SCALARS: list[Any] = [
    scalar,
    (scalar, "numpy.core.multiarray.scalar"),
    _codecs.encode,
    np.dtype,
    *(type(np.dtype(name)) for name in ("float16", "float32", "float64", "int32", "int64", "bool")),
]


def read_plain(path: Any, *, map_location: Any = None, **_: Any) -> Any:
    """Return the content of a checkpoint, which may hold only tensors, numbers and containers.

    It can stand in for :func:`torch.load`, whose further arguments it ignores.

    Args:
        path: of the checkpoint.
        map_location: see :func:`torch.load`.

    Raises:
        RefusedError: no such file, a damaged file, or a file that holds more and so could run code
            when it is loaded.
    """
    if not Path(path).is_file():
        raise RefusedError(f"{path}: no such file")
    try:
        with torch.serialization.safe_globals(NUMPY_SCALARS):
            return torch.serialization.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "Unsupported" in line), "")
        raise RefusedError(
            f"{path}: holds more than tensors and numbers and is not loaded, since that could run "
            f"code{f' ({reason.strip()})' if reason else ''}; if you trust its source, use "
            "nnU-Net's own commands, which load everything"
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        raise RefusedError(f"{path}: not a whole checkpoint ({error})") from None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint of nnU-Net onto the CPU, as plain values and tensors.

    Raises:
        ValueError: no such file, a damaged file, no checkpoint of nnU-Net, or a file that holds
            more than numbers and so could run code when it is loaded.
    """
    content = read_plain(path, map_location="cpu")
    needed = {"network_weights", "init_args", "trainer_name", "logging", "current_epoch"}
    if not isinstance(content, dict) or needed - content.keys():
        raise ValueError(f"{path}: not a checkpoint of nnU-Net v2")
    return {k: v if k == "network_weights" else plain(v) for k, v in content.items()}


def plain(value: Any) -> Any:
    """Return `value` with numpy's scalars as Python's, in dicts, lists and tuples."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return type(value)((plain(k), plain(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(plain(v) for v in value)
    return value

"""Writes and reads checkpoints of a training: tensors and plain values, whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from segcal import __version__
from segcal.io.files import whole_file

BEST_NAME = "checkpoint_best.pt"
LAST_NAME = "checkpoint_last.pt"


def write_checkpoint(path: Path, content: Mapping[str, Any]) -> None:
    """Write tensors and plain values; if the process is killed, the previous file remains."""
    with whole_file(path) as temporary:
        torch.save({"segcal": __version__, **content}, temporary)


def read_checkpoint(path: Path, keys: Collection[str]) -> dict[str, Any]:
    """Read a checkpoint onto the CPU.

    Args:
        path: path of the file.
        keys: keys that it must have.

    Raises:
        ValueError: the file is missing or damaged, or holds more than tensors and plain values.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - a damaged file fails anywhere in the reader
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: not a whole checkpoint of segcal ({reason})") from None
    if not isinstance(content, dict) or {"segcal", *keys} - content.keys():
        raise ValueError(f"{path}: not a checkpoint of a training of this kind")
    return content


def weights_digest(state: Mapping[str, Any]) -> str:
    """Short digest of a network's weights; networks with equal digests have equal outputs.

    It stays the same when the checkpoint is copied or moved, and changes when training continues.

    Args:
        state: ``state_dict`` of the network.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            raw = tensor.detach().cpu().flatten().contiguous().view(torch.uint8)
            digest.update(raw.numpy().data)
    return digest.hexdigest()[:16]

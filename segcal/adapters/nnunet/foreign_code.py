"""Loading models of strangers without running code from their files.

nnU-Net unpickles any checkpoint, and imports and calls whatever plans name as a network.
"""

from __future__ import annotations

import os
import pydoc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from segcal.adapters.nnunet.checkpoints import read_plain
from segcal.adapters.nnunet.patching import RefusedError, replaced

PACKAGES = ("dynamic_network_architectures", "nnunetv2", "torch.nn")
"""Packages from which nnU-Net itself builds networks."""
VARIABLE = "SEGCAL_NETWORKS"
"""Environment variable with further packages, separated by commas, whose networks may be built."""
_locate = pydoc.locate


@contextmanager
def no_foreign_code() -> Iterator[None]:
    """Let nnU-Net load checkpoints by :func:`read_plain`, and build networks of its own packages.

    In this block every caller of :func:`torch.load` or :func:`pydoc.locate` gets these safe
    versions.
    """
    with replaced(torch, "load", read_plain), replaced(pydoc, "locate", find_module_class):
        yield


def find_module_class(path: str, *_: Any) -> type[nn.Module] | None:
    """Return the class of a network, or of a part of one, that plans name.

    Args:
        path: its package, module and name.

    Returns:
        None where an allowed package has no such name.

    Raises:
        RefusedError: it belongs to another package, which is not imported, or is no ``nn.Module``.
    """
    packages = (*PACKAGES, *filter(None, os.environ.get(VARIABLE, "").split(",")))
    if not any(str(path).startswith(f"{package}.") for package in packages):
        raise RefusedError(
            f"plans: name {path!r} as a network or a part of one; it is not imported, since that "
            f"could run code: expected one of {', '.join(packages)}. If you trust it, set "
            f"{VARIABLE} to its package"
        )
    found = _locate(path)
    if found is not None and not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise RefusedError(
            f"plans: name {path!r} as a network or a part of one; expected an nn.Module, got "
            f"{type(found).__name__}"
        )
    return found

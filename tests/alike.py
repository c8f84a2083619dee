"""Whether two trainings of one seed hold the same, as near as the machine's arithmetic lets them.

CPU kernels may round apart in the eighth digit from run to run; a few steps of training make more
of it, and a voxel that crosses the edge of a bin moves a calibration error by itself.
"""

import pandas as pd
import torch

TABLES = {"rel": 1e-2, "abs": 1e-3}
"""Tolerance for measures."""


def shares(reliability):
    """The bins of a reliability.json as shares of all voxels, by repair and scope."""
    return {
        repair: {
            scope: {k: [v / sum(bins["count"]) for v in values] for k, values in bins.items()}
            for scope, bins in scopes.items()
        }
        for repair, scopes in reliability.items()
    }


def differences(a, b, where="", *, rel=1e-3, abs=1e-5):
    """Where two nests of values are not alike: text, whole numbers and types exactly."""
    tolerance = {"rel": rel, "abs": abs}
    if isinstance(a, pd.DataFrame) and isinstance(b, pd.DataFrame):
        a, b = a.to_dict("list"), b.to_dict("list")
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        return [] if same and torch.allclose(a, b, rel, abs, equal_nan=True) else [where]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [d for k in a for d in differences(a[k], b[k], f"{where}/{k}", **tolerance)]
    if isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, (x, y) in pairs for d in differences(x, y, f"{where}/{i}", **tolerance)]
    if isinstance(a, float) and isinstance(b, float):
        near = a == b or (a != a and b != b) or -(room := abs + rel * max(a, -a)) <= a - b <= room
        return [] if near else [f"{where}: {a!r}, {b!r}"]
    return [] if type(a) is type(b) and a == b else [f"{where}: {a!r}, {b!r}"]

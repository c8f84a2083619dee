"""Post-hoc calibration beside netcal, on the same arrays, in one process.

Made-up logits are too large, with a background that is too likely and voxels that are nearly sure;
every method is fitted to one half and applied to the other. Tables give the fastest fit and apply,
the most memory that the fit and apply took beyond what was there, both as multiples of segcal's,
the NLL on the other half, and the largest difference to segcal's probabilities.

What is the same method in both:

- temperature: netcal's TemperatureScaling.
- vector: netcal's LogisticCalibration, which makes log p of p, so segcal is given that for logits;
  of two classes both are Platt scaling, segcal's as one channel.
- beta: netcal's BetaCalibration for two classes. Of more, netcal fits one softmax of all classes'
  features, segcal a map of each class against the rest; so the values differ.
- isotonic: netcal's IsotonicRegression. Segcal pools more than 16,384 values, hence a small
  difference; --voxels 16000 has none.
- histogram: netcal's HistogramBinning, of equal width; in netcal an empty bin gives its centre and
  in segcal p, and in segcal a value up to a millionth of a bin above an edge counts as on it, which
  one in some 100,000 voxels is.

netcal has no Dirichlet calibration. Install it beside segcal, or apart if what it brings along
(pyro, gpytorch, tensorboard) is not wanted:

    pip install "netcal>=1.4"        # or: pip install -e ".[bench]"
    python scripts/bench_posthoc.py
    python scripts/bench_posthoc.py --voxels 16000 --json bench.json

    pip install --target netcal-lib --no-deps netcal gpytorch linear_operator pyro-ppl pyro-api \
        jaxtyping wadler-lindig opt_einsum
    PYTHONPATH=netcal-lib python scripts/bench_posthoc.py
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from segcal.components import build_component
from segcal.recipes import load_component

METHODS = ("temperature", "vector", "beta", "isotonic", "histogram")
BINS = 15
Array = NDArray[np.float64]


class Run(NamedTuple):
    """What one candidate took and gave."""

    fit_s: float
    apply_s: float
    peak_mb: float
    probabilities: Array


class Data(NamedTuple):
    """Log-probabilities ``(n, K)`` and labels ``(n,)``, to fit to and to apply to."""

    log_p: Array
    labels: NDArray[np.int64]
    other: Array
    other_labels: NDArray[np.int64]


def made(voxels: int, num_classes: int) -> Data:
    rng = np.random.default_rng(0)

    def half() -> tuple[Array, NDArray[np.int64]]:
        true = 2 * rng.standard_normal((voxels, num_classes))
        true[:, 0] += 2
        p = np.exp(true - true.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        drawn = (p.cumsum(1) < rng.random((voxels, 1))).sum(1).clip(max=num_classes - 1)
        said = torch.from_numpy(1.8 * true + np.eye(num_classes)[0])
        return torch.log_softmax(said, 1).numpy(), drawn

    return Data(*half(), *half())


def ours(name: str, data: Data) -> Run:
    x, y, other = (torch.from_numpy(a) for a in data[:3])
    if platt := name == "vector" and x.shape[1] == 2:
        x, y, other = (x[:, 1:] - x[:, :1]), y[:, None], (other[:, 1:] - other[:, :1])
    calibrator = build_component(load_component("posthoc", name), per_channel=platt)

    def apply() -> Array:
        found = calibrator.apply(other).numpy()
        return np.concatenate([1 - found, found], 1) if platt else found

    return timed(lambda: calibrator.fit(x, y), apply)


def theirs(name: str, data: Data) -> Run:
    from netcal.binning import HistogramBinning, IsotonicRegression
    from netcal.scaling import BetaCalibration, LogisticCalibration, TemperatureScaling

    calibrator = {
        "temperature": TemperatureScaling,
        "vector": LogisticCalibration,
        "beta": BetaCalibration,
        "isotonic": IsotonicRegression,
        "histogram": partial(HistogramBinning, bins=BINS),
    }[name]()
    two = data.log_p.shape[1] == 2
    p, other = (np.exp(x[:, 1] if two else x) for x in (data.log_p, data.other))

    def apply() -> Array:
        found = np.squeeze(calibrator.transform(other))
        return np.stack([1 - found, found], 1) if two else found

    logs = {"tensorboard": False} if name in ("temperature", "vector", "beta") else {}
    return timed(lambda: calibrator.fit(p, data.labels, **logs), apply)


def timed(fit: Callable[[], Any], apply: Callable[[], Array]) -> Run:
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # so that what others freed is asked for anew
        Path("/proc/self/clear_refs").write_text("5")
    before = memory_mb("VmRSS")
    start = time.perf_counter()
    fit()
    middle = time.perf_counter()
    found = apply()
    end = time.perf_counter()
    return Run(middle - start, end - middle, memory_mb("VmHWM") - before, found)


def memory_mb(row: str) -> float:
    """Resident memory now (VmRSS) or at most (VmHWM); NaN where the system does not say."""
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    (line,) = (x for x in status.read_text(encoding="utf-8").splitlines() if x.startswith(row))
    return int(line.split()[1]) / 1024


def nll(p: Array, labels: NDArray[np.int64]) -> float:
    with np.errstate(divide="ignore"):
        return float(-np.log(p[np.arange(len(p)), labels]).mean())


def compared(name: str, data: Data, rounds: int, with_netcal: bool) -> dict[str, dict[str, float]]:
    candidates = {"segcal": ours, **({"netcal": theirs} if with_netcal else {})}
    runs: dict[str, list[Run]] = {who: [] for who in candidates}
    for _ in range(rounds):
        for who, candidate in candidates.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                runs[who].append(candidate(name, data))
    expected = runs["segcal"][0].probabilities
    return {
        who: {
            "fit_s": min(run.fit_s for run in of),
            "apply_s": min(run.apply_s for run in of),
            "peak_mb": min(run.peak_mb for run in of),
            "nll": nll(of[0].probabilities, data.other_labels),
            "difference": float(np.abs(of[0].probabilities - expected).max()),
            "mean_difference": float(np.abs(of[0].probabilities - expected).mean()),
        }
        for who, of in runs.items()
    }


def table(num_classes: int, data: Data, found: dict[str, Any]) -> Table:
    before = nll(np.exp(data.other), data.other_labels)
    shown = Table(
        title=f"{num_classes} classes, {len(data.log_p):,} voxels each; NLL before {before:.6f}"
    )
    columns = ("fit s", "x", "apply s", "x", "MB", "x", "NLL", "most apart", "mean")
    for column in ("method", "", *columns):
        shown.add_column(column, no_wrap=True, justify="right" if column else "left")
    for name, of in found.items():
        for who, row in of.items():
            cells = []
            for key in ("fit_s", "apply_s", "peak_mb"):
                ratio = row[key] / of["segcal"][key] if of["segcal"][key] else float("nan")
                cells += [f"{row[key]:.3g}", f"{ratio:.2g}"]
            apart = ["", ""] if who == "segcal" else [
                f"{row['difference']:.1e}", f"{row['mean_difference']:.1e}"
            ]  # fmt: skip
            shown.add_row(name, who, *cells, f"{row['nll']:.6f}", *apart)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--voxels", type=int, default=200_000, help="of each half")
    parser.add_argument("--classes", type=int, action="append", help="may be repeated; 2 and 4")
    parser.add_argument("--method", choices=METHODS, action="append", help="may be repeated; all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    console = Console(width=110)
    with_netcal = importlib.util.find_spec("netcal") is not None
    if not with_netcal:
        console.print(
            "netcal is not installed, so segcal stands alone; pip install netcal (or see --help)"
        )
    console.print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}"
    )
    results: dict[str, Any] = {}
    for k in options.classes or (2, 4):
        data = made(options.voxels, k)
        found = {
            name: compared(name, data, options.rounds, with_netcal)
            for name in options.method or METHODS
        }
        console.print(table(k, data, found))
        results[str(k)] = found
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

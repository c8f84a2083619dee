"""Runs one part of the check in this process: ``python -m segcal.gpu.part NAME --out FILE``."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import torch

from segcal.gpu.findings import Findings


def main() -> None:
    """Run a part; its results are in the file, and an exception ends it with a traceback."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--tiny", action="store_true", help="few and small shapes")
    options = parser.parse_args()
    findings = Findings(options.out, options.seconds)
    if options.device == "cuda":
        torch.cuda.set_device(0)
    module = importlib.import_module(f"segcal.gpu.{options.name}")
    module.run(findings, torch.device(options.device), tiny=options.tiny)


if __name__ == "__main__":
    main()

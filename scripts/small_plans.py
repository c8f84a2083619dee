"""Add a configuration that a CPU trains in minutes to the plans of a preprocessed data set.

Example: python scripts/small_plans.py 4 2d --patch 56,40 --batch 32 --features 16,32,64,128
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from segcal.adapters.nnunet.plans import small_configuration
from segcal.io.files import read_json, write_json


def main(
    dataset: int,
    base: str,
    patch: Annotated[str, typer.Option(help="Patch size, e.g. 32,48,32.")],
    batch: Annotated[int, typer.Option(help="Batch size.")],
    features: Annotated[str, typer.Option(help="Features per stage, e.g. 8,16,32.")] = "8,16,32",
    name: Annotated[str | None, typer.Option(help="New configuration; default BASE_small.")] = None,
) -> None:
    """Write NAME into nnUNetPlans.json; all else, with preprocessing, comes from BASE."""
    root = Path(os.environ["nnUNet_preprocessed"])
    folders = sorted(root.glob(f"Dataset{dataset:03d}_*"))
    if len(folders) != 1:
        raise SystemExit(f"{root}: expected one preprocessed data set {dataset}, got {folders}")
    path = folders[0] / "nnUNetPlans.json"
    plans = read_json(path)
    plans["configurations"][name or f"{base}_small"] = small_configuration(
        plans,
        base,
        patch=[int(p) for p in patch.split(",")],
        batch=batch,
        features=[int(f) for f in features.split(",")],
    )
    write_json(path, plans)
    typer.echo(f"{path}: added {name or f'{base}_small'}")


if __name__ == "__main__":
    typer.run(main)

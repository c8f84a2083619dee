"""What segcal's nnU-Net trainers cost, and what their multipliers see, on a preprocessed data set.

`steps`: the same batch through `train_step` of nnU-Net's trainer and ours, in one process, in a new
order every round; medians and percent of nnU-Net's. `sources`: the constraints of a finished
training as each `multiplier_source` sees them, with the network as it is: how far the mean over
patches lies from that over whole volumes, and how much it scatters.

    python scripts/bench_nnunet.py steps 27 2d --trainer nnUNetTrainerCRaC
    python scripts/bench_nnunet.py sources 27 2d 0 --trainer nnUNetTrainerCRaC
"""

from __future__ import annotations

import os
import random
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("nnUNet_n_proc_DA", "0")  # nnU-Net loads data in this process

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from segcal.adapters.nnunet.registration import register
from segcal.reporting.progress import region_names

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
console = Console(width=110)
STOCK = "nnUNetTrainer"
Device = Annotated[str, typer.Option(help="cpu or cuda.")]


def trainer(name: str, dataset: str, configuration: str, fold: int, device: str) -> Any:
    register()
    from nnunetv2.run.run_training import get_trainer_from_args

    found = get_trainer_from_args(dataset, configuration, fold, name, device=torch.device(device))
    found.print_to_log_file = lambda *args, **kwargs: None
    found.initialize()
    return found


@app.command()
def steps(
    dataset: str,
    configuration: str,
    trainers: Annotated[list[str], typer.Option("--trainer", help="May be repeated.")],
    fold: int = 0,
    rounds: int = 20,
    device: Device = "cpu",
) -> None:
    """Time of a training step beside nnU-Net's."""
    torch.manual_seed(0)
    candidates = {n: trainer(n, dataset, configuration, fold, device) for n in [STOCK, *trainers]}
    loader, _ = candidates[STOCK].get_dataloaders()
    batch = next(loader)
    for found in candidates.values():
        found.network.train()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    shuffle = random.Random(0)
    for i in track(range(rounds + 2), console=console, transient=True):
        shuffle.shuffle(order)
        for name in order:
            start = time.perf_counter()
            candidates[name].train_step(batch)
            if device == "cuda":
                torch.cuda.synchronize()
            if i >= 2:  # compiled and warm
                times[name].append(time.perf_counter() - start)
    table = Table(title=f"training step, {tuple(batch['data'].shape)}, medians of {rounds} rounds")
    for column in ("", "ms", "quartiles", "beyond nnU-Net's"):
        table.add_column(column, justify="left" if not column else "right")
    reference = statistics.median(times[STOCK])
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        table.add_row(
            name, f"{1e3 * middle:.1f}", f"{1e3 * low:.1f} to {1e3 * high:.1f}",
            f"{middle / reference - 1:+.1%}",
        )  # fmt: skip
    console.print(table)


@app.command()
def sources(
    dataset: str,
    configuration: str,
    fold: int,
    name: Annotated[str, typer.Option("--trainer")] = "nnUNetTrainerCRaC",
    repeats: int = 12,
    iterations: Annotated[int, typer.Option(help="Batches of a validation pass.")] = 50,
    device: Device = "cpu",
) -> None:
    """Constraints of a finished training by source of the multipliers."""
    found = trainer(name, dataset, configuration, fold, device)
    found.load_checkpoint(str(Path(found.output_folder) / "checkpoint_final.pth"))
    found.do_split()
    found.num_val_iterations_per_epoch = iterations
    found.network.eval()
    found.loss.eval()
    passes: dict[str, list[dict[str, Any]]] = {"val_patches": [], "volumes": []}
    with torch.no_grad():
        for source, times in (("val_patches", repeats), ("volumes", 1)):
            found.settings = found.settings.model_copy(update={"multiplier_source": source})
            for i in track(range(times), source, console=console, transient=True):
                found.current_epoch = i
                found.observe_cases()
                passes[source].append({k: vars(v) for k, v in found.loss.dual_step().items()})
    for term in passes["volumes"][0]:
        draws, whole = (
            np.array([p[term]["constraint"] for p in passes[s]]) for s in ("val_patches", "volumes")
        )
        shares, whole_shares = (
            n / n.sum(-1, keepdims=True)
            for n in (np.array([p[term]["count"] for p in passes[s]]) for s in passes)
        )
        table = Table(title=f"{term}: constraint, {repeats} passes of {iterations} batches")
        for column in (
            "region", "class", "volumes", "patches", "patches / volumes", "scatter", "own voxels",
        ):  # fmt: skip
            table.add_column(column, justify="left" if column in ("region", "class") else "right")
        for row, region in enumerate(region_names(whole.shape[1])):
            for k, channel in enumerate(found.channel_names):
                values, truth = draws[:, row, k], whole[0, row, k]
                mean, scatter = values.mean(), values.std(ddof=1)
                own = (values / shares[:, row]).mean() / (truth / whole_shares[0, row])
                table.add_row(
                    region, channel, f"{truth:.4f}", f"{mean:.4f}", f"{mean / truth:.2f}",
                    f"{scatter / abs(mean):.1%}", f"{own:.2f}",
                )  # fmt: skip
        console.print(table)
        console.print(
            f"share of voxels in {', '.join(region_names(whole.shape[1]))}: patches "
            f"{shares.mean(0).round(3).tolist()}, volumes {whole_shares[0].round(3).tolist()}. A "
            "constraint is a sum over all voxels divided by all voxels; the last column is the "
            "ratio patches / volumes when each region's sum is divided by its own voxels."
        )


if __name__ == "__main__":
    app()

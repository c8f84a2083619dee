"""What segcal's nnU-Net trainers cost, and what their multipliers see, on a preprocessed data set.

`steps`: the same batch through `train_step` of nnU-Net's trainer and ours, in one process, in a new
order every round; medians and percent of nnU-Net's. `loss`: the loss alone, forward and backward,
on generated logits: nnU-Net's with deep supervision, and with CRaC on the full-resolution head, in
a sweep of its own and in one with nnU-Net's cross-entropy. `sources`: the constraints of a finished
training as each `multiplier_source` sees them, with the network as it is: how far the mean over
patches lies from that over whole volumes, and how much it scatters.

    python scripts/bench_nnunet.py steps 27 2d --trainer nnUNetTrainerCRaC
    python scripts/bench_nnunet.py loss --threads 2 --json bench.json
    python scripts/bench_nnunet.py sources 27 2d 0 --trainer nnUNetTrainerCRaC
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("nnUNet_n_proc_DA", "0")  # nnU-Net loads data in this process

import numpy as np
import torch
import torch.nn.functional as F
import typer
from nnunetv2.training.loss.compound_losses import DC_and_CE_loss
from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss
from rich.console import Console
from rich.progress import track
from rich.table import Table

from segcal.adapters.nnunet.host_loss import take_apart
from segcal.adapters.nnunet.labels import Labels
from segcal.adapters.nnunet.loss import PenalisedLoss
from segcal.adapters.nnunet.registration import register
from segcal.io.files import write_json
from segcal.objective import Objective
from segcal.penalties.crac import CRaC
from segcal.reporting.progress import region_names

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
console = Console(width=110)
STOCK = "nnUNetTrainer"
SHAPES = ("12,4,256,224", "2,4,96,96,96", "2,4,40,56,40")
REST, BEFORE, AFTER = "nnU-Net, no CE on the first head", "+ CRaC, two sweeps", "+ CRaC, one sweep"
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Json = Annotated[Path | None, typer.Option(help="Write the numbers to this file.")]


def trainer(name: str, dataset: str, configuration: str, fold: int, device: str) -> Any:
    register()
    from nnunetv2.run.run_training import get_trainer_from_args

    found = get_trainer_from_args(dataset, configuration, fold, name, device=torch.device(device))
    found.print_to_log_file = lambda *args, **kwargs: None
    found.initialize()
    return found


def interleaved(
    candidates: dict[str, Callable[[], Any]], rounds: int, device: str
) -> dict[str, list[float]]:
    """Seconds of every call: each once a round, in a new order; the first two rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    shuffle = random.Random(0)
    for i in track(range(rounds + 2), console=console, transient=True):
        shuffle.shuffle(order)
        for name in order:
            start = time.perf_counter()
            candidates[name]()
            if device == "cuda":
                torch.cuda.synchronize()
            if i >= 2:
                times[name].append(time.perf_counter() - start)
    return times


@app.command()
def loss(
    shapes: Annotated[
        list[str], typer.Option("--shape", help="N,K,S of the logits; may be repeated.")
    ] = list(SHAPES),  # noqa: B006
    rounds: int = 21,
    threads: Annotated[int, typer.Option(help="Of torch; segcal takes as many.")] = 1,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Time of nnU-Net's loss, forward and backward, with and without CRaC."""
    found = {}
    torch.set_num_threads(threads)
    table = Table(
        title=f"loss, {threads} threads on {device}, medians of {rounds} rounds (fastest)"
    )
    for column in ("logits", "", "ms", "x nnU-Net's", "CE + CRaC x CE"):
        table.add_column(column, justify="left" if column in ("logits", "") else "right")
    for shape in shapes:
        sizes = tuple(int(s) for s in shape.split(","))
        times = interleaved(losses(sizes, device), rounds, device)
        found[shape] = times
        middle = {name: statistics.median(values) for name, values in times.items()}
        cross_entropy = middle[STOCK] - middle[REST]
        for name, values in times.items():
            beyond = (middle[name] - middle[REST]) / cross_entropy
            table.add_row(
                shape if name == STOCK else "", name,
                f"{1e3 * middle[name]:.1f} ({1e3 * min(values):.1f})",
                f"{middle[name] / middle[STOCK]:.2f}",
                f"{beyond:.2f}" if name in (BEFORE, AFTER) else "",
            )  # fmt: skip
        table.add_section()
    console.print(table)
    if json:
        write_json(json, found)


def losses(shape: tuple[int, ...], device: str) -> dict[str, Callable[[], Any]]:
    """Forward and backward of nnU-Net's loss and ours, on logits ``(N, K, *S)``."""
    torch.manual_seed(0)
    n, k, *space = shape
    coarse = torch.randint(0, k, (n, 1, *(max(1, s // 16) for s in space))).float()
    sizes = [[max(1, s >> i) for s in space] for i in range(5)]
    targets = [F.interpolate(coarse, size=s).to(device, torch.int16) for s in sizes]
    heads = [(3 * torch.randn(n, k, *s)).to(device).requires_grad_() for s in sizes]
    weights = np.array([2.0**-i for i in range(5)])
    weights[-1] = 0
    dice = {"batch_dice": len(space) == 2, "smooth": 1e-5, "do_bg": False, "ddp": False}
    compound = DC_and_CE_loss(dice, {}, dice_class=MemoryEfficientSoftDiceLoss)
    host = DeepSupervisionWrapper(compound, weights / weights.sum())
    penalties = Objective({"crac": CRaC(k, lambda0=0.2)}).to(device)
    labels = Labels(k, per_channel=False, ignore_index=None, channels=1)
    joined = PenalisedLoss(host, labels, penalties).to(device)

    def step(function: Callable[[], torch.Tensor]) -> None:
        for head in heads:
            head.grad = None
        function().backward()

    return {
        STOCK: lambda: step(lambda: host(heads, targets)),
        REST: lambda: step(lambda: take_apart(host, k)(heads, targets)),
        BEFORE: lambda: step(
            lambda: host(heads, targets) + penalties(heads[0], labels.of(targets[0]))
        ),
        AFTER: lambda: step(lambda: joined(heads, targets)),
    }


@app.command()
def steps(
    dataset: str,
    configuration: str,
    trainers: Annotated[list[str], typer.Option("--trainer", help="May be repeated.")],
    fold: int = 0,
    rounds: int = 20,
    two_sweeps: Annotated[
        bool, typer.Option(help="Also with nnU-Net's cross-entropy and penalties computed apart.")
    ] = False,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Time of a training step beside nnU-Net's."""
    torch.manual_seed(0)
    candidates = {n: trainer(n, dataset, configuration, fold, device) for n in [STOCK, *trainers]}
    for n in trainers if two_sweeps else ():
        apart = trainer(n, dataset, configuration, fold, device)
        apart.loss.joined = None
        candidates[f"{n}, two sweeps"] = apart
    loader, _ = candidates[STOCK].get_dataloaders()
    batch = next(loader)
    for found in candidates.values():
        found.network.train()
    times = interleaved(
        {n: partial(found.train_step, batch) for n, found in candidates.items()}, rounds, device
    )
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
    if json:
        write_json(json, times)


@app.command()
def sources(
    dataset: str,
    configuration: str,
    fold: int,
    name: Annotated[str, typer.Option("--trainer")] = "nnUNetTrainerCRaC",
    repeats: int = 12,
    iterations: Annotated[int, typer.Option(help="Batches of a validation pass.")] = 50,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Constraints of a finished training by source of the multipliers."""
    rows = []
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
                rows.append({
                    "term": term, "region": region, "class": channel, "volumes": truth,
                    "patches": mean, "scatter": scatter, "own_voxels": own,
                })  # fmt: skip
        console.print(table)
        console.print(
            f"share of voxels in {', '.join(region_names(whole.shape[1]))}: patches "
            f"{shares.mean(0).round(3).tolist()}, volumes {whole_shares[0].round(3).tolist()}. A "
            "constraint is a sum over all voxels divided by all voxels; the last column is the "
            "ratio patches / volumes when each region's sum is divided by its own voxels."
        )
    if json:
        write_json(json, rows)


if __name__ == "__main__":
    app()

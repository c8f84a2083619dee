"""What recipes cost in MONAI's engines, beside a bare training loop with plain cross-entropy.

Every round trains one epoch and validates with every candidate, in a new order, in one process, on
the same slices with the same network; medians and percent of MONAI's SupervisedTrainer with
torch's cross-entropy.

    python scripts/bench_monai.py --rounds 5
    python scripts/bench_monai.py --features 32,32,64,128,256,32 --device cuda
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.networks.nets import BasicUNet
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from segcal.adapters.monai.handlers import DualStepHandler
from segcal.adapters.monai.losses import SegcalLoss
from segcal.datasets.phantom import PhantomSettings, make_phantom

CLASSES = 4


class CrossEntropy(nn.Module):
    """torch's, for MONAI's targets ``(B, 1, y, x)``."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(input, target[:, 0].long())


def slices(volumes: int, side: int, rng: np.random.Generator) -> Dataset:
    settings = PhantomSettings(shape=(8, side, side))
    found = []
    for _ in range(volumes):
        phantom = make_phantom(rng, settings)
        for x, y in zip(phantom.image, phantom.labels.astype(np.float32), strict=True):
            found.append({"image": torch.from_numpy(x)[None], "label": torch.from_numpy(y)[None]})
    return Dataset(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, default=192, help="pixels of a slice")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--features", default="16,16,32,64,128,16", help="of MONAI's BasicUNet")
    parser.add_argument("--recipes", nargs="+", default=["ce", "nacl_published", "crac_published"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device, rng = torch.device(options.device), np.random.default_rng(0)
    torch.manual_seed(0)
    train, validation = (slices(n, options.side, rng) for n in (4, 1))
    features = tuple(int(f) for f in options.features.split(","))
    losses: dict[str, nn.Module] = {"MONAI's engine, torch's cross-entropy": CrossEntropy()}
    for recipe in options.recipes:
        losses[f"SegcalLoss({recipe!r})"] = SegcalLoss(
            recipe, num_classes=CLASSES, to_onehot_y=True
        ).to(device)

    def epoch(loss: nn.Module) -> Callable[[], None]:
        network = BasicUNet(2, 1, CLASSES, features).to(device)
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)

        def run() -> None:
            shared = {"device": device, "network": network, "decollate": False}
            handlers = [DualStepHandler(loss)] if isinstance(loss, SegcalLoss) else None
            trainer = SupervisedTrainer(
                max_epochs=1, train_data_loader=DataLoader(train, batch_size=options.batch),
                optimizer=optimizer, loss_function=loss, **shared,
            )  # fmt: skip
            evaluator = SupervisedEvaluator(
                val_data_loader=DataLoader(validation, batch_size=options.batch),
                val_handlers=handlers, **shared,
            )  # fmt: skip
            trainer.run()
            evaluator.run()
            if device.type == "cuda":
                torch.cuda.synchronize()

        return run

    runs = {name: epoch(loss) for name, loss in losses.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0)
    console = Console(width=100)
    for i in track(range(options.rounds + 1), console=console, transient=True):
        shuffle.shuffle(order)
        for name in order:
            start = time.perf_counter()
            runs[name]()
            if i:  # compiled and warm
                times[name].append(time.perf_counter() - start)
    reference = statistics.median(next(iter(times.values())))
    table = Table(title=f"{len(train)} slices of {options.side} x {options.side}, {device}")
    for column in ("", "s per epoch", "fastest", "overhead"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in times.items():
        middle = statistics.median(values)
        table.add_row(name, f"{middle:.2f}", f"{min(values):.2f}", f"{middle / reference - 1:+.1%}")
    console.print(table)


if __name__ == "__main__":
    main()

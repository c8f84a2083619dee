"""Train a small UNet with every recipe on phantoms and measure it against the true posterior.

Same data, seed and number of steps for all; multipliers are updated after every epoch from
validation volumes. What a recipe does to calibration is seen without the noise of a label: the
phantom knows the probability of every voxel's label.

    python scripts/phantom_recipes.py                         # all recipes, minutes each on a CPU
    python scripts/phantom_recipes.py --recipes ce crac --epochs 4 --seeds 0 1 --json out.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from monai.networks.nets import UNet
from rich.console import Console
from rich.progress import track
from rich.table import Table

from segcal.datasets.phantom import make_phantom
from segcal.metrics.dice import dice
from segcal.metrics.ece import ece
from segcal.metrics.nll import nll
from segcal.metrics.tace import tace
from segcal.recipes import build, names
from segcal.reproduction.crac import tace_ref

CLASSES = 4
COLUMNS = ("DSC", "ECE", "ECE fg", "TACE", "TACE ref", "NLL", "abs error", "KL", "confidence")


def slices(n: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images ``(M, 1, y, x)``, labels ``(M, y, x)`` and posteriors ``(M, K, y, x)``."""
    phantoms = [make_phantom(rng) for _ in range(n)]
    images = torch.from_numpy(np.concatenate([p.image for p in phantoms]))[:, None]
    images = (images - images.mean()) / images.std()
    labels = torch.from_numpy(np.concatenate([p.labels for p in phantoms])).long()
    posterior = torch.from_numpy(np.concatenate([p.posterior.swapaxes(0, 1) for p in phantoms]))
    return images, labels, posterior


def measure(
    probs: torch.Tensor,
    labels: torch.Tensor,
    posterior: torch.Tensor,
    decision: torch.Tensor | None = None,
) -> dict[str, float]:
    """Row of the table; of two heads `decision` is what the mask comes from.

    ``abs error``: mean over voxels of half the sum over classes of the distance to the posterior;
    ``KL``: that of the posterior from p; ``confidence``: mean of the largest p less the posterior
    of that class (above 0: overconfident).
    """
    predicted = probs.argmax(1)
    mask = predicted if decision is None else decision.argmax(1)
    foreground = labels > 0
    q = posterior.double()
    log_ratio = torch.where(q > 0, q.clamp(min=1e-12).log() - probs.double().clamp(1e-12).log(), 0)
    true_of_predicted = q.gather(1, predicted[:, None])[:, 0]
    return {
        "DSC": float(np.mean([dice(mask, labels, k) for k in range(1, CLASSES)])),
        "ECE": ece(probs, labels),
        "ECE fg": ece(probs, labels, mask=foreground),
        "TACE": tace(probs, labels),
        "TACE ref": tace_ref(probs, labels, mask=foreground),
        "NLL": nll(probs, labels),
        "abs error": float((probs - q).abs().sum(1).mean() / 2),
        "KL": float((q * log_ratio).sum(1).mean()),
        "confidence": float((probs.max(1).values - true_of_predicted).mean()),
    }


def train(
    recipe: str, seed: int, epochs: int, steps: int, batch: int
) -> tuple[dict[str, float], str]:
    data = np.random.default_rng(seed)
    images, labels, _ = slices(24, data)
    val_images, val_labels, _ = slices(6, data)
    test_images, test_labels, posterior = slices(12, data)
    torch.manual_seed(seed)
    objective = build(recipe, CLASSES)
    channels = CLASSES * objective.num_heads
    network = UNet(2, 1, channels, (16, 32, 64, 128), (2, 2, 2), num_res_units=1)
    optimiser = torch.optim.Adam(network.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * steps)
    order = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        objective.advance(epoch / epochs)
        network.train()
        for _ in range(steps):
            pick = torch.randint(0, len(images), (batch,), generator=order)
            optimiser.zero_grad()
            loss, _ = objective.step(network, images[pick], labels[pick])
            loss.backward()
            optimiser.step()
            schedule.step()
        network.eval()
        with torch.no_grad():
            for x, y in zip(val_images.split(batch), val_labels.split(batch), strict=True):
                objective.observe(network(x), y)
        moved = objective.dual_step()
    with torch.no_grad():
        logits = torch.cat([network(x) for x in test_images.split(batch)])
    multipliers = "; ".join(
        f"{name} lambda {np.array(step.lam).round(3).tolist()}" for name, step in moved.items()
    )
    decision, probability = objective.by_head(logits)
    row = measure(torch.softmax(probability, 1), test_labels, posterior, decision)
    return row, multipliers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=names("recipes"), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=25, help="training steps an epoch")
    parser.add_argument("--batch", type=int, default=12, help="slices a step")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    console = Console(width=130)
    table = Table(
        title=f"phantoms, {options.epochs} epochs of {options.steps} steps, mean of seeds"
    )
    table.add_column("recipe")
    for column in (*COLUMNS, "s"):
        table.add_column(column, justify="right")
    _, labels, posterior = slices(42, np.random.default_rng(options.seeds[0]))
    truth = measure(posterior[-96:], labels[-96:], posterior[-96:])
    table.add_row("true posterior", *(f"{truth[c]:.4f}" for c in COLUMNS), "", end_section=True)
    results: dict[str, object] = {"true posterior": truth}
    for recipe in track(options.recipes, console=console):
        start = time.perf_counter()
        runs = [
            train(recipe, seed, options.epochs, options.steps, options.batch)
            for seed in options.seeds
        ]
        spent = time.perf_counter() - start
        results[recipe] = [row for row, _ in runs]
        cells = []
        for column in COLUMNS:
            values = [row[column] for row, _ in runs]
            spread = f" [{min(values):.3f}-{max(values):.3f}]" if len(values) > 1 else ""
            cells.append(f"{np.mean(values):.4f}{spread if column in ('DSC', 'ECE') else ''}")
        table.add_row(recipe, *cells, f"{spent:.0f}")
        if runs[-1][1]:
            console.print(f"{recipe}: {runs[-1][1]}")
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Which multi-label losses find the true posterior where it is known, and whether pairs help.

Recovery: a free logit for every label in each of 12 cells, so that the model can have any
posterior, and the exact minimiser of a loss shows which probability belongs to a logit. The error
against the posterior falls with more samples only if these probabilities are right.

Pairs: a small network on 20 features, with and without the label pair regulariser (LPR), against
the posterior of 2000 other samples, after the last epoch and after the epoch with the best
likelihood on validation samples (a quarter as many as training samples).

    python scripts/multilabel_posterior.py -o posterior             # some four minutes on a core
    python scripts/multilabel_posterior.py -o posterior --seeds 0 1 # sooner
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from segcal.classify.networks import MLP
from segcal.losses.multilabel.asymmetric import Asymmetric
from segcal.losses.multilabel.bce import BCE
from segcal.losses.multilabel.lpr import LPR
from segcal.losses.multilabel.posterior import MultiLabelLoss
from segcal.losses.multilabel.spa import SPA
from segcal.losses.multilabel.two_way import TwoWay

CELLS, CELL_LABELS = 12, 4
SIZES = (240, 960, 3840, 15360)
FEATURES, LABELS, TESTED = 20, 10, 2000
SMALL = (50, 100, 200, 400, 800)
BATCH, UPDATES, LEAST = 32, 480, 60
"""Samples of a step, steps of a training, smallest number of epochs."""
RECOVERED = {
    "BCE": BCE(),
    "SPA": SPA(),
    "ASY, m = 0": Asymmetric(4.0, 0.0, 0.0),
    "ASY, m = .05": Asymmetric(4.0, 0.0, 0.05),
    "two-way": TwoWay(),
}
PAIRED: dict[str, MultiLabelLoss] = {
    "BCE": BCE(),
    "BCE + LPR": LPR(BCE()),
    "SPA": SPA(),
    "SPA + LPR": LPR(SPA()),
}
Errors = dict[str, dict[int, list[float]]]
"""Mean distance to the posterior for every seed, by method and number of samples."""


def cell_posterior(seed: int) -> Tensor:
    """Posteriors ``(CELLS, CELL_LABELS)``."""
    rng = np.random.default_rng(seed)
    return torch.as_tensor(rng.beta(0.8, 1.6, (CELLS, CELL_LABELS)).clip(0.03, 0.97))


def minimiser(loss: MultiLabelLoss, cell: Tensor, targets: Tensor) -> Tensor:
    """Logits ``(CELLS, CELL_LABELS)`` that minimise the loss of all samples."""
    logits = torch.zeros(CELLS, CELL_LABELS, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [logits], max_iter=400, tolerance_grad=1e-9, tolerance_change=1e-13,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = logits.numel() * loss(logits[cell], targets)
        value.backward()
        return value

    optimiser.step(closure)
    return logits.detach()


def readings(name: str, loss: MultiLabelLoss, logits: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Probabilities of logits by the sigmoid, and by the link of the loss if it has one."""
    yield f"{name}, sigmoid", torch.sigmoid(logits)
    if not loss.no_posterior and not isinstance(loss, BCE):
        yield f"{name} + {loss.link_name}", loss.probabilities(logits)


def recover(seeds: list[int]) -> tuple[Errors, Errors, dict[str, Tensor]]:
    """Errors, the error by sampling alone, and pairs of truth and estimate at the largest n."""
    errors: Errors = defaultdict(lambda: defaultdict(list))
    sampling: Errors = defaultdict(lambda: defaultdict(list))
    pairs: dict[str, Tensor] = {}
    runs = [(seed, n) for seed in seeds for n in SIZES]
    for seed, n in track(runs, "Recovery"):
        eta = cell_posterior(seed)
        cell = torch.arange(n) % CELLS
        generator = torch.Generator().manual_seed(seed)
        targets = torch.rand((n, CELL_LABELS), generator=generator, dtype=torch.float64) < eta[cell]
        # E|frequency - eta| of a normal deviate
        spread = (2 / np.pi * eta * (1 - eta) / (n / CELLS)).sqrt()
        sampling["sampling error"][n].append(float(spread.mean()))
        for name, loss in RECOVERED.items():
            logits = minimiser(loss, cell, targets.long())
            for reading, found in readings(name, loss, logits):
                errors[reading][n].append(float((found - eta).abs().mean()))
                if seed == seeds[0] and n == SIZES[-1]:
                    pairs[reading] = torch.stack([eta.flatten(), found.flatten()])
    return errors, sampling, pairs


class World:
    """Features, labels that are independent given the features, and the posterior.

    Args:
        seed: of the weights that turn features into log-odds.
    """

    def __init__(self, seed: int) -> None:
        self.seed = 1000 * seed
        generator = torch.Generator().manual_seed(self.seed)
        self.weights = torch.randn(FEATURES, LABELS, generator=generator) * 2 / FEATURES**0.5

    def draw(self, n: int, part: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features ``(n, FEATURES)``, targets and posteriors ``(n, LABELS)``."""
        generator = torch.Generator().manual_seed(self.seed + part)
        x = torch.randn(n, FEATURES, generator=generator)
        eta = torch.sigmoid(x @ self.weights - 1.5)
        return x, (torch.rand(n, LABELS, generator=generator) < eta).long(), eta


def train(loss: MultiLabelLoss, n: int, seed: int) -> tuple[float, float]:
    """Error after the last epoch, and after the epoch that validation chooses."""
    world = World(seed)
    (x, y, _), (xv, yv, _), (xt, _, eta) = (
        world.draw(size, part) for part, size in enumerate((n, max(50, n // 4), TESTED), start=1)
    )
    torch.manual_seed(seed)
    network = MLP(FEATURES, LABELS, hidden=[64])
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    chosen, best, error = float("nan"), float("inf"), float("nan")
    for _ in range(max(LEAST, UPDATES * BATCH // n)):
        for batch in torch.split(torch.randperm(n), BATCH):
            optimiser.zero_grad()
            loss(network(x[batch]), y[batch]).backward()
            optimiser.step()
        with torch.no_grad():
            error = float((loss.probabilities(network(xt)) - eta).abs().mean())
            nll = float(BCE()(loss.log_odds(network(xv)), yv))
        if nll < best:
            chosen, best = error, nll
    return error, chosen


def with_pairs(seeds: list[int]) -> dict[str, Errors]:
    """Errors by the epoch that they belong to."""
    errors: dict[str, Errors] = {
        epoch: defaultdict(lambda: defaultdict(list)) for epoch in ("last epoch", "best epoch")
    }
    runs = [(n, name, seed) for n in SMALL for name in PAIRED for seed in seeds]
    for n, name, seed in track(runs, "Pairs"):
        for of, error in zip(errors.values(), train(PAIRED[name], n, seed), strict=True):
            of[name][n].append(error)
    return errors


def plot_recovery(errors: Errors, sampling: Errors, pairs: dict[str, Tensor]) -> Figure:
    """Error against n, and estimate against truth."""
    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    found = 0  # lines that lie on each other: the first is the widest
    for i, (name, of) in enumerate(errors.items()):
        biased = "sigmoid" in name and "BCE" not in name
        width = 1.2 if biased else 7.0 - 1.9 * found
        found += not biased
        look = {"color": f"C{i % 10}", "markersize": 3 if biased else 2 + width}
        mean, deviation = spread_of(of)
        left.errorbar(
            list(of), mean, deviation, fmt="o:" if biased else "o-", label=name, linewidth=width,
            elinewidth=1, **look,
        )  # fmt: skip
        right.plot(*pairs[name], "x" if biased else "o", linestyle="none", **look)
    of = sampling["sampling error"]
    left.plot(list(of), spread_of(of)[0], color="0.6", linewidth=12, alpha=0.4, zorder=0,
              label="sampling error")  # fmt: skip
    left.set(xscale="log", yscale="log", xlabel="samples", ylabel="mean distance to the posterior")
    right.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    right.set(xlabel="posterior", ylabel=f"estimate from {SIZES[-1]} samples", aspect="equal")
    figure.legend(loc="outside right center", frameon=False, fontsize="small")
    figure.suptitle("Which probabilities find the posterior (the solid lines lie on each other)")
    return figure


def plot_pairs(errors: dict[str, Errors]) -> Figure:
    """Error against n, with LPR and without, after the last and the best epoch."""
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (epoch, of_methods) in zip(axes, errors.items(), strict=True):
        for i, (name, of) in enumerate(of_methods.items()):
            mean, deviation = spread_of(of)
            axis.errorbar(
                list(of), mean, deviation, fmt="o-" if "LPR" in name else "o:", color=f"C{i // 2}",
                label=name, markersize=3, elinewidth=0.7,
            )  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="training samples", title=epoch)
        axis.set_xticks(SMALL, map(str, SMALL))
        axis.minorticks_off()
        axis.set_yticks([0.06, 0.08, 0.1, 0.15, 0.2], ["0.06", "0.08", "0.1", "0.15", "0.2"])
    axes[0].set_ylabel("mean distance to the posterior")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False,
        fontsize="small",
    )  # fmt: skip
    figure.suptitle("Posterior with the label pair regulariser and without")
    return figure


def spread_of(of: dict[int, list[float]]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation over seeds for every n."""
    return (
        [float(np.mean(v)) for v in of.values()],
        [float(np.std(v, ddof=1)) if len(v) > 1 else 0.0 for v in of.values()],
    )


def table(title: str, errors: Errors) -> Table:
    """Errors as readable text."""
    shown = Table(title=title)
    shown.add_column("method")
    for n in next(iter(errors.values())):
        shown.add_column(f"n = {n}", justify="right")
    for name, of in errors.items():
        cells = zip(*spread_of(of), strict=True)
        shown.add_row(name, *(f"{mean:.4f} ± {deviation:.4f}" for mean, deviation in cells))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.output.mkdir(parents=True, exist_ok=True)
    errors, sampling, pairs = recover(given.seeds)
    paired = with_pairs(given.seeds)
    plot_recovery(errors, sampling, pairs).savefig(given.output / "recovery.png", dpi=120)
    plot_pairs(paired).savefig(given.output / "pairs.png", dpi=120)
    tables = {"recovery": {**errors, **sampling}, **paired}
    (given.output / "errors.json").write_text(json.dumps(tables, indent=1))
    console = Console(width=120)
    for title, of in tables.items():
        console.print(table(f"{title}: mean distance to the posterior", of))
    console.print(f"Written: {given.output}")


if __name__ == "__main__":
    main()

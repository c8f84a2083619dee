"""Draw the figures of the documentation from generated data.

    python scripts/draw_docs.py            # into docs/assets
    python scripts/draw_docs.py -o FOLDER --only before_after

Every figure is an SVG with a light card of its own, so that it can be read on light and dark pages.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from scipy import ndimage

from segcal.binning import BinStatistics
from segcal.datasets.phantom import PhantomSettings, make_phantom
from segcal.metrics.ece import ece, reliability
from segcal.metrics.hausdorff import hausdorff
from segcal.neighbourhood import class_proportions, outer_region
from segcal.posthoc.class_region import ClassRegionTemperature
from segcal.surface import surface_distances

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
CARD, INK, SOFT = "#fbfbf9", "#222222", "#8a8a8a"
GOOD, BAD, THIRD = "#00796b", "#d1495b", "#edae49"
LABELS = ListedColormap(["#e9ecef", "#7fb7be", "#d3a588", "#b8dbd9"])
STYLE = {
    "figure.facecolor": CARD, "axes.facecolor": CARD, "savefig.facecolor": CARD,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": SOFT,
    "xtick.color": INK, "ytick.color": INK, "font.size": 9, "axes.titlesize": 9.5,
    "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "segcal",
    "image.interpolation": "nearest",
}  # fmt: skip
SHARPER = 3.0
"""Factor on the logits of the true posterior, as training with Dice may produce it."""
ZOOM = (slice(10, 60), slice(8, 62))
"""The heart in a slice."""


class Case(NamedTuple):
    """One generated heart, its labels, and the probabilities of an overconfident network."""

    image: np.ndarray
    labels: torch.Tensor
    posterior: torch.Tensor
    logits: torch.Tensor

    @property
    def probs(self) -> torch.Tensor:
        return self.logits.softmax(0)

    @property
    def near(self) -> np.ndarray:
        """Voxels within five of the labelled foreground."""
        return ndimage.binary_dilation(self.labels.numpy() > 0, np.ones((1, 11, 11), bool))


def case(seed: int) -> Case:
    phantom = make_phantom(np.random.default_rng(seed), PhantomSettings(shape=(6, 72, 72)))
    posterior = torch.from_numpy(phantom.posterior).double()
    labels = torch.from_numpy(phantom.labels.astype(np.int64))
    return Case(phantom.image, labels, posterior, SHARPER * posterior.clamp_min(1e-6).log())


def repaired(of: Case) -> torch.Tensor:
    """Probabilities of a case after a repair that was fitted to six other cases."""
    others = [case(100 + seed) for seed in range(6)]
    calibrator = ClassRegionTemperature().fit(
        torch.stack([c.logits for c in others]), torch.stack([c.labels for c in others])
    )
    return calibrator.apply(of.logits[None])[0].double()


def before_after() -> Figure:
    """Labels, confidence before and after repair, and the two reliability diagrams."""
    one, z = case(3), 2
    after = repaired(one)
    figure = Figure(figsize=(9.2, 4.6))
    grid = figure.add_gridspec(
        2, 3, left=0.03, right=0.98, bottom=0.16, top=0.93, wspace=0.28, hspace=0.32
    )
    wrong = (one.probs.argmax(0) != one.labels).numpy()
    _picture(
        figure.add_subplot(grid[0, 0]), one.image[z][ZOOM], "image (generated heart)", cmap="gray"
    )
    axes = figure.add_subplot(grid[1, 0])
    _picture(axes, one.labels[z].numpy()[ZOOM], "label", cmap=LABELS, vmin=0, vmax=3)
    for column, (name, probs, colour) in enumerate(
        (("overconfident network", one.probs, BAD), ("the same, repaired", after, GOOD)), 1
    ):
        axes = figure.add_subplot(grid[0, column])
        confidence = probs.amax(0)[z].numpy()[ZOOM]
        _picture(axes, confidence, f"{name}: confidence", cmap="magma", vmin=0.25, vmax=1)
        axes.contour(wrong[z][ZOOM], [0.5], colors="#2f9fd0", linewidths=0.7)
        axes = figure.add_subplot(grid[1, column])
        _reliability(axes, reliability(probs, one.labels, mask=one.near), colour)
        value = ece(probs, one.labels, mask=one.near)
        axes.set_title(f"near the foreground: ECE {value:.3f}")
    figure.text(
        0.36,
        0.015,
        "Blue lines enclose wrongly predicted voxels, which are the same before and after.",
        fontsize=8,
        color=INK,
    )
    return figure


def reliability_diagram() -> Figure:
    """One reliability diagram, with the gaps that ECE averages."""
    one = case(3)
    figure = Figure(figsize=(4.6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    statistics = reliability(one.probs, one.labels, mask=one.near)
    _reliability(axes, statistics, BAD)
    gap = int(np.nanargmax(statistics.count[:-1] * statistics.gap[:-1]))
    x, y = (gap + 0.5) / len(statistics.count), statistics.accuracy[gap]
    axes.annotate("", (x, y), (x, x), arrowprops={"arrowstyle": "<->", "color": INK})
    axes.annotate(
        "gap of a bin", (x, (x + y) / 2), (0.3, 0.85), arrowprops={"arrowstyle": "-", "color": SOFT}
    )
    axes.set_title(f"ECE {statistics.expected_error():.3f}: mean gap, weighted by voxels")
    return figure


def scopes() -> Figure:
    """The voxels of four scopes in a slice, with the ECE of each in the volume."""
    one, z = case(3), 2
    labels, predicted = one.labels.numpy(), one.probs.argmax(0).numpy()
    found = {
        "fg": labels > 0,
        "union": (labels > 0) | (predicted > 0),
        "dilated5": one.near,
        "all": np.ones_like(labels, bool),
    }
    figure = Figure(figsize=(9.2, 2.6))
    for column, (name, mask) in enumerate(found.items()):
        axes = figure.add_axes((0.015 + column * 0.247, 0.04, 0.23, 0.8))
        value = ece(one.probs, one.labels, mask=mask)
        _picture(axes, labels[z], f"{name}: ECE {value:.3f}", cmap=LABELS, vmin=0, vmax=3)
        chosen = np.zeros((*mask[z].shape, 4))
        chosen[~mask[z]] = (0.13, 0.13, 0.13, 0.55)
        axes.imshow(chosen)
    return figure


def hd95() -> Figure:
    """Two masks with an island, and the distances of both directions."""
    reference, prediction = np.zeros((2, 48, 64), bool)
    grid = np.indices(reference.shape)
    reference[(grid[0] - 24) ** 2 + (grid[1] - 20) ** 2 < 14**2] = True
    prediction[(grid[0] - 24) ** 2 + (grid[1] - 21) ** 2 < 13**2] = True
    prediction[22:25, 54:57] = True
    distances = surface_distances(prediction, reference, spacing_mm=(1.0, 1.0))
    pooled, largest = (
        hausdorff(prediction, reference, spacing_mm=(1.0, 1.0), percentile=95, definition=d)
        for d in ("pooled", "max_directed")
    )
    figure = Figure(figsize=(9.2, 2.9))
    axes = figure.add_axes((0.015, 0.05, 0.33, 0.82))
    _picture(
        axes,
        np.zeros(reference.shape),
        "reference (line), prediction (area)",
        cmap=ListedColormap([CARD]),
    )
    area = np.zeros((*prediction.shape, 4))
    area[prediction] = (*matplotlib.colors.to_rgb(THIRD), 0.8)
    axes.imshow(area)
    axes.contour(reference, [0.5], colors=GOOD, linewidths=2)
    axes = figure.add_axes((0.42, 0.17, 0.56, 0.7))
    values = [distances.prediction_to_reference, distances.reference_to_prediction]
    axes.hist(
        values,
        bins=np.arange(0, 25, 1.0),
        color=[THIRD, GOOD],
        label=["prediction to reference", "reference to prediction"],
    )
    top = axes.get_ylim()[1]
    for value, name, side in ((pooled, "pooled", "left"), (largest, "max-directed", "right")):
        axes.axvline(value, color=INK, linestyle="--", linewidth=1)
        shift = 0.3 if side == "left" else -0.3
        axes.text(value + shift, 0.55 * top, f"HD95 {name}\n{value:.1f} mm", ha=side)
    axes.set(xlabel="distance of a surface voxel (mm)", ylabel="surface voxels")
    axes.legend(frameon=False, loc="upper center", fontsize=8)
    return figure


def missed() -> Figure:
    """Three cases, one missed, and three means of their HD95."""
    grid = np.indices((40, 40))
    reference = (grid[0] - 20) ** 2 + (grid[1] - 18) ** 2 < 10**2
    predictions = [np.roll(reference, shift, axis=1) for shift in (1, 6)] + [
        np.zeros_like(reference)
    ]
    values = [hausdorff(p, reference, spacing_mm=(1.0, 1.0), percentile=95) for p in predictions]
    diagonal = float(np.hypot(*reference.shape))
    figure = Figure(figsize=(9.2, 2.9))
    for column, (prediction, value, name) in enumerate(
        zip(predictions, values, ("found", "badly found", "missed"), strict=True)
    ):
        axes = figure.add_axes((0.015 + column * 0.165, 0.1, 0.15, 0.7))
        said = "infinite" if np.isinf(value) else f"{value:.1f} mm"
        _picture(
            axes,
            prediction,
            f"{name}\nHD95 {said}",
            cmap=ListedColormap(["#e9ecef", THIRD]),
            vmin=0,
            vmax=1,
        )
        axes.contour(reference, [0.5], colors=GOOD, linewidths=1.6)
    finite = [v for v in values if np.isfinite(v)]
    means = {
        "0 for a miss\n(some published code)": sum(finite) / 3,
        "over the found\n(and the misses counted)": sum(finite) / 2,
        "diagonal for a miss\n(penalised)": (sum(finite) + diagonal) / 3,
    }
    axes = figure.add_axes((0.7, 0.17, 0.26, 0.68))
    bars = axes.barh(
        list(means)[::-1], list(means.values())[::-1], color=[GOOD, GOOD, BAD], height=0.6
    )
    axes.bar_label(bars, fmt="%.1f mm", padding=3)
    axes.set(xlim=(0, max(means.values()) * 1.3), title="mean HD95 of the three")
    axes.tick_params(axis="y", length=0)
    return figure


def method() -> Figure:
    """A label with the patch of a voxel, CRaC's regions, and CRaC's targets for logits."""
    z = 2
    labels = case(3).labels[z, 14:50, 18:54]
    outer = outer_region(labels[None])[0].numpy()
    tau = class_proportions(labels[None], 4)[0]
    spots = {"a": _spot(tau, 2, 1.0), "b": _spot(tau, 3, 5 / 9)}
    figure = Figure(figsize=(9.2, 3.1))
    axes = figure.add_axes((0.015, 0.05, 0.27, 0.8))
    _picture(axes, labels.numpy(), "label, and two patches of 3 x 3", cmap=LABELS, vmin=0, vmax=3)
    for name, (y, x) in spots.items():
        axes.add_patch(
            Rectangle((x - 1.5, y - 1.5), 3, 3, fill=False, edgecolor=INK, linewidth=1.5)
        )
        axes.text(x + 2.4, y - 1, name, fontweight="bold")
    axes = figure.add_axes((0.3, 0.05, 0.27, 0.8))
    _picture(
        axes,
        outer,
        "inner region, boundary region",
        cmap=ListedColormap(["#b2d8d2", BAD]),
        vmin=0,
        vmax=1,
    )
    names = ["back-\nground", "right\nventricle", "myo-\ncardium", "left\nventricle"]
    for row, (name, margin) in enumerate((("a", 5.0), ("b", 1.0))):
        axes = figure.add_axes((0.65, 0.58 - 0.44 * row, 0.33, 0.28))
        target = margin * tau[:, spots[name][0], spots[name][1]].numpy()
        bars = axes.bar(names, target, color=GOOD if row == 0 else BAD, width=0.55)
        axes.bar_label(bars, fmt="%.2g", fontsize=8)
        axes.set_ylim(0, max(target) * 1.3)
        where = "inner region, margin 5" if row == 0 else "boundary region, margin 1"
        axes.set_title(f"{name}, {where}: logits are pulled to", fontsize=9)
        axes.tick_params(axis="x", length=0, labelsize=7.5, labelbottom=row == 1)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    return figure


def _spot(tau: torch.Tensor, label: int, share: float) -> tuple[int, int]:
    """Voxel whose patch holds this share of a label, low down or on the right of the ventricle."""
    found = (tau[label] - share).abs()
    goal = torch.tensor([[0.8], [0.5]] if label == 2 else [[0.45], [0.9]])
    middle = goal * torch.tensor([[tau.shape[1]], [tau.shape[2]]])
    grid = torch.stack(torch.meshgrid(*(torch.arange(n) for n in tau.shape[1:]), indexing="ij"))
    far = (grid.flatten(1) - middle).norm(dim=0).view(tau.shape[1:])
    best = (100 * found + 0.01 * far).argmin()
    return int(best // tau.shape[2]), int(best % tau.shape[2])


def _picture(axes: Any, array: np.ndarray, title: str, **options: Any) -> None:
    axes.imshow(array, **options)
    axes.set_title(title)
    axes.set_axis_off()


def _reliability(axes: Any, statistics: BinStatistics, colour: str) -> None:
    edges = np.linspace(0, 1, len(statistics.count) + 1)
    shown = statistics.count > 0
    axes.bar(
        (edges[:-1] + edges[1:])[shown] / 2,
        statistics.accuracy[shown],
        width=0.9 / len(shown),
        color=colour,
        alpha=0.85,
    )
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle="--")
    axes.set(xlim=(0.2, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")


FIGURES: dict[str, Callable[[], Figure]] = {
    "before_after": before_after,
    "reliability": reliability_diagram,
    "scopes": scopes,
    "hd95": hd95,
    "missed": missed,
    "method": method,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=ASSETS)
    parser.add_argument("--only", choices=FIGURES, nargs="+", default=list(FIGURES))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name in options.only:
            path = options.output / f"{name}.svg"
            FIGURES[name]().savefig(path, metadata={"Date": None})
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

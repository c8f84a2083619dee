"""Draws the functions of a constraint that augmented Lagrangian methods use.

The multiplier is the weight of a constraint, which is learned during training.
"""

from __future__ import annotations

import torch
from matplotlib.figure import Figure

from segcal.alm.functions import FUNCTIONS
from segcal.reporting.legends import add_side_legend

SHOWN = {"phr": "PHR", "p2": "P2", "p3": "P3"}
"""Functions that are drawn, and their names in papers."""
WEIGHTS = ((0.1, 1.0), (1.0, 1.0), (1.0, 2.0), (1.0, 4.0))
"""Multipliers and penalty parameters that are drawn."""
REACH, POINTS = 1.5, 301
"""Range of the constraint to each side of 0, and number of values that are drawn."""


def plot_penalty_functions() -> Figure:
    """Draw every function of a constraint and its slope, one column per function.

    The slope is the next multiplier if all samples have this value of the constraint.
    """
    figure = Figure(figsize=(10.4, 6.0), layout="constrained")
    axes = figure.subplots(2, len(SHOWN), sharex=True, sharey="row")
    z = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    for column, (key, name) in zip(axes.T, SHOWN.items(), strict=True):
        for lam, rho in WEIGHTS:
            label = f"lam = {lam:g}, rho = {rho:g}"
            for axis, values in zip(column, FUNCTIONS[key](z, lam, rho), strict=True):
                axis.plot(z.numpy(), values.numpy(), label=label, linewidth=1.5)
        for axis in column:
            axis.axvline(0, color="0.8", linewidth=0.8, zorder=0)
            axis.axhline(0, color="0.8", linewidth=0.8, zorder=0)
            axis.spines[["top", "right"]].set_visible(False)
        column[0].set_title(name, fontsize=11)
        column[1].set_xlabel("constraint z (fulfilled where z ≤ 0)")
    axes[0, 0].set_ylabel("penalty P(z)")
    axes[1, 0].set_ylabel("slope P'(z), the next multiplier")
    add_side_legend(figure, axes[0, 0].lines[: len(WEIGHTS)])
    figure.suptitle("Functions of a constraint", fontsize=12)
    return figure

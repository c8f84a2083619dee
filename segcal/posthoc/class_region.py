"""A temperature for every predicted class and region of the predicted map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from scipy.optimize import minimize
from torch import Tensor

from segcal.posthoc.calibrator import PointwiseCalibrator
from segcal.posthoc.regions import Regions
from segcal.posthoc.rows import Rows, log_softmax
from segcal.posthoc.scale import BOUNDS, best_scale, drawn_scale, is_bound

__all__ = ["ClassRegionTemperature"]

STRENGTHS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, math.inf)
"""Strengths of the shrinkage that are tried: nats per voxel at e times the global temperature."""
UNTRIED = 1e-3
"""Strength where there is only one case, so that no strength can be tried."""
FOLDS = 5
GRID = 65
"""Number of scales at which the NLL of a group is computed while strengths are tried."""


class ClassRegionTemperature(PointwiseCalibrator):
    """``softmax(l / T_g + b_g)``, where the group g is the predicted class and region of a voxel.

    The group of a voxel is known without a reference, so that its calibration also holds for new
    cases; groups by label cannot be calibrated even for the true posterior. The temperatures are

        argmin  (1/N) sum_i NLL_i(T_g(i)) + strength * sum_g (log T_g - log T)^2,

    where T is the global temperature. The smaller a group's share of the voxels, the nearer its
    temperature stays to T. The strength is the one with the smallest NLL in cross-validation over
    patients, from 1e-7 to infinity (one temperature for all). Without biases b the predicted class
    never changes.

    Args:
        per_channel: whether every channel is a sigmoid of its own, with labels that may overlap.
            Each channel then has the groups inside and outside, in the interior and at the
            boundary.
        bands: upper ends of the regions, as in :class:`segcal.posthoc.regions.Regions`.
        biases: whether every group also gets a bias b_gk for each class, drawn to 0 with the
            same strength (which is chosen for the temperatures alone).
        strength: strength of the shrinkage to T; None chooses it.

    Attributes:
        temperatures: float64 ``(K, R)`` by predicted class and region; a group without voxels has
            the global temperature.
        global_temperature: T.
        chosen_strength: strength of the shrinkage; infinity means one temperature for all.

    Raises:
        ValueError: bands that are not ascending, a negative strength.
    """

    grouped = True
    temperatures: NDArray[np.float64]

    def __init__(
        self,
        *,
        per_channel: bool = False,
        bands: Sequence[float] | None = None,
        biases: bool = False,
        strength: float | None = None,
    ) -> None:
        regions = Regions(None if bands is None else tuple(float(end) for end in bands))
        super().__init__(per_channel=per_channel, regions=regions)
        if strength is not None and not strength >= 0:
            raise ValueError(f"strength: expected 0 or more, or None, got {strength}")
        self.biases = biases
        self.strength = strength
        self.global_temperature = 1.0
        self.chosen_strength = math.inf
        self.temperatures = np.ones((0, self.regions.count))
        self._biases = np.zeros((0, 0))

    def _fit(self, rows: Rows) -> None:
        scale = best_scale(rows)
        groups = [rows.where(rows.groups == g) for g in range(rows.num_groups)]
        self.chosen_strength = (
            _cross_validated(rows, scale) if self.strength is None else self.strength
        )
        strength = self.chosen_strength * float(rows.weights.sum())
        log_s = np.full(len(groups), math.log(scale))
        biases = np.zeros((len(groups), rows.num_classes))
        for g, one in enumerate(groups):
            if not len(one) or math.isinf(strength):
                continue
            log_s[g] = math.log(drawn_scale(one, scale, strength))
            if self.biases:
                log_s[g], biases[g] = _with_biases(one, log_s[g], scale, strength)
        self.global_temperature = 1 / scale
        self.temperatures = np.exp(-log_s).reshape(rows.num_classes, rows.num_regions)
        self._biases = biases
        if bounds := [g for g, u in enumerate(log_s) if is_bound(math.exp(u))]:
            self._note(
                f"the temperature of {len(bounds)} of {len(groups)} groups is at a bound of the "
                f"search, {BOUNDS[0]:g} or {BOUNDS[1]:g}: the cases do not determine it"
            )

    def _log_probabilities(self, logits: Tensor, groups: Tensor) -> Tensor:
        scale = torch.from_numpy(1 / self.temperatures.reshape(-1)).to(logits)
        z = logits * scale[groups, None]
        if self.biases:
            z = z + torch.from_numpy(self._biases).to(logits)[groups]
        return log_softmax(z)

    def _arguments(self) -> dict[str, Any]:
        bands = self.regions.bands
        return {
            "bands": None if bands is None else list(bands),
            "biases": self.biases,
            "strength": self.strength,
        }

    def _learned(self) -> dict[str, Any]:
        strength = self.chosen_strength
        return {
            "temperatures": self.temperatures.tolist(),
            "global_temperature": self.global_temperature,
            "strength": None if math.isinf(strength) else strength,
            **({"biases": self._biases.tolist()} if self.biases else {}),
        }

    def _load(self, learned: dict[str, Any]) -> None:
        found = np.asarray(learned["temperatures"], np.float64)
        if found.ndim != 2 or found.shape[1] != self.regions.count or not found.size:
            raise ValueError(
                f"state: expected temperatures (K, {self.regions.count}), got {found.shape}"
            )
        if not (np.isfinite(found) & (found > 0)).all():
            raise ValueError("state: expected positive temperatures")
        if len(found) != (k := self.facts.get("num_classes", 2)):  # a channel has two classes
            raise ValueError(f"state: expected temperatures of {k} classes, got {len(found)}")
        self.temperatures = found
        self.global_temperature = float(learned["global_temperature"])
        strength = learned["strength"]
        self.chosen_strength = math.inf if strength is None else float(strength)
        if self.biases:
            self._biases = np.asarray(learned["biases"], np.float64)
            if self._biases.shape != (found.size, len(found)):
                raise ValueError(
                    f"state: expected biases {(found.size, len(found))}, got {self._biases.shape}"
                )


def _cross_validated(rows: Rows, scale: float) -> float:
    """The strength with the smallest NLL on patients left out of the fit; of ties the larger.

    Every group's NLL is needed at many scales for many subsets of the patients. It is a smooth
    function of one number, so it is computed once on a grid of log s for every fold of the patients
    and summed; splines through these sums are minimised. Only the choice of the strength depends on
    the splines.
    """
    present = torch.bincount(rows.patients) > 0
    if int(present.sum()) < 2:
        return UNTRIED
    fold = ((present.cumsum(0) - 1) % FOLDS)[rows.patients]
    folds = int(fold.max()) + 1
    grid = np.linspace(-math.log(BOUNDS[1]), -math.log(BOUNDS[0]), GRID)
    table = _nll_table(rows, fold, folds, np.exp(grid))  # (folds, groups, GRID)
    weight = np.zeros(folds)
    np.add.at(weight, fold.numpy(), rows.weights.numpy())
    left_out = np.zeros(len(STRENGTHS))
    fine = np.linspace(grid[0], grid[-1], 16 * (GRID - 1) + 1)
    for f in range(folds):
        rest = CubicSpline(grid, table.sum(0) - table[f], axis=1)(fine)  # (groups, fine)
        held = CubicSpline(grid, table[f], axis=1)(fine)
        start = fine[rest.sum(0).argmin()]
        for j, strength in enumerate(STRENGTHS):
            at = np.full(len(rest), rest.sum(0).argmin())
            if math.isfinite(strength):
                drawn = strength * (weight.sum() - weight[f]) * (fine - start) ** 2
                at = (rest + drawn).argmin(1)
            left_out[j] += held[np.arange(len(held)), at].sum()
    return STRENGTHS[len(STRENGTHS) - 1 - int(left_out[::-1].argmin())]


def _nll_table(
    rows: Rows, fold: Tensor, folds: int, scales: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Sum of the NLL by fold, group and scale."""
    table = torch.zeros((len(scales), folds * rows.num_groups), dtype=torch.float64)
    begin = 0
    for part in rows.chunks():
        cell = fold[begin : begin + len(part)] * rows.num_groups + part.groups
        begin += len(part)
        own = part.of_label(part.logits)
        for j, s in enumerate(scales):
            nll = torch.logsumexp(s * part.logits, 1) - s * own
            table[j].index_add_(0, cell, nll * part.weights)
    return table.T.reshape(folds, rows.num_groups, len(scales)).numpy()


def _with_biases(
    rows: Rows, log_s: float, to: float, strength: float
) -> tuple[float, NDArray[np.float64]]:
    """Log-scale and biases of a group that minimise its NLL with shrinkage, from `log_s` on."""

    def objective(x: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        s, b = math.exp(x[0]), torch.from_numpy(x[1:])
        value, gradient = 0.0, np.zeros_like(x)
        for part in rows.chunks():
            log_p = log_softmax(s * part.logits + b)
            value -= float(part.of_label(log_p) @ part.weights)
            error = log_p.exp()
            error[torch.arange(len(part)), part.labels] -= 1
            error *= part.weights[:, None]
            gradient[0] += s * float((error * part.logits).sum())
            gradient[1:] += error.sum(0).numpy()
        away = x - [math.log(to), *np.zeros(len(x) - 1)]
        return value + strength * float(away @ away), gradient + 2 * strength * away

    start = np.concatenate([[log_s], np.zeros(rows.num_classes)])
    ends = [(-math.log(BOUNDS[1]), -math.log(BOUNDS[0])), *[(-20.0, 20.0)] * rows.num_classes]
    total = float(rows.weights.sum())
    found = minimize(
        lambda x: tuple(part / total for part in objective(x)), start, jac=True, bounds=ends,
        method="L-BFGS-B", options={"ftol": 0, "gtol": 1e-8, "maxiter": 500},
    )  # fmt: skip
    return float(found.x[0]), found.x[1:]

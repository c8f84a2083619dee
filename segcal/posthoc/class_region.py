"""A temperature for every predicted class and region of the predicted map, and for every case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
SLOPES = tuple(sorted((i / 8 for i in range(-8, 17)), key=abs))
"""Slopes by the doubt that are tried, the smallest first."""
FEWEST = 10
"""Fewest patients for a slope by the doubt; with fewer it is 0.

Slopes that three or five patients chose did harm after some draws of these patients; from eight on
they seldom did, and helped where cases differ in difficulty (docs/which-method.md).
"""
GAIN = 1e-3
"""Least relative gain in the NLL in cross-validation for a slope."""


@dataclass(frozen=True)
class _Doubt:
    """How the temperature follows the doubt of a case: log T rises by ``slope (doubt - centre)``.

    Attributes:
        slope: 0 where all cases have the same temperatures.
        centre: mean doubt of the cases of the fit.
        low: smallest doubt of these; smaller ones count as this.
        high: their largest doubt.
    """

    slope: float = 0.0
    centre: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def scale(self, doubt: Tensor) -> Tensor:
        """Factor of the logits of cases with these doubts; 1 where a doubt is NaN."""
        away = (doubt.clamp(self.low, self.high) - self.centre).nan_to_num(0.0)
        return torch.exp(-self.slope * away)


class ClassRegionTemperature(PointwiseCalibrator):
    """``softmax(l / T_g + b_g)``, where the group g is the predicted class and region of a voxel.

    The group of a voxel is known without a reference, so that its calibration also holds for new
    cases; groups by label cannot be calibrated even for the true posterior. The temperatures are

        argmin  (1/N) sum_i NLL_i(T_g(i)) + strength * sum_g (log T_g - log T)^2,

    where T is the global temperature. The smaller a group's share of the voxels, the nearer its
    temperature stays to T. The strength is the one with the smallest NLL in cross-validation over
    patients, from 1e-7 to infinity (one temperature for all). Without biases b the predicted class
    never changes.

    One temperature for all cases is too low for the difficult ones and too high for the easy ones.
    With `per_case` all temperatures of a case are multiplied by ``exp(slope (doubt - centre))``,
    where the doubt is the logarithm of the share of errors that the network itself expects at and
    in the structures that it predicts::

        doubt = log(mean over i of 1 - max_k softmax(l_i)_k)

    The mean is over all voxels, labelled or not, but those within the predicted background (class
    0, in the region farthest from another class), so that neither the size of the image nor
    smoothed labels there matter. The centre is the mean doubt of the held-out cases. The slope,
    from -1 to 2, is chosen together with the strength; it is 0 with fewer than ten patients, and
    where it does not lower the NLL in cross-validation by a thousandth. A doubt beyond those of the
    held-out cases counts as the nearest of these. A case without such voxels, or of a single voxel
    (a sample without spatial axes), has the temperatures of the centre. This form is our own;
    others find a temperature for every sample from the image (Ding et al. 2021) or from the entropy
    of its softmax (Balanya et al. 2022).

    Args:
        per_channel: whether every channel is a sigmoid of its own, with labels that may overlap.
            Each channel then has the groups inside and outside, in the interior and at the
            boundary.
        bands: upper ends of the regions, as in :class:`segcal.posthoc.regions.Regions`.
        biases: whether every group also gets a bias b_gk for each class, drawn to 0 with the
            same strength (which is chosen for the temperatures alone).
        strength: strength of the shrinkage to T; None chooses it.
        per_case: whether temperatures also follow the doubt of a case. Whole cases must then be
            handed over: the doubt of a part is another.

    Attributes:
        temperatures: float64 ``(K, R)`` by predicted class and region; a group without voxels has
            the global temperature.
        global_temperature: T.
        chosen_strength: strength of the shrinkage; infinity means one temperature for all.
        slope: how steeply the logarithm of a case's temperatures rises with its doubt; 0 without
            `per_case`.

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
        per_case: bool = False,
    ) -> None:
        regions = Regions(None if bands is None else tuple(float(end) for end in bands))
        super().__init__(per_channel=per_channel, regions=regions)
        if strength is not None and not strength >= 0:
            raise ValueError(f"strength: expected 0 or more, or None, got {strength}")
        self.biases = biases
        self.strength = strength
        self.per_case = per_case
        self.global_temperature = 1.0
        self.chosen_strength = math.inf
        self.temperatures = np.ones((0, self.regions.count))
        self._biases = np.zeros((0, 0))
        self._doubt = _Doubt()

    @property
    def slope(self) -> float:
        """How steeply the logarithm of a case's temperatures rises with its doubt."""
        return self._doubt.slope

    def _fit(self, rows: Rows) -> None:
        doubts = _known_doubts(rows) if self.per_case else None
        slope, self.chosen_strength = _cross_validated(rows, doubts, self.strength)
        self._doubt = _Doubt()
        if doubts is not None and slope:
            known = doubts[doubts.isfinite()]
            low, high = known.aminmax()
            self._doubt = _Doubt(slope, float(known.mean()), float(low), float(high))
        rows = self._adapted(rows)
        scale = best_scale(rows)
        groups = [rows.where(rows.groups == g) for g in range(rows.num_groups)]
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

    def _nll(self, rows: Rows) -> tuple[float, float]:
        return super()._nll(self._adapted(rows) if self.improved else rows)

    def _adapted(self, rows: Rows) -> Rows:
        """Rows whose logits are multiplied by the factor of their case."""
        if not self._doubt.slope:
            return rows
        scale = self._doubt.scale(rows.doubts).to(rows.logits.dtype)
        return replace(rows, logits=rows.logits * scale[rows.cases, None])

    def _scale_of(self, logits: Tensor, groups: Tensor) -> float:
        if not self._doubt.slope:
            return 1.0
        doubt = torch.tensor(self._doubt_of(logits, groups), dtype=torch.float64)
        return float(self._doubt.scale(doubt))

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
            "per_case": self.per_case,
        }

    def _learned(self) -> dict[str, Any]:
        strength = self.chosen_strength
        return {
            "temperatures": self.temperatures.tolist(),
            "global_temperature": self.global_temperature,
            "strength": None if math.isinf(strength) else strength,
            **({"biases": self._biases.tolist()} if self.biases else {}),
            **({"doubt": vars(self._doubt)} if self.per_case else {}),
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
        if self.per_case:
            self._doubt = _Doubt(**{key: float(value) for key, value in learned["doubt"].items()})
            if not all(map(math.isfinite, vars(self._doubt).values())):
                raise ValueError(f"state: expected finite numbers of the doubt, got {self._doubt}")


def _known_doubts(rows: Rows) -> Tensor:
    """Doubts of the cases, NaN for cases without a row."""
    present = torch.bincount(rows.cases, minlength=rows.num_cases) > 0
    return torch.where(present, rows.doubts, torch.nan)


def _cross_validated(
    rows: Rows, doubts: Tensor | None, strength: float | None
) -> tuple[float, float]:
    """The slope and strength with the smallest NLL on patients left out of the fit.

    Of equal ones it is the smallest slope and the largest strength. A slope must gain at least
    ``GAIN``. Every group's NLL is needed at many scales for many subsets of the patients. It is a
    smooth function of one number, so it is computed once on a grid of log s for every fold of the
    patients, and summed; splines through these sums are minimised. A slope shifts the log s of a
    case, so for slopes it is computed for every case. Only the choice of both depends on the
    splines.

    Args:
        rows: of one softmax.
        doubts: of the cases, if a slope is to be chosen.
        strength: the strength, if it is not to be chosen.
    """
    present = torch.bincount(rows.patients) > 0
    patients = int(present.sum())
    known = None if doubts is None else rows.patients[doubts[rows.cases].isfinite()]
    many = known is not None and int(torch.bincount(known).count_nonzero()) >= FEWEST
    slopes = SLOPES if many else (0.0,)
    if len(slopes) == 1 and (strength is not None or patients < 2):
        return 0.0, UNTRIED if strength is None else strength
    fold = ((present.cumsum(0) - 1) % FOLDS)[rows.patients]
    part, away = fold, np.zeros(int(fold.max()) + 1)
    fold_of = np.arange(len(away))
    if doubts is not None and len(slopes) > 1:
        part, fold_of = rows.cases, np.zeros(rows.num_cases, np.int64)
        fold_of[rows.cases.numpy()] = fold.numpy()
        away = (doubts - doubts.nanmean()).nan_to_num(0.0).numpy()
    weight = np.zeros(len(fold_of))
    np.add.at(weight, part.numpy(), rows.weights.numpy())
    grid = np.linspace(-math.log(BOUNDS[1]), -math.log(BOUNDS[0]), GRID)
    fine = np.linspace(grid[0], grid[-1], 16 * (GRID - 1) + 1)
    table = _nll_table(rows, part, len(fold_of), np.exp(grid))  # (parts, groups, GRID)
    splines = [CubicSpline(grid, one, axis=1) for one in table]
    tried = STRENGTHS[::-1] if strength is None else (strength,)
    best = (math.inf, 0.0, math.inf)
    bound = math.inf  # that the NLL of the next slope must be below
    for slope in slopes:
        by_fold = np.zeros((int(fold.max()) + 1, rows.num_groups, len(fine)))
        for spline, far, own in zip(splines, away, fold_of, strict=True):
            by_fold[own] += spline(np.clip(fine - slope * far, grid[0], grid[-1]))
        left_out = np.zeros(len(tried))
        for f, held in enumerate(by_fold):
            rest = by_fold.sum(0) - held
            start = rest.sum(0).argmin()
            for j, one in enumerate(tried):
                at = np.full(len(rest), start)
                if math.isfinite(one):
                    drawn = one * weight[fold_of != f].sum() * (fine - fine[start]) ** 2
                    at = (rest + drawn).argmin(1)
                left_out[j] += held[np.arange(len(held)), at].sum()
        least = int(left_out.argmin())
        if left_out[least] < min(best[0], bound):
            best = (float(left_out[least]), slope, tried[least])
        if slope == 0:
            bound = (1 - GAIN) * float(left_out[least])
    return best[1:]


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

"""Beta calibration: log-odds that are linear in the logarithms of p and of 1 - p."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from segcal.posthoc.newton import Vector, minimised
from segcal.posthoc.one_vs_rest import OneVsRest

__all__ = ["BetaCalibration"]

RIDGE = 1e-7
"""Weight of the squared distance to the identity (1, 1, 0), in nats per voxel."""
AT_A_TIME = 1 << 16


class BetaCalibration(OneVsRest):
    """``logit p' = a ln p - b ln(1 - p) + c`` with a, b >= 0, for every class against the rest.

    Source: Kull et al. 2017, "Beta calibration: a well-founded and easily implemented improvement
    on logistic calibration for binary classifiers". The authors' program drops a feature whose
    coefficient is negative and fits again; here the smallest negative log-likelihood (NLL) under
    the bounds is found. The NLL is convex in (a, b, c), so this is the best of the fits with none,
    one or both of a and b at 0 that keep to the bounds. What the cases do not determine is held
    near the identity (1, 1, 0) by 1e-7 nats per voxel times the squared distance.

    With more than two classes the p' are divided by their sum. With two classes there is one map,
    for class 1, so that they sum to 1; the map of class 0 is the same with a and b exchanged and c
    negated.

    Args:
        per_channel: whether every channel is a sigmoid of its own, with labels that may overlap.

    Attributes:
        maps: (a, b, c), float64, of each class, or of class 1 of two; None for a class that is
            nowhere or everywhere in the cases, which keeps its p.
    """

    def _map_of(
        self, log_p: Tensor, log_q: Tensor, hits: Tensor, weights: Tensor, num_classes: int
    ) -> Vector:
        problem = _Logistic(log_p, log_q, hits, weights)
        found = problem.best([0, 1, 2])
        if (found[:2] >= 0).all():
            return found
        faces = [problem.best(free) for free in ([0, 2], [1, 2], [2])]
        return min((x for x in faces if (x[:2] >= 0).all()), key=lambda x: problem.first(x)[0])

    def _mapped(
        self, found: NDArray[np.float64], log_p: Tensor, log_q: Tensor
    ) -> tuple[Tensor, Tensor]:
        a, b, c = found
        odds = a * log_p - b * log_q + c
        return logsigmoid(odds), logsigmoid(-odds)

    def _is_map(self, found: NDArray[np.float64]) -> bool:
        return found.shape == (3,) and bool(np.isfinite(found).all() and (found[:2] >= 0).all())


class _Logistic:
    """Mean binary NLL of ``a ln p - b ln(1 - p) + c``, plus the ridge."""

    def __init__(self, log_p: Tensor, log_q: Tensor, hits: Tensor, weights: Tensor) -> None:
        self.log_p, self.log_q, self.hits = log_p, log_q, hits.double()
        self.weights = weights / weights.sum()

    def first(self, x: Vector) -> tuple[float, Vector]:
        """Value and gradient."""
        away = x - [1, 1, 0]
        value, gradient = RIDGE * float(away @ away), 2 * RIDGE * away
        for f, y, w in self._parts():
            odds = torch.from_numpy(x) @ f
            value += float(w @ (torch.nn.functional.softplus(odds) - y * odds))
            gradient = gradient + (f @ (w * (torch.sigmoid(odds) - y))).numpy()
        return value, gradient

    def hessian(self, x: Vector) -> NDArray[np.float64]:
        """Second derivatives ``(3, 3)``."""
        found = 2 * RIDGE * np.eye(3)
        for f, _, w in self._parts():
            p = torch.sigmoid(torch.from_numpy(x) @ f)
            found += ((f * (w * p * (1 - p))) @ f.T).numpy()
        return found

    def best(self, free: list[int]) -> Vector:
        """The minimum where the parameters that are not free are 0."""
        x = np.zeros(3)

        def at(part: Vector) -> Vector:
            full = x.copy()
            full[free] = part
            return full

        def first(part: Vector) -> tuple[float, Vector]:
            value, gradient = self.first(at(part))
            return value, gradient[free]

        start = np.array([1.0, 1.0, 0.0])[free]
        x[free] = minimised(first, lambda part: self.hessian(at(part))[np.ix_(free, free)], start)
        return x

    def _parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Features ``(3, n)``, hits and weights of some rows at a time."""
        for begin in range(0, len(self.hits), AT_A_TIME):
            part = slice(begin, begin + AT_A_TIME)
            log_p = self.log_p[part]
            features = torch.stack([log_p, -self.log_q[part], torch.ones_like(log_p)])
            yield features, self.hits[part], self.weights[part]

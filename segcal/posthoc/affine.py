"""Calibrators whose scores are linear in the parameters, such as ``softmax(W f(l) + b)``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from segcal.posthoc.calibrator import PointwiseCalibrator
from segcal.posthoc.newton import TOLERANCE, Vector, minimised
from segcal.posthoc.rows import Rows, log_softmax

__all__ = ["Affine", "Diagonal", "FullAffine", "Scores"]

RIDGE = 1e-7
"""Weight of the squared distance to the identity, in nats per voxel. It hardly moves what the cases
determine, and keeps the rest finite (a class that never occurs, separable cases)."""
FEW = 1 << 15
"""Largest number of rows for which the Hessian is computed."""
AT_A_TIME = 1 << 13
"""Number of rows in memory at a time; the Hessian needs K (K + 1) numbers of each."""


class Scores(ABC):
    """Scores ``z (n, K)`` of features ``(n, K)``, linear in parameters ``(p,)``.

    Args:
        num_classes: K.

    Attributes:
        shape: shape in which the parameters are shown.
    """

    shape: tuple[int, int]

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    @abstractmethod
    def identity(self) -> Vector:
        """Parameters ``(p,)`` at which the scores are the features themselves."""

    @abstractmethod
    def of(self, parameters: Tensor, features: Tensor) -> Tensor:
        """Scores ``(n, K)`` of features ``(n, K)``."""

    @abstractmethod
    def pulled(self, errors: Tensor, features: Tensor) -> Tensor:
        """Gradient ``(p,)`` of ``sum_ik errors_ik z_ik``."""

    @abstractmethod
    def curvature(self, p: Tensor, weights: Tensor, features: Tensor) -> Tensor:
        """Hessian ``(p, p)`` of ``sum_i weights_i NLL_i``, where the probabilities are `p`."""


class Diagonal(Scores):
    """``z_k = w_k f_k + b_k``; parameters are w and b, ``(2, K)``."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.shape = (2, num_classes)

    def identity(self) -> Vector:
        """See :class:`Scores`."""
        return np.repeat([1.0, 0.0], self.num_classes)

    def of(self, parameters: Tensor, features: Tensor) -> Tensor:
        """See :class:`Scores`."""
        w, b = parameters.view(2, -1)
        return w * features + b

    def pulled(self, errors: Tensor, features: Tensor) -> Tensor:
        """See :class:`Scores`."""
        return torch.cat([(errors * features).sum(0), errors.sum(0)])

    def curvature(self, p: Tensor, weights: Tensor, features: Tensor) -> Tensor:
        """See :class:`Scores`."""
        spread = torch.cat([p * features, p], 1)
        found = -(spread.T @ (weights[:, None] * spread))
        k = self.num_classes
        own = weights[:, None] * p
        cross = (own * features).sum(0)
        found.diagonal().add_(torch.cat([(own * features.square()).sum(0), own.sum(0)]))
        found[:k, k:].diagonal().add_(cross)
        found[k:, :k].diagonal().add_(cross)
        return found


class Full(Scores):
    """``z = W f + b``; parameters are (W, b), ``(K, K + 1)``."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.shape = (num_classes, num_classes + 1)

    def identity(self) -> Vector:
        """See :class:`Scores`."""
        return np.eye(self.num_classes, self.num_classes + 1).ravel()

    def of(self, parameters: Tensor, features: Tensor) -> Tensor:
        """See :class:`Scores`."""
        w = parameters.view(self.num_classes, -1)
        return features @ w[:, :-1].T + w[:, -1]

    def pulled(self, errors: Tensor, features: Tensor) -> Tensor:
        """See :class:`Scores`."""
        return torch.cat([errors.T @ features, errors.sum(0)[:, None]], 1).flatten()

    def curvature(self, p: Tensor, weights: Tensor, features: Tensor) -> Tensor:
        """See :class:`Scores`."""
        f = torch.cat([features, torch.ones_like(features[:, :1])], 1)
        spread = (p[:, :, None] * f[:, None]).flatten(1)
        found = -(spread.T @ (weights[:, None] * spread))
        m = f.shape[1]
        for k in range(self.num_classes):
            part = slice(k * m, (k + 1) * m)
            found[part, part] += f.T @ ((weights * p[:, k])[:, None] * f)
        return found


class _Objective:
    """Mean NLL of rows plus ``sum_j penalty_j (x_j - identity_j)^2``."""

    def __init__(
        self,
        rows: Rows,
        scores: Scores,
        features: Callable[[Tensor], Tensor],
        penalty: Vector,
    ) -> None:
        self.rows, self.scores, self.features = rows, scores, features
        self.penalty, self.identity = penalty, scores.identity()
        self.total = float(rows.weights.sum())

    def parts(self, x: Vector) -> Iterator[tuple[Rows, Tensor, Tensor]]:
        """Rows in parts, their features, and their log-probabilities at x."""
        theta = torch.from_numpy(x)
        for part in self.rows.chunks(AT_A_TIME):
            f = self.features(part.logits)
            yield part, f, log_softmax(self.scores.of(theta, f))

    def first(self, x: Vector) -> tuple[float, Vector]:
        """Value and gradient."""
        value, gradient = 0.0, torch.zeros(len(x), dtype=torch.float64)
        for part, f, log_p in self.parts(x):
            value -= float(part.of_label(log_p) @ part.weights)
            error = log_p.exp()
            error[torch.arange(len(part)), part.labels] -= 1
            gradient += self.scores.pulled(error * part.weights[:, None], f)
        away = x - self.identity
        return (
            value / self.total + float(self.penalty @ away**2),
            gradient.numpy() / self.total + 2 * self.penalty * away,
        )

    def hessian(self, x: Vector) -> NDArray[np.float64]:
        """Second derivatives ``(p, p)``."""
        found = torch.zeros((len(x), len(x)), dtype=torch.float64)
        for part, f, log_p in self.parts(x):
            found += self.scores.curvature(log_p.exp(), part.weights, f)
        return found.numpy() / self.total + np.diag(2 * self.penalty)

    def hessian_times(self, x: Vector, v: Vector) -> Vector:
        """Second derivatives times v."""
        found, direction = torch.zeros(len(x), dtype=torch.float64), torch.from_numpy(v)
        for part, f, log_p in self.parts(x):
            p, moved = log_p.exp(), self.scores.of(direction, f)
            moved = p * (moved - (p * moved).sum(1, keepdim=True))
            found += self.scores.pulled(moved * part.weights[:, None], f)
        return found.numpy() / self.total + 2 * self.penalty * v


def least_nll(
    rows: Rows,
    scores: Scores,
    *,
    features: Callable[[Tensor], Tensor] = lambda logits: logits,
    penalty: Vector | float = 0.0,
) -> Vector:
    """Return the parameters x that minimise mean NLL plus ``sum_j penalty_j (x_j - identity_j)^2``.

    The function is convex. With few rows Newton's method finds its minimum. With many rows it finds
    the minimum of a part of them, and the Hessian there preconditions the fit to all rows, so that
    conjugate gradients need few passes over the rows.

    Args:
        rows: rows to fit to.
        scores: scores of the method.
        features: function that turns logits ``(n, K)`` into features ``(n, K)``.
        penalty: ``(p,)``, in nats per voxel; :data:`RIDGE` is added.
    """
    weights = np.broadcast_to(penalty, scores.identity().shape) + RIDGE
    whole = _Objective(rows, scores, features, weights)
    if len(rows) <= FEW:
        return minimised(whole.first, whole.hessian, scores.identity())
    some = _Objective(rows.thinned(FEW), scores, features, weights)
    start = minimised(some.first, some.hessian, scores.identity())
    round_ = np.linalg.inv(np.linalg.cholesky(some.hessian(start))).T  # x = start + round_ u

    def first(u: Vector) -> tuple[float, Vector]:
        value, gradient = whole.first(start + round_ @ u)
        return value, round_.T @ gradient

    found = minimize(
        first, np.zeros_like(start), jac=True, method="trust-ncg",
        hessp=lambda u, v: round_.T @ whole.hessian_times(start + round_ @ u, round_ @ v),
        options={"gtol": TOLERANCE * np.linalg.svd(round_, compute_uv=False)[-1], "maxiter": 100},
    )  # fmt: skip
    return minimised(whole.first, whole.hessian, start + round_ @ found.x)


class Affine(PointwiseCalibrator):
    """``softmax(z)`` of scores z that are linear in the parameters.

    A method defines its scores, their features, and the penalty that keeps them near the identity.
    What the cases do not determine (the offset of a class that never occurs, the scale of separable
    cases) is held near the identity by :data:`RIDGE`.

    Args:
        per_channel: whether every channel is a sigmoid of its own, with labels that may overlap.

    Attributes:
        parameters: float64, in the shape of the scores.
    """

    parameters: NDArray[np.float64]

    def __init__(self, *, per_channel: bool = False) -> None:
        super().__init__(per_channel=per_channel)
        self.parameters = np.zeros((0, 0))

    @abstractmethod
    def _scores(self, num_classes: int) -> Scores:
        """Scores for K classes."""

    def _features(self, logits: Tensor) -> Tensor:
        return logits

    def _penalty(self, num_classes: int) -> Vector | float:
        return 0.0

    def _fit(self, rows: Rows) -> None:
        k = rows.num_classes
        scores = self._scores(k)
        found = least_nll(rows, scores, features=self._features, penalty=self._penalty(k))
        self.parameters = found.reshape(scores.shape)
        if all(
            bool((self._log_probabilities(part.logits, part.groups).argmax(1) == part.labels).all())
            for part in rows.chunks()
        ):
            self._note(
                "the cases are separable: every voxel is predicted right, so the best scale is "
                f"infinite; it stays finite because {RIDGE:g} nats per voxel draw it to 1"
            )

    def _log_probabilities(self, logits: Tensor, groups: Tensor) -> Tensor:
        parameters = torch.from_numpy(self.parameters.ravel()).to(logits)
        scores = self._scores(logits.shape[1])
        return log_softmax(scores.of(parameters, self._features(logits)))

    def _learned(self) -> dict[str, Any]:
        return {"parameters": self.parameters.tolist()}

    def _load(self, learned: dict[str, Any]) -> None:
        found = np.asarray(learned["parameters"], np.float64)
        k = found.shape[-1] if found.ndim else 0
        shapes = [self._scores(n).shape for n in (k, k - 1) if n >= 2]
        if found.shape not in shapes or not np.isfinite(found).all():
            raise ValueError(
                f"state: expected finite parameters in a shape of {shapes}, got {found.shape}"
            )
        self.parameters = found


class FullAffine(Affine):
    """``softmax(W f + b)`` with off-diagonal and intercept regularisation (ODIR).

    Args:
        per_channel: whether every channel is a sigmoid of its own, with labels that may overlap.
        off_diagonal: weight of the mean square of W off its diagonal, in nats per voxel.
        bias: weight of the mean square of b, in nats per voxel.

    Raises:
        ValueError: a negative weight; in the fit, more than 30 classes.
    """

    most_classes = 30  # with more, the K^2 numbers are noise

    def __init__(
        self, *, per_channel: bool = False, off_diagonal: float = 1e-3, bias: float = 1e-3
    ) -> None:
        super().__init__(per_channel=per_channel)
        for name, weight in (("off_diagonal", off_diagonal), ("bias", bias)):
            if not 0 <= weight < np.inf:
                raise ValueError(f"{name}: expected a finite weight of 0 or more, got {weight}")
        self.off_diagonal, self.bias = off_diagonal, bias

    def _scores(self, num_classes: int) -> Scores:
        return Full(num_classes)

    def _penalty(self, num_classes: int) -> Vector:
        k = num_classes
        found = np.full((k, k + 1), self.off_diagonal / (k * (k - 1)))
        np.fill_diagonal(found, 0)
        found[:, k] = self.bias / k
        return found.ravel()

    def _arguments(self) -> dict[str, Any]:
        return {"off_diagonal": self.off_diagonal, "bias": self.bias}

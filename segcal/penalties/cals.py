"""CALS: class-adaptive margin penalties, by augmented Lagrangian or by a heuristic rule."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from segcal.alm import AugmentedLagrangian
from segcal.arrays import check_choice
from segcal.sweep.fused import supports, sweep
from segcal.sweep.terms import Residual, Together
from segcal.tensors import check_logits_labels, full_precision, valid_mask
from segcal.term import DualStep, LearnedTerm, Reduce

__all__ = ["CALS", "CALSHR"]

Score = Literal["unweighted", "weighted"]


class CALS(AugmentedLagrangian):
    """Margin constraints with a weight per class, learned on the validation set.

    The constraint of class k is ``z_k <= 0``, where ``z_k = (d_k - m) / m`` and
    ``d_k = max_j l_j - l_k``. The penalty is ``(1 / (N K)) sum_i sum_k P(z_k; lam_k, rho_k)`` (Liu
    et al. 2023, "Class adaptive network calibration", eq. 11 and Alg. 2). The multipliers ``lam``
    and the penalty parameters ``rho`` are ``(1, K)``: one region holds all voxels. z may be
    negative, so multipliers can fall.

    The published code has no ignore label, clips every P' before averaging (``clamp_elementwise``),
    and bounds rho, which the paper does not. rho is updated every 10 passes as in the paper's
    table, not at every pass as in its Algorithm 2. The published configuration has margin 20, and
    the published constructor has P2 without growth of rho; the published run lines change these to
    margin 10, PHR and growth.

    Args:
        num_classes: K.
        margin: m; 10 for images, 6 for text in the paper.
        rho0: initial penalty parameter, 1 in the paper.
        ignore_index: label to leave out of the penalty and of the statistics.
        **alm: further arguments of :class:`segcal.alm.AugmentedLagrangian`.

    Raises:
        ValueError: options out of range.
    """

    def __init__(
        self,
        num_classes: int,
        margin: float = 10.0,
        rho0: float = 1.0,
        *,
        ignore_index: int | None = None,
        **alm: Any,
    ) -> None:
        super().__init__(num_classes, 1, rho0=rho0, **alm)
        _check_margin(margin)
        self.margin = margin
        self.ignore_index = ignore_index

    def constraints(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return z ``(N, K, *S)`` and regions ``(N, *S)``: 0, and -1 where ignored."""
        check_logits_labels(logits, labels, self.num_classes, self.ignore_index)
        z = (logits.amax(1, keepdim=True) - logits - self.margin) / self.margin
        return z, torch.where(valid_mask(labels, self.ignore_index), 0, -1)

    def swept(self) -> Residual | None:
        """Describe the penalty to :mod:`segcal.sweep`."""
        if not self.fused:
            return None
        lam, rho = self.weights_in_force()
        return Residual(
            lam=lam,
            rho=rho,
            function=self.function,
            shape="upper",
            margins=(self.margin,),
            scale=1 / self.margin,
            divisor=self.num_penalised,
            ignore_index=self.ignore_index,
            clip=self.lambda_bounds if self.clamp_elementwise else (-math.inf, math.inf),
        )

    def extra_repr(self) -> str:
        """Name what distinguishes this penalty when it is printed."""
        return f"margin={self.margin}, {super().extra_repr()}"


class CALSHR(LearnedTerm):
    """Margin penalties with a weight per class that a heuristic rule moves up or down.

    The penalty is ``(1 / (N K)) sum_i sum_k lam_k relu(d_k - m)``. After each validation pass with
    mean score ``S_k``, ``lam_k *= mu`` where ``S_k > tau S_k'`` and ``lam_k /= mu`` where
    ``S_k < S_k' / tau``; S' is the score of the pass before (Liu et al. 2023, eq. 15).

    The paper compares penalty values; its code compares ``lam_k relu(d_k - m)``, so that a raised
    weight raises its own score. Our score leaves the weight out; ``score="weighted"`` does what the
    code does. The code takes scores that are all 0 to mean that no pass was seen; ours remembers
    whether there was a pass.

    Args:
        num_classes: K.
        margin: m.
        lambda0: initial weights, 0.1 in the code.
        mu: factor by which a weight is raised or lowered.
        tau: tolerance of the comparison.
        lambda_bounds: weights are clipped to these.
        score: whether the compared score leaves the weight out or, ``weighted``, includes it to
            reproduce the published code.
        ignore_index: label to leave out.
        fused: compute value and gradient in one sweep, a single pass over the voxels
            (:mod:`segcal.sweep`).

    Raises:
        ValueError: options out of range.
    """

    lam: Tensor
    previous: Tensor
    has_previous: Tensor
    step: Tensor
    score_sum: Tensor
    count: Tensor

    def __init__(
        self,
        num_classes: int,
        margin: float = 10.0,
        *,
        lambda0: float = 0.1,
        mu: float = 1.1,
        tau: float = 1.1,
        lambda_bounds: tuple[float, float] = (1e-6, 1e6),
        score: Score = "unweighted",
        ignore_index: int | None = None,
        fused: bool = True,
    ) -> None:
        super().__init__()
        _check_margin(margin)
        low, high = lambda_bounds
        if not 0 < low <= lambda0 <= high < math.inf:
            raise ValueError(
                f"lambda_bounds, lambda0: expected 0 < low <= lambda0 <= high, "
                f"got {lambda_bounds}, {lambda0}"
            )
        if not (1 <= mu < math.inf and 1 <= tau < math.inf):
            raise ValueError(f"mu, tau: expected numbers >= 1, got {mu}, {tau}")
        check_choice("score", score, get_args(Score))
        self.num_classes = num_classes
        self.margin = margin
        self.mu = mu
        self.tau = tau
        self.lambda_bounds = (low, high)
        self.score: Score = score
        self.ignore_index = ignore_index
        self.fused = fused
        self.register_buffer("lam", torch.full((num_classes,), lambda0, dtype=torch.float64))
        self.register_buffer("previous", torch.zeros(num_classes, dtype=torch.float64))
        self.register_buffer("has_previous", torch.zeros((), dtype=torch.bool))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("score_sum", torch.zeros(num_classes, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def identity(self) -> dict[str, Any]:
        """Number of classes, and which score is compared."""
        return {**super().identity(), "num_classes": self.num_classes, "score": self.score}

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Bounds of the weights."""
        return {"lam": self.lambda_bounds}

    def _excess(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """relu(d - m) ``(N, K, *S)``, 0 where ignored, and the number of valid voxels."""
        check_logits_labels(logits, labels, self.num_classes, self.ignore_index)
        valid = valid_mask(labels, self.ignore_index)
        excess = logits.amax(1, keepdim=True) - logits - self.margin
        counts = valid.unsqueeze(1) & ~(excess < 0)  # NaN counts, to be seen
        return torch.where(counts, excess, 0.0), valid.sum()

    def swept(self) -> Residual | None:
        """Describe the penalty to :mod:`segcal.sweep`."""
        if not self.fused:
            return None
        return Residual(
            lam=self.lam.unsqueeze(0),
            rho=torch.zeros_like(self.lam).unsqueeze(0),
            function="relu",
            shape="upper",
            margins=(self.margin,),
            divisor=self.num_classes,
            ignore_index=self.ignore_index,
        )

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the penalty of `logits` ``(N, K, *S)``; 0 when no voxel is valid."""
        residual = self.swept()
        if residual is not None and supports(logits, residual):
            return sweep(logits, labels, Together(residual))[0]
        with full_precision(logits) as x:
            excess, n = self._excess(x, labels)
            per_class = excess.sum([0, *range(2, x.ndim)])
            return (self.lam.to(x) * per_class).sum() / (n.clamp(min=1) * self.num_classes)

    @torch.no_grad()
    def observe(self, logits: Tensor, labels: Tensor) -> None:
        """Add a validation batch to the score.

        Raises:
            ValueError: logits that are not finite.
        """
        with full_precision(logits) as x:
            excess, n = self._excess(x, labels)
            score = excess.sum([0, *range(2, x.ndim)], dtype=torch.float64)
            if not bool(torch.isfinite(score).all()):
                raise ValueError("logits: not finite in a validation batch; nothing was changed")
            self.score_sum += score * self.lam if self.score == "weighted" else score
            self.count += n

    @torch.no_grad()
    def dual_step(self, reduce: Reduce | None = None) -> DualStep:
        """Move the weights by the pass just observed, and start a new pass.

        A pass without voxels changes nothing. The first pass has nothing to compare with.

        Args:
            reduce: sums a float64 vector over ranks; None for one rank.
        """
        packed = torch.cat([self.score_sum, self.count.double().view(1)])
        if reduce is not None:
            packed = reduce(packed)
        n = packed[-1]
        score = packed[:-1] / n.clamp(min=1)
        if n > 0:
            if self.has_previous:
                up, down = score > self.tau * self.previous, score < self.previous / self.tau
                moved = torch.where(up, self.lam * self.mu, self.lam)
                moved = torch.where(down, self.lam / self.mu, moved)
                self.lam.copy_(moved.clamp(*self.lambda_bounds))
            self.previous.copy_(score)
            self.has_previous.fill_(True)
            self.step += 1
        self.start_pass()
        return DualStep(
            step=int(self.step),
            lam=[self.lam.tolist()],
            rho=[],
            constraint=[score.tolist()],
            count=[int(n)],
            notes=[] if n > 0 else ["no voxel in validation; its weights stay"],
        )

    def start_pass(self) -> None:
        """Forget what was observed since the last update."""
        self.score_sum.zero_()
        self.count.zero_()


def _check_margin(margin: float) -> None:
    if not 0 < margin < math.inf:
        raise ValueError(f"margin: expected a positive number, got {margin}")

"""Augmented Lagrangian: multipliers of a constraint and their update in validation.

A penalised objective, a loss L with a penalty added, is ``L + mean_i sum P(z_i; lam, rho)``, where
z is a constraint that should not be positive. The multipliers lam are weights of the penalty, which
grow where the constraint is violated on the validation set; rho sharpens the penalty where the
violation does not shrink (Liu et al., CALS, Alg. 2; CRaC, Alg. 1; Birgin & Martínez, "Practical
augmented Lagrangian methods").
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from segcal.alm.functions import FUNCTIONS, FunctionName
from segcal.arrays import check_choice
from segcal.late_checks import raise_wrong_labels
from segcal.sweep.fused import Statistics, statistics, supports, sweep
from segcal.sweep.terms import Residual, Together
from segcal.tensors import check_background, full_precision, is_soft
from segcal.term import DualStep, LearnedTerm, Reduce

__all__ = ["AugmentedLagrangian"]

Average = Literal["all", "region"]

MET = 1e-5
"""A mean constraint up to this is met; it is about the rounding of float32 logits above 10."""
LAMBDA_SUSPICIOUS = (10.0, 100.0)
"""Multipliers which suggest that the constraint cannot be met; the user is told at each of them."""


class AugmentedLagrangian(LearnedTerm):
    """A penalty whose weights, one per region and class, are learned on the validation set.

    A subclass defines :meth:`constraints`, which returns z ``(N, K, *S)`` and an integer region map
    ``(N, *S)`` in ``[0, R)`` with -1 for voxels that do not count. Where value and gradient can be
    computed in a single pass over the voxels (:mod:`segcal.sweep`), it also defines :meth:`swept`,
    which describes the same constraint to that fast path.

    The whole state is in buffers, so ``state_dict`` carries it and a resumed training continues
    exactly: ``lam``, ``rho``, ``previous`` (last pass's mean constraint, ``(R, K)``),
    ``has_previous`` ``(R, 1)``, ``step``, and the sums of a pass that is under way. The state also
    names the penalty that it belongs to, and a different penalty refuses it.

    With z >= 0, as in CRaC, every P' is at least lam, so multipliers can only grow.

    Args:
        num_classes: K.
        num_regions: R.
        per_channel: whether every channel has regions of its own; the region map is then
            ``(N, K, *S)``.
        function: P, one of ``phr``, ``p2``, ``p3`` and ``relu`` of :mod:`segcal.alm.functions`.
        lambda0: initial multipliers; None starts at the lower bound.
        rho0: initial penalty parameter, also its lower bound.
        rho_max: upper bound of rho (in the published code, not in the paper).
        gamma: factor by which rho grows.
        tau: rho grows where the constraint exceeds both `tau` times the constraint of the previous
            pass, and rounding (1e-5).
        rho_period: rho is updated every so many passes (by comparing with the pass just before, as
            the published code does; the paper's algorithm updates it at every pass).
        lambda_bounds: bounds (low, high) to which multipliers are clipped.
        average: ``all`` divides a region's sum by all valid voxels, where the voxels of other
            regions keep lam as it is (published code and poster). ``region`` divides by the
            region's own voxels, the textbook estimate, which lets the multipliers of a region with
            the share f_r of the voxels grow 1/f_r times faster.
        clamp_elementwise: clip every P' to `lambda_bounds` before averaging, as the published
            code does (changes lam by 1e-6 at most while no P' exceeds the upper bound).
        include_background: whether class 0 is penalised; if not, its multipliers stay, and neither
            the sum nor the number of classes in the mean includes it.
        start_epoch: passes to wait; until then the penalty is 0 and nothing is updated.
        fused: compute value and gradient in one sweep, a single pass over the voxels, where that is
            possible (:mod:`segcal.sweep`); False keeps to ordinary torch operations, which can be
            differentiated twice.

    Raises:
        ValueError: arguments out of range.
    """

    lam: Tensor
    rho: Tensor
    previous: Tensor
    has_previous: Tensor
    step: Tensor
    derivative_sum: Tensor
    constraint_sum: Tensor
    count: Tensor

    def __init__(
        self,
        num_classes: int,
        num_regions: int = 1,
        per_channel: bool = False,
        /,
        *,
        function: FunctionName = "phr",
        lambda0: float | None = None,
        rho0: float = 1.0,
        rho_max: float = 10.0,
        gamma: float = 1.2,
        tau: float = 0.9,
        rho_period: int = 10,
        lambda_bounds: tuple[float, float] = (1e-6, 1e6),
        average: Average = "all",
        clamp_elementwise: bool = False,
        include_background: bool = True,
        start_epoch: int = 0,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.num_regions = num_regions
        self.per_channel = per_channel
        self.function: FunctionName = function
        self.rho_bounds = (rho0, rho_max)
        self.gamma = gamma
        self.tau = tau
        self.rho_period = rho_period
        self.lambda_bounds = (lambda_bounds[0], lambda_bounds[1])
        self.average = average
        self.clamp_elementwise = clamp_elementwise
        self.include_background = include_background
        self.start_epoch = start_epoch
        self.fused = fused
        lambda0 = lambda_bounds[0] if lambda0 is None else lambda0
        self._check(lambda0)
        self._make_state(lambda0)

    def _check(self, lambda0: float) -> None:
        fewest = 1 if self.per_channel else 2
        if self.num_classes < fewest:
            raise ValueError(f"num_classes: expected at least {fewest}, got {self.num_classes}")
        check_choice("function", self.function, tuple(FUNCTIONS))
        check_choice("average", self.average, get_args(Average))
        check_background(self.include_background, self.per_channel)
        if self.start_epoch < 0:
            raise ValueError(f"start_epoch: expected >= 0, got {self.start_epoch}")
        low, high = self.lambda_bounds
        if not 0 < low <= lambda0 <= high:
            raise ValueError(
                "lambda_bounds, lambda0: expected 0 < low <= lambda0 <= high, "
                f"got {self.lambda_bounds}, {lambda0}"
            )
        rho0, rho_max = self.rho_bounds
        if not 0 < rho0 <= rho_max < math.inf:
            raise ValueError(f"rho0: expected 0 < rho0 <= rho_max, got {rho0} and {rho_max}")
        if not 1 <= self.gamma < math.inf or not 0 < self.tau <= 1:
            raise ValueError(
                f"gamma, tau: expected gamma >= 1, 0 < tau <= 1, got {self.gamma}, {self.tau}"
            )
        if self.rho_period < 1:
            raise ValueError(f"rho_period: expected >= 1, got {self.rho_period}")
        if self.function == "p3" and lambda0 < 1e-3:
            warnings.warn(
                f"function p3 multiplies its multipliers, which hardly leave lambda0 = {lambda0:g}"
                "; start from 1e-3 or more, or use phr",
                stacklevel=3,
            )
        if self.function == "relu":
            warnings.warn(
                "function relu never raises its multipliers, whose update is the mean of lam or 0: "
                f"they stay at lambda0 = {lambda0:g} or fall; use phr to learn multipliers",
                stacklevel=3,
            )

    def _make_state(self, lambda0: float) -> None:
        shape = (self.num_regions, self.num_classes)
        counted = (self.num_regions, self.num_classes if self.per_channel else 1)
        for name, value in (
            ("lam", torch.full(shape, lambda0, dtype=torch.float64)),
            ("rho", torch.full(shape, self.rho_bounds[0], dtype=torch.float64)),
            ("previous", torch.zeros(shape, dtype=torch.float64)),
            ("has_previous", torch.zeros(counted, dtype=torch.bool)),
            ("step", torch.zeros((), dtype=torch.int64)),
            ("derivative_sum", torch.zeros(shape, dtype=torch.float64)),
            ("constraint_sum", torch.zeros(shape, dtype=torch.float64)),
            ("count", torch.zeros(counted, dtype=torch.int64)),
        ):
            self.register_buffer(name, value)

    @abstractmethod
    def constraints(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return z ``(N, K, *S)`` and the region map ``(N, *S)`` in [0, R), -1 = does not count.

        `logits` are at least float32, outside autocast.
        """

    def swept(self) -> Residual | None:
        """Describe the penalty to :mod:`segcal.sweep`; None if only :meth:`constraints` can."""
        return None

    def identity(self) -> dict[str, Any]:
        """Shape, function, and whether every channel has regions of its own."""
        return {
            **super().identity(),
            "num_classes": self.num_classes,
            "num_regions": self.num_regions,
            "per_channel": self.per_channel,
            "function": self.function,
            **({} if self.include_background else {"include_background": False}),
        }

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Bounds of the multipliers, and of rho."""
        return {"lam": self.lambda_bounds, "rho": self.rho_bounds}

    @property
    def num_penalised(self) -> int:
        """Number of classes that are penalised."""
        return self.num_classes - (0 if self.include_background else 1)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the penalty: the mean of P over valid voxels, classes and regions.

        Every voxel belongs to one region and adds 0 to the other regions, so the sum is divided by
        N K R (as the published code does by averaging over 2K channels).

        Args:
            logits: floating ``(N, K, *S)``.
            labels: integer ``(N, *S)``.

        Returns:
            scalar; 0 with zero gradient when no voxel is valid.
        """
        residual = self.swept()
        if residual is not None and supports(logits, residual) and not is_soft(logits, labels):
            return sweep(logits, labels, Together(residual))[0]
        with full_precision(logits) as x:
            z, region = self.constraints(x, labels)
            value, _ = self._evaluate(z, region)
            valid = region >= 0
            kept = torch.where(valid if self.per_channel else valid.unsqueeze(1), value, 0.0)
            entries = valid.sum() * (1 if self.per_channel else self.num_penalised)
            return kept.sum() / (entries.clamp(min=1) * self.num_regions)

    def weights_in_force(self) -> tuple[Tensor, Tensor]:
        """Return lam and rho ``(R, K)``; zeros before `start_epoch`, and in classes left out."""
        factor: Tensor | None = None
        if self.start_epoch:
            factor = self.step >= self.start_epoch  # on its device: the host does not wait
        if not self.include_background:
            factor = self._penalised() if factor is None else factor & self._penalised()
        return (self.lam, self.rho) if factor is None else (self.lam * factor, self.rho * factor)

    def _penalised(self) -> Tensor:
        """Bool ``(K,)``."""
        first = self.num_classes - self.num_penalised
        return torch.arange(self.num_classes, device=self.lam.device) >= first

    def _evaluate(self, z: Tensor, region: Tensor) -> tuple[Tensor, Tensor]:
        """P and P' with the weights of the region that each voxel belongs to."""
        index = region.clamp(min=0)
        index = index if self.per_channel else index.unsqueeze(1)
        k = torch.arange(self.num_classes, device=z.device).view(-1, *(1,) * (z.ndim - 2))
        lam, rho = (w.to(z.dtype)[index, k] for w in self.weights_in_force())
        return FUNCTIONS[self.function](z, lam, rho)

    @torch.no_grad()
    def observe(self, logits: Tensor, labels: Tensor) -> None:
        """Add a validation batch to the sums, with the multipliers as they are now.

        Raises:
            ValueError: labels that do not fit, or logits that are not finite, neither of which must
                reach the multipliers.
        """
        derivatives, constraints, voxels = self._statistics(logits, labels)
        raise_wrong_labels()
        if not bool(torch.isfinite(derivatives + constraints).all()):
            raise ValueError(
                "logits: not finite in a validation batch; this penalty's sums and multipliers "
                "were not changed. Look for a diverged training or an fp16 overflow"
            )
        self.derivative_sum += derivatives
        self.constraint_sum += constraints
        self.count += voxels

    def _statistics(self, logits: Tensor, labels: Tensor) -> Statistics:
        """Sums of P' and of the constraint per region and class."""
        residual = self.swept()
        if (
            residual is not None
            and supports(logits, residual, statistics=True)
            and not is_soft(logits, labels)
        ):
            found = statistics(logits, labels, residual)
            return found._replace(voxels=found.voxels.unsqueeze(1))
        with full_precision(logits) as x:
            z, region = self.constraints(x, labels)
            _, derivative = self._evaluate(z, region)
            if self.clamp_elementwise:
                derivative = derivative.clamp(*self.lambda_bounds)
            axes = [0, *range(2, z.ndim)]
            where = region if self.per_channel else region.unsqueeze(1)
            regions = [where == r for r in range(self.num_regions)]
            derivatives, constraints = (
                torch.stack(
                    [torch.where(r, v, 0.0).sum(axes, dtype=torch.float64) for r in regions]
                )
                for v in (derivative, z)
            )
            return Statistics(derivatives, constraints, torch.stack([r.sum(axes) for r in regions]))

    @torch.no_grad()
    def dual_step(self, reduce: Reduce | None = None) -> DualStep:
        """Update lam, then rho, from the pass just observed, and start a new pass.

        Both updates use statistics gathered with the old values. A region without voxels keeps its
        row; a pass without any voxel changes nothing and does not count as a pass.

        Args:
            reduce: sums a float64 vector over ranks (``all_reduce`` with SUM); None for one rank.
                Sums and counts are reduced, never means, so uneven ranks agree with one process.

        Returns:
            the new state, and notes for the user about it.
        """
        derivative_sum, constraint_sum, n = self._sums(reduce)
        seen = n > 0
        notes = [
            f"region {r} had no voxel in validation; its multipliers stay"
            for r in range(self.num_regions)
            if not seen[r].any() and seen.any()
        ]
        total = n.sum(0)
        divisor = n.clamp(min=1) if self.average == "region" else total.clamp(min=1)
        constraint = constraint_sum / divisor
        if not seen.any():
            notes.append("no voxel was observed in validation; nothing is updated")
        elif int(self.step) < self.start_epoch:
            self.step += 1
            left = self.start_epoch - int(self.step)
            notes.append(
                f"the penalty starts after {left} more passes" if left else "the penalty starts now"
            )
        else:
            rest = 0.0 if self.average == "region" else (total - n) * self.lam
            notes += self._learn((derivative_sum + rest) / divisor, constraint, seen)
        self.start_pass()
        return DualStep(
            step=int(self.step),
            lam=self.lam.tolist(),
            rho=self.rho.tolist(),
            constraint=constraint.tolist(),
            count=[int(v) for v in n.sum(1)],
            notes=notes,
        )

    def _sums(self, reduce: Reduce | None) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of P' and of z ``(R, K)``, and voxels, over all ranks."""
        own = (self.derivative_sum, self.constraint_sum, self.count)
        packed = torch.cat([x.flatten().double() for x in own])
        packed = packed if reduce is None else reduce(packed)
        parts = torch.split(packed, [x.numel() for x in own])
        derivative, constraint, n = (p.view_as(x) for p, x in zip(parts, own, strict=True))
        return derivative, constraint, n

    def _learn(self, derivative: Tensor, constraint: Tensor, seen: Tensor) -> list[str]:
        """Move lam to the mean P', then rho where the constraint is stuck; return warnings."""
        moves = seen & self._penalised()
        before = self.lam.clone()
        self.lam.copy_(torch.where(moves, derivative.clamp(*self.lambda_bounds), self.lam))
        if (int(self.step) + 1) % self.rho_period == 0:
            stuck = constraint > (self.tau * self.previous).clamp(min=MET)
            stuck &= moves & self.has_previous
            grown = torch.where(stuck, self.rho * self.gamma, self.rho)
            self.rho.copy_(grown.clamp(*self.rho_bounds))
        self.previous.copy_(torch.where(seen, constraint, self.previous))
        self.has_previous |= seen
        self.step += 1
        reached = [
            limit
            for limit in (min(one, self.lambda_bounds[1]) for one in LAMBDA_SUSPICIOUS)
            if bool(((self.lam >= limit) & (before < limit)).any())
        ]
        if not reached:
            return []
        return [
            f"a multiplier reached {reached[-1]:g}: the constraint may be one that cannot be met. "
            "Where Dice falls, lower rho0, the margins or the weight of the penalty"
        ]

    def start_pass(self) -> None:
        """Forget what was observed since the last update."""
        for sums in (self.derivative_sum, self.constraint_sum, self.count):
            sums.zero_()

    def extra_repr(self) -> str:
        """Name what distinguishes this penalty when it is printed."""
        settings: dict[str, Any] = {
            "num_classes": self.num_classes,
            "function": self.function,
            "rho_bounds": self.rho_bounds,
            "average": self.average,
            "start_epoch": self.start_epoch,
            "per_channel": self.per_channel,
            "fused": self.fused,
        }
        return ", ".join(f"{k}={v}" for k, v in settings.items())

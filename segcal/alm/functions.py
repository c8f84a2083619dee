"""Functions P of a constraint z <= 0 with multipliers lam and penalty parameters rho.

An objective with constraints is ``L + mean_i sum P(z_i; lam, rho)`` (Liu et al., CALS, Alg. 2 and
eq. 9; Birgin and Martínez, "Practical augmented Lagrangian methods"). Each function returns P and
its derivative in z.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from segcal.sweep.terms import Z_LINEAR

__all__ = ["p2", "p3", "phr", "relu"]

FunctionName = Literal["phr", "p2", "p3", "relu"]
Weight = Tensor | float
Function = Callable[[Tensor, Weight, Weight], tuple[Tensor, Tensor]]


def phr(z: Tensor, lam: Weight, rho: Weight) -> tuple[Tensor, Tensor]:
    """Powell-Hestenes-Rockafellar function and its derivative in z.

    P is ``lam z + rho z^2 / 2`` where ``lam + rho z >= 0``, else ``-lam^2 / (2 rho)``; its
    derivative is ``max(0, lam + rho z)``.

    Args:
        z: constraint values, float32 or float64, any shape.
        lam: multipliers >= 0, numbers or broadcastable to z.
        rho: penalty parameters >= 0, numbers or broadcastable to z; with 0 the value is ``lam z``.

    Returns:
        value and derivative, both like z.
    """
    lam, rho = _like(z, lam), _like(z, rho)
    inside, beyond = _split(z)
    slope = lam + rho * inside
    value = torch.where(
        slope >= 0,
        lam * inside + 0.5 * rho * inside.square(),
        -0.5 * lam.square() / rho.clamp(min=torch.finfo(z.dtype).tiny),
    )
    derivative = slope.clamp(min=0)
    return value + derivative.detach() * beyond, derivative


def p2(z: Tensor, lam: Weight, rho: Weight) -> tuple[Tensor, Tensor]:
    """Function P2 and its derivative in z.

    P is ``lam z + lam rho z^2 + rho^2 z^3 / 6`` for z >= 0 and ``lam z / (1 - rho z)`` for z < 0.
    Arguments and result are as in :func:`phr`.
    """
    lam, rho = _like(z, lam), _like(z, rho)
    inside, beyond = _split(z)
    pos, neg = _sides(inside)
    denominator = 1 - rho * neg
    value = torch.where(
        inside >= 0,
        lam * pos + lam * rho * pos.square() + rho.square() * pos.pow(3) / 6,
        lam * neg / denominator,
    )
    derivative = torch.where(
        inside >= 0,
        lam + 2 * lam * rho * pos + 0.5 * rho.square() * pos.square(),
        lam / denominator.square(),
    )
    return value + derivative.detach() * beyond, derivative


def p3(z: Tensor, lam: Weight, rho: Weight) -> tuple[Tensor, Tensor]:
    """Function P3 and its derivative in z.

    P is ``lam z + lam rho z^2`` for z >= 0 and ``lam z / (1 - rho z)`` for z < 0. Its update
    multiplies the multipliers, so a tiny initial lam hardly grows. Arguments and result are as in
    :func:`phr`.
    """
    lam, rho = _like(z, lam), _like(z, rho)
    inside, beyond = _split(z)
    pos, neg = _sides(inside)
    denominator = 1 - rho * neg
    value = torch.where(inside >= 0, lam * pos + lam * rho * pos.square(), lam * neg / denominator)
    derivative = torch.where(inside >= 0, lam + 2 * lam * rho * pos, lam / denominator.square())
    return value + derivative.detach() * beyond, derivative


def relu(z: Tensor, lam: Weight, rho: Weight) -> tuple[Tensor, Tensor]:
    """Function ``lam max(z, 0)`` and its derivative ``lam 1[z >= 0]``; rho is not used."""
    return lam * _sides(z)[0], lam * (z >= 0)


def _like(z: Tensor, weight: Weight) -> Tensor:
    return torch.as_tensor(weight, dtype=z.dtype, device=z.device)


def _split(z: Tensor) -> tuple[Tensor, Tensor]:
    inside = z.clamp(max=Z_LINEAR)
    return inside, z - inside


def _sides(z: Tensor) -> tuple[Tensor, Tensor]:
    """Positive and negative part of z; the positive part has slope 1 at 0 (clamp has 0 there)."""
    return torch.where(z >= 0, z, 0.0), torch.where(z < 0, z, 0.0)


FUNCTIONS: dict[str, Function] = {
    "phr": phr,
    "p2": p2,
    "p3": p3,
    "relu": relu,
}

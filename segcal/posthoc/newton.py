"""Minimum of a smooth convex function of a few numbers, whose Hessian is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["minimised"]

TOLERANCE = 1e-8
"""Norm of the gradient at which a fit has converged, in nats per voxel."""
STEPS, HALVINGS = 300, 60

Vector = NDArray[np.float64]


def minimised(
    first: Callable[[Vector], tuple[float, Vector]],
    hessian: Callable[[Vector], NDArray[np.float64]],
    start: Vector,
) -> Vector:
    """Return the minimum of a strictly convex function, by Newton's method with halved steps.

    SciPy's trust-region methods judge every step by the function's value. Near the minimum the
    value changes by less than rounding, and these methods give up at gradients above
    :data:`TOLERANCE`; here such a step is judged by the gradient.

    Args:
        first: function that returns value and gradient ``(p,)`` at a point.
        hessian: function that returns the Hessian ``(p, p)`` at a point.
        start: point to start from, ``(p,)``.
    """
    x = start
    value, gradient = first(x)
    for _ in range(STEPS):
        if np.linalg.norm(gradient) <= TOLERANCE:
            break
        step = np.linalg.solve(hessian(x), -gradient)
        slope = float(gradient @ step)
        for halvings in range(HALVINGS):
            reach = 0.5**halvings
            there = x + reach * step
            value_there, gradient_there = first(there)
            enough = value_there <= value + 1e-4 * reach * slope
            below_rounding = -reach * slope < 1e-12 * max(1.0, abs(value))
            smaller = np.linalg.norm(gradient_there) < np.linalg.norm(gradient)
            if enough or (below_rounding and smaller):
                break
        else:
            break  # nothing but rounding is left
        x, value, gradient = there, value_there, gradient_there
    return x

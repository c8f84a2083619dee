"""Checks that the fast path has the values and the gradient of the readable float64 version.

In half precision, it is compared with its own results for the same numbers in float32: such coarse
logits often lie at a kink of a penalty, where rounding decides the side.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from segcal.gpu.cases import IGNORED, PENALTIES, batch, penalised
from segcal.gpu.findings import Findings

CLASSES = (2, 4, 20, 118)
SPACES = ((33, 40), (7, 9, 11), (16, 16, 16), (1, 65, 129))
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative tolerances; errors of the gradient are relative to its largest value."""
SCALE = 2.0**16


def run(findings: Findings, device: torch.device, *, tiny: bool) -> None:
    """Compare every penalty, number of classes, shape and precision, and run each twice."""
    classes, spaces = (CLASSES[:1], SPACES[:1]) if tiny else (CLASSES, SPACES)
    done = 0
    worst: dict[str, float] = {}
    for name, k, (i, space) in itertools.product(PENALTIES, classes, enumerate(spaces)):
        if findings.left < 5:
            findings.note("stopped_before", f"{name}, {k} classes, {space}")
            break
        for dtype, ignore in itertools.product(TOLERANCES, (False, True)):
            logits, labels = batch((2, k, *space), device, ignore=ignore, offset=i % 2)
            case = f"{name}, {k} classes, {space}, {str(dtype)[6:]}, ignore {ignore}"
            error = _compare(findings, case, name, logits.to(dtype), labels, ignore)
            key = f"{name}, {str(dtype)[6:]}"
            worst[key] = max(worst.get(key, 0.0), error)
            done += 1
        labels.fill_(IGNORED)
        value, gradient = _step(penalised(name, k, device, ignore=True), logits.float(), labels)
        nothing = not bool(value) and not gradient.any()
        findings.expect(nothing, f"{name}, {k} classes, {space}: all ignored, but not 0")
        findings.note("compared", done)
        findings.note("largest_error", worst)


def _compare(
    findings: Findings, case: str, name: str, logits: Tensor, labels: Tensor, ignore: bool
) -> float:
    """Keep the differences; return the largest error of the gradient."""
    k, device = logits.shape[1], logits.device
    fast = penalised(name, k, device, ignore=ignore)
    scale = SCALE if logits.dtype == torch.float16 else 1.0
    value, gradient = _step(fast, logits, labels, scale)
    again = _step(fast, logits, labels, scale)
    same = torch.equal(value, again[0]) and torch.equal(gradient, again[1])
    findings.expect(same, f"{case}: two runs differ")
    if logits.dtype == torch.float32:
        readable = penalised(name, k, device, ignore=ignore, fused=False)
        expected, slope = _step(readable, logits.double(), labels)
    else:
        expected, slope = _step(fast, logits.float(), labels)
    tolerance = TOLERANCES[logits.dtype]
    error = float((gradient.double() / scale - slope.double()).abs().max() / slope.abs().max())
    of_value = float((value.double() - expected).abs() / expected.abs())
    findings.expect(error <= tolerance, f"{case}: gradient differs by {error:.1e}")
    findings.expect(of_value <= tolerance, f"{case}: value differs by {of_value:.1e}")
    return error


def _step(
    objective: torch.nn.Module, logits: Tensor, labels: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Value, and gradient times a scale, as with a ``GradScaler``."""
    x = logits.detach().requires_grad_()
    value = objective(x, labels)
    (gradient,) = torch.autograd.grad(scale * value, x)
    return value.detach(), gradient

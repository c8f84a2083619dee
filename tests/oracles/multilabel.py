"""Multi-label losses, links and rankings as loops over plain numbers, from the papers' formulas."""

from __future__ import annotations

import math

import numpy as np


def sigmoid(a):
    return 1 / (1 + math.exp(-a)) if a >= 0 else math.exp(a) / (1 + math.exp(a))


def entries(v, y, positive, negative):
    """Mean over known entries of positive(v) where y = 1 and of negative(v) where y = 0."""
    values = []
    for row, targets in zip(v, y, strict=True):
        for a, t in zip(row, targets, strict=True):
            if t >= 0:
                values.append(positive(a) if t == 1 else negative(a))
    return sum(values) / len(values) if values else 0.0


def bce(v, y, w_pos, w_neg):
    total, n = 0.0, 0
    for row, targets in zip(v, y, strict=True):
        for c, (a, t) in enumerate(zip(row, targets, strict=True)):
            if t == 1:
                total -= w_pos[c] * math.log(sigmoid(a))
            elif t == 0:
                total -= w_neg[c] * math.log(1 - sigmoid(a))
            n += t >= 0
    return total / n if n else 0.0


def asymmetric(v, y, gamma_neg, gamma_pos, margin):
    def negative(a):
        q = max(sigmoid(a) - margin, 0.0)
        return -(q**gamma_neg) * math.log(1 - q)

    return entries(
        v, y, lambda a: -((1 - sigmoid(a)) ** gamma_pos) * math.log(sigmoid(a)), negative
    )


def spa(v, y, positive, negative):
    (zp, kp, bp), (zn, kn, bn) = positive, negative
    return entries(
        v,
        y,
        lambda a: math.log(1 + math.exp(-kp * (a - bp))) / zp,
        lambda a: math.log(1 + math.exp(kn * (a - bn))) / zn,
    )


def softmax_rows(v, y):
    values = []
    for row, targets in zip(v, y, strict=True):
        positives = [a for a, t in zip(row, targets, strict=True) if t == 1]
        total = sum(math.exp(a) for a, t in zip(row, targets, strict=True) if t >= 0)
        if positives:
            values.append(sum(-math.log(math.exp(a) / total) for a in positives) / len(positives))
    return sum(values) / len(values) if values else 0.0


def contrast(row, targets, t_pos, t_neg, bias=0.0):
    p = sum(math.exp(-a / t_pos) for a, t in zip(row, targets, strict=True) if t == 1)
    n = sum(math.exp(a / t_neg) for a, t in zip(row, targets, strict=True) if t == 0)
    if p == 0 or n == 0:
        return 0.0
    return math.log(1 + math.exp(t_neg * math.log(n) + t_pos * math.log(p) + bias))


def two_way_rows(v, y, t_pos, t_neg, average, bias=0.0):
    values = [contrast(r, t, t_pos, t_neg, bias) for r, t in zip(v, y, strict=True)]
    least = 1 if average == "valid" else 0
    n = sum(any(t >= least for t in targets) for targets in y)
    return sum(values) / n if n else 0.0


def joint(v, y, t_pos, t_neg, bias=0.0):
    return contrast([a for r in v for a in r], [t for r in y for t in r], t_pos, t_neg, bias)


def multi_similarity(v, y, t_pos, t_neg):
    values = []
    for row, targets in zip(v, y, strict=True):
        p = sum(math.exp(-a / t_pos) for a, t in zip(row, targets, strict=True) if t == 1)
        n = sum(math.exp(a / t_neg) for a, t in zip(row, targets, strict=True) if t == 0)
        if any(t >= 0 for t in targets):
            values.append(math.log(1 + p**t_pos) + math.log(1 + n**t_neg))
    return sum(values) / len(values) if values else 0.0


def lpr(eta, y):
    """Equations 19 and 20: the posterior that t is the positive one of an unequal pair."""
    values = []
    for row, targets in zip(eta, y, strict=True):
        known = [t for t, label in enumerate(targets) if label >= 0]
        total = 0.0
        for i, t in enumerate(known):
            for u in known[i + 1 :]:
                if targets[t] != targets[u]:
                    one, other = row[t] * (1 - row[u]), row[u] * (1 - row[t])
                    beta = one / (one + other)
                    total -= math.log(beta if targets[t] == 1 else 1 - beta)
        pairs = len(known) * (len(known) - 1) / 2
        if known:
            values.append(total / pairs if pairs else 0.0)
    return sum(values) / len(values) if values else 0.0


def phi(q, gamma_neg, gamma_pos, margin):
    def h(u, g):
        return (u**g - (g * u ** (g - 1) * (1 - u) * math.log(1 - u) if g else 0)) / (1 - u)

    if q <= margin:
        return 0.0
    a, b = h(q - margin, gamma_neg), h(1 - q, gamma_pos)
    return a / (a + b)


def average_precision(scores, relevant):
    """Precision at every distinct threshold, weighted by the recall it adds."""
    total, before, value = sum(relevant), 0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        above = [r for s, r in zip(scores, relevant, strict=True) if s >= threshold]
        value += (sum(above) - before) / total * sum(above) / len(above)
        before = sum(above)
    return value


def calibration_gaps(p, y, bins):
    """Gap and size of every bin (lo, hi] that holds a known entry."""
    cells = {}
    for row, targets in zip(p, y, strict=True):
        for a, t in zip(row, targets, strict=True):
            if t >= 0:
                cells.setdefault(min(max(math.ceil(a * bins - 1e-6) - 1, 0), bins - 1), []).append(
                    (a, t)
                )
    return [(abs(np.mean([a for a, _ in c]) - np.mean([t for _, t in c])), len(c))
            for c in cells.values()]  # fmt: skip

"""Loops in float64 from the definitions: no shared code with the package."""

from __future__ import annotations

from fractions import Fraction

import numpy as np


def _binned(values, hits, bins):
    total = 0.0
    for m in range(bins):
        lo, hi = m / bins, (m + 1) / bins
        slack = 1e-6 / bins
        inside = (values > lo + slack) & (values <= hi + slack)
        if m == 0:
            inside |= values <= slack
        if m == bins - 1:
            inside |= values > hi
        if inside.any():
            total += inside.sum() * abs(hits[inside].mean() - values[inside].mean())
    return total / len(values)


def ece(p, y, bins):
    return _binned(p.max(0), (p.argmax(0) == y).astype(float), bins)


def classwise_ece(p, y, bins):
    return np.mean([_binned(p[k], (y == k).astype(float), bins) for k in range(len(p))])


def tace(p, y, bins, threshold):
    """Fill ranges one after the other from runs of equal values, in exact fractions."""
    gaps = []
    for k in range(len(p)):
        kept = p[k] > threshold
        values, hits = p[k][kept], (y[kept] == k)
        n = len(values)
        runs = [[v, Fraction(int((values == v).sum())), Fraction(int(hits[values == v].sum()))]
                for v in np.unique(values)]  # fmt: skip
        for r in range(bins):
            room = Fraction(n // bins + (1 if r < n % bins else 0))
            size = room
            confidence, hit = 0.0, Fraction(0)
            while room > 0:
                v, count, good = runs[0]
                take = min(room, count)
                confidence += float(take) * v
                hit += good * take / count
                runs[0] = [v, count - take, good * (count - take) / count]
                if runs[0][1] == 0:
                    runs.pop(0)
                room -= take
            if size:
                gaps.append(abs(float(hit) - confidence) / float(size))
    return np.mean(gaps) if gaps else np.nan


def nll(p, y, floor):
    return np.mean([-np.log(max(p[k, i], floor)) for i, k in enumerate(y)])


def brier(p, y):
    return np.mean(
        [sum((p[k, i] - (k == y[i])) ** 2 for k in range(len(p))) for i in range(len(y))]
    )


def aurc(confidence, wrong):
    """Mean over k of the mean loss of the k most confident; ties, in no order, share their loss."""
    kept = []
    for value in np.unique(confidence)[::-1]:
        tied = wrong[confidence == value]
        kept += [tied.mean()] * len(tied)
    return np.mean(np.cumsum(kept) / np.arange(1, len(kept) + 1)) if kept else np.nan

"""Retrieval of the samples that have all wanted labels and none of the unwanted ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.ranking import average_precision
from segcal.tensors import UNKNOWN, as_tensor, label_masks

__all__ = [
    "Queries",
    "draw_queries",
    "query_log_scores",
    "query_relevance",
    "retrieval_curve",
    "retrieval_map",
]

IMPOSSIBLE = -1e30
"""Stands for log 0 in sums; no finite log-odds come near this value."""


class Queries(NamedTuple):
    """Conjunctive queries: labels that must apply, and labels that must not.

    Attributes:
        wanted: labels that must apply, bool ``(Q, T)``.
        unwanted: labels that must not apply, bool ``(Q, T)``; no label is in both.
    """

    wanted: Tensor
    unwanted: Tensor


def query_log_scores(log_odds: Any, wanted: Any, unwanted: Any) -> Tensor:
    """Log of the probability that a sample meets all conditions of a query.

    ``log s = sum_{wanted} log eta_t + sum_{unwanted} log(1 - eta_t)``, where labels count as
    independent given the sample (Cheng & Vasconcelos 2024, eqs. 22 and 23). It is computed from
    log-odds, so no posterior is rounded to 0 or 1; its exponential is the probability. A query
    without conditions has the value 0.

    Args:
        log_odds: log-odds of calibrated posteriors, floating ``(B, T)``; infinite values are
            allowed.
        wanted: labels that must apply, 0 and 1, or bool ``(Q, T)``.
        unwanted: labels that must not apply, likewise; no label is in both.

    Returns:
        float64 ``(Q, B)``.

    Raises:
        ValueError: shapes that do not fit, a label both wanted and unwanted, or NaN.
    """
    z = as_tensor(log_odds)
    if not z.is_floating_point() or z.ndim != 2 or bool(z.isnan().any()):
        raise ValueError(
            f"log_odds: expected floating (B, T) without NaN, got {z.dtype} {tuple(z.shape)}"
        )
    queries = _checked(wanted, unwanted, z.shape[1], z.device)
    z = z.double()
    total = queries.wanted.double() @ F.logsigmoid(z).clamp(min=IMPOSSIBLE).T
    total += queries.unwanted.double() @ F.logsigmoid(-z).clamp(min=IMPOSSIBLE).T
    return total.masked_fill(total <= IMPOSSIBLE, -torch.inf)


def query_relevance(targets: Any, wanted: Any, unwanted: Any) -> Tensor:
    """Whether each sample meets all conditions of each query: 1, 0, or -1 where unknown.

    A sample with an unknown label is irrelevant if a known label breaks a condition.

    Args:
        targets: ``(B, T)`` of 0, 1 and -1.
        wanted: labels that must apply, 0 and 1, or bool ``(Q, T)``.
        unwanted: labels that must not apply, likewise; no label is in both.

    Returns:
        int64 ``(Q, B)``.

    Raises:
        ValueError: shapes or targets that do not fit, or a label both wanted and unwanted.
    """
    y = as_tensor(targets)
    positive, negative = label_masks(torch.zeros(y.shape, device=y.device), y, name="targets")
    w, u = (q.double() for q in _checked(wanted, unwanted, y.shape[1], y.device))
    broken = w @ negative.double().T + u @ positive.double().T
    met = w @ positive.double().T + u @ negative.double().T
    conditions = (w + u).sum(1, keepdim=True)
    return torch.where(broken > 0, 0, torch.where(met == conditions, 1, UNKNOWN))


def retrieval_map(log_odds: Any, targets: Any, wanted: Any, unwanted: Any) -> float:
    """Mean over queries of the average precision of the samples that meet them.

    Queries that no sample meets are left out. From the ranking of a query, samples are left out for
    which it is unknown whether they meet it.

    Args:
        log_odds: log-odds of calibrated posteriors, floating ``(B, T)``.
        targets: ``(B, T)`` of 0, 1 and -1.
        wanted: labels that must apply, 0 and 1, or bool ``(Q, T)``.
        unwanted: labels that must not apply, likewise; no label is in both.

    Returns:
        a fraction of 1; NaN when no query is met.

    Raises:
        ValueError: shapes, values or queries that do not fit.
    """
    scores = query_log_scores(log_odds, wanted, unwanted).numpy(force=True)
    relevance = query_relevance(targets, wanted, unwanted).numpy(force=True)
    if scores.shape != relevance.shape:
        raise ValueError(
            f"targets: expected (B, T) = {tuple(as_tensor(log_odds).shape)} as log_odds, got "
            f"{tuple(as_tensor(targets).shape)}"
        )
    values = [
        average_precision(s[r != UNKNOWN], r[r != UNKNOWN] == 1)
        for s, r in zip(scores, relevance, strict=True)
        if (r == 1).any()
    ]
    return float(np.mean(values)) if values else float("nan")


def draw_queries(targets: Any, conditions: int, count: int, *, seed: int = 0) -> Queries:
    """Draw queries of `conditions` labels, one or more wanted, that at least one sample meets.

    First a sample is drawn, then the number of wanted labels (all numbers that the sample allows
    are equally likely). The wanted labels are drawn from the labels that apply to the sample, the
    unwanted ones from the labels that do not.

    Args:
        targets: ``(B, T)`` of 0, 1 and -1.
        conditions: labels per query, wanted and unwanted together, at least 1.
        count: number of draws; a query that is drawn twice is kept once.
        seed: random seed of the draws.

    Returns:
        wanted and unwanted labels, bool ``(Q, T)`` each, ``Q <= count``; Q is 0 when no sample has
        enough known labels.

    Raises:
        ValueError: shapes, targets or numbers that do not fit.
    """
    if conditions < 1 or count < 1:
        raise ValueError(f"conditions, count: expected at least 1, got {conditions} and {count}")
    y = as_tensor(targets)
    positive, negative = (
        m.numpy(force=True) for m in label_masks(torch.zeros(y.shape), y.cpu(), name="targets")
    )
    n_pos, n_neg = positive.sum(1), negative.sum(1)
    able = np.flatnonzero((n_pos > 0) & (n_pos + n_neg >= conditions))
    rng = np.random.default_rng(seed)
    drawn = np.zeros((count if able.size else 0, 2, y.shape[1]), dtype=bool)
    for query in drawn:
        i = rng.choice(able)
        low, high = max(1, conditions - n_neg[i]), min(conditions, n_pos[i])
        n_wanted = rng.integers(low, high + 1)
        query[0, rng.choice(np.flatnonzero(positive[i]), n_wanted, replace=False)] = True
        rest = rng.choice(np.flatnonzero(negative[i]), conditions - n_wanted, replace=False)
        query[1, rest] = True
    wanted, unwanted = torch.as_tensor(np.unique(drawn, axis=0)).unbind(1)
    return Queries(wanted, unwanted)


def retrieval_curve(
    log_odds: Any,
    targets: Any,
    *,
    conditions: Iterable[int] = (1, 2, 3, 4, 5),
    count: int = 500,
    seed: int = 0,
) -> dict[int, float]:
    """Retrieval mAP against the number of conditions, over queries drawn from the targets.

    Args:
        log_odds: log-odds of calibrated posteriors, floating ``(B, T)``.
        targets: ``(B, T)`` of 0, 1 and -1.
        conditions: numbers of labels per query.
        count: number of queries drawn per number of labels, by :func:`draw_queries`.
        seed: random seed of the draws, so that two models are compared on the same queries.

    Returns:
        the value of :func:`retrieval_map` by number of conditions.

    Raises:
        ValueError: shapes, values or numbers that do not fit.
    """
    return {
        n: retrieval_map(log_odds, targets, *draw_queries(targets, n, count, seed=seed))
        for n in conditions
    }


def _checked(wanted: Any, unwanted: Any, num_labels: int, device: torch.device) -> Queries:
    masks = []
    for name, mask in (("wanted", as_tensor(wanted)), ("unwanted", as_tensor(unwanted))):
        if (
            mask.ndim != 2
            or mask.shape[1] != num_labels
            or not bool(((mask == 0) | (mask == 1)).all())
        ):
            raise ValueError(
                f"{name}: expected 0 and 1, (Q, {num_labels}), a row per query, got "
                f"{tuple(mask.shape)}"
            )
        masks.append(mask.bool().to(device))
    if masks[0].shape != masks[1].shape:
        raise ValueError(
            f"wanted, unwanted: expected one shape, got {tuple(masks[0].shape)} and "
            f"{tuple(masks[1].shape)}"
        )
    if both := (masks[0] & masks[1]).any(1).nonzero().flatten().tolist():
        raise ValueError(f"wanted, unwanted: a label is in both in queries {both[:5]}")
    return Queries(*masks)

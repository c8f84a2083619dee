"""How well predicted DSC, the order of cases, and volumes agree with the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from segcal.io.files import finite
from segcal.metrics.aurc import aurc, excess_aurc
from segcal.metrics.limits_of_agreement import limits_of_agreement

MEAN = "mean"
"""Name of the mean over the labels of a case, among the names of labels."""
FEWEST = 3
"""Fewest cases for a rank correlation."""
GROUP = 5
"""Fewest cases in a group of the calibration curve."""
MOST_GROUPS = 10
DEFINITIONS = {
    "spearman": "rank correlation of predicted and true DSC over the cases that have both",
    "mae": "mean |predicted - true DSC|",
    "dsc bias": "mean of (predicted - true DSC)",
    "curve": f"means of predicted and true DSC in groups of {GROUP} or more cases with similar "
    "predicted DSC",
    "dsc aurc": "area under the risk-coverage curve: mean 1 - DSC of the most confident cases, "
    "averaged over all numbers of cases kept; random: cases in no order; ideal: cases in the order "
    "of their true DSC; excess: aurc - ideal",
    "volume bias_ml, limits_ml": "mean of (expected - reference volume), and this mean -+ 1.96 "
    "standard deviations of the difference (Bland, Altman)",
    "volume coverage": "share of reference volumes within their intervals",
}


@dataclass(frozen=True)
class Predicted:
    """Predicted and true DSC of one label, or of the mean over labels, by case.

    Attributes:
        cases: names of the cases.
        predicted: soft Dice confidence.
        true: DSC.
    """

    cases: list[str]
    predicted: NDArray[np.float64]
    true: NDArray[np.float64]


def label_names(rows: pd.DataFrame) -> list[str]:
    """Labels with probabilities, in the order of the table; may be empty.

    Args:
        rows: rows of a :class:`segcal.evaluation.cohort.Cohort`.
    """
    key = "soft_dice_confidence/"
    return [str(c).removeprefix(key) for c in rows.columns if str(c).startswith(key)]


def predicted_dsc(rows: pd.DataFrame) -> dict[str, Predicted]:
    """Predicted and true DSC by label, and their means over labels, where both are defined.

    Args:
        rows: rows of a :class:`segcal.evaluation.cohort.Cohort`.
    """
    names = label_names(rows)
    if not names:
        return {}
    predicted = rows[[f"soft_dice_confidence/{name}" for name in names]].set_axis(names, axis=1)
    true = rows[[f"dsc/{name}" for name in names]].set_axis(names, axis=1)
    predicted, true = predicted.where(true.notna()), true.where(predicted.notna())
    if len(names) > 1:
        predicted[MEAN], true[MEAN] = predicted.mean(axis=1), true.mean(axis=1)
    found = {}
    for name in predicted.columns:
        there = predicted[name].notna()
        found[str(name)] = Predicted(
            [str(case) for case in rows.index[there]],
            predicted.loc[there, name].to_numpy(dtype=np.float64),
            true.loc[there, name].to_numpy(dtype=np.float64),
        )
    return found


def dsc_agreement(of: Predicted) -> dict[str, Any]:
    """How well the predicted DSC agrees with the true DSC; undefined numbers are None."""
    p, t, n = of.predicted, of.true, len(of.true)
    rank = None
    if n >= FEWEST and np.ptp(p) > 0 and np.ptp(t) > 0:
        from scipy import stats  # here, since it takes half a second to import

        rank = finite(float(stats.spearmanr(p, t).statistic))
    area, excess = aurc(p, 1 - t), excess_aurc(p, 1 - t)
    return {
        "n": n,
        "spearman": rank,
        "mae": _mean(np.abs(p - t)),
        "bias": _mean(p - t),
        "predicted": _mean(p),
        "true": _mean(t),
        "aurc": finite(area),
        "aurc_random": _mean(1 - t),
        "aurc_ideal": finite(area - excess),
        "aurc_excess": finite(excess),
        "curve": curve(of),
    }


def in_words(numbers: dict[str, Any]) -> str:
    """Say in a sentence how well the predicted DSC agrees with the true DSC; empty without cases.

    Args:
        numbers: result of :func:`dsc_agreement`.
    """
    if not numbers["n"]:
        return ""
    rank, side = numbers["spearman"], "above" if numbers["bias"] > 0 else "below"
    return (
        f"Predicted DSC (soft Dice confidence) is on average {abs(numbers['bias']):.3f} {side} the "
        f"true DSC; mean absolute error {numbers['mae']:.3f}, rank correlation "
        f"{'undefined' if rank is None else format(rank, '.3f')}; over {numbers['n']} "
        f"case{'' if numbers['n'] == 1 else 's'}"
    )


def curve(of: Predicted) -> list[dict[str, float]]:
    """Calibration curve of the DSC: equal groups of cases with similar predicted DSC."""
    n = len(of.true)
    order = np.argsort(of.predicted, kind="stable")
    groups = np.array_split(order, min(MOST_GROUPS, n // GROUP)) if n >= GROUP else []
    return [
        {
            "n": len(group),
            "predicted": float(of.predicted[group].mean()),
            "true": float(of.true[group].mean()),
        }
        for group in groups
    ]


def volumes(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Volumes by label: ``true``, ``expected``, ``low``, ``high`` in ml, one row per case.

    Args:
        rows: rows of a :class:`segcal.evaluation.cohort.Cohort`.
    """
    voxel_ml = rows[[f"spacing_{a}_mm" for a in "zyx"]].prod(axis=1) / 1000 if len(rows) else 0
    return {
        name: pd.DataFrame(
            {
                "true": rows[f"voxels_reference/{name}"] * voxel_ml,
                "expected": rows[f"volume_ml/{name}"],
                "low": rows[f"volume_low_ml/{name}"],
                "high": rows[f"volume_high_ml/{name}"],
            }
        ).dropna()
        for name in label_names(rows)
    }


def volume_agreement(of: pd.DataFrame) -> dict[str, Any]:
    """Bias and limits of agreement of the expected volume, and coverage of its intervals.

    Args:
        of: table of one label from :func:`volumes`.
    """
    limits = limits_of_agreement(of["expected"], of["true"])
    covered = (of["low"] <= of["true"]) & (of["true"] <= of["high"])
    return {
        "n": len(of),
        "bias_ml": finite(limits.bias),
        "limits_ml": [finite(limits.low), finite(limits.high)],
        "mae_ml": _mean((of["expected"] - of["true"]).abs().to_numpy()),
        "coverage": _mean(covered.to_numpy(dtype=np.float64)),
        "median_width_ml": finite(float((of["high"] - of["low"]).median())),
    }


def _mean(values: NDArray[np.float64]) -> float | None:
    return finite(float(values.mean())) if len(values) else None

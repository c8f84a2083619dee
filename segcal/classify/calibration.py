"""Post-hoc calibration of a classifier: fitted to validation samples, applied to others."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from segcal.classify.prediction import log_odds_by_kind
from segcal.components import build_component
from segcal.losses.multilabel.posterior import MultiLabelLoss
from segcal.posthoc.calibrator import Calibrator
from segcal.posthoc.links import logits_of
from segcal.recipes import load_component
from segcal.repair.saved import SavedCalibrator

LOGITS = "logits"
UNKNOWN = -1
"""Target of a label if it is unknown whether a sample has it."""


def to_calibrate(logits: Tensor, loss: MultiLabelLoss | None) -> tuple[str, Tensor]:
    """Input of a classifier's calibrator, and the name of that input.

    Args:
        logits: ``(N, K)``.
        loss: multi-label loss; None for classes.

    Returns:
        float64 log-odds of the loss's posterior probabilities, if it has a posterior that is a
        strictly increasing function of the logits; else the logits as they are.
    """
    if loss is None or not loss.bijective:  # what a link puts to 0 would be lost
        return LOGITS, logits.double()
    kind, log_odds = list(log_odds_by_kind(logits, loss).items())[-1]
    return (LOGITS if torch.equal(log_odds, logits.double()) else f"log-odds by {kind}"), log_odds


def fit_classifier(
    method: str,
    logits: Tensor,
    targets: Tensor,
    names: tuple[str, ...],
    loss: MultiLabelLoss | None,
    **said: Any,
) -> SavedCalibrator:
    """Fit a method to samples that the network was not trained on.

    Args:
        method: name of its config, such as ``temperature``.
        logits: ``(N, K)`` of the samples.
        targets: classes ``(N,)``; or labels ``(N, K)`` of 0, 1, and -1 where unknown, which is
            left out; each label has its own sigmoid.
        names: of the classes or labels.
        loss: multi-label loss; None for classes.
        said: fields of :class:`segcal.repair.saved.SavedCalibrator`: ``model``, and entries of
            ``fitted_on``.

    Raises:
        ValueError: no such method, a method that needs spatial axes, or a label that is
            unknown in every sample.
    """
    labels = loss is not None
    calibrator = build_component(load_component("posthoc", method), per_channel=labels)
    if labels and (unknown := [n for n, y in zip(names, targets.T, strict=True) if (y < 0).all()]):
        raise ValueError(
            f"{', '.join(unknown)}: unknown in every validation sample, so nothing can be fitted "
            "to it; remove the label or choose other validation samples"
        )
    what, x = to_calibrate(logits, loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # facts tell the same
        try:
            calibrator.fit(x, targets, ignore_index=UNKNOWN if labels else None)
        except ValueError as error:
            raise ValueError(f"method {method}, on validation samples: {error}") from None
    fitted_on = {"of": what, "samples": len(targets), **said.pop("fitted_on", {})}
    return SavedCalibrator(method, calibrator, names, labels, fitted_on=fitted_on, **said)


def calibrated(logits: Tensor, loss: MultiLabelLoss | None, calibrator: Calibrator) -> Tensor:
    """Calibrated probabilities ``(N, K)`` of logits ``(N, K)``, float64."""
    return calibrator.apply(to_calibrate(logits, loss)[1])


def calibrated_log_odds(probs: Tensor) -> Tensor:
    """Log-odds of probabilities of labels ``(N, K)``, finite."""
    return logits_of(probs, regions=True)


def kind_of(saved: SavedCalibrator) -> str:
    """Name of the calibrated probabilities."""
    return f"calibrated ({saved.method})"


def sentences(saved: SavedCalibrator) -> list[str]:
    """Sentences that a reader of the calibrated numbers should know."""
    facts, fitted_on = saved.calibrator.facts, saved.fitted_on
    said = (
        f"{kind_of(saved)}: fitted to the {fitted_on['of']} of {fitted_on['samples']} validation "
        f"samples, which also chose the epoch; NLL there {facts['nll_before']:.4f}, then "
        f"{facts['nll_after']:.4f} nats."
    )
    return [said, *(f"{kind_of(saved)}: {note}." for note in facts["notes"])]

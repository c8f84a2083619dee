"""Prediction with the network of a trainer at the end of its training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from nnunetv2.inference.export_prediction import resample_and_save
from nnunetv2.training.nnUNetTrainer import nnUNetTrainer as host  # noqa: N813 - a module

from segcal.adapters.nnunet.exporting import export
from segcal.adapters.nnunet.patching import Aggregation, replaced
from segcal.adapters.nnunet.prediction import AveragingPredictor


def predictor_of(trainer: Any) -> AveragingPredictor:
    """Return a predictor for the trainer's network that works as ``segcal nnunet predict`` does."""
    predictor = AveragingPredictor(Aggregation(), device=trainer.device, allow_tqdm=False)
    network = trainer.network.module if trainer.is_ddp else trainer.network
    predictor.manual_initialization(
        network, trainer.plans_manager, trainer.configuration_manager, None,
        trainer.dataset_json, type(trainer).__name__, trainer.inference_allowed_mirroring_axes,
    )  # fmt: skip
    predictor.of_fold(Path(trainer.output_folder).name, trainer.configuration_name)
    return predictor


@contextmanager
def predicted_by_both_heads(trainer: Any) -> Iterator[None]:
    """Let nnU-Net's validation in this block write the probabilities of the probability head.

    Label maps still come from the decision head, including those for the next stage of a cascade.

    Args:
        trainer: nnU-Net's, whose network has two heads.
    """
    with (
        replaced(host, "nnUNetPredictor", partial(AveragingPredictor, Aggregation())),
        replaced(host, "export_prediction_from_logits", export),
        replaced(host, "resample_and_save", resample_decision),
    ):
        yield
    if trainer.local_rank == 0:
        predictor_of(trainer).describe(Path(trainer.output_folder) / "validation")


def resample_decision(predicted: Any, *arguments: Any) -> None:
    """Write the decision of logits ``(2 K, *S)`` as nnU-Net does for a cascade's next stage."""
    resample_and_save(predicted[: len(predicted) // 2], *arguments)

"""Dirichlet calibration: an affine map of the log-probabilities."""

from __future__ import annotations

from torch import Tensor

from segcal.posthoc.affine import FullAffine
from segcal.posthoc.rows import log_softmax

__all__ = ["DirichletCalibration"]


class DirichletCalibration(FullAffine):
    """``softmax(W log p + b)`` for 30 classes at most, p being the softmax of the logits.

    Source: Kull et al. 2019, "Beyond temperature scaling: obtaining well-calibrated multiclass
    probabilities with Dirichlet calibration": it is what the posterior looks like where the p of
    every class follow a Dirichlet distribution. Unlike with
    :class:`segcal.posthoc.matrix.MatrixScaling`, a number that is added to all logits of a voxel
    does not matter. W and b are those of the least ::

        mean NLL + off_diagonal * mean_{j != k} W_jk^2 + bias * mean_k b_k^2

    of which log p comes from the logits in full precision, without a floor. What neither shows (the
    scale of separable cases) is held near the identity by 1e-7 nats a voxel times the squared
    distance.

    Args:
        per_channel: see :class:`segcal.posthoc.calibrator.Calibrator`; then this is beta
            calibration without its bounds.
        off_diagonal: weight in nats a voxel; 1e-3 by default, which no paper gives.
        bias: weight in nats a voxel; 1e-3 by default.

    Attributes:
        parameters: W and b, float64 ``(K, K + 1)``.

    Raises:
        ValueError: a negative weight; in the fit, more than 30 classes.
    """

    def _features(self, logits: Tensor) -> Tensor:
        return log_softmax(logits)

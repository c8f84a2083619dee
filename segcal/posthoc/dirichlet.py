"""Dirichlet calibration: an affine map of the log-probabilities."""

from __future__ import annotations

from torch import Tensor

from segcal.posthoc.affine import FullAffine
from segcal.posthoc.rows import log_softmax

__all__ = ["DirichletCalibration"]


class DirichletCalibration(FullAffine):
    """``softmax(W log p + b)`` for at most 30 classes, where p is the softmax of the logits.

    Source: Kull et al. 2019, "Beyond temperature scaling: obtaining well-calibrated multiclass
    probabilities with Dirichlet calibration". The posterior has this form where the p of every
    class follow a Dirichlet distribution. Unlike with :class:`segcal.posthoc.matrix.MatrixScaling`,
    a number that is added to all logits of a voxel does not matter. W and b minimise ::

        mean NLL + off_diagonal * mean_{j != k} W_jk^2 + bias * mean_k b_k^2

    where log p is computed from the logits in full precision, without a floor. What neither cases
    nor weights determine (the scale of separable cases) is held near the identity by 1e-7 nats per
    voxel times the squared distance.

    Args:
        per_channel: whether every channel is a sigmoid of its own, with labels that may overlap.
            This is then beta calibration without its bounds.
        off_diagonal: weight in nats per voxel; the default 1e-3 is our choice, from no paper.
        bias: weight in nats per voxel; 1e-3 by default.

    Attributes:
        parameters: W and b, float64 ``(K, K + 1)``.

    Raises:
        ValueError: a negative weight; in the fit, more than 30 classes.
    """

    def _features(self, logits: Tensor) -> Tensor:
        return log_softmax(logits)

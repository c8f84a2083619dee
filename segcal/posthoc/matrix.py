"""Matrix scaling: an affine map of the logits, drawn to a diagonal one."""

from __future__ import annotations

from segcal.posthoc.affine import FullAffine

__all__ = ["MatrixScaling"]


class MatrixScaling(FullAffine):
    """``softmax(W l + b)`` for 30 classes at most; predictions may change.

    Source: Guo et al. 2017, "On calibration of modern neural networks". W and b are those of the
    least ::

        mean NLL + off_diagonal * mean_{j != k} W_jk^2 + bias * mean_k b_k^2

    (Kull et al. 2019), without which K^2 numbers follow the noise of the cases. What neither shows
    (the scale of separable cases) is held near the identity by 1e-7 nats a voxel times the squared
    distance.

    Args:
        per_channel: see :class:`segcal.posthoc.calibrator.Calibrator`.
        off_diagonal: weight in nats a voxel; 1e-3 by default, which no paper gives.
        bias: weight in nats a voxel; 1e-3 by default.

    Attributes:
        parameters: W and b, float64 ``(K, K + 1)``.

    Raises:
        ValueError: a negative weight; in the fit, more than 30 classes.
    """

"""Matrix scaling: an affine map of the logits, regularised towards a diagonal map."""

from __future__ import annotations

from segcal.posthoc.affine import FullAffine

__all__ = ["MatrixScaling"]


class MatrixScaling(FullAffine):
    """``softmax(W l + b)`` for at most 30 classes; predictions may change.

    Source: Guo et al. 2017, "On calibration of modern neural networks". W and b minimise ::

        mean NLL + off_diagonal * mean_{j != k} W_jk^2 + bias * mean_k b_k^2

    (Kull et al. 2019). Without the two weights the K^2 numbers would follow the noise of the cases.
    What neither cases nor weights determine (the scale of separable cases) is held near the
    identity by 1e-7 nats per voxel times the squared distance.

    Args:
        per_channel: whether every channel is a sigmoid of its own, with labels that may overlap.
        off_diagonal: weight in nats per voxel; the default 1e-3 is our choice, from no paper.
        bias: weight in nats per voxel; 1e-3 by default.

    Attributes:
        parameters: W and b, float64 ``(K, K + 1)``.

    Raises:
        ValueError: a negative weight; in the fit, more than 30 classes.
    """

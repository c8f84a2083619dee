"""Vector scaling: a scale and an offset for the logits of each class; for a sigmoid, Platt's."""

from __future__ import annotations

from segcal.posthoc.affine import Affine, Diagonal, Scores

__all__ = ["VectorScaling"]


class VectorScaling(Affine):
    """``softmax(w * l + b)`` with a scale w_k and an offset b_k per class; predictions may change.

    Source: Guo et al. 2017, "On calibration of modern neural networks". With `per_channel` it is
    Platt scaling (Platt 1999), without his smoothed targets: a channel's probability becomes
    ``sigmoid(w l + b)``.

    Adding a number to all offsets changes nothing; the offsets that sum to 0 are taken. What the
    cases do not determine (the offset of a class that never occurs, the scale of separable cases)
    is held near w = 1 and b = 0 by 1e-7 nats per voxel times the squared distance.

    Args:
        per_channel: whether every channel is a sigmoid of its own, with labels that may overlap.

    Attributes:
        parameters: w and b, float64 ``(2, K)``.
    """

    def _scores(self, num_classes: int) -> Scores:
        return Diagonal(num_classes)

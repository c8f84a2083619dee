"""Conversion of labels from nnU-Net's targets to what segcal's terms take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Labels:
    """Layout of labels in nnU-Net's targets ``(N, 1, *S)``, or with regions ``(N, R, *S)`` of bool.

    Args:
        num_classes: K, channels of the logits.
        per_channel: region-based training, a sigmoid per channel.
        ignore_index: label of voxels to leave out; with regions an additional last channel marks
            them.
        channels: number of input channels that are images; in a cascade the others are one-hot
            labels.
    """

    def __init__(
        self, num_classes: int, *, per_channel: bool, ignore_index: int | None, channels: int
    ) -> None:
        self.num_classes = num_classes
        self.per_channel = per_channel
        self.ignore_index = ignore_index
        self.channels = channels

    def of(self, target: Tensor) -> Tensor:
        """Return labels ``(N, *S)``, per channel ``(N, R, *S)``, as segcal's terms take them."""
        if not self.per_channel:
            return target[:, 0].long()
        if self.ignore_index is None:
            return target.long()
        return torch.where(target[:, -1:].bool(), self.ignore_index, target[:, :-1].long())

    def runtime(self) -> dict[str, Any]:
        """Arguments of a term that only the data set determines."""
        return {
            "num_classes": self.num_classes,
            "ignore_index": self.ignore_index,
            "per_channel": self.per_channel or None,
        }

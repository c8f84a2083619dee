"""The image transforms that an experiment names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from segcal.components import Component
from segcal.training.building import build_part

__all__ = ["Augment"]


class Augment:
    """Draws transforms for every image of a batch.

    Args:
        components: classes of ``torchvision.transforms.v2``.
        name: of these transforms in messages.

    Raises:
        ValueError: an entry is no transform, or its arguments do not fit.
    """

    def __init__(self, components: tuple[Component, ...], name: str = "data.augment") -> None:
        self.transforms = [build_part(c, nn.Module, name) for c in components]

    def __call__(self, images: Tensor) -> Tensor:
        """Return images of the same size."""
        if not self.transforms:
            return images
        return torch.stack([self.of_one(image) for image in images])

    def of_one(self, image: Tensor) -> Tensor:
        """Return an image of any size."""
        for transform in self.transforms:
            image = transform(image)
        return image

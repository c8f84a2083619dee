"""DeepLabV3 on top of a feature network from timm, such as ResNet-34."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import interpolate

__all__ = ["DeepLab"]


class DeepLab(nn.Module):
    """DeepLabV3: features at 1/8 of the image size, seen at several scales, and upsampled.

    Chen et al. 2017, "Rethinking atrous convolution for semantic image segmentation". The head
    comes from torchvision, the backbone from timm; there is no auxiliary head. The branch that
    averages over the image has a batch norm, so a training batch needs at least two images.

    Args:
        in_channels: of the images.
        out_channels: of the logits.
        backbone: name of a network in timm.
        pretrained: whether to start from timm's weights, which timm downloads and adapts to the
            number of channels.
        stride: size of the image divided by the size of the features: 8 or 16.
        rates: dilations of the atrous convolutions; published are 12, 24, 36 for stride 8, and 6,
            12, 18 for stride 16.

    Raises:
        ValueError: timm or torchvision is not installed, or knows no such network.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        backbone: str = "resnet34",
        *,
        pretrained: bool = False,
        stride: int = 8,
        rates: Sequence[int] = (12, 24, 36),
    ) -> None:
        super().__init__()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of torch, to timm
                import timm
            from torchvision.models.segmentation import deeplabv3  # type: ignore[import-untyped]
        except ImportError as error:
            raise ValueError(f"{error}; pip install 'segcal[classify]'") from None
        try:
            features: Any = timm.create_model(
                backbone,
                pretrained=pretrained,
                in_chans=in_channels,
                features_only=True,
                output_stride=stride,
                out_indices=(-1,),
            )
        except RuntimeError as error:  # what timm raises where it knows no such name
            raise ValueError(f"backbone: {error}") from None
        self.backbone: nn.Module = features
        self.head: nn.Module = deeplabv3.DeepLabHead(
            features.feature_info.channels()[-1], out_channels, rates
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(N, K, y, x)`` of images ``(N, C, y, x)``."""
        (features,) = self.backbone(images)
        logits: Tensor = self.head(features)
        return interpolate(logits, images.shape[2:], mode="bilinear", align_corners=False)

"""DeepLabV3 on a network of timm's that gives its features, such as ResNet-34."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import interpolate

__all__ = ["DeepLab"]


class DeepLab(nn.Module):
    """DeepLabV3: features at an eighth of the size, seen at several scales, brought back.

    Chen et al. 2017, "Rethinking atrous convolution for semantic image segmentation". The head is
    torchvision's, the backbone timm's; without an auxiliary head. The branch of the mean over the
    image has a batch norm, so a training batch needs two images or more.

    Args:
        in_channels: of the images.
        out_channels: of the logits.
        backbone: name of a network of timm's.
        pretrained: begin with timm's weights, which it downloads; those of three channels are
            fitted to another number.
        stride: size of the image over that of the features: 8 or 16.
        rates: of the atrous convolutions; published for stride 8: 12, 24, 36, for 16: 6, 12, 18.

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

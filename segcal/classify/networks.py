"""Small networks for features, small images and texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

AT_ONCE = 1024
"""Number of samples that are summed up in float64 at a time."""
CONSTANT = 1e-7
"""A deviation smaller than this share of the mean is due to rounding."""


class MLP(nn.Sequential):
    """Fully connected layers with ReLU and dropout between them.

    Args:
        in_features: F; for images, the number of all values.
        num_classes: K.
        hidden: widths of the hidden layers.
        dropout: after each of them.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        hidden: Sequence[int] = (128, 128),
        dropout: float = 0.0,
    ) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for before, width in zip((in_features, *hidden), hidden, strict=False):
            layers += [nn.Linear(before, width), nn.ReLU(), nn.Dropout(dropout)]
        super().__init__(*layers, nn.Linear((in_features, *hidden)[-1], num_classes))


class SmallCNN(nn.Sequential):
    """Blocks of two 3 x 3 convolutions that each halve the size, then a mean over the image.

    Args:
        in_channels: C.
        num_classes: K.
        widths: channels of the blocks.
        dropout: before the last layer.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        widths: Sequence[int] = (16, 32),
        dropout: float = 0.0,
    ) -> None:
        layers: list[nn.Module] = []
        for before, width in zip((in_channels, *widths), widths, strict=False):
            for channels in (before, width):
                layers += [
                    nn.Conv2d(channels, width, 3, padding=1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                ]
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout)]
        super().__init__(*layers, *end, nn.Linear(widths[-1], num_classes))


class GPoolCNN(nn.Module):
    """Word vectors, convolutions along the text, the maximum over the text, a linear layer.

    Args:
        num_words: size of the vocabulary; number 0 means no word.
        num_classes: K.
        embedding: length of a word's vector.
        widths: channels of the convolutions.
        kernel_size: of the convolutions, odd.
        dropout: before the last layer.
        vectors: initial word vectors ``(num_words, embedding)``; words with NaN begin at random,
            with the deviation of the others.

    Raises:
        ValueError: vectors of another length than `embedding`.
    """

    def __init__(
        self,
        num_words: int,
        num_classes: int,
        embedding: int = 64,
        widths: Sequence[int] = (128,),
        kernel_size: int = 3,
        dropout: float = 0.0,
        vectors: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, embedding, padding_idx=0)
        if vectors is not None:
            _begin_with(self.embedding, vectors)
        layers: list[nn.Module] = []
        for before, width in zip((embedding, *widths), widths, strict=False):
            layers += [nn.Conv1d(before, width, kernel_size, padding=kernel_size // 2), nn.ReLU()]
        self.convolutions = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(widths[-1], num_classes))

    def forward(self, words: Tensor) -> Tensor:
        """Return logits ``(N, K)`` of words ``(N, L)``."""
        along: Tensor = self.convolutions(self.embedding(words).transpose(1, 2))
        return self.head(along.amax(2))


@torch.no_grad()
def _begin_with(embedding: nn.Embedding, vectors: Tensor) -> None:
    """Fill an embedding with the given vectors, and with similar random vectors elsewhere."""
    if vectors.shape != embedding.weight.shape:
        raise ValueError(
            f"vectors: have {vectors.shape[1]} numbers each, and embedding is "
            f"{embedding.embedding_dim}; set network.args.embedding={vectors.shape[1]}"
        )
    known = ~vectors[:, 0].isnan()
    embedding.weight *= vectors[known].std(correction=0)  # it is of deviation 1
    embedding.weight[known] = vectors[known]


def small_vgg16(num_classes: int, in_channels: int = 3, dropout: float = 0.5) -> nn.Module:
    """Return VGG16 with batch normalisation for images of about 32 x 32 pixels, such as CIFAR's.

    Its 13 convolutions with five poolings reduce 32 x 32 pixels to 512 values, and one linear layer
    turns them into logits, where ImageNet's VGG16 has three layers of width 4096 for 7 x 7
    positions.

    Args:
        num_classes: K.
        in_channels: C.
        dropout: before the last layer.
    """
    layers: list[nn.Module] = []
    before = in_channels
    for width, times in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(times):
            convolution = nn.Conv2d(before, width, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            before = width
        layers.append(nn.MaxPool2d(2))
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout)]
    network = nn.Sequential(*layers, *end, nn.Linear(before, num_classes))
    for module in network:
        if isinstance(module, nn.Conv2d):  # 13 layers deep, torch's own first weights fade
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


class Standardise(nn.Module):
    """Bring each feature or channel to mean 0 and deviation 1 over the training set.

    Words pass unchanged; byte images are divided by 255.

    Args:
        inputs: of the training set; with `given`, a few of them suffice.
        given: mean and deviation of the channels, if they are not taken from the inputs.

    Raises:
        ValueError: a mean or deviation that does not fit the channels.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self, inputs: Tensor, given: tuple[Sequence[float], Sequence[float]] | None = None
    ) -> None:
        super().__init__()
        self.words = inputs.dtype == torch.int64
        mean, deviation = torch.zeros(1), torch.ones(1)
        if given is not None:
            mean, deviation = (_of_channels(values, inputs) for values in given)
        elif not self.words:
            mean, deviation = _moments(inputs)
        constant = deviation <= CONSTANT * mean.abs()
        self.register_buffer("mean", mean.float())
        self.register_buffer("deviation", torch.where(constant, 1.0, deviation).float())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the input of the network."""
        return inputs if self.words else (_fractions(inputs) - self.mean) / self.deviation


def _moments(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each feature or channel in float64, computed in chunks of samples."""
    axes = [0, *range(2, inputs.ndim)]
    count = inputs.numel() // inputs.shape[1]
    parts = torch.split(inputs, AT_ONCE)
    mean = sum(_fractions(x).double().sum(axes, keepdim=True) for x in parts) / count
    squares = sum(((_fractions(x) - mean) ** 2).sum(axes, keepdim=True) for x in parts)
    return torch.as_tensor(mean), torch.as_tensor(squares / count).sqrt()


def _of_channels(values: Sequence[float], inputs: Tensor) -> Tensor:
    """Values of the channels, in a shape that can be subtracted from images."""
    if inputs.ndim != 4 or len(values) not in (1, inputs.shape[1]):
        raise ValueError(
            f"data.standardise: {len(values)} values of inputs {tuple(inputs.shape[1:])}; it is "
            "for the channels of images"
        )
    return torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1)


def _fractions(inputs: Tensor) -> Tensor:
    return inputs / 255 if inputs.dtype == torch.uint8 else inputs


class Standardised(nn.Module):
    """A network together with the standardisation of its inputs, which returns only logits."""

    def __init__(self, standardise: Standardise, network: nn.Module) -> None:
        super().__init__()
        self.standardise = standardise
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits ``(N, K)``; the first of several outputs (ViT's)."""
        output = self.network(self.standardise(inputs))
        return output[0] if isinstance(output, tuple) else output

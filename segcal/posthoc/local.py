"""Local temperature scaling: a temperature for every voxel, from the logits around it."""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from segcal.posthoc.calibrator import MOST_VOXELS, HeldOut, SampledCalibrator
from segcal.posthoc.rows import Rows, log_softmax
from segcal.posthoc.scale import best_scale, is_bound
from segcal.tensors import full_precision

__all__ = ["LocalTemperature"]

KERNEL, DILATION = 5, 2
REACH = DILATION * (KERNEL // 2)
"""Number of voxels to either side along each axis that a temperature depends on."""
FLOOR = 1e-3
"""The least temperature."""
LINK = math.log(math.expm1(1 - FLOOR))
"""Constant that is added before the softplus, so that weights of zero give a temperature of 1."""
TREES, GATES = 4, 3
FAR = 10.0
"""Inputs are clipped to this number of standard deviations from the mean."""
MOST_NUMBERS = 1 << 27
"""Number of inputs around the voxels to learn from that are kept of all cases together."""
FEWEST_VOXELS = 256
"""Number of voxels that are kept of a case at least."""
RATE = 1e-3
BATCH = (256, 2048)
"""Smallest and largest number of rows of a step."""
BATCH_NUMBERS = 1 << 22
"""Number of inputs of a step, within the bounds of ``BATCH``."""
CHECK = 20
"""Number of steps between two checks on the cases that were held back."""
PATIENCE = 8
"""Number of checks without a gain after which the fit stops."""
STEPS_OF_ONE_CASE = 100
PART = 1 << 13
"""Number of rows whose temperatures are computed at a time."""
TILE = {1: 1 << 18, 2: 512, 3: 64}
"""Edge length of the tile that is computed at a time, by the number of axes."""


class LocalTemperature(SampledCalibrator):
    """``softmax(l_i / T_i)`` with ``T_i`` from a small network that sees the logits around voxel i.

    Four convolutions of the logits (5 voxels along each axis, every second one) are mixed by three
    sigmoid gates, which are convolutions of the same kind. If the cases have images, a convolution
    of the image is mixed in by a fourth gate. ``T = softplus(mix + c) + 0.001``, with c such that
    weights of zero give 1. The prediction stays. There are 1 to 3 spatial axes; the first case
    determines their number, and whether images are used, which every case must then have.

    Source: Ding et al. 2021, "Local temperature scaling for probability calibration". Their program
    has ``relu(mix + 2) + 1e-8``, which begins at T = 2 and has no gradient where it is cut. It pads
    by reflection, which needs more than 4 voxels along each axis; we repeat the outermost voxel.
    Its weights are all zero at first, so that without an image the four convolutions stay equal.
    Ours begins at the best single temperature, with small random weights, and standardises its
    inputs by the mean and standard deviation of the voxels to learn from; logits are first centred
    over the classes, so that a shift of all logits does not matter.

    The network learns by Adam (rate 0.001) on the NLL of a sample of voxels with their
    surroundings. A fifth of the cases is held back: the weights with the smallest NLL on these
    cases are taken, and the fit stops when this NLL no longer falls. With one case the fit takes
    100 steps. The same seed gives the same fit on the same machine.

    Args:
        per_channel: whether every channel is a sigmoid of its own, with a network of its own.
        steps: largest number of steps of the fit.
        seed: random seed of the first weights, of the cases that are held back, and of the order of
            voxels.

    Raises:
        ValueError: fewer than one step; in the fit, cases without spatial axes, or with other axes
            or image channels than the first.
    """

    def __init__(self, *, per_channel: bool = False, steps: int = 2000, seed: int = 0) -> None:
        super().__init__(per_channel=per_channel)
        if steps < 1:
            raise ValueError(f"steps: expected 1 or more, got {steps}")
        self.steps = steps
        self.seed = seed
        self._network: _Network | None = None
        self._form: tuple[int, int] | None = None

    def _begin(self) -> None:
        self._form = None

    def _most(self, case: HeldOut, most: int) -> int:
        k, softmaxes = case.logits.shape[1], 1
        if self.per_channel:
            k, softmaxes = 2, k
        channels = k + (0 if case.image is None else case.image.shape[1])
        numbers = KERNEL ** (case.logits.ndim - 2) * channels * softmaxes
        share = most / MOST_VOXELS  # of this case
        return max(FEWEST_VOXELS, min(most, int(MOST_NUMBERS * share / numbers)))

    def _around(self, case: HeldOut, valid: Tensor, index: Tensor) -> Tensor:
        axes = case.logits.ndim - 2
        if self._form is None:
            if not 1 <= axes <= 3:
                raise ValueError(
                    "logits: local temperatures need 1 to 3 spatial axes, got "
                    f"{tuple(case.logits.shape)}"
                )
            image = _checked_image(case.logits, case.image)
            self._form = axes, 0 if image is None else image.shape[1]
        image = self._image(case.logits, case.image, *self._form)
        near = _neighbours(index, case.labels.shape[1:])
        inputs = _inputs(
            case.logits.detach().flatten(2)[0, :, near].movedim(0, 1),
            None if image is None else image.flatten(2)[0, :, near].movedim(0, 1),
        )
        return inputs.masked_fill(~valid.flatten()[near][:, None], math.nan)

    def _image(
        self, logits: Tensor, image: Tensor | None, axes: int, channels: int
    ) -> Tensor | None:
        """The image, if images are used and it has the shape of the first."""
        if logits.ndim != axes + 2:
            raise ValueError(
                f"logits: expected {axes} spatial axes as in the first case of the fit, got "
                f"{tuple(logits.shape)}"
            )
        if not channels:
            return None
        image = _checked_image(logits, image)
        if image is None or image.shape[1] != channels:
            raise ValueError(
                f"image: expected (N, {channels}, *S) as in the first case of the fit, got "
                f"{None if image is None else tuple(image.shape)}"
            )
        return image

    def _fit(self, rows: Rows) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        with torch.inference_mode(False), torch.enable_grad(), full_precision(rows.logits):
            train, held = _parted(rows.patients, generator)
            plain = replace(rows, around=None)
            scale = best_scale(plain.where(torch.isin(torch.arange(len(rows)), train)))
            if is_bound(scale):
                self._note(
                    f"the best single temperature, {1 / scale:g}, is at the bound of the search: "
                    "the cases do not determine it"
                )
            network = _Network.new(rows, train, 1 / scale, generator)
            steps = self.steps
            if not len(held) and steps > STEPS_OF_ONE_CASE:
                steps = STEPS_OF_ONE_CASE
                self._note(f"one case leaves no case to hold back; the fit took {steps} steps")
            network, nll = _trained(network, rows, train, held, steps, generator)
            self._network = network
            if len(held) and not nll <= (untouched := _mean_nll(None, rows, held)):
                self._note(
                    f"the best fit has NLL {nll:.6g} on the cases that were held back, where the "
                    f"logits have {untouched:.6g}; probabilities stay as they were"
                )
                self.improved = False

    def _log_probabilities_of(self, rows: Rows) -> Tensor:
        return log_softmax(rows.logits / self._fitted().of_rows(_around(rows))[:, None])

    def _fitted(self) -> _Network:
        assert self._network is not None, "fit or _load come first"  # noqa: S101
        return self._network

    def _probabilities(
        self, logits: Tensor, spacing_mm: Sequence[float] | None, image: Tensor | None
    ) -> Tensor:
        network = self._fitted().on(logits.device)
        image = self._image(logits, image, network.axes, network.image_channels)
        out = torch.empty_like(logits)
        for n, tile in itertools.product(range(len(logits)), _tiles(logits.shape[2:])):
            inputs = _inputs(
                _with_margin(logits[n : n + 1], tile),
                None if image is None else _with_margin(image[n : n + 1], tile),
            )
            at = (n, slice(None), *tile)
            out[at] = torch.softmax(logits[at] / network.of_volume(inputs).to(logits.dtype), 0)
        return out

    def _arguments(self) -> dict[str, Any]:
        return {"steps": self.steps, "seed": self.seed}

    def _learned(self) -> dict[str, Any]:
        return self._fitted().plain()

    def _load(self, learned: dict[str, Any]) -> None:
        self._network = _Network.from_plain(learned)


@dataclass(frozen=True)
class _Network:
    """The learned network, float32.

    Attributes:
        axes: number of spatial axes.
        image_channels: C, 0 without an image.
        mean: means of the inputs ``(K + C,)``.
        std: standard deviations of the inputs ``(K + C,)``.
        weight: ``(O, K + C, 5^axes)``. O is 7 for four trees and three gates, which see the logits;
            with an image it is 9, for a fourth gate, and a tree that sees only the image.
        bias: ``(O,)``.
    """

    axes: int
    image_channels: int
    mean: Tensor
    std: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def new(
        cls, rows: Rows, train: Tensor, temperature: float, generator: torch.Generator
    ) -> _Network:
        """A network that gives about this temperature everywhere, with the inputs' statistics."""
        around, classes = _around(rows), rows.num_classes
        channels, taps = around.shape[1:]
        outputs = TREES + GATES + (2 if channels > classes else 0)
        moments = []
        for c in range(channels):
            values = around[train, c].flatten()  # a channel at a time, for the memory
            values = values[values.isfinite()]
            moments.append(torch.std_mean(values if len(values) else torch.zeros(1), correction=0))
        std, mean = (torch.stack(part) for part in zip(*moments, strict=True))
        gates = slice(TREES, TREES + GATES + 1)
        sees = torch.zeros((outputs, channels, 1))
        sees[: gates.stop, :classes] = 1
        sees[gates.stop :, classes:] = 1
        spread = 0.1 / math.sqrt(taps * channels)  # only has to tell the trees apart
        weight = spread * sees * torch.randn((outputs, channels, taps), generator=generator)
        bias = torch.full((outputs,), _inverse_link(temperature))
        bias[gates] = 0
        return cls(
            round(math.log(taps, KERNEL)),
            channels - classes,
            mean,
            torch.where(std > 0, std, 1),
            weight.float(),
            bias.float(),
        )

    def on(self, device: torch.device) -> _Network:
        return replace(
            self, mean=self.mean.to(device), std=self.std.to(device),
            weight=self.weight.to(device), bias=self.bias.to(device),
        )  # fmt: skip

    def of_rows(self, around: Tensor) -> Tensor:
        """Temperatures ``(n,)`` of voxels with their surroundings ``(n, K + C, 5^axes)``."""
        weight = self.weight.flatten(1)
        parts = [
            _temperature(F.linear(self._standardised(part).flatten(1), weight, self.bias).T)
            for part in torch.split(around, PART)
        ]
        return torch.cat(parts)

    def of_volume(self, inputs: Tensor) -> Tensor:
        """Temperatures of ``(1, K + C, *S)`` without the margin, ``(*S - 2 REACH)``."""
        convolve = (F.conv1d, F.conv2d, F.conv3d)[self.axes - 1]
        weight = self.weight.view(*self.weight.shape[:2], *(KERNEL,) * self.axes)
        return _temperature(
            convolve(self._standardised(inputs), weight, self.bias, dilation=DILATION)[0]
        )

    def _standardised(self, inputs: Tensor) -> Tensor:
        """Standardised inputs, channels on axis 1; unknown values count as the mean."""
        shape = (1, -1, *(1,) * (inputs.ndim - 2))
        x = (inputs - self.mean.view(shape)) / self.std.view(shape)
        return x.nan_to_num_(nan=0.0, posinf=FAR, neginf=-FAR).clamp_(-FAR, FAR)

    def plain(self) -> dict[str, Any]:
        """Return what :meth:`from_plain` takes, ready for JSON; weights are base64 of float32."""
        weight = self.weight.numpy(force=True).astype("<f4")
        return {
            "axes": self.axes,
            "classes": len(self.mean) - self.image_channels,
            "image_channels": self.image_channels,
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "weight": base64.b64encode(weight.tobytes()).decode("ascii"),
            "bias": self.bias.tolist(),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> _Network:
        axes, images = int(plain["axes"]), int(plain["image_channels"])
        channels = int(plain["classes"]) + images
        outputs = TREES + GATES + (2 if images else 0)
        try:
            weight = np.frombuffer(base64.b64decode(plain["weight"]), "<f4").astype(np.float32)
        except ValueError as error:
            raise ValueError(f"state: expected weights as base64 of float32 ({error})") from None
        mean, std, bias = (
            torch.tensor(plain[key], dtype=torch.float32) for key in ("mean", "std", "bias")
        )
        shapes = {"mean": (channels,), "std": (channels,), "bias": (outputs,)}
        if axes not in TILE or weight.size != outputs * channels * KERNEL**axes:
            raise ValueError(
                f"state: expected 1 to 3 axes and {outputs * channels * KERNEL**axes} weights, got "
                f"{axes} axes and {weight.size}"
            )
        for key, one in (("mean", mean), ("std", std), ("bias", bias)):
            if tuple(one.shape) != shapes[key] or not bool(one.isfinite().all()):
                raise ValueError(
                    f"state: expected finite numbers {shapes[key]} as {key}, got {plain[key]}"
                )
        if not np.isfinite(weight).all() or not bool((std > 0).all()):
            raise ValueError("state: expected finite weights and positive standard deviations")
        shape = (outputs, channels, KERNEL**axes)
        return cls(axes, images, mean, std, torch.from_numpy(weight).view(shape), bias)


def _temperature(z: Tensor) -> Tensor:
    """Temperatures from the outputs ``(O, ...)`` of the convolutions, mixed by their gates."""
    gates = torch.sigmoid(z[TREES:])
    mix = torch.lerp(torch.lerp(z[3], z[2], gates[1]), torch.lerp(z[1], z[0], gates[0]), gates[2])
    if len(z) > TREES + GATES:
        mix = torch.lerp(z[-1], mix, gates[GATES])
    return F.softplus(mix + LINK) + FLOOR


def _inverse_link(temperature: float) -> float:
    above = temperature - FLOOR
    return above + math.log(-math.expm1(-above)) - LINK


def _checked_image(logits: Tensor, image: Tensor | None) -> Tensor | None:
    if image is None:
        return None
    expected = (logits.shape[0], *logits.shape[2:])
    if image.ndim != logits.ndim or (image.shape[0], *image.shape[2:]) != expected:
        raise ValueError(
            f"image: expected (N, C, *S) of logits {tuple(logits.shape)}, got {tuple(image.shape)}"
        )
    return image.detach()


def _inputs(logits: Tensor, image: Tensor | None) -> Tensor:
    """Inputs of the network, float32, channels on axis 1: centred logits, then the image."""
    centred = (logits - logits.mean(1, keepdim=True)).float()
    return centred if image is None else torch.cat([centred, image.to(centred)], 1)


def _neighbours(index: Tensor, shape: Sequence[int]) -> Tensor:
    """Flat indices ``(n, 5^axes)`` of a convolution's voxels; voxels at the border repeat."""
    steps = DILATION * (torch.arange(KERNEL, device=index.device) - KERNEL // 2)
    near = torch.zeros((len(index), 1), dtype=torch.long, device=index.device)
    for place, size in zip(torch.unravel_index(index, tuple(shape)), shape, strict=True):
        along = (place[:, None] + steps).clamp(0, size - 1)
        near = (near[:, :, None] * size + along[:, None]).flatten(1)
    return near


def _tiles(shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    edge = TILE[len(shape)]
    along = [[slice(b, min(b + edge, size)) for b in range(0, size, edge)] for size in shape]
    return itertools.product(*along)


def _with_margin(x: Tensor, tile: Sequence[slice]) -> Tensor:
    """A tile of ``(1, C, *S)`` with its surroundings; voxels at the border repeat."""
    for axis, part in enumerate(tile, start=2):
        at = torch.arange(part.start - REACH, part.stop + REACH, device=x.device)
        x = x.index_select(axis, at.clamp(0, x.shape[axis] - 1))
    return x


def _around(rows: Rows) -> Tensor:
    if rows.around is None:
        raise ValueError("rows: expected rows of LocalTemperature.collect, with surroundings")
    return rows.around


def _parted(cases: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of the rows to learn from, and of the rows of a fifth of the cases, held back."""
    found = torch.from_numpy(np.unique(cases.numpy()))
    order = found[torch.randperm(len(found), generator=generator)]
    back = order[: 0 if len(found) < 2 else max(1, len(found) // 5)]
    held = torch.isin(cases, back)
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


def _trained(
    network: _Network,
    rows: Rows,
    train: Tensor,
    held: Tensor,
    steps: int,
    generator: torch.Generator,
) -> tuple[_Network, float]:
    """The network with the smallest NLL of the rows `held`, or the last, and this NLL."""
    weight, bias = network.weight.clone(), network.bias.clone()
    learning = replace(network, weight=weight.requires_grad_(), bias=bias.requires_grad_())
    sees = (network.weight != 0).any(2, keepdim=True)  # trees and gates either logits or the image
    optimiser = torch.optim.Adam([weight, bias], RATE)
    unit = rows.weights[train].mean()
    size = min(len(train), max(BATCH[0], min(BATCH[1], BATCH_NUMBERS // weight[0].numel())))
    best, least, waited = network, _mean_nll(network, rows, held), 0
    for step in range(1, steps + 1):
        batch = train[torch.randint(len(train), (size,), generator=generator)]
        loss = (_nll(learning, rows, batch) * (rows.weights[batch] / unit)).mean()
        slopes = torch.autograd.grad(loss, (weight, bias))
        weight.grad, bias.grad = slopes[0] * sees, slopes[1]
        optimiser.step()
        if not len(held) or step % CHECK:
            continue
        now = _mean_nll(learning, rows, held)
        waited = 0 if now < least else waited + 1
        if now < least:
            best, least = _frozen(learning), now
        if waited == PATIENCE:
            break
    return (best if len(held) else _frozen(learning)), least


def _frozen(network: _Network) -> _Network:
    return replace(
        network, weight=network.weight.detach().clone(), bias=network.bias.detach().clone()
    )


def _nll(network: _Network | None, rows: Rows, index: Tensor) -> Tensor:
    """NLL of some rows; None stands for temperatures of 1."""
    x = rows.logits[index].double()
    if network is not None:
        x = x / network.of_rows(_around(rows)[index])[:, None]
    return F.cross_entropy(x, rows.labels[index], reduction="none")


@torch.no_grad()
def _mean_nll(network: _Network | None, rows: Rows, index: Tensor) -> float:
    """Weighted mean NLL of some rows; infinite without rows."""
    if not len(index):
        return math.inf
    values = torch.cat([_nll(network, rows, part) for part in torch.split(index, PART)])
    weights = rows.weights[index]
    return float(values @ weights / weights.sum())

"""nnU-Net's loss with the terms of a recipe, in place of cross-entropy and in addition."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from segcal.adapters.nnunet.host_loss import Heads, take_apart
from segcal.adapters.nnunet.labels import Labels
from segcal.binning import BinStatistics, equal_width_statistics
from segcal.heads import split_heads
from segcal.late_checks import raise_wrong_labels
from segcal.losses.cross_entropy import cross_entropy
from segcal.objective import Objective, two_view_loss
from segcal.schedule import Schedules
from segcal.tensors import full_precision, valid_mask
from segcal.term import DualStep, LearnedTerm, Reduce, TwoViewTerm, View

ECE_BINS = 15


class Weighed(Protocol):
    """Anything with weights that a schedule changes."""

    def weigh(self, factors: Mapping[str, float]) -> dict[str, float]:
        """Set factors on weights, see :meth:`segcal.objective.Objective.weigh`."""


class PenalisedLoss(nn.Module):
    """nnU-Net's loss plus terms on the full resolution; it also sums up calibration over a pass.

    Where possible, nnU-Net's cross-entropy and Dice of the full resolution are computed in one
    sweep over the voxels, together with the terms of a recipe (:mod:`segcal.sweep`). The values are
    the same.

    With two heads (:mod:`segcal.heads`) the full resolution has ``2 K`` channels. All of the above
    then applies to the first K, the decision head; the terms of the probability head apply to the
    other K, whose calibration is measured.

    Args:
        host: nnU-Net's loss, deep supervision included.
        labels: how targets are read.
        penalties: weighted terms on ``(logits, labels)``; None for none.
        consistency: weight, name and term that compares two views of every image. A training batch
            then holds twice as many samples: :meth:`prepare` adds them, :meth:`forward` separates
            them.
        probability: weighted terms of the probability head; None for a network with one head.
        schedules: factors on weights, by the names of terms; :meth:`advance` sets them.
        elsewhere: parts of `host` with weights that schedules name.
    """

    def __init__(
        self,
        host: nn.Module,
        labels: Labels,
        penalties: Objective | None = None,
        consistency: tuple[float, str, TwoViewTerm] | None = None,
        *,
        probability: Objective | None = None,
        schedules: Schedules | None = None,
        elsewhere: Sequence[Weighed] = (),
    ) -> None:
        super().__init__()
        self.host = host
        self.labels = labels
        self.penalties = penalties
        self.probability = probability
        self.base = "base" if probability is None else "decision/base"
        self._objectives = [one for one in (penalties, probability) if one is not None]
        self.schedules = schedules or Schedules({})
        self._weighed = [*self._objectives, *elsewhere]
        self.consistency: TwoViewTerm | None
        self._weight, self.name, self.consistency = consistency or (0.0, "", None)
        self.weight = self._weight
        self._join()
        self.advance(0.0)
        declared = [term for one in self._objectives for term in one.declared().values()]
        self.needs_image = any(term.needs_image for term in declared)
        self._views: tuple[View, View] | None = None
        self._images: list[Tensor | None] = [None]
        self.start_pass()

    def _join(self) -> None:
        """Compute nnU-Net's own terms together with the penalties, with the current weights."""
        one = self.penalties
        self.rest = take_apart(self.host, self.labels.num_classes)
        self.joined: Objective | None = None
        if self.rest is not None:
            terms: dict[str, nn.Module] = {**self.rest.terms}
            weights = dict(self.rest.weights)
            if one is not None:
                terms |= one.terms.items()
                weights |= one.in_force
            self.joined = Objective(terms, weights)

    def advance(self, progress: float, dice: float = math.nan) -> dict[str, float]:
        """Set the weights of the terms that have a schedule, for the next epoch.

        Args:
            progress: share of the epochs that are done, in [0, 1].
            dice: of the last validation pass; NaN if there is none.

        Returns:
            current weights of these terms, by name.
        """
        factors = self.schedules.factors(progress, dice)
        if not factors:
            return {}
        weights: dict[str, float] = {}
        for one in self._weighed:
            weights |= one.weigh(factors)
        if self.name in factors:
            weights[self.name] = self.weight = self._weight * factors[self.name]
        self._join()
        return {name: weights[name] for name in factors}

    def by_head(self, output: Heads) -> tuple[Heads, Tensor]:
        """Return deciding logits ``(N, K, *S)`` in all resolutions, and the probability head's.

        Args:
            output: the network's; with one head its full resolution serves as both.
        """
        if self.probability is None:
            return output, _first(output)
        decision, probability = split_heads(_first(output))
        rest = [] if isinstance(output, Tensor) else output[1:]
        return decision if isinstance(output, Tensor) else [decision, *rest], probability

    @property
    def learns(self) -> bool:
        """Whether a penalty's weights are learned in validation."""
        terms = [term for one in self._objectives for term in one.terms.values()]
        return any(isinstance(term, LearnedTerm) for term in terms)

    def start_pass(self, *, measuring: bool = False, observing: bool = False) -> None:
        """Forget the sums of the last pass, and start a new one.

        Args:
            measuring: whether to sum up calibration.
            observing: whether to give batches to the multipliers, the learned penalty weights.

        Raises:
            ValueError: labels of the last pass were invalid, which a GPU reports only now.
        """
        raise_wrong_labels()
        self.measuring = measuring
        self.observing = observing
        self._sums: dict[str, Tensor] = {}
        self._likelihood: Tensor | float = 0.0
        self._samples = 0
        self._calibration = torch.zeros(3, ECE_BINS, dtype=torch.float64)

    def means(self, reduce: Reduce | None = None) -> dict[str, float]:
        """Mean over samples of every unweighted term; :attr:`base` is nnU-Net's loss."""
        device = next(iter(self._sums.values())).device if self._sums else None
        sums = [*self._sums.values(), torch.tensor(float(self._samples), device=device)]
        total = torch.stack([s.double() for s in sums])
        *values, samples = (total if reduce is None else reduce(total)).tolist()
        return {name: v / max(samples, 1) for name, v in zip(self._sums, values, strict=True)}

    def likelihood(self, reduce: Reduce | None = None) -> float:
        """Mean cross-entropy of the pass, for schedules by the generalisation gap; NaN if none."""
        if not self.schedules.by_gap:
            return math.nan
        sums = torch.as_tensor(self._likelihood).double()
        total = torch.stack([sums, sums.new_tensor(float(self._samples))])
        value, samples = (total if reduce is None else reduce(total)).tolist()
        return value / samples if samples else math.nan

    def ece(self, device: torch.device, reduce: Reduce | None = None) -> float:
        """ECE of the pass, of the top label; with regions, of the decision in every channel."""
        sums = self._calibration.to(device)
        count, confidence, hits = (sums if reduce is None else reduce(sums)).numpy(force=True)
        return BinStatistics(count, confidence, hits).expected_error()

    def prepare(self, images: Tensor) -> Tensor:
        """Take in the images of the next batch and return the images for the network.

        Args:
            images: ``(N, C, *S)``.

        Returns:
            the same images, or both views of them one after the other, ``(2 N, C, *S)``.
        """
        self._views = None
        if self.consistency is not None and self.training:
            self._views = self.consistency.draw(images)
            m = self.labels.channels
            seen = [
                torch.cat([v.image(images[:, :m]), v.labels(images[:, m:])], 1)
                if images.shape[1] > m
                else v.image(images)
                for v in self._views
            ]
        else:
            seen = [images]
        if self.needs_image:
            self._images = [x[:, : self.labels.channels] for x in seen]
        else:
            self._images = [None] * len(seen)
        return torch.cat(seen) if len(seen) > 1 else images

    def forward(self, output: Heads, target: Heads) -> Tensor:
        """Return the scalar loss for what the network returned, and nnU-Net's targets."""
        decision, probability = self.by_head(output)
        labels = self.labels.of(_first(target))
        if self._views is None:
            total, values = self._view_loss(decision, target, self._images[0])
        else:
            total, values = self._two_view_loss(self._views, decision, target)
        if self.probability is not None:
            more, of_head = self.probability.loss_and_terms(probability, labels, self._images[0])
            total, values = total + more, {**values, **of_head}
        if self.observing:
            self.observe(_first(output).detach(), labels)
        if self.measuring:
            self._calibration += calibration(probability.detach(), labels, self.labels)
        n = labels.shape[0]
        if self.schedules.by_gap:
            self._likelihood = self._likelihood + n * self._cross_entropy(probability, labels)
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + n * value.detach()
        self._samples += n
        return total

    def observe(self, logits: Tensor, labels: Tensor) -> None:
        """Give a batch to the multipliers.

        Args:
            logits: ``(N, K, *S)``, for two heads ``(N, 2 K, *S)``.
            labels: as :meth:`Labels.of` returns them.
        """
        decision, probability = self.by_head(logits)
        for one, seen in ((self.penalties, decision), (self.probability, probability)):
            if one is not None:
                one.observe(cast(Tensor, seen), labels)

    def dual_step(self, reduce: Reduce | None = None) -> dict[str, DualStep]:
        """Update the multipliers."""
        steps: dict[str, DualStep] = {}
        for one in self._objectives:
            steps |= one.dual_step(reduce)
        return steps

    def learned_state(self) -> dict[str, Any]:
        """State that is learned in addition to the network's weights, on the CPU."""
        learned = [*self._objectives, self.schedules]
        return {name: v.cpu() for one in learned for name, v in one.state_dict().items()}

    def load_learned_state(self, state: dict[str, Any]) -> None:
        """Load what :meth:`learned_state` returned."""
        for one in (*self._objectives, self.schedules):
            of_one = one.state_dict()
            one.load_state_dict({name: v for name, v in state.items() if name in of_one})

    def _view_loss(
        self, output: Heads, target: Heads, image: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logits, labels = _first(output), self.labels.of(_first(target))
        if self.rest is not None and self.joined is not None and self.joined.shares_sweep(logits):
            total, values = self.joined.loss_and_terms(logits, labels, image)
            rest = self.rest(output, target)
            return rest + total, {self.base: rest + self.rest.take(values), **values}
        base = self._host_loss(output, target)
        if self.penalties is None:
            return base, {self.base: base}
        total, values = self.penalties.loss_and_terms(logits, labels, image)
        return base + total, {self.base: base, **values}

    @torch.no_grad()
    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(
            logits.detach(),
            labels,
            per_channel=self.labels.per_channel,
            ignore_index=self.labels.ignore_index,
        )

    def _host_loss(self, output: Heads, target: Heads) -> Tensor:
        """nnU-Net's loss as a tensor, which nnU-Net does not return if all weights are 0."""
        value = self.host(output, target)
        return value if isinstance(value, Tensor) else 0 * _first(output).sum()

    def _two_view_loss(
        self, views: tuple[View, View], output: Heads, target: Heads
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of both views by :func:`segcal.objective.two_view_loss`, with deep supervision."""
        both = [_map(lambda x, i=i: x.chunk(2)[i], output) for i in (0, 1)]
        losses = [
            self._view_loss(heads, _map(view.labels, target), image)
            for view, heads, image in zip(views, both, self._images, strict=True)
        ]
        return two_view_loss(
            self.name,
            cast(TwoViewTerm, self.consistency),
            self.weight,
            views,
            [_first(heads) for heads in both],
            self.labels.of(_first(target)),
            losses,
        )


def calibration(logits: Tensor, labels: Tensor, layout: Labels) -> Tensor:
    """Sums of equal-width bins, ``(3, M)``: predictions, their confidence, and hits.

    A prediction is the top label of a voxel; with regions it is, for every channel, whether the
    voxel is in the region. All sums are NaN if a prediction is NaN.

    Args:
        logits: ``(N, K, *S)``.
        labels: as :meth:`Labels.of` returns them.
        layout: of the labels.
    """
    valid = valid_mask(labels, layout.ignore_index)
    with full_precision(logits) as x:
        if layout.per_channel:
            p = torch.sigmoid(x)
            confidence, predicted = torch.maximum(p, 1 - p), (p > 0.5).long()
        else:
            confidence, predicted = torch.softmax(x, 1).max(1)
        confidence = confidence[valid]
        if confidence.isnan().any():  # a diverged training, or an overflow of half precision
            return torch.full((3, ECE_BINS), torch.nan, dtype=torch.float64)
        bins = equal_width_statistics(confidence, (predicted == labels)[valid], ECE_BINS)
    sums = (bins.count, bins.confidence_sum, bins.hit_sum)
    return torch.stack([torch.as_tensor(s, dtype=torch.float64) for s in sums])


def _first(heads: Heads) -> Tensor:
    return heads if isinstance(heads, Tensor) else heads[0]


def _map(function: Any, heads: Heads) -> Heads:
    return function(heads) if isinstance(heads, Tensor) else [function(h) for h in heads]

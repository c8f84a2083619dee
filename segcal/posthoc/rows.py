"""Voxels of held-out cases as rows, which post-hoc methods are fitted to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Rows", "doubt_of", "log_softmax", "softmax"]

CHUNK = 1 << 18
"""Number of rows that are processed at a time."""


@dataclass(frozen=True)
class Rows:
    """Voxels of several cases, or a sample of them, where the weight of a row counts its voxels.

    A sample is drawn at random, separately in every case and group. Sums over rows times weights
    are therefore unbiased, and rare groups (a boundary, a small organ) are kept whole.

    Attributes:
        logits: ``(n, K)``, float32 or float64.
        labels: int64 ``(n,)``.
        weights: float64 ``(n,)``: number of voxels that a row stands for.
        groups: int64 ``(n,)``: predicted class times `num_regions`, plus the region.
        cases: int64 ``(n,)``: number of the case.
        num_cases: number of cases.
        num_regions: number of regions of the predicted map.
        doubts: float64 ``(num_cases,)``: :func:`doubt_of` every case, of all its voxels, whether
            they have a label or not; NaN for samples without spatial axes.
        around: ``(n, ...)``: surroundings of each voxel, for methods that use them; or None.
        owners: int64 ``(num_cases,)``: patient of every case; None where every case is a patient of
            its own.
    """

    logits: Tensor
    labels: Tensor
    weights: Tensor
    groups: Tensor
    cases: Tensor
    num_cases: int
    num_regions: int
    doubts: Tensor
    around: Tensor | None = None
    owners: Tensor | None = None

    @property
    def num_classes(self) -> int:
        """K."""
        return self.logits.shape[1]

    @property
    def num_groups(self) -> int:
        """Number of predicted classes times number of regions."""
        return self.num_classes * self.num_regions

    @property
    def voxels(self) -> int:
        """Number of voxels that the rows stand for."""
        return round(float(self.weights.sum()))

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, mask: Tensor) -> Rows:
        """Rows where `mask`, bool ``(n,)``, is True."""
        return self._at(mask)

    def _at(self, index: Tensor | slice) -> Rows:
        return replace(
            self, logits=self.logits[index], labels=self.labels[index],
            weights=self.weights[index], groups=self.groups[index], cases=self.cases[index],
            around=None if self.around is None else self.around[index],
        )  # fmt: skip

    def of_cases(self, chosen: Sequence[int]) -> Rows:
        """Rows of the cases of these numbers."""
        wanted = torch.zeros(self.num_cases, dtype=torch.bool)
        wanted[list(chosen)] = True
        return self.where(wanted[self.cases])

    @property
    def patients(self) -> Tensor:
        """Patient of every row, int64 ``(n,)``; cross-validation keeps patients together."""
        return self.cases if self.owners is None else self.owners[self.cases]

    def of_patients(self, owners: Sequence[int]) -> Rows:
        """The rows, with the number of the patient of every case."""
        return replace(self, owners=torch.tensor(owners, dtype=torch.long))

    def thinned(self, most: int) -> Rows:
        """At most `most` of the rows, drawn with a seed; weights stay."""
        draw = torch.randperm(len(self), generator=torch.Generator().manual_seed(0))
        mask = torch.zeros(len(self), dtype=torch.bool)
        mask[draw[:most]] = True
        return self.where(mask)

    def chunks(self, size: int = CHUNK) -> Iterator[Rows]:
        """The rows in parts, with logits in float64, so that no pass over them takes much memory.

        Args:
            size: number of rows of a part.
        """
        for begin in range(0, len(self), size):
            part = self._at(slice(begin, begin + size))
            # A class after the other in memory: what sums over few classes is then several times
            # faster, since all rows are computed alike, side by side.
            yield replace(part, logits=part.logits.T.double().contiguous().T)

    def of_label(self, values: Tensor) -> Tensor:
        """Entry ``(n,)`` of `values` ``(n, K)`` at the label of each row."""
        return values.gather(1, self.labels[:, None])[:, 0]

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """Join the rows of several parts, whose cases are numbered consecutively.

        Raises:
            ValueError: no parts, or parts with different classes or regions.
        """
        if len({(one.num_classes, one.num_regions) for one in parts}) != 1:
            raise ValueError("parts: expected rows of the same classes and regions")
        around = [one.around for one in parts if one.around is not None]
        first, cases = 0, []
        for one in parts:
            cases.append(one.cases + first)
            first += one.num_cases
        return Rows(
            torch.cat([one.logits for one in parts]),
            torch.cat([one.labels for one in parts]),
            torch.cat([one.weights for one in parts]),
            torch.cat([one.groups for one in parts]),
            torch.cat(cases),
            first,
            parts[0].num_regions,
            torch.cat([one.doubts for one in parts]),
            torch.cat(around) if around else None,
        )


def doubt_of(logits: Tensor, near: Tensor) -> float:
    """Logarithm of the share of errors that a network expects in a case.

    That is log(mean of 1 - max p) over some voxels, at least log(1e-12), and exact where p is near
    1, too. Voxels without a softmax (NaN, an infinite logit) do not count.

    Args:
        logits: ``(K, n)``.
        near: bool ``(n,)``, the voxels.

    Returns:
        NaN if there are fewer than two such voxels.
    """
    wrong, voxels = torch.zeros(2, dtype=torch.float64)
    for begin in range(0, logits.shape[1], CHUNK):
        part = slice(begin, begin + CHUNK)
        x = logits[:, part][:, near[part]].cpu().double()  # some devices know no float64
        errors = -torch.expm1(x.amax(0) - torch.logsumexp(x, 0))
        known = ~errors.isnan()
        wrong += errors[known].sum()
        voxels += known.sum()
    return math.log(max(float(wrong / voxels), 1e-12)) if voxels > 1 else math.nan


def log_softmax(z: Tensor) -> Tensor:
    """Log-softmax over the classes of scores ``(n, K)``, fast for few classes.

    PyTorch works row by row along the last axis, which takes five to ten times as long for a
    handful of classes; along the first axis it takes all rows side by side.
    """
    return torch.log_softmax(z.T, 0).T


def softmax(z: Tensor) -> Tensor:
    """Softmax over the classes of scores ``(n, K)``, as fast as :func:`log_softmax`."""
    return torch.softmax(z.T, 0).T


def sampled(groups: Tensor, most: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw a sample in which small groups are whole and the others have about equally many rows.

    Args:
        groups: int64 ``(n,)``.
        most: approximate number of rows that are drawn.
        seed: random seed of the draw.

    Returns:
        indices of the rows, ascending, and their weights in float64: the size of a group over the
        number of its rows that were drawn.
    """
    if len(groups) <= most:
        return torch.arange(len(groups)), torch.ones(len(groups), dtype=torch.float64)
    sizes = torch.bincount(groups)
    share = _level(sizes[sizes > 0], most) / sizes.clamp(min=1)
    draw = torch.rand(len(groups), generator=torch.Generator().manual_seed(seed))
    taken = draw < share[groups]  # a share of 1 or more keeps all
    drawn = torch.bincount(groups[taken], minlength=len(sizes))
    for g in ((drawn == 0) & (sizes > 0)).nonzero()[:, 0]:  # or what is rare would weigh nothing
        members = (groups == g).nonzero()[:, 0]
        taken[members[draw[members].argmin()]] = True
    kept = taken.nonzero()[:, 0]
    of_group = groups[kept]
    drawn = torch.bincount(of_group, minlength=len(sizes))
    return kept, sizes[of_group].double() / drawn[of_group].double()


def _level(sizes: Tensor, most: int) -> int:
    """The largest quota, 1 or more, with which groups of these sizes give at most `most` rows."""
    low, high = 1, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        if int(sizes.clamp(max=middle).sum()) <= most:
            low = middle
        else:
            high = middle - 1
    return low

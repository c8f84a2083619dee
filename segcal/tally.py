"""Tally of a case: all the sums that calibration metrics need, in one pass over its voxels.

Cells
-----
Confidences fall into F cells of equal width, 2^16 or a few more, so that the edges of the M bins
are edges of cells. A cell counts its predictions and its hits (right predictions), and sums the
distances of the confidences from its lower edge in units of 2^-40, all in int64. Integers may be
added in any order: the result is the same for every order of the voxels and number of threads,
cases are merged by adding arrays, and for float32 values of at least 2^-17 the sums are exact.
:mod:`segcal.counting` describes how cells are found and where they lie in memory. The sum of the
confidences of a cell is, in units::

    predictions * cell * floor(2^40 / F) + distances

and is rounded once, to float64. Bins are sums of cells.

Scopes, zones, pieces
---------------------
A *scope* is a set of voxels over which calibration is measured, such as all voxels or the voxels
near a boundary. A voxel can be in several of up to seven scopes. Each set of scopes that occurs is
a *zone*; every voxel is in at most one zone, so that the pass over the voxels counts it once, and
the cells of a scope are the sums of the cells of its zones. Threads share the channels, whose
voxels they count in *pieces* of 2^17. So only a small part of the probabilities is copied (to a
type that is compiled for) at any time, and float sums, which are kept per piece and added in the
order of pieces, do not depend on the number of threads.

A class can be counted as soon as its probabilities are there, while those of the next are still
read from a file (:meth:`Voxels.count_class`). Scopes that depend on the probabilities, too, are
widened afterwards (:meth:`Voxels.widen`): since counts and sums are integers, a voxel that gets
into another zone is taken out of the cells of its old zone exactly, and added to the new one's.

Groups of equal mass
--------------------
The cells are a histogram, whose groups are the groups of predictions moved by at most a cell's
width (:class:`segcal.binning.MassHistogram` bounds the effect). To be exact for one case, a second
pass over the voxels (:meth:`Voxels.equal_mass_groups`) looks into the few cells that a cut goes
through, at most R - 1 per scope, and replaces each of them by its distinct values; every other cell
lies entirely in one group. float64 has too many values and is sorted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from segcal.arrays import PROBABILITY_TOLERANCE, as_array, copy_floats, distinct_labels
from segcal.binning import (
    BinStatistics,
    MassHistogram,
    above,
    edge_tolerance,
    equal_mass_statistics,
)
from segcal.counting import (
    BRIER,
    COUNTED,
    DISTANCES,
    HIT_SHIFT,
    HITS,
    NEAR_SHIFT,
    NLL,
    PACKED_COUNTS,
    PACKED_DISTANCES,
    PREDICTIONS,
    SLOTS,
    TOP,
    UNITS,
    WORDS,
    WRONG_LABEL,
    Found,
    Sought,
    cell_of,
    count_class,
    count_top,
    count_values,
    most_likely,
)
from segcal.threads import in_threads, threads_for

__all__ = ["Tally", "Voxels", "predicted_classes"]

FINEST = 2**16
"""Smallest number of cells."""
MAX_SCOPES = 7
"""Largest number of scopes of a case; their sets are then fewer than 128, and a zone is an int8."""
OUTSIDE = -1
"""Zone of the voxels that are in no scope."""
PIECE = 2**17
"""Number of voxels that one call of compiled code processes."""
ROUNDS = 2
"""Number of channels that a thread counts at least, since some take longer than others."""
REFINED = 2**22
"""Number of values that the second pass can tell apart; if there are more, all are sorted."""
FEW = 0.05
"""Share of the predictions below which a quick look leaves out those that the second pass skips."""

Cells = NDArray[np.int64]
Piece = tuple[NDArray[Any], int, NDArray[Any], NDArray[np.int8]]
"""Probabilities, where some voxels begin in them, and their labels and zones, in types that are
compiled for."""
Values = tuple[NDArray[np.float64], NDArray[np.int32]]
"""Distinct values ascending ``(n,)``, and their PREDICTIONS and HITS ``(zones, n, 2)``."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Tally:
    """Sums over the voxels of a scope, which can be added up over cases.

    Attributes:
        cells: int64 ``(1 + K, F + 1, 3)``: per channel (the top label, then every class) and cell
            its number of predictions [PREDICTIONS] and of hits [HITS], and the sum of their
            distances from the lower edge in units of 2^-40 [DISTANCES]. In the channels of the
            classes, the last cell takes what is above the threshold from the cell that the
            threshold lies in.
        extremes: float64 ``(F + 1, 2)``: the smallest confidence of the top labels of a cell, and
            the largest times -1; infinity in an empty cell.
        bins: M equal-width bins; each is F / M cells.
        threshold: probabilities of a class up to this are left out of TACE.
        nll_sum: sum of the negative log-likelihoods in nats, with probabilities floored at 1e-12.
        brier_sum: sum of the squared errors, summed over the classes.
    """

    cells: Cells
    extremes: NDArray[np.float64]
    bins: int
    threshold: float
    nll_sum: float
    brier_sum: float

    def __add__(self, other: Tally) -> Tally:
        """Sums over the voxels of both tallies.

        Raises:
            ValueError: other classes, bins or threshold.
        """
        mine, its = ((t.num_classes, t.bins, t.threshold) for t in (self, other))
        if mine != its:
            raise ValueError(
                f"cannot add tallies of different (classes, bins, threshold): {mine} and {its}"
            )
        return Tally(
            self.cells + other.cells,
            np.minimum(self.extremes, other.extremes),
            self.bins,
            self.threshold,
            self.nll_sum + other.nll_sum,
            self.brier_sum + other.brier_sum,
        )

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.cells) - 1

    @property
    def voxels(self) -> int:
        """Number of voxels."""
        return int(self.cells[TOP, :, PREDICTIONS].sum())

    @cached_property
    def top(self) -> BinStatistics:
        """Equal-width bins of the top label."""
        return self._bins(TOP)

    @cached_property
    def classes(self) -> list[BinStatistics]:
        """Equal-width bins of ``p_k`` against ``y = k``, one for every class."""
        return [self._bins(1 + k) for k in range(self.num_classes)]

    @property
    def kept(self) -> list[BinStatistics]:
        """As :attr:`classes`, for the probabilities above the threshold alone."""
        return [self._bins(1 + k, kept=True) for k in range(self.num_classes)]

    @property
    def top_mass(self) -> MassHistogram:
        """Histogram of the top label's confidence."""
        return self.mass(TOP)

    @property
    def class_mass(self) -> list[MassHistogram]:
        """Histogram of every class's probabilities above the threshold."""
        return [self.mass(1 + k) for k in range(self.num_classes)]

    def equal_mass_groups(self, groups: int) -> list[BinStatistics]:
        """Groups of equal mass, of the top label, then of every class, from the cells.

        They are the groups of probabilities moved by at most the width of a cell;
        :meth:`Voxels.equal_mass_groups` gives the exact groups.

        Args:
            groups: R, number of groups.
        """
        return [mass.groups(groups) for mass in (self.top_mass, *self.class_mass)]

    def mass(self, channel: int) -> MassHistogram:
        """Histogram of a channel: 0 is the top label, 1 + k is class k above the threshold.

        Cells of the top label are as wide as the range of their predictions, so that ties show. The
        width of a class's cell leaves out what the tolerances of edges and of probabilities add to
        it, at most a hundredth for cells within [0, 1].
        """
        order = self.by_confidence(channel)
        width = np.full(len(order), 1 / self.fine)
        if channel == TOP:
            width = np.maximum(-self.extremes[order].sum(1), 0)
        return MassHistogram(self._statistics(channel, order), width)

    def by_confidence(self, channel: int) -> NDArray[np.int64]:
        """Indices of the cells of :meth:`mass`, in its order.

        For a class these are the part of the edge cell above the threshold, which has the last
        index, and then the cells above the edge.
        """
        if channel == TOP:
            return np.arange(self.fine)
        return np.concatenate([[self.fine], np.arange(self.edge + 1, self.fine)])

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Plain arrays for a file, empty cells left out; :meth:`from_arrays` reads them."""
        flat = self.cells.reshape(-1, SLOTS)
        index = np.flatnonzero(flat[:, PREDICTIONS])
        return {
            "index": index,
            "cells": flat[index],
            "extremes": self.extremes[index[index <= self.fine]],
            "shape": np.array([*self.cells.shape[:2], self.bins]),
            "sums": np.array([self.threshold, self.nll_sum, self.brier_sum]),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Tally:
        """Read what :meth:`to_arrays` wrote.

        Raises:
            ValueError: arrays that are missing or do not fit.
        """
        if missing := {"index", "cells", "extremes", "shape", "sums"} - set(arrays):
            raise ValueError(f"tally: {', '.join(sorted(missing))} missing")
        try:
            channels, cells, bins = (int(n) for n in arrays["shape"])
            threshold, nll_sum, brier_sum = (float(x) for x in arrays["sums"])
            flat = np.zeros((channels * cells, SLOTS), np.int64)
            flat[arrays["index"]] = arrays["cells"]
            extremes = np.full((cells, 2), np.inf)
            extremes[arrays["index"][arrays["index"] < cells]] = arrays["extremes"]
        except (IndexError, ValueError) as error:
            raise ValueError(f"tally: arrays do not fit each other ({error})") from None
        return cls(
            flat.reshape(channels, cells, SLOTS), extremes, bins, threshold, nll_sum, brier_sum
        )

    @property
    def fine(self) -> int:
        """F, the number of cells of equal width, and the index of the cell above the threshold."""
        return self.cells.shape[1] - 1

    @property
    def edge(self) -> int:
        """Cell that the threshold lies in."""
        return int(cell_of(self.threshold, self.bins, self.fine // self.bins))

    def _statistics(self, channel: int, order: NDArray[np.int64]) -> BinStatistics:
        """Statistics of cells in some order; confidences are the cells' edges plus distances."""
        cells = self.cells[channel, order]
        count = cells[:, PREDICTIONS]
        lower = np.where(order == self.fine, self.edge, order) * (UNITS // self.fine)
        units = count * lower.astype(np.float64) + cells[:, DISTANCES]
        return BinStatistics(count, units / UNITS, cells[:, HITS])

    def _bins(self, channel: int, *, kept: bool = False) -> BinStatistics:
        order = self.by_confidence(channel) if kept else np.arange(self.fine + 1)
        part = self._statistics(channel, order)
        index = np.where(order == self.fine, self.edge, order) // (self.fine // self.bins)

        def summed(values: NDArray[Any]) -> NDArray[Any]:  # counts are exact in float64, too
            return np.bincount(index, values, self.bins).astype(values.dtype, copy=False)

        return BinStatistics(summed(part.count), summed(part.confidence_sum), summed(part.hit_sum))


class Voxels:
    """Probabilities and labels of a case, and which of its voxels are in which scope."""

    def __init__(
        self,
        probs: Any,
        labels: Any,
        scopes: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        *,
        ignore_index: int | None = None,
        bins: int = 15,
        threshold: float = 1e-3,
    ) -> None:
        """Check and prepare; nothing of the size of the probabilities is copied.

        Args:
            probs: probabilities ``(K, *S)``, floating (array or tensor); a single channel is the
                probability of label 1, and the rest is the probability of label 0. Their values are
                not read before they are counted.
            labels: integer ``(*S)``.
            scopes: masks bool ``(*S)`` by name, at most seven, as a mapping or as pairs; None as a
                mask takes every voxel. None instead of the mapping means ``{"all": None}``.
            ignore_index: label to leave out.
            bins: M.
            threshold: probabilities up to this are left out of TACE.

        Raises:
            ValueError: shapes or types that do not fit; arguments out of range.
        """
        p, y = as_array(probs), as_array(labels)
        if p.dtype.kind != "f" or p.ndim < 2 or p.shape[1:] != y.shape or y.dtype.kind not in "iu":
            raise ValueError(
                f"probs {p.dtype} {p.shape} and labels {y.dtype} {y.shape}: expected floating "
                "(K, *S) and integer (*S)"
            )
        if y.size >= 2**31:
            raise ValueError(
                f"labels: expected less than 2^31 voxels, got {y.size}; add the tallies of parts"
            )
        if bins < 1 or not 0 <= threshold <= 1:
            raise ValueError(
                f"bins, threshold: expected at least 1 and 0 to 1, got {bins}, {threshold}"
            )
        if scopes is None or isinstance(scopes, Mapping):
            scopes = (scopes or {"all": None}).items()
        self._scopes, member = _membership(scopes, y.shape)
        if ignore_index is not None:
            member *= y.reshape(-1) != ignore_index
        self._members, self._zone = _zones(member)
        self._p, self._y = p.reshape(len(p), -1), y.reshape(-1)
        self._num_classes = max(2, len(p))
        self._narrow = self._narrowed()
        self._ignore_index = ignore_index
        self._bins, self._threshold = bins, threshold
        self._packed: dict[int, Cells] = {}

    @property
    def _fine(self) -> int:
        """F."""
        return self._bins * -(-FINEST // self._bins)

    def count_class(self, k: int) -> None:
        """Count class k now, so that :meth:`tally` has less to do.

        Its probabilities must be there; those of other classes may still be missing.

        Raises:
            ValueError: values that are no probabilities.
        """
        self._count([1 + k], [range(self._pieces)])

    def widen(self, scope: str, mask: NDArray[Any]) -> None:
        """Add voxels to a scope; those that are in it already stay in it.

        Args:
            scope: its name.
            mask: bool or integer ``(*S)``, not 0 in the voxels that are added.
        """
        bit, more = 1 << self._scopes.index(scope), mask.reshape(-1)
        for i in range(self._pieces):
            part = slice(i * PIECE, (i + 1) * PIECE)
            lacking = np.array([not member & bit for member in (*self._members, 0)])
            moved = np.flatnonzero(more[part] != 0)  # of bool it is many times as fast
            moved = moved[lacking[self._zone[part][moved]]]  # OUTSIDE is the last
            if self._ignore_index is not None:
                moved = moved[self._y[part][moved] != self._ignore_index]
            if len(moved):
                self._move(part.start + moved, bit)

    def _move(self, where: NDArray[np.int64], bit: int) -> None:
        """Let some voxels be in one scope more; they may come from several zones."""
        y, before = self._narrow[where], self._zone[where]
        after = before.copy()
        for zone in distinct_labels(before).tolist():
            after[before == zone] = self._zone_of(bit | (0 if zone < 0 else self._members[zone]))
        self._zone[where] = after
        for channel, packed in self._packed.items():
            k = channel - 1
            p = self._of_class(k, where)
            for zone, sign in ((before, -1), (after, 1)):
                count_class(p, y, zone, k, sign, self._threshold, self._bins, packed)

    def _of_class(self, k: int, where: NDArray[np.int64]) -> NDArray[Any]:
        """Probabilities of a class in some voxels, in a type that is compiled for."""
        single = len(self._p) == 1
        values = self._p[0 if single else k, where]
        p = copy_floats(values, np.empty(len(values), _wide(values)))
        return 1 - p if single and k == 0 else p

    def _zone_of(self, member: int) -> int:
        """Index of a zone, which is made if no voxel was in it yet."""
        if member not in self._members:
            self._members.append(member)
            for channel, packed in self._packed.items():
                none = np.zeros((1, *packed.shape[1:]), packed.dtype)
                self._packed[channel] = np.concatenate([packed, none])
        return self._members.index(member)

    def tally(self) -> dict[str, Tally]:
        """Sums over each scope, in one pass.

        Raises:
            ValueError: values that are no probabilities or no labels.
        """
        channels = [c for c in range(self._num_classes + 1) if c not in self._packed]
        extremes, total = self._count(channels, self._shares(len(channels)))
        inside = {name: self._inside(name) for name in self._scopes}
        cells = self._unpacked(inside)
        found = {}
        for name, zones in inside.items():
            ends, losses = extremes[zones].min(0, initial=np.inf), total[zones].sum(0)
            nll_sum, brier_sum = float(losses[NLL]), float(losses[BRIER])
            found[name] = Tally(cells[name], ends, self._bins, self._threshold, nll_sum, brier_sum)
        return found

    def _shares(self, channels: int) -> list[range]:
        """Pieces of each share of a channel.

        A thread counts one channel at a time, whose cells stay in a fast cache. Where there are
        more threads than channels, several share a channel, each with cells of its own; such cells
        may take a quarter of the memory of the probabilities.
        """
        room = 8 * len(self._members) * channels * (self._fine + 1) * WORDS
        most = 1 + self._p.nbytes // max(4 * room, 1)
        threads = threads_for(self._pieces)
        wanted = threads if channels == 1 else -(-threads * ROUNDS // channels)
        sharing = max(1, min(wanted, most))
        return [range(share, self._pieces, sharing) for share in range(sharing)]

    def _count(
        self, channels: Sequence[int], shares: Sequence[range]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Count channels; extremes and sums of every zone are of the top label, if it is counted.

        :mod:`segcal.counting` describes what is counted.
        """
        zones, above = len(self._members), self._fine
        parts = list(itertools.product(channels, range(len(shares))))
        packed = {part: np.zeros((zones, above + 1, WORDS), np.int64) for part in parts}
        ends = np.full((len(shares) if TOP in channels else 0, zones, above + 1, 2), np.inf)
        sums = np.zeros((self._pieces, zones, 2))

        def count(part: tuple[int, int]) -> int:
            channel, share = part
            pieces, bins, cells = shares[share], self._bins, packed[part]
            each = self._each(pieces, _classes(channel))
            for i, (p, at, y, zone) in zip(pieces, each, strict=True):
                if channel == TOP:
                    wrong = count_top(p, at, y, zone, bins, cells, ends[share], sums[i])
                else:
                    k, of_class = channel - 1, p[0, at : at + len(y)]
                    wrong = count_class(of_class, y, zone, k, 1, self._threshold, bins, cells)
                if wrong:
                    return int(wrong)
            return COUNTED

        if wrong := sorted({*in_threads(count, parts)} - {COUNTED}):
            self._refuse(wrong[0])
        for channel, share in parts:
            if share:
                self._packed[channel] += packed.pop((channel, share))
            else:
                self._packed[channel] = packed.pop((channel, share))
        return ends.min(0, initial=np.inf), sums.sum(0)

    def _unpacked(self, inside: Mapping[str, Sequence[int]]) -> dict[str, Cells]:
        """Cells of the tally of every scope, from those of its zones, which are given up.

        Both may take as much memory as the probabilities, so no channel is kept in both forms.
        """
        shape = (self._num_classes + 1, self._fine + 1, SLOTS)
        cells = {name: np.empty(shape, np.int64) for name in inside}
        for channel in range(len(self._packed)):
            packed = self._packed.pop(channel)
            for name, zones in inside.items():
                summed = np.zeros(packed.shape[1:], np.int64)
                for zone in zones:
                    summed += packed[zone]
                counts, of_channel = summed[:, PACKED_COUNTS], cells[name][channel]
                of_channel[:, PREDICTIONS] = counts & (2**HIT_SHIFT - 1)
                of_channel[:, HITS] = counts >> HIT_SHIFT
                of_channel[:, DISTANCES] = summed[:, PACKED_DISTANCES]
        return cells

    def equal_mass_groups(
        self, tallies: Mapping[str, Tally], groups: int, channels: Iterable[int] | None = None
    ) -> dict[str, list[BinStatistics]]:
        """Exact groups of equal mass, by scope.

        They are the groups of :func:`segcal.binning.equal_mass_statistics`.

        Args:
            tallies: all that :meth:`tally` returned.
            groups: R, number of groups.
            channels: 0 for the top label, 1 + k for class k; None takes all.

        Raises:
            ValueError: tallies of other voxels, where that shows.
        """
        chosen = list(range(self._num_classes + 1) if channels is None else channels)
        threads = max(1, threads_for(self._pieces) // max(1, len(chosen)))  # of a channel
        of_channels = in_threads(
            lambda channel: self._groups_of(channel, tallies, groups, threads), chosen
        )
        return {name: [one[name] for one in of_channels] for name in tallies}

    def _groups_of(
        self, channel: int, tallies: Mapping[str, Tally], groups: int, threads: int
    ) -> dict[str, BinStatistics]:
        """Groups of equal mass of a channel, by scope."""
        cuts = {}
        for name, one in tallies.items():  # a mass takes memory, so it is made twice
            order, inside = one.by_confidence(channel), one.mass(channel).cuts_by_cell(groups)
            cuts[name] = {int(order[index]): within for index, within in inside.items()}
        cells = sorted({cell for of in cuts.values() for cell in of})
        values = self._distinct(channel, np.array(cells, np.int64), tallies, threads)
        if values is None:
            return {
                name: self._sorted(name, channel, one.threshold, groups)
                for name, one in tallies.items()
            }
        entries: dict[str, dict[int, BinStatistics]] = {name: {} for name in tallies}
        for cell, (confidence, of_zones) in zip(cells, values, strict=True):
            for name, of in cuts.items():
                if cell in of:
                    counts = of_zones[self._inside(name)].sum(0, np.int64)
                    entries[name][cell] = _around_cuts(confidence, counts, of[cell])
        return {
            name: _replaced(one.mass(channel), one.by_confidence(channel), entries[name]).groups(
                groups
            )
            for name, one in tallies.items()
        }

    @property
    def _pieces(self) -> int:
        return -(-len(self._y) // PIECE)

    def _each(self, pieces: range, classes: slice = slice(None)) -> Iterator[Piece]:
        """Pieces one after the other, of some classes alone; each is good until the next."""
        single = len(self._p) == 1
        chosen = self._p if single else self._p[classes]
        for i, (p, at) in zip(pieces, _widened(chosen, pieces), strict=True):
            part = slice(i * PIECE, (i + 1) * PIECE)
            y, zone = self._narrow[part], self._zone[part]
            if single:
                inside = p[:, at : at + len(y)]
                p, at = np.concatenate([1 - inside, inside])[classes], 0
            yield p, at, y, zone

    def _narrowed(self) -> NDArray[Any]:
        """Labels in the type that is compiled for; those that are no class are K or larger."""
        k = self._num_classes
        kind = np.uint8 if k <= np.iinfo(np.uint8).max else np.int32
        if self._y.dtype == kind:
            return np.ascontiguousarray(self._y)
        narrow = np.empty(len(self._y), kind)
        for start in range(0, len(narrow), PIECE):
            y = self._y[start : start + PIECE]
            narrow[start : start + PIECE] = np.where((y < 0) | (y >= k), k, y)
        return narrow

    def _inside(self, scope: str) -> list[int]:
        """Zones of a scope, in an order that does not depend on when they were made."""
        bit = 1 << self._scopes.index(scope)
        inside = [z for z, member in enumerate(self._members) if member & bit]
        return sorted(inside, key=self._members.__getitem__)

    def _refuse(self, wrong: int) -> None:
        if wrong == WRONG_LABEL:
            from segcal.tensors import as_tensor, check_label_values

            check_label_values(as_tensor(self._y), self._num_classes, self._ignore_index)
        raise ValueError(
            "probs: expected values in [0, 1] (logits need a softmax first; NaN and inf are "
            "refused)"
        )

    def _distinct(
        self, channel: int, which: NDArray[np.int64], tallies: Mapping[str, Tally], threads: int
    ) -> Iterator[Values] | None:
        """Distinct values in some cells, one after the other; None if there are too many."""
        some = next(iter(tallies.values()))
        most = sum(one.cells[channel, which, PREDICTIONS] for one in tallies.values())
        low, high = _bit_range(np.where(which == some.fine, some.edge, which), some.fine, some.bins)
        # a cell that holds fewer predictions than float32 has values in it is listed
        listed = most < high - low
        lists, tables = _starts(np.where(listed, most, 0)), _starts(np.where(listed, 0, high - low))
        rows, values, zones = int(lists[-1]), int(tables[-1]), len(self._members)
        if self._p.dtype.itemsize > 4 or rows + values > REFINED:
            return None
        place = np.full(some.fine + 1, -1, np.int32)
        place[which] = np.arange(len(which))
        begin = np.where(listed, lists[:-1], tables[:-1] - low)
        near = np.zeros(1 << (31 - NEAR_SHIFT), np.uint8)  # of every float32 that is not negative
        for first, last in zip(low >> NEAR_SHIFT, high >> NEAR_SHIFT, strict=True):
            near[first : last + 1] = 1
        all_of_it = sum(one.cells[channel, :, PREDICTIONS].sum() for one in tallies.values())
        few = bool(most.sum() < FEW * all_of_it)
        sought = Sought(place, listed, begin, lists[1:], near, few)
        classes = _classes(channel)

        def count(pieces: range) -> Found:
            found = Found(
                np.zeros((zones, values, 2), np.int32),
                np.zeros(rows, np.int32),
                np.zeros(rows, np.uint8),
                begin.copy(),
            )
            for piece in self._each(pieces, classes):
                count_values(*piece, channel, some.threshold, some.bins, sought, found)
            return found

        done = _on_threads(count, self._pieces, threads)
        if any((found.ends > sought.end)[listed].any() for found in done):
            raise ValueError("tallies: expected all that tally() returned of these voxels")
        return (
            _of_lists(done, j, begin[j], zones)
            if listed[j]
            else _of_tables(done, slice(tables[j], tables[j + 1]), low[j])
            for j in range(len(which))
        )

    def _sorted(self, scope: str, channel: int, threshold: float, groups: int) -> BinStatistics:
        """Groups of equal mass by copying and sorting the channel."""
        from segcal.tensors import as_tensor

        classes = _classes(channel)
        parts = []
        for whole, at, y, zone in self._each(range(self._pieces), classes):
            p = whole[:, at : at + len(y)]
            inside = np.isin(zone, self._inside(scope))
            if channel != TOP:
                inside &= above(as_tensor(p[0]), threshold).numpy()
            predicted = p.argmax(0) if channel == TOP else channel - 1
            parts.append((p.max(0)[inside], np.equal(predicted, y)[inside]))
        confidence, hits = (as_tensor(np.concatenate(side)) for side in zip(*parts, strict=True))
        return equal_mass_statistics(confidence.double(), hits, groups)


def _classes(channel: int) -> slice:
    """Classes that a channel is made of: all for the top label."""
    return slice(None) if channel == TOP else slice(channel - 1, channel)


def _membership(
    scopes: Iterable[tuple[str, Any]], shape: tuple[int, ...]
) -> tuple[list[str], NDArray[np.uint8]]:
    """Names of the scopes, and for each voxel its scopes, one bit per scope from the lowest on."""
    names: list[str] = []
    member = np.zeros(math.prod(shape), np.uint8)
    for name, mask in scopes:
        if len(names) == MAX_SCOPES:
            raise ValueError(f"scopes: expected at most {MAX_SCOPES}")
        chosen = np.ones((1,), bool) if mask is None else as_array(mask)
        if chosen.dtype != np.bool_ or (mask is not None and chosen.shape != shape):
            raise ValueError(
                f"scope {name}: expected bool {shape}, got {chosen.dtype} {chosen.shape}"
            )
        if mask is None:
            member |= np.uint8(1 << len(names))
        else:
            bits = chosen.reshape(-1).view(np.uint8)
            for i in range(0, len(member), PIECE):
                member[i : i + PIECE] |= bits[i : i + PIECE] << np.uint8(len(names))
        names.append(name)
        del mask, chosen  # before the next one is made
    return names, member


def _zones(member: NDArray[np.uint8]) -> tuple[list[int], NDArray[np.int8]]:
    """Sets of scopes that occur, as bits, and for each voxel the index of its own, or OUTSIDE.

    They overwrite `member`, which has the size of an image; everything in between is computed piece
    by piece.
    """
    members = [m for m in distinct_labels(member).tolist() if m]
    number = np.full(256, OUTSIDE, np.int8)
    number[members] = np.arange(len(members))
    table = number.tobytes()
    for i in range(0, len(member), PIECE):  # many times as fast as indexing the table by an array
        part = member[i : i + PIECE]
        part[:] = np.frombuffer(part.tobytes().translate(table), np.uint8)
    return members, member.view(np.int8)


def _of_lists(done: Sequence[Found], j: int, begin: int, zones: int) -> Values:
    """Distinct values of cell j, which was listed from `begin` on by every thread."""
    lists = [slice(begin, found.ends[j]) for found in done]
    bits = np.concatenate([found.bits[part] for found, part in zip(done, lists, strict=True)])
    marks = np.concatenate([found.marks[part] for found, part in zip(done, lists, strict=True)])
    distinct, index = np.unique(bits, return_inverse=True)
    shape = (zones, len(distinct))
    flat = (marks >> 1) * np.int64(shape[1]) + index
    hit = flat[marks & 1 == 1]
    both = {PREDICTIONS: flat, HITS: hit}
    counts = np.empty((*shape, len(both)), np.int32)
    for slot, where in both.items():
        counts[..., slot] = np.bincount(where, minlength=math.prod(shape)).reshape(shape)
    return distinct.view(np.float32).astype(np.float64), counts


def _of_tables(done: Sequence[Found], rows: slice, low: int) -> Values:
    """Values from the one with bits `low` on, which every thread counted in some rows."""
    bits = np.arange(low, low + rows.stop - rows.start, dtype=np.int32)
    counts = np.asarray([found.table[:, rows] for found in done]).sum(0, np.int32)
    return bits.view(np.float32).astype(np.float64), counts


def predicted_classes(probs: NDArray[Any]) -> NDArray[Any]:
    """Most likely class of every voxel, the lowest of equally likely classes.

    Args:
        probs: floating ``(K, *S)``.

    Returns:
        uint8 ``(*S)``, int32 for more than 256 classes.
    """
    k = len(probs)
    flat = probs.reshape(k, -1)
    found = np.empty(flat.shape[1], np.uint8 if k <= 256 else np.int32)

    def look(pieces: range) -> None:
        for i, (p, at) in zip(pieces, _widened(flat, pieces), strict=True):
            most_likely(p, at, found[i * PIECE : (i + 1) * PIECE])

    _on_threads(look, -(-flat.shape[1] // PIECE))
    return found.reshape(probs.shape[1:])


def _widened(p: NDArray[Any], pieces: range) -> Iterator[tuple[NDArray[Any], int]]:
    """Arrays ``(K, N)`` that hold pieces of one, and where a piece begins.

    They are contiguous and of a type that is compiled for: the array itself, or copies. Each copy
    takes the place of the one before it in memory: with many classes, fresh memory would take
    longer than what is written there, as would float16 that NumPy reads.
    """
    wide = _wide(p)
    if p.dtype == wide and p.flags.c_contiguous:
        yield from ((p, i * PIECE) for i in pieces)
        return
    room = np.empty(len(p) * PIECE, wide)
    for i in pieces:
        part = p[:, i * PIECE : (i + 1) * PIECE]
        yield copy_floats(part, room[: part.size].reshape(part.shape)), 0


def _wide(p: NDArray[Any]) -> type[np.floating[Any]]:
    """Type with fast arithmetic that holds the values of an array."""
    return np.float64 if p.dtype.itemsize > 4 else np.float32


def _on_threads(
    work: Callable[[range], Result], pieces: int, most: int | None = None
) -> list[Result]:
    """Share the pieces among threads; compiled code releases the interpreter's lock."""
    threads = threads_for(min(pieces, most or pieces))
    shares = [range(t, pieces, threads) for t in range(threads)]
    return in_threads(work, shares)


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes)])


def _bit_range(
    cell: NDArray[np.int64], fine: int, bins: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bits of the float32 values that fall into cells: from the first to before the second.

    Two values more on either side, for an edge of a cell is rounded here to the nearest float32;
    and the tolerance above every upper edge, though only the last cell of a bin takes it. Bits of
    negative values are not among them, nor need they be: only the first cell takes any, and it has
    so many values above 0 that it is always listed.
    """
    last = np.where(cell == fine - 1, 1 + PROBABILITY_TOLERANCE, (cell + 1) / fine)
    last += edge_tolerance(bins) / bins
    low = (cell / fine).astype(np.float32).view(np.int32).astype(np.int64) - 2
    high = last.astype(np.float32).view(np.int32).astype(np.int64) + 2
    return np.maximum(low, 0), high


def _around_cuts(
    confidence: NDArray[np.float64], counts: NDArray[np.int64], cuts: NDArray[np.int64]
) -> BinStatistics:
    """Statistics of the values of a cell that hold a cut, and of all others between two of them.

    Args:
        confidence: distinct values, ascending ``(n,)``.
        counts: PREDICTIONS and HITS of each ``(n, 2)``.
        cuts: numbers of predictions of the cell below each cut.
    """
    count, hits = counts[:, PREDICTIONS], counts[:, HITS]
    holding = np.searchsorted(np.cumsum(count), cuts)
    starts = np.unique(np.concatenate([[0], holding, holding + 1]))
    starts = starts[starts < len(count)]
    return BinStatistics(*(np.add.reduceat(x, starts) for x in (count, count * confidence, hits)))


def _replaced(
    mass: MassHistogram, order: NDArray[np.int64], entries: Mapping[int, BinStatistics]
) -> MassHistogram:
    """A histogram some of whose cells are replaced by several entries.

    `order` is that of :meth:`Tally.by_confidence`: its first index, then consecutive ones up to its
    last, so that a cell's place in it follows from the end.
    """
    old, parts, before = mass.statistics, [], 0
    place = {c: 0 if c == order[0] else c - int(order[-1]) + len(order) - 1 for c in entries}
    for cell, here in sorted(place.items(), key=lambda item: item[1]):
        parts += [_between(old, before, here), entries[cell]]
        before = here + 1
    parts.append(_between(old, before, len(order)))
    refined = BinStatistics(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("count", "confidence_sum", "hit_sum")
        )
    )
    return MassHistogram(refined, np.zeros(len(refined.count)))


def _between(of: BinStatistics, start: int, stop: int) -> BinStatistics:
    chosen = slice(start, stop)
    return BinStatistics(of.count[chosen], of.confidence_sum[chosen], of.hit_sum[chosen])

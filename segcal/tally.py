"""Everything calibration metrics need of a case, as sums, in one compiled pass over its voxels.

Confidences fall into cells of equal width, 2^16 or a few more, so that the edges of the bins are
among theirs. A cell counts its predictions, those that came true, and the distances of the
confidences from its lower edge in units of 2^-40. These are integers: sums are exact for float32
values of 2^-17 and more (others are rounded to the unit) and depend neither on the order of
addition nor on the number of threads, and cases merge by adding arrays.

Groups of equal mass follow from the cells as if all values of a cell were tied; a second pass over
the few cells that hold a cut makes them exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from segcal.binning import (
    EDGE_TOLERANCE,
    BinStatistics,
    MassHistogram,
    equal_mass_statistics,
)
from segcal.counting import (
    UNITS,
    WRONG_LABEL,
    cell_of,
    count_cells,
    count_values,
    most_likely,
)
from segcal.tensors import PROBABILITY_TOLERANCE, as_array, as_tensor, check_label_values

FINEST = 2**16
"""Cells there are at least."""
MAX_SCOPES = 7
"""Bits in the number of a zone; zones are then fewer than 128."""
PIECE = 2**17
"""Voxels that one call of compiled code looks at."""
REFINED = 2**22
"""Values that the second pass can tell apart; where there are more, all are sorted."""

Cells = NDArray[np.int64]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Tally:
    """Sums over the voxels of a scope; those of cases add up.

    Attributes:
        cells: int64 ``(1 + K, F + 1, 3)``: per channel (the top label, then every class) and cell
            its predictions, those that came true, and the sum of their distances from the lower
            edge in units of 2^-40. The last cell takes from the one that the threshold lies in
            what is above the threshold.
        bins: M equal-width bins; each is F / M cells.
        threshold: probabilities of a class up to this are left out of TACE.
        nll_sum: nats, probabilities floored at 1e-12.
        brier_sum: squared errors, summed over the classes.
    """

    cells: Cells
    bins: int
    threshold: float
    nll_sum: float
    brier_sum: float

    def __add__(self, other: Tally) -> Tally:
        """Sums over both.

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
        """How many there are."""
        return int(self.cells[0, :, 0].sum())

    @cached_property
    def top(self) -> BinStatistics:
        """Equal-width bins of the top label."""
        return self._bins(0)

    @cached_property
    def classes(self) -> list[BinStatistics]:
        """Equal-width bins of ``p_k`` against ``y = k``, one for every class."""
        return [self._bins(1 + k) for k in range(self.num_classes)]

    @property
    def kept(self) -> list[BinStatistics]:
        """As :attr:`classes`, of the probabilities above the threshold alone."""
        return [self._bins(1 + k, kept=True) for k in range(self.num_classes)]

    @property
    def top_mass(self) -> MassHistogram:
        """Histogram of the top label's confidence."""
        return self.mass(0)

    @property
    def class_mass(self) -> list[MassHistogram]:
        """Histogram of every class's probabilities above the threshold."""
        return [self.mass(1 + k) for k in range(self.num_classes)]

    def equal_mass_groups(self, groups: int) -> list[BinStatistics]:
        """Groups of equal mass, of the top label, then of every class, from the cells.

        They are those of probabilities moved by at most the width of a cell;
        :meth:`Voxels.equal_mass_groups` gives them exactly.

        Args:
            groups: R of them.
        """
        return [mass.groups(groups) for mass in (self.top_mass, *self.class_mass)]

    def mass(self, channel: int) -> MassHistogram:
        """Histogram of a channel: 0 the top label, 1 + k class k above the threshold."""
        statistics = self._statistics(channel, self.by_confidence(channel))
        return MassHistogram(statistics, 1 / self._fine)

    def by_confidence(self, channel: int) -> NDArray[np.int64]:
        """Indices of the cells of :meth:`mass`, in its order."""
        if channel == 0:
            return np.arange(self._fine)
        return np.concatenate([[self._fine], np.arange(self.edge + 1, self._fine)])

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Plain arrays for a file, empty cells left out; :meth:`from_arrays` reads them."""
        flat = self.cells.reshape(-1, 3)
        index = np.flatnonzero(flat[:, 0])
        return {
            "index": index,
            "cells": flat[index],
            "shape": np.array([*self.cells.shape[:2], self.bins]),
            "sums": np.array([self.threshold, self.nll_sum, self.brier_sum]),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Tally:
        """Read what :meth:`to_arrays` wrote.

        Raises:
            ValueError: arrays that are missing or do not fit.
        """
        if missing := {"index", "cells", "shape", "sums"} - set(arrays):
            raise ValueError(f"tally: {', '.join(sorted(missing))} missing")
        try:
            channels, cells, bins = (int(n) for n in arrays["shape"])
            threshold, nll_sum, brier_sum = (float(x) for x in arrays["sums"])
            flat = np.zeros((channels * cells, 3), np.int64)
            flat[arrays["index"]] = arrays["cells"]
        except (IndexError, ValueError) as error:
            raise ValueError(f"tally: arrays do not fit each other ({error})") from None
        return cls(flat.reshape(channels, cells, 3), bins, threshold, nll_sum, brier_sum)

    @property
    def _fine(self) -> int:
        return self.cells.shape[1] - 1

    @property
    def edge(self) -> int:
        """Cell that the threshold lies in."""
        return int(cell_of(self.threshold, self.bins, self._fine // self.bins))

    def _statistics(self, channel: int, order: NDArray[np.int64]) -> BinStatistics:
        count, hits, offset = self.cells[channel, order].T
        lower = np.where(order == self._fine, self.edge, order) * (UNITS // self._fine)
        return BinStatistics(count, (count * lower.astype(np.float64) + offset) / UNITS, hits)

    def _bins(self, channel: int, *, kept: bool = False) -> BinStatistics:
        order = self.by_confidence(channel) if kept else np.arange(self._fine + 1)
        part = self._statistics(channel, order)
        index = np.where(order == self._fine, self.edge, order) // (self._fine // self.bins)

        def summed(values: NDArray[Any]) -> NDArray[Any]:
            total = np.zeros(self.bins, values.dtype)
            np.add.at(total, index, values)
            return total

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
    ) -> None:
        """Check and prepare; nothing of the size of the probabilities is copied.

        Args:
            probs: probabilities ``(K, *S)``, floating (array or tensor); with one channel that of
                label 1, the rest being 0's.
            labels: integer ``(*S)``.
            scopes: bool ``(*S)`` by name, at most seven, as a mapping or as pairs; None as a value
                takes every voxel. None instead of the mapping is ``{"all": None}``.
            ignore_index: label to leave out.

        Raises:
            ValueError: shapes or types that do not fit.
        """
        p, y = as_array(probs), as_array(labels)
        if p.dtype.kind != "f" or p.ndim < 2 or p.shape[1:] != y.shape or y.dtype.kind not in "iu":
            raise ValueError(
                f"probs {p.dtype} {p.shape} and labels {y.dtype} {y.shape}: expected floating "
                "(K, *S) and integer (*S)"
            )
        if y.size >= 2**31:
            raise ValueError(
                f"labels: expected less than 2^31 voxels, got {y.size}; add tallies up"
            )
        if scopes is None or isinstance(scopes, Mapping):
            scopes = (scopes or {"all": None}).items()
        self._scopes: list[str] = []
        member = np.zeros(y.size, np.uint8)  # a bit a scope
        for name, mask in scopes:
            if len(self._scopes) == MAX_SCOPES:
                raise ValueError(f"scopes: expected at most {MAX_SCOPES}")
            chosen = np.ones((1,), bool) if mask is None else as_array(mask)
            if chosen.dtype != np.bool_ or (mask is not None and chosen.shape != y.shape):
                raise ValueError(
                    f"scope {name}: expected bool {y.shape}, got {chosen.dtype} {chosen.shape}"
                )
            member |= chosen.reshape(-1).view(np.uint8) << np.uint8(len(self._scopes))
            self._scopes.append(name)
        if ignore_index is not None:
            member *= y.reshape(-1) != ignore_index
        parts = [slice(i, i + PIECE) for i in range(0, len(member), PIECE)]
        used = sum(np.bincount(member[part], minlength=256) for part in parts)
        self._members = [int(m) for m in np.flatnonzero(used) if m]
        zones = np.full(256, -1, np.int8)  # voxels of the same scopes are a zone
        zones[self._members] = np.arange(len(self._members))
        self._zone = member.view(np.int8)
        for part in parts:
            self._zone[part] = zones[member[part]]
        self._p, self._y = p.reshape(len(p), -1), y.reshape(-1)
        self._num_classes = max(2, len(p))
        self._ignore_index = ignore_index

    def tally(self, *, bins: int = 15, threshold: float = 1e-3) -> dict[str, Tally]:
        """Sums over each scope, in one pass.

        Args:
            bins: M.
            threshold: probabilities up to this are left out of TACE.

        Raises:
            ValueError: values that are no probabilities or no labels; arguments out of range.
        """
        if bins < 1 or not 0 <= threshold <= 1:
            raise ValueError(
                f"bins, threshold: expected at least 1 and 0 to 1, got {bins}, {threshold}"
            )
        zones, k = len(self._members), self._num_classes
        fine = bins * -(-FINEST // bins)
        shape = (zones, k + 1, fine + 1, 2)
        sums = np.zeros((self._pieces, zones, 2))

        def count(pieces: range) -> Cells:
            packed = np.zeros(shape, np.int64)
            for i in pieces:
                wrong = count_cells(*self._piece(i), threshold, bins, packed, sums[i])
                if wrong:
                    self._refuse(wrong)
            return packed

        room = 16 * zones * (k + 1) * (fine + 1)  # bytes that every thread takes for itself
        packed, *others = _on_threads(count, self._pieces, 1 + self._p.nbytes // max(4 * room, 1))
        while others:
            packed += others.pop()
        total = sums.sum(0)
        found = {}
        for name in self._scopes:
            inside = self._inside(name)
            both, offset = np.moveaxis(packed[inside].sum(0), -1, 0)
            cells = np.stack([both & (2**32 - 1), both >> 32, offset], -1)
            nll_sum, brier_sum = total[inside].sum(0)
            found[name] = Tally(cells, bins, threshold, float(nll_sum), float(brier_sum))
        return found

    def equal_mass_groups(
        self, tallies: Mapping[str, Tally], groups: int, channels: Iterable[int] | None = None
    ) -> dict[str, list[BinStatistics]]:
        """Groups of equal mass, exact, by scope.

        See :func:`segcal.binning.equal_mass_statistics`.

        Args:
            tallies: what :meth:`tally` returned.
            groups: R.
            channels: 0 for the top label, 1 + k for class k; None takes all.
        """
        found: dict[str, list[BinStatistics]] = {name: [] for name in tallies}
        for channel in range(self._num_classes + 1) if channels is None else channels:
            masses = {name: one.mass(channel) for name, one in tallies.items()}
            cut = [
                one.by_confidence(channel)[masses[name].cells_with_cuts(groups)]
                for name, one in tallies.items()
            ]
            distinct = self._distinct(channel, np.unique(np.concatenate(cut)), tallies)
            for name, one in tallies.items():
                if distinct is None:
                    found[name].append(self._sorted(name, channel, one.threshold, groups))
                    continue
                refined = _replace(
                    masses[name].statistics,
                    one.by_confidence(channel),
                    {cell: (v, n[self._inside(name)].sum(0)) for cell, (v, n) in distinct.items()},
                )
                found[name].append(MassHistogram(refined, 0.0).groups(groups))
        return found

    @property
    def _pieces(self) -> int:
        return -(-len(self._y) // PIECE)

    def _piece(
        self, i: int, classes: slice = slice(None)
    ) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[np.int8]]:
        """Probabilities, labels and zones of some voxels, in types that are compiled for."""
        part = slice(i * PIECE, (i + 1) * PIECE)
        p = _widened(self._p[:, part], classes if len(self._p) > 1 else slice(None))
        if len(self._p) == 1:
            p = np.concatenate([1 - p, p])[classes]
        y = self._y[part]
        if y.dtype.itemsize > 4:  # what does not fit is as wrong as K
            y = np.where((y < 0) | (y >= self._num_classes), self._num_classes, y)
        return p, y.astype(np.int32), self._zone[part]

    def _inside(self, scope: str) -> list[int]:
        """Zones of a scope."""
        bit = 1 << self._scopes.index(scope)
        return [z for z, member in enumerate(self._members) if member & bit]

    def _refuse(self, wrong: int) -> None:
        if wrong == WRONG_LABEL:
            check_label_values(as_tensor(self._y), self._num_classes, self._ignore_index)
        raise ValueError(
            "probs: expected values in [0, 1] (logits need a softmax first; NaN and inf are "
            "refused)"
        )

    def _distinct(
        self, channel: int, which: NDArray[np.int64], tallies: Mapping[str, Tally]
    ) -> dict[int, tuple[NDArray[np.float64], NDArray[np.int64]]] | None:
        """Distinct values in some cells, and how many there are of each.

        A cell that holds fewer predictions than float32 has values in it is listed, another one
        counted value by value.

        Returns:
            by cell: values ascending ``(n,)``, predictions and hits ``(zones, n, 2)``; None where
            they are too many.
        """
        if self._p.dtype.itemsize > 4:
            return None
        some = next(iter(tallies.values()))
        fine = some.cells.shape[1] - 1
        low, high = _bit_range(np.where(which == fine, some.edge, which), fine, some.bins)
        most = sum(one.cells[channel, which, 0] for one in tallies.values())
        listed = most < high - low
        start = _starts(np.where(listed, most, 0)), _starts(np.where(listed, 0, high - low))
        rows, values = int(start[0][-1]), int(start[1][-1])
        if rows + values > REFINED:
            return None
        begin = np.where(listed, start[0][:-1], start[1][:-1] - low)
        place = np.full(fine + 1, -1, np.int32)
        place[which] = np.arange(len(which))
        classes = slice(channel - 1, channel) if channel else slice(None)
        zones = len(self._members)

        def count(pieces: range) -> tuple[NDArray[Any], ...]:
            table = np.zeros((zones, values, 2), np.int32)
            bits, marks, ends = np.zeros(rows, np.int32), np.zeros(rows, np.uint8), begin.copy()
            for i in pieces:
                count_values(
                    *self._piece(i, classes), channel - 1, some.threshold, some.bins,
                    place, begin, listed, table, bits, marks, ends,
                )  # fmt: skip
            return table, bits, marks, ends

        done = _on_threads(count, self._pieces)
        found: dict[int, tuple[NDArray[np.float64], NDArray[np.int64]]] = {}
        for j, cell in enumerate(which.tolist()):
            if listed[j]:
                parts = [(b[begin[j] : e[j]], m[begin[j] : e[j]]) for _, b, m, e in done]
                bits, marks = (np.concatenate(side) for side in zip(*parts, strict=True))
                distinct, index = np.unique(bits, return_inverse=True)
                shape = (zones, len(distinct))
                flat = (marks >> 1) * np.int64(shape[1]) + index
                hit = flat[marks & 1 == 1]
                both = [np.bincount(x, minlength=shape[0] * shape[1]) for x in (flat, hit)]
                counts = np.stack(both, -1).reshape(*shape, 2)
            else:
                part = slice(start[1][j], start[1][j + 1])
                distinct = np.arange(low[j], high[j], dtype=np.int32)
                counts = np.asarray([table[:, part] for table, *_ in done]).sum(0, np.int64)
            found[cell] = distinct.view(np.float32).astype(np.float64), counts
        return found

    def _sorted(self, scope: str, channel: int, threshold: float, groups: int) -> BinStatistics:
        """Groups of equal mass the long way."""
        classes = slice(channel - 1, channel) if channel else slice(None)
        parts = []
        for i in range(self._pieces):
            p, y, zone = self._piece(i, classes)
            inside = np.isin(zone, self._inside(scope))
            if channel:
                inside &= p[0] > threshold
            predicted = p.argmax(0) if channel == 0 else channel - 1
            parts.append((p.max(0)[inside], np.equal(predicted, y)[inside]))
        confidence, hits = (as_tensor(np.concatenate(side)) for side in zip(*parts, strict=True))
        return equal_mass_statistics(confidence.double(), hits, groups)


def predicted_classes(probs: NDArray[Any]) -> NDArray[Any]:
    """Most likely class of every voxel, the lowest of equals.

    Args:
        probs: floating ``(K, *S)``.

    Returns:
        uint8 ``(*S)``, int32 for more than 256 classes.
    """
    k = len(probs)
    flat = probs.reshape(k, -1)
    found = np.empty(flat.shape[1], np.uint8 if k <= 256 else np.int32)

    def look(pieces: range) -> None:
        for i in pieces:
            part = slice(i * PIECE, (i + 1) * PIECE)
            most_likely(_widened(flat[:, part]), found[part])

    _on_threads(look, -(-flat.shape[1] // PIECE))
    return found.reshape(probs.shape[1:])


def _widened(p: NDArray[Any], classes: slice = slice(None)) -> NDArray[Any]:
    """Contiguous copy in a type that is compiled for."""
    wide = np.float64 if p.dtype.itemsize > 4 else np.float32
    return np.ascontiguousarray(p[classes], dtype=wide)


def _on_threads(
    work: Callable[[range], Result], pieces: int, most: int | None = None
) -> list[Result]:
    """Share out the pieces; compiled code lets go of the interpreter's lock."""
    threads = max(1, min(torch.get_num_threads(), pieces, most or pieces))
    shares = [range(t, pieces, threads) for t in range(threads)]
    if threads == 1:
        return [work(shares[0])]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, shares))


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes)])


def _bit_range(
    cell: NDArray[np.int64], fine: int, bins: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bits of the float32 values that fall into cells: from the first to before the second."""
    last = np.where(cell == fine - 1, 1 + PROBABILITY_TOLERANCE, (cell + 1) / fine)
    low = (cell / fine).astype(np.float32).view(np.int32).astype(np.int64) - 2
    high = (last + EDGE_TOLERANCE / bins).astype(np.float32).view(np.int32).astype(np.int64) + 2
    return np.maximum(low, 0), high


def _replace(
    statistics: BinStatistics,
    order: NDArray[np.int64],
    distinct: Mapping[int, tuple[NDArray[np.float64], NDArray[np.int64]]],
) -> BinStatistics:
    """Statistics of cells in some order, some of the cells replaced by their distinct values."""
    old = (statistics.count, statistics.confidence_sum, statistics.hit_sum)
    parts: list[tuple[NDArray[Any], ...]] = []
    before = 0
    place = {c: 0 if c == order[0] else c - int(order[-1]) + len(order) - 1 for c in distinct}
    for cell, here in sorted(place.items(), key=lambda item: item[1]):
        values, counts = distinct[cell]
        count, hits = counts.T
        parts.append(tuple(x[before:here] for x in old))
        parts.append((count, count * values, hits))
        before = here + 1
    parts.append(tuple(x[before:] for x in old))
    return BinStatistics(*(np.concatenate(p) for p in zip(*parts, strict=True)))

"""Decision rules: label maps from probabilities, which stay as they are.

Probabilities ``(K, *S)`` are those of one case, a softmax whose channel 0 is the background; with a
`class_order` every channel is a region of its own, a sigmoid, and the class order says which label
each region gets in the map, where later regions overwrite earlier ones.

The mask of the largest expected Dice
-------------------------------------
For marginal probabilities p, the expected Dice of a mask M is taken as the ratio of expectations::

    D(M) = 2 sum_{M} p / (|M| + sum p)

Let D* be its maximum. ``2 sum_{M} p - D* (|M| + sum p)`` is at most 0, and 0 where D(M) = D*, so
the best masks maximise ``sum_{M} (2 p - D*)``: they are ``{p > D* / 2}``, with or without voxels of
exactly that probability. And ``M -> {p > D(M) / 2}`` never lowers D (Dinkelbach 1967). It reaches
the maximum exactly, in a handful of rounds and without a sort; as D grows, each mask lies within
the mask before, so that a round only looks at the voxels that are left. The smallest best mask is
taken.

The ratio prefers the empty mask only where all p are 0, because it does not know that a structure
may be absent altogether: a mask of many small probabilities then has a tiny expected Dice and a
tiny threshold. The empty mask is right if the structure is absent, with a probability of at most
``1 - max p`` (if the voxels err together). A structure whose expected Dice is below that
probability is left out. This costs Dice where structures are faint but present in every case, and
avoids false positives where they may be absent.

Offsets
-------
:class:`Offsets` are chosen on a grid. All that matters of a voxel is the order in which classes
take it over as the offsets grow by whole steps: the integer part of ``log p`` in steps, and the
order of the remainders. Few voxels can change their class at all, and many voxels are the same in
this respect, so that cases are reduced, exactly, to counts of few distinct rows of integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from segcal.arrays import PROBABILITY_TOLERANCE, as_array
from segcal.tally import predicted_classes

__all__ = [
    "Decision", "Offsets", "best_expected_dice", "decide", "decide_argmax", "decide_dice",
    "regions_to_labels",
]  # fmt: skip

PIECE = 1 << 18
"""Number of values that are processed at a time."""
STEP = 0.1
"""Difference between neighbouring offsets, in units of log p."""
STEPS = 30
"""Largest offset, in steps; the smallest is the negative of it."""
GRID = np.arange(-STEPS, STEPS + 1)
SWEEPS = 20
"""Largest number of times that all structures are gone through."""
LEAVE_ONE_OUT = 10
"""Number of patients up to which each is a fold of its own."""
FOLDS = 5
"""Number of folds for more patients."""
STATE_VERSION = 1

Rule = Literal["argmax", "dice"]
Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Decision:
    """Label map of one case by expected Dice.

    Attributes:
        labels: ``(*S)``, classes 0 to K - 1 (uint8, int32 for more than 256), or labels of the
            class order (int32).
        thresholds: float64, one per structure (classes 1 to K - 1, or all regions), whose mask is
            where its probability is above. Infinite where a structure was left out as absent.
        expected_dice: float64, one per structure, of its best mask on its own; NaN where all its
            probabilities are 0.
    """

    labels: NDArray[Any]
    thresholds: Numbers
    expected_dice: Numbers


def decide(
    probs: Any, rule: Rule | Offsets, *, class_order: Sequence[int] | None = None
) -> NDArray[Any]:
    """Return the integer label map ``(*S)`` of one case.

    Args:
        probs: floating ``(K, *S)``, array or tensor.
        rule: "argmax", "dice" (:func:`decide_dice`), or fitted :class:`Offsets`.
        class_order: label that each region gets in the map; None where channels are the classes of
            a softmax.

    Raises:
        ValueError: an unknown rule, or arguments that do not fit the rule.
    """
    if isinstance(rule, Offsets):
        return rule.apply(probs, class_order=class_order)
    if rule == "argmax":
        return decide_argmax(probs, class_order=class_order)
    if rule == "dice":
        return decide_dice(probs, class_order=class_order).labels
    raise ValueError(f"rule: expected one of {get_args(Rule)}, or Offsets, got {rule!r}")


def decide_argmax(probs: Any, *, class_order: Sequence[int] | None = None) -> NDArray[Any]:
    """Return the label map ``(*S)`` of the most likely classes, the lowest of equally likely ones.

    Args:
        probs: floating ``(K, *S)``.
        class_order: label that each region gets where its probability is above 0.5; None for a
            softmax.

    Raises:
        ValueError: not floating, or a class order of another length.
    """
    p = _checked(probs, class_order)
    return predicted_classes(p) if class_order is None else regions_to_labels(p, class_order)


def regions_to_labels(
    probs: NDArray[Any],
    class_order: Sequence[int],
    thresholds: Sequence[float] | Numbers | None = None,
) -> NDArray[np.int32]:
    """Return the label map ``(*S)`` of overlapping regions; later regions overwrite, as in nnU-Net.

    Args:
        probs: floating ``(K, *S)``.
        class_order: label that each region gets in the map.
        thresholds: a region is where its probability is above; None takes 0.5.
    """
    above = np.full(len(probs), 0.5) if thresholds is None else np.asarray(thresholds, float)
    labels = np.zeros(probs.shape[1:], np.int32)
    for channel, value, t in zip(probs, class_order, above, strict=True):
        labels[channel > t] = value  # as float64, which rounds neither
    return labels


def decide_dice(
    probs: Any, *, class_order: Sequence[int] | None = None, may_be_absent: bool = True
) -> Decision:
    """Return the label map of the masks with the largest expected Dice, as derived above.

    Where masks of classes overlap, a voxel goes to the class whose probability is largest in units
    of its threshold, the lowest of equal ones.

    Args:
        probs: floating ``(K, *S)``.
        class_order: label that each region gets in the map; None for a softmax.
        may_be_absent: leave out a structure whose expected Dice is below the largest probability
            that it is absent; False where all structures are known to be in every case.

    Raises:
        ValueError: not floating, not in [0, 1] (NaN is refused), a class order of another length,
            or a softmax of fewer than two classes.
    """
    p = _checked(probs, class_order)
    if class_order is None and len(p) < 2:
        raise ValueError("probs: a softmax needs at least 2 classes, got 1")
    found = [_best_mask(channel) for channel in (p if class_order is not None else p[1:])]
    dice = np.array([one for one, _ in found])
    absent = np.array([1 - most if may_be_absent else 0 for _, most in found])
    thresholds = np.where(dice >= absent, dice / 2, np.inf)  # infinite where Dice is NaN
    if class_order is not None:
        return Decision(regions_to_labels(p, class_order, thresholds), thresholds, dice)
    return Decision(_by_share(p, 1 / thresholds, thresholds), thresholds, dice)


def best_expected_dice(probs: Any) -> float:
    """Return the largest ratio ``2 sum_{M} p / (|M| + sum p)``; the mask is p above half of it.

    Args:
        probs: floating, marginal probabilities of one structure, any shape.

    Returns:
        a fraction of 1; NaN where all are 0.

    Raises:
        ValueError: not floating, or not in [0, 1] (NaN is refused).
    """
    p = as_array(probs)
    return _best_mask(_checked(p.reshape(1, -1), (1,))[0])[0]


class Offsets:
    """An offset per structure on log-probabilities, chosen on held-out cases by their mean DSC.

    A voxel goes to the class with the largest ``log p_k + o_k``, where the background has the
    offset 0; per channel a region is where ``log(p / (1 - p)) + o`` is above 0. The mean is over
    cases and structures; a structure that is in neither map of a case is left out, as in
    :func:`segcal.metrics.dice.dice`. Offsets between -3 and 3 in steps of 0.1 are tried for one
    structure after the other until none changes; of equally good offsets the one nearest to 0 is
    taken. A structure that is in no held-out case keeps 0.

    The offsets are accepted if they gain on patients that they were not chosen on, in
    cross-validation (leave-one-out up to 10 patients, else 5 folds), by more than the standard
    error over patients. Otherwise, or with one patient, all offsets stay 0 and the decision is
    argmax.

    Args:
        per_channel: whether every channel is a region of its own. Each region's offset is then
            chosen, and accepted or not, on its own, whatever one region hides of another in a label
            map.

    Attributes:
        values: offsets by channel; the background's offset is 0. Empty before the fit.
        facts: plain values that describe the fit: ``num_classes``, ``cases``, ``voxels``, ``rows``
            (number of distinct rows kept), ``folds``, ``taken`` (whether the offsets were
            accepted), ``dsc_before`` and ``dsc_after`` (mean DSC on all cases without and with the
            accepted offsets), ``gain`` (mean gain on cases that were left out, accepted or not),
            ``gain_error`` (its standard error, None where it is unknown), ``notes`` (warnings about
            the fit), and ``versions``. Per channel, ``taken`` is a list, and the other numbers are
            means.
    """

    def __init__(self, *, per_channel: bool = False) -> None:
        self.per_channel = per_channel
        self.values: list[float] = []
        self.facts: dict[str, Any] = {}

    def fit(
        self,
        cases: Iterable[tuple[Any, Any]],
        ignore_index: int | None = None,
        *,
        owners: Sequence[int] | None = None,
    ) -> Self:
        """Choose offsets, and return itself.

        Args:
            cases: pairs of probabilities, floating ``(K, *S)``, and labels, integer ``(*S)``, per
                channel ``(K, *S)`` of 0 and 1. They are iterated once, with one case in memory at a
                time.
            ignore_index: label of voxels that are left out.
            owners: number of the patient of every case; the cases of a patient are left out
                together. None where every case is a patient of its own.

        Raises:
            ValueError: shapes, values or numbers of classes that do not fit, or no case.
        """
        parts: list[list[_Rows]] = []
        known = 0
        for i, (probs, labels) in enumerate(cases):
            try:
                p, y = self._pair(probs, labels)
                if parts and len(p) != known:
                    raise ValueError(f"{len(p)} classes, the cases before have {known}")
                known = len(p)
                parts.append([_rows_of(*one, ignore_index) for one in self._questions(p, y)])
            except ValueError as error:
                raise ValueError(f"case {i}: {error}") from None
        if not parts:
            raise ValueError("cases: expected at least one, got none")
        owner = np.arange(len(parts)) if owners is None else np.asarray(owners)
        owner = np.unique(owner, return_inverse=True)[1]
        if len(owner) != len(parts):
            raise ValueError(f"owners: expected {len(parts)}, one a case, got {len(owner)}")
        fits = [_fit(_Cases.of(rows), owner) for rows in zip(*parts, strict=True)]
        rows = sum(len(one.labels) for case in parts for one in case)
        voxels = sum(int(case[0].counts.sum()) for case in parts)
        if self.per_channel:
            self.values = [offsets[1] for offsets, _ in fits]
        else:
            self.values = fits[0][0]
        self.facts = {
            "num_classes": known,
            "cases": len(parts),
            "voxels": voxels,
            "rows": rows,
            **(_mean_facts([facts for _, facts in fits]) if self.per_channel else fits[0][1]),
            "versions": {"numpy": np.__version__},
        }
        return self

    def _pair(self, probs: Any, labels: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        p = _checked(probs, None)
        y = as_array(labels)
        expected = p.shape if self.per_channel else p.shape[1:]
        if y.shape != expected or y.dtype.kind not in "iub":
            raise ValueError(
                f"labels: expected integers {expected} for probs {p.shape}, got {y.dtype} {y.shape}"
            )
        if len(p) < 2 and not self.per_channel:
            raise ValueError("probs: a softmax needs at least 2 classes, got 1")
        return p, y

    def _questions(
        self, p: NDArray[Any], y: NDArray[Any]
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Channels and labels that get offsets together: all of them, or each channel alone."""
        flat = p.reshape(len(p), -1)
        if not self.per_channel:
            yield flat, y.reshape(-1)
            return
        yield from ((flat[c : c + 1], y[c].reshape(-1)) for c in range(len(flat)))

    def apply(self, probs: Any, *, class_order: Sequence[int] | None = None) -> NDArray[Any]:
        """Return the label map ``(*S)``; it is :func:`decide_argmax`'s where all offsets are 0.

        Args:
            probs: floating ``(K, *S)``, K as in the fit.
            class_order: label that each region gets in the map, if fitted per channel, else None.

        Raises:
            ValueError: not fitted yet, another number of channels, or a class order where there
                are no regions.
        """
        if not self.values:
            raise ValueError("Offsets: not fitted yet; call fit, or from_state")
        if self.per_channel != (class_order is not None):
            raise ValueError(
                "class_order: expected one with offsets per channel, and with them alone, got "
                f"{class_order}"
            )
        p = _checked(probs, class_order)
        if len(p) != len(self.values):
            raise ValueError(
                f"probs: expected ({len(self.values)}, *S) as in the fit, got {p.shape}"
            )
        if not any(self.values):
            return decide_argmax(p, class_order=class_order)
        factors = np.exp(self.values)
        if class_order is not None:
            return regions_to_labels(p, class_order, 1 / (1 + factors))
        return _by_share(p, factors[1:])

    def state(self) -> dict[str, Any]:
        """Return all that has to be saved, ready for JSON."""
        return {
            "method": type(self).__name__,
            "version": STATE_VERSION,
            "arguments": {"per_channel": self.per_channel},
            "learned": {"values": list(self.values)},
            "facts": dict(self.facts),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Build offsets from what :meth:`state` returned.

        Raises:
            ValueError: the state of another method or version, or one that is damaged.
        """
        from segcal.posthoc.calibrator import check_state  # here, since it needs torch

        check_state(state, cls.__name__, STATE_VERSION)
        try:
            offsets = cls(**state["arguments"])
            offsets.facts = dict(state["facts"])
            offsets.values = [float(value) for value in state["learned"]["values"]]
            if len(offsets.values) != offsets.facts["num_classes"]:
                raise TypeError(f"{len(offsets.values)} offsets")
            if not all(map(math.isfinite, offsets.values)):
                raise TypeError(f"offsets {offsets.values}")
            if offsets.values[0] and not offsets.per_channel:
                raise TypeError("an offset of the background")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"state: of {cls.__name__}, but damaged ({error!r})") from None
        return offsets


def _checked(probs: Any, class_order: Sequence[int] | None) -> NDArray[Any]:
    p = as_array(probs)
    if p.dtype.kind != "f" or p.ndim < 1 or not len(p):
        raise ValueError(f"probs: expected floating (K, *S), got {p.dtype} {p.shape}")
    if class_order is not None and len(class_order) != len(p):
        raise ValueError(
            f"class_order: expected a label for each of {len(p)} channels, got {list(class_order)}"
        )
    return p


def _check_range(p: NDArray[Any]) -> None:
    """Raise ValueError unless probabilities lie in [0, 1]."""
    inside = (p >= -PROBABILITY_TOLERANCE) & (p <= 1 + PROBABILITY_TOLERANCE)
    if not inside.all():  # comparisons with NaN are False
        raise ValueError(
            "probs: expected values in [0, 1] (logits need a softmax first; NaN and inf are "
            f"refused), got others in {np.count_nonzero(~inside)} voxels"
        )


def _pieces(count: int, channels: int = 1) -> Iterator[slice]:
    """Parts of `count` voxels that are small enough to copy."""
    size = max(1024, PIECE // channels)
    return (slice(begin, begin + size) for begin in range(0, count, size))


def _widened(p: NDArray[Any]) -> NDArray[Any]:
    """The array in a type with fast arithmetic; no copy where it has such a type already."""
    return p.astype(np.float32) if p.dtype.itemsize < 4 else p


def _best_mask(channel: NDArray[Any]) -> tuple[float, float]:
    """Largest expected Dice of a mask, NaN where all p are 0; and the largest probability."""
    p = channel.reshape(-1)
    total = in_half = most = 0.0
    half = 0
    for part in _pieces(len(p)):
        piece = _widened(p[part])
        _check_range(piece)
        chosen = piece[piece > 0.5]
        half += len(chosen)
        in_half += float(chosen.sum(dtype=np.float64))
        total += float(np.maximum(piece, 0).sum(dtype=np.float64))
        most = max(most, float(piece.max()))
    if not total:
        return math.nan, most
    best = 2 * in_half / (half + total)  # of one mask, so that of the best is not below
    at = np.float64(best / 2)
    kept = [piece[piece > at] for piece in (_widened(p[part]) for part in _pieces(len(p)))]
    while True:
        value = 2 * math.fsum(float(one.sum(dtype=np.float64)) for one in kept)
        value /= sum(map(len, kept)) + total
        if not value > best:
            return best, most
        best = value
        kept = [piece[piece > np.float64(best / 2)] for piece in kept]


def _by_share(
    probs: NDArray[Any], factors: Numbers, thresholds: Numbers | None = None
) -> NDArray[Any]:
    """Class of the largest ``factor * p``, the lowest of equal ones.

    The background has the factor 1; with thresholds it takes the voxels where no class is above its
    threshold.
    """
    k = len(probs)
    p = probs.reshape(k, -1)
    labels = np.zeros(p.shape[1], np.uint8 if k <= 256 else np.int32)
    for part in _pieces(p.shape[1]):
        best = np.zeros(labels[part].shape) if thresholds is not None else p[0, part].astype(float)
        for c in range(1, k):
            one = p[c, part]
            share = one * factors[c - 1]
            takes = share > best
            if thresholds is not None:
                takes &= one > thresholds[c - 1]
            np.copyto(best, share, where=takes)
            labels[part][takes] = c
    return labels.reshape(probs.shape[1:])


class _Rows(NamedTuple):
    """Voxels of a case, reduced to what matters when offsets change by whole steps.

    Attributes:
        values: integer ``(n, K)``; with offsets of m steps the largest ``value + K m`` wins. The
            values of a row are distinct, except those that never win.
        labels: int64 ``(n,)``.
        counts: float64 ``(n,)``, number of voxels of a row, whole numbers.
    """

    values: NDArray[Any]
    labels: Integers
    counts: Numbers

    def distinct(self) -> _Rows:
        """Return every row once."""
        code = self.labels
        for column in self.values.T.astype(np.int64):  # one column after the other, never too large
            low = column.min()
            code = np.unique(code * (column.max() - low + 1) + column - low, return_inverse=True)[1]
        _, first, code = np.unique(code, return_index=True, return_inverse=True)
        counts = _sums(code, self.counts, len(first))
        return _Rows(self.values[first], self.labels[first], counts)

    @staticmethod
    def joined(parts: Sequence[_Rows]) -> _Rows:
        """Return the rows of all parts."""
        return _Rows(*map(np.concatenate, zip(*parts, strict=True)))


def _rows_of(p: NDArray[Any], y: NDArray[Any], ignore_index: int | None) -> _Rows:
    """Rows of one case with channels `p` ``(K, n)``, or ``(1, n)`` for a region."""
    from segcal.tensors import as_tensor, check_label_values  # here, since they need torch

    k = max(len(p), 2)
    never = _never(k)
    kind = np.int16 if 9 * STEPS * k < 2**15 else np.int32  # offsets are added to them
    parts = [_Rows(np.zeros((0, k), kind), np.zeros(0, np.int64), np.zeros(0))]
    for part in _pieces(len(y), k):
        labels = y[part].astype(np.int64)
        check_label_values(as_tensor(labels), k, ignore_index)
        piece = p[:, part].astype(np.float64)
        if ignore_index is not None:
            valid = labels != ignore_index
            labels, piece = labels[valid], piece[:, valid]
        _check_range(piece)
        piece = np.concatenate([1 - piece, piece]) if len(p) == 1 else piece
        parts.extend(_of_piece(np.clip(piece, 0, 1), labels, kind(never)))
    found = _Rows.joined(parts)
    return found.distinct() if len(found.labels) else found


def _never(k: int) -> int:
    """Value of a class, of K, that wins with no offset."""
    return -8 * STEPS * k


def _of_piece(p: Numbers, labels: Integers, never: np.signedinteger[Any]) -> Iterator[_Rows]:
    """Rows of a piece ``(K, n)``: of voxels whose class no offset changes, and of the others."""
    k = len(p)
    # what a class can lose and win; a little more, so that rounding keeps what is at the edge
    reach = np.exp(np.r_[0, np.full(k - 1, STEP * STEPS)])[:, None]
    able = (p > 0) & (p * reach * (1 + 1e-9) >= (p / reach).max(0))
    top = p.argmax(0)
    able[top, np.arange(len(top))] = True
    contested = able.sum(0) > 1
    kept = np.bincount(top[~contested] * k + labels[~contested], minlength=k * k)
    pairs = np.flatnonzero(kept)
    values = np.full((len(pairs), k), never)
    values[np.arange(len(pairs)), pairs // k] = k - 1
    yield _Rows(values, pairs % k, kept[pairs].astype(np.float64))
    if not contested.any():
        return
    q, able, labels = p[:, contested], able[:, contested], labels[contested]
    steps = np.where(able, np.log(np.where(able, q / q.max(0), 1)) / STEP, 0)
    whole = np.floor(steps)
    left = np.where(able, steps - whole, -1)
    rank = k - 1 - np.argsort(np.argsort(-left, axis=0, kind="stable"), axis=0)
    values = np.where(able, whole * k + rank, never).T.astype(never.dtype)
    yield _Rows(values, labels, np.ones(len(labels))).distinct()


@dataclass(frozen=True)
class _Cases:
    """Rows of all cases, and the label maps that offsets give; `m` are offsets in steps, ``(K,)``.

    Attributes:
        rows: rows of all cases.
        case: int64 ``(n,)``, number of the case of a row.
        number: number of cases.
        true: number of voxels of every class, float64 ``(cases, K)``.
    """

    rows: _Rows
    case: Integers
    number: int
    true: Numbers

    @classmethod
    def of(cls, parts: Sequence[_Rows]) -> _Cases:
        """Join the cases."""
        rows = _Rows.joined(parts)
        case = np.repeat(np.arange(len(parts)), [len(one.labels) for one in parts])
        k = rows.values.shape[1]
        true = _sums(case * k + rows.labels, rows.counts, len(parts) * k)
        return cls(rows, case, len(parts), true.reshape(-1, k))

    @property
    def num_classes(self) -> int:
        """K."""
        return self.rows.values.shape[1]

    def dsc(self, m: Integers) -> Numbers:
        """DSC of all structures ``(cases, K - 1)``; NaN where one is in neither map."""
        return self._dice(*self._counts(self.winners(m)))[:, 1:]

    def winners(self, m: Integers) -> Integers:
        """Class that every row goes to."""
        return self._scores(m, slice(None)).argmax(1)

    def along(self, m: Integers, c: int, winners: Integers) -> Numbers:
        """DSC ``(cases, K - 1, offsets)`` for every offset of structure c in the grid."""
        k, places = self.num_classes, len(GRID) + 1
        able = self._able(c)
        scores = self._scores(m, able)
        scores[:, c] = np.iinfo(scores.dtype).min
        other = scores.argmax(1)
        against = scores[np.arange(len(other)), other].astype(np.int64)
        takes = (against - self.rows.values[able, c]) // k + 1  # the first that c wins with
        place = np.clip(takes + STEPS, 0, places - 1)
        without = winners.copy()
        without[able] = other
        predicted, right = self._counts(without)
        case, labels, counts = self.case[able], self.rows.labels[able], self.rows.counts[able]

        def moved(weights: Numbers) -> Numbers:
            """Sums of weights that leave every class, by offsets up to each of the grid."""
            index = (case * k + other) * places + place
            sums = _sums(index, weights, self.number * k * places)
            return sums.reshape(self.number, k, places).cumsum(2)[:, :, :-1]

        gone, won_right = moved(counts), moved(counts * (labels == c)).sum(1)
        predicted = predicted[..., None] - gone
        right = right[..., None] - moved(counts * (labels == other))
        predicted[:, c], right[:, c] = gone.sum(1), won_right
        return self._dice(predicted, right)[:, 1:]

    def update(self, winners: Integers, m: Integers, c: int) -> None:
        """Change winners in place, after the offset of structure c has changed."""
        able = self._able(c)
        winners[able] = self._scores(m, able).argmax(1)

    def _able(self, c: int) -> Integers:
        """Rows that class c can win."""
        return np.flatnonzero(self.rows.values[:, c] > _never(self.num_classes))

    def _scores(self, m: Integers, rows: Integers | slice) -> NDArray[Any]:
        values = self.rows.values
        return values[rows] + (self.num_classes * m).astype(values.dtype)

    def _counts(self, winner: NDArray[Any]) -> tuple[Numbers, Numbers]:
        """Number of voxels predicted as every class, and of those the voxels of that label."""
        k = self.num_classes
        place, counts = self.case * k + winner, self.rows.counts
        both = (counts, counts * (self.rows.labels == winner))
        predicted, right = (_sums(place, one, self.number * k) for one in both)
        return predicted.reshape(-1, k), right.reshape(-1, k)

    def _dice(self, predicted: Numbers, right: Numbers) -> Numbers:
        true = self.true if predicted.ndim == 2 else self.true[..., None]
        total = predicted + true
        return np.divide(2 * right, total, out=np.full(total.shape, np.nan), where=total > 0)


def _sums(index: Integers, weights: Numbers, number: int) -> Numbers:
    """Sums of weights by their index, float64 ``(number,)``."""
    return np.bincount(index, weights, number).astype(np.float64, copy=False)


def _search(cases: _Cases, chosen: NDArray[np.bool_]) -> Integers:
    """Offsets in steps with the best mean DSC of the chosen cases, one structure at a time."""
    m = np.zeros(cases.num_classes, np.int64)
    present = np.flatnonzero(cases.true[chosen].sum(0) > 0)
    for _ in range(SWEEPS):
        before, winners = m.copy(), cases.winners(m)
        for c in present[present > 0]:
            means = _mean(cases.along(m, c, winners)[chosen])
            equals = GRID[means == means.max()]
            m[c] = min(equals.tolist(), key=lambda value: (abs(value), -value))
            cases.update(winners, m, c)
        if (m == before).all():
            break
    return m


def _fit(cases: _Cases, owner: NDArray[np.intp]) -> tuple[list[float], dict[str, Any]]:
    """Offsets of all classes, and the facts of their fit, for patients that own the cases."""
    n, patients = cases.number, int(owner.max()) + 1
    m = _search(cases, np.ones(n, bool))
    zero = np.zeros_like(m)
    before, held_out = cases.dsc(zero), cases.dsc(zero)
    folds = patients if patients <= LEAVE_ONE_OUT else FOLDS
    fold = owner % folds
    for f in range(folds) if patients > 1 else ():
        held_out[fold == f] = cases.dsc(_search(cases, fold != f))[fold == f]
    gain = float(_mean(held_out) - _mean(before))
    owned = [owner == one for one in range(patients)]
    gains = np.array([_mean(held_out[of]) - _mean(before[of]) for of in owned])
    gains = gains[~np.isnan(gains)]
    error = float(gains.std(ddof=1)) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
    taken = gain > error  # not where either is unknown
    notes = [
        f"structure {c}: in no held-out case, so its offset is 0"
        for c in range(1, cases.num_classes)
        if not cases.true[:, c].any()
    ]
    if patients == 1:
        notes.append("one patient cannot show what offsets do to other patients; they stay 0")
    elif m.any() and not taken:
        notes.append(
            f"offsets {(m * STEP).round(1).tolist()} gain {gain:.4f} (standard error {error:.4f}) "
            "in mean DSC on cases that they were not chosen on; they are not used"
        )
    m = m if taken else zero
    notes += [
        f"structure {c}: its offset {m[c] * STEP:.1f} is at the bound of the search"
        for c in np.flatnonzero(abs(m) == STEPS)
    ]
    return (m * STEP).round(6).tolist(), {
        "folds": folds,
        "taken": bool(taken),
        "dsc_before": _plain(_mean(before)),
        "dsc_after": _plain(_mean(cases.dsc(m))),
        "gain": _plain(gain) if patients > 1 else None,
        "gain_error": _plain(error),
        "notes": notes,
    }


def _mean(dsc: Numbers) -> Any:
    """Mean of the known values over the first two axes (or the only one); NaN without any."""
    axes = tuple(range(min(dsc.ndim, 2)))
    known = (~np.isnan(dsc)).sum(axes)
    total = np.nansum(dsc, axes)
    return np.divide(total, known, out=np.full(np.shape(total), np.nan), where=known > 0)


def _plain(value: Any) -> float | None:
    """The value, with None for NaN, which JSON does not have."""
    return None if math.isnan(value) else float(value)


def _mean_facts(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Facts of all channels: means where numbers are known, `taken` by channel."""
    mean = {}
    for key in ("dsc_before", "dsc_after", "gain", "gain_error"):
        known = [one[key] for one in facts if one[key] is not None]
        mean[key] = float(np.mean(known)) if known else None
    notes = [f"channel {c}: {text}" for c, one in enumerate(facts) for text in one["notes"]]
    taken = [one["taken"] for one in facts]
    return {"folds": facts[0]["folds"], "taken": taken, **mean, "notes": notes}

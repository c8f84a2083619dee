"""Samples with their classes or labels, and their split into training, validation and test."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.classify.readers.decoding import ImageFiles

PARTS = ("train", "validation", "test")
"""Names of the parts; the number of a part is an index of this list."""
UNSAID = -1
"""Part of samples for which the data set names no part."""


@dataclass(frozen=True)
class Samples:
    """A data set.

    Attributes:
        inputs: features ``(N, F)`` float32; images ``(N, C, H, W)``, uint8 or float32; words
            ``(N, L)`` int64, 0 where a text has ended; or images that stay in their files.
        targets: classes ``(N,)`` int64; or labels ``(N, T)`` int8 of 0, 1, and -1 where unknown.
        names: of the classes or labels.
        parts: ``(N,)`` given by the data set, -1 where unknown; None if it gives none.
        groups: ``(N,)``; samples of a group (slices of a patient) always stay together.
        checksum: of the files, if libraries may decode them with small differences; None if the
            inputs are exactly the content of the files.
        vectors: of words ``(W, D)`` float32 by their numbers, NaN for words without a vector; None
            for no vectors.
    """

    inputs: NDArray[Any] | ImageFiles
    targets: NDArray[Any]
    names: tuple[str, ...]
    parts: NDArray[np.int64] | None = None
    groups: NDArray[np.int64] | None = None
    checksum: int | None = None
    vectors: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.inputs)

    @property
    def multilabel(self) -> bool:
        """Whether a sample may have several labels, or none."""
        return self.targets.ndim == 2

    def check(self, source: str) -> Samples:
        """Return the samples if they are consistent.

        Args:
            source: beginning of messages.

        Raises:
            ValueError: samples that are not consistent.
        """
        n, count = len(self.inputs), len(self.names)
        twice = [name for name, times in Counter(self.names).items() if times > 1]
        wrong = ""
        if not n or len(self.targets) != n:
            wrong = f"expected samples and a target of each, got {n} and {len(self.targets)}"
        elif count < (1 if self.multilabel else 2):
            least = "one label" if self.multilabel else "two classes (one alone cannot be learnt)"
            wrong = f"expected at least {least}, got {', '.join(self.names) or 'none'}"
        elif twice:
            wrong = f"expected names of classes or labels, each once; got {twice[0]!r} twice"
        elif self.multilabel and (
            self.targets.shape[1] != count or not np.isin(self.targets, (-1, 0, 1)).all()
        ):
            wrong = f"expected targets 0, 1 or -1 (unknown) of {count} labels"
        elif not self.multilabel and not 0 <= self.targets.min() <= self.targets.max() < count:
            found = f"{self.targets.min()} to {self.targets.max()}"
            wrong = f"expected classes 0 to {count - 1}, got {found}"
        elif _not_finite(self.inputs):
            wrong = "holds NaN or infinite values; fill in what is missing first"
        elif any(x is not None and len(x) != n for x in (self.parts, self.groups)):
            wrong = "expected a part and a group of each sample"
        if wrong:
            raise ValueError(f"{source}: {wrong}")
        return self

    def take(self, index: NDArray[Any]) -> Samples:
        """Return some samples."""
        return replace(
            self,
            inputs=self.inputs[index],
            targets=self.targets[index],
            parts=None if self.parts is None else self.parts[index],
            groups=None if self.groups is None else self.groups[index],
        )


def _not_finite(inputs: NDArray[Any] | ImageFiles) -> bool:
    """Whether some values in memory are not finite."""
    if isinstance(inputs, ImageFiles) or inputs.dtype.kind != "f":
        return False
    return not np.isfinite(inputs).all()


def split(
    samples: Samples,
    *,
    validation: float,
    test: float,
    seed: int,
    fold: tuple[int, int] | None = None,
    test_from: str = "train",
) -> NDArray[np.int64]:
    """Part of every sample ``(N,)``; parts that the data set gives are kept.

    If the data set names no test samples, a share is drawn at random, and then a share for
    validation. Groups stay together. Every class gives its share (rounded down, so nothing if it
    has too few samples); labels are not balanced.

    Args:
        samples: to split.
        validation: share of all samples that are to be split.
        test: share, likewise.
        seed: of the choice.
        fold: number of the fold that tests, from 0, and number of folds; replaces the share and the
            parts of the data set. Folds of a seed have no sample in common.
        test_from: the part from which test samples are drawn if the data set names none: ``train``,
            which includes samples without a given part, or ``validation``.

    Raises:
        ValueError: a part without a sample; no validation samples to draw test samples from; a
            group that the data set itself splits.
    """
    rng = np.random.default_rng(seed)
    own = None if fold is not None else samples.parts
    parts = np.full(len(samples), UNSAID) if own is None else own.copy()
    said = set(np.unique(parts).tolist())
    open_ = np.flatnonzero(parts == UNSAID if UNSAID in said else parts == 0)
    shares = {2: test, 1: validation}
    if fold is None and test_from == "validation" and 2 not in said:
        if 1 not in said:
            raise ValueError(
                "data.split.test_from: the data set names no validation samples to test with; set "
                "it to train"
            )
        open_, shares = np.flatnonzero(parts == 1), {2: test}
    drawn = {part: share for part, share in shares.items() if part not in said}
    for units in _strata(samples, open_):
        sizes = {part: int(share * len(units)) for part, share in drawn.items()}
        order = rng.permutation(len(units))
        if fold is not None:
            start, stop = (len(units) * k // fold[1] for k in (fold[0], fold[0] + 1))
            order, sizes[2] = np.roll(order, -start), stop - start  # the fold, then validation
        begin = 0
        for part, size in sizes.items():
            chosen = [units[i] for i in order[begin : begin + size]]
            parts[np.concatenate([*chosen, np.empty(0, int)]).astype(int)] = part
            begin += size
    parts[parts == UNSAID] = 0
    counts = np.bincount(parts, minlength=len(PARTS))
    if empty := [name for name, n in zip(PARTS, counts, strict=True) if not n]:
        given = {PARTS[part]: f"{PARTS[part]} ({share:g})" for part, share in drawn.items()}
        raised = [text for name, text in given.items() if name in empty]
        if "train" not in empty:
            advice = f"raise {' and '.join(raised)}"
        elif len(open_) and given:
            advice = f"lower {' or '.join(given.values())}"
        else:
            advice = "the data set itself says what its samples are for, and none is for training"
        raise ValueError(
            f"data.split: no sample for {', '.join(empty)} of {len(samples)}; {advice}"
        )
    if samples.groups is not None:
        pairs = np.unique(np.stack([samples.groups, parts]), axis=1)
        times = np.unique(pairs[0], return_counts=True)[1]
        if torn := int((times > 1).sum()):
            raise ValueError(
                f"data: {torn} groups (patients) have samples in several parts, as the data set "
                "says, so that training would see who is tested; move all of a group to one part"
            )
    return parts


def _strata(samples: Samples, index: NDArray[np.int64]) -> list[list[NDArray[np.int64]]]:
    """Units that stay together, in strata that are each split evenly."""
    if samples.groups is not None:
        order = np.argsort(samples.groups[index], kind="stable")
        begins = np.flatnonzero(np.diff(samples.groups[index][order])) + 1
        return [np.split(index[order], begins) if len(index) else []]
    if samples.multilabel:
        return [[index[i : i + 1] for i in range(len(index))]]
    classes = samples.targets[index]
    return [[one[None] for one in index[classes == c]] for c in np.unique(classes)]


def long_tailed(
    classes: NDArray[np.int64], count: int, ratio: float, seed: int
) -> NDArray[np.int64]:
    """Indices of a subset whose class k keeps ``n ratio^{-k / (K - 1)}`` samples, in order.

    n is the size of the smallest class, so that class 0 has `ratio` times as many as the last.

    Args:
        classes: ``(N,)``.
        count: K.
        ratio: of the largest to the smallest class, >= 1.
        seed: of the choice.

    Raises:
        ValueError: a class without a sample.
    """
    rng = np.random.default_rng(seed)
    sizes = np.bincount(classes, minlength=count)
    if not sizes.all():
        raise ValueError(f"data.long_tail: class {int(sizes.argmin())} has no training sample")
    kept = []
    for k in range(count):
        size = max(1, round(sizes.min() * ratio ** (-k / (count - 1))))
        kept.append(rng.permutation(np.flatnonzero(classes == k))[:size])
    return np.sort(np.concatenate(kept))

"""Common interface of post-hoc methods: fit to held-out cases, apply to other cases, save.

Held-out cases are logits and labels of cases that the network was not trained on. A method works on
the logits of a softmax; with `per_channel` every channel is a sigmoid of its own (nnU-Net's
regions), which is calibrated as the softmax over (0, l) of "outside" and "inside".
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor
from typing_extensions import Self

from segcal.posthoc.regions import Regions
from segcal.posthoc.rows import CHUNK, Rows, doubt_of, log_softmax, sampled
from segcal.tensors import (
    check_channels,
    check_logits_labels,
    full_precision,
    is_softmax,
    valid_mask,
)

__all__ = ["Calibrator", "HeldOut", "PointwiseCalibrator", "SampledCalibrator"]

STATE_VERSION = 2
VOXELS_PER_CASE = 100_000
"""Number of voxels kept of each case where the number of cases is not known."""
MOST_VOXELS = 2_000_000
"""Number of voxels kept of all cases together where the number of cases is known."""
MOST_NUMBERS = 1 << 26
"""Largest number of logits that are kept of all cases together."""
FEWEST = 1000
"""Smallest number of voxels kept of a case, however many cases and classes there are."""


class HeldOut(NamedTuple):
    """A case that was held out of training; pairs of logits and labels are accepted as well.

    Attributes:
        logits: floating ``(N, K, *S)``, S of 0 to 3 axes.
        labels: integer ``(N, *S)``; per channel 0 and 1, ``(N, K, *S)``.
        spacing_mm: voxel size along S; None where it is not known.
        image: floating ``(N, C, *S)``, for methods that use the image.
    """

    logits: Tensor
    labels: Tensor
    spacing_mm: Sequence[float] | None = None
    image: Tensor | None = None


Cases = Iterable[HeldOut | tuple[Tensor, Tensor]]


class Calibrator(ABC):
    """A map from logits to probabilities that is fitted on held-out cases.

    A fit with a larger negative log-likelihood (NLL) than that of the original logits is rejected:
    the probabilities then stay as they were, and a warning says so.

    Args:
        per_channel: whether every channel is a sigmoid of its own, with labels that may overlap.

    Attributes:
        facts: plain values that describe the fit: ``num_classes``, ``cases``, ``voxels``,
            ``sampled`` (number of voxels that were used), ``nll_before`` and ``nll_after`` (mean
            NLL in nats; per channel, its mean over the channels), ``nll_error`` (standard error of
            ``nll_before`` by the sampling of voxels), ``notes`` (warnings about the fit), and
            ``versions``. Empty before the fit.
        improved: whether the fit was accepted; False leaves probabilities as they were.
        channels: fitted calibrators of the channels; empty without `per_channel`.
    """

    facts: dict[str, Any]
    improved: bool
    channels: list[Self]

    def __init__(self, *, per_channel: bool = False) -> None:
        self.per_channel = per_channel
        self.facts = {}
        self.improved = True
        self.channels = []

    @abstractmethod
    def fit(
        self,
        logits: Tensor | Cases,
        labels: Tensor | None = None,
        ignore_index: int | None = None,
    ) -> Self:
        """Fit to held-out cases, and return itself.

        Args:
            logits: floating ``(N, K, *S)``, of which every element is a case; or an iterable of
                cases (:class:`HeldOut`, or pairs of logits and labels), which may be iterated
                several times (an iterator is kept as a list).
            labels: integer ``(N, *S)`` for one tensor of logits, per channel ``(N, K, *S)``; None
                for an iterable of cases.
            ignore_index: label of voxels that are left out.

        Raises:
            ValueError: shapes or label values that do not fit, logits that are not finite, cases
                with different numbers of classes, or no valid voxel.
        """

    def apply(
        self,
        logits: Tensor,
        *,
        spacing_mm: Sequence[float] | None = None,
        image: Tensor | None = None,
    ) -> Tensor:
        """Return probabilities ``(N, K, *S)`` of logits of that shape, at least float32.

        Args:
            logits: floating ``(N, K, *S)``, K as in the fit.
            spacing_mm: voxel size along S; needed if the fit had one.
            image: ``(N, C, *S)``; needed if the fit had one.

        Raises:
            ValueError: not fitted yet, or another number of classes than it was fitted to.
        """
        if not self.facts:
            raise ValueError(f"{type(self).__name__}: not fitted yet; call fit, or from_state")
        expected = self.facts["num_classes"]
        if logits.ndim < 2 or logits.shape[1] != expected:
            raise ValueError(
                f"logits: expected (N, {expected}, *S) as in the fit, got {tuple(logits.shape)}"
            )
        with torch.no_grad(), full_precision(logits) as x:
            if not self.per_channel:
                return self._apply(x, spacing_mm, image)
            parts = [
                channel._apply(two_classes(x[:, c]), spacing_mm, image)[:, 1]
                for c, channel in enumerate(self.channels)
            ]
            return torch.stack(parts, 1)

    def _apply(self, x: Tensor, spacing_mm: Sequence[float] | None, image: Tensor | None) -> Tensor:
        if not self.improved:
            return torch.softmax(x, 1)
        return self._probabilities(x, spacing_mm, image)

    @abstractmethod
    def _probabilities(
        self, logits: Tensor, spacing_mm: Sequence[float] | None, image: Tensor | None
    ) -> Tensor:
        """Return probabilities of logits ``(N, K, *S)``, float32 or float64."""

    def state(self) -> dict[str, Any]:
        """Return all that has to be saved, ready for JSON."""
        learned = [c._saved() for c in self.channels] if self.per_channel else self._saved()
        return {
            "method": type(self).__name__,
            "version": STATE_VERSION,
            "arguments": {**self._arguments(), "per_channel": self.per_channel},
            "learned": learned,
            "facts": dict(self.facts),
        }

    def _saved(self) -> dict[str, Any] | None:
        return self._learned() if self.improved else None

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Build a calibrator from what :meth:`state` returned.

        Raises:
            ValueError: the state of another method or version, or one that is damaged.
        """
        check_state(state, cls.__name__, STATE_VERSION)
        try:
            calibrator = cls(**state["arguments"])
            calibrator.facts = dict(state["facts"])
            learned = state["learned"]
            if calibrator.per_channel:
                calibrator.channels = [calibrator._of_channel(one, {}) for one in learned]
                if len(learned) != calibrator.facts["num_classes"]:
                    raise TypeError(f"{len(learned)} channels")
            else:
                calibrator._take(learned)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"state: of {cls.__name__}, but damaged ({error!r})") from None
        return calibrator

    def _take(self, learned: dict[str, Any] | None) -> None:
        self.improved = learned is not None
        if learned is not None:
            self._load(learned)

    def _of_channel(self, learned: dict[str, Any] | None, facts: dict[str, Any]) -> Self:
        one = self._twin()
        one._take(learned)
        one.facts = facts
        return one

    def _twin(self) -> Self:
        """A calibrator that is not fitted, for the two classes of one channel."""
        return type(self)(**self._arguments())

    def _arguments(self) -> dict[str, Any]:
        """Arguments of the constructor other than `per_channel`, as plain values."""
        return {}

    @abstractmethod
    def _learned(self) -> dict[str, Any]:
        """What was learned, as numbers, lists and strings."""

    @abstractmethod
    def _load(self, learned: dict[str, Any]) -> None:
        """Restore what :meth:`_learned` returned."""


class SampledCalibrator(Calibrator):
    """A calibrator that is fitted to a sample of voxels, kept as rows.

    A method defines :meth:`_fit` and :meth:`_log_probabilities_of`, and its state by
    :meth:`_learned` and :meth:`_load`.

    In large cases a seeded sample of voxels is used, drawn separately in every group of voxels (2
    million voxels of all cases, or 100,000 of each case where the number of cases is not known
    beforehand); ``facts["nll_error"]`` says how exact that is.

    Args:
        per_channel: whether every channel is a sigmoid of its own, with labels that may overlap.
        regions: how the predicted map is divided into regions.
    """

    most_classes: ClassVar[int | None] = None

    def __init__(self, *, per_channel: bool = False, regions: Regions | None = None) -> None:
        super().__init__(per_channel=per_channel)
        self.regions = regions or Regions()
        self._notes: list[str] = []

    def fit(
        self,
        logits: Tensor | Cases,
        labels: Tensor | None = None,
        ignore_index: int | None = None,
    ) -> Self:
        """See :meth:`Calibrator.fit`."""
        return self.fit_rows(self.collect(_cases(logits, labels), ignore_index))

    def collect(
        self,
        cases: Cases,
        ignore_index: int | None = None,
        *,
        among: int | None = None,
        seed: int = 0,
    ) -> list[Rows]:
        """Go through the cases once, and keep voxels of each as rows.

        Args:
            cases: held-out cases, as :meth:`fit` takes them.
            ignore_index: label of voxels that are left out.
            among: total number of cases, of which ``cases`` may be a part; the more cases, the
                fewer voxels are kept of each. None takes the number of ``cases``, where it is
                known.
            seed: random seed of the draw of voxels.

        Returns:
            one item with the rows of the softmax, or per channel the rows of each channel; empty
            without a case.

        Raises:
            ValueError: as :meth:`fit`.
        """
        many = among or (len(cases) if isinstance(cases, Sequence) else 0)
        parts: list[list[Rows]] = []
        known = 0
        self._begin()
        for i, given in enumerate(cases):
            case = HeldOut(*given)
            k = case.logits.shape[1] if case.logits.ndim > 1 else 0
            if i and k != known:
                raise ValueError(f"case {i}: {k} classes, the cases before have {known}")
            known = k
            elements = _elements(_checked(i, case, ignore_index, self.per_channel))
            most = max(FEWEST, _quota(many, k) // max(1, len(elements)))
            for element in elements:
                parts.append(self._rows(element, ignore_index, most, seed=seed + len(parts)))
        return [Rows.joined(of_channel) for of_channel in zip(*parts, strict=True)]

    def _begin(self) -> None:
        """Forget what earlier cases looked like; called before the first case."""

    def _rows(self, case: HeldOut, ignore_index: int | None, most: int, *, seed: int) -> list[Rows]:
        """Rows of one case, or of samples that have no spatial axes, for each channel."""
        k = case.logits.shape[1]
        most = self._most(case, most)
        if not self.per_channel:
            return [self._of_softmax(case, ignore_index, most, seed)]
        return [
            self._of_softmax(
                case._replace(logits=two_classes(case.logits[:, c]), labels=case.labels[:, c]),
                ignore_index,
                most,
                seed,
            )
            for c in range(k)
        ]

    def _most(self, case: HeldOut, most: int) -> int:
        """Voxels that are kept of a case, where `most` are wanted."""
        return most

    def _of_softmax(self, case: HeldOut, ignore_index: int | None, most: int, seed: int) -> Rows:
        samples = case.logits.ndim == 2
        valid = valid_mask(case.labels, ignore_index)
        everywhere = self._groups(case.logits, case.spacing_mm)
        doubt = torch.nan if samples else self._doubt_of(case.logits[0].detach(), everywhere[0])
        groups = everywhere[valid].cpu()
        kept, weights = sampled(groups, len(groups) if samples else most, seed)
        index = valid.cpu().flatten().nonzero()[:, 0][kept]
        logits = case.logits.detach().movedim(1, -1).reshape(-1, case.logits.shape[1])[index].cpu()
        around = self._around(case, valid, index)
        return Rows(
            logits if logits.dtype == torch.float64 else logits.float(),
            case.labels.flatten()[index].long().cpu(),
            weights,
            groups[kept],
            index if samples else torch.zeros_like(index),
            len(valid) if samples else 1,
            self.regions.count,
            torch.full((len(valid) if samples else 1,), doubt, dtype=torch.float64),
            None if around is None else around.cpu(),
        )

    def _around(self, case: HeldOut, valid: Tensor, index: Tensor) -> Tensor | None:
        """Surroundings of voxels of a case, ``(n, ...)``, if the method uses them.

        Args:
            case: a case of one element, or samples.
            valid: bool ``(N, *S)``; voxels that are not valid must not matter.
            index: int64 ``(n,)``, positions of the voxels in the flattened labels.
        """
        return None

    def _groups(self, logits: Tensor, spacing_mm: Sequence[float] | None) -> Tensor:
        """Predicted class times the number of regions, plus the region, ``(N, *S)``."""
        predicted = logits.max(1).indices  # the first of equals, as argmax, and faster
        return predicted * self.regions.count + self.regions.of(predicted, spacing_mm)

    def _doubt_of(self, logits: Tensor, groups: Tensor) -> float:
        """:func:`doubt_of` a case, but for the inside of the predicted background.

        Neither the size of the image nor smoothed labels far from every structure then matter.

        Args:
            logits: ``(K, ...)``.
            groups: of the voxels; the first is class 0 in region 0.
        """
        near = groups.flatten() != self.regions.inside  # the group of class 0 there
        return doubt_of(logits.flatten(1), near)

    def fit_rows(self, rows: Sequence[Rows]) -> Self:
        """Fit to rows that :meth:`collect` returned, or to some of their cases.

        Args:
            rows: one item with the rows of the softmax, or per channel the rows of each channel.

        Raises:
            ValueError: no rows.
        """
        if not rows or not all(map(len, rows)):
            raise ValueError("labels: expected at least one voxel that is not ignored, got none")
        self.facts = {}
        if self.per_channel:
            self.channels = [self._twin().fit_rows([one]) for one in rows]
            self.facts = _mean_facts([c.facts for c in self.channels])
            return self
        (one,) = rows
        self.check_classes(one.num_classes)
        self.improved, self._notes = False, []
        before, error = self._nll(one)
        self.improved = True
        self._fit(one)
        after = self.nll(one)
        if not after <= before:
            self._note(
                f"the fit has NLL {after:.6g} where the logits have {before:.6g}; probabilities "
                "stay as they were"
            )
            self.improved, after = False, before
        self.facts = {
            "num_classes": one.num_classes,
            "cases": int(torch.bincount(one.cases).count_nonzero()),
            "voxels": one.voxels,
            "sampled": len(one),
            "nll_before": before,
            "nll_after": after,
            "nll_error": error,
            "notes": self._notes,
            "versions": {
                "torch": torch.__version__, "numpy": np.__version__, "scipy": scipy.__version__
            },
        }  # fmt: skip
        return self

    def check_classes(self, num_classes: int) -> None:
        """Check that the method can fit a softmax of this number of classes.

        Raises:
            ValueError: more classes than the method can fit.
        """
        if self.most_classes is not None and num_classes > self.most_classes:
            raise ValueError(
                f"logits: {type(self).__name__} fits no more than {self.most_classes} classes, got "
                f"{num_classes}; VectorScaling (vector) fits more"
            )

    def nll(self, rows: Rows) -> float:
        """Mean NLL in nats of rows of a softmax after calibration.

        Args:
            rows: rows of one softmax, so not per channel.
        """
        return self._nll(rows)[0]

    def _nll(self, rows: Rows) -> tuple[float, float]:
        """Mean NLL, and its standard error by the sampling of voxels from cases and groups."""
        values = torch.cat([-part.of_label(self._calibrated(part)) for part in rows.chunks()])
        total = rows.weights.sum()
        strata = rows.cases * rows.num_groups + rows.groups
        _, strata, drawn = torch.unique(strata, return_inverse=True, return_counts=True)
        n = drawn.double()
        mean = torch.zeros_like(n).index_add_(0, strata, values) / n
        spread = torch.zeros_like(n).index_add_(0, strata, (values - mean[strata]).square())
        size = torch.zeros_like(n).index_add_(0, strata, rows.weights)
        variance = size * (size - n) * spread / (n * (n - 1).clamp(min=1))  # 0 where all is there
        return float(values @ rows.weights / total), float(variance.sum().sqrt() / total)

    def _calibrated(self, part: Rows) -> Tensor:
        if not self.improved:
            return log_softmax(part.logits)
        return self._log_probabilities_of(part)

    def _note(self, text: str) -> None:
        """Warn about the fit, and keep the warning among its facts."""
        self._notes.append(text)
        warnings.warn(f"{type(self).__name__}: {text}", stacklevel=5)

    @abstractmethod
    def _fit(self, rows: Rows) -> None:
        """Learn from rows of one softmax; set `improved` to False where the rows do not fit."""

    @abstractmethod
    def _log_probabilities_of(self, rows: Rows) -> Tensor:
        """Return log-probabilities ``(n, K)`` of rows of one softmax."""


class PointwiseCalibrator(SampledCalibrator):
    """A calibrator that uses one voxel at a time: its logits, and its group.

    The group is the predicted class and the region of the predicted map. A method defines
    :meth:`_fit` and :meth:`_log_probabilities`, and its state by :meth:`_learned` and
    :meth:`_load`; a method that uses groups sets `grouped`.
    """

    grouped: ClassVar[bool] = False

    def _log_probabilities_of(self, rows: Rows) -> Tensor:
        return self._log_probabilities(rows.logits, rows.groups)

    def _probabilities(
        self, logits: Tensor, spacing_mm: Sequence[float] | None, image: Tensor | None
    ) -> Tensor:
        if self.grouped:
            groups = self._groups(logits, spacing_mm)
        else:
            groups = torch.zeros((), dtype=torch.long, device=logits.device)
            groups = groups.expand(logits[:, 0].shape)
        if logits.ndim == 2:
            return self._log_probabilities(logits, groups).exp()
        flat, groups = logits.flatten(2), groups.flatten(1)
        out = torch.empty_like(flat)
        for n in range(len(flat)):
            scale = self._scale_of(flat[n], groups[n])
            for begin in range(0, flat.shape[2], CHUNK):  # or a volume is there several times
                part = slice(begin, begin + CHUNK)
                x = flat[n, :, part].T
                log_p = self._log_probabilities(x if scale == 1 else x * scale, groups[n, part])
                out[n, :, part] = log_p.exp().T
        return out.view(logits.shape)

    def _scale_of(self, logits: Tensor, groups: Tensor) -> float:
        """Factor of all logits ``(K, V)`` of a case, whose voxels are in `groups` ``(V,)``."""
        return 1.0

    @abstractmethod
    def _log_probabilities(self, logits: Tensor, groups: Tensor) -> Tensor:
        """Return log-probabilities ``(n, K)`` of logits ``(n, K)`` in `groups`, int64 ``(n,)``."""


def check_state(state: object, method: str, version: int) -> None:
    """Check that a saved state belongs to a method.

    Raises:
        ValueError: no dict, or the state of another method or version.
    """
    if not isinstance(state, dict):
        raise ValueError(f"state: expected a dict, got {type(state).__name__}")
    if (state.get("method"), state.get("version")) != (method, version):
        raise ValueError(
            f"state: expected that of {method}, version {version}, got "
            f"{state.get('method')!r}, version {state.get('version')!r}"
        )


def two_classes(channel: Tensor) -> Tensor:
    """Logits ``(N, 2, *S)`` of a sigmoid's ``(N, *S)``: 0 for "outside", l for "inside"."""
    return torch.stack([torch.zeros_like(channel), channel], 1)


def _cases(logits: Tensor | Cases, labels: Tensor | None) -> Cases:
    if isinstance(logits, Tensor):
        if labels is None:
            raise ValueError(
                "labels: expected integers (N, *S) with one tensor of logits, got None"
            )
        return [HeldOut(logits, labels)]
    if labels is not None:
        raise ValueError("labels: expected None, since logits are cases with labels")
    return list(logits) if isinstance(logits, Iterator) else logits


def _checked(number: int, case: HeldOut, ignore_index: int | None, per_channel: bool) -> HeldOut:
    """The case, if its parts match; errors name its number."""
    try:
        check = check_channels if per_channel else check_logits_labels
        check(case.logits, case.labels, ignore_index=ignore_index)
    except ValueError as error:
        raise ValueError(f"case {number}: {error}") from None
    valid = valid_mask(case.labels, ignore_index)
    finite = torch.isfinite(case.logits)
    if not bool(finite.all()):
        finite |= ~(valid if per_channel else valid.unsqueeze(1))
        if not bool(finite.all()):
            raise ValueError(
                f"case {number}: logits: expected finite values, got NaN or infinity in "
                f"{int((~finite).sum())} of {finite.numel()}"
            )
    if not per_channel and _is_probabilities(case.logits):
        raise ValueError(
            f"case {number}: logits: expected logits, got values from 0 to 1 that sum to 1 over "
            "the classes; segcal.posthoc.links.logits_of makes logits of probabilities"
        )
    return case


def _is_probabilities(logits: Tensor) -> bool:
    """Whether the values went through a softmax; values of only 0 and 1 may be logits."""
    return is_softmax(logits) and bool(((logits > 0) & (logits < 1)).any())


def _quota(many: int, num_classes: int) -> int:
    """Number of voxels kept of each of `many` cases; 0 cases mean that it is not known."""
    if not many:
        return min(VOXELS_PER_CASE, MOST_NUMBERS // num_classes)
    return min(MOST_VOXELS, MOST_NUMBERS // num_classes) // many


def _elements(case: HeldOut) -> list[HeldOut]:
    """The elements of a batch, each as a case; samples without spatial axes stay together."""
    if case.logits.ndim == 2:
        return [case]
    parts = [slice(n, n + 1) for n in range(len(case.logits))]
    return [
        HeldOut(
            case.logits[part],
            case.labels[part],
            case.spacing_mm,
            None if case.image is None else case.image[part],
        )
        for part in parts
    ]


def _mean_facts(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Facts of all channels: numbers of the first channel, and the mean NLL over the channels."""
    mean = {
        key: float(np.mean([one[key] for one in facts]))
        for key in ("nll_before", "nll_after", "nll_error")
    }
    notes = [f"channel {c}: {text}" for c, one in enumerate(facts) for text in one["notes"]]
    return {**facts[0], **mean, "notes": notes, "num_classes": len(facts)}

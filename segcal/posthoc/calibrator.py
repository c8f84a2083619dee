"""What every post-hoc method is to its host: fitted on held-out cases, applied to others, saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from segcal.tensors import check_logits_labels, full_precision, valid_mask

__all__ = ["Calibrator"]

STATE_VERSION = 1
Cases = Iterable[tuple[Tensor, Tensor]]
"""Logits ``(N, K, *S)`` and labels ``(N, *S)`` of one case after another."""


class Calibrator(ABC):
    """A map from logits to probabilities that is fitted on held-out cases.

    A method gives :meth:`_fit`, :meth:`_log_probabilities`, and what was learned as numbers, lists
    and strings by :meth:`_learned` and :meth:`_load`: the state is JSON, never a pickle.

    Attributes:
        facts: of the fit: ``num_classes``, ``cases``, ``voxels``, and the mean negative
            log-likelihood in nats, ``nll_before`` and ``nll_after``. Empty before it.
    """

    facts: dict[str, float]

    def __init__(self) -> None:
        self.facts = {}

    def fit(
        self,
        logits: Tensor | Cases,
        labels: Tensor | None = None,
        ignore_index: int | None = None,
    ) -> Self:
        """Fit to held-out cases, and return itself.

        Args:
            logits: floating ``(N, K, *S)``; or pairs of logits and labels, one a case, which are
                gone through several times (an iterator is kept as a list).
            labels: integer ``(N, *S)`` of one tensor of logits; None with pairs.
            ignore_index: label of voxels that are left out.

        Raises:
            ValueError: shapes or label values that do not fit, logits that are not finite, cases
                with different numbers of classes, or no valid voxel.
        """
        cases = _Checked(_pairs(logits, labels), ignore_index)
        self.facts = {}
        before, count = _nll(cases, partial(torch.log_softmax, dim=1))
        self._fit(cases)
        self.facts = {"num_classes": cases.num_classes, "cases": cases.number, "voxels": count}
        after, _ = _nll(cases, self._log_probabilities)
        self.facts |= {"nll_before": before, "nll_after": after}
        return self

    def apply(self, logits: Tensor) -> Tensor:
        """Return probabilities ``(N, K, *S)`` of logits of that shape, at least float32.

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
        with full_precision(logits) as x:
            return self._probabilities(x)

    def state(self) -> dict[str, Any]:
        """All there is to save, ready for JSON."""
        return {
            "method": type(self).__name__,
            "version": STATE_VERSION,
            "learned": self._learned(),
            "facts": dict(self.facts),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Build what :meth:`state` described.

        Raises:
            ValueError: the state of another method or version, or one that is damaged.
        """
        if not isinstance(state, dict):
            raise ValueError(f"state: expected a dict, got {type(state).__name__}")
        if (state.get("method"), state.get("version")) != (cls.__name__, STATE_VERSION):
            raise ValueError(
                f"state: expected that of {cls.__name__}, version {STATE_VERSION}, got "
                f"{state.get('method')!r}, version {state.get('version')!r}"
            )
        calibrator = cls()
        try:
            calibrator._load(state["learned"])
            calibrator.facts = dict(state["facts"])
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"state: of {cls.__name__}, but damaged ({error!r})") from None
        return calibrator

    @abstractmethod
    def _fit(self, cases: Cases) -> None:
        """Learn from cases that have been checked: logits ``(n, K)`` and labels ``(n,)``, valid."""

    def _probabilities(self, logits: Tensor) -> Tensor:
        """Return probabilities of logits ``(N, K, *S)``, float32 or float64."""
        return self._log_probabilities(logits).exp()

    @abstractmethod
    def _log_probabilities(self, logits: Tensor) -> Tensor:
        """Return log-probabilities of logits ``(N, K, *S)``, float32 or float64."""

    @abstractmethod
    def _learned(self) -> dict[str, Any]:
        """What was learned, as numbers, lists and strings."""

    @abstractmethod
    def _load(self, learned: dict[str, Any]) -> None:
        """Take over what :meth:`_learned` returned."""


def _pairs(logits: Tensor | Cases, labels: Tensor | None) -> Cases:
    if isinstance(logits, Tensor):
        if labels is None:
            raise ValueError(
                "labels: expected integers (N, *S) with one tensor of logits, got None"
            )
        return [(logits, labels)]
    if labels is not None:
        raise ValueError("labels: expected None, since logits are pairs with labels")
    return list(logits) if isinstance(logits, Iterator) else logits


class _Checked:
    """Valid voxels of every case as rows, float64; what is wrong with a case names its number."""

    def __init__(self, cases: Cases, ignore_index: int | None) -> None:
        self._cases = cases
        self._ignore_index = ignore_index
        self.num_classes = 0
        self.number = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.number = 0
        for i, (logits, labels) in enumerate(self._cases):
            k = logits.shape[1] if logits.ndim > 1 else 0
            if i and k != self.num_classes:
                raise ValueError(f"case {i}: {k} classes, the cases before have {self.num_classes}")
            self.num_classes, self.number = k, i + 1
            try:
                check_logits_labels(logits, labels, ignore_index=self._ignore_index)
            except ValueError as error:
                raise ValueError(f"case {i}: {error}") from None
            valid = valid_mask(labels, self._ignore_index)
            rows = logits.detach().movedim(1, -1)[valid].double()
            if not bool(torch.isfinite(rows).all()):
                raise ValueError(f"case {i}: logits: expected finite values, got NaN or infinity")
            yield rows, labels[valid].long()


def _nll(cases: _Checked, log_probs: Callable[[Tensor], Tensor]) -> tuple[float, int]:
    """Mean negative log-likelihood over the voxels of all cases, and their number."""
    total, count = 0.0, 0
    for logits, labels in cases:
        total -= float(log_probs(logits).gather(1, labels[:, None]).sum())
        count += len(labels)
    if not count:
        raise ValueError("labels: expected at least one voxel that is not ignored, got none")
    return total / count, count

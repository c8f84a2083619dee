"""Calibration of each class's probability against the rest, normalised to one distribution."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.posthoc.calibrator import PointwiseCalibrator
from segcal.posthoc.regions import Regions
from segcal.posthoc.rows import Rows

__all__ = ["OneVsRest"]


@dataclass(frozen=True)
class OwnLogs:
    """Parts of which ``ln p_k`` and ``ln (1 - p_k)`` of a softmax are computed without rounding p.

    ``1 - p`` of the largest p loses all digits where p is near 1, so it is computed from the logits
    of the other classes; all other p are 1/2 or less.

    Attributes:
        total: logsumexp of the logits, float64 ``(n,)``.
        rest: logsumexp of the logits without the largest, float64 ``(n,)``.
        top: class of the largest logit, int64.
    """

    total: Tensor
    rest: Tensor
    top: Tensor

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> OwnLogs:
        """Compute it from parts of the logits, ``(n, K)`` each, one after another."""
        found = []
        for logits in parts:
            x = logits.double()
            top = x.argmax(1, keepdim=True)
            rest = torch.logsumexp(x.scatter(1, top, -torch.inf), 1)
            found.append((torch.logsumexp(x, 1), rest, top[:, 0]))
        return cls(*(torch.cat(column) for column in zip(*found, strict=True)))

    def pair(self, logit: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """``ln p`` and ``ln (1 - p)`` of class k, whose logits are `logit`, float64 ``(n,)``."""
        log_p = logit.double() - self.total
        small = torch.log1p(-log_p.clamp(max=-0.6).exp())  # p <= 1/2 has log_p <= -0.69
        return log_p, torch.where(self.top == k, self.rest - self.total, small)


class OneVsRest(PointwiseCalibrator):
    """``p'_k = m_k(p_k) / sum_j m_j(p_j)``, where every map m_k is fitted to "is it k?" separately.

    With two classes there is one map, for class 1, and ``p'_0 = 1 - p'_1``. A class that is nowhere
    in the cases, or everywhere, keeps its p. Where the maps of all classes give 0, the
    probabilities stay.

    Args:
        per_channel: whether every channel is a sigmoid of its own, with labels that may overlap.
            Each channel then has two classes and needs no division by a sum.

    Attributes:
        maps: of each class, or of class 1 of two; float64 arrays, None for a class that keeps p.
    """

    maps: list[NDArray[np.float64] | None]

    def __init__(self, *, per_channel: bool = False, regions: Regions | None = None) -> None:
        super().__init__(per_channel=per_channel, regions=regions)
        self.maps = []

    def _fit(self, rows: Rows) -> None:
        k = rows.num_classes
        own = OwnLogs.of([part.logits for part in rows.chunks()])
        self.maps = []
        separable = []
        for c in range(k) if k > 2 else (1,):
            hits = rows.labels == c
            if not hits.any() or hits.all():
                self.maps.append(None)
                continue
            log_p, log_q = own.pair(rows.logits[:, c], c)
            self.maps.append(self._map_of(log_p, log_q, hits, rows.weights, k))
            if log_p[hits].min() > log_p[~hits].max():
                separable.append(c)
        if separable:
            self._note(
                f"the cases are separable: p separates classes {separable} from all others without "
                "an error, so that no map is steep enough"
            )

    def _log_probabilities(self, logits: Tensor, groups: Tensor) -> Tensor:
        x, k = logits.double().cpu(), logits.shape[1]
        own = OwnLogs.of([x])
        before = torch.empty_like(x)
        after = torch.empty_like(before)
        for c in range(k) if k > 2 else (1,):
            found = self.maps[c if k > 2 else 0]
            pair = own.pair(x[:, c], c)
            before[:, c] = pair[0]
            log_p, log_q = pair if found is None else self._mapped(found, *pair)
            after[:, c] = log_p
            if k == 2:
                before[:, 0], after[:, 0] = pair[1], log_q
        total = torch.logsumexp(after, 1, keepdim=True)
        return torch.where(total.isneginf(), before, after - total).to(logits)

    @abstractmethod
    def _map_of(
        self, log_p: Tensor, log_q: Tensor, hits: Tensor, weights: Tensor, num_classes: int
    ) -> NDArray[np.float64]:
        """Fit a map.

        Args:
            log_p: ``ln p`` of the class, float64 ``(n,)``.
            log_q: ``ln (1 - p)``.
            hits: bool, whether the class is the label; some are, some are not.
            weights: float64.
            num_classes: K.
        """

    @abstractmethod
    def _mapped(
        self, found: NDArray[np.float64], log_p: Tensor, log_q: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logarithms of the mapped probability p', and of 1 - p'."""

    @abstractmethod
    def _is_map(self, found: NDArray[np.float64]) -> bool:
        """Whether an array of a state is a map."""

    def _learned(self) -> dict[str, Any]:
        return {"maps": [None if found is None else found.tolist() for found in self.maps]}

    def _load(self, learned: dict[str, Any]) -> None:
        maps = [None if m is None else np.asarray(m, np.float64) for m in learned["maps"]]
        for i, found in enumerate(maps):
            if found is not None and not self._is_map(found):
                raise ValueError(f"state: what is given as map {i} is none")
        self.maps = maps

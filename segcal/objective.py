"""The objective: a weighted sum of losses and penalties that forwards the three verbs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from segcal.penalty import DualStep, Penalty, Reduce


class Objective(nn.Module):
    """``sum_name weight * term(logits, labels)``.

    Args:
        terms: modules that take ``(logits, labels)`` and return a scalar, by name.
        weights: weight by name; 1 where missing.

    Raises:
        ValueError: no term, or a weight without a term.
    """

    def __init__(
        self, terms: Mapping[str, nn.Module], weights: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        weights = dict(weights or {})
        if not terms:
            raise ValueError("terms: expected at least one loss or penalty, got none")
        if unknown := set(weights) - set(terms):
            raise ValueError(
                f"weights: no term of that name: {sorted(unknown)}; terms are {sorted(terms)}"
            )
        self.terms = nn.ModuleDict(terms)
        self.weights = {name: float(weights.get(name, 1.0)) for name in terms}

    def each(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return every term, unweighted, by name."""
        return {name: term(logits, labels) for name, term in self.terms.items()}

    def total(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum of what :meth:`each` gave."""
        first, *rest = (self.weights[name] * value for name, value in values.items())
        return sum(rest, start=first)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the scalar objective of `logits` ``(N, K, *S)`` and `labels` ``(N, *S)``."""
        return self.total(self.each(logits, labels))

    def observe(self, logits: Tensor, labels: Tensor) -> None:
        """Hand a validation batch to every penalty."""
        for term in self.terms.values():
            if isinstance(term, Penalty):
                term.observe(logits, labels)

    def dual_step(self, reduce: Reduce | None = None) -> dict[str, DualStep]:
        """Let every penalty update its weights; return what they did, by name."""
        steps = {
            name: term.dual_step(reduce)
            for name, term in self.terms.items()
            if isinstance(term, Penalty)
        }
        return {name: step for name, step in steps.items() if step is not None}

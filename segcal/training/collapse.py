"""Detects collapse to background: a labelled class that the network no longer predicts.

A penalty that asks for a large background logit in every inner voxel can outweigh the
cross-entropy of the few foreground voxels. Cross-entropy + CRaC with its published settings
collapsed on hippocampus MRI within three epochs; Dice + cross-entropy + CRaC did not.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CollapseWatch"]

REMEDY = (
    "the network may have collapsed to background (in the first epochs of a short training, that "
    "is usual). If it stays so: keep Dice in the base loss, lower the weight of the penalty (of "
    "CRaC: margin_inner or rho0), and see 'Collapse' in docs/guides/nnunet.md"
)
"""Advice for a user whose network seems to have collapsed."""


class CollapseWatch:
    """Counts, per class, successive validation passes in which it is labelled but never predicted.

    Args:
        num_classes: K.
        patience: number of successive passes before a class counts as collapsed.
        background: whether class 0 is background, which is not watched; regions have none.
    """

    def __init__(self, num_classes: int, patience: int = 3, *, background: bool = True) -> None:
        self.patience = patience
        self.background = background
        self.missing = [0] * num_classes
        self._said: list[int] = []

    def update(self, predicted: Sequence[float], labelled: Sequence[float]) -> list[int]:
        """Take in one validation pass.

        Args:
            predicted: voxels per class in the argmax of the network, ``(K,)``.
            labelled: voxels per class in the labels, ``(K,)``.

        Returns:
            classes that have been labelled but not predicted for `patience` passes or more. A
            class that is not in the labels of a pass keeps its count.
        """
        for k, (p, y) in enumerate(zip(predicted, labelled, strict=True)):
            if p > 0:
                self.missing[k] = 0
            elif y > 0:
                self.missing[k] += 1
        return self.collapsed

    @property
    def collapsed(self) -> list[int]:
        """Classes that have been labelled but not predicted for `patience` passes or more."""
        watched = range(int(self.background), len(self.missing))
        return [k for k in watched if self.missing[k] >= self.patience]

    def news(self, collapsed: list[int], names: Sequence[str]) -> str:
        """A sentence on the classes that have collapsed, unless the last sentence named the same.

        Args:
            collapsed: collapsed classes of this pass, from :meth:`update`.
            names: names of the classes.

        Returns:
            the sentence; empty if there is nothing new.
        """
        before, self._said = self._said, collapsed
        if not collapsed or collapsed == before:
            return ""
        missing = ", ".join(names[k] for k in collapsed)
        return (
            f"{missing} labelled in validation but not predicted for {self.patience} epochs or "
            f"more: {REMEDY}"
        )

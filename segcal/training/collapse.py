"""Collapse to background: a class that is there and that the network has stopped to predict.

A penalty that asks a large background logit of every inner voxel can outweigh cross-entropy of
the few foreground voxels; cross-entropy + CRaC with its published settings did so on hippocampus
MRI within three epochs, Dice + cross-entropy + CRaC did not.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CollapseWatch"]

REMEDY = (
    "the network may have collapsed to background (in the first epochs of a short training, that "
    "is usual). If it stays so: keep Dice in the base loss, lower the weight of the penalty (of "
    "CRaC: margin_inner or rho0), and see 'Collapse' in docs/guides/nnunet.md"
)
"""What to tell a user whose network seems to have collapsed."""


class CollapseWatch:
    """Counts, per class, the validation passes in a row that labelled but never predicted it.

    Args:
        num_classes: K.
        patience: passes in a row before a class is called collapsed.
        background: class 0 is background and not watched; regions have none.
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
        """A sentence on classes that have collapsed, unless the last one was on the same.

        Args:
            collapsed: of this pass, see :meth:`update`.
            names: of the classes.

        Returns:
            the sentence; nothing where there is nothing new.
        """
        before, self._said = self._said, collapsed
        if not collapsed or collapsed == before:
            return ""
        missing = ", ".join(names[k] for k in collapsed)
        return (
            f"{missing} labelled in validation but not predicted for {self.patience} epochs or "
            f"more: {REMEDY}"
        )

"""What the labels of a data set mean: ``dataset.json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segcal.io.files import read_json


@dataclass(frozen=True)
class LabelSet:
    """What the labels mean.

    A region is a set of labels that is predicted as one channel, such as the whole tumour; regions
    may overlap.

    Attributes:
        names: names by label value, background (0) included; with regions, only the names that
            stand for a single label.
        ignore_index: label to leave out of everything, or None.
        source: file or option that this was read from.
        regions: labels of each region by name, in the order of the channels; empty if the labels
            do not overlap.
        class_order: label that each region gets in the label map; later regions overwrite earlier.
    """

    names: dict[int, str]
    ignore_index: int | None
    source: str
    regions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    class_order: tuple[int, ...] = ()

    @property
    def foreground(self) -> dict[str, tuple[int, ...]]:
        """Labels of each structure that is reported, by name: regions, or all foreground labels."""
        return self.regions or {name: (k,) for k, name in self.names.items() if k != 0}

    @property
    def values(self) -> set[int]:
        """Labels that may occur, without the ignore label."""
        return {0, *self.names, *(k for labels in self.regions.values() for k in labels)}

    @property
    def map_names(self) -> dict[int, str]:
        """Name of each foreground label of a label map, or of the region that leaves it there."""
        of_regions = dict(zip(self.class_order, self.regions, strict=True))
        return {**{k: name for k, name in self.names.items() if k != 0}, **of_regions}

    def contradiction(self) -> str:
        """Say which labels even a perfect prediction of the regions would change; or nothing.

        As in nnU-Net, a voxel gets the label of the last region that contains it. Nothing is lost
        if that label lies in the same regions as the voxel's own label.
        """
        changed = self._changed(self.class_order)
        if not changed:
            return ""
        what = ", ".join(
            f"{label} ({self._regions_of(label)}) becomes {left} ({self._regions_of(left)})"
            for label, left in changed.items()
        )
        order = self._kept_apart()
        advice = (
            f"{order} would fit, since each of these labels lies in no later region"
            if not self._changed(order)
            else "list outer regions before inner regions, and give each region a label that lies "
            "in no later region; regions that overlap partly cannot be stored in one label map"
        )
        return (
            f"{self.source}: 'regions_class_order' {list(self.class_order)} contradicts the "
            f"regions: in the label map of a perfect prediction {what}; {advice}"
        )

    def _changed(self, order: Sequence[int]) -> dict[int, int]:
        """New value of each label whose regions would be lost in a label map."""
        left = dict(zip(self.regions, order, strict=True))
        becomes = {k: left[name] for name, labels in self.regions.items() for k in labels}
        return {
            k: v for k, v in sorted(becomes.items()) if self._regions_of(k) != self._regions_of(v)
        }

    def _kept_apart(self) -> list[int]:
        """A label of each region that lies in no later region, or its first if there is none."""
        order, later = [], set[int]()
        for labels in reversed(self.regions.values()):
            order.append(next((k for k in labels if k not in later), labels[0]))
            later |= set(labels)
        return order[::-1]

    def _regions_of(self, label: int) -> str:
        return ", ".join(n for n, labels in self.regions.items() if label in labels) or "no region"

    @property
    def num_foreground_channels(self) -> int:
        """Number of channels, even if the label values are not consecutive."""
        return len(self.regions or self.names)

    @property
    def num_channels(self) -> int:
        """Number of channels of probabilities, background included if there are no regions.

        Raises:
            ValueError: the label values are not 0 to K - 1.
        """
        if self.regions:
            return len(self.regions)
        if sorted(self.names) != list(range(len(self.names))):
            raise ValueError(
                f"{self.source}: label values {sorted(self.names)} are not 0 to K - 1, so it is "
                "unclear which channel belongs to which label; renumber the labels to 0, 1, 2, ... "
                "without gaps, as nnU-Net needs them, in the label maps and in this definition"
            )
        return len(self.names)


def read_label_set(path: Path) -> LabelSet:
    """Read label names and the ignore label from ``dataset.json`` (nnU-Net v2 or Decathlon).

    Raises:
        ValueError: the file is of another kind.
    """
    return label_set_of(read_json(path), str(path))


def parse_labels(text: str) -> LabelSet:
    """Labels from text such as ``liver=1,spleen=2``; ``ignore=255`` names a label to leave out.

    Background is 0 and need not be named.

    Raises:
        ValueError: the text has another form, or two names share a value.
    """
    labels: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.rpartition("="))
        if not name or not value.isdecimal() or name in labels:
            raise ValueError(f"labels: expected NAME=VALUE,NAME=VALUE, got {text!r}")
        labels[name] = int(value)
    if 0 not in labels.values():
        labels = {"background": 0, **labels}
    return label_set_of({"labels": labels}, f"--labels {text}")


def label_set_of(content: Any, source: str) -> LabelSet:
    """Label names and the ignore label from the content of a ``dataset.json``.

    Args:
        content: content of the file.
        source: where the content is from, for messages.

    Raises:
        ValueError: the content is not that of a ``dataset.json``.
    """
    labels: Any = content.get("labels") if isinstance(content, dict) else None
    if not isinstance(labels, dict) or not labels:
        raise ValueError(f"{source}: expected 'labels': {{name: value}} of nnU-Net v2")
    names: dict[int, str] = {}
    ignore = None
    if all(k.isdigit() and isinstance(v, str) for k, v in labels.items()):
        if len(set(labels.values())) < len(labels):
            raise ValueError(f"{source}: a name stands for two label values: {labels}")
        labels = {name: int(value) for value, name in labels.items()}  # Decathlon, nnU-Net v1
    regions: dict[str, tuple[int, ...]] = {}
    for name, value in labels.items():
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not values or any(not isinstance(v, int) or isinstance(v, bool) for v in values):
            raise ValueError(
                f"{source}: label {name!r} has value {value!r}, expected an integer, or a list of "
                "integers for a region (nnU-Net v2 maps names to values)"
            )
        if name == "ignore":
            ignore = values[0]
            continue
        if set(values) != {0}:
            regions[name] = tuple(values)
        if len(values) == 1 and values[0] in names:
            raise ValueError(f"{source}: {name!r} and {names[values[0]]!r} share value {values[0]}")
        if len(values) == 1:
            names[values[0]] = name
    names = dict(sorted(names.items()))
    if all(len(values) == 1 for values in regions.values()):
        return LabelSet(names, ignore, source)
    order = content.get("regions_class_order")
    whole = isinstance(order, list) and all(type(v) is int for v in order)
    if not whole or len(order) != len(regions):
        raise ValueError(
            f"{source}: 'regions_class_order' must name a label for each of the {len(regions)} "
            f"regions {', '.join(regions)}, got {order!r}"
        )
    return LabelSet(names, ignore, source, regions, tuple(order))

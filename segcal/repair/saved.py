"""Saves a fitted calibrator as a JSON file, together with what it was fitted on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from segcal import __version__
from segcal.components import target
from segcal.io.files import read_json, write_json
from segcal.io.label_sets import LabelSet
from segcal.io.pairing import find_record
from segcal.posthoc.calibrator import Calibrator
from segcal.recipes import load_component, names

__all__ = [
    "CALIBRATOR_NAME", "NO_CALIBRATOR", "SavedCalibrator", "model_of", "read_calibrator",
    "write_calibrator",
]  # fmt: skip

CALIBRATOR_NAME = "calibrator.json"
"""File name of a calibrator that lies beside the model it was fitted for."""
NO_CALIBRATOR = "none"
"""Value of --calibrator that leaves probabilities as they are."""
FORMAT = 1
IDENTITY = ("dataset", "trainer", "plans", "configuration", "checkpoint", "weights")
"""Keys in the record of predictions that identify a model."""
AVERAGING = ("average", "mirroring", "tile_step_size", "overlap", "blend")
"""Keys that say how several passes of a model over a case (tiles, mirrored images) are averaged."""
MODEL_FOLDER = re.compile(r"(?P<trainer>[^_].*?)__(?P<plans>.+?)__(?P<configuration>[^/]+)")


@dataclass(frozen=True)
class SavedCalibrator:
    """A fitted calibrator, and what it was fitted on.

    Attributes:
        method: name of its config.
        calibrator: fitted calibrator.
        channels: name of every channel in their order: classes, background first, or regions.
        regions: whether the channels are regions, which may overlap.
        class_order: label that each region gets in the label map; later regions overwrite earlier.
        model: record of the predictions that it was fitted on, see :func:`model_of`; empty if
            nothing is known.
        fitted_on: where the cases came from, their names, and notes on them.
        offsets: state of :class:`segcal.posthoc.decision.Offsets` chosen on these cases, or None.
    """

    method: str
    calibrator: Calibrator
    channels: tuple[str, ...]
    regions: bool = False
    class_order: tuple[int, ...] = ()
    model: dict[str, Any] = field(default_factory=dict)
    fitted_on: dict[str, Any] = field(default_factory=dict)
    offsets: dict[str, Any] | None = None

    @property
    def members(self) -> int:
        """Number of networks whose averaged prediction it was fitted on; 0 if unknown."""
        return _members(self.model)

    @property
    def of_mean(self) -> bool:
        """Whether it was fitted to the mean of several networks, so that it suits no single one."""
        return self.members > 1

    def summary(self) -> dict[str, Any]:
        """Part of a record of predictions that describes their calibration."""
        facts = self.calibrator.facts
        keys = ("cases", "voxels", "nll_before", "nll_after")
        return {"method": self.method, "fitted_on": self.fitted_on.get("predictions"),
                "members": self.members, **{key: facts[key] for key in keys}}  # fmt: skip

    def check_labels(self, label_set: LabelSet | None, channels: int, what: str) -> None:
        """Check that the channels mean the same as in the fit.

        Args:
            label_set: labels of the predictions it is applied to; None if unknown.
            channels: number of channels of these predictions.
            what: first words of messages, which name these predictions.

        Raises:
            ValueError: the channels differ, or are in another order.
        """
        if channels != len(self.channels):
            raise ValueError(
                f"{what}: has {channels} channels, but the calibrator was fitted to "
                f"{len(self.channels)}: {', '.join(self.channels)}"
            )
        if label_set is None:
            return
        if bool(label_set.regions) != self.regions:
            raise ValueError(
                f"{what}: {'regions' if label_set.regions else 'classes that exclude each other'} "
                f"in {label_set.source}, but the calibrator was fitted to the other kind"
            )
        found = channel_names(label_set, channels)
        if found != self.channels:
            raise ValueError(
                f"{what}: channels {', '.join(found)} of {label_set.source}, but the calibrator "
                f"was fitted to {', '.join(self.channels)}, in this order"
            )

    def check_model(self, record: Mapping[str, Any], what: str) -> list[str]:
        """Check that it is applied to predictions of the model it was fitted for.

        Args:
            record: record of these predictions, see :func:`model_of`; empty if nothing is known.
            what: first words of messages, which name these predictions.

        Returns:
            sentences on minor differences.

        Raises:
            ValueError: the model is another one, or another number of networks is averaged.
        """
        if other := other_model(self.model, record):
            raise ValueError(
                f"{what}: {other[1]}, but the calibrator was fitted to {other[0]}; fit one for "
                "this model, or add --any-model if you know that it fits"
            )
        here = _members(record)
        if self.members and here and self.members != here:
            raise ValueError(
                f"{what}: the mean of {_networks(here)}, but the calibrator was fitted to "
                f"{_networks(self.members)}; a mean is less confident than single networks. "
                "Predict with segcal nnunet predict --calibrator (or with --per-fold, then "
                "calibrate apply), which calibrates each fold before averaging; or add --any-model"
            )
        return [
            f"{what}: {key} {record[key]}, but the calibrator was fitted with {key} "
            f"{self.model[key]}"
            for key in AVERAGING
            if key in record and key in self.model and record[key] != self.model[key]
        ]


def channel_names(label_set: LabelSet | None, channels: int) -> tuple[str, ...]:
    """Name of every channel in their order; their numbers if they have no names."""
    if label_set is None:
        return tuple(map(str, range(channels)))
    if label_set.regions:
        return tuple(label_set.regions)
    return tuple(label_set.names[k] for k in sorted(label_set.names))


def model_of(predictions: Path) -> dict[str, Any]:
    """What is known about the model that made predictions; empty if nothing is.

    It comes from the ``segcal_predict.json`` beside the predictions. For the folder of a model that
    nnU-Net trained, or of one of its folds, it comes from the folder's name, from the
    ``segcal_predict.json`` of a validation, if any, and from how nnU-Net validates: one fold
    predicts each case, with its final checkpoint, and sums are kept in half precision.

    Raises:
        ValueError: the record cannot be read.
    """
    if record := find_record(predictions):
        return record
    folder = predictions.resolve()
    for above in (folder, *folder.parents[:2]):
        if (found := MODEL_FOLDER.fullmatch(above.name)) and above.parent.name.startswith("Data"):
            inside = folder.relative_to(above).parts
            folds = [part for part in inside if part.startswith("fold_")]
            validated = (folder / "validation", *sorted(folder.glob("fold_*/validation")))
            return {
                **found.groupdict(),
                "dataset": above.parent.name,
                "members": 1,
                "checkpoint": "checkpoint_final.pth",
                "average": "logit",
                "mirroring": True,
                "tile_step_size": 0.5,
                "sums": "float16",
                **next((r for place in validated if (r := find_record(place))), {}),
                "folds": folds or sorted(path.name for path in folder.glob("fold_*")),
            }
    return {}


def other_model(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, str] | None:
    """First known difference between two models, in words for each; None if none is known.

    Args:
        ours: record of one model, see :func:`model_of`.
        theirs: record of the other model.
    """
    for key in IDENTITY:
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):  # by fold, of which both know some
            for fold in [fold for fold in a if fold in b and a[fold] != b[fold]]:
                return f"{key} {a[fold]} of {fold}", f"{key} {b[fold]}"
        elif a is not None and b is not None and a != b:
            return f"{key} {a}", f"{key} {b}"
    return None


def _members(record: Mapping[str, Any]) -> int:
    if "members" in record:
        return int(record["members"])
    folds = record.get("folds")
    return len(folds) if isinstance(folds, Sequence) and not isinstance(folds, str) else 0


def _networks(count: int) -> str:
    return "single networks" if count == 1 else f"{count} networks"


def write_calibrator(path: Path, saved: SavedCalibrator) -> None:
    """Write a calibrator as JSON, whole or not at all."""
    content = {
        "format": FORMAT,
        "segcal": __version__,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "method": saved.method,
        "channels": list(saved.channels),
        "regions": saved.regions,
        "class_order": list(saved.class_order),
        "model": saved.model,
        "fitted_on": saved.fitted_on,
        "offsets": saved.offsets,
        "state": saved.calibrator.state(),
    }
    write_json(path, json.loads(json.dumps(content, default=str)))


def read_calibrator(path: Path) -> SavedCalibrator:
    """Read a calibrator; nothing in the file is executed.

    Raises:
        ValueError: names the file: it holds no calibrator, or one of an unknown method or another
            format, or it is damaged.
    """
    content = read_json(path)
    if not isinstance(content, dict) or "state" not in content or "method" not in content:
        raise ValueError(f"{path}: not a calibrator; segcal calibrate fit writes one")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path}: expected format {FORMAT}, got {content.get('format')!r} (written by segcal "
            f"{content.get('segcal')}); fit it again with this version"
        )
    method = content["method"]
    if method not in names("posthoc"):
        raise ValueError(
            f"{path}: its method {method!r} is unknown; there are {', '.join(names('posthoc'))}"
        )
    kind = target(load_component("posthoc", method))
    try:
        saved = SavedCalibrator(
            method,
            kind.from_state(content["state"]),
            tuple(map(str, content["channels"])),
            bool(content["regions"]),
            tuple(map(int, content["class_order"])),
            dict(content["model"]),
            dict(content["fitted_on"]),
            content["offsets"],
        )
        saved.summary()
        _check_channels(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: a damaged calibrator ({error})") from None
    return saved


def _check_channels(saved: SavedCalibrator) -> None:
    found = saved.calibrator.facts.get("num_classes")
    if found != len(saved.channels):
        raise ValueError(f"it has {found} channels, but names {len(saved.channels)}")

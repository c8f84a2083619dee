"""Finds out what the labels mean, from a file that is named or from a file that is found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from segcal.io.files import read_json
from segcal.io.label_sets import LabelSet, read_label_set
from segcal.io.pairing import far_dataset_json, find_dataset_json


@dataclass(frozen=True)
class FoundLabels:
    """What the labels mean, and where that was found.

    Attributes:
        label_set: names and ignore label; None if no file says what the labels mean.
        file: file that was found without being named, or None.
        problem: why a file that was found is not used; empty if it is used.
    """

    label_set: LabelSet | None
    file: Path | None = None
    problem: str = ""


def find_labels(
    dataset_json: Path | LabelSet | None, predictions: Path, references: Path
) -> FoundLabels:
    """Read what the labels mean, from a file that is named or found.

    Args:
        dataset_json: nnU-Net's ``dataset.json``, or a label set; None looks for a
            ``dataset.json`` beside or above the predictions, then the references.
        predictions: folder or file.
        references: folder or file.

    Raises:
        ValueError: a file that is named, or one with an ignore label, cannot be understood.
    """
    if isinstance(dataset_json, LabelSet):
        return FoundLabels(dataset_json)
    if dataset_json is not None:
        return FoundLabels(read_label_set(dataset_json))
    found = find_dataset_json(predictions, references)
    if found is None:
        far = far_dataset_json(predictions, references)
        why = f"{far} lies two folders above, so it may belong to other data; name it to use it"
        return FoundLabels(None, far, "" if far is None else why)
    try:
        return FoundLabels(read_label_set(found), found)
    except ValueError as error:  # nobody asked for this file
        content = read_json(found)
        labels = content.get("labels") if isinstance(content, dict) else None
        if isinstance(labels, dict) and "ignore" in labels:
            raise ValueError(
                f"{error}; it declares an ignore label, which must not be counted: name a "
                "dataset.json that says which value it is"
            ) from None
        return FoundLabels(None, found, str(error))

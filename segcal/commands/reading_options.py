"""Options for what is read, shared by every command that pairs predictions and references."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # torch is imported when there is work to do
    from segcal.io.label_sets import LabelSet

READING = "What is read"
"""Group of the options in the help."""
OPTIONS = {
    "labels": "--labels", "prediction_pattern": "--prediction-pattern",
    "reference_pattern": "--reference-pattern",
}  # fmt: skip
"""Options by the arguments they become."""

PredictionPattern = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=READING,
        metavar="PATTERN",
        help="Where the name of a case stands in the path of its prediction, relative to the "
        "folder: `{case}/{case}_seg.nii.gz`, or `pred_{case}` for any format. `*` stands for "
        "anything but a slash. Default: the name of the file.",
    ),
]
ReferencePattern = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=READING,
        metavar="PATTERN",
        help="The same for references: `label{case}.nii.gz`, `{case}/segmentations` (a folder with "
        "one mask per class), or `{case}/annotation_{rater}.nii.gz` for several raters.",
    ),
]
DatasetJson = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=READING,
        help="nnU-Net's dataset.json with label names, regions and the ignore label. Default: it "
        "is looked for beside and above the predictions, then the references.",
    ),
]
Labels = Annotated[
    str | None,
    typer.Option(
        "--labels",
        rich_help_panel=READING,
        metavar="NAME=VALUE,...",
        help="Names of the label values if there is no dataset.json: liver=1,spleen=2 (and "
        "ignore=255).",
    ),
]


def known_labels(dataset_json: Path | None, labels: str | None) -> Path | LabelSet | None:
    """What the user says about the labels: a dataset.json, or names with their values.

    Raises:
        ValueError: both are given, or the text names no labels.
    """
    from segcal.io.label_sets import parse_labels

    if labels is None:
        return dataset_json
    if dataset_json is not None:
        raise ValueError(f"labels: {labels}: is given beside --dataset-json; give only one of them")
    return parse_labels(labels)


def source_of(label_set: LabelSet | None, why: str) -> str:
    """End of a line on a failed case: the labels in use, unless the line already names them."""
    if label_set is None or label_set.source in why:
        return ""
    return f" (labels: {label_set.source})"

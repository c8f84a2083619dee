"""Options that say what is read, alike in every command that pairs predictions and references."""

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
        help="Where the name of a case stands in the paths of predictions, relative to their "
        "folder: {case}/{case}_seg.nii.gz, pred_{case} (of any format), * is anything but a "
        "slash. Default: the names of files.",
    ),
]
ReferencePattern = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=READING,
        metavar="PATTERN",
        help="The same of the references: label{case}.nii.gz, {case}/segmentations (a folder with "
        "a mask per class), {case}/annotation_{rater}.nii.gz of several raters.",
    ),
]
DatasetJson = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=READING,
        help="nnU-Net dataset.json with label names, regions and 'ignore'; default: looked for "
        "beside and above the predictions, then the references.",
    ),
]
Labels = Annotated[
    str | None,
    typer.Option(
        "--labels",
        rich_help_panel=READING,
        metavar="NAME=VALUE,...",
        help="What the labels mean where no dataset.json is at hand: liver=1,spleen=2 (and "
        "ignore=255).",
    ),
]


def known_labels(dataset_json: Path | None, labels: str | None) -> Path | LabelSet | None:
    """What is given of the labels: a file, or words.

    Raises:
        ValueError: both, or words that name no labels.
    """
    from segcal.io.label_sets import parse_labels

    if labels is None:
        return dataset_json
    if dataset_json is not None:
        raise ValueError(f"labels: {labels}: is given beside --dataset-json; expected one of them")
    return parse_labels(labels)


def source_of(label_set: LabelSet | None, why: str) -> str:
    """What a line on a case that failed ends in: the labels in use, unless it names them."""
    if label_set is None or label_set.source in why:
        return ""
    return f" (labels: {label_set.source})"

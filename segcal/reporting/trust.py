"""Writes the files of a triage, which says which cases to check first: tables, pictures, a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from segcal.evaluation.reading import PredictionArrays, read_prediction
from segcal.evaluation.reported import readable
from segcal.io.files import write_json, write_text
from segcal.io.tables import write_csv
from segcal.metrics import table
from segcal.reporting import page
from segcal.reporting.folder import ReportFolder
from segcal.reporting.picture import Picture, draw
from segcal.reporting.report import Written, check_folder, place_image
from segcal.reporting.tables import ARROWS, Cell, Column, Table, number_cell
from segcal.reporting.unsure import plot_unsure
from segcal.trust.triage import Triage

__all__ = ["FILES", "write_trust"]

FILES = ("index.html", "trust.json", "trust.csv", "unsure/*.png")
"""Names of the files that a triage may write."""
FIRST = 10
"""Number of cases in the first table."""
PICTURES = 6
"""Number of cases that get a picture."""


def write_trust(triage: Triage, folder: Path | str) -> Written:
    """Write a triage; its files replace those of an earlier triage.

    Args:
        triage: result of :func:`segcal.trust.triage.trust`.
        folder: folder for the triage.

    Raises:
        ValueError: the folder holds the predictions, or files that no triage wrote.
    """
    check_folder(folder, [triage.job.predictions], FILES)
    output = ReportFolder(Path(folder))
    write_json(output.place("trust.json"), triage.summary)
    write_csv(output.place("trust.csv"), triage.rows.set_index("case"))
    sections: list[page.Section] = []
    notes: list[str] = []
    if len(triage.rows):
        pictures, notes = _pictures(triage)
        for name, picture in pictures.items():
            picture.save(output.place(name))
        sections = [
            page.Section(
                "Look at these first",
                [
                    *_remarks(triage),
                    *notes,
                    "Pictures show each case's least sure structure, in the slice with the most "
                    "expected errors. Doubt is the probability that a voxel's label is wrong.",
                ],
                _case_table(triage),
                list(pictures.values()),
            ),
            page.table_section(
                _row_table(triage), "Click a heading to sort. The same numbers are in trust.csv."
            ),
        ]
    title = f"What to look at first: {triage.job.predictions.resolve().name}"
    write_text(output.place("index.html"), page.render(title, triage.summary, sections))
    output.close()
    return Written(output.written, notes)


def _remarks(triage: Triage) -> list[str]:
    """Sentences that a reader must know before the numbers."""
    job = triage.job
    remarks = [
        "Cases are sorted by their least sure structure. Soft Dice confidence is the DSC that "
        "a mask can expect if its probabilities are calibrated; segcal evaluate says whether they "
        "are."
    ]
    if job.intervals is None:
        remarks.append(f"Intervals of volumes: {job.settings.conventions()['intervals']}.")
    else:
        remarks.append(job.intervals.too_few(job.settings.interval, job.settings.level))
    return list(filter(None, remarks))


def _case_table(triage: Triage) -> Table:
    """The least sure cases, with the least sure structure of each."""
    columns = [
        Column("case"), Column("least sure"),
        Column("soft Dice confidence", "of the least sure structure", better=ARROWS["higher"]),
        Column("mean", "soft Dice confidence, mean over the structures", better=ARROWS["higher"]),
        Column(readable("volume_ml", triage.job.unit), "of the least sure structure"),
        Column("interval", "interval of this volume"),
        Column("undecided volumes", "structures whose volume swing is large enough to be flagged"),
    ]  # fmt: skip
    body = []
    for case in triage.order[:FIRST]:
        of = triage.rows[triage.rows["case"] == case]
        worst, flagged = of.iloc[0], of[of["flag"] != ""]["label"]
        body.append(
            [
                Cell(case, case),
                Cell(worst["label"], worst["label"]),
                number_cell(worst["soft_dice_confidence"], 3),
                number_cell(of["soft_dice_confidence"].mean(), 3),
                number_cell(worst["volume_ml"], 2),
                Cell(
                    f"{worst['volume_low_ml']:.2f} to {worst['volume_high_ml']:.2f}",
                    repr(worst["volume_low_ml"]),
                ),
                Cell(", ".join(flagged), str(len(flagged))),
            ]
        )
    return Table("look_first", "Look at these first", columns, body, sortable=True)


def _row_table(triage: Triage) -> Table:
    """Every case and label with all their numbers."""
    meanings = triage.summary["conventions"]
    unit = triage.job.unit
    shown = [metric for metric in table.CONFIDENCE if metric.shown]
    columns = [
        Column("case"),
        Column("label"),
        *(Column(readable(m.key, unit), meanings[m.key], better=ARROWS[m.better]) for m in shown),
        Column("flag", meanings["flag"]),
    ]
    body = [
        [
            Cell(row["case"], row["case"]),
            Cell(row["label"], row["label"]),
            *(number_cell(row[m.key], m.digits) for m in shown),
            Cell(row["flag"], row["flag"]),
        ]
        for _, row in triage.rows.iterrows()
    ]
    return Table("structures", "All cases and structures", columns, body, sortable=True)


def _pictures(triage: Triage) -> tuple[dict[str, Picture], list[str]]:
    """Pictures of the first cases by file name, and notes on them."""
    job = triage.job
    by_name = {case.name: case for case in job.pairing.cases}
    pictures, notes = {}, []
    for name in triage.order[:PICTURES]:
        arrays = read_prediction(
            by_name[name], job.label_set, tolerance=job.settings.tolerance, reader=job.reader
        )
        worst = triage.rows[triage.rows["case"] == name].iloc[0]
        image = None
        if job.images is not None:
            image, note = place_image(job.images, name, arrays.geometry, job.settings.tolerance)
            notes += [f"{name} is shown without its image: {note}"] if note else []
        picture = _picture(arrays, worst, image)
        pictures[f"unsure/{name}.png"] = picture
    return pictures, notes


def _picture(
    arrays: PredictionArrays, worst: pd.Series[Any], image: NDArray[Any] | None
) -> Picture:
    channel = next(one.channel for one in arrays.structures if one.name == worst["label"])
    confidence = f"soft Dice confidence {worst['soft_dice_confidence']:.3f}"
    title = f"{worst['case']}: {worst['label']}, {confidence}"
    figure = plot_unsure(
        arrays.prediction,
        arrays.probabilities[channel],
        doubt(arrays.probabilities, regions=arrays.regions),
        name=worst["label"],
        names=arrays.names,
        spacing_mm=arrays.geometry.spacing_mm,
        title=title,
        image=image,
    )
    return draw(figure, title)


def doubt(probabilities: NDArray[Any], *, regions: bool) -> NDArray[Any]:
    """Probability ``(*S)`` that the most likely label is wrong; the largest over regions, if any.

    Args:
        probabilities: ``(K, *S)``.
        regions: whether the channels are regions.
    """
    if not regions:
        return 1 - probabilities.max(0)
    channels: Sequence[NDArray[Any]] = [np.minimum(p, 1 - p) for p in probabilities]
    return np.max(channels, 0)

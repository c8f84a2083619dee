"""``segcal maps``: how confident a prediction is, as volumes to lay over the image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from segcal.commands.console import open_console, say
from segcal.commands.errors import user_errors
from segcal.commands.evaluate import MAX_NOTES, say_labels
from segcal.commands.progress import progress_bar
from segcal.commands.reading_options import OPTIONS as OF_READING
from segcal.commands.reading_options import (
    READING,
    DatasetJson,
    Labels,
    PredictionPattern,
    known_labels,
    source_of,
)
from segcal.commands.running_options import OPTIONS as OF_RUNNING
from segcal.commands.running_options import Engine, Processes, Resume, RunsOn, Scheduler

if TYPE_CHECKING:  # torch is imported when there is work to do
    from segcal.evaluation.cohort import Cohort
    from segcal.trust.maps import MapsJob

OPTIONS = {"images": "--images", **OF_READING, **OF_RUNNING}
"""Options by the arguments they become."""


def maps(
    predictions: Annotated[
        Path,
        typer.Argument(
            metavar="PREDICTIONS",
            help="Folder of predictions with probabilities, in any form that segcal evaluate "
            "reads, or one file.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the maps, a sub-folder per case.")
    ],
    images: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the images (CASE_0000.nii.gz or CASE.nii.gz), which say where voxels "
            "lie if there is no label map beside a .npz."
        ),
    ] = None,
    resume: Resume = False,
    dataset_json: DatasetJson = None,
    labels: Labels = None,
    prediction_pattern: PredictionPattern = None,
    tolerance: Annotated[
        float,
        typer.Option(
            rich_help_panel=READING,
            min=0,
            help="How far probabilities may lie off their label map or image, in voxels.",
        ),
    ] = 1e-2,
    processes: Processes = None,
    engine: RunsOn = Engine.processes,
    scheduler: Scheduler = None,
) -> None:
    """Write where predictions are confident and where not, as volumes to lay over the image.

    Example: segcal maps predictions -o maps

    Every case gets a sub-folder with entropy.nii.gz (0: decided, 1: all classes equally likely),
    confidence.nii.gz (the probability of the most probable class) and, for every label or region,
    probability_LABEL.nii.gz. Values go from 0 to 1 in steps of 1/255 (uint8 with a scale in the
    header, which ITK-SNAP, 3D Slicer and MITK apply), in the geometry of the image. maps.json
    repeats all this.

    Exit code 0: all written. 1: some case failed, the rest is there. 2: wrong usage.
    """
    console = open_console()
    with user_errors(OPTIONS):
        from segcal.evaluation.api import runner_of
        from segcal.trust.maps import plan_maps, write_maps

        job = plan_maps(
            predictions, output, images=images, dataset_json=known_labels(dataset_json, labels),
            prediction_pattern=prediction_pattern, tolerance=tolerance,
            found=lambda found: say_labels(console, found),
        )  # fmt: skip
        runner = runner_of(engine.value, scheduler)
    with progress_bar("Mapping", len(job.pairing.cases)) as advance:
        cohort = write_maps(
            job, resume=resume, processes=processes, runner=runner, progress=advance
        )
    _say_maps(console, job, cohort)
    if cohort.interrupted:
        say(console, "Interrupted. The same command with --resume goes on from there.", "red")
        raise typer.Exit(130)
    if cohort.failed:
        raise typer.Exit(1)


def _say_maps(console: Console, job: MapsJob, cohort: Cohort) -> None:
    for name, why in cohort.failed.items():
        say(console, f"FAILED {name}: {why}{source_of(job.labels.label_set, why)}", "red")
    for name, texts in list(cohort.notes.items())[:MAX_NOTES]:
        say(console, f"Note on {name}: {'; '.join(texts)}", "yellow")
    written = int(cohort.rows["maps"].sum()) if len(cohort.rows) else 0
    say(console, f"{written} maps of {len(cohort.rows)} cases written to {job.output}")

"""``segcal evaluate``: numbers of predictions against reference labels."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from segcal.commands.errors import user_errors

LIBRARIES = ("segcal", "torch", "numpy", "scipy", "nibabel", "SimpleITK", "pandas")


def evaluate(
    predictions: Annotated[
        Path,
        typer.Argument(
            help="Folder of .npz (nnU-Net v2, --save_probabilities), 4-D NIfTI probabilities "
            "(class last) or label maps; or one such file."
        ),
    ],
    references: Annotated[Path, typer.Argument(help="Folder of label maps, or one label map.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for cases.csv, summary.json, PNG.")
    ],
    dataset_json: Annotated[
        Path | None,
        typer.Option(
            help="nnU-Net dataset.json with label names and 'ignore'; default: looked for beside "
            "the predictions and above the references."
        ),
    ] = None,
    bins: Annotated[
        int, typer.Option(min=1, max=10_000, help="Bins of the calibration errors.")
    ] = 15,
    tace_threshold: Annotated[
        float, typer.Option(min=0, max=1, help="TACE leaves out probabilities up to this.")
    ] = 1e-3,
    dilation: Annotated[
        int,
        typer.Option(min=1, max=100, help="Reach in voxels of the scope around the foreground."),
    ] = 5,
) -> None:
    """Overlap, surface distances and calibration of predictions, per case and in summary.

    Example: segcal evaluate predictions labelsTs -o report

    Files are matched by name (CASE.npz or CASE.nii.gz with CASE.nii.gz). OUT gets cases.csv (one
    row a case), summary.json (means, counts, conventions, versions) and reliability.png.
    Calibration is reported for three scopes: fg (foreground-labelled voxels, as published),
    dilated (near the foreground) and all. Distances are in mm.

    Exit code 0: all evaluated. 1: some case failed, the rest is there. 2: wrong usage.
    """
    with user_errors():
        failed = _run(predictions, references, output, dataset_json, bins, tace_threshold, dilation)
    if failed:
        raise typer.Exit(1)


def _run(
    predictions: Path,
    references: Path,
    output: Path,
    dataset_json: Path | None,
    bins: int,
    tace_threshold: float,
    dilation: int,
) -> bool:
    from segcal.commands.progress import progress_bar
    from segcal.evaluation.case import Settings
    from segcal.evaluation.cohort import evaluate_cohort, summarise
    from segcal.io.cases import find_label_set, is_reoriented, pair
    from segcal.io.files import write_json
    from segcal.io.tables import write_csv
    from segcal.reporting.reliability import plot_reliability, save_figure

    settings = Settings(bins, tace_threshold, dilation)
    pairing = pair(predictions, references)
    label_set = find_label_set(dataset_json, predictions, references)
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output}: is a file; the report needs a folder")
    output.mkdir(parents=True, exist_ok=True)
    reoriented = is_reoriented(predictions)
    with progress_bar("Evaluating", len(pairing.cases)) as advance:
        cohort = evaluate_cohort(
            pairing,
            label_set=label_set,
            reoriented=reoriented,
            settings=settings,
            progress=lambda case: advance(case.name),
        )
    console = Console()
    if len(cohort.rows):
        summary = summarise(cohort)
        write_csv(output / "cases.csv", cohort.rows)
        write_json(
            output / "summary.json",
            {
                "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "predictions": str(predictions.resolve()),
                "references": str(references.resolve()),
                "labels": None if label_set is None else label_set.source,
                "settings": vars(settings),
                "versions": {
                    "python": platform.python_version(),
                    **{name: version(name) for name in LIBRARIES},
                },
                "conventions": settings.conventions(),
                **summary,
            },
        )
        if cohort.reliability:
            figure = plot_reliability(
                {settings.scope_titles[k]: v for k, v in cohort.reliability.items()},
                f"Reliability of the top label, {len(cohort.rows)} cases pooled",
            )
            save_figure(figure, output / "reliability.png")
        console.print(class_table(summary))
        if cohort.reliability:
            console.print(calibration_table(summary, settings.scopes))
    _say_problems(console, cohort)
    if len(cohort.rows):
        console.print(f"Written: {output}/cases.csv, summary.json", soft_wrap=True, end="")
        console.print(", reliability.png" if cohort.reliability else "")
    return bool(cohort.failed or not len(cohort.rows) or pairing.without_prediction)


def class_table(summary: dict[str, Any]) -> Table:
    """Overlap and surface distances per class."""
    table = Table(title=f"Overlap and surfaces, {summary['cases']['evaluated']} cases")
    table.add_column("label", overflow="fold")
    for name in ("n", "DSC", "missed", "false+", "HD", "HD95", "HD95 pen.", "ASSD"):
        table.add_column(name, justify="right", no_wrap=True)
    blocks = {
        **summary["classes"],
        "mean": {"dsc": summary["metrics"]["dsc"], **summary["surface_over_classes"]},
    }
    for name, block in blocks.items():
        hd, hd95 = block["hd_mm"], block["hd95_pooled_mm"]
        table.add_row(
            name,
            str(block["dsc"]["n"]),
            number(block["dsc"]["mean"], 4),
            str(hd["missed"]),
            str(hd["false_alarms"]),
            number(hd["mean_of_found"], 2),
            number(hd95["mean_of_found"], 2),
            number(hd95["penalised_mean"], 2),
            number(block["assd_pooled_mm"]["mean_of_found"], 2),
            end_section=name == list(blocks)[-2],
        )
    table.caption = (
        "mm; HD, HD95 (pooled), ASSD: mean over the found; pen.: a miss costs the diagonal"
    )
    return table


def calibration_table(summary: dict[str, Any], scopes: tuple[str, ...]) -> Table:
    """Calibration errors per scope."""
    table = Table(title="Calibration, mean over cases (fractions of 1)")
    table.add_column("scope", no_wrap=True)
    for name in ("ECE", "ECE pooled", "CECE", "TACE", "TACE ref", "NLL", "Brier"):
        table.add_column(name, justify="right", no_wrap=True)
    metrics = summary["metrics"]
    for scope in scopes:
        table.add_row(
            scope,
            number(metrics[f"ece_{scope}"]["mean"], 4),
            number(summary["pooled"][f"ece_{scope}"], 4),
            number(metrics[f"cece_{scope}"]["mean"], 4),
            number(metrics[f"tace_{scope}"]["mean"], 4),
            number(metrics["tace_ref"]["mean"], 4) if scope == "fg" else "",
            number(metrics[f"nll_{scope}"]["mean"], 4),
            number(metrics[f"brier_{scope}"]["mean"], 4),
        )
    table.caption = "CECE: classwise; TACE: Nixon; TACE ref: as the CRaC poster defines it"
    return table


def number(value: float | None, digits: int) -> str:
    """Format a number, a dash where it is undefined."""
    return "-" if value is None else f"{value:.{digits}f}"


def _say_problems(console: Console, cohort: Any) -> None:
    for name, why in cohort.failed.items():
        console.print(f"FAILED {name}: {why}", style="red", markup=False, soft_wrap=True)
    for names, what in (
        (cohort.pairing.without_prediction, "references without a prediction, not in the means"),
        (cohort.pairing.without_reference, "predictions without a reference, left out"),
    ):
        if names:
            console.print(
                f"{len(names)} {what}: {', '.join(names)}", style="yellow", markup=False,
                soft_wrap=True,
            )  # fmt: skip

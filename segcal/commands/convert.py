"""``segcal convert``: bring downloaded data sets into nnU-Net's raw layout."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from segcal.commands.console import open_console, say
from segcal.commands.errors import user_errors
from segcal.commands.progress import progress_bar

if TYPE_CHECKING:
    from segcal.datasets.raw import Conversion, Plan
    from segcal.io.sources import Source

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Bring a downloaded data set into nnU-Net's raw layout.\n\n"
    "Example: segcal convert msd Downloads/Task05_Prostate $nnUNet_raw\n\n"
    "Every file is checked before a case is written. Skipped cases are listed with the reason, and "
    "recorded in conversion.json. After an interruption, the same command continues where it "
    "stopped. Exit code 0: all converted. 1: some case was skipped, the rest is there. 2: wrong "
    "usage.",
)


OPTIONS = {"dataset_id": "--dataset-id", "release": "--release", "force": "--force"}
"""Options by the arguments they become."""


class Split(str, Enum):
    """How ACDC is split."""

    nnunet = "nnunet"
    paper = "paper"


class Release(str, Enum):
    """FLARE challenges, by year."""

    flare21 = "21"
    flare22 = "22"


class AmosTask(str, Enum):
    """Tasks of AMOS22."""

    ct = "1"
    both = "2"


Src = Annotated[
    Path, typer.Argument(help="Folder of the data set as it was downloaded, or its zip archive.")
]
Dest = Annotated[
    Path,
    typer.Argument(
        help="nnU-Net's raw folder ($nnUNet_raw), in which DatasetNNN_NAME is made; or the folder "
        "DatasetNNN_NAME itself."
    ),
]
DatasetId = Annotated[int | None, typer.Option(help="Number of the data set in nnU-Net, 1 to 999.")]
Force = Annotated[
    bool,
    typer.Option("--force", help="Write every case anew, and remove cases of an older conversion."),
]


@app.command()
def acdc(
    src: Src,
    dest: Dest,
    dataset_id: DatasetId = None,
    split: Annotated[
        Split,
        typer.Option(
            help="nnunet: patients in training/ make 5 folds, patients in testing/ go to imagesTs "
            "and labelsTs. paper: patients in training/ are divided 70 : 10 : 20 into training, "
            "validation and test; testing/ is left out. Both keep the cases of a patient together "
            "and are stratified by diagnostic group."
        ),
    ] = Split.nnunet,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split.")] = 0,
    force: Force = False,
) -> None:
    """Convert ACDC: both frames of every patient, test labels included.

    Example: segcal convert acdc Downloads/ACDC $nnUNet_raw

    SRC holds training/patient001/patient001_frame01.nii.gz and so on, at any depth. The affines of
    ACDC's files say 1 mm; the converted files have the header's true voxel size in the affine, too.
    """
    from segcal.datasets import acdc as data
    from segcal.datasets.raw import raw_folder
    from segcal.io.sources import find_sources

    with user_errors(OPTIONS):
        folder = raw_folder(dest, dataset_id, data.DATASET_ID, data.NAME)
        sources = find_sources(src)
        plan = data.plan_acdc(sources, data.read_infos(sources), split=split.value, seed=seed)
    _convert(src, sources, plan, folder, force)


@app.command()
def flare(
    src: Src,
    dest: Dest,
    dataset_id: DatasetId = None,
    release: Annotated[
        Release | None,
        typer.Option(
            help="21: liver, kidney, spleen, pancreas. 22: 13 organs. Default: recognised by the "
            "names of the files."
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Convert the labelled cases of FLARE21 or FLARE22; unlabelled cases are only counted.

    Example: segcal convert flare Downloads/FLARE22 $nnUNet_raw --release 22

    Images are CASE_0000.nii.gz, labels CASE.nii.gz in another folder. Labelled cases in folders of
    validation or test go to imagesTs and labelsTs.
    """
    from segcal.datasets import flare as data
    from segcal.datasets.raw import raw_folder
    from segcal.io.sources import find_sources

    with user_errors(OPTIONS):
        sources = find_sources(src)
        key = data.find_release(sources) if release is None else release.value
        folder = raw_folder(dest, dataset_id, data.DATASET_ID[key], data.NAME[key])
        plan = data.plan_flare(sources, key)
    _convert(src, sources, plan, folder, force)


@app.command()
def msd(src: Src, dest: Dest, dataset_id: DatasetId = None, force: Force = False) -> None:
    """Convert a task of the Medical Segmentation Decathlon; 4-D images are split into channels.

    Example: segcal convert msd Downloads/Task05_Prostate $nnUNet_raw

    Number and name are taken from the folder's name, TaskNN_Name. Other data sets with a
    dataset.json of this kind are converted, too: cases in its list "validation" are held out by the
    fold in splits_final.json, labels of test cases go to labelsTs, and files that it does not list
    are only counted.
    """
    from segcal.datasets import msd as data
    from segcal.datasets.raw import raw_folder
    from segcal.io.sources import find_sources

    with user_errors(OPTIONS):
        sources = find_sources(src)
        task = data.read_task(sources)
        number, name = data.task_name(task, src.resolve().name)
        if number is None and dataset_id is None:
            raise ValueError(f"{src}: not named like Task05_Prostate; give a --dataset-id")
        folder = raw_folder(dest, dataset_id, number or 0, name)
        plan = data.plan_msd(sources, task)
    _convert(src, sources, plan, folder, force)


@app.command()
def amos(
    src: Src,
    dest: Dest,
    dataset_id: DatasetId = None,
    task: Annotated[
        AmosTask, typer.Option(help="1: the CT scans. 2: CT and MRI, as one channel.")
    ] = AmosTask.ct,
    force: Force = False,
) -> None:
    """Convert AMOS22: 15 abdominal organs in CT and MRI.

    Example: segcal convert amos Downloads/amos22 $nnUNet_raw --task 1

    SRC holds imagesTr/amos_0001.nii.gz, labelsTr, imagesVa and so on, at any depth. The validation
    set is held out by the fold in splits_final.json; test cases go to imagesTs.
    """
    from segcal.datasets import abdomen as data
    from segcal.datasets.raw import raw_folder
    from segcal.io.sources import find_sources

    with user_errors(OPTIONS):
        folder = raw_folder(dest, dataset_id, *data.AMOS_FOLDER[task.value])
        sources = find_sources(src)
        plan = data.plan_amos(sources, task.value)
    _convert(src, sources, plan, folder, force)


@app.command()
def btcv(src: Src, dest: Dest, dataset_id: DatasetId = None, force: Force = False) -> None:
    """Convert BTCV (Synapse, "Beyond the Cranial Vault"): 13 abdominal organs in CT.

    Example: segcal convert btcv Downloads/RawData $nnUNet_raw

    SRC holds img0001.nii.gz and label0001.nii.gz, in any folders. The cases 35 to 40, on which
    Swin UNETR and MONAI's tutorials validate, are held out by the fold in splits_final.json; images
    without a label go to imagesTs.
    """
    from segcal.datasets import abdomen as data
    from segcal.datasets.raw import raw_folder
    from segcal.io.sources import find_sources

    with user_errors(OPTIONS):
        folder = raw_folder(dest, dataset_id, *data.BTCV_FOLDER)
        sources = find_sources(src)
        plan = data.plan_btcv(sources)
    _convert(src, sources, plan, folder, force)


def _convert(
    src: Path, sources: Mapping[str, Source], plan: Plan, folder: Path, force: bool
) -> None:
    """Write the data set and print the outcome."""
    from segcal.datasets.raw import check_apart, write_dataset

    console = open_console()
    try:
        with user_errors(OPTIONS), progress_bar("Converting", len(plan.cases)) as advance:
            check_apart(src, folder)
            done = write_dataset(sources, plan, folder, force=force, progress=advance)
    except KeyboardInterrupt:
        say(console, "Interrupted: the same command goes on from there.", "red")
        raise typer.Exit(130) from None
    _report(console, plan, done, folder)
    if done.skipped:
        raise typer.Exit(1)


def _report(console: Console, plan: Plan, done: Conversion, folder: Path) -> None:
    """Print counts, what was skipped, and what to do next."""
    from segcal.datasets.raw import RECORD, SPLITS

    if done.skipped:
        table = Table("Skipped", "Why", box=box.SIMPLE, header_style="")
        for one in done.skipped:
            table.add_row(Text(one.name), Text(one.reason, overflow="fold"))
        console.print(table)
    for what, number in plan.counts.items():
        say(console, f"{number} {what}")
    if done.rewritten:
        say(
            console,
            f"{done.rewritten} cases are not copied bit for bit; {RECORD} says what was changed.",
        )
    say(
        console,
        f"{done.training} training and {done.test} test cases in {folder} ({done.unchanged} were "
        f"there before), {len(done.skipped)} skipped.",
        "red" if done.skipped else "green",
    )
    if not done.training:
        say(console, "No dataset.json is written: there is nothing to train on.", "red")
        return
    say(
        console,
        "Next: nnUNetv2_plan_and_preprocess -d {} --verify_dataset_integrity".format(
            int(folder.name[len("Dataset") :].split("_")[0])
        ),
    )
    if done.splits:
        say(
            console,
            f"Then: cp {folder / SPLITS} $nnUNet_preprocessed/{folder.name}/ (nnU-Net looks for "
            "its folds there, and makes others if it finds none)",
        )

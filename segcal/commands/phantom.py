"""``segcal phantom``: data whose true posterior is known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segcal.commands.errors import user_errors


def phantom(
    output: Annotated[
        Path, typer.Argument(help="Folder to make, e.g. $nnUNet_raw/Dataset900_Phantom.")
    ],
    train: Annotated[int, typer.Option(min=1, help="Number of training cases.")] = 12,
    test: Annotated[int, typer.Option(min=0, help="Number of test cases.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same data.")] = 0,
    size: Annotated[int, typer.Option(min=32, help="Height and width, in voxels.")] = 64,
    slices: Annotated[int, typer.Option(min=2, help="Number of slices.")] = 8,
    ambiguity_mm: Annotated[
        float, typer.Option(help="Blur of boundaries: scale of the posterior, in mm.")
    ] = 0.8,
    noise: Annotated[
        float, typer.Option(min=0, help="SD of the noise; tissues have intensities 0.2 to 0.9.")
    ] = 0.06,
) -> None:
    """Generate short-axis hearts in nnU-Net's raw layout, with every voxel's true posterior.

    Example: segcal phantom $nnUNet_raw/Dataset900_Phantom --train 12 --test 4

    Labels are drawn from the posterior, which is written to posteriorTr and posteriorTs as .npz.
    "segcal evaluate OUT/posteriorTs OUT/labelsTs -o report" shows what perfect calibration looks
    like on data of this size.
    """
    from segcal.commands.progress import progress_bar
    from segcal.datasets.phantom import PhantomSettings, write_phantom_dataset

    with user_errors(), progress_bar("Generating", train + test) as advance:
        write_phantom_dataset(
            output,
            train=train,
            test=test,
            seed=seed,
            settings=PhantomSettings(
                shape=(slices, size, size), ambiguity_mm=ambiguity_mm, noise=noise
            ),
            progress=advance,
        )
    typer.echo(f"Written: {output}")

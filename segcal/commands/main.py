"""The ``segcal`` command."""

from __future__ import annotations

import atexit
import gc
from typing import Annotated

import typer

from segcal import __version__
from segcal.commands import (
    calibrate,
    check,
    classify,
    convert,
    doctor,
    evaluate,
    maps,
    methods,
    nnunet,
    phantom,
    predict,
    study,
    train,
    trust,
)

app = typer.Typer(
    name="segcal",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    help="Calibrated medical image segmentation: train with penalties that learn their own "
    "weights, evaluate probabilities, and know what the numbers mean.\n\n"
    "Example: segcal evaluate predictions labelsTs -o report",
)
app.command()(evaluate.evaluate)
app.command()(check.check)
app.command()(maps.maps)
app.command()(train.train)
app.command()(predict.predict)
app.command()(phantom.phantom)
app.command()(methods.methods)
app.command()(study.study)
app.command()(doctor.doctor)
app.add_typer(calibrate.app, name="calibrate")
app.add_typer(trust.app, name="trust")
app.add_typer(classify.app, name="classify")
app.add_typer(nnunet.app, name="nnunet")
app.add_typer(convert.app, name="convert")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"segcal {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options that go before a command."""
    # The libraries that a command imports are a million objects that stay. The collector looked
    # through them dozens of times, and once more at the end: a fourth of a short command's time.
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)

"""Options of the training commands that fit a calibrator at the end."""

from __future__ import annotations

from typing import Annotated

import typer

MethodOption = Annotated[
    str | None,
    typer.Option(
        help="Method that --calibrate fits (default: class_region_case, a temperature per "
        "predicted class and region, which rises with the doubt of a case); segcal methods lists "
        "them."
    ),
]


def chosen_method(calibrate: bool | None, method: str | None, of_recipe: str | None) -> str | None:
    """The post-hoc method that a training ends with; None fits none.

    Args:
        calibrate: whether the user wants one; None leaves it to the recipe.
        method: name of the method that the user wants.
        of_recipe: name of the method that the recipe wants, if any.

    Raises:
        ValueError: an unknown method, or one for a calibration that nobody asked for.
    """
    from segcal.recipes import names
    from segcal.repair.fitting import METHOD

    if method and not calibrate:
        raise ValueError("--method: chooses what --calibrate fits; give --calibrate, too")
    if method and method not in names("posthoc"):
        raise ValueError(f"--method {method}: expected one of {', '.join(names('posthoc'))}")
    if calibrate is None:
        return of_recipe
    return method or METHOD if calibrate else None

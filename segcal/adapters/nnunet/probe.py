"""Try what nnU-Net does at its start, and print the results as JSON; the doctor runs this.

It is a process of its own, since broken installations can fail in any way, and so that trainers
registered here are not mistaken for trainers that the environment variable finds.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


def attempt(action: Callable[[], Any]) -> str | None:
    """Return None if `action` works, else the error that it raised."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what was looked for
        return f"{type(error).__name__}: {error}"
    return None


def probe() -> dict[str, Any]:
    """Import packages, and look up trainers in both ways.

    Returns:
        ``imports``: by package the error of its import, or None; ``by_variable`` and
        ``by_registration``: the same by trainer; ``blocks``: see :func:`blocks`; ``cuda``: name of
        the GPU, or None.
    """
    names = ("torch", "timm", "torchvision", "nnunetv2.training.nnUNetTrainer.nnUNetTrainer")
    imports = {name: attempt(partial(importlib.import_module, name)) for name in names}
    result: dict[str, Any] = {"imports": imports, "cuda": None}
    if imports["torch"] is None:
        import torch

        if torch.cuda.is_available():
            result["cuda"] = torch.cuda.get_device_name(0)
    ours = attempt(partial(importlib.import_module, "segcal.adapters.nnunet.trainers"))
    imports["segcal.adapters.nnunet.trainers"] = ours
    if ours is None:
        from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name as find

        from segcal.adapters.nnunet import registration, trainers

        result["by_variable"] = {n: attempt(partial(find, n)) for n in trainers.__all__}
        registration.register()
        result["by_registration"] = {n: attempt(partial(find, n)) for n in trainers.__all__}
        result["blocks"] = blocks()
    return result


def blocks() -> dict[str, str]:
    """By preprocessed plans with a ``segcal`` entry, what is wrong with the entry, or nothing."""
    from segcal.adapters.nnunet.settings import PLANS_KEY, problem_of_block
    from segcal.io.files import read_json

    found = {}
    for path in sorted(Path(os.environ.get("nnUNet_preprocessed") or os.devnull).glob("*/*.json")):
        try:
            plans = read_json(path)
            configurations = dict(plans["configurations"])
        except (KeyError, TypeError, ValueError):
            continue  # another file of nnU-Net's
        for name, one in configurations.items():
            if isinstance(one, dict) and PLANS_KEY in one:
                found[f"{path}, {name}"] = problem_of_block(one[PLANS_KEY])
    return found


if __name__ == "__main__":
    found = probe()
    print()  # nnU-Net prints lines of its own
    print(json.dumps(found))

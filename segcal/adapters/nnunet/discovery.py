"""How nnU-Net finds segcal's trainers: by an environment variable, or by registration.

``nnUNet_extTrainer`` names folders whose modules nnU-Net searches; ours is a folder with a single
star import, so that the classes live in :mod:`segcal.adapters.nnunet.trainers` and stay
importable and picklable. Registration puts the classes where nnU-Net looks first, which needs no
variable and skips the import of every trainer that nnU-Net ships.
"""

from __future__ import annotations

import os
from pathlib import Path

EXT_VARIABLE = "nnUNet_extTrainer"
PATH_VARIABLES = ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")


def ext_path() -> Path:
    """Folder for ``nnUNet_extTrainer``."""
    return Path(__file__).parent / "_ext"


def ensure_env() -> None:
    """Put our folder first in ``nnUNet_extTrainer``, keeping the user's; children inherit it."""
    ours = str(ext_path())
    others = [p for p in os.environ.get(EXT_VARIABLE, "").split(os.pathsep) if p and p != ours]
    os.environ[EXT_VARIABLE] = os.pathsep.join([ours, *others])


def register() -> None:
    """Make our trainers attributes of the module that nnU-Net searches first."""
    from nnunetv2.training.nnUNetTrainer import nnUNetTrainer as searched_first  # noqa: N813

    from segcal.adapters.nnunet import trainers

    for name, trainer in trainers.TRAINERS.items():
        setattr(searched_first, name, trainer)


def recipes_of_trainers() -> dict[str, str]:
    """Name of the recipe of every trainer that the module for ``nnUNet_extTrainer`` offers."""
    from segcal.adapters.nnunet import trainers

    return {name: getattr(trainers, name).recipe for name in trainers.__all__}


def require_paths(*variables: str) -> None:
    """Check nnU-Net's path variables before nnU-Net is imported (it reads them then).

    Raises:
        ValueError: a variable is not set, or names a folder that does not exist.
    """
    for name in variables:
        value = os.environ.get(name)
        if not value:
            raise ValueError(
                f"{name} is not set; nnU-Net needs {', '.join(PATH_VARIABLES)}, for example: "
                f'export {name}="$HOME/nnunet/{name.removeprefix("nnUNet_")}"'
            )
        if name != "nnUNet_results" and not Path(value).is_dir():
            raise ValueError(f"{name}={value}: no such folder")

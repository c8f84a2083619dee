"""How nnU-Net finds segcal's trainers and its own folders: by environment variables.

``nnUNet_extTrainer`` names folders whose modules nnU-Net searches; segcal's folder holds a module
with a single star import, so that the classes live in :mod:`segcal.adapters.nnunet.trainers` and
stay importable and picklable. nnU-Net reads its variables when it is imported, so nothing of it is
imported here. :mod:`segcal.adapters.nnunet.registration` is another way, which needs no variable.
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
    """Put segcal's folder first in ``nnUNet_extTrainer`` beside the user's; children inherit it."""
    ours = str(ext_path())
    others = [p for p in os.environ.get(EXT_VARIABLE, "").split(os.pathsep) if p and p != ours]
    os.environ[EXT_VARIABLE] = os.pathsep.join([ours, *others])


def require_paths(*variables: str) -> None:
    """Check nnU-Net's path variables, before nnU-Net is imported and reads them.

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

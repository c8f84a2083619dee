"""Putting segcal's trainers where nnU-Net looks first, which needs no environment variable.

The search ends at that place, so the other trainers that nnU-Net ships are not imported. Importing
this module imports nnU-Net, which then reads its environment variables.
"""

from __future__ import annotations

from nnunetv2.training.nnUNetTrainer import nnUNetTrainer as searched_first  # noqa: N813

from segcal.adapters.nnunet import trainers


def register() -> None:
    """Make segcal's trainers attributes of the module that nnU-Net searches first."""
    for name, trainer in trainers.TRAINERS.items():
        setattr(searched_first, name, trainer)


def recipes_of_trainers() -> dict[str, str]:
    """Name of the recipe of every trainer that the module for ``nnUNet_extTrainer`` offers."""
    return {name: getattr(trainers, name).recipe for name in trainers.__all__}

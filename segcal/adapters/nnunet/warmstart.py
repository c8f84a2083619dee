"""Start a training from the end of another one, segmentation head included.

nnU-Net's ``-pretrained_weights`` leaves out the segmentation head, so that a converged network
starts with a random head. Here the new fold gets a ``checkpoint_latest.pth`` with all weights, as
if its training had some epochs left, and nnU-Net's ``--c`` continues from this checkpoint.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nnunetv2.run.run_training import get_trainer_from_args
from nnunetv2.utilities.file_path_utilities import get_output_folder
from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

from segcal import __version__
from segcal.adapters.nnunet.checkpoints import read_checkpoint
from segcal.adapters.nnunet.foreign_code import no_foreign_code
from segcal.adapters.nnunet.registration import register
from segcal.heads import both_heads
from segcal.io.files import whole_file, write_json

FINAL = "checkpoint_final.pth"
LATEST = "checkpoint_latest.pth"
CHECKPOINTS = (FINAL, LATEST, "checkpoint_best.pth")
RECORD_NAME = "segcal_warmstart.json"
OF_PLANS = (
    "transpose_forward",
    "image_reader_writer",
    "foreground_intensity_properties_per_channel",
)
OF_CONFIGURATION = (
    "architecture",
    "spacing",
    "patch_size",
    "normalization_schemes",
    "use_mask_for_norm",
    "preprocessor_name",
)
OF_DATASET = ("labels", "regions_class_order", "channel_names")


@dataclass(frozen=True)
class WarmStart:
    """The checkpoint that was written.

    Attributes:
        checkpoint: the new ``checkpoint_latest.pth``.
        source_epochs: number of epochs the source was trained for.
        first_epoch: epoch with which the training continues.
        total_epochs: number of epochs to give to the training, so that it trains as many as asked
            for.
        default_epochs: number of epochs that the trainer has by default.
    """

    checkpoint: Path
    source_epochs: int
    first_epoch: int
    total_epochs: int
    default_epochs: int


def warmstart(
    source: Path,
    dataset: str,
    configuration: str,
    fold: int | str,
    trainer_name: str,
    plans_name: str = "nnUNetPlans",
    epochs: int = 100,
) -> WarmStart:
    """Write ``checkpoint_latest.pth`` for a fold of `trainer_name`, from a finished training.

    If the new network has two heads and the source one, both begin with the source's weights.

    The learning rate begins at nnU-Net's value for `epochs` before the end; the optimiser's
    momentum and the best Dice of the source are forgotten.

    Args:
        source: folder of the fold that was trained, or a checkpoint.
        dataset: number or name of nnU-Net's data set.
        configuration: of the new training.
        fold: of the new training.
        trainer_name: of the new training.
        plans_name: of the new training.
        epochs: number of epochs to train.

    Raises:
        ValueError: the source is not finished or damaged; it has other plans, labels or another
            network; it was trained on validation cases of the new fold; the new fold is trained
            already.
    """
    path = source / FINAL if source.is_dir() else source
    if source.is_dir() and not path.exists():
        raise ValueError(f"{source}: holds no {FINAL}; is its training finished?")
    checkpoint = read_checkpoint(path)
    target = _untrained_fold(dataset, configuration, fold, trainer_name, plans_name)
    with _results_elsewhere():
        trainer = _trainer(dataset, configuration, fold, trainer_name, plans_name)
        if differences := unlike(checkpoint["init_args"], trainer.my_init_kwargs):
            raise ValueError(f"{path}: cannot be continued as {target}: {'; '.join(differences)}")
        with no_foreign_code():
            trainer.initialize()
    checkpoint["network_weights"] = both_heads(checkpoint["network_weights"], trainer.network)
    _check_weights(path, checkpoint["network_weights"], trainer.network.state_dict())
    trained = checkpoint["current_epoch"]
    first = max(trained - epochs, 0)
    written = WarmStart(target / LATEST, trained, first, first + epochs, trainer.num_epochs)
    target.mkdir(parents=True, exist_ok=True)
    write_json(
        target / RECORD_NAME,
        {
            "segcal": __version__,
            "source": str(path.resolve()),
            "source_trainer": checkpoint["trainer_name"],
            "source_epochs": trained,
            "first_epoch": first,
            "total_epochs": written.total_epochs,
        },
    )
    with whole_file(written.checkpoint) as temporary:
        torch.save(_started(checkpoint, trainer, trainer_name, first), temporary)
    return written


def _untrained_fold(
    dataset: str, configuration: str, fold: int | str, trainer_name: str, plans_name: str
) -> Path:
    """Return the folder of a fold that has not been trained.

    Raises:
        ValueError: there is no such data set, or a checkpoint in the folder.
    """
    try:
        target = Path(get_output_folder(dataset, trainer_name, plans_name, configuration, fold))
    except RuntimeError as error:  # nnU-Net knows no such data set
        raise ValueError(f"dataset {dataset}: {error}") from None
    if found := [name for name in CHECKPOINTS if (target / name).exists()]:
        raise ValueError(
            f"{target}: holds {', '.join(found)}; segcal does not overwrite a training; choose "
            "another fold or trainer"
        )
    return target


def _trainer(
    dataset: str, configuration: str, fold: int | str, trainer_name: str, plans_name: str
) -> Any:
    """Return the nnU-Net trainer of this name on the CPU.

    Raises:
        ValueError: there is no such trainer.
    """
    register()
    cpu = torch.device("cpu")
    try:
        return get_trainer_from_args(
            dataset, configuration, fold, trainer_name, plans_name, device=cpu
        )
    except (RuntimeError, ImportError) as error:  # nnU-Net finds no such trainer
        raise ValueError(f"trainer {trainer_name}: {error}") from None


def _started(
    checkpoint: dict[str, Any], trainer: Any, trainer_name: str, first_epoch: int
) -> dict[str, Any]:
    """Return a finished training's checkpoint as a checkpoint of `trainer` before `first_epoch`."""
    return {
        "network_weights": checkpoint["network_weights"],
        "optimizer_state": trainer.optimizer.state_dict(),
        "grad_scaler_state": checkpoint.get("grad_scaler_state"),  # an exported model has none
        "logging": {key: values[:first_epoch] for key, values in checkpoint["logging"].items()},
        "_best_ema": None,
        "current_epoch": first_epoch,
        "init_args": trainer.my_init_kwargs,
        "trainer_name": trainer_name,
        "inference_allowed_mirroring_axes": checkpoint["inference_allowed_mirroring_axes"],
    }


def unlike(source: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Descriptions of init arguments that two trainings must share and do not."""
    found = []
    of_source, of_new = (_essentials(a) for a in (source, new))
    for what in of_source:
        for key, value in of_source[what].items():
            other = of_new[what][key]
            if value != other:
                found.append(f"{what}: {key} was {_short(value)}, is {_short(other)}")
    same_data = source["plans"]["dataset_name"] == new["plans"]["dataset_name"]
    if same_data and str(source["fold"]) != str(new["fold"]):
        found.append(
            f"it was trained on fold {source['fold']}, whose training cases fold {new['fold']} "
            "validates on"
        )
    return found


def _essentials(init_args: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Properties that make one training's network useful to another, in JSON's types."""
    plans = init_args["plans"]
    name = init_args["configuration"]
    configuration = PlansManager(plans).get_configuration(name).configuration
    return {
        "labels": {key: init_args["dataset_json"].get(key) for key in OF_DATASET},
        "plans": {key: plans.get(key) for key in OF_PLANS},
        "configuration": {key: configuration.get(key) for key in OF_CONFIGURATION},
    }


def _check_weights(path: Path, source: dict[str, Any], new: dict[str, Any]) -> None:
    shapes, wanted = ({k: tuple(v.shape) for k, v in w.items()} for w in (source, new))
    wrong = sorted(k for k in shapes.keys() | wanted.keys() if shapes.get(k) != wanted.get(k))
    if wrong:
        shown = "; ".join(f"{k} {shapes.get(k)}, not {wanted.get(k)}" for k in wrong[:3])
        raise ValueError(f"{path}: {len(wrong)} weights belong to another network: {shown}")


@contextmanager
def _results_elsewhere() -> Iterator[None]:
    """Let nnU-Net's trainer make its folder in a temporary place, and no run of W&B."""
    with tempfile.TemporaryDirectory() as folder:
        changed = {"nnUNet_results": folder, "nnUNet_wandb_enabled": "0"}
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

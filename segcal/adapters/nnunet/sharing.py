"""Trained models for people who have nnU-Net and not segcal."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, get_args

import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name
from nnunetv2.utilities.label_handling.label_handling import determine_num_input_channels
from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

from segcal import __version__
from segcal.adapters.nnunet.calibrators import for_trainer
from segcal.adapters.nnunet.checkpoints import read_checkpoint
from segcal.adapters.nnunet.foreign_code import no_foreign_code
from segcal.adapters.nnunet.registration import register
from segcal.adapters.nnunet.trainers import TwoHeadTrainer
from segcal.heads import Head, one_head
from segcal.io.files import TEMPORARY, check_writable, read_json
from segcal.repair.saved import CALIBRATOR_NAME, SavedCalibrator, read_calibrator, write_calibrator

STOCK = "nnUNetTrainer"
PROVENANCE_KEY = "segcal"
OF_MODEL = ("dataset.json", "plans.json", "dataset_fingerprint.json")
OF_FOLD = ("progress.png", "network_architecture.pdf")
OF_TRAINING = ("optimizer_state", "grad_scaler_state")
"""Parts of a checkpoint, twice as large as the network, that only resuming needs."""
OWN_NETWORKS = (nnUNetTrainer.build_network_architecture, TwoHeadTrainer.build_network_architecture)
"""Functions whose networks stock nnU-Net can build, with the weights of one head."""


def export_model(
    model: Path,
    results: Path,
    checkpoint_name: str = "checkpoint_final.pth",
    *,
    head: Head | None = None,
) -> Path:
    """Write a copy of a trained model with which stock nnU-Net predicts, without segcal.

    Checkpoints name nnU-Net's own trainer and hold only tensors and plain values, so that
    ``torch.load(weights_only=True)`` reads them. They keep the record of their training under
    ``segcal``, without the optimizer's state. Paths and validation results, which name folders and
    cases of the person who trained, are left out. Calibrators in the folders of the model or its
    folds are copied and made to name the stock trainer.

    From a network with two heads one head is copied: the decision head, or the probability head
    together with its calibrators.

    Args:
        model: folder of a trained model, with ``plans.json`` and ``fold_X``.
        results: folder that can serve as somebody's ``nnUNet_results``.
        checkpoint_name: which checkpoint of the folds is copied.
        head: which head to copy, for a network with two heads.

    Returns:
        The new folder, ``results/DATASET/nnUNetTrainer__PLANS__CONFIGURATION``.

    Raises:
        ValueError: `model` is no such folder, its network is not nnU-Net's own, `results` has a
            model of that name already, or a calibrator cannot be read; `head` is missing for a
            network with two heads, or given for a network with one.
    """
    check_writable(results)
    plans, dataset = (_read_of_model(model, name) for name in ("plans.json", "dataset.json"))
    folds = sorted(path.parent for path in model.glob(f"fold_*/{checkpoint_name}"))
    if not folds:
        raise ValueError(f"{model}: no fold_X/{checkpoint_name} in it; is its training finished?")
    content = {fold: read_checkpoint(fold / checkpoint_name) for fold in folds}
    for fold, checkpoint in content.items():
        path = fold / checkpoint_name
        checkpoint["network_weights"] = _weights_of(path, checkpoint, head)
        _check_network(path, checkpoint, plans, dataset)
    calibrators = {} if head == "decision" else _calibrators(model, folds)
    configuration = content[folds[0]]["init_args"]["configuration"]
    name = f"{STOCK}__{plans['plans_name']}__{configuration}"
    target = results / plans["dataset_name"] / name
    if target.exists():
        raise ValueError(f"{target}: exists already; name another folder, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=target.parent))
    try:
        _copy(OF_MODEL, model, temporary)
        for fold, checkpoint in content.items():
            (temporary / fold.name).mkdir()
            torch.save(as_stock(checkpoint, head), temporary / fold.name / checkpoint_name)
            _copy(OF_FOLD, fold, temporary / fold.name)
        for place, saved in calibrators.items():
            write_calibrator(temporary / place / CALIBRATOR_NAME, saved)
        temporary.chmod(0o755)
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def as_stock(checkpoint: dict[str, Any], head: Head | None = None) -> dict[str, Any]:
    """Return a checkpoint that names nnU-Net's trainer, with its training under ``segcal``.

    Args:
        checkpoint: of one head.
        head: which head it was, if the network had two.
    """
    init_args = dict(checkpoint["init_args"])
    state = init_args.pop(PROVENANCE_KEY, None)
    provenance = {"exported_by": __version__, "trainer_name": checkpoint["trainer_name"]}
    provenance |= {} if head is None else {"head": head}
    return {
        **{key: value for key, value in checkpoint.items() if key not in OF_TRAINING},
        "init_args": init_args,
        "trainer_name": STOCK,
        PROVENANCE_KEY: {**provenance, "training": state},
    }


def _weights_of(path: Path, checkpoint: dict[str, Any], head: Head | None) -> dict[str, Any]:
    """The network's weights; of two heads, the weights with `head`.

    Raises:
        ValueError: `head` is missing for two heads, or given for one.
    """
    weights: dict[str, Any] = checkpoint["network_weights"]
    if head is not None:
        try:
            return one_head(weights, head)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if _class_of(path, checkpoint["trainer_name"]).build_network_architecture is OWN_NETWORKS[1]:
        raise ValueError(
            f"{path}: its network has two heads, and a stock model has one; choose it "
            f"with --head {' or '.join(get_args(Head))}"
        )
    return weights


def _calibrators(model: Path, folds: list[Path]) -> dict[Path, SavedCalibrator]:
    """Calibrators of the model and its folds, for a stock model, by their relative paths."""
    return {
        place.relative_to(model): for_trainer(read_calibrator(place / CALIBRATOR_NAME), STOCK)
        for place in (model, *folds)
        if (place / CALIBRATOR_NAME).is_file()
    }


def _read_of_model(model: Path, name: str) -> dict[str, Any]:
    if not (model / name).is_file():
        raise ValueError(
            f"{model}: holds no {name}; expected the folder of a trained model, "
            "nnUNet_results/DATASET/TRAINER__PLANS__CONFIGURATION"
        )
    return read_json(model / name)


def _check_network(
    path: Path, checkpoint: dict[str, Any], plans: dict[str, Any], dataset: dict[str, Any]
) -> None:
    """Check that stock nnU-Net builds the same network as the checkpoint's.

    Raises:
        ValueError: the trainer builds a network of its own, its weights do not fit, or its plans
            could run code.
    """
    name = checkpoint["trainer_name"]
    if _class_of(path, name).build_network_architecture not in OWN_NETWORKS:
        raise ValueError(
            f"{path}: {name} builds a network of its own, which stock nnU-Net cannot build; share "
            "the trainer with the model"
        )
    manager = PlansManager(plans)
    configuration = manager.get_configuration(checkpoint["init_args"]["configuration"])
    with no_foreign_code():
        network = nnUNetTrainer.build_network_architecture(
            manager,
            configuration,
            determine_num_input_channels(manager, configuration, dataset),
            manager.get_label_manager(dataset).num_segmentation_heads,
            enable_deep_supervision=False,
        )
    try:
        network.load_state_dict(checkpoint["network_weights"])
    except RuntimeError as error:
        raise ValueError(
            f"{path}: its weights do not fit the network of {path.parent.parent / 'plans.json'}: "
            f"{error}"
        ) from None


def _class_of(path: Path, name: str) -> type[nnUNetTrainer]:
    """The class of the trainer that a checkpoint names.

    Raises:
        ValueError: it is not found.
    """
    register()
    try:
        found: type[nnUNetTrainer] = recursive_find_trainer_class_by_name(name)
    except (RuntimeError, ImportError) as error:
        raise ValueError(
            f"{path}: was trained with {name}, which is not found here, so segcal "
            "cannot know whether it builds nnU-Net's network; set nnUNet_extTrainer to the "
            f"trainer's folder ({type(error).__name__}: {error})"
        ) from None
    return found


def _copy(names: tuple[str, ...], source: Path, target: Path) -> None:
    for name in names:
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)

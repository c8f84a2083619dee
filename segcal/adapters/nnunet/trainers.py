"""nnU-Net trainers, one for every recipe: nnU-Net's own loss with the recipe put into it.

``nnUNetTrainerCRaC`` minimises Dice + cross-entropy + CRaC; in ``nnUNetTrainerFL`` the focal loss
replaces cross-entropy; the suffix ``_CE`` leaves out Dice. A recipe's file names its trainer
(``trainer: CRaC``), so that a new recipe is a new trainer.

The constructor keeps nnU-Net's signature and the network its architecture, so a trained model
predicts like any other. Multipliers, the learned weights of penalties, are updated from the full
resolution of validation batches, before the checkpoint of the epoch is written, which holds them.

A recipe with ``temperature`` divides the last layer of the network in ``checkpoint_final.pth`` by a
fitted temperature.

A recipe with two heads (:mod:`segcal.heads`) adds K channels to the network's last layer. Outside
training the network returns the K channels of the decision head, as nnU-Net expects.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.distributed as dist
from nnunetv2.training.dataloading.data_loader import nnUNetDataLoader
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.plans_handling.plans_handler import PlansManager
from torch import Tensor, nn
from tqdm import tqdm

from segcal import __version__
from segcal.adapters.nnunet.best import BestCalibrated
from segcal.adapters.nnunet.building import build_loss, describe_terms
from segcal.adapters.nnunet.final_validation import predicted_by_both_heads
from segcal.adapters.nnunet.host_loss import Heads
from segcal.adapters.nnunet.journal import Journal
from segcal.adapters.nnunet.labels import Labels
from segcal.adapters.nnunet.loss import PenalisedLoss
from segcal.adapters.nnunet.patching import RefusedError, replaced
from segcal.adapters.nnunet.settings import (
    PLANS_KEY,
    WITHOUT_DICE,
    check_block,
    of_other_trainers,
)
from segcal.adapters.nnunet.sources import calibration_cases_of, patches, volumes
from segcal.adapters.nnunet.workers import workers_end_with_us
from segcal.heads import TwoHeadLayer, add_probability_head, head_layer
from segcal.io.files import remove_leftovers, whole_file
from segcal.io.label_sets import label_set_of
from segcal.posthoc.folding import fitted_temperature, fold_temperature
from segcal.posthoc.temperature import Temperature
from segcal.recipes import load_recipe, names
from segcal.reporting.picture import draw
from segcal.reporting.progress import FIGURE_NAME, plot_progress
from segcal.schedule import generalisation_gap
from segcal.term import sum_over_ranks
from segcal.training.collapse import CollapseWatch

BEST_NAME = "checkpoint_best_ece.pth"
BEST_DICE_NAME = "checkpoint_best.pth"
CHECKPOINT_KEY = "segcal"


class CalibratedTrainer(nnUNetTrainer):
    """nnU-Net's trainer with the recipe that a subclass names."""

    recipe: ClassVar[str]
    dice: ClassVar[bool]
    loss: PenalisedLoss
    _best_ema: float | None  # nnU-Net's

    def __init__(
        self,
        plans: dict[str, Any],
        configuration: str,
        fold: int | str,
        dataset_json: dict[str, Any],
        device: torch.device = torch.device("cuda"),  # noqa: B008 - nnU-Net's signature
    ) -> None:
        self._read_block(plans, configuration, dataset_json)  # before nnU-Net makes a folder
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.enable_deep_supervision = self.settings.deep_supervision
        if self.settings.epochs is not None:
            self.num_epochs = self.settings.epochs
        if self.settings.iterations is not None:
            self.num_iterations_per_epoch = self.settings.iterations
        self.calibration_cases: list[str] = []
        self.val_cases: list[str] = []
        self.best_calibrated = BestCalibrated()
        self.temperature: list[float] = []
        self._other_settings = ""
        self.channel_names = _channel_names(
            self.dataset_json["labels"], regions=self.label_manager.has_regions
        )
        self.collapse_watch = CollapseWatch(
            len(self.channel_names), background=not self.label_manager.has_regions
        )
        self.journal = Journal(self, self.channel_names)

    def _read_block(
        self, plans: dict[str, Any], configuration: str, dataset_json: dict[str, Any]
    ) -> None:
        """Read the plans' settings for segcal's trainers.

        Raises:
            RefusedError: a setting that does not fit.
        """
        manager = PlansManager(plans)
        content = manager.get_configuration(configuration).configuration.get(PLANS_KEY, {})
        known = manager.get_label_manager(dataset_json)
        self._labels = Labels(
            known.num_segmentation_heads,
            per_channel=known.has_regions,
            ignore_index=known.ignore_label,
            channels=len(dataset_json.get("channel_names") or dataset_json["modality"]),
        )
        recipe = load_recipe(self.recipe)
        try:
            self.settings, self.parts, self._arguments = check_block(
                content, recipe, **self._labels.runtime()
            )
        except ValueError as error:
            raise RefusedError(
                f"{manager.plans_name}.json, configuration {configuration}, "
                f"{type(self).__name__}: {error}"
            ) from error
        self._of_others = of_other_trainers(content, self.parts)

    def _build_loss(self) -> PenalisedLoss:
        self._check_device_and_batch()
        labels, recipe = self._labels, load_recipe(self.recipe)
        self.penalty_settings = describe_terms(recipe, self.parts, self._arguments, labels)
        host = super()._build_loss()
        loss = build_loss(host, labels, recipe, self.parts, self._arguments, dice=self.dice)
        return loss.to(self.device)

    def _check_device_and_batch(self) -> None:
        """Refuse settings that would fail in the first step.

        Raises:
            ValueError: a device without float64; unequal shares of a batch.
        """
        if self.device.type == "mps":
            raise ValueError(
                f"{type(self).__name__}: multipliers are kept in float64, which the device mps "
                "does not have; use cpu or cuda"
            )
        batch, ranks = (
            self.configuration_manager.batch_size,
            dist.get_world_size() if self.is_ddp else 1,
        )
        if self.configuration_manager.batch_dice and batch % ranks:
            raise ValueError(
                f"{type(self).__name__}: nnU-Net's batch Dice gathers from {ranks} processes, "
                f"whose shares of a batch of {batch} differ; plan a batch_size divisible by "
                f"{ranks}, or batch_dice false"
            )

    def do_split(self) -> tuple[list[str], list[str]]:
        """Split as nnU-Net does, and look up the cases that multipliers learn from."""
        train, val = super().do_split()
        self.val_cases = val
        self.calibration_cases = calibration_cases_of(self, train, val)
        return train, val

    def get_dataloaders(self) -> tuple[Any, Any]:
        """Start nnU-Net's loaders, with workers that end when this process is killed."""
        with workers_end_with_us():
            return super().get_dataloaders()

    def on_train_start(self) -> None:
        """Start as nnU-Net does, and log what is added to the loss.

        Raises:
            ValueError: the checkpoint to continue from was trained with other settings.
        """
        if self._other_settings:
            raise ValueError(
                f"{self._other_settings}. Continue with the settings it was trained with, or "
                "start again (without --c)"
            )
        super().on_train_start()
        self._say_what_is_trained()
        if self.local_rank == 0:
            remove_leftovers(Path(self.output_folder))
            self.journal.epoch_log.forget_from(self.current_epoch)
        if CHECKPOINT_KEY in self.my_init_kwargs:  # a training that goes on
            self._keep_best_dice()
            self._keep_best_calibrated()

    def _say_what_is_trained(self) -> None:
        loss = self.parts.formula(dice=self.dice)
        self.print_to_log_file(
            f"segcal {__version__}, recipe {self.recipe}: {loss}; terms {self.penalty_settings}"
        )
        settings = self.settings.model_dump()
        self.print_to_log_file(f"segcal settings: {settings}")
        self.logger.update_config({"segcal": {**settings, **self.penalty_settings}})
        if self._of_others:
            self.print_to_log_file(
                f"segcal: the plans set {', '.join(self._of_others)} for other trainers; this "
                "trainer has no such term"
            )
        warn_of_labels(self)
        source = self.settings.multiplier_source
        if not self.loss.learns and (self.calibration_cases or source != "val_patches"):
            self.print_to_log_file(
                "WARNING: this recipe learns no multipliers, so multiplier_source and a list "
                '"calib" in splits_final.json have no effect'
            )
        elif self.calibration_cases:
            self.print_to_log_file(
                f"segcal: multipliers learn from {len(self.calibration_cases)} cases of their own, "
                '"calib" in splits_final.json'
            )
        if self.fold == "all" and self.loss.learns:
            self.print_to_log_file(
                "WARNING: with fold 'all' validation cases are training cases, so multipliers are "
                "learned from training data"
            )

    def train_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Take nnU-Net's step, on two views of the images if the recipe compares them."""
        return super().train_step(self._prepared(batch))

    def validation_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Take nnU-Net's step."""
        return super().validation_step(self._prepared(batch))

    def _prepared(self, batch: dict[str, Any]) -> dict[str, Any]:
        images = batch["data"].to(self.device, non_blocking=True)
        return {**batch, "data": self.loss.prepare(images)}

    def on_train_epoch_start(self) -> None:
        """Set the weights that a schedule changes; start the sums of the training terms."""
        super().on_train_epoch_start()
        dice = math.nan
        if self.current_epoch:
            dice = float(self.logger.get_value("mean_fg_dice", step=-1))
        else:
            self.loss.schedules.see_gap(0.0)
        self._scheduled = self.loss.advance(self.current_epoch / self.num_epochs, dice)
        self.loss.train()
        self.loss.start_pass()

    def on_train_epoch_end(self, train_outputs: list[dict[str, Any]]) -> None:
        """Keep the means of the training terms for the log."""
        super().on_train_epoch_end(train_outputs)
        self._train_terms = self.loss.means(self._reduce)
        self._train_likelihood = self.loss.likelihood(self._reduce)

    def on_validation_epoch_start(self) -> None:
        """From here on, give validation batches to the multipliers too, unless they have others."""
        super().on_validation_epoch_start()
        self.loss.eval()
        self.loss.start_pass(measuring=True, observing=not self._own_pass)

    def on_validation_epoch_end(self, val_outputs: list[dict[str, Any]]) -> None:
        """Update the multipliers. The checkpoint of this epoch is written later and holds them."""
        super().on_validation_epoch_end(val_outputs)
        terms, ece = self.loss.means(self._reduce), self.loss.ece(self.device, self._reduce)
        gap = generalisation_gap(self._train_likelihood, self.loss.likelihood(self._reduce))
        self.loss.schedules.see_gap(gap)
        self.loss.start_pass()
        every = self.settings.volumes_every if self.settings.multiplier_source == "volumes" else 1
        steps = {}
        if self.current_epoch % every == 0:
            if self._own_pass:
                self.observe_cases()
            steps = self.loss.dual_step(self._reduce)
        collapsed = self._collapsed_classes(val_outputs)
        self.journal.write(
            train=self._train_terms,
            val=terms,
            ece=ece,
            steps=steps,
            collapsed=collapsed,
            weights=self._scheduled,
        )
        if news := self.collapse_watch.news(collapsed, self.channel_names):
            self.print_to_log_file(f"WARNING: segcal: {news}")

    def on_epoch_end(self) -> None:
        """End the epoch as nnU-Net does, keep the best calibrated epoch and draw the figure."""
        super().on_epoch_end()
        self._keep_best_calibrated()
        if self.local_rank == 0:
            figure = plot_progress(self.journal.epoch_log.records(), self.channel_names)
            draw(figure, "").save(Path(self.output_folder) / FIGURE_NAME)

    def on_train_end(self) -> None:
        """Divide the network's last layer if the recipe says so, then end as nnU-Net does."""
        if load_recipe(self.recipe).temperature:
            self._fold_temperature()
        super().on_train_end()

    def _keep_best_dice(self) -> None:
        """Keep the last epoch as nnU-Net's best, if it is the best.

        nnU-Net checks this after it has written ``checkpoint_latest``. A training that continues
        from that checkpoint checks again, because the killed training may not have done so.
        """
        dice = self.logger.get_value("ema_fg_dice", step=-1)
        if self._best_ema is None or dice > self._best_ema:
            self._best_ema = dice
            self._save_last_epoch(BEST_DICE_NAME)

    def _keep_best_calibrated(self) -> None:
        """Keep the last epoch if it is the best calibrated one. Repeating this does no harm."""
        ece, dice = (
            float(self.logger.get_value(key, step=-1)) for key in ("segcal_val_ece", "ema_fg_dice")
        )
        if self.best_calibrated.update(ece, dice, collapsed=bool(self.collapse_watch.collapsed)):
            self.print_to_log_file(
                f"segcal: lowest ECE among epochs near the best Dice: {ece:.4f}, of validation "
                f"patches; kept as {BEST_NAME}"
            )
            self._save_last_epoch(BEST_NAME)

    def _save_last_epoch(self, name: str) -> None:
        self.current_epoch -= 1  # as nnU-Net does for its last checkpoint
        self.save_checkpoint(str(Path(self.output_folder) / name))
        self.current_epoch += 1

    @property
    def _own_pass(self) -> bool:
        """Whether multipliers are updated from other data than nnU-Net's validation."""
        elsewhere = self.settings.multiplier_source != "val_patches" or self.calibration_cases
        return self.loss.learns and bool(elsewhere)

    @property
    def _reduce(self) -> Any:
        return sum_over_ranks if self.is_ddp else None

    def observe_cases(self) -> None:
        """Give the multipliers the batches of their own source."""
        volumes = self.settings.multiplier_source == "volumes"
        fixed = self.settings.multiplier_source == "fixed_patches"
        for logits, labels in self._seen(self._volumes() if volumes else self._patches(fixed)):
            self.loss.observe(logits, labels)

    def _fold_temperature(self) -> None:
        """Divide the network's last layer by a temperature fitted to validation patches.

        The patches are always the same, so repeating this does no harm. If it fails, the log says
        why, and the finished training is kept.
        """
        self.temperature = []
        if self.fold == "all":
            self.print_to_log_file(
                "WARNING: segcal: with fold 'all' the network is trained on the cases it validates "
                "on, so no temperature is fitted to them"
            )
            return
        self.network.eval()
        try:
            temperature = self._fitted_temperature()
            self.temperature = fold_temperature(
                self.network, temperature, lambda: next(self._probabilities())[0]
            )
        except ValueError as error:
            self.print_to_log_file(
                f"WARNING: segcal: no temperature became part of the network: {error}. --calibrate "
                "repairs its probabilities"
            )
            return
        facts = temperature.facts
        self.print_to_log_file(
            f"segcal: temperature {', '.join(f'{t:.4g}' for t in self.temperature)}, by which the "
            f"last layer in checkpoint_final.pth is divided: NLL of validation patches "
            f"{facts['nll_before']:.4f} -> {facts['nll_after']:.4f}, same masks"
        )

    def _fitted_temperature(self) -> Temperature:
        """The temperature fitted to the first process's patches, in all processes.

        Raises:
            ValueError: it cannot be fitted; raised in all processes.
        """
        found: list[Any] = [None]
        if self.local_rank == 0:
            try:
                fitted = fitted_temperature(
                    self._probabilities(),
                    self.num_val_iterations_per_epoch,
                    ignore_index=self._labels.ignore_index,
                    per_channel=self._labels.per_channel,
                )
                found = [fitted.state()]
            except ValueError as error:
                found = [str(error)]
        if self.is_ddp:
            dist.broadcast_object_list(found, 0)
        if isinstance(found[0], str):
            raise ValueError(found[0])
        return Temperature.from_state(found[0])

    def _probabilities(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the logits that give probabilities, and the labels, of fixed patches."""
        for logits, labels in self._seen(self._patches(fixed=True)):
            yield self.loss.by_head(logits)[1], labels

    def _seen(
        self, batches: Iterable[tuple[Tensor, Tensor, tuple[slice, ...]]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the network's logits in full resolution, and labels."""
        network = self.network.module if self.is_ddp else self.network
        for images, target, keep in batches:
            images = images.to(self.device)
            with (
                torch.no_grad(),
                torch.autocast(self.device.type, enabled=self.device.type == "cuda"),
            ):
                output = network(images)
            logits = output if isinstance(output, Tensor) else output[0]
            kept = (slice(None), slice(None), *keep)
            yield logits[kept], self.loss.labels.of(target.to(self.device)[kept])

    def _volumes(self) -> Iterator[tuple[Tensor, Tensor, tuple[slice, ...]]]:
        """Patches of whole cases, this process's share, and the part of each patch to keep."""
        cases = self.calibration_cases or self.val_cases
        if self.is_ddp:
            cases = cases[self.local_rank :: dist.get_world_size()]
        dataset = self._dataset(cases)
        shown = tqdm(
            dataset.identifiers, "segcal: volumes that multipliers learn from",
            disable=self.local_rank != 0,
        )  # fmt: skip
        patch = self.configuration_manager.patch_size
        yield from volumes(dataset, shown, patch, self._validation_transforms())

    def _patches(self, fixed: bool) -> Iterator[tuple[Tensor, Tensor, tuple[slice, ...]]]:
        """Patches, either the same every time, or new ones in every epoch."""
        patch = self.configuration_manager.patch_size
        loader = nnUNetDataLoader(
            self._dataset(self.calibration_cases or self.val_cases),
            self.batch_size,
            patch,
            patch,
            self.label_manager,
            oversample_foreground_percent=self.oversample_foreground_percent,
            transforms=self._validation_transforms(),
        )
        seed = (self.settings.patch_seed, self.local_rank, 0 if fixed else 1 + self.current_epoch)
        for batch in patches(loader, self.num_val_iterations_per_epoch, seed):
            yield batch["data"], batch["target"], ()

    def _dataset(self, cases: list[str]) -> Any:
        return self.dataset_class(
            self.preprocessed_dataset_folder,
            cases,
            folder_with_segs_from_previous_stage=self.folder_with_segs_from_previous_stage,
        )

    def _validation_transforms(self) -> Any:
        manager = self.label_manager
        return self.get_validation_transforms(
            None,
            is_cascaded=self.is_cascaded,
            foreground_labels=manager.foreground_labels,
            regions=manager.foreground_regions if manager.has_regions else None,
            ignore_label=manager.ignore_label,
        )

    def _collapsed_classes(self, val_outputs: list[dict[str, Any]]) -> list[int]:
        tp, fp, fn = (
            torch.as_tensor(np.sum([o[k] for o in val_outputs], axis=0), dtype=torch.float64)
            for k in ("tp_hard", "fp_hard", "fn_hard")
        )
        counts = torch.stack([tp + fp, tp + fn]).to(self.device)
        if self.is_ddp:
            counts = sum_over_ranks(counts)
        predicted, labelled = counts.tolist()
        if not self.label_manager.has_regions:  # nnU-Net leaves the background out
            predicted, labelled = [1.0, *predicted], [1.0, *labelled]
        return self.collapse_watch.update(predicted, labelled)

    def save_checkpoint(self, filename: str) -> None:
        """Save nnU-Net's checkpoint with the state of the penalties among its init arguments.

        nnU-Net stores and restores init arguments itself and reads only ``configuration`` from
        them, so no code of nnU-Net is copied. A training killed while it writes keeps the previous
        checkpoint.
        """
        self.my_init_kwargs[CHECKPOINT_KEY] = {
            "version": __version__,
            "settings": self.penalty_settings,
            "state": self.loss.learned_state(),
            "missing": list(self.collapse_watch.missing),
            "best": vars(self.best_calibrated),
            "temperature": self.temperature,
        }
        if self.local_rank != 0 or self.disable_checkpointing:
            super().save_checkpoint(filename)
            return
        with whole_file(Path(filename)) as temporary:
            super().save_checkpoint(str(temporary))

    def load_checkpoint(self, filename_or_checkpoint: dict[str, Any] | str) -> None:
        """Load nnU-Net's checkpoint and the state of the penalties.

        A checkpoint that was trained with other settings of the penalties can predict, but its
        training cannot continue (:meth:`on_train_start`).

        Raises:
            ValueError: its file is damaged.
        """
        path = filename_or_checkpoint
        if isinstance(path, str) and Path(path).exists() and not zipfile.is_zipfile(path):
            raise ValueError(
                f"{path}: not a whole checkpoint (was its disk full, or its training killed while "
                "a stock trainer wrote it?). Delete it: a continued training (--c) then takes "
                "checkpoint_best.pth, if there is one"
            )
        super().load_checkpoint(filename_or_checkpoint)
        saved = self.my_init_kwargs.get(CHECKPOINT_KEY)
        if saved is None:
            self.print_to_log_file(
                f"WARNING: {filename_or_checkpoint} holds no segcal state (a stock training?): "
                "multipliers start from their initial values"
            )
            return
        self._other_settings = ""
        if differences := _differences(saved["settings"], self.penalty_settings):
            text = "; ".join(differences)
            self._other_settings = f"{filename_or_checkpoint}: was trained with {text}"
            return
        self.loss.load_learned_state(saved["state"])
        self.collapse_watch.missing = list(saved["missing"])
        self.best_calibrated = BestCalibrated(**saved["best"])


class TwoHeadTrainer(CalibratedTrainer):
    """The trainer for a recipe with one head for decisions and one for probabilities."""

    @staticmethod
    def build_network_architecture(
        plans_manager: Any,
        configuration_manager: Any,
        num_input_channels: int,
        num_output_channels: int,
        enable_deep_supervision: bool = True,
    ) -> nn.Module:
        """Build nnU-Net's network, and a probability head beside its last layer."""
        network: nn.Module = nnUNetTrainer.build_network_architecture(
            plans_manager,
            configuration_manager,
            num_input_channels,
            num_output_channels,
            enable_deep_supervision,
        )
        add_probability_head(network, num_output_channels, output="decision")
        return network

    def on_train_start(self) -> None:
        """Start as above, and let the network return both heads from now on."""
        super().on_train_start()
        self._head_layer.output = "both"

    def on_train_end(self) -> None:
        """End as above; everything after it expects the channels of the decision head."""
        super().on_train_end()
        self._head_layer.output = "decision"

    @property
    def _head_layer(self) -> TwoHeadLayer:
        return cast(TwoHeadLayer, head_layer(self.network))

    def validation_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Take nnU-Net's step: it evaluates the decision head, and the loss sees both heads."""
        prepared, network, loss, seen = self._prepared(batch), self.network, self.loss, []

        def decision(images: Tensor) -> Heads:
            seen.append(network(images))
            return loss.by_head(seen[0])[0]

        with (
            replaced(self, "network", decision),
            replaced(self, "loss", lambda _, target: loss(seen[0], target)),
        ):
            return nnUNetTrainer.validation_step(self, prepared)

    def perform_actual_validation(self, save_probabilities: bool = False) -> None:
        """Validate as nnU-Net does; probabilities come from the probability head."""
        if not save_probabilities:
            super().perform_actual_validation()
            return
        with predicted_by_both_heads(self):
            super().perform_actual_validation(True)


def _trainers() -> dict[str, type[CalibratedTrainer]]:
    """Make the trainers of all recipes that name one; users of nnU-Net type these names."""
    found: dict[str, type[CalibratedTrainer]] = {}
    for recipe in names("recipes"):
        content = load_recipe(recipe)
        if not content.trainer:
            continue
        kind = CalibratedTrainer if content.probability is None else TwoHeadTrainer
        for suffix, dice in (("", True), (WITHOUT_DICE, False)):
            name = f"nnUNetTrainer{content.trainer}{suffix}"
            doc = f"nnU-Net with recipe {recipe}" + ("." if dice else ", without Dice.")
            attributes = {"recipe": recipe, "dice": dice, "__doc__": doc, "__module__": __name__}
            found[name] = type(name, (kind,), attributes)
    return found


TRAINERS = _trainers()
globals().update(TRAINERS)
__all__ = list(TRAINERS)


def warn_of_labels(trainer: nnUNetTrainer) -> None:
    """Write problems of the labels into a training's log, e.g. regions that no label map holds."""
    try:
        why = label_set_of(trainer.dataset_json, "dataset.json").contradiction()
    except ValueError as error:  # which nnU-Net trains with, and segcal evaluate refuses
        why = str(error)
    if why:
        trainer.print_to_log_file(f"WARNING: {why}")


def _channel_names(labels: dict[str, Any], *, regions: bool) -> list[str]:
    """Names of the network's channels: classes by label, or regions in nnU-Net's order."""
    if regions:
        return [k for k, v in labels.items() if k != "ignore" and set(np.ravel(v)) != {0}]
    return sorted((k for k in labels if k != "ignore"), key=lambda k: int(np.ravel(labels[k])[0]))


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Descriptions of settings that differ, by penalty and argument."""
    found = []
    for name in sorted(set(saved) | set(now)):
        a, b = saved.get(name, {}), now.get(name, {})
        found += [
            f"{name}: {key} = {a.get(key)!r}, not {b.get(key)!r}"
            for key in sorted(set(a) | set(b))
            if a.get(key) != b.get(key)
        ]
    return found

"""nnU-Net trainers: nnU-Net's own loss plus the penalties of a recipe.

The constructor keeps nnU-Net's signature, the network keeps its architecture, so a trained model
predicts like any other. Multipliers are observed on the full-resolution head in validation,
updated before the checkpoint of the epoch is written, and saved in it.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import Tensor, nn

from segcal import __version__
from segcal.collapse import CollapseWatch
from segcal.io.config import build, load_recipe, resolve_terms
from segcal.io.files import remove_leftovers, whole_file, write_text
from segcal.objective import Objective
from segcal.penalty import DualStep

__all__ = ["nnUNetTrainerCRaC", "nnUNetTrainerNACL"]

LOG_NAME = "segcal_log.jsonl"
CHECKPOINT_KEY = "segcal"
PLANS_KEY = "segcal"
"""Key of a plans configuration: arguments by penalty, e.g. {"crac": {"margin_inner": 3.0}}."""
COLLAPSE_REMEDY = (
    "the network may have collapsed to background. Keep Dice in the base loss, lower margin_inner "
    "or rho0, and see 'Collapse' in segcal's README"
)


class PenalisedLoss(nn.Module):
    """nnU-Net's loss plus penalties on the full-resolution head.

    Args:
        host: nnU-Net's loss, deep supervision included.
        penalties: weighted sum of penalties on ``(logits (N, K, *S), labels (N, *S))``.
    """

    def __init__(self, host: nn.Module, penalties: Objective) -> None:
        super().__init__()
        self.host = host
        self.penalties = penalties
        self.observing = False
        self.start_pass()

    def start_pass(self, *, observing: bool = False) -> None:
        """Forget the sums of terms; from now on hand batches to the multipliers, or do not."""
        self.observing = observing
        self._sums: dict[str, Tensor] = {}
        self._batches = 0

    def means(self) -> dict[str, float]:
        """Mean of every unweighted term since :meth:`start_pass`, ``base`` being nnU-Net's."""
        return {k: float(v) / max(self._batches, 1) for k, v in self._sums.items()}

    def forward(
        self, output: Tensor | Sequence[Tensor], target: Tensor | Sequence[Tensor]
    ) -> Tensor:
        """Return the scalar loss for nnU-Net's ``(N, K, *S)`` heads and ``(N, 1, *S)`` targets."""
        logits = output if isinstance(output, Tensor) else output[0]
        labels = (target if isinstance(target, Tensor) else target[0])[:, 0].long()
        base = self.host(output, target)
        total, values = self.penalties.evaluate(logits, labels)
        if self.observing:
            self.penalties.observe(logits, labels)
        for name, value in {"base": base, **values}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach()
        self._batches += 1
        return base + total


class CalibratedTrainer(nnUNetTrainer):
    """nnU-Net's trainer with the penalties of the recipe that a subclass names."""

    recipe: ClassVar[str]
    loss: PenalisedLoss

    def _build_loss(self) -> PenalisedLoss:
        if self.label_manager.has_regions:
            raise ValueError(
                f"{type(self).__name__}: region-based labels (overlapping, sigmoid) are not "
                "supported by this penalty; train with nnUNetTrainer, or with labels that exclude "
                "each other"
            )
        if self.device.type == "mps":
            raise ValueError(
                f"{type(self).__name__}: multipliers are kept in float64, which -device mps does "
                "not have; use -device cpu or cuda"
            )
        host = super()._build_loss()
        if not np.all(np.isfinite(getattr(host, "weight_factors", 1.0))):
            raise ValueError(
                f"{type(self).__name__}: a network of two stages leaves deep supervision without "
                "a weight, and its loss is NaN; plan three stages or more"
            )
        recipe = load_recipe(self.recipe)
        num_classes = self.label_manager.num_segmentation_heads
        runtime = {"num_classes": num_classes, "ignore_index": self.label_manager.ignore_label}
        components = resolve_terms(
            recipe,
            with_base=False,
            overrides=self.configuration_manager.configuration.get(PLANS_KEY),
        )
        self.penalty_settings: dict[str, Any] = {
            name: {"weight": recipe.penalties[name], "target": c.target, **runtime, **c.args}
            for name, c in components.items()
        }
        terms = {name: build(c, **runtime) for name, c in components.items()}
        for attribute, problem in (
            (
                "needs_image",
                "weighs neighbours by intensities, and nnU-Net gives its loss no image",
            ),
            ("two_views", "calls the network twice, which nnU-Net's training does not"),
        ):
            if found := [name for name, term in terms.items() if getattr(term, attribute, False)]:
                raise ValueError(f"{type(self).__name__}: {', '.join(found)} {problem}")
        self.collapse_watch = CollapseWatch(num_classes)
        self._collapse_said: list[int] = []
        return PenalisedLoss(host, Objective(terms, recipe.penalties)).to(self.device)

    def on_train_start(self) -> None:
        """Start as nnU-Net does, and say what is added to the loss."""
        super().on_train_start()
        self.print_to_log_file(
            f"segcal {__version__}, recipe {self.recipe}: nnU-Net's loss + {self.penalty_settings}"
        )
        if self.fold == "all":
            self.print_to_log_file(
                "WARNING: with fold 'all' validation cases are training cases, so multipliers are "
                "learned from training data"
            )
        if self.local_rank == 0:
            remove_leftovers(Path(self.output_folder))
            self._forget_log_from(self.current_epoch)

    def on_train_epoch_start(self) -> None:
        """Start the sums of the training terms."""
        super().on_train_epoch_start()
        self.loss.start_pass()

    def on_train_epoch_end(self, train_outputs: list[dict[str, Any]]) -> None:
        """Keep the means of the training terms for the log."""
        super().on_train_epoch_end(train_outputs)
        self._train_terms = self.loss.means()

    def on_validation_epoch_start(self) -> None:
        """From here on every validation batch also goes to the multipliers."""
        super().on_validation_epoch_start()
        self.loss.start_pass(observing=True)

    def on_validation_epoch_end(self, val_outputs: list[dict[str, Any]]) -> None:
        """Update the multipliers. The checkpoint of this epoch is written later, with them."""
        super().on_validation_epoch_end(val_outputs)
        terms = self.loss.means()
        self.loss.start_pass()
        steps = self.loss.penalties.dual_step(_sum_over_ranks if self.is_ddp else None)
        collapsed = self._collapsed_classes(val_outputs)
        self._report(terms, steps, collapsed)

    def _collapsed_classes(self, val_outputs: list[dict[str, Any]]) -> list[int]:
        tp, fp, fn = (
            torch.as_tensor(np.sum([o[k] for o in val_outputs], axis=0), dtype=torch.float64)
            for k in ("tp_hard", "fp_hard", "fn_hard")
        )
        counts = torch.stack([tp + fp, tp + fn]).to(self.device)
        if self.is_ddp:
            counts = _sum_over_ranks(counts)
        predicted, labelled = counts.tolist()
        return self.collapse_watch.update([1.0, *predicted], [1.0, *labelled])

    def _report(
        self, val_terms: dict[str, float], steps: dict[str, DualStep], collapsed: list[int]
    ) -> None:
        record: dict[str, Any] = {
            "epoch": self.current_epoch,
            "train": self._train_terms,
            "val": val_terms,
            "collapsed": collapsed,
        }
        for phase in ("train", "val"):
            terms = ", ".join(f"{k} {v:.4f}" for k, v in record[phase].items())
            self.print_to_log_file(f"segcal {phase} terms (unweighted): {terms}")
        for name, step in steps.items():
            record[name] = vars(step)
            for row, region in enumerate(("inner", "outer")[: len(step.lam)]):
                self.print_to_log_file(
                    f"segcal {name} {region}: lambda {_short(step.lam[row])}, "
                    f"rho {_short(step.rho[row])}, constraint {_short(step.constraint[row])}"
                )
            for note in step.notes:
                self.print_to_log_file(f"WARNING: segcal {name}: {note}")
        if collapsed and collapsed != self._collapse_said:
            names = [k for k, v in self.dataset_json["labels"].items() if v in collapsed]
            self.print_to_log_file(
                f"WARNING: segcal: {', '.join(names)} labelled in validation but not predicted for "
                f"{self.collapse_watch.patience} epochs or more: {COLLAPSE_REMEDY}"
            )
        self._collapse_said = collapsed
        if self.local_rank == 0:
            with self._log_path().open("a", encoding="utf-8") as log:
                log.write(json.dumps(record) + "\n")

    def save_checkpoint(self, filename: str) -> None:
        """Save nnU-Net's checkpoint with the state of the penalties among its init arguments.

        nnU-Net stores and restores those itself and reads only ``configuration`` of them, so
        neither side's code is copied. A training killed while it writes keeps the checkpoint
        before.
        """
        self.my_init_kwargs[CHECKPOINT_KEY] = {
            "version": __version__,
            "settings": self.penalty_settings,
            "state": {k: v.cpu() for k, v in self.loss.penalties.state_dict().items()},
            "missing": list(self.collapse_watch.missing),
        }
        if self.local_rank != 0 or self.disable_checkpointing:
            super().save_checkpoint(filename)
            return
        with whole_file(Path(filename)) as temporary:
            super().save_checkpoint(str(temporary))

    def load_checkpoint(self, filename_or_checkpoint: dict[str, Any] | str) -> None:
        """Load nnU-Net's checkpoint and the state of the penalties.

        Raises:
            ValueError: the checkpoint was trained with other settings of the penalties, or its
                file is damaged.
        """
        path = filename_or_checkpoint
        if isinstance(path, str) and Path(path).exists() and not zipfile.is_zipfile(path):
            raise ValueError(
                f"{path}: not a whole checkpoint (was its disk full, or its training killed while "
                "a stock trainer wrote it?). Delete it: --c then goes on from checkpoint_best.pth, "
                "if there is one"
            )
        super().load_checkpoint(filename_or_checkpoint)
        saved = self.my_init_kwargs.get(CHECKPOINT_KEY)
        if saved is None:
            self.print_to_log_file(
                f"WARNING: {filename_or_checkpoint} holds no segcal state (a stock training?): "
                "multipliers start from their initial values"
            )
            return
        if differences := _differences(saved["settings"], self.penalty_settings):
            raise ValueError(
                f"{filename_or_checkpoint}: was trained with {'; '.join(differences)}. Go on with "
                "the settings it was trained with, or start anew without --c"
            )
        self.loss.penalties.load_state_dict(saved["state"])
        self.collapse_watch.missing = list(saved["missing"])

    def _log_path(self) -> Path:
        return Path(self.output_folder) / LOG_NAME

    def _forget_log_from(self, epoch: int) -> None:
        """Drop lines of epochs that a resumed training runs again."""
        path = self._log_path()
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if _epoch_of(line) < epoch]
            write_text(path, "".join(kept))


class nnUNetTrainerNACL(CalibratedTrainer):  # noqa: N801 - the name is what nnU-Net's user types
    """nnU-Net's Dice + cross-entropy + NACL."""

    recipe = "nacl"


class nnUNetTrainerCRaC(CalibratedTrainer):  # noqa: N801
    """nnU-Net's Dice + cross-entropy + CRaC."""

    recipe = "crac"


def _sum_over_ranks(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Sentences on settings that differ, by penalty and argument."""
    found = []
    for name in sorted(set(saved) | set(now)):
        a, b = saved.get(name, {}), now.get(name, {})
        found += [
            f"{name}: {key} = {a.get(key)!r}, not {b.get(key)!r}"
            for key in sorted(set(a) | set(b))
            if a.get(key) != b.get(key)
        ]
    return found


def _short(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{v:.3g}" for v in values) + "]"


def _epoch_of(line: str) -> int:
    try:
        return int(json.loads(line)["epoch"])
    except (ValueError, KeyError):  # half a line, from a killed run
        return 10**9

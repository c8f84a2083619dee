"""The training of an experiment on MONAI's engines, in one process or several.

An epoch consists of the training batches and a pass over the validation set. At the end of that
pass the multipliers, the learned weights of the penalties, are updated. Then the log is written,
and the checkpoint with all that a resumed training needs to go on as if it had not been stopped.

Several processes share every batch, and their losses are weighted so that terms that are means over
samples or voxels equal the terms of one process, even with a smaller last batch. Ratios within a
batch (ML1-ACE, MMCE, CRaC averaged by region, uneven numbers of ignored voxels) and batch norm are
computed on each process's share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from ignite.engine import Events
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.utils import optional_import
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from segcal.adapters.monai.building import build_network, check_network, window_inferer
from segcal.adapters.monai.checkpoints import KEYS
from segcal.adapters.monai.data import (
    Crops,
    EpochBatches,
    Item,
    KeptBatches,
    ValidationBatches,
    cached,
    crop_transforms,
    kept_on,
    units,
)
from segcal.adapters.monai.dataset import check_cases, find_cases
from segcal.adapters.monai.experiment import SegmentationExperiment
from segcal.adapters.monai.validation import TermMeans, ValidationPass
from segcal.recipes import build, load_objective
from segcal.training.beginning import RUN_NAME
from segcal.training.checkpoints import LAST_NAME
from segcal.training.collapse import CollapseWatch
from segcal.training.results import Criterion, HeldOutPass, Validation
from segcal.training.run import TrainingRun

__all__ = ["SegmentationRun"]

SummaryWriter, HAS_TENSORBOARD = optional_import("torch.utils.tensorboard", name="SummaryWriter")
TENSORBOARD = "tensorboard"
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class SegmentationRun(TrainingRun[SegmentationExperiment]):
    """A training of a MONAI network that has been checked and is ready to run.

    Example::

        with processes("auto") as ranks:
            trained = SegmentationRun(load_experiment("my.yaml"), ranks).run()

    See :class:`segcal.training.run.TrainingRun`. The argument ``advance`` of :meth:`run` is called
    after every iteration with a sentence on the last epoch's results.
    """

    libraries = ("segcal", "torch", "monai", "pytorch-ignite", "numpy", "nibabel")
    keys = (*TrainingRun.keys, *KEYS)
    criterion = Criterion("miou", "mean IoU")
    _words = ""
    _writer: Any = None

    def prepare(self, checkpoint: dict[str, Any] | None) -> None:
        """Find the files of the cases, and build the loss."""
        experiment, precision = self.experiment, self.experiment.training.precision
        if precision == "fp16" and self.device.type == "cpu":
            raise ValueError("training.precision: fp16 needs a GPU; use fp32 or bf16")
        self.cases = find_cases(experiment.data)
        if checkpoint is not None and checkpoint["cases"] != self.cases.names:
            raise ValueError(
                f"{self.folder / LAST_NAME}: was trained and validated on other cases ({RUN_NAME} "
                "beside it lists them); restore them, or choose another output"
            )
        self.classes = self.cases.classes
        self.recipe = load_objective(experiment.recipe)
        terms: dict[str, Any] = experiment.terms
        self.objective = build(
            experiment.recipe, len(self.classes), ignore_index=self.cases.ignore_index, **terms
        )
        self.collapse = CollapseWatch(len(self.classes))
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self._means = TermMeans()
        self._measured = ValidationPass(self.objective, len(self.classes), self.cases.ignore_index)

    def build_network(self, *, fresh: bool) -> nn.Module:
        """Build what the experiment names."""
        return build_network(self.experiment, self.cases.channels, self._outputs, fresh=fresh)

    @property
    def _outputs(self) -> int:
        """Channels of the network's logits: the classes, for each head."""
        return self.objective.num_heads * len(self.classes)

    def check_network(self) -> None:
        """Raise ValueError unless logits have the size of the image."""
        self._check_batch(min(2, max(1, self.experiment.training.batch_size // self.ranks.size)))

    def _check_batch(self, samples: int) -> None:
        """Raise ValueError unless the network can be trained on batches of this many samples."""
        data, channels = self.experiment.data, self.cases.channels
        check_network(self.network, data, channels, self._outputs, self.device, samples)

    def load(self) -> None:
        """Check and read the volumes of all cases."""
        data, settings, ranks = self.experiment.data, self.experiment.training, self.ranks
        sides = {"train": self.cases.train, "val": self.cases.val}
        self.say(
            f"Checking and reading {len(sides['train'])} training and {len(sides['val'])} "
            "validation cases"
        )
        known = self.cases.known_labels
        grids = {
            side: check_cases(cases, self.cases.channels, known) for side, cases in sides.items()
        }
        listed = units(grids["train"], data)
        self.sampler = EpochBatches(
            len(listed), settings.batch_size, settings.seed, ranks.rank, ranks.size
        )
        left = len(listed) % settings.batch_size
        if left and left // ranks.size <= 1 < settings.batch_size // ranks.size:
            self._check_batch(1)  # the last of an epoch, of which some norms know no deviation
        transform = crop_transforms(data, len(self.classes), self.cases.ignore_index)
        volumes = {side: cached(cases, data, settings.workers) for side, cases in sides.items()}
        samples = len(listed) + len(units(grids["val"], data))
        kept = kept_on(data, samples, self.cases.channels, settings.workers, self.device)
        loading: dict[str, Any] = {
            "num_workers": settings.workers if kept is None else 0,
            "pin_memory": self.device.type == "cuda" and kept in (None, torch.device("cpu")),
            "generator": torch.Generator(),  # of its own: the network's draws are not shifted
        }
        crops = Crops(volumes["train"], listed, data, transform)
        if kept is None:
            _try_first(lambda: crops[0, 0])
            self.train_loader = DataLoader(crops, batch_sampler=self.sampler, **loading)
        else:
            stack = KeptBatches(crops, kept)
            _try_first(lambda: stack[[(0, 0)]])
            self.train_loader = DataLoader(stack, batch_size=None, sampler=self.sampler, **loading)
        batches = ValidationBatches(
            volumes["val"], grids["val"], data, settings.val_batch_size, self.cases.ignore_index,
            kept,
        )  # fmt: skip
        if len(batches) < ranks.size:
            raise ValueError(
                f"validation: {len(batches)} batches for {ranks.size} processes; use fewer "
                "processes, a smaller training.val_batch_size, or more validation cases"
            )
        mine = range(ranks.rank, len(batches), ranks.size)
        self.val_loader = DataLoader(batches, batch_size=None, sampler=mine, **loading)

    @property
    def iterations(self) -> int:
        """Number of training iterations left, without early stop."""
        return self.epochs_left * len(self.sampler)

    @cached_property
    def _trainer(self) -> SupervisedTrainer:
        trainer = SupervisedTrainer(
            self.device,
            self.experiment.training.epochs,
            self.train_loader,
            self._model,
            self.optimizer,
            self.objective,
            epoch_length=len(self.sampler),
            iteration_update=self._iterate,
            decollate=False,
        )
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: self.advance(self._words)
        )
        trainer.state.epoch = self.epoch
        trainer.state.iteration = self.epoch * len(self.sampler)
        return trainer

    @cached_property
    def _evaluator(self) -> SupervisedEvaluator:
        evaluator = SupervisedEvaluator(
            self.device,
            self.val_loader,
            self.network,
            inferer=window_inferer(self.experiment),
            val_handlers=[self._measured],
            decollate=False,
        )
        evaluator.add_event_handler(Events.STARTED, self._share_statistics)
        return evaluator

    @cached_property
    def _model(self) -> nn.Module:
        if self.ranks.size == 1:
            return self.network
        return DistributedDataParallel(
            self.network,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            find_unused_parameters=self.experiment.training.find_unused_parameters,
        )

    def _share_statistics(self, engine: SupervisedEvaluator) -> None:
        """Give all processes the batch norm statistics of the first, whose network is saved."""
        if self.ranks.size > 1:
            for buffer in self.network.buffers():
                dist.broadcast(buffer, 0)

    def train_epoch(self, seed: int) -> dict[str, float]:
        """Run MONAI's trainer for one more epoch."""
        self.sampler.epoch = self.epoch
        self._trainer.state.max_epochs = self.epoch + 1
        with deterministic():
            self._trainer.run()
        return self._means.take(self.device)

    def _iterate(self, engine: SupervisedTrainer, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """One step; the recipe may call the network on two views of the images."""
        images = batch["image"].to(self.device, non_blocking=True)
        labels = batch["label"].to(self.device, non_blocking=True)[:, 0].long()
        share = self.sampler.share((engine.state.iteration - 1) % len(self.sampler))
        self._model.train()
        self.objective.train()
        self.optimizer.zero_grad(set_to_none=True)
        precision = self.experiment.training.precision
        with torch.autocast(self.device.type, PRECISIONS[precision], enabled=precision != "fp32"):
            total, values = self.objective.step(self._model, images, labels)
        self.scaler.scale(total * share.weight).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._means.add(values, share.samples)
        return {"loss": total.detach()}

    def validate_epoch(self) -> Validation:
        """Run MONAI's evaluator; the multipliers are updated at the end of its pass."""
        with deterministic():
            self._evaluator.run(self.epoch + 1)
        return self._measured.result

    def held_out(self, network: nn.Module) -> HeldOutPass:
        """This process's batches of the validation set."""
        inferer = window_inferer(self.experiment)

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for batch in self.val_loader:
                with torch.no_grad(), deterministic():
                    logits = inferer(batch["image"].to(self.device), network).float()
                labels = batch["label"].to(self.device)[:, 0].long()
                yield self.objective.by_head(logits)[1], labels

        return HeldOutPass(batches(), len(self.val_loader), self.cases.ignore_index)

    def after_epoch(self, record: dict[str, Any], validation: Validation) -> None:
        """Report the results of the epoch, and write them for TensorBoard."""
        scores = f"mean IoU {record['miou']:.4f}, ECE {record['ece']:.4f}"
        self._words = f"epoch {record['epoch']}: {scores}"
        self.say(f"{self._words}; {_terms(record)}")
        if HAS_TENSORBOARD:
            self._write_scalars(record, validation)

    def _write_scalars(self, record: dict[str, Any], validation: Validation) -> None:
        epoch = record["epoch"]
        if self._writer is None:
            self._writer = SummaryWriter(str(self.folder / TENSORBOARD), purge_step=epoch)
        for phase in ("train", "val"):
            for name, value in record[phase].items():
                self._writer.add_scalar(f"{phase}/{name}", value, epoch)
        for name in ("miou", "ece", "lr"):
            self._writer.add_scalar(name, record[name], epoch)
        for name, step in validation.steps.items():
            for key in ("lam", "rho", "constraint"):
                for region, row in enumerate(getattr(step, key)):
                    for label, value in zip(self.classes, row, strict=False):
                        self._writer.add_scalar(f"{name}/{key}_{region}/{label}", value, epoch)

    def finish(self) -> None:
        """Close the log of TensorBoard."""
        if self._writer is not None:
            self._writer.close()

    def facts(self) -> dict[str, Any]:
        """The cases that train and validate."""
        return {"cases": self.cases.names}

    def own_state(self) -> dict[str, Any]:
        """What a prediction needs to know about the data, and the scale of gradients."""
        return {
            "classes": list(self.classes),
            "heads": self.objective.num_heads,
            "ignore_label": self.cases.ignore_label,
            "channels": self.cases.channels,
            "cases": self.cases.names,
            "scaler": self.scaler.state_dict(),
        }

    def restore_own(self, checkpoint: dict[str, Any]) -> None:
        """Restore the scale of gradients."""
        self.scaler.load_state_dict(checkpoint["scaler"])


@contextmanager
def deterministic() -> Iterator[None]:
    """Have cuDNN choose kernels that give the same result every time."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def _try_first(cut: Callable[[], Item]) -> None:
    """Cut a sample before training begins.

    Raises:
        ValueError: `data.augment` fails on it.
    """
    try:
        cut()
    except (KeyError, RuntimeError, TypeError) as error:
        why = error.__cause__ or error
        raise ValueError(
            f"data.augment: fails on the first sample ({type(why).__name__}: {why}); its keys are "
            "image and label, which are on the GPU unless data.on_device is false"
        ) from error


def _terms(record: dict[str, Any]) -> str:
    """Terms of an epoch, and how long it took."""
    terms = "; ".join(
        f"{phase} {', '.join(f'{name} {value:.4g}' for name, value in record[phase].items())}"
        for phase in ("train", "val")
    )
    return f"{terms}; {record['seconds']:.1f} s"

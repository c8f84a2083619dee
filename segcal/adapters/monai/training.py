"""The training of an experiment on MONAI's engines, in one process or several.

An epoch: training batches; a pass over the validation set, at whose end the multipliers are
updated; then the log, and the checkpoint with all that a resumed training needs to go on as if it
had not been stopped.

Several processes share every batch, and their losses are weighted so that terms that are means over
samples or voxels are those of one process, a smaller last batch included. What is a ratio within a
batch (ML1-ACE, MMCE, CRaC averaged by region, labels to ignore in uneven numbers) and batch norm
are of each process's share.
"""

from __future__ import annotations

import copy
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ignite.engine import Events
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.handlers import ValidationHandler
from monai.inferers import Inferer, SimpleInferer, SlidingWindowInferer
from monai.utils import optional_import
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from segcal.adapters.monai.checkpoints import MUST_BE_SAME, experiment_of, read_training
from segcal.adapters.monai.data import (
    EpochBatches,
    Samples,
    ValidationBatches,
    cached,
    crops,
    units,
)
from segcal.adapters.monai.dataset import check_cases, find_cases
from segcal.adapters.monai.experiment import Data, Experiment
from segcal.adapters.monai.validation import TermMeans, ValidationPass
from segcal.io.files import read_json, remove_leftovers, write_json
from segcal.recipes import build, load_objective
from segcal.reporting.picture import draw
from segcal.reporting.progress import FIGURE_NAME, plot_progress
from segcal.term import sum_over_ranks
from segcal.training.checkpoints import BEST_NAME, LAST_NAME, write_checkpoint
from segcal.training.collapse import REMEDY, CollapseWatch
from segcal.training.epoch_log import EpochLog
from segcal.training.experiments import (
    build_optimizer,
    build_part,
    check_same,
    check_unused,
    choose_device,
    write_resolved,
)

SummaryWriter, HAS_TENSORBOARD = optional_import("torch.utils.tensorboard", name="SummaryWriter")
RUN_NAME = "run.json"
TENSORBOARD = "tensorboard"
LIBRARIES = ("segcal", "torch", "monai", "pytorch-ignite", "numpy", "nibabel")
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together.

    Attributes:
        rank: its number.
        size: how many there are.
        device: what it computes on.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0


@contextmanager
def processes(device: str) -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` has started, if it has.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:0``; of several processes on GPUs each takes
            the one of its local rank.

    Raises:
        ValueError: no such device.
    """
    chosen = choose_device(device)
    if "WORLD_SIZE" not in os.environ:
        yield Ranks(0, 1, chosen)
        return
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), chosen)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Trained:
    """What came of a training.

    Attributes:
        folder: of the results.
        epochs: that have been trained, those before a resume included.
        best_epoch: number of the best one, from 0.
        best_miou: its validation mean IoU.
        early: whether patience ended it.
    """

    folder: Path
    epochs: int
    best_epoch: int
    best_miou: float
    early: bool


class TrainingRun:
    """A training that has been checked and is ready to run.

    Example::

        with processes("auto") as ranks:
            trained = TrainingRun(load_experiment("my.yaml"), ranks).run()

    Args:
        experiment: what to do.
        ranks: this process.
        resume: go on from the last checkpoint; from the beginning where there is none yet.
        say: told what a user should read, in the first process.

    Raises:
        ValueError: something does not fit.
    """

    def __init__(
        self,
        experiment: Experiment,
        ranks: Ranks,
        *,
        resume: bool = False,
        say: Say = lambda text: None,
    ) -> None:
        self.experiment, self.ranks, self.say = experiment, ranks, say
        data, settings = experiment.data, experiment.training
        self.device, self.folder = ranks.device, experiment.folder
        last = self.folder / LAST_NAME
        if not resume:
            check_unused(self.folder)
        if settings.precision == "fp16" and self.device.type == "cpu":
            raise ValueError("training.precision: fp16 needs a GPU; use fp32 or bf16")
        checkpoint = None
        if resume and last.exists():
            checkpoint = read_training(last)
            check_same(experiment_of(checkpoint, last), experiment, MUST_BE_SAME, last)
        self.cases = find_cases(data)
        if checkpoint is not None and checkpoint["cases"] != self.cases.names:
            raise ValueError(
                f"{last}: was trained and validated on other cases ({RUN_NAME} beside it lists "
                "them); go on with those, or choose another output"
            )
        self.recipe = load_objective(experiment.recipe).model_dump()
        if checkpoint is not None and checkpoint["recipe"] != self.recipe:
            raise ValueError(
                f"{last}: was trained with another content of {experiment.recipe}; go on with "
                "that, or choose another output"
            )
        if ranks.first:
            say(
                f"Checking and reading {len(self.cases.train)} training and "
                f"{len(self.cases.val)} validation cases"
            )
        k = len(self.cases.classes)
        terms: dict[str, Any] = experiment.terms
        self.objective = build(
            experiment.recipe, k, ignore_index=self.cases.ignore_index, **terms
        ).to(self.device)
        torch.manual_seed(settings.seed)
        self.network = build_network(experiment, self.cases.channels, k).to(self.device)
        check_network(self.network, data, self.cases.channels, k, self.device)
        self.optimizer, self.scheduler = build_optimizer(
            experiment.optimizer,
            experiment.scheduler,
            self.network,
            epochs=settings.epochs,
            metric="mean IoU",
            higher=True,
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=settings.precision == "fp16")
        self.best_miou, self.best_epoch, self.epoch = -1.0, -1, 0
        self.collapse = CollapseWatch(k)
        self._said: list[int] = []
        self._state = ""
        self._load_data()
        if checkpoint is not None:
            self._restore(checkpoint)
        self._begin(resumed=checkpoint is not None)

    def _load_data(self) -> None:
        data, settings, ranks = self.experiment.data, self.experiment.training, self.ranks
        sides = {"train": self.cases.train, "val": self.cases.val}
        grids = {side: check_cases(cases, self.cases.known_labels) for side, cases in sides.items()}
        listed = units(grids["train"], data)
        self.sampler = EpochBatches(
            len(listed), settings.batch_size, settings.seed, ranks.rank, ranks.size
        )
        transform = crops(data, len(self.cases.classes), self.cases.ignore_index)
        volumes = {side: cached(cases, data, settings.workers) for side, cases in sides.items()}
        loading: dict[str, Any] = {
            "num_workers": settings.workers,
            "pin_memory": self.device.type == "cuda",
            "generator": torch.Generator(),  # of its own: the network's draws are not shifted
        }
        self.train_loader = DataLoader(
            Samples(volumes["train"], listed, data, transform),
            batch_sampler=self.sampler,
            **loading,
        )
        _try_first(self.train_loader.dataset)
        batches = ValidationBatches(
            volumes["val"], grids["val"], data, settings.val_batch_size, self.cases.ignore_index
        )
        if len(batches) < ranks.size:
            raise ValueError(
                f"validation: {len(batches)} batches for {ranks.size} processes; use fewer "
                "processes, a smaller training.val_batch_size, or more validation cases"
            )
        self.val_loader = DataLoader(
            batches,
            batch_size=None,
            sampler=range(ranks.rank, len(batches), ranks.size),
            **loading,
        )

    def _begin(self, *, resumed: bool) -> None:
        """Write what the run is, when all has been checked by all processes."""
        mine = torch.tensor([self.epoch, self.epoch**2], dtype=torch.float64)
        total, squares = sum_over_ranks(mine).tolist()  # which waits for all
        if total**2 != self.ranks.size * squares:  # equal if and only if all epochs are
            raise ValueError(
                f"{self.folder / LAST_NAME}: not all processes find the same one; the output "
                "must lie on a file system that all machines share"
            )
        if not self.ranks.first:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)
        EpochLog(self.folder).forget_from(self.epoch)
        write_resolved(self.experiment, self.folder)
        path = self.folder / RUN_NAME
        before = read_json(path)["runs"] if resumed and path.exists() else []
        run = {
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "first_epoch": self.epoch,
            "seed": self.experiment.training.seed,
            "device": str(self.device),
            "processes": self.ranks.size,
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in LIBRARIES},
            },
        }
        write_json(
            path,
            {
                "runs": [*before, run],
                "recipe": self.recipe,
                "cases": self.cases.names,
                "classes": list(self.cases.classes),
            },
        )

    @property
    def iterations(self) -> int:
        """How many are left, without early stop."""
        return (self.experiment.training.epochs - self.epoch) * len(self.sampler)

    def run(self, advance: Callable[[str], None] = lambda state: None) -> Trained:
        """Train to the end.

        Args:
            advance: called after every iteration with what the last epoch came to, in words.

        Raises:
            FloatingPointError: logits are no longer finite.
        """
        settings = self.experiment.training
        per_epoch = len(self.sampler)
        self._measured = ValidationPass(
            self.objective, len(self.cases.classes), self.cases.ignore_index
        )
        evaluator = SupervisedEvaluator(
            self.device,
            self.val_loader,
            self.network,
            inferer=window_inferer(self.experiment),
            val_handlers=[self._measured],
            decollate=False,
        )
        evaluator.add_event_handler(Events.STARTED, self._share_statistics)
        self._model = self._wrapped()
        self._trainer = SupervisedTrainer(
            self.device,
            settings.epochs,
            self.train_loader,
            self._model,
            self.optimizer,
            self.objective,
            epoch_length=per_epoch,
            iteration_update=self._iterate,
            decollate=False,
            train_handlers=[ValidationHandler(1, evaluator)],  # before the checkpoint is written
        )
        self._trainer.add_event_handler(Events.EPOCH_STARTED, self._start_epoch)
        self._trainer.add_event_handler(Events.EPOCH_COMPLETED, self._end_epoch)
        self._trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: advance(self._state)
        )
        self._trainer.state.epoch = self.epoch
        self._trainer.state.iteration = self.epoch * per_epoch
        self._means, self._writer = TermMeans(), self._tensorboard()
        if self.epoch < settings.epochs and not self._out_of_patience:
            with deterministic():
                self._trainer.run()
        if self._writer is not None:
            self._writer.close()
        return Trained(
            self.folder, self.epoch, self.best_epoch, self.best_miou, self._out_of_patience
        )

    def _wrapped(self) -> nn.Module:
        if self.ranks.size == 1:
            return self.network
        return DistributedDataParallel(
            self.network,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            find_unused_parameters=self.experiment.training.find_unused_parameters,
        )

    def _share_statistics(self, engine: SupervisedEvaluator) -> None:
        """Give all the statistics of batch norm of the first process, whose network is saved."""
        if self.ranks.size > 1:
            for buffer in self.network.buffers():
                dist.broadcast(buffer, 0)

    def _start_epoch(self, engine: SupervisedTrainer) -> None:
        """Seed an epoch, each rank differently, so that nothing depends on the epochs before."""
        self.sampler.epoch = engine.state.epoch - 1
        seed = self.experiment.training.seed
        torch.manual_seed(seed + 1000003 * engine.state.epoch + 7919 * self.ranks.rank)
        self._started = time.monotonic()

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

    def _end_epoch(self, engine: SupervisedTrainer) -> None:
        """Step the schedule, log, keep the best and the last, decide whether to go on."""
        epoch, validation = self.epoch, self._measured.result
        self.epoch += 1
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(validation.miou)
        elif self.scheduler is not None:
            self.scheduler.step()
        collapsed = self.collapse.update(validation.predicted, validation.labelled)
        record = {
            "epoch": epoch,
            "train": self._means.take(self.device),
            "val": validation.terms,
            "miou": validation.miou,
            "ece": validation.ece,
            "lr": rates[0],
            "collapsed": collapsed,
            "seconds": round(time.monotonic() - self._started, 3),
            **{name: vars(step) for name, step in validation.steps.items()},
        }
        miou = -1.0 if math.isnan(validation.miou) else validation.miou  # no foreground at all
        best = self.best_epoch < 0 or miou > self.best_miou
        if best:
            self.best_miou, self.best_epoch = miou, epoch
        self._state = f"epoch {epoch}: mean IoU {validation.miou:.4f}, ECE {validation.ece:.4f}"
        if self.ranks.first:
            self._keep(record, best=best)
            self.say(f"{self._state}; {_words(record)}")
        self._warn(validation.steps, collapsed)
        if self._out_of_patience:
            engine.terminate()

    @property
    def _out_of_patience(self) -> bool:
        patience = self.experiment.training.early_stop
        return patience is not None and self.epoch - 1 - self.best_epoch >= patience

    def _keep(self, record: dict[str, Any], *, best: bool) -> None:
        log = EpochLog(self.folder)
        log.append(record)
        content = self._state_dict()
        if best:
            write_checkpoint(self.folder / BEST_NAME, content)
        write_checkpoint(self.folder / LAST_NAME, content)
        figure = plot_progress(log.records(), self.cases.classes)
        draw(figure, "").save(self.folder / FIGURE_NAME)
        if self._writer is not None:
            self._write_scalars(record)

    def _warn(self, steps: dict[str, Any], collapsed: list[int]) -> None:
        if not self.ranks.first:
            return
        for name, step in steps.items():
            for note in step.notes:
                self.say(f"epoch {self.epoch - 1}: {name}: {note}")
        if collapsed and collapsed != self._said:
            missing = ", ".join(self.cases.classes[k] for k in collapsed)
            self.say(
                f"epoch {self.epoch - 1}: {missing} labelled in validation but not predicted for "
                f"{self.collapse.patience} epochs or more: {REMEDY}"
            )
        self._said = collapsed

    def _tensorboard(self) -> Any:
        if not (HAS_TENSORBOARD and self.ranks.first):
            return None
        return SummaryWriter(str(self.folder / TENSORBOARD), purge_step=self.epoch)

    def _write_scalars(self, record: dict[str, Any]) -> None:
        epoch = record["epoch"]
        for phase in ("train", "val"):
            for name, value in record[phase].items():
                self._writer.add_scalar(f"{phase}/{name}", value, epoch)
        for name in ("miou", "ece", "lr"):
            self._writer.add_scalar(name, record[name], epoch)
        for name, step in self._measured.result.steps.items():
            for key in ("lam", "rho", "constraint"):
                for region, row in enumerate(getattr(step, key)):
                    for label, value in zip(self.cases.classes, row, strict=False):
                        self._writer.add_scalar(f"{name}/{key}_{region}/{label}", value, epoch)

    def _state_dict(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment.model_dump(mode="json"),
            "classes": list(self.cases.classes),
            "ignore_label": self.cases.ignore_label,
            "channels": self.cases.channels,
            "cases": self.cases.names,
            "recipe": self.recipe,
            "epoch": self.epoch,
            "best_miou": self.best_miou,
            "best_epoch": self.best_epoch,
            "missing": list(self.collapse.missing),
            "network": self.network.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def _restore(self, content: dict[str, Any]) -> None:
        self.epoch = content["epoch"]
        self.best_miou, self.best_epoch = content["best_miou"], content["best_epoch"]
        self.collapse.missing = list(content["missing"])
        self.network.load_state_dict(content["network"])
        self.objective.load_state_dict(content["objective"])
        self.optimizer.load_state_dict(content["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(content["scheduler"])
        self.scaler.load_state_dict(content["scaler"])


@contextmanager
def deterministic() -> Iterator[None]:
    """Have cuDNN choose kernels that give the same every time."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def build_network(experiment: Experiment, channels: int, num_classes: int) -> nn.Module:
    """Build the network of an experiment.

    Raises:
        ValueError: not a network, or arguments that do not fit.
    """
    return build_part(
        experiment.network,
        nn.Module,
        "network",
        spatial_dims=experiment.data.axes,
        in_channels=channels,
        out_channels=num_classes,
    )


@torch.no_grad()
def check_network(
    network: nn.Module, data: Data, channels: int, num_classes: int, device: torch.device
) -> None:
    """Check with an image of zeros that logits come out as large as the image, in both modes.

    Raises:
        ValueError: they do not.
    """
    images = torch.zeros(1, channels, *data.size, device=device)
    expected = (1, num_classes, *data.size)
    for training in (False, True):
        trial = copy.deepcopy(network).train(training)  # batch norm keeps what it sees
        try:
            output = trial(images)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ValueError(
                f"network: fails on an image {tuple(images.shape)} ({error}); does data.size "
                "divide by its strides?"
            ) from None
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        if shape != expected:
            raise ValueError(
                f"network: expected logits {expected} for an image {tuple(images.shape)}, got "
                f"{shape}; switch deep supervision off, and choose a data.size that divides by "
                "the strides"
            )


def window_inferer(experiment: Experiment) -> Inferer:
    """How validation calls the network: on the crop that it trains on, or window by window."""
    if experiment.data.crop == "center":
        return SimpleInferer()
    return SlidingWindowInferer(
        experiment.data.size,
        experiment.training.val_batch_size,
        experiment.inference.overlap,
        experiment.inference.blend,
    )


def _try_first(samples: Any) -> None:
    """Cut a sample before training begins.

    Raises:
        ValueError: `data.augment` fails on it.
    """
    try:
        samples[0, 0]
    except (KeyError, RuntimeError, TypeError) as error:
        why = error.__cause__ or error
        raise ValueError(
            f"data.augment: fails on the first sample ({type(why).__name__}: {why}); its keys are "
            "image and label"
        ) from error


def _words(record: dict[str, Any]) -> str:
    """Terms of an epoch, and how long it took."""
    terms = "; ".join(
        f"{phase} {', '.join(f'{name} {value:.4g}' for name, value in record[phase].items())}"
        for phase in ("train", "val")
    )
    return f"{terms}; {record['seconds']:.1f} s"

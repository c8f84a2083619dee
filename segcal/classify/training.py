"""The training of an experiment of classification, in one process.

An epoch: training batches; a pass over the validation set, at whose end the multipliers are
updated; then the log, and the checkpoint with all that a resumed training needs to go on as if it
had not been stopped.
"""

from __future__ import annotations

import copy
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from segcal.classify.data import Augment, Part, Parted, load
from segcal.classify.evaluation import HIGHER_IS_BETTER, measure
from segcal.classify.experiment import Experiment
from segcal.classify.networks import Standardise, Standardised
from segcal.components import hands_on, target
from segcal.io.files import remove_leftovers, write_json
from segcal.io.yaml import validated
from segcal.losses.multilabel.posterior import MultiLabelLoss
from segcal.objective import Objective
from segcal.recipes import build, build_terms, load_objective, names
from segcal.reporting.picture import draw
from segcal.reporting.progress import FIGURE_NAME, plot_progress
from segcal.term import DualStep
from segcal.training.checkpoints import BEST_NAME, LAST_NAME, read_checkpoint, write_checkpoint
from segcal.training.epoch_log import EpochLog
from segcal.training.experiments import (
    build_optimizer,
    build_part,
    check_same,
    check_unused,
    choose_device,
    write_resolved,
)

RUN_NAME = "run.json"
LIBRARIES = ("segcal", "torch", "numpy", "scipy")
KEYS = ("experiment", "network", "objective", "data", "epoch")
"""What a checkpoint of a classifier has at least."""
MUST_BE_SAME: Mapping[str, Sequence[str]] = {
    "data": ("args",),  # their samples are compared
    "network": ("summary", "paper"),
    "recipe": (),
    "terms": (),
    "optimizer": (),
    "scheduler": (),
    "training": ("epochs", "early_stop", "device"),
}
"""Parts of an experiment that a resumed training may not change, but for these of their keys."""
BOUNDED = (nn.Tanh, nn.Sigmoid, nn.Softmax)
"""Modules whose outputs are no logits."""
WEIGHTS = "weights"
"""Argument by which networks of torchvision take what they were trained to."""
FIGURE_SECONDS = 20.0
"""The figure of a training is drawn anew no more often than this, and at the end."""
EVALUATED_AT_ONCE, VALUES_AT_ONCE = 1024, 2**23
"""Samples that are evaluated at a time, at most, and the values they have together."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Trained:
    """What came of a training.

    Attributes:
        folder: of the results.
        epochs: that have been trained, those before a resume included.
        best_epoch: number of the best one, from 0.
        metric: by which it is the best.
        best: its value in validation.
        early: whether patience ended it.
    """

    folder: Path
    epochs: int
    best_epoch: int
    metric: str
    best: float
    early: bool


class TrainingRun:
    """A training that has been checked and is ready to run.

    Example::

        trained = TrainingRun(load_experiment("digits")).run()

    Args:
        experiment: what to do.
        resume: go on from the last checkpoint; from the beginning where there is none yet.
        say: told what a user should read.

    Raises:
        ValueError: something does not fit.
    """

    def __init__(
        self, experiment: Experiment, *, resume: bool = False, say: Say = lambda text: None
    ) -> None:
        self.experiment, self.say, self.folder = experiment, say, experiment.folder
        settings = experiment.training
        self.device = choose_device(settings.device)
        last = self.folder / LAST_NAME
        if not resume:
            check_unused(self.folder)
        checkpoint = None
        if resume and last.exists():
            checkpoint = read_checkpoint(last, KEYS)
            before = validated(checkpoint["experiment"], Experiment, str(last))
            check_same(before, experiment, MUST_BE_SAME, last)
            if checkpoint["epoch"] > settings.epochs:
                raise ValueError(
                    f"{last}: has been trained for {checkpoint['epoch']} epochs, more than "
                    f"training.epochs {settings.epochs}; choose another output"
                )
        self.data = load(experiment.data)
        if checkpoint is not None:
            check_data(checkpoint, self.data, last)
        self.metric = settings.metric or ("map_class" if self.data.multilabel else "accuracy")
        if (self.metric in HIGHER_IS_BETTER) and (
            (self.metric == "accuracy") == self.data.multilabel
        ):
            raise ValueError(f"training.metric: there is no {self.metric} of this data")
        if self.data.multilabel and not (self.data.parts["validation"].targets == 1).any():
            raise ValueError(
                "data.split: no validation sample has a label, so no epoch is better than another; "
                "give another seed or a larger share"
            )
        self.parts = {name: part.to(self.device) for name, part in self.data.parts.items()}
        self.objective = build_objective(experiment, self.data).to(self.device)
        self.augment = Augment(experiment.data.augment)
        torch.manual_seed(settings.seed)
        network = build_network(experiment, self.data, pretrained=checkpoint is None)
        self.network = network.to(self.device)
        self._check_network()
        if experiment.network.args.get(WEIGHTS) is not None:
            self._check_rebuilt()
        self.optimizer, self.scheduler = build_optimizer(
            experiment.optimizer,
            experiment.scheduler,
            self.network,
            epochs=settings.epochs,
            metric=self.metric,
            higher=self.metric in HIGHER_IS_BETTER,
        )
        self.epoch, self.best_epoch, self.best = 0, -1, float("-inf")
        self._drawn = time.monotonic()
        if checkpoint is not None:
            self._restore(checkpoint)
        self._begin(resumed=checkpoint is not None)

    @torch.no_grad()
    def _check_network(self) -> None:
        """Raise ValueError unless logits come out, in both modes, that the loss can take."""
        few, targets = self.parts["train"].inputs[:2], self.parts["train"].targets[:2]
        expected = (len(few), len(self.data.names))
        bounded: list[tuple[str, Any]] = []
        grey = few.ndim == 4 and few.shape[1] == 1
        hint = "; for grey images in a network of colours set data.channels=3" if grey else ""
        try:
            augmented = self.augment(few)
        except Exception as error:  # noqa: BLE001 - whatever it says, it does not work
            raise ValueError(
                f"data.augment: fails on inputs {tuple(few.shape)} ({type(error).__name__}: "
                f"{error})"
            ) from None
        for training in (False, True):
            trial = copy.deepcopy(self.network).train(training)  # batch norm keeps what it sees
            for module in trial.modules():
                if isinstance(module, BOUNDED):
                    module.register_forward_hook(
                        lambda module, _, out: bounded.append((type(module).__name__, out))
                    )
            try:
                output = trial(augmented)
            except Exception as error:  # noqa: BLE001 - whatever it says, it does not work
                raise ValueError(
                    f"network: fails on inputs {tuple(few.shape)} ({type(error).__name__}: "
                    f"{error}){hint}"
                ) from None
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            if shape != expected:
                raise ValueError(
                    f"network: expected logits {expected} for inputs {tuple(few.shape)}, got "
                    f"{shape}; say how many classes there are in its arguments"
                )
            if ends := [name for name, out in bounded if out is output]:
                raise ValueError(
                    f"network: ends with {ends[0]}, by which its outputs have bounds that logits "
                    "have not; leave it out (of MONAI's ViT: post_activation: none)"
                )
        try:
            total, _ = self.objective.loss_and_terms(output.float(), targets)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"recipe: {self.experiment.recipe} is not for samples without pixels ({error})"
            ) from None
        if total.ndim:
            raise ValueError(
                f"recipe: {self.experiment.recipe} gives a loss for every entry; give its terms "
                "reduction: mean or sum"
            )

    def _check_rebuilt(self) -> None:
        """Raise ValueError if a checkpoint would not fit the network without its first weights."""
        without = build_network(self.experiment, self.data, pretrained=False)
        try:
            without.load_state_dict(self.network.state_dict())
        except RuntimeError as error:
            raise ValueError(
                "network: has other layers with its weights than without, so that no checkpoint "
                f"could be read; take another ({error})"
            ) from None

    def _begin(self, *, resumed: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)
        EpochLog(self.folder).forget_from(self.epoch)
        write_resolved(self.experiment, self.folder)
        write_json(
            self.folder / RUN_NAME,
            {
                "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "resumed_at_epoch": self.epoch if resumed else None,
                "seed": self.experiment.training.seed,
                "device": str(self.device),
                "versions": {
                    "python": platform.python_version(),
                    **{name: version(name) for name in LIBRARIES},
                },
                "samples": {name: len(part) for name, part in self.parts.items()},
                "train": _frequencies(self.data),
                "metric": self.metric,
            },
        )

    @property
    def epochs_left(self) -> int:
        """Epochs that are still to be trained, unless patience ends it before."""
        return max(0, self.experiment.training.epochs - self.epoch)

    def run(self, advance: Callable[[str], None] = lambda state: None) -> Trained:
        """Train.

        Args:
            advance: called after every epoch with how it went.

        Raises:
            FloatingPointError: the loss is no longer finite.
        """
        while self.epochs_left and not self._out_of_patience:
            advance(self._run_epoch())
        self._draw()
        return Trained(
            self.folder,
            self.epoch,
            self.best_epoch,
            self.metric,
            self.best if self.metric in HIGHER_IS_BETTER else -self.best,
            self._out_of_patience,
        )

    def _run_epoch(self) -> str:
        started = time.monotonic()
        seed = self.experiment.training.seed + 1000003 * (self.epoch + 1)
        torch.manual_seed(seed)
        train = self._train(seed)
        metrics, terms, steps = self._validate()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        value = metrics[self.metric]
        score = value if self.metric in HIGHER_IS_BETTER else -value
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(value)
        elif self.scheduler is not None:
            self.scheduler.step()
        record = {
            "epoch": self.epoch,
            "train": train,
            "val": terms,
            **metrics,
            "lr": rates[0],
            "seconds": round(time.monotonic() - started, 3),
            **{name: vars(step) for name, step in steps.items()},
        }
        best = self.best_epoch < 0 or score > self.best
        if best:
            self.best, self.best_epoch = score, self.epoch
        for name, step in steps.items():
            for note in step.notes:
                self.say(f"epoch {self.epoch}: {name}: {note}")
        self.epoch += 1
        EpochLog(self.folder).append(record)
        content = self._state_dict()
        if best:
            write_checkpoint(self.folder / BEST_NAME, content)
        write_checkpoint(self.folder / LAST_NAME, content)
        if time.monotonic() - self._drawn > FIGURE_SECONDS:
            self._draw()
        return f"{self.metric} {value:.4f}, ECE {metrics['ece']:.4f}"

    def _train(self, seed: int) -> dict[str, float]:
        settings = self.experiment.training
        self.network.train()
        self.objective.train()
        sums: dict[str, float] = {}
        count = 0
        for inputs, targets in self.parts["train"].shuffled(settings.batch_size, seed):
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=settings.precision == "bf16"
            ):
                logits = self.network(self.augment(inputs))
            total, values = self.objective.loss_and_terms(logits.float(), targets)
            if not torch.isfinite(total):
                raise FloatingPointError(
                    f"the loss is {total.item()} in epoch {self.epoch}; lower the learning rate or "
                    "the weight of the penalty"
                )
            total.backward()  # type: ignore[no-untyped-call]
            if settings.clip_grad is not None:
                nn.utils.clip_grad_norm_(self.network.parameters(), settings.clip_grad)
            self.optimizer.step()
            _add(sums, values, len(targets))
            count += len(targets)
        return {name: value / count for name, value in sums.items()}

    @torch.no_grad()
    def _validate(self) -> tuple[dict[str, float], dict[str, float], dict[str, DualStep]]:
        part = self.parts["validation"]
        logits = predict(self.network, part)
        if not torch.isfinite(logits).all():
            raise FloatingPointError(
                f"the logits of validation samples are not finite in epoch {self.epoch}; lower the "
                "learning rate"
            )
        self.objective.eval()
        self.objective.start_pass()
        terms: dict[str, float] = {}
        size = self.experiment.training.batch_size  # pairs of samples count: batches as in training
        for x, y in zip(torch.split(logits, size), torch.split(part.targets, size), strict=True):
            _add(terms, self.objective.loss_and_terms(x, y)[1], len(y) / len(part))
        self.objective.observe(logits, part.targets)
        steps = self.objective.dual_step()
        loss = label_loss(self.objective)
        outcomes = measure(logits.cpu(), part.targets.cpu(), self.data.names, loss)
        found = [outcome.metrics for outcome in outcomes.values()]
        metrics = dict(found[-1])  # of the posterior, where the loss has one
        if loss is not None and not loss.bijective:  # phi may make ties
            metrics |= {k: v for k, v in found[0].items() if k in HIGHER_IS_BETTER}
        return metrics, terms, steps

    def _draw(self) -> None:
        records = EpochLog(self.folder).records()
        if records:
            draw(plot_progress(records, self.data.names), "").save(self.folder / FIGURE_NAME)
        self._drawn = time.monotonic()

    @property
    def _out_of_patience(self) -> bool:
        patience = self.experiment.training.early_stop
        return patience is not None and self.epoch - 1 - self.best_epoch >= patience

    def _state_dict(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment.model_dump(mode="json"),
            "data": self.data.checksum,
            "epoch": self.epoch,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "network": self.network.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }

    def _restore(self, content: dict[str, Any]) -> None:
        self.epoch, self.best = content["epoch"], content["best"]
        self.best_epoch = content["best_epoch"]
        self.network.load_state_dict(content["network"])
        self.objective.load_state_dict(content["objective"])
        self.optimizer.load_state_dict(content["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(content["scheduler"])


def _add(sums: dict[str, float], values: Mapping[str, Tensor], weight: float) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + float(value) * weight


@torch.no_grad()
def predict(network: nn.Module, part: Part) -> Tensor:
    """Logits ``(N, K)`` float32 of all samples of a part, in eval mode."""
    network.eval()
    size = max(1, min(EVALUATED_AT_ONCE, VALUES_AT_ONCE // part.inputs[0].numel()))
    return torch.cat([network(b.inputs).float() for b in part.batches(size)])


def build_objective(experiment: Experiment, data: Parted) -> Objective:
    """Build the loss of an experiment.

    Raises:
        ValueError: a recipe of labels for classes or the other way round, unknown terms, or
            arguments that do not fit.
    """
    if not data.multilabel:
        if experiment.recipe in names("multilabel"):
            try:
                load_objective(experiment.recipe)
            except ValueError:
                raise ValueError(
                    f"recipe: {experiment.recipe} is of labels, and these are classes that exclude "
                    "each other; take one that segcal methods lists as a recipe"
                ) from None
        terms: dict[str, Any] = experiment.terms
        return build(experiment.recipe, len(data.names), **terms)
    recipe = experiment.recipe
    if recipe not in names("multilabel"):
        raise ValueError(
            f"recipe: {recipe} is of classes, and these are labels; there are "
            f"{', '.join(names('multilabel'))}"
        )
    if unknown := sorted(set(experiment.terms) - {recipe}):
        raise ValueError(f"terms: no term {', '.join(unknown)}; there is {recipe}")
    positives, negatives = data.counts()
    read = load_objective(recipe, multilabel=True)
    terms = build_terms(read, overrides=experiment.terms, positives=positives, negatives=negatives)
    return Objective(terms, read.weights)


def label_loss(objective: Objective) -> MultiLabelLoss | None:
    """The loss of labels in an objective; None where it is of classes."""
    found = [t for t in objective.terms.values() if isinstance(t, MultiLabelLoss)]
    return found[0] if found else None


def build_network(experiment: Experiment, data: Parted, *, pretrained: bool = True) -> Standardised:
    """Build the network of an experiment and what its inputs go through before.

    A network of torchvision whose ``weights`` are named gets a new last layer where they are of
    other classes.

    Args:
        experiment: see there.
        data: the samples.
        pretrained: False builds it without those weights, for a checkpoint to fill.

    Raises:
        ValueError: not a network, arguments that do not fit, or weights that are not to be had.
    """
    inputs, count = data.parts["train"].inputs, len(data.names)
    component, arguments = experiment.network, dict(experiment.network.args)
    handed_on = hands_on(target(component))
    from_weights = handed_on and arguments.get(WEIGHTS) is not None
    if from_weights:  # they have a number of classes of their own, to begin with
        arguments.pop("num_classes", None)
    if from_weights and not pretrained:
        arguments[WEIGHTS] = None
    if handed_on and arguments.get(WEIGHTS) is None:
        arguments.setdefault("num_classes", count)
    component = component.model_copy(update={"args": arguments})
    network = build_part(
        component,
        nn.Module,
        "network",
        num_classes=count,
        in_features=inputs[0].numel(),
        num_words=data.num_words,
        in_channels=inputs.shape[1],
        out_channels=count,
        spatial_dims=2 if inputs.ndim == 4 else 1,
    )
    if from_weights and pretrained:
        _renew_last_layer(network, count)
    return Standardised(Standardise(inputs), network)


def _renew_last_layer(network: nn.Module, count: int) -> None:
    """Give the last layer of a classifier `count` outputs, if it has others."""
    layers = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    name, last = layers[-1]
    if isinstance(last, nn.Linear) and last.out_features != count:
        network.set_submodule(name, nn.Linear(last.in_features, count))
    elif isinstance(last, nn.Conv2d) and last.out_channels != count:  # SqueezeNet's, 1 x 1
        network.set_submodule(name, nn.Conv2d(last.in_channels, count, 1))


def _frequencies(data: Parted) -> dict[str, int]:
    """Training samples of every class or label."""
    targets = data.parts["train"].targets
    counts = data.counts()[0] if data.multilabel else torch.bincount(
        targets, minlength=len(data.names))  # fmt: skip
    return dict(zip(data.names, counts.tolist(), strict=True))


def check_data(content: Mapping[str, Any], data: Parted, path: Path) -> None:
    """Raise ValueError unless a checkpoint's samples and their parts are those of the data.

    With others, what was trained on could be tested on.
    """
    if content["data"] != data.checksum:
        raise ValueError(
            f"{path}: was trained when its data set had other samples, targets or parts; bring "
            "back the files it was trained on, or train anew"
        )

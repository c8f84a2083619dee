"""Building the loss and the network of an experiment, and trying them on a few samples."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from segcal.classify.augmenting import Augment
from segcal.classify.data import Part, Parted
from segcal.classify.experiment import ClassificationExperiment, Standard
from segcal.classify.networks import Standardise, Standardised
from segcal.components import Component, accepted_arguments, hands_on, target
from segcal.losses.multilabel.classes import OfClasses
from segcal.losses.multilabel.posterior import MultiLabelLoss
from segcal.objective import Objective
from segcal.recipes import Recipe, build, build_terms, load_objective, names
from segcal.term import Term
from segcal.training.building import build_part

BOUNDED = (nn.Tanh, nn.Sigmoid, nn.Softmax)
"""Modules whose outputs cannot be logits."""
NO_WEIGHTS = {"weights": None, "pretrained": False}
"""Arguments of torchvision's and timm's networks for pretrained weights, with the values that give
random weights."""


def recipe_of(experiment: ClassificationExperiment, data: Parted) -> Recipe:
    """The loss that an experiment names: for labels, for classes, or a multi-label one for classes.

    Classes exclude each other; of labels a sample may have several.

    Raises:
        ValueError: a multi-label loss does not fit classes, or the other way round.
    """
    name = experiment.recipe
    if data.multilabel:
        if name not in names("multilabel"):
            raise ValueError(
                f"recipe: {name} is a loss of classes, but samples have labels here; take one of "
                f"{', '.join(names('multilabel'))}"
            )
        return load_objective(name, multilabel=True)
    try:
        return load_objective(name)  # focal is a loss of classes, too
    except ValueError:
        if name not in names("multilabel"):
            raise
        return load_objective(name, multilabel=True)


def build_objective(experiment: ClassificationExperiment, data: Parted) -> Objective:
    """Build the loss of an experiment.

    Raises:
        ValueError: a multi-label loss for classes or the other way round, unknown terms, or
            arguments that do not fit.
    """
    read = recipe_of(experiment, data)
    if not read.multilabel:
        terms: dict[str, Any] = experiment.terms
        objective = build(experiment.recipe, len(data.names), **terms)
        if objective.num_heads > 1:
            raise ValueError(
                f"recipe: {experiment.recipe} needs a network with two heads, one for a mask and "
                "one for probabilities, which exists for segmentation only; take a recipe with one"
            )
        return objective
    recipe = experiment.recipe
    if unknown := sorted(set(experiment.terms) - {recipe}):
        raise ValueError(f"terms: no term {', '.join(unknown)}; expected {recipe}")
    positives, negatives = data.counts()
    built = build_terms(read, overrides=experiment.terms, positives=positives, negatives=negatives)
    if not data.multilabel:
        built = {name: _of_classes(recipe, term) for name, term in built.items()}
    return Objective(built, read.weights)


def _of_classes(recipe: str, term: Term) -> OfClasses:
    """A multi-label loss applied to classes; ValueError unless it compares scores."""
    if not isinstance(term, MultiLabelLoss) or not term.no_posterior:
        raise ValueError(
            f"recipe: {recipe} is a multi-label loss, but classes exclude each other here; it "
            "gives every label its own probability, and these would not add up to 1. Take a loss "
            "of classes that segcal methods lists, or a multi-label loss that compares scores, "
            "such as two_way"
        )
    return OfClasses(term)


def build_network(
    experiment: ClassificationExperiment, data: Parted, *, pretrained: bool = True
) -> Standardised:
    """Build the network of an experiment, together with the standardisation of its inputs.

    A torchvision network with named ``weights`` gets a new last layer if the weights have other
    classes; timm's networks make a new layer themselves.

    Args:
        experiment: names the network.
        data: the samples.
        pretrained: False builds it without pretrained weights, for a checkpoint to fill.

    Raises:
        ValueError: not a network, arguments that do not fit, or weights that are unavailable.
    """
    inputs, count = data.parts["train"].inputs, len(data.names)
    shape, standard = data.parts["train"].shape, experiment.data.standardise
    what = target(experiment.network)
    if data.vectors is not None and "vectors" not in accepted_arguments(what):
        raise ValueError(
            f"data.args.vectors: {experiment.network.target} cannot start from word vectors; "
            "segcal.classify.networks.GPoolCNN can"
        )
    renewed = has_weights(experiment) and bool(experiment.network.args.get("weights"))
    component = _with_numbers(experiment, count, shape, pretrained=pretrained)
    network = build_part(
        component,
        nn.Module,
        "network",
        num_classes=count,
        in_features=math.prod(shape),
        num_words=data.num_words,
        vectors=data.vectors,
        in_channels=shape[0],
        out_channels=count,
        spatial_dims=2 if len(shape) == 3 else 1,
    )
    if renewed and pretrained:
        _renew_last_layer(network, count)
    if not isinstance(inputs, Tensor):  # too many to be looked at before
        inputs, standard = inputs[:1], standard or Standard()
    given = None if standard is None else (standard.mean, standard.std)
    return Standardised(Standardise(inputs, given), network)


def has_weights(experiment: ClassificationExperiment) -> bool:
    """Whether the network starts from pretrained weights."""
    arguments = experiment.network.args
    named = any(arguments.get(name, none) not in (none, None) for name, none in NO_WEIGHTS.items())
    return named and hands_on(target(experiment.network))


def _with_numbers(
    experiment: ClassificationExperiment, count: int, shape: Sequence[int], *, pretrained: bool
) -> Component:
    """The network with arguments that its function passes on without naming them."""
    component, arguments = experiment.network, dict(experiment.network.args)
    if not hands_on(target(component)):
        return component
    if component.target.startswith("timm."):
        arguments.setdefault("in_chans", shape[0])
    if arguments.get("weights") is not None:
        arguments.pop("num_classes", None)  # of their own, to begin with
    if not pretrained:
        arguments |= {name: none for name, none in NO_WEIGHTS.items() if name in arguments}
    if arguments.get("weights") is None:
        arguments.setdefault("num_classes", count)
    return component.model_copy(update={"args": arguments})


def last_layer(network: nn.Module) -> tuple[str, nn.Linear | nn.Conv2d]:
    """Name and module of the last layer, which gives the logits.

    Raises:
        ValueError: the network has no linear layer and no convolution.
    """
    layers = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    if not layers:
        raise ValueError("network: has no linear layer and no convolution as last layer")
    return layers[-1]


def parameter_groups(network: nn.Module, rate: float, count: int) -> list[dict[str, Any]]:
    """Parameters of a network in two groups, with a separate learning rate for the last layer.

    Args:
        network: the network.
        rate: of the last layer.
        count: K.

    Raises:
        ValueError: the last layer does not have K outputs, so it is not the layer of the classes.
    """
    name, last = last_layer(network)
    if len(last.weight) != count:
        raise ValueError(
            f"training.head_lr: the last layer of the network, {name}, has {len(last.weight)} "
            f"outputs for {count} classes; give all layers one rate"
        )
    head = list(last.parameters())
    below = [p for p in network.parameters() if all(p is not one for one in head)]
    return [{"params": below}, {"params": head, "lr": rate}]


def _renew_last_layer(network: nn.Module, count: int) -> None:
    """Give the last layer of a classifier `count` outputs, if it has others."""
    name, last = last_layer(network)
    if isinstance(last, nn.Linear) and last.out_features != count:
        network.set_submodule(name, nn.Linear(last.in_features, count))
    elif isinstance(last, nn.Conv2d) and last.out_channels != count:  # SqueezeNet's, 1 x 1
        network.set_submodule(name, nn.Conv2d(last.in_channels, count, 1))


@torch.no_grad()
def check_network(network: nn.Module, part: Part, augment: Augment, num_classes: int) -> Tensor:
    """Check that a network gives logits, in training and evaluation mode.

    Args:
        network: to try.
        part: samples, of which the first two are taken.
        augment: transforms that are applied to them.
        num_classes: K.

    Returns:
        the logits ``(2, K)`` in eval mode.

    Raises:
        ValueError: the network fails, or its outputs are no logits.
    """
    few = part.some_trained_on()
    try:
        inputs = augment(few)
    except Exception as error:  # noqa: BLE001 - whatever it says, it does not work
        raise ValueError(
            f"data.augment: fails on inputs {tuple(few.shape)} ({type(error).__name__}: {error})"
        ) from None
    # those from disk may be of another size where they are evaluated
    evaluated = inputs if isinstance(part.inputs, Tensor) else part.inputs[:2]
    for training, seen in ((True, inputs), (False, evaluated)):
        trial = copy.deepcopy(network).train(training)  # batch norm keeps what it sees
        output = _try(trial, seen, num_classes)
    return output


def _try(trial: nn.Module, inputs: Tensor, num_classes: int) -> Tensor:
    """Logits of a copy of a network; ValueError if its outputs are no logits."""
    expected, shown = (len(inputs), num_classes), f"inputs {tuple(inputs.shape)}"
    bounded: list[tuple[str, Any]] = []
    for module in trial.modules():
        if isinstance(module, BOUNDED):
            module.register_forward_hook(
                lambda module, _, out: bounded.append((type(module).__name__, out))
            )
    try:
        output = trial(inputs)
    except Exception as error:  # noqa: BLE001 - whatever it says, it does not work
        grey = inputs.ndim == 4 and inputs.shape[1] == 1
        hint = "; for grey images in a network of colours set data.channels=3" if grey else ""
        raise ValueError(
            f"network: fails on {shown} ({type(error).__name__}: {error}){hint}"
        ) from None
    shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if shape != expected:
        raise ValueError(
            f"network: expected logits {expected} for {shown}, got {shape}; give the number of "
            "classes in its arguments"
        )
    if ends := [name for name, out in bounded if out is output]:
        raise ValueError(
            f"network: ends with {ends[0]}, which bounds its outputs, but logits have no bounds; "
            "leave it out (for MONAI's ViT: post_activation: none)"
        )
    return output


def check_objective(recipe: str, objective: Objective, logits: Tensor, targets: Tensor) -> None:
    """Check that a loss takes logits and targets of samples.

    Args:
        recipe: name of the loss.
        objective: the loss.
        logits: ``(N, K)``.
        targets: classes ``(N,)`` or labels ``(N, T)``.

    Raises:
        ValueError: the loss needs pixels, or gives a value for every entry.
    """
    try:
        total, _ = objective.loss_and_terms(logits.float(), targets)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"recipe: {recipe} does not work for samples without pixels ({error})"
        ) from None
    if total.ndim:
        raise ValueError(
            f"recipe: {recipe} gives a loss for every entry; give its terms reduction: mean or sum"
        )


def check_rebuilt(
    experiment: ClassificationExperiment, data: Parted, network: Standardised
) -> None:
    """Check that a checkpoint will fit the network when it is built without pretrained weights.

    Raises:
        ValueError: it would not fit.
    """
    if not has_weights(experiment):
        return
    without = build_network(experiment, data, pretrained=False)
    try:
        without.load_state_dict(network.state_dict())
    except RuntimeError as error:
        raise ValueError(
            "network: has other layers with pretrained weights than without, so that no "
            f"checkpoint could be read; take another network ({error})"
        ) from None

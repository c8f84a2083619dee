"""Builds the parts that an experiment names: networks, transforms, optimisers, schedules."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter, signature
from typing import Any, TypeVar, get_type_hints

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, ReduceLROnPlateau

from segcal.components import Component, build_component, target

__all__ = ["build_optimizer", "build_part"]

Part = TypeVar("Part")


def build_part(component: Component, kind: type[Part], name: str, **runtime: Any) -> Part:
    """Build what `component` names: a class, or a function that is annotated to return one.

    Args:
        component: target and arguments.
        kind: class that the result must have.
        name: name of the part in messages.
        runtime: as for :func:`segcal.components.build_component`.

    Raises:
        ValueError: the result would not be of this class, or the arguments do not fit.
    """
    what = target(component)
    made = what if isinstance(what, type) else _annotated(what)
    if not (isinstance(made, type) and issubclass(made, kind)):
        raise ValueError(
            f"{name}: {component.target} is not a {kind.__module__}.{kind.__qualname__}"
        )
    try:
        part: Part = build_component(component, **runtime)
    except (ValueError, OSError) as error:
        raise ValueError(f"{name}: {error}") from None
    return part


def build_optimizer(
    optimizer: Component,
    scheduler: Component | None,
    network: nn.Module,
    *,
    epochs: int,
    metric: str,
    higher: bool,
    groups: Sequence[dict[str, Any]] | None = None,
) -> tuple[Optimizer, LRScheduler | None]:
    """Build the optimiser of a network, and the schedule of its learning rate, one step per epoch.

    Args:
        optimizer: a class of torch.optim.
        scheduler: a class of torch.optim.lr_scheduler, or None.
        network: network whose parameters are updated.
        epochs: number of epochs of the training, for which the schedule must last.
        metric: name of the metric that a ReduceLROnPlateau gets, for messages.
        higher: whether a higher value of the metric is better.
        groups: groups of parameters with settings of their own; None treats all alike.

    Raises:
        ValueError: a class does not exist or its arguments do not fit, the optimiser computes the
            loss itself, ReduceLROnPlateau has the wrong direction, or the schedule ends before the
            training.
    """
    parameters = list(groups or network.parameters())
    built = build_part(optimizer, Optimizer, "optimizer", params=parameters)
    if signature(built.step).parameters["closure"].default is Parameter.empty:
        raise ValueError(
            f"optimizer: {optimizer.target} computes the loss again within a step, which is not "
            "supported here; use another, e.g. torch.optim.AdamW"
        )
    parameter = nn.Parameter(torch.zeros_like(next(network.parameters()).detach().flatten()[:1]))
    parameter.grad = torch.ones_like(parameter)
    trial = build_part(optimizer, Optimizer, "optimizer", params=[parameter])
    try:
        trial.step()
    except Exception as error:  # noqa: BLE001 - whatever it says, it does not work
        raise ValueError(
            f"optimizer: {optimizer.target} fails ({type(error).__name__}: {error})"
        ) from None
    if scheduler is None:
        return built, None
    schedule = build_part(scheduler, LRScheduler, "scheduler", optimizer=built)
    if isinstance(schedule, ReduceLROnPlateau):
        _check_direction(schedule, metric, higher)
    else:
        _rehearse(scheduler, schedule, trial, epochs)
    return built, schedule


def _check_direction(schedule: ReduceLROnPlateau, metric: str, higher: bool) -> None:
    """Raise ValueError unless a ReduceLROnPlateau has the direction of its metric."""
    mode = "max" if higher else "min"
    if schedule.mode != mode:
        raise ValueError(
            f"scheduler: ReduceLROnPlateau is shown the validation {metric}, of which "
            f"{'more' if higher else 'less'} is better; give it mode: {mode}"
        )


def _rehearse(scheduler: Component, schedule: LRScheduler, trial: Optimizer, epochs: int) -> None:
    """Raise ValueError unless a schedule lasts as long as the training, and falls to its end.

    Args:
        scheduler: component that the schedule was built from.
        schedule: schedule of the network's optimiser.
        trial: a separate optimiser, on which the schedule is tried.
        epochs: number of epochs of the training.
    """
    if isinstance(schedule, CosineAnnealingLR) and schedule.T_max < epochs:
        raise ValueError(
            f"scheduler: with T_max {schedule.T_max} the learning rate would climb again before "
            f"the end of {epochs} epochs; give it T_max: {epochs} (a training that was begun with "
            "another T_max cannot be made longer)"
        )
    rehearsal = build_part(scheduler, LRScheduler, "scheduler", optimizer=trial)
    try:
        for _ in range(epochs):
            trial.step()
            rehearsal.step()
    except Exception as error:  # noqa: BLE001 - whatever it says, it does not work
        raise ValueError(
            f"scheduler: {scheduler.target}, one step per epoch, does not last {epochs} epochs "
            f"({type(error).__name__}: {error})"
        ) from None


def _annotated(what: Any) -> Any:
    """Annotated return type of a function, which is not called, since calling may have effects."""
    try:
        return get_type_hints(what).get("return")
    except (TypeError, NameError, AttributeError):
        return None

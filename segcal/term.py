"""Common interface of losses and penalties (terms): three methods, and what a term needs."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from inspect import get_annotations
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Self

from segcal.sweep.terms import Swept
from segcal.tensors import double_needed

__all__ = [
    "Capabilities",
    "DualStep",
    "LearnedTerm",
    "OtherTerm",
    "Term",
    "TwoViewTerm",
    "View",
    "sum_over_ranks",
]

Reduce = Callable[[Tensor], Tensor]
"""Takes a tensor of one rank's sums and returns the sum over all ranks (``all_reduce(SUM)``)."""

STATE_VERSION = 2
SLACK = 1e-6
"""Share of a range's ends by which a state may lie outside, because it may have been float32."""


FINITE = (-1e300, 1e300)
"""Range of the numbers of a state that have no range of their own."""


def sum_over_ranks(x: Tensor) -> Tensor:
    """Sum of `x` over the ranks of the default process group; `x` itself without a group."""
    if not (dist.is_available() and dist.is_initialized()):
        return x
    on_gpu = "nccl" in dist.get_backend() and not x.is_cuda  # which sums nothing else
    total = x.to(_device_of_rank()) if on_gpu else x.clone()
    dist.all_reduce(total)
    return total.to(x.device)


def _device_of_rank() -> torch.device:
    """The GPU of this process: of its group, chosen by it, or by its number on the machine.

    Two processes that sum on the same GPU would wait for each other for ever.
    """
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None:
        return torch.device(bound)
    index = torch.cuda.current_device()
    if index == 0:  # as it is where none has been chosen
        index = dist.get_node_local_rank(fallback_rank=0) % torch.cuda.device_count()
    return torch.device("cuda", index)


@dataclass(frozen=True)
class DualStep:
    """Result of one update of the multipliers (learned weights), as nested lists ready for JSON.

    Attributes:
        step: number of updates so far, including this one.
        lam: multipliers after the update, ``[region][class]``.
        rho: penalty parameters after the update, ``[region][class]``.
        constraint: constraint in the validation pass, ``[region][class]``: the region's sum divided
            by all valid voxels, or by its own (``average="region"``).
        count: number of voxels seen per region.
        notes: sentences that a user should read (an empty region, a multiplier at its bound).
        quantity: name of `constraint` for logs and figures.
    """

    step: int
    lam: list[list[float]]
    rho: list[list[float]]
    constraint: list[list[float]]
    count: list[int]
    notes: list[str] = field(default_factory=list)
    quantity: str = "constraint"


class Capabilities(Protocol):
    """What a term declares to the framework that trains with it, its host.

    Hosts ask through this protocol, so that mypy knows every name; a torch module accepts any name.

    Attributes:
        needs_image: whether ``forward`` takes the image ``(N, C, *S)`` after the labels.
        two_views: whether ``forward`` compares two views of a batch, as in :class:`TwoViewTerm`.
        include_background: whether class 0 takes part in sums over classes.
        per_channel: whether labels are ``(N, K, *S)`` of 0 and 1 that may overlap, with a sigmoid
            per channel.
        ignore_index: label of voxels that are left out, or None.
    """

    needs_image: bool
    two_views: bool
    include_background: bool
    per_channel: bool
    ignore_index: int | None

    def swept(self) -> Swept | None:
        """Describe the term to :mod:`segcal.sweep`; None where that cannot compute it."""


CAPABILITIES = ("swept", *get_annotations(Capabilities))
"""Names that a term declares."""


class Term(nn.Module):
    """A loss or a penalty, with three methods and declarations for its host.

    ``forward(logits, labels)`` returns a scalar; ``observe(logits, labels)`` is called on every
    validation batch, and ``dual_step()`` once after the last batch. A term that learns nothing
    inherits methods that do nothing.

    Its declarations are class attributes, or attributes that its constructor sets, with the names
    and meanings of :class:`Capabilities`.

    Raises:
        TypeError: a subclass declares a name that is nearly the name of a capability.
    """

    needs_image: bool = False
    two_views: bool = False
    include_background: bool = True
    per_channel: bool = False
    ignore_index: int | None = None

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in vars(cls):
            meant = get_close_matches(name, CAPABILITIES, 1, cutoff=0.85)
            if meant and name not in CAPABILITIES:
                raise TypeError(f"{cls.__name__}: declares {name}; is {meant[0]} meant?")

    def swept(self) -> Swept | None:
        """Describe the term to :mod:`segcal.sweep`; None where that cannot compute it."""
        return None

    def observe(self, logits: Tensor, labels: Tensor) -> None:
        """Take in one validation batch; a term that learns nothing does nothing."""

    def dual_step(self, reduce: Reduce | None = None) -> DualStep | None:
        """Update what is learned from validation; None when nothing is learned."""
        return None

    def start_pass(self) -> None:
        """Forget what was observed since the last update, such as a pass that was interrupted."""


class OtherTerm(Term):
    """A module of another library as a term, which is called with ``(logits, labels)``.

    Args:
        module: returns a scalar; it learns nothing from validation.

    Raises:
        ValueError: a module that declares further needs, which only a :class:`Term` can do.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if wants := [n for n in ("needs_image", "two_views", "swept") if hasattr(module, n)]:
            raise ValueError(
                f"{type(module).__name__}: has {', '.join(wants)}; make it a segcal.term.Term"
            )
        self.module = module

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return what the module does."""
        value: Tensor = self.module(logits, labels)
        return value


class View(Protocol):
    """A random transform of a batch, and its inverse for logits."""

    def image(self, images: Tensor) -> Tensor:
        """Return images ``(N, C, *S)`` as this view sees them."""

    def labels(self, labels: Tensor) -> Tensor:
        """Return labels ``(N, *S)`` as this view sees them."""

    def back(self, logits: Tensor) -> Tensor:
        """Return logits ``(N, K, *S)`` of the view in the original frame."""

    def inside(self, logits: Tensor) -> Tensor:
        """Return which voxels ``(N, *S)`` of the original frame the view saw."""


class TwoViewTerm(Term):
    """A term that compares the logits of two views of a batch, for which the model is called twice.

    ``forward(first, second, labels, inside)`` takes the logits of both views in the original frame,
    and the voxels that both views saw.

    Attributes:
        alpha: the term's own factor on the comparison.
    """

    two_views = True
    alpha: float

    @abstractmethod
    def draw(self, images: Tensor) -> tuple[View, View]:
        """Return two random views of images ``(N, C, *S)``."""


class LearnedTerm(Term):
    """A term whose weights are learned, and whose saved state names the term it belongs to.

    The state of another method or of other settings, as named by :meth:`identity`, is refused.
    """

    def identity(self) -> dict[str, Any]:
        """Settings that a state must have in common with this penalty to be loaded."""
        return {"method": type(self).__name__}

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest value that a state may hold, by the name of the buffer."""
        return {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the state with the module, but keep its types, as half precision cannot sum it.

        Raises:
            ValueError: a device that has no float64.
        """

        def keep_type(x: Tensor) -> Tensor:
            moved = fn(x)
            return moved if moved.dtype == x.dtype else x.to(moved.device)

        with double_needed(type(self).__name__):
            super()._apply(keep_type, recurse)  # type: ignore[no-untyped-call]
        return self

    def get_extra_state(self) -> Tensor:
        """Version of the format and :meth:`identity` for ``state_dict``: JSON, as bytes."""
        text = json.dumps({"version": STATE_VERSION, **self.identity()})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Do nothing, as the state has been compared before it was loaded."""

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Compare version and identity, then load.

        Raises:
            ValueError: with all that differs; nothing of this penalty has been loaded.
        """
        key = f"{prefix}_extra_state"
        if key in state_dict:
            self._check_identity(state_dict[key])
        elif f"{prefix}lam" in state_dict:
            raise ValueError(
                f"{prefix}lam: the state of an older segcal, which does not name its penalty; "
                "start the multipliers anew"
            )
        self._check_values(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _check_values(self, state_dict: dict[str, Any], prefix: str) -> None:
        ranges = self.ranges()
        for name in self.state_dict():
            value = state_dict.get(f"{prefix}{name}")
            if not isinstance(value, Tensor) or name == "_extra_state":
                continue
            low, high = ranges.get(name, FINITE)
            above = value.double() >= low - SLACK * abs(low)
            wrong = value[~(above & (value.double() <= high + SLACK * abs(high)))]
            if wrong.numel():
                wanted = f"numbers from {low:g} to {high:g}" if name in ranges else "finite numbers"
                raise ValueError(
                    f"{prefix}{name}: expected {wanted}, got "
                    f"{float(wrong.flatten()[0]):g} in the state to be loaded; build the "
                    f"{type(self).__name__} with the settings that the state was saved with, or "
                    "start anew"
                )

    def _check_identity(self, state: Any) -> None:
        try:
            saved, here = (json.loads(bytes(s.tolist())) for s in (state, self.get_extra_state()))
        except (AttributeError, TypeError, ValueError, RecursionError):
            saved = None
        if not isinstance(saved, dict):
            raise ValueError(
                f"_extra_state: expected what segcal saves of a {type(self).__name__}, JSON as "
                f"bytes in a tensor, got {type(state).__name__}; is it the state of something else?"
            )
        if saved.get("version") != here["version"]:
            raise ValueError(
                f"not a state of this version: {saved.get('version')!r}, here {here['version']}. "
                "It is the state of an older segcal; start the multipliers of "
                f"{type(self).__name__} anew"
            )
        differences = [
            f"{name} {saved.get(name)!r}, here {here.get(name)!r}"
            for name in sorted({*saved, *here})
            if saved.get(name) != here.get(name)
        ]
        if differences:
            raise ValueError(
                f"not a state of this {type(self).__name__}: {'; '.join(differences)}. Build the "
                "penalty with the settings that the state was saved with, or start anew"
            )

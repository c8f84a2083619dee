"""Configurations of nnU-Net's plans that a CPU trains in minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def small_configuration(
    plans: Mapping[str, Any],
    base: str,
    *,
    patch: Sequence[int] | None = None,
    batch: int | None = None,
    features: Sequence[int] | None = None,
) -> dict[str, Any]:
    """A smaller configuration that inherits everything else, with preprocessing, from another.

    Args:
        plans: content of ``nnUNetPlans.json``.
        base: name of the configuration to inherit from.
        patch: size of the patches; None keeps it.
        batch: number of patches in a batch; None keeps it.
        features: number of features for every stage of the network; None keeps them.

    Raises:
        ValueError: the plans have no such configuration.
    """
    if base not in plans["configurations"]:
        raise ValueError(
            f"configuration: expected one of {', '.join(plans['configurations'])}, got {base!r}"
        )
    found: dict[str, Any] = {"inherits_from": base}
    if patch is not None:
        found["patch_size"] = list(patch)
    if batch is not None:
        found["batch_size"] = batch
    if features is not None:
        architecture = plans["configurations"][base]["architecture"]
        kwargs, stages = dict(architecture["arch_kwargs"]), len(features)
        kwargs.update(n_stages=stages, features_per_stage=list(features))
        for key in ("kernel_sizes", "strides", "n_conv_per_stage"):
            kwargs[key] = kwargs[key][:stages]
        kwargs["n_conv_per_stage_decoder"] = kwargs["n_conv_per_stage_decoder"][: stages - 1]
        found["architecture"] = {**architecture, "arch_kwargs": kwargs}
    return found

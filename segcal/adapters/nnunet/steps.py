"""The network and losses of nnU-Net's default trainer without data, for timing training steps."""

from __future__ import annotations

import torch
from nnunetv2.training.loss.compound_losses import DC_and_CE_loss
from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss
from nnunetv2.utilities.get_network_from_plans import get_network_from_plans
from torch import nn

from segcal.adapters.nnunet.building import build_loss
from segcal.adapters.nnunet.labels import Labels
from segcal.adapters.nnunet.loss import PenalisedLoss
from segcal.adapters.nnunet.settings import parts
from segcal.recipes import load_recipe

STOCK = "stock"


def network(channels: int, num_classes: int, stages: int) -> nn.Module:
    """nnU-Net's default network for volumes, in its default widths, without deep supervision."""
    found: nn.Module = get_network_from_plans(
        "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        {
            "n_stages": stages,
            "features_per_stage": [min(32 * 2**i, 320) for i in range(stages)],
            "conv_op": "torch.nn.Conv3d",
            "kernel_sizes": 3,
            "strides": [1] + [2] * (stages - 1),
            "n_conv_per_stage": 2,
            "n_conv_per_stage_decoder": 2,
            "conv_bias": True,
            "norm_op": "torch.nn.InstanceNorm3d",
            "norm_op_kwargs": {"eps": 1e-5, "affine": True},
            "nonlin": "torch.nn.LeakyReLU",
        },
        ["conv_op", "norm_op", "nonlin"],
        channels,
        num_classes,
        deep_supervision=False,
    )
    return found


def losses(
    num_classes: int, recipes: tuple[str, ...], device: torch.device
) -> dict[str, nn.Module]:
    """nnU-Net's Dice + cross-entropy under :data:`STOCK`, and with recipes put into it.

    Args:
        num_classes: K.
        recipes: names.
        device: to compute on.
    """
    found: dict[str, nn.Module] = {STOCK: _host()}
    labels = Labels(num_classes, per_channel=False, ignore_index=None, channels=1)
    for name in recipes:
        recipe = load_recipe(name)
        loss: PenalisedLoss = build_loss(_host(), labels, recipe, parts(recipe), {}, dice=True)
        found[name] = loss.to(device)
    return found


def _host() -> nn.Module:
    options = {"batch_dice": False, "smooth": 1e-5, "do_bg": False, "ddp": False}
    return DC_and_CE_loss(options, {}, dice_class=MemoryEfficientSoftDiceLoss)

"""CRaC in a LightningModule; needs `pip install lightning` and half a minute on a CPU.

python scripts/examples/lightning_module.py --epochs 8
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import lightning
import numpy as np
import torch
from plain_pytorch import CLASSES, network, slices
from torch import Tensor
from torch.utils.data import DataLoader

from segcal.metrics.ece import ece
from segcal.recipes import build
from segcal.term import sum_over_ranks


class Calibrated(lightning.LightningModule):
    """A network with an objective that learns its multipliers, which checkpoints save too."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.net = network()
        self.objective = build(recipe, num_classes=CLASSES)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), lr=3e-3)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return self.objective(self.net(images), labels)

    def on_validation_epoch_start(self) -> None:
        self.objective.start_pass()  # forget Lightning's sanity check

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        logits = self.net(images)
        self.objective.observe(logits, labels)
        self.log("ece", ece(logits.softmax(1).transpose(0, 1), labels), prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return
        for name, step in self.objective.dual_step(sum_over_ranks).items():
            self.log(f"{name}_lambda_mean", float(np.mean(step.lam)), prog_bar=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--recipe", default="crac", help="see: segcal methods")
    options = parser.parse_args()

    lightning.seed_everything(0)
    rng = np.random.default_rng(0)
    model = Calibrated(options.recipe)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"accelerator": "cpu", "logger": False}
        trainer = lightning.Trainer(max_epochs=options.epochs, default_root_dir=folder, **settings)
        trainer.fit(
            model,
            DataLoader(slices(12, rng), batch_size=8, shuffle=True),
            DataLoader(slices(4, rng), batch_size=8),
        )
    print({name: round(float(v), 4) for name, v in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()

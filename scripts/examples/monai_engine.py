"""CRaC in MONAI's engines with one loss and one handler; half a minute on a CPU.

python scripts/examples/monai_engine.py --epochs 8
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np
import torch
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.handlers import CheckpointSaver, StatsHandler, ValidationHandler
from monai.networks.nets import BasicUNet
from monai.transforms import Activationsd, AsDiscreted, Compose, CopyItemsd
from monai.utils import set_determinism

from segcal.adapters.monai.handlers import DualStepHandler, MetricHandler
from segcal.adapters.monai.losses import SegcalLoss
from segcal.adapters.monai.metrics import DSCMetric, ECEMetric
from segcal.datasets.phantom import make_phantom

CLASSES = 4


def slices(volumes: int, rng: np.random.Generator) -> Dataset:
    """Slices of generated hearts as MONAI has them: image and label ``(1, y, x)``."""
    found = []
    for _ in range(volumes):
        phantom = make_phantom(rng)
        image = (phantom.image - phantom.image.mean()) / phantom.image.std()
        for x, y in zip(image, phantom.labels.astype(np.float32), strict=True):
            found.append({"image": torch.from_numpy(x)[None], "label": torch.from_numpy(y)[None]})
    return Dataset(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--recipe", default="crac", help="see: segcal methods")
    options = parser.parse_args()

    set_determinism(seed=0)
    rng = np.random.default_rng(0)
    device = torch.device("cpu")
    net = BasicUNet(spatial_dims=2, out_channels=CLASSES, features=(8, 8, 16, 16, 32, 8))
    loss = SegcalLoss(options.recipe, num_classes=CLASSES, to_onehot_y=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    dsc = DSCMetric(num_classes=CLASSES)

    evaluator = SupervisedEvaluator(
        device=device,
        val_data_loader=DataLoader(slices(4, rng), batch_size=8),
        network=net,
        postprocessing=Compose(
            [
                Activationsd("pred", softmax=True),
                CopyItemsd("pred", names="mask"),
                AsDiscreted("mask", argmax=True),
            ]
        ),
        key_val_metric={"dsc": MetricHandler(dsc, keys=["mask", "label"])},
        additional_metrics={"ece": MetricHandler(ECEMetric(pooled=True))},
        val_handlers=[DualStepHandler(loss), StatsHandler(iteration_log=False)],
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = SupervisedTrainer(
            device=device,
            max_epochs=options.epochs,
            train_data_loader=DataLoader(slices(12, rng), batch_size=8, shuffle=True),
            network=net,
            optimizer=optimizer,
            loss_function=loss,
            train_handlers=[
                ValidationHandler(1, evaluator),  # before the saver: it updates the multipliers
                CheckpointSaver(
                    folder, {"net": net, "optimizer": optimizer, "loss": loss}, save_interval=1
                ),
            ],
        )
        trainer.run()
    print({name: round(float(value), 4) for name, value in evaluator.state.metrics.items()})


if __name__ == "__main__":
    main()

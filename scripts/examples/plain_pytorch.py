"""CRaC in a training loop of your own: plain PyTorch, half a minute on a CPU.

python scripts/examples/plain_pytorch.py --epochs 8
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from segcal.datasets.phantom import make_phantom
from segcal.metrics.ece import ece
from segcal.recipes import build

CLASSES = 4


def slices(volumes: int, rng: np.random.Generator) -> TensorDataset:
    """Images ``(M, 1, y, x)`` and labels ``(M, y, x)`` of generated hearts."""
    phantoms = [make_phantom(rng) for _ in range(volumes)]
    images = torch.from_numpy(np.concatenate([p.image for p in phantoms]))[:, None]
    labels = torch.from_numpy(np.concatenate([p.labels for p in phantoms])).long()
    return TensorDataset((images - images.mean()) / images.std(), labels)


def network(width: int = 16) -> nn.Module:
    """A network of convolutions with growing dilation."""
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
    for dilation in (1, 2, 4, 8):
        layers += [
            nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation),
            nn.InstanceNorm2d(width, affine=True),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.Conv2d(width, CLASSES, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--recipe", default="crac", help="see: segcal methods")
    parser.add_argument("--checkpoint", type=Path, help="state to write, and to continue from")
    options = parser.parse_args()

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    train = DataLoader(slices(12, rng), batch_size=8, shuffle=True)
    validation = DataLoader(slices(4, rng), batch_size=8)
    net = network()
    objective = build(options.recipe, num_classes=CLASSES)  # Dice + cross-entropy + CRaC
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    parts = {"net": net, "objective": objective, "optimizer": optimizer}
    first = 0
    if options.checkpoint and options.checkpoint.exists():
        state = torch.load(options.checkpoint, weights_only=True)
        first = state.pop("epoch") + 1
        for name, value in state.items():
            parts[name].load_state_dict(value)

    for epoch in range(first, options.epochs):
        net.train()
        objective.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss = objective(net(images), labels)
            loss.backward()
            optimizer.step()

        net.eval()
        objective.eval()
        probabilities, references = [], []
        with torch.no_grad():
            for images, labels in validation:
                logits = net(images)
                objective.observe(logits, labels)  # 1. every validation batch
                probabilities.append(logits.softmax(1))
                references.append(labels)
        steps = objective.dual_step()  # 2. once after the last
        error = ece(torch.cat(probabilities).transpose(0, 1), torch.cat(references))
        multipliers = {name: np.round(step.lam, 3).tolist() for name, step in steps.items()}
        print(f"epoch {epoch}: loss {loss.item():.3f}, validation ECE {error:.4f}, {multipliers}")
        if options.checkpoint:  # 3. with multipliers, rho and counters, after their update
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"epoch": epoch, **state}, options.checkpoint)


if __name__ == "__main__":
    main()

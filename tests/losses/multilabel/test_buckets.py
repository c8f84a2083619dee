"""Two gloo processes whose batches are gathered have the loss of one process with all samples."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from segcal.losses.multilabel.two_way import TwoWay, two_way
from tests.conftest import close
from tests.ranks import in_two_processes

SHARES = {"equal": (slice(0, 4), slice(4, 8)), "unequal": (slice(0, 5), slice(5, 8)),
          "one has none": (slice(0, 8), slice(8, 8))}  # fmt: skip
OPTIONS = ({}, {"along": "class"}, {"bucket_size": 3}, {"temperature_pos": 0.0})


def batch():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn((8, 6), generator=generator, dtype=torch.float64)
    targets = torch.randint(-1, 2, (8, 4), generator=generator)
    return inputs, targets


def value_and_gradient(options, share=None):
    """Loss of a linear network, and the gradient of its weights."""
    inputs, targets = batch()
    network = torch.nn.Linear(6, 4, dtype=torch.float64)
    torch.nn.init.constant_(network.bias, 0.5)
    with torch.no_grad():
        network.weight.copy_(torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6))
    if share is not None:
        network = torch.nn.parallel.DistributedDataParallel(network)
        inputs, targets = inputs[share], targets[share]
    loss = TwoWay(gather=share is not None, **options)(network(inputs), targets)
    loss.backward()
    return loss.detach(), [p.grad for p in network.parameters()]


def rank_main(rank, shares, folder):
    dist.init_process_group("gloo")
    try:
        found = [value_and_gradient(options, shares[rank]) for options in OPTIONS]
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", SHARES)
def test_two_processes_are_one(tmp_path, name):
    in_two_processes(rank_main, SHARES[name], str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    for i, options in enumerate(OPTIONS):
        value, gradient = value_and_gradient(options)
        for rank in ranks:
            close(rank[i][0], value)
            for found, expected in zip(rank[i][1], gradient, strict=True):
                close(found, expected)


def test_without_processes_there_is_nothing_to_gather():
    inputs, targets = batch()
    assert torch.equal(
        two_way(inputs[:, :4], targets, gather=True), two_way(inputs[:, :4], targets)
    )

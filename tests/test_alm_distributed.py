"""Two gloo processes with uneven batches learn the multipliers of one process, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from segcal.penalties.cals import CALS, CALSHR
from segcal.penalties.confidence import Confidence
from segcal.penalties.crac import CRaC
from tests.ranks import in_two_processes

PENALTIES = {
    "crac": (CRaC, {"rho_period": 1}),
    "cals": (CALS, {"margin": 2.0}),
    "cals_hr": (CALSHR, {"margin": 2.0}),
    "confidence": (Confidence, {"floor": -0.2}),
}
SHARES = ((0, 1), (2,))  # batches of each rank, in the order in which one process sees them
EMPTY_SHARES = ((0, 1, 2), ())


def batches(epoch):
    generator = torch.Generator().manual_seed(epoch)
    for n in (3, 1, 2):
        logits = 6 * torch.randn(n, 3, 6, 5, generator=generator, dtype=torch.float64)
        yield logits, torch.randint(0, 3, (n, 6, 5), generator=generator)


def all_reduce(x):
    dist.all_reduce(x)
    return x


def learn(name, share=None):
    make, options = PENALTIES[name]
    penalty = make(3, **options)
    for epoch in range(4):
        for i, (logits, labels) in enumerate(batches(epoch)):
            if share is None or i in share:
                penalty.observe(logits, labels)
        penalty.dual_step(None if share is None else all_reduce)
    return penalty.state_dict()


def rank_main(rank, shares, folder):
    dist.init_process_group("gloo")
    try:
        states = {name: learn(name, shares[rank]) for name in PENALTIES}
        torch.save(states, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shares", [SHARES, EMPTY_SHARES], ids=["uneven", "one rank has none"])
def test_two_ranks_are_one_process(tmp_path, shares):
    in_two_processes(rank_main, shares, str(tmp_path))
    for name in PENALTIES:
        expected = learn(name)
        assert int(expected["step"]) == 4
        for rank in (0, 1):
            state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)[name]
            for key, value in expected.items():
                assert torch.equal(state[key], value), (name, rank, key)

"""Trainings that are killed, at any moment, and go on: nothing that they had learned is lost."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from segcal.adapters.nnunet.checkpoints import read_checkpoint
from segcal.io.files import TEMPORARY
from tests.adapters.nnunet_commands import BUDGET, RUN, TRAIN, wait_until
from tests.adapters.nnunet_data import Tiny
from tests.alike import TABLES, differences

pytestmark = pytest.mark.slow

TRAINER = "nnUNetTrainerCRaC"
CHECKPOINTS = {"checkpoint_best.pth", "checkpoint_best_ece.pth", "checkpoint_final.pth"}
"""What a finished training leaves."""
LATEST = "checkpoint_latest.pth"
ENDLESS = [*BUDGET, "--epochs", "1000"]
"""For a training that is looked at while it runs, however long its processes have to wait."""


def content(path):
    """What a checkpoint holds of a training, without what differs between two by nature."""
    read = read_checkpoint(path)
    logged = {k: v for k, v in read["logging"].items() if not k.endswith("_timestamps")}
    return {**read, "logging": logged, "init_args": read["init_args"]["segcal"]}


def checkpoints(folder):
    """Names of a fold's checkpoints and how many epochs each has trained; all must be whole."""
    return {p.name: read_checkpoint(p)["current_epoch"] for p in folder.glob("checkpoint*.pth")}


def leftovers(folder):
    return sorted(p.name for p in folder.glob(f"{TEMPORARY}*"))


def check_same(resumed, whole):
    """A fold that was killed and went on holds what one that was not holds."""
    assert set(checkpoints(resumed)) == set(checkpoints(whole)) == CHECKPOINTS
    for name in CHECKPOINTS:
        assert not differences(content(resumed / name), content(whole / name)), name
    logs = [(f / "segcal_log.jsonl").read_text().splitlines() for f in (resumed, whole)]
    assert not differences(*([json.loads(line) for line in log] for log in logs), **TABLES)
    assert not leftovers(resumed)


@pytest.mark.filterwarnings("ignore:.*Received empty chunks:UserWarning")
def test_killed_before_each_of_its_writes(tmp_path):
    """Between any two changes of its folder a training may die; what it then does is the same."""
    often = {"rho_period": 1, "tau": 0.95}  # so that rho, and what it is compared with, matter
    Tiny(tmp_path).set_plans("often", "2d", segcal={"crac": often})
    (tmp_path / "results").mkdir()
    folders = {f"nnUNet_{n}": str(tmp_path / n) for n in ("raw", "preprocessed", "results")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.nnunet_deaths", str(tmp_path), "often", "2"],
        env={**os.environ, **folders, "nnUNet_n_proc_DA": "0", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    log = (tmp_path / "results" / "log.txt").read_text()
    assert done.returncode == 0, done.stderr[-3000:] + log[-3000:]
    moments = json.loads((tmp_path / "moments.json").read_text())
    for name in CHECKPOINTS | {LATEST, "segcal_progress.png"}:
        assert f"put {name} in its place" in moments
    assert moments.count("append to segcal_log.jsonl") == 2
    assert moments[-1] == f"remove {LATEST}"
    whole = tmp_path / "whole"
    rho = content(whole / "checkpoint_final.pth")["init_args"]["state"]["terms.crac.rho"]
    assert len(set(rho.flatten().tolist())) > 1  # some have grown
    for n, moment in enumerate(moments):
        killed = tmp_path / str(n) / "killed"
        assert len(leftovers(killed)) == moment.startswith("put"), moment
        checkpoints(killed)
        check_same(tmp_path / str(n) / "resumed", whole)


def seconds_of_an_epoch(whole):
    starts = read_checkpoint(whole / "checkpoint_final.pth")["logging"]["epoch_start_timestamps"]
    return min(b - a for a, b in pairwise(starts[1:]))  # the first one also compiles


def test_killed_at_random_moments(workspace):
    """The command, killed seven times in one training, from its start to its validation.

    On a busy machine a kill may come after the end of the command: then that moment is missed, and
    what follows must hold all the same.
    """
    results = workspace.root / "killed"
    fold, whole = results / RUN.format(TRAINER), workspace.root / "results" / RUN.format(TRAINER)
    command = (*TRAIN, "-tr", TRAINER, "--seed", 1, *BUDGET)
    chance = random.Random(4)
    epoch = seconds_of_an_epoch(whole)

    def in_epoch(first):
        said = [f": Epoch {n}" for n in range(first, 4)] + ["Training done."]
        return lambda: any(map(training.said, said))

    def writes():
        return set(fold.glob(f"{TEMPORARY}*.pth")) - before

    moments = [  # what it waits for, and how many seconds more at most
        ("start of the program", lambda: True, 3),
        ("first epoch", in_epoch(0), 0.5),
        ("checkpoint being written", writes, 0),
        ("second epoch or later", in_epoch(1), 1.5 * epoch),
        ("third epoch or later", in_epoch(2), 1.5 * epoch),
        ("end of the training", lambda: training.said("Training done."), 1),
        ("validation", lambda: training.said(": predicting"), 6),
    ]
    log, resume, any_before, hit = [], (), False, 0
    for what, reached, most in moments:
        before = set(fold.glob(f"{TEMPORARY}*.pth"))
        training = workspace.start(*command, *resume, nnUNet_results=str(results))
        wait_until(reached, training.process, every=0.001 if reached is writes else 0.02)
        time.sleep(chance.uniform(0, most))
        alive, seconds = training.runs(), training.seconds
        assert not training.kill(), "a process has outlived its training"
        assert alive or training.process.poll() == 0, training.log.read_text()[-3000:]
        hit += alive
        found = checkpoints(fold)
        log.append(
            f"killed after {seconds:5.1f} s, {what}{'' if alive else ', which had ended'}: "
            f"{len(workspace.records(TRAINER, 'killed'))} epochs logged, whole checkpoints "
            f"{found or 'none'}, leftovers {leftovers(fold) or 'none'}"
        )
        anew = training.said("no checkpoint available to continue from. Starting a new training")
        assert anew == (resume == ("--c",) and not any_before)
        any_before = bool(found)
        resume = ("--c",)
    assert "checkpoint_final.pth" in found
    assert hit >= 4, log
    out = workspace.run(*command, "--c", nnUNet_results=str(results))
    assert "Validation complete" in out
    log.append(f"went on to its end: {len(workspace.records(TRAINER, 'killed'))} epochs logged")
    check_same(fold, whole)
    log.append(f"as uninterrupted: {', '.join(sorted(CHECKPOINTS))}, segcal_log.jsonl")
    summaries = [f / "validation" / "summary.json" for f in (fold, whole)]
    scores = [json.loads(path.read_text())["mean"] for path in summaries]
    assert not differences(*scores, **TABLES)
    (workspace.root / "kills.txt").write_text("\n".join(log) + "\n")
    print("\n".join(log))


RESUME = """
import json
import torch
from segcal.adapters.nnunet.registration import register
register()
from nnunetv2.run.run_training import get_trainer_from_args, maybe_load_checkpoint
cpu = torch.device("cpu")
trainer = get_trainer_from_args(
    "901", "2d_small", 0, "nnUNetTrainerCRaC", continue_training=True, device=cpu
)
maybe_load_checkpoint(trainer, True, False)
state = trainer.loss.learned_state()
kept = {name.removeprefix("terms.crac."): value.tolist() for name, value in state.items()}
print("\\n" + json.dumps({"epoch": trainer.current_epoch, **kept}))
"""


def test_killed_with_workers(workspace):
    """Workers draw other batches after a resume; the state is exact, and none outlives its own."""
    environment = {"nnUNet_results": str(workspace.root / "workers"), "nnUNet_n_proc_DA": "2"}
    training = workspace.start(*TRAIN, "-tr", TRAINER, *ENDLESS, **environment)
    training.wait_for(lambda: len(workspace.records(TRAINER, "workers")) >= 2)
    assert len(training.group()) == 1 + 2 + 1  # itself, its workers and that of the validation
    assert not training.kill(), "a process has outlived its training"
    records = workspace.records(TRAINER, "workers")
    loaded = json.loads(
        workspace.run(sys.executable, "-c", RESUME, **environment).strip().splitlines()[-1]
    )
    last = records[loaded["epoch"] - 1]  # the next may have been logged, not saved
    assert loaded["epoch"] >= len(records) - 1 >= 1
    for key in ("lam", "rho", "step"):
        assert loaded[key] == last["crac"][key], key
    assert loaded["previous"] == last["crac"]["constraint"]
    more = loaded["epoch"] + 2
    workspace.run(*TRAIN, "-tr", TRAINER, *BUDGET, "--epochs", more, "--c", **environment)
    again = workspace.records(TRAINER, "workers")
    assert again[: loaded["epoch"]] == records[: loaded["epoch"]]
    assert [r["epoch"] for r in again] == list(range(more))


def test_stock_trainers_too_have_workers_that_end(workspace):
    environment = {"nnUNet_results": str(workspace.root / "stock_workers"), "nnUNet_n_proc_DA": "2"}
    training = workspace.start(*TRAIN, "-tr", "nnUNetTrainer", *ENDLESS, **environment)
    training.wait_for(lambda: training.said("Epoch 0"))
    assert len(training.group()) == 1 + 2 + 1
    assert not training.kill(), "a process has outlived its training"

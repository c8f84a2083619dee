"""A real training of nnU-Net, shared by all who need one."""

from __future__ import annotations

import sys

import pytest

from tests.adapters.nnunet_commands import BIN, BUDGET, SCRIPTS, TRAIN, Workspace


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A phantom, planned and preprocessed, and one finished training of it: CRaC, 4 epochs."""
    w = Workspace(tmp_path_factory.mktemp("nnunet"))
    (w.root / "preprocessed").mkdir()
    w.run(BIN / "segcal", "phantom", w.data, "--train", 6, "--test", 2, "--size", 40, "--slices", 4)
    w.run(
        BIN / "nnUNetv2_plan_and_preprocess", "-d", 901, "-c", "2d", "-np", 1, "-npfp", 1,
        "--verify_dataset_integrity",
    )  # fmt: skip
    w.run(
        sys.executable, SCRIPTS / "small_plans.py", 901, "2d", "--patch", "32,32", "--batch", 4,
        "--features", "4,8,16",
    )  # fmt: skip
    w.run(*TRAIN, "-tr", "nnUNetTrainerCRaC", "--seed", 1, *BUDGET)
    return w

"""A Dask cluster finds what processes of this machine find."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.io.volumes import Geometry, write_nifti

pytest.importorskip("distributed", reason='needs pip install "segcal[dask]"')

SHAPE = (3, 10, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ten cases with probabilities, and references drawn from them."""
    root, rng = tmp_path_factory.mktemp("cluster"), np.random.default_rng(0)
    place = Geometry(SHAPE, (4.0, 1.0, 1.0), (0.0, 0.0, 0.0), np.eye(3))
    for i in range(10):
        p = rng.dirichlet(np.full(3, 0.4), SHAPE).transpose(3, 0, 1, 2).astype(np.float32)
        drawn = (rng.random(SHAPE) > p.cumsum(0)[:, None][:2]).sum((0, 1)).astype(np.uint8)
        write_nifti(root / "p" / f"c{i}.nii.gz", p.argmax(0).astype(np.uint8), place)
        np.savez_compressed(root / "p" / f"c{i}.npz", probabilities=p)
        write_nifti(root / "y" / f"c{i}.nii.gz", drawn, place)
    return root


@pytest.mark.parametrize(
    ("command", "where"),
    [
        (["trust", "p"], "trust.csv"),
        (["trust", "fit", "p", "y"], ""),
        (["maps", "p"], "c3/entropy.nii.gz"),
    ],
    ids=["trust", "trust fit", "maps"],
)
def test_a_cluster_finds_the_same(folder, tmp_path, command, where):
    paths = [str(folder / one) if one in ("p", "y") else one for one in command]
    found = []
    for name, options in (("one", ["-p", "1"]), ("dask", ["--engine", "dask", "-p", "2"])):
        out = tmp_path / (name if where else f"{name}.json")
        done = CliRunner().invoke(app, [*paths, "-o", str(out), *options])
        assert done.exit_code == 0, done.output
        content = (out / where if where else out).read_bytes()
        found.append(content if where else {**json.loads(content), "created": ""})
    assert found[0] == found[1]

"""The phantom's posterior is calibrated, a sharpened one is not, and files are what they say."""

from __future__ import annotations

import numpy as np
import pytest

from segcal.binning import BinStatistics
from segcal.datasets.phantom import PhantomSettings, make_phantom, write_phantom_dataset
from segcal.metrics.classwise_ece import classwise_ece
from segcal.metrics.ece import ece, reliability
from segcal.metrics.tace import tace


@pytest.fixture(scope="module")
def phantoms():
    settings = PhantomSettings(shape=(8, 96, 96))
    return [make_phantom(np.random.default_rng([1, i]), settings) for i in range(10)]


def pooled(phantoms, power):
    total: BinStatistics | None = None
    for x in phantoms:
        p = sharpen(x.posterior, power)
        statistics = reliability(p, x.labels)
        total = statistics if total is None else total + statistics
    assert total is not None
    return total.expected_error()


def sharpen(p, power):
    q = p.astype(np.float64) ** power
    return q / q.sum(0)


def test_the_posterior_is_calibrated_and_a_sharpened_one_is_not(phantoms):
    assert pooled(phantoms, 1) < 0.002
    for power in (0.5, 2):
        assert pooled(phantoms, power) > 0.01
    for metric in (ece, classwise_ece, tace):
        honest = np.mean([metric(x.posterior, x.labels) for x in phantoms])
        sharp = np.mean([metric(sharpen(x.posterior, 2), x.labels) for x in phantoms])
        assert sharp > 2 * honest


def test_shapes_types_and_classes(phantoms):
    for x in phantoms:
        assert x.posterior.shape == (4, 8, 96, 96)
        np.testing.assert_allclose(x.posterior.sum(0), 1, atol=1e-6)
        assert set(np.unique(x.labels)) == {0, 1, 2, 3}
        ambiguous = (x.posterior.max(0) < 0.9).mean()
        assert 0.02 < ambiguous < 0.3


def test_every_case_depends_on_seed_and_number_alone(tmp_path):
    small = PhantomSettings(shape=(2, 32, 32))
    write_phantom_dataset(tmp_path / "a", train=2, test=1, seed=3, settings=small)
    write_phantom_dataset(tmp_path / "b", train=1, test=2, seed=3, settings=small)
    write_phantom_dataset(tmp_path / "c", train=1, test=0, seed=4, settings=small)
    name = "posterior{}/phantom_{}.npz"

    def load(folder, subset, number):
        with np.load(tmp_path / folder / name.format(subset, number)) as f:
            return f["probabilities"]

    np.testing.assert_array_equal(load("a", "Tr", "002"), load("b", "Ts", "002"))
    assert not np.array_equal(load("a", "Tr", "001"), load("c", "Tr", "001"))


def test_all_or_nothing(tmp_path):
    small = PhantomSettings(shape=(2, 32, 32))

    def stop(name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_phantom_dataset(tmp_path / "a", settings=small, progress=stop)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="exists; remove it"):
        write_phantom_dataset(tmp_path / "a", settings=small)
    with pytest.raises(ValueError, match="shape: expected"):
        PhantomSettings(shape=(2, 8, 8))

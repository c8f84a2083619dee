"""Phantom: short-axis hearts whose true posterior is known in every voxel.

Labels are those of ACDC: 0 background, 1 right ventricle, 2 myocardium, 3 left ventricle. How
ambiguous boundaries are varies in space. The labels are drawn from the stated posterior, so the
posterior itself is a perfectly calibrated prediction.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage, special

from segcal.io.archives import save_arrays
from segcal.io.files import whole_file, write_json
from segcal.io.volumes import Geometry, write_nifti

__all__ = ["Phantom", "PhantomSettings", "make_phantom", "write_phantom_dataset"]

LABELS = {"background": 0, "right ventricle": 1, "myocardium": 2, "left ventricle": 3}
Float = NDArray[np.float64]


@dataclass(frozen=True)
class PhantomSettings:
    """Appearance of a phantom.

    Attributes:
        shape: ``(z, y, x)`` in voxels.
        spacing_mm: ``(z, y, x)``; thick slices as in cine MRI.
        ambiguity_mm: scale of the blur at boundaries: the posterior goes from 0.27 to 0.73 over
            twice this distance. It varies by a factor of about 3 in space and grows to the apex.
        noise: standard deviation of the image noise; tissue means lie between 0.2 and 0.9.
        correlation_voxels: in-plane scale over which labels of neighbours are correlated. The
            marginal of every voxel is the posterior for any value.
    """

    shape: tuple[int, int, int] = (8, 64, 64)
    spacing_mm: tuple[float, float, float] = (8.0, 1.5, 1.5)
    ambiguity_mm: float = 0.8
    noise: float = 0.06
    correlation_voxels: float = 1.5

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape[1:]) < 32 or self.shape[0] < 2:
            raise ValueError(f"shape: expected (z >= 2, y >= 32, x >= 32), got {self.shape}")
        if not all(0 < v < np.inf for v in (*self.spacing_mm, self.ambiguity_mm)):
            raise ValueError("spacing_mm, ambiguity_mm: expected positive numbers")
        if not all(0 <= v < np.inf for v in (self.noise, self.correlation_voxels)):
            raise ValueError("noise, correlation_voxels: expected numbers >= 0")


@dataclass(frozen=True)
class Phantom:
    """One generated volume.

    Attributes:
        image: float32 ``(z, y, x)``.
        labels: uint8 ``(z, y, x)``, drawn from the posterior.
        posterior: float32 ``(4, z, y, x)``, the probability of each label given the anatomy.
    """

    image: NDArray[np.float32]
    labels: NDArray[np.uint8]
    posterior: NDArray[np.float32]


def make_phantom(rng: np.random.Generator, settings: PhantomSettings | None = None) -> Phantom:
    """Generate one volume.

    Args:
        rng: source of all randomness.
        settings: appearance; None uses the defaults.
    """
    settings = settings or PhantomSettings()
    posterior = _posterior(rng, settings)
    labels = _draw(rng, posterior, settings.correlation_voxels)
    return Phantom(_image(rng, posterior, settings), labels, posterior)


def write_phantom_dataset(
    folder: Path,
    *,
    train: int = 12,
    test: int = 4,
    seed: int = 0,
    settings: PhantomSettings | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> None:
    """Write phantoms in nnU-Net's raw layout, all or nothing.

    It writes ``imagesTr labelsTr imagesTs labelsTs dataset.json`` as nnU-Net needs them. Beside
    them, ``posteriorTr posteriorTs`` hold ``CASE.npz`` in the format of nnU-Net's probabilities,
    which can be evaluated like a prediction. Case i depends only on `seed` and i.

    Args:
        folder: e.g. ``$nnUNet_raw/Dataset900_Phantom``; must not exist.
        train: number of training cases.
        test: number of test cases.
        seed: random seed of the whole data set.
        settings: appearance; None uses the defaults.
        progress: called with each case's name after it is written.

    Raises:
        ValueError: `folder` exists, or there is no training case.
    """
    settings = settings or PhantomSettings()
    if folder.exists():
        raise ValueError(f"{folder}: exists; remove it or choose another place")
    if train < 1 or test < 0:
        raise ValueError(f"train, test: expected at least 1 and 0 cases, got {train} and {test}")
    if seed < 0:
        raise ValueError(f"seed: expected a number >= 0, got {seed}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".segcal-phantom-", dir=folder.parent))
    try:
        for number in range(1, train + test + 1):
            subset = "Tr" if number <= train else "Ts"
            name = f"phantom_{number:03d}"
            phantom = make_phantom(np.random.default_rng([seed, number]), settings)
            _write_case(temporary, subset, name, phantom, settings)
            progress(name)
        dataset = {
            "name": "Phantom",
            "description": "Generated short-axis hearts with known posterior (segcal)",
            "channel_names": {"0": "MRI"},
            "labels": LABELS,
            "numTraining": train,
            "file_ending": ".nii.gz",
        }
        write_json(temporary / "dataset.json", dataset)
        write_json(temporary / "phantom.json", {"seed": seed, **asdict(settings)})
        temporary.chmod(0o755)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_case(
    folder: Path, subset: str, name: str, phantom: Phantom, settings: PhantomSettings
) -> None:
    geometry = Geometry(
        shape=settings.shape,
        spacing_mm=settings.spacing_mm,
        origin_mm=(12.5, -30.0, 45.0),
        direction=np.diag([-1.0, -1.0, 1.0]),
    )
    write_nifti(folder / f"images{subset}" / f"{name}_0000.nii.gz", phantom.image, geometry)
    write_nifti(folder / f"labels{subset}" / f"{name}.nii.gz", phantom.labels, geometry)
    with whole_file(folder / f"posterior{subset}" / f"{name}.npz") as path:
        save_arrays(path, {"probabilities": phantom.posterior})


def _posterior(rng: np.random.Generator, settings: PhantomSettings) -> NDArray[np.float32]:
    """Products of soft memberships: inside LV, inside epicardium, inside RV."""
    z, y, x = (np.arange(n, dtype=float) for n in settings.shape)
    depth = (z / max(len(z) - 1, 1))[:, None, None]  # 0 base, 1 apex
    mm_y, mm_x = settings.spacing_mm[1:]
    field = min(len(y) * mm_y, len(x) * mm_x)
    scale = field / 96.0  # the anatomy fills the field of view
    centre = rng.uniform(-5, 5, 2) * scale + rng.uniform(-3, 3, 2) * scale * depth[..., None]
    dy = ((y - len(y) / 2) * mm_y)[None, :, None] - centre[..., 0]
    dx = ((x - len(x) / 2) * mm_x)[None, None, :] - centre[..., 1] - 6 * scale
    radius, angle = np.hypot(dy, dx), np.arctan2(dy, dx)
    lobes = sum(rng.normal(0, 0.04) * np.cos(k * angle + rng.uniform(0, 2 * np.pi)) for k in (2, 3))
    taper = 1 - rng.uniform(0.35, 0.55) * depth**2
    endo = rng.uniform(12, 17) * scale * taper * (1 + lobes)
    epi = endo + rng.uniform(6, 9) * scale * (1 - 0.3 * depth)
    # the right ventricle: an ellipse beside the left one, hidden behind the epicardium
    rv_y, rv_x = rng.uniform(17, 22) * scale * taper, rng.uniform(14, 18) * scale * taper
    rv_radius = np.hypot(dy / rv_y, (dx + epi.mean() + 3 * scale) / rv_x)
    inside_rv = (1 - rv_radius) * np.sqrt(rv_y * rv_x)
    blur = settings.ambiguity_mm * np.exp(0.4 * _smooth_noise(rng, settings.shape, (1, 8, 8)))
    blur = blur * (0.8 + 0.8 * depth)
    in_endo = special.expit((endo - radius) / blur)
    in_epi = special.expit((epi - radius) / blur)
    in_rv = special.expit(inside_rv / (1.5 * blur))
    parts = [
        (1 - in_epi) * (1 - in_rv),
        (1 - in_epi) * in_rv,
        in_epi * (1 - in_endo),
        in_epi * in_endo,
    ]
    return np.stack(parts).astype(np.float32)


def _draw(
    rng: np.random.Generator, posterior: NDArray[np.float32], scale: float
) -> NDArray[np.uint8]:
    """Draw labels whose marginals are the posterior, correlated between neighbouring voxels.

    A Gaussian field gives each voxel a uniform number, and the inverse of the cumulative
    posterior (from the left ventricle outward, so that neighbours in the order are neighbours in
    the heart) turns it into a label.
    """
    uniform = special.ndtr(_smooth_noise(rng, posterior.shape[1:], (0, scale, scale)))
    outward = posterior[::-1].astype(np.float64)
    cumulative = np.cumsum(outward / outward.sum(0), axis=0)
    index = (uniform[None] > cumulative[:-1]).sum(0)
    return (3 - index).astype(np.uint8)


def _smooth_noise(
    rng: np.random.Generator, shape: tuple[int, ...], sigma: tuple[float, ...]
) -> Float:
    """Stationary Gaussian noise, standard normal in every voxel."""
    noise = ndimage.gaussian_filter(rng.standard_normal(shape), sigma, mode="wrap")
    impulse = np.zeros(shape)
    impulse[(0,) * len(shape)] = 1
    response = ndimage.gaussian_filter(impulse, sigma, mode="wrap")
    return noise / np.sqrt((response**2).sum())


def _image(
    rng: np.random.Generator, posterior: NDArray[np.float32], settings: PhantomSettings
) -> NDArray[np.float32]:
    """Tissue means mixed by the posterior (partial volume), in a bias field, with Rician noise."""
    shape = settings.shape
    surroundings = 0.4 + 0.12 * _smooth_noise(rng, shape, (0.5, 5, 5))
    means = rng.normal([0.82, 0.28, 0.88], 0.03)
    clean = posterior[0] * surroundings + np.tensordot(means, posterior[1:], 1)
    clean = ndimage.gaussian_filter(clean, (0, 0.6, 0.6))
    bias = 1 + 0.12 * _smooth_noise(rng, shape, (4, 24, 24))
    real, imaginary = rng.normal(0, settings.noise, (2, *shape))
    magnitude = np.hypot(clean * bias + real, imaginary)
    return (rng.uniform(300, 1200) * magnitude).astype(np.float32)

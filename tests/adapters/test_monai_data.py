"""What the network sees of a volume."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segcal.adapters.monai.data import (
    Crops,
    EpochBatches,
    Preprocess,
    Resample,
    Unit,
    ValidationBatches,
    crop_transforms,
    kept_on,
    resample,
    units,
)
from segcal.adapters.monai.dataset import PADDING, CaseFiles, check_cases
from segcal.adapters.monai.experiment import VolumeData
from segcal.io.volumes import Geometry, write_nifti
from tests.io.test_formats import FLIPPED, LABELS, two_forms

FLIPS = tuple(
    {
        "target": "monai.transforms.RandFlipd",
        "args": {"keys": ["image", "label"], "prob": 0.5, "spatial_axis": axis},
    }
    for axis in (0, 1)
)


def grid(shape, spacing=(1.0, 1.0, 1.0)):
    return Geometry(shape, spacing, (0.0, 0.0, 0.0), np.eye(3))


def data(**parts):
    return VolumeData.model_validate({"root": "x", "size": (4, 6), **parts})


@pytest.fixture
def volume():
    """Every voxel of the image has a value of its own; labels tell which, modulo 3."""
    image = torch.arange(5 * 7 * 9, dtype=torch.float32).reshape(1, 5, 7, 9)
    return {"image": image, "label": (image % 3).to(torch.int16)}


@pytest.mark.parametrize(("axis", "count", "shape"), [("z", 5, (7, 9)), ("y", 7, (5, 9)),
                                                      ("x", 9, (5, 7))])  # fmt: skip
def test_slices_follow_the_axis(volume, axis, count, shape):
    settings = data(axis=axis, size=shape)
    listed = units([grid((5, 7, 9))], settings)
    assert listed == [Unit(0, place) for place in range(count)]
    samples = Crops([volume], listed, settings, crop_transforms(settings, 3, PADDING))
    images = [samples[place, 0]["image"][0] for place in range(count)]
    whole = volume["image"][0].numpy()
    expected = np.moveaxis(whole, "zyx".index(axis), 0)
    np.testing.assert_array_equal(torch.stack(images).numpy(), expected)


def test_the_middle_is_cut_and_padding_has_no_label(volume):
    settings = data(size=(3, 13))  # of slices (7, 9)
    samples = Crops([volume], [Unit(0, 1)], settings, crop_transforms(settings, 3, PADDING))
    item = samples[0, 0]
    np.testing.assert_array_equal(item["image"][0, :, 2:-2], volume["image"][0, 1, 2:5])
    np.testing.assert_array_equal(item["label"][0, :, 2:-2], volume["label"][0, 1, 2:5])
    for side in (slice(0, 2), slice(-2, None)):
        assert (item["image"][0, :, side] == 0).all()
        assert (item["label"][0, :, side] == PADDING).all()
    batches = ValidationBatches([volume], [grid((5, 7, 9))], settings, 2, PADDING)
    assert [len(b["image"]) for b in (batches[i] for i in range(len(batches)))] == [2, 2, 1]
    torch.testing.assert_close(batches[0]["image"][1], item["image"])


@pytest.mark.parametrize("kind", ["slices", "patches"])
def test_random_crops_depend_on_their_seed_alone(volume, kind):
    size = (4, 6) if kind == "slices" else (3, 4, 6)
    settings = data(units=kind, size=size, crop="random", augment=FLIPS)
    samples = Crops([volume], [Unit(0, 2)], settings, crop_transforms(settings, 3, PADDING))
    items = [samples[0, seed] for seed in range(40)]
    for seed in (3, 0, 7):
        again = samples[0, seed]
        assert all(torch.equal(items[seed][key], again[key]) for key in again)
    corners = {(int(i["image"].flatten()[0]), int(i["image"].flatten()[-1])) for i in items}
    assert len(corners) > 20
    flips = set()
    for item in items:
        assert item["image"].shape == (1, *size)
        assert torch.equal(item["label"].float(), item["image"] % 3)  # cut and turned alike
        flips.add(tuple(int(torch.sign(item["image"].diff(dim=d).flatten()[0])) for d in (1, -1)))
    assert len(flips) == (4 if kind == "slices" else 2)  # axes are flipped on their own


def augmented(name, **arguments):
    component = {"target": f"monai.transforms.{name}", "args": {"prob": 1.0, **arguments}}
    return data(size=(7, 9), augment=[component])


def test_augmentation_leaves_the_cache_alone(volume):
    before = volume["image"].clone()
    settings = augmented(
        "RandCoarseDropoutd", keys=["image"], holes=1, spatial_size=[3, 3], fill_value=-9
    )
    samples = Crops([volume], [Unit(0, 1)], settings, crop_transforms(settings, 3, PADDING))
    assert (samples[0, 0]["image"] == -9).sum() == 9
    assert torch.equal(volume["image"], before)


def test_labels_are_not_mixed(volume):
    for mode, whole in ((["bilinear", "nearest"], True), (["bilinear", "bilinear"], False)):
        settings = augmented("RandRotated", keys=["image", "label"], range_x=0.5, mode=mode)
        samples = Crops([volume], [Unit(0, 1)], settings, crop_transforms(settings, 3, PADDING))
        if whole:
            assert set(samples[0, 0]["label"].unique().tolist()) == {0, 1, 2}
        else:
            with pytest.raises(ValueError, match=r"a transform interpolates between labels"):
                samples[0, 0]


def test_what_is_put_on_a_gpu(monkeypatch):
    """What is the same in every epoch and takes a quarter of the free memory, augmented there."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    free = {"bytes": 4 * 10 * 24 * 6}  # of ten samples of 24 voxels, float32 and int16
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free["bytes"], 10**12))

    def place(device=gpu, workers=0, channels=1, **parts):
        return kept_on(data(**parts), 10, channels, workers, device)

    assert place() == place(augment=FLIPS) == place(workers=3) == gpu
    assert place(augment=FLIPS, workers=3) is None  # which the workers do
    assert place(channels=2) == place(on_device=False) == place(device=cpu) == cpu
    assert place(augment=FLIPS, on_device=False) is place(device=cpu, augment=FLIPS) is None
    assert place(crop="random") is place(cache=0.5) is None
    free["bytes"] = 0
    assert place() == cpu
    assert place(on_device=True) == place(on_device=True, augment=FLIPS, workers=3) == gpu
    for parts in ({"crop": "random"}, {"cache": 0.5}):
        with pytest.raises(ValueError, match="on_device: true needs crop: center and cache: 1"):
            data(on_device=True, **parts)


def test_foreground_crops_hold_foreground():
    image = torch.zeros(1, 1, 40, 40)
    label = torch.zeros(1, 1, 40, 40, dtype=torch.int16)
    label[0, 0, 33, 2] = 1
    label[0, 0, 5:9] = PADDING  # neither class nor foreground
    for share, least, most in ((1.0, 200, 200), (0.5, 80, 125)):
        settings = data(size=(8, 8), crop="random", foreground=share)
        samples = Crops(
            [{"image": image, "label": label}],
            [Unit(0, 0)],
            settings,
            crop_transforms(settings, 2, PADDING),
        )
        hits = sum(bool((samples[0, seed]["label"] == 1).any()) for seed in range(200))
        assert least <= hits <= most


def test_resampling_is_edge_to_edge():
    ramp = torch.arange(20.0).expand(1, 2, 3, 20)
    half = resample(ramp, (2, 3, 10))
    # voxel j of the coarse grid has its middle between the voxels 2 j and 2 j + 1
    torch.testing.assert_close(half[0, 0, 0], 2 * torch.arange(10.0) + 0.5)
    torch.testing.assert_close(resample(half, (2, 3, 20))[..., 1:-1], ramp[..., 1:-1])
    label = (ramp > 12).to(torch.int16)
    done = Resample((2, 3, 10))({"image": ramp, "label": label})["label"]
    assert done.dtype == torch.int16
    assert done[0, 0, 0].tolist() == [0] * 6 + [1] * 4


def test_intensities(tmp_path):
    random = np.random.default_rng(0)
    values = random.uniform(-1000, 1000, (3, 8, 10))
    paths = tuple(tmp_path / f"a_000{c}.nii.gz" for c in (0, 1))
    for factor, path in enumerate(paths, start=1):
        write_nifti(path, factor * values, grid((3, 8, 10), (4.0, 1.0, 2.0)))
    item = Preprocess(data())(CaseFiles("a", paths))
    z = (values - values.mean()) / values.std()
    np.testing.assert_allclose(item["image"].numpy(), [z, z], atol=1e-4)
    assert type(item["image"]) is torch.Tensor
    window = data(intensity="window", window=(-160, 240), spacing_mm=(None, None, 4.0))
    item = Preprocess(window)(CaseFiles("a", paths[:1]))
    coarse = values.reshape(3, 8, 5, 2).mean(-1)
    np.testing.assert_allclose(
        item["image"][0].numpy(), np.clip((coarse + 160) / 400, 0, 1), atol=1e-4
    )
    assert (
        len(units([grid((3, 8, 10), (4.0, 1.0, 2.0))], data(axis="x", spacing_mm=(4, 1, 4)))) == 5
    )
    write_nifti(paths[0], np.full((3, 8, 10), np.nan), grid((3, 8, 10)))
    with pytest.raises(ValueError, match=r"a_0000\.nii\.gz: holds NaN or infinite values"):
        Preprocess(data())(CaseFiles("a", paths[:1]))


@pytest.mark.parametrize("count", [7, 8, 9])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_batches_of_one_process(count, ranks):
    whole = EpochBatches(count, 4, 5, 0, 1)
    parts = [EpochBatches(count, 4, 5, r, ranks) for r in range(ranks)]
    value = np.arange(count) ** 2.0  # of the sample of each number
    for epoch in (0, 1):
        for sampler in (whole, *parts):
            sampler.epoch = epoch
        batches, *shares = (list(s) for s in (whole, *parts))
        assert sorted(n for batch in batches for n, _ in batch) == list(range(count))
        for b, batch in enumerate(batches):
            taken = [key for s, part in zip(shares, parts, strict=True)
                     for key in s[b][: part.share(b).samples]]  # fmt: skip
            assert sorted(taken) == sorted(batch)  # each once, with the same seed
            means = [
                part.share(b).weight * value[[n for n, _ in s[b]]].mean()
                for s, part in zip(shares, parts, strict=True)
            ]
            assert np.mean(means) == pytest.approx(value[[n for n, _ in batch]].mean())


def test_orders_and_seeds_differ_between_epochs():
    sampler = EpochBatches(50, 4, 1, 0, 1)
    first = [key for batch in sampler for key in batch]
    sampler.epoch = 1
    second = [key for batch in sampler for key in batch]
    assert [n for n, _ in first] != [n for n, _ in second]
    assert not {seed for _, seed in first} & {seed for _, seed in second}
    with pytest.raises(ValueError, match=r"training\.batch_size: .*1 samples are fewer than 2"):
        EpochBatches(50, 1, 1, 0, 2)


def test_two_forms_that_disagree_are_warned_of(tmp_path):
    image = two_forms(tmp_path / "i.nii.gz", FLIPPED, 2, np.eye(4), 1, LABELS.astype(np.int16))
    write_nifti(tmp_path / "l.nii.gz", LABELS, grid(LABELS.shape))
    case = CaseFiles("a", (image,), tmp_path / "l.nii.gz")
    with pytest.warns(UserWarning, match=r"i\.nii\.gz: its qform and its sform disagree"):
        (found,) = check_cases([case], 1, {0, 1, 2, 3})
    np.testing.assert_array_equal(found.direction, np.eye(3))

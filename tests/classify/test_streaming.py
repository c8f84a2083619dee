"""Trainings on images that stay on disk."""

from __future__ import annotations

import gc
import json
import weakref

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from typer.testing import CliRunner

from segcal.classify import data
from segcal.classify.data import load
from segcal.classify.evaluation import evaluate_classifier
from segcal.classify.experiment import SampleData, load_experiment
from segcal.classify.readers.decoding import ImageFiles
from segcal.classify.streaming import _Decoding, decoders
from segcal.classify.training import ClassificationRun
from segcal.commands.main import app
from segcal.training.epoch_log import EpochLog
from tests.conftest import close

pytestmark = pytest.mark.usefixtures("one_thread")
V2 = "torchvision.transforms.v2"
CROP = [
    {"target": f"{V2}.RandomResizedCrop", "args": {"size": 6}},
    {"target": f"{V2}.RandomHorizontalFlip"},
]
FIT = [
    {"target": f"{V2}.Resize", "args": {"size": 7}},
    {"target": f"{V2}.CenterCrop", "args": {"size": 6}},
]
STANDARD = {"mean": [0.5], "std": [0.25]}
NETWORK = {"target": "segcal.classify.networks.SmallCNN", "args": {"widths": [4], "dropout": 0.5}}


def write_images(root, sizes=((8, 8),), n=10):
    """Three classes, of which the k-th is bright in channel k."""
    rng = np.random.default_rng(0)
    for part, count in (("train", n), ("val", 3), ("test", 3)):
        for k, kind in enumerate(("red", "green", "blue")):
            for i in range(count):
                width, height = sizes[i % len(sizes)]
                array = rng.integers(0, 120, (height, width, 3))
                array[..., k] += 80
                path = root / part / kind / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array.astype(np.uint8)).save(path)
    return root


def write_config(folder, images, **data):
    content = {
        "data": {"source": "image_folder", "args": {"path": str(images)}, **data},
        "network": NETWORK,
        "recipe": "cals",
        "optimizer": {"target": "torch.optim.Adam", "args": {"lr": 0.02}},
        "training": {"epochs": 2, "batch_size": 7, "device": "cpu", "workers": 0},
        "output": str(folder / "run"),
    }
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(path, *settings, resume=False):
    return ClassificationRun(load_experiment(path, settings), resume=resume).run()


def checkpoint(done):
    return torch.load(done.folder / "checkpoint_last.pt", weights_only=True)


def same(a, b):
    for key in ("network", "objective"):
        assert a[key].keys() == b[key].keys()
        for name in a[key]:
            assert torch.equal(torch.as_tensor(a[key][name]), torch.as_tensor(b[key][name])), name


def logged(done):
    return [
        {k: v for k, v in record.items() if k != "seconds"}
        for record in EpochLog(done.folder).records()
    ]


def test_streamed_is_what_is_in_memory_bit_for_bit(tmp_path):
    """The same order, dropout and steps; processes that decode draw nothing of torch's."""
    path = write_config(tmp_path, write_images(tmp_path / "i"), standardise=STANDARD)
    found = []
    for name, settings in (
        ("memory", ["data.source=images", "data.args.size=8"]),
        ("streamed", []),
        ("processes", ["training.workers=2"]),
    ):
        done = run(path, f"output={tmp_path / name}", *settings)
        found.append((checkpoint(done), logged(done), evaluate_classifier(done.folder).logits))
    for other in found[1:]:
        same(found[0][0], other[0])
        assert other[1] == found[0][1]
        assert torch.equal(found[0][2], other[2])


def test_transforms_are_those_of_the_seed_whoever_decodes(tmp_path):
    """Images of several sizes; with the same seed the same crops, resumed or not."""
    images = write_images(tmp_path / "i", sizes=((8, 8), (12, 9), (7, 10)))
    path = write_config(tmp_path, images, augment=CROP, resize=FIT)
    whole = run(path, f"output={tmp_path / 'whole'}")
    run(path, f"output={tmp_path / 'parts'}", "training.epochs=1", "training.workers=2")
    parts = run(path, f"output={tmp_path / 'parts'}", resume=True)  # other workers, the same
    same(checkpoint(whole), checkpoint(parts))
    assert logged(whole) == logged(parts)
    other = run(path, f"output={tmp_path / 'other'}", "training.seed=2")
    assert logged(other) != logged(whole)
    told = json.loads((whole.folder / "run.json").read_text())
    assert told["samples"] == {"train": 30, "validation": 9, "test": 9}
    assert len(evaluate_classifier(whole.folder, part="train").logits) == 30


def test_training_sees_crops_and_evaluation_the_middle(tmp_path):
    images = write_images(tmp_path / "i", sizes=((12, 9),))
    given = SampleData(source="image_folder", args={"path": str(images)}, augment=CROP, resize=FIT)
    part = load(given).parts["train"]
    first = [torch.cat([x for x, _ in part.shuffled(4, seed)]) for seed in (1, 1, 2)]
    assert first[0].shape == (30, 3, 6, 6)
    assert sum(len(x) for x, _ in part.shuffled(29, 1)) == 29  # a batch of one is left out
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])
    evaluated = torch.cat([b.inputs for b in part.batches(4)])
    assert evaluated.shape == (30, 3, 6, 6)
    assert torch.equal(evaluated, torch.cat([b.inputs for b in part.batches(30)]))
    assert part.shape == (3, 6, 6)


@pytest.mark.parametrize("batch", [3, 5])
def test_images_of_two_batches_are_in_memory(tmp_path, monkeypatch, batch):
    """One that the network has, and one that is being decoded; not the 48 of the data set."""
    alive, most = [0], [0]
    decode, fetch = ImageFiles.decode, _Decoding.__getitem__

    def counted(image, number):
        """Add to what is alive until it is no longer."""
        alive[0] += number
        most[0] = max(most[0], alive[0])
        weakref.finalize(image, lambda: alive.__setitem__(0, alive[0] - number))
        return image

    class Counted(np.ndarray):
        """An array that can be referred to weakly."""

    monkeypatch.setattr(
        ImageFiles, "decode", lambda self, i: counted(decode(self, i).view(Counted), 1)
    )
    monkeypatch.setattr(_Decoding, "__getitem__", lambda self, n: counted(fetch(self, n), len(n)))
    path = write_config(tmp_path, write_images(tmp_path / "i"))
    run(path, f"training.batch_size={batch}", "training.epochs=1")
    assert max(batch, 9) <= most[0] <= 2 * max(batch, 9)  # 9 validate, evaluated at once
    gc.collect()
    assert not alive[0]


def test_what_is_damaged_is_named_when_it_is_met(tmp_path):
    images = write_images(tmp_path / "i")
    (images / "train" / "green" / "4.png").write_bytes(b"half an image")
    path = write_config(tmp_path, images)
    for workers in (0, 2):
        with pytest.raises(ValueError, match=r"^\S*train/green/4\.png: not an image that can be"):
            run(path, f"training.workers={workers}", f"output={tmp_path / str(workers)}")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, r"\.png is 8 x 8 and .*\.png 9 x 12: bring all images to one size, with data.resize"),
        ({"augment": [{"target": f"{V2}.Resize", "args": {"size": -1}}]}, "data.augment: "),
        ({"channels": 1}, "data.channels: 1, but images are read with 3"),
        ({"standardise": {"mean": [0.5, 0.5]}}, "data.standardise: 2 values of inputs"),
        ({"standardise": {"std": [0.0]}}, "std"),
        ({"source": "images", "args": {"path": "i", "size": 8}, "resize": FIT},
         "resize: is for images streamed from disk .coco, image_folder"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path, data, message):
    images = write_images(tmp_path / "i", sizes=((8, 8), (12, 9)))
    with pytest.raises(ValueError, match=message):
        run(write_config(tmp_path, images, **data))


def test_a_network_of_one_size_is_tried_on_what_is_evaluated(tmp_path):
    """Training would fail after its first epoch."""
    path = write_config(tmp_path, write_images(tmp_path / "i"), augment=CROP)  # 6 x 6, and 8 x 8
    mlp = "network={target: segcal.classify.networks.MLP, args: {in_features: 108}}"
    with pytest.raises(ValueError, match="in_features is 108 in the config but 192"):
        run(path, mlp)
    vit = (
        "network={target: timm.create_model, args: {model_name: test_vit, img_size: 6, "
        "patch_size: 3}}"
    )
    with pytest.raises(ValueError, match=r"network: fails on inputs \(2, 3, 8, 8\)"):
        run(path, vit)
    assert not (tmp_path / "run").exists()


def test_the_command_says_which_image(tmp_path):
    images = write_images(tmp_path / "i")
    damaged = images / "val" / "blue" / "2.png"
    damaged.write_bytes(damaged.read_bytes()[:50])
    path = write_config(tmp_path, images)
    result = CliRunner().invoke(app, ["classify", "train", str(path)])
    assert result.exit_code == 1
    assert "Stopped: " in result.output
    assert "val/blue/2.png: not an image that can be read" in " ".join(result.output.split())


def test_values_are_standardised_as_those_of_imagenet(tmp_path):
    path = write_config(tmp_path, write_images(tmp_path / "i"))
    network = ClassificationRun(load_experiment(path)).network
    white = torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)
    expected = (1 - np.array([0.485, 0.456, 0.406])) / [0.229, 0.224, 0.225]
    close(network.standardise(white)[0, :, 0, 0], expected, rtol=1e-6)


def test_images_that_have_changed_are_refused(tmp_path):
    images = write_images(tmp_path / "i")
    path = write_config(tmp_path, images)
    run(path, "training.epochs=1")
    write_images(images, n=11)
    data._load.cache_clear()  # as another process finds it
    with pytest.raises(ValueError, match=r"checkpoint_last\.pt: was trained when its data set had"):
        run(path, resume=True)


def test_decoders():
    assert decoders(3) == 3
    assert decoders(0) == 0
    assert 0 <= decoders(None) <= 8


@pytest.mark.parametrize("name", ["imagenet", "imagenet_lt", "tiny_imagenet"])
def test_transforms_of_shipped_experiments(tmp_path, name):
    """They bring images of several sizes, or those of 64 x 64 alone, to one."""
    sizes = ((64, 64),) if name == "tiny_imagenet" else ((80, 64), (300, 280))
    given = load_experiment(name).data
    images = write_images(tmp_path / "i", sizes=sizes, n=2)
    one = data.load(
        given.model_copy(update={"source": "image_folder", "args": {"path": str(images)}})
    )
    side = 64 if name == "tiny_imagenet" else 224
    for part in one.parts.values():
        assert part.shape == (3, side, side)
        inputs, _ = next(part.shuffled(4, 0))
        assert inputs.dtype == torch.uint8
        assert inputs.shape[1:] == (3, side, side)

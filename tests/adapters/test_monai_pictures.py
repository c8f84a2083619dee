"""Pictures: colours as channels, label maps with a palette, sizes that differ, lists of cases."""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from segcal.adapters.monai.building import build_network
from segcal.adapters.monai.checkpoints import read_training
from segcal.adapters.monai.data import Preprocess, ReadCase
from segcal.adapters.monai.dataset import check_cases, find_cases, read_names
from segcal.adapters.monai.deeplab import DeepLab
from segcal.adapters.monai.experiment import VolumeData, load_experiment
from segcal.commands.main import app
from segcal.io.volumes import read_labels
from segcal.training.epoch_log import EpochLog
from tests.adapters.monai_experiments import run, write_config
from tests.conftest import close

pytestmark = pytest.mark.usefixtures("one_thread")

PALETTE = [0, 0, 0, 128, 0, 0, 0, 128, 0, *[0] * 756]
SIZES = [(24, 30), (32, 20), (40, 36), (28, 28), (30, 24), (26, 32)]
"""Heights and widths."""
MEAN, STD = [100.0, 110.0, 120.0], [50.0, 55.0, 60.0]


def write_pictures(folder):
    """Write the layout of VOC2012: red squares and green ones before grey, borders ignored."""
    rng = np.random.default_rng(0)
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    names = [f"2007_00{i:04d}" for i in range(len(SIZES))]
    for name, (height, width) in zip(names, SIZES, strict=True):
        label = np.zeros((height, width), np.uint8)
        label[3:11, 3:11] = 255
        label[4:10, 4:10] = 1
        label[13:21, 8:18] = 2
        colours = np.array([[90, 90, 90], [220, 40, 40], [40, 200, 40]])
        image = colours[np.where(label == 255, 0, label)] + rng.normal(0, 8, (height, width, 3))
        picture = Image.fromarray(image.clip(0, 255).astype(np.uint8))
        picture.save(folder / "JPEGImages" / f"{name}.jpg", quality=95)
        indexed = Image.fromarray(label).convert("L")
        indexed.putpalette(PALETTE)  # as VOC stores its labels
        assert indexed.mode == "P"
        indexed.save(folder / "SegmentationClass" / f"{name}.png")
    Image.new("RGB", (9, 9)).save(folder / "JPEGImages" / "2007_999999.jpg")  # without a label
    lists = folder / "ImageSets" / "Segmentation"
    (lists / "train.txt").write_text("\n".join(names[:4]) + "\n")
    (lists / "val.txt").write_text("\n".join(names[4:]) + "\n")
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures") / "VOC2012")


@pytest.fixture
def voc(tmp_path, original):
    shutil.copytree(original, tmp_path / "VOC2012")
    return tmp_path / "VOC2012"


def data_of(voc, **parts):
    """What an experiment says of the pictures."""
    lists = voc / "ImageSets" / "Segmentation"
    return {
        "images": str(voc / "JPEGImages"), "labels": str(voc / "SegmentationClass"),
        "classes": ["background", "square", "bar"], "ignore": 255, "size": [40, 40],
        "split": {"train": str(lists / "train.txt"), "validation": 0.25},
        "intensity": "fixed", "mean": MEAN, "std": STD, **parts,
    }  # fmt: skip


def test_colours_are_channels_and_a_palette_is_its_numbers(voc):
    data = VolumeData(**data_of(voc))
    cases = find_cases(data)
    assert (cases.channels, cases.ignore_index, cases.classes[1]) == (3, 255, "square")
    assert cases.known_labels == {0, 1, 2, 255}
    found = {case.name: case for case in (*cases.train, *cases.val)}
    assert (len(cases.train), len(cases.val)) == (3, 1)
    assert sorted(found) == read_names(data.split.train)
    grids = check_cases(list(found.values()), 3, cases.known_labels)
    assert {grid.shape for grid in grids} == {(1, *size) for size in SIZES[:4]}
    case = found["2007_000000"]
    item = ReadCase()(case)
    assert item["image"].shape == (3, 1, 24, 30)
    stored = np.array(Image.open(case.images[0]))  # (y, x, colour)
    assert torch.equal(item["image"][:, 0], torch.from_numpy(stored.transpose(2, 0, 1)).float())
    label = item["label"][0, 0]
    assert (label[5, 5], label[3, 3], label[0, 0], label[15, 9]) == (1, 255, 0, 2)
    seen = Preprocess(data)(case)["image"][:, 0]
    expected = (stored[7, 5] - np.array(MEAN)) / STD
    close(seen[:, 7, 5].numpy(), expected, rtol=1e-6)


def test_two_lists_say_who_trains_and_who_validates(voc):
    lists = voc / "ImageSets" / "Segmentation"
    split = {"train": lists / "train.txt", "val": lists / "val.txt"}
    cases = find_cases(VolumeData(**data_of(voc, split=split)))
    assert cases.names == {"train": read_names(split["train"]), "val": read_names(split["val"])}
    (lists / "val.txt").write_text("2007_000004 1\n2007_000000\n")  # what follows is no name
    with pytest.raises(ValueError, match=r"train\.txt: 2007_000000 are listed in .*val\.txt, too"):
        find_cases(VolumeData(**data_of(voc, split=split)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2007_000000\n2007_999999\n", r"train\.txt: no image .* no label map .* for 2007_999999"),
        ("2007_000000\n2007_000000\n", r"train\.txt: .*each once; got 2007_000000 twice"),
        ("\n", r"train\.txt: expected names of cases, one per line, each once; got none"),
    ],
)
def test_lists_that_do_not_fit(voc, text, message):
    (voc / "ImageSets" / "Segmentation" / "train.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        find_cases(VolumeData(**data_of(voc)))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"ignore": 2}, r"ignore: expected a label that is none of the classes, got 2"),
        ({"mean": None}, r"intensity 'fixed' needs mean and std"),
        ({"intensity": "zscore"}, r"intensity 'fixed' needs mean and std"),
        ({"std": [1.0, 0.0, 1.0]}, r"std > 0"),
        ({"mean": [1.0]}, r"mean, std: expected as many"),
        ({"split": {"val": "val.txt"}}, r"val: give also train"),
        ({"split": {"train": "a.txt", "fold": 0}}, r"give either a fold or lists"),
    ],
)
def test_settings_that_do_not_fit(voc, parts, message):
    with pytest.raises(ValueError, match=message):
        VolumeData(**data_of(voc, **parts))


def test_what_does_not_fit_is_named_before_training(voc, tmp_path):
    config = write_config(tmp_path, None, data=data_of(voc), recipe="cals")
    grey = voc / "JPEGImages" / "2007_000001.jpg"
    Image.open(grey).convert("L").save(grey)
    with pytest.raises(ValueError, match=r"000001\.jpg: expected 3 channels, got 1; save all"):
        run(config)
    two = ["data.mean=[1, 2]", "data.std=[1, 2]"]
    with pytest.raises(ValueError, match=r"data\.mean, data\.std: .* each of 3 channels, got 2"):
        run(config, *two)
    colour = voc / "SegmentationClass" / "2007_000002.png"
    Image.open(colour).convert("RGB").save(colour)
    with pytest.raises(ValueError, match=r"000002\.png: expected a label map of grey values"):
        read_labels(colour)
    jpeg = colour.with_suffix(".jpg")
    Image.open(colour).convert("L").save(jpeg)
    with pytest.raises(ValueError, match=r"000002\.jpg: a JPEG does not keep the exact values"):
        read_labels(jpeg)


def test_train_predict_evaluate(voc, tmp_path):
    """With 255 left out, an image of the list as it is predicted, and DSC by hand."""
    config = write_config(
        tmp_path, None, data=data_of(voc, augment=[{
            "target": "monai.transforms.RandFlipd",
            "args": {"keys": ["image", "label"], "prob": 0.5, "spatial_axis": 1},
        }]), recipe="cals", optimizer={"args": {"lr": 0.03}},
        training={"epochs": 40, "batch_size": 2},
    )  # fmt: skip
    done = run(config)
    records = EpochLog(done.folder).records()
    assert records[-1]["miou"] > 0.5 > records[0]["miou"]
    assert np.array(records[-1]["cals"]["lam"]).shape == (1, 3)
    pixels = sum(h * w - 64 + 36 for h, w in [SIZES[i] for i in _validated(done.folder)])
    assert records[-1]["cals"]["count"] == [pixels]  # neither borders nor padding
    lists = voc / "ImageSets" / "Segmentation"
    said = CliRunner().invoke(app, [
        "predict", str(config), "-i", str(voc / "JPEGImages"), "-o", str(tmp_path / "p"),
        "--cases", str(lists / "val.txt"),
    ])  # fmt: skip
    assert said.exit_code == 0, said.output
    names = read_names(lists / "val.txt")
    assert {path.name for path in (tmp_path / "p").iterdir()} == {
        *(f"{name}{end}" for name in names for end in (".npz", ".png")),
        "dataset.json", "segcal_predict.json",
    }  # fmt: skip
    for name, size in zip(names, SIZES[4:], strict=True):
        with np.load(tmp_path / "p" / f"{name}.npz") as stored:
            probabilities = stored["probabilities"]
        assert probabilities.shape == (3, 1, *size)
        mask = np.asarray(Image.open(tmp_path / "p" / f"{name}.png"))
        assert np.array_equal(mask, probabilities.argmax(0)[0])
    labels = json.loads((tmp_path / "p" / "dataset.json").read_text())["labels"]
    assert labels == {"background": 0, "square": 1, "bar": 2, "ignore": 255}
    wanted = voc / "SegmentationClass"
    said = CliRunner().invoke(app, [
        "evaluate", str(tmp_path / "p"), str(wanted), "-o", str(tmp_path / "r"),
        "--cases", str(lists / "val.txt"),
    ])  # fmt: skip
    assert said.exit_code == 0, said.output
    both = union = np.zeros(2)
    rows = pd.read_csv(tmp_path / "r" / "cases.csv").set_index("case")
    for name in names:
        predicted = np.asarray(Image.open(tmp_path / "p" / f"{name}.png"))
        label = np.asarray(Image.open(wanted / f"{name}.png"))
        ours, theirs = (predicted == 2) & (label != 255), label == 2
        dsc = 2 * (ours & theirs).sum() / (ours.sum() + theirs.sum())
        close(rows.loc[name, "dsc/bar"], dsc)
        known = label != 255
        both = both + [((predicted == k) & (label == k)).sum() for k in (1, 2)]
        union = union + [(((predicted == k) & known) | (label == k)).sum() for k in (1, 2)]
        assert rows.loc[name, "voxels_reference/square"] == 36
    iou = both / union
    found = json.loads((tmp_path / "r" / "summary.json").read_text())["pooled_iou"]
    close([found["mean"], *found["classes"].values()], [iou.mean(), *iou], rtol=1e-9)
    assert f"of all cases together: {iou.mean():.4f}" in " ".join(said.output.split())
    said = CliRunner().invoke(app, [
        "predict", str(config), "-i", str(voc / "JPEGImages"), "--format", "nifti",
    ])  # fmt: skip
    assert said.exit_code == 2
    assert "pictures have no voxel size" in " ".join(said.output.split())


def _validated(folder):
    """Numbers of the cases that validated."""
    made = json.loads((folder / "run.json").read_text())
    return [int(name[-4:]) for name in made["cases"]["val"]]


def test_colour_pictures_in_the_layout_of_nnunet(voc, tmp_path):
    """One file CASE_0000.png holds the channels that dataset.json names; ignore comes last."""
    root = tmp_path / "Dataset001_Pictures"
    for folder in ("imagesTr", "labelsTr", "imagesTs"):
        (root / folder).mkdir(parents=True)
    for path in sorted((voc / "SegmentationClass").iterdir()):
        label = np.array(Image.open(path))
        Image.fromarray(np.where(label == 255, 3, label)).save(root / "labelsTr" / path.name)
        image = Image.open(voc / "JPEGImages" / f"{path.stem}.jpg")
        image.save(root / "imagesTr" / f"{path.stem}_0000.png")
    shutil.copy(root / "imagesTr" / "2007_000000_0000.png", root / "imagesTs")
    (root / "dataset.json").write_text(json.dumps({
        "channel_names": {"0": "R", "1": "G", "2": "B"}, "numTraining": len(SIZES),
        "labels": {"background": 0, "square": 1, "bar": 2, "ignore": 3}, "file_ending": ".png",
    }))  # fmt: skip
    config = write_config(
        tmp_path, root, data={"size": [40, 40], "crop": "center"}, recipe="ce",
        training={"epochs": 1},
    )  # fmt: skip
    done = run(config)
    assert read_training(done.folder / "checkpoint_best.pt")["channels"] == 3
    said = CliRunner().invoke(app, ["predict", str(config)])
    assert said.exit_code == 0, said.output
    assert (done.folder / "predictions" / "2007_000000.png").is_file()


DEEPLAB = {"target": "segcal.adapters.monai.deeplab.DeepLab", "args": {"backbone": "resnet10t"}}


def test_deeplab_trains_in_batches_of_two_or_more(voc, tmp_path):
    """Its batch norm of a mean over the image knows no deviation of a single image."""
    settings = {"epochs": 1, "batch_size": 3}
    config = write_config(
        tmp_path, None, data=data_of(voc), recipe="cals", network=DEEPLAB, training=settings
    )
    done = run(config)  # three train
    assert np.isfinite(EpochLog(done.folder).records()[0]["miou"])
    with pytest.raises(ValueError, match=r"batch_size leaves no last batch of one sample"):
        run(config, "training.batch_size=2", f"output={tmp_path / 'two'}")
    with pytest.raises(ValueError, match=r"batch_size leaves no last batch of one sample"):
        run(config, "training.batch_size=1", f"output={tmp_path / 'one'}")


def test_deeplab_is_that_of_torchvision():
    """With a backbone whose features are known, the head's logits brought to the image's size."""
    network = DeepLab(3, 4, "resnet34").eval()
    features = network.backbone(torch.zeros(1, 3, 64, 48))
    assert [tuple(one.shape) for one in features] == [(1, 512, 8, 6)]  # an eighth
    assert network(torch.zeros(2, 3, 61, 45)).shape == (2, 4, 61, 45)
    dilations = {m.dilation[0] for m in network.head.modules() if isinstance(m, torch.nn.Conv2d)}
    assert dilations == {1, 12, 24, 36}
    with pytest.raises(ValueError, match=r"backbone: .*resnet99"):
        DeepLab(3, 4, "resnet99")


def test_weights_from_elsewhere_are_left_out_where_a_checkpoint_comes(monkeypatch):
    """Nothing is downloaded to predict or to go on."""
    DeepLab(1, 2, "resnet10t")  # which imports it
    timm = sys.modules["timm"]
    made = timm.create_model
    asked = []

    def record(*arguments, pretrained, **options):
        asked.append(pretrained)
        return made(*arguments, pretrained=False, **options)

    monkeypatch.setattr(timm, "create_model", record)
    experiment = load_experiment("voc2012/deeplabv3")
    build_network(experiment, 3, 21, fresh=False)
    build_network(experiment, 3, 21)
    assert asked == [False, True]


def test_the_shipped_experiment_is_the_published_protocol():
    experiment = load_experiment("voc2012/deeplabv3")
    assert len(experiment.data.classes) == 21
    assert experiment.data.ignore == 255
    assert experiment.optimizer.args == {"lr": 1e-3, "weight_decay": 5e-4}
    assert (experiment.training.epochs, experiment.training.batch_size) == (100, 8)
    assert experiment.scheduler.args == {"T_max": 100}
    assert sum(p.numel() for p in build_network(experiment, 3, 21, fresh=False).parameters()) == (
        26_012_245
    )

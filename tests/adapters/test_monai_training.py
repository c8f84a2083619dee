"""The MONAI trainer: learns, is interrupted, runs in two processes, predicts what is evaluated."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from segcal.adapters.monai.checkpoints import read_training
from segcal.adapters.monai.experiment import load_experiment
from segcal.adapters.monai.inference import Predictor, predict_cases
from segcal.adapters.monai.training import SegmentationRun
from segcal.binning import equal_width_statistics
from segcal.commands.main import app
from segcal.datasets.phantom import PhantomSettings, write_phantom_dataset
from segcal.evaluation.api import evaluate
from segcal.io.volumes import Geometry, read_labels, read_volume, write_nifti
from segcal.metrics.iou import confusion_matrix, mean_dice, mean_iou
from segcal.repair.saved import read_calibrator
from segcal.schedule import generalisation_gap
from segcal.training.epoch_log import EpochLog
from segcal.training.time_limit import OutOfTimeError
from tests.adapters.monai_experiments import apart_main, rank_main, run, write_config
from tests.conftest import close
from tests.ranks import in_two_processes

pytestmark = pytest.mark.usefixtures("one_thread", "plain_progress")
TERMS = r"cross_entropy \d\.\d+"
AUGMENT = [
    {"target": f"monai.transforms.{name}", "args": arguments}
    for name, arguments in (
        ("RandFlipd", {"keys": ["image", "label"], "prob": 0.5, "spatial_axis": 0}),
        ("RandGaussianNoised", {"keys": ["image"], "prob": 0.5}),
    )
]
DROPOUT = {
    "target": "monai.networks.nets.UNet",
    "args": {"channels": [4, 8], "strides": [2], "num_res_units": 1, "dropout": 0.2},
}


@pytest.fixture(scope="module")
def phantom(tmp_path_factory):
    """Four training cases of 5 slices, so that the last batch is smaller, and two test cases."""
    root = tmp_path_factory.mktemp("data") / "phantom"
    write_phantom_dataset(
        root, train=4, test=2, seed=0, settings=PhantomSettings(shape=(5, 32, 32))
    )
    return root


def tensors(content, prefix=""):
    """Every tensor and number of a checkpoint, by name."""
    if isinstance(content, dict):
        items = content.items()
    elif isinstance(content, (list, tuple)):
        items = enumerate(content)
    else:
        return {prefix: content}
    return {k: v for name, x in items for k, v in tensors(x, f"{prefix}.{name}").items()}


def assert_same_state(a, b, *, but=("experiment",), exactly=True):
    one, two = (
        tensors({k: v for k, v in read_training(p).items() if k not in but}) for p in (a, b)
    )
    assert one.keys() == two.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            rtol, atol = (0, 0) if exactly else (1e-4, 1e-6)
            torch.testing.assert_close(
                value, two[name], rtol=rtol, atol=atol, equal_nan=True, msg=name
            )
        elif isinstance(value, float) and not exactly:
            assert value == pytest.approx(two[name], abs=1e-5), name
        else:
            assert value == two[name], name


def test_a_training_learns_and_keeps_the_best_epoch(tmp_path, phantom, pictures):
    states = []
    path = write_config(tmp_path, phantom)
    done = run(path, "training.epochs=4", "scheduler.target=torch.optim.lr_scheduler.StepLR",
               "scheduler.args={step_size: 3}", advance=states.append)  # fmt: skip
    records = EpochLog(done.folder).records()
    assert [r["epoch"] for r in records] == [0, 1, 2, 3]
    assert [r["lr"] for r in records] == pytest.approx([0.01] * 3 + [0.001])
    assert len(states) == 4 * 4  # 15 slices in batches of 4
    for phase in ("train", "val"):
        assert set(records[0][phase]) == {"cross_entropy", "soft_dice", "crac"}
        assert records[-1][phase]["cross_entropy"] < 0.8 * records[0][phase]["cross_entropy"]
    lam = np.array([r["crac"]["lam"] for r in records])
    assert lam.shape == (4, 2, 4)
    assert [r["crac"]["step"] for r in records] == [1, 2, 3, 4]
    assert not np.array_equal(lam[0], lam[-1])
    mious = [r["miou"] for r in records]
    assert done.best_epoch == int(np.argmax(mious))
    assert done.best == max(mious)
    best = read_training(done.folder / "checkpoint_best.pt")
    assert best["epoch"] == done.best_epoch + 1
    # saved after the update of its epoch
    saved = best["objective"]["terms.crac.lam"].tolist()
    assert saved == records[done.best_epoch]["crac"]["lam"]
    made = json.loads((done.folder / "run.json").read_text())
    (started,) = made["runs"]
    assert (started["seed"], started["first_epoch"]) == (1, 0)
    assert len(made["cases"]["train"]) == 3
    assert {"torch", "monai", "segcal"} < started["versions"].keys()
    assert load_experiment(done.folder / "config.yaml").training.epochs == 4
    assert (done.folder / "segcal_progress.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match=r"run: holds a training; resume it, or choose another"):
        run(path)


def test_a_transform_without_its_key_is_refused_before_training(tmp_path, phantom):
    augment = [{"target": "monai.transforms.RandFlipd", "args": {"keys": ["img"], "prob": 1.0}}]
    path = write_config(tmp_path, phantom, data={"augment": augment})
    with pytest.raises(ValueError, match=r"data\.augment: fails on the first sample \(KeyError"):
        run(path)
    assert not (tmp_path / "run" / "run.json").exists()


def test_logged_metrics_are_those_of_the_predictions(tmp_path, phantom):
    path = write_config(tmp_path, phantom, recipe="ce", training={"epochs": 1})
    done = run(path)
    (record,) = EpochLog(done.folder).records()
    predictor = Predictor(load_experiment(path), "last")
    (case,) = predictor.cases(None, validation=True)
    p = predictor.predict(case)[0]
    p, y = p.numpy().astype(np.float64), read_labels(case.label).array
    top = p.argmax(0)
    ious = [
        ((top == k) & (y == k)).sum() / ((top == k) | (y == k)).sum()
        for k in (1, 2, 3)
        if ((top == k) | (y == k)).any()
    ]
    assert record["miou"] == pytest.approx(np.mean(ious), rel=1e-12)
    bins = np.clip(np.ceil(p.max(0) * 15).astype(int) - 1, 0, 14)
    ece = sum(abs((top == y)[bins == b].sum() - p.max(0)[bins == b].sum()) for b in range(15))
    assert record["ece"] == pytest.approx(ece / y.size, abs=1e-6)
    ce = -np.log(np.take_along_axis(p, y[None].astype(int), 0)).mean()
    assert record["val"]["cross_entropy"] == pytest.approx(ce, rel=1e-5)


@pytest.mark.parametrize("recipe", ["crac", "bwcr", "two heads"])
def test_a_killed_training_goes_on_as_if_it_had_not_been(tmp_path, phantom, recipe):
    data = {"size": [24, 24], "crop": "random", "foreground": 0.5, "augment": AUGMENT}
    if recipe == "two heads":
        recipe = str(two_heads(tmp_path))
    path = write_config(
        tmp_path,
        phantom,
        data=data,
        network=DROPOUT,
        recipe=recipe,
        scheduler={"target": "torch.optim.lr_scheduler.StepLR", "args": {"step_size": 2}},
        training={"epochs": 3},
    )
    whole = run(path, f"output={tmp_path}/whole")
    calls = []

    def killed(state):
        calls.append(state)
        if len(calls) == 6:  # in the second epoch
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(path, f"output={tmp_path}/killed", advance=killed)
    log = EpochLog(tmp_path / "killed")
    with log.path.open("a") as file:
        file.write('{"epoch": 1, "tr')  # as if killed while it wrote
    (tmp_path / "killed" / ".segcal-abcdefgh-checkpoint_last.pt").write_bytes(b"half")
    again = run(path, f"output={tmp_path}/killed", resume=True)
    assert again.epochs == whole.epochs == 3
    assert not list((tmp_path / "killed").glob(".segcal-*"))
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        assert_same_state(whole.folder / name, again.folder / name)
    one, two = (EpochLog(t.folder).records() for t in (whole, again))
    for record in (*one, *two):
        del record["seconds"]
    assert one == two
    finished = run(path, f"output={tmp_path}/killed", resume=True)
    assert finished == again  # nothing is left to do


def test_a_schedule_by_the_gap_follows_the_epoch_before(tmp_path, phantom, pictures):
    path = write_config(tmp_path, phantom, recipe="confidence")
    done = run(path, "training.epochs=3")
    records = EpochLog(done.folder).records()
    factor = gap = 0.0
    for record in records:
        assert record["weights"] == {
            "ml1_ace_soft": pytest.approx(factor), "confidence": pytest.approx(factor)
        }  # fmt: skip
        losses = (record[phase]["cross_entropy"] for phase in ("train", "val"))
        gap = 0.7 * gap + 0.3 * generalisation_gap(*losses)
        factor = min(max((gap - 0.1) / 0.4, 0), 1)
    assert run(path, "training.epochs=3", resume=True) == done


PLAIN = {
    "target": "monai.networks.nets.DynUNet",
    "args": {
        "kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2],
        "filters": [4, 8, 8],
    },
}  # fmt: skip
SUM = {
    "target": "monai.networks.nets.UNet",
    "args": {"channels": [4, 8], "strides": [2], "num_res_units": 2},
}


def test_a_temperature_becomes_part_of_the_best_network(tmp_path, phantom, pictures):
    said = []
    path = write_config(tmp_path, phantom, recipe="confidence", network=PLAIN)
    done = run(path, "training.epochs=4", said=said)
    last, best = (
        torch.load(done.folder / name, weights_only=True)
        for name in ("checkpoint_last.pt", "checkpoint_best.pt")
    )
    assert "temperature" in best, said
    (t,) = best["temperature"]
    assert "temperature" not in last  # which training goes on from
    assert any(text.startswith(f"Temperature {t:.4g}, by which the last layer") for text in said)
    changed = {k for k, v in best["network"].items() if not torch.equal(v, last["network"][k])}
    assert changed == {"output_block.conv.conv.weight", "output_block.conv.conv.bias"}
    for name in changed:
        close(best["network"][name], last["network"][name] / t, rtol=1e-6)
    experiment = load_experiment(done.folder / "config.yaml")
    logits = []
    for which in ("last", "best"):
        predictor = Predictor(experiment, which)
        (case, *_) = predictor.cases(None, validation=True)
        logits.append(predictor.predict(case)[0].double().log())
    before, after = (one - one.mean(0) for one in logits)
    close(after, before / t, rtol=1e-3, atol=1e-3)
    # gone on with, a better epoch is divided by its own
    more = run(path, "training.epochs=6", resume=True)
    best = torch.load(more.folder / "checkpoint_best.pt", weights_only=True)
    assert (best["temperature"] == [t]) == (more.best_epoch == done.best_epoch)
    content = (more.folder / "checkpoint_best.pt").read_bytes()
    run(path, "training.epochs=6", resume=True)
    assert (more.folder / "checkpoint_best.pt").read_bytes() == content


def test_a_network_whose_output_is_a_sum_keeps_its_logits(tmp_path, phantom, pictures):
    said = []
    path = write_config(tmp_path, phantom, recipe="confidence", network=SUM)
    done = run(path, "training.epochs=1", said=said)
    assert any("checkpoint_best.pt was left without a temperature" in text for text in said)
    assert "temperature" not in torch.load(done.folder / "checkpoint_best.pt", weights_only=True)


def two_heads(folder):
    """A recipe of two heads, with schedules; one waits for a Dice that is reached at once."""
    path = folder / "two.yaml"
    path.write_text(
        "base: {cross_entropy: 1.0, soft_dice: 1.0}\n"
        "probability: {base: {svls: 1.0}, penalties: {crac: 1.0}}\n"
        "schedule:\n"
        "  soft_dice: {from: 1, to: 0.5, start: 0.2, end: 0.8}\n"
        "  svls: {from: 0.1, to: 1, end: 0.5, dice: 0.001}\n"
    )
    return path


def test_a_network_of_two_heads(tmp_path, phantom, pictures):
    path = write_config(tmp_path, phantom, recipe=str(two_heads(tmp_path)))
    done = run(path, "training.epochs=3")
    records = EpochLog(done.folder).records()
    names = ["decision/cross_entropy", "decision/soft_dice", "probability/svls"]
    assert list(records[0]["train"]) == list(records[0]["val"]) == [*names, "probability/crac"]
    assert np.array(records[-1]["probability/crac"]["lam"]).shape == (2, 4)
    weights = [tuple(r["weights"].values()) for r in records]
    assert list(records[0]["weights"]) == names[1:]
    ramps = [(1.0, 0.1), (1 - 0.5 * (1 / 3 - 0.2) / 0.6, 0.1), (1 - 0.5 * (2 / 3 - 0.2) / 0.6, 0.7)]
    assert weights == [pytest.approx(pair) for pair in ramps]
    assert all(0 < r["dice"] < 1 for r in records)
    # the mask is the decision head's, the probabilities are the other's
    predictor = Predictor(load_experiment(done.folder / "config.yaml"), "last")
    (case,) = predictor.cases(None, validation=True)
    probs, decision, _ = predictor.predict(case)
    predict_cases(predictor, [case], tmp_path / "p", "npz")
    mask = read_labels(tmp_path / "p" / f"{case.name}.nii.gz").array
    np.testing.assert_array_equal(mask, decision.argmax(0))
    assert (mask != probs.argmax(0).numpy()).any()
    with np.load(tmp_path / "p" / f"{case.name}.npz") as file:
        np.testing.assert_array_equal(file["probabilities"], probs)
    record = json.loads((tmp_path / "p" / "segcal_predict.json").read_text())
    assert (record["heads"], record["decision"]) == (2, "decision head")
    y = read_labels(case.label).array
    hits = probs.argmax(0) == torch.from_numpy(y.astype(np.int64))
    bins = equal_width_statistics(probs.max(0)[0].flatten(), hits.flatten(), 15)
    assert records[-1]["ece"] == pytest.approx(bins.expected_error(), abs=1e-6)
    confusion = confusion_matrix(mask, y, 4)
    assert records[-1]["dice"] == pytest.approx(mean_dice(confusion), abs=1e-6)
    assert records[-1]["miou"] == pytest.approx(mean_iou(confusion), abs=1e-6)
    predict_cases(predictor, [case], tmp_path / "q", "nifti")
    (tmp_path / "y").mkdir()
    shutil.copy(case.label, tmp_path / "y")
    (notes,) = evaluate(tmp_path / "q", tmp_path / "y").notes.values()
    assert any("the mask of the decision head is not beside it" in note for note in notes)
    written = read_labels(tmp_path / "q" / "masks" / f"{case.name}.nii.gz").array
    np.testing.assert_array_equal(written, mask)


def test_a_training_goes_on_only_as_it_began(tmp_path, phantom):
    path = write_config(tmp_path, phantom, recipe="ce", training={"epochs": 1})
    done = run(path)
    with pytest.raises(ValueError, match=r"was trained with optimizer.args = .*0.01.*, not .*0.5"):
        run(path, "optimizer.args.lr=0.5", resume=True)
    fewer = tmp_path / "fewer"
    shutil.copytree(phantom, fewer)
    name = json.loads((done.folder / "run.json").read_text())["cases"]["train"][0]
    (fewer / "imagesTr" / f"{name}_0000.nii.gz").unlink()
    (fewer / "labelsTr" / f"{name}.nii.gz").unlink()
    with pytest.raises(ValueError, match=r"last\.pt: was trained and validated on other cases"):
        run(path, f"data.root={fewer}", resume=True)
    assert run(path, "training.epochs=2", resume=True).epochs == 2


def test_seeds_and_not_workers_make_the_difference(tmp_path, phantom):
    path = write_config(tmp_path, phantom, recipe="ce", training={"epochs": 1})
    for name, seed, workers in (("a", 1, 0), ("b", 1, 1), ("c", 2, 0)):
        run(path, f"output={tmp_path}/{name}", f"training.seed={seed}",
            f"training.workers={workers}")  # fmt: skip
    last = "checkpoint_last.pt"
    assert_same_state(tmp_path / "a" / last, tmp_path / "b" / last)
    with pytest.raises(AssertionError):
        assert_same_state(tmp_path / "a" / last, tmp_path / "c" / last)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("bwcr_published", []),
        ("svls", []),
        ("nacl", ["terms.nacl.kernel=image_l1"]),
        ("cals", ["training.precision=bf16"]),
    ],
)
def test_recipes_of_every_kind(tmp_path, phantom, recipe, settings):
    path = write_config(tmp_path, phantom, recipe=recipe, training={"epochs": 1})
    done = run(path, *settings)
    (record,) = EpochLog(done.folder).records()
    assert np.isfinite(list(record["train"].values())).all()
    assert ("bwcr_published" in record["train"]) == (recipe == "bwcr_published")
    assert ("cals" in record) == (recipe == "cals")


def test_3d_patches_and_resampling(tmp_path, phantom):
    data = {
        "size": [4, 16, 16], "units": "patches", "crop": "random", "foreground": 0.5,
        "per_volume": 2, "spacing_mm": [None, 2.0, 2.0],
    }  # fmt: skip
    path = write_config(tmp_path, phantom, data=data, training={"epochs": 1, "batch_size": 2})
    states = []
    done = run(path, advance=states.append)
    assert len(states) == 3  # 3 volumes, 2 patches of each
    predictor = Predictor(load_experiment(path), "best")
    cases = predictor.cases(None)
    predict_cases(predictor, cases, done.folder / "p", "nifti")
    for case in cases:
        written = read_volume(done.folder / "p" / f"{case.name}.nii.gz")
        assert not written.geometry.differences(read_volume(case.images[0]).geometry, 1e-4)
        np.testing.assert_allclose(written.array.sum(0), 1, atol=1e-5)


def test_a_collapse_is_told_once(tmp_path, phantom):
    # logits w_k x: only the classes of the largest and the smallest w are ever predicted
    lines = {"target": "torch.nn.Conv2d", "args": {"kernel_size": 1, "bias": False}}
    path = write_config(tmp_path, phantom, network=lines, recipe="ce", training={"epochs": 4})
    said = []
    run(path, "optimizer.args.lr=0.0", said=said)
    assert said[0] == "Checking and reading 3 training and 1 validation cases"
    told = [text for text in said if "labelled in validation but not predicted" in text]
    assert len(told) == 1
    assert told[0].startswith("epoch 2: ")
    assert " for 3 epochs or more: the network may have collapsed" in told[0]
    state = rf"epoch 0: mean IoU 0\.\d+, ECE 0\.\d+; train {TERMS}; val {TERMS}; \d+\.\d s"
    assert re.fullmatch(state, said[1])


def test_a_network_that_is_lost_stops_the_training(tmp_path, phantom):
    path = write_config(tmp_path, phantom, recipe="ce")
    with pytest.raises(FloatingPointError, match="logits are no longer finite"):
        run(path, "optimizer.args.lr=1.0e+30")
    assert not (tmp_path / "run" / "checkpoint_last.pt").exists()


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path, phantom):
    # Adam would blow up the rounding of biases before a normalisation, whose gradient is 0
    path = write_config(
        tmp_path, phantom, training={"epochs": 2, "val_batch_size": 2},
        optimizer={"target": "torch.optim.SGD", "args": {"lr": 0.1, "momentum": 0.9}},
    )  # fmt: skip
    one = run(path, f"output={tmp_path}/one")
    jobs = [
        (path, [f"output={tmp_path}/two"]),
        (path, [f"output={tmp_path}/views", "recipe=bwcr", "training.epochs=1"]),
    ]
    batch_norm = "network.args={channels: [4, 8], strides: [2], num_res_units: 1, norm: batch}"
    jobs.append((path, [f"output={tmp_path}/norm", batch_norm, "training.epochs=1"]))
    in_two_processes(rank_main, jobs, groups=len(jobs))
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        assert_same_state(one.folder / name, tmp_path / "two" / name, exactly=False)
    a, b = (EpochLog(folder).records() for folder in (one.folder, tmp_path / "two"))
    assert len(a) == len(b) == 2
    for x, y in zip(a, b, strict=True):
        assert x["train"] == pytest.approx(y["train"], rel=1e-5)
        assert x["val"] == pytest.approx(y["val"], rel=1e-5)
        assert x["crac"]["count"] == y["crac"]["count"]
        assert (x["miou"], x["ece"]) == pytest.approx((y["miou"], y["ece"]), abs=1e-5)
    assert json.loads((tmp_path / "two" / "run.json").read_text())["runs"][0]["processes"] == 2
    assert len(EpochLog(tmp_path / "views").records()) == 1
    # all validate the network that is saved: its batch norm's statistics are those of one process
    predictor = Predictor(load_experiment(tmp_path / "norm" / "config.yaml"), "last")
    (case,) = predictor.cases(None, validation=True)
    p, y = predictor.predict(case)[0].double(), read_labels(case.label).array.astype(int)
    (record,) = EpochLog(tmp_path / "norm").records()
    ce = -np.log(np.take_along_axis(p.numpy(), y[None], 0)).mean()
    assert record["val"]["cross_entropy"] == pytest.approx(ce, rel=1e-5)


@pytest.mark.slow
def test_processes_that_find_different_checkpoints_stop(tmp_path, phantom):
    path = write_config(tmp_path, phantom, recipe="ce", training={"epochs": 1, "val_batch_size": 2})
    done = run(path)
    outputs = [str(done.folder), str(tmp_path / "elsewhere")]
    in_two_processes(apart_main, path, outputs)
    assert not (tmp_path / "elsewhere").exists()


OBLIQUE = Geometry(
    shape=(7, 41, 37),
    spacing_mm=(5.0, 0.7, 1.3),
    origin_mm=(-31.0, 12.5, 88.0),
    direction=np.linalg.qr(np.array([[1.0, 0.2, 0.1], [-0.3, 1.0, 0.2], [0.1, -0.1, -1.0]]))[0],
)


@pytest.fixture
def oblique(tmp_path):
    """Two images of random values on an oblique, anisotropic grid, and their labels."""
    random = np.random.default_rng(0)
    for name in ("p1_a", "p2_a"):
        image = random.normal(100, 20, OBLIQUE.shape)
        write_nifti(tmp_path / "images" / f"{name}.nii.gz", image, OBLIQUE)
        write_nifti(tmp_path / "labels" / f"{name}.nii.gz", (image > 110).astype(np.uint8), OBLIQUE)
    return tmp_path


@pytest.mark.parametrize(
    ("units", "axis", "size", "crop"),
    [
        ("slices", "z", [32, 32], "center"),
        ("slices", "y", [4, 48], "random"),
        ("slices", "x", [8, 16], "random"),
        ("patches", "z", [8, 16, 48], "random"),
    ],
)
def test_probabilities_lie_where_the_image_does(oblique, units, axis, size, crop):
    data = {
        "images": str(oblique / "images"), "labels": str(oblique / "labels"),
        "classes": ["background", "bright"], "units": units, "axis": axis, "size": size,
        "crop": crop, "split": {"validation": 0.5},
    }  # fmt: skip
    path = write_config(oblique, None, data=data, recipe="ce", training={"epochs": 1})
    run(path)
    predictor = Predictor(load_experiment(path), "best")
    # voxel by voxel the logit is the intensity, whatever the windows
    predictor.network = lambda x: torch.cat([torch.zeros_like(x), x], 1)
    (case, _) = predictor.cases(oblique / "images")
    predict_cases(predictor, [case], oblique / "out", "npz")
    predict_cases(predictor, [case], oblique / "out", "nifti")
    assert not list((oblique / "out").glob("*.npz"))  # of the run before
    predict_cases(predictor, [case], oblique / "out2", "npz")
    image = read_volume(case.images[0])
    x = image.array.astype(np.float64)
    expected = 1 / (1 + np.exp(-(x - x.mean()) / x.std()))
    written = read_volume(oblique / "out" / "p1_a.nii.gz")
    assert not written.geometry.differences(image.geometry, 1e-4)
    np.testing.assert_allclose(written.array, [1 - expected, expected], atol=1e-5)
    stored = np.load(oblique / "out2" / "p1_a.npz")["probabilities"]
    np.testing.assert_array_equal(stored, written.array)
    top = read_labels(oblique / "out2" / "p1_a.nii.gz")
    np.testing.assert_array_equal(top.array, stored.argmax(0))
    assert not top.geometry.differences(image.geometry, 1e-4)


def test_windows_are_averaged_as_probabilities(oblique):
    data = {
        "images": str(oblique / "images"), "labels": str(oblique / "labels"),
        "classes": ["background", "bright"], "size": [41, 20], "crop": "random",
    }  # fmt: skip
    network = {
        "target": "monai.networks.nets.UNet",
        "args": {"channels": [4, 8], "strides": [1], "num_res_units": 1},
    }
    path = write_config(
        oblique, None, data=data, network=network, recipe="ce", training={"epochs": 1},
        inference={"overlap": 0.15, "blend": "constant"},
    )  # fmt: skip
    run(path)
    predictor = Predictor(load_experiment(path), "best")

    def mean_as_logit(x):
        logit = 30 * x.mean((1, 2, 3), keepdim=True).expand_as(x)
        return torch.cat([torch.zeros_like(x), logit], 1)

    predictor.network = mean_as_logit
    case = predictor.cases(oblique / "images")[0]
    probs = predictor.predict(case)[0]
    x = read_volume(case.images[0]).array.astype(np.float64)
    x = (x - x.mean()) / x.std()
    p = 1 / (1 + np.exp(-30 * np.stack([x[:, :, :20].mean((1, 2)), x[:, :, 17:].mean((1, 2))])))
    np.testing.assert_allclose(probs[1, :, 5, 10], p[0], atol=1e-4)
    np.testing.assert_allclose(probs[1, :, 5, 30], p[1], atol=1e-4)
    np.testing.assert_allclose(probs[1, :, 5, 18], p.mean(0), atol=1e-4)


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_train_predict_evaluate(tmp_path, phantom):
    path = write_config(tmp_path, phantom, output=f"{tmp_path}/runs/{{recipe}}")
    settings = ("--set", "recipe=nacl", "--set", "training.epochs=2")
    out = invoke("train", path, *settings)
    assert "2 epochs, done. Best: epoch" in out
    assert "Next: segcal predict" in out
    invoke("predict", path, *settings, "-o", tmp_path / "npz")
    invoke("predict", path, *settings, "-o", tmp_path / "nii", "--format", "nifti")
    invoke("predict", tmp_path / "runs" / "nacl" / "config.yaml", "--validation", "--checkpoint",
           "last")  # fmt: skip
    assert len(list((tmp_path / "runs" / "nacl" / "predictions_validation").glob("*.npz"))) == 1
    made = json.loads((tmp_path / "npz" / "segcal_predict.json").read_text())
    assert made["average"] == "prob"
    invoke("evaluate", tmp_path / "npz", tmp_path / "nii", phantom / "labelsTs", "-o",
           tmp_path / "report", "-p", 1)  # fmt: skip
    one, two = (
        json.loads((tmp_path / "report" / name / "summary.json").read_text())
        for name in ("npz", "nii")
    )
    assert one["pooled"] == two["pooled"]
    assert "left ventricle" in json.dumps(one)
    result = CliRunner().invoke(app, ["predict", str(path)])
    assert result.exit_code == 2
    assert "checkpoint_best.pt: no such file; train first" in result.output


def test_a_training_ends_with_the_calibrator_of_its_recipe(tmp_path, phantom):
    path = write_config(tmp_path, phantom, output=f"{tmp_path}/runs/{{recipe}}")
    runs = tmp_path / "runs"
    chosen = ("--set", "recipe=confidence")
    said = invoke("train", path, *chosen, "--no-calibrate")
    assert "fitted to" not in said
    assert not (runs / "confidence" / "calibrator.json").exists()
    said = invoke("train", path, *chosen, "--resume")  # nothing is left to train
    assert "class_region_case fitted to 1 validation cases, NLL" in said
    saved = read_calibrator(runs / "confidence" / "calibrator.json")
    assert saved.fitted_on["predictions"] == str(runs / "confidence" / "predictions_validation")
    assert f"Calibrated by {runs / 'confidence' / 'calibrator.json'}" in invoke(
        "predict", path, *chosen
    )
    assert "fitted to" not in invoke("train", path, "--set", "recipe=ce")
    said = invoke("train", path, "--set", "recipe=ce", "--resume", "--calibrate", "--method",
                  "temperature")  # fmt: skip
    assert "temperature fitted to 1 validation cases" in said
    for wrong, told in (
        (["--method", "vector"], "give --calibrate, too"),
        (["--calibrate", "--method", "unheard"], "--method unheard: expected one of"),
    ):
        done = CliRunner().invoke(app, ["train", str(path), *wrong])
        assert done.exit_code == 2
        assert told in done.output.replace("\n", " ")
    assert not (runs / "crac").exists()


def test_a_recipes_calibrator_that_cannot_be_fitted_costs_no_training(
    tmp_path, phantom, monkeypatch
):
    def fails(*arguments, **options):
        raise ValueError("too few voxels")

    monkeypatch.setattr("segcal.adapters.monai.calibration.fit_calibrator", fails)
    path = write_config(tmp_path, phantom, recipe="confidence", training={"epochs": 1})
    assert "WARNING: no calibrator was fitted: too few voxels" in invoke("train", path)
    done = CliRunner().invoke(app, ["train", str(path), "--resume", "--calibrate"])
    assert done.exit_code == 2
    assert "too few voxels" in done.output


def test_predictions_do_not_replace_data(tmp_path, phantom):
    path = write_config(tmp_path, phantom, recipe="ce", training={"epochs": 1})
    run(path)
    other = shutil.copytree(phantom / "imagesTs", tmp_path / "other")
    before = {p: p.read_bytes() for p in (*phantom.rglob("*.*"), *other.iterdir())}
    for options in (
        ("-o", phantom), ("-o", phantom / "imagesTs"), ("-o", phantom / "labelsTs"),
        ("-o", phantom / "labelsTr", "--validation"), ("-o", other, "--input", other),
    ):  # fmt: skip
        result = CliRunner().invoke(app, ["predict", str(path), *map(str, options)])
        assert result.exit_code == 2
        assert "choose another folder" in result.output
    assert {p: p.read_bytes() for p in (*phantom.rglob("*.*"), *other.iterdir())} == before


def test_tensorboard(tmp_path, phantom):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = run(write_config(tmp_path, phantom))
    events = EventAccumulator(str(done.folder / "tensorboard"))
    events.Reload()
    records = EpochLog(done.folder).records()
    scalars = [(e.step, e.value) for e in events.Scalars("ece")]
    assert scalars == [(r["epoch"], pytest.approx(r["ece"])) for r in records]
    assert "crac/lam_0/background" in events.Tags()["scalars"]


def test_gaps_of_confidence_are_logged_and_drawn(tmp_path, phantom, pictures):
    """A penalty without rho: TensorBoard, the log and the figure do without, too."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: {cross_entropy: 1.0}\npenalties: {confidence: 1.0}\n")
    done = run(write_config(tmp_path, phantom, recipe=str(recipe)))
    steps = [r["confidence"] for r in EpochLog(done.folder).records()]
    assert [s["step"] for s in steps] == [1, 2]
    assert all(s["rho"] == [] and np.isfinite(s["constraint"]).all() for s in steps)
    assert (done.folder / "segcal_progress.png").stat().st_size > 1000
    if find_spec("tensorboard") is None:
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(done.folder / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"confidence/lam_1/background", "confidence/constraint_0/background"} <= {*tags}
    assert not any("rho" in tag for tag in tags)


@pytest.mark.slow
def test_torchrun(tmp_path, phantom):
    path = write_config(tmp_path, phantom, training={"epochs": 1, "val_batch_size": 2})
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone",
         "-m", "segcal", "train", str(path)],
        check=True, timeout=150,
    )  # fmt: skip
    assert len(EpochLog(tmp_path / "run").records()) == 1


def stopped_after_each_epoch(path, folder, *settings):
    """Train as if time were always up, and go on until the end."""
    stops = 0
    while True:
        experiment = load_experiment(path, [*settings, f"output={folder}"])
        try:
            SegmentationRun(experiment, resume=True).run(until=0.0)
        except OutOfTimeError:
            stops += 1
        else:
            return stops


@pytest.mark.parametrize(("size", "augment"), [([32, 32], []), ([40, 24], AUGMENT)])
def test_what_is_cut_once_trains_as_what_is_cut_anew(phantom, tmp_path, size, augment):
    """Samples that are kept on a device give the same training, in one go and epoch by epoch."""
    parts = {"data": {"size": size, "augment": augment}, "training": {"epochs": 3}}
    folders = {name: tmp_path / name for name in ("anew", "kept", "slices")}
    path = write_config(tmp_path, phantom, **parts)
    run(path, "data.cache=0.9", f"output={folders['anew']}")
    run(path, "data.on_device=true", f"output={folders['kept']}")
    assert stopped_after_each_epoch(path, folders["slices"], "data.on_device=true") == 2
    for name in ("kept", "slices"):
        assert_same_state(*(folders[n] / "checkpoint_last.pt" for n in ("anew", name)))
    anew, *others = (EpochLog(folder).records() for folder in folders.values())
    for record in (*anew, *others[0], *others[1]):
        del record["seconds"]
    assert others == [anew, anew]

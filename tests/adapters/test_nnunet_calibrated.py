"""Predictions of nnU-Net with a calibrator: what is written, and what is refused."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
import torch
from typer.testing import CliRunner

from segcal.adapters.nnunet import running
from segcal.adapters.nnunet.calibrators import check_continued, find_calibrator
from segcal.adapters.nnunet.exporting import export, logits_path
from segcal.adapters.nnunet.fold_calibration import fit_after_validation
from segcal.adapters.nnunet.patching import Aggregation, RefusedError
from segcal.adapters.nnunet.running import Budget
from segcal.adapters.nnunet.sharing import export_model
from segcal.commands.main import app
from segcal.io.files import read_json, write_json
from segcal.io.pairing import RECORD_NAME
from segcal.posthoc.class_region import ClassRegionTemperature
from segcal.repair.applying import apply_job, plan_apply
from segcal.repair.saved import (
    CALIBRATOR_NAME,
    IDENTITY,
    SavedCalibrator,
    model_of,
    read_calibrator,
    write_calibrator,
)
from segcal.training.checkpoints import weights_digest
from tests.adapters.nnunet_data import CLASSES, NAME, SPLIT, Tiny, set_environment, trainer
from tests.adapters.nnunet_data import REGIONS as HEART
from tests.adapters.test_nnunet_prediction import (
    LABELS,
    REGIONS,
    dataset,
    ours,
    plans,
    probabilities,
)
from tests.forks import WithoutSpawn

FINAL = "checkpoint_final.pth"
KNOWN = set(IDENTITY) - {"weights"}
"""Of a model that nnU-Net trained, whose checkpoints are told apart by their folders."""

pytestmark = [
    pytest.mark.usefixtures("one_thread", "plain_progress"),
    pytest.mark.filterwarnings("ignore:.*Received empty chunks:UserWarning"),
    pytest.mark.filterwarnings("ignore:Mean of empty slice:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*multiprocessing.pool.*:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*given NumPy array is not writable:UserWarning"),
]
RECORD = {
    "dataset": "Dataset001_A", "trainer": "nnUNetTrainer", "plans": "nnUNetPlans",
    "configuration": "2d", "checkpoint": "checkpoint_final.pth", "folds": ["fold_0"], "members": 1,
    "average": "logit", "mirroring": True, "tile_step_size": 0.5,
}  # fmt: skip


def fitted(channels, *, regions=False, kind=ClassRegionTemperature, **arguments):
    """A calibrator of overconfident logits."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((2, channels, 6, 7, 8), generator=generator)
    x = torch.nn.functional.avg_pool3d(x, 3, 1, 1) * 4  # predictions in pieces, with an inside
    if regions:
        y = torch.bernoulli(torch.sigmoid(x / 3), generator=generator).long()
    else:
        p = torch.softmax(x / 3, 1).movedim(1, -1).flatten(0, -2)
        y = torch.multinomial(p, 1, generator=generator).view(2, 6, 7, 8)
    return kind(per_channel=regions, **arguments).fit(x, y)


def saved_for(labels=LABELS, *, model=RECORD, **options):
    regions = labels is REGIONS
    names = [name for name in labels if not (regions and name == "background")]
    calibrator = fitted(len(names), regions=regions, **options)
    order = (1, 2) if regions else ()
    return SavedCalibrator(
        "class_region", calibrator, tuple(names), regions, order, dict(model), {"predictions": "v"}
    )


SHAPE, CROP = (6, 10, 14), ((1, 6), (2, 9), (0, 11))
SPACING = [3.0, 1.0, 2.0]
"""Of the array that is written; the network's axes may lie otherwise."""


def case(transpose, looks, heads):
    """Smooth logits of what nnU-Net cropped and resampled, and what it knows of the case."""
    sizes = tuple(b - a for a, b in CROP)
    drawn = np.random.default_rng(0).normal(size=(looks, heads, sizes[0], 9, 8))
    smooth = torch.nn.functional.avg_pool3d(torch.as_tensor(drawn), 3, 1, 1).numpy() * 8
    properties = {
        "spacing": SPACING,
        "shape_before_cropping": SHAPE,
        "bbox_used_for_cropping": [list(side) for side in CROP],
        "shape_after_cropping_and_before_resampling": sizes,
        "sitk_stuff": {
            "spacing": (1.0, 1.0, 1.0), "origin": (0.0, 0.0, 0.0),
            "direction": (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0),
        },
    }  # fmt: skip
    return smooth.astype(np.float32), properties


@pytest.mark.parametrize("labels", [LABELS, REGIONS], ids=["labels", "regions"])
@pytest.mark.parametrize("transpose", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("folds", [1, 2])
@pytest.mark.parametrize("bands", [None, [1.5, 2.5]], ids=["patch", "mm"])
def test_written_is_the_mean_of_calibrated_folds(tmp_path, labels, transpose, folds, bands):
    """From the logits that each fold alone leaves in the resolution and the frame of the file."""
    host = plans(transpose)
    heads = len(labels) - (labels is REGIONS)
    looks, properties = case(transpose, folds, heads)
    calibrator = fitted(heads, regions=labels is REGIONS, bands=bands)
    common = (properties, host.get_configuration("2d"), host, dataset(labels))
    expected = 0
    for fold, logits in enumerate(looks):
        export(logits, *common, str(tmp_path / f"{fold}"), True, save_logits=True)
        with np.load(logits_path(str(tmp_path / f"{fold}"))) as file:
            full = torch.as_tensor(file["logits"])
        expected = expected + calibrator.apply(full[None], spacing_mm=SPACING)[0] / folds
        assert (calibrator.apply(full[None])[0] != probabilities(full, labels)).any()
    output = tmp_path / "together" / "case"
    names = [f"fold_{fold}" for fold in range(folds)]
    for folder in (output.parent, *(output.parent / name for name in names)):
        folder.mkdir()
    stack = np.stack([looks.mean(0), *looks])
    given = stack if folds > 1 else looks[0]
    export(given, *common, str(output), True, save_logits=True, calibrator=calibrator)
    with np.load(output.with_suffix(".npz")) as file:
        written = torch.as_tensor(file["probabilities"])
    outside = torch.ones(SHAPE, dtype=torch.bool)
    outside[tuple(slice(*side) for side in CROP)] = False
    outside = outside.permute(host.transpose_backward)
    torch.testing.assert_close(written, expected, rtol=1e-5, atol=1e-6)
    background = torch.zeros(heads)
    background[0] = labels is LABELS
    assert (written[:, outside] == background[:, None]).all()
    found = sitk.GetArrayFromImage(sitk.ReadImage(f"{output}.nii.gz"))
    if labels is LABELS:
        decided = written.argmax(0)
    else:
        decided = torch.zeros(found.shape, dtype=torch.long)
        for region, label in enumerate((1, 2)):
            decided[written[region] > 0.5] = label
    np.testing.assert_array_equal(found, decided)
    with np.load(logits_path(str(output))) as file:  # as they were
        mean = np.mean([np.load(logits_path(str(tmp_path / f"{f}")))["logits"]
                        for f in range(folds)], 0)  # fmt: skip
        np.testing.assert_allclose(file["logits"], mean, rtol=1e-5, atol=1e-5)
    export(stack, *common, str(output), True, fold_names=names, calibrator=calibrator)
    alone = [np.load(output.parent / name / "case.npz")["probabilities"] for name in names]
    with np.load(output.with_suffix(".npz")) as file:
        np.testing.assert_allclose(file["probabilities"], np.mean(alone, 0), rtol=1e-5, atol=1e-6)


def test_one_of_an_ensemble_is_applied_to_the_mean(tmp_path):
    host = plans()
    looks, properties = case((0, 1, 2), 1, 3)
    calibrator = fitted(3)
    common = (properties, host.get_configuration("2d"), host, dataset(LABELS))
    export(looks[0], *common, str(tmp_path / "a"), True, save_logits=True)
    export(looks[0], *common, str(tmp_path / "b"), True, calibrator=calibrator)
    logits = torch.as_tensor(np.load(logits_path(str(tmp_path / "a")))["logits"])
    written = np.load(tmp_path / "b.npz")["probabilities"]
    np.testing.assert_allclose(written, calibrator.apply(logits[None])[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("members", "folds", "looks"), [(1, 2, 3), (2, 2, None), (1, 1, None), (0, 2, 3)]
)
def test_folds_are_handed_on_where_each_is_calibrated(members, folds, looks):
    host = ours("logit", folds=folds)
    plain = host.predict_logits_from_preprocessed_data(torch.zeros(1, 1, 8, 8))
    host.saved = saved_for(model={**RECORD, "members": members})
    values = host.predict_logits_from_preprocessed_data(torch.zeros(1, 1, 8, 8))
    assert values.shape == (3, 1, 8, 8) if looks is None else (looks, 3, 1, 8, 8)
    assert torch.equal(values if looks is None else values[0], plain)


@pytest.fixture
def folder(tmp_path):
    """Folder of a model with nothing but the meaning of its labels, and a calibrator for it."""
    model = tmp_path / "model"
    (model / "fold_0").mkdir(parents=True)
    write_json(model / "dataset.json", dataset(LABELS))
    write_calibrator(tmp_path / "c.json", saved_for())
    return model


def digest_in(fold):
    return weights_digest(torch.load(fold / FINAL, weights_only=False)["network_weights"])


def find(model, asked=None, record=RECORD, channels=3, **options):
    return find_calibrator(Aggregation(calibrator=asked, **options), model, record, channels)


def test_one_beside_the_model_is_applied_unless_it_does_not_fit(folder, tmp_path, capsys):
    assert find(folder) is find(folder, "none") is None
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match=r"holds no calibrator.json; segcal calibrate fit"):
        find(folder, "model")
    in_fold = folder / "fold_0" / "calibrator.json"
    shutil.copy(tmp_path / "c.json", in_fold)
    assert find(folder).method == "class_region"
    said = capsys.readouterr().out
    assert f"Calibrated by {in_fold} (class_region): fold_0; --calibrator none would leave" in said
    assert find(folder, "none") is None
    assert find(folder, record={**RECORD, "checkpoint": "checkpoint_best.pth"}) is None
    said = capsys.readouterr().out
    assert f"WARNING: {in_fold} is not applied: " in said
    assert "checkpoint checkpoint_best.pth, but the calibrator was fitted to checkpoint" in said
    assert find(folder, "model").method == "class_region"
    assert "(class_region): fold_0" in capsys.readouterr().out
    two = {**RECORD, "folds": ["fold_0", "fold_1"], "members": 2}
    with pytest.raises(ValueError, match=r"holds no calibrator.json"):
        find(folder, "model", two)  # one fold's is not the model's
    assert find(folder, record=two) is None
    said = capsys.readouterr().out
    assert "Not calibrated: there are calibrators of single folds (fold_0), but none" in said
    shutil.copy(tmp_path / "c.json", folder / "calibrator.json")
    find(folder, "model", two)
    assert "calibrator.json (class_region): each fold" in capsys.readouterr().out
    assert find(folder, record=two).method == "class_region"
    in_fold.write_text("{}")
    (folder / "calibrator.json").unlink()
    with pytest.raises(ValueError, match="not a calibrator"):
        find(folder)  # damaged, which is not the same as not fitting


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": "nnUNetTrainerCRaC"}, "trainer nnUNetTrainerCRaC, but the calibrator"),
        ({"dataset": "Dataset002_B"}, "dataset Dataset002_B"),
        ({"plans": "nnUNetResEncUNetLPlans"}, "plans nnUNetResEncUNetLPlans"),
        ({"configuration": "3d_fullres"}, "configuration 3d_fullres"),
        ({"checkpoint": "checkpoint_best.pth"}, "checkpoint checkpoint_best.pth"),
    ],
)
def test_another_model_is_refused(folder, tmp_path, changes, message):
    path = str(tmp_path / "c.json")
    with pytest.raises(ValueError, match=message):
        find(folder, path, {**RECORD, **changes})
    assert find(folder, path, {**RECORD, **changes}, any_model=True) is not None


def test_a_fold_that_was_trained_again_is_another_model(folder, tmp_path, capsys):
    saved = saved_for(model={**RECORD, "weights": {"fold_0": "old", "fold_1": "same"}})
    path = folder / "fold_0" / "calibrator.json"
    write_calibrator(path, saved)
    assert find(folder, record={**RECORD, "weights": {"fold_0": "old"}}) is not None
    assert find(folder, record=RECORD) is not None  # nothing is known
    again = {**RECORD, "weights": {"fold_0": "new"}}
    capsys.readouterr()
    assert find(folder, record=again) is None
    said = capsys.readouterr().out
    assert f"{path} is not applied: " in said
    assert "weights new, but the calibrator was fitted to weights old of fold_0" in said
    with pytest.raises(ValueError, match="weights new, but"):
        find(folder, "model", again)
    assert find(folder, record={**RECORD, "weights": {"fold_2": "new"}}) is not None


def test_another_average_is_said(folder, tmp_path, capsys):
    find(folder, str(tmp_path / "c.json"), {**RECORD, "average": "prob", "mirroring": False})
    said = capsys.readouterr().out
    assert "WARNING" in said
    assert "average prob, but the calibrator was fitted with average logit" in said
    assert "mirroring False" in said


def test_another_number_of_networks_is_refused(folder, tmp_path, capsys):
    path = tmp_path / "c.json"
    five = {"folds": [f"fold_{f}" for f in range(5)], "members": 5}
    write_calibrator(path, saved_for(model={**RECORD, **five}))
    with pytest.raises(ValueError, match="mean of 5 networks, but 1 predict here"):
        find(folder, str(path))
    assert find(folder, str(path), {**RECORD, **five}).of_mean
    assert "the mean of 5 folds" in capsys.readouterr().out
    with pytest.raises(ValueError, match="does not fit a single fold; leave out --per-fold"):
        find(folder, str(path), {**RECORD, **five}, per_fold=True)
    assert find(folder, str(path), any_model=True) is not None
    write_calibrator(path, saved_for(model={}))
    assert not find(folder, str(path), {**RECORD, **five}).of_mean
    assert "does not say how many networks" in capsys.readouterr().out


def test_other_labels_are_refused(folder, tmp_path):
    path = str(tmp_path / "c.json")
    for labels in ({"background": 0, "b": 1, "a": 2}, {"background": 0, "a": 1}):
        write_json(folder / "dataset.json", dataset(labels))
        with pytest.raises(ValueError, match="but the calibrator was fitted to"):
            find(folder, path, channels=len(labels), any_model=True)
    write_json(folder / "dataset.json", dataset(REGIONS))
    with pytest.raises(ValueError, match=r"regions in .*, but the calibrator was fitted to"):
        find(folder, path, channels=3)


def test_damaged_and_missing_files_are_refused(folder, tmp_path):
    path = tmp_path / "c.json"
    with pytest.raises(ValueError, match=r"none.json: no such file"):
        find(folder, str(tmp_path / "none.json"))
    content = read_json(path)
    content["state"]["learned"] = {}
    write_json(path, content)
    with pytest.raises(ValueError, match="a damaged calibrator"):
        find(folder, str(path))
    path.write_text("{")
    with pytest.raises(ValueError, match="not a JSON file"):
        find(folder, str(path))


def test_one_that_needs_more_than_logits_is_refused(folder, tmp_path, monkeypatch):
    def sees_an_image(self, logits, *, spacing_mm=None, image=None):
        raise ValueError("image: expected (N, 1, *S), got None")

    monkeypatch.setattr(ClassRegionTemperature, "apply", sees_an_image)
    with pytest.raises(ValueError, match=r"needs more than the logits of a volume .*image"):
        find(folder, str(tmp_path / "c.json"))


def test_predictions_are_gone_on_with_as_they_were_calibrated(tmp_path):
    saved = saved_for()
    check_continued(tmp_path, saved)
    write_json(tmp_path / RECORD_NAME, {"average": "logit"})
    check_continued(tmp_path, None)
    with pytest.raises(RefusedError, match="without a calibrator, not with a calibrator"):
        check_continued(tmp_path, saved)
    write_json(tmp_path / RECORD_NAME, {"average": "logit", "calibrator": saved.summary()})
    check_continued(tmp_path, saved)
    other = replace(saved, fitted_on={"predictions": "w"})
    for now in (None, other):
        with pytest.raises(RefusedError, match=r"fitted to 2 cases of v.*, not with"):
            check_continued(tmp_path, now)


def test_a_worker_gets_the_calibrator():
    calibrator = fitted(3)
    sent = pickle.loads(pickle.dumps(partial(export, calibrator=calibrator)))
    x = torch.randn(1, 3, 4, 5, 6)
    assert torch.equal(sent.keywords["calibrator"].apply(x), calibrator.apply(x))


def arguments(images, output, *folds, name="nnUNetTrainerBaseline"):
    return ["-i", str(images), "-o", str(output), "-d", NAME, "-c", "2d", "-tr", name,
            "-f", *map(str, folds), "-device", "cpu", "-npp", "0", "-nps", "0",
            "--disable_progress_bar"]  # fmt: skip


def command(*given):
    done = CliRunner().invoke(app, ["nnunet", "predict", *map(str, given)])
    assert done.exit_code == 2, done.output
    return done.output


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Folder of a model of two folds that were trained for an epoch, and a folder of images."""
    data = Tiny(tmp_path)
    set_environment(monkeypatch, tmp_path)
    for fold in range(2):
        found = trainer("nnUNetTrainerBaseline", "2d", fold, epochs=1)
        found.run_training()
    images = data.write_images()
    for extra in sorted(images.iterdir())[2:]:
        extra.unlink()
    return Path(found.output_folder).parent, images


def test_a_trained_model_predicts_with_its_calibrator(trained, tmp_path, capsys, monkeypatch):
    model, images = trained
    saved = saved_for(CLASSES, model=model_of(model))
    write_calibrator(model / CALIBRATOR_NAME, saved)
    alone = []
    for fold in (0, 1):
        output = tmp_path / f"alone_{fold}"
        raw = Aggregation(save_logits=True, calibrator="none")
        running.predict(arguments(images, output, fold), raw)
        alone.append(np.load(output / "logits" / "case_0.npz")["logits"])
    assert "alibrated" not in capsys.readouterr().out
    both, output = Aggregation(calibrator="model"), tmp_path / "both"
    running.predict(arguments(images, output, 0, 1), both)
    assert "WARNING" not in capsys.readouterr().out
    expected = torch.stack(
        [
            saved.calibrator.apply(torch.as_tensor(logits)[None], spacing_mm=(8, 1.5, 1.5))[0]
            for logits in alone
        ]
    ).mean(0)
    found = np.load(output / "case_0.npz")["probabilities"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    apart, repaired = tmp_path / "apart", tmp_path / "repaired"  # the other road to the same
    raw = Aggregation(per_fold=True, calibrator="none")
    running.predict(arguments(images, apart, 0, 1), raw)
    apply_job(plan_apply(apart, saved, repaired), processes=1)
    by_file = np.load(repaired / "case_0.npz")["probabilities"]
    np.testing.assert_allclose(by_file, found, rtol=1e-4, atol=1e-5)
    record = read_json(output / RECORD_NAME)
    assert record["calibrator"] == saved.summary()
    assert record["members"] == 2
    assert record["weights"] == {
        name: weights_digest(
            torch.load(model / name / FINAL, weights_only=False)["network_weights"]
        )
        for name in ("fold_0", "fold_1")
    }
    assert record["dataset"] == NAME
    for folder in (model, model / "fold_0" / "validation", model / "fold_1"):
        assert {key: model_of(folder)[key] for key in KNOWN} == {key: record[key] for key in KNOWN}
    go_on = [*arguments(images, output, 0, 1), "--continue_prediction"]
    running.predict(go_on, both)
    assert "0 cases lack a file" in capsys.readouterr().out
    running.predict(go_on)  # by default with the model's, as before
    assert "0 cases lack a file" in capsys.readouterr().out
    assert "not without a calibrator" in command(*go_on, "--calibrator", "none")
    other = tmp_path / "other.json"
    write_calibrator(other, replace(saved, fitted_on={"predictions": "elsewhere"}))
    assert "cases of elsewhere)" in command(*go_on, "--calibrator", other)
    write_calibrator(other, replace(saved, model={**saved.model, "trainer": "nnUNetTrainer"}))
    assert "but the calibrator was fitted to trainer nnUNetTrainer;" in command(
        *go_on, "--calibrator", other
    )
    export_model(model, tmp_path / "shared")
    monkeypatch.setenv("nnUNet_results", str(tmp_path / "shared"))
    output = tmp_path / "of_copy"
    running.predict(arguments(images, output, 0, 1, name="nnUNetTrainer"), both)
    again = np.load(output / "case_0.npz")["probabilities"]
    np.testing.assert_allclose(again, found, rtol=1e-4, atol=1e-5)
    assert read_json(output / RECORD_NAME)["trainer"] == "nnUNetTrainer"


class Runs:
    """What makes a file when it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path("it_ran"),))


def test_code_in_checkpoints_is_not_run(trained, tmp_path, monkeypatch):
    model, images = trained
    monkeypatch.chdir(tmp_path)
    path = model / "fold_1" / "checkpoint_final.pth"
    torch.save({**torch.load(path, weights_only=False), "extra": Runs()}, path)
    told = "checkpoint_final.pth: holds more than tensors and numbers and is not loaded"
    assert told in command(*arguments(images, tmp_path / "out", 0, 1))
    assert not (tmp_path / "out" / "case_0.npz").exists()
    start = ["nnunet", "train", NAME, "2d", "1", "-device", "cpu"]
    for how in (
        ["-tr", "nnUNetTrainerBaseline", "--c"], ["-tr", "nnUNetTrainerBaseline", "--val"],
        ["-tr", "nnUNetTrainer", "-pretrained_weights", str(path)],
    ):  # fmt: skip
        done = CliRunner().invoke(app, [*start, *how])
        assert done.exit_code == 2, done.output
        assert told in done.output
    assert not Path("it_ran").exists()
    torch.load(path, weights_only=False)  # which is what nnU-Net does
    assert Path("it_ran").exists()


STRANGE = """
from pathlib import Path
from dynamic_network_architectures.architectures.unet import PlainConvUNet as Net
from torch.nn import InstanceNorm2d as Norm
Path("it_ran").touch()
"""


@pytest.mark.parametrize(
    ("place", "values", "said"),
    [
        ((), {"network_class_name": "strange.Net"}, "'strange.Net'"),
        (("arch_kwargs",), {"norm_op": "strange.Norm"}, "'strange.Norm'"),
        (
            ("arch_kwargs",),
            {"nonlin": "torch.nn.functional.torch.os.mkdir", "nonlin_kwargs": {"path": "it_ran"}},
            "expected an nn.Module, got builtin",
        ),
    ],
)
def test_code_that_plans_name_is_not_run(trained, tmp_path, monkeypatch, place, values, said):
    model, images = trained
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("strange.py").write_text(STRANGE)
    preprocessed = tmp_path / "preprocessed" / NAME / "nnUNetPlans.json"
    for path in (preprocessed, model / "plans.json"):
        plans = read_json(path)
        one = plans["configurations"]["2d"]["architecture"]
        for key in place:
            one = one[key]
        one.update(values)
        write_json(path, plans)
    start = ["nnunet", "train", NAME, "2d", "1", "-device", "cpu", "-tr"]
    exporting = ["nnunet", "export", str(model), str(tmp_path / "shared")]
    predicting = ["nnunet", "predict", *arguments(images, tmp_path / "out", 0, 1)]
    for given in (
        predicting, exporting, [*start, "nnUNetTrainerCRaC"], [*start, "nnUNetTrainer"],
        [*start, "nnUNetTrainerBaseline", "--val"],
    ):  # fmt: skip
        done = CliRunner().invoke(app, given)
        assert done.exit_code == 2, done.output
        assert said in done.output
        assert not Path("it_ran").exists()


def test_networks_of_a_package_that_is_trusted_are_built(trained, tmp_path, monkeypatch):
    model, images = trained
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("strange.py").write_text(STRANGE)
    plans = read_json(model / "plans.json")
    plans["configurations"]["2d"]["architecture"]["network_class_name"] = "strange.Net"
    write_json(model / "plans.json", plans)
    monkeypatch.setenv("SEGCAL_NETWORKS", "other,strange")
    running.predict(arguments(images, tmp_path / "out", 0, 1))
    assert Path("it_ran").exists()
    assert (tmp_path / "out" / "case_0.npz").exists()


@pytest.mark.parametrize("labels", [CLASSES, HEART], ids=["labels", "regions"])
@pytest.mark.parametrize("calib", [False, True])
def test_training_ends_with_a_calibrator(tmp_path, monkeypatch, calib, labels):
    data = Tiny(tmp_path, calib=calib, labels=labels)
    set_environment(monkeypatch, tmp_path)
    references = data.write_references()
    monkeypatch.setattr(multiprocessing, "get_context", WithoutSpawn())
    found = trainer("nnUNetTrainer" if calib else "nnUNetTrainerBaseline", "2d", epochs=1)
    fit_after_validation(found, "temperature")
    found.run_training()
    found.perform_actual_validation()
    fold = Path(found.output_folder)
    assert sorted(p.stem for p in fold.glob("validation/*.npz")) == SPLIT["val"]
    saved = read_calibrator(fold / CALIBRATOR_NAME)
    assert saved.fitted_on["cases"] == SPLIT["calib" if calib else "val"]
    assert saved.fitted_on["references"] == str(references)
    assert saved.fitted_on["saved_logits"] == calib
    assert saved.channels == tuple(k for k in labels if labels is CLASSES or k != "background")
    assert saved.members == 1
    assert saved.model["weights"] == {"fold_0": digest_in(fold)}
    assert {key: saved.model[key] for key in KNOWN} == {key: model_of(fold)[key] for key in KNOWN}
    assert saved.model["sums"] == ("float32" if calib else "float16")
    log = next(fold.glob("training_log*")).read_text()
    assert (
        f'temperature fitted to {1 + (not calib)} cases of "{"calib" if calib else "val"}"' in log
    )
    assert ("now looks too good" in log) != calib
    with np.load(fold / "validation" / "case_2.npz") as file:  # half precision ends with logits
        assert file["probabilities"].dtype == np.float32


def test_the_cases_of_a_patient_stay_together(tmp_path, monkeypatch):
    data = Tiny(tmp_path)
    set_environment(monkeypatch, tmp_path)
    data.write_references()
    monkeypatch.setattr(multiprocessing, "get_context", WithoutSpawn())
    found = trainer("nnUNetTrainerBaseline", "2d", epochs=1)
    with pytest.raises(ValueError, match=r"'person\[0-9\]' finds nothing in case_0, case_1"):
        Budget(calibrate="temperature", patients="person[0-9]").apply(found)
    Budget(epochs=1, calibrate="temperature", patients="case").apply(found)
    found.run_training()
    given = []
    monkeypatch.setattr(
        "segcal.posthoc.rows.Rows.of_patients",
        lambda rows, owners: given.append(owners) or rows,
    )
    found.perform_actual_validation()
    assert given == [[0] * len(SPLIT["val"])]
    log = next(Path(found.output_folder).glob("training_log*")).read_text()
    assert log.count("WARNING: segcal: case: the fold trains on cases of these patients") == 1


def too_few(trainer, method, patients):
    raise ValueError("too few voxels")


@pytest.mark.parametrize("required", [False, True])
def test_a_calibrator_that_cannot_be_fitted_costs_no_training(tmp_path, monkeypatch, required):
    data = Tiny(tmp_path)
    set_environment(monkeypatch, tmp_path)
    data.write_references()
    monkeypatch.setattr(multiprocessing, "get_context", WithoutSpawn())
    found = trainer("nnUNetTrainerBaseline", "2d", epochs=1)
    Budget(epochs=1, calibrate="class_region", must_calibrate=required).apply(found)
    found.run_training()
    monkeypatch.setattr("segcal.adapters.nnunet.fold_calibration.fit_fold", too_few)
    with pytest.raises(ValueError, match="too few") if required else nullcontext():
        found.perform_actual_validation()
    fold = Path(found.output_folder)
    assert (fold / "checkpoint_final.pth").is_file()
    assert not (fold / CALIBRATOR_NAME).exists()
    log = next(fold.glob("training_log*")).read_text()
    assert ("WARNING: segcal: no calibrator was fitted: too few voxels" in log) != required


@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        ("902 2d 0 -tr nnUNetTrainerConfidence", "class_region_case"),
        ("902 2d 0 -tr nnUNetTrainerConfidence_CE --npz", "class_region_case"),
        ("902 2d 0 -tr nnUNetTrainerConfidence --val", "class_region_case"),
        ("902 2d 0 -tr nnUNetTrainerConfidence --val_best", None),
        ("902 2d all -tr nnUNetTrainerConfidence", None),
        ("902 2d 0 -tr nnUNetTrainerCRaC", None),
        ("902 2d 0 -tr nnUNetTrainer", None),
        ("902 2d 0", None),
        ("-h -tr nnUNetTrainerConfidence", None),
    ],
)
def test_a_recipe_may_end_with_a_calibrator(arguments, method):
    assert running.calibrator_of_recipe(arguments.split()) == method


def test_the_command_line_decides_over_the_recipe(monkeypatch):
    budgets = []
    monkeypatch.setattr(running, "check_train", lambda arguments, budget: None)
    monkeypatch.setattr(running, "train", lambda arguments, budget: budgets.append(budget))
    base = ["nnunet", "train", "902", "2d", "0", "-tr", "nnUNetTrainerConfidence"]
    together = ["--patients", "p[0-9]+"]
    for more in (
        together,
        ["--no-calibrate"],
        ["--calibrate"],
        ["--calibrate", "--method", "vector"],
    ):
        assert CliRunner().invoke(app, [*base, *more]).exit_code == 0
    default = "class_region_case"
    assert [one.calibrate for one in budgets] == [default, None, default, "vector"]
    assert [one.must_calibrate for one in budgets] == [False, False, True, True]
    assert [one.patients for one in budgets] == ["p[0-9]+", None, None, None]
    refused = CliRunner().invoke(app, [*base, "--no-calibrate", *together])
    assert refused.exit_code == 2
    assert "--patients: is for --calibrate" in " ".join(refused.output.split())


def test_a_calibrator_at_the_end_is_checked_at_the_start(tmp_path, monkeypatch):
    set_environment(monkeypatch, tmp_path)
    (tmp_path / "preprocessed").mkdir()
    for given, message in (
        (["902", "2d", "all"], "with fold 'all' the network is trained on the cases"),
        (["902", "2d", "0", "--val_best"], "leave out --val_best"),
        (["902", "2d", "0", "--method", "unheard"], "--method unheard: expected one of"),
    ):
        done = CliRunner().invoke(app, ["nnunet", "train", *given, "--calibrate"])
        assert done.exit_code == 2, done.output
        assert message in done.output.replace("\n", " ")
    done = CliRunner().invoke(app, ["nnunet", "train", "902", "2d", "0", "--method", "temperature"])
    assert done.exit_code == 2
    assert "give --calibrate, too" in done.output

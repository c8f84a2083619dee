"""Experiments: what is refused before training begins, and what the shipped ones are."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import yaml
from typer.testing import CliRunner

from segcal.adapters.monai.building import build_network, check_network
from segcal.adapters.monai.dataset import find_cases, split_names
from segcal.adapters.monai.experiment import KIND, CaseSplit, load_experiment
from segcal.adapters.monai.inference import Predictor, predict_cases
from segcal.commands.main import app
from segcal.datasets.phantom import PhantomSettings, write_phantom_dataset
from segcal.io.label_sets import read_label_set
from segcal.io.volumes import read_labels, write_nifti
from segcal.recipes import load_objective, resolve_terms
from segcal.training.experiments import shipped, write_resolved
from tests.adapters.monai_experiments import run, write_config

METHODS = ("ce", "fl", "ecp", "ls", "svls", "mbls", "nacl_published", "bwcr_published",
           "crac_published")  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "phantom"
    write_phantom_dataset(
        root, train=3, test=1, seed=0, settings=PhantomSettings(shape=(3, 32, 32))
    )
    return root


@pytest.fixture
def phantom(tmp_path, original):
    shutil.copytree(original, tmp_path / "phantom")
    return tmp_path / "phantom"


def test_shipped_experiments_state_the_published_protocol():
    medical = ["acdc/dynunet", "acdc/unet", "flare/dynunet", "flare/unet"]
    assert shipped(KIND) == [*medical, "voc2012/deeplabv3"]
    for name in medical:
        experiment = load_experiment(name)
        data, network = name.split("/")
        assert experiment.data.size == (192, 192)
        assert experiment.data.crop == "center"
        assert not experiment.data.augment
        assert experiment.optimizer.target == "torch.optim.Adam"
        assert experiment.optimizer.args == {"lr": 1e-3}
        assert experiment.scheduler is not None
        assert experiment.scheduler.args == {"step_size": 50, "gamma": 0.1}
        settings = experiment.training
        batch = {"acdc": 4, "flare": 16}[data]
        assert (settings.epochs, settings.batch_size, settings.seed) == (75, batch, 1)
        built = build_network(experiment, 1, 4)
        widths = {m.out_channels for m in built.modules() if isinstance(m, torch.nn.Conv2d)}
        assert {32, 64, 128, 256, 512} <= widths
        norms = [m for m in built.modules() if "Norm" in type(m).__name__]
        assert bool(norms) == (network == "dynunet")


@pytest.mark.parametrize("recipe", METHODS)
def test_each_method_of_the_papers_is_one_setting(recipe):
    experiment = load_experiment("acdc/unet", [f"recipe={recipe}"])
    assert resolve_terms(load_objective(experiment.recipe))
    assert str(experiment.folder) == f"runs/acdc_unet/{recipe}"


def test_a_shipped_network_takes_the_published_slices():
    experiment = load_experiment("acdc/unet", ["data.size=[32, 32]"])
    check_network(build_network(experiment, 1, 4), experiment.data, 1, 4, torch.device("cpu"))


def test_settings_on_the_command_line(tmp_path):
    settings = [
        "training.epochs=3", "terms.crac.margin_inner=3.5", "recipe=crac", "scheduler=null",
        "data.split={fold: 2}", "output=runs/{recipe}_{fold}_{seed}",
    ]  # fmt: skip
    experiment = load_experiment("acdc/unet", settings)
    assert experiment.training.epochs == 3
    assert experiment.terms == {"crac": {"margin_inner": 3.5}}
    assert experiment.scheduler is None
    assert experiment.data.split.fold == 2
    assert str(experiment.folder) == "runs/crac_2_1"
    write_resolved(experiment, tmp_path)
    assert load_experiment(tmp_path / "config.yaml") == experiment


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["training.epoch=3"], r"training\.epoch: unknown; there are epochs, batch_size"),
        (["data.split.folds=1"], r"data\.split\.folds: unknown; there are file, fold"),
        (["nonsense=1"], r"nonsense: unknown; there are summary, data, network, recipe"),
        (["training.epochs=many"], r"training\.epochs: .*valid integer"),
        (["training.epochs"], r"setting 'training\.epochs': expected key=value"),
        (["training.epochs=["], r"its value is no YAML"),
        (["recipe=crak"], r"recipe: no recipe, penalty or loss is called 'crak'"),
        (["network.target=os.system"], r"network\.target: only targets below segcal\."),
        (["data.size=[32]"], r"data: size: expected 2 sizes for slices"),
        (["data.intensity=window"], r"data: intensity 'window' needs window"),
        (["data.intensity=window", "data.window=[5, 5]"], r"window: expected low < high"),
        (["data.images=x"], r"data: give root, or images, labels and classes"),
        (["data.foreground=0.5"], r"foreground and per_volume need crop: random"),
        (["data.spacing_mm=[1, 0, 1]"], r"spacing_mm: expected positive"),
        (
            ["data.split.patient=(\\d+"],
            r"data\.split\.patient: '\(\\\\d\+' is no regular expression",
        ),
        (["data.split.file=s.json", "data.split.fold=null"], r"file: give also the fold"),
    ],
)
def test_experiments_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        load_experiment("acdc/unet", settings)


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.1e-2", ".1e-2", "1.e-3", "+1e-3", "0.001"])
def test_numbers_with_exponents_are_numbers(tmp_path, text):
    experiment = load_experiment("acdc/unet", [f"scheduler.args.gamma={text}"])
    assert experiment.scheduler.args["gamma"] == 1e-3
    write_resolved(experiment, tmp_path)
    assert load_experiment(tmp_path / "config.yaml") == experiment


def test_files_that_are_no_experiment(tmp_path):
    with pytest.raises(ValueError, match=r"acdc/unett: no YAML file and no shipped.* acdc/unet"):
        load_experiment("acdc/unett")
    path = tmp_path / "a.yaml"
    with pytest.raises(ValueError, match=r"a\.yaml: no such file"):
        load_experiment(path)
    path.write_text("- 1")
    with pytest.raises(ValueError, match=r"a\.yaml: expected keys summary, data"):
        load_experiment(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["network.target=torch.load"], r"network: torch\.load is not a torch\.nn"),
        (["network.target=monai.networks.nets.UNett"], r"UNett: cannot be found"),
        (["network.args.width=3"], r"network: .*takes no width; it takes .*channels"),
        (["network.args.in_channels=2"], r"in_channels is 2 in the config but 1 here"),
        (["data.size=[31, 32]"], r"network: .*divisible"),
        (["network={target: monai.networks.nets.BasicUNetPlusPlus}", "data.size=[32, 32]"],
         r"network: expected logits \(2, 4, 32, 32\) .*got list; switch deep supervision off"),
        (["optimizer.target=torch.nn.ReLU"], r"optimizer: torch\.nn\.ReLU is not a torch\.optim"),
        (["optimizer.args.lr='0.1'"], r"optimizer: .*given .*'lr': '0\.1'"),
        (["scheduler={target: torch.optim.SGD, args: {}}"], r"scheduler: .*not a torch\.optim\.lr"),
        (["scheduler.target=torch.optim.lr_scheduler.ReduceLROnPlateau"],
         r"scheduler: ReduceLROnPlateau is shown the validation mean IoU.* mode: max"),
        (["terms.nacl.alpha=1"], r"recipe: has no term nacl; it has"),
        (["training.precision=fp16"], r"training\.precision: fp16 needs a GPU"),
        (["data.augment=[{target: torch.nn.ReLU}]"], r"data\.augment\.0: .*Transform"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(tmp_path, phantom, settings, message):
    path = write_config(tmp_path, phantom)
    with pytest.raises(ValueError, match=message):
        run(path, *settings)
    assert not (tmp_path / "run").exists()


def second_label(phantom):
    path = phantom / "labelsTr" / "phantom_002.nii.gz"
    volume = read_labels(path)
    return path, volume.array.copy(), volume.geometry


def test_labels_are_checked_before_training(tmp_path, phantom):
    path, array, geometry = second_label(phantom)
    config = write_config(tmp_path, phantom)
    array[0, 0, 0] = 255  # which padding has, but no file
    write_nifti(path, array, geometry)
    with pytest.raises(ValueError, match=r"phantom_002\.nii\.gz: holds label 255; known are 0, 1"):
        run(config)
    write_nifti(path, array[:2], type(geometry)(**{**vars(geometry), "shape": (2, 32, 32)}))
    with pytest.raises(ValueError, match=r"phantom_002\.nii\.gz: does not lie on the grid of"):
        run(config)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"phantom_002\.nii\.gz"):
        run(config)
    path.unlink()
    with pytest.raises(ValueError, match=r"imagesTr: no label map in .*labelsTr for phantom_002"):
        run(config)
    assert not (tmp_path / "run").exists()


def test_images_are_checked_before_training(tmp_path, phantom):
    config = write_config(tmp_path, phantom)
    image = phantom / "imagesTr" / "phantom_001_0000.nii.gz"
    content = image.read_bytes()
    image.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"phantom_001_0000\.nii\.gz: cannot be read"):
        run(config)
    image.unlink()
    with pytest.raises(ValueError, match=r"labelsTr: no image in .*imagesTr for phantom_001"):
        run(config)
    image.write_bytes(content)
    image.with_name("phantom_001_0001.nii.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"phantom_001: expected channels 0 to 0"):
        run(config)


def test_regions_are_refused(tmp_path, phantom):
    labels = {"background": 0, "heart": [1, 2, 3], "ventricle": [3]}
    path = phantom / "dataset.json"
    content = {**json.loads(path.read_text()), "labels": labels, "regions_class_order": [1, 3]}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"dataset\.json: defines regions that overlap"):
        run(write_config(tmp_path, phantom))


def test_splits_by_fold(tmp_path):
    names = ["a", "b", "c"]
    file = tmp_path / "splits_final.json"
    file.write_text(json.dumps([{"train": ["a", "c"], "val": ["b"]}]))
    assert split_names(names, CaseSplit(fold=0), tmp_path) == (["a", "c"], ["b"])
    assert split_names(names, CaseSplit(file=file, fold=0), None) == (["a", "c"], ["b"])
    with pytest.raises(ValueError, match=r"has no fold 1, there are 1"):
        split_names(names, CaseSplit(fold=1), tmp_path)
    with pytest.raises(ValueError, match=r"no files for c of fold 0"):
        split_names(["a", "b"], CaseSplit(fold=0), tmp_path)
    file.write_text(json.dumps([{"train": ["a", "b"], "val": ["b"]}]))
    with pytest.raises(ValueError, match=r"b are in both train and val"):
        split_names(names, CaseSplit(fold=0), tmp_path)


def test_folds_and_lists_keep_patients_together(tmp_path):
    folds = [
        {"train": ["p1_a", "p1_b"], "val": ["p2_a"]},
        {"train": ["p1_a", "p2_a"], "val": ["p1_b"]},
    ]
    (tmp_path / "splits_final.json").write_text(json.dumps(folds))
    names = ["p1_a", "p1_b", "p2_a"]
    for fold, apart in enumerate((True, False)):
        lists = {side: tmp_path / f"{side}.txt" for side in ("train", "val")}
        for side, path in lists.items():
            path.write_text("\n".join(folds[fold][side]))
        for one in ({"fold": fold}, lists):
            if apart:
                found = split_names(names, CaseSplit(patient=r"p\d", **one), tmp_path)
                assert found == (folds[fold]["train"], folds[fold]["val"])
                continue
            assert split_names(names, CaseSplit(**one), tmp_path)[1] == ["p1_b"]
            with pytest.raises(ValueError, match=r"p1 of data\.split\.patient are in both"):
                split_names(names, CaseSplit(patient=r"p\d", **one), tmp_path)
            with pytest.raises(ValueError, match=r"'p1' does not match 'p2_a'"):
                split_names(names, CaseSplit(patient="p1", **one), tmp_path)


def test_splits_by_share_keep_patients_together():
    names = [f"patient{p:03d}_frame{f:02d}" for p in range(20) for f in (1, 9)]
    split = CaseSplit(validation=0.2, seed=3, patient=r"patient\d+")
    train, val = split_names(names, split, None)
    assert sorted(train + val) == names
    assert len(val) == 8
    patients = [{name.split("_")[0] for name in side} for side in (train, val)]
    assert not patients[0] & patients[1]
    assert split_names(names[::-1], split, None)[1] == val[::-1]
    assert (
        split_names(names, CaseSplit(validation=0.2, seed=4, patient=r"patient\d+"), None)[1] != val
    )
    with pytest.raises(ValueError, match=r"'case' does not match 'patient000_frame01'"):
        split_names(names, CaseSplit(patient="case"), None)


def test_channels_and_ignore_label(phantom, tmp_path):
    path = phantom / "dataset.json"
    content = json.loads(path.read_text())
    content["labels"]["ignore"] = 4
    content["channel_names"]["1"] = "again"
    path.write_text(json.dumps(content))
    for image in list((phantom / "imagesTr").iterdir()):
        shutil.copy(image, image.with_name(image.name.replace("_0000", "_0001")))
    cases = find_cases(load_experiment(write_config(tmp_path, phantom)).data)
    assert cases.channels == 2
    assert cases.ignore_index == cases.ignore_label == 4
    assert [p.name for p in cases.train[0].images] == [
        f"{cases.train[0].name}_000{c}.nii.gz" for c in (0, 1)
    ]
    path, array, geometry = second_label(phantom)
    array[0] = 4
    write_nifti(path, array, geometry)
    done = run(write_config(tmp_path, phantom, training={"epochs": 1}))
    assert done.epochs == 1
    predictor = Predictor(load_experiment(done.folder / "config.yaml"), "last")
    predict_cases(predictor, predictor.cases(None, validation=True), tmp_path / "out", "npz")
    assert read_label_set(tmp_path / "out" / "dataset.json").ignore_index == 4


def test_the_command_shows_all_settings(tmp_path):
    shown = CliRunner().invoke(app, ["train", "acdc/unet", "--set", "recipe=nacl", "--show"])
    assert shown.exit_code == 0
    (tmp_path / "mine.yaml").write_text(shown.stdout)
    assert load_experiment(tmp_path / "mine.yaml") == load_experiment("acdc/unet", ["recipe=nacl"])


def test_the_command_says_what_is_wrong(tmp_path, phantom):
    path = write_config(tmp_path, phantom)
    result = CliRunner().invoke(app, ["train", str(path), "--set", "training.epoch=1"])
    assert result.exit_code == 2
    assert "training.epoch: unknown; there are epochs" in result.output
    result = CliRunner().invoke(app, ["train", str(path), "--set", "training.epochs"])
    assert "Error: --set 'training.epochs': expected key=value" in result.output
    content = yaml.safe_load(path.read_text())
    content["data"]["root"] = str(tmp_path / "none")
    path.write_text(yaml.safe_dump(content))
    result = CliRunner().invoke(app, ["train", str(path)])
    assert result.exit_code == 2
    assert "none: no such folder; set data.root to the folder of your data set" in " ".join(
        result.output.split()
    )

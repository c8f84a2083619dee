"""Trainings of nnU-Net, seconds each: what it can do, with every trainer."""

from __future__ import annotations

import importlib
import json
import math
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from segcal.adapters.nnunet import running
from segcal.adapters.nnunet.running import Budget
from segcal.commands.main import app
from segcal.recipes import load_recipe, names
from tests.adapters.nnunet_data import (
    CASES,
    CLASSES,
    NAME,
    REGIONS,
    SPLIT,
    Tiny,
    architecture,
    records,
    set_environment,
    trainer,
)
from tests.alike import differences
from tests.conftest import close
from tests.ranks import in_two_processes

TRAINERS = [r.trainer for r in map(load_recipe, names("recipes")) if r.trainer]
LEARNED = {"CRaC": 2, "CRaCBands": 3, "CRaCRamp": 2, "CALS": 1, "CALSHR": 1}
CONFIDENCE = ("Confidence", "ConfidenceFixed", "ConfidenceSVLS", "TwoHeadsConfidence")
LEARNED |= dict.fromkeys(CONFIDENCE, 2)
"""Rows of multipliers."""
ROWS_OF_REGIONS = {**LEARNED, **dict.fromkeys(CONFIDENCE, 4)}
"""Where channels are regions; voxels are decided to lie inside or outside."""
RAMPS = {"CRaCRamp", "NACLRamp", "Confidence"}
TWO_HEADS = {
    "TwoHeadsConfidence": ["probability/svls", "probability/confidence"],
    "TwoHeads": ["probability/svls"],
}
IN_PLACE = {"FL", "FLSD", "LS", "SVLS"}
PER_CHANNEL = {"SVLS", "NACL", "MbLS", "CRaC", "CRaCBands", "mL1ACE", "mL1ACESoft"}
PER_CHANNEL |= {"Baseline", *TWO_HEADS, *RAMPS, *CONFIDENCE}
pytestmark = [
    pytest.mark.usefixtures("one_thread", "plain_progress"),
    pytest.mark.filterwarnings("ignore:.*Received empty chunks:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*multiprocessing.pool.*:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Mean of empty slice:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def trainers():
    """Their module, imported before fixtures look for what it draws with."""
    return importlib.import_module("segcal.adapters.nnunet.trainers")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Return a maker of data sets to which nnU-Net's folders point."""

    def make(**options):
        data = Tiny(tmp_path, **options)
        set_environment(monkeypatch, tmp_path)
        return data

    return make


def run(name, configuration, fold=0, **options):
    found = trainer(f"nnUNetTrainer{name}", configuration, fold, **options)
    found.run_training()
    return found


def check(found, short, epochs=2, channels=4):
    """What every training leaves behind."""
    lines = records(found)
    assert [r["epoch"] for r in lines] == list(range(epochs))
    folder = Path(found.output_folder)
    assert {"checkpoint_best_ece.pth", "checkpoint_final.pth", "segcal_progress.png"} <= {
        p.name for p in folder.iterdir()
    }
    for line in lines:
        assert all(map(math.isfinite, [*line["train"].values(), *line["val"].values()]))
        assert 0 < line["ece"] < 1
    short = short.removesuffix("_CE")
    term = {"ECP": "entropy", "LogitNorm": "logit_norm", "MbLS": "margin", "mL1ACE": "ml1_ace"}
    term |= {"CALSHR": "cals_hr", "mL1ACESoft": "ml1_ace_soft", "CRaCBands": "crac_bands"}
    added = [] if short in {*IN_PLACE, "Baseline"} else [term.get(short, short.lower())]
    added = [name.removesuffix("ramp") for name in added]
    added = ["ml1_ace_soft", "confidence"] if short in {"Confidence", "ConfidenceFixed"} else added
    added = ["confidence"] if short == "ConfidenceSVLS" else added
    base = "decision/base" if short in TWO_HEADS else "base"
    added = TWO_HEADS.get(short, added)
    assert list(lines[0]["train"]) == [base, *added]
    if short in LEARNED:
        rows = LEARNED if channels == len(CLASSES) else ROWS_OF_REGIONS
        for line in lines:
            lam = torch.tensor(line[added[-1]]["lam"])
            assert lam.shape == (rows[short], channels)
    scheduled = {"weights"} if short in RAMPS else set()
    learned = {added[-1]} if short in LEARNED else set()
    known = {"epoch", "train", "val", "ece", "collapsed"}
    assert set(lines[0]) == known | scheduled | learned
    series = found.logger.local_logger.my_fantastic_logging
    assert {len(values) for values in series.values()} == {epochs}
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["2d", "3d"])
@pytest.mark.parametrize("short", [s + suffix for s in TRAINERS for suffix in ("", "_CE")])
def test_trainer(tiny, short, configuration):
    tiny()
    check(run(short, configuration), short)


@pytest.mark.slow
@pytest.mark.parametrize("short", TRAINERS)
def test_ignore_label(tiny, short):
    tiny(labels={**CLASSES, "ignore": 4})
    lines = check(run(short, "2d"), short)
    if short == "CRaC":  # 2 batches of 3 patches, rows 8 to 13 of 32 ignored
        assert sum(lines[0]["crac"]["count"]) < 2 * 3 * 16 * 16


@pytest.mark.slow
@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("short", sorted(PER_CHANNEL))
def test_regions(tiny, short, ignore):
    tiny(labels={**REGIONS, "ignore": 4} if ignore else REGIONS)
    found = run(short, "2d")
    assert found.channel_names == ["heart", "left", "cavity"]
    check(found, short, channels=3)


@pytest.mark.parametrize("short", sorted(set(TRAINERS) - PER_CHANNEL))
def test_regions_are_refused_before_training(tiny, short):
    tiny(labels=REGIONS)
    with pytest.raises(ValueError, match="has no form per channel"):
        trainer(f"nnUNetTrainer{short}", "2d").initialize()


@pytest.mark.parametrize("labels", [CLASSES, {**CLASSES, "ignore": 4}])
def test_a_penalty_of_weight_0_leaves_the_stock_loss(tiny, labels):
    """Cross-entropy is computed in a sweep with the penalty there, and has to be nnU-Net's."""
    tiny(labels=labels).set_plans("zero", "3d", segcal={"crac": {"weight": 0}})
    stock, ours = (trainer(f"nnUNetTrainer{name}", "zero") for name in ("", "CRaC"))
    for found in (stock, ours):
        found.initialize()
    batch = next(stock.get_dataloaders()[0])
    with torch.no_grad():
        heads = stock.network(batch["data"])
        assert ours.loss.joined.shares_sweep(heads[0])
        close(ours.loss(heads, batch["target"]), stock.loss(heads, batch["target"]), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("short", TRAINERS)
def test_cascade(tiny, short):
    """The second stage; the first one's predictions are written as nnU-Net would."""
    tiny().write_previous_stage(f"nnUNetTrainer{short}")
    found = run(short, "3d_cascade")
    assert found.num_input_channels == 1 + 3
    check(found, short)


@pytest.mark.slow
@pytest.mark.parametrize("short", TRAINERS)
def test_without_deep_supervision(tiny, short):
    tiny().set_plans("flat", "2d", segcal={"deep_supervision": False})
    found = run(short, "flat")
    assert not found.network.decoder.deep_supervision
    check(found, short)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["2d", "3d"])
def test_image_kernel_of_several_channels(tiny, configuration):
    data = tiny(channels=2)
    for kernel in ("image_l1", "mean"):
        data.set_plans(kernel, configuration, segcal={"nacl": {"kernel": kernel}})
    by_kernel = {k: check(run("NACL", k), "NACL") for k in ("image_l1", "mean")}
    first = {k: lines[0]["val"]["nacl"] for k, lines in by_kernel.items()}
    assert first["image_l1"] != first["mean"]


@pytest.mark.parametrize("short", ["CRaC", "BWCR", "FL_CE", "Confidence", "TwoHeadsConfidence"])
def test_a_training_of_each_kind(tiny, short, pictures):
    tiny()
    check(run(short, "2d", epochs=1), short, epochs=1)


def test_the_base_is_nnunets_own_loss(tiny):
    """Baseline's first loss is that of nnUNetTrainer, and with a penalty the base is."""
    tiny()
    stock = run("", "2d", epochs=1).logger.get_value("train_losses", 0)
    plain = run("Baseline", "2d", epochs=1)
    assert plain.logger.get_value("train_losses", 0) == stock
    penalised = trainer("nnUNetTrainerMbLS", "2d", epochs=1)
    penalised.num_iterations_per_epoch = 1  # the same weights still
    penalised.run_training()
    once = trainer("nnUNetTrainer", "2d", epochs=1)
    once.num_iterations_per_epoch = 1
    once.run_training()
    base = records(penalised)[0]["train"]["base"]
    assert base == pytest.approx(float(once.logger.get_value("train_losses", 0)), rel=1e-6)


def test_a_temperature_becomes_part_of_the_network(tiny, capsys):
    """The last layer of full resolution is divided; nnU-Net's checkpoint holds it so."""
    tiny()
    found = trainer("nnUNetTrainerConfidence", "2d", epochs=2)
    states, fold = [], found._fold_temperature

    def folded():
        states.append({k: v.clone() for k, v in found.network.state_dict().items()})
        fold()

    found._fold_temperature = folded
    found.run_training()
    (t,) = found.temperature
    assert f"segcal: temperature {t:.4g}, by which the last layer" in capsys.readouterr().out
    saved = torch.load(Path(found.output_folder) / "checkpoint_final.pth", weights_only=False)
    assert saved["init_args"]["segcal"]["temperature"] == [t]
    after = saved["network_weights"]
    changed = {k for k, v in states[0].items() if not torch.equal(v, after[k])}
    last = f"decoder.seg_layers.{len(found.network.decoder.seg_layers) - 1}"
    assert {name.rpartition(".")[0] for name in changed} == {last}
    for name in changed:
        close(after[name], states[0][name] / t, rtol=1e-6)
    again = trainer("nnUNetTrainerConfidence", "2d", epochs=2, resume=True)
    again.load_checkpoint(str(Path(found.output_folder) / "checkpoint_final.pth"))
    again.run_training()
    assert again.temperature == [pytest.approx(1, abs=1e-4)]


def test_a_temperature_that_cannot_be_fitted_costs_no_training(tiny, capsys, monkeypatch):
    tiny()
    found = trainer("nnUNetTrainerConfidence", "2d", epochs=1)
    whole = type(found)._probabilities

    def lost(of):
        for logits, labels in whole(of):
            yield torch.full_like(logits, math.nan), labels

    monkeypatch.setattr(type(found), "_probabilities", lost)
    found.run_training()
    assert found.temperature == []
    assert (Path(found.output_folder) / "checkpoint_final.pth").is_file()
    assert "WARNING: segcal: no temperature became part of the network: " in capsys.readouterr().out


def test_fold_all_warns(tiny, capsys):
    tiny()
    run("CRaC", "2d", "all", epochs=1)
    assert "multipliers are learned from training data" in capsys.readouterr().out
    run("NACL", "2d", "all", epochs=1)
    assert "multipliers are learned" not in capsys.readouterr().out


def test_an_order_that_contradicts_the_regions_is_said(tiny, capsys):
    data = tiny(labels=REGIONS)
    run("Baseline", "2d", epochs=1)
    assert "contradicts the regions" not in capsys.readouterr().out
    path = data.folder / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "regions_class_order": [3, 2, 1]}))
    run("Baseline", "2d", epochs=1)
    shown = capsys.readouterr().out
    assert "WARNING: dataset.json: 'regions_class_order' [3, 2, 1] contradicts the reg" in shown
    brief = Budget(epochs=1, iterations=1, val_iterations=1, seed=0, validate=False)
    for name in ("nnUNetTrainer", "nnUNetTrainerBaseline"):  # a stock one cannot say it itself
        running.train([data.folder.name, "2d", "0", "-device", "cpu", "-tr", name], brief)
        assert capsys.readouterr().out.count("contradicts the regions") == 1


def test_a_source_of_multipliers_that_are_not_learned_is_said(tiny, capsys):
    data = tiny(calib=True)
    run("CRaC", "2d", epochs=1)
    shown = capsys.readouterr().out
    assert "multipliers learn from 1 cases of their own" in shown
    assert "have no effect" not in shown
    data.set_plans("volumes", "2d", segcal={"multiplier_source": "volumes"})
    run("NACL", "volumes", epochs=1)
    shown = capsys.readouterr().out
    assert "multipliers learn from" not in shown
    assert 'learns no multipliers, so multiplier_source and a list "calib"' in shown


def test_settings_are_shown_and_unknown_ones_refused(tiny, capsys):
    data = tiny()
    data.set_plans("mine", "2d", segcal={"crac": {"margin_inner": 3.0}})
    run("CRaC", "mine", epochs=1)
    shown = capsys.readouterr().out
    assert "recipe crac: Dice + cross-entropy + crac; terms {" in shown
    assert "'margin_inner': 3.0" in shown
    assert "'multiplier_source': 'val_patches'" in shown
    data.set_plans("wrong", "2d", segcal={"crc": {"margin_inner": 3.0}})
    told = "nnUNetPlans.json, configuration wrong, nnUNetTrainerCRaC: .*unknown crc; this trainer"
    with pytest.raises(ValueError, match=told):
        trainer("nnUNetTrainerCRaC", "wrong")
    assert "segcal: the plans set" not in shown


def test_a_misspelt_block_is_one_line_and_no_folder(tiny):
    data = tiny()
    data.set_plans("wrong", "2d", segcal={"crac": {"margin_iner": 3.0}})
    start = ["nnunet", "train", NAME, "wrong", "0", "-tr", "nnUNetTrainerCRaC", "-device", "cpu"]
    done = CliRunner().invoke(app, start)
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    (line,) = [x for x in done.output.splitlines() if x.startswith("Error: ")]
    assert (
        "configuration wrong, nnUNetTrainerCRaC: segcal.penalties.crac.CRaC: takes no marg" in line
    )
    assert not (data.root / "results").exists()


def test_a_block_of_one_trainer_does_not_stop_another(tiny, capsys):
    data = tiny()
    block = {"crac": {"margin_inner": 3.0}, "epochs": 1, "iterations": 3}
    data.set_plans("shared", "2d", segcal=block)
    from nnunetv2.run.run_training import get_trainer_from_args

    cpu = torch.device("cpu")
    found = get_trainer_from_args(NAME, "shared", 0, "nnUNetTrainerNACL", device=cpu)
    assert (found.num_epochs, found.num_iterations_per_epoch) == (1, 3)
    run("NACL", "shared", epochs=1)
    assert "the plans set crac for other trainers" in capsys.readouterr().out


@pytest.mark.parametrize(("labels", "collapsed"), [(REGIONS, [0, 2]), (CLASSES, [1, 3])])
def test_collapse_of_the_first_region_is_seen(tiny, labels, collapsed):
    """Of what nnU-Net counts in validation: regions, or classes without the background."""
    tiny(labels=labels)
    found = trainer("nnUNetTrainerBaseline", "2d")
    found.initialize()
    counts = {"tp_hard": [0, 4, 0], "fp_hard": [0, 1, 0], "fn_hard": [7, 0, 2]}
    batch = {key: np.array(values, np.float32) for key, values in counts.items()}
    assert [found._collapsed_classes([batch, batch]) for _ in range(3)] == [[], [], collapsed]


def seen_by(monkeypatch, found):
    """Record what multipliers observe."""
    seen = []
    observe = type(found.loss.penalties).observe
    monkeypatch.setattr(
        type(found.loss.penalties),
        "observe",
        lambda self, logits, labels: (seen.append(labels.clone()), observe(self, logits, labels)),
    )
    return seen


@pytest.mark.parametrize("configuration", ["2d", "3d"])
def test_volumes_count_every_voxel_once(tiny, monkeypatch, configuration, pictures, capsys):
    data = tiny()
    data.set_plans(
        "whole", configuration, segcal={"multiplier_source": "volumes", "volumes_every": 2}
    )
    found = trainer("nnUNetTrainerCRaC", "whole", epochs=3)
    found.initialize()
    seen = seen_by(monkeypatch, found)
    found.run_training()
    lines = records(found)
    assert ["crac" in line for line in lines] == [True, False, True]
    labels = torch.stack([torch.from_numpy(data.labels[case]) for case in SPLIT["val"]])
    expected = torch.bincount(labels.flatten().long())
    got = torch.bincount(torch.cat([y.flatten() for y in seen]))
    assert torch.equal(got, 2 * expected)  # of two passes
    shown = capsys.readouterr().err
    assert "segcal: volumes that multipliers learn from: 100%" in shown
    assert "2/2" in shown
    assert sum(lines[0]["crac"]["count"]) == labels.numel()
    series = found.logger.local_logger.my_fantastic_logging
    assert {len(values) for values in series.values()} == {3}


def test_volumes_of_a_cascade(tiny):
    """The stage before goes to the images, not to the labels."""
    data = tiny()
    data.write_previous_stage("nnUNetTrainerCRaC")
    data.set_plans(
        "3d_cascade", "3d", previous_stage="3d_low", segcal={"multiplier_source": "volumes"}
    )
    found = trainer("nnUNetTrainerCRaC", "3d_cascade")
    found.initialize()
    found.do_split()
    voxels = torch.zeros(4, dtype=torch.long)
    for images, target, keep in found._volumes():
        assert images.shape[1] == 1 + 3
        assert set(images[:, 1:].unique().tolist()) <= {0.0, 1.0}
        voxels += torch.bincount(target[(0, 0, *keep)].flatten().long(), minlength=4)
    labels = torch.stack([torch.from_numpy(data.labels[case]) for case in SPLIT["val"]])
    assert torch.equal(voxels, torch.bincount(labels.flatten().long(), minlength=4))


def test_volumes_of_regions_leave_out_what_is_ignored(tiny):
    data = tiny(labels={**REGIONS, "ignore": 4})
    data.set_plans("whole", "2d", segcal={"multiplier_source": "volumes"})
    (line,) = check(run("CRaC", "whole", epochs=1), "CRaC", epochs=1, channels=3)
    kept = sum(int((data.labels[case] != 4).sum()) for case in SPLIT["val"])
    assert sum(line["crac"]["count"]) == 3 * kept  # of three channels


def test_fixed_patches_are_the_same_every_epoch(tiny, monkeypatch):
    tiny().set_plans("fixed", "2d", segcal={"multiplier_source": "fixed_patches"})
    found = trainer("nnUNetTrainerCRaC", "fixed")
    found.initialize()
    seen = seen_by(monkeypatch, found)
    found.run_training()
    first, second = torch.stack(seen).chunk(2)
    assert torch.equal(first, second)
    assert first.shape == (2, 3, 16, 16)


@pytest.mark.parametrize("source", ["val_patches", "fixed_patches", "volumes"])
def test_cases_kept_for_the_multipliers(tiny, monkeypatch, source):
    data = tiny(calib=True)
    data.set_plans("kept", "2d", segcal={"multiplier_source": source})
    found = trainer("nnUNetTrainerCRaC", "kept", epochs=1)
    loaded = []
    found.initialize()
    load = found.dataset_class.load_case
    monkeypatch.setattr(
        found.dataset_class,
        "load_case",
        lambda self, case: (loaded.append(case), load(self, case))[1],
    )
    found.run_training()
    seen = seen_by(monkeypatch, found)
    found.current_epoch = 0
    loaded.clear()
    found.observe_cases()
    assert set(loaded) == set(SPLIT["calib"])
    assert seen
    splits = data.folder / "splits_final.json"
    splits.write_text(json.dumps([{**SPLIT, "calib": CASES[1:]}]))
    with pytest.raises(ValueError, match="also in train or val: case_1, case_2, case_3"):
        run("CRaC", "kept", epochs=1)


class Elsewhere:
    """Stands for W&B."""

    def __init__(self):
        self.logged, self.config = {}, {}

    def update_config(self, config):
        self.config.update(config)

    def log(self, key, value, step):
        self.logged.setdefault(key, []).append((step, value))


def test_values_reach_nnunets_loggers(tiny):
    tiny()
    found = trainer("nnUNetTrainerCRaC", "2d")
    elsewhere = Elsewhere()
    found.logger.loggers.append(elsewhere)
    found.run_training()
    lines = records(found)
    assert elsewhere.config["segcal"]["crac"]["margin_inner"] == 5.0
    assert elsewhere.config["segcal"]["multiplier_source"] == "val_patches"
    logged = elsewhere.logged
    assert logged["segcal_val_ece"] == [(r["epoch"], r["ece"]) for r in lines]
    assert logged["segcal_train_base"] == [(r["epoch"], r["train"]["base"]) for r in lines]
    for row, region in enumerate(("inner", "outer")):
        for k, channel in enumerate(CLASSES):
            for key in ("lam", "rho", "constraint"):
                expected = [(r["epoch"], r["crac"][key][row][k]) for r in lines]
                assert logged[f"segcal_crac_{key}_{region}/{channel}"] == expected


def test_two_heads_learn_from_volumes_of_their_own(tiny, monkeypatch):
    """The logits that multipliers see are those of both heads."""
    data = tiny(calib=True)
    settings = {"multiplier_source": "volumes", "confidence": {"cap": 0.2}}
    data.set_plans("whole", "2d", segcal=settings)
    found = trainer("nnUNetTrainerTwoHeadsConfidence", "whole", epochs=1)
    found.initialize()
    channels, observe = set(), found.loss.observe
    monkeypatch.setattr(
        found.loss, "observe", lambda x, y: (channels.add(x.shape[1]), observe(x, y))
    )
    found.run_training()
    assert channels == {2 * len(CLASSES)}
    (line,) = records(found)
    lam = np.array(line["probability/confidence"]["lam"])
    assert 0 < lam.max() <= 0.2
    assert found.penalty_settings["probability/confidence"]["cap"] == 0.2
    assert found.network(torch.zeros(1, 1, 16, 16))[0].shape[1] == len(CLASSES)  # as stock


@pytest.mark.parametrize("checkpoint", ["final", "best"])
def test_resumed_training_is_the_uninterrupted_one(tiny, checkpoint):
    """From any checkpoint: killed early, a training has but nnU-Net's best one."""
    tiny()
    whole = run("CRaC", "2d", epochs=3)
    expected = records(whole)
    best = whole.best_calibrated
    part = trainer("nnUNetTrainerCRaC", "2d", epochs=3)
    part.initialize()
    part.num_epochs = 2  # ends early, its learning rate is that of three
    part.run_training()
    folder = Path(part.output_folder)
    again = trainer("nnUNetTrainerCRaC", "2d", epochs=3, resume=True)
    again.load_checkpoint(str(folder / f"checkpoint_{checkpoint}.pth"))
    again.run_training()
    assert records(again) == expected
    assert again.best_calibrated == best


def test_resumed_training_keeps_best_epochs_that_the_killed_one_had_not_come_to(tiny):
    """They are written after checkpoint_latest, which does not know of them."""
    tiny()
    killed = trainer("nnUNetTrainerCRaC", "2d")
    save, folder = killed.save_checkpoint, Path(killed.output_folder)

    def dies(name):
        save(name)
        raise KeyboardInterrupt

    killed.save_checkpoint = dies
    with pytest.raises(KeyboardInterrupt):
        killed.run_training()
    (latest,) = folder.glob("checkpoint*")
    again = trainer("nnUNetTrainerCRaC", "2d", resume=True)
    again.load_checkpoint(str(latest))
    again.on_train_start()
    for name in ("checkpoint_best", "checkpoint_best_ece"):
        assert torch.load(folder / f"{name}.pth", weights_only=False)["current_epoch"] == 1
    assert again._best_ema == killed.logger.get_value("ema_fg_dice", 0)
    assert again.best_calibrated.ece == records(killed)[0]["ece"]
    assert again.current_epoch == 1


def test_best_calibrated_checkpoint_is_that_epochs(tiny):
    tiny()
    found = run("NACL", "2d", epochs=3)
    saved = torch.load(Path(found.output_folder) / "checkpoint_best_ece.pth", weights_only=False)
    best = saved["init_args"]["segcal"]["best"]
    assert best["ece"] == records(found)[saved["current_epoch"] - 1]["ece"]
    assert best["ece"] == found.best_calibrated.ece


def test_log_of_a_diverged_training_is_json(tiny, pictures):
    tiny()
    found = trainer("nnUNetTrainerNACL", "2d", epochs=1)
    found.initialize()
    with torch.no_grad():
        next(found.network.parameters()).fill_(torch.nan)
    found.run_training()
    text = (Path(found.output_folder) / "segcal_log.jsonl").read_text()
    assert "NaN" not in text
    line = json.loads(text)
    assert line["train"] == line["val"] == {"base": None, "nacl": None}
    assert line["ece"] is None
    assert not (Path(found.output_folder) / "checkpoint_best_ece.pth").exists()


def test_a_network_of_two_stages_is_refused(tiny):
    two = architecture(2)
    two["arch_kwargs"] |= {
        "n_stages": 2, "features_per_stage": [4, 8], "kernel_sizes": [[3, 3]] * 2,
        "strides": [[1, 1], [2, 2]], "n_conv_per_stage": [1, 1], "n_conv_per_stage_decoder": [1],
    }  # fmt: skip
    data = tiny()
    data.set_plans("two", "2d", architecture=two)
    with pytest.raises(ValueError, match=r"two stages .* NaN; plan three stages or more, or tur"):
        trainer("nnUNetTrainerCRaC", "two").initialize()
    data.set_plans("flat", "two", segcal={"deep_supervision": False})  # as the message says
    trainer("nnUNetTrainerCRaC", "flat").initialize()


def rank_main(rank, root, name, configuration):
    """nnU-Net's training on several GPUs, on the CPU: only its device is another."""
    patch = pytest.MonkeyPatch()
    set_environment(patch, Path(root))
    from nnunetv2.training.nnUNetTrainer import nnUNetTrainer as host  # noqa: N813

    found = trainer(name, configuration)
    dist.init_process_group("gloo")
    try:
        patch.setattr(host, "DDP", lambda network, device_ids: ddp(network))
        ddp = torch.nn.parallel.DistributedDataParallel
        found.is_ddp, found.local_rank = True, rank
        found.run_training()
        state = found.loss.learned_state()
        ece = found.logger.get_value("segcal_val_ece", -1)
        kept = {"state": state, "batch": found.batch_size, "ece": ece,
                "terms": found._train_terms, "best": vars(found.best_calibrated),
                "temperature": found.temperature}  # fmt: skip
        torch.save(kept, f"{root}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_processes_of_several_gpus_find_the_trainer_and_its_budget(tiny, monkeypatch):
    """What nnU-Net spawns is called here, without a GPU, as its processes would call it."""
    data = tiny()
    from nnunetv2.run import run_training as host

    monkeypatch.setenv("nnUNet_extTrainer", "")
    spawned, trained = [], []
    monkeypatch.setattr(host.mp, "spawn", lambda f, args, nprocs, join: spawned.append((f, args)))
    name = "nnUNetTrainerCRaC"
    options = ["-tr", name, "-num_gpus", "2"]
    running.train([data.folder.name, "2d", "0", *options], Budget(epochs=7, seed=1))
    ((function, arguments),) = spawned
    assert host.run_ddp is not function  # as it was
    find = host.get_trainer_from_args
    cpu = torch.device("cpu")
    monkeypatch.setattr(host, "get_trainer_from_args", partial(find, device=cpu))

    def run_ddp(rank, dataset, configuration, fold, trainer_name, plans, *rest):
        trained.append(
            (rank, host.get_trainer_from_args(dataset, configuration, fold, trainer_name))
        )

    monkeypatch.setattr(host, "run_ddp", run_ddp)
    pickle.loads(pickle.dumps(function))(1, *arguments)
    ((rank, found),) = trained
    assert (rank, found.num_epochs, type(found).__name__) == (1, 7, name)


def test_batch_dice_of_uneven_shares_is_refused(tiny, monkeypatch):
    tiny().set_plans("even", "2d", batch_size=4)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for configuration in ("2d", "even"):
        found = trainer("nnUNetTrainerCRaC", configuration)
        found.is_ddp = True
        if configuration == "even":
            found._build_loss()
        else:
            with pytest.raises(ValueError, match="2 processes, whose shares of a batch of 3 diff"):
                found._build_loss()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("short", "source"),
    [
        ("CRaC", "val_patches"),
        ("CRaC", "volumes"),
        ("BWCR", "val_patches"),
        ("CALS", "val_patches"),
        ("Confidence", "val_patches"),
        ("Confidence", "volumes"),
    ],
)
def test_two_processes_learn_the_same_multipliers(tiny, short, source):
    data = tiny()
    settings = {"multiplier_source": source, "volumes_every": 1}
    # nnU-Net's own batch Dice cannot gather from batches of different sizes
    data.set_plans("two", "2d", batch_dice=False, segcal=settings)
    name = f"nnUNetTrainer{short}"
    in_two_processes(rank_main, str(data.root), name, "two")
    first, second = (torch.load(data.root / f"{r}.pt", weights_only=False) for r in (0, 1))
    assert (first["batch"], second["batch"]) == (2, 1)  # of a batch of three
    assert not differences(first["state"], second["state"], rel=0, abs=0)
    assert len(first["temperature"]) == (short == "Confidence")
    for key in ("ece", "terms", "best", "temperature"):
        assert first[key] == second[key]
    folder = data.root / "results" / "Dataset902_Tiny" / f"{name}__nnUNetPlans__two" / "fold_0"
    lines = [json.loads(line) for line in (folder / "segcal_log.jsonl").read_text().splitlines()]
    assert len(lines) == 2  # of rank 0 alone
    if short == "CRaC":
        voxels = 2 * 6 * 32 * 32 if source == "volumes" else 2 * 3 * 16 * 16
        assert sum(lines[0]["crac"]["count"]) == voxels  # of both ranks

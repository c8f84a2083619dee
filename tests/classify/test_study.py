"""Studies: losses x seeds x data sets."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from scipy import stats

from segcal.classify.choosing import choose
from segcal.classify.evaluation import evaluate_classifier
from segcal.classify.study import (
    Study,
    check,
    load_study,
    report_study,
    result_of,
    run_trials,
    trials,
)
from segcal.classify.study_report import TrialResult, write_study
from segcal.training.epoch_log import EpochLog
from segcal.training.experiments import read_content, shipped
from segcal.training.time_limit import OutOfTimeError
from tests.classify.classifiers import write_classes, write_config, write_labels
from tests.conftest import close
from tests.forks import forked

pytestmark = pytest.mark.usefixtures("one_thread")


HEADER = {"name": "s", "predictions": "p", "references": "r"}


@pytest.fixture
def study(tmp_path):
    """Two losses of classes and three of labels, two seeds."""
    terms = {"cals": {"margin": 3.0}}
    experiment = write_config(tmp_path, write_classes(tmp_path / "classes.npz"), terms=terms)
    data = {"args": {"path": str(write_labels(tmp_path / "labels.npz"))}}
    content = {
        "sets": {
            "clouds": {"config": str(experiment)},
            "halves": {
                "config": str(experiment),
                "recipes": ["bce", "asymmetric", "two_way"],
                "changes": {"data": data, "training": {"batch_size": 16}},
            },
        },
        "recipes": ["ce", "cals"],
        "seeds": [1, 2],
        "terms": {"cals": {"cals": {"margin": 0.5}}},
        "changes": {"training": {"epochs": 2}},
        "output": str(tmp_path / "study"),
    }
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def report(found, folder, **kwargs):
    runs = [run for run in map(result_of, found) if run is not None]
    return write_study(folder, runs, **{"header": HEADER, "failed": {}, **kwargs})


def test_trials(study):
    found = trials(load_study(study))
    assert [c.name for c in found[:3]] == [
        "clouds, ce, seed 1", "clouds, ce, seed 2", "clouds, cals, seed 1"]  # fmt: skip
    assert len(found) == 2 * 2 + 3 * 2
    cals, halves = found[2].experiment, found[-1].experiment
    assert cals.terms == {"cals": {"margin": 0.5}}
    assert found[0].experiment.terms == {}  # those in the file are of its own recipe
    assert cals.folder.parts[-4:] == ("study", "clouds", "cals", "seed_1")
    assert (halves.training.batch_size, halves.training.epochs) == (16, 2)
    assert (cals.training.batch_size, cals.training.seed) == (32, 1)
    assert all(c.experiment.data.split.seed == c.seed for c in found)
    fixed = trials(load_study(study, ["splits=fixed"]))
    assert {c.experiment.data.split.seed for c in fixed} == {0}
    crossed = trials(load_study(study, ["splits=folds", "seeds=[4, 2]"]))
    assert {(c.seed, c.experiment.data.split.fold) for c in crossed} == {(4, 0), (2, 1)}
    assert {(c.experiment.data.split.seed, c.experiment.data.split.folds) for c in crossed} == {
        (0, 2)}  # fmt: skip


def test_a_loss_has_names_of_ones_own(study):
    """What a variant says goes before what the study says of its loss."""
    content = yaml.safe_load(study.read_text())
    content["terms"]["cals"]["cals"]["rho0"] = 2.0
    content["recipes"] = {
        "ce": None,
        "cals": None,
        "p2_m0.7": {"recipe": "cals", "terms": {"cals": {"margin": 0.7, "function": "p2"}}},
    }
    content["sets"]["halves"]["recipes"] = ["bce"]
    content["sets"]["one"] = {**content["sets"]["clouds"], "recipes": ["p2_m0.7"]}
    study.write_text(yaml.safe_dump(content, sort_keys=False))
    found = {(t.set, t.recipe): t.experiment for t in trials(load_study(study)) if t.seed == 1}
    assert list(found) == [
        ("clouds", "ce"), ("clouds", "cals"), ("clouds", "p2_m0.7"), ("halves", "bce"),
        ("one", "p2_m0.7"),
    ]  # fmt: skip
    variant = found["one", "p2_m0.7"]
    assert variant.recipe == "cals"
    assert variant.terms == {"cals": {"margin": 0.7, "rho0": 2.0, "function": "p2"}}
    assert found["clouds", "cals"].terms == {"cals": {"margin": 0.5, "rho0": 2.0}}
    assert variant.folder.parts[-3:] == ("one", "p2_m0.7", "seed_1")


def test_sets_beside_each_other_and_test_samples_over_the_epochs(study, tmp_path):
    """Of two sets of classes there is a figure of both; of test samples where they are measured."""
    settings = [
        "recipes=[ce]", "seeds=[1]", "sets.halves.recipes=[bce]", "changes.bins=4",
        "sets.clouds.changes.training.test_curves=true",
    ]  # fmt: skip
    content = yaml.safe_load(study.read_text())
    content["sets"]["more"] = dict(content["sets"]["clouds"])
    study.write_text(yaml.safe_dump(content))
    found = trials(load_study(study, settings))
    assert [why for _, why in run_trials(found, 1)] == [""] * 3
    files = report(found, tmp_path / "report")
    of_all = {f"figures/{name}.png" for name in ("trade_off", "ece_epochs")}
    of_test = {f"figures/clouds_test_{metric}_epochs.png" for metric in ("accuracy", "ece")}
    assert of_all | of_test <= set(files)
    assert not any("more_test" in name or "halves_test" in name for name in files)
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert summary["conventions"]["classes: bins"] == "4 of (lo, hi], 0 in the first"
    assert len(found[0].result()["outcomes"]["softmax"]["reliability"]["count"]) == 4


def test_the_best_on_validation_is_chosen_for_every_seed(study, tmp_path):
    content = yaml.safe_load(study.read_text())
    content["sets"].pop("clouds")
    content["sets"]["halves"].pop("recipes")
    mild = {"recipe": "spa", "terms": {"spa": {"negative": [2, 1, 0]}}}
    content |= {
        "recipes": {"spa": None, "spa@mild": mild, "two_way": None}, "seeds": [1, 2, 3],
        "chosen": {"spa_chosen": ["spa", "spa@mild"]}, "terms": {},
    }  # fmt: skip
    study.write_text(yaml.safe_dump(content))
    read = load_study(study)
    found = trials(read)
    check(found)
    todo = [t for t in found if (t.recipe, t.seed) != ("spa", 3)]  # seed 3 has no choice yet
    assert [why for _, why in run_trials(todo, 1)] == [""] * 8
    report_study(read, found, tmp_path / "report", name="s", failed={}, forms=["markdown"])
    runs = pd.read_csv(tmp_path / "report" / "runs.csv").set_index(["method", "seed"])
    results = {(t.recipe, t.seed): t.result() for t in todo}
    for seed in (1, 2):
        of = {name: results[name, seed]["best"] for name in ("spa", "spa@mild")}
        assert results["spa", seed]["metric"] == "nll"
        best = min(of, key=of.get)
        tested = results[best, seed]["outcomes"]["link"]["metrics"]["nll"]
        close(runs.loc[("spa_chosen + link", seed), "nll"], tested, rtol=1e-9)
    assert ("spa_chosen + link", 3) not in runs.index
    assert ("spa_chosen", 1) not in runs.index  # the sigmoid had no part in the choice
    tables = (tmp_path / "report" / "tables.md").read_text()
    table = tables.split("chosen on validation samples")[1]
    line = next(x for x in table.splitlines() if x.startswith("| spa@mild"))
    validation = sum(results["spa@mild", s]["best"] for s in (1, 2)) / 2
    tested = sum(results["spa@mild", s]["outcomes"]["link"]["metrics"]["nll"] for s in (1, 2)) / 2
    assert f"{validation:.4f}" in line
    assert f"{tested:.4f}" in line
    page = (tmp_path / "report" / "index.html").read_text()
    assert "for every seed, the loss with the best validation NLL of 2" in page


def test_a_choice_needs_one_metric_and_takes_the_right_end(study):
    def run(recipe, metric, best):
        outcome = {"sigmoid": {"metrics": {metric: best}, "retrieval": {}, "reliability": {}}}
        return TrialResult(
            set="s", recipe=recipe, seed=1, multilabel=True, names=("a",), samples={}, tested=0,
            notes=(),
            outcomes=outcome, last={}, metric=metric, best=best, records=[],
        )  # fmt: skip

    found = [run("a", "map_class", 0.3), run("b", "map_class", 0.5), run("c", "nll", 0.1)]
    assert choose("x", ["a", "b"], found).chosen[1].recipe == "b"
    assert choose("x", ["a", "d"], found) is None
    with pytest.raises(ValueError, match=r"chosen\.x: .*got map_class and nll; set changes"):
        choose("x", ["a", "c"], found)
    low = [run("a", "nll", 0.3), run("b", "nll", 0.5)]
    assert choose("x", ["a", "b"], low).chosen[1].recipe == "a"
    linked = [
        replace(r, seed=2, outcomes={**r.outcomes, "link": {}}, last={"link": {}}) for r in low
    ]
    low = [replace(r, last={"sigmoid": {}}) for r in low]
    rows = choose("x", ["a", "b"], [*low, *linked]).results()
    assert [(r.recipe, r.seed, list(r.outcomes)) for r in rows] == [
        ("x", 1, ["posterior"]), ("x", 2, ["posterior"]),
    ]  # fmt: skip


def test_a_study_runs_once_and_its_table_holds_the_means(study, tmp_path):
    found = trials(load_study(study))
    check(found)
    assert [why for _, why in run_trials(found, 1)] == [""] * 10
    assert all(c.result() is not None for c in found)
    files = report(found, tmp_path / "report", forms=["markdown", "latex"])
    assert {"index.html", "runs.csv", "means.csv", "differences.csv", "tables.md",
            "tables.tex"} <= set(files)  # fmt: skip
    assert {f for f in files if f.endswith(".png")} == {
        f"figures/{name}.png" for name in (
            "trade_off", "clouds_metrics", "clouds_ece_epochs", "clouds_multipliers",
            "clouds_multiplier_bands", "clouds_reliability", "halves_metrics", "halves_ace_epochs",
            "halves_map_class_epochs", "halves_reliability", "halves_retrieval",
        )}  # fmt: skip
    runs = (
        pd.read_csv(tmp_path / "report" / "runs.csv")
        .set_index(["set", "method", "seed"])
        .sort_index()
    )
    for trial in found:
        for kind, outcome in trial.result()["outcomes"].items():
            method = trial.recipe if kind in ("softmax", "sigmoid") else f"{trial.recipe} + {kind}"
            row = runs.loc[(trial.set, method, trial.seed)]
            for metric, value in outcome["metrics"].items():
                close(row[metric], value, rtol=1e-9)
            for conditions, value in outcome["retrieval"].items():
                close(row[f"retrieval_{conditions}"], value, rtol=1e-9)
            last = evaluate_classifier(trial.experiment.folder, checkpoint="checkpoint_last.pt")
            close(row["last_nll"], last.outcomes[kind].metrics["nll"], rtol=1e-9)
    _check_differences(tmp_path / "report" / "differences.csv", runs)
    means = pd.read_csv(tmp_path / "report" / "means.csv").set_index(["set", "method"])
    ace = runs.loc[("halves", "asymmetric + phi"), "ace"]
    close(means.loc[("halves", "asymmetric + phi"), "ace_mean"], (ace[1] + ace[2]) / 2, rtol=1e-9)
    close(means.loc[("halves", "asymmetric + phi"), "ace_std"], abs(ace[1] - ace[2]) / np.sqrt(2),
          rtol=1e-9)  # fmt: skip
    table = (tmp_path / "report" / "tables.md").read_text()
    accuracy = runs.loc[("clouds", "ce"), "accuracy"]
    assert f"{accuracy.mean():.4f}" in next(x for x in table.splitlines() if x.startswith("| ce |"))
    assert "| asymmetric + phi |" in table
    assert "| two\\_way |" in table
    assert "Nadeau and Bengio" in table
    same = [replace(run, tested=0) for run in map(result_of, found)]  # as its data set may say
    write_study(tmp_path / "same", same, header=HEADER, failed={}, forms=["markdown"])
    said = (tmp_path / "same" / "tables.md").read_text()
    assert "All seeds have the same test samples" in said
    assert "Nadeau" not in said
    answered = table.split("halves: retrieval")[1]
    assert "1 condition ↑" in answered
    assert f"{means.loc[('halves', 'bce'), 'retrieval_2_mean']:.4f}" in answered
    assert "over 2 seeds (72 train, 24 validation, 24 test)" in table
    assert "was tested, for two\\_way the epoch with the best mAP@class." in table
    assert "clouds: after the last epoch" in table
    page = (tmp_path / "report" / "index.html").read_text()
    assert "10 trainings evaluated" in page
    assert "two_way has no posterior" in page


def _check_differences(path, runs):
    """Every difference is the mean of those of the two seeds, with the variance of new samples."""
    found = pd.read_csv(path).set_index(["set", "method", "metric"])
    ece = runs["ece"]
    delta = ece.loc["clouds", "cals"] - ece.loc["clouds", "ce"]
    row = found.loc["clouds", "cals", "ece"]
    half = stats.t.ppf(0.975, 1) * delta.std() * np.sqrt(1 / 2 + 24 / 72)
    close([row["difference"], row["ci95_low"], row["ci95_high"]],
          [delta.mean(), delta.mean() - half, delta.mean() + half], rtol=1e-9)  # fmt: skip
    assert found.loc["halves", "asymmetric + phi", "ace"]["baseline"] == "bce"
    assert ("halves", "bce", "ace") not in found.index


def test_more_epochs_go_on_and_fewer_are_refused(study):
    found = trials(load_study(study))[:1]
    assert [why for _, why in run_trials(found, 1)] == [""]
    longer = trials(load_study(study, ["changes.training.epochs=3"]))
    assert all(c.result() is None for c in longer)  # not what was asked for: it goes on
    assert [why for _, why in run_trials(longer[:1], 1)] == [""]
    assert longer[0].result()["epochs"] == 3
    assert "more than training.epochs 2" in next(run_trials(found[:1], 1))[1]


def test_a_study_goes_on_where_time_was_up(study):
    whole, slices = (trials(load_study(study, [f"output={study.parent / n}"]))[:2] for n in "ab")
    assert [why for _, why in run_trials(whole, 1)] == [""] * 2
    epochs = []
    while left := [trial for trial in slices if trial.result() is None]:
        with suppress(OutOfTimeError):
            assert [why for _, why in run_trials(left, 1, until=0.0)] == [""]
        epochs.append([len(EpochLog(t.experiment.folder).records()) for t in slices])
    assert epochs == [[1, 0], [2, 0], [2, 1], [2, 2]]
    assert [t.result()["outcomes"] for t in slices] == [t.result()["outcomes"] for t in whole]


def test_an_unfinished_study_says_what_is_missing(study, tmp_path):
    found = trials(load_study(study))
    assert [why for _, why in run_trials(found[:3], 1)] == [""] * 3
    report(found, tmp_path / "report", failed={"a": "why"}, missing=[c.name for c in found[3:]])
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert summary["cases"]["evaluated"] == 3
    assert summary["cases"]["failed"] == {"a": "why"}
    assert summary["missing"][0] == "clouds, cals, seed 2"
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Some methods have only 1 trainings" in page
    assert "interrupted" in page


def test_a_training_that_fails_does_not_stop_the_others(study):
    sgd = {"target": "torch.optim.SGD", "args": {"lr": 1e30}}
    found = trials(load_study(study, ["recipes=[ce, ls]"]))
    broken = found[0].experiment.model_copy(
        update={"optimizer": type(found[0].experiment.optimizer)(**sgd)}
    )
    first = type(found[0])(found[0].set, found[0].recipe, found[0].seed, broken)
    reasons = [why for _, why in run_trials([first, found[1]], 1)]
    assert reasons[0].startswith("the loss is nan in epoch 0")
    assert reasons[1] == ""


def test_memory_that_ends_does_not_stop_the_others(study, monkeypatch):
    found = trials(load_study(study))[:2]

    def full(trial, until):
        if trial == found[0]:
            raise torch.OutOfMemoryError("2 GiB more")

    monkeypatch.setattr("segcal.classify.study.run_trial", full)
    whys = [why for _, why in run_trials(found, 1)]
    assert whys[0].startswith("OutOfMemoryError: 2 GiB more (more in ")
    assert whys[1] == ""
    told = (found[0].experiment.folder / "failed.txt").read_text()
    assert "in full" in told  # the traceback
    monkeypatch.setattr("segcal.classify.study.run_trial", lambda trial, until: None)
    assert [why for _, why in run_trials(found[:1], 1)] == [""]
    assert not (found[0].experiment.folder / "failed.txt").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("changes.terms.cals.margin=3", "changes: terms has no effect here; set terms.REC"),
        ("changes.recipe=ls", "recipe has no effect here; set recipes"),
        ("sets.halves.changes.training.seed=7", r"halves\.changes.*training\.seed has no effect"),
        ("sets.halves.changes.output=a", "output has no effect here"),
        ("changes.data.split.seed=7", r"data\.split\.seed has no effect with splits: seed"),
        ("splits=folds", "makes a fold for every seed, so give two or more"),
    ],
)
def test_changes_that_a_study_overrules_are_refused(study, changes, message):
    with pytest.raises(ValueError, match=message):
        load_study(study, ["splits=seed", "seeds=[1]", changes])


def test_results_of_other_data_are_refused(study, tmp_path):
    found = trials(load_study(study))[:1]
    assert [why for _, why in run_trials(found, 1)] == [""]
    check(found)
    write_classes(tmp_path / "classes.npz", seed=1)
    with pytest.raises(ValueError, match=r"sets\.clouds, ce: .*result\.json: was trained when its"):
        check(found)


def test_a_process_that_is_killed_does_not_stop_the_report(study, monkeypatch):
    class Killed(ThreadPoolExecutor):
        def __init__(self, processes, *rest):
            super().__init__(processes)

        def submit(self, *arguments):
            future = Future()
            future.set_exception(BrokenProcessPool())
            return future

    monkeypatch.setattr("segcal.classify.study.ProcessPoolExecutor", Killed)
    found = trials(load_study(study))
    ended = list(run_trials(found, 2))
    assert len(ended) == len(found)
    assert all("its process was killed" in why for _, why in ended)


@pytest.mark.slow
def test_several_processes_find_the_same(study, monkeypatch):
    monkeypatch.setattr("segcal.classify.study.get_context", forked(multiprocessing.get_context))
    found = trials(load_study(study))[:2]
    assert [why for _, why in run_trials(found, 1)] == ["", ""]
    other = trials(load_study(study, [f"output={study.parent / 'other'}"]))[:2]
    assert {trial.name: why for trial, why in run_trials(other, 2)} == {c.name: "" for c in other}
    for a, b in zip(found, other, strict=True):
        assert a.result()["outcomes"] == b.result()["outcomes"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["sets={}"], "at least 1"),
        (["recipes=[]"], "sets.clouds: has no recipes"),
        (["baseline=ls"], "baseline: expected a recipe that every set has, but clouds has ce"),
        (["recipes=[nothing]"], "sets.clouds, nothing: .*no recipe"),
        (["changes.training.epoch=1"], "sets.clouds, ce: .*epoch: unknown; there are epochs"),
        (["sets.clouds.config=none"], "sets.clouds, ce: none: no YAML file"),
        (["sets.clouds.recipes=[bce]"], "sets.clouds, bce: "),
        (["sets.halves.recipes=[ce]"], "sets.halves, ce: recipe: ce is a loss of classes"),
        (["recipes=[ce, ce]"], "name each once"),
        (["terms.calls.cals.margin=3"], "terms: no recipe, penalty or loss is called 'calls'"),
        (["terms.cals.calls.margin=3"], "sets.clouds, cals: .*has no term calls"),
        (["chosen.x=[ce]"], "chosen.x: expected a name that no recipe has, and two or more"),
        (["chosen.ce=[ce, cals]"], "chosen.ce: expected a name that no recipe has"),
        (["chosen.x=[ce, ls]"], "chosen.x: ls is not in the study, which has ce, cals"),
        (["recipes.ce=3"], "recipes"),
        (["seed=[3]"], "seed: unknown; there are summary, sets"),
    ],
)
def test_what_does_not_fit_is_refused_before_work_starts(study, settings, message):
    with pytest.raises(ValueError, match=message):
        check(trials(load_study(study, settings)))


def test_names_of_sets_are_those_of_folders(study):
    content = yaml.safe_load(study.read_text())
    content["sets"]["../a"] = content["sets"].pop("clouds")
    study.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=r"'\.\./a' cannot name a folder"):
        load_study(study)


def classification_studies():
    return [n for n in shipped("studies") if "kind" not in read_content(n, Study, "studies")]


@pytest.mark.parametrize("name", classification_studies())
def test_shipped_studies_fit(name):
    study = load_study(name)
    assert study.summary
    assert len(trials(study)) == sum(
        len(one.recipes or study.recipes) * len(study.seeds) for one in study.sets.values()
    )

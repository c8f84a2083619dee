"""The skeleton of a training, on a trainer of a few lines."""

from __future__ import annotations

import json
import math
import subprocess

import pytest
import torch
from torch import nn

from segcal.components import Component
from segcal.io.yaml import Strict
from segcal.metrics.ece import ece
from segcal.posthoc.folding import fitted_temperature
from segcal.recipes import build, load_objective
from segcal.training import beginning
from segcal.training.beginning import OutputInUseError, source_commit
from segcal.training.collapse import CollapseWatch
from segcal.training.devices import Ranks
from segcal.training.epoch_log import EpochLog
from segcal.training.experiments import Experiment, TrainingSettings
from segcal.training.results import Criterion, HeldOutPass, Validation
from segcal.training.run import TrainingRun

pytestmark = pytest.mark.usefixtures("one_thread", "drawn")


@pytest.fixture
def drawn(monkeypatch):
    """Folders of figures, in place of figures, which take longer than these trainings."""
    found = []
    monkeypatch.setattr(TrainingRun, "_draw", lambda run: found.append(run.folder))
    return found


class TinyTraining(TrainingSettings):
    """How long."""

    epochs: int = 3
    batch_size: int = 4
    device: str = "cpu"


class TinyExperiment(Experiment):
    """What is trained."""

    data: Strict = Strict()
    network: Component = Component(target="torch.nn.Linear")
    recipe: str = "cals"
    training: TinyTraining = TinyTraining()


class TinyRun(TrainingRun[TinyExperiment]):
    """Three classes of points in the plane, a layer with dropout."""

    keys = (*TrainingRun.keys, "points")
    criterion = Criterion("nll", "likelihood", higher=False)

    def prepare(self, checkpoint):
        self.classes = ("a", "b", "c")
        self.recipe = load_objective(self.experiment.recipe)
        self.objective = build(self.experiment.recipe, 3)
        self.labels = torch.arange(12) % 3
        noise = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
        self.points = noise + 2 * torch.eye(3, 2)[self.labels]

    def build_network(self, *, fresh):
        return nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.2))

    def train_epoch(self, seed):
        self.network.train()
        self.objective.train()
        for i in torch.randperm(12).split(self.experiment.training.batch_size):
            self.optimizer.zero_grad()
            total, values = self.objective.loss_and_terms(
                self.network(self.points[i]), self.labels[i]
            )
            total.backward()
            self.optimizer.step()
        return {name: float(value) for name, value in values.items()}

    @torch.no_grad()
    def validate_epoch(self):
        self.network.eval()
        self.objective.eval()
        self.objective.start_pass()
        logits = self.network(self.points)
        _, values = self.objective.loss_and_terms(logits, self.labels)
        self.objective.observe(logits, self.labels)
        steps = self.objective.dual_step()
        nll = float(nn.functional.cross_entropy(logits, self.labels))
        metrics = {"nll": nll, "ece": ece(logits.softmax(1), self.labels)}
        return Validation({n: float(v) for n, v in values.items()}, metrics, steps)

    def held_out(self, network):
        with torch.no_grad():
            return HeldOutPass(iter([(network(self.points), self.labels)]), 1, None)

    def own_state(self):
        return {"points": len(self.points)}

    def after_epoch(self, record, validation):
        self.advance(f"{record[self.criterion.key]:.4f}")


class ScriptedRun(TinyRun):
    """Validates to numbers that a test has written down."""

    criterion = Criterion("score", "score")
    script = ()
    predicted = ()

    def prepare(self, checkpoint):
        super().prepare(checkpoint)
        if self.predicted:
            self.collapse = CollapseWatch(3, patience=2)

    def validate_epoch(self):
        predicted = self.predicted[self.epoch] if self.predicted else ()
        metrics = {"score": self.script[self.epoch], "ece": 0.1}
        return Validation({}, metrics, {}, predicted, (1,) * 3)


def experiment(folder, **parts):
    return TinyExperiment(output=str(folder / "run"), **parts)


def scripted(folder, *values, higher=True, said=None, resume=False, predicted=(), **parts):
    class Run(ScriptedRun):
        criterion = Criterion("score", "score", higher)
        script = values

    Run.predicted = predicted
    training = {"epochs": len(values), **parts.pop("training", {})}
    given = experiment(folder, training=training, **parts)
    say = (lambda text: None) if said is None else said.append
    return Run(given, resume=resume, say=say).run()


def content(folder, name="checkpoint_last.pt"):
    return torch.load(folder / "run" / name, weights_only=True)


def records(folder):
    found = EpochLog(folder / "run").records()
    return [{k: v for k, v in r.items() if k != "seconds"} for r in found]


def test_the_best_network_is_divided_by_its_temperature(tmp_path):
    """Of any trainer: a recipe says so, and a second run of a finished training changes nothing."""
    recipe = tmp_path / "warm.yaml"
    recipe.write_text("base: {cross_entropy: 1.0}\ntemperature: true\n")
    said = []
    training = {"epochs": 30, "batch_size": 12}
    given = experiment(tmp_path, recipe=str(recipe), training=training)
    TinyRun(given, say=said.append).run()
    best, last = content(tmp_path, "checkpoint_best.pt"), content(tmp_path)
    (t,) = best["temperature"]
    assert t != 1
    assert "temperature" not in last
    assert said[-1].startswith(f"Temperature {t:.4g}, by which the last layer in checkpoint_best")
    if best["epoch"] == last["epoch"]:
        torch.testing.assert_close(best["network"]["0.weight"], last["network"]["0.weight"] / t)
    before = (tmp_path / "run" / "checkpoint_best.pt").read_bytes()
    TinyRun(given, resume=True).run()
    assert (tmp_path / "run" / "checkpoint_best.pt").read_bytes() == before
    run = TinyRun(given, resume=True)
    run.network.load_state_dict(best["network"])
    run.network.eval()
    batches, number, _ = run.held_out(run.network)
    assert fitted_temperature(batches, number).value == pytest.approx(1, abs=1e-4)


def test_a_temperature_that_cannot_be_fitted_costs_no_training(tmp_path):
    class Lost(TinyRun):
        def held_out(self, network):
            return HeldOutPass(iter([(torch.full((12, 3), torch.nan), self.labels)]), 1, None)

    recipe = tmp_path / "warm.yaml"
    recipe.write_text("base: {cross_entropy: 1.0}\ntemperature: true\n")
    said = []
    done = Lost(experiment(tmp_path, recipe=str(recipe)), say=said.append).run()
    assert done.epochs == 3
    assert said[-1].startswith("WARNING: checkpoint_best.pt was left without a temperature: ")
    assert "temperature" not in content(tmp_path, "checkpoint_best.pt")


def assert_same(a, b):
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a.keys() - {"experiment"}:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def test_a_trainer_of_a_few_lines_has_all_that_trainers_have(tmp_path, monkeypatch):
    monkeypatch.undo()  # with a figure
    steps = []
    done = TinyRun(experiment(tmp_path)).run(steps.append)
    assert {p.name for p in done.folder.iterdir()} == {
        "config.yaml", "run.json", "segcal_log.jsonl", "segcal_progress.png",
        "checkpoint_best.pt", "checkpoint_last.pt"}  # fmt: skip
    logged = records(tmp_path)
    assert steps == [f"{r['nll']:.4f}" for r in logged]
    assert [list(r) for r in logged] == [["epoch", "train", "val", "nll", "ece", "lr", "cals"]] * 3
    assert (done.epochs, done.metric, done.early) == (3, "likelihood", False)
    assert done.best == min(r["nll"] for r in logged) == logged[done.best_epoch]["nll"]
    assert content(tmp_path, "checkpoint_best.pt")["epoch"] == done.best_epoch + 1
    assert content(tmp_path)["points"] == 12
    told = json.loads((done.folder / "run.json").read_text())
    (started,) = told["runs"]
    assert (started["first_epoch"], started["seed"], started["processes"]) == (0, 1, 1)
    assert {"python", "torch", "segcal"} <= started["versions"].keys()
    assert started["versions"].get("commit") == source_commit()
    assert (told["metric"], told["classes"]) == ("likelihood", ["a", "b", "c"])
    assert told["recipe"] == load_objective("cals").model_dump()


def test_the_commit_is_told_where_there_is_one(tmp_path, monkeypatch):
    root = tmp_path / "checkout"
    monkeypatch.setattr(beginning, "__file__", str(root / "segcal" / "training" / "beginning.py"))
    assert source_commit() is None  # installed, not checked out
    (root / ".git").mkdir(parents=True)
    assert source_commit() is None  # damaged
    (root / ".git").rmdir()
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    commit = source_commit()
    assert commit == head.stdout[: len(commit)]
    assert len(commit) == 12


def test_a_killed_training_goes_on_as_if_it_had_not_been(tmp_path):
    """Weights, moments, multipliers, schedule, order and dropout."""
    schedule = Component(target="torch.optim.lr_scheduler.StepLR", args={"step_size": 2})
    given = {"scheduler": schedule, "training": {"epochs": 5}}
    TinyRun(experiment(tmp_path / "whole", **given)).run()

    class Killed(TinyRun):
        def validate_epoch(self):
            if self.epoch == 3:
                raise KeyboardInterrupt
            return super().validate_epoch()

    with pytest.raises(KeyboardInterrupt):
        Killed(experiment(tmp_path / "parts", **given)).run()
    with EpochLog(tmp_path / "parts" / "run").path.open("a") as file:
        file.write('{"epoch": 3, "tr')  # as if killed while it wrote
    (tmp_path / "parts" / "run" / ".segcal-abcdefgh-checkpoint_last.pt").write_bytes(b"half")
    done = TinyRun(experiment(tmp_path / "parts", **given), resume=True).run()
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        assert_same(content(tmp_path / "whole", name), content(tmp_path / "parts", name))
    assert records(tmp_path / "whole") == records(tmp_path / "parts")
    assert [r["lr"] for r in records(tmp_path / "parts")] == pytest.approx(
        [1e-3, 1e-3, 1e-4, 1e-4, 1e-5]
    )
    assert not list(done.folder.glob(".segcal-*"))
    runs = json.loads((done.folder / "run.json").read_text())["runs"]
    assert [r["first_epoch"] for r in runs] == [0, 3]
    assert TinyRun(experiment(tmp_path / "parts", **given), resume=True).run() == done


def test_seeds_make_the_difference(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        TinyRun(experiment(tmp_path / name, training={"seed": seed})).run()
    assert records(tmp_path / "a") == records(tmp_path / "b")
    assert records(tmp_path / "a")[0]["train"] != records(tmp_path / "c")[0]["train"]


def test_what_is_there_is_not_overwritten(tmp_path):
    TinyRun(experiment(tmp_path)).run()
    with pytest.raises(OutputInUseError, match="holds a training; resume it, or choose another"):
        TinyRun(experiment(tmp_path))
    (tmp_path / "run" / "checkpoint_last.pt").unlink()
    with pytest.raises(OutputInUseError):  # its log is there
        TinyRun(experiment(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "ce"}, r"checkpoint_last\.pt: was trained with recipe = 'cals', not 'ce'"),
        ({"training": {"batch_size": 3}}, r"training\.batch_size = 4, not 3"),
        ({"training": {"epochs": 2}}, r"trained for 3 epochs, more than training\.epochs 2"),
    ],
)
def test_a_training_goes_on_only_as_it_began(tmp_path, changes, message):
    TinyRun(experiment(tmp_path)).run()
    with pytest.raises(ValueError, match=message):
        TinyRun(experiment(tmp_path, **changes), resume=True)
    more = TinyRun(experiment(tmp_path, training={"epochs": 4, "early_stop": 9}), resume=True).run()
    assert more.epochs == 4


def test_another_content_of_the_recipe_is_refused_on_resume(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: {cross_entropy: 1.0}\n")
    given = experiment(tmp_path, recipe=str(recipe))
    TinyRun(given).run()
    recipe.write_text("base: {cross_entropy: 2.0}\n")
    with pytest.raises(ValueError, match=r"was trained with another content of .*mine\.yaml"):
        TinyRun(given, resume=True)
    recipe.write_text("base: {cross_entropy: 1.0}\n")
    assert TinyRun(given, resume=True).run().epochs == 3


def test_checkpoints_of_other_trainers_are_refused(tmp_path):
    TinyRun(experiment(tmp_path)).run()

    class Other(TinyRun):
        keys = (*TinyRun.keys, "volumes")

    with pytest.raises(ValueError, match="not a checkpoint of a training of this kind"):
        Other(experiment(tmp_path), resume=True)


NAN = math.nan


@pytest.mark.parametrize(
    ("values", "higher", "best"),
    [
        ((0.1, 0.3, 0.2, 0.3), True, 3),  # of equal ones, the last
        ((0.1, 0.3, 0.2), False, 0),
        ((0.1, NAN, 0.05, 0.3), True, 3),
        ((NAN, 0.3, 0.2), True, 1),
        ((NAN, 0.3, 0.2), False, 2),
        ((NAN, NAN), True, 0),
    ],
)
def test_the_best_epoch(tmp_path, values, higher, best):
    done = scripted(tmp_path, *values, higher=higher)
    assert done.best_epoch == best
    assert content(tmp_path, "checkpoint_best.pt")["epoch"] == best + 1
    if not math.isnan(values[best]):
        assert done.best == values[best]


def test_patience(tmp_path):
    values = (0.2, 0.3, 0.1, 0.3, 0.9, 0.9)
    done = scripted(tmp_path, *values, training={"early_stop": 2})
    assert (done.epochs, done.best_epoch, done.early) == (4, 3, True)  # the last is not better
    assert scripted(tmp_path, *values, training={"early_stop": 2}, resume=True) == done
    more = scripted(tmp_path, *values, training={"early_stop": 3}, resume=True)
    assert (more.epochs, more.best_epoch, more.early) == (6, 5, False)


def test_a_plateau_is_one_of_the_criterion(tmp_path):
    arguments = {"mode": "max", "patience": 0, "factor": 0.5, "threshold": 0.0}
    plateau = Component(target="torch.optim.lr_scheduler.ReduceLROnPlateau", args=arguments)
    scripted(tmp_path, 0.1, 0.3, 0.2, 0.4, scheduler=plateau)
    assert [r["lr"] for r in records(tmp_path)] == [1e-3, 1e-3, 1e-3, 5e-4]
    with pytest.raises(ValueError, match=r"shown the validation score.* give it mode: min"):
        scripted(tmp_path / "other", 0.1, higher=False, scheduler=plateau)


def test_a_collapse_is_told_once_and_remembered(tmp_path):
    predicted = ((1, 0, 1), (1, 0, 1), (1, 0, 1), (1, 1, 1), (1, 0, 1), (1, 0, 1))
    said = []
    scripted(tmp_path, *[0.0] * 6, predicted=predicted, said=said)
    told = "b labelled in validation but not predicted for 2 epochs or more: "
    assert [text.split(told)[0] for text in said] == ["epoch 1: ", "epoch 5: "]
    assert [r["collapsed"] for r in records(tmp_path)] == [[], [1], [1], [], [], [1]]
    scripted(tmp_path / "parts", 0.0, predicted=predicted)
    scripted(tmp_path / "parts", *[0.0] * 6, predicted=predicted, resume=True)
    assert records(tmp_path / "parts") == records(tmp_path)


def test_the_figure_is_drawn_in_the_end_and_not_after_every_epoch(tmp_path, drawn, monkeypatch):
    TinyRun(experiment(tmp_path / "a")).run()
    assert drawn == [tmp_path / "a" / "run"]
    monkeypatch.setattr("segcal.training.run.FIGURE_SECONDS", -1.0)
    TinyRun(experiment(tmp_path / "b")).run()
    assert drawn[1:] == [tmp_path / "b" / "run"] * 4


def test_the_first_process_alone_writes_and_speaks(tmp_path, drawn):
    said = []
    second = Ranks(1, 2, torch.device("cpu"))
    done = TinyRun(experiment(tmp_path), second, say=said.append).run()
    assert done.epochs == 3
    assert not said
    assert not drawn
    assert not (tmp_path / "run").exists()


def test_draws_of_an_epoch_differ_between_processes(tmp_path):
    seeds = []

    class Told(TinyRun):
        def train_epoch(self, seed):
            assert torch.initial_seed() == seed
            seeds.append(seed)
            return super().train_epoch(seed)

    for rank in range(2):
        Told(experiment(tmp_path / str(rank)), Ranks(rank, 2, torch.device("cpu"))).run()
    assert len(set(seeds)) == 6


@pytest.mark.parametrize("epochs", [0, 2])
def test_the_figure_of_a_broken_off_training_is_drawn(tmp_path, drawn, epochs):
    class Diverging(TinyRun):
        def train_epoch(self, seed):
            if self.epoch == epochs:
                raise FloatingPointError("lost")
            return super().train_epoch(seed)

    run = Diverging(experiment(tmp_path))
    with pytest.raises(FloatingPointError, match="lost"):
        run.run()
    assert drawn == [tmp_path / "run"]

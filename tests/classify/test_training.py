"""Trainings of classifiers."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from segcal.classify.augmenting import Augment
from segcal.classify.building import build_network
from segcal.classify.data import Part, Parted, load
from segcal.classify.evaluation import evaluate_classifier
from segcal.classify.experiment import SampleData, load_experiment
from segcal.classify.measures import measure
from segcal.classify.networks import GPoolCNN, SmallCNN, Standardise
from segcal.classify.prediction import label_loss, predict
from segcal.classify.readers.archives import write_npz
from segcal.classify.readers.samples import Samples
from segcal.classify.training import ClassificationRun
from segcal.losses.multilabel.bce import frequency_weights
from segcal.recipes import names
from segcal.training.checkpoints import LAST_NAME
from segcal.training.epoch_log import EpochLog
from segcal.training.experiments import shipped
from tests.classify.classifiers import write_classes, write_config, write_labels
from tests.conftest import close

pytestmark = pytest.mark.usefixtures("one_thread")
RECIPES = ("ce", "ecp", "ls", "fl", "flsd", "mmce", "cpc", "mbls", "logit_norm", "cals_hr", "cals")


@pytest.fixture
def classes(tmp_path):
    return write_classes(tmp_path / "classes.npz")


@pytest.fixture
def labels(tmp_path):
    return write_labels(tmp_path / "labels.npz")


def run(path, *settings, resume=False):
    return ClassificationRun(load_experiment(path, settings), resume=resume).run()


def test_it_learns_and_says_how(tmp_path, classes):
    done = run(write_config(tmp_path, classes), "training.epochs=8")
    assert (done.epochs, done.metric, done.early) == (8, "nll", False)
    assert {p.name for p in done.folder.iterdir()} == {
        "config.yaml", "run.json", "segcal_log.jsonl", "segcal_progress.png",
        "checkpoint_best.pt", "checkpoint_last.pt"}  # fmt: skip
    records = EpochLog(done.folder).records()
    assert records[done.best_epoch]["nll"] == done.best
    assert min(r["nll"] for r in records) == done.best
    assert records[done.best_epoch]["accuracy"] > 0.8
    assert {"cross_entropy", "cals"} == records[0]["train"].keys() == records[0]["val"].keys()
    told = json.loads((done.folder / "run.json").read_text())
    assert told["samples"] == {"train": 72, "validation": 24, "test": 24}
    assert told["train"] == {"class 0": 24, "class 1": 24, "class 2": 24}
    tested = evaluate_classifier(done.folder, device="cpu")
    assert tested.epoch == done.best_epoch
    assert tested.outcomes["softmax"].metrics["accuracy"] > 0.8


def test_a_resumed_training_is_the_same(tmp_path, classes):
    """Multipliers, moments, schedule and dropout go on as if nothing had happened."""
    schedule = {"target": "torch.optim.lr_scheduler.StepLR", "args": {"step_size": 2}}
    path = write_config(tmp_path, classes, scheduler=schedule, terms={"cals": {"margin": 0.5}})
    whole = run(path, f"output={tmp_path / 'whole'}", "training.epochs=5")
    run(path, f"output={tmp_path / 'parts'}", "training.epochs=2")
    parts = run(path, f"output={tmp_path / 'parts'}", "training.epochs=5", resume=True)
    a, b = (
        torch.load(done.folder / "checkpoint_last.pt", weights_only=True) for done in (whole, parts)
    )
    for key in ("network", "objective", "optimizer", "scheduler"):
        assert json.dumps(_plain(a[key])) == json.dumps(_plain(b[key])), key
    logs = [
        [{k: v for k, v in r.items() if k != "seconds"} for r in EpochLog(done.folder).records()]
        for done in (whole, parts)
    ]
    assert logs[0] == logs[1]
    assert len({str(r["cals"]["lam"]) for r in logs[0]}) == 5  # the multipliers did move
    assert whole.best == parts.best


def test_test_samples_over_the_epochs_change_nothing(tmp_path, classes):
    """The last line has what an evaluation of the last epoch says, in bins of one's own number."""
    path = write_config(tmp_path, classes, bins=4)
    plain = run(path, f"output={tmp_path / 'plain'}")
    shown = run(path, f"output={tmp_path / 'shown'}", "training.test_curves=true")
    without, with_test = (EpochLog(done.folder).records() for done in (plain, shown))
    kept = [{k: v for k, v in r.items() if not k.startswith("test_")} for r in with_test]
    for record in (*kept, *without):
        record.pop("seconds")
    assert kept == without
    assert (plain.best, plain.best_epoch) == (shown.best, shown.best_epoch)
    last = evaluate_classifier(shown.folder, device="cpu", checkpoint="checkpoint_last.pt")
    measured = last.outcomes["softmax"].metrics
    logged = {k[5:]: v for k, v in with_test[-1].items() if k.startswith("test_")}
    assert logged.keys() == measured.keys() - {"ece_floor"}  # which takes a simulation
    for metric, value in logged.items():
        close(value, measured[metric], rtol=1e-6)
    assert len(last.outcomes["softmax"].top.count) == 4
    run(path, f"output={tmp_path / 'shown'}", "training.epochs=5", resume=True)  # without from here
    assert "test_ece" not in EpochLog(shown.folder).records()[-1]


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_loss_of_classes(tmp_path, classes, recipe):
    done = run(write_config(tmp_path, classes), f"recipe={recipe}", "training.epochs=2")
    (_, record) = EpochLog(done.folder).records()
    assert all(np.isfinite([*record["train"].values(), *record["val"].values()]))
    if recipe.startswith("cals"):
        assert np.array(record[recipe]["lam"]).shape == (1, 3)
        assert record[recipe]["count"] == [24]  # learned on the validation samples


@pytest.mark.parametrize("recipe", names("multilabel"))
def test_every_loss_of_labels(tmp_path, labels, recipe):
    done = run(write_config(tmp_path, labels), f"recipe={recipe}", "training.epochs=2")
    ranks_only = {"joint", "multi_similarity", "softmax"}  # no probabilities
    known = recipe not in ranks_only and "two_way" not in recipe
    assert done.metric == ("nll" if known else "map_class")
    (_, record) = EpochLog(done.folder).records()
    assert np.isfinite([record["train"][recipe], record["val"][recipe]]).all()
    tested = evaluate_classifier(done.folder, device="cpu", part="validation")
    posterior = list(tested.outcomes.values())[-1].metrics
    best = EpochLog(done.folder).records()[done.best_epoch]
    for key in ("ace", "map_class", "nll"):
        close(posterior[key], best[key], rtol=1e-6)
    assert bool(tested.notes()) == ("sigmoid" in tested.outcomes and bool(tested.loss.no_posterior))


def test_validation_terms_are_of_batches_as_those_of_training(tmp_path, labels):
    """The sums of a two-way loss run over the samples of a batch; more samples have larger ones."""
    path = write_config(tmp_path, labels, training={"batch_size": 10})
    done = run(path, "recipe=two_way", "training.epochs=1")
    tested = evaluate_classifier(done.folder, device="cpu", part="validation")
    expected = sum(
        len(y) / 24 * tested.loss(x, y)
        for x, y in zip(tested.logits.split(10), tested.part.targets.split(10), strict=True)
    )
    (record,) = EpochLog(done.folder).records()
    close(record["val"]["two_way"], expected, rtol=1e-6)


def test_epochs_are_ranked_by_logits_and_calibrated_by_the_posterior(tmp_path, labels):
    """All that phi puts to 0 would be ties, by which epochs could not be told apart."""
    terms = {"asymmetric": {"margin": 0.6}}
    config = write_config(tmp_path, labels, recipe="asymmetric", terms=terms)
    training = ClassificationRun(load_experiment(config))
    trained = training.run()
    part = training.parts["validation"]
    logits = predict(training.network, part)
    found = measure(logits, part.targets, training.data.names, label_loss(training.objective))
    last = EpochLog(trained.folder).records()[-1]
    for metric in ("map_class", "map_sample"):
        close(last[metric], found["sigmoid"].metrics[metric])
    for metric in ("ace", "nll"):
        close(last[metric], found["phi"].metrics[metric])
    assert found["phi"].metrics["map_class"] != found["sigmoid"].metrics["map_class"]
    assert found["phi"].metrics["ace"] != found["sigmoid"].metrics["ace"]


def test_frequencies_are_those_of_the_training_samples(tmp_path, labels):
    experiment = load_experiment(write_config(tmp_path, labels), ["recipe=bce_balanced"])
    training = ClassificationRun(experiment)
    targets = load(experiment.data).parts["train"].targets
    positive, negative = frequency_weights((targets == 1).sum(0), (targets == 0).sum(0))
    (loss,) = training.objective.terms.values()
    close(loss.positive_weight, positive)
    close(loss.negative_weight, negative)


def test_a_fixed_seed_and_another(tmp_path, classes):
    path = write_config(tmp_path, classes)
    logs = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        done = run(path, f"output={tmp_path / name}", f"training.seed={seed}", "training.epochs=1")
        logs.append(EpochLog(done.folder).records()[0]["train"])
    assert logs[0] == logs[1] != logs[2]


def test_a_loss_that_is_lost_stops_it(tmp_path, classes):
    path = write_config(tmp_path, classes, optimizer={"target": "torch.optim.SGD", "args": {
        "lr": 1e30}}, recipe="ce")  # fmt: skip
    with pytest.raises(FloatingPointError, match="the loss is nan in epoch 0"):
        run(path)


def test_logits_that_are_lost_stop_it(tmp_path, classes):
    """The last step of an epoch can lose what its loss did not show."""
    path = write_config(tmp_path, classes, optimizer={"target": "torch.optim.SGD", "args": {
        "lr": 1e30}}, recipe="ce", training={"batch_size": 72})  # fmt: skip
    with pytest.raises(FloatingPointError, match="the logits of validation samples are not finite"):
        run(path)


ONE_CYCLE = "{target: torch.optim.lr_scheduler.OneCycleLR, args: {max_lr: 0.1, total_steps: 3}}"
PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"


def test_a_plateau_is_one_of_the_metric(tmp_path, classes):
    """The rate falls once, after the first epoch that is not better, and not before."""
    args = {"mode": "max", "patience": 0, "factor": 0.5, "threshold": 0.0, "cooldown": 100}
    path = write_config(tmp_path, classes, scheduler={"target": PLATEAU, "args": args})
    done = run(path, "training.epochs=8", "training.metric=accuracy")
    records = EpochLog(done.folder).records()
    value, worse = [r["accuracy"] for r in records], []
    for i in range(1, 8):
        worse.append(value[i] <= max(value[:i]))
    first = worse.index(True) + 1
    assert first > 1  # it did become better before
    assert [r["lr"] for r in records] == [0.02] * (first + 1) + [0.01] * (7 - first)
    for mode, metric, right in (("min", "accuracy", "max"), ("max", "nll", "min")):
        with pytest.raises(ValueError, match=f"validation {metric}.*give it mode: {right}"):
            run(path, f"scheduler.args.mode={mode}", f"training.metric={metric}",
                f"output={tmp_path / mode}")  # fmt: skip


def test_validation_samples_without_any_label_are_refused(tmp_path):
    parts, targets = np.arange(30) % 3, np.ones((30, 2), np.int8)
    targets[parts == 1] = 0
    inputs = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    write_npz(tmp_path / "none.npz", Samples(inputs, targets, ("a", "b"), parts))
    with pytest.raises(ValueError, match="no validation sample has a label"):
        run(write_config(tmp_path, tmp_path / "none.npz"), "recipe=bce")


def test_metric_that_chooses(tmp_path, labels, classes):
    done = run(write_config(tmp_path, labels), "recipe=bce", "training.metric=nll")
    assert done.metric == "nll"
    assert done.best == min(r["nll"] for r in EpochLog(done.folder).records())
    path = write_config(tmp_path, classes)
    with pytest.raises(ValueError, match="map_class does not fit this data set"):
        run(path, "training.metric=map_class", f"output={tmp_path / 'other'}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["recipe=nothing"], "no recipe, penalty or loss is called 'nothing'.*bce"),
        (["recipe=spa"], "spa"),
        (["recipe=nacl"], "recipe: nacl does not work for samples without pixels"),
        (["recipe=bwcr"], "recipe: bwcr does not work for samples without pixels"),
        (["terms.cals.magin=3"], "takes no magin"),
        (["data.source=web"], "expected one of arff"),
        (["data.args.file=a"], "data: .*takes no file"),
        (["data.channels=3"], "channels and augment are for images"),
        (["data.long_tail=0.5"], "greater than 1"),
        (["training.epoch=3"], "training.epoch: unknown; there are epochs"),
        (["optimizer.target=torch.nn.Linear"], "is not a torch.optim"),
        (["optimizer={target: torch.optim.LBFGS}"], "optimizer: torch.optim.LBFGS computes the"),
        (["optimizer={target: torch.optim.SparseAdam}"], "optimizer: .*SparseAdam fails"),
        (["optimizer.args.lr=abc"], r"Adam: .*given \{'lr': 'abc'\}"),
        (
            ["scheduler={target: torch.optim.lr_scheduler.StepLR, args: {step_size: 0}}"],
            "does not last 4 epochs .*ZeroDivision",
        ),
        (
            ["scheduler={target: torch.optim.lr_scheduler.CosineAnnealingLR, args: {T_max: 3}}"],
            "T_max 3 the learning rate would climb .* T_max: 4",
        ),
        (["network.target=torch.nn.Embedding", "network.args={num_embeddings: 3}"], "network: "),
        ([f"scheduler={ONE_CYCLE}"], "scheduler: .*OneCycleLR.* does not last 4 epochs"),
        (["network.args.hiden=[3]"], "takes no hiden"),
        (["network.target=torch.pi"], r"network: torch\.pi is not a torch\.nn"),
        (["network.target=torch.add"], r"network: torch\.add is not a torch\.nn"),
        (["network.target=builtins.eval"], "only targets below"),
        (["data.split.test=0.001"], "no sample for test"),
    ],
)
def test_what_does_not_fit_is_refused_before_work_starts(tmp_path, classes, settings, message):
    with pytest.raises(ValueError, match=message):
        run(write_config(tmp_path, classes), *settings)
    assert not (tmp_path / "run").exists()


def test_losses_of_classes_are_not_for_labels(tmp_path, labels):
    with pytest.raises(ValueError, match="cals is a loss of classes, but samples have labels here"):
        run(write_config(tmp_path, labels))
    with pytest.raises(ValueError, match="no term bce; expected spa"):
        run(write_config(tmp_path, labels), "recipe=spa", "terms.bce.scheme=balanced")


def test_losses_that_compare_labels_are_of_classes_too(tmp_path, classes):
    """Within samples and with temperatures 1, the two-way loss is cross-entropy."""
    config = write_config(tmp_path, classes)
    one = "terms.two_way={along: sample, temperature_pos: 1.0, temperature_neg: 1.0}"
    found = {}
    for recipe, metric, settings in (("ce", "nll", []), ("two_way", "accuracy", [one])):
        done = run(config, f"recipe={recipe}", f"output={tmp_path / recipe}", *settings)
        assert done.metric == metric
        found[recipe] = evaluate_classifier(done.folder, checkpoint=LAST_NAME)
    close(found["two_way"].logits, found["ce"].logits, rtol=1e-4, atol=1e-5)
    assert list(found["two_way"].outcomes) == ["softmax"]
    assert found["ce"].notes() == []
    assert "two_way is a multi-label loss, used for classes" in found["two_way"].notes()[0]
    assert "--calibrate" in found["two_way"].notes()[0]
    with pytest.raises(ValueError, match=r"spa is a multi-label loss, but classes.*as two_way"):
        run(config, "recipe=spa")
    with pytest.raises(ValueError, match="no term ce; expected two_way"):
        run(config, "recipe=two_way", "terms.ce.x=1")


def test_arguments_of_losses_of_labels(tmp_path, labels):
    config = write_config(tmp_path, labels)
    with pytest.raises(ValueError, match="bce gives a loss for every entry"):
        run(config, "recipe=bce", "terms.bce.reduction=none")
    mild = ["recipe=spa_lpr", "terms.spa_lpr.base.args.negative=[1, 1, 1]"]
    training = ClassificationRun(load_experiment(config, mild))
    assert label_loss(training.objective).base.negative == (1, 1, 1)


def test_a_long_tail_is_of_training_alone(tmp_path):
    data = SampleData(
        source="npz", args={"path": str(write_classes(tmp_path / "a.npz"))}, long_tail=4
    )
    counts = {n: torch.bincount(p.targets).tolist() for n, p in load(data).parts.items()}
    assert counts == {"train": [24, 12, 6], "validation": [8, 8, 8], "test": [8, 8, 8]}


def test_standardised_by_the_training_set():
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) * 4 + 2
    x[:, 1] = 5.0  # a feature that is always the same
    y = Standardise(x)(x)
    close(y.mean(0), [0, 0, 0], atol=1e-6)
    close(y.std(0, correction=0), [1, 0, 1], rtol=1e-6)
    images = torch.randint(0, 256, (20, 3, 4, 4), dtype=torch.uint8)
    y = Standardise(images)(images)
    close(y.mean((0, 2, 3)), [0, 0, 0], atol=1e-6)
    close(y.std((0, 2, 3), correction=0), [1, 1, 1], rtol=1e-6)
    words = torch.tensor([[3, 0]])
    assert Standardise(words)(words) is words


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    targets = np.arange(30) % 2
    inputs = rng.integers(0, 100, (30, 1, 32, 32)) + 100 * targets[:, None, None, None]
    write_npz(tmp_path / "i.npz", Samples(inputs.astype(np.uint8), targets, ("dark", "light")))
    return tmp_path / "i.npz"


FLIP = {"target": "torchvision.transforms.v2.RandomHorizontalFlip"}


@pytest.mark.parametrize(
    ("network", "channels"),
    [
        ({"target": "segcal.classify.networks.SmallCNN", "args": {"widths": [4]}}, 1),
        ({"target": "torchvision.models.resnet18"}, 3),
        (
            {
                "target": "monai.networks.nets.ViT",
                "args": {
                    "img_size": [32, 32], "patch_size": 16, "classification": True,
                    "hidden_size": 12, "mlp_dim": 12, "num_layers": 1, "num_heads": 2,
                    "post_activation": "none",
                },
            },
            1,
        ),
    ],
    ids=["small", "torchvision", "monai"],
)  # fmt: skip
def test_networks_of_images(tmp_path, images, network, channels):
    path = write_config(tmp_path, images, network=network, recipe="ce",
                        data={"channels": channels, "augment": [FLIP]})  # fmt: skip
    experiment = load_experiment(path, ["training.epochs=1"])
    network = build_network(experiment, load(experiment.data)).eval()
    assert network(torch.zeros(2, channels, 32, 32)).shape == (2, 2)
    if channels == 1:
        assert run(path, "training.epochs=1").epochs == 1


def test_weights_of_other_classes_get_a_new_last_layer(tmp_path, images, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    state = torchvision.models.resnet18().state_dict()  # of a thousand classes
    torch.save(state, folder / "resnet18-f37072fd.pth")
    given = {"target": "torchvision.models.resnet18", "args": {"weights": "IMAGENET1K_V1"}}
    path = write_config(tmp_path, images, network=given, recipe="ce", data={"channels": 3})
    experiment = load_experiment(path)
    network = build_network(experiment, load(experiment.data))
    close(network.network.layer4[1].conv2.weight, state["layer4.1.conv2.weight"])
    assert network.network.fc.weight.shape == (2, 512)
    done = run(path, "training.epochs=1")
    (folder / "resnet18-f37072fd.pth").unlink()  # a checkpoint has all that it needs
    assert len(evaluate_classifier(done.folder, device="cpu").part) == 6


@pytest.mark.parametrize(
    ("name", "file", "arguments", "message"),
    [
        ("squeezenet1_1", "squeezenet1_1-b8a52dc0.pth", {"num_classes": 2}, None),
        (
            "googlenet",
            "googlenet-1378be20.pth",
            {},
            "other layers with pretrained weights than without",
        ),
    ],
)
def test_last_layers_and_those_beside(
    tmp_path, images, monkeypatch, name, file, arguments, message
):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    whole = {"init_weights": False} if name == "googlenet" else {}
    torch.save(getattr(torchvision.models, name)(**whole).state_dict(), folder / file)
    given = {
        "target": f"torchvision.models.{name}",
        "args": {"weights": "IMAGENET1K_V1", **arguments, **whole},
    }
    path = write_config(tmp_path, images, network=given, recipe="ce", data={"channels": 3})
    experiment = load_experiment(path)
    if message:
        with pytest.raises(ValueError, match=message):
            ClassificationRun(experiment)
    else:
        ClassificationRun(experiment)


def test_a_network_whose_outputs_have_bounds(tmp_path, images):
    """MONAI's ViT ends with tanh unless it is told not to: no confidence above e^2 : 1."""
    vit = {
        "img_size": [32, 32], "patch_size": 16, "classification": True, "hidden_size": 12,
        "mlp_dim": 12, "num_layers": 1, "num_heads": 2,
    }  # fmt: skip
    path = write_config(tmp_path, images, recipe="ce", data={"channels": 1},
                        network={"target": "monai.networks.nets.ViT", "args": vit})  # fmt: skip
    with pytest.raises(ValueError, match=r"network: ends with Tanh.*post_activation: none"):
        run(path)
    assert not (tmp_path / "run").exists()


def test_a_network_of_colours_for_grey_images(tmp_path, images):
    path = write_config(tmp_path, images, network={"target": "torchvision.models.resnet18"})
    with pytest.raises(ValueError, match=r"for grey images in a network of colours set data\.chan"):
        run(path)


def test_every_image_is_turned_by_itself():
    turned = Augment(SampleData(source="digits", augment=[FLIP]).augment)
    torch.manual_seed(0)
    image = torch.arange(4.0).view(1, 1, 2, 2)
    found = turned(image.expand(40, -1, -1, -1))
    flipped = (found[:, 0, 0, 0] == 1).sum()
    assert 5 < flipped < 35
    assert turned(image).shape == image.shape


def test_networks_of_texts():
    """Words beyond the end of a text are 0, whose vector is 0 and stays so."""
    network = GPoolCNN(50, 4, embedding=8, widths=[6], kernel_size=3)
    assert network(torch.randint(0, 50, (3, 9))).shape == (3, 4)
    assert not network.embedding.weight[0].any()
    assert SmallCNN(3, 5)(torch.zeros(2, 3, 9, 7)).shape == (2, 5)


@pytest.mark.parametrize("name", shipped("classify"))
def test_shipped_experiments_fit(name):
    experiment = load_experiment(name)
    assert experiment.summary
    assert "{recipe}" in experiment.output


def test_a_checkpoint_of_other_data_is_refused(tmp_path, classes):
    done = run(write_config(tmp_path, classes), "training.epochs=1")
    with pytest.raises(ValueError, match="part: expected one of train"):
        evaluate_classifier(done.folder, part="tests")
    with pytest.raises(ValueError, match=r"none\.pt: no such file"):
        evaluate_classifier(done.folder, checkpoint="none.pt")
    (done.folder / "checkpoint_best.pt").write_bytes(b"half")
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        evaluate_classifier(done.folder)
    torch.save({"segcal": "0", "network": {}}, done.folder / "checkpoint_best.pt")
    with pytest.raises(ValueError, match="not a checkpoint of a training"):
        evaluate_classifier(done.folder)


def test_data_that_have_moved(tmp_path, classes):
    path = write_config(tmp_path, classes)
    done = run(path, "training.epochs=1")
    moved = classes.rename(tmp_path / "moved.npz")
    with pytest.raises(ValueError, match=r"classes\.npz: no such file"):
        evaluate_classifier(done.folder)
    there = [f"data.args.path={moved}"]
    assert len(evaluate_classifier(done.folder, settings=there).part) == 24
    with pytest.raises(ValueError, match=r"only data\.args may be changed"):
        evaluate_classifier(done.folder, settings=["training.epochs=3"])
    again = run(path, "training.epochs=2", f"data.args.path={moved}", resume=True)
    assert again.epochs == 2
    assert len(evaluate_classifier(done.folder).part) == 24
    write_classes(moved, seed=1)  # other features, the same classes
    with pytest.raises(ValueError, match=r"checkpoint_best\.pt: was trained when its data set"):
        evaluate_classifier(done.folder, settings=there)


def test_other_images_of_the_same_classes_are_other_data(tmp_path):
    found = []
    for seed, letters in ((0, "ab"), (0, "ab"), (1, "ab"), (0, "ac")):
        rng = np.random.default_rng(seed)
        shutil.rmtree(tmp_path / "images", ignore_errors=True)
        for kind in ("cat", "dog"):
            (tmp_path / "images" / kind).mkdir(parents=True)
            for i in range(10):
                picture = rng.integers(0, 256, (8, 8), dtype=np.uint8)
                Image.fromarray(picture).save(
                    tmp_path / "images" / kind / f"{i}{letters[i % 2]}.png"
                )
        data = SampleData(source="images", args={"path": str(tmp_path / "images"), "size": 8})
        found.append(load(data).checksum)
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_few_large_samples_are_evaluated_at_a_time(monkeypatch):
    monkeypatch.setattr("segcal.classify.prediction.VALUES_AT_ONCE", 30)
    seen = []
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    network.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
    part = Part(torch.zeros(5, 3, 2, 2), torch.zeros(5, dtype=torch.long), torch.arange(5))
    assert predict(network, part).shape == (5, 2)
    assert seen == [2, 2, 1]


def test_data_that_have_changed_are_refused(tmp_path, classes):
    """More samples draw other parts: some that were trained on would be tested."""
    path = write_config(tmp_path, classes)
    done = run(path, "training.epochs=1")
    write_classes(classes, n=150)
    with pytest.raises(ValueError, match=r"checkpoint_best\.pt: was trained when its data set"):
        evaluate_classifier(done.folder)
    with pytest.raises(ValueError, match=r"checkpoint_last\.pt: was trained when its data set"):
        run(path, "training.epochs=2", resume=True)
    write_classes(classes)
    assert len(evaluate_classifier(done.folder).part) == 24
    assert run(path, "training.epochs=2", resume=True).epochs == 2


def test_predictions_are_kept(tmp_path, labels):
    done = run(write_config(tmp_path, labels), "recipe=spa", "training.epochs=1")
    tested = evaluate_classifier(done.folder, device="cpu")
    tested.save(tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz") as kept, np.load(labels) as data:
        assert kept["names"].tolist() == ["a", "b", "c"]
        np.testing.assert_array_equal(kept["targets"], data["targets"][kept["index"]])
        close(kept["probabilities_sigmoid"], torch.sigmoid(tested.logits), rtol=1e-5)
        close(kept["probabilities_link"], tested.loss.probabilities(tested.logits), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "changes"),
    [
        ("cifar10", (3, 32, 32), []),
        ("cifar10", (3, 32, 32), ["network.target=torchvision.models.vgg16_bn"]),
        ("cifar10", (3, 32, 32), ["network.target=torchvision.models.efficientnet_b0"]),
        ("medmnist", (3, 28, 28), []),
        ("images", (3, 64, 64), []),
        ("tiny_imagenet", (3, 64, 64), []),
        ("imagenet", (3, 64, 64), []),
        (
            "imagenet",
            (3, 256, 256),
            ["network.args={model_name: swinv2_tiny_window8_256, drop_path_rate: 0.1}"],
        ),
        ("imagenet_lt", (3, 64, 64), []),
        ("features", (2048,), []),
        ("slices", (1, 64, 64), []),
        ("digits", (1, 8, 8), []),
        ("arff", (294,), []),
        ("csv", (20,), []),
        ("docstrings", (60,), []),
        ("newsgroups", (500,), []),
    ],
)
def test_networks_of_shipped_experiments(name, shape, changes):
    experiment = load_experiment(name, changes)
    words = name in ("docstrings", "newsgroups")
    part = Part(
        torch.zeros(2, *shape, dtype=torch.long if words else torch.float32),
        torch.zeros(2, dtype=torch.long), torch.arange(2),
    )  # fmt: skip
    names = tuple("abcdefg")
    network = build_network(experiment, Parted({"train": part}, names, False, 20000, 0))
    with torch.no_grad():
        assert network.eval()(part.inputs).shape == (2, 7)

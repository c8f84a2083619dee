"""Networks of timm, learning rates of head and backbone, features of frozen networks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from segcal.classify.building import build_network, parameter_groups
from segcal.classify.data import load
from segcal.classify.evaluation import evaluate_classifier
from segcal.classify.experiment import load_experiment
from segcal.classify.features import extract_features
from segcal.classify.networks import small_vgg16
from segcal.classify.readers.archives import read_npz, write_npz
from segcal.classify.readers.samples import Samples
from segcal.classify.study import load_study, trials
from segcal.classify.training import ClassificationRun
from segcal.commands.main import app
from segcal.components import Component, target
from tests.classify.classifiers import write_classes, write_config
from tests.conftest import close

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"target": "timm.create_model", "args": {"model_name": "test_resnet"}}


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    targets = np.arange(30) % 3
    inputs = rng.integers(0, 100, (30, 1, 32, 32)) + 50 * targets[:, None, None, None]
    write_npz(tmp_path / "i.npz", Samples(inputs.astype(np.uint8), targets, ("a", "b", "c")))
    return tmp_path / "i.npz"


def config(folder, samples, **parts):
    return write_config(folder, samples, **{"network": SMALL, "recipe": "ce", **parts})


def test_numbers_of_classes_and_channels_of_timm(tmp_path, images):
    experiment = load_experiment(config(tmp_path, images), ["training.epochs=1"])
    network = build_network(experiment, load(experiment.data)).network
    assert network.get_classifier().weight.shape[0] == 3
    assert next(network.parameters()).shape[1] == 1  # grey
    assert ClassificationRun(experiment).run().epochs == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"model_name": "resnet5000"}, "network: timm.create_model: RuntimeError: Unknown model"),
        ({"model_name": "test_resnet", "in_chans": 3}, "network: fails on inputs"),
        ({"model_name": "test_resnet", "wings": 2}, "network: timm.create_model: .*wings"),
    ],
)
def test_what_timm_has_not_is_refused(tmp_path, images, args, message):
    path = config(tmp_path, images, network={**SMALL, "args": args})
    with pytest.raises(ValueError, match=message):
        ClassificationRun(load_experiment(path))


def weights(tmp_path, seed=7):
    """A file of weights of a thousand classes, as timm has them, and how a config names it."""
    torch.manual_seed(seed)
    trained = target(Component(target="timm.create_model"))("test_resnet", num_classes=1000)
    torch.save(trained.state_dict(), tmp_path / "w.pth")
    overlay = {"file": str(tmp_path / "w.pth"), "num_classes": 1000}
    args = {"pretrained": True, "pretrained_cfg_overlay": overlay}
    return trained, {**SMALL, "args": {**SMALL["args"], **args}}


def test_weights_of_timm_and_checkpoints_that_need_them_no_more(tmp_path, images):
    trained, network = weights(tmp_path)
    path = config(tmp_path, images, network=network, data={"channels": 3})
    experiment = load_experiment(path, ["training.epochs=1"])
    built = build_network(experiment, load(experiment.data)).network
    first = next(iter(trained.state_dict()))
    close(built.state_dict()[first], trained.state_dict()[first])
    assert built.get_classifier().weight.shape[0] == 3
    done = ClassificationRun(experiment).run()
    (tmp_path / "w.pth").unlink()
    assert len(evaluate_classifier(done.folder, device="cpu").part) == 6


def test_the_last_layer_learns_at_a_rate_of_its_own(tmp_path):
    """By SGD without momentum a step is rate times gradient; both rates fall by the schedule."""
    path = write_config(
        tmp_path, write_classes(tmp_path / "a.npz"), recipe="ce",
        network={"target": "segcal.classify.networks.MLP", "args": {"hidden": [8]}},
        optimizer={"target": "torch.optim.SGD", "args": {"lr": 0.01}},
        scheduler={"target": "torch.optim.lr_scheduler.StepLR",
                   "args": {"step_size": 1, "gamma": 0.5}},
        training={"head_lr": 0.1, "batch_size": 72, "epochs": 1},
    )  # fmt: skip
    training = ClassificationRun(load_experiment(path))
    before = {n: p.detach().clone() for n, p in training.network.named_parameters()}
    training.run()
    assert [group["lr"] for group in training.optimizer.param_groups] == [0.005, 0.05]
    after = dict(training.network.named_parameters())
    for name, value in before.items():
        rate = 0.1 if name.startswith("network.4") else 0.01
        close(after[name], value - rate * after[name].grad, rtol=1e-6, atol=1e-9)
    assert len(before) == 4
    with pytest.raises(ValueError, match=r"head_lr: the last layer .*, has 3 outputs for 5"):
        parameter_groups(training.network, 0.1, 5)


def test_a_rate_of_the_last_layer_is_resumed(tmp_path):
    path = write_config(tmp_path, write_classes(tmp_path / "a.npz"), training={"head_lr": 0.1})
    found = []
    for name, stops in (("whole", (3,)), ("parts", (1, 3))):
        for epochs in stops:
            settings = [f"training.epochs={epochs}", f"output={tmp_path / name}"]
            run = ClassificationRun(load_experiment(path, settings), resume=epochs != stops[0])
            run.run()
        found.append(run.network.state_dict())
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name])


def test_features_are_what_the_last_layer_sees(tmp_path, images):
    """Of a checkpoint: features times the last layer are its logits, in the same parts."""
    path = config(tmp_path, images)
    experiment = load_experiment(path, ["training.epochs=1"])
    done = ClassificationRun(experiment).run()
    file = done.folder / "checkpoint_best.pt"
    found = extract_features(experiment, checkpoint=file)
    tested = evaluate_classifier(done.folder, device="cpu")
    state = torch.load(file, weights_only=True)["network"]
    test = torch.from_numpy(found.inputs[found.parts == 2])
    close(test @ state["network.fc.weight"].T + state["network.fc.bias"], tested.logits, rtol=1e-5)
    assert found.targets[found.parts == 2].tolist() == tested.part.targets.tolist()
    assert np.bincount(found.parts).tolist() == [18, 6, 6]
    write_npz(tmp_path / "features.npz", found)
    np.testing.assert_array_equal(read_npz(tmp_path / "features.npz").inputs, found.inputs)
    settings = [f"data.args.path={tmp_path / 'features.npz'}", f"output={tmp_path / 'head'}"]
    head = load_experiment("features", [*settings, "training.batch_size=6"])
    trained = ClassificationRun(head).run()
    assert trained.best < 0.1  # NLL
    other = load_experiment(path, ["network.args.model_name=test_vit"])
    with pytest.raises(ValueError, match=r"checkpoint_best\.pt: does not fit this network"):
        extract_features(other, checkpoint=file)


def test_features_of_weights_from_elsewhere(tmp_path, images):
    _, network = weights(tmp_path)
    experiment = load_experiment(config(tmp_path, images, network=network, data={"channels": 3}))
    found = extract_features(experiment)
    network = build_network(experiment, load(experiment.data)).eval()
    part = load(experiment.data).parts["test"]
    with torch.no_grad():
        pooled = network.network.forward_head(
            network.network.forward_features(network.standardise(part.inputs)), pre_logits=True
        )
    close(found.inputs[found.parts == 2], pooled, rtol=1e-5)
    random = load_experiment(config(tmp_path, images))
    with pytest.raises(ValueError, match="network: has random weights, whose features"):
        extract_features(random)


def test_features_by_command(tmp_path, images):
    path = config(tmp_path, images)
    done = ClassificationRun(load_experiment(path, ["training.epochs=1"])).run()
    command = ["classify", "features", str(path), "-o", str(tmp_path / "f.npz")]
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, "has random weights" in result.output) == (2, True)
    command += ["--checkpoint", str(done.folder / "checkpoint_best.pt")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "features of 30 samples" in result.output
    assert read_npz(tmp_path / "f.npz").names == ("a", "b", "c")
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, "exists already" in result.output) == (2, True)


def test_networks_of_cifar_keep_the_size():
    """ResNets see 32 x 32 in their first block and 4 x 4 in their last, VGG16 2 x 2 before it."""
    found = {}
    for trial in trials(load_study("cifar10")):
        network = trial.experiment.network
        found[trial.set] = (network.target.rpartition(".")[2], network.args)
    assert {name: kind for name, (kind, _) in found.items()} == {
        "resnet18": "resnet18", "resnet50": "resnet50", "vgg16": "small_vgg16"}  # fmt: skip
    from monai.networks.nets import resnet18

    network = resnet18(**found["resnet18"][1], num_classes=10)
    sizes = []
    for part in (network.conv1, network.layer1, network.layer4):
        part.register_forward_hook(lambda module, given, out: sizes.append(tuple(out.shape[1:])))
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sizes == [(64, 32, 32), (64, 32, 32), (512, 4, 4)]
    assert sum(p.numel() for p in network.parameters()) == 11_173_962  # of the published one
    assert sum(isinstance(m, torch.nn.Conv2d) for m in small_vgg16(10)) == 13
    assert small_vgg16(10, in_channels=1)(torch.zeros(2, 1, 32, 32)).shape == (2, 10)

"""The handlers in MONAI's own engines, around a small UNet."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
import torch.distributed as dist
from monai.data import MetaTensor, list_data_collate
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.handlers import CheckpointLoader, CheckpointSaver, ValidationHandler
from monai.losses import DeepSupervisionLoss
from monai.networks.nets import UNet
from monai.transforms import AsDiscreted

from segcal.adapters.monai.handlers import DualStepHandler, MetricHandler, ScheduleHandler
from segcal.adapters.monai.losses import SegcalLoss
from segcal.adapters.monai.metrics import DSCMetric, HausdorffMetric
from segcal.adapters.monai.transforms import SelectHead
from tests.conftest import close
from tests.ranks import in_two_processes

K = 3
CPU = torch.device("cpu")
CRAC = {"rho_period": 1}
AFFINE = np.diag([1.5, 0.5, 4.0, 1.0])


def batches(n, seed=0):
    """MONAI's batches: MetaTensors with a channel, labels as floats; the last batch is smaller."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for _ in range(2 * n - 1):
        label = torch.randint(0, K, (1, 8, 8, 8), generator=generator)
        label[:, :4] = 1
        image = label + 0.3 * torch.randn(label.shape, generator=generator)
        cases.append({"image": image, "label": label.float()})
    cases = [{k: MetaTensor(v, affine=AFFINE) for k, v in case.items()} for case in cases]
    return [list_data_collate(cases[i : i + 2]) for i in range(0, len(cases), 2)]


class Setting:
    """Network, optimiser, loss and engines, the same ones every time."""

    def __init__(self, loss=None, network=None):
        torch.manual_seed(0)
        self.network = network or UNet(
            spatial_dims=3, in_channels=1, out_channels=K, channels=(4, 8), strides=(2,)
        )
        self.optimiser = torch.optim.Adam(self.network.parameters(), 1e-2)
        self.loss = loss or SegcalLoss("crac", num_classes=K, to_onehot_y=True, crac=CRAC)
        self.handler = DualStepHandler(self.loss)

    def evaluator(self, handlers=(), **options):
        return SupervisedEvaluator(
            device=CPU,
            val_data_loader=batches(3, seed=1),
            network=self.network,
            val_handlers=[self.handler, *handlers] if isinstance(handlers, tuple) else handlers,
            **options,
        )

    def trainer(self, handlers, epochs=3, loss=None, **options):
        return SupervisedTrainer(
            device=CPU,
            max_epochs=epochs,
            train_data_loader=batches(2),
            network=self.network,
            optimizer=self.optimiser,
            loss_function=loss or self.loss,
            train_handlers=handlers,
            **options,
        )

    def saved(self, trainer=None):
        objects = {"net": self.network, "opt": self.optimiser, "loss": self.loss}
        return objects if trainer is None else {**objects, "trainer": trainer}


def states_equal(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(a[key], b[key]) for key in a)


def test_engines_do_what_a_plain_loop_does(one_thread):
    """And the loop needs no ignite: forward, observe, dual_step."""
    engines = Setting()
    evaluator = engines.evaluator()
    engines.trainer([ValidationHandler(1, evaluator)]).run()

    loop = Setting()
    network, loss = loop.network, loop.loss
    for _ in range(3):
        network.train()
        for batch in batches(2):
            loop.optimiser.zero_grad()
            loss(network(batch["image"]), batch["label"]).backward()
            loop.optimiser.step()
        network.eval()
        with torch.no_grad():
            for batch in batches(3, seed=1):
                loss.observe(network(batch["image"]), batch["label"])
        steps = loss.dual_step()
    assert states_equal(engines.loss.state_dict(), loss.state_dict())
    assert states_equal(engines.network.state_dict(), network.state_dict())
    assert engines.handler.steps == steps
    assert steps["crac"].step == 3
    assert sum(steps["crac"].count) == 5 * 8**3
    lam = torch.tensor(steps["crac"].lam)
    assert (lam > 1e-6).all()
    close(evaluator.state.metrics["crac_lambda_mean"], lam.mean(), rtol=1e-6)
    close(evaluator.state.metrics["crac_rho_mean"], torch.tensor(steps["crac"].rho).mean(), 1e-6)


def test_raw_outputs_are_observed_though_they_are_post_processed(one_thread):
    """Decollating and argmax come after; metrics beside it get what they ask for."""
    plain, post = Setting(), Setting()
    plain.evaluator().run()
    evaluator = post.evaluator(
        postprocessing=AsDiscreted(keys="pred", argmax=True),
        key_val_metric={"dice": MetricHandler(DSCMetric(num_classes=K))},
    )
    evaluator.run()
    assert states_equal(plain.loss.state_dict(), post.loss.state_dict())
    assert 0 < evaluator.state.metrics["dice"] < 1
    assert isinstance(evaluator.state.output, list)


def test_one_update_a_pass_and_a_broken_one_leaves_nothing(one_thread):
    setting, whole = Setting(), Setting()
    evaluator = setting.evaluator()
    good = evaluator.data_loader
    evaluator.data_loader = [
        good[0],
        {"image": good[1]["image"], "label": good[0]["label"][..., :2]},
    ]
    logging.disable(logging.CRITICAL)
    with pytest.raises(ValueError, match="labels: expected"):
        evaluator.run()
    logging.disable(logging.NOTSET)
    assert setting.loss.objective.terms["crac"].count.sum() > 0
    evaluator = setting.evaluator()
    evaluator.run()
    whole.evaluator().run()
    assert states_equal(setting.loss.state_dict(), whole.loss.state_dict())
    evaluator.run(2)
    assert setting.handler.steps["crac"].step == 2


@pytest.mark.parametrize("where", ["network and loss", "network"])
def test_bfloat16(one_thread, where):
    """Multipliers stay float64 and are close to those without. (MONAI's amp=True is for CUDA.)"""

    def inferer(inputs, network):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return network(inputs)

    def loss_function(logits, target):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "network and loss"):
            value = half.loss(logits, target)
        seen.append((logits.dtype, value.dtype))
        return value

    half, full, seen = Setting(), Setting(), []
    validation = ValidationHandler(1, half.evaluator(inferer=inferer))
    half.trainer([validation], 2, loss=loss_function, inferer=inferer).run()
    full.trainer([ValidationHandler(1, full.evaluator())], 2).run()
    assert set(seen) == {(torch.bfloat16, torch.float32)}
    lam, expected = (s.loss.objective.terms["crac"].lam for s in (half, full))
    assert lam.dtype == torch.float64
    close(lam, expected, rtol=0.05)
    assert not torch.equal(lam, expected)


def test_a_resumed_training_is_the_uninterrupted_one(tmp_path, one_thread):
    whole = Setting()
    whole.trainer([ValidationHandler(1, whole.evaluator())], epochs=4).run()

    killed = Setting()
    trainer = killed.trainer([ValidationHandler(1, killed.evaluator())], epochs=2)
    saver = CheckpointSaver(str(tmp_path), killed.saved(trainer), save_interval=1)
    saver.attach(trainer)
    trainer.run()

    resumed = Setting()
    trainer = resumed.trainer([ValidationHandler(1, resumed.evaluator())], epochs=4)
    path = tmp_path / "checkpoint_epoch=2.pt"
    CheckpointLoader(str(path), resumed.saved(trainer)).attach(trainer)
    trainer.run()
    assert int(resumed.loss.objective.terms["crac"].step) == 4
    assert states_equal(resumed.loss.state_dict(), whole.loss.state_dict())
    assert states_equal(resumed.network.state_dict(), whole.network.state_dict())
    saved = torch.load(path, weights_only=True)
    assert int(saved["loss"]["objective.terms.crac.step"]) == 2


@pytest.mark.parametrize("order", ["wrong", "right"])
def test_warns_once_when_a_checkpoint_is_saved_before_the_update(
    order, tmp_path, one_thread, recwarn
):
    setting = Setting()
    saver = CheckpointSaver(str(tmp_path), setting.saved(), save_interval=1)
    validation = ValidationHandler(1, setting.evaluator())
    setting.trainer([validation, saver] if order == "right" else [saver, validation]).run()
    told = [str(w.message) for w in recwarn if "before this update" in str(w.message)]
    saved = torch.load(tmp_path / "checkpoint_epoch=3.pt", weights_only=True)["loss"]
    if order == "right":
        assert told == []
        assert int(saved["objective.terms.crac.step"]) == 3
    else:
        assert len(told) == 1
        assert "ValidationHandler before CheckpointSaver" in told[0]
        assert int(saved["objective.terms.crac.step"]) == 2


def test_warns_of_a_saver_among_the_validation_handlers(tmp_path, one_thread):
    setting = Setting()
    best = CheckpointSaver(str(tmp_path), {"loss": setting.loss}, save_key_metric=True)
    dice = {"dice": MetricHandler(DSCMetric(num_classes=K))}
    post = AsDiscreted(keys="pred", argmax=True)
    options = {"key_val_metric": dice, "postprocessing": post}
    evaluator = setting.evaluator([best, setting.handler], **options)
    with pytest.warns(UserWarning, match="put DualStepHandler first into val_handlers"):
        setting.trainer([ValidationHandler(1, evaluator)], epochs=1).run()


class TwoHeads(torch.nn.Module):
    """Two heads in training, one in evaluation."""

    def __init__(self):
        super().__init__()
        self.full = torch.nn.Conv3d(1, K, 3, padding=1)
        self.coarse = torch.nn.Conv3d(1, K, 3, padding=1, stride=2)

    def forward(self, x):
        return [self.full(x), self.coarse(x)]


def test_deep_supervision(one_thread):
    torch.manual_seed(0)
    network = TwoHeads()
    alone = copy.deepcopy(network)
    setting = Setting(network=network)
    wrapped = DeepSupervisionLoss(setting.loss)
    with pytest.raises(ValueError, match="got DeepSupervisionLoss"):
        DualStepHandler(wrapped)
    setting.evaluator().run()
    loss = SegcalLoss("crac", num_classes=K, crac=CRAC)
    for batch in batches(3, seed=1):
        with torch.no_grad():
            loss.observe(alone.full(batch["image"]), batch["label"])
    assert loss.dual_step() == setting.handler.steps
    trainer = setting.trainer(
        [ValidationHandler(1, setting.evaluator())], epochs=1, loss=wrapped, decollate=False
    )
    trainer.run()
    assert not torch.equal(network.coarse.weight, alone.coarse.weight)
    assert setting.handler.steps["crac"].step == 2


def rank_main(rank, folder):
    dist.init_process_group("gloo")
    try:
        setting = Setting()
        evaluator = setting.evaluator()
        share = evaluator.data_loader[:1] if rank == 0 else evaluator.data_loader[1:]
        evaluator.data_loader, evaluator.state.epoch_length = share, len(share)
        for epoch in (1, 2):
            evaluator.run(epoch)
        torch.save(setting.loss.state_dict(), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_two_ranks_are_one_process(tmp_path, one_thread):
    """One batch of two samples on rank 0, one of two and one of one on rank 1."""
    in_two_processes(rank_main, str(tmp_path))
    setting = Setting()
    evaluator = setting.evaluator()
    for epoch in (1, 2):
        evaluator.run(epoch)
    expected = setting.loss.state_dict()
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert states_equal(first, second)
    assert int(first["objective.terms.crac.step"]) == 2
    for name, value in expected.items():
        close(first[name], value, rtol=1e-12)


def test_updates_are_logged(caplog, one_thread):
    setting = Setting(SegcalLoss("crac", num_classes=K, crac={"start_epoch": 2}))
    evaluator = setting.evaluator()
    evaluator.logger = logging.getLogger("test")
    with caplog.at_level(logging.INFO, "test"):
        evaluator.run()
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("crac")]
    assert lines == [
        "crac: update 1 of the multipliers: lambda_mean 1e-06, rho_mean 0.1",
        "crac: the penalty starts after 1 more passes",
    ]


def test_a_loss_that_learns_nothing(one_thread):
    setting = Setting(SegcalLoss("nacl", num_classes=K))
    evaluator = setting.evaluator()
    evaluator.run()
    assert setting.handler.steps == {}
    assert evaluator.state.metrics == {}


def test_weights_without_rho(one_thread):
    setting = Setting(SegcalLoss("cals_hr", num_classes=K))
    evaluator = setting.evaluator()
    evaluator.run()
    assert evaluator.state.metrics == {"cals_hr_lambda_mean": pytest.approx(0.1)}


def test_belongs_to_an_evaluator(one_thread):
    with pytest.raises(ValueError, match="got SupervisedTrainer; multipliers are"):
        Setting().trainer([DualStepHandler(Setting().loss)])
    with pytest.raises(ValueError, match=r"expected a SegcalLoss .* got CrossEntropyLoss"):
        DualStepHandler(torch.nn.CrossEntropyLoss())


def test_other_keys(one_thread):
    loss = SegcalLoss("crac", num_classes=K)
    evaluator = Setting().evaluator([DualStepHandler(loss, keys=("pred", "target"))])
    evaluator.logger.disabled = True
    with pytest.raises(KeyError, match="target"):
        evaluator.run()


@pytest.mark.parametrize("decollate", [True, False])
def test_distances_in_mm_of_the_meta_tensors(decollate, one_thread):
    """Masks that are 2 voxels of 1.5 mm apart along the first axis."""
    y = torch.zeros(1, 8, 8, 8)
    y[:, 2, 2:4, 2:4] = 1
    case = {"image": MetaTensor(y.roll(2, 1), affine=AFFINE), "label": MetaTensor(y, affine=AFFINE)}
    evaluator = SupervisedEvaluator(
        device=CPU,
        val_data_loader=[list_data_collate([case])],
        network=torch.nn.Identity(),
        decollate=decollate,
        key_val_metric={"mm": MetricHandler(HausdorffMetric())},
        additional_metrics={
            "voxels": MetricHandler(HausdorffMetric(convention="monai"), save_details=False),
            "given": MetricHandler(HausdorffMetric(spacing=10.0), keys=["image", "label"]),
        },
    )
    evaluator.run()
    assert evaluator.state.metrics == {"mm": 3.0, "voxels": 2.0, "given": 20.0}
    assert set(evaluator.state.metric_details) == {"mm", "given"}
    evaluator.data_loader = [{"image": y[None], "label": y[None]}]
    evaluator.logger.disabled = True
    with pytest.raises(ValueError, match='"meta" needs y or y_pred to be MetaTensors'):
        evaluator.run()


TWO_HEADS = """
base: {cross_entropy: 1.0, soft_dice: 1.0}
probability: {base: {svls: 1.0}, penalties: {crac: 1.0}}
schedule: {soft_dice: {from: 1, to: 0, start: 0.25, end: 0.75}, svls: {from: 0, to: 1, dice: 0.5}}
"""


def test_two_heads_with_a_schedule(tmp_path, one_thread):
    """In MONAI's engines, whose metrics see the head that they are of."""
    path = tmp_path / "two.yaml"
    path.write_text(TWO_HEADS)
    loss = SegcalLoss(path, num_classes=K, to_onehot_y=True)
    assert loss.num_heads == 2
    network = UNet(spatial_dims=3, in_channels=1, out_channels=2 * K, channels=(4, 8), strides=(2,))
    setting = Setting(loss, network)
    evaluator = setting.evaluator()
    scheduled, seen = ScheduleHandler(loss, dice=lambda: 0.6), []
    loss.register_forward_pre_hook(lambda *_: seen.append(loss.objective.in_force))
    trainer = setting.trainer([scheduled, ValidationHandler(1, evaluator)], epochs=4)
    trainer.run()
    assert [step["decision/soft_dice"] for step in seen[::2]] == pytest.approx([1, 1, 0.5, 0])
    assert [step["probability/svls"] for step in seen[::2]] == pytest.approx([0, 0, 0.25, 0.5])
    assert setting.handler.steps["probability/crac"].step == 4
    (batch, *_) = batches(1)
    logits = network(batch["image"])
    for place, head in enumerate(("decision", "probability")):
        close(SelectHead(head)(logits[0]), logits[0, place * K : (place + 1) * K])
        close(loss.by_head(logits)[place], logits[:, place * K : (place + 1) * K])
    with pytest.raises(ValueError, match="head: expected one of"):
        SelectHead("both")
    with pytest.raises(ValueError, match="engine: expected a trainer"):
        scheduled.attach(evaluator)
    with pytest.raises(ValueError, match=r"expected \(N, 6, \*S\), the 3 channels"):
        loss(logits[:, :K], batch["label"])


def test_a_schedule_by_the_gap():
    loss = SegcalLoss("confidence", num_classes=K, to_onehot_y=True)
    setting = Setting(loss, UNet(3, 1, K, channels=(4, 8), strides=(2,)))
    gaps, seen = iter([0.0, 1.0, 0.0]), []
    scheduled = ScheduleHandler(loss, gap=lambda: next(gaps))
    loss.register_forward_pre_hook(lambda *_: seen.append(loss.objective.in_force["confidence"]))
    setting.trainer([scheduled], epochs=4).run()
    steps = len(seen) // 4
    assert seen[::steps] == pytest.approx([0, 0, (0.3 - 0.1) / 0.4, (0.21 - 0.1) / 0.4])

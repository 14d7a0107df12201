from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from tests.warm_program import WarmProgram

from dstrat import ModelCheckpoint
from dstrat.errors import MisuseError, RankFailedError

if find_spec("torchmetrics") is None:
    pytest.skip("torchmetrics is not installed", allow_module_level=True)


class Scored(torch.nn.Module):
    """What the modules of these tests have in common."""

    def error(self, batch):
        x, y = batch
        return self.layer(x), y


@pytest.fixture
def make_scored(make_line):
    from torchmetrics import CatMetric, MeanSquaredError, MetricCollection

    def make(**hooks):
        def init(self):
            base.__init__(self)
            self.mse, self.cat = MeanSquaredError(), CatMetric()
            self.both = MetricCollection({"a": MeanSquaredError(), "b": MeanSquaredError()}, prefix="c/")

        base = type(make_line())
        methods = {"error": Scored.error, "__init__": init, "seen": [], **hooks}
        return make_line(type("Net", (base,), methods))

    return make


def test_step_with(name):
    def step(self, batch, batch_idx):
        getattr(self, name)(*self.error(batch))
        self.log(name, getattr(self, name))

    return step


test_step_with.__test__ = False


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_value_is_that_of_one_device(quiet_trainer, make_scored, loader, averaging, devices):
    def test_step(self, batch, batch_idx):
        self.mse.update(*self.error(batch))
        self.log("mse", self.mse)
        self.cat.update(batch[1])
        self.both.update(*self.error(batch))
        self.log_dict(self.both)

    module = make_scored(test_step=test_step)
    x, y = zip(*loader(40), strict=True)  # batches of 40 and 8
    expected = torch.nn.functional.mse_loss(module.layer(torch.cat(x)), torch.cat(y)).item()
    strategy = averaging() if devices > 1 else "single_device"
    [result] = quiet_trainer(strategy=strategy, devices=devices).test(module, loader(8))
    assert result == pytest.approx({"mse": expected, "c/a": expected, "c/b": expected}, rel=1e-6)


def test_a_process_without_a_batch_takes_part(quiet_trainer, make_scored, loader, averaging):
    module = make_scored(test_step=test_step_with("mse"))
    [expected] = quiet_trainer().test(module, loader(24))
    [result] = quiet_trainer(strategy=averaging(), devices=4).test(module, loader(24))  # two batches for four
    assert result == pytest.approx(expected, rel=1e-6)


def test_the_value_of_a_step_is_what_the_metric_returned_for_the_batch(quiet_trainer, make_scored, loader):
    def training_step(self, batch, batch_idx):
        returned = self.mse(*self.error(batch))
        self.log("mse", self.mse, on_epoch=True)
        self.seen.append(returned.item())
        assert self.trainer.callback_metrics["mse_step"].item() == returned.item()
        return self.loss(batch)

    def on_train_epoch_end(self):
        assert self.trainer.callback_metrics["mse"].item() == pytest.approx(sum(self.seen) / len(self.seen), rel=1e-6)
        self.seen.clear()

    module = make_scored(training_step=training_step, on_train_epoch_end=on_train_epoch_end)
    quiet_trainer(max_epochs=2).fit(module, loader())
    assert not module.mse.update_called


@pytest.mark.parametrize("devices", [1, 2])
def test_hooks_at_the_end_of_an_epoch_see_the_metric_of_the_epoch(
    quiet_trainer, make_scored, loader, averaging, devices
):
    def step(name):
        def step(self, batch, batch_idx):
            metric = getattr(self, name)
            metric.update(*self.error(batch))
            self.log(name, metric, on_step=False, on_epoch=True)
            return self.loss(batch)

        return step

    def hook(name):
        def hook(self):
            assert getattr(self, name).compute() == self.trainer.callback_metrics[name]
            self.seen.append(name)

        return hook

    def on_train_end(self):
        assert self.seen == ["mse", "mse", "train_mse"] * 2
        assert not self.mse.update_called
        assert not self.train_mse.update_called

    def init(self):
        base.__init__(self)
        self.train_mse, self.seen = type(self.mse)(), []

    base = type(make_scored(training_step=step("train_mse"), validation_step=step("mse")))
    hooks = {
        "on_validation_epoch_end": hook("mse"),
        "on_validation_end": hook("mse"),
        "on_train_epoch_end": hook("train_mse"),
    }
    module = type("Net", (base,), {"__init__": init, "on_train_end": on_train_end, **hooks})()
    strategy = averaging() if devices > 1 else "single_device"
    trainer = quiet_trainer(max_epochs=2, num_sanity_val_steps=0, strategy=strategy, devices=devices)
    trainer.fit(module, loader(), loader())


@pytest.mark.parametrize("short", [0, 1])
def test_a_loader_with_fewer_batches_than_processes_counts_beside_another(
    quiet_trainer, make_scored, loader, averaging, short
):
    def test_step(self, batch, batch_idx, dataloader_idx):
        loss = self.loss(batch)
        for index in range(40):  # more than one exchange has room for
            self.log(f"mean_{index}", loss + index)
        self.log("least", loss, reduce_fx="min")
        self.log("all", loss, add_dataloader_idx=False)
        if dataloader_idx == short:
            self.mse.update(*self.error(batch))
            self.log("mse", self.mse)

    loaders = [loader(count=1 if index == short else 48) for index in range(2)]
    alone, together = (
        quiet_trainer(strategy=strategy, devices=devices).test(make_scored(test_step=test_step), loaders)
        for strategy, devices in (("single_device", 1), (averaging(), 2))
    )
    assert len(alone[short]) == 43
    assert [*map(pytest.approx, alone)] == together


def test_a_process_that_lacks_a_loader_may_log_nothing_that_the_others_do_not(
    quiet_trainer, make_scored, loader, averaging
):
    def test_step(self, batch, batch_idx, dataloader_idx):
        self.log("loss" if dataloader_idx or self.global_rank == 0 else "error", self.loss(batch))

    module = make_scored(test_step=test_step)
    with pytest.raises(RankFailedError, match="rank 1 logged 'error/dataloader_idx_0' and rank 0 did not"):
        quiet_trainer(strategy=averaging(), devices=2).test(module, [loader(), loader(count=1)])


def test_a_checkpoint_at_the_end_of_an_epoch_has_metrics_that_begin_anew(quiet_trainer, make_scored, loader, tmp_path):
    def training_step(self, batch, batch_idx):
        self.mse.persistent(True)
        self.mse(*self.error(batch))
        self.log("mse", self.mse, on_epoch=True)
        return self.loss(batch)

    module = make_scored(training_step=training_step)
    keeper = ModelCheckpoint(tmp_path / "kept")
    trainer = quiet_trainer(max_epochs=1, callbacks=keeper)
    trainer.fit(module, loader())
    assert trainer.strategy.load_checkpoint(keeper.best_model_path)["state_dict"]["mse.total"] == 0


def test_a_metric_is_reset_after_an_epoch_also_where_only_its_steps_count(quiet_trainer, make_scored, loader):
    def training_step(self, batch, batch_idx):
        self.mse(*self.error(batch))
        self.log("mse", self.mse)
        return self.loss(batch)

    module = make_scored(training_step=training_step)
    quiet_trainer(max_epochs=1).fit(module, loader())
    assert not module.mse.update_called


@pytest.mark.parametrize("name", ["mse", "cat"])
def test_what_inference_mode_has_updated_can_be_trained_with(quiet_trainer, make_scored, loader, name):
    def use(self, batch):
        if name == "mse":
            self.mse(*self.error(batch))
        else:
            self.cat.reset()
            self.cat.update(batch[1][0])
        self.log("value", getattr(self, name), on_step=False, on_epoch=True)

    def validation_step(self, batch, batch_idx):
        self.use(batch)

    def training_step(self, batch, batch_idx):
        self.use(batch)
        return self.loss(batch)

    module = make_scored(training_step=training_step, validation_step=validation_step, use=use)
    trainer = quiet_trainer(max_epochs=2, check_val_every_n_epoch=3)  # the sanity check alone validates
    trainer.fit(module, loader(), loader())
    assert trainer.callback_metrics["value"].isfinite()


def test_a_metric_that_computes_several_numbers_cannot_be_logged(quiet_trainer, make_scored, loader):
    def test_step(self, batch, batch_idx):
        self.cat.update(batch[1])
        self.log("all", self.cat)

    with pytest.raises(MisuseError, match=r"log\('all'\): the CatMetric computed a tensor of shape \(48, 1\), and one"):
        quiet_trainer().test(make_scored(test_step=test_step), loader())


def test_a_metric_that_was_only_updated_has_no_value_of_the_step(quiet_trainer, make_scored, loader):
    def training_step(self, batch, batch_idx):
        self.mse.update(*self.error(batch))
        self.log("mse", self.mse)
        return self.loss(batch)

    with pytest.raises(
        MisuseError, match=r"only updated: call self\.mse\(\.\.\.\) rather than its update, or log with on"
    ):
        quiet_trainer().fit(make_scored(training_step=training_step), loader())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce_fx": "sum"}, "which reduces itself: leave out reduce_fx"),
        ({"rank_zero_only": True}, "which reduces itself"),
        ({"metric_attribute": "cat"}, "Net has no such attribute, or it is another metric"),
    ],
)
def test_options_that_are_not_for_metrics_are_refused(quiet_trainer, make_scored, loader, options, message):
    def test_step(self, batch, batch_idx):
        self.log("mse", self.mse, **options)

    with pytest.raises(MisuseError, match=message):
        quiet_trainer().test(make_scored(test_step=test_step), loader())


def test_a_metric_belongs_to_the_module(quiet_trainer, make_scored, loader):
    from torchmetrics import MeanMetric

    def test_step(self, batch, batch_idx):
        self.log("val/mean", MeanMetric())

    with pytest.raises(
        MisuseError, match=r"a MeanMetric that is no attribute of Net.*: set it in __init__, as self\.val_m"
    ):
        quiet_trainer().test(make_scored(test_step=test_step), loader())


def test_a_name_has_one_metric(quiet_trainer, make_scored, loader):
    def test_step(self, batch, batch_idx):
        self.log("x", self.mse)
        self.log("x", self.cat)

    with pytest.raises(MisuseError, match=r"log\('x'\) got another metric object than before"):
        quiet_trainer().test(make_scored(test_step=test_step), loader())


def test_a_collection_is_for_log_dict(quiet_trainer, make_scored, loader):
    def test_step(self, batch, batch_idx):
        self.log("x", self.both)

    with pytest.raises(MisuseError, match=r"log\('x'\) got a MetricCollection; log a number.*several with log_dict"):
        quiet_trainer().test(make_scored(test_step=test_step), loader())


def test_metrics_under_different_names_are_an_error_not_a_hang(quiet_trainer, make_scored, loader, averaging):
    def test_step(self, batch, batch_idx):
        self.mse.update(*self.error(batch))
        self.log("mse" if self.global_rank == 0 else "other", self.mse)

    with pytest.raises(RankFailedError, match="rank 0 logged 'mse' and rank 1 did not"):
        quiet_trainer(strategy=averaging(), devices=2).test(make_scored(test_step=test_step), loader())


def test_a_metric_of_several_loaders_needs_one_for_each(quiet_trainer, make_scored, loader):
    def test_step(self, batch, batch_idx, dataloader_idx):
        metric = (self.mse, self.both["a"])[dataloader_idx]
        metric.update(*self.error(batch))
        self.log("mse", metric)

    module = make_scored(test_step=test_step)
    first, second = quiet_trainer().test(module, [loader(), loader(count=24)])
    assert first.keys() == {"mse/dataloader_idx_0"}
    assert second.keys() == {"mse/dataloader_idx_1"}


def test_a_metric_moves_with_the_module():
    from torchmetrics import Metric, SumMetric

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.total: Metric = SumMetric()

    assert Net().to("meta").total.sum_value.device.type == "meta"


def test_torchmetrics_is_not_loaded_by_logging(tmp_path):
    (tmp_path / "script.py").write_text("""
import sys, torch
for name in [*sys.modules]:  # what the fork server has loaded
    if name.split(".")[0] in ("dstrat", "torchmetrics"): del sys.modules[name]
from dstrat import Trainer, TrainModule
class Net(TrainModule):
    def __init__(self): super().__init__(); self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        self.log("loss", 1.0, on_epoch=True); self.log_dict({"other": torch.ones(())})
        return self.layer(batch).sum()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.zeros(4, 2))
Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False).fit(Net(), data)
print("torchmetrics" in sys.modules)
""")
    assert WarmProgram(tmp_path / "script.py").run() == "False\n"

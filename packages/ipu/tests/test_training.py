"""Fits on IPUs: what is logged, scheduled, validated and counted; on the simulator."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path

import pytest
import torch
from ipu_fit import ON_CPU, Counting, Regression, data, fit, made, make_trainer, state_of
from torch import nn

from dstrat import Callback, CSVLogger, LearningRateMonitor, seed_everything
from dstrat_ipu import IPUStrategy


@pytest.fixture(scope="module")
def on_one_device():
    """A fit of one device with batches of 32, and its values."""
    module, trainer = fit(made(), data(640, batch_size=32), val=data(256, batch_size=32, shuffle=False), **ON_CPU)
    return module, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(("devices", "iterations"), [(1, 1), (4, 1), (4, 4)])
def test_logged_values_are_those_of_one_device(on_one_device, devices, iterations):
    strategy = IPUStrategy(device_iterations=iterations)
    loaders = data(640, batch_size=32 // devices), data(256, batch_size=32 // devices, shuffle=False)
    _, trainer = fit(made(), loaders[0], val=loaders[1], strategy=strategy, devices=devices)
    _, expected = on_one_device
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert logged.keys() == expected.keys() == {"loss", "loss_step", "loss_epoch", "val_loss"}
    for name, value in logged.items():
        assert math.isclose(value, expected[name], rel_tol=1e-5)


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
def test_torch_optimizers_step_as_on_one_device(name):
    options = {"momentum": 0.9, "weight_decay": 0.01} if name == "SGD" else {}
    loader = data(320, batch_size=16)
    expected = fit(made(optimizer=name, **options), loader, **ON_CPU)[0].losses
    losses = fit(made(optimizer=name, **options), loader)[0].losses
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ({"optimizer": "SGD"}, {"lr"}),
        ({"optimizer": "SGD", "momentum": 0.9}, {"lr", "momentum"}),
        ({"betas": (0.8, 0.999)}, {"lr", "betas"}),
    ],
)
def test_only_options_that_differ_are_variable_on_the_device(simulator, monkeypatch, module, named):
    calls, cls = [], getattr(simulator.optim, module.get("optimizer", "AdamW"))
    plain = cls.__init__

    def record(self, params, **options):
        calls.append(set(options))
        plain(self, params, **options)

    monkeypatch.setattr(cls, "__init__", record)
    fit(made(**module), data(16))
    assert calls == [named]


def test_devices_are_released_where_weights_cannot_be_fetched(simulator, monkeypatch):
    class Failing(IPUStrategy):
        def _fetch(self):
            raise RuntimeError("the link is down")

    destroy = simulator.PoplarExecutor.destroy

    def destroy_and_fail(self):
        destroy(self)
        raise RuntimeError("nor can it be destroyed")

    monkeypatch.setattr(simulator.PoplarExecutor, "destroy", destroy_and_fail)
    with pytest.raises(RuntimeError, match="the link is down"):
        fit(made(), data(16), val=data(16), strategy=Failing())
    assert not simulator.hardware._held


def test_gradients_are_clipped_within_the_step():
    clipped = [fit(made(), data(), gradient_clip_val=0.1, **where)[0].losses for where in (ON_CPU, {})]
    torch.testing.assert_close(torch.tensor(clipped[1]), torch.tensor(clipped[0]), rtol=1e-5, atol=0)
    assert clipped[0] != fit(made(), data(), **ON_CPU)[0].losses


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_schedulers_reach_the_device(interval):
    loaders = [data(160, batch_size=16) for _ in range(2)]
    expected = fit(made(scheduled=interval), loaders[0], max_epochs=3, **ON_CPU)[0].losses
    losses = fit(made(scheduled=interval), loaders[1], max_epochs=3)[0].losses
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)


def test_groups_of_parameters_keep_their_own_options():
    class Groups(Regression):
        def configure_optimizers(self):
            first, last = self.net[0], self.net[3]
            groups = [
                {"params": list(first.parameters()), "lr": 0.02, "weight_decay": 0.3, "label": "first"},
                {"params": [last.weight], "betas": (0.5, 0.9)},
            ]
            optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
            factors = [lambda step: 0.9**step, lambda step: 1 / (1 + step)]
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    losses = [fit(Groups, data(), **where)[0].losses for where in (ON_CPU, {})]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-5, atol=0)


def test_a_loss_that_poptorch_does_not_know_is_marked():
    class Written(Regression):
        def training_step(self, batch, batch_idx):
            return {"loss": (self.net(batch[0]) - batch[1]).square().mean(), "size": batch[1].sum()}

    losses = []
    for where in (ON_CPU, {"devices": 2}):
        seed_everything(3, verbose=False)
        losses.append(fit(Written(), data(batch_size=8 // where["devices"]), **where)[0].losses)
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:Output expected to be on the IPU but is on cpu")
@pytest.mark.parametrize(("devices", "iterations"), [(1, 1), (2, 4)])
def test_constants_of_the_host_are_those_of_every_batch(devices, iterations):
    kept, weight = torch.arange(3), torch.tensor(0.25)
    outputs = []

    class Constant(Regression):
        def training_step(self, batch, batch_idx):
            self.log("weight", weight, on_step=False, on_epoch=True)
            return {"loss": super().training_step(batch, batch_idx), "kept": kept, "of_host": weight}

        def on_train_batch_end(self, results, batch, batch_idx) -> None:
            outputs.append(results)
            super().on_train_batch_end(results, batch, batch_idx)

    strategy = IPUStrategy(device_iterations=iterations)
    module, trainer = fit(Constant, data(64), strategy=strategy, devices=devices)
    count = devices * iterations
    assert len(module.losses) == 8 // devices
    assert outputs[0]["kept"].tolist() == [0, 1, 2] * count
    assert outputs[0]["of_host"].reshape(-1).tolist() == [0.25] * count
    assert float(trainer.callback_metrics["weight"]) == 0.25


def test_learning_rates_and_losses_are_written(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    monitor = LearningRateMonitor("step")
    fit(made(scheduled="step"), data(64), logger=logger, log_every_n_steps=1, callbacks=[monitor])
    text = (tmp_path / "metrics.csv").read_text()
    assert "lr-AdamW" in text
    assert "loss_step" in text


def test_a_poptorch_optimizer_is_taken_as_it_is(simulator):
    class WithTheirs(Regression):
        def configure_optimizers(self):
            return simulator.optim.AdamW(self.parameters(), lr=0.01, max_grad_norm=0.1)

    seed_everything(3, verbose=False)
    losses = fit(WithTheirs(), data())[0].losses
    expected = fit(made(), data(), gradient_clip_val=0.1, **ON_CPU)[0].losses
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)


def test_training_and_inference_alternate_on_all_devices(simulator, simulated_ipus):
    """Each model needs all devices, so that one has to leave them for the other."""
    loaders = data(320, batch_size=4), data(96, batch_size=4, shuffle=False)
    module, trainer = fit(made(), loaders[0], val=loaders[1], devices=simulated_ipus, val_check_interval=5)
    assert trainer.num_devices == simulated_ipus
    alone, _ = fit(made(), data(320, batch_size=4), devices=simulated_ipus)
    assert module.losses == alone.losses
    assert not simulator.hardware._held


def test_validation_has_the_trained_weights():
    class Remembering(Regression):
        def validation_step(self, batch, batch_idx):
            self.log("bias", self.net[3].bias.sum())

    seed_everything(3, verbose=False)
    module, trainer = fit(Remembering(), data(), val=data(16), devices=2)
    assert math.isclose(float(trainer.callback_metrics["bias"]), float(module.net[3].bias.detach()), rel_tol=1e-6)


def test_nobody_holds_the_devices_around_an_evaluation(simulator):
    held = []

    class Looking(Callback):
        def on_validation_start(self, trainer, module) -> None:
            held.append(dict(simulator.hardware._held))

        def on_train_epoch_end(self, trainer, module) -> None:
            held.append(dict(simulator.hardware._held))

    fit(made(), data(), val=data(32), callbacks=[Looking()], max_epochs=2)
    assert held == [{}] * 5  # the sanity check begins as well


def test_statistics_of_batches_come_back_from_the_device():
    modules = [fit(made(normalizes=True), data(), **where)[0] for where in (ON_CPU, {})]
    expected, found = map(state_of, modules)
    for name in ("net.1.running_mean", "net.1.running_var"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
    assert found["net.1.num_batches_tracked"] == 20


def test_weights_come_back_as_plain_parameters():
    module, _ = fit(made(normalizes=True))
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    assert {type(buffer) for buffer in module.buffers()} == {torch.Tensor}
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())
    assert len(module.losses) == 20


def test_a_fit_that_breaks_before_the_first_call_leaves_the_module_as_it_was(simulator):
    class Failing(Regression):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("while it is traced")

    module = Failing()
    with pytest.raises(RuntimeError, match="while it is traced"):
        fit(module)
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    assert not simulator.hardware._held
    fit(module.__class__.__base__())


def test_test_and_predict_run_on_the_devices():
    module, _ = fit(made(), data(), devices=2)
    loader = data(64, batch_size=8, shuffle=False)
    (result,) = make_trainer(devices=2).test(module, loader, verbose=False)
    (expected,) = make_trainer(**ON_CPU).test(module, data(64, batch_size=16, shuffle=False), verbose=False)
    assert math.isclose(result["val_loss"], expected["val_loss"], rel_tol=1e-5)
    predictions = torch.cat(make_trainer(devices=2).predict(module, loader))
    with torch.no_grad():
        torch.testing.assert_close(predictions, module.net(loader.dataset.tensors[0]))


def test_what_does_not_fill_a_call_is_left_out_and_logged(caplog):
    with caplog.at_level(logging.WARNING):
        _, trainer = fit(made(), data(100, batch_size=8), val=data(20, batch_size=8), devices=2)
    assert trainer.num_training_batches == 6
    assert "the last 4 of 100 samples of the training loader are left out of each epoch, as one call" in caplog.text
    assert "the last 4 of 20 samples of the evaluation loader" in caplog.text


def test_the_index_of_a_batch_is_not_a_constant():
    class Noting(Regression):
        def training_step(self, batch, batch_idx):
            self.log("index", batch_idx.sum().float(), on_step=False, on_epoch=True, reduce_fx="max")
            return super().training_step(batch, batch_idx)

    seed_everything(3, verbose=False)
    _, trainer = fit(Noting(), data(320, batch_size=8), strategy=IPUStrategy(device_iterations=4), devices=2)
    assert float(trainer.callback_metrics["index"]) == 19


def test_evaluation_counts_the_batches_of_each_call(simulator):
    class Indexing(Regression):
        def predict_step(self, batch, batch_idx):
            return batch_idx

    options = simulator.Options().replicationFactor(2).deviceIterations(2)
    trainer = make_trainer(strategy=IPUStrategy(inference_opts=options), devices=2)
    indices = trainer.predict(Indexing(), data(64, batch_size=8, shuffle=False))
    assert {one.dtype for one in indices} == {torch.int64}  # which comes from the device as int32
    assert [one.tolist() for one in indices] == [[0, 0, 1, 1], [2, 2, 3, 3]]


@pytest.mark.parametrize("purpose", ["validate", "test", "predict"])
def test_limits_of_evaluation_count_batches_and_not_calls(simulator, purpose):
    calls = []

    class Noting(Callback):
        def on_test_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0) -> None:
            calls.append((batch_idx, len(batch[0])))

        on_validation_batch_end = on_predict_batch_end = on_test_batch_end

    options = simulator.Options().replicationFactor(2).deviceIterations(2)
    name = {"validate": "val"}.get(purpose, purpose)
    trainer = make_trainer(
        strategy=IPUStrategy(inference_opts=options), devices=2, callbacks=[Noting()], **{f"limit_{name}_batches": 4}
    )
    getattr(trainer, purpose)(
        made(), data(128, batch_size=8, shuffle=False), **{"verbose": False} if name != "predict" else {}
    )
    assert calls == [(0, 32), (2, 32)]  # batches of 16 samples, two in each call


def test_validation_within_training_counts_batches(simulator):
    batches = []

    class Noting(Callback):
        def on_validation_start(self, trainer, module) -> None:
            batches.append((trainer.fit_loop.batches_seen, trainer.run.evaluation_loop.current_batches))

    strategy = IPUStrategy(device_iterations=2, inference_opts=simulator.Options().deviceIterations(2))
    loaders = data(64), data(64)
    fit(
        made(),
        loaders[0],
        val=loaders[1],
        strategy=strategy,
        callbacks=[Noting()],
        val_check_interval=4,
        limit_val_batches=6,
    )
    assert batches == [(0, [2]), (4, [6]), (8, [6])]  # the first is the sanity check


def test_poptorch_loaders_are_taken_as_they_are(simulator):
    options = simulator.Options().replicationFactor(2).deviceIterations(2).outputMode(simulator.OutputMode.All)
    dataset = data().dataset
    loader = simulator.DataLoader(options, dataset, batch_size=8)
    module, trainer = fit(made(), loader, strategy=IPUStrategy(training_opts=options), devices=2)
    assert trainer.global_step == len(module.losses) == 10
    expected = fit(made(), data(shuffle=False, batch_size=16), **ON_CPU)[0].losses
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(expected), rtol=1e-5, atol=0)


def test_only_the_last_loss_of_a_call_is_known_in_final_mode(simulator):
    options = simulator.Options().deviceIterations(4)
    module, trainer = fit(made(), data(), strategy=IPUStrategy(training_opts=options))
    assert trainer.global_step == 20
    everything = fit(made(), data(), strategy=IPUStrategy(device_iterations=4))[0].losses
    assert module.losses == everything[3::4]


def test_a_pipeline_trains_as_on_one_device(simulator):
    class Pipeline(Regression):
        def __init__(self):
            super().__init__()
            self.net[0] = simulator.BeginBlock(self.net[0], ipu_id=0)
            self.net[3] = simulator.BeginBlock(self.net[3], ipu_id=1)

    training = simulator.Options().replicationFactor(4).outputMode(simulator.OutputMode.All)
    training.Training.gradientAccumulation(4)
    inference = simulator.Options().replicationFactor(4).deviceIterations(2)
    strategy = IPUStrategy(training_opts=training, inference_opts=inference)
    seed_everything(3, verbose=False)
    module, trainer = fit(
        Pipeline(), data(640, batch_size=8), val=data(64), strategy=strategy, devices=8, accumulate_grad_batches=4
    )
    expected = fit(made(), data(640, batch_size=32), **ON_CPU, accumulate_grad_batches=4)[0].losses
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(expected), rtol=1e-5, atol=0)
    assert trainer.global_step == 5


def test_half_precision_trains(simulator):
    module, trainer = fit(made(), data(), precision="16-true", devices=2)
    assert trainer.precision == "16-true"
    assert module.net[0].weight.dtype == torch.float16
    assert sum(module.losses[-5:]) < sum(module.losses[:5])


def test_weights_that_a_callback_swaps_in_are_evaluated():
    class Zeros(Callback):
        def on_validation_start(self, trainer, module):
            self.kept = state_of(module)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()

        def on_validation_end(self, trainer, module):
            module.load_state_dict(self.kept)

    module, trainer = fit(made(), data(), val=data(32), callbacks=[Zeros()], val_check_interval=5)
    targets = data(32).dataset.tensors[1]
    assert math.isclose(float(trainer.callback_metrics["val_loss"]), float(targets.square().mean()), rel_tol=1e-5)
    assert module.losses == fit(made(), data())[0].losses


def test_a_report_is_asked_for_while_the_run_lasts(tmp_path, monkeypatch):
    import json
    import os

    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"debug.allowOutOfMemory": "true"}')
    seen = {}

    class Looking(Callback):
        def on_train_start(self, trainer, module):
            seen.update(json.loads(os.environ["POPLAR_ENGINE_OPTIONS"]))

    strategy = IPUStrategy(autoreport=True, autoreport_dir=str(tmp_path / "reports"))
    fit(made(), data(16), strategy=strategy, callbacks=[Looking()])
    assert seen == {
        "debug.allowOutOfMemory": "true",
        "autoReport.all": "true",
        "autoReport.directory": str(tmp_path / "reports"),
    }
    assert (tmp_path / "reports").is_dir()
    assert os.environ["POPLAR_ENGINE_OPTIONS"] == '{"debug.allowOutOfMemory": "true"}'


def test_the_program_of_the_readme_runs():
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    program = text.split("```python\n")[1].split("```")[0].split("if __name__")
    scope = {"__name__": "readme"}
    exec(program[0], scope)
    inputs = torch.randn(512, 8)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = make_trainer(devices=8, max_epochs=2)
    trainer.fit(scope["Net"](), torch.utils.data.DataLoader(dataset, batch_size=8))
    assert trainer.global_step == 16


# Counts, beside a loop written by hand on the same simulator


def hand_loop(simulator, *, epochs, validates):
    """Train and validate as the vendor's examples do; return what the simulator counted."""
    module = made()

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = module.net

        def forward(self, inputs, targets):
            return simulator.identity_loss(nn.functional.mse_loss(self.net(inputs), targets), reduction="none")

    options = simulator.Options().replicationFactor(8).outputMode(simulator.OutputMode.All)
    model = WithLoss()
    optimizer = simulator.optim.AdamW(module.parameters(), lr=0.01)
    training = simulator.trainingModel(model, options, optimizer)
    inference = simulator.inferenceModel(model, simulator.Options().replicationFactor(8))
    loaders = [simulator.DataLoader(options, loader.dataset, 4) for loader in (data(320), data(64))]
    before = simulator.counts.copy()
    for _ in range(epochs):
        for inputs, targets in loaders[0]:
            training(inputs, targets)
        if validates:
            training.detachFromDevice()
            for inputs, targets in loaders[1]:
                inference(inputs, targets)
            inference.detachFromDevice()
    counted = simulator.counts.since(before)
    training.destroy()
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("shows", [False, True])
def test_the_device_does_what_it_does_for_a_hand_written_loop(simulator, tmp_path, capsys, validates, shows):
    expected = hand_loop(simulator, epochs=2, validates=validates)
    counting = Counting(simulator)
    loud = {"enable_progress_bar": True, "logger": CSVLogger(tmp_path), "log_every_n_steps": 1} if shows else {}
    fit(
        made(),
        data(320, batch_size=4),
        val=data(64, batch_size=4) if validates else None,
        devices=8,
        max_epochs=2,
        num_sanity_val_steps=0,
        callbacks=[counting],
        **loud,
    )
    # poptorch copies the weights twice where both its models are made of one; here each is its own.
    assert counting.end.weights_to_device == counting.end.attachments <= expected.weights_to_device
    assert dataclasses.replace(counting.end, weights_to_device=expected.weights_to_device) == expected
    end = counting.end  # as the README has it
    copies = (end.weights_to_host, end.weights_to_device, end.state_to_host, end.state_to_device)
    assert (end.compilations, end.calls, copies) == ((2, 24, (2, 4, 2, 1)) if validates else (1, 20, (0, 1, 0, 0)))

"""Errors that users get before anything is compiled; on the simulator."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import subprocess
import sys

import pytest
import torch
from ipu_fit import Regression, data, fit, made, make_trainer

import dstrat
from dstrat import Callback, OwnLoop
from dstrat.errors import ConflictError, DeviceError, MisuseError, RequestError
from dstrat_ipu import IPUPrecision, IPUStrategy
from dstrat_ipu.accelerator import IPUAccelerator


@pytest.fixture
def compiled(simulator):
    """Tells how many models have been compiled in the test."""
    before = simulator.counts.copy()
    return lambda: simulator.counts.since(before).compilations


def test_the_signature_is_the_known_one():
    parameters = inspect.signature(IPUStrategy).parameters
    assert [(name, parameter.default) for name, parameter in parameters.items()] == [
        ("accelerator", None),
        ("device_iterations", 1),
        ("autoreport", False),
        ("autoreport_dir", None),
        ("parallel_devices", None),
        ("cluster_environment", None),
        ("checkpoint_io", None),
        ("precision_plugin", None),
        ("training_opts", None),
        ("inference_opts", None),
    ]


@pytest.mark.parametrize("devices", [1, 8, "auto", -1])
def test_the_strategy_is_chosen_for_the_accelerator(devices, simulated_ipus):
    trainer = make_trainer(devices=devices)
    assert type(trainer.strategy) is IPUStrategy
    assert trainer.num_devices == (devices if devices in (1, 8) else simulated_ipus)
    assert trainer.world_size == 1


def test_the_plan_explains_the_choice():
    text = str(make_trainer(devices=8).plan)
    assert "ipu_strategy" in text
    assert "the first choice for 8 devices" in text


class ByHand(Regression):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Stepping(Regression):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


class Clipping(Regression):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        pass


class Looking(Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
        pass


class Two(Regression):
    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[3])]


class TheirsClipped(Regression):
    def configure_optimizers(self):
        import poptorch

        return poptorch.optim.AdamW(self.parameters(), lr=0.01)


class Closing(Regression):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("module", "options", "error", "message"),
    [
        (ByHand, {}, ConflictError, "automatic_optimization=False: return the loss from training_step"),
        (Stepping, {}, ConflictError, "Stepping.optimizer_step would never be called"),
        (Clipping, {}, ConflictError, "Clipping.configure_gradient_clipping would never be called"),
        (Regression, {"callbacks": [Looking()]}, ConflictError, "on_before_optimizer_step .* would never be called"),
        (Two, {}, ConflictError, "returned 2 optimizers, and poptorch compiles the step of one"),
        (Closing, {}, RequestError, "cannot compile the step of LBFGS: choose SGD, Adam, AdamW or RMSprop"),
        (
            Regression,
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            ConflictError,
            "gradient_clip_algorithm='value' is not possible",
        ),
        (TheirsClipped, {"gradient_clip_val": 1.0}, ConflictError, "give it max_grad_norm=1.0"),
        (lambda: made(optimizer="SGD", momentum=0.9, nesterov=True), {}, RequestError, "SGD with nesterov=True"),
        (lambda: made(amsgrad=True), {}, RequestError, "AdamW with amsgrad=True"),
        (lambda: made(lr=torch.tensor(0.01)), {}, RequestError, "AdamW has a tensor as lr, .* pass a float"),
        (lambda: made(optimizer="RMSprop"), {"gradient_clip_val": 1.0}, ConflictError, "not possible with RMSprop"),
        (Regression, {"detect_anomaly": True}, ConflictError, "detect_anomaly=True cannot look"),
        (
            lambda: made(scheduled="step"),
            {"strategy": IPUStrategy(device_iterations=4)},
            ConflictError,
            "CosineAnnealingLR is stepped every 1 optimizer steps, and IPUStrategy takes 4",
        ),
        (Regression, {"strategy": IPUStrategy(device_iterations=4), "max_steps": 6}, ConflictError, "max_steps=6"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before(compiled, module, options, error, message):
    with pytest.raises(error, match=message):
        fit(module(), **options)
    assert compiled() == 0


class Strings(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.zeros(16), f"sample {index}"


def test_batches_of_other_things_than_tensors_are_refused(compiled):
    with pytest.raises(MisuseError, match="a value of the type str, which would be the same in every call"):
        fit(made(), torch.utils.data.DataLoader(Strings(), batch_size=4))
    assert compiled() == 0


def test_batches_of_several_shapes_are_refused_with_advice():
    def collate(samples):
        inputs, targets = map(torch.stack, zip(*samples, strict=True))
        collate.calls += 1
        return torch.cat([inputs] * collate.calls, 1)[:, : 16 * collate.calls], targets

    collate.calls = 0

    class Cutting(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch[0][:, :16], batch[1]), batch_idx)

    loader = torch.utils.data.DataLoader(data().dataset, batch_size=8, collate_fn=collate)
    with pytest.raises(MisuseError, match="graphs are static, so pad samples to one size in collate_fn"):
        fit(Cutting(), loader)


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            lambda x, y: {"x": x, "y": y},
            lambda x, y: {"y": y, "x": x},
            r"dict\(y: Tensor, x: Tensor\), and the step was compiled for dict\(x: Tensor, y: Tensor\)",
        ),
        (Pair, lambda x, y: {"x": x, "y": y}, r"dict\(.*compiled for Pair\("),
        (lambda x, y: [x, {"y": y}], lambda x, y: [x, [y]], r"list\(Tensor, list\(Tensor\)\)"),
    ],
    ids=["order", "type", "nested"],
)
def test_batches_of_several_structures_are_refused(first, second, message):
    """They have the same shapes, so that inputs and targets would swap."""
    calls = iter([first, second])

    def collate(samples):
        return next(calls)(torch.zeros(4, 16), torch.ones(4, 16))

    class Anything(Regression):
        def training_step(self, batch, batch_idx):
            return self.net(torch.zeros(4, 16)).mean()

    loader = torch.utils.data.DataLoader(data(8).dataset, batch_size=4, collate_fn=collate)
    with pytest.raises(MisuseError, match=message):
        fit(Anything(), loader)


class Stream:
    def __iter__(self):
        return iter([(torch.zeros(4, 16), torch.zeros(4, 1))])


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (Stream, "is a Stream, whose batches cannot be joined for calls that consume 2"),
        (lambda: data(12, batch_size=8), "has 12 samples, and one call consumes 16"),
        (lambda: torch.utils.data.DataLoader(data().dataset, batch_size=None), "without a batch size"),
    ],
)
def test_loaders_that_cannot_fill_a_call_are_refused(compiled, loader, message):
    with pytest.raises((RequestError, MisuseError), match=message):
        fit(made(), loader(), devices=2)
    assert compiled() == 0


@pytest.mark.parametrize("returned", [None, {"prediction": 1}, torch.zeros(2)])
def test_a_step_without_a_loss_is_refused(returned):
    class Without(Regression):
        def training_step(self, batch, batch_idx):
            return returned

    with pytest.raises(MisuseError, match="as its loss, and a compiled step needs one number"):
        fit(Without())


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_logged_numbers_are_refused_with_the_hook(step):
    class Frozen(Regression):
        pass

    def log_epoch(self, batch, batch_idx):
        self.log("epoch", self.current_epoch)
        return getattr(Regression, step)(self, batch, batch_idx)

    setattr(Frozen, step, log_epoch)
    hook = "on_train_batch" if step == "training_step" else "on_validation_batch"
    with pytest.raises(MisuseError, match=rf"log\('epoch'\) got 0 within {step}.*log it in {hook}_start or {hook}_end"):
        fit(Frozen(), val=data(16))


def test_a_second_loss_is_refused_with_advice():
    class Second(Regression):
        def training_step(self, batch, batch_idx):
            self.log("l1", torch.nn.functional.l1_loss(self.net(batch[0]), batch[1]))
            return super().training_step(batch, batch_idx)

    with pytest.raises(MisuseError, match=r"log such a value from plain operations, as \(a - b\)\.abs\(\)\.mean\(\)"):
        fit(Second(), data(16))


def test_metric_objects_are_refused_with_the_way_out():
    class Measuring(Regression):
        def training_step(self, batch, batch_idx):
            self.log("seen", object())
            return super().training_step(batch, batch_idx)

    with pytest.raises(MisuseError, match="update and log it in the hook at the end of the batch"):
        fit(Measuring())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device_iterations": 0}, RequestError, "device_iterations=0 must be an int of at least 1"),
        ({"autoreport_dir": "x"}, ConflictError, "autoreport_dir='x' needs autoreport=True"),
    ],
)
def test_arguments_are_checked(arguments, error, message):
    with pytest.raises(error, match=message):
        IPUStrategy(**arguments)


@pytest.mark.parametrize("text", ["{autoReport", "[1]"])
def test_engine_options_that_are_no_json_object_are_named(monkeypatch, compiled, text):
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", text)
    with pytest.raises(RequestError, match=r"POPLAR_ENGINE_OPTIONS=.* is no JSON object"):
        fit(strategy=IPUStrategy(autoreport=True))
    assert compiled() == 0


def test_samplers_without_a_length_are_refused(compiled):
    class Endless(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(range(16))

    loader = torch.utils.data.DataLoader(data().dataset, batch_size=8, sampler=Endless())
    with pytest.raises(RequestError, match="sampler of the training loader, a Endless, has no length"):
        fit(made(), loader)
    assert compiled() == 0


def test_options_that_contradict_the_trainer_are_refused(simulator, compiled):
    options = simulator.Options()
    options.Training.gradientAccumulation(4)
    with pytest.raises(ConflictError, match=r"gradientAccumulation\(4\).*pass accumulate_grad_batches=4"):
        fit(strategy=IPUStrategy(training_opts=options))
    with pytest.raises(ConflictError, match=r"device_iterations=3 and deviceIterations\(2\)"):
        fit(strategy=IPUStrategy(device_iterations=3, training_opts=simulator.Options().deviceIterations(2)))
    summed = simulator.Options().outputMode(simulator.OutputMode.Sum)
    with pytest.raises(RequestError, match=r"outputMode\(Sum\), which has no loss of a single batch"):
        fit(strategy=IPUStrategy(training_opts=summed))
    other = simulator.DataLoader(simulator.Options().replicationFactor(4), data().dataset, 4)
    with pytest.raises(ConflictError, match="give both the same options, or a torch DataLoader"):
        fit(made(), other, devices=2)
    assert compiled() == 0


@pytest.mark.parametrize("name", ["training_opts", "inference_opts"])
def test_more_replicas_than_devices_are_refused(simulator, compiled, name):
    options = simulator.Options().replicationFactor(8)
    with pytest.raises(ConflictError, match=rf"{name} has replicationFactor\(8\), and devices=4.*pass devices=8"):
        fit(strategy=IPUStrategy(**{name: options}), devices=4)
    assert compiled() == 0


def test_different_replication_of_evaluation_is_refused(simulator, compiled):
    both = [simulator.Options().replicationFactor(count) for count in (4, 2)]
    with pytest.raises(ConflictError, match=r"replicationFactor\(4\), and inference_opts replicationFactor\(2\)"):
        fit(strategy=IPUStrategy(training_opts=both[0], inference_opts=both[1]), devices=4)
    assert compiled() == 0


def test_idle_devices_are_logged(simulator, caplog):
    with caplog.at_level(logging.WARNING):
        fit(made(), data(16), strategy=IPUStrategy(training_opts=simulator.Options().replicationFactor(2)), devices=4)
    assert (
        "replicationFactor(2) with devices=4: a module that poptorch.Block or BeginBlock does not divide" in caplog.text
    )


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (16, "devices=16 is more than there are: at most 8 ipu devices"),
        (3, "is 3 IPUs, and poptorch reserves 1, 2, 4, 8"),
        ([2, 3], "poptorch chooses them itself: give their number, such as 2"),
    ],
)
def test_devices_that_cannot_be_had_are_refused(devices, message):
    with pytest.raises(DeviceError, match=message):
        make_trainer(devices=devices)


def test_devices_in_use_are_named(simulator):
    holder = simulator.inferenceModel(torch.nn.Linear(2, 1), simulator.Options().replicationFactor(8))
    holder(torch.zeros(8, 2))
    with pytest.raises(DeviceError, match=r"could not reserve its IPUs .* another program may use them"):
        fit(devices=8)
    holder.destroy()
    fit(devices=8)


def test_precisions_are_those_of_ipus():
    assert IPUPrecision("16-true").param_dtype == torch.float16
    with pytest.raises(RequestError, match="choose one of 32-true, 16-true"):
        IPUPrecision("bf16-mixed")
    with pytest.raises(dstrat.errors.DstratError, match="bf16-mixed"):
        make_trainer(precision="bf16-mixed")


def test_a_loop_of_ones_own_is_refused():
    loop = OwnLoop(dstrat.build(accelerator="ipu", devices=1))
    with pytest.raises(ConflictError, match="IPUStrategy runs whole optimizer steps here"):
        loop.launch(lambda loop: loop.setup(torch.nn.Linear(1, 1), lambda net: torch.optim.SGD(net.parameters(), 0.1)))


def test_no_ipu_has_a_reason(monkeypatch):
    monkeypatch.setenv("POPTORCH_SIMULATED_IPUS", "0")
    with pytest.raises(DeviceError, match="poptorch sees no IPU: see what gc-info -l lists"):
        make_trainer()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            None,
            "poptorch is not installed: dstrat needs torch 2.9 .* releases of poptorch load with torch 2.0.1 or older",
        ),
        ("assert False, 'only works with torch==2.0.1'", "cannot be loaded with torch .*only works with torch==2.0.1"),
        ("import popart_that_is_not_there", "poptorch cannot be imported .*popart_that_is_not_there"),
    ],
    ids=["missing", "another torch", "without libraries"],
)
def test_a_poptorch_that_cannot_be_loaded_is_a_reason(tmp_path, monkeypatch, text, reason):
    for name in [name for name in sys.modules if name.partition(".")[0] == "poptorch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if not p.endswith("simulator"))])
    if text is not None:
        (tmp_path / "poptorch.py").write_text(text)
    importlib.invalidate_caches()
    accelerator = IPUAccelerator()
    assert not accelerator.is_available()
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(accelerator.hint_unavailable())


@pytest.mark.slow
def test_listing_and_doctor_tell_of_the_simulator():
    shown = subprocess.run(
        [sys.executable, "-m", "dstrat", "show", "ipu_strategy"], capture_output=True, text=True, check=True
    ).stdout
    assert "one process for all IPUs" in shown
    explained = subprocess.run(
        [sys.executable, "-m", "dstrat", "explain", "--accelerator", "ipu", "--devices", "8"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "ipu_strategy" in explained
    assert "dstrat-ipu 0.1.0" in explained

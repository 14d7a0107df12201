"""What an own loop says to who uses it wrongly."""

from __future__ import annotations

import pytest
import torch
from tests.accelerators import ACCELERATOR
from tests.sharpness import Sam
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dstrat
from dstrat import OwnLoop
from dstrat.errors import CheckpointError, ConflictError, MisuseError, RequestError, UnknownAliasError
from dstrat.interfaces.strategy import CompiledSteps


@pytest.fixture
def loop():
    return OwnLoop(dstrat.build(strategy="single_device", accelerator=ACCELERATOR, devices=1))


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)


def two(net):
    return [torch.optim.SGD([parameter], lr=0.1) for parameter in net.parameters()]


def refuse(loop, error, match, function):
    """Check what a launched function raises, and that the loop can be launched again."""
    with pytest.raises(error, match=match):
        loop.launch(function)
    assert loop.launch(lambda loop: "works") == "works"


def test_an_unknown_alias_is_named_when_the_strategy_is_built():
    with pytest.raises(UnknownAliasError, match="'singel_device' is not known: did you mean 'single_device'"):
        dstrat.build(strategy="singel_device")


def test_plugins_are_none_one_or_several():
    for plugins in (None, (), [], "torch", ["torch"]):
        strategy = dstrat.build(strategy="single_device", accelerator=ACCELERATOR, devices=1, plugins=plugins)
        assert strategy.checkpoint_io.__class__.__name__.startswith("Torch" if plugins else "Portable")


def test_an_alias_in_place_of_a_strategy_is_refused_with_the_way_out():
    with pytest.raises(MisuseError, match=r"OwnLoop\(dstrat.build\(strategy='ddp'\)\)"):
        OwnLoop("ddp")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("setup", (nn.Linear(1, 1),)),
        ("training_loader", ([1],)),
        ("evaluation_loader", ([1],)),
        ("compute", (abs, 1)),
        ("backward", (torch.ones(()),)),
        ("step", ()),
        ("save_checkpoint", ("x",)),
        ("load_checkpoint", ("x",)),
    ],
)
def test_what_belongs_into_the_processes_of_the_job_is_refused_outside(loop, name, arguments):
    with pytest.raises(MisuseError, match=f"{name} works in each process of the job"):
        getattr(loop, name)(*arguments)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("compute", (abs, 1)), ("backward", (torch.ones(()),)), ("step", ()), ("save_checkpoint", ("x",))],
)
def test_what_needs_a_module_is_refused_before_setup(loop, name, arguments):
    refuse(loop, MisuseError, f"{name} was called before setup", lambda loop: getattr(loop, name)(*arguments))


def test_an_optimizer_in_place_of_a_function_is_refused(loop):
    net = nn.Linear(1, 1)
    refuse(loop, MisuseError, "setup needs a function, not a SGD", lambda loop: loop.setup(net, sgd(net)))


def test_a_second_setup_is_refused(loop):
    def twice(loop):
        for _ in range(2):
            loop.setup(nn.Linear(1, 1), sgd)

    refuse(loop, MisuseError, "setup was called twice", twice)


def test_a_launch_within_a_launch_is_refused(loop):
    refuse(loop, MisuseError, "in a function that is launched already", lambda loop: loop.launch(print))


def test_a_step_without_gradients_is_refused(loop):
    def step(loop):
        loop.setup(nn.Linear(1, 1), sgd)
        loop.step()

    refuse(loop, MisuseError, r"call loop.backward\(loss\) before", step)


def test_one_of_several_optimizers_steps_once_for_a_loss(loop):
    def step(loop):
        net = nn.Linear(1, 1)
        loop.setup(net, two)
        loop.backward(loop.compute(net, torch.ones(1, device=loop.device)).sum())
        loop.step(loop.optimizers[0])
        loop.step(loop.optimizers[0])

    refuse(loop, MisuseError, "step was called without gradients", step)


def test_a_training_step_without_optimizers_is_refused(loop):
    def compute(loop):
        net = nn.Linear(1, 1)
        loop.setup(net)
        loop.compute(net, torch.ones(1, device=loop.device))

    refuse(loop, MisuseError, "setup got no optimizers", compute)


def test_one_of_several_optimizers_has_to_be_named(loop):
    def step(loop, optimizer=None):
        net = nn.Linear(1, 1)
        loop.setup(net, two)
        loop.backward(loop.compute(net, torch.ones(1, device=loop.device)).sum())
        loop.step(optimizer)

    refuse(loop, MisuseError, "step got no optimizer: pass one of the 2", step)
    other = sgd(nn.Linear(1, 1))
    refuse(loop, MisuseError, "a SGD that setup did not make", lambda loop: step(loop, other))


def test_lbfgs_is_stepped_with_a_closure(loop):
    def step(loop):
        net = nn.Linear(1, 1)
        loop.setup(net, lambda net: torch.optim.LBFGS(net.parameters()))
        loop.backward(loop.compute(net, torch.ones(1, device=loop.device)).sum())
        loop.step()

    refuse(loop, MisuseError, r"call loop.step\(closure=closure\)", step)


@pytest.mark.parametrize("clears", [True, False])
def test_an_optimizer_that_needs_another_gradient_is_stepped_with_a_closure(loop, clears):
    class Climbing(Sam):
        def zero_grad(self):
            if clears:
                super().zero_grad()

    def step(loop):
        net = nn.Linear(1, 1)
        loop.setup(net, lambda net: Climbing(net.parameters(), lr=0.1))
        loop.backward(loop.compute(net, torch.ones(1, device=loop.device)).sum())
        loop.step()

    refuse(loop, MisuseError, r"^Climbing computes another loss .*: call loop.step\(closure", step)


def test_a_closure_of_a_step_calls_backward_each_time(loop):
    def step(loop):
        net = nn.Linear(1, 1)
        loop.setup(net, sgd)
        loss = loop.compute(net, torch.ones(1, device=loop.device)).sum()
        loop.backward(loss)
        loop.step(closure=lambda: loss)

    refuse(loop, MisuseError, "the closure of a step left no gradients", step)


def test_a_closure_computes_no_accumulated_batches(loop):
    def step(loop):
        loop.setup(nn.Linear(1, 1), sgd, accumulate_grad_batches=2)
        loop.step(closure=lambda: None)

    refuse(loop, ConflictError, "step got a closure", step)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"accumulate_grad_batches": 0}, RequestError, "accumulate_grad_batches=0 must be an int of at least 1"),
        ({"accumulate_grad_batches": 1.5}, RequestError, "accumulate_grad_batches=1.5 must be an int of at least 1"),
        ({"gradient_clip_val": -1.0}, RequestError, "gradient_clip_val=-1.0 must be a positive number, or None or 0"),
        ({"gradient_clip_algorithm": "Norm"}, RequestError, "'Norm' must be 'norm' or 'value'"),
        ({"accumulate_grad_batches": 2, "make_optimizers": two}, ConflictError, "there are 2: leave it out"),
    ],
)
def test_options_that_cannot_work_are_refused_at_setup(loop, options, error, match):
    options = {"make_optimizers": sgd} | options
    refuse(loop, error, match, lambda loop: loop.setup(nn.Linear(1, 1), **options))


def test_gradients_that_wait_for_a_step_are_not_left_out_of_a_checkpoint_silently(loop, tmp_path):
    def save(loop):
        net = nn.Linear(1, 1)
        loop.setup(net, sgd, accumulate_grad_batches=2)
        loop.backward(loop.compute(net, torch.ones(1, device=loop.device)).sum())
        assert not loop.step()
        loop.save_checkpoint(tmp_path / "saved")

    refuse(loop, MisuseError, "of 1 of accumulate_grad_batches=2 batches wait", save)


def test_so_are_those_of_a_single_batch(loop, tmp_path):
    def save(loop):
        net = nn.Linear(1, 1)
        loop.setup(net, sgd)
        loop.backward(loop.compute(net, torch.ones(1, device=loop.device)).sum())
        loop.save_checkpoint(tmp_path / "saved")

    refuse(loop, MisuseError, "of 1 of accumulate_grad_batches=1 batches wait", save)


def test_a_checkpoint_of_other_loaders_or_optimizers_is_refused(loop, tmp_path):
    data = DataLoader(TensorDataset(torch.ones(4)))

    def save(loop):
        loop.setup(nn.Linear(1, 1), sgd)
        loop.training_loader(data)
        loop.save_checkpoint(tmp_path / "saved")

    def load_without_loader(loop):
        loop.setup(nn.Linear(1, 1), sgd)
        loop.load_checkpoint(tmp_path / "saved")

    def load_with_two(loop):
        loop.setup(nn.Linear(1, 1), two)
        loop.load_checkpoint(tmp_path / "saved")

    loop.launch(save)
    refuse(loop, CheckpointError, "has 1 training loaders, and this training has 0", load_without_loader)
    refuse(loop, CheckpointError, "has 1 optimizers, and this training has 2", load_with_two)


def test_a_strategy_that_compiles_whole_steps_is_refused():
    class Whole(dstrat.SingleDeviceStrategy):
        def compiled_steps(self):
            return CompiledSteps()

    loop = OwnLoop(dstrat.build(strategy=Whole(), accelerator=ACCELERATOR, devices=1))
    refuse(
        loop,
        ConflictError,
        "runs whole optimizer steps here, so that a loop of one's own cannot call backward",
        lambda loop: loop.setup(nn.Linear(1, 1), sgd),
    )

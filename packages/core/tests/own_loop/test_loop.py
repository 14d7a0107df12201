"""What an own loop does on one device."""

from __future__ import annotations

import json

import pytest
import torch
from tests.accelerators import ACCELERATOR
from tests.sharpness import Sam
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dstrat
from dstrat import OwnLoop, SingleDeviceStrategy, Trainer, TrainModule
from dstrat.errors import CheckpointError, MisuseError


def make_loop(**options):
    return OwnLoop(dstrat.build(**{"strategy": "single_device", "accelerator": ACCELERATOR, "devices": 1} | options))


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.05)


def numbers(batch_size=4, **options):
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size, **options)


def line():
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def squares(net, x, y):
    return nn.functional.mse_loss(net(x), y)


def train(loop, steps=12, **options):
    """Train a line; return the losses of all batches."""
    net, losses = line(), []
    loop.setup(net, adam, **options)
    batches = loop.training_loader(numbers())
    while loop.steps_done < steps:
        for x, y in batches:
            loss = loop.compute(squares, net, x, y)
            loop.backward(loss)
            losses.append(loss.item())
            loop.step()
    return losses


def by_hand(accumulate=1, clip=None, steps=12):
    net, losses = line(), []
    optimizer = adam(net)
    loader = numbers(shuffle=False)
    while len(losses) < steps * accumulate:
        for x, y in loader:
            loss = squares(net, x, y)
            losses.append(loss.item())
            (loss / accumulate).backward()
            if len(losses) % accumulate == 0:
                if clip:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, 0.1), (1, 0.1), (1, 0)])
def test_the_losses_are_those_of_plain_torch_to_the_last_bit(accumulate, clip):
    losses = make_loop().launch(train, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    assert losses == by_hand(accumulate, clip)


def test_a_strategy_of_the_users_own_is_completed():
    assert OwnLoop(dstrat.build(strategy=SingleDeviceStrategy(device="cpu"))).launch(train) == by_hand()


class CallsTheModule(SingleDeviceStrategy):
    """Overrides a step as strategies for a Trainer may do."""

    def training_step(self, *args, **kwargs):
        return self.module.training_step(*args, **kwargs)


def test_a_strategy_that_calls_the_modules_step_is_told_what_to_call():
    strategy = dstrat.build(strategy=CallsTheModule(device="cpu"))
    with pytest.raises(MisuseError, match=r"calls self\.module\.training_step, and .* call super\(\)\.training_step"):
        OwnLoop(strategy).launch(train)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_steps_run_in_the_precision_that_was_asked_for(precision):
    seen = []

    def look(loop):
        net = nn.Linear(3, 1)
        loop.setup(net, adam)

        def loss(x):
            out = net(x)
            seen.append(out.dtype)
            return out.sum()

        for x, _ in loop.training_loader(numbers()):
            seen.append(x.dtype)
            loop.backward(loop.compute(loss, x))
            loop.step()
            break

    make_loop(precision=precision).launch(look)
    mixed = [torch.float32, torch.bfloat16]
    assert seen == (mixed if precision == "bf16-mixed" else [torch.float64] * 2)


def test_a_step_whose_gradients_are_not_finite_is_skipped_in_float16(caplog):
    def overflow(loop):
        net = line()
        loop.setup(net, adam)
        before = net.weight.clone()
        loop.backward(loop.compute(net, torch.ones(3, device=loop.device)).sum() * torch.inf)
        assert loop.step()
        return torch.equal(before, net.weight)

    assert make_loop(precision="16-mixed").launch(overflow)
    assert "step skipped" in caplog.text


def test_evaluation_has_no_gradients_and_leaves_the_modes_as_they_were():
    def evaluate(loop):
        net = nn.Sequential(nn.Linear(3, 1), nn.Dropout(1.0))
        net[0].eval()
        loop.setup(net, adam)
        with loop.evaluation():
            out = loop.compute(net, torch.ones(3, device=loop.device))
            assert out.abs().sum() > 0  # the dropout is off
            assert not out.requires_grad
        return [part.training for part in net]

    assert make_loop().launch(evaluate) == [False, True]


def test_a_loader_goes_on_where_a_loop_over_it_was_left():
    def read(loop):
        batches = loop.training_loader(numbers(shuffle=True))
        whole = [x for x, _ in batches]
        seen = []
        for _ in range(3):
            for x, _ in batches:
                seen.append(x)
                if len(seen) in (2, 4):
                    break
        assert batches.epoch == 2
        return whole, seen

    whole, seen = make_loop().launch(read)
    assert len(whole) == len(seen) == 6
    assert torch.equal(torch.cat(seen).sort(0).values, torch.cat(whole).sort(0).values)  # each sample once
    assert not torch.equal(torch.cat(seen), torch.cat(whole))  # another epoch has another order


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.variant)])
@pytest.mark.parametrize("save_at", [4, 6, 8])  # in an epoch of 6, at its end, in the next
def test_a_resumed_loop_goes_on_to_the_last_bit(tmp_path, save_at, num_workers):
    def with_dropout():
        torch.manual_seed(0)
        return nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))

    def run(loop, path, stop=12):
        torch.manual_seed(17 if path is None else 99)
        net = with_dropout()
        loop.setup(net, adam)
        batches = loop.training_loader(numbers(shuffle=True, num_workers=num_workers))
        losses = [] if path is None else loop.load_checkpoint(path)["losses"]
        while loop.steps_done < stop:
            for x, y in batches:
                loss = loop.compute(squares, net, x, y)
                loop.backward(loss)
                losses.append(loss.item())
                loop.step()
                if path is None and loop.steps_done == save_at:
                    loop.save_checkpoint(tmp_path / "saved", {"losses": losses})
        return losses, net

    losses, net = make_loop().launch(run, None)
    resumed, other = make_loop().launch(run, tmp_path / "saved")
    assert len(losses) == 12
    assert resumed == losses
    assert torch.equal(net[1].weight, other[1].weight)


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # which torchdata calls
def test_a_loader_that_knows_its_place_goes_on_there(tmp_path):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    saves = {3: tmp_path / "within", 6: tmp_path / "end", 8: tmp_path / "next"}

    def read(loop, path):
        torch.manual_seed(17 if path is None else 99)
        loop.setup(line(), adam)
        x = torch.arange(24.0)
        loader = torchdata.StatefulDataLoader(TensorDataset(x), batch_size=4, shuffle=True, num_workers=1)
        batches = loop.training_loader(loader)
        seen = [] if path is None else loop.load_checkpoint(path)["seen"]
        while batches.epoch < 2:
            for (part,) in batches:
                seen.append(part.tolist())
                if path is None and len(seen) in saves:
                    loop.save_checkpoint(saves[len(seen)], {"seen": seen})
                if len(seen) % 5 == 0:
                    break  # which another loop over it goes on from
        return seen

    seen = make_loop().launch(read, None)
    for epoch in (seen[:6], seen[6:]):
        assert sorted(number for batch in epoch for number in batch) == list(range(24))
    for path in saves.values():
        assert make_loop().launch(read, path) == seen


def test_gradients_of_before_a_checkpoint_was_loaded_are_not_in_the_next_step(tmp_path):
    def run(loop, *, interrupts):
        net = line()
        loop.setup(net, lambda net: torch.optim.SGD(net.parameters(), lr=0.1), accumulate_grad_batches=3)
        loop.save_checkpoint(tmp_path / f"{interrupts}")

        def batch(scale):
            loop.backward(loop.compute(net, scale * torch.ones(3, device=loop.device)).sum())

        if interrupts:
            batch(100.0)
            assert not loop.step()
            batch(100.0)
            loop.load_checkpoint(tmp_path / f"{interrupts}")
        steps = []
        for _ in range(3):
            batch(1.0)
            steps.append(loop.step())
        return steps, net.weight.detach()

    steps, weight = make_loop().launch(run, interrupts=True)
    assert steps == [False, False, True]
    assert torch.equal(weight, make_loop().launch(run, interrupts=False)[1])


def test_a_loop_that_steps_by_closures_can_be_saved(tmp_path):
    def run(loop):
        net = line()
        loop.setup(net, lambda net: torch.optim.LBFGS(net.parameters(), max_iter=2))

        def closure():
            loop.optimizers[0].zero_grad()
            loss = loop.compute(squares, net, torch.ones(3, device=loop.device), torch.ones(1, device=loop.device))
            loop.backward(loss)
            return loss

        loop.step(closure=closure)
        loop.strategy.optimizer_step(loop.optimizers[0], closure)
        assert loop.steps_done == 1
        loop.save_checkpoint(tmp_path / "saved")
        return loop.load_checkpoint(tmp_path / "saved")

    assert make_loop().launch(run) == {}


@pytest.mark.parametrize(("strategy", "devices"), [("single_device", 1), ("ddp_fork", 2)])
def test_sharpness_aware_steps_are_those_of_a_plain_loop(strategy, devices):
    batches = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))

    def sharp(net):
        return Sam(net.parameters(), lr=0.1, momentum=0.9)

    def run(loop):
        net, losses = line(), []
        loop.setup(net, sharp, gradient_clip_val=0.5)

        def closure():
            loop.optimizers[0].zero_grad()
            loss = loop.compute(lambda: net(batch).square().mean())
            loop.backward(loss)
            return loss

        for whole in batches:
            batch = whole.chunk(loop.world_size)[loop.global_rank]
            loss = closure()
            assert loop.step(closure=closure)
            losses.append(loop.all_reduce(loss.detach()).item())
        return losses

    net, expected = line(), []
    optimizer = sharp(net)

    def closure():
        net(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)

    for batch in batches:
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step(closure)
        expected.append(loss.item())
    built = dstrat.build(strategy=strategy, accelerator=ACCELERATOR, devices=devices)
    assert dstrat.OwnLoop(built).launch(run) == pytest.approx(expected, rel=1e-6)


def test_as_many_processes_go_on_after_as_many_batches_also_where_there_is_more_data(tmp_path):
    def run(loop, path, count):
        loop.setup(line(), adam)
        batches = loop.training_loader(DataLoader(range(count), batch_size=4))
        if path is not None:
            loop.load_checkpoint(path)
        for _ in batches:
            if path is not None:
                return batches.batches_done
            if batches.batches_done == 3:
                return loop.save_checkpoint(tmp_path / "saved")
        return None

    make_loop().launch(run, None, 24)
    assert make_loop().launch(run, tmp_path / "saved", 48) == 4


def test_an_epoch_has_as_many_batches_as_its_sampler_says():
    class Growing:
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 2 + self.epoch

        def __iter__(self):
            return iter(range(len(self)))

    def read(loop):
        batches = loop.training_loader(DataLoader(range(9), sampler=Growing()))
        return [len(list(batches)) for _ in range(3)]

    assert make_loop().launch(read) == [2, 3, 4]


def test_schedulers_that_are_made_with_the_optimizers_are_saved(tmp_path):
    def make(net):
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def run(loop, path=None):
        net = line()
        loop.setup(net, make)
        if path:
            loop.load_checkpoint(path)
        loop.backward(loop.compute(net, torch.ones(3, device=loop.device)).sum())
        loop.step()
        loop.schedulers[0].step()
        if path is None:
            loop.save_checkpoint(tmp_path / "saved")
        return loop.optimizers[0].param_groups[0]["lr"]

    assert make_loop().launch(run) == 0.5
    assert make_loop().launch(run, tmp_path / "saved") == 0.25


@pytest.mark.parametrize(("cls", "name"), [(SingleDeviceStrategy, "single_device"), (None, "Mine")])
def test_a_checkpoint_says_which_strategy_saved_it(tmp_path, cls, name):
    def save(loop):
        loop.setup(line(), adam)
        loop.save_checkpoint(tmp_path / "saved")

    strategy = cls or type("Mine", (SingleDeviceStrategy,), {})
    OwnLoop(dstrat.build(strategy=strategy(device="cpu"))).launch(save)
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())["manifest"]
    assert manifest["strategy"] == name


def test_a_trainer_says_that_it_cannot_continue_an_own_loop(tmp_path):
    class Line(TrainModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def training_step(self, batch):
            return squares(self.layer, *batch)

        def configure_optimizers(self):
            return adam(self)

    def save(loop):
        loop.setup(Line(), adam)
        loop.save_checkpoint(tmp_path / "saved")

    make_loop().launch(save)
    trainer = Trainer(
        accelerator=ACCELERATOR, logger=False, default_root_dir=tmp_path, enable_progress_bar=False, devices=1
    )
    with pytest.raises(CheckpointError, match=r"saved by OwnLoop.save_checkpoint, and a Trainer cannot continue"):
        trainer.fit(Line(), numbers(), ckpt_path=tmp_path / "saved")


def test_weights_alone_are_loaded_for_evaluation(tmp_path):
    def save(loop):
        net = line()
        loop.setup(net, adam)
        loop.save_checkpoint(tmp_path / "saved", {"name": "first"})

    def load(loop):
        net = nn.Linear(3, 1)
        loop.setup(net)
        return loop.load_checkpoint(tmp_path / "saved"), net

    make_loop().launch(save)
    state, net = make_loop().launch(load)
    assert state == {"name": "first"}
    assert torch.equal(net.weight, line().weight)


def test_a_new_checkpoint_gets_the_path_and_an_older_one_another(tmp_path):
    def save(loop):
        loop.setup(line(), adam)
        loop.save_checkpoint(tmp_path / "saved", {"number": 2})
        loop.save_checkpoint(tmp_path / "saved", {"number": 3})
        return loop.load_checkpoint(tmp_path / "saved"), loop.load_checkpoint(tmp_path / "saved-v1")

    def save_earlier(loop):
        loop.setup(line(), adam)
        loop.save_checkpoint(tmp_path / "saved", {"number": 1})

    make_loop().launch(save_earlier)
    assert make_loop().launch(save) == ({"number": 3}, {"number": 1})
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved", "saved-v1"]


def test_two_optimizers_are_stepped_one_by_one():
    def both(loop):
        net = line()
        loop.setup(net, lambda net: [torch.optim.SGD([parameter], lr=1.0) for parameter in net.parameters()])
        loop.backward(loop.compute(net, torch.ones(3, device=loop.device)).sum())
        assert loop.step(loop.optimizers[0])
        changed = not torch.equal(net.weight.cpu(), line().weight), not torch.equal(net.bias.cpu(), line().bias)
        assert loop.step(loop.optimizers[1])
        return changed, not torch.equal(net.bias.cpu(), line().bias)

    assert make_loop().launch(both) == ((True, False), True)


class Rivals(nn.Module):
    """Two layers, each of which has a loss that the other takes part in, as those of a GAN."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def loss(self, sign):
        return sign * self.second(self.first(torch.ones(3, device=self.first.weight.device)).tanh()).tanh().sum()

    def optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=0.5) for layer in (self.first, self.second)]


def test_gradients_that_another_optimizer_has_not_used_are_not_in_its_next_step():
    def train(loop):
        net = Rivals()
        loop.setup(net, Rivals.optimizers)
        for _ in range(3):
            for optimizer, sign in zip(loop.optimizers, (1, -1), strict=True):
                loop.backward(loop.compute(net.loss, sign))
                assert loop.step(optimizer)
        return net.cpu().state_dict()

    net = Rivals()
    optimizers = net.optimizers()
    for _ in range(3):
        for optimizer, sign in zip(optimizers, (1, -1), strict=True):
            net.zero_grad()
            net.loss(sign).backward()
            optimizer.step()
    torch.testing.assert_close(make_loop().launch(train), net.state_dict(), rtol=0, atol=0)


def test_a_module_of_the_trainer_keeps_its_own_steps():
    class Own(TrainModule):
        def training_step(self, batch):
            return "own"

    def run(loop, module):
        module.layer = nn.Linear(3, 1)
        loop.setup(module, adam)
        loop.backward(loop.compute(lambda: module.layer(torch.ones(3, device=loop.device)).sum()))
        loop.step()
        return module.training_step(None)

    module = Own()
    assert make_loop().launch(run, module) == module.training_step(None) == "own"


@pytest.mark.parametrize("method", ["training_step", "run_step"])
def test_a_strategy_that_overrides_a_step_runs_the_functions(method):
    calls = []

    class Custom(SingleDeviceStrategy):
        pass

    def override(self, *args, **kwargs):
        calls.append(len(args))
        return getattr(SingleDeviceStrategy, method)(self, *args, **kwargs)

    setattr(Custom, method, override)

    def run(loop):
        net = line()
        loop.setup(net, adam)
        loss = loop.compute(squares, net, torch.ones(1, 3, device=loop.device), y=torch.ones(1, 1, device=loop.device))
        loop.backward(loss)
        assert loop.step()
        with loop.evaluation():
            return (
                loop.compute(
                    squares, net, torch.ones(1, 3, device=loop.device), torch.ones(1, 1, device=loop.device)
                ).item()
                < loss.item()
            )

    assert make_loop(strategy=Custom()).launch(run)
    assert calls == {"training_step": [3], "run_step": [5, 6]}[method]


def test_arguments_of_a_function_have_any_names():
    def run(loop):
        loop.setup(line(), adam)
        return loop.compute(lambda **options: options, step=1, name="two")

    assert make_loop().launch(run) == {"step": 1, "name": "two"}


def test_what_a_launched_function_raises_comes_out_and_the_strategy_is_torn_down():
    def broken(loop):
        loop.setup(line(), adam)
        raise ZeroDivisionError("mine")

    loop = make_loop()
    with pytest.raises(ZeroDivisionError, match="mine"):
        loop.launch(broken)
    assert loop.optimizers == []

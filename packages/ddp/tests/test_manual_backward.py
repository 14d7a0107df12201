"""Training steps that run backward by themselves."""

import re

import pytest
import torch
from tests.accelerators import ACCELERATOR, START_METHOD
from tests.hand_loop import Net, batches, parts, share, start
from tests.ranks import each, in_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dstrat
from dstrat import OwnLoop, Trainer, TrainModule
from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import ConflictError
from dstrat_ddp import DDPStrategy


class TwoLosses(Net):
    """Two optimizers, each with a loss of its own part, stepped inside the training step."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(6, 3)
        self.first = torch.optim.SGD(self.layers.parameters(), lr=0.1)
        self.second = torch.optim.SGD(self.other.parameters(), lr=0.1)
        self.strategy = None
        self.accumulate = False

    def configure_optimizers(self):
        return self.first

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        losses = []
        for part, optimizer in ((self.layers, self.first), (self.other, self.second)):
            loss = nn.functional.mse_loss(part(inputs), targets)
            if self.accumulate and batch_idx % 2 == 0:
                with self.strategy.no_backward_sync():
                    self.strategy.backward(loss)
            else:
                self.strategy.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        self.seen += 1 + self.strategy.global_rank
        return torch.stack(losses)


def manual_losses(strategy, given, accumulate):
    module = TwoLosses()
    start(strategy, module, given)
    module.strategy, module.accumulate = strategy, accumulate
    losses = []
    for index, batch in enumerate(batches()):
        own = strategy.batch_to_device(share(strategy, batch))
        losses += strategy.reduce(strategy.training_step(own, index)).tolist()
    buffers = float(module.seen)
    module.strategy = None
    strategy.teardown()
    return losses, buffers


def ddp_losses(cluster, accumulate, **options):
    return manual_losses(DDPStrategy(find_unused_parameters=True), parts(cluster), accumulate)


@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_are_those_of_one_device(world_size):
    cases = {accumulate: {"accumulate": accumulate} for accumulate in (False, True)}
    expected = {name: manual_losses(SingleDeviceStrategy(), parts(), **case) for name, case in cases.items()}
    for rank, found in enumerate(in_ranks(each, world_size, function=ddp_losses, cases=cases)):
        for accumulate, (losses, seen) in found.items():
            assert losses == pytest.approx(expected[accumulate][0], rel=1e-6)
            assert seen == expected[accumulate][1] + rank  # a step begins with the buffers of rank 0


def refused_static_graph(cluster):
    strategy = DDPStrategy(static_graph=True)
    with pytest.raises(ConflictError, match=re.escape("manual optimization, which runs them within the step")):
        manual_losses(strategy, parts(cluster), accumulate=False)
    strategy.barrier()
    strategy.teardown()


def test_a_static_graph_is_refused():
    in_ranks(refused_static_graph)


class TwoOptimizers(TrainModule):
    """Steps the optimizers of two layers in turn, each in every second batch, with local gradients in between."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def training_step(self, batch, batch_idx):
        for optimizer, part in zip(self.optimizers(), (self.first, self.second), strict=True):
            accumulates = batch_idx % 2 == 0
            with optimizer.toggle_model(sync_grad=not accumulates):
                self.manual_backward(nn.functional.mse_loss(part(batch[0]), batch[1]) / 2)
                if not accumulates:
                    optimizer.step()
                    optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.first, self.second)]


def trained(tmp_path, strategy, devices, batch_size):
    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :3] * 2)
    module = TwoOptimizers()
    trainer = Trainer(
        accelerator=ACCELERATOR,
        strategy=strategy,
        devices=devices,
        max_epochs=2,
        barebones=True,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, DataLoader(data, batch_size=batch_size))
    assert trainer.global_step == 8
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_two_optimizers_of_a_module_train_as_on_one_device(tmp_path):
    one = trained(tmp_path, "single_device", 1, batch_size=8)
    two = trained(tmp_path, DDPStrategy(start_method=START_METHOD, find_unused_parameters=True), 2, batch_size=4)
    torch.testing.assert_close(two, one)


# Backward passes that follow no step of their own


class Heads(nn.Module):
    """Two outputs of shared layers; a loss is a method of its own, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, inputs):
        return self.layers(inputs)

    def loss(self, inputs):
        return self.layers(inputs).square().mean()


def method_of_the_module(loop, net, inputs):
    loop.backward(net.loss(inputs))


def two_losses_of_a_step(loop, net, inputs):
    outputs = loop.compute(net, inputs)
    loop.strategy.backward(outputs[:, 0].square().mean(), retain_graph=True)
    loop.backward(outputs[:, 1].square().mean())


def two_steps_before(loop, net, inputs):
    first, second = (loop.compute(net, half).square().mean() for half in inputs.chunk(2))
    loop.backward(first)
    loop.backward(second)


def losses_of(loop, name):
    net, losses = Heads(), []
    loop.setup(net, lambda net: torch.optim.SGD(net.parameters(), lr=0.5))
    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    for (batch,) in loop.training_loader(DataLoader(TensorDataset(inputs), batch_size=8 // loop.world_size)):
        globals()[name](loop, net, batch)
        loop.step()
        with torch.no_grad():
            losses.append(float(net.loss(loop.strategy.batch_to_device(inputs))))  # of the weights of this rank
    return losses


def losses_of_two_modules(loop, name):
    torch.manual_seed(0)
    generator, critic, losses = nn.Linear(6, 6), nn.Linear(6, 2), []
    loop.setup([generator, critic], lambda *both: torch.optim.SGD(nn.ModuleList(both).parameters(), lr=0.5))
    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    for (batch,) in loop.training_loader(DataLoader(TensorDataset(inputs), batch_size=8 // loop.world_size)):
        if name == "no step":
            loop.backward(critic(generator(batch)).square().mean())
        elif name == "two losses of a step":
            outputs = loop.compute(critic, loop.compute(generator, batch))
            loop.strategy.backward(outputs[:, 0].square().mean(), retain_graph=True)
            loop.backward(outputs[:, 1].square().mean())
        else:
            first, second = (loop.compute(critic, loop.compute(generator, half)) for half in batch.chunk(2))
            loop.backward(first.square().mean())
            loop.backward(second.square().mean())
        loop.step()
        with torch.no_grad():
            losses.append(float(critic(generator(loop.strategy.batch_to_device(inputs))).square().mean()))
    return losses


def launched_losses(cluster, function, name, **options):
    strategy = dstrat.build(
        strategy=DDPStrategy(**options), accelerator=ACCELERATOR, devices=cluster.world_size, plugins=[cluster]
    )
    return OwnLoop(strategy).launch(function, name)


def test_gradients_of_each_backward_pass_are_averaged():
    names = ("method_of_the_module", "two_losses_of_a_step", "two_steps_before")
    one_device = dstrat.build(strategy="single_device", accelerator=ACCELERATOR, devices=1)
    expected = {name: OwnLoop(one_device).launch(losses_of, name) for name in names}
    cases = {name: {"function": losses_of, "name": name} for name in names}
    for found in in_ranks(each, function=launched_losses, cases=cases):
        for name in names:
            assert found[name] == pytest.approx(expected[name], rel=1e-6), name


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_gradients_of_each_backward_pass_of_several_modules_are_averaged(options):
    names = ("no step", "two losses of a step", "two steps before")
    one_device = dstrat.build(strategy="single_device", accelerator=ACCELERATOR, devices=1)
    expected = {name: OwnLoop(one_device).launch(losses_of_two_modules, name) for name in names}
    cases = {name: {"function": losses_of_two_modules, "name": name, **options} for name in names}
    for found in in_ranks(each, function=launched_losses, cases=cases):
        for name in names:
            assert found[name] == pytest.approx(expected[name], rel=1e-6), name


def refused_second_pass(cluster):
    with pytest.raises(ConflictError, match="static_graph=True needs one backward pass after each training step"):
        launched_losses(cluster, losses_of_two_modules, "two losses of a step", static_graph=True)


def test_a_second_pass_of_several_modules_with_a_static_graph_is_refused():
    in_ranks(refused_second_pass)

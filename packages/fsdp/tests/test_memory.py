"""How much a rank holds: while a module is made and sharded, and while it trains."""

import gc

import pytest
import torch
from tests.hand_loop import Block, BlockNet, Run, parts, start
from tests.ranks import each, in_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.builtin.precision.true import TruePrecision
from dstrat.cli.estimate.fake_step import TrainingSetup, measure_training
from dstrat.interfaces.batch import tensors_in
from dstrat_fsdp import FSDPStrategy


class Wide(BlockNet):
    """Eight blocks, each of 99 % of an eighth of the parameters."""

    def __init__(self):
        nn.Module.__init__(self)
        self.first = nn.Linear(6, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(8))
        self.last = nn.Linear(64, 3)


def set_up(strategy, cluster):
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    with strategy.model_sharded_context():
        module = Wide()
    strategy.connect(module)
    strategy.setup(Run(module))
    return module


def live_numbers():
    """Number of values of all tensors that are alive, storages counted once; those of shards are small."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance would wake torch's deprecated names
        if issubclass(kind, torch.Tensor) and not issubclass(kind, DTensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes() // 4
    return sum(found.values())


def forget_older_tensors():
    gc.collect()
    gc.freeze()


def most_while_building(cluster):
    most = 0
    forget_older_tensors()

    class Watching(nn.Linear):
        def reset_parameters(self):
            nonlocal most
            super().reset_parameters()
            if not self.weight.is_meta:
                most = max(most, live_numbers())

    plain = nn.Linear
    nn.Linear = Watching
    try:
        strategy = FSDPStrategy()
        module = set_up(strategy, cluster)
    finally:
        nn.Linear = plain
    numel = sum(parameter.numel() for parameter in module.parameters())
    block = sum(parameter.numel() for parameter in module.blocks[0].parameters())
    after = live_numbers()
    strategy.teardown()
    return most, after, numel, block


def test_a_rank_never_holds_more_than_its_shard_and_one_block():
    for most, after, numel, block in in_ranks(most_while_building, 4):
        assert 0 < most <= 1.05 * numel / 4 + block
        assert after <= 1.05 * numel / 4


def after_steps(cluster, options):
    forget_older_tensors()
    strategy = FSDPStrategy(**options)
    module = set_up(strategy, cluster)
    [optimizer] = strategy.optimizers
    inputs = torch.randn(4, 6)
    for index in range(2):
        optimizer.zero_grad()
        strategy.backward(strategy.training_step((inputs, inputs[:, :3]), index))
        strategy.optimizer_step(optimizer, lambda: None)
    held = live_numbers()
    numel = sum(parameter.numel() for parameter in module.parameters())
    strategy.teardown()
    return held, 4 * numel  # parameters, gradients, and two numbers of the optimizer


SHARDS = {
    2: {"plain": ({}, 2), "offloaded": ({"cpu_offload": True}, 2)},
    4: {"plain": ({}, 4), "two replicas": ({"device_mesh": (2, 2)}, 2)},
}


@pytest.mark.parametrize("world_size", SHARDS)
def test_a_rank_that_trains_holds_its_share_of_parameters_gradients_and_optimizer_state(world_size):
    cases = {name: {"options": options} for name, (options, _) in SHARDS[world_size].items()}
    for found in in_ranks(each, world_size, function=after_steps, cases=cases):
        for name, (held, whole) in found.items():
            shards = SHARDS[world_size][name][1]
            assert 0.95 * whole / shards < held <= 1.05 * whole / shards, name


def held_while_accumulating(cluster):
    strategy = FSDPStrategy()
    set_up(strategy, cluster)
    inputs = torch.randn(4, 6)
    with strategy.no_backward_sync():
        strategy.backward(strategy.training_step((inputs, inputs[:, :3]), 0))
    held = sum(gradient.numel() for gradient in tensors_in(strategy.rank_state()["gradients"]))
    strategy.teardown()
    return held


def test_a_rank_holds_whole_gradients_until_the_last_batch_of_a_step_as_declared():
    def make():
        return TrainingSetup(
            module=Wide(), batch=(torch.zeros(4, 6), torch.zeros(4, 3)), make_optimizers=Wide.configure_optimizers
        )

    training = measure_training(make, TruePrecision(), device_type="cpu", world_size=2, ranks_per_machine=2)
    once, twice = (FSDPStrategy().memory_layout(training.for_steps_of(batches)) for batches in (1, 2))
    declared = (twice.accumulated - once.accumulated) // 4
    for held in in_ranks(held_while_accumulating):
        assert held == declared


class Residual(nn.Module):
    """A layer whose weights are larger than what it saves."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(128, 128, bias=False)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


class Deep(nn.Module):
    """Thirty-two of these layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Residual() for _ in range(32)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def saved_for_the_backward_pass(cluster):
    """Bytes in 16 bits that are alive for the backward pass after the forward pass."""
    strategy, module, saved = FSDPStrategy(), Deep(), []
    start(strategy, module, parts(cluster, "bf16-mixed"))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        loss = strategy.training_step(torch.ones(4, 128), 0)
    storages = {one.data_ptr(): one.untyped_storage() for one in saved if one.dtype == torch.bfloat16}
    sizes = sum(storage.nbytes() for storage in storages.values())  # 0 of parameters that have been freed
    strategy.backward(loss)
    strategy.teardown()
    return sizes


def test_autocast_copies_no_parameters_that_are_gathered_in_16_bits():
    def make():
        return TrainingSetup(module=Deep(), batch=torch.ones(4, 128), make_optimizers=Deep.configure_optimizers)

    precision = MixedPrecision("bf16-mixed")
    dtype = FSDPStrategy().forward_dtype(precision)
    training = measure_training(
        make, precision, device_type="cpu", world_size=2, ranks_per_machine=2, forward_dtype=dtype
    )
    for saved in in_ranks(saved_for_the_backward_pass):
        assert training.saved["layers"] == pytest.approx(saved, rel=0.05)

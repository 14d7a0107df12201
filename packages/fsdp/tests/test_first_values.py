"""The values that sharded parameters begin with, and how much a rank holds while it makes them."""

import gc

import pytest
import torch
from fsdp_loop import Block, Net, Run, parts, single_device_losses, train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dstrat.errors import MisuseError
from dstrat_fsdp import FSDPStrategy


def without_memory(strategy, module_class, cluster, shards_itself=False):
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    with strategy.model_sharded_context():
        module = module_class()
    if shards_itself:
        for block in module.blocks:
            fully_shard(block, mesh=strategy.device_mesh)
    strategy.connect(module)
    strategy.setup(Run(module))
    return module


def trained_from_meta(cluster, module, shards_itself=False, **options):
    strategy = FSDPStrategy(**options)
    without_memory(strategy, globals()[module], cluster, shards_itself)
    losses = train(strategy)
    strategy.teardown()
    return losses


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(6, 10)
        self.other.weight = self.first.weight

    def layers(self, x):
        return super().layers(x) + self.other(x).sum(1, keepdim=True)


@pytest.mark.parametrize("module", ["Net", "Tied"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_parameters_that_were_made_without_memory_have_the_values_of_one_device(ranks, module, world_size):
    expected = single_device_losses(globals()[module]())
    for losses in ranks(trained_from_meta, world_size, module=module):
        assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("options", [{"device_mesh": (2, 2)}, {"cpu_offload": True}, {"shards_itself": True}])
def test_so_have_they_on_any_mesh_and_where_the_module_shards_itself(ranks, options):
    expected = single_device_losses()
    for losses in ranks(trained_from_meta, 4, module="Net", **options):
        assert losses == pytest.approx(expected, rel=1e-6)


class Different(Net):
    def __init__(self):
        super().__init__()
        rank = torch.distributed.get_rank()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(rank)
            self.seen += rank


def shards_of_different_modules(cluster):
    strategy = FSDPStrategy()
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    module = Different()
    strategy.connect(module)
    strategy.setup(Run(module))
    whole = [parameter.detach().full_tensor() for parameter in module.parameters()]
    seen = float(module.seen)
    strategy.teardown()
    return [tensor.tolist() for tensor in whole], seen


def test_every_shard_is_that_of_rank_0(ranks):
    expected = [parameter.detach().tolist() for parameter in Net().parameters()]
    assert ranks(shards_of_different_modules) == [(expected, 0.0)] * 2


class Raw(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


def nothing_computes_it(cluster):
    strategy = FSDPStrategy()
    try:
        without_memory(strategy, Raw, cluster)
    except MisuseError as error:
        return str(error)
    return None


def test_a_layer_that_cannot_compute_its_values_is_named(ranks):
    [message] = ranks(nothing_computes_it, 1)
    assert message == (
        "Raw was made without memory, and nothing computes the first values of its 'scale': "
        "give it a method reset_parameters(self)"
    )


class Wide(Net):
    """Eight blocks, each of 99 % of an eighth of the parameters."""

    def __init__(self):
        nn.Module.__init__(self)
        self.first = nn.Linear(6, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(8))
        self.last = nn.Linear(64, 3)


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


def most_while_building(cluster):
    most = 0
    before = live_numbers()

    class Watching(nn.Linear):
        def reset_parameters(self):
            nonlocal most
            super().reset_parameters()
            if not self.weight.is_meta:
                most = max(most, live_numbers() - before)

    plain = nn.Linear
    nn.Linear = Watching
    try:
        strategy = FSDPStrategy()
        module = without_memory(strategy, Wide, cluster)
    finally:
        nn.Linear = plain
    numel = sum(parameter.numel() for parameter in module.parameters())
    block = sum(parameter.numel() for parameter in module.blocks[0].parameters())
    after = live_numbers() - before
    strategy.teardown()
    return most, after, numel, block


def test_a_rank_never_holds_more_than_its_shard_and_one_block(ranks):
    for most, after, numel, block in ranks(most_while_building, 4):
        assert 0 < most <= 1.05 * numel / 4 + block
        assert after <= 1.05 * numel / 4

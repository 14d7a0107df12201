"""The values that sharded parameters begin with, and how much a rank holds while it makes them."""

import pytest
import torch
from fsdp_loop import Net, Run, parts, single_device_losses, train
from torch import nn
from torch.distributed.fsdp import fully_shard

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

"""The values that sharded parameters begin with, and how much a rank holds while it makes them."""

import socket
from datetime import timedelta

import pytest
import torch
import torch.testing._internal.distributed.fake_pg
from tests.hand_loop import BlockNet, Run, parts, single_device_losses, train
from tests.ranks import each, in_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from dstrat.errors import MisuseError
from dstrat.parallel.process_group import close_process_group, open_process_group
from dstrat.testing.ranks.team import LoopbackCluster
from dstrat_fsdp import FSDPStrategy
from dstrat_fsdp.parameters import materialize

STEPS = 6


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
    losses = train(strategy, steps=STEPS)
    strategy.teardown()
    return losses


class Tied(BlockNet):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(6, 10)
        self.other.weight = self.first.weight

    def layers(self, x):
        return super().layers(x) + self.other(x).sum(1, keepdim=True)


FROM_META = {
    2: {"Net": {"module": "BlockNet"}, "tied": {"module": "Tied"}},
    4: {
        "Net": {"module": "BlockNet"},
        "tied": {"module": "Tied"},
        "two replicas": {"module": "BlockNet", "device_mesh": (2, 2)},
        "offloaded": {"module": "BlockNet", "cpu_offload": True},
        "shards itself": {"module": "BlockNet", "shards_itself": True},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", FROM_META)
def test_parameters_that_were_made_without_memory_have_the_values_of_one_device(world_size):
    cases = FROM_META[world_size]
    expected = {name: single_device_losses(globals()[case["module"]](), steps=STEPS) for name, case in cases.items()}
    for losses in in_ranks(each, world_size, function=trained_from_meta, cases=cases):
        assert losses == {name: pytest.approx(values, rel=1e-6) for name, values in expected.items()}


class Different(BlockNet):
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


def test_every_shard_is_that_of_rank_0():
    expected = [parameter.detach().tolist() for parameter in BlockNet().parameters()]
    assert in_ranks(shards_of_different_modules) == [(expected, 0.0)] * 2


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


def test_a_layer_that_cannot_compute_its_values_is_named():
    [message] = in_ranks(nothing_computes_it, 1)
    assert message == (
        "Raw was made without memory, and nothing computes the first values of its 'scale': "
        "give it a method reset_parameters(self)"
    )


class OnMeta(FSDPStrategy):
    """The first rank, on a device from which nothing can be read."""

    root_device = torch.device("meta")
    is_global_zero = True


def test_first_values_leave_the_parameters_on_the_host():
    net = nn.Linear(2, 2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        open_process_group(LoopbackCluster(0, 1, port, listener), backend="fake", timeout=timedelta(seconds=20))
        try:
            OnMeta()._take_first_values(net)
        finally:
            close_process_group()
    assert {parameter.device.type for parameter in net.parameters()} == {"cpu"}


class Rotary(nn.Module):
    """Computes a buffer that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.register_buffer("frequencies", torch.empty(4), persistent=False)

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        self.frequencies.copy_(torch.arange(4.0))


def test_buffers_are_computed_where_a_checkpoint_has_the_parameters():
    with torch.device("meta"):
        layer = Rotary()
    materialize(layer, torch.device("cpu"), computes_parameters=False)
    assert torch.equal(layer.frequencies, torch.arange(4.0))

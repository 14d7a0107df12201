"""Whole state of what ranks shard: gathered on rank 0, scattered from there."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dstrat import ParallelStrategy
from dstrat.builtin.accelerators.cpu import CPUAccelerator
from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import FlatShard
from dstrat.interfaces.state_dict import name_parameters, number_parameters
from dstrat.launch.local import LocalLauncher
from dstrat.parallel.full_state import (
    agree_on,
    gather_entries,
    gather_state,
    scatter_module_state,
    scatter_optimizer_state,
    scatter_state,
)
from dstrat.parallel.process_group import close_process_group, open_process_group

WHOLE = torch.arange(15.0).reshape(5, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 3))
        self.register_buffer("seen", torch.zeros(()))


def flat_shard(tensor):
    """Two thirds of the elements on rank 0, the others on rank 1."""
    start, end = ((0, 10), (10, 15))[dist.get_rank()]
    return FlatShard(local=tensor.reshape(-1)[start:end].clone(), start=start, shape=tuple(tensor.shape))


def gather(strategy):
    mesh = init_device_mesh("cpu", (2,))
    state = {
        "flat": flat_shard(WHOLE),
        "rows": distribute_tensor(WHOLE, mesh, [Shard(0)]),
        "groups": [{"lr": torch.tensor(0.1), "betas": (0.9, 0.99)}],
    }
    gathered = gather_state(state, strategy)
    if dist.get_rank() == 1:
        return gathered
    same = torch.equal(gathered["flat"], WHOLE) and torch.equal(gathered["rows"], WHOLE)
    return same, float(gathered["groups"][0]["lr"]), gathered["groups"][0]["betas"]


def scatter_module(strategy):
    strategy.connect(Net())
    state = {"weight": WHOLE, "seen": torch.tensor(4.0)} if strategy.is_global_zero else {}
    targets = {"weight": flat_shard(torch.zeros(5, 3)), "seen": strategy.module.seen}
    scatter_module_state(strategy, state, targets, strict=True)
    return targets["weight"].local.tolist(), float(strategy.module.seen)


def scatter_too_large(strategy):
    strategy.connect(Net())
    state = {"weight": WHOLE.T, "seen": torch.tensor(4.0)} if strategy.is_global_zero else {}
    with pytest.raises(CheckpointError, match=r"weight has the shape \(3, 5\), and the module's has \(5, 3\)"):
        scatter_module_state(strategy, state, strategy.module.state_dict(), strict=True)


def scatter_nested(strategy):
    entry = {"step": 3, "mean": WHOLE}
    state = {"cut": entry, "whole": entry, "foreign": entry} if strategy.is_global_zero else {}
    shard = flat_shard(torch.zeros(5, 3))
    found = scatter_state(strategy, state, {"cut": {"mean": shard}, "foreign": None})
    return (
        found.keys() == {"cut", "whole"}
        and found["cut"] == {"step": 3, "mean": shard}
        and torch.equal(shard.local, flat_shard(WHOLE).local)
        and torch.equal(found["whole"]["mean"], WHOLE)
    )


class Alone(ParallelStrategy):
    """One rank on a device from which nothing can be read."""

    root_device = torch.device("meta")
    is_global_zero = True

    def broadcast(self, obj, src=0):
        return obj


def test_counts_of_steps_do_not_pass_through_the_device():
    entries = {"weight": {"step": torch.tensor(3.0)}}
    found = scatter_state(Alone(), entries, {})
    assert (float(found["weight"]["step"]), found["weight"]["step"].device.type) == (3.0, "cpu")


def components(strategy):
    return strategy.accelerator, strategy.parallel_devices, strategy.cluster_environment


class Divided(ParallelStrategy):
    """Each rank has a plain tensor that the other one lacks."""

    replicates_state = False

    def sharded_module_state(self):
        name = "weight" if self.is_global_zero else "seen"
        return {name: self.module.state_dict()[name] + 1}


def gather_divided(strategy):
    divided = Divided(*components(strategy))
    divided.connect(Net())
    return {name: value.unique().tolist() for name, value in divided.module_state_dict().items()}


class Recording(ParallelStrategy):
    """Records the ranks that send an object to all others."""

    def __init__(self, *args):
        super().__init__(*args)
        self.senders = set()

    def broadcast(self, obj, src=0):
        self.senders.add(src)
        return super().broadcast(obj, src)


def senders_of_names(strategy):
    recording = Recording(*components(strategy))
    recording.connect(Net())
    state = recording.module.state_dict()
    scatter_module_state(recording, gather_entries(state, recording), state, strict=True)
    return recording.senders


class Unread(ParallelStrategy):
    """Must not compute the state of an optimizer for the names of its parameters."""

    def optimizer_template(self, optimizer):
        return {}

    def sharded_optimizer_state(self, optimizer):
        raise AssertionError(optimizer)


def names_of_loaded(strategy):
    unread = Unread(*components(strategy))
    unread.connect(Net())
    optimizer = torch.optim.SGD(unread.module.parameters(), lr=0.1)
    state = optimizer.state_dict() if strategy.is_global_zero else {}
    return scatter_optimizer_state(unread, optimizer, state)["param_groups"][0]["params"]


def disagree(strategy):
    with pytest.raises(CheckpointError, match="found by rank 0"):
        agree_on(strategy, lambda: f"found by rank {strategy.global_rank}")
    agree_on(strategy, lambda: None)


def run_all(functions):
    cluster = LocalEnvironment(os.environ)
    open_process_group(cluster, backend="gloo", timeout=timedelta(seconds=60))
    try:
        cpu = torch.device("cpu")
        strategy = ParallelStrategy(CPUAccelerator(), [cpu, cpu], cluster)
        found = {function.__name__: function(strategy) for function in functions}
        everywhere = [None, None]
        dist.all_gather_object(everywhere, found)
        return everywhere
    finally:
        close_process_group()


@pytest.fixture(scope="module")
def ranks():
    """What each function returns in each of two ranks."""
    functions = (
        gather,
        scatter_module,
        scatter_too_large,
        scatter_nested,
        disagree,
        gather_divided,
        senders_of_names,
        names_of_loaded,
    )
    return LocalLauncher(num_processes=2, start_method="fork").launch(run_all, functions)


def test_rank_0_has_the_whole_state(ranks):
    assert [found["gather"] for found in ranks] == [(True, pytest.approx(0.1), (0.9, 0.99)), {}]


def test_plain_tensors_come_from_the_ranks_that_have_them(ranks):
    assert [found["gather_divided"] for found in ranks] == [{"weight": [1.0], "seen": [1.0]}, {}]


def test_ranks_with_the_same_names_do_not_exchange_them(ranks):
    assert [found["senders_of_names"] for found in ranks] == [{0}, {0}]


def test_an_optimizers_state_is_not_computed_to_load_another(ranks):
    assert [found["names_of_loaded"] for found in ranks] == [["weight"], ["weight"]]


def test_each_rank_takes_its_elements_of_the_module(ranks):
    elements = WHOLE.flatten().tolist()
    assert [found["scatter_module"] for found in ranks] == [(elements[:10], 4.0), (elements[10:], 4.0)]


def test_each_rank_takes_what_its_template_has_of_a_state(ranks):
    assert [found["scatter_nested"] for found in ranks] == [True, True]


def test_all_ranks_raise_what_rank_0_finds(ranks):
    assert [found["disagree"] for found in ranks] == [found["scatter_too_large"] for found in ranks] == [None, None]


def test_parameters_have_names_or_numbers():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    groups = [{"params": [*net[1].parameters()]}, {"params": [*net[0].parameters()], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    names = [["1.weight", "1.bias"], ["0.weight", "0.bias"]]
    named = name_parameters(state, names)
    assert [group["params"] for group in named["param_groups"]] == names
    assert named["state"]["0.weight"] is state["state"][2]
    assert number_parameters(named) == state


def test_a_parameter_without_a_name_keeps_its_number():
    state = {"state": {1: {}}, "param_groups": [{"params": [0, 1]}]}
    assert name_parameters(state, [["weight"]]) == {"state": {"1": {}}, "param_groups": [{"params": ["weight", "1"]}]}

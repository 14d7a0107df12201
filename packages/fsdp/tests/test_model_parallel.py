"""Tensor parallelism together with sharding, on a mesh of two by two."""

import pytest
import torch
from fsdp_loop import Net, Run, parts, single_device_losses, train
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dstrat_fsdp import ModelParallelStrategy

TRAINING = {
    "plain": {},
    "accumulation": {"accumulate": 3},
    "clipping by norm": {"clip": 0.05},
    "clipping by value": {"clip": 0.03, "algorithm": "value"},
}


def split(module, mesh):
    for block in module.blocks:
        parallelize_module(block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def split_and_shard(module, mesh):
    split(module, mesh)
    for block in module.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(module, mesh=mesh["data_parallel"])


def started(cluster, configure=split, meta=False, **options):
    strategy = ModelParallelStrategy(**options)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    if meta:
        with strategy.model_sharded_context():
            module = Net()
    else:
        module = Net()
    configure(module, strategy.device_mesh)
    strategy.connect(module)
    strategy.setup(Run(module))
    return strategy


def losses(cluster, training, configure="split", meta=False, **options):
    strategy = started(cluster, globals()[configure], meta, **options)
    found = train(strategy, **training)
    strategy.teardown()
    return found


@pytest.mark.parametrize("way", TRAINING)
def test_losses_on_two_by_two_are_those_of_one_device(ranks, way):
    expected = single_device_losses(**TRAINING[way])
    for found in ranks(losses, 4, training=TRAINING[way], tensor_parallel_size=2):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 1)])
def test_either_dimension_may_be_one(ranks, data, tensor):
    expected = single_device_losses()
    configure = "split" if tensor > 1 else "nothing"
    for found in ranks(losses, training={}, configure=configure, data_parallel_size=data, tensor_parallel_size=tensor):
        assert found == pytest.approx(expected, rel=1e-6)


def nothing(module, mesh):
    pass


@pytest.mark.parametrize("meta", [False, True])
def test_a_module_may_shard_itself(ranks, meta):
    expected = single_device_losses()
    for found in ranks(losses, 4, training={}, configure="split_and_shard", meta=meta, tensor_parallel_size=2):
        assert found == pytest.approx(expected, rel=1e-6)


class Different(Net):
    def __init__(self):
        super().__init__()
        rank = torch.distributed.get_rank()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(rank)


def values_of_different_modules(cluster):
    strategy = ModelParallelStrategy(tensor_parallel_size=2)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    module = Different()
    split(module, strategy.device_mesh)
    strategy.connect(module)
    strategy.setup(Run(module))
    whole = [parameter.detach().full_tensor().tolist() for parameter in module.parameters()]
    strategy.teardown()
    return whole


def test_every_shard_and_every_part_is_that_of_rank_0(ranks):
    expected = [parameter.detach().tolist() for parameter in Net().parameters()]
    assert ranks(values_of_different_modules, 4) == [expected] * 4


def what_is_shared(cluster):
    strategy = ModelParallelStrategy(tensor_parallel_size=2)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    group = torch.tensor(float(strategy.distributed_sampler_kwargs["rank"]) + 1)
    reduced = [float(strategy.reduce(group, reduce_op=op)) for op in ("sum", "mean", "max")]
    whole = int(strategy.reduce(group.long(), reduce_op="sum"))
    votes = [strategy.reduce_boolean_decision(cluster.global_rank == 3, all=every) for every in (False, True)]
    state = (strategy.distributed_sampler_kwargs, reduced, whole, votes)
    strategy.teardown()
    return state


def test_ranks_that_share_a_batch_read_the_same_part_and_count_once(ranks):
    for rank, (share, reduced, whole, votes) in enumerate(ranks(what_is_shared, 4)):
        assert share == {"num_replicas": 2, "rank": rank // 2}
        assert reduced == [3.0, 1.5, 2.0]
        assert whole == 3
        assert votes == [True, False]

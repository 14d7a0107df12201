"""Tensor parallelism together with sharding, on a mesh of two by two."""

import pytest
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

"""Whole tensors, and the parts of them that a rank has."""

from datetime import timedelta

import torch
from tests.ranks import in_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dstrat.parallel.full_state import copy_full, full_tensor, shard_like
from dstrat.parallel.process_group import close_process_group, open_process_group

PLANS = {"by rows": ColwiseParallel, "by columns": RowwiseParallel}


def two_dimensional(plan, rows, stages=1):
    """Return a layer of numbers, each another, over two dimensions of a mesh; and the numbers.

    Each stage of a pipeline has such a layer.
    """
    layer = nn.Linear(6, rows, bias=False)
    numbers = torch.arange(6.0 * rows).reshape(rows, 6)
    with torch.no_grad():
        layer.weight.copy_(numbers)
    mesh = init_device_mesh("cpu", (stages, 2 // stages, 2), mesh_dim_names=("stage", "data", "tensor"))
    parallelize_module(layer, mesh["tensor"], plan())
    fully_shard(layer, mesh=mesh["data"])
    return layer, numbers


def gathered(plan):
    # Shards of 10 rows are 3, 2, 3 and 2; torch 2.9 gathers those in a wrong order.
    return [
        torch.equal(full_tensor(layer.weight), numbers)
        for layer, numbers in (two_dimensional(plan, rows, stages) for rows in (8, 10) for stages in (1, 2))
    ]


def divided(plan):
    """Whether a whole tensor's shard is the part that fully_shard has made of it, and is put there."""
    layer, numbers = two_dimensional(plan, 10)
    made_by_torch = layer.weight.to_local().clone()
    shard = shard_like(layer.weight, numbers)
    with torch.no_grad():
        layer.weight.zero_()
    copy_full(layer.weight, numbers)
    return [torch.equal(part.to_local(), made_by_torch) for part in (shard, layer.weight)]


def with_a_group(cluster, function):
    open_process_group(cluster, backend="gloo", timeout=timedelta(seconds=60))
    try:
        return {name: function(plan) for name, plan in PLANS.items()}
    finally:
        close_process_group()


def test_a_tensor_over_two_dimensions_of_a_mesh_is_gathered_in_its_order():
    for found in in_ranks(with_a_group, 4, function=gathered):
        assert found == {"by rows": [True] * 4, "by columns": [True] * 4}


def test_each_rank_takes_its_part_of_a_whole_tensor():
    for found in in_ranks(with_a_group, 4, function=divided):
        assert found == {"by rows": [True, True], "by columns": [True, True]}

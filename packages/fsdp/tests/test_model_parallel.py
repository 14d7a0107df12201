"""Tensor parallelism together with sharding, on a mesh of two by two."""

import re
import time

import pytest
import torch
from tests.hand_loop import (
    Block,
    BlockNet,
    Run,
    batches,
    misuse_in_a_step,
    one_pass,
    parts,
    single_device_losses,
    train,
)
from tests.ranks import each, in_ranks
from tests.ways_of_training import SHORT, WAYS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dstrat.errors import MisuseError
from dstrat_fsdp import ModelParallelStrategy
from dstrat_fsdp import mesh as fsdp_mesh


def split(module, mesh):
    for block in module.blocks:
        parallelize_module(block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def split_and_shard(module, mesh):
    # fully_shard would do it, but torch cannot for types of device that packages add.
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(mesh.device_type))
    split(module, mesh)
    for block in module.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(module, mesh=mesh["data_parallel"])


def started(cluster, configure=split, meta=False, module_class=BlockNet, **options):
    strategy = ModelParallelStrategy(**options)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    if meta:
        with strategy.model_sharded_context():
            module = module_class()
    else:
        module = module_class()
    configure(module, strategy.device_mesh)
    strategy.connect(module)
    strategy.setup(Run(module))
    return strategy


def losses(cluster, training, configure="split", meta=False, **options):
    strategy = started(cluster, globals()[configure], meta, **options)
    found = train(strategy, **training)
    strategy.teardown()
    return found


def nothing(module, mesh):
    pass


@pytest.mark.slow
def test_losses_on_two_by_two_are_those_of_one_device_also_where_the_module_shards_itself():
    itself = {"configure": "split_and_shard", "training": SHORT}
    cases = {
        **{way: {"training": training} for way, training in WAYS.items()},
        "shards itself": {**itself, "meta": False},
        "shards itself, made without memory": {**itself, "meta": True},
    }
    expected = {name: single_device_losses(BlockNet(), **case["training"]) for name, case in cases.items()}
    for case in cases.values():
        case["tensor_parallel_size"] = 2
    for found in in_ranks(each, 4, function=losses, cases=cases):
        assert found == {name: pytest.approx(values, rel=1e-6) for name, values in expected.items()}


def test_either_dimension_may_be_one():
    cases = {
        "tensors": {"training": SHORT, "data_parallel_size": 1, "tensor_parallel_size": 2},
        "data": {"training": SHORT, "configure": "nothing", "data_parallel_size": 2, "tensor_parallel_size": 1},
    }
    expected = pytest.approx(single_device_losses(BlockNet(), **SHORT), rel=1e-6)
    for found in in_ranks(each, function=losses, cases=cases):
        assert found == dict.fromkeys(cases, expected)


def trained_of_frozen(cluster):
    strategy = ModelParallelStrategy()
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    with strategy.model_sharded_context():
        block = BlockNet().blocks[0]
        for layer in (block.norm, block.up):
            layer.requires_grad_(False)
        plan = {"norm": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, strategy.device_mesh["tensor_parallel"], plan)
    strategy.teardown()
    return [name for name, parameter in block.named_parameters() if parameter.requires_grad]


def test_frozen_layers_that_are_split_stay_frozen():
    assert in_ranks(trained_of_frozen, 1) == [["down.weight", "down.bias"]]


class GatedBlock(Block):
    """Has parameters between layers that are split, where a rank has a part of the features."""

    mesh = None

    def __init__(self, width, shape):
        super().__init__(width)
        self.gate = nn.Parameter(torch.full(shape, 0.5))

    def forward(self, x):
        gate = self.gate
        if self.mesh is not None:
            gate = DTensor.from_local(gate, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        return x + self.down(gate * torch.tanh(self.up(self.norm(x))))


class GatedNet(BlockNet):
    shape = ()

    def make_layers(self):
        super().make_layers()
        self.blocks = nn.ModuleList(GatedBlock(10, self.shape) for _ in range(3))


class LongGatedNet(GatedNet):
    shape = (1,)


def error_of_gates(cluster, module_class, tensor_parallel_size):
    strategy = started(cluster, module_class=module_class, tensor_parallel_size=tensor_parallel_size)
    return misuse_in_a_step(strategy)


def test_a_replica_with_the_gradient_of_a_part_of_the_features_is_refused():
    expected = (
        "the gradient of parameter 'blocks.0.gate' differs between the 2 ranks that share a batch, and so would its "
        "replicas: it is used where each rank has a part of the features. Use it on whole features, outside of the "
        "split layers, or let DTensors sum its gradient: DTensor.from_local(parameter, mesh, [Replicate()])"
        ".to_local(grad_placements=[Partial()]) in the forward, with the mesh of parallelize_module"
    )
    cases = {kind: {"module_class": kind, "tensor_parallel_size": 2} for kind in (GatedNet, LongGatedNet)}
    for found in in_ranks(each, 4, function=error_of_gates, cases=cases):
        assert found == dict.fromkeys(cases, expected)


class DroppingNet(BlockNet):
    def layers(self, x):
        return super().layers(nn.functional.dropout(x, 0.5, self.training))


def error_after_drawing_in_one_rank(cluster):
    strategy = started(cluster, module_class=DroppingNet, tensor_parallel_size=2)
    first, second, *_ = batches(2)
    one_pass(strategy, first, 0, 1)
    if strategy.is_global_zero:  # as a hook that samples from the model does
        torch.rand(())
    with pytest.raises(MisuseError) as error:
        one_pass(strategy, second, 1, 1)
    strategy.barrier()  # the other rank may still compare gradients
    strategy.teardown()
    return str(error.value)


def test_ranks_of_a_batch_that_draw_other_numbers_in_a_layer_are_an_error():
    for message in in_ranks(error_after_drawing_in_one_rank):
        assert re.match(
            r"the gradient of parameter '.*' differs in step 2 between the 2 ranks that share a batch: they have drawn "
            r"other random numbers in a layer, such as for dropout",
            message,
        )


def losses_with_summed_gates(cluster, module_class):
    def split_with_sums(module, mesh):
        split(module, mesh)
        for block in module.blocks:
            block.mesh = mesh["tensor_parallel"]

    strategy = started(cluster, split_with_sums, module_class=module_class, tensor_parallel_size=2)
    found = train(strategy, **SHORT, clip=0.05)
    strategy.teardown()
    return found


def test_losses_are_those_of_one_device_if_gradients_of_parts_are_summed_as_the_error_says():
    expected = pytest.approx(single_device_losses(GatedNet(), **SHORT, clip=0.05), rel=1e-6, abs=0)
    cases = {kind: {"module_class": kind} for kind in (GatedNet, LongGatedNet)}
    for found in in_ranks(each, 4, function=losses_with_summed_gates, cases=cases):
        assert found == dict.fromkeys(cases, expected)


class Different(BlockNet):
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


def test_every_shard_and_every_part_is_that_of_rank_0():
    expected = [parameter.detach().tolist() for parameter in BlockNet().parameters()]
    assert in_ranks(values_of_different_modules, 4) == [expected] * 4


def what_is_shared(cluster):
    strategy = ModelParallelStrategy(tensor_parallel_size=2)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    group = strategy.from_host(torch.tensor(float(strategy.distributed_sampler_kwargs["rank"]) + 1))
    reduced = [float(strategy.reduce(group, reduce_op=op)) for op in ("sum", "mean", "max")]
    whole = int(strategy.reduce(group.long(), reduce_op="sum"))
    votes = [strategy.reduce_boolean_decision(cluster.global_rank == 3, all=every) for every in (False, True)]
    state = (strategy.distributed_sampler_kwargs, reduced, whole, votes)
    strategy.teardown()
    return state


def test_ranks_that_share_a_batch_read_the_same_part_and_count_once():
    for rank, (share, reduced, whole, votes) in enumerate(in_ranks(what_is_shared, 4)):
        assert share == {"num_replicas": 2, "rank": rank // 2}
        assert reduced == [3.0, 1.5, 2.0]
        assert whole == 3
        assert votes == [True, False]


def opening_with_a_late_rank(cluster):
    """Return when a rank had opened its groups, and when it could go on."""
    opened = 0.0

    def open_late(*args, **kwargs):
        nonlocal opened
        mesh = init_device_mesh(*args, **kwargs)
        time.sleep(0.3 if cluster.global_rank == 3 else 0)
        opened = time.monotonic()
        return mesh

    strategy = ModelParallelStrategy(tensor_parallel_size=2)
    strategy.receive(parts(cluster))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fsdp_mesh, "init_device_mesh", open_late)
        strategy.setup_environment()
    went_on = time.monotonic()
    strategy.teardown()
    return opened, went_on


def test_no_rank_can_close_its_groups_while_another_opens_them():
    # Gloo's sockets of another rank break, or it waits forever: in one of a hundred jobs of four ranks.
    times = in_ranks(opening_with_a_late_rank, 4)
    assert min(went_on for _, went_on in times) >= max(opened for opened, _ in times)

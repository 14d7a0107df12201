"""Layouts of replicas, shards and split layers have the losses of one device in every way of training."""

import pytest
import torch
from tests.hand_loop import BlockNet, Run, parts, single_device_losses, train
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from tests.ways_of_training import SHORT, WAYS
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.utils.data import DataLoader

from dstrat import TrainModule
from dstrat.errors import MisuseError, RequestError
from dstrat_mesh import MeshStrategy
from dstrat_mesh.axes import Axes

LAYOUTS = {  # by the number of ranks
    4: [{"dp_replicate": 2}, {"tp": 2}, {"dp_replicate": 2, "tp": 2}, {"tp": 4}],
    8: [{"dp_replicate": 2, "dp_shard": 2, "tp": 2}],
}


def split(module, mesh):
    for block in module.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def losses(cluster, training, meta=False, **options):
    strategy = MeshStrategy(**options)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    if meta:
        with strategy.model_sharded_context():
            module = BlockNet()
    else:
        module = BlockNet()
    if strategy.tensor_parallel_size > 1:
        split(module, strategy.device_mesh)
    strategy.connect(module)
    strategy.setup(Run(module))
    found = train(strategy, **training)
    strategy.teardown()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.variant)])
def test_losses_are_those_of_one_device(ranks):
    cases = {
        f"{layout} {way}": {"training": training, **layout}
        for layout in LAYOUTS[ranks]
        for way, training in WAYS.items()
        if way in ("plain", "accumulation and clipping") or layout == LAYOUTS[ranks][-1]
    }
    expected = {
        name: pytest.approx(single_device_losses(BlockNet(), **case["training"]), rel=1e-6, abs=0)
        for name, case in cases.items()
    }
    for found in in_ranks(each, ranks, function=losses, cases=cases):
        assert found == expected


def test_a_module_that_is_made_without_memory_has_the_values_of_one_device():
    cases = {"meta": {"training": SHORT, "meta": True, "dp_replicate": 2, "tp": 2}}
    expected = {"meta": pytest.approx(single_device_losses(BlockNet(), **SHORT), rel=1e-6)}
    for found in in_ranks(each, 4, function=losses, cases=cases):
        assert found == expected


# The mesh


def test_groups_are_the_ranks_along_an_axis():
    axes = Axes.of(8, pp=1, dp_replicate=2, dp_shard="auto", cp=1, tp=2)
    assert (axes.shape, axes.names) == ((1, 2, 2, 1, 2), ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    assert axes.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert axes.groups("dp_shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert axes.groups("dp_replicate") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("ranks", "sizes", "message"),
    [
        (3, {"tp": 2}, "tp=2 does not divide the 3 processes: 2 must divide their number, such as 2 or 4 devices"),
        (
            8,
            {"tp": 2, "dp_shard": 2},
            "dp_shard=2 * tp=2 is a mesh of 4 processes, and the job has 8: ask for 4 devices, or dp_shard=4",
        ),
        (5, {"dp_replicate": 2, "dp_shard": 2}, "is a mesh of 4 processes, and the job has 5: ask for 4 devices"),
    ],
)
def test_sizes_that_do_not_fit_the_processes_are_refused(ranks, sizes, message):
    with pytest.raises(RequestError) as error:
        MeshStrategy(**sizes).describe_layout(ranks, ranks)
    assert str(error.value).endswith(message)


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"dp_replicate": "auto"}, {"dp_shard": True}, {"dp_shard": 1.0}])
def test_a_size_is_a_positive_number(sizes):
    with pytest.raises(RequestError, match="is not a positive number"):
        MeshStrategy(**sizes)


def test_the_plan_shows_the_mesh_and_its_groups():
    from dstrat.resolve import Request, make_plan

    request = Request(strategy="mesh(tp=2, dp_replicate=2)", accelerator="cpu", devices=8)
    rows = {row.subject.strip(): row.value for row in make_plan(request, environ={}, interactive=False).choices}
    assert rows["mesh"] == "dp_replicate 2 x dp_shard 2 x tp 2"
    assert rows["dp_replicate"] == "[0, 4] [1, 5] [2, 6] [3, 7]"


def unsplit(cluster):
    strategy = MeshStrategy(tp=2)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    strategy.connect(BlockNet())
    try:
        strategy.setup(Run(strategy.module))
    except MisuseError as error:
        return str(error)
    finally:
        strategy.teardown()


def test_ranks_that_would_do_the_same_work_are_refused():
    for message in in_ranks(unsplit):
        assert message == (
            "no layer of BlockNet is split over the 2 ranks of tp=2: call parallelize_module(..., "
            'self.device_mesh["tp"], ...) in configure_model, or leave tp out'
        )


@pytest.mark.parametrize(("layers", "stages"), [(7, 1), (8, 2), (31, 4), (32, 8), (1000, 8)])
def test_pipelines_are_compared_with_as_many_stages_as_their_layers_allow(layers, stages):
    axes = Axes.of(8, pp=4, dp_replicate=1, dp_shard="auto", cp=1, tp=1)
    schedules = axes.schedules(layers)
    several = {"schedule": "Interleaved1F1B", "stages_per_rank": stages}
    assert schedules == [
        {"pp": 4, "microbatches": microbatches, **schedule}
        for microbatches in (16, 4)
        for schedule in ([{}, several] if stages > 1 else [{}])
    ]
    for options in schedules:
        MeshStrategy(**options)
    assert Axes.of(8, pp=1, dp_replicate=1, dp_shard="auto", cp=1, tp=2).schedules(layers) == [{"tp": 2}]


class Tied(TrainModule):
    """An embedding and an output layer share a weight, which parallelize_module gives each of them anew."""

    ties_again = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.losses = []

    def configure_model(self):
        if getattr(self.trainer.strategy, "tensor_parallel_size", 1) > 1:
            parallelize_module(self, self.device_mesh["tp"], self.plan())
            if self.ties_again:
                self.head.weight = self.embedding.weight

    @staticmethod
    def plan():
        embedding = RowwiseParallel(input_layouts=Replicate())
        return {"embedding": embedding, "head": ColwiseParallel(output_layouts=Replicate())}

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.embedding(batch)), batch.flip(0))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class TrainedApart(Tied):
    ties_again = False


class LossOfParts(Tied):
    """Its loss is of logits that are split, whose backward pass has the same context as the forward pass."""

    @staticmethod
    def plan():
        return {**Tied.plan(), "head": ColwiseParallel(use_local_output=False)}

    def training_step(self, batch, batch_idx):
        with loss_parallel():
            return super().training_step(batch, batch_idx)


def fitted(cluster, module_class):
    module = module_class()
    try:
        quiet_trainer("single_device" if cluster is None else MeshStrategy(tp=2), cluster).fit(
            module, DataLoader(torch.arange(32) % 8, batch_size=8)
        )
    except MisuseError as error:
        return str(error)
    return module.losses


def test_a_weight_of_two_split_layers_has_to_stay_one():
    expected = pytest.approx(fitted(None, Tied), rel=1e-6, abs=0)
    cases = {module_class: {"module_class": module_class} for module_class in (Tied, TrainedApart, LossOfParts)}
    for found in in_ranks(each, function=fitted, cases=cases):
        assert found[Tied] == expected
        assert found[TrainedApart] == (
            "configure_model of TrainedApart has split layers that share a parameter, so that 'embedding.weight' and "
            "'head.weight' are trained apart: let them share it again after parallelize_module, "
            "self.head.weight = self.embedding.weight, or call fully_shard for a layer that contains both"
        )
        assert found[LossOfParts].startswith("a loss was computed in torch's loss_parallel(), and its backward pass")

"""Pipelines: losses of one device on each layout and with each schedule, evaluation, and layers of other stages."""

import dataclasses
import io
import logging
import time

import pytest
import torch
import torch.distributed as dist
from tests.hand_loop import (
    Block,
    BlockNet,
    Run,
    batches,
    misuse_in_a_step,
    one_pass,
    parts,
    single_device_losses,
    start,
)
from tests.ranks import each, in_ranks
from tests.ways_of_training import SHORT
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dstrat import Pipeline, TorchCheckpointIO
from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.checkpoint.strategy_state import module_entries, replaced_weights
from dstrat.errors import DstratError, RequestError
from dstrat.parallel.internals import number_begun
from dstrat_mesh import MeshStrategy

LAYOUTS = {  # by the number of ranks; schedule and microbatches too
    (2, "stages"): [
        {"pp": 2},
        {"pp": 2, "microbatches": 4},
        {"pp": 2, "microbatches": 1},
        {"pp": 2, "microbatches": 8, "schedule": "GPipe"},
        {"pp": 2, "microbatches": 4, "schedule": "Interleaved1F1B"},
        {"pp": 2, "microbatches": 3, "schedule": "LoopedBFS"},
    ],
    (4, "stages and shards"): [
        {"pp": 4, "microbatches": 6},
        {"pp": 4, "microbatches": 6, "schedule": "GPipe"},
        {"pp": 2, "dp_shard": 2, "microbatches": 4, "schedule": "GPipe"},
        {"pp": 2, "dp_replicate": 2},
        {"pp": 2, "dp_shard": 2, "schedule": "Interleaved1F1B"},
        {"pp": 2, "dp_shard": 2, "schedule": "LoopedBFS"},
    ],
    # Of the first two, the meshes of split layers are equal, and their groups have other names.
    (8, "all axes"): [
        {"pp": 2, "dp_shard": 2, "tp": 2},
        {"pp": 4, "tp": 2},
    ],
}


class PipeNet(BlockNet):
    """A small network whose layers are a chain."""

    def layers(self, x):
        return self(x)

    def forward(self, x):
        return BlockNet.layers(self, x)

    def configure_pipeline(self):
        return Pipeline(
            model=self,
            layers=[self.first, *self.blocks, self.last],
            loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]),
        )


def split(module, mesh):
    for block in module.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if isinstance(module, SharedNet):
        for layer in (module.enter, module.leave):
            parallelize_module(layer, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
        module.leave.weight = module.enter.weight


def started(cluster, meta=False, module_class=PipeNet, precision="32-true", **options):
    strategy = MeshStrategy(**options)
    strategy.receive(parts(cluster, precision))
    strategy.setup_environment()
    if meta:
        with strategy.model_sharded_context():
            module = module_class()
    else:
        module = module_class()
    if strategy.tensor_parallel_size > 1:
        split(module, strategy.device_mesh)
    strategy.connect(module)
    strategy.setup(Run(module))
    return strategy


def train(strategy, steps=20, accumulate=1, clip=None, algorithm="norm"):
    """Train as a Trainer does: gradients are scaled before the step."""
    losses, optimizer = [], strategy.optimizers[0]
    groups = zip(*[iter(batches(steps * accumulate))] * accumulate, strict=True)
    for index, group in enumerate(groups):
        optimizer.zero_grad()
        with strategy.no_backward_sync():
            found = [one_pass(strategy, batch, index, accumulate) for batch in group[:-1]]
        found.append(one_pass(strategy, group[-1], index, accumulate))
        if accumulate > 1:
            strategy.scale_gradients(optimizer, 1 / accumulate)
        if clip is not None:
            strategy.clip_gradients(optimizer, clip, algorithm)
        optimizer.step()
        losses.append(float(strategy.reduce(sum(found))))
    return losses


def losses(cluster, training, **options):
    strategy = started(cluster, **options)
    found = train(strategy, **training)
    strategy.teardown()
    return found


WAYS = {
    "plain": {},
    "accumulation and clipping": {"accumulate": 2, "clip": 0.05, **SHORT},
    "clipping by value": {"clip": 0.03, "algorithm": "value", **SHORT},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts", [pytest.param(layouts, marks=[pytest.mark.variant] * (layouts[0] == 8)) for layouts in LAYOUTS]
)
def test_losses_are_those_of_one_device(layouts):
    cases = {
        f"{layout} {way}": {"training": training, **layout}
        for layout in LAYOUTS[layouts]
        for way, training in WAYS.items()
        if way != "clipping by value" or layout == LAYOUTS[layouts][-1]
    }
    expected = {
        name: pytest.approx(single_device_losses(PipeNet(), **case["training"]), rel=1e-6, abs=0)
        for name, case in cases.items()
    }
    for found in in_ranks(each, layouts[0], function=losses, cases=cases):
        assert found == expected


def test_layers_that_are_made_without_memory_have_the_values_of_one_device():
    cases = {
        "stages": {"training": SHORT, "meta": True, "pp": 2, "dp_shard": 2},
        "split": {"training": SHORT, "meta": True, "pp": 2, "tp": 2},
    }
    expected = dict.fromkeys(cases, pytest.approx(single_device_losses(PipeNet(), **SHORT), rel=1e-6))
    for found in in_ranks(each, 4, function=losses, cases=cases):
        assert found == expected


class DeepNet(PipeNet):
    """Has a layer for each of eight stages."""

    def make_layers(self):
        super().make_layers()
        self.blocks = nn.ModuleList(Block(10) for _ in range(6))


def test_four_ranks_compute_in_eight_stages():
    schedules = {"Interleaved1F1B": 8, "LoopedBFS": 6}
    cases = {
        name: {"training": SHORT, "module_class": DeepNet, "pp": 4, "schedule": name, "microbatches": count}
        for name, count in schedules.items()
    }
    expected = dict.fromkeys(cases, pytest.approx(single_device_losses(DeepNet(), **SHORT), rel=1e-6, abs=0))
    for found in in_ranks(each, 4, function=losses, cases=cases):
        assert found == expected


def waited_for_last_stage(cluster, returned, microbatches, **options):
    """Let the first stage wait, in its last backward pass, until the last one has returned from its step."""
    strategy = started(cluster, pp=cluster.world_size, microbatches=microbatches, **options)
    gradients, ends = [], []

    def wait(gradient):
        gradients.append(gradient)
        if len(gradients) == microbatches:
            deadline = time.monotonic() + 60
            while not returned.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            ends.append(returned.exists())

    if cluster.global_rank == 0:
        strategy.module.first.register_forward_hook(lambda layer, args, output: output.register_hook(wait) and None)
    loss = one_pass(strategy, *batches(1), index=0, accumulate=1)
    if cluster.global_rank == cluster.world_size - 1:
        returned.touch()
    strategy.teardown()
    return ends, float(loss)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_last_stage_does_not_wait_until_others_have_its_loss(tmp_path, ranks):
    found = in_ranks(waited_for_last_stage, ranks, returned=tmp_path / "returned", microbatches=4)
    assert found[0][0] == [True]
    assert len({loss for _, loss in found}) == 1


class FirstFrozen(PipeNet):
    """The first stage of four is frozen."""

    frozen = 2

    def make_layers(self):
        super().make_layers()
        for layer in [self.first, *self.blocks][: self.frozen]:
            layer.requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.learning_rate)


class HalfFrozen(FirstFrozen):
    """The first stage of each rank is frozen, if each has two."""

    frozen = 3


def test_ranks_with_frozen_stages_train_their_others():
    training = {"accumulate": 2, "clip": 0.05, "steps": 3}
    expected, cases = {}, {}
    for schedule in ("Interleaved1F1B", "LoopedBFS"):
        for module_class in (FirstFrozen, HalfFrozen):
            name = f"{module_class.__name__} {schedule}"
            cases[name] = {"training": training, "module_class": module_class, "pp": 2, "schedule": schedule}
            expected[name] = pytest.approx(single_device_losses(module_class(), **training), rel=1e-6, abs=0)
    for found in in_ranks(each, 2, function=losses, cases=cases):
        assert found == expected


class Unfrozen(FirstFrozen):
    """Its first stage is trained later."""

    configure_optimizers = PipeNet.configure_optimizers


def unfrozen_losses(cluster=None, precision="32-true", **options):
    if cluster is None:
        strategy = SingleDeviceStrategy()
        start(strategy, Unfrozen(), parts(precision=precision))
    else:
        strategy = started(cluster, module_class=Unfrozen, precision=precision, **options)
    found = train(strategy, steps=2)
    strategy.module.requires_grad_(True)
    found += train(strategy, steps=3)
    strategy.teardown()
    return found


def test_stages_are_unfrozen_while_they_train():
    expected = pytest.approx(unfrozen_losses(), rel=1e-6, abs=0)
    cases = {schedule: {"pp": 2, "schedule": schedule} for schedule in ("1F1B", "Interleaved1F1B")}
    for found in in_ranks(each, 2, function=unfrozen_losses, cases=cases):
        assert found == dict.fromkeys(cases, expected)


def test_stages_are_unfrozen_while_they_train_in_mixed_precision():
    expected = pytest.approx(unfrozen_losses(precision="bf16-mixed"), rel=0.02)
    for found in in_ranks(unfrozen_losses, 2, precision="bf16-mixed", pp=2, microbatches=1):
        assert found == expected


def test_ranks_without_gradients_take_part_in_clipping_in_float64():
    training, precision = {"clip": 0.05, "steps": 3}, "64-true"
    expected = single_device_losses(FirstFrozen(), precision, **training)
    for found in in_ranks(losses, 2, training=training, module_class=FirstFrozen, precision=precision, pp=2):
        assert found == pytest.approx(expected, rel=1e-6, abs=0)


class SharedNet(PipeNet):
    """Has a parameter in the first and the last stage."""

    def make_layers(self):
        super().make_layers()
        self.enter, self.leave = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
        self.leave.weight = self.enter.weight

    def forward(self, x):
        x = self.enter(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(self.leave(x))

    def configure_pipeline(self):
        layers = [self.first, self.enter, *self.blocks, self.leave, self.last]
        return Pipeline(model=self, layers=layers, loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]))


def shared_losses(cluster, **options):
    return losses(cluster, WAYS["accumulation and clipping"], module_class=SharedNet, **options)


def test_a_parameter_of_two_stages_is_trained_as_one():
    expected = single_device_losses(SharedNet(), **WAYS["accumulation and clipping"])
    ways = (
        *({"pp": 4}, {"pp": 2, "tp": 2}),  # whose meshes are equal in part
        *({"pp": 2, "dp_shard": 2}, {"pp": 2, "meta": True}, {"pp": 2, "schedule": "Interleaved1F1B"}),
    )
    cases = {str(options): options for options in ways}
    for found in in_ranks(each, 4, function=shared_losses, cases=cases):
        assert found == dict.fromkeys(cases, pytest.approx(expected, rel=1e-6, abs=0))


def groups_of_messages(cluster):
    """Return the names of all groups in which this rank has sent or received, and the ranks of each."""
    used, exchange = {}, dist.batch_isend_irecv

    def record(messages):
        used.update((message.group.group_name, dist.get_process_group_ranks(message.group)) for message in messages)
        return exchange(messages)

    dist.batch_isend_irecv = record
    try:
        losses(cluster, {"steps": 1}, module_class=SharedNet, pp=4)
    finally:
        dist.batch_isend_irecv = exchange
    return used


def test_messages_of_a_shared_parameter_have_a_group_without_other_ranks():
    found = in_ranks(groups_of_messages, 4)
    for used in found:
        for name, ranks in used.items():  # the first messages in a group of NCCL wait for all ranks of it
            assert all(name in found[rank] for rank in ranks)


def messages_before_a_step(cluster, **options):
    """Return how many messages each way of the pipeline has had on this rank after the setup."""
    strategy = started(cluster, **options)
    counts = [number_begun(group) for group in strategy._pipeline._links.groups]
    strategy.teardown()
    return counts


def test_neighbours_are_connected_before_the_first_step():
    for counts in in_ranks(messages_before_a_step, pp=2, schedule="Interleaved1F1B"):
        assert len(counts) == 4
        assert min(counts) > 0


def groups_of_a_step(cluster, **options):
    """Return the number of messages in a step by the names of groups, and the names of groups with collectives."""
    strategy = started(cluster, **options)
    groups = {group.group_name: group for group in strategy._pipeline._links.groups}
    before = {name: number_begun(group) for name, group in groups.items()}
    train(strategy, steps=1)
    counts = {name: number_begun(group) - before[name] for name, group in groups.items()}
    collective = {dist.group.WORLD.group_name, strategy.device_mesh.get_group("pp").group_name}
    strategy.teardown()
    return counts, collective


def test_activations_have_groups_without_collectives():
    for counts, collective in in_ranks(groups_of_a_step, pp=2):
        assert len(counts) == 2  # activations and gradients
        assert min(counts.values()) > 0
        assert not counts.keys() & collective


class Unused(SharedNet):
    """Its layers with the shared parameter are in use later: neither of them at first, and then one."""

    used = ()

    def forward(self, x):
        return self.compute([self.first, self.enter, *self.blocks, self.leave, self.last], x)

    def compute(self, layers, value, _batch=None):
        for layer in layers:
            if layer not in (self.enter, self.leave) or layer in self.used:
                value = layer(value)
        return value

    def configure_pipeline(self):
        return dataclasses.replace(super().configure_pipeline(), compute=self.compute)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


def unused_losses(cluster=None, **options):
    if cluster is None:
        strategy = SingleDeviceStrategy()
        start(strategy, Unused(), parts())
    else:
        strategy = started(cluster, module_class=Unused, **options)
    module, found = strategy.module, []
    for used in ((), (module.leave,), (), (module.enter,), (module.enter, module.leave)):
        module.used = used
        found += train(strategy, steps=2, clip=0.1)
    strategy.teardown()
    return found


def test_a_parameter_of_two_stages_without_a_gradient_is_not_stepped():
    expected = pytest.approx(unused_losses(), rel=1e-6, abs=0)
    cases = {str(options): options for options in ({"pp": 2, "dp_shard": 2}, {"pp": 4})}
    for found in in_ranks(each, 4, function=unused_losses, cases=cases):
        assert found == dict.fromkeys(cases, expected)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.scale * x


class ScaledNet(PipeNet):
    """Has a scalar in a block, and one in two stages."""

    def make_layers(self):
        super().make_layers()
        self.blocks[1].norm = Scale()
        self.enter, self.leave = Scale(), Scale()
        self.leave.scale = self.enter.scale

    forward = SharedNet.forward
    configure_pipeline = SharedNet.configure_pipeline


def scaled_losses(cluster, **options):
    return losses(cluster, WAYS["accumulation and clipping"], module_class=ScaledNet, **options)


def test_scalars_of_one_stage_and_of_two_are_trained():
    expected = single_device_losses(ScaledNet(), **WAYS["accumulation and clipping"])
    layouts = ({"pp": 2, "dp_shard": 2}, {"pp": 2, "dp_replicate": 2}, {"pp": 2, "tp": 2}, {"dp_shard": 2, "tp": 2})
    cases = {str(options): options for options in layouts}
    for found in in_ranks(each, 4, function=scaled_losses, cases=cases):
        assert found == dict.fromkeys(cases, pytest.approx(expected, rel=1e-6, abs=0))


class GatedBlock(Block):
    def __init__(self, width):
        super().__init__(width)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.down(self.gate * torch.tanh(self.up(self.norm(x))))


class GatedNet(PipeNet):
    """Has scalars between layers that are split."""

    def make_layers(self):
        super().make_layers()
        self.blocks = nn.ModuleList(GatedBlock(10) for _ in range(3))


def error_of_gates(cluster, **options):
    strategy = started(cluster, module_class=GatedNet, **options)
    return misuse_in_a_step(strategy)


def test_a_scalar_with_the_gradient_of_a_part_of_the_features_is_refused():
    layouts = ({"pp": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2})
    for found in in_ranks(each, 4, function=error_of_gates, cases={str(options): options for options in layouts}):
        for message in found.values():
            assert "differs between the 2 ranks that share a batch, and so would its replicas" in str(message)


# Full state, of which each stage has its layers


def saved_and_loaded(cluster, **options):
    first = started(cluster, **options)
    train(first, steps=2)
    written = io.BytesIO()
    torch.save((first.module_state_dict(), first.optimizer_state(first.optimizers[0])), written)
    expected = train(first, steps=2)
    second = started(cluster, **options)
    module, optimizer = torch.load(io.BytesIO(written.getvalue()))  # empty on other ranks than 0
    second.load_module_state_dict(module)
    second.load_optimizer_state(second.optimizers[0], optimizer)
    found = train(second, steps=2)
    second.teardown()
    return written.getvalue(), found == expected, expected


def test_full_state_comes_from_all_stages_and_goes_to_them():
    cases = {module_class: {"pp": 2, "tp": 2, "module_class": module_class} for module_class in (SharedNet, ScaledNet)}
    ranks = in_ranks(each, 4, function=saved_and_loaded, cases=cases)
    for module_class in cases:
        (written, _, expected), (other, *_), *_ = everywhere = [found[module_class] for found in ranks]
        assert [resumes for _, resumes, _ in everywhere] == [True] * 4
        assert torch.load(io.BytesIO(other)) == ({}, {})
        alone = SingleDeviceStrategy()
        start(alone, module_class(), parts())
        module, optimizer = torch.load(io.BytesIO(written))
        alone.load_module_state_dict(module)
        alone.load_optimizer_state(alone.optimizers[0], optimizer)
        assert train(alone, steps=2) == pytest.approx(expected, rel=1e-5)
        alone.teardown()


def replaced(cluster):
    """Return whether a single file with other weights has those of all stages."""
    strategy = started(cluster, pp=2)
    strategy.components = dataclasses.replace(strategy.components, checkpoint_io=TorchCheckpointIO())
    state = module_entries(strategy)["state_dict"]
    before = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        weights = {name: value + 1 for name, value in strategy.local_weights().items()}
    after = replaced_weights(strategy, state, weights)
    strategy.teardown()
    return {name: torch.equal(after[name], value + 1) for name, value in before.items()}


def test_a_file_with_averaged_weights_has_those_of_all_stages():
    first, last = in_ranks(replaced)
    assert first == dict.fromkeys(PipeNet().state_dict(), True)
    assert last == {}


# What does not fit is refused


class Tied(PipeNet):
    def make_layers(self):
        super().make_layers()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Normed(PipeNet):
    def make_layers(self):
        super().make_layers()
        self.blocks[0].norm = nn.BatchNorm1d(10)


class NormedWithoutState(PipeNet):
    def make_layers(self):
        super().make_layers()
        self.blocks[0].norm = nn.BatchNorm1d(10, affine=False, track_running_stats=False)


class Centered(PipeNet):
    class Center(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(10))

        def forward(self, x):
            self.running_mean.lerp_(x.detach().mean(0), 0.5)
            return x - self.running_mean

    def make_layers(self):
        super().make_layers()
        self.blocks[0].norm = self.Center()


class Normalizing(torch.optim.SGD):
    """Divides gradients by the norm of all of them."""

    def step(self, closure=None):
        gradients = [parameter.grad for parameter in self.param_groups[0]["params"] if parameter.grad is not None]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)


class Normalized(PipeNet):
    def configure_optimizers(self):
        return Normalizing(self.parameters(), lr=0.1)


class Outside(PipeNet):
    def make_layers(self):
        super().make_layers()
        self.scale = nn.Parameter(torch.ones(1))


class Unordered(PipeNet):
    def configure_pipeline(self):
        return Pipeline(model=self, loss=lambda output, batch: output.mean())


class OtherLoss(PipeNet):
    def training_step(self, batch, batch_idx):
        return 2 * super().training_step(batch, batch_idx)


class Doubling:
    training_step = OtherLoss.training_step


class MixedIn(Doubling, PipeNet):
    pass


class OtherPipeline(OtherLoss):
    def configure_pipeline(self):
        pipeline = super().configure_pipeline()
        return dataclasses.replace(pipeline, loss=lambda *values: 2 * pipeline.loss(*values))


def refusal(cluster, module_class, **options):
    strategy = MeshStrategy(pp=2, **options)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    strategy.connect({"BlockNet": BlockNet, **globals()}[module_class]())
    try:
        strategy.setup(Run(strategy.module))
        strategy.training_step(next(batches(1, 8)), 0)
    except DstratError as error:
        strategy.barrier()  # the other rank may still wait for the comparison of batches
        return str(error)
    finally:
        strategy.teardown()


def test_what_a_pipeline_cannot_do_is_refused():
    cases = {
        "the parameter 'blocks.0.up.weight' is in stages 0 and 1 of the pipeline": {"module_class": "Tied"},
        "Normed has a BatchNorm1d, which normalizes over a batch": {"module_class": "Normed"},
        "NormedWithoutState has a BatchNorm1d, which normalizes over": {"module_class": "NormedWithoutState"},
        "Centered has a Center, which keeps running statistics of batches": {"module_class": "Centered"},
        "Normalizing cannot step the stages of a pipeline (its step of": {"module_class": "Normalized"},
        "the pipeline has no layer with the parameter 'scale' of Outside": {"module_class": "Outside"},
        "OtherLoss overrides training_step of PipeNet, which stages do not call": {"module_class": "OtherLoss"},
        "MixedIn overrides training_step of PipeNet, which stages do not call": {"module_class": "MixedIn"},
        "BlockNet has no configure_pipeline, which a pipeline (pp) needs": {"module_class": "BlockNet"},
        "Pipeline(model=Unordered) does not say in which order": {"module_class": "Unordered"},
        "the pipeline has 5 layers, and each of its 6 stages needs one": {
            "module_class": "PipeNet",
            "schedule": "LoopedBFS",
            "stages_per_rank": 3,
        },
    }
    for found in in_ranks(each, function=refusal, cases=cases):
        for expected, message in found.items():
            assert message.startswith(expected)


def test_a_subclass_may_have_another_loss_and_its_pipeline():
    expected = single_device_losses(OtherPipeline(), steps=2)
    for found in in_ranks(losses, training={"steps": 2}, module_class=OtherPipeline, pp=2):
        assert found == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp": 2, "schedule": "ZBVZeroBubble"}, "choose schedule='InterleavedZeroBubble', which fills idle time"),
        (
            {"pp": 2, "schedule": "1f1b"},
            "schedule='1f1b' is not known: choose among '1F1B', 'GPipe', 'Interleaved1F1B'",
        ),
        ({"microbatches": 4}, "give pp=2 or more"),
        ({"stages_per_rank": 2}, "schedule='1F1B' has one stage for each rank, and stages_per_rank=2 asks for more"),
        ({"pp": 2, "schedule": "LoopedBFS", "stages_per_rank": 0}, "stages_per_rank=0 is not a positive number"),
        (
            {"pp": 4, "schedule": "Interleaved1F1B", "microbatches": 6},
            "microbatches=6 is no multiple of pp=4, and schedule='Interleaved1F1B'",
        ),
        ({"pp": 2, "state_dict_type": "full"}, "would leave all layers on each rank"),
        ({"pp": 0}, "pp=0 is not a positive number"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(RequestError) as error:
        MeshStrategy(**options)
    assert message in str(error.value)


def test_the_plan_shows_stages_and_the_bubble():
    rows = {subject.strip(): (value, reason) for subject, value, reason in MeshStrategy(pp=2).describe_layout(4, 4)}
    assert rows["mesh"][0] == "pp 2 x dp_shard 2"
    assert rows["pp"] == ("[0, 2] [1, 3]", "stages of the model")
    assert rows["schedule"] == ("1F1B, 2 microbatches", "idle 33% of the time: the bubble")
    (*_, row) = MeshStrategy(pp=2, schedule="Interleaved1F1B").describe_layout(2, 2)
    assert row == (
        "  schedule",
        "Interleaved1F1B, 2 stages per rank, 2 microbatches",
        "idle 20% of the time: the bubble",
    )


def logged_stages(cluster):
    messages, logger = [], logging.getLogger("dstrat_mesh")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        started(cluster, pp=2).teardown()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return messages


def test_the_first_rank_logs_the_layers_of_each_stage():
    first, second = in_ranks(logged_stages)
    titles, layers = zip(*(message.split(": ") for message in first), strict=True)
    assert titles == ("stage 0 of the pipeline", "stage 1 of the pipeline")
    blocks = [f"blocks.{number}" for number in range(len(PipeNet().blocks))]
    assert ", ".join(layers) == ", ".join(["first", *blocks, "last"])
    assert second == []


class Adaptive(PipeNet):
    """Has an optimizer that makes its state in the constructor."""

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def held(cluster, module_class):
    strategy = started(cluster, pp=2, module_class=module_class)
    train(strategy, steps=1)
    own = [name for name, parameter in strategy.module.named_parameters() if not parameter.is_meta]
    state = strategy.sharded_optimizer_state(strategy.optimizers[0])["state"]
    strategy.teardown()
    return sorted(own), sorted(state)


@pytest.mark.parametrize("module_class", [PipeNet, Adaptive])
def test_a_rank_has_the_layers_of_its_stage_only(module_class):
    first, last = in_ranks(held, module_class=module_class)
    assert sorted([*first[0], *last[0]]) == sorted(name for name, _ in PipeNet().named_parameters())
    assert min(len(first[0]), len(last[0])) > 0
    assert (first[0], last[0]) == (first[1], last[1])

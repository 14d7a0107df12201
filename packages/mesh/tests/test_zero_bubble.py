"""The schedule InterleavedZeroBubble: losses of one device on each layout, gradients in two parts, and refusals."""

import copy
import gc
import weakref

import pytest
import torch
from packages.mesh.tests import context_fits, pipeline_fits, test_experts, test_pipeline
from packages.mesh.tests.test_pipeline import (
    WAYS,
    DeepNet,
    FirstFrozen,
    HalfFrozen,
    PipeNet,
    ScaledNet,
    SharedNet,
    started,
)
from tests.hand_loop import Block, one_pass, single_device_losses
from tests.hand_loop import batches as hand_batches
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from tests.ways_of_training import SHORT
from torch import nn
from torch.utils.data import DataLoader

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat_mesh import MeshStrategy
from dstrat_mesh.schedule import PassKind, Schedule
from dstrat_mesh.split_backward import backward_to_input

ZERO_BUBBLE = {"schedule": "InterleavedZeroBubble"}
ACCUMULATED = WAYS["accumulation and clipping"]

LAYOUTS = {
    2: [
        {"pp": 2, "stages_per_rank": 1},
        {"pp": 2, "stages_per_rank": 1, "microbatches": 5},
        {"pp": 2, "stages_per_rank": 2, "microbatches": 4},
    ],
    4: [
        {"pp": 4, "stages_per_rank": 1, "microbatches": 6},
        {"pp": 2, "dp_shard": 2, "stages_per_rank": 2},
        {"pp": 2, "dp_replicate": 2, "stages_per_rank": 2},
        {"pp": 2, "tp": 2, "stages_per_rank": 1, "microbatches": 4},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_losses_of_twenty_steps_are_those_of_one_device(ranks):
    ways = {"plain": {}, "accumulation and clipping": ACCUMULATED}
    expected = {name: single_device_losses(PipeNet(), **training) for name, training in ways.items()}
    cases = {
        f"{name}: {layout}": {"training": training, **ZERO_BUBBLE, **layout}
        for name, training in ways.items()
        for layout in LAYOUTS[ranks]
    }
    for found in in_ranks(each, ranks, function=test_pipeline.losses, cases=cases):
        for case, losses in found.items():
            assert losses == pytest.approx(expected[case.split(":")[0]], rel=1e-6, abs=0), case


NETS = [  # module, options of the layout
    (FirstFrozen, {"pp": 4, "stages_per_rank": 1}),
    (FirstFrozen, {"pp": 2, "stages_per_rank": 2, "dp_shard": 2}),
    (HalfFrozen, {"pp": 2, "stages_per_rank": 2, "dp_shard": 2}),
    (SharedNet, {"pp": 4, "stages_per_rank": 1}),
    (SharedNet, {"pp": 2, "stages_per_rank": 2, "dp_shard": 2}),
    (ScaledNet, {"pp": 2, "stages_per_rank": 2, "dp_shard": 2}),
    (ScaledNet, {"pp": 2, "stages_per_rank": 1, "dp_replicate": 2}),
    (PipeNet, {"pp": 2, "stages_per_rank": 1, "dp_shard": 2, "cpu_offload": True}),
]


def test_frozen_layers_shared_weights_and_scalars_train_as_on_one_device():
    expected, cases = {}, {}
    for module_class, layout in NETS:
        name = f"{module_class.__name__} {layout}"
        cases[name] = {"training": ACCUMULATED, "module_class": module_class, **ZERO_BUBBLE, **layout}
        expected[name] = pytest.approx(single_device_losses(module_class(), **ACCUMULATED), rel=1e-6, abs=0)
    for found in in_ranks(each, 4, function=test_pipeline.losses, cases=cases):
        assert found == expected


def test_four_ranks_compute_in_eight_stages():
    expected = pytest.approx(single_device_losses(DeepNet(), **SHORT), rel=1e-6, abs=0)
    options = {"pp": 4, "microbatches": 8, "module_class": DeepNet}
    assert in_ranks(test_pipeline.losses, 4, training=SHORT, **ZERO_BUBBLE, **options) == [expected] * 4


def test_stages_are_unfrozen_while_they_train():
    expected = pytest.approx(test_pipeline.unfrozen_losses(), rel=1e-6, abs=0)
    for found in in_ranks(test_pipeline.unfrozen_losses, 2, pp=2, **ZERO_BUBBLE):
        assert found == expected


def in_mixed_precision(cluster, **options):
    return test_pipeline.losses(cluster, ACCUMULATED, precision="bf16-mixed", pp=2, dp_shard=2, **options)


def test_mixed_precision_computes_as_with_other_schedules():
    options = {"stages_per_rank": 2, "microbatches": 4}
    cases = {name: {"schedule": name, **options} for name in ("Interleaved1F1B", "InterleavedZeroBubble")}
    for found in in_ranks(each, 4, function=in_mixed_precision, cases=cases):
        assert found["InterleavedZeroBubble"] == found["Interleaved1F1B"]


# Other axes


def with_experts(cluster, **options):
    return test_experts.losses(cluster, ACCUMULATED, **options)[0]


def test_experts_are_divided_in_its_stages():
    expected = single_device_losses(test_experts.MixtureNet(), **ACCUMULATED)
    layouts = ({"ep": 2, "pp": 2, "stages_per_rank": 1}, {"ep": 2, "pp": 2, "stages_per_rank": 2})
    cases = {str(layout): {**ZERO_BUBBLE, **layout} for layout in layouts}
    for found in in_ranks(each, 4, function=with_experts, cases=cases):
        assert found == dict.fromkeys(cases, pytest.approx(expected, rel=1e-6, abs=0))


def with_sequences(cluster, **options):
    strategy = MeshStrategy(pp=2, cp=2, **ZERO_BUBBLE, **options)
    return context_fits.fit(strategy, cluster.world_size, 8, max_steps=10, plugins=[cluster]).losses


def test_sequences_are_divided_in_its_stages():
    expected = context_fits.fit("single_device", 1, 8, max_steps=10).losses
    cases = {
        f"{method} {count}": {"context_parallel": method, "stages_per_rank": count}
        for method in ("ulysses", "ring")
        for count in (1, 2)
    }
    for found in in_ranks(each, 4, function=with_sequences, cases=cases):
        assert found == dict.fromkeys(cases, pytest.approx(expected, rel=1e-6))


# Checkpoints


def moved(cluster, folder):
    """Train three steps with either schedule, and go on with the other."""
    options = {"plugins": [cluster], "gradient_clip_val": 0.1}
    found = {}
    for first, second in (("1F1B", "InterleavedZeroBubble"), ("InterleavedZeroBubble", "1F1B")):
        path = str(folder / first)
        strategies = [MeshStrategy(pp=2, schedule=name, stages_per_rank=1) for name in (first, second)]
        saved, _ = pipeline_fits.fit(strategies[0], 2, 8, path=path, max_steps=3, **options)
        continued, _ = pipeline_fits.fit(strategies[1], 2, 8, ckpt=path, max_steps=6, **options)
        found[first] = saved.losses + continued.losses
    return found


def test_a_checkpoint_moves_to_and_from_another_schedule(tmp_path):
    module, _ = pipeline_fits.fit("single_device", 1, 8, max_steps=6, gradient_clip_val=0.1)
    for found in in_ranks(moved, 2, folder=tmp_path):
        for losses in found.values():
            assert losses == pytest.approx(module.losses, rel=1e-6)


# Memory


class Saved:
    """An activation that is saved for backward passes."""

    def __init__(self, tensor):
        self.tensor = tensor


class CountingBlock(Block):
    """Counts the calls whose activations are in memory."""

    def forward(self, x):
        activations = weakref.WeakSet()
        self.calls.append(activations)

        def pack(tensor):
            saved = Saved(tensor.detach())  # an output that refers to its graph would be a cycle
            activations.add(saved)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            output = super().forward(x)
        self.held.append(sum(map(bool, self.calls)))
        return output


class CountingNet(PipeNet):
    def make_layers(self):
        super().make_layers()
        self.blocks = nn.ModuleList(CountingBlock(10) for _ in range(4))
        for block in self.blocks:
            block.calls, block.held = [], []


def held_microbatches(cluster, schedule):
    """Return how many microbatches a rank's block holds after each of its forward passes, and at the end."""
    options = {"pp": 3, "stages_per_rank": 1, "microbatches": 8, "schedule": schedule}
    strategy = started(cluster, module_class=CountingNet, **options)
    gc.disable()  # activations are freed by the last reference
    one_pass(strategy, next(hand_batches(1)), 0, accumulate=1)
    gc.enable()
    block = next(block for block in strategy.module.blocks if block.calls)
    remaining = sum(map(bool, block.calls))
    strategy.teardown()
    return [*block.held, remaining]


def expected_microbatches(schedule, rank):
    held, counts = 0, []
    for step in schedule.passes(rank):
        held += step.kind is PassKind.FORWARD
        held -= step.kind is (PassKind.WEIGHTS if schedule.splits_backward else PassKind.BACKWARD)
        counts += [held] if step.kind is PassKind.FORWARD else []
    return [*counts, held]


@pytest.mark.parametrize("name", ["1F1B", "InterleavedZeroBubble"])
def test_a_rank_holds_activations_as_its_schedule_says(name):
    schedule = Schedule.of(name, 3, 1, 8)
    assert in_ranks(held_microbatches, 3, schedule=name) == [expected_microbatches(schedule, rank) for rank in range(3)]


# Gradients in two parts


class Mixed(nn.Module):
    """Has weights of one operation, of several, of a product of weights, and of an operation of Python."""

    def __init__(self):
        super().__init__()
        self.norm, self.heads, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8, bias=False)
        self.shared, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.positions, self.slope = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(8))
        self.lstm, self.unused = nn.LSTM(8, 8, batch_first=True), nn.Linear(2, 2)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        x = x + self.positions
        x.register_hook(lambda gradient: gradient * 2)
        attended = nn.functional.scaled_dot_product_attention(*self.heads(self.norm(x)).chunk(3, -1), is_causal=True)
        x = x + self.out(attended) * self.gain
        x = self.shared(self.shared(x).relu()) + x * self.gain
        x = x + self.attention(self.norm(x), x, x, need_weights=False)[0]
        scaled = self.normed(x)
        scaled.register_hook(lambda gradient: gradient * 2)
        x = self.frozen(Product.apply(x + scaled, self.slope))
        return self.lstm(x)[0].reshape(len(x), -1)  # a view


class Product(torch.autograd.Function):
    """Counts its backward passes."""

    num_backward = 0

    @staticmethod
    def forward(ctx, x, factors):
        ctx.save_for_backward(x, factors)
        return x * factors

    @staticmethod
    def backward(ctx, gradient):
        Product.num_backward += 1
        x, factors = ctx.saved_tensors
        return gradient * factors, (gradient * x).sum((0, 1))


def test_gradients_in_two_parts_are_those_of_one_pass():
    torch.manual_seed(0)
    expected = Mixed().double()
    module = copy.deepcopy(expected)
    for _ in range(2):  # they accumulate
        x, gradient = torch.randn(3, 5, 8).double(), torch.randn(3, 40).double()
        first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected(first).backward(gradient)
        num_backward = Product.num_backward
        earlier = copy.deepcopy(module.heads.weight.grad)
        weights = backward_to_input(module(second), gradient, second)
        torch.testing.assert_close(second.grad, first.grad)
        assert module.heads.weight.grad is earlier is None or torch.equal(module.heads.weight.grad, earlier)
        weights.compute()
        assert Product.num_backward == num_backward + 1
        for (name, parameter), other in zip(module.named_parameters(), expected.parameters(), strict=True):
            assert (parameter.grad is None) == (other.grad is None) == (name.startswith(("unused", "frozen"))), name
            if other.grad is not None:
                torch.testing.assert_close(parameter.grad, other.grad, msg=name)


def test_an_output_that_does_not_depend_on_the_input_has_gradients_of_weights():
    layer, received = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    backward_to_input(layer(received.detach()).sum(), None, received).compute()
    assert received.grad is None
    torch.testing.assert_close(layer.bias.grad, torch.full((2,), 4.0))


# Compiled layers, and what is refused


def compiled(cluster):
    module = pipeline_fits.Net()
    module.net[2].compile(backend="eager")
    trainer = quiet_trainer(MeshStrategy(pp=2, stages_per_rank=1, **ZERO_BUBBLE), cluster)
    with pytest.raises(MisuseError) as error:
        trainer.fit(module, DataLoader(pipeline_fits.data(), batch_size=8))
    return str(error.value)


def test_compiled_layers_are_refused():
    for message in in_ranks(compiled, 2):
        assert message.startswith("net.2 is compiled, and compiled code computes its gradients in one pass, which sch")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_checkpointing": "full"}, "reads saved activations in two passes, and activation_checkpointing"),
        ({"activation_offload": True}, "leave them out, or choose 'Interleaved1F1B' or '1F1B'"),
        ({"reshard_after_forward": True}, "stay gathered for a batch: leave reshard_after_forward=True out, or choose"),
        ({"schedule": "ZBVZeroBubble"}, "has the first and the last stage on one rank, and here stage s is on rank"),
        ({"schedule": "DualPipeV"}, "choose schedule='InterleavedZeroBubble'"),
        ({"microbatches": 3}, "microbatches=3 is no multiple of pp=2, and schedule='InterleavedZeroBubble'"),
    ],
)
def test_what_it_cannot_do_is_refused(options, message):
    with pytest.raises((ConflictError, RequestError)) as error:
        MeshStrategy(pp=2, **{**ZERO_BUBBLE, **options})
    assert message in str(error.value)


def test_the_plan_shows_its_idle_time():
    (*_, row) = MeshStrategy(pp=2, stages_per_rank=1, **ZERO_BUBBLE).describe_layout(2, 2)
    assert row == ("  schedule", "InterleavedZeroBubble, 2 microbatches", "idle 14% of the time: the bubble")

"""What a mesh declares to send in a step is what its ranks send; and what they hold in it."""

import weakref
from collections import Counter

import pytest
import torch
from tests.hand_loop import Block, Net, Run, batches, one_pass, parts
from tests.ranks import each, in_ranks
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dstrat import Pipeline
from dstrat.builtin.precision.true import TruePrecision
from dstrat.cli.estimate.fake_step import TrainingSetup, measure_training
from dstrat.cli.estimate.ranks import memory_of_ranks
from dstrat.parallel.internals import DispatchMode, RecordedCollectives
from dstrat.parallel.shards import local_tensor
from dstrat_mesh import MeshStrategy

WIDTH, SAMPLES, DATA_RANKS = 6, 4, 2
EXPERTS, CHOICES = 4, 2


class Blocks(Net):
    """Equal blocks, and nothing outside of them."""

    def make_layers(self):
        self.layers = nn.Sequential(*(Block(WIDTH) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_pipeline(self):
        return Pipeline(model=self.layers, loss=lambda output, batch: output.square().mean())


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, tokens, index, weights):
        return (torch.einsum("tw,tkwo->tko", tokens, self.weight[index]) * weights.unsqueeze(-1)).sum(1)


class Mixture(Block):
    """A block whose experts get as many tokens each."""

    def __init__(self):
        super().__init__(WIDTH)
        self.experts = Experts()

    def forward(self, x):
        x = super().forward(x)
        index = torch.arange(CHOICES * len(x), device=x.device).view(-1, CHOICES) % EXPERTS
        return x + self.experts(x, index, x[:, :CHOICES].sigmoid())


class Mixtures(Blocks):
    def make_layers(self):
        self.layers = nn.Sequential(*(Mixture() for _ in range(4)))

    def configure_experts(self):
        return [layer.experts for layer in self.layers]


def sizes(samples, module_class=Blocks):
    """The sizes of a training of the blocks on four ranks."""

    def make():
        batch = [torch.zeros(samples, WIDTH), torch.zeros(samples, 3)]
        return TrainingSetup(module=module_class(), batch=batch, make_optimizers=lambda one: one.configure_optimizers())

    return measure_training(make, TruePrecision(), device_type="cpu", world_size=4, ranks_per_machine=4)


def totals(collectives):
    """Bytes and number of collectives, by kind."""
    sums, numbers = Counter(), Counter()
    for one in collectives:
        sums[one.kind] += one.bytes
        numbers[one.kind] += one.messages
    return {kind: (sums[kind], numbers[kind]) for kind in sums}


def started(cluster, module_class=Blocks, **options):
    strategy = MeshStrategy(**options)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    module = module_class()
    if strategy.tensor_parallel_size > 1:
        for block in module.layers:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, strategy.device_mesh["tp"], plan)
    strategy.connect(module)
    strategy.setup(Run(strategy.module))
    return strategy


def third_step(strategy, mode, samples=SAMPLES):
    """Take three steps, the third in a mode that sees each operation, and end the run.

    In the first two ranks compare their batches.
    """
    *earlier, third = batches(3, samples * strategy.data_parallel_size)
    for batch in earlier:
        one_pass(strategy, batch, 0, 1)
        strategy.optimizers[0].zero_grad()
    with mode:
        one_pass(strategy, third, 1, 1)
    strategy.teardown()


def sent(cluster, **options):
    """What a rank sends in its third step."""
    recorded = RecordedCollectives()
    third_step(started(cluster, **options), recorded)
    return totals(recorded.collectives)


def test_stages_send_what_is_declared_for_their_microbatches():
    layouts = [{"pp": 2, "microbatches": 4}, {"pp": 2, "tp": 2, "microbatches": 4}]
    training = sizes(SAMPLES)
    declared = [totals(MeshStrategy(**one).communication_layout(training).collectives) for one in layouts]
    first, _, last, _ = in_ranks(each, 4, function=sent, cases={str(one): one for one in layouts})
    for layout, expected in zip(layouts, declared, strict=True):
        found, of_last = first[str(layout)], last[str(layout)]
        forward, backward = found.pop("send"), of_last.pop("send")  # a stage between others sends both
        loss = (4, 1)  # in float32, from the last stage: not declared
        declared_size, declared_messages = expected.pop("send")
        assert forward[0] + backward[0] == declared_size + loss[0]
        assert forward[1] + backward[1] == declared_messages + loss[1]
        # Torch gathers a block once too often, ahead of a backward pass.
        assert found == {kind: pytest.approx(numbers, rel=0.07) for kind, numbers in expected.items()}


def test_experts_exchange_the_declared_tokens():
    layouts = [{"ep": 2}, {"ep": 4, "tp": 2}, {"ep": 2, "pp": 2, "microbatches": 2}]
    training = sizes(SAMPLES, Mixtures)
    cases = {str(one): {"module_class": Mixtures, **one} for one in layouts}
    first = in_ranks(each, 4, function=sent, cases=cases)[0]
    for layout in layouts:
        expected = totals(MeshStrategy(**layout).communication_layout(training).collectives)
        expected.pop("send", None)  # of stages, as above
        for kind, (size, messages) in expected.items():
            numbers_of_tokens = kind == "all_to_all" and 8 * EXPERTS * messages // 5
            # Torch gathers one of eight blocks once too often, as above.
            assert first[str(layout)][kind] == pytest.approx((size + numbers_of_tokens, messages), rel=0.13), (
                layout,
                kind,
            )


def held(cluster, **options):
    strategy = started(cluster, module_class=Mixtures, **options)
    state = strategy.sharded_module_state().values()
    strategy.teardown()
    return sum(local_tensor(value).nbytes for value in state)


def test_a_rank_holds_the_declared_share_of_the_experts():
    training = sizes(SAMPLES, Mixtures)
    layouts = [{"ep": 2}, {"ep": 4}, {"ep": 2, "dp_replicate": 2}]
    ranks = in_ranks(each, 4, function=held, cases={str(one): one for one in layouts})
    for layout in layouts:
        declared = MeshStrategy(**layout).memory_layout(training)
        assert max(rank[str(layout)] for rank in ranks) == declared.parameters
        assert declared.assumption == "all experts get as many tokens"


class LiveSends(DispatchMode):
    """Counts the tensors that were sent and are still in memory: at most, and when the last one is sent."""

    live = largest = at_last = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(cls not in (torch.Tensor, nn.Parameter) for cls in types):
            return NotImplemented
        output = function(*args, **(kwargs or {}))
        if str(function) == "c10d.send.default":
            for tensor in args[0]:
                self.live += 1
                weakref.finalize(tensor.untyped_storage(), self.forget)
            self.largest, self.at_last = max(self.largest, self.live), self.live
        return output

    def forget(self):
        self.live -= 1


def live_sends(cluster, samples, **options):
    mode = LiveSends()
    third_step(started(cluster, **options), mode, samples)
    return mode.largest, mode.at_last


SHORT_AND_LONG = [
    {"pp": 2, "microbatches": count, "samples": count, "schedule": schedule}
    for schedule in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
    for count in (4, 16)
]


def test_sent_tensors_are_freed_when_they_have_arrived():
    for largest in in_ranks(each, 2, function=live_sends, cases={str(one): one for one in SHORT_AND_LONG}):
        short, long, *of_two_stages = (one for one, _ in largest.values())
        assert 0 < long <= short <= 3
        for few, many in zip(of_two_stages[::2], of_two_stages[1::2], strict=True):
            assert 0 < many <= few <= 8


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
def test_gradients_do_not_pile_up_after_the_last_forward_pass(schedule):
    cases = {"": {"pp": 2, "microbatches": 16, "samples": 16, "schedule": schedule}}
    _, last = in_ranks(each, 2, function=live_sends, cases=cases)
    assert last[""][1] <= 5  # of 16, and of as many outputs where each rank has two stages


def test_stages_hold_whole_gradients_of_several_microbatches():
    training = sizes(SAMPLES)
    one, four = (MeshStrategy(pp=2, microbatches=count).memory_layout(training) for count in (1, 4))
    assert four.accumulated - one.accumulated == training.trainable_parameters // 2


def test_layouts_without_shards_gather_and_buffer_nothing():
    training = sizes(SAMPLES)
    for layout in ({"pp": 4, "microbatches": 1}, {"tp": 4}):
        memory = MeshStrategy(**layout).memory_layout(training)
        assert memory.step_buffers == memory.reduction_buffer == memory.accumulated == 0
    one, eight = (MeshStrategy(pp=4, microbatches=count).communication_layout(training) for count in (1, 8))
    assert one.hooks == eight.hooks


def test_a_stage_steps_its_largest_parameter_and_adds_one_gradient_at_a_time():
    training = sizes(SAMPLES)
    assert 2 * training.largest_parameter <= training.optimizer_temporaries < training.parameters  # of one at a time
    stages = [stage.memory for stage in memory_of_ranks(MeshStrategy(pp=4, microbatches=4), training)]
    for memory in (MeshStrategy(pp=4, microbatches=4).memory_layout(training), *stages):
        assert memory.optimizer_temporaries == training.optimizer_temporaries
        assert (memory.step_buffers, memory.reduction_buffer) == (training.largest_parameter, 0)


def test_split_layers_send_parts_of_sequences():
    training = sizes(SAMPLES)
    split, both = (MeshStrategy(**one).communication_layout(training) for one in ({"tp": 2}, {"tp": 2, "cp": 2}))
    whole, part = (totals(layout.collectives)["all_reduce"] for layout in (split, both))
    assert part == (whole[0] // 2, whole[1])


def test_stages_begin_their_operations_for_each_microbatch_and_split_layers_all_of_them():
    training = sizes(SAMPLES)
    layouts = ({"tp": 4}, {"pp": 4, "microbatches": 4}, {"pp": 4, "microbatches": 16})
    assert [MeshStrategy(**one).communication_layout(training).operation_share for one in layouts] == [1, 1, 4]


def test_a_rank_computes_each_microbatch_with_its_share_of_the_weights():
    axes = ({"tp": 4}, {"pp": 2, "tp": 2, "microbatches": 8}, {"cp": 4})
    layouts = [MeshStrategy(**one).communication_layout(sizes(SAMPLES)) for one in axes]
    assert [(one.passes, one.weight_share) for one in layouts] == [(1, 0.25), (8, 0.25), (1, 1.0)]
    few, many = (MeshStrategy(ep=count).communication_layout(sizes(SAMPLES, Mixtures)) for count in (2, 4))
    # One part of the weights is divided by 2 and 4, and the other one is whole.
    assert 0 < few.weight_share - many.weight_share < 0.25
    assert 2 * (1 - few.weight_share) == pytest.approx(4 / 3 * (1 - many.weight_share))


def test_a_rank_moves_its_part_of_activations_of_which_split_layers_have_some_whole():
    axes = ({"cp": 2}, {"pp": 2, "microbatches": 8}, {"tp": 2}, {"pp": 2, "tp": 2})
    layouts = [MeshStrategy(**one).communication_layout(sizes(SAMPLES)) for one in axes]
    sequences, stages, split, both = (one.activation_share for one in layouts)
    assert (sequences, stages) == (0.5, 0.5)
    assert 0.5 < split < 1
    assert both == pytest.approx(split / 2)


def test_python_takes_time_for_each_microbatch_and_for_split_matrices():
    axes = ({"pp": 2}, {"pp": 2, "microbatches": 8}, {}, {"tp": 2})
    few, many, whole, split = (MeshStrategy(**one).communication_layout(sizes(SAMPLES)).hooks for one in axes)
    assert few < many
    assert whole < split


def test_fast_pipelines_are_compared_with_other_schedules_of_the_same_mesh():
    options = {"pp": 2, "tp": 2, "microbatches": 8, "cpu_offload": True}
    similar = MeshStrategy.similar_options(options, Blocks())
    assert options in similar
    assert {**options, "microbatches": 4} in similar
    assert {**options, "schedule": "InterleavedZeroBubble", "stages_per_rank": 1} in similar
    assert {**options, "schedule": "Interleaved1F1B", "stages_per_rank": 2} in similar
    assert all(MeshStrategy(**one) and one.keys() >= options.keys() for one in similar)
    assert MeshStrategy.similar_options({"tp": 2}, Blocks()) == []


def gathers(cluster, **options):
    recorded = RecordedCollectives()
    strategy = started(cluster, pp=2, microbatches=4, **options)
    declared = totals(strategy.communication_layout(sizes(SAMPLES)).collectives)["all_gather"]
    third_step(strategy, recorded)
    return totals(recorded.collectives)["all_gather"], declared


def test_a_pipeline_gathers_its_layers_once_in_a_batch_or_in_each_pass():
    cases = {"once": {}, "in each pass": {"reshard_after_forward": True}}
    for of_rank in in_ranks(each, 4, function=gathers, cases=cases):
        once, declared = of_rank["once"]
        assert once == declared == (once[0], 2)  # two blocks of a stage
        found, declared = of_rank["in each pass"]
        assert declared == (8 * once[0], 8 * 2)
        assert found == pytest.approx(declared, rel=0.07)  # Torch gathers a block once too often, as above


def test_layers_are_gathered_in_each_batch_and_gradients_summed_in_the_last():
    declared = MeshStrategy(dp_replicate=2).communication_layout(sizes(SAMPLES)).collectives
    assert {one.kind: one.in_each_batch for one in declared} == {
        "all_gather": True,
        "reduce_scatter": False,
        "all_reduce": False,
    }


def test_recomputation_sends_once_more_what_the_forward_pass_of_attention_sends():
    def sent(method, **options):
        strategy = MeshStrategy(cp=4, context_parallel=method, **options)
        (one,) = [
            one
            for one in strategy.communication_layout(sizes(SAMPLES)).collectives
            if one.kind == {"ring": "send", "ulysses": "all_to_all"}[method]
        ]
        return one.bytes, one.messages

    for method, forward, both in (("ring", 2 * 3, 2 * 3 + 4 * 4), ("ulysses", 4, 8)):
        usual, again = sent(method), sent(method, activation_checkpointing="full")
        assert again[0] / usual[0] == pytest.approx((both + forward) / both, rel=0.01)
    assert [sent("ring", **options)[1] / 4 for options in ({}, {"activation_checkpointing": "full"})] == [11, 14]


def test_a_stage_with_frozen_layers_has_no_gradients_and_no_state_of_them():
    class Frozen(Blocks):
        def make_layers(self):
            super().make_layers()
            self.layers[:2].requires_grad_(False)

    strategy, training = MeshStrategy(pp=2), sizes(SAMPLES, Frozen)
    first, second = (one.memory for one in memory_of_ranks(strategy, training))
    assert first.parameters == second.parameters > 0
    assert (first.gradients, first.optimizer_state) == (0, 0)
    whole = strategy.memory_layout(training)
    assert second.gradients == 2 * whole.gradients
    assert second.optimizer_state == 2 * whole.optimizer_state


def test_a_stage_gathers_its_own_layers_only():
    class LargeHead(Blocks):
        def make_layers(self):
            super().make_layers()
            self.layers.append(nn.Linear(WIDTH, 100 * WIDTH))

    training = sizes(SAMPLES, LargeHead)
    first, last = memory_of_ranks(MeshStrategy(pp=2), training)
    layers = [training.module.layers[index] for index in (0, -1)]
    block, head = (sum(one.nbytes for one in layer.parameters()) for layer in layers)
    in_block, in_head = (max(one.nbytes for one in layer.parameters()) for layer in layers)
    assert last.layers == ("layers.4",)
    # Four blocks stay gathered, beside a gradient that is added to those of earlier microbatches; of a layer outside of
    # blocks there is also the sum of its gradients.
    assert first.memory.step_buffers == 4 * block + in_block
    assert last.memory.step_buffers == 2 * head + in_head

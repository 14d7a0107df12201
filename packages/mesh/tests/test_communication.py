"""What a mesh declares to send in a step is what its ranks send; and what they hold in it."""

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
from dstrat.parallel.internals import RecordedCollectives
from dstrat_mesh import MeshStrategy

WIDTH, SAMPLES, DATA_RANKS = 6, 4, 2


class Blocks(Net):
    """Equal blocks, and nothing outside of them."""

    def make_layers(self):
        self.layers = nn.Sequential(*(Block(WIDTH) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_pipeline(self):
        return Pipeline(model=self.layers, loss=lambda output, batch: output.square().mean())


def sizes(samples):
    """The sizes of a training of the blocks on four ranks."""

    def make():
        batch = [torch.zeros(samples, WIDTH), torch.zeros(samples, 3)]
        return TrainingSetup(module=Blocks(), batch=batch, make_optimizers=lambda one: one.configure_optimizers())

    return measure_training(make, TruePrecision(), device_type="cpu", world_size=4, ranks_per_machine=4)


def totals(collectives):
    """Bytes and number of collectives, by kind."""
    sums, numbers = Counter(), Counter()
    for one in collectives:
        sums[one.kind] += one.bytes
        numbers[one.kind] += one.messages
    return {kind: (sums[kind], numbers[kind]) for kind in sums}


def sent(cluster, **options):
    """What a rank sends in its second step."""
    strategy = MeshStrategy(**options)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    module = Blocks()
    if strategy.tensor_parallel_size > 1:
        for block in module.layers:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, strategy.device_mesh["tp"], plan)
    strategy.connect(module)
    strategy.setup(Run(strategy.module))
    first, second = batches(2, SAMPLES * strategy.data_parallel_size)
    one_pass(strategy, first, 0, 1)
    strategy.optimizers[0].zero_grad()
    with RecordedCollectives() as recorded:
        one_pass(strategy, second, 1, 1)
    strategy.teardown()
    return totals(recorded.collectives)


def test_stages_send_what_is_declared_for_their_microbatches():
    layouts = [{"pp": 2, "microbatches": 4}, {"pp": 2, "tp": 2, "microbatches": 4}]
    training = sizes(SAMPLES)
    declared = [totals(MeshStrategy(**one).communication_layout(training).collectives) for one in layouts]
    first, _, last, _ = in_ranks(each, 4, function=sent, cases={str(one): one for one in layouts})
    for layout, expected in zip(layouts, declared, strict=True):
        found, of_last = first[str(layout)], last[str(layout)]
        forward, backward = found.pop("send"), of_last.pop("send")  # a stage between others sends both
        assert (forward[0] + backward[0], forward[1] + backward[1]) == expected.pop("send")
        found.pop("broadcast")  # of the loss
        # Torch gathers a block once too often, ahead of a backward pass.
        assert found == {kind: pytest.approx(numbers, rel=0.07) for kind, numbers in expected.items()}


def test_stages_hold_whole_gradients_of_several_microbatches():
    training = sizes(SAMPLES)
    one, four = (MeshStrategy(pp=2, microbatches=count).memory_layout(training) for count in (1, 4))
    assert four.accumulated - one.accumulated == training.trainable_parameters // 2


def test_split_layers_send_parts_of_sequences():
    training = sizes(SAMPLES)
    split, both = (MeshStrategy(**one).communication_layout(training) for one in ({"tp": 2}, {"tp": 2, "cp": 2}))
    whole, part = (totals(layout.collectives)["all_reduce"] for layout in (split, both))
    assert part == (whole[0] // 2, whole[1])


def test_stages_begin_their_operations_for_each_microbatch_and_split_layers_all_of_them():
    training = sizes(SAMPLES)
    layouts = ({"tp": 4}, {"pp": 4, "microbatches": 4}, {"pp": 4, "microbatches": 16})
    assert [MeshStrategy(**one).communication_layout(training).operation_share for one in layouts] == [1, 1, 4]


def test_layers_are_gathered_in_each_batch_and_gradients_summed_in_the_last():
    declared = MeshStrategy(dp_replicate=2).communication_layout(sizes(SAMPLES)).collectives
    assert {one.kind: one.in_each_batch for one in declared} == {
        "all_gather": True,
        "reduce_scatter": False,
        "all_reduce": False,
    }

"""Layers that compute activations again on a mesh: the losses are bit for bit those without it."""

import pytest
from tests.hand_loop import BlockNet, Run, parts, train
from tests.ranks import each, in_ranks
from tests.ways_of_training import WAYS
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dstrat import Pipeline
from dstrat_mesh import MeshStrategy

LAYOUTS = {
    2: [{"pp": 2, "microbatches": 4}, {"pp": 2, "schedule": "Interleaved1F1B"}, {"tp": 2}],
    4: [{"tp": 2}, {"dp_replicate": 2}, {"pp": 2, "dp_shard": 2, "schedule": "GPipe"}],
}


class PipeNet(BlockNet):
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


def losses(cluster, **options):
    strategy = MeshStrategy(**options)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    module = PipeNet()
    if strategy.tensor_parallel_size > 1:
        for block in module.blocks:
            parallelize_module(block, strategy.device_mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    strategy.connect(module)
    strategy.setup(Run(module))
    found = train(strategy, **WAYS["accumulation and clipping"])
    strategy.teardown()
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.variant)])
@pytest.mark.slow
def test_losses_are_bit_for_bit_those_without(ranks):
    ways = {
        "plain": {},
        "selective": {"activation_checkpointing": "selective"},
        "full": {"activation_checkpointing": "full"},
    }
    cases = {(str(layout), way): {**layout, **options} for layout in LAYOUTS[ranks] for way, options in ways.items()}
    for found in in_ranks(each, ranks, function=losses, cases=cases):
        for layout in map(str, LAYOUTS[ranks]):
            assert found[layout, "selective"] == found[layout, "plain"], layout
            assert found[layout, "full"] == found[layout, "plain"], layout

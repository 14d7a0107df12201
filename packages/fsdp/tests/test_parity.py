"""The losses of fsdp are those of one device, with the same global batches, in float32."""

import pytest
import torch
from tests.hand_loop import Block, BlockNet, losses_of, parts, single_device_losses
from tests.ranks import each, in_ranks
from tests.ways_of_training import WAYS, losses_of_one_device
from torch import nn

from dstrat_fsdp import FSDPStrategy

OPTIONS = {
    "gradients sharded, parameters kept": {"sharding_strategy": "SHARD_GRAD_OP"},
    "replicas": {"sharding_strategy": "NO_SHARD"},
    "offloading": {"cpu_offload": True},
    "gathering late": {"backward_prefetch": "BACKWARD_POST"},
    "blocks that are kept": {"reshard_after_forward": False},
    "small blocks": {"auto_wrap_policy": 1},
    "activations computed again": {"activation_checkpointing": Block},
    "some activations computed again": {"activation_checkpointing": "selective"},
    "nested layers computed again": {
        "activation_checkpointing": "selective",
        "auto_wrap_policy": {Block, nn.Linear},
    },
}
SOME_WAYS = ("accumulation", "clipping by norm")


def fsdp_losses(cluster, options, training):
    return losses_of(FSDPStrategy(**options), BlockNet(), parts(cluster), **training)


@pytest.fixture(scope="module")
def expected():
    """Losses of one device for each way of training."""
    return losses_of_one_device(BlockNet)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.variant)])
def test_losses_are_those_of_one_device(expected, world_size):
    cases = {way: {"options": {}, "training": training} for way, training in WAYS.items()}
    for losses in in_ranks(each, world_size, function=fsdp_losses, cases=cases):
        assert losses == expected


@pytest.mark.slow
def test_options_leave_the_losses_as_they_are(expected):
    cases = {
        (name, way): {"options": options, "training": WAYS[way]}
        for name, options in OPTIONS.items()
        for way in SOME_WAYS
    }
    for losses in in_ranks(each, function=fsdp_losses, cases=cases):
        assert losses == {(name, way): expected[way] for name, way in cases}


def test_replicas_of_shards_leave_the_losses_as_they_are(expected):
    options = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}
    cases = {way: {"options": options, "training": WAYS[way]} for way in SOME_WAYS}
    for losses in in_ranks(each, 4, function=fsdp_losses, cases=cases):
        assert losses == {way: expected[way] for way in SOME_WAYS}


class Strided(BlockNet):
    """One weight is transposed in memory, and one is that of a convolution in channels_last."""

    def make_layers(self):
        super().make_layers()
        transposed = self.first.weight.detach().T.contiguous().T
        self.first.weight = nn.Parameter(transposed)
        self.convolution = nn.Conv2d(2, 10, 2).to(memory_format=torch.channels_last)

    def layers(self, x):
        x = self.first(x) + self.convolution(x[:, :4].reshape(-1, 2, 2, 1).expand(-1, -1, -1, 2)).flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def strided_losses(cluster):
    return losses_of(FSDPStrategy(), Strided(), parts(cluster), **WAYS["accumulation"])


def test_parameters_may_have_any_order_in_memory():
    expected = single_device_losses(Strided(), **WAYS["accumulation"])
    for losses in in_ranks(strided_losses):
        assert losses == pytest.approx(expected, rel=1e-6)


class Wrapped(BlockNet):
    """The layers are beside a wrapper of them, which has a sibling."""

    class Wrapper(nn.Module):
        def __init__(self, blocks):
            super().__init__()
            self.blocks = blocks
            self.scale = nn.Linear(10, 10)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.scale(x)

    def make_layers(self):
        super().make_layers()
        self.one, self.two = self.Wrapper(self.blocks), self.Wrapper(nn.ModuleList([Block(10)]))

    def layers(self, x):
        return self.last(self.two(self.one(self.first(x))))


def wrapped_losses(cluster):
    return losses_of(FSDPStrategy(), Wrapped(), parts(cluster))


def test_layers_beside_their_wrapper_have_the_losses_of_one_device():
    expected = pytest.approx(single_device_losses(Wrapped()), rel=1e-6)
    for losses in in_ranks(wrapped_losses):
        assert losses == expected

"""Which parts of a module become blocks."""

import functools

import pytest
import torch
from tests.hand_loop import Block, BlockNet
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

from dstrat.errors import RequestError
from dstrat.parallel.layers import selected_layers
from dstrat_fsdp.wrap_policy import blocks_of, outermost_layers


def names(module, policy=None):
    of = {id(part): name for name, part in module.named_modules()}
    return [of[id(block)] for block in blocks_of(module, policy)]


class Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.stages = nn.ModuleDict({str(i): nn.Sequential(Bottleneck(), Bottleneck()) for i in range(2)})
        self.head = nn.Linear(4, 2)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.places = nn.Embedding(9, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.words.weight
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))


def test_repeated_layers_in_a_list_are_blocks():
    assert sorted(names(BlockNet())) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_layer_with_several_names_is_one_block():
    class Criterion(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

    model = BlockNet()
    module = nn.ModuleDict({"model": model, "criterion": Criterion(model)})  # as losses of sentence-transformers do
    assert sorted(names(module)) == ["model.blocks.0", "model.blocks.1", "model.blocks.2"]
    assert len(outermost_layers(module)) == len(set(outermost_layers(module)))


class Encoder(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.net.layers(x))


class Distilled(nn.Module):
    """A network beside an encoder that contains it, and that has a sibling."""

    def __init__(self):
        super().__init__()
        self.net = BlockNet()
        self.student, self.teacher = Encoder(self.net), Encoder(BlockNet())


def test_a_layer_whose_network_is_also_outside_is_no_block():
    inner = [f"net.blocks.{index}" for index in range(3)]  # also those of the student
    assert sorted(names(Distilled())) == [*inner, "teacher"]
    with pytest.raises(RequestError, match=r"Encoder that is sharded by itself shares its parameter 'net\."):
        blocks_of(Distilled(), {Encoder})
    blocks = blocks_of(Distilled(), {Encoder, Block, nn.Linear})  # all of the network is in blocks of its own
    assert len([block for block in blocks if isinstance(block, Encoder)]) == 2


def test_a_layer_that_contains_itself_ends():
    module = BlockNet()
    module.blocks[0].back = module
    assert sorted(names(module)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_repeated_stages_are_blocks_and_what_they_contain_is_not():
    assert sorted(names(Convolutional())) == ["stages.0", "stages.1"]


def test_the_layers_of_torchs_transformer_are_blocks():
    found = sorted(names(nn.Transformer(8, 2, 2, 2, 16, batch_first=True)))
    assert found == ["decoder.layers.0", "decoder.layers.1", "encoder.layers.0", "encoder.layers.1"]


def test_a_plain_sequence_has_its_larger_layers_as_blocks():
    module = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 1, bias=False))
    module.append(nn.PReLU())
    assert sorted(names(module)) == ["0", "2", "4"]


def test_embeddings_are_no_blocks_where_there_are_others():
    assert sorted(names(Tied())) == ["blocks.0", "blocks.1"]


def test_a_module_may_have_a_policy_of_its_own_and_an_option_comes_before_it():
    module = Convolutional()
    module.auto_wrap_policy = (nn.BatchNorm2d,)
    assert sorted(names(module)) == [f"stages.{stage}.{block}.norm" for stage in (0, 1) for block in (0, 1)]
    assert names(module, {nn.Linear}) == ["head"]


@pytest.mark.parametrize("policy", [Block, 400])
def test_a_policy_of_a_module_may_be_what_the_option_may_be(policy):
    module = BlockNet()
    module.auto_wrap_policy = policy
    assert sorted(names(module)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_policy_of_a_module_that_is_none_is_refused():
    module = BlockNet()
    module.auto_wrap_policy = "Block"
    with pytest.raises(RequestError, match=r"BlockNet\.auto_wrap_policy 'Block' is not a class of layers such as"):
        blocks_of(module, None)


def test_a_module_without_repetition_has_no_blocks():
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


@pytest.mark.parametrize(
    "policy",
    [
        {Block},
        [Block],
        lambda module: isinstance(module, Block),
        ModuleWrapPolicy({Block}),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        functools.partial(size_based_auto_wrap_policy, min_num_params=400),
        400,
    ],
)
def test_a_policy_may_be_given_in_several_ways(policy):
    assert sorted(names(BlockNet(), policy)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_policy_may_match_the_module_itself_only():
    class WithoutForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

    assert blocks_of(WithoutForward(), {WithoutForward}) == []
    assert blocks_of(BlockNet(), {BlockNet}) == []


def test_inner_blocks_come_before_those_that_contain_them():
    found = names(BlockNet(), {Block, nn.Linear})
    assert found.index("blocks.1.up") < found.index("blocks.1")
    assert "first" in found


@pytest.mark.parametrize(
    ("policy", "part"), [({nn.LSTM}, "LSTM"), (10**6, "1000000"), (lambda module: False, "lambda")]
)
def test_a_policy_that_matches_nothing_is_refused_with_what_there_is(policy, part):
    with pytest.raises(RequestError, match=rf"{part}.* matches no layer of BlockNet.*Block, LayerNorm, Linear"):
        blocks_of(BlockNet(), policy)


def test_a_block_may_not_share_a_parameter_with_a_layer_outside_of_it():
    with pytest.raises(RequestError, match="Embedding that is sharded by itself shares its parameter"):
        blocks_of(Tied(), {nn.Embedding})


def test_a_compiled_layer_is_a_block_with_its_wrapper():
    module = BlockNet()
    for index, block in enumerate(module.blocks):
        module.blocks[index] = torch.compile(block, backend="eager")
    for policy in (None, (Block,), lambda layer: isinstance(layer, Block)):
        assert sorted(names(module, policy)) == ["blocks.0", "blocks.1", "blocks.2"]


class Delegating(nn.Module):
    """A wrapper with the attributes of its layer, as those of adapters have."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)

    def forward(self, x):
        return self.layer(x)


def test_a_wrapper_of_a_compiled_layer_is_no_compiled_layer():
    module = BlockNet()
    for index, block in enumerate(module.blocks):
        module.blocks[index] = Delegating(torch.compile(block, backend="eager"))
    assert sorted(names(module, {Block})) == ["blocks.0.layer", "blocks.1.layer", "blocks.2.layer"]
    assert sorted(names(module, {Delegating})) == ["blocks.0", "blocks.1", "blocks.2"]
    assert set(selected_layers(module, {Delegating})) == set(module.blocks)

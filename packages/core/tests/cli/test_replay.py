"""Equal layers of a fake step: a few run, and the sizes are those of a step in which all of them do."""

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.builtin.precision.true import TruePrecision
from dstrat.cli.estimate import fake_step
from dstrat.cli.estimate.fake_step import TrainingSetup, measure_training
from dstrat.parallel.activation_memory import ActivationMemory

WIDTH, LAYERS, REAL = 32, 10, 6


class Block(nn.Module):
    """Counts how often it runs."""

    calls = 0

    def __init__(self, index=0, width=WIDTH):
        super().__init__()
        self.index = index
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.activation = nn.functional.gelu

    def forward(self, x):
        Block.calls += 1
        return x + self.down(self.activation(self.up(self.norm(x))))


class Chain(nn.Module):
    """Blocks between two layers."""

    def __init__(self, blocks):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(8, WIDTH), nn.ModuleList(blocks), nn.Linear(WIDTH, 8)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class InTuples(Block):
    """Returns a tuple, as layers of transformers do."""

    def forward(self, x):
        x = x[0] if isinstance(x, tuple) else x
        return super().forward(x), None


class EndsWithTanh(Block):
    """Saves its output, which the next one saves as its input."""

    def forward(self, x):
        return super().forward(x).tanh()


class KeepsNothing(Block):
    """Needs neither input nor output for its gradients."""

    def forward(self, x):
        Block.calls += 1
        return x + self.norm.bias


class UsesOneParameter(Block):
    """Leaves parameters without gradients."""

    def forward(self, x):
        Block.calls += 1
        return x * self.down.bias


def chain(kind=Block):
    class Last(Chain):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x[0] if isinstance(x, tuple) else x)

    return Last([kind(index) for index in range(LAYERS)]), torch.zeros(4, 8)


def transformer():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False), torch.zeros(4, 16, WIDTH)


def make(factory):
    module, batch = factory()
    return TrainingSetup(
        module=module, batch=batch, make_optimizers=lambda one: torch.optim.AdamW(one.parameters(), foreach=True)
    )


def measured(factory, *, replays, device_type="cpu", saved=None, forward_dtype=None):
    Block.calls = 0
    precision = MixedPrecision("bf16-mixed") if device_type == "cuda" else TruePrecision()
    size = fake_step._measure(
        lambda: make(factory),
        precision,
        device_type=device_type,
        world_size=2,
        ranks_per_machine=2,
        batch_size=None,
        saved_activations=saved,
        forward_dtype=forward_dtype,
        same_optimizers=None,
        replays=replays,
    )
    return size, Block.calls


def assert_equal(first, second):
    for field in dataclasses.fields(first):
        if field.name == "unused":  # of layers that repeat, those of some
            assert (set(first.unused) <= set(second.unused), bool(first.unused)) == (True, bool(second.unused))
        elif field.name not in ("module", "precision", "optimizers"):  # objects of each training
            assert getattr(first, field.name) == getattr(second, field.name), field.name


KINDS = [Block, InTuples, EndsWithTanh, KeepsNothing, UsesOneParameter]
SAVED = {
    "all": None,
    "full": ActivationMemory(recomputation="full"),
    "selective": ActivationMemory(recomputation="selective"),
}


@pytest.mark.parametrize(
    ("kind", "device_type"),
    [pytest.param(kind, "cpu", marks=[pytest.mark.variant] * (kind is EndsWithTanh)) for kind in KINDS]
    + [pytest.param(kind, "cuda", marks=[pytest.mark.variant] * (kind is not InTuples)) for kind in KINDS],
)
@pytest.mark.parametrize("saved", SAVED)
def test_sizes_are_those_of_all_layers_and_a_few_run(kind, saved, device_type):
    options = {"device_type": device_type, "saved": SAVED[saved]}
    replayed, few = measured(lambda: chain(kind), replays=True, **options)
    real, all_calls = measured(lambda: chain(kind), replays=False, **options)
    assert_equal(replayed, real)
    assert few * LAYERS == all_calls * REAL
    assert all_calls >= LAYERS
    assert [len(block._forward_hooks) for block in replayed.module.blocks] == [0] * LAYERS
    assert ["forward" in vars(block) for block in replayed.module.blocks] == [
        "forward" in vars(block) for block in real.module.blocks
    ]


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("factory", [lambda: chain(Block), pytest.param(transformer, marks=pytest.mark.variant)])
def test_sizes_without_casts_of_parameters_are_those_of_all_layers(factory, saved):
    options = {"device_type": "cuda", "saved": SAVED[saved], "forward_dtype": torch.bfloat16}
    replayed, real = (measured(factory, replays=replays, **options)[0] for replays in (True, False))
    assert_equal(replayed, real)


@pytest.mark.parametrize("saved", SAVED)
def test_sizes_of_a_transformer_are_those_of_all_layers(saved):
    replayed, real = (
        measured(transformer, replays=replays, device_type="cuda", saved=SAVED[saved])[0] for replays in (True, False)
    )
    assert_equal(replayed, real)
    assert f"layers.{LAYERS // 2}.linear1" in replayed.outputs


def shared():
    blocks = [Block(index) for index in range(LAYERS)]
    for block in blocks:
        block.up.weight = blocks[0].up.weight
    return Chain(blocks), torch.zeros(4, 8)


def hooked():
    blocks = [Block(index) for index in range(LAYERS)]
    for block in blocks:
        block.up.register_forward_hook(lambda _layer, _inputs, output: output.clone())
    return Chain(blocks), torch.zeros(4, 8)


def differing():
    blocks = [Block() for _ in range(LAYERS)]
    for block in blocks[::2]:
        block.activation = nn.functional.silu
    return Chain(blocks), torch.zeros(4, 8)


def configured():
    blocks = [Block() for _ in range(LAYERS)]
    for index, block in enumerate(blocks):
        block.config = SimpleNamespace(sizes=[1, 2, index == LAYERS // 2])
    return Chain(blocks), torch.zeros(4, 8)


@dataclasses.dataclass
class Slotted:
    """Has no __dict__."""

    __slots__ = ("size",)
    size: int


def scaled(factor):
    return lambda x: x * factor


def with_attribute(values):
    """Return a factory of blocks with values that differ in one block in the middle."""

    def factory():
        blocks = [Block() for _ in range(LAYERS)]
        for index, block in enumerate(blocks):
            block.attribute = values[index == LAYERS // 2]
        return Chain(blocks), torch.zeros(4, 8)

    return factory


DIFFERING = {
    "slots": (Slotted(1), Slotted(2)),
    "functions of partial": (partial(nn.functional.gelu), partial(nn.functional.silu)),
    "arguments of partial": (partial(nn.functional.softmax, dim=0), partial(nn.functional.softmax, dim=1)),
    "ranges": (range(2), range(3)),
    "numbers of numpy": (np.int64(1), np.int64(2)),
    "closures": (scaled(1), scaled(2)),
    "methods": (Slotted(1).__eq__, Slotted(2).__eq__),
    "code": ((lambda x: x + 1), (lambda x: x - 1)),
}


@pytest.mark.parametrize("values", [*DIFFERING.values()], ids=DIFFERING)
def test_layers_with_attributes_that_differ_all_run(values):
    replayed, calls = measured(with_attribute(values), replays=True)
    assert calls == LAYERS
    assert_equal(replayed, measured(with_attribute(values), replays=False)[0])


def test_a_few_run_of_layers_whose_attributes_say_the_same():
    def factory():
        blocks = [Block() for _ in range(LAYERS)]
        for block in blocks:
            block.attributes = [Slotted(1), partial(nn.functional.softmax, dim=0), range(2), np.int64(1), scaled(1)]
            block.method = Slotted(1).__eq__
        return Chain(blocks), torch.zeros(4, 8)

    assert measured(factory, replays=True)[1] == REAL


class SomeDoMore(Block):
    """Does more in a few layers, none of which is near an end."""

    def forward(self, x):
        x = super().forward(x)
        return super().forward(x) if self.index in (3, 7) else x


class OfTable(Block):
    """Reads from a table by its number, in a part of it."""

    def __init__(self, index):
        super().__init__()
        del self.index
        self.down.number = index

    def forward(self, x):
        rounds = [2 if index == LAYERS // 2 else 1 for index in range(LAYERS)]
        for _ in range(rounds[self.down.number]):
            x = super().forward(x)
        return x


def numbered_by_twos():
    return Chain([Block(index // 2) for index in range(LAYERS)]), torch.zeros(4, 8)


@pytest.mark.parametrize("factory", [shared, hooked, differing, configured, numbered_by_twos])
def test_layers_that_differ_all_run(factory):
    replayed, calls = measured(factory, replays=True)
    assert calls == LAYERS
    assert_equal(replayed, measured(factory, replays=False)[0])


class Twice(Chain):
    """Calls its layers in two rounds."""

    def forward(self, x):
        x = self.first(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.last(x)


class Reversed(Chain):
    """Calls its layers from the last one on."""

    def forward(self, x):
        x = self.first(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.last(x)


class Secretive(Block):
    """Does more where something that is no attribute says so."""

    secrets: ClassVar = set()

    def forward(self, x):
        return super().forward(super().forward(x)) if id(self) in self.secrets else super().forward(x)


class Secret(Chain):
    """Has such a layer at each end."""

    def __init__(self, blocks):
        super().__init__([Secretive() for _ in blocks])
        Secretive.secrets |= {id(self.blocks[index]) for index in (1, LAYERS - 2)}


class Sliced(Block):
    """Returns a view of a larger tensor."""

    def forward(self, x):
        return self.up(x)[..., :WIDTH]


class OfViews(Chain):
    """Has such layers."""

    def __init__(self, blocks):
        super().__init__([Sliced() for _ in blocks])


class WithOthersBetween(Chain):
    """Computes between its layers, also with tensors of all of them."""

    def forward(self, x):
        x = first = self.first(x)
        for block in self.blocks:
            x = block(x * 2 + first).tanh() * first
        return self.last(x)


class OfAllOutputs(Chain):
    """Adds the outputs of its layers at the end."""

    def forward(self, x):
        outputs = [self.first(x)]
        for block in self.blocks:
            outputs.append(block(outputs[-1]))
        return self.last(sum(outputs))


@pytest.mark.parametrize("kind", [SomeDoMore, pytest.param(OfTable, marks=pytest.mark.variant)])
def test_layers_that_read_their_number_all_run(kind):
    def factory():
        return Chain([kind(index) for index in range(LAYERS)]), torch.zeros(4, 8)

    with pytest.raises(fake_step.NotEqualLayers):
        measured(factory, replays=True)
    size = measure_training(
        lambda: make(factory), TruePrecision(), device_type="cpu", world_size=2, ranks_per_machine=2
    )
    assert_equal(size, measured(factory, replays=False)[0])


@pytest.mark.parametrize(
    "kind", [Twice, pytest.param(Reversed, marks=pytest.mark.variant), Secret, OfViews, WithOthersBetween]
)
def test_sizes_are_right_however_layers_are_called(kind):
    def factory():
        return kind([Block(index) for index in range(LAYERS)]), torch.zeros(4, 8)

    size = measure_training(
        lambda: make(factory), TruePrecision(), device_type="cpu", world_size=2, ranks_per_machine=2
    )
    assert_equal(size, measured(factory, replays=False)[0])


def test_outputs_that_are_used_again_at_the_end_count_alike_but_for_a_sum_of_gradients():
    def factory():
        return OfAllOutputs([Block(index) for index in range(LAYERS)]), torch.zeros(4, 8)

    (replayed, few), (real, _) = (measured(factory, replays=replays) for replays in (True, False))
    assert few == REAL
    assert (replayed.work, replayed.saved, replayed.optimizer_work) == (real.work, real.saved, real.optimizer_work)
    # torch sums gradients in place where nothing else has the first of them.
    assert replayed.activations == pytest.approx(real.activations, abs=4 * 4 * WIDTH)


def test_the_optimizer_step_of_the_same_parameters_is_not_measured_again():
    first, _ = measured(chain, replays=True)
    steps = []

    class Counting(torch.optim.AdamW):
        def step(self, closure=None):
            steps.append(1)
            return super().step(closure)

    def counting():
        module, batch = chain()
        return TrainingSetup(module=module, batch=batch, make_optimizers=lambda one: Counting(one.parameters()))

    devices = {"device_type": "cpu", "world_size": 2, "ranks_per_machine": 2}
    again = measure_training(counting, TruePrecision(), same_optimizers=first, batch_size=8, **devices)
    assert steps == []
    for name in ("optimizer_state", "optimizer_temporaries", "optimizer_work"):
        assert getattr(again, name) == getattr(first, name)
    assert again.activations > first.activations

"""The weights of any layout, one full tensor after the other: their values, and the memory and bytes that it takes."""

import gc
import warnings
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
from packages.mesh.tests.pipeline_fits import Net, data
from tests.live_bytes import LiveBytes
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader

from dstrat.parallel.internals import RecordedCollectives

LAYOUTS = ["ddp", "fsdp", "mesh(pp=2)", "mesh(tp=2)"]
if find_spec("deepspeed"):
    LAYOUTS += ["deepspeed_stage_2", "deepspeed_stage_3"]


class Streaming(Net):
    """Streams its weights at the end, and records what a process holds meanwhile."""

    everywhere = False

    def get_extra_state(self):
        return torch.ones(1)

    def set_extra_state(self, state):
        pass

    def on_train_end(self):
        strategy = self.trainer.strategy
        self.streamed = {
            name: tensor.cpu().clone() for name, tensor in strategy.stream_weights(everywhere=self.everywhere)
        }
        full = strategy.module_state_dict()
        self.full = {name: value.cpu() for name, value in full.items() if name != "_extra_state"}
        biases = strategy.stream_weights(everywhere=self.everywhere, selects=lambda name: name.endswith("bias"))
        self.biases = {name: tensor.cpu().clone() for name, tensor in biases}


def streamed(cluster, alias, everywhere=False):
    warnings.simplefilter("ignore")  # of DeepSpeed
    module = Streaming()
    module.everywhere = everywhere
    trainer = quiet_trainer(strategy=alias, devices=cluster.world_size, max_steps=2, plugins=[cluster])
    trainer.fit(module, DataLoader(data(), batch_size=4))
    return module.streamed, module.full, module.biases


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("alias", LAYOUTS)
def test_the_stream_has_the_full_state_of_the_module_on_rank_0_or_on_each(alias):
    cases = {everywhere: {"alias": alias, "everywhere": everywhere} for everywhere in (False, True)}
    first, second = in_ranks(each, function=streamed, cases=cases)
    weights, full, biases = first[False]
    assert len(full) == 8
    assert equal(weights, full)
    assert second[False][0] == {}
    assert equal(first[True][0], full)
    assert equal(second[True][0], full)
    assert len(biases) == 4
    assert equal(biases, {name: tensor for name, tensor in full.items() if name in biases})


# Memory and communication

WIDTHS = (6, *[64] * 7, 3)
LARGEST = 64 * 64 * 4  # bytes of a weight
TOTAL = sum((one + 1) * other * 4 for one, other in pairwise(WIDTHS))
REPLICATED = ("ddp", "deepspeed_stage_2")


class Deep(Net):
    """Streams weights of six layers of the same size, and records what that takes."""

    everywhere = False

    def __init__(self):
        super().__init__()
        layers = (nn.Linear(one, other) for one, other in pairwise(WIDTHS))
        self.net = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))[:-1]

    def on_train_end(self):
        gc.collect()
        self.received = 0
        with LiveBytes() as live, RecordedCollectives() as recorded:
            for _, tensor in self.trainer.strategy.stream_weights(everywhere=self.everywhere):
                self.received += tensor.nbytes
        self.live = live.largest
        self.sent = sum(one.sent for one in recorded.collectives if one.kind != "broadcast")  # of names


def measured(cluster, alias, everywhere):
    warnings.simplefilter("ignore")  # of DeepSpeed
    module = Deep()
    module.everywhere = everywhere
    trainer = quiet_trainer(strategy=alias, devices=cluster.world_size, max_steps=1, plugins=[cluster])
    trainer.fit(module, DataLoader(data(), batch_size=4))
    return module.received, module.live, module.sent


@pytest.mark.parametrize("alias", LAYOUTS)
def test_a_stream_takes_the_memory_of_few_tensors_and_sends_each_once(alias):
    cases = {everywhere: {"alias": alias, "everywhere": everywhere} for everywhere in (False, True)}
    # Weights that are split along columns are gathered as rows, and copied.
    tensors = 0 if alias in REPLICATED else 2 if alias == "mesh(tp=2)" else 1
    # A thread of gloo may keep a tensor for a moment after its collective has ended.
    limit = tensors * LARGEST + (LARGEST if tensors else 0) + 1024  # biases, names
    assert limit < TOTAL / 1.9
    for rank, results in enumerate(in_ranks(each, function=measured, cases=cases)):
        for everywhere, (received, live, sent) in results.items():
            assert received == (TOTAL if everywhere or rank == 0 else 0)
            assert live <= limit
            if alias in REPLICATED:
                assert sent < 64
            elif alias == "fsdp":
                assert sent == pytest.approx(TOTAL / 2, rel=0.01)  # each rank sends its half
            else:
                assert sent < 1.01 * TOTAL

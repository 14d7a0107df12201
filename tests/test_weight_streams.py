"""The weights of any layout, one full tensor after the other."""

import warnings
from importlib.util import find_spec

import pytest
import torch
from packages.mesh.tests.pipeline_fits import Net, data
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch.utils.data import DataLoader

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


def streamed(cluster, alias, everywhere=False):
    warnings.simplefilter("ignore")  # of DeepSpeed
    module = Streaming()
    module.everywhere = everywhere
    trainer = quiet_trainer(strategy=alias, devices=cluster.world_size, max_steps=2, plugins=[cluster])
    trainer.fit(module, DataLoader(data(), batch_size=4))
    return module.streamed, module.full


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("alias", LAYOUTS)
def test_the_stream_has_the_full_state_of_the_module_on_rank_0_or_on_each(alias):
    cases = {everywhere: {"alias": alias, "everywhere": everywhere} for everywhere in (False, True)}
    first, second = in_ranks(each, function=streamed, cases=cases)
    weights, full = first[False]
    assert len(full) == 8
    assert equal(weights, full)
    assert second[False][0] == {}
    assert equal(first[True][0], full)
    assert equal(second[True][0], full)

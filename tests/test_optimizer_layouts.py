"""Optimizers with state beside that of parameters, where that state is sharded: refused before the first step."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import SGD
from torch.utils.data import DataLoader

from dstrat import TrainModule
from dstrat.errors import MisuseError
from dstrat.strategies import DDPStrategy, FSDPStrategy

DATA = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


class BesideState(SGD):
    """Has a key beside ``state`` and ``param_groups``."""

    def state_dict(self):
        return {**super().state_dict(), "count": 3}


class InState(SGD):
    """Has a state of all parameters from its first step on."""

    def step(self, closure=None):
        self.state["count"] = self.state.get("count", 0) + 1
        return super().step(closure)


def zero(parameters, kind):
    return ZeroRedundancyOptimizer(parameters, kind, lr=0.1, momentum=0.9)


def plain(parameters, kind):
    return kind(parameters, lr=0.1, momentum=0.9)


class Net(TrainModule):
    def __init__(self, make, kind):
        super().__init__()
        torch.manual_seed(0)
        self.make, self.kind, self.layers = make, kind, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        assert self.kind not in (BesideState, InState)  # before the first step
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return self.make(self.parameters(), self.kind)


def strategies():
    made = {"ddp": (DDPStrategy, {}, zero), "fsdp": (FSDPStrategy, {}, plain)}
    if find_spec("deepspeed"):
        from dstrat_deepspeed import DeepSpeedStrategy

        made |= {f"stage {stage}": (DeepSpeedStrategy, {"stage": stage}, plain) for stage in (1, 3)}
    if find_spec("fairscale"):
        from dstrat_fairscale import DDPShardedStrategy

        made["ddp_sharded"] = (DDPShardedStrategy, {}, plain)
    return made


def refusal(cluster, kind, strategy, options, make):
    with pytest.raises(MisuseError) as caught:
        quiet_trainer(strategy(**options), cluster).fit(Net(make, kind), DataLoader(DATA, 4))
    return str(caught.value)


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize(("kind", "key"), [(BesideState, "count"), (InState, "state['count']")])
def test_state_beside_that_of_parameters_is_refused_where_it_is_sharded(kind, key):
    made = {
        name: {"kind": kind, "strategy": strategy, "options": options, "make": make}
        for name, (strategy, options, make) in strategies().items()
    }
    expected = f"the state_dict of {kind.__name__} has a layout of its own ({key}), which cannot be saved and loaded"
    for found in in_ranks(each, 2, function=refusal, cases=made):
        assert {name: message[: len(expected)] for name, message in found.items()} == dict.fromkeys(made, expected)


def resumed(cluster, path, plugins):
    def fit(epochs, ckpt_path=None):
        net = Net(zero, SGD)
        trainer = quiet_trainer(DDPStrategy(), cluster, plugins=plugins, max_epochs=epochs)
        trainer.fit(net, DataLoader(DATA, 4), ckpt_path=ckpt_path)
        return trainer, [parameter.tolist() for parameter in net.parameters()]

    class Saving(Net):
        def on_train_end(self):
            self.trainer.save_checkpoint(path)

    quiet_trainer(DDPStrategy(), cluster, plugins=plugins).fit(Saving(zero, SGD), DataLoader(DATA, 4))
    return fit(2)[1], fit(2, path)[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plugins", ["portable", "torch"])
def test_a_sharded_optimizer_of_ddp_resumes_exactly(tmp_path, plugins):
    for whole, again in in_ranks(resumed, 2, path=tmp_path / "saved.ckpt", plugins=[plugins]):
        assert again == whole

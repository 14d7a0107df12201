"""Evaluation in several processes: of the module that rank 0 has, whose buffers a checkpoint holds."""

import pytest
import torch
from tests.hand_loop import parts, start
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer, shuffled_loader
from torch import nn

from dstrat import Callback, TrainModule
from dstrat.parallel.separate_modules import SeparateModules
from dstrat_ddp import DDPStrategy


class Normalized(TrainModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


class StateOfRankZero(Callback):
    def on_validation_end(self, trainer, module):
        self.state = {name: value.clone() for name, value in module.state_dict().items()}


def evaluated(cluster):
    """Return what evaluations in a fit, after it and without one come to, and rank 0's module by hand."""
    torch.manual_seed(cluster.global_rank)
    data, module, kept = shuffled_loader(64, batch_size=4).dataset, Normalized(), StateOfRankZero()
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    trainer = quiet_trainer(DDPStrategy(), cluster, callbacks=kept, num_sanity_val_steps=0)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4), loader)
    found = {"in a fit": float(trainer.callback_metrics["val_loss"])}
    found["after it"] = trainer.test(module, loader, verbose=False)[0]["test_loss"]
    by_hand = Normalized().eval()
    by_hand.load_state_dict(kept.state)
    expected = [by_hand.training_step(data.tensors, 0).item()] * 2
    fresh = Normalized()
    found["without a fit"] = quiet_trainer(DDPStrategy(), cluster).test(fresh, loader, verbose=False)[0]["test_loss"]
    expected.append(fresh.eval().training_step(data.tensors, 0).item())
    return found, expected


def test_each_evaluation_is_that_of_the_module_of_rank_zero():
    (found, expected), (others, _) = in_ranks(evaluated)
    assert list(found.values()) == pytest.approx(expected, rel=1e-5)
    assert found == others


def module_with_buffers(rank):
    module = Normalized()
    module._ddp_params_and_buffers_to_ignore = ["seen"]
    module.register_buffer("seen", torch.full((2,), float(rank)))
    module.register_buffer("shared", torch.full((2,), float(rank)))
    return module


class Pair(SeparateModules):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def buffers_of_evaluation(cluster, separate, fitting):
    rank = cluster.global_rank
    module = module_with_buffers(rank)
    if separate:
        module = Pair({"first": module, "second": module_with_buffers(rank)})
    strategy = DDPStrategy()
    start(strategy, module, parts(cluster), is_fitting=fitting)
    with strategy.evaluation_context():
        buffers = {
            name: buffer[0].item() for name, buffer in module.named_buffers() if name.endswith(("seen", "shared"))
        }
    strategy.teardown()
    return buffers


def test_buffers_that_ddp_ignores_stay_those_of_each_rank():
    options = [{"separate": separate, "fitting": fitting} for separate in (False, True) for fitting in (False, True)]
    cases = {tuple(case.values()): case for case in options}
    for rank, results in enumerate(in_ranks(each, function=buffers_of_evaluation, cases=cases)):
        for (separate, _), buffers in results.items():
            prefixes = ("first.", "second.") if separate else ("",)
            assert buffers == {
                f"{prefix}{name}": rank * (name == "seen") for prefix in prefixes for name in ("seen", "shared")
            }

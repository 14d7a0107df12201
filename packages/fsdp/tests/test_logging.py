"""Logged values of sharded parameters and gradients: all ranks log the full value."""

import pytest
import torch
from tests.hand_loop import BlockNet
from tests.ranks import in_ranks
from tests.trainer_runs import loader, quiet_trainer
from torch.nn.utils import clip_grad_norm_, get_total_norm

from dstrat import OwnLoop, TrainModule, build
from dstrat.loggers import Logger


class Rows(Logger):
    """Keeps the values that it gets."""

    def __init__(self):
        super().__init__()
        self.values = {}

    def log_metrics(self, metrics, step=None):
        self.values |= metrics


def values_of(parameters):
    """Return values of one element: of shards, partial sums and norms, maxima, and replicas."""
    weight, gradients = parameters[0], [parameter.grad for parameter in parameters]
    return {
        "norm": weight.norm(),
        "sum": weight.sum(),
        "largest": weight.detach().max(),
        "total": get_total_norm(gradients),
        "clipped": clip_grad_norm_(parameters, 1e9),
    }


class Logging(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = BlockNet()

    def training_step(self, batch, batch_idx):
        return self.net.training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        values = values_of([*self.parameters()])
        self.log_dict({f"step {name}": value for name, value in values.items()}, on_step=True)
        self.log_dict({f"epoch {name}": value for name, value in values.items()}, on_step=False, on_epoch=True)
        self.log("first", values["norm"], rank_zero_only=True)
        self.log("largest of all", values["sum"], reduce_fx="max", on_step=False, on_epoch=True)

    def on_train_end(self):
        self.norms = self.all_gather(self.net.first.weight.norm()).tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def logged_by_trainer(cluster, strategy):
    """Return the values of this rank, those that the logger got, and a norm that each rank has gathered."""
    rows, module = Rows(), Logging()
    trainer = quiet_trainer(strategy, cluster, logger=rows, log_every_n_steps=1)
    trainer.fit(module, loader(16, 8 // trainer.world_size))
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "first"}
    return values, rows.values, module.norms


def test_the_trainer_logs_full_values_of_shards():
    expected, written, [norm] = logged_by_trainer(None, "single_device")
    assert len(expected) == 11
    [(first, written_by_first, norms), (second, *_)] = in_ranks(logged_by_trainer, strategy="fsdp")
    assert first == second == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert written_by_first == pytest.approx(written, rel=1e-5, abs=1e-6)
    assert norms == pytest.approx([norm, norm], rel=1e-5)


def logged_by_loop(cluster, strategy):
    """Return what the loop has reduced and gathered, and what the logger of rank 0 got."""
    rows = Rows()

    def train(loop):
        net = BlockNet()
        loop.setup(net, lambda net: torch.optim.SGD(net.parameters(), lr=0.01))
        [batch] = loop.training_loader(loader(8, 8 // loop.world_size))
        loss = loop.compute(net.training_step, batch, 0)
        loop.backward(loss)
        values = values_of([*net.parameters()])
        loop.log_dict(values)
        loop.log("loss", loop.all_reduce(loss))
        gathered = loop.all_gather(net.first.weight.norm())
        assert gathered.shape == (loop.world_size,)
        return loop.all_reduce(values["sum"]).item(), gathered[-1].item()

    plugins = [] if cluster is None else [cluster]
    devices = 1 if cluster is None else cluster.world_size
    strategy = build(strategy=strategy, accelerator="cpu", devices=devices, plugins=plugins)
    results = OwnLoop(strategy, rows).launch(train)
    return results, rows.values


def test_a_loop_of_ones_own_logs_full_values_of_shards():
    results, expected = logged_by_loop(None, "single_device")
    assert len(expected) == 6
    [(first, written), (second, _)] = in_ranks(logged_by_loop, strategy="fsdp")
    assert first == second == pytest.approx(results, rel=1e-5, abs=1e-6)
    assert written == pytest.approx(expected, rel=1e-5, abs=1e-6)

"""Layers in torch's wrappers: checkpoints and averages of recomputed ones, training of compiled ones."""

import warnings

import pytest
import torch
from deepspeed_fit import Model, fit
from tests.ranks import each, in_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dstrat import EMAWeightAveraging
from dstrat.errors import MisuseError
from dstrat.parallel.layers import is_compiled, uncompiled
from dstrat_deepspeed import DeepSpeedStrategy

# None of the parameters is kept gathered.
SHARDED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


class Wrapped(Model):
    """Has blocks that compute their activations again."""

    def __init__(self, path, wraps=True):
        super().__init__()
        self.path = path
        for index, block in enumerate(self.net.blocks) if wraps else ():
            self.net.blocks[index] = checkpoint_wrapper(block)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.trainer.save_checkpoint(self.path)


def fitted(cluster, strategy, path, *, wraps, ckpt_path=None):
    strategy = strategy if isinstance(strategy, str) else DeepSpeedStrategy(**strategy)
    average = EMAWeightAveraging(decay=0.5)
    return fit(Wrapped(path, wraps), strategy, cluster, ckpt_path=ckpt_path, callbacks=[average])


def save_and_resume(cluster, path):
    """Return the losses of a training, and of those that continue its checkpoint on two ranks."""
    losses = fitted(cluster, {"config": SHARDED}, path, wraps=True)
    resumed = [
        fitted(cluster, {"config": SHARDED}, path.with_suffix(f".{wraps}"), wraps=wraps, ckpt_path=path)
        for wraps in (True, False)
    ]
    return losses, resumed


def test_checkpoints_of_stage_3_have_the_shards_of_wrapped_layers(tmp_path):
    expected = fitted(None, "single_device", tmp_path / "single", wraps=False)
    for losses, resumed in in_ranks(save_and_resume, path=tmp_path / "sharded"):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert resumed == [pytest.approx(expected[-2:], rel=1e-5)] * 2
    one_device = fitted(None, "single_device", tmp_path / "on", wraps=False, ckpt_path=tmp_path / "sharded")
    assert one_device == pytest.approx(expected[-2:], rel=1e-5)
    average = [
        fitted(None, "single_device", tmp_path / f"{name} on", wraps=False, ckpt_path=tmp_path / name)
        for name in ("single", "sharded")
    ]
    assert average[0] == pytest.approx(average[1], rel=1e-5)


# Compiled layers


class Compiled(Model):
    """Compiles its blocks, in the wrappers of ``torch.compile``."""

    def __init__(self, moment):
        super().__init__()
        self.moment = moment
        self.compile_at("creation")

    def compile_at(self, moment):
        if self.moment == moment:
            self.net.blocks = nn.ModuleList(torch.compile(block, backend="aot_eager") for block in self.net.blocks)
            self.moment = None  # a run calls configure_model once, on each rank

    def configure_model(self):
        self.compile_at("configure_model")

    def on_train_start(self):
        self.compile_at("on_train_start")


def losses_of_compiled(cluster, moment):
    warnings.simplefilter("ignore")  # the compiler traces DeepSpeed's hooks, and warns of what they do
    module = Compiled(moment)
    try:
        losses = fit(module, DeepSpeedStrategy(config=SHARDED), cluster, max_steps=2)
    except MisuseError as error:
        return str(error)
    assert all(is_compiled(block) for block in module.net.blocks)
    assert all(vars(uncompiled(block)).get("_compiled_call_impl") is None for block in module.net.blocks)
    return losses


def test_compiled_layers_are_trained_in_stage_3_or_an_error_says_how():
    expected = fit(Model(), "single_device", max_steps=2)
    cases = {moment: {"moment": moment} for moment in ("creation", "configure_model", "on_train_start")}
    for found in in_ranks(each, function=losses_of_compiled, cases=cases):
        assert "net.blocks.0, net.blocks.1 was compiled by torch.compile(layer)" in found.pop("on_train_start")
        assert list(found.values()) == [pytest.approx(expected, rel=1e-5)] * 2

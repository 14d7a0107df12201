"""ZeRO++ keeps a second shard of each parameter within a group of ranks, which follows the weights."""

from contextlib import nullcontext

import pytest
import torch
from deepspeed_fit import Model, fit

from dstrat import Callback
from dstrat_deepspeed import DeepSpeedStrategy

ZERO = {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}


class SavesFirst(Callback):
    saves_checkpoints = True

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 0:
            trainer.save_checkpoint(self.path)


def gathered(weight):
    if not hasattr(weight, "ds_id"):  # on one device
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([weight], modifier_rank=0)


class Halving(Model):
    """Halves a weight before its second batch."""

    def on_train_batch_start(self, batch, batch_idx):
        weight = self.net.first.weight
        if batch_idx == 1:
            with gathered(weight), torch.no_grad():
                weight.mul_(0.5)


def losses(cluster, folder):
    def strategy():
        return DeepSpeedStrategy(config={"zero_optimization": ZERO})

    whole = fit(Model(), strategy(), cluster, callbacks=[SavesFirst(f"{folder}/c")])
    return whole, fit(Model(), strategy(), cluster, ckpt_path=f"{folder}/c"), fit(Halving(), strategy(), cluster)


def test_a_run_goes_on_with_loaded_and_with_changed_weights(ranks, tmp_path):
    changed = fit(Halving(), "single_device")
    for whole, resumed, halved in ranks(losses, folder=str(tmp_path)):
        assert resumed == whole[1:]
        assert halved == pytest.approx(changed, rel=1e-5, abs=0)

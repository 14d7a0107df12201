"""A rank that is killed while others wait for it."""

import os
import signal

import pytest
import torch
from deepspeed_fit import Model, fit

from dstrat import Callback
from dstrat_deepspeed import DeepSpeedStrategy


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


class Dying(Model):
    """Rank 1 dies in its second batch, when the others gather a parameter."""

    where = ""

    def training_step(self, batch, batch_idx):
        dies = batch_idx == 1 and self.global_rank == 1
        if dies and self.where == "forward":
            self.net.blocks[0].register_forward_hook(die)
        loss = super().training_step(batch, batch_idx)
        if dies and self.where == "backward":
            loss.register_hook(die)
        return loss


class DiesWhileSaving(Callback):
    """Saves after the second batch, and dies when DeepSpeed writes its files."""

    saves_checkpoints = True

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            if trainer.global_rank == 1:
                torch.save = die
            trainer.save_checkpoint(f"{self.folder}/c")


def until_it_breaks(cluster, where, folder):
    module = Dying()
    module.where = where
    callbacks = [DiesWhileSaving(folder)] if where == "save" else []
    try:
        fit(module, DeepSpeedStrategy(stage=3, save_native=True), cluster, callbacks=callbacks)
    except Exception as error:
        return f"{type(error).__name__}: {error}", torch.distributed.is_initialized()
    return None


@pytest.mark.parametrize("where", ["forward", "backward", "save"])
def test_the_others_notice_and_can_close(ranks, tmp_path, where):
    survivor, victim = ranks(until_it_breaks, may_die=(1,), where=where, folder=str(tmp_path))
    assert victim is None
    message, is_open = survivor
    assert not is_open
    if where == "save":
        assert "another rank was lost" in message
        assert message.endswith(f"the checkpoint '{tmp_path}/c' itself is complete")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "last"]
    else:
        assert message.startswith(("RuntimeError", "DistBackendError"))

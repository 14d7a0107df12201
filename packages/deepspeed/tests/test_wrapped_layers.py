"""Checkpoints and averages of layers in the wrappers of checkpoint_wrapper."""

import pytest
from deepspeed_fit import Model, fit
from tests.ranks import in_ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dstrat import EMAWeightAveraging
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

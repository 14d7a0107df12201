"""What is in the files that DeepSpeed writes beside a checkpoint."""

import pytest
import torch
from deepspeed_fit import Model, fit

from dstrat import Callback
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.errors import CheckpointError
from dstrat_deepspeed import DeepSpeedStrategy
from dstrat_deepspeed.native_checkpoint import DeepSpeedCheckpointIO

WAYS = {(stage, excludes): f"{stage}-{excludes}" for stage in (2, 3) for excludes in (False, True)}


class Frozen(Model):
    """A network whose first layer is not trained."""

    def __init__(self):
        super().__init__()
        self.net.first.requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class Saves(Callback):
    saves_checkpoints = True

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)


def save(cluster, folder):
    for (stage, excludes), name in WAYS.items():
        strategy = DeepSpeedStrategy(stage=stage, save_native=True, exclude_frozen_parameters=excludes)
        fit(Frozen(), strategy, cluster, callbacks=[Saves(f"{folder}/{name}")])


def test_frozen_parameters_are_left_out_of_them_where_that_is_asked_for(ranks, tmp_path):
    ranks(save, folder=str(tmp_path))
    expected = Frozen().state_dict()
    for (_, excludes), name in WAYS.items():
        found = DeepSpeedCheckpointIO().load_checkpoint(tmp_path / f"{name}.deepspeed")["state_dict"]
        left_out = ["net.first.weight", "net.first.bias"] if excludes else []
        assert [name for name in expected if name not in found] == left_out
        if not excludes:
            assert torch.equal(found["net.first.weight"], expected["net.first.weight"])
        assert not torch.equal(found["net.last.weight"], expected["net.last.weight"])


def test_a_store_is_refused_before_anything_is_written_into_it(monkeypatch):
    written = []
    strategy = DeepSpeedStrategy(save_native=True)
    monkeypatch.setattr(PortableCheckpointIO, "save_checkpoint", lambda _, __, path: written.append(path))
    with pytest.raises(CheckpointError, match="beside 'memory://saved', which is in a store"):
        fit(Model(), strategy, callbacks=[Saves("memory://saved")])
    assert written == []

"""What a rank has for itself comes back with it: buffers of its own data, and sparse gradients that wait for a step."""

from __future__ import annotations

from functools import partial

import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer, same_when_resumed, shuffled_loader
from torch import nn

from dstrat import TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat_ddp import DDPStrategy
from dstrat_fsdp import FSDPStrategy


class Normed(TrainModule):
    """Has statistics of the data that a rank reads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.register_buffer("same_everywhere", torch.arange(5))
        self.register_buffer("not_saved", torch.zeros(()), persistent=False)

    def training_step(self, batch, batch_idx):
        self.not_saved += batch[0].sum()
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Worded(Normed):
    """Has gradients of the rows that a batch uses, and as many others as torch sums in several parts."""

    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(9, 6, sparse=True)
        self.layers = nn.Sequential(nn.Linear(6, 37), nn.Tanh(), nn.Linear(37, 11), nn.Tanh(), nn.Linear(11, 1))

    def training_step(self, batch, batch_idx):
        words = self.words((batch[0] * 5).long() % 9)
        return super().training_step([batch[0] + words, batch[1]], batch_idx)


def fit(cluster, folder, make, cls, io, *, callbacks=(), ckpt_path=None, **options):
    module = cls()
    trainer = quiet_trainer(
        make(), cluster, plugins=[io()], default_root_dir=folder, max_epochs=2, callbacks=callbacks, **options
    )
    batches = 5 * cluster.world_size
    trainer.fit(module, shuffled_loader(4 * batches, batch_size=4), ckpt_path=ckpt_path)
    values = [*module.named_parameters(), *module.named_buffers()]  # shards have no state dict after the run
    return {
        name: getattr(value, "_local_tensor", value).detach().clone() for name, value in values if name != "not_saved"
    }


def resumed(cluster, folder, moments, **case):
    return same_when_resumed(partial(fit, cluster, folder, **case), folder, moments)


def cases_of(folder, cases, **options):
    return {name: {**case, **options, "folder": folder / name} for name, case in cases.items()}


NORMED = {
    "folder": {"make": FSDPStrategy, "io": PortableCheckpointIO},
    "one file": {"make": FSDPStrategy, "io": TorchCheckpointIO},
}
SPARSE = {
    "folder": {"make": DDPStrategy, "io": PortableCheckpointIO},
    "one file": {"make": DDPStrategy, "io": TorchCheckpointIO},
}


def test_each_rank_goes_on_with_its_own_buffers(tmp_path):
    cases = cases_of(tmp_path, NORMED, cls=Normed, moments=(3, 5))
    for found in in_ranks(each, function=resumed, cases=cases):
        assert found == {name: {3: True, 5: True} for name in cases}
    io = PortableCheckpointIO()
    first, other = (io.load_rank(tmp_path / "folder" / "3", rank)["buffers"] for rank in (0, 1))
    assert first == {}
    assert other.keys() == {"layers.1.running_mean", "layers.1.running_var"}


def test_sparse_gradients_between_the_batches_of_a_step_come_back_on_three_ranks(tmp_path):
    cases = cases_of(tmp_path, SPARSE, cls=Worded, moments=(1, 4, 6), accumulate_grad_batches=3)
    for found in in_ranks(each, 3, function=resumed, cases=cases):
        assert found == {name: {1: True, 4: True, 6: True} for name in cases}


def moved(cluster, folder, saved):
    """Go on from a checkpoint of other ranks; return whether it came to its end."""
    state = fit(cluster, folder, DDPStrategy, Worded, PortableCheckpointIO, ckpt_path=saved, accumulate_grad_batches=3)
    return all(bool(value.isfinite().all()) for value in state.values())


def test_sparse_gradients_move_to_another_number_of_ranks(tmp_path):
    case = cases_of(tmp_path, {"saved": SPARSE["folder"]}, cls=Worded, moments=(1,), accumulate_grad_batches=3)
    in_ranks(each, function=resumed, cases=case)
    assert in_ranks(moved, 1, folder=tmp_path, saved=tmp_path / "saved" / "1") == [True]

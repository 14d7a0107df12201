"""A strategy whose ranks communicate without torch.distributed: here by the job's store alone."""

import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.ranks import in_ranks
from tests.trainer_runs import Evaluated, loader, quiet_trainer
from torch import nn

from dstrat import Callback
from dstrat.errors import CheckpointError
from dstrat.parallel.job import rank_and_size
from dstrat.parallel.process_group import join_job, leave_job
from dstrat.parallel.strategy import ParallelStrategy


class Messages:
    """Messages of all ranks, through the store."""

    def __init__(self, store, name, rank, size):
        self.store, self.name, self.rank, self.size, self.number = store, name, rank, size, 0

    def all_gather(self, message):
        self.number += 1
        keys = [f"{self.name}/{self.number}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], message + b".")
        return [self.store.get(key)[:-1] for key in keys]


class ByStore(ParallelStrategy):
    """Averages gradients through the job's store."""

    uses_torch_distributed = False
    num_channels = 0

    def open_communication(self):
        self.store = join_job(self.cluster_environment, timeout=self.timeout, open_channel=self.open_channel)
        self.messages = self.open_channel()
        return self.store

    def open_channel(self):
        self.num_channels += 1
        return Messages(self.store, self.num_channels, self.global_rank, self.world_size)

    def close_communication(self, *, aborts):
        leave_job()

    def exchange(self, value):
        return [pickle.loads(message) for message in self.messages.all_gather(pickle.dumps(value))]

    def reduce(self, tensor, group=None, reduce_op="mean"):
        if not isinstance(tensor, torch.Tensor):
            return tensor
        total = torch.stack(self.exchange(tensor.detach())).sum(0)
        return total if reduce_op == "sum" else total / self.world_size

    def broadcast(self, obj, src=0):
        return self.exchange(obj)[src]

    def barrier(self, name=None):
        self.exchange(None)

    def all_gather(self, tensor, group=None, sync_grads=False):
        return torch.stack(self.exchange(tensor.detach()))

    def take_from_first_rank(self, tensors):
        for tensor in tensors:
            tensor.data.copy_(self.broadcast(tensor.detach()))

    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, **kwargs)
        for parameter in self.module.parameters():
            parameter.grad.copy_(self.reduce(parameter.grad))


class Line(Evaluated):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Module()
        self.net.layers = nn.Linear(6, 3)
        self.net.training_step = lambda batch, batch_idx: (self.net.layers(batch[0]) - batch[1]).square().mean()


class NotesGroups(Callback):
    saves_checkpoints = True

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen = (dist.is_initialized(), rank_and_size())


def fit(cluster, folder, resume_from=None, steps=4):
    notes = NotesGroups()
    strategy = "single_device" if cluster is None else ByStore(timeout=timedelta(seconds=30))
    trainer = quiet_trainer(strategy, cluster, callbacks=[notes], max_steps=steps)
    module = Line()
    trainer.fit(module, loader(32, 8 if cluster is None else 4), ckpt_path=resume_from)
    if cluster is not None and resume_from is None:
        trainer.save_checkpoint(folder)
    return module.net.layers.weight.detach(), notes.seen, trainer.strategy.components.checkpoint_io.is_collective


def test_it_trains_and_saves_portable_checkpoints_that_resume(tmp_path):
    saved = in_ranks(fit, folder=str(tmp_path / "saved"), steps=2)
    resumed = in_ranks(fit, folder=None, resume_from=str(tmp_path / "saved"))
    expected, *_ = fit(None, None)
    for rank, (weight, seen, is_collective) in enumerate(resumed):
        torch.testing.assert_close(weight, expected)
        assert seen == (False, (rank, 2))
        assert is_collective
    assert len(saved) == 2
    assert rank_and_size() == (0, 1)


def failing(cluster, folder):
    class Unsavable(Callback):
        saves_checkpoints = True

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_rank == 1:
                module.on_save_checkpoint = lambda checkpoint: checkpoint.update(per_rank={"number": object()})
            trainer.save_checkpoint(folder)

    trainer = quiet_trainer(ByStore(timeout=timedelta(seconds=30)), cluster, callbacks=[Unsavable()])
    with pytest.raises(CheckpointError) as failed:
        trainer.fit(Line(), loader(32, 4))
    return str(failed.value)


def test_a_rank_that_cannot_save_fails_the_save_in_all(tmp_path):
    first, second = in_ranks(failing, folder=str(tmp_path / "saved"))
    assert first == second
    assert first.startswith("rank 1 could not ")

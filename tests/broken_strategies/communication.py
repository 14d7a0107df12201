"""Strategies whose collectives give something else."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from tests.broken_strategies.good import Averaging

from dstrat_ddp import DDPStrategy


class DeclaresHalfOfItsBytes(DDPStrategy):
    def communication_layout(self, training):
        layout = super().communication_layout(training)
        halved = [dataclasses.replace(one, bytes=one.bytes // 2) for one in layout.collectives]
        return dataclasses.replace(layout, collectives=tuple(halved))


class SkipsTheBarrier(DDPStrategy):
    def barrier(self, name=None):
        pass


class GathersInItsOwnOrder(DDPStrategy):
    def all_gather(self, tensor, group=None, sync_grads=False):
        return super().all_gather(tensor, group, sync_grads).roll(-self.global_rank, 0)


class GathersFlat(DDPStrategy):
    def all_gather(self, tensor, group=None, sync_grads=False):
        return super().all_gather(tensor, group, sync_grads).flatten(0, 1)


class GathersFromOneProcess(DDPStrategy):
    def gather_from_processes(self, tensor, group=None):
        return super().gather_from_processes(tensor, group)[:1]


class BroadcastsFromRank0(DDPStrategy):
    def broadcast(self, obj, src=0):
        return super().broadcast(obj, src=0)


class SumsForTheMean(DDPStrategy):
    def reduce(self, tensor, group=None, reduce_op="mean"):
        return super().reduce(tensor, group, "sum" if reduce_op in ("mean", "avg") else reduce_op)


class ReducesInPlace(DDPStrategy):
    def reduce(self, tensor, group=None, reduce_op="mean"):
        reduced = super().reduce(tensor, group, reduce_op)
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.data.copy_(reduced)
        return reduced


class DecidesAlone(DDPStrategy):
    def reduce_boolean_decision(self, decision, all=True):  # noqa: A002 - the known name
        return decision


class CountsItsRankFromOne(Averaging):
    @property
    def is_global_zero(self):
        return self.global_rank == 1


class SamplesTwice(DDPStrategy):
    @property
    def distributed_sampler_kwargs(self):
        return {"num_replicas": self.world_size, "rank": 0}


class EvaluatesEverythingEverywhere(DDPStrategy):
    def validation_step(self, batch, *args, **kwargs):
        parts = [self.broadcast(batch, src=rank) for rank in range(self.world_size)]
        whole = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        return super().validation_step(whole, *args, **kwargs)


class ListensToEverybody(DDPStrategy):
    def setup_environment(self):
        super().setup_environment()
        self.store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


class GathersByConcatenation(DDPStrategy):
    def all_gather(self, tensor, group=None, sync_grads=False):
        gathered = super().all_gather(tensor, group, sync_grads)
        return gathered if tensor.dim() else gathered.sum()


class OnlyRank0SkipsTheBarrier(DDPStrategy):
    def barrier(self, name=None):
        if not self.is_global_zero:
            super().barrier(name)


class HoldsOnlyTheOthers(DDPStrategy):
    """Rank 0 says that it has come, and waits for nobody."""

    def barrier(self, name=None):
        self.count = getattr(self, "count", 0) + 1
        store = dist.distributed_c10d._get_default_store()
        if self.is_global_zero:
            store.set(f"barrier {self.count}", "open")
        else:
            store.wait([f"barrier {self.count}"])


class DropsTheLastUnevenBatch(DDPStrategy):
    def validation_step(self, batch, *args, **kwargs):
        if len(batch[0]) * self.world_size == 8:
            return super().validation_step(batch, *args, **kwargs)
        return None

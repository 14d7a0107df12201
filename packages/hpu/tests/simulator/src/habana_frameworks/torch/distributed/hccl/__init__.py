"""Collectives between devices, and what a launcher has said of this process."""

import os

import torch
import torch.distributed as dist

from habana_frameworks.torch._device import simulator
from habana_frameworks.torch.hpu import HABANA_VISIBLE_MODULES_VAR, HLS_MODULE_ID_VAR

_OF_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE": "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "RANK",
}


def initialize_distributed_hpu(world_size=None, rank=None, local_rank=None):
    """Return world size, rank and local rank, and choose the device of a process of several."""
    if None not in (world_size, rank, local_rank):
        os.environ.update(WORLD_SIZE=str(world_size), RANK=str(rank), LOCAL_RANK=str(local_rank))
    else:
        for name, variable in _OF_MPI.items():
            if name in os.environ:
                os.environ.setdefault(variable, os.environ[name])
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "12345")
    world_size = int(os.getenv("WORLD_SIZE", "1"))
    rank, local_rank = int(os.getenv("RANK", "-1")), int(os.getenv("LOCAL_RANK", "-1"))
    if HLS_MODULE_ID_VAR not in os.environ and local_rank != -1 and world_size > 1:
        visible = os.environ.get(HABANA_VISIBLE_MODULES_VAR)
        modules = visible.split(",") if visible else None
        assert modules is None or local_rank < len(modules), (
            f"There is not enough devices available for training. Please verify if {HABANA_VISIBLE_MODULES_VAR} "
            "is set correctly."
        )
        os.environ[HLS_MODULE_ID_VAR] = modules[local_rank] if modules else str(local_rank)
    if rank != -1:
        os.environ["ID"] = str(rank)
    return world_size, rank, local_rank


initialize_distributed_hpu()


def _create(backend, options):
    store = dist.PrefixStore("gloo below hccl", backend.store)
    gloo = dist.ProcessGroupGloo(store, backend.group_rank, backend.group_size, backend.timeout)
    return simulator.ProcessGroupHCCL(gloo, backend.group_rank, backend.group_size)


torch.distributed.Backend.register_backend("hccl", _create, devices=["hpu"], extended_api=True)

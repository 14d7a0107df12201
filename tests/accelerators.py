"""Accelerator of the tests of trainings: the CPU, or on request another one, such as simulated GPUs."""

import os
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
from torch.distributed.device_mesh import init_device_mesh

from dstrat.parallel.process_group import close_process_group, open_process_group
from dstrat.plugins.catalog import get_catalog

ACCELERATOR = os.environ.get("DSTRAT_TEST_ACCELERATOR", "cpu")
# Beside a GPU no process can be forked that has run a backward pass, as tests have.
START_METHOD = "fork" if ACCELERATOR == "cpu" else "forkserver"


def make_accelerator():
    catalog = get_catalog()
    offer = catalog.find("accelerator", ACCELERATOR)
    return catalog.load(offer)(**offer.component.options)


def make_scaler(**options):
    """Return torch's scaler of losses on the accelerator."""
    (device,) = make_accelerator().get_parallel_devices([0])
    return torch.amp.GradScaler(device.type, **options)


@contextmanager
def process_group(cluster, seconds=30):
    """Open the process group of the accelerator in a context in which tensors are made on the device of the rank."""
    accelerator = make_accelerator()
    (device,) = accelerator.get_parallel_devices([cluster.local_rank])
    accelerator.setup(device)
    backend = accelerator.process_group_backend
    open_process_group(cluster, backend=backend, timeout=timedelta(seconds=seconds))
    try:
        with nullcontext() if device.type == "cpu" else device:
            yield
    finally:
        close_process_group()


def make_mesh(sizes, **options):
    """Return a mesh of the devices of the ranks in the context of a process group."""
    return init_device_mesh(torch.get_default_device().type, sizes, **options)

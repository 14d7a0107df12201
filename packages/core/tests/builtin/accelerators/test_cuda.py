"""GPUs that torch calls cuda."""

import os
import subprocess
import sys

import pytest
import torch

from dstrat.builtin.accelerators.cuda import CUDAAccelerator
from dstrat.errors import DeviceError

COUNT_AND_FORK = """
import os, sys, torch
from dstrat.builtin.accelerators.cuda import CUDAAccelerator
cuda = CUDAAccelerator()
assert cuda.is_available()
devices = cuda.get_parallel_devices(cuda.parse_devices("auto"))
assert not torch.cuda.is_initialized()
pid = os.fork()
if pid == 0:
    cuda.setup(devices[0])
    os._exit(0 if torch.ones(2, device="cuda").sum().item() == 2 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_it_says_so():
    cuda = CUDAAccelerator()
    assert not cuda.is_available()
    assert cuda.auto_device_count() == 0
    with pytest.raises(DeviceError, match="devices=2 is not possible: this machine has no cuda device"):
        cuda.parse_devices(2)


def test_devices_have_their_own_index():
    assert CUDAAccelerator().get_parallel_devices([2, 0]) == [torch.device("cuda:2"), torch.device("cuda:0")]
    assert CUDAAccelerator().process_group_backend == "nccl"


def test_teardown_without_setup_touches_nothing():
    CUDAAccelerator().teardown()
    assert torch.cuda.is_available() or not torch.cuda.is_initialized()


@pytest.mark.cuda
def test_counting_leaves_the_process_able_to_fork():
    subprocess.run([sys.executable, "-c", COUNT_AND_FORK], check=True, timeout=400)


@pytest.mark.cuda
def test_setup_makes_the_device_current_and_statistics_count_its_memory():
    cuda = CUDAAccelerator()
    device = cuda.get_parallel_devices(cuda.parse_devices(1))[0]
    cuda.setup(device)
    assert torch.cuda.current_device() == device.index
    held = torch.ones(1 << 20, device=device)
    stats = cuda.get_device_stats(device)
    assert stats["memory_reserved"] >= stats["memory_allocated"] >= held.nbytes
    cuda.teardown()


@pytest.mark.cuda
def test_only_visible_devices_count():
    code = "from dstrat.builtin.accelerators.cuda import CUDAAccelerator as A; assert not A().is_available()"
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400, env=environ)

"""The GPU of Apple silicon."""

import pytest
import torch

from dstrat.builtin.accelerators.mps import MPSAccelerator
from dstrat.errors import DeviceError

HAS_MPS = torch.backends.mps.is_available()


@pytest.mark.skipif(HAS_MPS, reason="this machine has an MPS device")
def test_without_a_device_it_says_so():
    assert not MPSAccelerator().is_available()
    with pytest.raises(DeviceError, match="this machine has no mps device"):
        MPSAccelerator().parse_devices("auto")


@pytest.mark.skipif(not HAS_MPS, reason="this machine has no MPS device")
def test_there_is_one_device():
    mps = MPSAccelerator()
    assert mps.parse_devices("auto") == mps.parse_devices(1) == mps.parse_devices([0]) == [0]
    with pytest.raises(DeviceError, match="at most 1 mps devices"):
        mps.parse_devices(2)
    mps.setup(mps.get_parallel_devices([0])[0])
    assert mps.get_device_stats(torch.device("mps"))["memory_allocated"] >= 0
    mps.teardown()


def test_it_has_no_float64():
    assert not MPSAccelerator().supports_dtype(torch.float64)
    assert MPSAccelerator().supports_dtype(torch.bfloat16)

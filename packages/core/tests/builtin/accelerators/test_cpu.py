"""The processor."""

import pytest
import torch

from dstrat.builtin.accelerators.cpu import CPUAccelerator
from dstrat.errors import DeviceError


def test_each_device_is_a_process_on_the_same_processor():
    cpu = CPUAccelerator()
    assert cpu.is_available()
    assert cpu.get_parallel_devices(cpu.parse_devices(3)) == [torch.device("cpu")] * 3
    assert cpu.process_group_backend == "gloo"


@pytest.mark.parametrize("devices", ["auto", -1])
def test_one_process_is_what_is_taken_automatically(devices):
    assert CPUAccelerator().parse_devices(devices) == [0]
    assert CPUAccelerator().auto_device_count() == 1


def test_a_slip_of_the_pen_does_not_start_thousands_of_processes():
    with pytest.raises(DeviceError, match="at most 1024 cpu devices"):
        CPUAccelerator().parse_devices(4000)


def test_setup_and_teardown_need_nothing():
    cpu = CPUAccelerator()
    cpu.setup(torch.device("cpu"))
    cpu.teardown()
    assert cpu.get_device_stats(torch.device("cpu")) == {}
    assert all(cpu.supports_dtype(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16))

"""Any type of device of torch; tests/simulated_gpu runs the same class on one."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from dstrat.builtin.accelerators.torch_accelerator import TorchAccelerator
from dstrat.errors import DeviceError
from dstrat.interfaces.accelerator import initialized_device_type

GUIDE = Path(__file__).parents[5] / "docs" / "publish.md"


@pytest.mark.skipif(torch.xpu.is_available(), reason="this machine has an XPU")
def test_without_a_device_it_says_so():
    xpu = TorchAccelerator("xpu")
    assert not xpu.is_available()
    assert xpu.hint_unavailable() is None
    with pytest.raises(DeviceError, match="devices=1 is not possible: this machine has no xpu device"):
        xpu.parse_devices(1)
    xpu.teardown()


def test_a_type_that_no_package_adds_says_what_to_install():
    npu = TorchAccelerator("npu")
    assert not npu.is_available()
    assert npu.hint_unavailable() == (
        "torch has no module torch.npu: install the package that adds this type of device"
    )
    assert npu.process_group_backend == "none"
    npu.teardown()


def test_the_backend_is_the_one_that_torch_has_for_the_type():
    assert TorchAccelerator("xpu").process_group_backend == "xccl"
    assert TorchAccelerator("cuda").process_group_backend == "nccl"


def test_devices_have_their_own_index():
    assert TorchAccelerator("xpu").get_parallel_devices([2, 0]) == [torch.device("xpu:2"), torch.device("xpu:0")]


def test_this_process_has_initialized_no_device():
    assert initialized_device_type() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_torch_for_cuda_that_was_asked_for_a_gpu_on_a_machine_without_one_can_be_copied(monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))  # as torch for CUDA says
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: True)  # in copies, once is_available() has been called
    assert initialized_device_type() is None


def test_records_of_the_guide_make_accelerators_of_their_type():
    program = (GUIDE.read_text().partition("\nNPU = ")[2]).partition("\n```")[0]
    scope = {}
    exec(f"from dstrat import Component\nNPU = {program}", scope)
    for name, backend in (("NPU", "hccl"), ("NEURON", "neuron")):
        record = scope[name]
        module, _, class_name = record.target.partition(":")
        accelerator = getattr(import_module(module), class_name)(**record.options)
        assert (accelerator.device_type, record.process_group_backend) == (record.device_type, backend)
        assert not accelerator.is_available()

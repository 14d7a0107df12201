"""Devices that users name, and what XLA's runtime says of them."""

import pytest
import torch

from dstrat_xla import TPUAccelerator, XLAAccelerator


@pytest.mark.parametrize(
    ("devices", "indices"), [("auto", [0]), (1, [0]), (4, [0, 1, 2, 3]), ([5], [5]), ("2", [0, 1])]
)
def test_devices_are_a_number_or_indices(devices, indices):
    accelerator = XLAAccelerator()
    assert accelerator.parse_devices(devices) == indices
    assert accelerator.get_parallel_devices(indices) == [torch.device("xla", index) for index in indices]


def test_the_processor_counts_no_memory():
    assert XLAAccelerator().get_device_stats(torch.device("xla", 0)) == {}


def test_a_machine_without_a_tpu_has_none():
    assert not TPUAccelerator().is_available()


@pytest.mark.tpu
def test_a_tpu_counts_its_memory():
    accelerator = TPUAccelerator()
    accelerator.setup(torch.device("xla", 0))
    assert accelerator.get_device_stats(torch.device("xla", 0))["memory_limit"] > 0

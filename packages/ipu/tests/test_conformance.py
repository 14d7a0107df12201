"""The plugin and accelerator of this distribution pass the conformance kit; on the simulator."""

from __future__ import annotations

from dstrat.testing import AcceleratorSuite, PluginSuite


class TestPlugin(PluginSuite):
    distribution = "dstrat-ipu"


class TestAccelerator(AcceleratorSuite):
    alias = "ipu"
    expected_failures = {  # noqa: RUF012 - as the kit has it
        "test_it_gives_a_device_of_torch_for_each_index": "no tensor is on an IPU outside of a compiled model"
    }

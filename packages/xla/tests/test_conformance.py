"""The plugin, accelerator, checkpoint io and strategies of this distribution pass the conformance kit."""

from __future__ import annotations

from typing import ClassVar

from dstrat.testing import AcceleratorSuite, CheckpointIOSuite, PluginSuite, StrategySuite


class TestPlugin(PluginSuite):
    distribution = "dstrat-xla"


class TestAccelerator(AcceleratorSuite):
    alias = "xla"


class TestCheckpointIO(CheckpointIOSuite):
    alias = "xla"


class TestSingleXLA(StrategySuite):
    alias = "single_xla"
    accelerator = "xla"
    world_sizes = (1,)


class TestXLA(StrategySuite):
    alias = "xla"
    accelerator = "xla"
    options: ClassVar = {"reduce_on_host": True}  # XLA's CPU backend has no collectives
    world_sizes = (1, 2)


class TestXLASPMD(StrategySuite):
    alias = "xla_spmd"
    accelerator = "xla"
    devices_per_process = 4
    options: ClassVar = {"mesh_shape": {"data": 2, "fsdp": 2}}
    world_sizes = (1,)


class TestXLAFSDP(StrategySuite):
    alias = "xla_fsdp"
    accelerator = "xla"
    world_sizes = (1,)

"""The plugin, accelerator, precision, checkpoint io and strategies of this distribution pass the conformance kit."""

from __future__ import annotations

import os
from typing import ClassVar

from dstrat.testing import AcceleratorSuite, CheckpointIOSuite, PluginSuite, StrategySuite

# Ranks hold their devices while they wait for another test, so that each team of them needs a machine.
MACHINE_OF_EACH_TEAM = {"HABANA_SIMULATOR_MACHINE": f"{os.environ['HABANA_SIMULATOR_MACHINE']}/team-{{job}}"}
WITHOUT_ENGINE = {
    "test_it_trains_in_each_precision_that_it_declares[fp8]": "fp8 needs an engine that the simulator lacks",
}


class TestPlugin(PluginSuite):
    distribution = "dstrat-hpu"


class TestAccelerator(AcceleratorSuite):
    alias = "hpu"


class TestCheckpointIO(CheckpointIOSuite):
    alias = "hpu"


class TestHPUSingle(StrategySuite):
    alias = "hpu_single"
    accelerator = "hpu"
    environ: ClassVar = MACHINE_OF_EACH_TEAM
    world_sizes = (1,)
    expected_failures: ClassVar = WITHOUT_ENGINE


class TestHPUParallel(StrategySuite):
    alias = "hpu_parallel"
    accelerator = "hpu"
    environ: ClassVar = MACHINE_OF_EACH_TEAM
    world_sizes = (1, 2)
    expected_failures: ClassVar = WITHOUT_ENGINE


class TestHPUFSDP(StrategySuite):
    alias = "hpu_fsdp"
    accelerator = "hpu"
    environ: ClassVar = MACHINE_OF_EACH_TEAM
    world_sizes = (1, 2)

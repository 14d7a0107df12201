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
    """Gradients are averaged on the host, as XLA's CPU backend has no collectives between processes."""

    alias = "xla"
    accelerator = "xla"
    options: ClassVar = {"reduce_on_host": True}
    world_sizes = (1, 2)
    expected_failures: ClassVar = {
        "test_batch_norm_takes_the_statistics_of_each_ranks_own_batch": (
            "XLA's batch norm keeps the biased variance of a batch in its running statistics, torch's the unbiased one"
        ),
    }


class TestXLASPMD(StrategySuite):
    """Two replicas, each sharded over two devices."""

    alias = "xla_spmd"
    accelerator = "xla"
    devices_per_process = 4
    options: ClassVar = {"mesh_shape": {"data": 2, "fsdp": 2}}
    world_sizes = (1,)


class TestXLAFSDP(StrategySuite):
    alias = "xla_fsdp"
    accelerator = "xla"
    world_sizes = (1,)
    expected_failures: ClassVar = {
        "test_it_starts_processes_as_its_record_says": (
            "XLA's CPU backend has no collectives between processes, so that without a TPU there can be only one"
        ),
    }

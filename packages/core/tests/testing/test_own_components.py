"""The core's own components pass the conformance kit."""

from dstrat.testing import (
    AcceleratorSuite,
    CheckpointIOSuite,
    ClusterEnvironmentSuite,
    PluginSuite,
    PrecisionSuite,
    StrategySuite,
)


class TestPlugin(PluginSuite):
    distribution = "dstrat"


class TestSingleDevice(StrategySuite):
    alias = "single_device"
    world_sizes = (1,)


class TestCPU(AcceleratorSuite):
    alias = "cpu"


class TestCUDA(AcceleratorSuite):
    alias = "cuda"


class TestXPU(AcceleratorSuite):
    alias = "xpu"


class TestMPS(AcceleratorSuite):
    alias = "mps"


class Test32True(PrecisionSuite):
    alias = "32-true"


class Test64True(PrecisionSuite):
    alias = "64-true"


class TestBF16True(PrecisionSuite):
    alias = "bf16-true"


class TestBF16Mixed(PrecisionSuite):
    alias = "bf16-mixed"


class Test16Mixed(PrecisionSuite):
    alias = "16-mixed"


class TestTorchFile(CheckpointIOSuite):
    alias = "torch"


class TestPortable(CheckpointIOSuite):
    alias = "portable"


class TestPlain(ClusterEnvironmentSuite):
    alias = "env"

    @staticmethod
    def rank_environ(rank, world_size):
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }


class TestTorchElastic(ClusterEnvironmentSuite):
    alias = "torchelastic"

    @staticmethod
    def rank_environ(rank, world_size):
        return {
            **TestPlain.rank_environ(rank, world_size),
            "TORCHELASTIC_RUN_ID": "a",
            "GROUP_RANK": "0",
            "LOCAL_WORLD_SIZE": str(world_size),
        }

"""The conformance kit on simulated GPUs: what a GPU would run has run on something that is not a CPU.

By default what trains and computes; ``nox -s simulated_gpu -- -m variant`` runs the rest: what launches and ends
processes (see ``conftest.py``), and fsdp with its parameters on the host, which shares all but the copies with fsdp.
"""

import pytest

from dstrat.testing import AcceleratorSuite, StrategySuite


class TestAccelerator(AcceleratorSuite):
    alias = "simulated_gpu"


class TestSingleDevice(StrategySuite):
    alias = "single_device"
    accelerator = "simulated_gpu"
    world_sizes = (1,)


class TestDDP(StrategySuite):
    alias = "ddp"
    accelerator = "simulated_gpu"
    world_sizes = (2,)


class TestFSDP(StrategySuite):
    alias = "fsdp"
    accelerator = "simulated_gpu"
    world_sizes = (2,)


class TestFSDPOffloaded(StrategySuite):
    alias = "fsdp_cpu_offload"
    accelerator = "simulated_gpu"
    world_sizes = (2,)
    pytestmark = pytest.mark.variant

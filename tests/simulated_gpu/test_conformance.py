"""The conformance kit on simulated GPUs: what a GPU would run has run on something that is not a CPU.

By default what trains and computes; ``nox -s simulated_gpu -- -m variant`` runs the rest: what launches and ends
processes (see ``conftest.py``), fsdp with its parameters on the host, which shares all but the copies with fsdp, and
further layouts.
"""

from typing import ClassVar

import pytest
from packages.mesh.tests import test_layout_conformance as on_processors

from dstrat.testing import AcceleratorSuite, Layout, LayoutSuite, StrategySuite


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


class TestMesh(LayoutSuite):
    alias = "mesh"
    accelerator = "simulated_gpu"
    configure_model = staticmethod(on_processors.split_heads)
    layouts: ClassVar = {name: on_processors.TestTwoRanks.layouts[name] for name in ("stages", "split layers")}


class TestMoreOfMesh(LayoutSuite):
    alias = "mesh"
    accelerator = "simulated_gpu"
    configure_model = staticmethod(on_processors.split_heads)
    layouts: ClassVar = {
        **on_processors.TestTwoRanks.layouts,
        "zero bubble": Layout(processes=2, options={"pp": 2, **on_processors.ZERO_BUBBLE}, share=0.71),
    }
    pytestmark = pytest.mark.variant

"""Layouts of all axes pass the layout suite of the conformance kit."""

from typing import ClassVar

import pytest
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dstrat.testing import Layout, LayoutSuite


def split_heads(module):
    """Split the layers of attention over the ranks that share a batch."""
    mesh = module.device_mesh["tp"]
    if mesh.size() > 1:
        plan = {**dict.fromkeys(("query", "key", "value"), ColwiseParallel()), "out": RowwiseParallel()}
        for layer in (module.net[1], module.net[3]):
            parallelize_module(layer, mesh, plan)


TURNS = {"schedule": "LoopedBFS"}
ZERO_BUBBLE = {"schedule": "InterleavedZeroBubble"}
RING = {"context_parallel": "ring"}


class TestTwoRanks(LayoutSuite):
    alias = "mesh"
    configure_model = staticmethod(split_heads)
    layouts: ClassVar = {
        "shards": Layout(processes=2, share=0.51),
        "split layers": Layout(processes=2, options={"tp": 2}, share=0.7),
        "stages": Layout(processes=2, options={"pp": 2, "microbatches": 4}, share=0.6),
        "stages in turn": Layout(processes=2, options={"pp": 2, "schedule": "Interleaved1F1B"}, share=0.71),
        "sequences": Layout(processes=2, options={"cp": 2}, share=0.51),
        "a ring of sequences": Layout(processes=2, options={"cp": 2, **RING}, share=0.51),
        "experts": Layout(processes=2, options={"ep": 2}, share=0.51),
    }


class TestFourRanks(LayoutSuite):
    alias = "mesh"
    configure_model = staticmethod(split_heads)
    layouts: ClassVar = {
        "zero bubble and shards": Layout(processes=4, options={"pp": 2, **ZERO_BUBBLE}, share=0.36),
        "stages and split layers": Layout(processes=4, options={"pp": 2, "tp": 2}, share=0.4),
        "a ring and split layers": Layout(processes=4, options={"cp": 2, "tp": 2, **RING}, share=0.4),
        "stages and experts": Layout(processes=4, options={"pp": 2, "ep": 2}, share=0.31),
    }


@pytest.mark.variant
class TestReplicas(LayoutSuite):
    alias = "mesh"
    configure_model = staticmethod(split_heads)
    layouts: ClassVar = {"replicas": Layout(processes=2, options={"dp_replicate": 2})}


@pytest.mark.variant
class TestMoreOfFourRanks(LayoutSuite):
    alias = "mesh"
    configure_model = staticmethod(split_heads)
    layouts: ClassVar = {
        "stages and shards": Layout(processes=4, options={"pp": 2}, share=0.31),
        "stages and sequences": Layout(processes=4, options={"pp": 2, "cp": 2}, share=0.31),
        "experts and shards": Layout(processes=4, options={"ep": 2}, share=0.26),
        "stages, GPipe": Layout(processes=4, options={"pp": 4, "schedule": "GPipe"}, share=0.4),
        "stages in turn and experts": Layout(processes=4, options={"pp": 2, "ep": 2, **TURNS}, share=0.36),
        "sequences and shards": Layout(processes=4, options={"cp": 2}, share=0.26),
        "experts and split layers": Layout(processes=4, options={"ep": 4, "tp": 2}, share=0.35),
    }


@pytest.mark.slow
class TestEightRanks(LayoutSuite):
    alias = "mesh"
    configure_model = staticmethod(split_heads)
    layouts: ClassVar = {
        "stages, a ring, split layers": Layout(processes=8, options={"pp": 2, "cp": 2, "tp": 2, **RING}, share=0.2),
    }


@pytest.mark.variant
class TestReplicasOfEightRanks(LayoutSuite):
    alias = "mesh"
    configure_model = staticmethod(split_heads)
    layouts: ClassVar = {
        "replicas, shards, a ring": Layout(processes=8, options={"dp_replicate": 2, "cp": 2, **RING}, share=0.26),
    }

"""Indices of devices that DeepSpeed computes on."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dstrat.builtin.accelerators.cuda import CUDAAccelerator
from dstrat.testing.ranks.team import LoopbackCluster
from dstrat_deepspeed import DeepSpeedStrategy
from dstrat_deepspeed.engine import Engine, StepModule
from dstrat_deepspeed.zero3 import shard, sharded_creation


class StoppedError(Exception):
    """Raised by the library, as nothing after that is needed."""


class Library:
    """Notes the index of the device that DeepSpeed would use, as its engine and ``zero.Init`` find it."""

    def __init__(self):
        self.zero = SimpleNamespace(Init=self.init)
        groups = SimpleNamespace(_get_zero_param_intra_parallel_group=lambda: None)
        self.utils = SimpleNamespace(groups=groups)
        self.index = None

    def init(self, **options):
        self.index = int(os.environ["LOCAL_RANK"])
        raise StoppedError

    def initialize(self, args=None, **options):
        self.index = getattr(args, "device_rank", int(os.environ["LOCAL_RANK"]))
        raise StoppedError


def create(library):
    with sharded_creation(library, {}, None, device_rank=3):
        pass


USES = {
    "sharded creation": create,
    "sharding": lambda library: shard(library, nn.Linear(2, 2), {}, device_rank=3),
    "engine": lambda library: Engine(
        library, StepModule(nn.Linear(2, 2), None), None, {}, is_manual=False, device_rank=3
    ),
}


@pytest.mark.parametrize("use", USES)
def test_deepspeed_gets_the_index_of_the_device_not_the_local_rank(use, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    library = Library()
    with pytest.raises(StoppedError):
        USES[use](library)
    assert (library.index, os.environ["LOCAL_RANK"]) == (3, "1")


@pytest.mark.parametrize(("devices", "index"), [(("cuda:2", "cuda:3"), 3), (("cpu", "cpu"), 1)])
def test_the_index_is_that_of_the_rank_s_device(devices, index):
    strategy = DeepSpeedStrategy(
        accelerator=CUDAAccelerator(),
        parallel_devices=[torch.device(name) for name in devices],
        cluster_environment=LoopbackCluster(1, 2, 0, None),
    )
    assert strategy._device_rank == index


def test_checks_that_ranks_agree_compute_on_the_device(monkeypatch):
    from functools import partial
    from importlib import import_module

    from dstrat_deepspeed.internals import checks_on_device
    from dstrat_deepspeed.runtime import environment

    coordinator, utilities = (
        import_module(f"deepspeed.runtime.zero.{name}") for name in ("partitioned_param_coordinator", "utils")
    )
    names = []
    accelerator = SimpleNamespace(device_name=lambda index: names.append(index) or "cpu")
    monkeypatch.setattr(utilities, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(utilities, "dist", SimpleNamespace(get_rank=lambda: 0, broadcast=lambda *_, **__: None))
    monkeypatch.setenv("LOCAL_RANK", "1")
    original = coordinator.assert_ints_same_as_other_ranks
    with checks_on_device(partial(environment, {"LOCAL_RANK": "3"})):
        coordinator.assert_ints_same_as_other_ranks([4, 5])
    assert set(names) == {"3"}
    assert os.environ["LOCAL_RANK"] == "1"
    assert coordinator.assert_ints_same_as_other_ranks is original

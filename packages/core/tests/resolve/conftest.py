"""A catalog of the core's own components, and one that has made-up ones of every kind besides."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dstrat.builtin.accelerators.cpu import CPUAccelerator
from dstrat.builtin.precision.true import TruePrecision
from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.errors import MisuseError
from dstrat.interfaces.accelerator import Accelerator
from dstrat.interfaces.cluster import ClusterEnvironment
from dstrat.interfaces.precision import Precision
from dstrat.parallel.strategy import ParallelStrategy
from dstrat.plugins.catalog import Catalog
from dstrat.plugins.component import Component


class Many(ParallelStrategy):
    """One process per device."""


class Pair(SingleDeviceStrategy):
    """One process with up to two devices."""


class Fast(Accelerator):
    """Four devices without float64."""

    process_group_backend = "gloo"

    def is_available(self):
        return True

    def auto_device_count(self):
        return 4

    def parse_devices(self, devices):
        return list(range(int(devices)))  # leaves bad words to int()

    def get_parallel_devices(self, indices):
        return [torch.device("meta", index) for index in indices]

    def supports_dtype(self, dtype):
        return dtype != torch.float64

    def precision_for(self, flag):
        return FastPrecision() if flag == "bf16-true" else None


class Slow(CPUAccelerator):
    """There, but never chosen by itself."""


class Lonely(CPUAccelerator):
    """In no group, so that few strategies run on it."""


class Gone(Fast):
    """Not there."""

    def is_available(self):
        return False


class Cracked(Fast):
    """Cannot tell."""

    def is_available(self):
        raise RuntimeError("driver too old")


class FastPrecision(TruePrecision):
    """The fast accelerator's own."""

    def __init__(self):
        super().__init__("bf16-true")


class Farm(ClusterEnvironment):
    """As simple as the interface's example: it does not expect anything strange."""

    @classmethod
    def evidence(cls, environ):
        return f"FARM is {environ['FARM'].strip()}" if "FARM" in environ else None

    main_address = property(lambda self: "localhost")
    main_port = property(lambda self: 29500)
    world_size = property(lambda self: int(self.environ["FARM"]))
    global_rank = property(lambda self: int(self.environ["FARM_RANK"]))
    local_rank = property(lambda self: int(self.environ["FARM_RANK"]))
    node_rank = property(lambda self: 0)


class Blind(Farm):
    """Its evidence needs a variable."""

    @classmethod
    def evidence(cls, environ):
        return None if "BLIND" not in environ else {"1": "BLIND is 1"}[environ["BLIND"]]


class Odd(Precision):
    """Computes in float64."""

    flag = "odd"
    param_dtype = reduce_dtype = property(lambda self: torch.float32)
    compute_dtype = property(lambda self: torch.float64)


class Scaled(TruePrecision):
    """Has an option, and a flag that the fast accelerator serves with another class."""

    def __init__(self, scale=1.0):
        super().__init__("bf16-true")
        self.scale = scale


class Shelf(TorchCheckpointIO):
    """A checkpoint io of one's own."""


class Drawer(Shelf):
    """A checkpoint io with an option."""

    def __init__(self, depth=1, **kwargs):
        super().__init__()
        self.depth = depth
        if kwargs:
            raise MisuseError(f"Drawer has no {[*kwargs]}")


class Demanding(SingleDeviceStrategy):
    """Cannot be constructed by others."""

    def __init__(self, size):
        super().__init__()


SHELF = Shelf()

_MANY = Component(
    kind="strategy",
    alias="many",
    target=Many,
    summary="",
    options={"start_method": "popen"},
    auto=50,
    accelerators=("cpu", "chips"),
    starts_processes=True,
    notebook_safe=False,
    multi_node=True,
)
_PAIR = Component(kind="strategy", alias="pair", target=Pair, summary="", max_devices=2)
_FAST = Component(kind="accelerator", alias="fast", target=Fast, summary="", auto=500, groups=("chips",))
_FARM = Component(kind="cluster_environment", alias="farm", target=Farm, summary="", auto=900)

COMPONENTS = [
    _MANY,
    _MANY.variant("many_spawn", start_method="spawn"),
    dataclasses.replace(_MANY.variant("many_fork", start_method="fork"), notebook_safe=True, auto=10),
    _MANY.variant("many_timeless", start_method="magic"),
    _MANY.variant("many_shelved", checkpoint_io=SHELF),
    dataclasses.replace(_MANY.variant("many_here"), multi_node=False),
    dataclasses.replace(_MANY.variant("many_plain"), accelerators=("cpu",)),
    _PAIR,
    dataclasses.replace(
        _PAIR.variant("picky"), accelerators=("fast",), precisions=("bf16-mixed", "bf16-true"), max_devices=None
    ),
    dataclasses.replace(_PAIR.variant("lost"), accelerators=("gone",)),
    dataclasses.replace(_PAIR.variant("needy"), requires=("no-such-distribution>=3",)),
    Component(kind="strategy", alias="demanding", target=Demanding, summary="", max_devices=1),
    _FAST,
    dataclasses.replace(_FAST, alias="slow", target=Slow, auto=None),
    dataclasses.replace(_FAST, alias="lonely", target=Lonely, auto=None, groups=()),
    dataclasses.replace(_FAST, alias="gone", target=Gone, auto=600, groups=("chips", "ruins")),
    dataclasses.replace(_FAST, alias="cracked", target=Cracked, auto=700, groups=("ruins",)),
    _FARM,
    dataclasses.replace(_FARM, alias="blind", target=Blind, auto=950),
    Component(kind="precision", alias="odd", target=Odd, summary=""),
    Component(kind="checkpoint_io", alias="shelf", target=Shelf, summary=""),
    Component(kind="checkpoint_io", alias="drawer", target=Drawer, summary=""),
    Component(kind="precision", alias="scaled", target=Scaled, summary=""),
]


@pytest.fixture(scope="session")
def core_catalog():
    """Only what the core offers, whatever else is installed here."""
    others = {plugin.distribution for plugin in Catalog({}).plugins} - {"dstrat"}
    return Catalog({"DSTRAT_DISABLE_PLUGINS": ",".join(others)})


@pytest.fixture(scope="session")
def catalog():
    """What the core offers, and the made-up components."""
    others = {plugin.distribution for plugin in Catalog({}).plugins} - {"dstrat"}
    catalog = Catalog({"DSTRAT_DISABLE_PLUGINS": ",".join(others)})
    for component in COMPONENTS:
        catalog.register(component)
    return catalog


@pytest.fixture(scope="session")
def parts(catalog):
    """The classes behind the aliases, by alias, as a user has them in hand."""
    kinds = ("strategy", "accelerator", "precision", "checkpoint_io", "cluster_environment")
    offers = [offer for kind in kinds for offer in catalog.offers(kind) if offer.component.alias != "needy"]
    return {offer.component.alias: catalog.load(offer) for offer in offers}

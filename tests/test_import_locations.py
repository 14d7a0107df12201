"""The modules that a user imports from: each name is there for programs and for type checkers alike."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dstrat
from dstrat import accelerators, callbacks, launch, loggers, profilers, strategies, tuner, utilities
from dstrat import plugins as plugin_classes
from dstrat.plugins import environments, io, precision
from dstrat.plugins.known import KNOWN_CLASSES

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[1]
FAMILIES = ["dstrat_bagua", "dstrat_ddp", "dstrat_deepspeed", "dstrat_fairscale", "dstrat_fsdp"]
MODULES = [
    dstrat, accelerators, callbacks, loggers, profilers, strategies, tuner, utilities, plugin_classes, environments, io,
    precision, launch, *map(import_module, FAMILIES),
]  # fmt: skip


def names_for_type_checkers(module: ModuleType) -> set[str]:
    """Return the names that the module declares under ``if TYPE_CHECKING``."""
    tree = ast.parse(inspect.getsource(module))
    blocks = [node.body for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    statements = [statement for block in blocks for statement in block]
    imported = {
        name.asname or name.name for node in statements if isinstance(node, ast.ImportFrom) for name in node.names
    }
    declared = {ast.unparse(node.target) for node in statements if isinstance(node, ast.AnnAssign)}
    return (imported | declared) - {"*"}


def skip_without_fairscale(family: str) -> None:
    """Skip what imports a class of dstrat-fairscale, which derives from one of FairScale, where it is not installed."""
    if family == "dstrat_fairscale":
        pytest.importorskip("fairscale", reason="needs fairscale")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_programs_and_type_checkers_see_the_same_names(module: ModuleType) -> None:
    skip_without_fairscale(module.__name__)
    static = names_for_type_checkers(module)
    assert static == {*getattr(module, "_HOMES", module.__all__)} | ({"__version__"} & static)
    assert static <= {*module.__all__}
    for name in module.__all__:
        assert getattr(module, name) is not None


@pytest.mark.parametrize(
    ("module", "base"),
    [(callbacks, dstrat.Callback), (loggers, dstrat.Logger), (profilers, dstrat.Profiler)],
)
def test_every_class_of_a_kind_is_where_its_kind_is(module: ModuleType, base: type) -> None:
    exported = {name: getattr(dstrat, name) for name in dstrat.__all__}
    of_kind = {name for name, value in exported.items() if isinstance(value, type) and issubclass(value, base)}
    assert of_kind == {name for name in module.__all__ if isinstance(getattr(module, name), type)}


def test_the_classes_of_installed_families_are_strategies_of_dstrat() -> None:
    skip_without_fairscale("dstrat_fairscale")
    from dstrat.strategies import (
        BaguaStrategy,
        CheckpointIO,
        DDPShardedStrategy,
        DDPStrategy,
        DeepSpeedStrategy,
        FSDPStrategy,
        StrategyRegistry,
    )

    assert CheckpointIO is dstrat.CheckpointIO
    assert StrategyRegistry is dstrat.StrategyRegistry
    classes = (BaguaStrategy, DDPStrategy, DeepSpeedStrategy, DDPShardedStrategy, FSDPStrategy)
    assert [cls.__module__.partition(".")[0] for cls in classes] == FAMILIES
    assert {"BaguaStrategy", "DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy"} <= {*dir(strategies)}


def test_type_checkers_know_every_class_that_is_hinted_and_offered_here() -> None:
    workspace = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    classes = {name: hint for table in KNOWN_CLASSES.values() for name, hint in table.items()}
    offered = {name for name, hint in classes.items() if hint.partition("[")[0].removeprefix("dstrat-") in workspace}
    assert offered == names_for_type_checkers(import_module("dstrat.plugins.known")) - {"Iterable", "Kind", "Mapping"}
    for module in (accelerators, strategies):  # and takes them all from there
        assert "from dstrat.plugins.known import *" in inspect.getsource(module)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_class_of_a_family_has_an_install_hint_and_a_type(family: str) -> None:
    skip_without_fairscale(family)
    distribution = family.replace("_", "-")
    hinted = {name for name, hint in KNOWN_CLASSES["strategy"].items() if hint.partition("[")[0] == distribution}
    package = import_module(family)
    assert hinted == {name for name in package.__all__ if issubclass(getattr(package, name), dstrat.Strategy)}
    assert hinted <= names_for_type_checkers(import_module("dstrat.plugins.known"))
    for name in hinted:
        assert getattr(strategies, name) is getattr(package, name)

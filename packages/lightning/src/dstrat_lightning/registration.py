"""dstrat's strategies among those of Lightning's Trainer, as soon as Lightning is imported."""

from __future__ import annotations

import sys
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from dstrat.plugins.known import KNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PREFIX = "dstrat_"
_MODULES = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")


def register_when_imported() -> None:
    """Register the strategies with each of Lightning's two packages, now or after its import.

    Every listing of plugins imports this distribution, and must not import Lightning; so this waits for the user.
    """
    for name in _MODULES:
        module = sys.modules.get(name)
        if hasattr(module, "StrategyRegistry"):
            register_strategies(module)
        else:
            sys.meta_path.insert(0, _Finder(name))  # before Python's own, which would find the module without it


def register_strategies(strategies: Any) -> None:
    """Add ``dstrat_ddp``, ``dstrat_fsdp`` and all other aliases that are known to a registry of Lightning's.

    Args:
        strategies: ``lightning.pytorch.strategies`` or ``pytorch_lightning.strategies``.
    """
    package = strategies.__name__.rpartition(".")[0]
    # The table of install hints, not the catalog: the error for an alias that is not installed has the command.
    for alias in KNOWN["strategy"]:
        description = f"{alias} of dstrat"
        strategies.StrategyRegistry.register(
            PREFIX + alias, partial(_make_strategy, package), description=description, override=True, alias=alias
        )


def _make_strategy(package: str, alias: str) -> Any:
    from dstrat_lightning.strategy import strategy_class  # not with Lightning, as it imports torch and dstrat's Trainer

    return strategy_class(package)(alias)


class _Finder(MetaPathFinder):
    """Finder of one module, which registers the strategies when it has been imported.

    Args:
        name: Of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)  # it has done its work, and the next look-up is the ordinary one
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loader that loads a module by another one, and then registers the strategies.

    Args:
        loader: The other one.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        register_strategies(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_source, get_resource_reader and the like, which other tools call

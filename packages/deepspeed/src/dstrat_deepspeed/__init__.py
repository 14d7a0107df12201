"""DeepSpeed's ZeRO for dstrat; importing it brings in neither torch nor DeepSpeed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dstrat_deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]

_MODULES = {"DeepSpeedStrategy": "strategy"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

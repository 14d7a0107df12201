"""Precision of everything that is not computed or kept in few bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.builtin.precision.true import TruePrecision
from dstrat.errors import RequestError
from dstrat.interfaces.precision import Precision

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    import torch

_BASES = ("bf16-mixed", "bf16-true", "32-true")


class PrecisionOverBase(Precision):
    """A precision that converts some linear layers, and leaves everything else to one of the core's.

    Args:
        flag: The alias that a user writes.
        base: The core's precision for everything else.
        device: Type of the device for autocast; None takes that of the module.
    """

    def __init__(self, flag: str, base: str, device: str | None) -> None:
        if base not in _BASES:
            raise RequestError(
                f"{type(self).__name__}(base={base!r}) is not possible: choose one of {', '.join(_BASES)}"
            )
        self.flag = flag
        self._base: Precision = MixedPrecision(base, device) if base == "bf16-mixed" else TruePrecision(base)

    @property
    def param_dtype(self) -> torch.dtype:
        return self._base.param_dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._base.compute_dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self._base.reduce_dtype

    def connect(self, module: nn.Module) -> nn.Module:
        return self._base.connect(module)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self._base.tensor_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        return self._base.forward_context()

    def convert_input(self, batch: Any) -> Any:
        return self._base.convert_input(batch)

    def teardown(self) -> None:
        self._base.teardown()


def replace_layers(module: nn.Module, replacements: Mapping[str, nn.Module]) -> None:
    """Replace layers of a module, by their names."""
    for name, replacement in replacements.items():
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, replacement)


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a module by their names, a shared one under each of its names.

    Subclasses are left out: they compute something else than a product, such as the layers of LoRA, or are read by
    their parent, such as those of attention.
    """
    return {name: layer for name, layer in module.named_modules(remove_duplicate=False) if type(layer) is nn.Linear}

"""Precision on Gaudi, fp8 with the vendor's transformer engine included."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.builtin.precision.true import TruePrecision
from dstrat.errors import ConflictError, RequestError
from dstrat.interfaces.precision import Precision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.nn import Module

_FLAGS = ("32-true", "bf16-true", "bf16-mixed", "fp8")
_ENGINE = "habana_frameworks.torch.hpex.experimental.transformer_engine"


class HPUPrecisionPlugin(Precision):
    """The dtypes that Gaudi computes in.

    ``"fp8"`` computes the products of the transformer engine's layers in 8 bits, and everything else as
    ``"bf16-mixed"`` does.  It has not been tested: there is no simulator of the engine.

    Args:
        precision: ``"32-true"``, ``"bf16-true"``, ``"bf16-mixed"`` or ``"fp8"``.
        device: Type of the device for autocast.
        recipe: The engine's recipe of scales, for ``"fp8"`` only; None takes its default.
        replace_layers: Whether ``nn.Linear`` layers become the engine's, for ``"fp8"`` only.

    Raises:
        RequestError: It is another precision, or the engine cannot be loaded.
        ConflictError: An option of ``"fp8"`` was given to another precision.
    """

    def __init__(
        self, precision: str = "32-true", device: str = "hpu", recipe: Any = None, replace_layers: bool = False
    ) -> None:
        if precision not in _FLAGS:
            raise RequestError(f"HPUPrecisionPlugin({precision!r}) is not possible: choose one of {', '.join(_FLAGS)}")
        if precision != "fp8" and (recipe is not None or replace_layers):
            raise ConflictError(f"recipe and replace_layers need precision='fp8', not {precision!r}")
        self.flag, self.device = precision, device
        self._engine = _load_engine() if precision == "fp8" else None
        self._recipe, self._replace_layers = recipe, replace_layers
        # Parameters of fp8 stay in float32, and what the engine has no layer for runs under autocast.
        is_true = precision.endswith("true")
        self._precision: Precision = TruePrecision(precision) if is_true else MixedPrecision("bf16-mixed", device)

    @property
    def param_dtype(self) -> torch.dtype:
        return self._precision.param_dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._precision.compute_dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self._precision.reduce_dtype

    def connect(self, module: Module) -> Module:
        if self._engine is not None and self._replace_layers:
            _use_engine(module, self._engine)
        return self._precision.connect(module)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self._precision.tensor_init_context()

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with self._precision.forward_context():
            if self._engine is None:
                yield
                return
            # Inside autocast, whose dtype is that of the inputs which the engine's layers quantize.
            with self._engine.fp8_autocast(enabled=True, fp8_recipe=self._recipe):
                yield

    def convert_input(self, batch: Any) -> Any:
        return self._precision.convert_input(batch)

    def teardown(self) -> None:
        self._precision.teardown()


def _load_engine() -> Any:
    try:
        return importlib.import_module(_ENGINE)
    except ImportError as error:
        raise RequestError(
            f"precision 'fp8' needs Gaudi's transformer engine, which cannot be loaded ({error}): install a release of "
            "the vendor's plugin that has it, or choose 'bf16-mixed'"
        ) from error


def _use_engine(module: Module, engine: Any) -> None:
    """Replace linear layers by the engine's with the same values."""
    for name, layer in module.named_children():
        if type(layer) is not nn.Linear:  # a subclass may compute something else
            _use_engine(layer, engine)
            continue
        replacement = engine.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        # Not strict: the engine's scales are in no checkpoint of a plain layer.
        differing = replacement.load_state_dict(layer.state_dict(), strict=False)
        missing = [key for key in differing.missing_keys if not key.endswith("_extra_state")]  # scales of the engine
        if missing or differing.unexpected_keys:
            raise RequestError(
                f"layer {name!r} cannot become the engine's: missing {missing}, unexpected "
                f"{differing.unexpected_keys}; take replace_layers=False, or another release of the vendor's plugin"
            )
        setattr(module, name, replacement)

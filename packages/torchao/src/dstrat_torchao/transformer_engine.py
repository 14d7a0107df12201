"""Training with the layers of NVIDIA's Transformer Engine, which compute products in 8-bit floats."""

from __future__ import annotations

import importlib
import logging
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dstrat.builtin.precision.true import default_dtype
from dstrat.errors import RequestError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.precision import Precision
from dstrat_torchao.base import replace_layers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ENGINE = "transformer_engine.pytorch"
_INSTALL = 'pip install --no-build-isolation "transformer-engine[pytorch]"'

_log = logging.getLogger(__name__)


class TransformerEnginePrecision(Precision):
    """Products of the engine's layers in 8-bit floats, with parameters and everything else in 16 bits.

    It needs the library transformer-engine and a GPU of capability 8.9 or newer.  Written for the library's documented
    interface, and not yet run on such hardware.

    Args:
        weights_dtype: Dtype of the parameters.
        recipe: The engine's recipe of scales, or options of its ``DelayedScaling``; None takes the engine's default.
        replace_layers: Whether ``nn.Linear`` and ``nn.LayerNorm`` layers become the engine's; None does so unless the
            module has some of the engine's already.
        fallback_compute_dtype: Dtype of autocast for what is not computed in 8 bits; None takes ``weights_dtype``.

    Raises:
        RequestError: The library cannot be loaded.
    """

    flag = "transformer-engine"

    def __init__(
        self,
        weights_dtype: torch.dtype = torch.bfloat16,
        recipe: Any = None,
        replace_layers: bool | None = None,
        fallback_compute_dtype: torch.dtype | None = None,
    ) -> None:
        self._engine = _load(_ENGINE)
        if recipe is not None and isinstance(recipe, dict):
            recipe = _load("transformer_engine.common.recipe").DelayedScaling(**recipe)
        self._weights_dtype = weights_dtype
        self._recipe = recipe
        self._replaces_layers = replace_layers
        self._fallback_dtype = fallback_compute_dtype or weights_dtype

    @property
    def param_dtype(self) -> torch.dtype:
        return self._weights_dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._weights_dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self._weights_dtype

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (*super().dtypes, torch.float8_e4m3fn)

    def connect(self, module: nn.Module) -> nn.Module:
        has_engine = any(type(layer).__module__.startswith("transformer_engine.") for layer in module.modules())
        if self._replaces_layers or (self._replaces_layers is None and not has_engine):
            replace_layers(module, _replacements(module, self._engine))
        return module.to(self._weights_dtype)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return default_dtype(self._weights_dtype)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.tensor_init_context())  # tensors that forward makes have the weights' dtype
            stack.enter_context(torch.autocast("cuda", dtype=self._fallback_dtype))
            if hasattr(self._engine, "autocast"):  # of releases that deprecate the other
                stack.enter_context(self._engine.autocast(enabled=True, recipe=self._recipe))
            else:
                stack.enter_context(self._engine.fp8_autocast(enabled=True, fp8_recipe=self._recipe))
            yield

    def convert_input(self, batch: Any) -> Any:
        return apply_to_tensors(batch, lambda x: x.to(self._weights_dtype) if x.is_floating_point() else x)


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RequestError(
            f"precision 'transformer-engine' needs {name}, which cannot be loaded ({error}): {_INSTALL}"
        ) from error


def _replacements(module: nn.Module, engine: Any) -> Mapping[str, nn.Module]:
    """Return the engine's layers with the same values for those that it has."""
    made: dict[int, nn.Module] = {}
    names: dict[str, nn.Module] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        if id(layer) not in made:
            replacement = _replacement(layer, name, engine)
            if replacement is None:
                continue
            replacement.load_state_dict(layer.state_dict(), strict=False)  # without the engine's own extra state
            for key, parameter in layer.named_parameters():
                replacement.get_parameter(key).requires_grad_(parameter.requires_grad)
            made[id(layer)] = replacement
        names[name] = made[id(layer)]
    return names


def _replacement(layer: nn.Module, name: str, engine: Any) -> nn.Module | None:
    replacement: nn.Module | None = None
    if type(layer) is nn.Linear:
        if layer.in_features % 16 or layer.out_features % 16:  # forward and backward products need these multiples
            _log.info("precision 'transformer-engine' leaves layer %r as it is, for its sizes", name)
            return None
        replacement = engine.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    elif isinstance(layer, nn.LayerNorm) and _is_like_the_engine(layer):
        replacement = engine.LayerNorm(layer.normalized_shape[0], eps=layer.eps)
    return replacement


def _is_like_the_engine(layer: nn.LayerNorm) -> bool:
    """Return whether it is a layer norm over one dimension, with weight and bias, as the engine's has always."""
    is_plain = type(layer) is nn.LayerNorm and len(layer.normalized_shape) == 1
    return is_plain and layer.elementwise_affine and layer.bias is not None

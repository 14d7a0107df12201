"""Training with products in 8-bit floats, by torchao."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dstrat.errors import ConflictError, DeviceError, RequestError
from dstrat_torchao.base import PrecisionOverBase, linear_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_RECIPES = {"float8": "tensorwise", "float8-rowwise": "rowwise", "float8-rowwise-gw-hp": "rowwise_with_gw_hp"}
_FEATURES = 16  # the hardware's products need multiples of it
_CAPABILITY = (8, 9)  # Ada and Hopper, the first with such products

_log = logging.getLogger(__name__)


class Float8Precision(PrecisionOverBase):
    """Products of linear layers in 8-bit floats, forward and backward; everything else as its base says.

    Parameters, gradients, optimizer state and checkpoints are those of the base.  Inputs, weights and gradients of
    outputs are scaled and rounded to 8 bits before each product, with scales computed from their values.  Layers are
    converted for the run, and are plain ``nn.Linear`` layers again after it.

    Args:
        precision: ``"float8"``: one scale for each tensor, the fastest; ``"float8-rowwise"``: one for each row, more
            exact; ``"float8-rowwise-gw-hp"``: the same with gradients of weights in the base's dtype, the most exact.
        base: Precision of everything else: ``"bf16-mixed"``, ``"bf16-true"`` or ``"32-true"``.
        device: Type of the device for autocast; None takes that of the module.
        layers: Whether to convert an ``nn.Linear`` layer, by the layer and its name; None converts those whose
            numbers of inputs and outputs are multiples of 16, as the hardware needs.
        emulate: Whether to round to 8 bits and compute products in the base's dtype, on any hardware.  It shows how a
            training would go, and is slower than the base.
        config: Further options of torchao's ``Float8LinearConfig``, such as ``{"pad_inner_dim": True}``.

    Raises:
        RequestError: There is no such precision or option.
        ConflictError: An option would change what checkpoints contain.
    """

    hint_unsupported = "or round to 8 bits without such hardware: precision=Float8Precision(emulate=True)"

    def __init__(
        self,
        precision: str = "float8",
        base: str = "bf16-mixed",
        device: str | None = None,
        *,
        layers: Callable[[nn.Linear, str], bool] | None = None,
        emulate: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if precision not in _RECIPES:
            raise RequestError(f"Float8Precision({precision!r}) is not possible: choose one of {', '.join(_RECIPES)}")
        super().__init__(precision, base, device)
        self._emulates = emulate
        self._is_selected = layers or _has_fitting_features
        self._options = dict(config or {})
        if config:
            self._make_config()  # which checks it; without options importing torchao can wait
        self._converted: list[_ConvertedLayer] = []

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return super().dtypes if self._emulates else (*super().dtypes, torch.float8_e4m3fn)

    def connect(self, module: nn.Module) -> nn.Module:
        """Convert the selected linear layers.

        Raises:
            DeviceError: The hardware has no products in 8 bits.
            RequestError: No layer is selected.
        """
        has_values = any(not parameter.is_meta for parameter in module.parameters())
        if not self._emulates and has_values:  # without values it is an estimate, for hardware elsewhere
            _check_hardware(self.flag)
        module = super().connect(module)
        layers = linear_layers(module)
        selected = {name: layer for name, layer in layers.items() if self._is_selected(layer, name)}
        if not selected:
            raise RequestError(
                f"precision {self.flag!r} converts no layer of {type(module).__name__}: it needs nn.Linear layers with "
                f"multiples of {_FEATURES} inputs and outputs, or Float8Precision(layers=...) that selects others"
            )
        if remaining := sorted(layers.keys() - selected.keys()):
            _log.info("precision %r leaves these linear layers as they are: %s", self.flag, ", ".join(remaining))
        config = self._make_config()
        distinct = dict.fromkeys(selected.values())  # a shared layer has several names
        self._converted = [_ConvertedLayer(layer, config) for layer in distinct]
        return module

    def teardown(self) -> None:
        for layer in self._converted:
            layer.restore()
        self._converted = []
        super().teardown()

    def _make_config(self) -> Any:
        from torchao.float8 import Float8LinearConfig

        known = {field.name for field in dataclasses.fields(Float8LinearConfig)} - {"emulate"}
        if unknown := ", ".join(sorted(self._options.keys() - known)):
            raise RequestError(
                f"Float8Precision(config=...) has no option {unknown}: choose some of {', '.join(sorted(known))}"
            )
        if self._options.get("enable_fsdp_float8_all_gather"):
            raise ConflictError(
                "enable_fsdp_float8_all_gather replaces parameters by torchao's tensors, which checkpoints and "
                "optimizers of other precisions cannot read: leave it out"
            )
        # Replaced in the recipe, which sets several options that a new config would have by default.
        config = Float8LinearConfig.from_recipe_name(_RECIPES[self.flag])
        return dataclasses.replace(config, emulate=self._emulates, **self._options)


class _ConvertedLayer:
    """A linear layer that is torchao's until it is restored.

    It stays the same object, as torch's ``fully_shard`` does it: hooks, shared layers and references of the user hold.
    """

    def __init__(self, layer: nn.Linear, config: Any) -> None:
        from torchao.float8 import convert_to_float8_training

        # For a lone layer torchao returns a new one, with the same parameters.
        converted = convert_to_float8_training(layer, config=config)
        attributes = {name: value for name, value in vars(converted).items() if name not in vars(layer)}
        self._layer, self._names = layer, list(attributes)
        vars(layer).update(attributes)
        layer.__class__ = type(converted)
        self._hook = layer.register_forward_pre_hook(_cast_inputs)

    def restore(self) -> None:
        """Make it a plain layer again."""
        self._hook.remove()
        self._layer.__class__ = nn.Linear
        for name in self._names:
            del vars(self._layer)[name]


def _cast_inputs(_layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return inputs in the dtype of autocast."""
    # torchao's layers (0.18) look at CUDA's autocast only.
    x, *further = inputs
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return (x, *further)


def _has_fitting_features(layer: nn.Linear, _name: str) -> bool:
    return layer.in_features % _FEATURES == 0 and layer.out_features % _FEATURES == 0


def _check_hardware(flag: str) -> None:
    """Raise DeviceError unless the current device has products in 8 bits."""
    # Only in the rank: asking initializes CUDA, after which a process cannot fork.
    advice = "choose 'bf16-mixed', or Float8Precision(emulate=True), which rounds to 8 bits on any hardware"
    if not torch.cuda.is_available():
        raise DeviceError(f"precision {flag!r} needs a CUDA device, and torch sees none here: {advice}")
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is None and capability < _CAPABILITY:  # AMD's capabilities have other numbers
        name = torch.cuda.get_device_name()
        raise DeviceError(
            f"precision {flag!r} needs a GPU of capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or newer, such as H100, "
            f"and {name} has {capability[0]}.{capability[1]}: {advice}"
        )

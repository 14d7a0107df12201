"""Weights of frozen linear layers in 8 or 4 bits, by torchao."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it

from dstrat.errors import MisuseError, RequestError
from dstrat_torchao.base import PrecisionOverBase, linear_layers, replace_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

_log = logging.getLogger(__name__)


class QuantizedWeightsPrecision(PrecisionOverBase):
    """Weights of frozen linear layers in few bits; everything else, adapters and heads included, as its base says.

    A layer is frozen if its weight has ``requires_grad=False``, as after ``module.freeze()``.  Its weight is rounded
    when the run begins, and stays so.  Gradients flow through it to the layers before it.  Checkpoints have the rounded
    values as plain tensors under the layer's usual name, so that any precision and strategy can load them.  No strategy
    shards these weights: each rank has all of them.

    Args:
        precision: ``"int8-weights"``: 8 bits with a scale for each output; ``"nf4-weights"``: 4 bits, the normal floats
            of QLoRA (https://arxiv.org/abs/2305.14314), with a scale of 8 bits for each 64 values.
        base: Precision of everything else, and of products: ``"bf16-mixed"``, ``"bf16-true"`` or ``"32-true"``.
        device: Type of the device for autocast; None takes that of the module.
        layers: Whether to convert a frozen ``nn.Linear`` layer, by the layer and its name; None converts all.
        options: Options of torchao: of ``Int8WeightOnlyConfig``, or of ``to_nf4``, such as
            ``{"scaler_block_size": 64}`` for small layers.

    Raises:
        RequestError: There is no such precision.
    """

    def __init__(
        self,
        precision: str = "int8-weights",
        base: str = "bf16-mixed",
        device: str | None = None,
        *,
        layers: Callable[[nn.Linear, str], bool] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if precision not in _FORMATS:
            raise RequestError(
                f"QuantizedWeightsPrecision({precision!r}) is not possible: choose one of {', '.join(_FORMATS)}"
            )
        super().__init__(precision, base, device)
        self._is_selected = layers
        self._options = dict(options or {})
        self._layers: dict[str, QuantizedLinear] = {}

    def connect(self, module: nn.Module) -> nn.Module:
        """Round the weights of the frozen linear layers.

        Raises:
            MisuseError: A frozen layer has no values yet, or other values than on another rank.
        """
        module = super().connect(module)
        layers = {
            name: layer
            for name, layer in linear_layers(module).items()
            if not layer.weight.requires_grad and (self._is_selected is None or self._is_selected(layer, name))
        }
        # In a second run: layers stay quantized, as their exact values are gone.
        already = any(isinstance(layer, QuantizedLinear) for layer in module.modules())
        if not layers and not already:
            _log.warning(
                "precision %r converts no layer of %s, of which no selected nn.Linear layer is frozen: call "
                "module.freeze(), or weight.requires_grad_(False) on those that are not trained",
                self.flag,
                type(module).__name__,
            )
        _check_values(layers, self.flag)
        replace_layers(module, self._replacements(layers))
        self._layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, QuantizedLinear)}
        return module

    def state_dict(self) -> dict[str, Any]:
        """Return the integers and scales: values that were rounded are not always rounded to themselves again."""
        return {name: layer.inner_tensors() for name, layer in self._layers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, tensors in state.items():
            if name in self._layers:
                self._layers[name].load_inner_tensors(tensors)

    def teardown(self) -> None:
        self._layers = {}
        super().teardown()

    def _replacements(self, layers: Mapping[str, nn.Linear]) -> dict[str, QuantizedLinear]:
        quantize, made = _FORMATS[self.flag], dict[int, QuantizedLinear]()
        for name, layer in layers.items():
            if id(layer) in made:  # shared, under another name
                continue
            try:
                made[id(layer)] = QuantizedLinear(layer, quantize, self._options)
            except (AssertionError, RuntimeError, ValueError, TypeError) as error:
                raise RequestError(
                    f"precision {self.flag!r} cannot convert layer {name!r} with a weight of "
                    f"{tuple(layer.weight.shape)} ({error}): leave it out with layers=..., or pass other options"
                ) from error
        return {name: made[id(layer)] for name, layer in layers.items()}


class QuantizedLinear(nn.Module):
    """A linear layer with a frozen weight in few bits, which is neither a parameter nor a buffer.

    So strategies leave it alone: its inner tensors are integers and scales, not to be averaged, sharded or cast.

    Args:
        layer: The layer whose weight is rounded.
        quantize: Rounds a weight of shape (outputs, inputs).
        options: Further arguments of ``quantize``.
    """

    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear, quantize: Callable[..., Tensor], options: Mapping[str, Any]) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_parameter("bias", layer.bias)
        self._quantize, self._options = quantize, options
        # A plain attribute: Module registers parameters only, and torchao returns a tensor of its own class.
        self.weight: Any = quantize(layer.weight.detach(), **options)
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return the products of x, of shape (..., inputs), with the weight: shape (..., outputs)."""
        return F.linear(x, self.weight, self.bias)

    def inner_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of which the weight consists, by torchao's names."""
        return {name: getattr(self.weight, name) for name in self.weight.__tensor_flatten__()[0]}

    def load_inner_tensors(self, saved: Mapping[str, Tensor]) -> None:
        """Load what :meth:`inner_tensors` returned, unless it is of another format, as after a change of options."""
        inner = self.inner_tensors()
        if {name: tensor.shape for name, tensor in inner.items()} == {name: t.shape for name, t in saved.items()}:
            for name, tensor in inner.items():
                tensor.copy_(saved[name])

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {type(self.weight).__name__}"

    def __getstate__(self) -> dict[str, Any]:
        # torchao's 4-bit type loses its block sizes when it is copied.
        weight = self.weight
        spec = (type(weight), self.inner_tensors(), weight.__tensor_flatten__()[1], weight.shape, weight.stride())
        return {**vars(self), "weight": spec}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kind, inner, spec, shape, stride = state["weight"]
        weight = kind.__tensor_unflatten__(inner, spec, shape, stride)
        super().__setstate__({**state, "weight": weight})  # type: ignore[no-untyped-call]  # in torch

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Follows to another device, but not to another dtype: a cast would change scales, or undo the quantization.
        device = fn(torch.empty(0, device=self.weight.device)).device
        if device != self.weight.device:
            self.weight = self.weight.to(device)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # in torch

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        weight = self.weight  # torchao's types have different names for their rounded values
        values = weight.dequantize() if hasattr(weight, "qdata") else weight.get_original_weight()
        destination[f"{prefix}weight"] = values.to(weight.dtype)  # before the bias, as in nn.Linear
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        name = f"{prefix}weight"
        value = state_dict.get(name)
        missing, unexpected, errors = args[2:]  # lists of torch, which its load_state_dict reports
        super()._load_from_state_dict(state_dict, prefix, *args)
        if name in unexpected:  # there is no parameter of that name
            unexpected.remove(name)
        if value is None:
            missing.append(name)
        elif value.shape != self.weight.shape:
            errors.append(
                f"size mismatch for {name}: copying a param with shape {value.shape} from checkpoint, the shape in "
                f"current model is {self.weight.shape}."
            )
        else:
            self.weight = self._quantize(value.detach().to(self.weight.device, self.weight.dtype), **self._options)


# Formats of weights


def _quantize_int8(weight: Tensor, **options: Any) -> Tensor:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = nn.Linear(1, 1, bias=False, device="meta")  # quantize_ takes modules only
    layer.weight = nn.Parameter(weight, requires_grad=False)
    # Without its settings of inductor, which would be those of the process.
    quantize_(layer, Int8WeightOnlyConfig(**{"set_inductor_config": False, **options}))
    return layer.weight.detach()


def _quantize_nf4(weight: Tensor, **options: Any) -> Tensor:
    from torchao.quantization import to_nf4

    quantized: Tensor = to_nf4(weight, **options)
    return quantized


_FORMATS: dict[str, Callable[..., Tensor]] = {"int8-weights": _quantize_int8, "nf4-weights": _quantize_nf4}


def _check_values(layers: Mapping[str, nn.Linear], flag: str) -> None:
    """Raise MisuseError unless the layers have values, and the same ones on every rank."""
    # Strategies broadcast parameters and buffers, and quantized weights are neither.
    for name, layer in layers.items():
        if layer.weight.is_meta:
            raise MisuseError(
                f"precision {flag!r} cannot round the weight of layer {name!r}, which is on the meta device: load its "
                "values before the run, or create it in __init__. An estimate has no values either: estimate with "
                "the base instead, such as 'bf16-mixed'"
            )
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    # Sums in float64 differ where values do, and are small enough to exchange.
    sums = {name: layer.weight.sum(dtype=torch.float64).item() for name, layer in layers.items()}
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, sums)
    if any(other != sums for other in of_ranks):
        differing = next(name for name in sums if any(other.get(name) != sums[name] for other in of_ranks))
        raise MisuseError(
            f"frozen layer {differing!r} has other values on another rank, and precision {flag!r} keeps them: load the "
            "same weights on each rank, or create the module after dstrat.seed_everything(...)"
        )

"""Layers that are made on torch's meta device, without memory, and get their values when a strategy shards them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.nn import Module

_RESETS = ("reset_parameters", "_reset_parameters")  # torch's own layers have either


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Convert parameters to the meta device when a module registers them; buffers are created as usual.

    So at most one parameter is in memory at a time.  A parameter that replaces a frozen one is frozen too, which
    torch's tensor parallelism omits.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: Module, name: str, param: Any) -> None:
        if isinstance(param, DTensor):
            replaced = module._parameters.get(name)  # noqa: SLF001 - getattr raises where it is missing
            param.requires_grad_(param.requires_grad and (replaced is None or replaced.requires_grad))
        elif param is not None and not param.is_meta:
            param = type(param)(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]  # torch's hook for this is global too
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]  # as above


def parameter_reader(layer: Module) -> Callable[[str, tuple[slice, ...]], Tensor] | None:
    """Return the method of a layer that reads a box of a parameter, such as from a file; None if it has none.

    A layer whose values are not computed may define ``read_parameter(name, slices)``, with a slice for each dimension.
    Then each rank reads its own shards only.  It draws no random numbers.

    Args:
        layer: A layer that was made on the meta device.
    """
    return getattr(layer, "read_parameter", None)


def reset_method(layer: Module, names: Sequence[str]) -> Callable[[], object]:
    """Return the method that computes a layer's first values.

    Args:
        layer: A layer that was made on the meta device.
        names: Its tensors there.

    Raises:
        MisuseError: The layer has no such method.
    """
    method: Callable[[], object] | None = next((getattr(layer, name) for name in _RESETS if hasattr(layer, name)), None)
    if method is None:
        raise MisuseError(
            f"{type(layer).__name__} was made without memory, and nothing computes the first values of its "
            f"{', '.join(map(repr, names))}: give it a method reset_parameters(self)"
        )
    return method


def materialize_on_cpu(module: Module) -> None:
    """Give the parameters on the meta device memory on the CPU and first values; shared ones stay shared.

    Args:
        module: A module that was made by :func:`parameters_on_meta`.

    Raises:
        MisuseError: A layer has no method that computes its first values.
    """
    missing: list[tuple[Module, str, nn.Parameter]] = []
    resets: list[Callable[[], object]] = []
    for layer in module.modules():
        parameters = layer.named_parameters(recurse=False, remove_duplicate=False)
        on_meta = [(layer, name, parameter) for name, parameter in parameters if parameter.is_meta]
        if on_meta:
            resets.append(reset_method(layer, [name for _, name, _ in on_meta]))
            missing += on_meta
    made: dict[int, nn.Parameter] = {}
    for layer, name, parameter in missing:
        if id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
        setattr(layer, name, made[id(parameter)])
    for reset in resets:
        reset()

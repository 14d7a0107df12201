"""Applying a function to every tensor of a nested batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def apply_to_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return the batch with the function applied to each tensor in it.

    Goes into dicts, lists, tuples, named tuples and dataclasses; everything else is returned as it is.
    """
    if isinstance(batch, _tensor_class()):
        return function(batch)
    if isinstance(batch, list | tuple):
        values = [apply_to_tensors(value, function) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if isinstance(batch, Mapping):
        return _rebuild_mapping(batch, {key: apply_to_tensors(value, function) for key, value in batch.items()})
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{f: apply_to_tensors(getattr(batch, f), function) for f in fields})
    return batch


@cache
def _tensor_class() -> type[Tensor]:
    from torch import Tensor

    return Tensor


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with each tensor (and whatever else has a ``to`` for devices) on the device.

    Copies from pinned memory do not wait for the device.
    """

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=tensor.is_pinned())

    return apply_to_tensors(batch, move)


def _rebuild_mapping(original: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    return values if type(original) is dict else type(original)(values)  # type: ignore[call-arg]  # by convention

"""The first values of parameters: those of rank 0, or those that a layer on the meta device computes for itself."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _sync_params_and_buffers

from dstrat.errors import MisuseError
from dstrat_fsdp.slices import copy_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor
    from torch.nn import Module

_BUCKET_BYTES = 250 * 2**20
_RESETS = ("reset_parameters", "_reset_parameters")  # torch's own layers have either


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let parameters that a module registers be on the meta device; buffers are made as always.

    Only one parameter at a time is ever in memory, as it is left behind when it is registered.  One that is split in
    the place of a frozen one is frozen too, which torch's tensor parallelism forgets.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: Module, name: str, param: Any) -> None:
        if isinstance(param, DTensor):
            replaced = module._parameters.get(name)  # noqa: SLF001 - getattr would need it to be there
            param.requires_grad_(param.requires_grad and (replaced is None or replaced.requires_grad))
        elif param is not None and not param.is_meta:
            param = type(param)(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]  # there is no hook for one thread
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]  # as above


def take_from_first_rank(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite tensors by those of the first rank of a group; collective.

    Args:
        tensors: On the device; those on the meta device have no values yet and are left alone.
        group: None is all ranks.
    """
    real = [tensor.detach() for tensor in tensors if not tensor.is_meta]
    chosen = dist.group.WORLD if group is None else group
    if real and chosen is not None:
        _sync_params_and_buffers(chosen, real, _BUCKET_BYTES, 0)


def materialize(module: Module, device: torch.device, known: Callable[[Module, str], Tensor | None]) -> None:
    """Give memory and values to what is on the meta device; on each rank for its shards only.

    A layer's values are computed whole, by its ``reset_parameters``, before the next layer's are: all ranks compute
    the same ones, and keep their parts.

    Args:
        module: Sharded.
        device: Where shards go.
        known: Returns this rank's shard of a layer's parameter where it has one already.

    Raises:
        MisuseError: A layer has no ``reset_parameters``.
    """
    names = {layer: found for layer in _inner_first(module) if (found := _meta_names(layer))}
    owned = _first_owners(names)
    if names:
        module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)  # noqa: SLF001 - as to_empty does, which would empty everything
    for layer, found in names.items():
        _fill(layer, found, owned[layer], known)


def _inner_first(module: Module) -> Iterator[Module]:
    """Yield the parts of a module in the order in which their constructors have ended."""
    seen: set[int] = set()

    def visit(part: Module) -> Iterator[Module]:
        if id(part) in seen:
            return
        seen.add(id(part))
        for child in part.children():
            yield from visit(child)
        yield part

    return visit(module)


def _meta_names(layer: Module) -> list[str]:
    own = itertools.chain(layer.named_parameters(recurse=False), layer.named_buffers(recurse=False))
    return [name for name, tensor in own if tensor.is_meta]


def _first_owners(names: Mapping[Module, list[str]]) -> dict[Module, set[str]]:
    """Return for each layer the names whose values are its own, and not those of a layer that it shares them with."""
    seen: set[int] = set()
    owned: dict[Module, set[str]] = {}
    for layer, found in names.items():
        tensors = {name: id(getattr(layer, name)) for name in found}
        owned[layer] = {name for name, tensor in tensors.items() if tensor not in seen}
        seen.update(tensors.values())
    return owned


@torch.no_grad()
def _fill(layer: Module, names: list[str], owned: set[str], known: Callable[[Module, str], Tensor | None]) -> None:
    shards = {name: known(layer, name) for name in owned}
    if any(shard is None for shard in shards.values()):
        _compute(layer, names, owned)
    for name, shard in shards.items():
        if shard is not None:
            _local(getattr(layer, name)).copy_(shard)


def _compute(layer: Module, names: list[str], owned: set[str]) -> None:
    """Let a layer compute its values whole, and keep this rank's parts of those that are its own."""
    reset = next((getattr(layer, name) for name in _RESETS if hasattr(layer, name)), None)
    if reset is None:
        raise MisuseError(
            f"{type(layer).__name__} was made without memory, and nothing computes the first values of its "
            f"{', '.join(map(repr, names))}: give it a method reset_parameters(self)"
        )
    sharded = {name: getattr(layer, name) for name in names}
    for name, tensor in sharded.items():
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=_local(tensor).device)
        setattr(layer, name, nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole)
    reset()
    for name, tensor in sharded.items():
        whole = getattr(layer, name)
        setattr(layer, name, tensor)
        if name in owned:
            copy_whole(tensor, whole)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""torch_xla's FullyShardedDataParallel around a module that keeps its names, and its state in shards."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from dstrat.errors import RequestError
from dstrat.interfaces.checkpoint_io import FlatShard
from dstrat.parallel.step_module import StepModule
from dstrat_xla import runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping


class ShardedModule:
    """The user's module while it is sharded.

    torch_xla removes the parameters from their layers, so that neither the module's ``parameters()`` nor its state
    would have them.  This class registers each shard under the name of its parameter, for optimizers and state dicts.

    Args:
        module: The user's module; after :meth:`undo` it has its full parameters, on the CPU.
        is_block: Whether a layer is wrapped by itself.
        is_checkpointed: Whether a wrapped layer computes its activations again in the backward pass.
        options: Further arguments of torch_xla's wrapper.

    Attributes:
        root: Its forward runs a step of the module.
    """

    def __init__(
        self,
        module: Module,
        is_block: Callable[..., bool] | None,
        is_checkpointed: Callable[[Module], bool],
        options: Mapping[str, Any],
    ) -> None:
        wrapper = wrapper_class()

        # torch_xla wraps what this returns: recomputation has to be within the wrapper, which gathers for it.
        def wrap(layer: Module, **more: Any) -> Module:
            if is_checkpointed(layer):
                layer = importlib.import_module("torch_xla.distributed.fsdp").checkpoint_module(layer)
            wrapped: Module = wrapper(layer, **more)
            return wrapped

        self._module = module
        self.root = wrapper(StepModule(module), auto_wrap_policy=is_block, auto_wrapper_callable=wrap, **options)
        self._wrappers = [submodule for submodule in self.root.modules() if isinstance(submodule, wrapper)]
        self._shards: dict[Parameter, torch.Size] = {}
        for submodule in self._wrappers:
            self._name_shards(submodule)

    def _name_shards(self, wrapper: Any) -> None:
        """Register the shards as parameters of the layers, which compute with the gathered parameters of torch_xla."""
        for layer, name, shard, size in runtime.take_shards(wrapper):
            # Not register_parameter: it refuses the name, as the gathered parameter is an attribute of the layer.
            layer._parameters[name] = shard  # noqa: SLF001
            self._shards[shard] = size
        for _, _, layer, name, first, first_name in wrapper.shared_full_param_infos:
            layer._parameters[name] = first._parameters[first_name]  # noqa: SLF001 - as above

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the shards by the names of their parameters."""
        for name, parameter in self._module.named_parameters():
            yield unwrapped_name(name), parameter

    # State

    def shard_of(self, parameter: Tensor, value: Tensor | None = None) -> FlatShard:
        """Return the elements of a parameter, or of a tensor that is sharded like it, that this process has."""
        size = self._shards[parameter]  # type: ignore[index]  # a parameter
        flat = (parameter if value is None else value).detach().reshape(-1)
        start = self.root.rank * flat.numel()
        length = max(0, min(flat.numel(), size.numel() - start))  # the rest is padding
        return FlatShard(local=flat[:length], start=min(start, size.numel()), shape=tuple(size))

    def host_shard_of(self, parameter: Tensor, value: Tensor | None = None) -> FlatShard:
        """Return a copy of :meth:`shard_of` on the host."""
        shard = self.shard_of(parameter, value)
        return FlatShard(local=shard.local.cpu(), start=shard.start, shape=shard.shape)

    def is_sharded_like(self, parameter: Tensor, value: Any) -> bool:
        """Return whether a value in an optimizer's state has an element for each one of the parameter's shard."""
        return isinstance(value, Tensor) and parameter in self._shards and value.shape == parameter.shape

    @torch.no_grad()
    def full_tensor(self, parameter: Tensor, value: Tensor | None = None) -> Tensor:
        """Return the full tensor of a parameter, or of a tensor that is sharded like it, on the host; collective."""
        size = self._shards[parameter]  # type: ignore[index]  # a parameter
        shard = (parameter if value is None else value).detach()
        # Shards are flat and padded to one length, so that they follow each other, with the padding last.
        gathered = shard if self.root.world_size == 1 else runtime.xla_model().all_gather(shard)
        return gathered.reshape(-1)[: size.numel()].view(size).cpu()

    @torch.no_grad()
    def copy_shard(self, parameter: Tensor, target: Tensor, value: Tensor | FlatShard) -> None:
        """Copy this process's elements of a full tensor, or a shard, into a tensor that is sharded likewise."""
        shard = self.shard_of(parameter, target)
        elements = value.local if isinstance(value, FlatShard) else shard.taken_from(value)
        shard.local.copy_(elements)

    # The end

    def undo(self) -> None:
        """Restore the module, with full parameters on the CPU; collective."""
        runtime.cut()  # the step's graph runs first, or each gathered tensor would run it again
        full = {shard: Parameter(self.full_tensor(shard), requires_grad=shard.requires_grad) for shard in self._shards}
        for wrapper in self._wrappers:
            infos = [info[1:] for info in wrapper.full_param_infos]
            infos += [info[2:4] for info in wrapper.shared_full_param_infos]
            for layer, name in infos:
                layer.__dict__.pop(name)  # torch_xla's gathered parameter, which would hide the full one
                layer._parameters[name] = full[layer._parameters[name]]  # noqa: SLF001 - keeps the order of names
        wrapped = {id(wrapper): wrapper.module.module for wrapper in self._wrappers}
        for submodule in list(self._module.modules()):
            for name, child in list(submodule._modules.items()):  # noqa: SLF001 - likewise
                submodule._modules[name] = wrapped.get(id(child), child)  # noqa: SLF001 - likewise
        for submodule in self._module.modules():
            runtime.remove_patches(submodule)


def wrapper_class() -> Any:
    """Return torch_xla's XlaFullyShardedDataParallel."""
    runtime.torch_xla()
    return importlib.import_module("torch_xla.distributed.fsdp").XlaFullyShardedDataParallel


def unwrapped_name(name: str) -> str:
    """Return the name that a parameter or buffer has in the user's module."""
    for wrapper in runtime.FSDP_PREFIXES:
        name = name.replace(wrapper, "")
    return name


def block_policy(policy: Collection[type[Module]] | Callable[..., bool] | None) -> Callable[..., bool] | None:
    """Return a policy as torch_xla takes it: of a set of classes, or as it is.

    Raises:
        RequestError: It is neither.
    """
    if policy is None or callable(policy):
        return policy
    classes = checked_classes("auto_wrap_policy", policy)
    wrap = importlib.import_module("torch_xla.distributed.fsdp.wrap")
    return functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls=set(classes))


def checked_classes(option: str, classes: Collection[type[Module]] | None) -> tuple[type[Module], ...]:
    """Return classes of layers as a tuple.

    Raises:
        RequestError: They are something else.
    """
    checked = () if classes is None else tuple(classes)
    if not all(isinstance(one, type) and issubclass(one, Module) for one in checked):
        raise RequestError(f"{option} {classes!r} is no set of classes of layers: give one, such as {{MyBlock}}")
    return checked

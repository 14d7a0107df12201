"""Adapter of torch's private names: each one that this package reads, calls or replaces.

They are those of torch 2.9 and 2.13, which are tested.  Where the two differ, or torch 2.15 does, the line says so.
``FSDPParam`` and its group are private classes: their attributes are read here only, except ``sharded_param``.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import timedelta

    from torch import Tensor
    from torch._ops import OpOverload
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.nn import Module


# Units of ``fully_shard``


_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def unwrap(unit: FSDPModule) -> None:
    """Turn a unit into a plain module again; its parameters stay sharded.

    torch has no public way to undo ``fully_shard``: this reverts its hooks, class, registry entries and process groups.

    Args:
        unit: A unit that is not gathered.
    """
    module: Any = unit
    state = module._get_fsdp_state()  # torch records its changes in this object
    for handle in _hooks(state):
        handle.remove()
    module.__class__ = type(module).__mro__[2]  # after torch's combined class and FSDPModule
    for submodule in module.modules():  # all of them have torch's marks for its compiler
        for name in _MARKS:
            submodule.__dict__.pop(name, None)
    # Process groups close with their last reference.  A traceback may keep the unit of a failed rank alive, and its
    # peers would wait for the open group.
    for group in _groups(state):
        for holder in (group, *group.fsdp_params):
            holder.mesh_info = holder.post_forward_mesh_info = None
    # fully_shard refuses a module that is in its registry, and the next run shards this one again.
    for key in (STATE_KEY, REGISTRY_KEY):
        module.__dict__.pop(key, None)
    _module_state_mapping.pop(module, None)


def end_step(unit: FSDPModule) -> None:
    """Let a unit be in no step, also after one that was broken off: in a forward pass ``reshard`` may do nothing."""
    for group in _groups(unit._get_fsdp_state()):
        group._training_state = type(group._training_state).IDLE


def fsdp_params(units: Iterable[FSDPModule]) -> Iterator[Any]:
    """Yield torch's record (``FSDPParam``) of each parameter."""
    for unit in units:
        for group in _groups(unit._get_fsdp_state()):
            yield from group.fsdp_params


def stores_of_parameters(unit: FSDPModule) -> list[tuple[dict[str, Any], str, Any]]:
    """Return each of a unit's parameters as the dict of its layer, its name there, and torch's record of it."""
    stores = []
    for param in fsdp_params([unit]):
        info = param._module_info
        layers = [info.module, *info.shared_modules]
        names = [info.param_name, *info.shared_param_names]
        stores += [(layer._parameters, name, param) for layer, name in zip(layers, names, strict=True)]
    return stores


def is_sharded(param: Any) -> bool:
    """Return whether a parameter is not gathered, so that the next forward pass gathers it."""
    return bool(param.sharded_state is type(param.sharded_state).SHARDED)


def initialize_before_forward(unit: FSDPModule) -> None:
    """Do for a unit what its first forward pass does: find out which unit is the root, and set up communication.

    torch requires it of a unit before the units in it.
    """
    unit._get_fsdp_state()._lazy_init()


def gather_for_gradient(unit: FSDPModule, tensor: Tensor) -> None:
    """Let a unit be gathered before a backward pass computes the gradient of a tensor that its forward has computed.

    torch does it for tensors in the collections that a forward returns, with this hook.
    """
    tensor.register_hook(unit._get_fsdp_state()._pre_backward)


def set_gradient_dtypes(units: Iterable[FSDPModule]) -> None:
    """Let units whose parameters were all frozen in their first forward pass reduce gradients in their dtypes.

    torch chooses the dtypes of a unit's gradients in that pass, by its trained parameters, and not again when others
    are unfrozen: gradients of mixed precision would stay in the dtype of the computation, which a shard refuses.
    ``unit.unshard()`` is public and chooses them too, but gathers the unit.
    """
    for unit in units:
        for group in _groups(unit._get_fsdp_state()):
            has_none = getattr(group, "_orig_dtype", ...) is None  # absent before the first forward pass of the unit
            if has_none and any(param.sharded_param.requires_grad for param in group.fsdp_params):
                group._init_mp_dtypes()


def forward_order(root: FSDPModule, units: Sequence[FSDPModule]) -> list[int]:
    """Return the numbers of the units that have computed forward passes since the last backward pass, in their order.

    torch records them to gather units ahead in the backward pass.
    """
    numbers = {id(group): index for index, unit in enumerate(units) for group in _groups(unit._get_fsdp_state())}
    root_state: Any = root._get_fsdp_state()
    return [numbers[id(group)] for group in root_state._comm_ctx.post_forward_order]


def reduce_gradients(root: FSDPModule) -> None:
    """Reduce the gradients of all units that backward passes have accumulated without communication; collective.

    torch's pipeline stages do it likewise.
    """
    state: Any = root._get_fsdp_state()
    for one in state._state_ctx.all_states:
        for group in _groups(one):
            group.post_backward()
    state._root_post_backward_final_callback()


def accumulate_gradients(units: Iterable[FSDPModule]) -> None:
    """Add the gradients of gathered parameters to those in the dtype in which torch accumulates, if it is another.

    As a backward pass without communication does, in torch's hook of each unit.
    """
    for param in fsdp_params(units):
        if _was_gathered(param) and _has_separate_gradient(param):
            param.accumulate_unsharded_grad_if_needed()
            param.to_accumulated_grad_if_needed()


def _groups(state: Any) -> list[Any]:
    """Return the parameter groups of a unit, each of which torch gathers in one collective."""
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]  # 2.9: one
    return [group for group in groups if group is not None]


def _hooks(state: Any) -> list[Any]:
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in _groups(state):
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [parameter._post_load_hook_handle for parameter in group.fsdp_params]
    return handles


# Gradients that accumulate without communication, and versions of gathered parameters
#
# Before torch 2.15, a gradient whose dtype is not that of the gathered parameter is in unsharded_accumulated_grad, and
# any other one is the parameter's grad.  From 2.15 on both are the parameter's.


def accumulated_gradient(param: Any) -> Tensor | None:
    """Return the unsharded gradient of a parameter; None if there is none."""
    if param.unsharded_accumulated_grad is not None:
        return param.unsharded_accumulated_grad  # type: ignore[no-any-return]  # torch's own attribute
    return param.unsharded_param.grad if _was_gathered(param) else None


def set_accumulated_gradient(param: Any, gradient: Tensor) -> None:
    """Set the unsharded gradient of a parameter that was gathered, in its :func:`accumulation_dtype`."""
    if param.reduce_dtype is not None and _has_separate_gradient(param):
        param.unsharded_accumulated_grad = gradient
    else:
        param.unsharded_param.grad = gradient


def clear_accumulated_gradient(param: Any) -> None:
    """Drop the unsharded gradient of a parameter."""
    if _has_separate_gradient(param):
        param.unsharded_accumulated_grad = None
    if _was_gathered(param):
        param.unsharded_param.grad = None


def accumulation_dtype(param: Any) -> torch.dtype:
    """Return the dtype in which torch accumulates the unsharded gradient of a parameter that was gathered."""
    dtype = param.reduce_dtype if _has_separate_gradient(param) else param.unsharded_grad_dtype
    return dtype or param.unsharded_param.dtype  # type: ignore[no-any-return]  # torch's own attribute


def unsharded_parameter(param: Any) -> Any:
    """Return the unsharded parameter of one that was gathered; between two uses its memory is freed."""
    return param.unsharded_param


def gathered_versions(params: Iterable[Any]) -> list[int | None]:
    """Return the version counter of each parameter as it is gathered; None if it never was."""
    return [param._unsharded_param._version if _was_gathered(param) else None for param in params]


def _was_gathered(param: Any) -> bool:
    return hasattr(param, "_unsharded_param")


def _has_separate_gradient(param: Any) -> bool:
    return "unsharded_accumulated_grad" in vars(param)  # a property from torch 2.15 on


# Tensors and modules


def is_view(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of another one."""
    return tensor._base is not None


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return tensor._version


def has_gradient_hooks(parameter: Tensor, *, after_accumulation: bool) -> bool:
    """Return whether a parameter has hooks on its gradient, also those that follow its accumulation if asked for."""
    return bool(parameter._backward_hooks or (after_accumulation and parameter._post_accumulate_grad_hooks))


def parameter_store(layer: Module) -> dict[str, Any]:
    """Return the dict in which a layer keeps its own parameters: a look-up in it is cheap enough for each step."""
    return layer._parameters


def allocate_meta_tensors(module: Module, device: torch.device) -> None:
    """Allocate the tensors of a module that are on the meta device; shared ones stay shared."""
    # As Module.to_empty does, which would empty all tensors, with their values.
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


def move(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Move tensors to a device in place.

    A device that a package adds to torch (``PrivateUse1``) has another type of tensor, which ``tensor.data = ...``
    refuses: there the two tensors are swapped.
    """
    for tensor in tensors:
        if tensor.device == device:
            continue
        moved = tensor.detach().to(device)
        if torch._has_compatible_shallow_copy_type(tensor, moved):
            tensor.data = moved
        else:
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            torch.utils.swap_tensors(tensor, torch.nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved)


def norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return the 2-norm of each tensor, computed in one call, as ``torch.nn.utils`` does."""
    return torch._foreach_norm(tensors)


def scale(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors by a factor in place, in one call."""
    torch._foreach_mul_(tensors, factor)


def clamp(tensors: list[Tensor], largest: float) -> None:
    """Limit the values of tensors in place, in two calls."""
    torch._foreach_clamp_min_(tensors, -largest)
    torch._foreach_clamp_max_(tensors, largest)


# Dispatch of operations on DTensors


VIEWS: tuple[OpOverload, ...] = (
    torch.ops.aten.diagonal.default,
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.unfold.default,
    torch.ops.aten.view.default,
)
"""Operations that return views, and of a ``DTensor`` views of a copy if their result spans several shards."""

READ: OpOverload = torch.ops.aten._local_scalar_dense.default
"""The operation of ``item()``, ``float()`` and ``bool()``."""

EXTREMES: tuple[OpOverload, ...] = (
    torch.ops.aten.amax.default,
    torch.ops.aten.amin.default,
    torch.ops.aten.argmax.default,
    torch.ops.aten.argmin.default,
    torch.ops.aten.max.default,
    torch.ops.aten.min.default,
)
"""Operations that torch computes of each shard first, which fails for one without elements."""

ALL: OpOverload = torch.ops.aten.all.default
"""Whether all elements are true, which in torch 2.9 is whether those of any shard are."""

MEANS: tuple[OpOverload, ...] = (
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.binary_cross_entropy_with_logits.default,
    torch.ops.aten.huber_loss.default,
    torch.ops.aten.mean.default,
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
)
"""The mean of all elements, and losses with one, as the mean of the shards' means, also of shards of other sizes.

That is so in torch 2.13 for losses, and in torch 2.9 for the mean too.
"""

NORM: OpOverload = torch.ops.aten.linalg_vector_norm.default
"""A norm, which is the largest or smallest magnitude where its order is infinite."""

FOREACH_NORM: OpOverload = torch.ops.aten._foreach_norm.Scalar
"""The same of several tensors."""

DRAWS: tuple[OpOverload, ...] = (
    torch.ops.aten.bernoulli_.Tensor,
    torch.ops.aten.bernoulli_.float,
    torch.ops.aten.cauchy_.default,
    torch.ops.aten.exponential_.default,
    torch.ops.aten.geometric_.default,
    torch.ops.aten.log_normal_.default,
    torch.ops.aten.normal_.default,
    torch.ops.aten.random_.default,
    torch.ops.aten.random_.to,
    getattr(torch.ops.aten.random_, "from"),
    torch.ops.aten.uniform_.default,
)
"""Operations that fill a tensor with random numbers."""

LIKE: tuple[OpOverload, ...] = (
    torch.ops.aten.rand_like.default,
    torch.ops.aten.randint_like.default,
    torch.ops.aten.randint_like.low_dtype,
    torch.ops.aten.randn_like.default,
)
"""Operations that return a new tensor of random numbers."""


BERNOULLI: OpOverload = torch.ops.aten.bernoulli.default
"""The operation that returns a new tensor of random numbers, with probabilities of another one."""

NEW: tuple[OpOverload, ...] = (
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_full.default,
    torch.ops.aten.new_ones.default,
    torch.ops.aten.new_zeros.default,
)
"""Operations that return a new tensor of any shape, in the dtype and on the device of another one."""


def counts_draws(device: str) -> bool:
    """Return whether torch gives the ranks of a mesh different random numbers, on a type of device."""
    return hasattr(torch.get_device_module(device), "set_rng_state")


@cache
def mutating_operations() -> tuple[OpOverload, ...]:
    """Return torch's operations that change their first argument, a tensor, except those of ``DRAWS``."""
    operations = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten" and packet.endswith("_") and not packet.startswith("_"):
            operations.append(getattr(getattr(torch.ops.aten, packet), overload or "default"))
    return tuple(operation for operation in operations if operation not in DRAWS)


def set_dispatch_handler(operations: Iterable[OpOverload], handler: Callable[..., Any] | None) -> None:
    """Let a function handle operations on DTensors of this process; torch itself handles them without one.

    Args:
        operations: The operations, none of which torch gives a handler.
        handler: It gets the operation, its arguments and its keyword arguments, and returns the result.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for operation in operations:
        if handler is None:
            handlers.pop(operation, None)
        else:
            handlers[operation] = handler


def dispatch(operation: OpOverload, args: Any, kwargs: Any) -> Any:
    """Do what torch does for an operation without its handler."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operation, None)
    try:
        return operation(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[operation] = handler


def shard_memory(tensor: Any) -> StorageWeakRef:
    """Return a reference to the memory of a shard, also of a ``DTensor`` whose gathering has not been waited for."""
    local: Any = tensor._local_tensor
    return StorageWeakRef(getattr(local, "elem", local).untyped_storage())  # elem: of an asynchronous result


def shard_of(tensor: Any) -> Tensor:
    """Return the shard of a ``DTensor`` in the same memory, without the time that ``to_local`` takes, or a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def like_shard(tensor: Any, local: Tensor) -> Tensor:
    """Return a ``DTensor`` of a shard, in the layout of another one."""
    return DTensor(local, tensor._spec, requires_grad=False)  # without the checks of from_local


# Process groups and meshes


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of this process in a mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set how long collectives of a group wait for the other ranks."""
    # Made public, and the old name deprecated, by torch 2.15.
    function = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
    function(timeout, group)


def release_mesh(mesh: DeviceMesh) -> None:
    """Drop a mesh's references to process groups, which close with their last reference; DTensors keep the mesh."""
    getattr(mesh, "_pg_registry", {}).clear()  # torch 2.9 has no such registry
    drop_cached_results()


def drop_cached_results() -> None:
    """Let DTensor operations compute the layouts of their results again.

    They are cached with the mesh of the first call, also for a later mesh that is equal: its groups may have other
    names, and those of the first one are closed.
    """
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    clear_fast_path = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # torch 2.9 has none
    if clear_fast_path is not None:
        clear_fast_path()

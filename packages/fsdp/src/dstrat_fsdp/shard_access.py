"""Writes and reads of shards that torch gets wrong: errors, or values of all ranks."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from dstrat.errors import MisuseError
from dstrat.parallel.full_state import copy_full, full_tensor, shard_like
from dstrat.parallel.shards import local_tensor
from dstrat_fsdp import internals
from dstrat_fsdp.checks import untraced

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torch._ops import OpOverload
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle


class ParameterGuard:
    """Detects parameters that were replaced, or changed while they were gathered, as such a change would be lost.

    Args:
        module: The user's module, sharded; no unit is gathered.
        fsdp_params: torch's records (``FSDPParam``) of its parameters.
    """

    def __init__(self, module: Module, fsdp_params: Iterable[Any]) -> None:
        self._module, self._fsdp_params = module, list(fsdp_params)
        self._versions: list[int | None] = [None] * len(self._fsdp_params)
        self._sharded = [
            (layer, name, parameter)
            for layer in module.modules()
            for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False)
        ]
        self._stores = [(internals.parameter_store(layer), name, parameter) for layer, name, parameter in self._sharded]

    def check_not_replaced(self) -> None:
        """Check that no parameter was replaced; no unit is gathered now.

        Raises:
            MisuseError: A parameter was replaced.
        """
        for index, (store, name, parameter) in enumerate(self._stores):
            if store.get(name) is not parameter:
                raise MisuseError(
                    f"parameter {self._name(index)!r} was replaced after the module was sharded, and the old "
                    "parameter is still the one that is trained: change its values in place, or replace it in "
                    "configure_model"
                )

    def check_not_changed(self) -> None:
        """Compare the version counters of gathered parameters with those of the last call.

        torch's gathering does not increase them, and neither does a change of ``parameter.data``.

        Raises:
            MisuseError: A parameter was changed in place while it was gathered.
        """
        versions = internals.gathered_versions(self._fsdp_params)
        before, self._versions = self._versions, versions
        for param, old, new in zip(self._fsdp_params, before, versions, strict=True):
            if old not in (None, new):
                # By identity: a tied parameter has one record, and several layers.
                index = next(i for i, (_, _, one) in enumerate(self._sharded) if one is param.sharded_param)
                raise self._lost(index, "in the step before")

    def gathered(self, unit: Module) -> dict[int, Tensor]:
        """Return the sum of each parameter of a unit that is gathered now, by its index."""
        layers = {id(layer) for layer in unit.modules()}
        sums = {}
        for index, (layer, name, parameter) in enumerate(self._sharded):
            current = getattr(layer, name) if id(layer) in layers else parameter
            if current is not parameter and current.dim():  # no change of a scalar is lost
                sums[index] = local_tensor(current).sum().nan_to_num()  # NaN would differ from itself
        return sums

    def check_unchanged(self, before: dict[int, Tensor], after: dict[int, Tensor]) -> None:
        """Compare what :meth:`gathered` returned before and after a forward pass.

        Raises:
            MisuseError: A sum has changed.
        """
        for index, value in before.items():
            if index in after and not torch.equal(value, after[index]):
                raise self._lost(index, "in a forward pass")

    def _lost(self, index: int, when: str) -> MisuseError:
        return MisuseError(
            f"parameter {self._name(index)!r} was changed {when}, while it was gathered: freeing it loses the change; "
            "change it where it is sharded, such as in on_train_batch_end"
        )

    def _name(self, index: int) -> str:
        layer, name, _ = self._sharded[index]
        prefix = next((key for key, submodule in self._module.named_modules() if submodule is layer), "")
        return f"{prefix}.{name}".lstrip(".")


class AssignmentGuard:
    """Detects shards to which ``tensor.data = values`` was assigned.

    torch gives the ``DTensor`` another storage, which nothing reads, and goes on with the shard as it was.

    Args:
        tensors: Parameters or gradients with their names, gathered or not; others than DTensors are left out.
        variable: What a program calls such a tensor, for the message.
    """

    def __init__(self, tensors: Iterable[tuple[str, Any]], variable: str = "parameter") -> None:
        self._storages = [
            (name, tensor, tensor.untyped_storage()) for name, tensor in tensors if isinstance(tensor, DTensor)
        ]
        self._variable = variable

    def check(self) -> None:
        """Check the shards, gathered or not.

        Raises:
            MisuseError: One was assigned to.
        """
        for name, tensor, storage in self._storages:
            if tensor.untyped_storage() is not storage:  # torch returns the same object for a storage
                raise MisuseError(
                    f"{name} was changed by an assignment to its .data, which has no effect on a shard: change it in "
                    f"place, with torch.no_grad(), as {self._variable}.copy_(values) or {self._variable}.mul_(0.9)"
                )


class PassedParameters:
    """Refuses other tensors in the place of a unit's parameters in its forward pass, as of ``functional_call``.

    torch gathers parameters when the forward pass of their unit begins, and puts them in the place of these tensors.
    Parameters that are gathered already, such as those of a whole step, may be replaced.

    Args:
        unit: The unit.
        name: Its name in the user's module.
    """

    def __init__(self, unit: Any, name: str) -> None:
        self._name, self._stores = name, internals.stores_of_parameters(unit)
        # Before torch's own hook, which gathers.
        self._handle = unit.register_forward_pre_hook(untraced(self._check), prepend=True)

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _check(self, _unit: Module, _args: Any) -> None:
        for store, name, param in self._stores:
            if store.get(name) is not param.sharded_param and internals.is_sharded(param):
                raise MisuseError(
                    f"the block {self._name!r} was called with another tensor as its parameter {name!r} "
                    "(torch.func.functional_call), which has no effect: torch gathers the parameter in its place. Call "
                    "it in the forward of a layer that contains the block, and shard that layer as one block, for a "
                    "class Net with auto_wrap_policy={Net}"
                )


class ChangesInForward:
    """Hooks on units that check gathered parameters for changes in forward passes, during the first step.

    Args:
        guard: The guard of the parameters.
        units: The units.
    """

    def __init__(self, guard: ParameterGuard, units: Sequence[Module]) -> None:
        self._guard = guard
        self._before: dict[int, dict[int, Tensor]] = {}
        self._handles: list[RemovableHandle] = []
        for unit in units:
            self._handles.append(unit.register_forward_pre_hook(untraced(self._remember)))
            compare = untraced(self._compare)
            self._handles.append(unit.register_forward_hook(compare, prepend=True))  # before they are freed

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._before = [], {}

    def _remember(self, unit: Module, _args: Any) -> None:
        self._before[id(unit)] = self._guard.gathered(unit)

    def _compare(self, unit: Module, _args: Any, _output: Any) -> None:
        self._guard.check_unchanged(self._before.pop(id(unit), {}), self._guard.gathered(unit))


class SliceGuard:
    """Refuses in-place operations on parts of a shard: rows, slices, diagonals and the like.

    Where a part of a ``DTensor`` spans the shards of several ranks, torch takes it from a copy that it gathers, and
    what is written there changes no shard.  Parts that each rank has in its own shard can be written.  Gradients and
    other sharded tensors, such as masks, are watched in hooks only: optimizers, and split layers with their
    activations, use the memory of parts for other values.

    Args:
        module: The user's module, sharded; no unit is gathered.
    """

    watches_all: ClassVar[bool] = False
    """Whether all sharded tensors are watched now, or parameters only."""

    is_stepping: ClassVar[bool] = False
    """Whether an optimizer steps now, which may use gradients, and the memory of parts, for other values."""

    # Of all sharded modules of the process, as torch has one dispatcher for DTensors.  References keep no memory.
    _names: ClassVar[dict[StorageWeakRef, str]] = {}  # of parameters, by their shards
    _copies: ClassVar[dict[StorageWeakRef, str]] = {}  # names of what they are parts of, by copies of parts

    def __init__(self, module: Module) -> None:
        self._shards = {
            internals.shard_memory(parameter): name
            for name, parameter in module.named_parameters()
            if isinstance(parameter, DTensor)
        }
        self._names.update(self._shards)
        internals.set_dispatch_handler(internals.VIEWS, self._take_slice)

    def drop_copies(self) -> None:
        """Forget copies that no longer exist; without any, in-place operations are not looked at."""
        for memory in [memory for memory in self._copies if memory.expired()]:
            del self._copies[memory]
        if not self._copies:
            internals.set_dispatch_handler(internals.mutating_operations(), None)

    def remove(self) -> None:
        """Stop watching the shards of this module."""
        for memory in self._shards:
            self._names.pop(memory, None)
        if not self._names:
            SliceGuard.watches_all = SliceGuard.is_stepping = False
            self._copies.clear()
            internals.set_dispatch_handler((*internals.VIEWS, *internals.mutating_operations()), None)

    @classmethod
    def _take_slice(cls, operation: OpOverload, args: Any, kwargs: Any) -> Any:
        views = internals.dispatch(operation, args, kwargs)
        shard = internals.shard_memory(args[0])
        name = cls._names.get(shard)
        if name is not None or cls.watches_all:
            for view in views if isinstance(views, (list, tuple)) else (views,):
                memory = internals.shard_memory(view)
                if memory != shard:
                    cls._copies[memory] = "a sharded tensor" if name is None else f"parameter {name!r}"
                    internals.set_dispatch_handler(internals.mutating_operations(), cls._write)
        return views

    @classmethod
    def _write(cls, operation: OpOverload, args: Any, kwargs: Any) -> Any:
        cls.check_write(operation, args[0])
        return internals.dispatch(operation, args, kwargs)

    @classmethod
    def is_parameter(cls, tensor: DTensor) -> bool:
        """Return whether a tensor has the memory of a parameter's shard."""
        return internals.shard_memory(tensor) in cls._names

    @classmethod
    def check_write(cls, operation: OpOverload, tensor: Any) -> None:
        """Check that an operation does not change a copy of a part.

        Raises:
            MisuseError: It does.
        """
        if not cls._copies:
            return
        name = cls._copies.get(internals.shard_memory(tensor))
        if name is not None:
            write = operation.overloadpacket.__name__
            raise MisuseError(
                f"{write} of a part of {name} has no effect: the part spans the shards of several ranks, and torch "
                "has gathered a copy of it. Change the whole tensor, such as a parameter or its gradient, with a mask "
                "that is sharded likewise: tensor.mul_(distribute_tensor(mask, tensor.device_mesh, tensor.placements)) "
                "(a part that is needed by itself only is changed in a clone())"
            )


# Random values


def draw_full_values() -> None:
    """Let ``uniform_()``, ``randn_like()`` and the like give a ``DTensor`` the values of one device, from now on.

    On devices such as the CPU torch draws the numbers of each shard from the rank's generator, so that ranks with the
    same state give all shards the same values.
    """
    internals.set_dispatch_handler(internals.DRAWS, _draw)
    internals.set_dispatch_handler(internals.LIKE, _draw_like)
    internals.set_dispatch_handler([internals.BERNOULLI], _draw_by_values)


def _draw(operation: OpOverload, args: Any, kwargs: Any) -> Any:
    """Fill a tensor with this rank's shard of the random values that the full tensor would have."""
    tensor = args[0]
    SliceGuard.check_write(operation, tensor)
    if any(isinstance(one, DTensor) for one in args[1:]) or not _has_equal_draws(tensor):
        return internals.dispatch(operation, args, kwargs)
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    copy_full(tensor, operation(full, *args[1:], **kwargs))
    return tensor


def _draw_like(operation: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return this rank's shard of the random values that a full tensor of the same shape would have."""
    tensor = args[0]
    if any(one.is_partial() for one in tensor.placements) or kwargs.get("device") or not _has_equal_draws(tensor):
        return internals.dispatch(operation, args, kwargs)
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return shard_like(tensor, operation(full, *args[1:], **kwargs))


def _draw_by_values(operation: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return this rank's shard of random values that depend on those of a tensor; collective, as those are gathered."""
    tensor = args[0]
    if not (dist.is_initialized() and _has_equal_draws(tensor)):
        return internals.dispatch(operation, args, kwargs)
    return shard_like(tensor, operation(full_tensor(tensor.detach()), *args[1:], **kwargs))


def _has_equal_draws(tensor: DTensor) -> bool:
    """Return whether torch would draw the same numbers for different shards of a tensor."""
    device = tensor.device_mesh.device_type  # not the tensor's, which may be on the meta device
    is_replicated = all(placement.is_replicate() for placement in tensor.placements)
    return not is_replicated and not internals.counts_draws(device)


# New tensors


def make_plain_tensors() -> None:
    """Let ``parameter.new_zeros(n, size)`` and the like return a plain tensor, from now on.

    A program makes first hidden states in this way.  Tensors of the parameter's shape, of one element, and those that
    an optimizer makes in its step, stay DTensors: its state is computed with sharded gradients.
    """
    internals.set_dispatch_handler(internals.NEW, _make_tensor)


def _make_tensor(operation: OpOverload, args: Any, kwargs: Any) -> Any:
    like, shape = args[0], torch.Size(args[1])
    is_state = SliceGuard.is_stepping or shape == like.shape or shape.numel() == 1
    if is_state or not SliceGuard.is_parameter(like):
        return internals.dispatch(operation, args, kwargs)
    return operation(local_tensor(like), *args[1:], **kwargs)


# Reads


def read_full_values() -> None:
    """Let reads of a ``DTensor`` (``item()``, ``float()``, ``max()`` ...) return its full value, from now on.

    torch returns what this rank has of it: of ``parameter.grad.norm()`` the norm of its own shard.  The read of a value
    that ranks have parts of is collective.  It stays so after a run, whose module keeps its shards.
    """
    internals.set_dispatch_handler([internals.READ], _read)
    internals.set_dispatch_handler(internals.EXTREMES, _find_extreme)
    internals.set_dispatch_handler(internals.MEANS, _find_mean)
    internals.set_dispatch_handler([internals.ALL], _find_all)
    internals.set_dispatch_handler([internals.NORM], _find_norm)
    internals.set_dispatch_handler([internals.FOREACH_NORM], _find_norms)


def _read(operation: OpOverload, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if all(placement.is_replicate() for placement in tensor.placements):
        return internals.dispatch(operation, args, kwargs)
    if not dist.is_initialized():
        raise MisuseError(
            "a value of a module's shards was read after the run that sharded it, such as parameter.norm().item(), and "
            "each rank has a part of it only: read it in on_train_end, or load a checkpoint into a new module"
        )
    return full_tensor(tensor.detach()).item()


def _find_extreme(operation: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return the largest or smallest value, or its index, where some ranks may have no elements; collective."""
    tensor = args[0]
    if not _may_lack_elements(tensor):
        # torch 2.9 divides no argmax, which it says on all ranks before it communicates.
        with contextlib.suppress(NotImplementedError):
            return internals.dispatch(operation, args, kwargs)
    return _compute_of_full(operation, args, kwargs)


def _find_mean(operation: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return a mean, of shards of different sizes too; collective then."""
    is_uneven = any(length % count for length, count in _divisions(args[0])) and dist.is_initialized()
    return (_compute_of_full if is_uneven else internals.dispatch)(operation, args, kwargs)


def _find_all(operation: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return whether all elements are true: whether none is false."""
    if all(placement.is_replicate() for placement in args[0].placements):
        return internals.dispatch(operation, args, kwargs)
    return args[0].logical_not().any().logical_not()


def _compute_of_full(operation: OpOverload, args: Any, kwargs: Any) -> DTensor:
    tensor = args[0]
    full = [full_tensor(one) if isinstance(one, DTensor) else one for one in args]
    value = operation(*full, **kwargs)
    return DTensor.from_local(value, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim, run_check=False)


def _find_norm(operation: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return a norm; collective as :func:`_find_extreme` where its order is infinite."""
    is_extreme = len(args) > 1 and math.isinf(args[1])
    return (_find_extreme if is_extreme else internals.dispatch)(operation, args, kwargs)


def _find_norms(operation: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return the norms of several tensors, likewise."""
    tensors, order = args[0], args[1] if len(args) > 1 else 2
    if not (math.isinf(order) and any(isinstance(one, DTensor) and _may_lack_elements(one) for one in tensors)):
        return internals.dispatch(operation, args, kwargs)
    return [internals.NORM(tensor, order, **kwargs) for tensor in tensors]


def _may_lack_elements(tensor: DTensor) -> bool:
    """Return whether a rank may have no elements of a tensor; the same in all ranks."""
    # The last one begins after all others, which have the sizes of torch.chunk.
    is_empty = any(length <= (count - 1) * -(-length // count) for length, count in _divisions(tensor))
    return dist.is_initialized() and is_empty


def _divisions(tensor: Any) -> list[tuple[int, int]]:
    """Return the length of each dimension that is sharded, and the number of shards; none of a plain tensor."""
    if not isinstance(tensor, DTensor):
        return []
    counts: Counter[int] = Counter()
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if hasattr(placement, "dim"):
            counts[placement.dim] = max(1, counts[placement.dim]) * size
    return [(tensor.shape[dimension], count) for dimension, count in counts.items()]

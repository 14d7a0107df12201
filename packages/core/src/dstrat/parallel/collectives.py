"""Collectives on tensors and objects over a process group of torch.distributed."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from dstrat.errors import RequestError
from dstrat.parallel.internals import broadcast_coalesced

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn import Module

T = TypeVar("T")

_OPERATIONS = {
    "mean": dist.ReduceOp.SUM,  # divided afterwards: Gloo has no AVG, and a mean of integers is a float
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
_WITH_FACTOR = "premul_sum"
"""An operation of torch that is an object with a factor, without a name."""


def uses_host_memory() -> bool:
    """Return whether the backend of torch.distributed communicates from the memory of the host."""
    return dist.get_backend() in ("gloo", "mpi")


def reduce_tensor(
    tensor: Tensor, *, group: dist.ProcessGroup | None = None, reduce_op: str | dist.ReduceOp | None = "mean"
) -> Tensor:
    """Return the tensor reduced over the group; the argument is not changed.

    Args:
        tensor: A tensor of the same shape and dtype on every rank.  A mean of integers is a float.
        group: The ranks to reduce over; None for all.
        reduce_op: ``"mean"`` or ``"avg"``, ``"sum"``, ``"max"``, ``"min"``, ``"product"``, ``"band"``, ``"bor"``,
            ``"bxor"``, or torch's; None for the mean.  Not every backend supports all of them.

    Raises:
        RequestError: The operation is unknown.
    """
    name = name_of_operation(reduce_op)
    reduced = tensor.detach().clone(memory_format=torch.contiguous_format)  # collectives refuse other layouts
    dist.all_reduce(reduced, op=_OPERATIONS.get(name, reduce_op), group=group)
    return reduced / dist.get_world_size(group) if name == "mean" else reduced


def name_of_operation(reduce_op: str | dist.ReduceOp | None) -> str:
    """Return the name of an operation, such as ``"mean"``, for any value that ``reduce_tensor`` accepts.

    Raises:
        RequestError: The operation is unknown.
    """
    plain = getattr(reduce_op, "op", reduce_op)  # of an instance of torch's class
    name = "mean" if plain is None else str(getattr(plain, "name", plain)).lower()
    name = "mean" if name == "avg" else name
    if name not in _OPERATIONS and name != _WITH_FACTOR:
        raise RequestError(f"reduce_op {reduce_op!r} is not one of avg, {', '.join(_OPERATIONS)}")
    return name


def wait_for_collective(work: dist.Work) -> None:
    """Wait for a collective that was begun before, in a frame by which a rank is known to wait for its peers."""
    work.wait()


def gather_tensors(tensor: Tensor, *, group: dist.ProcessGroup | None = None, sync_grads: bool = False) -> Tensor:
    """Return the tensors of all ranks stacked along a new first dimension; collective.

    Args:
        tensor: A tensor of the same shape and dtype on every rank.
        group: The ranks to gather from; None for all.
        sync_grads: Whether gradients flow back: each rank gets the sum of those of its tensor.

    Returns:
        ``(world_size, *shape)``, in the order of the ranks.
    """
    if sync_grads and torch.is_grad_enabled():
        gathered: Tensor = _GatherWithGradients.apply(tensor, group)  # type: ignore[no-untyped-call]  # torch leaves it so
        return gathered
    return _gather(tensor.detach(), group)


def _gather(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    tensor = tensor.contiguous()
    # Not all_gather_into_tensor, which saves a copy: torch 2.13 warns that it is deprecated.
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return torch.stack(gathered)


class _GatherWithGradients(torch.autograd.Function):
    """Gathers in the forward pass; in the backward pass each rank gets the sum of the gradients of its tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        # As in the forward pass: a strategy may have another default group in the backward pass.
        ctx.group = dist.group.WORLD if group is None else group
        ctx.rank = dist.get_rank(group)
        return _gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        summed = gradient.contiguous().clone()  # a copy: autograd may use the gradient elsewhere too
        dist.all_reduce(summed, group=ctx.group)
        return summed[ctx.rank], None


def broadcast_object(obj: T, *, src: int = 0) -> T:
    """Return the source rank's object, which must be picklable, on every rank; collective.

    Tensors of a device, at any depth, are on the current device of each rank.
    """
    is_source = dist.get_rank() == src
    messages = [pack_object(obj) if is_source else None]
    dist.broadcast_object_list(messages, src=src)
    received: T = obj if is_source else pickle.loads(messages[0])  # type: ignore[arg-type]  # noqa: S301 - from a rank of the job
    return received


def pack_object(obj: Any) -> bytes:
    """Pickle an object for another process, which gets tensors of a device on its own current device."""
    buffer = io.BytesIO()
    _ObjectPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


class _ObjectPickler(pickle.Pickler):
    """Pickler of tensors by their values, without the index of their device.

    torch pickles a tensor with its device: each rank would open a context on the devices of all others, and fail where
    it sees its own device only.
    """

    def reducer_override(self, obj: Any) -> Any:
        # The values of a parameter are a tensor that comes here too.
        if not isinstance(obj, Tensor) or isinstance(obj, Parameter) or obj.device.type in ("cpu", "meta"):
            return NotImplemented
        return _to_current_device, (obj.detach().cpu(), obj.device.type, obj.requires_grad)


def _to_current_device(tensor: Tensor, device_type: str, requires_grad: bool) -> Tensor:
    return tensor.to(device_type).requires_grad_(requires_grad)


def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite tensors by those of the first rank of a group; collective.

    Args:
        tensors: Tensors on the device, of the same shapes and dtypes on every rank.  Those on the meta device have no
            values, and are skipped.
        group: The ranks; None for all.
    """
    values = [stored_elements(tensor.detach()) for tensor in tensors if not tensor.is_meta]
    group = dist.group.WORLD if group is None else group
    if values and group is not None:
        broadcast_coalesced(values, group)


take_from_first_rank = broadcast_tensors  # its first name


def stored_elements(tensor: Tensor) -> Tensor:
    """Return a view of a tensor that another tensor can be copied into, with each of its elements in memory once.

    torch refuses to copy into an expanded tensor.  It also refuses to copy a tensor into itself by other strides of a
    dimension of one element, which a broadcast of a single tensor does: ``positions.unsqueeze(0).transpose(0, 1)`` has
    such strides.
    """
    if tensor.layout is not torch.strided or _has_plain_strides(tensor):
        return tensor
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def give_plain_strides(tensor: Tensor) -> None:
    """Replace the memory of a tensor if a library could not send it, or receive into it, as it is."""
    if tensor.layout is torch.strided and not _has_plain_strides(tensor):
        tensor.data = tensor.detach().reshape(-1).view(tensor.shape)  # of one with all elements in order, a view


def _has_plain_strides(tensor: Tensor) -> bool:
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


def running_statistics(module: Module) -> list[Tensor]:
    """Return the buffers of layers with running statistics, such as batch norm, that a rank computes from its data.

    Checkpoints have those of rank 0, so that evaluation uses them too.  A training step reads none.
    """
    layers = [layer for layer in module.modules() if getattr(layer, "running_mean", None) is not None]
    return [buffer for layer in layers for buffer in layer.buffers(recurse=False)]

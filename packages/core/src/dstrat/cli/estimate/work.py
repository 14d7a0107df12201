"""Work of a step on fake tensors: floating-point operations, bytes that are moved, and operations."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from dstrat.interfaces.batch import apply_to_tensors, tensors_in
from dstrat.interfaces.memory import Work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

# Of the CPU's kernel, on which a fake step runs; torch's registry has those of GPUs.
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


READS_DEVICE: Any = torch.ops.prim.device.default
"""Operation of a fake tensor that has no work; torch's engine calls it twice for each of the others."""


_GROUPED = torch.ops.aten._grouped_mm.default  # noqa: SLF001 - its name in torch, as it appears in a dispatch mode


class GroupedProductsOfAnyDtype(TorchDispatchMode):
    """Lets torch's products of groups of rows, such as experts, run on fake tensors of other dtypes than bfloat16.

    Torch's function of their shapes refuses others, which its kernels compute.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _GROUPED or args[0].dtype == torch.bfloat16:
            return func(*args, **(kwargs or {}))
        return func(*apply_to_tensors(args, _in_bfloat16), **(kwargs or {})).to(args[0].dtype)


def _in_bfloat16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor  # offsets of groups are integers


class CountedWork(TorchDispatchMode):
    """Counts the work of operations, until it is taken."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._flops = self._operands = self._moved = self._operations = 0

    @property
    def counted(self) -> Work:
        """The work since it was taken, or since the beginning."""
        return Work(flops=self._flops, operands=self._operands, moved=self._moved, operations=self._operations)

    def add(self, work: Work) -> None:
        """Count work of operations that do not run."""
        self._flops += work.flops
        self._operands += work.operands
        self._moved += work.moved
        self._operations += work.operations

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Run operations that do not count."""
        before = self._flops, self._operands, self._moved, self._operations
        yield
        self._flops, self._operands, self._moved, self._operations = before

    def take(self) -> Work:
        """Return the work since the last call, or since the beginning."""
        work = self.counted
        self._flops = self._operands = self._moved = self._operations = 0
        return work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READS_DEVICE:
            return args[0].fake_device
        output = func(*args, **(kwargs or {}))
        tensors: list[Tensor] = [*tensors_in(output)]
        if func.is_view or not tensors:
            return output
        self._operations += 1
        flops = _flops(func, args, kwargs or {}, output)
        size = sum(tensor.nbytes for tensor in (*tensors, *tensors_in((args, kwargs or {}))))
        if flops is None:
            self._moved += size
        else:
            self._flops += flops
            self._operands += size
        return output


def _flops(func: Any, args: Any, kwargs: Any, output: Any) -> int | None:
    """Return the floating-point operations of a product, convolution or attention; None of other operations."""
    name = func.overloadpacket.__name__
    if name == _ATTENTION:
        query, key, value = args[:3]
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))
    if name == f"{_ATTENTION}_backward":
        gradient, query, key, value = args[:4]
        return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))
    if func is _GROUPED:
        first, second = args[:2]
        # Groups are parts of one of the three sizes, unless both have a dimension of groups.
        groups = first.shape[0] if first.dim() == second.dim() == 3 else 1
        return int(2 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1])
    count: Any = flop_registry.get(func.overloadpacket)
    return None if count is None else int(count(*args, **kwargs, out_val=output))


_HEADS, _NEEDS_WEIGHTS = 4, 15
"""Positions of ``num_heads`` and ``need_weights`` in torch.nn.functional.multi_head_attention_forward."""


class RecordedHeads(TorchFunctionMode):
    """Records the numbers of heads of torch's attention.

    Attributes:
        heads: The numbers, of queries and of keys.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heads: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            tensors = [*args, *kwargs.values()][:2]
            self.heads |= {tensor.shape[-3] for tensor in tensors if tensor.dim() > 2}
        elif name == "multi_head_attention_forward" and not _returns_weights(args, kwargs):
            # Its inner operations do not pass this mode.
            self.heads.add(kwargs["num_heads"] if "num_heads" in kwargs else args[_HEADS])
        return func(*args, **kwargs)


def _returns_weights(args: Any, kwargs: Any) -> bool:
    """Return whether torch's function of attention returns weights, for which it computes with matrix products."""
    return bool(kwargs.get("need_weights", args[_NEEDS_WEIGHTS] if len(args) > _NEEDS_WEIGHTS else True))

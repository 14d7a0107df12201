"""Reduction of gradients by Horovod's DistributedOptimizer, and Adasum of parameter updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import SGD

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.plugins.settings import nearest
from dstrat_horovod.internals import local_accumulation, release_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.nn import Module, Parameter

    from dstrat_horovod.communication import Communication

Operation = Literal["Average", "Sum", "Adasum"]

_OPERATIONS: dict[str, Operation] = {"average": "Average", "sum": "Sum", "adasum": "Adasum"}
_COMPRESSIONS = ("none", "fp16")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionOptions:
    """Options of Horovod's ``DistributedOptimizer``.

    Attributes:
        op: The operation.
        compression: ``"none"``, ``"fp16"``, or a class of Horovod's interface ``Compressor``.
        gradient_predivide_factor: Divides before the sum; the rest of the average is divided after it.
        groups: Number of groups of gradients that are reduced together, or the groups, of parameters or their names.
        sparse_as_dense: Whether sparse gradients are reduced as dense ones.
    """

    op: Operation
    compression: Any
    gradient_predivide_factor: float
    groups: int | Sequence[Sequence[Tensor | str]] | None
    sparse_as_dense: bool

    def __post_init__(self) -> None:
        if isinstance(self.compression, str) and self.compression not in _COMPRESSIONS:
            raise RequestError(
                f"compression {self.compression!r} is not one of {', '.join(_COMPRESSIONS)}, nor a class like "
                "horovod.torch.Compression.fp16"
            )
        factor = self.gradient_predivide_factor
        if not factor > 0:
            raise RequestError(f"gradient_predivide_factor {factor!r} must be a positive number")
        if factor != 1.0 and self.op != "Average":
            raise ConflictError(f"gradient_predivide_factor={factor!r} needs op='average', not op={self.op.lower()!r}")
        if isinstance(self.groups, bool | str) or (isinstance(self.groups, int) and self.groups < 1):
            raise RequestError(f"groups {self.groups!r} must be a number from 1 upwards, or lists of parameters")
        if self.op == "Adasum" and self.groups is not None:
            raise ConflictError(
                "op='Adasum' combines updates of parameters one by one: leave out groups and num_groups"
            )

    def compressor(self, hvd: Any) -> Any:
        """Return Horovod's class for the compression.

        Args:
            hvd: The module ``horovod.torch``.
        """
        return getattr(hvd.Compression, self.compression) if isinstance(self.compression, str) else self.compression


def operation_of(op: Any) -> Operation:
    """Return the operation for a name, in any case, or one of Horovod's constants.

    Raises:
        RequestError: There is no such operation.
    """
    if isinstance(op, str) and op.lower() in _OPERATIONS:
        return _OPERATIONS[op.lower()]
    if isinstance(op, int) and not isinstance(op, bool):
        from dstrat_horovod.communication import horovod

        hvd = horovod()
        for name in _OPERATIONS.values():
            if op == getattr(hvd, name):
                return name
    raise RequestError(f"op {op!r} is not one of {', '.join(map(repr, _OPERATIONS.values()))}")


class GradientReduction:
    """Gradients of a module, which Horovod reduces while the backward pass computes the next ones.

    It uses a ``DistributedOptimizer`` that never steps.  Horovod's function returns another optimizer than the user's,
    whose class it constructs with default arguments, which not every class has; schedulers and callbacks would have
    the wrong one.

    Args:
        communication: The open communication.
        module: The module, on its device.
        options: The options.

    Raises:
        ConflictError: A parameter has a dtype that Horovod cannot reduce.
        MisuseError: A group names a parameter that there is not.
    """

    def __init__(self, communication: Communication, module: Module, options: ReductionOptions) -> None:
        self._communication = communication
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        check_dtypes(named)
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._has_groups = options.groups is not None
        hvd = communication.hvd
        self._optimizer = hvd.DistributedOptimizer(
            SGD(self._parameters, lr=0.0),
            named_parameters=named,
            compression=options.compressor(hvd),
            op=getattr(hvd, options.op),
            gradient_predivide_factor=options.gradient_predivide_factor,
            groups=resolve_groups(options.groups, dict(named)),
            sparse_as_dense=options.sparse_as_dense,
        )

    def accumulation(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients accumulate without communication."""
        return local_accumulation(self._optimizer)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; collective.

        A parameter without a gradient in this rank gets the reduced one, if any rank has one.

        Raises:
            ConflictError: Gradients are grouped, and ranks have gradients of different parameters.
            PeerError: Another rank did not come, or has ended.
        """
        lacking = [parameter for parameter in self._parameters if parameter.grad is None]
        if self._has_groups:
            self._check_groups()
        # A sum is -0.0 only if every addend is: so a rank sees without another message that no rank has a gradient.
        for parameter in lacking:
            parameter.grad = torch.full_like(parameter, -0.0)
        with self._communication.peer_errors("gradients"):
            self._optimizer.synchronize()
        for parameter in lacking:
            gradient = parameter.grad
            if gradient is not None and bool(torch.signbit(gradient).all()) and not gradient.any():
                parameter.grad = None  # with zeros an optimizer would decay an unused parameter

    def _check_groups(self) -> None:
        """Raise ConflictError where ranks would wait for different groups."""
        has_gradient = torch.tensor([parameter.grad is not None for parameter in self._parameters], dtype=torch.int32)
        numbers = self._communication.reduce(has_gradient, "sum").tolist()
        size = self._communication.hvd.size()
        differing = [name for name, number in zip(self._names, numbers, strict=True) if number not in (0, size)]
        if differing:
            raise ConflictError(
                f"groups need gradients of the same parameters in every rank, and {differing[0]!r} has one in some "
                "ranks only: leave out groups and num_groups"
            )

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        release_hooks(self._optimizer)


def check_dtypes(named: Sequence[tuple[str, Parameter]]) -> None:
    """Raise ConflictError for a parameter whose gradient Horovod cannot reduce."""
    for name, parameter in named:
        if parameter.dtype is torch.bfloat16:
            raise ConflictError(
                f"Horovod 0.28 cannot reduce bfloat16, and the parameter {name!r} has it: train with "
                "precision='bf16-mixed', whose gradients are float32, or with strategy='ddp'"
            )


def resolve_groups(
    groups: int | Sequence[Sequence[Tensor | str]] | None, parameters: dict[str, Parameter]
) -> int | list[list[Tensor]] | None:
    """Return groups with parameters in place of their names.

    Raises:
        MisuseError: There is no such parameter.
    """
    if groups is None or isinstance(groups, int):
        return groups
    for name in [name for group in groups for name in group if isinstance(name, str)]:
        if name not in parameters:
            near = nearest(name, parameters)
            advice = f"did you mean {near[0]!r}?" if near else f"the first is {next(iter(parameters), None)!r}"
            raise MisuseError(f"groups name {name!r}, which is no trainable parameter of the module; {advice}")
    return [[parameters[item] if isinstance(item, str) else item for item in group] for group in groups]


# Adasum


class AdasumUpdates:
    """Adasum of the updates that each rank computes from its own gradients.

    Each rank steps the optimizer with its own gradients; the updates of the ranks are combined for each parameter, and
    added to the parameter as it was before.  Two updates a and b become ``(1 - ab/2aa) a + (1 - ab/2bb) b``, where ab
    is their dot product: their sum if they are orthogonal, and their average if they are the same.  More than two are
    combined in pairs, the pairs in pairs, and so on.  Source: Maleki et al., Scaling Distributed Training with Adaptive
    Summation, MLSys 2021 (arXiv:2006.02924).

    Horovod's implementation needs MPI or NCCL; with Gloo alone it ends the process.  This one gathers the updates of
    all ranks, so that it sends and holds as many times the parameters.

    Args:
        communication: The open communication.
        module: The module, on its device.
        options: The options, of which only the compression matters.
    """

    def __init__(self, communication: Communication, module: Module, options: ReductionOptions) -> None:
        self._communication = communication
        self._compression = options.compressor(communication.hvd)
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        check_dtypes(named)
        self._parameters = [parameter for _, parameter in named]

    def step(self, step: Callable[[], Any]) -> Any:
        """Run a step of an optimizer, and combine the updates of all ranks; collective.

        Returns:
            The result of the step.
        """
        before = [parameter.detach().clone() for parameter in self._parameters]
        result = step()
        with torch.no_grad():
            updates = [parameter - value for parameter, value in zip(self._parameters, before, strict=True)]
            for parameter, value, gathered in zip(self._parameters, before, self._gather(updates), strict=True):
                parameter.copy_(value + adasum(gathered))
        return result

    def _gather(self, updates: Sequence[Tensor]) -> list[Tensor]:
        """Return each update of all ranks, stacked."""
        hvd = self._communication.hvd
        compressed = [self._compression.compress(update) for update in updates]
        with self._communication.peer_errors("Adasum"):
            handles = [
                hvd.allgather_async(values.contiguous().unsqueeze(0), name=f"dstrat.adasum.{index}")
                for index, (values, _) in enumerate(compressed)
            ]
            gathered = [hvd.synchronize(handle) for handle in handles]
        decompress = self._compression.decompress
        return [decompress(values, context) for values, (_, context) in zip(gathered, compressed, strict=True)]


def adasum(updates: Tensor) -> Tensor:
    """Return the Adasum of updates that are stacked along the first dimension, whose size is a power of 2."""
    rows: list[Tensor] = list(updates)
    while len(rows) > 1:
        rows = [_combine(rows[index], rows[index + 1]) for index in range(0, len(rows), 2)]
    return rows[0]


def _combine(one: Tensor, other: Tensor) -> Tensor:
    a, b = one.double().flatten(), other.double().flatten()
    product, a_square, b_square = a @ b, a @ a, b @ b
    # A zero update takes no part; the clamp only avoids a division by zero.
    smallest = torch.finfo(torch.float64).tiny
    of_one = 1 - product / (2 * a_square.clamp(min=smallest))
    of_other = 1 - product / (2 * b_square.clamp(min=smallest))
    combined = of_one * one.double() + of_other * other.double()
    return combined.type_as(one)

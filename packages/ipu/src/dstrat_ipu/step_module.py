"""Steps of a module as poptorch compiles them: tensors in, tensors out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from dstrat.errors import MisuseError
from dstrat.interfaces.batch import apply_to_tensors, tensors_in
from dstrat_ipu import runtime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.interfaces.precision import Precision

_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "mean": Tensor.mean,
    "sum": Tensor.sum,
    "max": Tensor.amax,
    "min": Tensor.amin,
}
_HOOKS = {"training_step": "on_train_batch", "validation_step": "on_validation_batch", "test_step": "on_test_batch"}
_PLACEHOLDER = torch.empty(0)  # created at import: a tensor created while poptorch traces would be on the device
_PLAIN = (Tensor, str, bytes, int, float, complex, bool, type(None))


@dataclasses.dataclass
class _Traced:
    """Record of a trace, shared with the copy of the module that poptorch traces.

    Attributes:
        arguments: Arguments of the step, for their structure.
        structure: Types and keys of the first arguments, which every call must have.
        outputs: Outputs of the step, with placeholders for tensors.
        num_outputs: Number of tensors in the outputs.
        dtypes: Dtypes of all outputs of the graph.
        shapes: Their shapes, of one batch in one replica.
        logs: Logged values, each with its index among the outputs of the graph.
    """

    arguments: tuple[Any, ...] = ()
    structure: Any = None
    outputs: Any = None
    num_outputs: int = 0
    dtypes: list[torch.dtype] = dataclasses.field(default_factory=list)
    shapes: list[torch.Size] = dataclasses.field(default_factory=list)
    logs: list[tuple[Any, int]] = dataclasses.field(default_factory=list)


class StepModule(Module):
    """A step of a module as a separate module: its forward pass takes tensors and returns tensors.

    It runs while poptorch traces it.  All values that the step returns or logs then are outputs of the graph;
    :meth:`finish` converts the outputs of a call to those of the step, and logs their values.

    Args:
        module: The user's module.
        name: Name of its step.
        precision: The precision, for the context of the step.
    """

    def __init__(self, module: Module, name: str, precision: Precision) -> None:
        super().__init__()
        self.module = module
        self.is_training_step = name == "training_step"
        self._name, self._precision = name, precision
        self._traced = _Traced()

    def flatten(self, arguments: tuple[Any, ...]) -> list[Tensor]:
        """Return the tensors of a step's arguments, whose structure must be the same in every call.

        Raises:
            MisuseError: A value other than a tensor may change from batch to batch, or the first call had other types
                or keys, or these in another order.
        """
        structure = tuple(_structure_of(argument) for argument in arguments)
        if self._traced.structure is None:
            self._traced.structure = structure
        elif structure != self._traced.structure:  # the tensors would go to the wrong names of the traced step
            new, old = (_describe(side[0]) for side in (structure, self._traced.structure))
            raise MisuseError(
                f"a batch is {new}, and the step was compiled for {old}: let collate_fn return the same types, with "
                "the same keys in the same order, for each batch"
            )
        self._traced.arguments = arguments  # for the trace, which gets tensors alone
        return tensors_in(arguments)

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Run the step; return its outputs and what it logs."""
        values = iter(tensors)
        arguments = [apply_to_tensors(argument, lambda _: next(values)) for argument in self._traced.arguments]
        capture: Any = getattr(self.module, "capture_logs", lambda: nullcontext(()))  # which modules of own loops lack
        with capture() as logs, self._precision.forward_context():
            outputs = getattr(self.module, self._name)(*arguments)
        if self.is_training_step:
            outputs = _with_final_loss(outputs)
        tensors_out = tensors_in(outputs)
        traced = self._traced
        traced.outputs = apply_to_tensors(outputs, lambda _: _PLACEHOLDER)
        traced.num_outputs, traced.logs = len(tensors_out), []
        for call in logs:
            _check_logged(call, self._name)
            traced.logs.append((call, len(tensors_out)))
            tensors_out.append(call.value.detach().reshape(()))  # so that a call returns one number for each batch
        traced.dtypes = [tensor.dtype for tensor in tensors_out]
        traced.shapes = [tensor.shape for tensor in tensors_out]
        return tensors_out

    def finish(self, results: Sequence[Tensor], *, batches: int, replicas: int, batch_size: int) -> Any:
        """Log the values of a call, and return the outputs of the step, with the tensors of all batches.

        Args:
            results: Outputs of the compiled model, each joined from all batches and replicas.
            batches: Number of batches with results in the call.
            replicas: Number of replicas that split a batch.
            batch_size: Number of samples in each batch, over all replicas.
        """
        traced = zip(results, self._traced.dtypes, self._traced.shapes, strict=True)
        # int64 and float64 come back as int32 and float32.
        results = [_repeat(result.to(dtype), shape, batches * replicas) for result, dtype, shape in traced]
        for call, index in self._traced.logs:
            values = _reduce(call, index, results, batches, replicas)
            options = dict(call.options)
            logged_size = options.pop("batch_size")
            for value in values:
                size = batch_size if logged_size is None else logged_size * replicas
                self.module.log(call.name, value, batch_size=size, **options)  # type: ignore[operator]  # the user's
        tensors = iter(results[: self._traced.num_outputs])
        outputs = apply_to_tensors(self._traced.outputs, lambda _: next(tensors))
        if not self.is_training_step:
            return outputs
        loss = loss_of(outputs).reshape(batches, replicas).mean(1)  # of each batch, as the mean over its replicas
        return _replaced_loss(outputs, loss[0] if batches == 1 else loss)


def loss_of(outputs: Any) -> Any:
    """Return the loss of the outputs of ``training_step``."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs


def _replaced_loss(outputs: Any, loss: Tensor) -> Any:
    return {**outputs, "loss": loss} if isinstance(outputs, Mapping) else loss


def _with_final_loss(outputs: Any) -> Any:
    """Mark the loss as the value that gradients are computed from, and detach everything else."""
    loss = loss_of(outputs)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise MisuseError(
            f"training_step returned {shape} as its loss, and a compiled step needs one number: return the loss, or a "
            "dict with it as 'loss'; None, which leaves a batch out, is not possible"
        )
    # A loss of plain operations is no final one to poptorch unless it is marked; it is a number already.
    final = runtime.poptorch().identity_loss(loss.reshape(()), reduction="none")
    detached = apply_to_tensors(outputs, Tensor.detach)
    return _replaced_loss(detached, final)


def _reduce(call: Any, index: int, results: Sequence[Tensor], batches: int, replicas: int) -> list[Tensor]:
    """Return a logged value of each batch, reduced over replicas as other strategies reduce it over processes."""
    reduction = call.options["reduce_fx"]
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")
    reduce = _REDUCTIONS.get({"amax": "max", "amin": "min"}.get(name, name), Tensor.mean)
    return list(reduce(results[index].reshape(batches, replicas), 1).unbind())


def _repeat(result: Tensor, shape: torch.Size, count: int) -> Tensor:
    """Return a result with one value for each batch and replica: poptorch returns constants of the host only once.

    Args:
        result: The result of poptorch.
        shape: Shape in the step, for one batch in one replica.
        count: Number of batches, over all replicas.
    """
    if count == 1 or result.shape != shape:
        return result
    return torch.cat([result.reshape(1) if result.dim() == 0 else result] * count)


def _structure_of(argument: Any) -> Any:
    """Return the types and keys of an argument, without its tensors.

    Raises:
        MisuseError: It has values that would be constants of the graph.
    """
    if argument is None:
        return None
    if isinstance(argument, Tensor):
        return Tensor
    if isinstance(argument, Mapping):
        names, values = list(argument), list(argument.values())
    elif isinstance(argument, list | tuple):
        names, values = list(range(len(argument))), list(argument)
    elif dataclasses.is_dataclass(argument) and not isinstance(argument, type):
        names = [field.name for field in dataclasses.fields(argument)]
        values = [getattr(argument, name) for name in names]
    else:
        raise MisuseError(
            f"a batch has a value of the type {type(argument).__name__}, which would be the same in every call of a "
            "compiled step: let collate_fn return tensors alone, with the samples along their first dimension"
        )
    return (type(argument), tuple(names), tuple(map(_structure_of, values)))


def _describe(structure: Any) -> str:
    """Return a structure for messages, such as ``dict(x: Tensor, y: Tensor)``."""
    if not isinstance(structure, tuple):
        return "None" if structure is None else "Tensor"
    kind, names, children = structure
    is_sequence = issubclass(kind, list | tuple)
    items = [
        _describe(child) if is_sequence else f"{name}: {_describe(child)}"
        for name, child in zip(names, children, strict=True)
    ]
    return f"{kind.__name__}({', '.join(items)})"


def _check_logged(call: Any, step: str) -> None:
    value = call.value
    if isinstance(value, Tensor) and value.numel() != 1:
        raise MisuseError(f"log({call.name!r}) got a tensor of shape {tuple(value.shape)}; log one number")
    if not isinstance(value, _PLAIN):
        raise MisuseError(
            f"log({call.name!r}) got a {type(value).__name__} within {step}, whose state a compiled step cannot keep: "
            "return what it needs from the step, and update and log it in the hook at the end of the batch"
        )
    if not isinstance(value, Tensor):
        hook = _HOOKS[step]
        raise MisuseError(
            f"log({call.name!r}) got {value!r} within {step}, which a compiled step would log with this value in "
            f"every call: log it in {hook}_start or {hook}_end, or a tensor that the step computes"
        )
    if isinstance(call.options["batch_size"], Tensor):
        raise MisuseError(f"log({call.name!r}, batch_size=...) got a tensor: give a number, such as len(inputs)")

"""Steps of a module as poptorch compiles them: tensors in, tensors out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from dstrat.errors import MisuseError
from dstrat.interfaces.batch import apply_to_tensors
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
_PLAIN = (Tensor, str, bytes, int, float, complex, bool, type(None))


@dataclasses.dataclass
class _Traced:
    """What a trace leaves, shared with the copy of the module that poptorch traces.

    Attributes:
        arguments: Of the step, of which the structure counts.
        outputs: What the step returned, with placeholders for tensors.
        num_outputs: Number of its tensors.
        logs: What was logged, each with its index among the outputs of the graph, or None for a constant.
    """

    arguments: tuple[Any, ...] = ()
    outputs: Any = None
    num_outputs: int = 0
    logs: list[tuple[Any, int | None]] = dataclasses.field(default_factory=list)


class StepModule(Module):
    """A step of a module as a module of its own: its forward pass takes tensors and returns tensors.

    It runs while poptorch traces it.  Whatever the step returns or logs there is an output of the graph, and
    :meth:`finish` makes of the outputs of a call what the step would have returned, and logs their values.

    Args:
        module: The user's.
        name: Of its step.
        precision: Of which the context is that of the step.
    """

    def __init__(self, module: Module, name: str, precision: Precision) -> None:
        super().__init__()
        self.module = module
        self.is_training_step = name == "training_step"
        self._name, self._precision = name, precision
        self._traced = _Traced()

    def flatten(self, arguments: tuple[Any, ...]) -> list[Tensor]:
        """Return the tensors of a step's arguments, whose structure must be that of every call.

        Raises:
            MisuseError: There is something else that may change from batch to batch.
        """
        tensors: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        for argument in arguments:
            _check_tensors_only(argument)
            apply_to_tensors(argument, note)
        self._traced.arguments = arguments
        return tensors

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Run the step; return its outputs and what it logs."""
        values = iter(tensors)
        arguments = [apply_to_tensors(argument, lambda _: next(values)) for argument in self._traced.arguments]
        with self.module.capture_logs() as logs, self._precision.forward_context():  # type: ignore[operator]
            outputs = getattr(self.module, self._name)(*arguments)
        if self.is_training_step:
            outputs = _with_final_loss(outputs)
        tensors_out: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            tensors_out.append(tensor)
            return tensor

        apply_to_tensors(outputs, note)
        traced = self._traced
        traced.outputs = apply_to_tensors(outputs, lambda _: torch.empty(0))
        traced.num_outputs, traced.logs = len(tensors_out), []
        for call in logs:
            _check_logged(call, self._name)
            is_tensor = isinstance(call.value, Tensor)
            traced.logs.append((call, len(tensors_out) if is_tensor else None))
            if is_tensor:
                tensors_out.append(call.value.detach().reshape(()))
        return tensors_out

    def finish(self, results: Sequence[Tensor], *, batches: int, replicas: int, batch_size: int) -> Any:
        """Log the values of a call, and return what the step has returned, with the tensors of all batches.

        Args:
            results: Outputs of the compiled model, each of all batches and replicas one after the other.
            batches: Number of batches in the call of which there are results.
            replicas: Number of replicas that share a batch.
            batch_size: Number of samples in each batch, over all replicas.
        """
        for call, index in self._traced.logs:
            values = _reduced(call, index, results, batches, replicas)
            options = dict(call.options)
            own = options.pop("batch_size")
            for value in values:
                self.module.log(  # type: ignore[operator]  # the user's module
                    call.name, value, batch_size=batch_size if own is None else own * replicas, **options
                )
        tensors = iter(results[: self._traced.num_outputs])
        outputs = apply_to_tensors(self._traced.outputs, lambda _: next(tensors))
        return _with_loss_per_batch(outputs, batches, replicas) if self.is_training_step else outputs


def loss_of(outputs: Any) -> Any:
    """Return the loss in what ``training_step`` returned."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs


def _replaced_loss(outputs: Any, loss: Tensor) -> Any:
    return {**outputs, "loss": loss} if isinstance(outputs, Mapping) else loss


def _with_final_loss(outputs: Any) -> Any:
    """Mark the loss as what gradients are computed of, and detach everything else."""
    loss = loss_of(outputs)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise MisuseError(
            f"training_step returned {shape} as its loss, and a compiled step needs one number: return the loss, or a "
            "dict with it as 'loss'; None, which leaves a batch out, is not possible"
        )
    final = runtime.poptorch().identity_loss(loss.reshape(()), reduction="none")
    detached = apply_to_tensors(outputs, Tensor.detach)
    return _replaced_loss(detached, final)


def _with_loss_per_batch(outputs: Any, batches: int, replicas: int) -> Any:
    """Let the loss be that of each batch, over all replicas; without a dimension where the call has one batch."""
    loss = loss_of(outputs).reshape(batches, replicas).mean(1)
    return _replaced_loss(outputs, loss[0] if batches == 1 else loss)


def _reduced(call: Any, index: int | None, results: Sequence[Tensor], batches: int, replicas: int) -> list[Any]:
    """Return a logged value of each batch, over all replicas as over all processes of other strategies."""
    if index is None:
        return [call.value] * batches
    reduction = call.options["reduce_fx"]
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")
    reduce = _REDUCTIONS.get({"amax": "max", "amin": "min"}.get(name, name), Tensor.mean)
    return list(reduce(results[index].reshape(batches, replicas), 1).unbind())


def _check_tensors_only(argument: Any) -> None:
    """Raise MisuseError where an argument has values that would be constants of the graph."""
    values: Any = ()
    if isinstance(argument, Mapping):
        values = argument.values()
    elif isinstance(argument, list | tuple):
        values = argument
    elif dataclasses.is_dataclass(argument) and not isinstance(argument, type):
        values = [getattr(argument, field.name) for field in dataclasses.fields(argument)]
    elif not isinstance(argument, Tensor) and argument is not None:
        kind = type(argument).__name__
        raise MisuseError(
            f"a batch has a value of the type {kind}, which would be the same in every call of a compiled step: let "
            "collate_fn return tensors alone, with the samples along their first dimension"
        )
    for value in values:
        _check_tensors_only(value)


def _check_logged(call: Any, step: str) -> None:
    value = call.value
    if isinstance(value, Tensor) and value.numel() != 1:
        raise MisuseError(f"log({call.name!r}) got a tensor of shape {tuple(value.shape)}; log one number")
    if not isinstance(value, _PLAIN):
        raise MisuseError(
            f"log({call.name!r}) got a {type(value).__name__} within {step}, whose state a compiled step cannot keep: "
            "return what it needs from the step, and update and log it in the hook at the end of the batch"
        )
    if isinstance(call.options["batch_size"], Tensor):
        raise MisuseError(f"log({call.name!r}, batch_size=...) got a tensor: give a number, such as len(inputs)")

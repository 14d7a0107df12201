"""Detection of non-finite values, with the module and the batch that they come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Self

from dstrat.errors import AnomalyError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torch import nn

    from dstrat.training.run import Run


class AnomalyDetection:
    """A context in which a NaN is an error that names its module, or its operation in the backward pass.

    Use it around a training step::

        with AnomalyDetection(module, lambda: f"epoch {epoch}, batch {batch_idx}, rank {rank}") as anomalies:
            loss = training_step(batch)
            anomalies.check_loss(loss)  # such as a hook before the backward pass
            loss.backward()

    The output of every submodule is checked at the end of its ``forward``, so that the error names the first and
    innermost one.  Infinite values may be intended, as in a mask: they are an error only if a NaN or a non-finite loss
    follows.  The checks read values back from the device after each layer, which is slow.

    Args:
        module: The module to check; not its wrapper, whose prefix would be in the names.
        position: Returns the position in the run, for the message.
    """

    def __init__(self, module: nn.Module, position: Callable[[], str]) -> None:
        self._module, self._position = module, position
        self._stack = ExitStack()
        self._first_infinite: str | None = None

    def __enter__(self) -> Self:
        self._stack.enter_context(torch.autograd.set_detect_anomaly(True))
        for name, submodule in self._module.named_modules():
            if not isinstance(submodule, torch.jit.ScriptModule):  # its hooks would have to be scripts too
                self._stack.callback(submodule.register_forward_hook(self._watcher(name), with_kwargs=True).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        if isinstance(value, RuntimeError) and "returned nan values" in str(value):  # torch has no class for it
            raise AnomalyError(f"{value} in the backward pass ({self._position()}){self._source()}") from value

    def check_loss(self, loss: Tensor) -> None:
        """Check the loss of a batch.

        Raises:
            AnomalyError: The loss is not finite.
        """
        problem = _nonfinite_kind(loss)
        if problem:
            raise AnomalyError(
                f"the loss is {problem} ({self._position()})"
                f"{self._source() or '; the outputs of all modules were finite, so it was computed from them'}"
            )
        self._first_infinite = None  # a finite loss: the infinite values of this batch were intended

    def _watcher(self, name: str) -> Callable[..., None]:
        def watch(submodule: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            problem = _nonfinite_kind(output)
            if problem is None:
                return
            source = (
                f"the output of {name!r} ({type(submodule).__name__})"
                if name
                else f"the output of {type(submodule).__name__}"
            )
            if problem == "inf":
                self._first_infinite = self._first_infinite or source
                return
            raise AnomalyError(
                f"{source} has {problem} ({self._position()}); {_cause(submodule, (args, kwargs))}{self._source()}"
            )

        return watch

    def _source(self) -> str:
        return f"; the first infinite values were in {self._first_infinite}" if self._first_infinite else ""


def _cause(module: nn.Module, inputs: Any) -> str:
    """Describe the non-finite inputs and parameters of a module whose output has a NaN."""
    before = _nonfinite_kind(inputs)
    if before == "NaN":
        return (
            "its input has NaN, which no module before it put out: look at the batch, and at the code between modules"
        )
    for name, parameter in module.named_parameters():
        if problem := _nonfinite_kind(parameter):
            return (
                f"its parameter {name!r} has {problem}: look at the last step of the optimizer, and at initial values"
            )
    return "its input has inf, its parameters are finite" if before else "its input and its parameters are finite"


def _nonfinite_kind(value: Any) -> str | None:
    """Return ``"NaN"`` or ``"inf"`` if nested values have such elements; None if all are finite."""
    problem = None
    for tensor in _tensors(value):
        if torch.isfinite(tensor).all():
            continue
        if torch.isnan(tensor).any():
            return "NaN"
        problem = "inf"
    return problem


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested values that can be checked; of sharded ones the local shard."""
    if isinstance(value, Tensor):
        if _may_be_checked(value):
            to_local = getattr(value.detach(), "to_local", None)
            yield to_local() if to_local is not None else value.detach()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def _may_be_checked(tensor: Tensor) -> bool:
    # torch.isfinite lacks float8, sparse and meta tensors.
    has_fractions = tensor.is_floating_point() or tensor.is_complex()
    return has_fractions and tensor.dtype.itemsize > 1 and tensor.layout is torch.strided and not tensor.is_meta


# Anomaly detection in a fit


@contextmanager
def watched_fit(run: Run) -> Iterator[None]:
    """Detect anomalies in a fit in a ``with`` block, if the settings have ``detect_anomaly``."""
    if not run.settings.steps.detect_anomaly:
        yield
        return
    location = _FitLocation(run)
    with AnomalyDetection(run.module, location.describe) as anomalies:
        run.hooks.insert("on_before_backward", anomalies.check_loss)
        run.hooks.insert("on_validation_batch_start", location.note_validation_batch)
        yield


class _FitLocation:
    """Description of the current position in a fit, for messages."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._validation_batch = ""

    def note_validation_batch(self, _batch: Any, batch_idx: int, dataloader_idx: int | None = None) -> None:
        of_loader = "" if dataloader_idx is None else f" of loader {dataloader_idx}"
        self._validation_batch = f"batch {batch_idx}{of_loader}"

    def describe(self) -> str:
        run = self._run
        batch = f"batch {run.fit_loop.batch_idx}"
        if run.is_evaluating:
            batch = f"{'sanity check' if run.sanity_checking else 'validation'} {self._validation_batch}"
        return f"epoch {run.fit_loop.epoch}, {batch}, rank {run.strategy.global_rank}"

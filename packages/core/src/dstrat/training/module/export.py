"""Export of a module to TorchScript and ONNX; copies and pickles."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from typing_extensions import Self

from dstrat.errors import MissingRequirementError, MisuseError
from dstrat.interfaces.batch import move_to_device
from dstrat.parallel.layers import restored_modes
from dstrat.plugins.known import pip_command


class ExportMethods(nn.Module):
    """``freeze``, ``to_torchscript`` and ``to_onnx`` of a module.

    Attributes:
        example_input_array: Arguments of ``forward`` for exports and the model summary: a tensor, a tuple of arguments
            or a dict of them by name.
    """

    example_input_array: Any = None

    __jit_unused_properties__: ClassVar[list[str]] = []  # torch.jit skips the names in these two lists
    __jit_ignored_attributes__: ClassVar[list[str]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ours = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == "dstrat"]
        # Those of this framework only: torch.jit compiles a user's property that forward reads.
        properties = [name for base in ours for name, value in vars(base).items() if isinstance(value, property)]
        annotated = [name for base in ours for name in vars(base).get("__annotations__", {})]
        cls.__jit_unused_properties__ = properties
        cls.__jit_ignored_attributes__ = properties + annotated

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = nn.Module.__getstate__(self)
        return {**state, "_trainer": None}  # copies and pickles have no Trainer

    def freeze(self) -> Self:
        """Freeze all parameters, set evaluation mode, and return the module."""
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> Self:
        """Unfreeze all parameters, set training mode, and return the module."""
        return self.requires_grad_(True).train()

    @torch.no_grad()
    def to_torchscript(
        self,
        file_path: str | Path | None = None,
        method: Literal["script", "trace"] = "script",
        example_inputs: Any = None,
        **kwargs: Any,
    ) -> torch.jit.ScriptModule:
        """Return the module, in evaluation mode, as TorchScript, which torch has deprecated for ``torch.export``.

        Args:
            file_path: Path to write it to; None writes no file.
            method: ``"script"`` compiles the code of ``forward``; ``"trace"`` records one call.
            example_inputs: Arguments of ``forward`` for the trace; by default :attr:`example_input_array`.
            **kwargs: Arguments of ``torch.jit.script`` or ``torch.jit.trace``.

        Raises:
            MisuseError: The method is unknown, or a trace has no input.
        """
        if method not in ("script", "trace"):
            raise MisuseError(f"to_torchscript(method={method!r}): the method is 'script' or 'trace'")
        with restored_modes(self), traceable(self):
            self.eval()
            if method == "script":
                scripted: torch.jit.ScriptModule = torch.jit.script(self, **kwargs)
            else:
                args, by_name = self._inputs(example_inputs, "to_torchscript(method='trace')", "example_inputs")
                # torch.jit.trace takes one of the two.
                inputs = {"example_kwarg_inputs": by_name} if by_name else {"example_inputs": args}
                scripted = torch.jit.trace(self, **inputs, **kwargs)
        if file_path is not None:
            Path(file_path).parent.mkdir(parents=True, exist_ok=True)
            scripted.save(str(file_path))
        return scripted

    @torch.no_grad()
    def to_onnx(self, file_path: str | Path | None = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """Export the module, in evaluation mode, to ONNX; needs the extra ``dstrat[onnx]``.

        Args:
            file_path: Path to write it to; None writes no file.
            input_sample: Arguments of ``forward``; by default :attr:`example_input_array`.
            **kwargs: Arguments of ``torch.onnx.export``.

        Returns:
            The result of ``torch.onnx.export``: a ``torch.onnx.ONNXProgram``, or None from its older exporter.

        Raises:
            MissingRequirementError: onnx or onnxscript is not installed.
            MisuseError: Neither argument nor attribute has an input.
        """
        missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
        if missing:
            are = "is" if len(missing) == 1 else "are"
            raise MissingRequirementError(
                f"to_onnx needs {' and '.join(missing)}, which {are} not installed: {pip_command('dstrat[onnx]')}"
            )
        args, by_name = self._inputs(input_sample, "to_onnx", "input_sample")
        if file_path is not None:
            Path(file_path).parent.mkdir(parents=True, exist_ok=True)
        options = {"verbose": False, **({"kwargs": by_name} if by_name else {}), **kwargs}
        with restored_modes(self):
            self.eval()
            return torch.onnx.export(self, args, None if file_path is None else str(file_path), **options)

    def _inputs(self, sample: Any, method: str, argument: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of forward, on the module's device."""
        inputs = self.example_input_array if sample is None else sample
        if inputs is None:
            raise MisuseError(
                f"{method} calls forward: pass {argument}, or set {type(self).__name__}.example_input_array"
            )
        parameter = next(self.parameters(), None)
        inputs = inputs if parameter is None else move_to_device(inputs, parameter.device)
        if isinstance(inputs, Mapping):
            return (), dict(inputs)
        return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


@contextmanager
def traceable(module: nn.Module) -> Iterator[None]:
    """Make a module readable for torch.jit in a ``with`` block, and silence torch.jit's deprecation warnings."""
    # torch.jit reads every property, and expects AttributeError from those that raise, such as ``trainer``.
    attached = [submodule for submodule in module.modules() if "_trainer" in vars(submodule)]
    trainers = [vars(submodule)["_trainer"] for submodule in attached]
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):  # the latter since torch 2.15
            warnings.filterwarnings("ignore", r".torch\.jit\.\w+. is (deprecated|not supported)", kind)
        try:
            for submodule, trainer in zip(attached, trainers, strict=True):
                vars(submodule)["_trainer"] = _Readable(trainer)
            yield
        finally:
            for submodule, trainer in zip(attached, trainers, strict=True):
                vars(submodule)["_trainer"] = trainer


class _Readable:
    """A proxy of a Trainer or its strategy that turns MisuseError into AttributeError."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        try:
            value = getattr(self._original, name)
        except MisuseError as error:
            raise AttributeError(str(error)) from error
        return _Readable(value) if name == "strategy" else value

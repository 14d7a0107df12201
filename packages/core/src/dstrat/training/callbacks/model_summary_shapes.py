"""The shapes that go into a module's layers and come out of them, found by running an example."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from dstrat.data.random_state import RandomState

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

_LONGEST = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """The shapes of a layer's first call, as text such as ``[32, 3]``.

    Attributes:
        input: Of what went in.
        output: Of what came out.
    """

    input: str
    output: str


def try_example(trainer: Trainer, module: TrainModule) -> tuple[dict[str, Shapes], str | None]:
    """Run the module's ``example_input_array``; return the shapes by layer, and why there are none where it failed."""
    example = getattr(module, "example_input_array", None)
    if example is None:
        return {}, None
    problem = _obstacle(trainer, module)
    if problem:
        return {}, f"no shapes: {problem}"
    strategy = trainer.strategy

    def run(*args: Any, **kwargs: Any) -> Any:
        with strategy.precision_plugin.forward_context():
            return module.forward(*args, **kwargs)  # not the call itself, which may be compiled

    try:
        return record_shapes(module, strategy.batch_to_device(example), run), None
    except Exception as error:  # noqa: BLE001 - a table is no reason not to train
        return {}, f"no shapes: forward failed on example_input_array with {type(error).__name__}: {error}"


def record_shapes(module: nn.Module, example: Any, run: Callable[..., Any]) -> dict[str, Shapes]:
    """Run a module once on an example, and return the shapes of each layer that was called, by its name.

    Args:
        module: Its modes and random numbers are as before afterwards.
        example: A tensor, a tuple of positional arguments, or a dict of keyword arguments.
        run: Called with these.
    """
    args = example if isinstance(example, tuple) else () if isinstance(example, Mapping) else (example,)
    kwargs = example if isinstance(example, Mapping) else {}
    found: dict[str, Shapes] = {}
    with ExitStack() as stack:
        _leave_as_it_was(module, stack)
        for name, part in module.named_modules():
            if name and not isinstance(part, torch.jit.ScriptModule):
                hook = part.register_forward_hook(_recorder(name, found), with_kwargs=True)
                stack.callback(hook.remove)
        found[""] = _shapes(args, kwargs, run(*args, **kwargs))
    return found


def _obstacle(trainer: Trainer, module: nn.Module) -> str | None:
    if trainer.world_size > 1 and not trainer.strategy.replicates_state:
        return f"with {type(trainer.strategy).__name__} no process alone can run the module"
    tensors = [*module.parameters(), *module.buffers()]
    if any(isinstance(tensor, UninitializedParameter | UninitializedBuffer) for tensor in tensors):
        return "running example_input_array would give lazy layers their size"
    if any(tensor.is_meta for tensor in tensors):
        return "the module is on the meta device"
    return None


def _leave_as_it_was(module: nn.Module, stack: ExitStack) -> None:
    for part in module.modules():
        stack.callback(setattr, part, "training", part.training)
    module.eval()
    stack.callback(RandomState.capture().restore)
    devices = {parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"}
    stack.enter_context(torch.random.fork_rng(devices=devices))
    stack.enter_context(torch.no_grad())


def _recorder(name: str, found: dict[str, Shapes]) -> Callable[..., None]:
    def record(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG001 - torch's signature
        if name not in found:
            found[name] = _shapes(args, kwargs, output)

    return record


def _shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Shapes:
    given = [*map(shape_of, args), *(f"{name}={shape_of(value)}" for name, value in kwargs.items())]
    return Shapes(input=_shortened(", ".join(given)), output=_shortened(shape_of(output)))


def shape_of(value: Any) -> str:
    """Return the shapes of the tensors in a value as text."""
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {shape_of(part)}' for key, part in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(shape_of, value))})"
    return "None" if value is None else type(value).__name__


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."

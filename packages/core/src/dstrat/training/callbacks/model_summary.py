"""Table of a module's layers, printed before training."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from dstrat.data.random_state import RandomState
from dstrat.errors import RequestError
from dstrat.training.callbacks.callback import Callback
from dstrat.training.callbacks.progress_bar import has_terminal
from dstrat.training.notebook import Output, has_notebook, html_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


class ModelSummary(Callback):
    """Print a module's layers with their parameters and sizes to stderr at the start of a fit, on rank 0.

    If the module has an ``example_input_array`` (a tensor, a tuple of positional or a dict of keyword arguments of
    ``forward``), the table has each layer's input and output shapes, and the operations of its ``forward`` that torch's
    counter knows (matrix products, convolutions, attention).  ``forward`` runs once for this, in evaluation mode
    without gradients; modes and random state are restored.  If a layer is in evaluation mode, such as a frozen one, a
    column shows the mode of each.

    Args:
        max_depth: Number of levels: 1 is the module's direct layers, 0 the totals only, -1 all levels.

    Raises:
        RequestError: The depth is below -1.
    """

    retired_members: ClassVar[Mapping[str, str]] = {"summarize": "override on_fit_start, and print the summary there"}

    def __init__(self, max_depth: int = 1) -> None:
        if max_depth < -1:
            raise RequestError(f"ModelSummary(max_depth={max_depth!r}) must be 0 or more, or -1 for all levels")
        self._max_depth = max_depth

    @override
    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.is_global_zero:
            shapes, remark = try_example(trainer, module)
            show(summarize(module, max_depth=self._max_depth, shapes=shapes, remark=remark))


def show(summary: Summary) -> None:
    """Show a summary below the cell of a notebook, or on stderr: with colors on a terminal, else as plain text."""
    if has_notebook():
        Output().show(as_html(summary), as_text(summary))
    elif has_terminal():
        show_on_terminal(summary)
    else:
        print(as_text(summary), file=sys.stderr, flush=True)


# Parameters and memory of a module's layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A row of the table; sharded parameters count in full, uninitialized ones not at all.

    Attributes:
        name: Name of the layer in the module.
        kind: Name of its class.
        parameters: Number of elements of its parameters.
        trainable: Number of elements of its trainable parameters.
        num_bytes: Bytes of its parameters and buffers; those shared by several layers count in each.
        shapes: Shapes of its input and output; None if they are not known.
        trains: Whether it is in training mode.
    """

    name: str
    kind: str
    parameters: int
    trainable: int
    num_bytes: int
    shapes: Shapes | None = None
    trains: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The summary of a module.

    Attributes:
        layers: The layers in depth-first order.
        total: The totals of the module, in which shared parameters count once.
        remarks: Explanations of the figures.
    """

    layers: tuple[Layer, ...]
    total: Layer
    remarks: tuple[str, ...]


def summarize(
    module: nn.Module, *, max_depth: int = 1, shapes: Mapping[str, Shapes] | None = None, remark: str | None = None
) -> Summary:
    """Return a summary of a module.

    Args:
        module: The module, which is not changed.
        max_depth: Number of levels; -1 is all.
        shapes: Known shapes by the names of layers; the name of the module itself is empty.
        remark: An additional remark.
    """
    shapes_by_name = shapes or {}
    layers = [
        _layer(name, layer, layer.parameters(), layer.buffers(), shapes_by_name.get(name))
        for name, layer in _layers_to_depth(module, max_depth)
    ]
    direct = _layer("(own)", None, module.parameters(recurse=False), module.buffers(recurse=False), None)
    if direct.num_bytes and max_depth:
        layers.append(direct)
    total = _layer("total", module, module.parameters(), module.buffers(), shapes_by_name.get(""))
    return Summary(layers=tuple(layers), total=total, remarks=tuple(filter(None, (*_remarks(module), remark))))


def _layers_to_depth(module: nn.Module, max_depth: int) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in module.named_modules():
        if name and (max_depth < 0 or name.count(".") < max_depth):
            yield name, layer


def _layer(
    name: str,
    module: nn.Module | None,
    parameters: Iterable[nn.Parameter],
    buffers: Iterable[Tensor],
    shapes: Shapes | None,
) -> Layer:
    sizes = [
        (parameter.numel(), parameter.requires_grad, _bytes_of(parameter)) for parameter in _initialized(parameters)
    ]
    return Layer(
        name=name,
        kind="" if module is None else type(module).__name__,
        parameters=sum(size for size, _, _ in sizes),
        trainable=sum(size for size, trains, _ in sizes if trains),
        num_bytes=sum(num_bytes for _, _, num_bytes in sizes) + sum(map(_bytes_of, _initialized(buffers))),
        shapes=shapes,
        trains=module is None or module.training,
    )


def _remarks(module: nn.Module) -> Iterator[str]:
    parameters = list(module.parameters())
    lazy = sum(isinstance(parameter, UninitializedParameter | UninitializedBuffer) for parameter in parameters)
    if lazy:
        yield f"{lazy} parameters of lazy layers have no size yet, and are not counted"
    if any(parameter.is_meta for parameter in parameters):
        yield "parameters on the meta device take no memory yet; their sizes are those that they will have"
    owners = [parameter for layer in module.modules() for parameter in layer.parameters(recurse=False)]
    shared = sum(parameter.numel() for parameter in _initialized(owners)) - sum(
        p.numel() for p in _initialized(parameters)
    )
    if shared:
        yield f"layers share {shared:,} parameters, which count once in the total"


def _initialized(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if not isinstance(tensor, UninitializedParameter | UninitializedBuffer)]


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# Summary as a table on a terminal


def show_on_terminal(summary: Summary) -> None:
    """Print a summary to stderr, which is a terminal."""
    from rich.box import SIMPLE  # loaded only where a terminal shows it
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=SIMPLE,
        show_edge=False,
        show_footer=bool(summary.layers),  # without layers the total is below the header's rule
        pad_edge=False,
        collapse_padding=True,
        header_style="bold",
        footer_style="bold",
    )
    for name, total in zip(header(summary), cells(summary.total, summary), strict=True):
        is_number = name not in TEXT_COLUMNS
        table.add_column(
            name, Text(total), justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
        )
    for layer in summary.layers:
        frozen = layer.parameters > 0 and layer.trainable == 0
        table.add_row(*map(Text, cells(layer, summary)), style="dim" if frozen else "")
    if not summary.layers:
        table.add_row(*map(Text, cells(summary.total, summary)), style="bold")
    console = Console(stderr=True)
    console.print(table)
    for remark in summary.remarks:
        console.print(Text(remark, style="dim"))


# Input and output shapes of layers, recorded in a forward pass of the example


_LONGEST = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """The shapes of a layer's first call, as text such as ``[32, 3]``.

    Attributes:
        input: Of the arguments.
        output: Of the result.
        flops: Floating-point operations of the call, as far as torch counts them.
    """

    input: str
    output: str
    flops: int = 0


def try_example(trainer: Trainer, module: TrainModule) -> tuple[dict[str, Shapes], str | None]:
    """Run the module's ``example_input_array``; return the shapes by layer, and a remark if there are none."""
    example = getattr(module, "example_input_array", None)
    if example is None:
        return {}, None
    problem = _why_not_runnable(trainer, module)
    if problem:
        return {}, f"no shapes: {problem}"
    strategy = trainer.strategy

    def run(*args: Any, **kwargs: Any) -> Any:
        with strategy.precision_plugin.forward_context():
            return module.forward(*args, **kwargs)  # module(...) may be compiled, without calling the hooks

    try:
        return record_shapes(module, strategy.batch_to_device(example), run), None
    except Exception as error:  # noqa: BLE001 - a failure of the summary must not prevent the training
        return {}, f"no shapes: forward failed on example_input_array with {type(error).__name__}: {error}"


def record_shapes(module: nn.Module, example: Any, run: Callable[..., Any]) -> dict[str, Shapes]:
    """Run a module once on an example, and return the shapes of each called layer, by name.

    Args:
        module: The module, whose modes are restored, as is the random state.
        example: A tensor, a tuple of positional arguments, or a dict of keyword arguments.
        run: Called with these arguments.
    """
    args = example if isinstance(example, tuple) else () if isinstance(example, Mapping) else (example,)
    kwargs = example if isinstance(example, Mapping) else {}
    shapes: dict[str, Shapes] = {}
    counter = FlopCounterMode(display=False)
    with ExitStack() as stack:
        _restore_on_exit(module, stack)
        stack.enter_context(counter)
        for name, layer in module.named_modules():
            if name and not isinstance(layer, torch.jit.ScriptModule):  # torch supports no hooks there
                before, after = _recorders(name, shapes, counter)
                stack.callback(layer.register_forward_pre_hook(before).remove)
                stack.callback(layer.register_forward_hook(after, with_kwargs=True).remove)
        output = run(*args, **kwargs)
        shapes[""] = _shapes(args, kwargs, output, counter.get_total_flops())
    return shapes


def _why_not_runnable(trainer: Trainer, module: nn.Module) -> str | None:
    if trainer.world_size > 1 and not trainer.strategy.replicates_state:
        return f"with {type(trainer.strategy).__name__} no process alone can run the module"
    tensors = [*module.parameters(), *module.buffers()]
    if any(isinstance(tensor, UninitializedParameter | UninitializedBuffer) for tensor in tensors):
        return "running example_input_array would give lazy layers their size"
    if any(tensor.is_meta for tensor in tensors):
        return "the module is on the meta device"
    return None


def _restore_on_exit(module: nn.Module, stack: ExitStack) -> None:
    for layer in module.modules():  # each by itself, as some may be in evaluation mode already
        stack.callback(setattr, layer, "training", layer.training)
    module.eval()
    stack.callback(RandomState.capture().restore)
    devices = {parameter.device for parameter in module.parameters() if not parameter.is_cpu}  # meta ones end earlier
    for device in devices:
        stack.enter_context(torch.random.fork_rng(devices=[device], device_type=device.type))
    stack.enter_context(torch.no_grad())


def _recorders(
    name: str, shapes: dict[str, Shapes], counter: FlopCounterMode
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the hooks before and after a layer's forward pass."""
    totals: list[int] = []  # at the begin of its calls, which may be nested

    def before(_layer: nn.Module, _args: Any) -> None:
        totals.append(counter.get_total_flops())

    def after(_layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        flops = counter.get_total_flops() - totals.pop()
        if name not in shapes:  # a layer may be called several times
            shapes[name] = _shapes(args, kwargs, output, flops)

    return before, after


def _shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, flops: int) -> Shapes:
    inputs = [*map(shape_of, args), *(f"{name}={shape_of(value)}" for name, value in kwargs.items())]
    return Shapes(input=_shortened(", ".join(inputs)), output=_shortened(shape_of(output)), flops=flops)


def shape_of(value: Any) -> str:
    """Return the shapes of the tensors in a value as text."""
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {shape_of(item)}' for key, item in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(shape_of, value))})"
    return "None" if value is None else type(value).__name__


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


# Summary as a table of text


TEXT_COLUMNS = ("layer", "type", "mode", "input", "output")
"""Columns of words; numbers are aligned to the right."""


def header(summary: Summary) -> tuple[str, ...]:
    """Return the names of the columns; those of modes, shapes and operations only if they say something."""
    modes = ("mode",) if _has_modes(summary) else ()
    shapes = ("input", "output") if _has_shapes(summary) else ()
    flops = ("FLOPs",) if _has_flops(summary) else ()
    return ("layer", "type", *modes, "parameters", "trainable", "size", *shapes, *flops)


def cells(layer: Layer, summary: Summary) -> tuple[str, ...]:
    """Return a layer's row."""
    shapes = layer.shapes or Shapes(input="", output="")
    return (
        layer.name,
        layer.kind,
        *(("train" if layer.trains else "eval",) if _has_modes(summary) else ()),
        f"{layer.parameters:,}",
        f"{layer.trainable:,}",
        format_bytes(layer.num_bytes),
        *((shapes.input, shapes.output) if _has_shapes(summary) else ()),
        *((_format_flops(shapes.flops),) if _has_flops(summary) else ()),
    )


def as_text(summary: Summary) -> str:
    """Return the table as plain text."""
    names = header(summary)
    rows = [names, *(cells(layer, summary) for layer in summary.layers), cells(summary.total, summary)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    lines = [
        "  ".join(
            cell.ljust(width) if name in TEXT_COLUMNS else cell.rjust(width)
            for cell, width, name in zip(row, widths, names, strict=True)
        )
        for row in rows
    ]
    rule = "-" * len(lines[0])
    layers = [*lines[1:-1], rule] if summary.layers else []
    return "\n".join(line.rstrip() for line in [lines[0], rule, *layers, lines[-1], *summary.remarks])


def as_html(summary: Summary) -> str:
    """Return the table for a notebook."""
    rows = [cells(layer, summary) for layer in (*summary.layers, summary.total)]
    remarks = "".join(f"<div>{html.escape(remark)}</div>" for remark in summary.remarks)
    return html_table(header(summary), rows, text_columns=TEXT_COLUMNS) + remarks


def format_bytes(size: float) -> str:
    """Return a number of bytes with a decimal unit, such as ``"1.5 MB"``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _format_flops(flops: int) -> str:
    """Return a number of operations with a unit, such as ``"1.5 G"``; empty for none."""
    size = float(flops)
    for unit in ("", " k", " M", " G"):
        if size < 1000:
            return f"{size:.3g}{unit}" if flops else ""
        size /= 1000
    return f"{size:.3g} T"


def _has_modes(summary: Summary) -> bool:
    return not all(layer.trains for layer in summary.layers)


def _has_flops(summary: Summary) -> bool:
    return summary.total.shapes is not None and summary.total.shapes.flops > 0


def _has_shapes(summary: Summary) -> bool:
    return any(layer.shapes is not None for layer in (*summary.layers, summary.total))

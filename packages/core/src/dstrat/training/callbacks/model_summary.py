"""A small table of a module's layers, shown before training."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn.parameter import UninitializedParameter
from typing_extensions import override

from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


class ModelSummary(Callback):
    """Writes the top-level layers with their numbers of parameters to stderr when a fit starts, once for the job."""

    @override
    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.is_global_zero:
            print(summarize(module), file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSize:
    """What a layer holds; sharded parameters count whole, uninitialized ones not at all.

    Attributes:
        name: Its name in the module.
        kind: The name of its class.
        parameters: Number of values in its parameters.
        trainable: Number of those that are trained.
    """

    name: str
    kind: str
    parameters: int
    trainable: int

    @classmethod
    def of(cls, name: str, kind: str, parameters: Iterable[nn.Parameter]) -> LayerSize:
        """Count the parameters of a layer."""
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in _initialized(parameters)]
        return cls(
            name=name,
            kind=kind,
            parameters=sum(size for size, _ in sizes),
            trainable=sum(size for size, trains in sizes if trains),
        )


def summarize(module: nn.Module) -> str:
    """Return a table of the module's top-level layers, and its totals."""
    layers = [LayerSize.of(name, type(child).__name__, child.parameters()) for name, child in module.named_children()]
    own = LayerSize.of("(own)", "Parameter", module.parameters(recurse=False))
    if own.parameters:
        layers.append(own)
    total = LayerSize.of("total", type(module).__name__, module.parameters())
    size = sum(parameter.numel() * parameter.element_size() for parameter in _initialized(module.parameters()))
    lines = _table([*layers, total])
    lines.append(f"{_bytes(size)} of parameters")
    return "\n".join(lines)


def _initialized(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if not isinstance(parameter, UninitializedParameter)]


def _table(layers: list[LayerSize]) -> list[str]:
    rows = [("layer", "type", "parameters", "trainable")]
    rows += [(layer.name, layer.kind, f"{layer.parameters:,}", f"{layer.trainable:,}") for layer in layers]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {count:>{widths[2]}}  {trainable:>{widths[3]}}"
        for name, kind, count, trainable in rows
    ]
    rule = "-" * len(lines[0])
    return [lines[0], rule, *lines[1:-1], rule, lines[-1]]


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"

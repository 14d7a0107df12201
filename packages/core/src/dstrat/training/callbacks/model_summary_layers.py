"""Parameters and memory of a module's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor, nn

    from dstrat.training.callbacks.model_summary_shapes import Shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """What a layer holds; sharded parameters count whole, uninitialized ones not at all.

    Attributes:
        name: Its name in the module.
        kind: The name of its class.
        parameters: Number of values in its parameters.
        trainable: Number of those that are trained.
        num_bytes: Memory that its parameters and buffers take; one that several layers share counts for each.
        shapes: The shapes of its input and output, None where they are not known.
    """

    name: str
    kind: str
    parameters: int
    trainable: int
    num_bytes: int
    shapes: Shapes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What is known of a module.

    Attributes:
        layers: Its layers, those of a layer after it.
        total: The module as a whole, where what is shared counts once.
        remarks: What the figures do not say.
    """

    layers: tuple[Layer, ...]
    total: Layer
    remarks: tuple[str, ...]


def summarize(
    module: nn.Module, *, max_depth: int = 1, shapes: Mapping[str, Shapes] | None = None, remark: str | None = None
) -> Summary:
    """Return a summary of a module.

    Args:
        module: The module; nothing in it is changed.
        max_depth: Levels of layers to list, -1 for all.
        shapes: Shapes of the layers that are known, by their name; that of the module itself is empty.
        remark: What is to be said besides.
    """
    known = shapes or {}
    layers = [
        _layer(name, part, part.parameters(), part.buffers(), known.get(name))
        for name, part in _parts(module, max_depth)
    ]
    direct = _layer("(own)", None, module.parameters(recurse=False), module.buffers(recurse=False), None)
    if direct.num_bytes and max_depth:
        layers.append(direct)
    total = _layer("total", module, module.parameters(), module.buffers(), known.get(""))
    return Summary(layers=tuple(layers), total=total, remarks=tuple(filter(None, (*_remarks(module), remark))))


def _parts(module: nn.Module, max_depth: int) -> Iterator[tuple[str, nn.Module]]:
    for name, part in module.named_modules():
        if name and (max_depth < 0 or name.count(".") < max_depth):
            yield name, part


def _layer(
    name: str,
    module: nn.Module | None,
    parameters: Iterable[nn.Parameter],
    buffers: Iterable[Tensor],
    shapes: Shapes | None,
) -> Layer:
    sizes = [(parameter.numel(), parameter.requires_grad, _bytes_of(parameter)) for parameter in _known(parameters)]
    return Layer(
        name=name,
        kind="" if module is None else type(module).__name__,
        parameters=sum(size for size, _, _ in sizes),
        trainable=sum(size for size, trains, _ in sizes if trains),
        num_bytes=sum(num_bytes for _, _, num_bytes in sizes) + sum(map(_bytes_of, _known(buffers))),
        shapes=shapes,
    )


def _remarks(module: nn.Module) -> Iterator[str]:
    parameters = list(module.parameters())
    lazy = sum(isinstance(parameter, UninitializedParameter | UninitializedBuffer) for parameter in parameters)
    if lazy:
        yield f"{lazy} parameters of lazy layers have no size yet, and are not counted"
    if any(parameter.is_meta for parameter in parameters):
        yield "parameters on the meta device take no memory yet; their sizes are those that they will have"
    owners = [parameter for part in module.modules() for parameter in part.parameters(recurse=False)]
    shared = sum(parameter.numel() for parameter in _known(owners)) - sum(p.numel() for p in _known(parameters))
    if shared:
        yield f"layers share {shared:,} parameters, which count once in the total"


def _known(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if not isinstance(tensor, UninitializedParameter | UninitializedBuffer)]


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

"""Tensor parallelism by the plan that a model of transformers brings."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from dstrat.errors import RequestError
from dstrat_transformers.models import expert_layers, generic_name, is_peft, owners_of_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

_logger = logging.getLogger(__name__)


class HeadwiseNorm(ParallelStyle):
    """A normalization whose input has a part of the heads: ``(..., heads, head_dim)``.

    Its parameters are the same on all ranks, each of which has gradients of its own heads; DTensors add them up.
    """

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            replicated = DTensor.from_local(parameter.data, device_mesh, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(replicated, requires_grad=parameter.requires_grad))

        def split_heads(_module: Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            heads, *remaining = inputs
            placement = Shard(heads.ndim - 2)
            return DTensor.from_local(heads, device_mesh, [placement], run_check=False), *remaining

        module.register_forward_pre_hook(split_heads)
        # The attention around it computes with local tensors.
        module.register_forward_hook(lambda _module, _inputs, output: output.to_local())
        return module


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    # Names in transformers, and what they are in torch.
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": HeadwiseNorm,
    "rowwise": RowwiseParallel,
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
}

_OPTIONAL = ("colwise_gather_output", "colwise_rep", "embedding_rowwise", "rowwise_rep", "rowwise_split_input")
"""Styles of layers with whole inputs and outputs, which compute the same where they are not split."""

_NO_OPERATION = "replicate"


def parallelize(
    model: Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str | ParallelStyle] | None = None,
    *,
    leaves_experts: bool = False,
) -> None:
    """Split the layers of a model over a mesh, by its plan.

    Call it before the strategy's setup, as in ``configure_model``; :class:`~dstrat_transformers.HFModule` does.

    Args:
        model: The model of transformers, with its values or on the meta device.
        mesh: The ranks that share a batch, such as ``device_mesh["tensor_parallel"]``.
        plan: Styles by the names of layers, with ``*`` for numbers: names of transformers, or styles of torch.  None
            is the model's own plan.
        leaves_experts: Whether layers of experts stay as they are, because the strategy divides them by ``ep``.

    Raises:
        RequestError: The model has no plan; a style has no counterpart in torch; or a layer cannot be divided by the
            size of the mesh.
    """
    styles = _styles_of_layers(model, plan, expert_layers(model) if leaves_experts else ())
    # Before the split, which gives each of the layers that share a parameter one of its own.
    tied = [owners for owners in owners_of_parameters(model).values() if len(owners) > 1]
    _add_tied_embeddings(model, styles, tied)
    size = mesh.size()
    for name, style in styles.items():
        layer = model.get_submodule(name)
        if style == _NO_OPERATION:
            continue
        if isinstance(style, str):
            if not _is_divisible(model, name, style, size):
                continue
            style = _STYLES[style]()  # noqa: PLW2901 - the same by another type
        parallelize_module(layer, mesh, style)
    for owners in tied:
        _tie(owners)


def check_tensor_parallel(
    model: Module,
    size: int,
    plan: Mapping[str, str | ParallelStyle] | None = None,
    *,
    leaves_experts: bool = False,
) -> None:
    """Check that :func:`parallelize` can split the layers of a model over so many ranks, before anything runs.

    Raises:
        RequestError: As of that function.
    """
    for name, style in _styles_of_layers(model, plan, expert_layers(model) if leaves_experts else ()).items():
        if isinstance(style, str) and style != _NO_OPERATION:
            _is_divisible(model, name, style, size)


def _styles_of_layers(
    model: Module, plan: Mapping[str, str | ParallelStyle] | None, ignored: Collection[Module]
) -> dict[str, str | ParallelStyle]:
    """Return the style of each layer that a plan names, without layers that are ignored."""
    owner = type(model).__name__
    if is_peft(model):
        raise RequestError(
            f"{owner} has adapters of peft, which no tensor-parallel plan of transformers splits: use the strategy "
            "'fsdp'"
        )
    if plan is None:
        plan = getattr(model, "tp_plan", None) or {}
        if not plan:
            raise RequestError(
                f"{owner} has no tensor-parallel plan in transformers: pass tensor_parallel_plan= with the styles of "
                "its layers, such as {'model.layers.*.mlp.up_proj': 'colwise'}, or use the strategy 'fsdp'"
            )
    excluded = tuple(generic_name(name) for name, layer in model.named_modules() if layer in ignored)
    plan = {name: style for name, style in plan.items() if not generic_name(name).startswith(excluded)}
    known = (*_STYLES, _NO_OPERATION)
    unknown = {name: style for name, style in plan.items() if isinstance(style, str) and style not in known}
    if unknown:
        name, style = next(iter(unknown.items()))
        of_experts = "divide experts by 'mesh(tp=2, ep=2)', " if expert_layers(model) else ""
        raise RequestError(
            f"the style {style!r} of {name!r} in the tensor-parallel plan of {owner} has no counterpart in torch's "
            f"parallelize_module: dstrat-transformers has {', '.join(known)}; {of_experts}pass tensor_parallel_plan= "
            "without it, or use the strategy 'fsdp'"
        )
    layers = {name: generic_name(name) for name, _ in model.named_modules()}
    styles = {name: plan[generic] for name, generic in layers.items() if generic in plan}
    # A name with its number comes before the pattern.
    styles |= {name: plan[name] for name in layers if name in plan}
    return styles


def _add_tied_embeddings(model: Module, styles: dict[str, Any], tied: list[list[tuple[Module, str]]]) -> None:
    """Split the embeddings whose weight a split output layer shares, or both would no longer be one parameter."""
    layer_names = {id(layer): name for name, layer in model.named_modules()}
    for owners in tied:
        names = [layer_names[id(layer)] for layer, _ in owners]
        if any(name in styles for name in names):
            for (layer, _), name in zip(owners, names, strict=True):
                if isinstance(layer, nn.Embedding):
                    styles.setdefault(name, "embedding_rowwise")


def _is_divisible(model: Module, name: str, style: str, size: int) -> bool:
    """Return whether a layer can be split evenly; False for one that may stay whole.

    Raises:
        RequestError: It cannot be, and must not stay whole.
    """
    layer: Any = model.get_submodule(name)
    if style == "replicated_with_grad_allreduce":
        return True
    is_embedding = isinstance(layer, nn.Embedding)
    length = layer.num_embeddings if is_embedding else layer.in_features if "rowwise" in style else layer.out_features
    parent: Any = model.get_submodule(name.rpartition(".")[0])
    # Layers of attention are split between heads, which the model reshapes by the head's size.
    head_dim = getattr(parent, "head_dim", None) if style in ("colwise", "rowwise") else None
    if length % (size * (head_dim or 1)) == 0:
        return True
    if style in _OPTIONAL:
        _logger.info("%s of %d features is not split over %d ranks, which do not divide it", name, length, size)
        return False
    raise RequestError(
        f"{name} has {f'{length // head_dim} heads' if head_dim else f'{length} features'}, which the {size} ranks of "
        "tensor_parallel_size do not divide: choose a size that does"
    )


def _tie(owners: list[tuple[Module, str]]) -> None:
    """Let several layers share one parameter again, that of the first layer that is split."""
    parameters = [getattr(layer, name) for layer, name in owners]
    shared = next((parameter for parameter in parameters if isinstance(parameter, DTensor)), None)
    if shared is not None:  # otherwise all are as before; and a plain parameter that is set here may lose its values
        for layer, name in owners:
            setattr(layer, name, shared)


# Slices of parameters, for the ranks of an engine


@dataclass(frozen=True, slots=True)
class Slicing:
    """Division of a parameter over the ranks of an engine.

    Attributes:
        dim: The dimension that is divided, from the end.
        num_packed: Number of tensors that are packed along it, each of which is divided.
    """

    dim: int
    num_packed: int = 1

    def of(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """Return the slice of a rank, which is empty where there are fewer elements than ranks."""
        dim = tensor.dim() + self.dim
        slices = []
        for packed in tensor.chunk(self.num_packed, dim):
            length = -(-packed.shape[dim] // size)  # as torch divides
            first = min(rank * length, packed.shape[dim])
            slices.append(packed.narrow(dim, first, min(length, packed.shape[dim] - first)))
        return torch.cat(slices, dim)  # a copy, so that the tensor itself need not stay in memory


_ROWS, _COLUMNS = Slicing(-2), Slicing(-1)
_SLICINGS: dict[str, tuple[Slicing, Slicing | None]] = {
    # Styles of transformers, for weights, and for biases, of which None is one on all ranks.
    **dict.fromkeys(("colwise", "colwise_gather_output", "colwise_rep"), (_ROWS, _COLUMNS)),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input"), (_COLUMNS, None)),
    "embedding_rowwise": (_ROWS, None),
    "embedding_colwise": (_COLUMNS, None),
    "packed_colwise": (Slicing(-2, 2), Slicing(-1, 2)),
    "packed_rowwise": (Slicing(-1, 2), None),
}
_NOT_SLICED = (_NO_OPERATION, "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts", "sequence_parallel")


def slicings(model: Module, size: int, plan: Mapping[str, Any] | None = None) -> dict[str, Slicing]:
    """Return how each parameter of a model is divided over the ranks of an engine; others are on all of them.

    Args:
        model: The model of transformers, on any layout.
        size: Number of ranks.
        plan: Styles of transformers by the names of layers or parameters; None is the model's own plan.

    Raises:
        RequestError: The model has no plan, or one with another style; or ranks do not divide heads or experts.
    """
    styles = dict((getattr(model, "tp_plan", None) if plan is None else plan) or {})
    if not styles:
        raise RequestError(
            f"{type(model).__name__} has no tensor-parallel plan in transformers, by which its weights are divided: "
            "pass tensor_parallel_plan= to its HFModule, or leave tensor_parallel out"
        )
    for name, style in styles.items():
        if style not in _SLICINGS and style not in _NOT_SLICED:
            raise RequestError(
                f"the style {style!r} of {name!r} in the tensor-parallel plan of {type(model).__name__} does not say "
                f"how a weight is divided: the styles that do are {', '.join(_SLICINGS)}"
            )
    divided: dict[str, Slicing] = {}
    layer_names = {id(layer): name for name, layer in model.named_modules()}
    for owners in owners_of_parameters(model).values():
        names = [f"{layer_names[id(layer)]}.{attribute}" for layer, attribute in owners]
        of_names = [slicing for name in names if (slicing := _slicing(model, name, styles, size)) is not None]
        if of_names:  # also of layers that share the parameter, such as an embedding with the output layer
            divided |= dict.fromkeys(names, of_names[0])
    return divided


def _slicing(model: Module, name: str, styles: Mapping[str, str], size: int) -> Slicing | None:
    """Return how a parameter is divided by its own style, or that of its layer; None if it is not."""
    layer_name, _, attribute = name.rpartition(".")
    candidates = (name, generic_name(name), layer_name, generic_name(layer_name))
    style = next((styles[candidate] for candidate in candidates if candidate in styles), None)
    if style not in _SLICINGS:
        return None
    of_weight, of_bias = _SLICINGS[style]
    slicing = of_bias if attribute.endswith("bias") else of_weight
    layer = model.get_submodule(layer_name)
    if isinstance(layer, nn.Embedding) and style.startswith("rowwise"):
        slicing = _ROWS  # as torch's RowwiseParallel
    if slicing is None:
        return None
    if isinstance(layer, nn.Linear) and style in ("colwise", "rowwise"):
        _is_divisible(model, layer_name, style, size)
    parameter = getattr(layer, attribute)
    length = getattr(parameter, "ds_shape", parameter.shape)[slicing.dim]  # as DeepSpeed's stage 3 empties parameters
    if length % (size * slicing.num_packed) and not (
        isinstance(layer, nn.Linear | nn.Embedding) and style in _OPTIONAL
    ):
        raise RequestError(
            f"{name} has {length // slicing.num_packed} features, which the {size} ranks of the engine do not divide: "
            "choose a size that does"
        )
    return slicing

"""Experts that ranks divide: tokens go to the ranks of their experts, and outputs come back."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from dstrat.errors import DstratError, MisuseError, RequestError
from dstrat.parallel.collectives import gather_tensors
from dstrat_fsdp import internals
from dstrat_fsdp.mesh import open_mesh
from dstrat_fsdp.parameters import replace_parameters
from dstrat_fsdp.wrap_policy import names_of_shared, parameter_uses
from dstrat_mesh.axes import EXPERT, REPLICATE, SHARD
from dstrat_mesh.exchange import exchange_rows
from dstrat_mesh.stages import generator_states

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from dstrat.parallel.strategy import ParallelStrategy
    from dstrat_mesh.axes import Axes

_CONTRACT = "configure_experts"
_COUNT = "num_experts"  # attribute of layers with the number of their experts


class ExpertParallelism:
    """Layers of experts in a run, of which each rank of ``ep`` computes a share.

    Args:
        module: The user's module, whose ``configure_experts`` returns the layers; not divided yet.
        axes: The sizes of the mesh.
        tensor_group: The ranks that share a batch, of which each sends a part of the tokens; None if there are none.
        strategy: Of the run.

    Attributes:
        layers: The layers.

    Raises:
        MisuseError: The module names no such layers, or one has parameters that cannot be divided.
        RequestError: The ranks do not divide the experts.
    """

    def __init__(
        self,
        module: Module,
        axes: Axes,
        tensor_group: ProcessGroup | None,
        strategy: ParallelStrategy,
    ) -> None:
        counts = experts_of(module, axes.ep)
        self.layers, names = list(counts), {layer: name for name, layer in module.named_modules()}
        sizes = axes.mesh_of_experts
        self._mesh = open_mesh(strategy.root_device.type, tuple(sizes.values()), tuple(sizes), strategy.timeout)
        self._replicates = axes.dp_replicate > 1
        self._replaced = {layer: vars(layer).get("forward") for layer in self.layers}
        group = self._mesh.get_group(EXPERT)
        for layer, count in counts.items():
            experts = RoutedExperts(layer, names[layer], count, group, tensor_group, strategy)
            layer.forward = experts.compute

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """The ranks with the same experts, over which their parameters are sharded."""
        return self._mesh[(REPLICATE, SHARD) if self._replicates else (SHARD,)]

    @torch.no_grad()
    def divide(self, module: Module) -> None:
        """Keep this rank's share of the experts in the layers of a module, which all ranks have with equal values."""
        mesh, inside = self._mesh[EXPERT], set(module.modules())

        def share_of(parameter: Tensor) -> Tensor:
            share = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            return DTensor.from_local(share, mesh, [Shard(0)], run_check=False)

        replace_parameters((owner for layer in self.layers if layer in inside for owner in layer.modules()), share_of)

    def end(self) -> None:
        """Restore the ``forward`` of the layers, and drop the groups."""
        for layer, forward in self._replaced.items():
            del layer.forward
            if forward is not None:
                layer.forward = forward
        internals.release_mesh(self._mesh)


def experts_of(module: Module, ranks: int) -> dict[Module, int]:
    """Return the layers of experts of a module, with the number of their experts.

    Args:
        module: The module.
        ranks: Number of ranks that divide them.

    Raises:
        MisuseError: The module names no such layers, or one has parameters that cannot be divided.
        RequestError: The ranks do not divide the experts.
    """
    names = {layer: name for name, layer in module.named_modules()}
    return {layer: _number_of_experts(module, layer, names[layer], ranks) for layer in _layers_of(module)}


def common_number_of_experts(module: Module) -> int:
    """Return the largest number that divides the experts of all layers; 1 if a module has none that can be divided."""
    try:
        return math.gcd(*experts_of(module, 1).values())
    except DstratError:  # also from hooks of modules that are defined for any model
        return 1


def with_experts(layers: Sequence[Module], module: Module, blocks: Sequence[Module]) -> tuple[Module, ...]:
    """Return the blocks of a module with its layers of experts, which are blocks of their own.

    Args:
        layers: The layers of experts, of this module or others.
        module: The module.
        blocks: Its blocks, of which those within experts are left out.
    """
    if not layers:
        return tuple(blocks)
    within = {inner for layer in layers for inner in layer.modules()}
    present = set(module.modules())
    return (*(layer for layer in layers if layer in present), *(block for block in blocks if block not in within))


def _layers_of(module: Module) -> list[Module]:
    name = type(module).__name__
    if not hasattr(module, _CONTRACT):
        raise MisuseError(
            f"{name} has no {_CONTRACT}, which experts (ep) need: define it to return the layers that are called as "
            "experts(tokens, index, weights), such as [block.experts for block in self.blocks]"
        )
    returned: Any = module.configure_experts()  # type: ignore[operator]  # a method
    if isinstance(returned, nn.Module) and not isinstance(returned, nn.ModuleList):
        raise MisuseError(
            f"{_CONTRACT} of {name} returned one {type(returned).__name__}: return a list, such as "
            "[block.experts for block in self.blocks]"
        )
    layers: list[Module] = list(returned)
    known = set(module.modules())
    if not layers or not all(layer in known for layer in layers):
        received = ", ".join(type(layer).__name__ for layer in layers) or "no layer"
        raise MisuseError(f"{_CONTRACT} of {name} returned {received}: return layers of the module, or leave ep out")
    return layers


def _number_of_experts(module: Module, layer: Module, prefix: str, ranks: int) -> int:
    """Return the number of experts in a layer: the first dimension of each of its parameters."""
    shapes = {f"{prefix}.{name}": tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    counts = {shape[:1] for shape in shapes.values()}
    said = vars(layer).get(_COUNT)
    if said is not None:
        counts.add((said,))
    if len(counts) != 1 or counts == {()} or names_of_shared(layer, parameter_uses(module)):
        shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "no parameters"
        if said is not None:
            shown = f"{_COUNT}={said} and {shown}"
        raise MisuseError(
            f"the experts {prefix!r} ({type(layer).__name__}) have {shown}: each needs the experts as its first "
            "dimension, and no other layer may have it; put shared parameters into a layer of their own"
        )
    (count,) = counts.pop()
    if count % ranks:
        fitting = [str(size) for size in range(1, count + 1) if count % size == 0]
        raise RequestError(
            f"the {ranks} ranks of ep do not divide the {count} experts of {prefix!r}: choose ep among "
            f"{', '.join(fitting)}"
        )
    return int(count)


class RoutedExperts:
    """A layer of experts whose tokens go to the ranks of their experts.

    Two all-to-alls, of tokens and of outputs, without a capacity, so that no token is dropped (as in MegaBlocks, Gale
    et al. 2022, https://arxiv.org/abs/2211.15841).

    Args:
        layer: The layer, whose parameters are this rank's experts; its ``forward`` is that of one device.
        name: Its name in the module.
        count: Number of experts of all ranks.
        group: The ranks, in the order of their experts.
        tensor_group: The ranks that have the same tokens; None if there are none.
        strategy: Of the run.
    """

    def __init__(
        self,
        layer: Module,
        name: str,
        count: int,
        group: ProcessGroup,
        tensor_group: ProcessGroup | None,
        strategy: ParallelStrategy,
    ) -> None:
        self._layer, self._name, self._forward, self._strategy = layer, name, layer.forward, strategy
        self._count, self._group, self._tensor_group = count, group, tensor_group
        # Ranks of the group whose tokens are of different batches, or other parts of one.
        self._batches = group.size() if tensor_group is None else group.size() // tensor_group.size()

    def compute(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs for each token; collective.

        Args:
            tokens: This rank's tokens, ``(tokens, width)``.
            index: The experts of each token, ``(tokens, choices)``, integers.
            weights: The factors of their outputs, likewise.

        Raises:
            MisuseError: The tensors have other shapes, or are sharded; or the experts draw random numbers, and other
                ranks have the same tokens.
        """
        if isinstance(tokens, DTensor) or tokens.dim() != 2 or index.shape != weights.shape or index.dim() != 2:
            raise MisuseError(
                f"{self._name} was called with a {type(tokens).__name__} of shape {tuple(tokens.shape)}, an index of "
                f"{tuple(index.shape)} and weights of {tuple(weights.shape)}: experts are called with plain tensors, "
                "experts(tokens, index, weights) of (tokens, width) and twice (tokens, choices)"
            )
        # Routers compute the weights in float32 also where the experts compute in bfloat16.
        tokens = tokens.to(next(self._layer.parameters()).dtype)
        if self._tensor_group is not None:
            length = tokens.shape[0]
            tokens, index, weights = (_share(tensor, self._tensor_group) for tensor in (tokens, index, weights))
        order = index.flatten().argsort(stable=True)
        counts = torch.bincount(index.flatten(), minlength=self._count).reshape(self._group.size(), -1)
        arriving = torch.empty_like(counts)  # by the rank that they come from, and the expert of this one
        dist.all_to_all_single(arriving, counts, group=self._group)
        # Buffers are allocated by the host, which therefore waits for the counts.
        sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
        rows = exchange_rows(tokens[order // index.shape[1]], sent, received, self._group)
        numbers = torch.arange(arriving.shape[1], device=index.device).repeat(arriving.shape[0])
        with self._local_experts(), self._drawing_nothing():
            outputs = self._compute_rows(rows, numbers.repeat_interleave(arriving.flatten()))
        outputs = exchange_rows(outputs, received, sent, self._group)
        selected = outputs[order.argsort()].unflatten(0, index.shape)
        combined = (selected * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)
        return combined if self._tensor_group is None else _joined(combined, length, self._tensor_group)

    @contextmanager
    def _local_experts(self) -> Iterator[None]:
        """In this context the layer has plain tensors of this rank's experts, and their number."""
        attributes, shadowed = vars(self._layer), []
        for owner in self._layer.modules():
            parameters: list[tuple[str, Any]] = list(owner.named_parameters(recurse=False))
            for name, parameter in parameters:
                local = parameter.to_local()
                if local.requires_grad and self._batches > 1:
                    # It has the sum over the batches of the group, and a data-parallel gradient is their mean.
                    local.register_hook(lambda gradient: gradient / self._batches)
                vars(owner)[name] = local  # found before the parameter, which torch still has
                shadowed.append((owner, name))
        total = attributes.get(_COUNT)
        if total is not None:
            attributes[_COUNT] = self._count // self._group.size()
        try:
            yield
        finally:
            if total is not None:
                attributes[_COUNT] = total
            for owner, name in shadowed:
                del vars(owner)[name]

    @contextmanager
    def _drawing_nothing(self) -> Iterator[None]:
        """In this context experts may draw no random numbers, if the ranks of tensor parallelism compute with them.

        Each would draw for its own tokens, and compute the layers that come after with other numbers than the others.
        """
        if self._tensor_group is None:
            yield
            return
        before = generator_states(self._strategy)
        yield
        if not all(map(torch.equal, before, generator_states(self._strategy))):
            raise MisuseError(
                f"the experts {self._name!r} draw random numbers, such as for dropout, which ep does not do together "
                "with tp: apply dropout to their output, or leave tp out"
            )

    def _compute_rows(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Return the output of one expert for each row."""
        is_empty = not len(rows)
        if is_empty:
            # A row without effect: other ranks wait for the gradients of this one's parameters and tokens.  At zero a
            # norm has none.
            rows, numbers = torch.cat([rows, rows.new_ones(1, *rows.shape[1:])]), numbers.new_zeros(1)
        outputs: Tensor = self._forward(rows, numbers.unsqueeze(1), rows.new_ones(len(rows), 1))
        return outputs[:0] if is_empty else outputs


# Ranks of tensor parallelism, which have the same tokens: each sends a part of them


class _Share(torch.autograd.Function):
    """This rank's part of rows that all ranks have; the gradient is that of all rows again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.length, ctx.group = rows.shape[0], group
        return _slice_rows(rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _gather(gradient, ctx.length, ctx.group), None


class _Joined(torch.autograd.Function):
    """The rows of all ranks; each has the whole gradient of them already."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, length: int, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(rows, length, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _slice_rows(gradient, ctx.group), None, None


def _share(rows: Tensor, group: ProcessGroup) -> Tensor:
    share: Tensor = _Share.apply(rows, group)  # type: ignore[no-untyped-call]  # torch leaves it so
    return share


def _joined(rows: Tensor, length: int, group: ProcessGroup) -> Tensor:
    joined: Tensor = _Joined.apply(rows, length, group)  # type: ignore[no-untyped-call]  # torch leaves it so
    return joined


def _slice_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    size = -(-rows.shape[0] // group.size())
    return rows[group.rank() * size : (group.rank() + 1) * size].clone()


def _gather(rows: Tensor, length: int, group: ProcessGroup) -> Tensor:
    size = -(-length // group.size())
    padded = torch.cat([rows, rows.new_zeros(size - rows.shape[0], *rows.shape[1:])])
    return gather_tensors(padded, group=group).flatten(0, 1)[:length]

"""Laying out the buckets of DistributedDataParallel before the first step rather than after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.nn.parallel import DistributedDataParallel


def lay_out_buckets(model: DistributedDataParallel) -> None:
    """Run a backward pass whose gradients are all zero, by whose order torch lays out the buckets; collective.

    torch gathers gradients in buckets, and lays them out anew after the first backward pass of a job, in the order in
    which gradients came.  Sums over more than two ranks depend on the layout in their last bits, so that a job that
    goes on from a checkpoint would differ from one that never stopped.  With this pass both have the same layout, that
    of parameters from last to first, from the first step on.

    Nothing is done where torch keeps its first layout, or where such a pass would be seen: by hooks of the user on
    parameters, or in a graph that torch records.

    Args:
        model: As it was made, before communication hooks are registered.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if model.find_unused_parameters or model.static_graph or model.mixed_precision is not None:
        return
    if any(map(_has_hooks, parameters)):
        return
    sparse = {id(part.weight) for part in model.modules() if _is_sparse(part)}
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    model.reducer.prepare_for_forward()
    model.reducer.prepare_for_backward([])
    with torch.enable_grad():
        zeros = (_zero_of_row(p) if id(p) in sparse else (p * 0).sum() for p in parameters)
        nothing: Tensor = sum(zeros, torch.zeros(()))
    nothing.backward()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _zero_of_row(table: Parameter) -> Tensor:
    """Return zero, whose gradient is sparse, as torch expects it of a table that is declared so."""
    row = torch.zeros(1, dtype=torch.int64, device=table.device)
    return (nn.functional.embedding(row, table, sparse=True) * 0).sum()


def _has_hooks(parameter: Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)  # noqa: SLF001 - torch has no public name


def _is_sparse(module: nn.Module) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse

"""Adapter of DistributedDataParallel's reducer, and of torch's private names: the one file that touches them.

They are those of torch 2.9 and 2.13, which are tested, and are the same in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from dstrat.parallel.separate_modules import SeparateModules

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.nn.parallel import DistributedDataParallel


def release_reducer(model: DistributedDataParallel) -> None:
    """Free the reducer of a model, which cannot be trained any more.

    It must be freed before the process group, also if a traceback keeps the model alive.  If the reducer held the last
    reference to the group, torch would wait for the group's threads while it holds the GIL, for which they may wait.
    And peers notice the failure of this rank only when its group closes.
    """
    for name in ("logger", "reducer", "process_group"):  # the logger refers to the reducer
        model.__dict__.pop(name, None)


def prepare_for_backward(model: DistributedDataParallel, loss: Tensor) -> None:
    """Let the reducer expect a backward pass from a loss, as the end of the wrapper's forward does."""
    # With the loss, torch searches its graph for parameters that get no gradient; a static graph needs no search.
    searches = model.find_unused_parameters and not model.static_graph
    model.reducer.prepare_for_backward([loss] if searches else [])


def check_reduction_finished(model: DistributedDataParallel) -> None:
    """Raise torch's error if a backward pass has reached some parameters of a model, and not all."""
    # torch documents this private method for the use after a backward pass.  By itself it checks in the next step only,
    # when gradients that were not averaged have been applied.
    model._check_reducer_finalized()


# Parameters and buffers that DistributedDataParallel ignores


_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module with their names; ``_set_params_and_buffers_to_ignore_for_model`` of torch sets it, too."""


def ignored_names(module: Module) -> frozenset[str]:
    """Return the names of parameters and buffers that DistributedDataParallel does not synchronize."""
    if isinstance(module, SeparateModules):  # each of them has a wrapper
        return frozenset(f"{child}.{name}" for child, one in module.named_children() for name in ignored_names(one))
    return frozenset(getattr(module, _IGNORED, ()))


def pass_ignored_names(module: Module, outer: Module) -> None:
    """Copy the names that the user excluded from synchronization to an outer module.

    Args:
        module: The user's module.
        outer: The module that is wrapped instead, which has the user's as ``module``.
    """
    if names := ignored_names(module):
        setattr(outer, _IGNORED, [f"module.{name}" for name in names])


# Bucket layout before the first step


def lay_out_buckets(model: DistributedDataParallel) -> None:
    """Run a backward pass with zero gradients, so that torch rebuilds its buckets now; collective.

    torch reduces gradients in buckets, and rebuilds these after the first backward pass of a job, in the order in
    which gradients became ready.  Sums over more than two ranks depend on the buckets in their last bits, so a resumed
    job would differ from one that never stopped.  With this pass both have the same buckets from the first step on, in
    the reversed order of parameters.

    Args:
        model: The new wrapper, before communication hooks are registered.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # With a search torch never rebuilds, and this pass would be the graph that a static one keeps.  Mixed precision
    # replaces the data of parameters in the wrapper's forward, which does not run here.
    if model.find_unused_parameters or model.static_graph or model.mixed_precision is not None:
        return
    # The user's hooks on parameters would see the zeros.
    if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters):
        return
    sparse = {id(layer.weight) for layer in model.modules() if _is_sparse(layer)}
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    model.reducer.prepare_for_forward()
    model.reducer.prepare_for_backward([])
    with torch.enable_grad():
        zeros = (_zero_of_row(p) if id(p) in sparse else _zero_of(p) for p in parameters)
        zero: Tensor = sum(zeros, torch.zeros(()))
    zero.backward()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _zero_of(parameter: Parameter) -> Tensor:
    zero = (parameter * 0).sum()
    return zero.real if zero.is_complex() else zero  # a backward pass begins with a real number


def _zero_of_row(table: Parameter) -> Tensor:
    """Return zero with a sparse gradient for an embedding table, as torch expects it for ``sparse=True``."""
    row = torch.zeros(1, dtype=torch.int64, device=table.device)
    return (nn.functional.embedding(row, table, sparse=True) * 0).sum()


def _is_sparse(module: nn.Module) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse

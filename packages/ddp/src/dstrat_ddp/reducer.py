"""Adapter to DistributedDataParallel's reducer: end, bucket layout, one for each of several modules."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dstrat.parallel.step_module import StepModule
from dstrat_ddp.step_module import ExplainedUnusedParameters, pass_ignored_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module, Parameter

    from dstrat.parallel.separate_modules import SeparateModules


def release_reducer(model: DistributedDataParallel) -> None:
    """Free what averages the gradients of a model, which cannot be used any more.

    It goes before the process group, also where a traceback keeps the model alive.  Were the reducer the last to let
    the group go, torch would wait for the group's threads while it holds Python's lock, for which they may wait.
    The other ranks notice that this one has failed only when nothing holds the group.
    """
    for name in ("logger", "reducer", "process_group"):  # the logger refers to the reducer
        model.__dict__.pop(name, None)


# Laying out the buckets of DistributedDataParallel before the first step rather than after it.


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


# Several modules, each in a DistributedDataParallel of its own, of which a step runs those that it uses.


class SeparateWrappers:
    """The wrappers of several modules.

    Args:
        modules: The modules; those without trainable parameters need no wrapper.
        wrap: Returns the wrapper of one.
    """

    def __init__(self, modules: SeparateModules, wrap: Callable[[Module], Any]) -> None:
        self._modules = modules
        self._wrappers = {
            id(module): wrap(_as_steps(module))
            for module in modules.children()
            if any(parameter.requires_grad for parameter in module.parameters())
        }
        self._parallel = [one for one in self._wrappers.values() if isinstance(one, DistributedDataParallel)]
        for wrapper in self._parallel:
            lay_out_buckets(wrapper)
        self._explained = [ExplainedUnusedParameters(wrapper) for wrapper in self._parallel]

    def __call__(self, step: Callable[..., Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a step, which calls a function, in the wrappers of the modules that the function uses."""
        run: Callable[..., Any] = partial(step, function)
        for module in self._modules.used_by(function):
            if id(module) in self._wrappers:
                run = partial(self._wrappers[id(module)], run)
        return run(*args, **kwargs)

    def explained(self) -> AbstractContextManager[Any]:
        """Return a context that names parameters without a gradient, where torch gives up on them."""
        stack = ExitStack()
        for one in self._explained:
            stack.enter_context(one)
        return stack

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients accumulate without being averaged."""
        stack = ExitStack()
        for wrapper in self._parallel:
            stack.enter_context(wrapper.no_sync())
        return stack

    def check_finished(self) -> None:
        """Raise the error of a backward pass that has reached some parameters of a module, and not all."""
        for wrapper in self._parallel:
            wrapper._check_reducer_finalized()  # noqa: SLF001 - torch documents it for this place

    def release(self) -> None:
        """Free what averages gradients."""
        for wrapper in self._parallel:
            release_reducer(wrapper)


def _as_steps(module: Module) -> StepModule:
    steps = StepModule(module)
    pass_ignored_names(module, steps)
    return steps

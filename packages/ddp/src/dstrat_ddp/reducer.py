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
    """Free the reducer of a model, which cannot be trained any more.

    It must be freed before the process group, also if a traceback keeps the model alive.  If the reducer held the last
    reference to the group, torch would wait for the group's threads while it holds the GIL, for which they may wait.
    And peers notice the failure of this rank only when its group closes.
    """
    for name in ("logger", "reducer", "process_group"):  # the logger refers to the reducer
        model.__dict__.pop(name, None)


# Bucket layout before the first step


def lay_out_buckets(model: DistributedDataParallel) -> None:
    """Run a backward pass with zero gradients, so that torch rebuilds its buckets now; collective.

    torch reduces gradients in buckets, and rebuilds these after the first backward pass of a job, in the order in
    which gradients became ready.  Sums over more than two ranks depend on the buckets in their last bits, so a resumed
    job would differ from one that never stopped.  With this pass both have the same buckets from the first step on, in
    the reversed order of parameters.

    It does nothing if torch never rebuilds, or if the pass would be visible: to the user's hooks on parameters, or in
    a graph that torch records.

    Args:
        model: The new wrapper, before communication hooks are registered.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if model.find_unused_parameters or model.static_graph or model.mixed_precision is not None:
        return
    if any(map(_has_hooks, parameters)):
        return
    sparse = {id(layer.weight) for layer in model.modules() if _is_sparse(layer)}
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    model.reducer.prepare_for_forward()
    model.reducer.prepare_for_backward([])
    with torch.enable_grad():
        zeros = (_zero_of_row(p) if id(p) in sparse else (p * 0).sum() for p in parameters)
        zero: Tensor = sum(zeros, torch.zeros(()))
    zero.backward()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _zero_of_row(table: Parameter) -> Tensor:
    """Return zero with a sparse gradient for an embedding table, as torch expects it for ``sparse=True``."""
    row = torch.zeros(1, dtype=torch.int64, device=table.device)
    return (nn.functional.embedding(row, table, sparse=True) * 0).sum()


def _has_hooks(parameter: Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)  # noqa: SLF001 - torch has no public name


def _is_sparse(module: nn.Module) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse


# One DistributedDataParallel for each of several modules


class SeparateWrappers:
    """The wrappers of several modules.

    Args:
        modules: The modules; those without trainable parameters need no wrapper.
        wrap: Returns the wrapper of a module.
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
        """Return a context that names parameters without a gradient in torch's error about them."""
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
        """Raise torch's error if a backward pass has reached some parameters of a module, and not all."""
        for wrapper in self._parallel:
            wrapper._check_reducer_finalized()  # noqa: SLF001 - torch documents it for this use

    def release(self) -> None:
        """Free the reducers."""
        for wrapper in self._parallel:
            release_reducer(wrapper)


def _as_steps(module: Module) -> StepModule:
    steps = StepModule(module)
    pass_ignored_names(module, steps)
    return steps

"""Several modules, each in a DistributedDataParallel of its own, of which a step runs those that it uses."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from dstrat_ddp.ending import release_reducer
from dstrat_ddp.layout import lay_out_buckets
from dstrat_ddp.step_module import pass_ignored_names
from dstrat_ddp.unused_parameters import ExplainedUnusedParameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat.parallel.separate_modules import SeparateModules


class _Within(Module):
    """A module whose forward calls a function, so that a wrapper does its work around that."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        pass_ignored_names(module, self)

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


class SeparateWrappers:
    """The wrappers of several modules.

    Args:
        modules: The modules; those without trainable parameters need no wrapper.
        wrap: Returns the wrapper of one.
    """

    def __init__(self, modules: SeparateModules, wrap: Callable[[Module], Any]) -> None:
        self._modules = modules
        self._wrappers = {
            id(module): wrap(_Within(module))
            for module in modules.children()
            if any(parameter.requires_grad for parameter in module.parameters())
        }
        self._parallel = [one for one in self._wrappers.values() if isinstance(one, DistributedDataParallel)]
        for wrapper in self._parallel:
            lay_out_buckets(wrapper)
        self._explained = [ExplainedUnusedParameters(wrapper) for wrapper in self._parallel]

    def __call__(self, step: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function in the wrappers of the modules that it uses."""
        run: Callable[..., Any] = partial(getattr(self._modules, step), function)
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

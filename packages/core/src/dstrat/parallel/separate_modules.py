"""Several modules of one strategy, of which a step may use only some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Mapping


class SeparateModules(Module):
    """Modules that take turns, such as the generator and the discriminator of a GAN.

    For a strategy it is one module, with the names of all in its state.  If a wrapper waits for all gradients of the
    wrapped module, as DistributedDataParallel does, the strategy wraps each of these modules separately.

    Args:
        modules: Modules by name.

    Raises:
        MisuseError: A name cannot be that of a submodule, or a value is no module.
    """

    def __init__(self, modules: Mapping[str, Module]) -> None:
        super().__init__()
        self._used: dict[int, tuple[Any, tuple[Module, ...]]] = {}
        try:
            for name, module in modules.items():
                self.add_module(name, module)
        except (TypeError, KeyError) as error:
            raise MisuseError(
                f"{name!r}: {module!r} is not a torch.nn.Module under a name of its own: {error}"
            ) from error

    def used_by(self, function: Any) -> tuple[Module, ...]:
        """Return the modules that a function uses: one for a module and its methods, all for any other function."""
        owner = function if isinstance(function, Module) else getattr(function, "__self__", None)
        if not isinstance(owner, Module):
            return tuple(self.children())
        if id(owner) not in self._used:  # cached, because the search visits all submodules
            used = tuple(child for child in self.children() if any(submodule is owner for submodule in child.modules()))
            self._used[id(owner)] = owner, used or tuple(self.children())
        return self._used[id(owner)][1]

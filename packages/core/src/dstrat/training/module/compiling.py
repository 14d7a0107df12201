"""Compilation of a module in place, with unchanged names of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dstrat.errors import MisuseError
from dstrat.interfaces.state_dict import canonical_name, with_names_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# torch's private names of compilation, for torch 2.9 to 2.13, are in this module: the wrapper's attribute for the
# module, which is in the names of weights too; and below, the compiled and the plain implementation of module(...).
_WRAPPED = "_orig_mod"


class CompilingMethods(nn.Module):
    """``compile`` of a module, and state dicts with the names of the uncompiled module."""

    _compile_options: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's forward and its layers in place, with the arguments of ``torch.compile``.

        A step then runs compiled code when it calls the module itself, ``self(x)``, or one of its layers,
        ``self.encoder(x)``.  The steps themselves are not compiled, because they log.

        Raises:
            MisuseError: The module has neither a forward nor layers.
        """
        targets = [*([self] if _has_forward(self) else []), *_layers(self)]
        if not targets:
            raise MisuseError(
                f"{type(self).__name__} has no forward and no layers yet, and so nothing to compile: call compile() "
                "after they are made, at the end of __init__ or of configure_model"
            )
        for target in targets:
            # As nn.Module.compile does, whose compiled function silently skips torch's own layers (see _calling).
            target._compiled_call_impl = torch.compile(_calling(target), *args, **kwargs)  # noqa: SLF001
        self._compile_options = (args, kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves its types out
        if self._compile_options is not None:  # torch leaves compiled code out of pickles and copies
            args, kwargs = self._compile_options
            self.compile(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the weights by the names of the uncompiled module, also for layers wrapped by ``torch.compile``."""
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        if any(_WRAPPED in name for name in state):
            metadata = getattr(state, "_metadata", {})  # versions of layers by name, which load_state_dict reads
            for names in (state, metadata):
                plain = {_plain_after(prefix, name): value for name, value in names.items()}
                names.clear()  # in place: the caller, a parent module too, keeps this dict
                names.update(plain)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights by the names of the uncompiled module, or by those of wrapped layers."""
        compiled_names = [name for name, _ in self.named_modules() if _WRAPPED in name]
        if compiled_names or any(_WRAPPED in name for name in state_dict):
            state_dict = with_names_of(super().state_dict(), state_dict)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def wrapped_module(wrapper: Any) -> Any:
    """Return the module in a wrapper of ``torch.compile``; None for any other object."""
    return getattr(wrapper, _WRAPPED, None)


def _plain_after(prefix: str, name: str) -> str:
    return prefix + canonical_name(name[len(prefix) :]) if name.startswith(prefix) else name


def _calling(module: nn.Module) -> Callable[..., Any]:
    """Return a function that calls a module, for ``torch.compile``."""

    # torch skips the code of its own files, such as Module._call_impl, at the top of a compiled function.
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # noqa: SLF001 - module(...) would call the compiled function

    return call


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that steps may call: the children, and the items of lists and dicts of modules.

    It skips layers without parameters, such as metrics and losses, and those wrapped by ``torch.compile``.
    """
    for child in module.children():
        if not _has_forward(child):
            yield from _layers(child)
        elif next(child.parameters(), None) is not None and not hasattr(child, _WRAPPED):
            yield child

"""Hooks of callbacks and module, bound once before a run, so that unused ones cost nothing."""

from __future__ import annotations

import inspect
import logging
from functools import partial, partialmethod
from types import FunctionType
from typing import TYPE_CHECKING, Any

from dstrat.errors import MisuseError
from dstrat.plugins.settings import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dstrat.training.callbacks.callback import Callback
    from dstrat.training.module.train_module import TrainModule

_log = logging.getLogger(__name__)


def overrides(owner: object, name: str, base: type) -> bool:
    """Return whether an object, or its class, overrides a hook of a base class; a hook that is None does not."""
    attributes = getattr(owner, "__dict__", {})  # users assign hooks to instances too
    if name in attributes:
        return attributes[name] is not None
    method = getattr(type(owner), name, None)
    return method is not None and method is not getattr(base, name, None)


def hook_of(owner: object, name: str, base: type) -> Callable[..., Any]:
    """Return a hook of an object; the base class's if the object's is None."""
    method: Callable[..., Any] | None = getattr(owner, name)
    return partial(getattr(base, name), owner) if method is None else method


class HookRunner:
    """The overridden hooks of callbacks and module, by name.

    Callbacks come first, in their order, then the module.  Callbacks that save checkpoints (``runs_last``) follow the
    module, since they read the values that it logs.

    Args:
        trainer: The first argument of callbacks' hooks.
        module: The user's module.
        callbacks: The callbacks whose hooks are called.
        profiled: Returns a function that the profiler measures by a name.
    """

    def __init__(
        self,
        trainer: object,
        module: TrainModule,
        callbacks: Sequence[Callback],
        profiled: Callable[[str, Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        from dstrat.training.callbacks.callback import Callback
        from dstrat.training.module.train_module import TrainModule  # only runs need it

        self._trainer, self._module, self._measured = trainer, module, profiled
        self._callback_base, self._module_base = Callback, TrainModule
        self._inserted: dict[str, tuple[Callable[..., Any], ...]] = {}
        self.replace_callbacks(callbacks)

    def replace_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Call the hooks of other callbacks from now on."""
        self._early = [callback for callback in callbacks if not callback.runs_last]
        self._late = [callback for callback in callbacks if callback.runs_last]
        self._hooks: dict[str, tuple[Callable[..., Any], ...]] = {}

    def of(self, name: str) -> tuple[Callable[..., Any], ...]:
        """Return the functions of a hook, in the order of their calls."""
        if name not in self._hooks:
            self._hooks[name] = (*self._inserted.get(name, ()), *self.early(name), *self.late(name))
        return self._hooks[name]

    def early(self, name: str) -> tuple[Callable[..., Any], ...]:
        """Return the functions of a hook, without those of callbacks that run last."""
        if not overrides(self._module, name, self._module_base):
            return tuple(self._of_callbacks(self._early, name))
        module_hook = self._profiled(self._module, name, getattr(self._module, name))
        return (*self._of_callbacks(self._early, name), module_hook)

    def late(self, name: str) -> tuple[Callable[..., Any], ...]:
        """Return the functions of a hook of the callbacks that run last."""
        return tuple(self._of_callbacks(self._late, name))

    def answering(self, name: str) -> list[str]:
        """Return the names of classes that override a hook with a function that may return a value."""
        owners = ((self._module, self._module_base), *((c, self._callback_base) for c in (*self._early, *self._late)))
        return [
            type(owner).__name__
            for owner, base in owners
            if overrides(owner, name, base)
            # A str where the user's file has "from __future__ import annotations".
            and getattr(getattr(owner, name), "__annotations__", {}).get("return", Any) not in (None, "None")
        ]

    def insert(self, name: str, hook: Callable[..., Any]) -> None:
        """Insert a function before those of callbacks and module."""
        self._inserted[name] = (hook, *self._inserted.get(name, ()))
        self._hooks.pop(name, None)

    def call(self, name: str, *args: Any) -> None:
        """Call a hook."""
        for hook in self.of(name):
            hook(*args)

    def call_callbacks(self, name: str, *args: Any) -> None:
        """Call a hook of the callbacks, not of the module."""
        for hook in self.of_callbacks(name):
            hook(*args)

    def of_callbacks(self, name: str) -> list[Callable[..., Any]]:
        """Return the functions of a hook of the callbacks, without the module's."""
        return self._of_callbacks([*self._early, *self._late], name)

    def _of_callbacks(self, callbacks: Sequence[Callback], name: str) -> list[Callable[..., Any]]:
        return [
            self._profiled(callback, name, partial(getattr(callback, name), self._trainer, self._module))
            for callback in callbacks
            if overrides(callback, name, self._callback_base)
        ]

    def _profiled(self, owner: object, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        return self._measured(f"{type(owner).__name__}.{name}", hook)


# Hooks that Lightning has removed, which would silently never be called


_WITHOUT_OUTPUTS = "which gets no outputs: append them to a list of the module in the step"

_ANYWHERE = {
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_epoch_start": "on_train_epoch_start, on_validation_epoch_start or on_test_epoch_start",
    "on_epoch_end": "on_train_epoch_end, on_validation_epoch_end or on_test_epoch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_hpc_save": "on_save_checkpoint",
    "on_hpc_load": "on_load_checkpoint",
}
_OF_MODULES = {
    **_ANYWHERE,
    "training_epoch_end": f"on_train_epoch_end, {_WITHOUT_OUTPUTS}",
    "validation_epoch_end": f"on_validation_epoch_end, {_WITHOUT_OUTPUTS}",
    "test_epoch_end": f"on_test_epoch_end, {_WITHOUT_OUTPUTS}",
    "training_step_end": "the end of training_step",
    "validation_step_end": "the end of validation_step",
    "test_step_end": "the end of test_step",
    "configure_sharded_model": "configure_model",
    "get_progress_bar_dict": "self.log(name, value, prog_bar=True) in a step",
    "on_post_move_to_device": "configure_model or on_fit_start",
    "tbptt_split_batch": "training_step, with automatic_optimization = False",
    **{f"on_{source}_dataloader": f"{source}_dataloader" for source in ("train", "val", "test", "predict")},
}
_OF_CALLBACKS = {
    **_ANYWHERE,
    "on_init_start": "__init__ or setup",
    "on_init_end": "__init__ or setup",
    "on_before_accelerator_backend_setup": "setup",
    "on_configure_sharded_model": "setup or on_fit_start",
    "on_keyboard_interrupt": "on_exception",
}

_COMMON_NAMES = {"on_epoch_start", "on_epoch_end"}
"""Names that other libraries' methods have too; these take other arguments than the removed hooks."""


def check_no_removed_hooks(owner: object, *, is_callback: bool = False) -> None:
    """Check that an object has no method with the name of a removed hook.

    Args:
        owner: A module, a data module or a callback.
        is_callback: Whether the owner is a callback.

    Raises:
        MisuseError: The owner has one; the message names the replacement.
    """
    for name, instead in (_OF_CALLBACKS if is_callback else _OF_MODULES).items():
        method = getattr(owner, name, None)
        if callable(method) and (name not in _COMMON_NAMES or _takes(method, 2 if is_callback else 0)):
            raise MisuseError(
                f"{type(owner).__name__}.{name} is not called any more: do its work in {instead}, or give it another "
                "name if it is no hook"
            )


def _takes(method: Callable[..., Any], count: int) -> bool:
    """Return whether a method can be called with a number of positional arguments."""
    try:
        inspect.signature(method).bind(*range(count))
    except TypeError:
        return False
    return True


# Misspelled hooks, which would silently never be called either


_HOOKS = ("on_", "configure_")
_LIKELY = 0.85  # a user's own method may be similar to a hook


_METHODS = (FunctionType, staticmethod, classmethod, partialmethod)


def methods_beside(owner: object, base: type) -> list[str]:
    """Return the public methods of an object that its base class does not have."""
    kind = type(owner)
    return [
        name
        for name in dir(kind)
        # Static, since a descriptor of the user's may raise if it is read from the class.
        if name[0] != "_" and not hasattr(base, name) and isinstance(inspect.getattr_static(kind, name, None), _METHODS)
    ]


def warn_of_misspelled_hooks(owner: object, base: type) -> None:
    """Log a warning for each method whose name is almost that of a hook that the object lacks.

    Args:
        owner: A module, a data module or a callback.
        base: The class with the hooks.
    """
    hooks = [name for name in dir(base) if name.startswith(_HOOKS) and not overrides(owner, name, base)]
    for name in methods_beside(owner, base):
        if name.startswith(_HOOKS) and (near := nearest(name, hooks, count=1, least=_LIKELY)):
            _log.warning(
                "%s.%s is no hook, and is never called by the Trainer: did you mean %s? Give it another name if not",
                type(owner).__name__,
                name,
                near[0],
            )

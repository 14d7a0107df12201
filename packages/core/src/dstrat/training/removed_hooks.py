"""Hooks that older trainers called and this one does not: a class that still has one is told, as it would be silent."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable

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
"""What libraries call methods of their own, which take other arguments than the hooks did."""


def check_no_removed_hooks(owner: object, *, is_callback: bool = False) -> None:
    """Check that an object has no method that is named as a hook of old, which nobody would call.

    Args:
        owner: A module, a data module or a callback.
        is_callback: Whether it is a callback.

    Raises:
        MisuseError: It has one; the message says what to write instead.
    """
    for name, instead in (_OF_CALLBACKS if is_callback else _OF_MODULES).items():
        method = getattr(owner, name, None)
        if callable(method) and (name not in _COMMON_NAMES or _takes(method, 2 if is_callback else 0)):
            raise MisuseError(
                f"{type(owner).__name__}.{name} is not called any more: do its work in {instead}, or give it another "
                "name if it is no hook"
            )


def _takes(method: Callable[..., Any], count: int) -> bool:
    """Return whether a method can be called with so many arguments."""
    try:
        inspect.signature(method).bind(*range(count))
    except TypeError:
        return False
    return True

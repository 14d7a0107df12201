"""Classes of dstrat and of Lightning whose every hook is recorded when it is called."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def _words(*lines: str) -> list[str]:
    return [word for line in lines for word in line.split()]


DATA_HOOKS = _words(
    "prepare_data setup teardown train_dataloader val_dataloader test_dataloader predict_dataloader",
    "on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer",
)

SHARED_HOOKS = [
    *_words(
        "on_fit_start on_fit_end on_train_start on_train_end on_train_epoch_start on_train_epoch_end",
        "on_train_batch_start on_train_batch_end on_before_zero_grad on_before_backward on_after_backward",
        "on_before_optimizer_step on_save_checkpoint on_load_checkpoint",
    ),
    *(
        f"on_{stage}_{hook}"
        for stage in ("validation", "test", "predict")
        for hook in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
    ),
]

HOOKS = {
    "module": [
        *DATA_HOOKS,
        *SHARED_HOOKS,
        *_words(
            "configure_callbacks configure_model configure_optimizers configure_gradient_clipping",
            "training_step validation_step test_step predict_step",
            "backward optimizer_step optimizer_zero_grad lr_scheduler_step",
            "on_validation_model_eval on_validation_model_train on_validation_model_zero_grad",
            "on_test_model_eval on_test_model_train on_predict_model_eval on_predict_model_train",
        ),
    ],
    "data": [*DATA_HOOKS, "state_dict", "load_state_dict", "on_exception"],
    "callback": [
        *SHARED_HOOKS,
        *_words("setup teardown on_exception on_sanity_check_start on_sanity_check_end state_dict load_state_dict"),
    ],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """Classes of one of the two, and what was called.

    Attributes:
        name: dstrat or lightning.
        trainer: Its Trainer.
        module: Its module's base class.
        data: Its data module's base class.
        callback: Its callback's base class.
        checkpoint: Its callback that saves checkpoints.
        calls: The hooks that were called, in order.
    """

    name: str
    trainer: type
    module: type
    data: type
    callback: type
    checkpoint: type
    calls: list[str] = field(default_factory=list)

    def recorded(self, kind: str, content: type, **attributes: Any) -> Any:
        """Return an object of this framework that records its hooks.

        Args:
            kind: module, data or callback.
            content: A class that implements some of the hooks.
            **attributes: Of the object's class.
        """
        base = type(content.__name__, (content, getattr(self, kind)), attributes)
        return type(
            content.__name__, (base,), {name: _recording(kind, name, base, self.calls) for name in HOOKS[kind]}
        )()


def recorded_frameworks() -> Iterator[Framework]:
    """Return dstrat and Lightning."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint as LightningCheckpoint

    from dstrat import Callback, DataModule, ModelCheckpoint, Trainer, TrainModule

    yield Framework(
        name="dstrat",
        trainer=Trainer,
        module=TrainModule,
        data=DataModule,
        callback=Callback,
        checkpoint=ModelCheckpoint,
    )
    yield Framework(
        name="lightning",
        trainer=pl.Trainer,
        module=pl.LightningModule,
        data=pl.LightningDataModule,
        callback=pl.Callback,
        checkpoint=LightningCheckpoint,
    )


def _recording(kind: str, name: str, base: type, calls: list[str]) -> Callable[..., Any]:
    """Return a method that notes that it was called, and does what it does in the base class (which may lack it)."""
    inner = getattr(base, name, None)

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        told = args[2:] if kind == "callback" and name not in ("state_dict", "load_state_dict") else args
        calls.append(f"{kind}.{name}({', '.join(_plain((*told, *kwargs.values())))})")
        return None if inner is None else inner(self, *args, **kwargs)

    hook.__name__ = name
    if inner is not None:
        # Lightning looks at signatures.  Not functools.wraps: it would take the hook for one that is not overridden.
        hook.__signature__ = inspect.signature(inner)  # type: ignore[attr-defined]  # read by inspect
    return hook


def _plain(args: Iterable[Any]) -> list[str]:
    """Return the arguments that are the same in both, such as the index of a batch."""
    return [str(getattr(arg, "value", arg)) for arg in args if isinstance(arg, int | str)]

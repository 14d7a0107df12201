"""Trial runs: short runs of a copy of the module, which leave no trace."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.data.combined_loader import leaves
from dstrat.data.random_state import RandomState
from dstrat.data.resume import generator_states, set_generator_states
from dstrat.errors import MisuseError
from dstrat.interfaces.precision import Precision
from dstrat.training.callbacks.callback import Callback
from dstrat.training.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from dstrat.interfaces.optimizers import Optimization
    from dstrat.training.loops.sources import DataSources
    from dstrat.training.module.train_module import TrainModule

_SHARED_SETTINGS = (
    "accumulate_grad_batches",
    "benchmark",
    "default_root_dir",
    "detect_anomaly",
    "deterministic",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "inference_mode",
    "overfit_batches",
    "sync_batchnorm",
    "use_distributed_sampler",
)
_QUIET = {
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "logger": False,
    "num_sanity_val_steps": 0,
}

_log = logging.getLogger(__name__)


class TrialTrainer(Trainer):
    """A Trainer that runs a module as another Trainer would, without what that shows and writes.

    Learning-rate schedulers are left out, as a trial ends before they matter.

    Args:
        trainer: Whose strategy, devices, precision and settings are used.
        callback: Watches the trial.
        **settings: Arguments of :class:`Trainer` that differ.
    """

    def __init__(self, trainer: Trainer, callback: Callback, **settings: Any) -> None:
        request = trainer.request
        components = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
        components["precision"] = _copy_precision(request.precision)
        components["plugins"] = [_copy_precision(plugin) for plugin in request.plugins]
        shared = {name: getattr(trainer, name) for name in _SHARED_SETTINGS}
        super().__init__(**components | shared | _QUIET | settings, callbacks=[callback, _DeviceRandomState()])

    @override
    def configure_optimizers(self) -> Optimization:
        return dataclasses.replace(super().configure_optimizers(), schedulers=())


def _copy_precision(plugin: Any) -> Any:
    """Return a copy of a precision, which may have a state such as a loss scale; anything else as it is."""
    return copy.deepcopy(plugin) if isinstance(plugin, Precision) else plugin


class _DeviceRandomState(Callback):
    """The random state of the device, which is put back after a run; in each process."""

    def __init__(self) -> None:
        self._state: Tensor | None = None

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._state = trainer.strategy.accelerator.get_random_state(trainer.strategy.root_device)

    @override
    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if self._state is not None:
            trainer.strategy.accelerator.set_random_state(trainer.strategy.root_device, self._state)
            self._state = None


@contextlib.contextmanager
def restored_random_state(loaders: Any) -> Iterator[None]:
    """Let this process and the loaders draw the same random numbers afterwards as if nothing had been drawn."""
    random = RandomState.capture()
    generators = [(loader, generator_states(loader)) for loader in leaves(loaders)]
    try:
        yield
    finally:
        random.restore()
        for loader, states in generators:
            set_generator_states(loader, states)
            if getattr(loader, "_iterator", None) is not None:  # persistent workers, which have drawn a seed
                loader._iterator = None  # noqa: SLF001 - torch has no public name for it


def copy_module(module: TrainModule, caller: str) -> TrainModule:
    """Return a deep copy of a module without its Trainer.

    Args:
        module: What to copy.
        caller: Needs the copy, for the message.

    Raises:
        MisuseError: It cannot be copied.
    """
    attached = module.__dict__.get("_trainer")
    try:
        return copy.deepcopy(module, {id(attached): None})
    except Exception as error:
        raise MisuseError(
            f"{caller} tries a copy of {type(module).__name__}, which cannot be copied "
            f"({type(error).__name__}: {error}): let copy.deepcopy(module) work, or choose the value by hand"
        ) from error


def attribute_holders(name: str, *owners: Any) -> list[Any]:
    """Return the owners and hyperparameters that have an attribute of a name."""
    candidates = [candidate for owner in owners if owner is not None for candidate in (owner, owner.hparams)]
    return [candidate for candidate in candidates if hasattr(candidate, name)]


def set_attribute(name: str, value: Any, *owners: Any) -> None:
    """Set an attribute wherever :func:`attribute_holders` finds it."""
    for holder in attribute_holders(name, *owners):
        setattr(holder, name, value)


def run_trial(trainer: TrialTrainer, stage: str, module: TrainModule, sources: DataSources) -> None:
    """Run a stage of a trial over a run's data.

    Args:
        trainer: Runs it.
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        module: What is tried.
        sources: The data of the run that the trial is for.
    """
    arguments: Mapping[str, Any] = sources.arguments(stage)
    getattr(trainer, stage)(module, **arguments, **({"verbose": False} if stage in ("validate", "test") else {}))

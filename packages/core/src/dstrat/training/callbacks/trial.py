"""Trial runs: short runs of a copy of the module, without side effects."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.data.combined_loader import leaves
from dstrat.data.random_state import RandomState, drop_workers
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

# Settings that change the computation; not limits and intervals, which a trial sets by itself.
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
    """A Trainer with the settings of another Trainer, but without its output, files and learning-rate schedulers.

    Args:
        trainer: The Trainer with the strategy, devices, precision and settings.
        callback: Observes the trial.
        **settings: Arguments of :class:`Trainer` that differ.
    """

    def __init__(self, trainer: Trainer, callback: Callback, **settings: Any) -> None:
        request = trainer.request
        components = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
        components["precision"] = _copy_precision(request.precision)
        components["plugins"] = [_copy_precision(plugin) for plugin in request.plugins]
        # Both need checkpoints, which a trial does not save: it starts anew with the fit.
        components |= {"elastic": False, "preemption_deadline": None}
        shared = {name: getattr(trainer, name) for name in _SHARED_SETTINGS}
        super().__init__(**components | shared | _QUIET | settings, callbacks=[callback, _DeviceRandomState()])

    @override
    def configure_optimizers(self) -> Optimization:
        # A trial sets the learning rate itself, or ends before a scheduler matters.
        return dataclasses.replace(super().configure_optimizers(), schedulers=())


def _copy_precision(plugin: Any) -> Any:
    """Return a copy of a precision, which may have state such as a loss scale; anything else itself."""
    return copy.deepcopy(plugin) if isinstance(plugin, Precision) else plugin


class _DeviceRandomState(Callback):
    """Save the random state of the device before a run, and restore it afterwards, in each process."""

    def __init__(self) -> None:
        self._state: Tensor | None = None

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._state = trainer.strategy.get_random_state()

    @override
    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if self._state is not None:
            trainer.strategy.set_random_state(self._state)
            self._state = None


@contextlib.contextmanager
def restored_random_state(loaders: Any) -> Iterator[None]:
    """Restore the random state of this process and of the loaders at the end of a ``with`` block."""
    random = RandomState.capture()
    generators = [(loader, generator_states(loader)) for loader in leaves(loaders)]
    try:
        yield
    finally:
        random.restore()
        for loader, states in generators:
            set_generator_states(loader, states)
            drop_workers(loader)  # their seed was drawn in the block


def copy_module(module: TrainModule, caller: str) -> TrainModule:
    """Return a deep copy of a module without its Trainer.

    Args:
        module: The module to copy.
        caller: Name of the feature that needs the copy, for the message.

    Raises:
        MisuseError: The module cannot be copied.
    """
    attached = module.__dict__.get("_trainer")
    try:
        return copy.deepcopy(module, {id(attached): None})  # the memo replaces the Trainer by None
    except Exception as error:
        raise MisuseError(
            f"{caller} tries a copy of {type(module).__name__}, which cannot be copied "
            f"({type(error).__name__}: {error}): let copy.deepcopy(module) work, or choose the value by hand"
        ) from error


def attribute_holders(name: str, *owners: Any) -> list[Any]:
    """Return the owners and their ``hparams`` that have an attribute."""
    candidates = [candidate for owner in owners if owner is not None for candidate in (owner, owner.hparams)]
    return [candidate for candidate in candidates if hasattr(candidate, name)]


def set_attribute(name: str, value: Any, *owners: Any) -> None:
    """Set an attribute of all its :func:`attribute_holders`."""
    for holder in attribute_holders(name, *owners):
        setattr(holder, name, value)


def run_trial(trainer: TrialTrainer, stage: str, module: TrainModule, sources: DataSources) -> None:
    """Run a stage of a trial with the data of a run.

    Args:
        trainer: The Trainer of the trial.
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        module: The copy of the module.
        sources: The sources of the run's loaders.
    """
    arguments: Mapping[str, Any] = sources.arguments(stage)
    getattr(trainer, stage)(module, **arguments, **({"verbose": False} if stage in ("validate", "test") else {}))

"""Lightning's callbacks as dstrat's: its users' run as they are, its built-in ones are translated."""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dstrat import Callback
from dstrat.errors import MisuseError
from dstrat_lightning.conversion import is_of_lightning
from dstrat_lightning.internals import constructor_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_log = logging.getLogger(__name__)

_HOOKS = [
    name
    for name in vars(Callback)
    if (name.startswith("on_") or name in ("setup", "teardown"))
    and name not in ("on_before_fit", "on_configure_optimizers")  # dstrat's, which Lightning does not have
]
_LIBRARIES = ("lightning", "pytorch_lightning")

_translated: WeakKeyDictionary[Callback, Any] = WeakKeyDictionary()
"""The callbacks of Lightning, by those of dstrat that run in their place; empty in a started process."""


def adapt_callback(callback: Any) -> Callback:
    """Return a callback of Lightning's, or one that derives from its class, as a Callback.

    Raises:
        MisuseError: It changes how one of Lightning's own works that is translated.
    """
    for base in type(callback).__mro__:
        for name, translation in _TRANSLATIONS.items():
            if is_of_lightning(base, name):
                _check_translatable(callback, base)
                ours = translation.make(callback)
                _let_follow(callback, ours, translation.results)
                _translated[ours] = callback
                return ours
    user_class: Any = type(callback)
    writes = any(is_of_lightning(b, "callbacks.prediction_writer:BasePredictionWriter") for b in user_class.__mro__)
    adapted: Callback = wrapper_class(PredictionWriterCallback if writes else LightningCallback, user_class)(callback)
    return adapted


@cache
def wrapper_class(wrapper: type[LightningCallback], user_class: type) -> Any:
    """Return a wrapper's class for one class of callbacks.

    A module's ``configure_callbacks`` replaces the callbacks of the same classes, and those of users differ.
    """
    return type(user_class.__name__, (wrapper,), {"__module__": __name__})


def lightning_callback(callback: Any) -> Any:
    """Return the callback as the user passed it."""
    if isinstance(callback, LightningCallback):
        return callback.callback
    return _translated.get(callback, callback) if isinstance(callback, Callback) else callback


# Callbacks that run as they are


class LightningCallback(Callback):
    """Callback that calls the hooks which one of Lightning overrides, with a Trainer under Lightning's names.

    Args:
        callback: Of Lightning.

    Attributes:
        callback: As it was given.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        # After the module, as in Lightning: they read what it logs in the same hook.
        names = {base.__name__ for base in type(callback).__mro__ if base.__module__.split(".")[0] in _LIBRARIES}
        self.runs_last = bool(names & {"EarlyStopping", "Checkpoint"})
        self.saves_checkpoints = "Checkpoint" in names
        base = next(b for b in type(callback).__mro__ if is_of_lightning(b, "callbacks.callback:Callback"))
        for name in _HOOKS:
            if getattr(type(callback), name) is not getattr(base, name) or name in vars(callback):
                vars(self)[name] = self._hook(name)  # in the instance, it counts as overridden; others are never called

    def _hook(self, name: str) -> Callable[..., None]:
        method = getattr(self.callback, name)

        def call(trainer: Any, *args: Any) -> None:
            from dstrat_lightning.trainer_view import TrainerView  # which imports this module

            method(TrainerView(trainer), *args)

        return call

    @property
    def state_key(self) -> str:
        return self.callback.state_key  # type: ignore[no-any-return]  # Lightning's

    def state_dict(self) -> dict[str, Any]:
        return self.callback.state_dict()  # type: ignore[no-any-return]  # Lightning's

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.callback.load_state_dict(state_dict)

    def __reduce__(self) -> Any:
        return adapt_callback, (self.callback,)  # its functions and its class cannot be pickled


class PredictionWriterCallback(LightningCallback):
    """Callback that collects predictions and indices for a ``BasePredictionWriter``, as Lightning's loop does."""

    reads_batch_indices = True

    def __init__(self, callback: Any) -> None:
        super().__init__(callback)
        self._predictions: list[list[Any]] = []
        self._indices: list[list[Any]] = []
        hooks = {
            "on_predict_epoch_start": self._start,
            "on_predict_batch_end": self._write_batch,
            "on_predict_epoch_end": self._write_epoch,
        }
        vars(self).update(hooks)

    def _start(self, trainer: Any, _module: Any) -> None:
        count = len(trainer.num_predict_batches)
        self._predictions, self._indices = [[] for _ in range(count)], [[] for _ in range(count)]

    def _write_batch(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        from dstrat_lightning.trainer_view import TrainerView

        indices = trainer.predict_batch_indices
        if self.callback.interval.on_batch:
            view = TrainerView(trainer)
            self.callback.write_on_batch_end(view, module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.callback.interval.on_epoch:
            self._predictions[dataloader_idx].append(outputs)
            self._indices[dataloader_idx].append(indices)

    def _write_epoch(self, trainer: Any, module: Any) -> None:
        from dstrat_lightning.trainer_view import TrainerView

        predictions, indices = self._predictions, self._indices
        self._predictions, self._indices = [], []
        if self.callback.interval.on_epoch:
            one = len(predictions) == 1
            # Lightning has the indices in a list of loaders, also of one.
            self.callback.write_on_epoch_end(
                TrainerView(trainer), module, predictions[0] if one else predictions, indices
            )


# Translation of Lightning's own callbacks


class Translation:
    """One of Lightning's callbacks and the callback of dstrat that runs in its place.

    Args:
        name: Of the class in ``dstrat.callbacks``.
        *arguments: Names of constructor arguments that both have.
        results: Attributes that users read from Lightning's callback, which it takes from dstrat's.
    """

    def __init__(self, name: str, *arguments: str, results: tuple[str, ...] = ()) -> None:
        self.name, self.results, self._arguments = name, results, arguments

    def make(self, callback: Any) -> Callback:
        """Return dstrat's callback with the arguments of Lightning's."""
        from dstrat import callbacks

        made: Callback = getattr(callbacks, self.name)(**self.arguments_for(callback))
        return made

    def arguments_for(self, callback: Any) -> dict[str, Any]:
        """Return the arguments of dstrat's callback."""
        return constructor_arguments(callback, self._arguments)


class CheckpointTranslation(Translation):
    """The translation of ``ModelCheckpoint``."""

    def arguments_for(self, callback: Any) -> dict[str, Any]:
        _check_file_names(callback)
        arguments = super().arguments_for(callback)
        # Lightning has 0 where a number does not count, and 1 epoch where the user asked for none of the three.
        steps, time = arguments["every_n_train_steps"] or None, arguments["train_time_interval"]
        epochs = None if steps or time else arguments["every_n_epochs"]
        save_last = arguments["save_last"] or False  # None is Lightning's default
        return {**arguments, "every_n_train_steps": steps, "every_n_epochs": epochs, "save_last": save_last}


_FILE_NAMES = ("CHECKPOINT_NAME_LAST", "CHECKPOINT_JOIN_CHAR", "CHECKPOINT_EQUALS_CHAR", "FILE_EXTENSION")


def _check_file_names(callback: Any) -> None:
    """Raise MisuseError where a ``ModelCheckpoint`` names its files in another way by attributes of its class."""
    standard = next(
        base for base in type(callback).__mro__ if is_of_lightning(base, "callbacks.model_checkpoint:ModelCheckpoint")
    )
    if changed := [name for name in _FILE_NAMES if getattr(callback, name, None) != getattr(standard, name, None)]:
        raise MisuseError(
            f"ModelCheckpoint has another {', '.join(changed)}, and dstrat's runs in its place without it: leave "
            "it out, or run the program with Lightning's Trainer and strategy='dstrat_...'"
        )


class AveragingTranslation(Translation):
    """The translation of ``StochasticWeightAveraging``."""

    def arguments_for(self, callback: Any) -> dict[str, Any]:
        arguments = super().arguments_for(callback)
        # Lightning keeps its own mean where no function was given: None is dstrat's, in one call for all parameters.
        is_default = arguments["avg_fn"] is type(callback).avg_fn
        return {**arguments, "avg_fn": None if is_default else arguments["avg_fn"]}


class TimerTranslation(Translation):
    """The translation of ``Timer``, which keeps its duration in seconds, and its interval as a member of an enum."""

    def arguments_for(self, callback: Any) -> dict[str, Any]:
        arguments = super().arguments_for(callback)
        seconds, interval = arguments["duration"], arguments["interval"]
        duration = None if seconds is None else timedelta(seconds=seconds)
        return {**arguments, "duration": duration, "interval": getattr(interval, "value", interval)}


class ThroughputTranslation(Translation):
    """The translation of ``ThroughputMonitor``, which keeps arguments of its ``Throughput`` in a dict."""

    def arguments_for(self, callback: Any) -> dict[str, Any]:
        arguments = super().arguments_for(callback)
        options = arguments.pop("kwargs")
        if unknown := [name for name in options if name not in ("window_size", "available_flops")]:
            raise MisuseError(
                f"ThroughputMonitor got {', '.join(unknown)}, and dstrat's runs in its place without it: "
                "leave it out, or run the program with Lightning's Trainer and strategy='dstrat_...'"
            )
        return {**arguments, **options}


_TRANSLATIONS: dict[str, Translation] = {
    "callbacks.model_checkpoint:ModelCheckpoint": CheckpointTranslation(
        "ModelCheckpoint",
        *("dirpath", "filename", "monitor", "verbose", "save_last", "save_top_k", "save_on_exception"),
        *("save_weights_only", "mode", "auto_insert_metric_name", "every_n_train_steps", "train_time_interval"),
        *("every_n_epochs", "save_on_train_epoch_end", "enable_version_counter"),
        results=(
            *("best_model_path", "best_model_score", "best_k_models", "kth_best_model_path", "last_model_path"),
            *("current_score", "dirpath"),
        ),
    ),
    "callbacks.timer:Timer": TimerTranslation(
        *("Timer", "duration", "interval", "verbose"),
        results=("time_elapsed", "time_remaining", "start_time", "end_time"),
    ),
    "callbacks.throughput_monitor:ThroughputMonitor": ThroughputTranslation(
        "ThroughputMonitor", "batch_size_fn", "length_fn", "kwargs"
    ),
    "callbacks.lr_monitor:LearningRateMonitor": Translation(
        *("LearningRateMonitor", "logging_interval", "log_momentum", "log_weight_decay"), results=("lrs",)
    ),
    "callbacks.device_stats_monitor:DeviceStatsMonitor": Translation("DeviceStatsMonitor", "cpu_stats"),
    "callbacks.model_summary:ModelSummary": Translation("ModelSummary", "max_depth"),
    "callbacks.progress.tqdm_progress:TQDMProgressBar": Translation("ProgressBar"),
    "callbacks.progress.rich_progress:RichProgressBar": Translation("RichProgressBar"),
    "callbacks.gradient_accumulation_scheduler:GradientAccumulationScheduler": Translation(
        "GradientAccumulationScheduler", "scheduling"
    ),
    "callbacks.stochastic_weight_avg:StochasticWeightAveraging": AveragingTranslation(
        *("StochasticWeightAveraging", "swa_lrs", "swa_epoch_start", "annealing_epochs", "annealing_strategy", "avg_fn")
    ),
    "callbacks.batch_size_finder:BatchSizeFinder": Translation(
        *(
            "BatchSizeFinder",
            "mode",
            "steps_per_trial",
            "init_val",
            "max_trials",
            "batch_arg_name",
            "margin",
            "max_val",
        ),
        results=("optimal_batch_size",),
    ),
    "callbacks.lr_finder:LearningRateFinder": Translation(
        *("LearningRateFinder", "min_lr", "max_lr", "num_training_steps", "mode", "early_stop_threshold"),
        *("update_attr", "attr_name"),
        results=("optimal_lr",),
    ),
}


def _check_translatable(callback: Any, base: type) -> None:
    """Raise MisuseError where a user's class changes methods of one that is translated; of a bar only warn."""
    changed = sorted(
        name
        for cls in type(callback).__mro__[: type(callback).__mro__.index(base)]
        for name in vars(cls)
        if name != "__init__" and callable(getattr(base, name, None)) and not name.startswith("__")
    )
    is_of_library = is_of_lightning(type(callback), "callbacks.rich_model_summary:RichModelSummary")
    is_adapted = getattr(type(callback), "followed_class", None) is base  # in an earlier Trainer, by _let_follow
    if not changed or is_of_library or is_adapted:
        return
    name = type(callback).__name__
    if "ProgressBar" in base.__name__ or "Summary" in base.__name__:
        _log.warning("%s changes %s of %s, which dstrat's does not use", name, ", ".join(changed), base.__name__)
        return
    raise MisuseError(
        f"{name} changes {', '.join(changed)} of Lightning's {base.__name__}, in whose place dstrat's runs: derive it "
        f"from dstrat.callbacks.{base.__name__}, or run the program with Lightning's Trainer and strategy='dstrat_...'"
    )


def _let_follow(callback: Any, ours: Callback, names: tuple[str, ...]) -> None:
    """Let attributes of a callback of Lightning, such as ``best_model_path``, be those of the one that runs."""
    cls = getattr(type(callback), "followed_class", type(callback))
    if names:
        # Properties, as the values change during the run; in a class of its own, as other objects have other values.
        answers = {name: property(partial(_answer, ours=ours, name=name)) for name in names if hasattr(ours, name)}
        namespace = {"followed_class": cls, "__module__": cls.__module__, **answers}
        callback.__class__ = type(cls.__name__, (cls,), namespace)


def _answer(_callback: Any, ours: Callback, name: str) -> Any:
    return getattr(ours, name)

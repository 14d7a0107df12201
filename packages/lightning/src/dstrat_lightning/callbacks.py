"""Lightning's callbacks as dstrat's: its users' run as they are, its built-in ones are translated."""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dstrat import Callback
from dstrat.errors import MisuseError
from dstrat_lightning.conversion import is_of_lightning

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_log = logging.getLogger(__name__)

_NOT_OF_LIGHTNING = ("on_before_fit", "on_configure_optimizers")
_HOOKS = [
    name
    for name in vars(Callback)
    if (name.startswith("on_") or name in ("setup", "teardown")) and name not in _NOT_OF_LIGHTNING
]

_translated: WeakKeyDictionary[Callback, Any] = WeakKeyDictionary()
"""The callbacks of Lightning, by those that stand for them; a copy in another process stands for itself."""


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
    wrapper = PredictionWriterCallback if _writes_predictions(callback) else LightningCallback
    user_class: Any = type(callback)
    adapted: Callback = wrapper_class(wrapper, user_class)(callback)
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
    """Calls the hooks that a callback of Lightning overrides, with a Trainer that looks like Lightning's.

    Args:
        callback: Of Lightning.

    Attributes:
        callback: As it was given.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        # As Lightning does, which calls those that watch a value and those that save after the module.
        names = {base.__name__ for base in type(callback).__mro__ if base.__module__.split(".")[0] in _LIBRARIES}
        self.runs_last = bool(names & {"EarlyStopping", "Checkpoint"})
        self.saves_checkpoints = "Checkpoint" in names
        base = next(b for b in type(callback).__mro__ if is_of_lightning(b, "callbacks.callback:Callback"))
        for name in _HOOKS:
            if getattr(type(callback), name) is not getattr(base, name) or name in vars(callback):
                vars(self)[name] = self._hook(name)  # which counts as overridden, and the others cost nothing

    def _hook(self, name: str) -> Callable[..., None]:
        method = getattr(self.callback, name)

        def call(trainer: Any, *args: Any) -> None:
            from dstrat_lightning.trainer_view import TrainerView

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


_LIBRARIES = ("lightning", "pytorch_lightning")


def _writes_predictions(callback: Any) -> bool:
    names = type(callback).__mro__
    return any(is_of_lightning(base, "callbacks.prediction_writer:BasePredictionWriter") for base in names)


class PredictionWriterCallback(LightningCallback):
    """Lets a ``BasePredictionWriter`` write, by dstrat's ``PredictionWriter``."""

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
        count = len(trainer.predict_dataloaders)
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
    """How one of Lightning's callbacks is made again of ours.

    Args:
        name: Of our class in ``dstrat.callbacks``.
        results: Attributes that users read of Lightning's callback, which it takes from ours.
        arguments: Arguments of ours by the attributes of Lightning's with their values; a release may lack some.
    """

    def __init__(self, name: str, results: tuple[str, ...] = (), **arguments: str) -> None:
        self.name, self.results, self._arguments = name, results, arguments

    def make(self, callback: Any) -> Callback:
        """Return ours."""
        from dstrat import callbacks

        values = vars(callback)
        arguments = {name: values[attribute] for name, attribute in self._arguments.items() if attribute in values}
        made: Callback = getattr(callbacks, self.name)(**arguments)
        return made


class CheckpointTranslation(Translation):
    """The same of ``ModelCheckpoint``, whose times of saving are numbers that are 0 where they do not count."""

    def make(self, callback: Any) -> Callback:
        from dstrat.callbacks import ModelCheckpoint

        _check_file_names(callback)
        values = vars(callback)
        steps, every, time = (
            values[f"_{name}"] for name in ("every_n_train_steps", "every_n_epochs", "train_time_interval")
        )
        return ModelCheckpoint(
            dirpath=values["dirpath"],
            filename=values["filename"],
            monitor=values["monitor"],
            verbose=values["verbose"],
            save_last=values["save_last"] or False,
            save_top_k=values["save_top_k"],
            save_on_exception=values.get("save_on_exception", False),
            save_weights_only=values["save_weights_only"],
            mode=values["mode"],
            auto_insert_metric_name=values["auto_insert_metric_name"],
            every_n_train_steps=steps or None,
            train_time_interval=time,
            every_n_epochs=None if steps or time else every,
            save_on_train_epoch_end=values["_save_on_train_epoch_end"],
            enable_version_counter=values.get("_enable_version_counter", True),
        )


_FILE_NAMES = ("CHECKPOINT_NAME_LAST", "CHECKPOINT_JOIN_CHAR", "CHECKPOINT_EQUALS_CHAR", "FILE_EXTENSION")


def _check_file_names(callback: Any) -> None:
    """Raise MisuseError where a ``ModelCheckpoint`` names its files in another way by attributes of its class."""
    bases = (
        base for base in type(callback).__mro__ if is_of_lightning(base, "callbacks.model_checkpoint:ModelCheckpoint")
    )
    standard = next(bases)
    if changed := [name for name in _FILE_NAMES if getattr(callback, name, None) != getattr(standard, name, None)]:
        raise MisuseError(
            f"ModelCheckpoint has another {', '.join(changed)}, which dstrat's does not have: leave it out, or run the "
            "program with Lightning's Trainer and strategy='dstrat_...'"
        )


class AveragingTranslation(Translation):
    """The same of ``StochasticWeightAveraging``, which has its default average as a function too."""

    def make(self, callback: Any) -> Callback:
        from dstrat.callbacks import StochasticWeightAveraging

        function = callback._avg_fn  # noqa: SLF001 - it has no public name
        return StochasticWeightAveraging(
            swa_lrs=callback._swa_lrs,  # noqa: SLF001 - likewise
            swa_epoch_start=callback._swa_epoch_start,  # noqa: SLF001 - likewise
            annealing_epochs=callback._annealing_epochs,  # noqa: SLF001 - likewise
            annealing_strategy=callback._annealing_strategy,  # noqa: SLF001 - likewise
            avg_fn=None if function is getattr(type(callback), "avg_fn", None) else function,
        )


class TimerTranslation(Translation):
    """The same of ``Timer``, which has its duration in seconds."""

    def make(self, callback: Any) -> Callback:
        from datetime import timedelta

        from dstrat.callbacks import Timer

        values = vars(callback)
        seconds, interval = values["_duration"], values["_interval"]
        duration = None if seconds is None else timedelta(seconds=seconds)
        return Timer(
            duration, getattr(interval, "value", interval), values["_verbose"]
        )  # a member of an enum, or a str


class ThroughputTranslation(Translation):
    """The same of ``ThroughputMonitor``, which passes other arguments on; it looks for Lightning's precisions."""

    def make(self, callback: Any) -> Callback:
        from dstrat.callbacks import ThroughputMonitor

        options = dict(callback.kwargs)
        known = {name: options.pop(name) for name in ("window_size", "available_flops") if name in options}
        if options:
            raise MisuseError(
                f"ThroughputMonitor has {', '.join(options)}, which dstrat's does not have: leave it out, or run the "
                "program with Lightning's Trainer and strategy='dstrat_...'"
            )
        return ThroughputMonitor(callback.batch_size_fn, callback.length_fn, **known)


_TRANSLATIONS: dict[str, Translation] = {
    "callbacks.model_checkpoint:ModelCheckpoint": CheckpointTranslation(
        "ModelCheckpoint",
        (
            *("best_model_path", "best_model_score", "best_k_models", "kth_best_model_path", "last_model_path"),
            *("current_score", "dirpath"),
        ),
    ),
    "callbacks.timer:Timer": TimerTranslation("Timer", ("time_elapsed", "time_remaining", "start_time", "end_time")),
    "callbacks.throughput_monitor:ThroughputMonitor": ThroughputTranslation("ThroughputMonitor"),
    "callbacks.lr_monitor:LearningRateMonitor": Translation(
        "LearningRateMonitor",
        ("lrs",),
        logging_interval="logging_interval",
        log_momentum="log_momentum",
        log_weight_decay="log_weight_decay",
    ),
    "callbacks.device_stats_monitor:DeviceStatsMonitor": Translation("DeviceStatsMonitor", cpu_stats="_cpu_stats"),
    "callbacks.model_summary:ModelSummary": Translation("ModelSummary", max_depth="_max_depth"),
    "callbacks.progress.tqdm_progress:TQDMProgressBar": Translation("ProgressBar"),
    "callbacks.progress.rich_progress:RichProgressBar": Translation("RichProgressBar"),
    "callbacks.gradient_accumulation_scheduler:GradientAccumulationScheduler": Translation(
        "GradientAccumulationScheduler", scheduling="scheduling"
    ),
    "callbacks.stochastic_weight_avg:StochasticWeightAveraging": AveragingTranslation("StochasticWeightAveraging"),
    "callbacks.batch_size_finder:BatchSizeFinder": Translation(
        "BatchSizeFinder",
        ("optimal_batch_size",),
        mode="_mode",
        steps_per_trial="_steps_per_trial",
        init_val="_init_val",
        max_trials="_max_trials",
        batch_arg_name="_batch_arg_name",
        margin="_margin",
        max_val="_max_val",
    ),
    "callbacks.lr_finder:LearningRateFinder": Translation(
        "LearningRateFinder",
        ("optimal_lr",),
        min_lr="_min_lr",
        max_lr="_max_lr",
        num_training_steps="_num_training_steps",
        mode="_mode",
        early_stop_threshold="_early_stop_threshold",
        update_attr="_update_attr",
        attr_name="_attr_name",
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
    changed = [
        name for name in changed if not is_of_lightning(type(callback), "callbacks.rich_model_summary:RichModelSummary")
    ]
    if not changed or getattr(type(callback), "followed_class", None) is base:
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
    """Let a callback of Lightning answer with what the one says that stands for it."""
    cls = getattr(type(callback), "followed_class", type(callback))
    if names:
        answers = {name: property(partial(_answer, ours=ours, name=name)) for name in names if hasattr(ours, name)}
        callback.__class__ = type(
            cls.__name__, (cls,), {"followed_class": cls, "__module__": cls.__module__, **answers}
        )


def _answer(_callback: Any, ours: Callback, name: str) -> Any:
    return getattr(ours, name)

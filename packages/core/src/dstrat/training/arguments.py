"""Arguments of a Trainer: checks, and conversion of objects of other libraries."""

from __future__ import annotations

import inspect
import logging
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dstrat.data.limits import check_count, check_limit
from dstrat.errors import ConflictError, RequestError
from dstrat.interfaces.optimizers import check_clipping
from dstrat.plugins.catalog import get_catalog
from dstrat.plugins.known import known_adapter, pip_command
from dstrat.training.module.plain_values import to_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.resolve.request import Request
    from dstrat.training.settings import TrainerSettings


_log = logging.getLogger(__name__)

_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches")
_AT_LEAST = {
    "max_epochs": -1,
    "max_steps": -1,
    "min_epochs": 0,
    "min_steps": 0,
    "num_sanity_val_steps": -1,
    "log_every_n_steps": 0,
    "accumulate_grad_batches": 1,
    "reload_dataloaders_every_n_epochs": 0,
}
_STATEMENTS = ("sync_batchnorm", "detect_anomaly", "use_distributed_sampler", "inference_mode", "benchmark")
_ENABLED = ("progress_bar", "model_summary", "checkpointing")


RETIRED_ARGUMENTS = {
    **dict.fromkeys(("gpus", "gpu"), "it is accelerator='gpu' with devices=..."),
    "tpu_cores": "it is accelerator='tpu' with devices=...",
    "ipus": "it is accelerator='ipu' with devices=...",
    "hpus": "it is accelerator='hpu' with devices=...",
    "num_processes": "it is accelerator='cpu' with devices=...",
    "auto_select_gpus": "it is accelerator='gpu' with devices=..., a number of devices",
    "num_gpu_nodes": "it is num_nodes",
    "nb_gpu_nodes": "it is num_nodes",
    "distributed_backend": "it is strategy",
    "resume_from_checkpoint": "it is an argument of fit, ckpt_path=...",
    "auto_lr_find": "call Tuner(trainer).lr_find(module), or pass callbacks=LearningRateFinder()",
    "auto_scale_batch_size": "call Tuner(trainer).scale_batch_size(module), or pass callbacks=BatchSizeFinder()",
    **dict.fromkeys(("amp_backend", "amp_level", "use_amp"), "it is precision, such as precision='16-mixed'"),
    **dict.fromkeys(("replace_sampler_ddp", "replace_sampler"), "it is use_distributed_sampler"),
    "multiple_trainloader_mode": "pass CombinedLoader(loaders, mode) as the loader",
    "reload_dataloaders_every_epoch": "it is reload_dataloaders_every_n_epochs=1",
    "track_grad_norm": "log grad_norm(self, norm_type=2) in the module's on_before_optimizer_step",
    "terminate_on_nan": "it is detect_anomaly=True, or EarlyStopping(monitor, check_finite=True)",
    "checkpoint_callback": "it is enable_checkpointing, and a ModelCheckpoint belongs to callbacks",
    "early_stop_callback": "pass callbacks=EarlyStopping(monitor)",
    "weights_save_path": "it is default_root_dir, or ModelCheckpoint(dirpath=...)",
    "default_save_path": "it is default_root_dir",
    "weights_summary": "it is enable_model_summary, or ModelSummary(max_depth=...)",
    "progress_bar_refresh_rate": "it is enable_progress_bar, or callbacks=TQDMProgressBar(refresh_rate=...)",
    "process_position": "pass callbacks=TQDMProgressBar(process_position=...)",
    "show_progress_bar": "it is enable_progress_bar",
    "stochastic_weight_avg": "pass callbacks=StochasticWeightAveraging(swa_lrs)",
    "log_gpu_memory": "pass callbacks=DeviceStatsMonitor()",
    "flush_logs_every_n_steps": "it is an argument of CSVLogger",
    "row_log_interval": "it is log_every_n_steps",
    "log_save_interval": "it is flush_logs_every_n_steps of CSVLogger",
    "move_metrics_to_cpu": "leave it out: logged values stay where they are until they are read",
    "prepare_data_per_node": "leave it out: prepare_data is called once on each machine",
    "truncated_bptt_steps": "split the batch in training_step, with automatic_optimization = False",
    "automatic_optimization": "it is an attribute of the module",
    "max_nb_epochs": "it is max_epochs",
    "min_nb_epochs": "it is min_epochs",
    "nb_sanity_val_steps": "it is num_sanity_val_steps",
    "train_percent_check": "it is limit_train_batches",
    "val_percent_check": "it is limit_val_batches",
    "test_percent_check": "it is limit_test_batches",
    "overfit_pct": "it is overfit_batches",
    "gradient_clip": "it is gradient_clip_val",
    "enable_autolog_hparams": "call save_hyperparameters(logger=False) in the module instead",
    "model_registry": "it belongs to a service of Lightning AI: leave it out",
    **dict.fromkeys(
        ("model", "train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path", "resume"),
        "it is an argument of fit",
    ),
    "dataloaders": "it is an argument of validate, test and predict",
}
"""The successors of arguments of Lightning's Trainer, and the places of arguments that belong elsewhere."""

RETIRED_ARGUMENTS_OF_RUNS = {"resume_from_checkpoint": "it is ckpt_path"}
"""The successors of arguments of Lightning's ``fit``, ``validate``, ``test`` and ``predict``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureDefaults:
    """Features of the Trainer that run beside the training.

    Attributes:
        logger: One or several loggers; True or None is a CSV logger, False none.
        progress_bar: Whether to show a progress bar.
        model_summary: Whether to print the layers before training.
        checkpointing: Whether to save checkpoints.
        log_every_n_steps: Optimizer steps between two writes of step values; 0 writes none.
        num_sanity_val_steps: Validation batches to try before training starts; -1 is all.
    """

    logger: Any
    progress_bar: bool
    model_summary: bool
    checkpointing: bool
    log_every_n_steps: int
    num_sanity_val_steps: int


_USUAL = FeatureDefaults(
    logger=None,
    progress_bar=True,
    model_summary=True,
    checkpointing=True,
    log_every_n_steps=50,
    num_sanity_val_steps=2,
)
_BARE = FeatureDefaults(
    logger=False,
    progress_bar=False,
    model_summary=False,
    checkpointing=False,
    log_every_n_steps=0,
    num_sanity_val_steps=0,
)


def resolve_features(requested: Mapping[str, Any], *, barebones: bool, fast_dev_run: Any) -> FeatureDefaults:
    """Return the features of a Trainer.

    Args:
        requested: The user's value for each attribute of :class:`FeatureDefaults`, None for the default, and for
            ``profiler`` and ``detect_anomaly``.
        barebones: Whether all features are off.
        fast_dev_run: Number of batches of a trial run, which has no sanity check; 0 in a normal run.

    Raises:
        RequestError: A value is not a bool, or ``fast_dev_run`` not a number of batches.
        ConflictError: The user requests a feature that barebones switches off.
    """
    if not isinstance(fast_dev_run, int) or fast_dev_run < 0:  # True is an int, 1
        raise RequestError(f"fast_dev_run={fast_dev_run!r} must be True, False, or a number of batches (int)")
    enabled = {f"enable_{name}": requested[name] for name in _ENABLED if requested[name] is not None}
    _check_statements({"barebones": barebones, **enabled})
    defaults = _BARE if barebones else _USUAL
    # None is the default, and not False: barebones conflicts with what the user has requested only.
    values = {
        name: getattr(defaults, name) if requested[name] is None else requested[name]
        for name in FeatureDefaults.__slots__
    }
    if barebones:
        _check_bare({**requested, "fast_dev_run": fast_dev_run})
    if fast_dev_run:
        values["num_sanity_val_steps"] = 0  # validation itself is as short
    return FeatureDefaults(**values)


def _check_bare(requested: Mapping[str, Any]) -> None:
    """Raise a ConflictError if the user requests a feature that barebones switches off."""
    off = {name: getattr(_BARE, name, False) for name in requested}
    for name, value in requested.items():
        if value is not None and value != off[name]:
            argument = f"enable_{name}" if name in _ENABLED else name
            raise ConflictError(
                f"barebones=True switches off everything beside training, and {argument}={value!r} was asked for: pass "
                "one or the other"
            )


def changed_arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that differ from their defaults, as plain values and names of classes.

    Args:
        function: The called function, whose first parameter is ``self``.
        values: The values of its parameters, by name.
    """
    _, *parameters = inspect.signature(function).parameters.values()
    return {
        parameter.name: to_plain(values[parameter.name], parameter.name, _class_name)
        for parameter in parameters
        if values[parameter.name] is not parameter.default
    }


def warn_of_variables(function: Callable[..., Any], changed: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Log a warning of environment variables from which Lightning's Trainer takes arguments that are not passed."""
    for argument in inspect.signature(function).parameters:
        if argument not in changed and (variable := f"PL_TRAINER_{argument.upper()}") in environ:
            _log.warning("the environment variable %s has no effect: pass Trainer(%s=...)", variable, argument)


def _class_name(_: str, value: Any) -> str:
    return value.__qualname__ if isinstance(value, type) else type(value).__qualname__


def check_arguments(settings: TrainerSettings) -> None:
    """Check the counts, limits and choices among a Trainer's arguments.

    Raises:
        RequestError: An argument is out of range or of another type; the message names it.
        ConflictError: Two arguments contradict each other.
    """
    groups = (getattr(settings, field.name) for field in fields(settings))
    values = {field.name: getattr(group, field.name) for group in groups for field in fields(group)}
    for name in _LIMITS:
        check_limit(values[name], name)
    for name, least in _AT_LEAST.items():
        check_count(values[name], name, least)
    _check_statements({name: values[name] for name in _STATEMENTS if name != "benchmark" or values[name] is not None})
    for unit in ("epochs", "steps"):
        least, most = values[f"min_{unit}"], values[f"max_{unit}"]
        if 0 <= most < least:  # -1 is no limit
            raise ConflictError(f"min_{unit}={least} is more than max_{unit}={most}: make it smaller, or leave one out")
    _check_interval(values["val_check_interval"], values["check_val_every_n_epoch"])
    check_clipping(values["gradient_clip_val"], values["gradient_clip_algorithm"])
    if values["deterministic"] not in (None, False, True, "warn"):
        raise RequestError(f"deterministic={values['deterministic']!r} must be True, False or 'warn'")
    if values["overfit_batches"] and not values["fast_dev_run"]:
        _check_overfitting(values)


def _check_overfitting(values: Mapping[str, Any]) -> None:
    for name in ("limit_train_batches", "limit_val_batches"):
        if values[name] is not None:
            raise ConflictError(
                f"overfit_batches={values['overfit_batches']!r} limits training and validation, and "
                f"{name}={values[name]!r} does too: leave one out"
            )


def _check_statements(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise RequestError(f"{name}={value!r} must be True or False")


def check_ends_of_job(request: Request) -> None:
    """Check the types of the arguments that say how a job ends or goes on, which the resolution calculates with.

    Raises:
        RequestError: One is out of range or of another type; the message names it.
    """
    check_count(request.max_restarts, "max_restarts", 0)
    elastic, seconds = request.elastic, request.preemption_deadline
    if not isinstance(elastic, bool) and elastic != "replace":
        raise RequestError(f"elastic={elastic!r} must be True, False or 'replace'")
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and seconds > 0):
        raise RequestError(f"preemption_deadline={seconds!r} must be a number of seconds above 0, such as 90")


def check_elastic(elastic: Any, *, saves_checkpoints: bool, saves_in_memory: bool) -> None:
    """Check that callbacks save what the ranks of an elastic fit go on from.

    Raises:
        ConflictError: None does.
    """
    if elastic == "replace" and not saves_in_memory:
        raise ConflictError(
            "elastic='replace' passes the state to new processes in memory, and no callback saves there: add "
            "InMemoryCheckpoint(every_n_train_steps=10), or choose elastic=True"
        )
    if elastic and not saves_checkpoints:
        raise ConflictError(
            f"elastic={elastic!r} goes on from the newest checkpoint, and no callback saves any: add "
            "InMemoryCheckpoint(every_n_train_steps=10) or a ModelCheckpoint, or leave elastic out"
        )


def check_preemption(seconds: float | None, cluster: ClusterEnvironment | None, *, saves_checkpoints: bool) -> None:
    """Check the deadline of a preemption.

    Args:
        seconds: The ``preemption_deadline``; None without one.
        cluster: The cluster environment of the job; None without one.
        saves_checkpoints: Whether any callback does.

    Raises:
        ConflictError: No callback could save a checkpoint, or the job is to be queued again without one.
    """
    if seconds is None:
        # Without a checkpoint the job would start from scratch each time.
        if cluster is not None and cluster.requeue_signal is not None:
            name = signal.Signals(cluster.requeue_signal).name
            raise ConflictError(
                f"{type(cluster).__name__} queues the job again after {name}, and without a preemption_deadline no "
                "checkpoint is saved then: pass preemption_deadline=90 if the signal comes 90 seconds before the end"
            )
        return
    if not saves_checkpoints:
        raise ConflictError(
            f"preemption_deadline={seconds!r} saves a checkpoint on SIGTERM and SIGUSR1, and no callback saves any: "
            "leave out enable_checkpointing=False or barebones=True, or leave out the deadline"
        )


def _check_interval(value: Any, epochs: Any) -> None:
    if epochs is not None:
        check_count(epochs, "check_val_every_n_epoch", 1)
    if value is None:
        return
    if not isinstance(value, int | float):
        read_duration(value, "val_check_interval")
        return
    count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    fraction = isinstance(value, float) and 0.0 < value <= 1.0
    if not count and not fraction:
        raise RequestError(
            f"val_check_interval={value!r} must be a number of batches (int), "
            "a fraction of the epoch (float, up to 1.0), or a length of time such as '00:30:00'"
        )
    # 1.0 needs no number of batches: it is the end of an epoch.
    if fraction and value != 1.0 and epochs is None:
        raise ConflictError(
            f"val_check_interval={value!r} is a fraction of an epoch, and check_val_every_n_epoch=None counts batches "
            "across epochs: give a number of batches"
        )


# Durations


_DURATION = re.compile(r"(?:(\d{1,6}):)?(\d{1,6}):(\d{1,2}):(\d{1,2})")


def read_duration(value: Any, name: str) -> timedelta:
    """Return a duration.

    Args:
        value: A timedelta, a dict of its arguments such as ``{"hours": 1}``, or a str: ``"DD:HH:MM:SS"``,
            ``"HH:MM:SS"``.
        name: The argument, for the message.

    Raises:
        RequestError: The value is none of these, or not positive.
    """
    duration = _parse_duration(value)
    if duration is None or duration <= timedelta(0):
        raise RequestError(
            f"{name}={value!r} is not a length of time: give a timedelta, a dict such as {{'hours': 1}}, "
            "or text as 'DD:HH:MM:SS' or 'HH:MM:SS'"
        )
    return duration


def _parse_duration(value: Any) -> timedelta | None:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, Mapping):
        try:
            return timedelta(**value)
        except (TypeError, ValueError, OverflowError):  # unknown units, NaN, more than timedelta can hold
            return None
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    days, hours, minutes, seconds = (int(digits or 0) for digits in match.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


# Conversion of objects of other libraries


def adapt(value: Any, expected: type[Any]) -> Any:
    """Return an object of an expected class, converted by a plugin if it is another library's.

    Args:
        value: The object that the user passed, or None.
        expected: TrainModule, DataModule, Callback or Logger.

    Returns:
        The object; unchanged if no plugin converts it to the expected class, for the caller's check of the type.

    Raises:
        CatalogError: Two plugins convert it, or the one that does cannot be imported.
    """
    if value is None or isinstance(value, expected):
        return value
    offer = get_catalog().find_adapter(type(value))
    if offer is None:
        return value
    converted = offer.convert(value)
    return converted if isinstance(converted, expected) else value


def install_hint(value: object) -> str:
    """Return the end of a message: how an object of another library, or a class, is accepted; empty if unknown."""
    if isinstance(value, type):
        return f"; it is a class: pass an instance, {value.__name__}(...)"
    requirement = known_adapter(type(value))
    return f"; {pip_command(requirement)} lets it run as it is" if requirement else ""

"""DeepSpeed's configuration: options, the Trainer's settings, and the user's configuration over them."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dstrat.errors import ConflictError, RequestError
from dstrat_deepspeed.nvme import run_folder
from dstrat_deepspeed.optimizers import check_named_optimizer, check_one_optimizer
from dstrat_deepspeed.options import changed, possible_value, read_options
from dstrat_deepspeed.validation import (
    check_can_offload,
    check_clipping,
    check_components,
    check_config,
    check_options,
    offload_devices,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.optim import Optimizer

    from dstrat.interfaces.strategy import Components, TrainerLike
    from dstrat_deepspeed.options import Options


AUTO = "auto"
"""The value of a configuration that stands for the Trainer's setting."""
PATH_VARIABLE = "DSTRAT_DEEPSPEED_CONFIG_PATH"
_MICRO_BATCH = "train_micro_batch_size_per_gpu"

_logger = logging.getLogger(__name__)


# Sources of a configuration: dict, JSON file, environment


@dataclass(frozen=True, kw_only=True, slots=True)
class UserConfig:
    """The user's own configuration.

    Attributes:
        source: The argument or variable that it comes from, for messages.
        values: The parsed content.
    """

    source: str
    values: dict[str, Any] = field(default_factory=dict)


def read_config(config: Mapping[str, Any] | str | Path | None, environ: Mapping[str, str]) -> UserConfig:
    """Read the argument ``config``, or the file in ``DSTRAT_DEEPSPEED_CONFIG_PATH``; empty if neither is set.

    Raises:
        RequestError: The file cannot be read, or is not a JSON object.
    """
    if isinstance(config, Mapping):
        return UserConfig(source="config", values=copy.deepcopy(dict(config)))
    if config is not None and not isinstance(config, str | Path):
        raise RequestError(f"config is of the type {type(config).__name__}: give a dict, or the path of a JSON file")
    if config is None and not environ.get(PATH_VARIABLE):
        return UserConfig(source="config")
    path = Path(config or environ[PATH_VARIABLE])
    source = f"config={str(path)!r}" if config is not None else f"{PATH_VARIABLE}={str(path)!r}"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{source} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RequestError(f"{source} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise RequestError(f"{source} holds a JSON {type(values).__name__}, and a configuration is an object: {{...}}")
    return UserConfig(source=source, values=values)


# The configuration of the options


def zero_stage(options: Options, user: UserConfig) -> int:
    """Return the stage of ZeRO, from the user's configuration or the option."""
    section = user.values.get("zero_optimization")
    if isinstance(section, dict) and section.get("stage", AUTO) != AUTO:
        return int(possible_value("stage", section["stage"], "int"))
    return options.zero.stage if isinstance(section, dict) or options.zero.zero_optimization else 0


def from_options(options: Options, stage: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for the options."""
    config: dict[str, Any] = {
        "fp16": dataclasses.asdict(options.loss_scale),
        "zero_allow_untested_optimizer": options.zero.zero_allow_untested_optimizer,
        "zero_optimization": {"stage": stage, **_zero_section(options, stage)},
        "steps_per_print": None,
    }
    if changed(options.activations):
        config["activation_checkpointing"] = dataclasses.asdict(options.activations)
    if "nvme" in (options.offload.offload_optimizer_device, options.offload.offload_params_device):
        files = dataclasses.asdict(options.files)
        config["aio"] = {"intra_op_parallelism": files.pop("thread_count"), **files}
    return config


def _zero_section(options: Options, stage: int) -> dict[str, Any]:
    zero, offload = dataclasses.asdict(options.zero), options.offload
    for name in ("stage", "zero_optimization", "zero_allow_untested_optimizer"):
        zero.pop(name)
    if stage != 3:
        zero.pop("sub_group_size")
    if stage > 0 and offload.offload_optimizer:
        zero["offload_optimizer"] = {
            **_device_section(options, offload.offload_optimizer_device),
            "buffer_count": offload.optimizer_buffer_count,
        }
    if stage == 3 and offload.offload_parameters:
        zero["offload_param"] = {
            **_device_section(options, offload.offload_params_device),
            "buffer_count": offload.params_buffer_count,
            "buffer_size": offload.params_buffer_size,
            "max_in_cpu": offload.max_in_cpu,
        }
    return zero


def _device_section(options: Options, device: str) -> dict[str, Any]:
    section: dict[str, Any] = {"device": device, "pin_memory": options.offload.pin_memory}
    return {**section, "nvme_path": options.offload.nvme_path} if device == "nvme" else section


def _sections_in_files(config: dict[str, Any]) -> list[str]:
    return [name for name, device in offload_devices(config).items() if device == "nvme"]


def without_boundaries(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration for any number of backward passes per step (manual optimization)."""
    zero = config["zero_optimization"]
    if zero["stage"] == 0:
        return config  # stage 0 reduces all gradients in each backward pass
    if zero["stage"] == 1:
        zero = {**zero, "overlap_comm": False}  # stage 1 reduces in the step, where nothing overlaps
    return {**config, "managed_gradient_accumulation": False, "zero_optimization": zero}


# Settings of the Trainer and the precision, which the user's configuration may not contradict

Settings: TypeAlias = "dict[tuple[str, ...], tuple[Any, str]]"
"""By the keys that lead to a value of the configuration: the value, and the user's argument that determines it."""


def settings_of(trainer: TrainerLike) -> Settings:
    """Return the settings that the Trainer's arguments determine."""
    accumulate, clip = trainer.accumulate_grad_batches, trainer.gradient_clip_val
    return {
        ("gradient_accumulation_steps",): (accumulate, f"the Trainer's accumulate_grad_batches={accumulate!r}"),
        ("gradient_clipping",): (float(clip or 0.0), f"the Trainer's gradient_clip_val={clip!r}"),
    }


def settings_of_precision(flag: str) -> Settings:
    """Return the settings that the precision determines: DeepSpeed's own 16-bit modes."""
    modes = {"bf16": flag == "bf16-true", "fp16": flag == "16-mixed"}
    if flag != "bf16-mixed":  # with which the user's configuration may ask for torch_autocast
        modes["torch_autocast"] = False
    return {(name, "enabled"): (value, f"precision={flag!r}") for name, value in modes.items()}


def merged(base: dict[str, Any], user: UserConfig, settings: Settings | None = None) -> dict[str, Any]:
    """Return the user's configuration over that of the options, section by section, with settings.

    Raises:
        ConflictError: The user's configuration contradicts a setting; the message names both sources.
        RequestError: It has another value in place of a section.
    """
    values = dict(user.values)
    if "bfloat16" in values:  # DeepSpeed's older name of the section
        values["bf16"] = values.pop("bfloat16")
    config = _merge(base, values, user.source)
    for (*sections, key), (value, source) in (settings or {}).items():
        section = config
        for name in sections:
            section = _as_section(section.setdefault(name, {}), name, user.source)
        if section.setdefault(key, value) != value:
            raise ConflictError(
                f"{user.source} says {'.'.join([*sections, key])}: {section[key]!r}, and {source} says otherwise: "
                "leave one of them out, or let both say the same"
            )
    return config


def _merge(base: dict[str, Any], values: dict[str, Any], source: str) -> dict[str, Any]:
    result = dict(base)
    for key, value in values.items():
        if isinstance(value, str) and value == AUTO:
            continue
        below = result.get(key)
        if isinstance(below, dict):
            result[key] = _merge(below, _as_section(value, key, source), source)
        else:
            result[key] = _merge({}, value, source) if isinstance(value, dict) else value
    return result


def _as_section(value: Any, name: str, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{source} says {name}: {value!r}, and it must be a section: {{...}}")
    return value


class Configuration:
    """The options of a strategy, by their names, overridden by the user's configuration.

    Raises:
        RequestError: An option does not exist, or its value is not valid.
        ConflictError: Two options exclude each other.
    """

    def __init__(
        self, options: Mapping[str, Any], config: Mapping[str, Any] | str | Path | None, batch_size: int | str
    ) -> None:
        self.options = read_options(options)
        self._user = read_config(config, os.environ)
        self.stage = zero_stage(self.options, self._user)
        self._batch_size = (
            batch_size if batch_size == AUTO else possible_value("logging_batch_size_per_gpu", batch_size, "int")
        )
        self._folders: dict[str, str] = {}
        check_options(self.options, self.known, self.stage)
        if self.options.checkpoints.load_full_weights:
            _logger.info("load_full_weights=True changes nothing: whole weights of a checkpoint are dealt out anyway")

    @property
    def known(self) -> dict[str, Any]:
        """The configuration that is known before a run: without settings of the Trainer and the precision."""
        return merged(from_options(self.options, self.stage), self._user)

    def check_components(self, parts: Components) -> None:
        """Check the configuration against the components that are known, and against this machine."""
        if parts.precision_plugin is not None and parts.parallel_devices:
            check_components(self.options, self.known, parts.precision_plugin.flag, parts.parallel_devices[0].type)
        check_can_offload(self.known, os.environ)
        if parts.parallel_devices:
            check_named_optimizer(self.known, parts.parallel_devices[0].type, os.environ, self._user.source)

    @contextmanager
    def run_folders(self) -> Iterator[None]:
        """Make the folders of this rank's files in a run, and remove them at the end of a ``with`` block."""
        config = self.known
        paths = {str(config["zero_optimization"][name]["nvme_path"]) for name in _sections_in_files(config)}
        with ExitStack() as folders:
            self._folders = {path: folders.enter_context(run_folder(path)) for path in paths}
            try:
                yield
            finally:
                self._folders = {}

    def for_creation(self, flag: str, world_size: int) -> dict[str, Any]:
        """Return the configuration for ``deepspeed.zero.Init``, with which stage 3 creates layers."""
        config = self._complete(settings_of_precision(flag))
        for size in (_MICRO_BATCH, "train_batch_size", "gradient_accumulation_steps"):  # the Trainer is not known yet
            config.pop(size, None)
        config[_MICRO_BATCH] = 1  # DeepSpeed requires one
        check_config(config, self._user.source, world_size)
        return config

    def for_run(
        self, trainer: TrainerLike, optimizer: Optimizer | None, *, flag: str, world_size: int
    ) -> dict[str, Any]:
        """Return the complete configuration of a run.

        Raises:
            RequestError: DeepSpeed does not accept the configuration.
            ConflictError: It contradicts the Trainer, the precision or the optimizer; the message names both sources.
        """
        if trainer.gradient_clip_val is not None:
            check_clipping(trainer.gradient_clip_algorithm)
        settings = {**settings_of(trainer), **settings_of_precision(flag)}
        if self._batch_size != AUTO:
            settings[(_MICRO_BATCH,)] = (self._batch_size, f"logging_batch_size_per_gpu={self._batch_size!r}")
        config = self._complete(settings)
        if "train_batch_size" not in config:  # from which DeepSpeed computes the other one
            config.setdefault(_MICRO_BATCH, 1)
        check_config(config, self._user.source, world_size)
        if not trainer.is_fitting:
            config.pop("optimizer", None)
        check_one_optimizer(config, optimizer, self._user.source, is_fitting=trainer.is_fitting)
        return config

    def _complete(self, settings: Settings) -> dict[str, Any]:
        """Return the configuration with settings, and with the folders of this run."""
        config = merged(from_options(self.options, self.stage), self._user, settings)
        zero = config["zero_optimization"]
        for name in _sections_in_files(config):
            path = str(zero[name]["nvme_path"])
            zero[name] = {**zero[name], "nvme_path": self._folders.get(path, path)}
            if name == "offload_param":
                # DeepSpeed keeps parameters in their buffers for reuse, and fails when it has used all of the few.
                zero.setdefault("stage3_max_reuse_distance", 0)
        return config

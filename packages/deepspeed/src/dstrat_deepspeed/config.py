"""DeepSpeed's configuration: options, the Trainer's settings, and the user's own over them."""

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
from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError, RequestError
from dstrat_deepspeed.nvme import folder_in
from dstrat_deepspeed.options import changed, possible_stage, read_options
from dstrat_deepspeed.validation import (
    SIZES,
    MicroBatch,
    check_can_offload,
    check_clipping,
    check_config,
    check_named_optimizer,
    check_one_optimizer,
    check_options,
    check_parts,
    check_ranks,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.optim import Optimizer

    from dstrat.interfaces.strategy import Parts, TrainerLike
    from dstrat_deepspeed.options import Options


AUTO = "auto"
"""What a configuration says where the Trainer's setting is meant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A value that the Trainer, or another part of the request, decides.

    Attributes:
        path: The keys of the configuration that lead to it.
        value: What it is.
        place: Where the user has set it, or not.
        yields: Whether the user's configuration may say something else.
    """

    path: tuple[str, ...]
    value: Any
    place: str
    yields: bool = False


def zero_stage(options: Options, given: GivenConfig) -> int:
    """Return the stage of ZeRO: that of the user's configuration, or of the option.

    Raises:
        RequestError: There is no such stage.
    """
    section = given.values.get("zero_optimization")
    if isinstance(section, dict) and section.get("stage", AUTO) != AUTO:
        stage = section["stage"]
        return possible_stage(stage, f"{given.place} asks for stage {stage!r} of ZeRO")
    if isinstance(section, dict) and given.values:
        return options.zero.stage
    return options.zero.stage if options.zero.zero_optimization else 0


def from_options(options: Options, stage: int) -> dict[str, Any]:
    """Return the configuration that the options stand for."""
    config: dict[str, Any] = {
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
    zero = dataclasses.asdict(options.zero)
    unlisted = {"stage", "zero_optimization", "zero_allow_untested_optimizer"}
    section = {name: value for name, value in zero.items() if name not in unlisted}
    if stage != 3:
        section.pop("sub_group_size")
    if stage > 0 and options.offload.offload_optimizer:
        section["offload_optimizer"] = _offload_optimizer(options)
    if stage == 3 and options.offload.offload_parameters:
        section["offload_param"] = _offload_parameters(options)
    return section


def _offload_optimizer(options: Options) -> dict[str, Any]:
    offload = options.offload
    section: dict[str, Any] = {
        "device": offload.offload_optimizer_device,
        "buffer_count": offload.optimizer_buffer_count,
        "pin_memory": offload.pin_memory,
    }
    if offload.offload_optimizer_device == "nvme":
        section["nvme_path"] = offload.nvme_path
    return section


def _offload_parameters(options: Options) -> dict[str, Any]:
    offload = options.offload
    section: dict[str, Any] = {
        "device": offload.offload_params_device,
        "buffer_count": offload.params_buffer_count,
        "buffer_size": offload.params_buffer_size,
        "max_in_cpu": offload.max_in_cpu,
        "pin_memory": offload.pin_memory,
    }
    if offload.offload_params_device == "nvme":
        section["nvme_path"] = offload.nvme_path
    return section


def settings_of(trainer: TrainerLike) -> list[Setting]:
    """Return what the Trainer decides."""
    accumulate, clip = trainer.accumulate_grad_batches, trainer.gradient_clip_val
    return [
        Setting(
            path=("gradient_accumulation_steps",),
            value=accumulate,
            place=f"the Trainer's accumulate_grad_batches={accumulate!r}",
        ),
        Setting(
            path=("gradient_clipping",), value=float(clip or 0.0), place=f"the Trainer's gradient_clip_val={clip!r}"
        ),
    ]


def settings_of_precision(flag: str, options: Options) -> list[Setting]:
    """Return what the precision decides: which 16 bits DeepSpeed itself computes in, and how it scales the loss."""
    place = f"precision={flag!r}"
    decided: dict[tuple[str, ...], Any] = {
        ("bf16", "enabled"): flag == "bf16-true",
        ("fp16", "enabled"): flag == "16-mixed",
    }
    if flag != "bf16-mixed":
        decided["torch_autocast", "enabled"] = False
    settings = [Setting(path=path, value=value, place=place) for path, value in decided.items()]
    if flag == "16-mixed":
        scale = dataclasses.asdict(options.loss_scale)
        settings += [
            Setting(path=("fp16", name), value=value, place=f"{name}={value!r}", yields=True)
            for name, value in scale.items()
        ]
    return settings


def merged(base: dict[str, Any], given: GivenConfig, settings: Iterable[Setting] = ()) -> dict[str, Any]:
    """Return the whole configuration.

    Args:
        base: What follows from the options.
        given: The user's, which is merged over it, section by section; the value ``"auto"`` changes nothing.
        settings: What is decided elsewhere.

    Raises:
        ConflictError: The user's configuration contradicts a setting; both places are named.
    """
    values = dict(given.values)
    if "bfloat16" in values:  # its name in earlier versions
        values["bf16"] = values.pop("bfloat16")
    config = _over(base, values)
    for setting in settings:
        _apply(config, setting, given.place)
    return config


def nvme_paths(config: dict[str, Any]) -> set[str]:
    """Return the folders in which a configuration keeps what is in files."""
    zero = config["zero_optimization"]
    return {str(zero[section]["nvme_path"]) for section in _sections_in_files(zero)}


def files_in(folders: Mapping[str, str], config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with other folders for what is in files.

    Parameters that are in files are let go after each use there, unless the configuration says how long they stay:
    DeepSpeed has few buffers to read them into, and fails where it keeps all of them.
    """
    zero = dict(config["zero_optimization"])
    for section in _sections_in_files(zero):
        path = str(zero[section]["nvme_path"])
        zero[section] = {**zero[section], "nvme_path": folders.get(path, path)}
        if section == "offload_param":
            zero.setdefault("stage3_max_reuse_distance", 0)
    return {**config, "zero_optimization": zero}


def _sections_in_files(zero: Mapping[str, Any]) -> list[str]:
    sections = {name: zero.get(name) for name in ("offload_optimizer", "offload_param")}
    return [name for name, values in sections.items() if isinstance(values, dict) and values.get("device") == "nvme"]


def without_boundaries(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with which gradients accumulate until a step, however many backward passes there are."""
    zero = config["zero_optimization"]
    if zero["stage"] == 0:
        return config  # all gradients are reduced in each backward pass
    if zero["stage"] == 1:
        zero = {**zero, "overlap_comm": False}  # they are reduced in the step
    return {**config, "managed_gradient_accumulation": False, "zero_optimization": zero}


def _over(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in values.items():
        if isinstance(value, str) and value == AUTO:
            continue
        below = result.get(key)
        result[key] = _over(below if isinstance(below, dict) else {}, value) if isinstance(value, dict) else value
    return result


def _apply(config: dict[str, Any], setting: Setting, place: str) -> None:
    *sections, key = setting.path
    for name in sections:
        section = config.setdefault(name, {})
        if not isinstance(section, dict):
            raise RequestError(f"{place} says {name}: {section!r}, and it must be a section: {{...}}")
        config = section
    if key in config and config[key] != setting.value:
        if setting.yields:
            return
        raise ConflictError(
            f"{place} says {'.'.join(setting.path)}: {config[key]!r}, and {setting.place} says otherwise: "
            "leave one of them out, or let both say the same"
        )
    config[key] = setting.value


# DeepSpeed's configuration of a run, from options and the user's own.


_logger = logging.getLogger(__name__)


class Configuration:
    """The options of a strategy, with the user's own configuration over them.

    Args:
        options: By name.
        given: The argument ``config``.
        batch_size: The argument ``logging_batch_size_per_gpu``.

    Attributes:
        options: In their groups.
        stage: Of ZeRO.

    Raises:
        RequestError: There is no such option, or a value is none of its own.
        ConflictError: Two options exclude each other.
    """

    def __init__(
        self, options: Mapping[str, Any], given: Mapping[str, Any] | str | Path | None, batch_size: int | str
    ) -> None:
        self.options = read_options(options)
        self._given = read_config(given, os.environ)
        self.stage = zero_stage(self.options, self._given)
        self._micro_batch = MicroBatch(batch_size, self._given)
        self._folders: dict[str, str] = {}
        check_options(self.options, self._known, self.stage)
        if self.options.checkpoints.load_full_weights:
            _logger.info("load_full_weights=True changes nothing: whole weights of a checkpoint are dealt out anyway")

    @property
    def _known(self) -> dict[str, Any]:
        """The configuration as far as it is known before a run: what is sharded, and where."""
        return merged(from_options(self.options, self.stage), self._given)

    def check_parts(self, parts: Parts) -> None:
        """Check what it needs of the other parts, as far as they are known, and of this machine."""
        if parts.precision_plugin is not None and parts.parallel_devices:
            check_parts(self.options, self._known, parts.precision_plugin.flag, parts.parallel_devices[0].type)
        check_can_offload(self._known, os.environ)
        if parts.parallel_devices:
            check_named_optimizer(self._known, parts.parallel_devices[0].type, os.environ, self._given.place)

    def check_ranks(self, world_size: int) -> None:
        """Check that the ranks can be divided as it says."""
        check_ranks(self._known, world_size, self._given.place)

    def check_batch(self, batch: Any) -> None:
        """Compare the sizes that it states with a batch of the training."""
        self._micro_batch.check(batch)

    @contextmanager
    def own_folders(self) -> Iterator[None]:
        """Let what is in files be in folders of this run alone in a ``with`` block; they are removed at its end."""
        with ExitStack() as made:
            self._folders = {path: made.enter_context(folder_in(path)) for path in nvme_paths(self._known)}
            try:
                yield
            finally:
                self._folders = {}

    def of_creation(self, flag: str) -> dict[str, Any]:
        """Return what stage 3 needs to know when layers are made, in a precision.

        Raises:
            RequestError: DeepSpeed does not take it.
            ConflictError: It contradicts the precision.
        """
        known = merged(from_options(self.options, self.stage), self._given, settings_of_precision(flag, self.options))
        config = {key: value for key, value in files_in(self._folders, known).items() if key not in SIZES}
        config["train_micro_batch_size_per_gpu"] = 1
        check_config(config, self._given.place)
        return config

    def of_run(
        self, trainer: TrainerLike, optimizer: Optimizer | None, *, flag: str, world_size: int
    ) -> dict[str, Any]:
        """Return the whole configuration of a run.

        Args:
            trainer: Its settings come before the user's configuration, which may not contradict them.
            optimizer: What ``configure_optimizers`` has returned.
            flag: Of the precision.
            world_size: Number of ranks.

        Raises:
            RequestError: DeepSpeed does not take it.
            ConflictError: It contradicts something else; both places are named.
        """
        if trainer.gradient_clip_val is not None:
            check_clipping(trainer.gradient_clip_algorithm)
        settings = [*settings_of(trainer), *settings_of_precision(flag, self.options)]
        config = files_in(self._folders, merged(from_options(self.options, self.stage), self._given, settings))
        self._micro_batch.complete(config, world_size=world_size)
        check_config(config, self._given.place)
        if not trainer.is_fitting:
            config.pop("optimizer", None)
        check_one_optimizer(config, optimizer, self._given.place, is_fitting=trainer.is_fitting)
        return config


# Sources of a DeepSpeed configuration: dict, JSON file, environment.


PATH_VARIABLE = "DSTRAT_DEEPSPEED_CONFIG_PATH"


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenConfig:
    """A configuration that the user has written.

    Attributes:
        place: Where it is, for error messages.
        values: What it says.
    """

    place: str
    values: dict[str, Any] = field(default_factory=dict)


def read_config(given: Mapping[str, Any] | str | Path | None, environ: Mapping[str, str]) -> GivenConfig:
    """Read the configuration of the user; empty where there is none.

    Args:
        given: The argument ``config``.
        environ: Names a file in ``DSTRAT_DEEPSPEED_CONFIG_PATH``, which is read where no argument is given.

    Raises:
        RequestError: There is no such file, or it is not a JSON object.
    """
    if isinstance(given, Mapping):
        return GivenConfig(place="config", values=copy.deepcopy(dict(given)))
    if given is not None and not isinstance(given, str | Path):
        raise RequestError(f"config is of the type {type(given).__name__}: give a dict, or the path of a JSON file")
    if given is None and not environ.get(PATH_VARIABLE):
        return GivenConfig(place="config")
    path = Path(given or environ[PATH_VARIABLE])
    place = f"config={str(path)!r}" if given is not None else f"{PATH_VARIABLE}={str(path)!r}"
    return GivenConfig(place=place, values=_parsed(path, place))


def _parsed(path: Path, place: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{place} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RequestError(f"{place} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise RequestError(f"{place} holds a JSON {type(values).__name__}, and a configuration is an object: {{...}}")
    return values

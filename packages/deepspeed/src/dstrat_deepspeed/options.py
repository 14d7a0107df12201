"""Options of ``DeepSpeedStrategy``, in groups."""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dstrat.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping


Device = Literal["cpu", "nvme"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroOptions:
    """Sharding and communication of ZeRO.

    Attributes:
        zero_optimization: Whether anything is sharded; False is stage 0.
        stage: 0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        contiguous_gradients: Whether gradients are copied into one buffer as they are computed.
        overlap_comm: Whether gradients are reduced while others are still computed.
        allgather_partitions: Whether updated parameters are collected by all-gather, rather than by broadcasts.
        reduce_scatter: Whether gradients are reduced by reduce-scatter, rather than by all-reduce.
        allgather_bucket_size: Elements that are gathered at a time.
        reduce_bucket_size: Elements that are reduced at a time.
        sub_group_size: Parameters that stage 3 updates at a time.
        zero_allow_untested_optimizer: Whether optimizers that DeepSpeed does not know are allowed.
    """

    zero_optimization: bool = True
    stage: int = 2
    contiguous_gradients: bool = True
    overlap_comm: bool = True
    allgather_partitions: bool = True
    reduce_scatter: bool = True
    allgather_bucket_size: int = 200_000_000
    reduce_bucket_size: int = 200_000_000
    sub_group_size: int = 1_000_000_000
    zero_allow_untested_optimizer: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadOptions:
    """State and parameters on the CPU or in files instead of on the device.

    Attributes:
        offload_optimizer: Whether optimizer state and step are there.
        offload_optimizer_device: ``"cpu"`` or ``"nvme"``.
        offload_parameters: Whether stage 3 keeps its shards of parameters there.
        offload_params_device: ``"cpu"`` or ``"nvme"``.
        remote_device: Where ``configure_model`` puts parameters under stage 3: ``"cpu"`` or ``"nvme"``; None follows
            from ``offload_parameters``.
        nvme_path: Folder in which each rank makes one for its files, until the end of a run.
        params_buffer_count: Buffers for parameters that are read from files.
        params_buffer_size: Elements in each of them.
        max_in_cpu: Elements of parameters that stay in memory when the rest is in files.
        optimizer_buffer_count: Buffers for optimizer state that is read from files.
        pin_memory: Whether memory on the CPU is page-locked.
    """

    offload_optimizer: bool = False
    offload_optimizer_device: Device = "cpu"
    offload_parameters: bool = False
    offload_params_device: Device = "cpu"
    remote_device: Device | None = None
    nvme_path: str = "/local_nvme"
    params_buffer_count: int = 5
    params_buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    optimizer_buffer_count: int = 4
    pin_memory: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FileOptions:
    """Reading and writing of files on NVMe.

    Attributes:
        block_size: Bytes of a request.
        queue_depth: Requests under way at a time.
        single_submit: Whether requests are submitted one by one.
        overlap_events: Whether they are submitted while others are waited for.
        thread_count: Threads of each rank.
    """

    block_size: int = 1_048_576
    queue_depth: int = 8
    single_submit: bool = False
    overlap_events: bool = True
    thread_count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaleOptions:
    """The scale of the loss with precision ``"16-mixed"``.

    Attributes:
        loss_scale: The scale; 0 lets it adapt itself, as the others say.
        initial_scale_power: The first scale is two to this power.
        loss_scale_window: Steps without overflow before the scale is doubled.
        hysteresis: Overflows before it is halved.
        min_loss_scale: The least scale.
    """

    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: float = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationOptions:
    """Activations of ``deepspeed.checkpointing.checkpoint``.

    Attributes:
        partition_activations: Whether they are divided over model-parallel ranks.
        cpu_checkpointing: Whether they are kept on the CPU.
        contiguous_memory_optimization: Whether they are copied into one buffer.
        synchronize_checkpoint_boundary: Whether the device is waited for at each checkpoint.
    """

    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    synchronize_checkpoint_boundary: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointOptions:
    """Content and form of checkpoints.

    Attributes:
        load_full_weights: Allowed for programs from elsewhere, and logged: whole parameters are always dealt out to
            the shards of stage 3.
        exclude_frozen_parameters: Whether parameters that need no gradient are left out of DeepSpeed's own files.
        save_native: Whether DeepSpeed's own files are written too, beside each checkpoint.
    """

    load_full_weights: bool = False
    exclude_frozen_parameters: bool = False
    save_native: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """All options of a strategy."""

    zero: ZeroOptions = field(default_factory=ZeroOptions)
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    files: FileOptions = field(default_factory=FileOptions)
    loss_scale: LossScaleOptions = field(default_factory=LossScaleOptions)
    activations: ActivationOptions = field(default_factory=ActivationOptions)
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)


_GROUPS: dict[str, type] = {
    "zero": ZeroOptions,
    "offload": OffloadOptions,
    "files": FileOptions,
    "loss_scale": LossScaleOptions,
    "activations": ActivationOptions,
    "checkpoints": CheckpointOptions,
}
_GROUP_OF = {option.name: name for name, group in _GROUPS.items() for option in dataclasses.fields(group)}
_KINDS = {option.name: str(option.type) for group in _GROUPS.values() for option in dataclasses.fields(group)}


def read_options(values: Mapping[str, Any]) -> Options:
    """Return the options of these values, which have the names of options.

    Raises:
        RequestError: There is no such option, or a value makes no sense.
    """
    grouped: dict[str, dict[str, Any]] = {name: {} for name in _GROUPS}
    for name, value in values.items():
        if name not in _GROUP_OF:
            near = difflib.get_close_matches(name, _GROUP_OF, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}" if near else "pass what has no name here in config="
            raise RequestError(f"DeepSpeedStrategy has no option {name!r}: {hint}")
        grouped[_GROUP_OF[name]][name] = possible_value(name, value, _KINDS[name])
    return Options(**{name: _GROUPS[name](**group) for name, group in grouped.items()})


def changed(group: Any) -> list[str]:
    """Return the options of a group that are not at their default."""
    default = type(group)()
    names = [option.name for option in dataclasses.fields(group)]
    return [name for name in names if getattr(group, name) != getattr(default, name)]


# Values of an option, by the type that its group states

_LEAST = {
    "reduce_bucket_size": 1,
    "params_buffer_count": 1,
    "params_buffer_size": 1,
    "optimizer_buffer_count": 1,
    "block_size": 1,
    "queue_depth": 1,
    "thread_count": 1,
    "loss_scale_window": 1,
    "hysteresis": 1,
}


def possible_value(name: str, value: Any, kind: str) -> Any:
    """Return the value of an option as DeepSpeed takes it, such as a whole number for ``5e8``.

    Args:
        name: Of the option.
        value: The user's.
        kind: The annotation of the option, as text.

    Raises:
        RequestError: The option cannot have the value.
    """
    if name == "stage":
        return possible_stage(value, f"stage {value!r} of ZeRO is not possible")
    if kind == "bool" and not isinstance(value, bool):
        raise RequestError(f"{name} {value!r} is not possible: give True or False")
    if kind.startswith("Device") and value not in ("cpu", "nvme") and not (kind.endswith("None") and value is None):
        raise RequestError(f"{name} {value!r} is not possible: choose 'cpu' or 'nvme'")
    if kind == "str":
        return _text(name, value)
    return _number(name, value, is_whole=kind == "int") if kind in ("int", "float") else value


def possible_stage(value: Any, complaint: str) -> int:
    """Return a stage of ZeRO.

    Raises:
        RequestError: It is none; the message begins with the complaint.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 3:
        raise RequestError(f"{complaint}: choose 0, 1, 2 or 3")
    return int(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise RequestError(f"{name} {value!r} is not possible: give the path of a folder")
    return str(os.fspath(value))


def _number(name: str, value: Any, *, is_whole: bool) -> int | float:
    least = _LEAST.get(name, 0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value >= least or (is_whole and value % 1):
        raise RequestError(
            f"{name} {value!r} is not possible: give a {'whole ' if is_whole else ''}number from {least} on"
        )
    return int(value) if is_whole else value

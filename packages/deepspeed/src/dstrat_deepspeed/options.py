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
        zero_optimization: Whether ZeRO shards; False is stage 0.
        stage: 0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        contiguous_gradients: Whether gradients are copied into one buffer as they are computed.
        overlap_comm: Whether gradients are reduced while others are still computed.
        allgather_partitions: Whether updated parameters are gathered by all-gather instead of broadcasts.
        reduce_scatter: Whether gradients are reduced by reduce-scatter instead of all-reduce.
        allgather_bucket_size: Elements of an all-gather.
        reduce_bucket_size: Elements of a reduction.
        sub_group_size: Elements that stage 3 updates at a time.
        zero_allow_untested_optimizer: Whether optimizers outside DeepSpeed's own list are allowed.
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
    """Offloading of optimizer state and parameters to the CPU or to files.

    Attributes:
        offload_optimizer: Whether the optimizer's state and step are offloaded.
        offload_optimizer_device: ``"cpu"`` or ``"nvme"``.
        offload_parameters: Whether stage 3 offloads its shards of parameters.
        offload_params_device: ``"cpu"`` or ``"nvme"``.
        remote_device: Device on which ``configure_model`` creates the shards of stage 3: ``"cpu"`` or ``"nvme"``; None
            follows ``offload_parameters``.
        nvme_path: Folder in which each rank makes a folder for its files, until the end of a run.
        params_buffer_count: Number of buffers for parameters in files.
        params_buffer_size: Elements of each of these buffers.
        max_in_cpu: Elements of parameters that stay in memory when the other ones are in files.
        optimizer_buffer_count: Number of buffers for optimizer state in files.
        pin_memory: Whether offloaded memory on the CPU is page-locked.
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
    """Asynchronous I/O of files on NVMe.

    Attributes:
        block_size: Bytes of a request.
        queue_depth: Number of requests in flight.
        single_submit: Whether requests are submitted one by one.
        overlap_events: Whether requests are submitted while earlier ones complete.
        thread_count: Number of threads of each rank.
    """

    block_size: int = 1_048_576
    queue_depth: int = 8
    single_submit: bool = False
    overlap_events: bool = True
    thread_count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaleOptions:
    """Loss scale of precision ``"16-mixed"``.

    Attributes:
        loss_scale: Static scale; 0 is a dynamic one, which the other options control.
        initial_scale_power: Exponent of the initial scale, to base 2.
        loss_scale_window: Steps without overflow before the scale is doubled.
        hysteresis: Overflows before the scale is halved.
        min_loss_scale: Lower bound of the scale.
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
        partition_activations: Whether activations are sharded over model-parallel ranks.
        cpu_checkpointing: Whether activations are moved to the CPU.
        contiguous_memory_optimization: Whether activations are copied into one buffer.
        synchronize_checkpoint_boundary: Whether the device is synchronized at each checkpoint.
    """

    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    synchronize_checkpoint_boundary: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointOptions:
    """Content and form of checkpoints.

    Attributes:
        load_full_weights: Accepted for compatibility, and logged: full parameters are always scattered to the shards
            of stage 3.
        exclude_frozen_parameters: Whether DeepSpeed's own files have only parameters that require gradients.
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


_GROUPS: dict[str, Any] = {group.name: group.default_factory for group in dataclasses.fields(Options)}
_GROUP_OF = {option.name: name for name, group in _GROUPS.items() for option in dataclasses.fields(group)}
_KINDS = {option.name: str(option.type) for group in _GROUPS.values() for option in dataclasses.fields(group)}


def read_options(values: Mapping[str, Any]) -> Options:
    """Return options from values by name.

    Raises:
        RequestError: An option does not exist, or its value is not valid.
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
    """Return the names of a group's options whose values differ from the defaults."""
    default = type(group)()
    names = [option.name for option in dataclasses.fields(group)]
    return [name for name in names if getattr(group, name) != getattr(default, name)]


# Validation of values, by the annotation of the option

_FROM_1 = (
    *("reduce_bucket_size", "params_buffer_count", "params_buffer_size", "optimizer_buffer_count", "block_size"),
    *("queue_depth", "thread_count", "loss_scale_window", "hysteresis", "logging_batch_size_per_gpu"),
)


def possible_value(name: str, value: Any, kind: str) -> Any:
    """Return the value of an option in DeepSpeed's type, such as an int for ``5e8``.

    Args:
        name: Of the option.
        value: The user's.
        kind: The annotation of the option as a str.

    Raises:
        RequestError: The value is not valid for the option.
    """
    if name == "stage" and (isinstance(value, bool) or value not in (0, 1, 2, 3) or not isinstance(value, int)):
        raise RequestError(f"stage {value!r} of ZeRO is not possible: choose 0, 1, 2 or 3")
    if kind == "bool" and not isinstance(value, bool):
        raise RequestError(f"{name} {value!r} is not possible: give True or False")
    if kind.startswith("Device") and value not in ("cpu", "nvme") and not (kind.endswith("None") and value is None):
        raise RequestError(f"{name} {value!r} is not possible: choose 'cpu' or 'nvme'")
    if kind == "str":
        if not isinstance(value, str | os.PathLike) or not os.fspath(value):
            raise RequestError(f"{name} {value!r} is not possible: give the path of a folder")
        return str(os.fspath(value))
    return _number(name, value, is_integer=kind == "int") if kind in ("int", "float") else value


def _number(name: str, value: Any, *, is_integer: bool) -> int | float:
    least = 1 if name in _FROM_1 else 0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value >= least or (is_integer and value % 1):
        raise RequestError(
            f"{name} {value!r} is not possible: give a {'whole ' if is_integer else ''}number from {least} on"
        )
    return int(value) if is_integer else value

"""Validation of options and of the user's configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError, RequestError
from dstrat_deepspeed.idle_options import check_offloading
from dstrat_deepspeed.options import changed
from dstrat_deepspeed.prerequisites import check_lockable, check_prerequisites

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dstrat.interfaces.precision import ClipAlgorithm
    from dstrat_deepspeed.options import Options

_SECTIONS = ("offload_optimizer", "offload_param")


def check_options(options: Options, config: dict[str, Any], stage: int) -> None:
    """Check that no option would be ignored.

    Raises:
        ConflictError: One would.
    """
    offload, zero = options.offload, options.zero
    if "stage" in changed(zero) and zero.stage and not zero.zero_optimization:
        raise ConflictError(f"zero_optimization=False is stage 0, and stage={zero.stage} shards: leave one of them out")
    if "sub_group_size" in changed(zero) and stage != 3:
        raise ConflictError(f"sub_group_size is for the step of stage 3, and the stage is {stage}: leave it out")
    if offload.offload_optimizer and stage == 0:
        raise ConflictError("offload_optimizer needs a sharded optimizer: choose stage 1, 2 or 3, or leave it out")
    if offload.offload_parameters and stage != 3:
        raise ConflictError(f"offload_parameters needs stage 3, which shards parameters, and the stage is {stage}")
    if offload.remote_device is not None and stage != 3:
        raise ConflictError(f"remote_device is for parameters of stage 3, and the stage is {stage}: leave it out")
    if "nvme" in dict(_devices(config)).values() and stage != 3:
        raise ConflictError(f"only stage 3 can offload to 'nvme', and the stage is {stage}: choose 'cpu'")
    check_offloading(options)
    if offload.remote_device == "nvme" and dict(_devices(config)).get("offload_param") != "nvme":
        raise ConflictError(
            "remote_device='nvme' makes parameters in files, where they stay with offload_parameters=True and "
            "offload_params_device='nvme' only: pass these too, or leave it out"
        )
    _check_activations(_activations(config))
    _check_loss_scale(options)
    if options.checkpoints.exclude_frozen_parameters and not options.checkpoints.save_native:
        raise ConflictError(
            "exclude_frozen_parameters is about DeepSpeed's own files, which save_native=True writes: set that, or "
            "leave it out"
        )
    idle = changed(options.files)
    if idle and "nvme" not in dict(_devices(config)).values():
        raise ConflictError(f"{', '.join(idle)} say how files on NVMe are read, and nothing is offloaded to 'nvme'")


def _activations(config: dict[str, Any]) -> dict[str, Any]:
    section = config.get("activation_checkpointing")
    return section if isinstance(section, dict) else {}


def _check_activations(section: dict[str, Any]) -> None:
    is_possible = section.get("partition_activations") and section.get("number_checkpoints")
    if section.get("contiguous_memory_optimization") and not is_possible:
        raise ConflictError(
            "contiguous_memory_optimization needs partition_activations=True, and the number of checkpoints in a "
            'forward pass: config={"activation_checkpointing": {"number_checkpoints": ...}}'
        )


def _check_loss_scale(options: Options) -> None:
    idle = [name for name in changed(options.loss_scale) if name != "loss_scale"]
    if idle and options.loss_scale.loss_scale:
        raise ConflictError(
            f"loss_scale={options.loss_scale.loss_scale!r} is the scale of the whole training, and "
            f"{', '.join(idle)} say how it adapts itself: leave one of them out"
        )


def check_parts(options: Options, config: dict[str, Any], flag: str, device_type: str) -> None:
    """Check that options and precision go together with each other and with the hardware.

    Raises:
        ConflictError: DeepSpeed does not compute in the precision there, or options are without effect.
    """
    if device_type == "cpu" and _activations(config).get("cpu_checkpointing"):
        raise ConflictError(
            "cpu_checkpointing moves activations to the CPU, where the accelerator 'cpu' has them already: leave it out"
        )
    if flag == "16-mixed" and device_type == "cpu":
        raise ConflictError(
            "precision '16-mixed' cannot work on the accelerator 'cpu', where DeepSpeed has no float16: "
            "choose 'bf16-mixed', 'bf16-true' or '32-true'"
        )
    idle = changed(options.loss_scale)
    if idle and flag != "16-mixed":
        raise ConflictError(f"{', '.join(idle)} scale the loss of precision '16-mixed', and the precision is {flag!r}")


def check_clipping(algorithm: ClipAlgorithm) -> None:
    """Check that DeepSpeed can clip gradients so.

    Raises:
        RequestError: It cannot.
    """
    if algorithm != "norm":
        raise RequestError(
            f"gradient_clip_algorithm={algorithm!r} is not possible with DeepSpeed, which clips by norm only: "
            "leave it out, or train with another strategy"
        )


def check_can_offload(config: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Check what a configuration needs of this machine.

    Raises:
        RequestError: A compiler, a library or a folder is missing.
    """
    for section, device in _devices(config):
        if device == "nvme":
            _check_folder(config["zero_optimization"][section].get("nvme_path"))
            check_prerequisites("async_io", f"{section} on 'nvme'", environ)
            if section == "offload_param":
                _check_buffers(config["zero_optimization"][section])
        if section == "offload_optimizer" and uses_cpu_optimizer(config) and "optimizer" not in config:
            check_prerequisites("cpu_adam", "offload_optimizer", environ)


def _check_buffers(section: dict[str, Any]) -> None:
    """Check that the buffers for parameters, of at least 16 bits, can be locked in memory."""
    size = 2 * section.get("buffer_count", 5) * section.get("buffer_size", 100_000_000)
    check_lockable(
        int(size), "offload_param on 'nvme'", "pass a smaller params_buffer_size (elements) or params_buffer_count"
    )


def check_state_buffers(config: dict[str, Any], groups: Sequence[Mapping[str, Any]], world_size: int) -> None:
    """Check that the buffers for optimizer state in files, in 32 bits, can be locked in memory.

    Args:
        config: The whole configuration of a run.
        groups: The optimizer's, with the parameters, which may be sharded already.
        world_size: Ranks among which each parameter is divided.

    Raises:
        RequestError: This process may lock less.
    """
    if ("offload_optimizer", "nvme") not in _devices(config):
        return
    zero = config["zero_optimization"]
    largest = max(
        _largest_part(group["params"], zero.get("sub_group_size", 1_000_000_000), world_size) for group in groups
    )
    check_lockable(
        int(4 * zero["offload_optimizer"].get("buffer_count", 4) * largest),
        "offload_optimizer on 'nvme'",
        "pass a smaller sub_group_size (elements)",
    )


def _largest_part(parameters: Sequence[Any], size: int, world_size: int) -> int:
    """Return the elements of the largest part of a group on a rank; a part ends where it has at least that size."""
    largest = part = 0
    for parameter in parameters:
        part += -(-getattr(parameter, "ds_numel", parameter.numel()) // world_size)
        largest = max(largest, part)
        if part >= size:
            part = 0
    return largest


def uses_cpu_optimizer(config: dict[str, Any]) -> bool:
    """Return whether the optimizer's step is on the CPU, by an optimizer of DeepSpeed's."""
    return offloads_optimizer(config) and config.get("zero_force_ds_cpu_optimizer", True)


def offloads_optimizer(config: dict[str, Any]) -> bool:
    """Return whether the optimizer's state is not on the device."""
    return "offload_optimizer" in dict(_devices(config))


def check_ranks(config: dict[str, Any], world_size: int, place: str) -> None:
    """Check that the ranks can be divided as a whole configuration says, and that each of them reads its own data.

    Raises:
        RequestError: Groups do not come out even, or a size is none.
        ConflictError: Several ranks would share the data of one.
    """
    size = _size(config, ("zero_optimization", "zero_hpz_partition_size"), place, least=1)
    if world_size % size:
        raise RequestError(
            f"{place} says zero_optimization.zero_hpz_partition_size: {size}, which does not divide the {world_size} "
            "ranks: give one that does"
        )
    shared = {
        "tensor_parallel.autotp_size": _size(config, ("tensor_parallel", "autotp_size"), place, least=0),
        "sequence_parallel_size": _size(config, ("sequence_parallel_size",), place, least=1),
    }
    for name, count in shared.items():
        if count > 1:
            raise ConflictError(
                f"{place} says {name}: {count}, with which {count} ranks read the same data, and DeepSpeedStrategy "
                "gives each rank its own: leave it out"
            )


def _size(config: dict[str, Any], path: tuple[str, ...], place: str, *, least: int) -> int:
    """Return the number of ranks at a path of keys, by default the least one, which divides nothing."""
    section: Any = config
    for name in path[:-1]:
        section = section.get(name, {})
        if not isinstance(section, dict):
            raise RequestError(f"{place} says {name}: {section!r}, and it must be a section: {{...}}")
    size = section.get(path[-1], least)
    if isinstance(size, bool) or not isinstance(size, int) or size < least:
        raise RequestError(
            f"{place} says {'.'.join(path)}: {size!r}, which is not possible: give a whole number from {least} on"
        )
    return size


def _devices(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is offloaded, and where to."""
    zero = config.get("zero_optimization", {})
    for section in _SECTIONS:
        values = zero.get(section) if isinstance(zero, dict) else None
        if isinstance(values, dict) and values.get("device", "none") != "none":
            yield section, values["device"]


def _check_folder(path: Any) -> None:
    if path is None:
        raise RequestError(
            "offloading to 'nvme' needs a folder: pass nvme_path='/path/on/nvme', or \"nvme_path\" in the section of a "
            "configuration that says so"
        )
    if not (Path(path).is_dir() and os.access(path, os.W_OK)):
        raise RequestError(
            f"nvme_path {str(path)!r} is not a folder that can be written: make it, or pass another nvme_path"
        )

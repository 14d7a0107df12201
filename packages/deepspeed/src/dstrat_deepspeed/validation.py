"""Validation of options and of the user's configuration."""

from __future__ import annotations

import difflib
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError, RequestError
from dstrat_deepspeed.options import changed
from dstrat_deepspeed.runtime import check_lockable, check_prerequisites

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dstrat.interfaces.precision import ClipAlgorithm
    from dstrat_deepspeed.options import Options


# Options that contradict each other, or would have no effect


def check_options(options: Options, config: dict[str, Any], stage: int) -> None:
    """Raise a ConflictError if options contradict each other, or if one has no effect."""
    offload, zero, devices = options.offload, options.zero, offload_devices(config)
    scaling = [name for name in changed(options.loss_scale) if name != "loss_scale"]
    activations = _section(config, "activation_checkpointing")
    has_checkpoints = activations.get("partition_activations") and activations.get("number_checkpoints")
    conflicts = {
        f"zero_optimization=False needs stage=0, not stage={zero.stage}: leave one of them out": (
            "stage" in changed(zero) and zero.stage and not zero.zero_optimization
        ),
        f"sub_group_size needs stage=3, not stage={stage}: leave it out": (
            "sub_group_size" in changed(zero) and stage != 3
        ),
        "offload_optimizer needs a sharded optimizer: choose stage 1, 2 or 3, or leave it out": (
            offload.offload_optimizer and stage == 0
        ),
        f"offload_parameters needs stage=3, which shards parameters, not stage={stage}": (
            offload.offload_parameters and stage != 3
        ),
        f"remote_device needs stage=3, not stage={stage}: leave it out": (
            offload.remote_device is not None and stage != 3
        ),
        f"offloading to 'nvme' needs stage=3, not stage={stage}: choose 'cpu'": (
            "nvme" in devices.values() and stage != 3
        ),
        **_unused_offload_options(options),
        "remote_device='nvme' makes parameters in files, where they stay with offload_parameters=True and "
        "offload_params_device='nvme' only: pass these too, or leave it out": (
            offload.remote_device == "nvme" and devices.get("offload_param") != "nvme"
        ),
        "contiguous_memory_optimization needs partition_activations=True, and the number of checkpoints in a "
        'forward pass: config={"activation_checkpointing": {"number_checkpoints": ...}}': (
            activations.get("contiguous_memory_optimization") and not has_checkpoints
        ),
        f"loss_scale={options.loss_scale.loss_scale!r} is the scale of the whole training, and {', '.join(scaling)} "
        "say how it adapts itself: leave one of them out": scaling and options.loss_scale.loss_scale,
        "exclude_frozen_parameters is about DeepSpeed's own files, which save_native=True writes: set that, or leave "
        "it out": options.checkpoints.exclude_frozen_parameters and not options.checkpoints.save_native,
        f"{', '.join(changed(options.files))} say how files on NVMe are read, and nothing is offloaded to 'nvme'": (
            changed(options.files) and "nvme" not in devices.values()
        ),
    }
    for message, is_conflict in conflicts.items():
        if is_conflict:
            raise ConflictError(message)


def _unused_offload_options(options: Options) -> dict[str, bool]:
    """Return, by message, whether each changed option of offloading has no effect."""
    offload = options.offload
    optimizer = offload.offload_optimizer_device if offload.offload_optimizer else None
    parameters = offload.offload_params_device if offload.offload_parameters else None
    in_files = "parameters offloaded to 'nvme'"
    needed = {
        "offload_optimizer_device": (optimizer, "offload_optimizer=True"),
        "offload_params_device": (parameters, "offload_parameters=True"),
        "optimizer_buffer_count": (optimizer == "nvme", "the optimizer offloaded to 'nvme'"),
        "params_buffer_count": (parameters == "nvme", in_files),
        "params_buffer_size": (parameters == "nvme", in_files),
        "max_in_cpu": (parameters == "nvme", in_files),
        "nvme_path": (
            "nvme" in (optimizer, parameters),
            "offload_optimizer_device='nvme' or offload_params_device='nvme'",
        ),
        "pin_memory": (optimizer or parameters, "offload_optimizer=True or offload_parameters=True"),
    }
    return {
        f"{name}={getattr(offload, name)!r} changes nothing without {needed[name][1]}: pass that too (sections of "
        "config= say all of it themselves), or leave it out": not needed[name][0]
        for name in changed(offload)
        if name in needed
    }


def check_components(options: Options, config: dict[str, Any], flag: str, device_type: str) -> None:
    """Raise a ConflictError if DeepSpeed lacks the precision on the device, or if an option has no effect there."""
    if device_type == "cpu" and _section(config, "activation_checkpointing").get("cpu_checkpointing"):
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
    """Raise a RequestError for another algorithm than ``"norm"``, the only one that DeepSpeed has."""
    if algorithm != "norm":
        raise RequestError(
            f"gradient_clip_algorithm={algorithm!r} is not possible with DeepSpeed, which clips by norm only: "
            "leave it out, or train with another strategy"
        )


# Offloading, by the complete configuration


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def offload_devices(config: dict[str, Any]) -> dict[str, str]:
    """Return the device of each offloading section of a configuration; without those that do not offload."""
    zero = _section(config, "zero_optimization")
    devices = {name: _section(zero, name).get("device", "none") for name in ("offload_optimizer", "offload_param")}
    return {name: device for name, device in devices.items() if device != "none"}


def uses_cpu_optimizer(config: dict[str, Any]) -> bool:
    """Return whether one of DeepSpeed's optimizers for the CPU makes the step."""
    return offloads_optimizer(config) and config.get("zero_force_ds_cpu_optimizer", True)


def offloads_optimizer(config: dict[str, Any]) -> bool:
    """Return whether the optimizer's state is offloaded."""
    return "offload_optimizer" in offload_devices(config)


def check_can_offload(config: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Raise a RequestError if this machine lacks the compiler, the library, the folder or the memory that is needed."""
    for name, device in offload_devices(config).items():
        if device == "nvme":
            section = config["zero_optimization"][name]
            _check_folder(section.get("nvme_path"))
            check_prerequisites("async_io", f"{name} on 'nvme'", environ)
            if name == "offload_param":
                check_lockable(  # the dtype is not known yet; elements of parameters have at least 2 bytes
                    int(2 * section.get("buffer_count", 5) * section.get("buffer_size", 100_000_000)),
                    "offload_param on 'nvme'",
                    "pass a smaller params_buffer_size (elements) or params_buffer_count",
                )
        if name == "offload_optimizer" and uses_cpu_optimizer(config) and "optimizer" not in config:
            check_prerequisites("cpu_adam", "offload_optimizer", environ)


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


def check_state_buffers(config: dict[str, Any], groups: Sequence[Mapping[str, Any]], world_size: int) -> None:
    """Raise a RequestError if this process may not lock the buffers for optimizer state in files, which has 32 bits.

    Args:
        config: The complete configuration of a run.
        groups: The optimizer's, with parameters that may be sharded already.
        world_size: Number of ranks that share each parameter.
    """
    if offload_devices(config).get("offload_optimizer") != "nvme":
        return
    zero = config["zero_optimization"]
    group_size = zero.get("sub_group_size", 1_000_000_000)
    largest = max(_largest_sub_group(group["params"], group_size, world_size) for group in groups)
    check_lockable(
        int(4 * zero["offload_optimizer"].get("buffer_count", 4) * largest),
        "offload_optimizer on 'nvme'",
        "pass a smaller sub_group_size (elements)",
    )


def _largest_sub_group(parameters: Sequence[Any], size: int, world_size: int) -> int:
    """Return the elements of a rank's largest sub-group; DeepSpeed closes one when it reaches the size."""
    largest = current = 0
    for parameter in parameters:
        current += -(-getattr(parameter, "ds_numel", parameter.numel()) // world_size)
        largest = max(largest, current)
        if current >= size:
            current = 0
    return largest


# The complete configuration, which DeepSpeed parses before the run

# Keys that DeepSpeed reads outside DeepSpeedConfig
_READ_ELSEWHERE = {"data_parallel_size", "sequence_parallel_size", "keep_in_fp32_modules"}
_LENIENT = (
    "activation_checkpointing",
    "aio",
    "data_efficiency",
    "flops_profiler",
    "torch_autocast",
)
"""Sections in which DeepSpeed ignores unknown keys; in others they are errors."""


def check_config(config: dict[str, Any], source: str, world_size: int) -> None:
    """Check the values and the keys of a configuration, and that its groups divide the ranks.

    Raises:
        RequestError: DeepSpeed does not accept the configuration, or does not read one of its keys, or a group's size
            does not divide the number of ranks.
        ConflictError: Several ranks would read the same data.
    """
    # DeepSpeed ignores unknown top-level keys: the keys that it reads show the misspelled ones.
    sections = {name: _ObservedKeys(config[name]) for name in _LENIENT if isinstance(config.get(name), dict)}
    observed = _ObservedKeys({**config, **sections})
    try:
        import_module("deepspeed.runtime.config").DeepSpeedConfig(observed)
    except Exception as error:  # each section raises another class, of pydantic, asserts or DeepSpeed's own
        raise RequestError(f"DeepSpeed does not take the configuration ({source}): {_reason(error)}") from error
    _check_keys(config, observed.read | _READ_ELSEWHERE, source)
    for name, section in sections.items():
        _check_keys(config[name], section.read, f"{source}, in its section {name},")
    _check_groups(config, source, world_size)


def _check_groups(config: dict[str, Any], source: str, world_size: int) -> None:
    size = int(_section(config, "zero_optimization").get("zero_hpz_partition_size") or 1)
    if world_size % size:
        raise RequestError(
            f"{source} says zero_optimization.zero_hpz_partition_size: {size}, which does not divide the {world_size} "
            "ranks: give one that does"
        )
    shared = {
        "tensor_parallel.autotp_size": _section(config, "tensor_parallel").get("autotp_size", 0),
        "sequence_parallel_size": config.get("sequence_parallel_size", 1),
    }
    for name, count in shared.items():
        if count not in (0, 1):
            raise ConflictError(
                f"{source} says {name}: {count}, with which {count} ranks read the same data, and DeepSpeedStrategy "
                "gives each rank its own: leave it out"
            )


def _check_keys(values: dict[str, Any], known: set[str], source: str) -> None:
    unknown = sorted(set(values) - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ": leave it out"
        raise RequestError(f"{source} has the key {unknown[0]!r}, which DeepSpeed does not know{hint}")


def _reason(error: Exception) -> str:
    details = getattr(error, "errors", None)
    if details is None:  # not an error of pydantic
        return f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__} in its own check"
    section = getattr(error, "title", "").removeprefix("DeepSpeed").removesuffix("Config")
    return "; ".join(
        f"{section} {'.'.join(map(str, detail['loc']))}={detail['input']!r}: {detail['msg']}" for detail in details()
    )


class _ObservedKeys(dict[str, Any]):
    """A dict that records which of its keys are read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        """Return the dict itself, which also records ``key in config.keys()``."""
        return self

    def __copy__(self) -> _ObservedKeys:
        return self  # DeepSpeed reads a copy of the dict, which would record nothing

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # ** and dict() bypass the methods above for a subclass without its own __iter__

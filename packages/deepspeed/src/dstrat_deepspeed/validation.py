"""Validation of options and of the user's configuration."""

from __future__ import annotations

import difflib
import importlib.util
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import ConflictError, RequestError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat_deepspeed.options import changed
from dstrat_deepspeed.prerequisites import check_lockable, check_prerequisites

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from dstrat.interfaces.precision import ClipAlgorithm
    from dstrat_deepspeed.config import GivenConfig
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


# Validation of offloading options that would have no effect.


def check_offloading(options: Options) -> None:
    """Check that no option of offloading would be ignored.

    Raises:
        ConflictError: One would, as nothing is offloaded so.
    """
    offload = options.offload
    of_optimizer = offload.offload_optimizer_device if offload.offload_optimizer else None
    of_parameters = offload.offload_params_device if offload.offload_parameters else None
    anything = of_optimizer or of_parameters
    in_files = "nvme" in (of_optimizer, of_parameters)
    needed = {
        "offload_optimizer_device": (of_optimizer, "offload_optimizer=True"),
        "offload_params_device": (of_parameters, "offload_parameters=True"),
        "optimizer_buffer_count": (of_optimizer == "nvme", "the optimizer offloaded to 'nvme'"),
        "params_buffer_count": (of_parameters == "nvme", "parameters offloaded to 'nvme'"),
        "params_buffer_size": (of_parameters == "nvme", "parameters offloaded to 'nvme'"),
        "max_in_cpu": (of_parameters == "nvme", "parameters offloaded to 'nvme'"),
        "nvme_path": (in_files, "offload_optimizer_device='nvme' or offload_params_device='nvme'"),
        "pin_memory": (anything, "offload_optimizer=True or offload_parameters=True"),
    }
    for name in changed(offload):
        has, what = needed.get(name, (True, ""))
        if not has:
            raise ConflictError(
                f"{name}={getattr(offload, name)!r} changes nothing without {what}: pass that too (sections of config= "
                "say all of it themselves), or leave it out"
            )


# Letting DeepSpeed read a configuration before it is used, and telling what it does not take, or does not look at.


_READ_ELSEWHERE = {"data_parallel_size", "sequence_parallel_size", "keep_in_fp32_modules"}
_LENIENT = (
    "activation_checkpointing",
    "aio",
    "data_efficiency",
    "flops_profiler",
    "torch_autocast",
)
"""Sections whose keys DeepSpeed asks for one by one, whatever else they have; others refuse what they do not know."""


def check_config(config: dict[str, Any], place: str) -> None:
    """Check the values and the keys of a configuration.

    Args:
        config: The whole of it.
        place: Where the user has written a part of it, for error messages.

    Raises:
        RequestError: DeepSpeed does not take it, or it has a key that DeepSpeed does not look at.
    """
    sections = {name: _ObservedKeys(config[name]) for name in _LENIENT if isinstance(config.get(name), dict)}
    observed = _ObservedKeys({**config, **sections})
    try:
        import_module("deepspeed.runtime.config").DeepSpeedConfig(observed)
    except Exception as error:  # a dozen classes, by the part of DeepSpeed that reads a section
        raise RequestError(f"DeepSpeed does not take the configuration ({place}): {_reason(error)}") from error
    _check_keys(config, observed.asked | _READ_ELSEWHERE, place)
    for name in _LENIENT:
        section = observed.get(name)
        if isinstance(section, _ObservedKeys):
            _check_keys(config[name], section.asked, f"{place}, in its section {name},")


def _check_keys(values: dict[str, Any], known: set[str], place: str) -> None:
    unknown = sorted(set(values) - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ": leave it out"
        raise RequestError(f"{place} has the key {unknown[0]!r}, which DeepSpeed does not know{hint}")


def _reason(error: Exception) -> str:
    details = getattr(error, "errors", None)
    if details is None:  # not pydantic's
        return f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__} in its own check"
    section = getattr(error, "title", "").removeprefix("DeepSpeed").removesuffix("Config")
    return "; ".join(
        f"{section} {'.'.join(map(str, detail['loc']))}={detail['input']!r}: {detail['msg']}" for detail in details()
    )


class _ObservedKeys(dict[str, Any]):
    """A dict that notes which keys it is asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        """Return what notes the questions of ``key in config.keys()`` too."""
        return self

    def __copy__(self) -> _ObservedKeys:
        return self  # DeepSpeed reads a copy

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()


# The micro-batch size that a configuration has to state.


_MICRO, _GLOBAL = "train_micro_batch_size_per_gpu", "train_batch_size"
SIZES = (_MICRO, _GLOBAL, "gradient_accumulation_steps")
"""What a configuration says of the number of samples."""


class MicroBatch:
    """Number of samples in a batch of one rank, which DeepSpeed uses for figures of its own only.

    Args:
        asked: The option ``logging_batch_size_per_gpu``: a number, or ``"auto"``.
        given: The user's configuration.
    """

    def __init__(self, asked: int | str, given: GivenConfig) -> None:
        if asked != "auto" and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
            raise RequestError(
                f"logging_batch_size_per_gpu {asked!r} is not possible: give a whole number from 1 on, or 'auto'"
            )
        self._asked = asked
        self._given = given
        self._stated: tuple[str, int] | None = None

    def complete(self, config: dict[str, Any], *, world_size: int) -> None:
        """Write the size into a whole configuration.

        Raises:
            RequestError: The global size that the user has given cannot be divided.
            ConflictError: Two sizes contradict each other.
        """
        accumulate = config["gradient_accumulation_steps"]
        if _MICRO in config:
            self._state(f"{self._given.place} says {_MICRO}", config[_MICRO], config)
        if _GLOBAL in config:
            whole, share = config.pop(_GLOBAL), world_size * accumulate
            if not isinstance(whole, int) or whole % share:
                raise RequestError(
                    f"{self._given.place} says {_GLOBAL}: {whole!r}, which is no multiple of {world_size} ranks times "
                    f"accumulate_grad_batches={accumulate}: give one that is, or leave it out"
                )
            self._state(f"{self._given.place} says {_GLOBAL}", whole // share, config)
        if self._asked != "auto":
            self._state(f"logging_batch_size_per_gpu={self._asked!r}", int(self._asked), config)
        config.setdefault(_MICRO, 1)

    def _state(self, place: str, size: int, config: dict[str, Any]) -> None:
        if self._stated is not None and self._stated[1] != size:
            raise ConflictError(
                f"{place}, which makes {size} samples in each batch of a rank, and {self._stated[0]}, which makes "
                f"{self._stated[1]}: leave one of them out"
            )
        self._stated = (place, size)
        config[_MICRO] = size

    def check(self, batch: Any) -> None:
        """Compare what the configuration says with the first batch of a training.

        Raises:
            ConflictError: They differ.
        """
        sizes: list[int] = []
        apply_to_tensors(batch, lambda tensor: _note_size(tensor, sizes))
        if self._stated is not None and sizes and self._stated[1] not in sizes:
            place, size = self._stated
            raise ConflictError(
                f"{place}, which makes {size} samples in each batch of a rank, and the first batch of the training "
                f"loader has {sizes[0]}: let both say the same, or leave it out"
            )
        self._stated = None


def _note_size(tensor: Tensor, sizes: list[int]) -> Tensor:
    sizes.extend(tensor.shape[:1])
    return tensor


# The optimizer that a configuration names, which DeepSpeed makes and perhaps compiles.


_OWN = ("adam", "adamw", "adagrad", "lamb", "lion", "muon", "muadam", "muadamw", "musgd")
_ON_THE_CPU = {
    "adam": "cpu_adam",
    "adamw": "cpu_adam",
    "muon": "cpu_adam",
    "adagrad": "cpu_adagrad",
    "lion": "cpu_lion",
    "lamb": "fused_lamb",
}
_ON_THE_DEVICE = {"adam": "fused_adam", "adamw": "fused_adam", "lion": "fused_lion", "lamb": "fused_lamb"}
_NOT_FOR_CPUS = ("fused_lion", "fused_lamb")


def check_named_optimizer(config: dict[str, Any], device_type: str, environ: Mapping[str, str], place: str) -> None:
    """Check that DeepSpeed can make the optimizer that a configuration names, if it does.

    Args:
        config: As far as it is known before a run.
        device_type: ``"cpu"`` or ``"cuda"``.
        environ: Says where programs are, and what they have compiled.
        place: Where the user has written it, for error messages.

    Raises:
        RequestError: There is no such optimizer, it is not for the device, or it cannot be compiled.
    """
    if "optimizer" not in config:
        return
    name, options = _named(config["optimizer"], place)
    if name.startswith("mu") and name != "muon" and importlib.util.find_spec("mup") is None:
        raise RequestError(f"{place} names the optimizer {name!r}, which is of the package mup: pip install mup")
    operations = _ON_THE_CPU if offloads_optimizer(config) else _ON_THE_DEVICE
    operation = None if options.get("torch_adam") else operations.get(name)
    if device_type == "cpu" and operation in _NOT_FOR_CPUS:
        raise RequestError(
            f"{place} names the optimizer {name!r}, which DeepSpeed has for GPUs only: name 'AdamW' or one of "
            "torch.optim, or return one from configure_optimizers"
        )
    if operation is not None:
        option = f"{place}, which names the optimizer {name!r},"
        is_for_gpus = device_type == "cuda" and operation.startswith("fused_")
        check_prerequisites(operation, option, environ, is_for_gpus=is_for_gpus)


def _named(section: Any, place: str) -> tuple[str, dict[str, Any]]:
    """Return the name, in lower case where it is one of DeepSpeed's own, and the options."""
    name = section.get("type") if isinstance(section, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            f'{place} says optimizer: {section!r}, and it must be {{"type": "AdamW", "params": {{...}}}}'
        )
    if name.lower() in _OWN:
        options = section.get("params")
        return name.lower(), options if isinstance(options, dict) else {}
    known = [key for key, value in vars(torch.optim).items() if isinstance(value, type) and key != "Optimizer"]
    if name not in known or name == "LBFGS":
        near = difflib.get_close_matches(name, [*known, *_OWN], n=1)
        hint = f"did you mean {near[0]!r}?" if near and name != "LBFGS" else "name another one"
        raise RequestError(f"{place} names the optimizer {name!r}, with which DeepSpeed cannot train: {hint}")
    return name, {}


def check_one_optimizer(config: dict[str, Any], optimizer: Optimizer | None, place: str, *, is_fitting: bool) -> None:
    """Check that there is one place where the optimizer comes from, and that schedulers are the module's.

    Raises:
        ConflictError: There are two.
        RequestError: There is none, and a stage of ZeRO shards it.
    """
    if optimizer is not None and "optimizer" in config:
        raise ConflictError(
            f"{place} has an 'optimizer', and configure_optimizers returned {type(optimizer).__name__}: leave one out"
        )
    if "scheduler" in config:
        raise ConflictError(
            f"{place} has a 'scheduler', which DeepSpeed would step by itself: return the scheduler from "
            "configure_optimizers, so that it is stepped, logged and saved like any other"
        )
    stage = config["zero_optimization"]["stage"]
    if is_fitting and stage > 0 and optimizer is None and "optimizer" not in config:
        raise RequestError(
            f"configure_optimizers returned no optimizer, and stage {stage} of ZeRO shards one: return one, or choose "
            "stage 0"
        )

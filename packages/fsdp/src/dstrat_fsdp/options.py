"""Options of sharding: names, torch's policies and enumerations, and those of its earlier FSDP."""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from dstrat.errors import ConflictError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dstrat.interfaces.precision import Precision

ShardingName = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]
StateDictType = Literal["sharded", "full"]

_SHARDING: tuple[ShardingName, ...] = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
_STATE_DICT: tuple[StateDictType, ...] = ("sharded", "full")
_FSDP1_OPTIONS = {
    "use_orig_params": "with torch's fully_shard parameters always are the original ones; leave it out",
    "forward_prefetch": "torch's fully_shard gathers the next block early by itself; leave it out",
    "limit_all_gathers": "torch's fully_shard limits them by itself; leave it out",
    "sync_module_states": "all ranks always begin with the values of rank 0; leave it out",
    "param_init_fn": "layers that are made in configure_model are computed by their reset_parameters; leave it out",
    "ignored_modules": "torch's fully_shard has no such option; call it on submodules in configure_model",
}
_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST")


def sharding_name(value: str | ShardingStrategy | None) -> ShardingName | None:
    """Return the name of a sharding strategy, which may be a member of torch's enumeration."""
    if value is None:
        return None
    name: ShardingName = _one_of("sharding_strategy", value, _SHARDING)
    return name


def state_dict_type_name(value: str) -> StateDictType:
    """Return the type of state dict, in lower case."""
    if isinstance(value, str) and value.lower() in _STATE_DICT:
        return value.lower()  # type: ignore[return-value]  # checked on the line above
    raise RequestError(f"state_dict_type {value!r} is not one of {', '.join(map(repr, _STATE_DICT))}")


def prefetches_backward(value: str | BackwardPrefetch | None) -> bool:
    """Return whether a block is gathered while the gradients of the next one are still computed."""
    return value is None or _one_of("backward_prefetch", value, _PREFETCH) == "BACKWARD_PRE"


def offload_policy(value: Any, device: torch.device) -> OffloadPolicy:
    """Return torch's policy of offloading to the CPU.

    Args:
        value: True or False, torch's policy, or the ``CPUOffload`` of its earlier API; None does not offload.
        device: The device of the training; a CPU needs no pinned memory, and often has none.
    """
    if isinstance(value, OffloadPolicy):
        return value
    offloads = getattr(value, "offload_params", value)
    if offloads is not None and not isinstance(offloads, bool):
        raise RequestError(f"cpu_offload {value!r} is not True, False or a CPUOffloadPolicy of torch.distributed.fsdp")
    return CPUOffloadPolicy(pin_memory=device.type != "cpu") if offloads else OffloadPolicy()


def offloads_to_host(value: Any, device_type: str) -> bool:
    """Return whether shards are on another device than the training; a CPU is the host.

    Args:
        value: As for :func:`offload_policy`.
        device_type: Type of the devices of the training.
    """
    return device_type != "cpu" and isinstance(offload_policy(value, torch.device(device_type)), CPUOffloadPolicy)


def changes_dtypes(policy: MixedPrecisionPolicy) -> bool:
    """Return whether parameters are gathered, or gradients summed, in another dtype than that of the parameters."""
    return policy.param_dtype is not None or policy.reduce_dtype is not None


def precision_policy(policy: Any, precision: Precision) -> MixedPrecisionPolicy:
    """Return torch's policy of dtypes: the user's, or that of the precision.

    Args:
        policy: torch's policy, or the ``MixedPrecision`` of its earlier API.
        precision: The strategy's precision plugin.

    Raises:
        ConflictError: The policy gathers parameters in another dtype than the precision computes in.
    """
    computed = precision.compute_dtype if precision.compute_dtype != precision.param_dtype else None
    if policy is None:
        reduced = precision.reduce_dtype
        return MixedPrecisionPolicy(
            param_dtype=computed, reduce_dtype=reduced if reduced != (computed or precision.param_dtype) else None
        )
    if not hasattr(policy, "param_dtype") or not hasattr(policy, "reduce_dtype"):
        raise RequestError(f"mixed_precision {policy!r} is not a MixedPrecisionPolicy of torch.distributed.fsdp")
    if computed is not None and policy.param_dtype is not computed:
        raise ConflictError(
            f"precision {precision.flag!r} computes in {computed}, and mixed_precision says {policy.param_dtype}: "
            "leave one of them out"
        )
    if policy.param_dtype is torch.float16 and precision.compute_dtype is not torch.float16:
        raise ConflictError(
            "mixed_precision computes in torch.float16, where small gradients become zero unless the loss is scaled: "
            "pass precision='16-mixed' as well"
        )
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if getattr(policy, "keep_low_precision_grads", False):
        raise RequestError(
            "mixed_precision says keep_low_precision_grads=True, and gradients have the dtype of the parameters: leave "
            "it out, or pass precision='bf16-true', which keeps both in bfloat16"
        )
    return MixedPrecisionPolicy(
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
    )


def input_dtype(policy: Any, precision: Precision) -> torch.dtype | None:
    """Return the dtype to which a step's floating-point tensors are cast; None leaves them as they are.

    Args:
        policy: torch's policy, or the ``MixedPrecision`` of its earlier API; None leaves the casting to the precision.
        precision: The strategy's precision plugin.
    """
    casts = getattr(policy, "cast_root_forward_inputs", getattr(policy, "cast_forward_inputs", False))
    uses_autocast = precision.compute_dtype != precision.param_dtype  # which casts in each operation
    dtype: torch.dtype | None = policy.param_dtype if casts and not uses_autocast else None
    return dtype


def refuse_unknown(strategy: type, unknown: Iterable[str]) -> None:
    """Refuse options that a strategy does not have.

    Raises:
        RequestError: There is an unknown option; the message names the replacement.
    """
    for name in unknown:
        names = [*inspect.signature(strategy).parameters][:-1]  # the last one takes unknown ones
        near = difflib.get_close_matches(name, names, n=1)
        instead = _FSDP1_OPTIONS.get(name) or (f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}")
        raise RequestError(f"{strategy.__name__} has no option {name!r}: {instead}")


def _one_of(option: str, value: Any, names: tuple[Any, ...]) -> Any:
    name = getattr(value, "name", value)
    if isinstance(name, str) and name.upper() in names:
        return name.upper()
    raise RequestError(f"{option} {value!r} is not one of {', '.join(map(repr, names))}")

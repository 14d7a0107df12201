"""Bringing the options of sharding, in their several spellings, into one shape."""

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
_OF_EARLIER_FSDP = {
    "use_orig_params": "with torch's fully_shard parameters always are the original ones; leave it out",
    "forward_prefetch": "torch's fully_shard gathers the next block early by itself; leave it out",
    "limit_all_gathers": "torch's fully_shard limits them by itself; leave it out",
    "sync_module_states": "all ranks always begin with the values of rank 0; leave it out",
    "param_init_fn": "layers that are made in configure_model are computed by their reset_parameters; leave it out",
    "ignored_modules": "torch's fully_shard has no such choice here; call it on parts of the module in configure_model",
}
_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST")


def sharding_name(given: str | ShardingStrategy | None) -> ShardingName | None:
    """Return the name of a sharding strategy, which may be torch's own enumeration's."""
    if given is None:
        return None
    name: ShardingName = _one_of("sharding_strategy", given, _SHARDING)
    return name


def state_dict_type_name(given: str) -> StateDictType:
    """Return the type of state dict, in lower case."""
    if isinstance(given, str) and given.lower() in _STATE_DICT:
        return given.lower()  # type: ignore[return-value]  # checked on the line above
    raise RequestError(f"state_dict_type {given!r} is not one of {', '.join(map(repr, _STATE_DICT))}")


def gathers_early(given: str | BackwardPrefetch | None) -> bool:
    """Return whether a block is gathered while the gradients of the one after it are still computed."""
    return given is None or _one_of("backward_prefetch", given, _PREFETCH) == "BACKWARD_PRE"


def offload_policy(given: Any, device: torch.device) -> OffloadPolicy:
    """Return torch's policy of offloading to the CPU.

    Args:
        given: True or False, torch's policy, or the ``CPUOffload`` of its earlier API; None does not offload.
        device: Where training runs; a CPU needs no pinned memory, and often has none.
    """
    if isinstance(given, OffloadPolicy):
        return given
    wanted = getattr(given, "offload_params", given)
    if wanted is not None and not isinstance(wanted, bool):
        raise RequestError(f"cpu_offload {given!r} is not True, False or a CPUOffloadPolicy of torch.distributed.fsdp")
    return CPUOffloadPolicy(pin_memory=device.type != "cpu") if wanted else OffloadPolicy()


def precision_policy(given: Any, precision: Precision) -> MixedPrecisionPolicy:
    """Return torch's policy of dtypes: the given one, or what follows from the precision.

    Args:
        given: torch's policy, or the ``MixedPrecision`` of its earlier API.
        precision: The strategy's precision plugin.

    Raises:
        ConflictError: The policy gathers parameters in another dtype than the precision computes in.
    """
    computed = precision.compute_dtype if precision.compute_dtype != precision.param_dtype else None
    if given is None:
        reduced = precision.reduce_dtype
        return MixedPrecisionPolicy(
            param_dtype=computed, reduce_dtype=reduced if reduced != (computed or precision.param_dtype) else None
        )
    if not hasattr(given, "param_dtype") or not hasattr(given, "reduce_dtype"):
        raise RequestError(f"mixed_precision {given!r} is not a MixedPrecisionPolicy of torch.distributed.fsdp")
    if computed is not None and given.param_dtype is not computed:
        raise ConflictError(
            f"precision {precision.flag!r} computes in {computed}, and mixed_precision says {given.param_dtype}: "
            "leave one of them out"
        )
    if given.param_dtype is torch.float16 and precision.compute_dtype is not torch.float16:
        raise ConflictError(
            "mixed_precision computes in torch.float16, where small gradients become zero unless the loss is scaled: "
            "pass precision='16-mixed' as well"
        )
    if isinstance(given, MixedPrecisionPolicy):
        return given
    if getattr(given, "keep_low_precision_grads", False):
        raise RequestError(
            "mixed_precision says keep_low_precision_grads=True, and gradients have the dtype of the parameters: leave "
            "it out, or pass precision='bf16-true', which keeps both in bfloat16"
        )
    return MixedPrecisionPolicy(
        param_dtype=given.param_dtype,
        reduce_dtype=given.reduce_dtype,
        cast_forward_inputs=given.cast_forward_inputs,
    )


def input_dtype(given: Any, precision: Precision) -> torch.dtype | None:
    """Return the dtype to which a step's floating-point tensors are cast; None leaves them as they are.

    Args:
        given: torch's policy, or the ``MixedPrecision`` of its earlier API; None leaves the casting to the precision.
        precision: The strategy's precision plugin.
    """
    casts = getattr(given, "cast_root_forward_inputs", getattr(given, "cast_forward_inputs", False))
    uses_autocast = precision.compute_dtype != precision.param_dtype  # which casts in each operation
    dtype: torch.dtype | None = given.param_dtype if casts and not uses_autocast else None
    return dtype


def check_known(strategy: type, unknown: Iterable[str]) -> None:
    """Check that no option was given that a strategy does not have.

    Raises:
        RequestError: One was; the message says what takes its place.
    """
    for name in unknown:
        known = [*inspect.signature(strategy).parameters][:-1]  # the last one takes unknown ones
        near = difflib.get_close_matches(name, known, n=1)
        instead = _OF_EARLIER_FSDP.get(name) or (f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}")
        raise RequestError(f"{strategy.__name__} has no option {name!r}: {instead}")


def _one_of(option: str, given: Any, names: tuple[Any, ...]) -> Any:
    name = getattr(given, "name", given)
    if isinstance(name, str) and name.upper() in names:
        return name.upper()
    raise RequestError(f"{option} {given!r} is not one of {', '.join(map(repr, names))}")

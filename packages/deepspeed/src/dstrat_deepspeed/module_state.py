"""The state of a module whose parameters stage 3 has split, by its own names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat_deepspeed.partitions import shard_of_stage_3

if TYPE_CHECKING:
    from torch.nn import Module

    from dstrat.interfaces.flat_shard import FlatShard


def sharded_state(module: Module) -> dict[str, Any]:
    """Return the state of a module, with what this rank holds in the place of parameters that are split."""
    state: dict[str, Any] = module.state_dict()
    shards: dict[int, FlatShard] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in state and hasattr(parameter, "ds_tensor"):
            if id(parameter) not in shards:
                shards[id(parameter)] = shard_of_stage_3(parameter)
            state[name] = shards[id(parameter)]
    return state


def gather_persistent(optimizer: Any) -> None:
    """Gather the small parameters that stage 3 keeps whole anew, after their shards have changed; collective."""
    persistent = getattr(optimizer, "persistent_parameters", None)
    if persistent:
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)

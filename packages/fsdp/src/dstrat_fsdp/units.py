"""Units of ``fully_shard``: the wrapped step, and how a module is unwrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping

from dstrat.parallel.step_module import StepModule

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.fsdp import FSDPModule


_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def unwrap(unit: FSDPModule) -> None:
    """Make a plain module of a unit again; its parameters stay what they are, which is shards.

    Args:
        unit: Nothing of it is gathered.
    """
    module: Any = unit
    state = module._get_fsdp_state()  # noqa: SLF001 - torch keeps everything that it has changed in here
    for handle in _hooks(state):
        handle.remove()
    module.__class__ = type(module).__mro__[2]  # between them is FSDPModule itself
    for part in module.modules():
        for name in _MARKS:
            part.__dict__.pop(name, None)
    _release_groups(state)
    for key in (STATE_KEY, REGISTRY_KEY):
        module.__dict__.pop(key, None)
    _module_state_mapping.pop(module, None)


def _release_groups(state: Any) -> None:
    """Let go of the process groups, which close when nobody holds them, also where a traceback keeps the unit.

    Otherwise the other ranks would wait for one that has raised and lives on.
    """
    for group in _groups(state):
        for holder in (group, *group.fsdp_params):
            holder.mesh_info = holder.post_forward_mesh_info = None


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """Return what torch gathers together of a unit."""
    return _groups(unit._get_fsdp_state())  # noqa: SLF001 - as above


def _groups(state: Any) -> list[Any]:
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]  # noqa: SLF001 - one in torch 2.9
    return [group for group in groups if group is not None]


def _hooks(state: Any) -> list[Any]:
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]  # noqa: SLF001 - as above
    for group in _groups(state):
        handles += group._module_to_pre_save_state_dict_hook_handle.values()  # noqa: SLF001 - as above
        handles += group._module_to_pre_load_state_dict_hook_handle.values()  # noqa: SLF001 - as above
        handles += [parameter._post_load_hook_handle for parameter in group.fsdp_params]  # noqa: SLF001 - as above
    return handles


class SelfShardedSteps(StepModule):
    """A module whose forward runs a step of a user's module that has sharded itself, around its forward alone."""

    def forward(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.module.unshard()  # type: ignore[operator]  # an FSDPModule
        return super().forward(step, *args, **kwargs)

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
    """Turn a unit into a plain module again; its parameters stay sharded.

    torch has no public way to undo ``fully_shard``: this reverts its hooks, class, registry entries and process groups.

    Args:
        unit: A unit that is not gathered.
    """
    module: Any = unit
    state = module._get_fsdp_state()  # noqa: SLF001 - torch records its changes in this object
    for handle in _hooks(state):
        handle.remove()
    module.__class__ = type(module).__mro__[2]  # after torch's combined class and FSDPModule
    for submodule in module.modules():
        for name in _MARKS:
            submodule.__dict__.pop(name, None)
    _release_groups(state)
    for key in (STATE_KEY, REGISTRY_KEY):
        module.__dict__.pop(key, None)
    _module_state_mapping.pop(module, None)


def _release_groups(state: Any) -> None:
    """Drop the references to process groups, which close with their last reference.

    A traceback may keep the unit of a failed rank alive, and its peers would wait for the open group.
    """
    for group in _groups(state):
        for holder in (group, *group.fsdp_params):
            holder.mesh_info = holder.post_forward_mesh_info = None


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """Return the parameter groups of a unit, each of which torch gathers in one collective."""
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
    """Step module of a user's module that is itself a unit: torch gathers that for ``forward`` only, not for steps."""

    def forward(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.module.unshard()  # type: ignore[operator]  # an FSDPModule
        return super().forward(step, *args, **kwargs)

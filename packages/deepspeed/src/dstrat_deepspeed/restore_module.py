"""Giving a module back as it was before DeepSpeed had it: whole parameters, plain dicts, no traces."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dstrat.errors import MisuseError
from dstrat_deepspeed.nvme import let_go, release_unused

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module, Parameter

_MODULE_MARKS = (
    "_external_params",
    "_original_parameters",
    "all_parameters",
    "applied_pre_backward_ref_cnt",
    "ds_external_parameters",
    "ds_grads_remaining",
    "ds_id",
    "ds_inflight_param_registry",
    "ds_model_granularity",
    "ds_recompute_parameters",
    "post_bwd_fn",
    "pre_bwd_fn",
)


class ModuleSnapshot:
    """What a module's parameters carried before DeepSpeed marked them.

    Args:
        module: The user's; parameters may have been sharded as they were made.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._before = [
            (parameter, set() if _is_sharded(parameter) else set(vars(parameter))) for parameter in module.parameters()
        ]
        self._lost: dict[int, torch.Size] = {}

    def gather(self, *, keeps: bool) -> None:
        """Gather the parameters one after the other; collective.

        Args:
            keeps: Whether this rank has them on the CPU afterwards.
        """
        release_unused(parameter for parameter, _ in self._before)
        for parameter, _ in self._before:
            if _is_sharded(parameter):
                _as_deepspeeds(parameter).all_gather(param_list=[parameter])
                parameter.data = parameter.data.to("cpu", copy=True) if keeps else parameter.data.new_empty(0)
                let_go(parameter)
                if keeps:
                    _as_deepspeeds(parameter).ds_tensor = None

    def remove(self) -> None:
        """Remove the marks of DeepSpeed; gradients are gone with it, and shards that are not gathered."""
        for parameter, before in self._before:
            parameter.grad = None
            if getattr(parameter, "ds_tensor", None) is not None:
                self._lost[id(parameter)] = _as_deepspeeds(parameter).ds_shape
                parameter.data = parameter.data.new_empty(0)
            for name in set(vars(parameter)) - before:
                delattr(parameter, name)
        for part in self._module.modules():
            marked = vars(part)
            if "_original_parameters" in marked:
                marked["_parameters"] = _plain(marked["_parameters"])
            for name in _MODULE_MARKS:
                marked.pop(name, None)

    def leave_shapes(self) -> None:
        """Put the parameters that are not here on the meta device, where they keep their shapes without memory."""

        def shape_of(parameter: Parameter) -> Tensor | None:
            shape = self._lost.get(id(parameter))
            return None if shape is None else torch.empty(shape, dtype=parameter.dtype, device="meta")

        if self._lost:
            _replace_parameters(self._module, shape_of)


def rematerialize(module: Module, *, is_global_zero: bool) -> None:
    """Give memory to the parameters that a run of stage 3 has left on rank 0 alone; their values come from there.

    Raises:
        MisuseError: This is rank 0, and does not have them either.
    """
    if is_global_zero and any(parameter.is_meta for parameter in module.parameters()):
        raise MisuseError(
            f"parameters of {type(module).__name__} are on the meta device, without values, such as after a run of "
            "stage 3 that failed: build the module anew, and load a checkpoint of it"
        )
    _replace_parameters(module, lambda old: torch.empty_like(old, device="cpu") if old.is_meta else None)


def restore_linear() -> None:
    """Give torch its own ``linear`` back, in whose place DeepSpeed's stage 3 puts one that saves memory."""
    module: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    original = getattr(getattr(module, "InsertPostInitMethodToModuleSubClasses", None), "linear_bk", None)
    if original is not None:
        torch.nn.functional.linear = original


def _replace_parameters(module: Module, make: Callable[[Parameter], Tensor | None]) -> None:
    """Set parameters anew, tied ones once, where the function returns values."""
    made: dict[Parameter, Parameter] = {}
    for layer in module.modules():
        for name, parameter in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                values = make(parameter)
                made[parameter] = parameter if values is None else nn.Parameter(values, parameter.requires_grad)
            if made[parameter] is not parameter:
                setattr(layer, name, made[parameter])


def _plain(parameters: dict[str, Any]) -> dict[str, Any]:
    return dict(parameters.items())


def _is_sharded(parameter: Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def _as_deepspeeds(parameter: Any) -> Any:
    """Return the parameter, to which DeepSpeed has given methods and attributes of its own."""
    return parameter

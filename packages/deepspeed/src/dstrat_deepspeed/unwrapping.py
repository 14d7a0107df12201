"""Giving a module back as it was before DeepSpeed had it: whole parameters, plain dicts, no traces."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
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


class Footprint:
    """What a module's parameters carried before DeepSpeed marked them.

    Args:
        module: The user's; parameters may have been sharded as they were made.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._before = [
            (parameter, set() if _is_sharded(parameter) else set(vars(parameter))) for parameter in module.parameters()
        ]

    def gather(self) -> None:
        """Let each rank have all parameters on the CPU, gathered one after the other; collective."""
        for parameter, _ in self._before:
            if _is_sharded(parameter):
                _parameter(parameter).all_gather(param_list=[parameter])
                parameter.data = parameter.data.cpu()
                _parameter(parameter).ds_tensor = None

    def remove(self) -> None:
        """Remove the marks of DeepSpeed; gradients are gone with it."""
        for parameter, before in self._before:
            parameter.grad = None
            for name in set(vars(parameter)) - before:
                delattr(parameter, name)
        for part in self._module.modules():
            marked = vars(part)
            if "_original_parameters" in marked:
                marked["_parameters"] = _plain(marked["_parameters"])
            for name in _MODULE_MARKS:
                marked.pop(name, None)


def restore_linear() -> None:
    """Give torch its own ``linear`` back, in whose place DeepSpeed's stage 3 puts one that saves memory."""
    module: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    original = getattr(getattr(module, "InsertPostInitMethodToModuleSubClasses", None), "linear_bk", None)
    if original is not None:
        torch.nn.functional.linear = original


def _plain(parameters: dict[str, Any]) -> dict[str, Any]:
    return dict(parameters.items())


def _is_sharded(parameter: Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def _parameter(parameter: Any) -> Any:
    """Return the parameter, to which DeepSpeed has given methods of its own."""
    return parameter

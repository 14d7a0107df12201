"""The gradients that wait for a step of the optimizer, where each stage accumulates them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

_BY_PARAMETER = ("grad", "grad_accum")


def waiting_gradients(optimizer: Any) -> dict[str, Any]:
    """Return this rank's accumulated gradients, as it has them; empty where there are none.

    Args:
        optimizer: What DeepSpeed has made of the user's optimizer, of stages 1 to 3.
    """
    if hasattr(optimizer, "fp32_groups_has_gradients"):
        computed = [list(group) for group in optimizer.fp32_groups_has_gradients]
        return (
            {"flat": list(optimizer.fp32_groups_gradients_flat), "computed": computed}
            if any(map(any, computed))
            else {}
        )
    batches = optimizer.micro_step_id + int(getattr(optimizer, "_epilogue_ran_this_backward", False))
    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        return {"flat": optimizer.grad_partitions_flat_buffer, "batches": batches} if batches > 0 else {}
    found: dict[str, Any] = {}
    for key in _BY_PARAMETER:
        found[key] = {
            str(number): value
            for number, parameter in _parameters(optimizer)
            if (value := getattr(parameter, key, None)) is not None
        }
    found["all"] = {str(group): list(value) for group, value in optimizer.all_grad_tensors.items() if value is not None}
    found["flat"] = {
        str(group): value.flat_partition
        for group, value in optimizer.averaged_gradients.items()
        if getattr(value, "flat_partition", None) is not None
    }
    found["cpu"] = {
        str(number): value
        for number, value in getattr(optimizer, "accumulated_grads_in_cpu", {}).items()
        if number in optimizer._offload_accumulated_param_ids  # noqa: SLF001 - the others are of an earlier step
    }
    present = {key: value for key, value in found.items() if value}
    return {**present, "batches": optimizer.micro_step_id} if present else {}


def put_back(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Let the next backward pass or step have what :func:`waiting_gradients` returned.

    Args:
        optimizer: Of the same stage and number of ranks.
        saved: The gradients; empty where there were none.
    """
    if not saved:
        return
    if hasattr(optimizer, "fp32_groups_has_gradients"):
        for buffer, value in zip(optimizer.fp32_groups_gradients_flat, saved["flat"], strict=True):
            buffer.copy_(value)
        optimizer.fp32_groups_has_gradients = [list(group) for group in saved["computed"]]
        return
    optimizer.micro_step_id = saved["batches"]
    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        optimizer.grad_partitions_flat_buffer.copy_(saved["flat"])
        optimizer.independent_gradient_partition_epilogue()  # or a step that comes before a backward pass lacks them
        optimizer._epilogue_ran_this_backward = False  # noqa: SLF001 - that pass is counted already
        return
    parameters = {str(number): parameter for number, parameter in _parameters(optimizer)}
    for key in _BY_PARAMETER:
        for number, value in saved.get(key, {}).items():
            setattr(parameters[number], key, _near(value, parameters[number]))
    for group, values in saved.get("all", {}).items():
        like = optimizer.bit16_groups_flat[int(group)]
        optimizer.all_grad_tensors[int(group)] = [_near(value, like) for value in values]
    for group, value in saved.get("flat", {}).items():
        optimizer._get_compact_grad_partition_buffer(int(group)).flat_partition.copy_(value)  # noqa: SLF001 - makes it
    for number, value in saved.get("cpu", {}).items():
        optimizer.accumulated_grads_in_cpu[int(number)] = value
        optimizer._offload_accumulated_param_ids.add(int(number))  # noqa: SLF001 - as when it was accumulated


def _parameters(optimizer: Any) -> Iterator[tuple[int, Any]]:
    for group in optimizer.bit16_groups:
        for parameter in group:
            yield optimizer.get_param_id(parameter), parameter


def _near(value: Tensor, like: Tensor) -> Tensor:
    return value.to(like.device)

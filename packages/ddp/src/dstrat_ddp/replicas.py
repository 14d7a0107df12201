"""Replicas of a module on several devices of one process, which share the batch of each step."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DataParallel

if TYPE_CHECKING:
    from torch.nn import Module

    from dstrat_ddp.step_module import StepModule

_logger = logging.getLogger(__name__)


def replicated(steps: StepModule, devices: Sequence[torch.device]) -> Module:
    """Return a module that runs a step on all devices; the given one where there is nothing to share.

    Args:
        steps: Runs a step on the first device.
        devices: Of one kind.
    """
    if devices[0].type == "cpu":
        if len(devices) > 1:
            _logger.info("the %d CPU devices of this process count as one: no batch is split", len(devices))
        return steps
    return _JoiningDataParallel(steps, device_ids=list(devices)) if len(devices) > 1 else steps


def joined(outputs: Sequence[Any], device: torch.device) -> Any:
    """Return the outputs of all replicas as one: the mean of scalars, other tensors joined along dimension 0.

    Args:
        outputs: One for each replica, all built alike of tensors, numbers, mappings, sequences and dataclasses;
            of anything else, the first replica's is returned.
        device: Where tensors go.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return _joined_tensors([output.to(device) for output in outputs])
    if isinstance(first, float):
        return sum(outputs) / len(outputs)
    if isinstance(first, Mapping):
        return {key: joined([output[key] for output in outputs], device) for key in first}
    if isinstance(first, list | tuple):
        parts = [joined(part, device) for part in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        values = {name: joined([getattr(output, name) for output in outputs], device) for name in names}
        return dataclasses.replace(first, **values)
    return first


def _joined_tensors(tensors: list[Tensor]) -> Tensor:
    if tensors[0].dim() > 0:
        return torch.cat(tensors)
    stacked = torch.stack(tensors)
    return (stacked if stacked.is_floating_point() else stacked.float()).mean()


class _JoiningDataParallel(DataParallel[Any]):
    """DataParallel that joins whatever a step returns; torch's own wants tensors, and warns of scalars."""

    def gather(self, outputs: Sequence[Any], output_device: int | torch.device) -> Any:  # noqa: ARG002 - always the first
        return joined(outputs, self.src_device_obj)

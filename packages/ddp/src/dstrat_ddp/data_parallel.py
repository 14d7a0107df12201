"""Data parallelism in one process: replicas on its devices share each batch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DataParallel
from typing_extensions import override

from dstrat.interfaces.strategy import Strategy
from dstrat.interfaces.tied_parameters import keep_ties
from dstrat.parallel.step_module import StepModule

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import StepName, TrainerLike


T = TypeVar("T")

_logger = logging.getLogger(__name__)


class DataParallelStrategy(Strategy):
    """Training in one process with torch's DataParallel, on one machine.

    Each step copies the module to all devices and gives each a slice of the batch; a scalar that the step returns
    becomes the mean over the devices, other tensors are joined along the batch.  It is slower than DDPStrategy, and
    meant for notebooks and for code that must not run in several processes.  Changes that a step makes to the module
    are lost, and CPU devices count as one.

    Args:
        accelerator: The hardware.
        checkpoint_io: The format of checkpoints.
        precision_plugin: The dtypes.
        parallel_devices: The devices; the first one keeps the parameters.
    """

    drives_several_devices = True

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin)
        self.add_components(parallel_devices=parallel_devices)

    @property
    def parallel_devices(self) -> tuple[torch.device, ...]:
        """The devices that share each batch."""
        return self._present(self.components.parallel_devices, "devices")

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0]

    @property
    def driven_devices(self) -> tuple[torch.device, ...]:
        return self.parallel_devices

    @property
    def is_global_zero(self) -> bool:
        return True

    def model_to_device(self) -> None:
        with keep_ties(self.module):
            self.module.to(self.root_device)

    @override
    def wrap_model(self, trainer: TrainerLike) -> None:
        self.model = replicated(StepModule(self.module), self.parallel_devices)

    def run_step(self, name: StepName, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return super().run_step(name, partial(self.model, step), *args, **kwargs)

    # Communication: there is one process, and the devices' outputs are one already

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return tensor

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return obj

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        pass

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return tensor.unsqueeze(0)


# Replicas of a module on several devices of one process


def replicated(steps: StepModule, devices: Sequence[torch.device]) -> Module:
    """Return a module that runs a step on all devices; with one device, or on CPUs, the module itself.

    Args:
        steps: The module that runs a step on the first device.
        devices: Devices of one type.
    """
    if devices[0].type == "cpu":
        if len(devices) > 1:
            _logger.info("the %d CPU devices of this process count as one: no batch is split", len(devices))
        return steps
    return _JoiningDataParallel(steps, device_ids=list(devices)) if len(devices) > 1 else steps


def replica_step(replica: Module, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step bound to a replica: a method of the original module would use the original's parameters.

    A function that is no method uses whatever module it refers to.
    """
    if isinstance(step, MethodType) and isinstance(step.__self__, Module):
        return MethodType(step.__func__, replica)
    return step


def join_outputs(outputs: Sequence[Any], device: torch.device) -> Any:
    """Return the outputs of all replicas as one: the mean of scalars, other tensors joined along dimension 0.

    A mapping with a loss and its weight, as of a training step, becomes the weighted mean and the sum of the weights.

    Args:
        outputs: One for each replica, all of the same structure of tensors, numbers, mappings, sequences and
            dataclasses; of other values, the first replica's is returned.
        device: Device of the joined tensors.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return _join_tensors([output.to(device) for output in outputs])
    if isinstance(first, float):
        return sum(outputs) / len(outputs)
    if isinstance(first, Mapping):
        return _join_mappings(outputs, device)
    if isinstance(first, list | tuple):
        joined = [join_outputs(items, device) for items in zip(*outputs, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        values = {name: join_outputs([getattr(output, name) for output in outputs], device) for name in names}
        return dataclasses.replace(first, **values)
    return first


def _join_mappings(outputs: Sequence[Mapping[str, Any]], device: torch.device) -> dict[str, Any]:
    joined = {key: join_outputs([output[key] for output in outputs], device) for key in outputs[0]}
    if not isinstance(outputs[0].get("loss"), Tensor) or outputs[0].get("weight") is None:
        return joined
    losses = torch.stack([output["loss"].to(device) for output in outputs])
    weights = torch.stack([torch.as_tensor(output["weight"]).to(device, losses.dtype) for output in outputs])
    total = weights.sum()
    # A part without weight may have the loss nan, the mean over nothing.
    weighted = torch.where(weights > 0, losses * weights, torch.zeros_like(losses)).sum()
    return {**joined, "loss": weighted / total.clamp(min=torch.finfo(total.dtype).tiny), "weight": total}


def _join_tensors(tensors: list[Tensor]) -> Tensor:
    if tensors[0].dim() > 0:
        return torch.cat(tensors)
    stacked = torch.stack(tensors)
    # Integers, such as counts of right predictions, have no mean of their own dtype.
    return (stacked if stacked.is_floating_point() else stacked.float()).mean()


class _JoiningDataParallel(DataParallel[Any]):
    """DataParallel that joins outputs of any structure; torch's takes tensors only, and warns of scalars."""

    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Sequence[dict[str, Any]] | None
    ) -> list[Any]:
        """Run a step in each replica; it is the first of the replica's inputs."""
        steps = [replica_step(replica.module, step) for replica, (step, *_) in zip(replicas, inputs, strict=True)]
        return super().parallel_apply(
            replicas, [(step, *arguments) for step, (_, *arguments) in zip(steps, inputs, strict=True)], kwargs
        )

    @override
    def gather(self, outputs: Sequence[Any], output_device: int | torch.device) -> Any:
        return join_outputs(outputs, self.src_device_obj)

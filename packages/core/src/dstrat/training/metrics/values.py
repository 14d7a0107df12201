"""Logged values, and entries of numbers: the latest step, and the total over the epoch."""

from __future__ import annotations

import math
import sys
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.errors import MisuseError
from dstrat.parallel.internals import change_count
from dstrat.training.metrics.reduction import Contribution

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.training.metrics.reduction import Options


_CUDA_GRAPHS = "torch._inductor.cudagraph_trees"  # loaded by torch.compile(mode="reduce-overhead")

DATALOADER_SUFFIX = "/dataloader_idx_"
"""The separator between a name and the index of one of several loaders."""


class LoggedValue:
    """A logged name with its options: base class of numbers and metric objects.

    Args:
        name: The name that the user logs.
        options: The arguments of ``log``.
        in_step: Whether it is logged in steps, or around them.
        training: Whether it is logged in training, which determines the defaults.

    Attributes:
        is_fresh: Whether it was logged since the last write of step values.
        is_superseded: Whether another stage has given a value of the step value's name since it was logged.
        was_logged: Whether it was logged in this epoch.
        latest: The value of the last step in this process.
        step_name: Name of the step value.
        epoch_name: Name of the epoch value.
    """

    __slots__ = (
        "epoch_name",
        "in_step",
        "is_fresh",
        "is_superseded",
        "latest",
        "name",
        "on_epoch",
        "on_step",
        "options",
        "step_name",
        "was_logged",
    )

    def __init__(self, name: str, options: Options, *, in_step: bool, training: bool) -> None:
        options.check(name, in_step=in_step)
        of_steps = training and in_step
        self.name, self.options, self.in_step = name, options, in_step
        self.on_step = of_steps if options.on_step is None else options.on_step
        self.on_epoch = not of_steps if options.on_epoch is None else options.on_epoch
        self.is_fresh = self.is_superseded = self.was_logged = False
        self.latest: Tensor | float = 0.0
        self.step_name = extended(name, "_step") if self.on_epoch else name
        self.epoch_name = extended(name, "_epoch") if self.on_step else name

    @property
    def value_names(self) -> set[str]:
        """Names of the values in loggers."""
        enabled_by_name = {self.step_name: self.on_step, self.epoch_name: self.on_epoch}
        return {name for name, enabled in enabled_by_name.items() if enabled}

    @property
    def is_written(self) -> bool:
        """Whether loggers write it."""
        return self.options.logger is not False

    @property
    def step_value(self) -> Tensor | float | None:
        """The value of the latest step; None if it is not known yet."""
        return self.latest

    @property
    def shown_value(self) -> Tensor | float:
        """The value of the latest step that the progress bar shows."""
        return self.latest

    @property
    def resolved(self) -> Options:
        """The options with their defaults resolved, without objects of this process, such as groups."""
        return self.options._replace(
            on_step=self.on_step, on_epoch=self.on_epoch, sync_dist_group=self.options.sync_dist_group is not None
        )

    def start_epoch(self) -> None:
        """Start another epoch."""
        self.was_logged = False

    def supersede(self) -> None:
        """Leave the name of the step value to a newer value of another stage, until it is logged again."""
        self.is_superseded = True

    def weigh(self, value: Tensor | float, weight: Tensor | float) -> None:
        """Accumulate a value that was taken without a weight, with its weight in the mean; metric objects do not."""

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the epoch until now, as plain values and tensors."""
        return {
            "latest": self.latest,
            "is_fresh": self.is_fresh,
            "is_superseded": self.is_superseded,
            "was_logged": self.was_logged,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values of the epoch."""
        self.latest, self.is_fresh, self.was_logged = state["latest"], state["is_fresh"], state["was_logged"]
        self.is_superseded = state.get("is_superseded", False)  # absent in older checkpoints


def extended(name: str, ending: str) -> str:
    """Return a name with an ending, inserted before the index of a loader."""
    base, separator, index = name.rpartition(DATALOADER_SUFFIX)
    return f"{base}{ending}{separator}{index}" if separator else f"{name}{ending}"


# Logged numbers: the value of the latest step, and the total over the epoch


class NumberEntry(LoggedValue):
    """A logged name whose values are numbers or tensors with one element.

    Numbers and CPU tensors are accumulated in double precision at once.  Tensors on another device are accumulated on
    that device, in a total of their own.

    Args:
        name: The name that the user logs.
        options: The arguments of ``log``.
        in_step: Whether it is logged in steps, or around them.
        training: Whether it is logged in training.
        has_peers: Whether there are other ranks to reduce over.
        accelerator: The hardware of logged tensors; None for the CPU.

    Attributes:
        weighs: Whether the weight of a value matters.
        weight: Sum of the weights of the epoch's values.
        sync_step: Whether step values are reduced over all ranks.
        sync_epoch: Whether the epoch value is reduced over all ranks.
        reduced: The latest reduced step value; None before the first one.
    """

    __slots__ = (
        "_accelerator",
        "_device_total",
        "_last_weight",
        "_total",
        "_version",
        "adds",
        "reduced",
        "reduction",
        "sync_epoch",
        "sync_step",
        "weighs",
        "weight",
    )

    def __init__(
        self,
        name: str,
        options: Options,
        *,
        in_step: bool,
        training: bool,
        has_peers: bool = True,
        accelerator: Accelerator | None = None,
    ) -> None:
        super().__init__(name, options, in_step=in_step, training=training)
        self._accelerator = accelerator
        self.reduction = options.reduction(name)
        self.adds = self.reduction in ("mean", "sum")
        sync = False if options.rank_zero_only else options.sync_dist
        self.sync_step = self.on_step and sync is True and has_peers
        self.sync_epoch = self.on_epoch and sync is not False
        if sync and self.on_step and not training:
            raise MisuseError(
                f"log({name!r}, on_step=True, sync_dist=True) works in training only: in evaluation the processes may "
                "have different numbers of steps; set on_step=False"
            )
        self.weighs = self.reduction == "mean" and (self.on_epoch or self.sync_step)
        self.reduced: float | None = None
        self._version = 0
        self._last_weight: float | Tensor = 1.0
        self._reset()

    def start_epoch(self) -> None:
        super().start_epoch()
        self._reset()

    def supersede(self) -> None:
        super().supersede()
        self.reduced = None  # values that are logged from now on have no reduced one yet

    def _reset(self) -> None:
        self._total: float | None = None
        self._device_total: Tensor | None = None
        self.weight: float | Tensor = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "latest": self.local_latest,
            "last_weight": float(self._last_weight),
            "total": self._total,
            "device_total": self._device_total,
            "weight": float(self.weight),
            "reduced": self.reduced,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._version = change_count(self.latest) if isinstance(self.latest, Tensor) else 0
        self._last_weight, self.reduced = state["last_weight"], state["reduced"]
        self._total, self._device_total, self.weight = state["total"], state["device_total"], state["weight"]

    def take(self, value: Any, weight: float | None) -> None:
        """Accumulate the value of a batch with its weight in the mean, or None for :meth:`weigh` to follow."""
        self.is_fresh = self.was_logged = True
        self.is_superseded = False
        if isinstance(value, Tensor):
            if not value.is_cpu:
                self._take_on_device(value, weight)
                return
            try:
                value = value.item()
            except RuntimeError:
                raise _not_one_number(self.name, value) from None
        elif type(value) is not float:  # an identity test is faster than isinstance
            value = _number(self.name, value)
        self.latest, self._last_weight = value, weight or 0.0
        if self.on_epoch and weight:  # a value without weight may be nan, such as the mean over no labels
            self.weight += weight
            if self._total is None:
                self._total = value * weight if self.adds else value
            elif self.adds:
                self._total += value * weight
            else:
                self._total = _extreme(self.reduction, self._total, value)

    def weigh(self, value: Tensor | float, weight: Tensor | float) -> None:
        self._last_weight = weight
        if not self.on_epoch or (not isinstance(weight, Tensor) and not weight):
            return
        if isinstance(weight, Tensor):
            weight = weight.to(value.device if isinstance(value, Tensor) else weight.device, self._dtype_of_totals)
            weighted = torch.where(weight > 0, value * weight, torch.zeros_like(weight))  # as a value may be nan
            self._device_total = self._added_on_device(weighted, 1.0)
        elif isinstance(value, Tensor):
            self._device_total = self._added_on_device(value, weight)
        else:
            self._total = (self._total or 0.0) + value * weight
        self.weight = self.weight + weight

    def _take_on_device(self, value: Tensor, weight: float | None) -> None:
        if value.numel() != 1:
            raise _not_one_number(self.name, value)
        value = value.detach()
        if value.dim():
            value = value.reshape(())
        if _CUDA_GRAPHS in sys.modules:
            value = value.clone()  # the next replay of a graph overwrites its outputs
        self._version = change_count(value)  # the tensor is not copied, but must not change until it is read
        self.latest, self._last_weight = value, weight or 0.0
        if self.on_epoch and weight:
            self.weight += weight
            self._device_total = self._added_on_device(value, weight)

    @property
    def _dtype_of_totals(self) -> torch.dtype:
        has_float64 = self._accelerator is None or self._accelerator.supports_dtype(torch.float64)
        return torch.float64 if has_float64 else torch.float32

    def _added_on_device(self, value: Tensor, weight: float) -> Tensor:
        total = self._device_total
        if total is None:
            # Later values may come outside of inference mode, in which tensors of inference mode cannot be changed.
            with torch.inference_mode(mode=False), torch.no_grad():
                # Copied to the device, and with a dimension: a lazy device makes zeros created on it, and any 0-dim
                # zero, a constant of the graph, and would compile the first step of each epoch again.
                has_streams = self._accelerator is not None and self._accelerator.has_streams
                total = torch.zeros(1, dtype=self._dtype_of_totals).to(value.device, non_blocking=has_streams)
                if not self.adds:
                    return total.copy_(value)
        elif total.device != value.device:
            if total.is_cpu:  # loaded from a checkpoint
                total = total.to(value.device)
            else:  # logged from several devices of this process
                value = value.to(total.device)
        if self.adds:
            return total.add_(value, alpha=weight)
        return torch.maximum(total, value) if self.reduction == "max" else torch.minimum(total, value)

    @property
    def step_value(self) -> Tensor | float | None:
        return self.reduced if self.sync_step else self.local_latest

    @property
    def shown_value(self) -> Tensor | float:
        return self.local_latest if self.reduced is None else self.reduced

    @property
    def local_latest(self) -> Tensor | float:
        """The value of the latest step in this process.

        Raises:
            MisuseError: The tensor was changed in place since it was logged.
        """
        if isinstance(self.latest, Tensor) and change_count(self.latest) != self._version:
            raise MisuseError(
                f"the tensor that was logged as {self.name!r} has been changed in place since: log a copy, x.clone()"
            )
        return self.latest

    @property
    def resolved(self) -> Options:
        return super().resolved._replace(reduce_fx=self.reduction, sync_dist=self.options.sync_dist)

    @property
    def step_share(self) -> Contribution:
        """This rank's contribution to the reduced value of the latest step."""
        total = self.local_latest * self._last_weight if self.adds else self.local_latest
        return self._share(self.step_name, total, self._last_weight)

    @property
    def epoch_share(self) -> Contribution:
        """This rank's contribution to the reduced value of the epoch."""
        return self._share(self.epoch_name, self._combined_total, self.weight)

    @property
    def local_epoch_value(self) -> Tensor | float:
        """The epoch value of this process."""
        if self.reduction != "mean":
            return self._combined_total
        if isinstance(self.weight, Tensor):
            return self._combined_total / self.weight
        return self._combined_total / self.weight if self.weight else math.nan

    def _share(self, name: str, total: Tensor | float, weight: float | Tensor) -> Contribution:
        group = self.options.sync_dist_group
        return Contribution(name, self.reduction, total, weight, group, of_batches=self.in_step)

    @property
    def _combined_total(self) -> Tensor | float:
        total = self._total
        if self._device_total is None:
            return total or 0.0  # without any weight there is no total
        on_device = self._device_total.reshape(())  # Python numbers and device tensors may be mixed under one name
        if total is None:
            return on_device
        if self.adds:
            return on_device + total
        return on_device.clamp(min=total) if self.reduction == "max" else on_device.clamp(max=total)


def _extreme(reduction: str, one: float, other: float) -> float:
    if math.isnan(one) or math.isnan(other):  # max and min of Python depend on the order of their arguments then
        return math.nan
    return max(one, other) if reduction == "max" else min(one, other)


def _number(name: str, value: Any) -> float:
    if isinstance(value, Real):
        return float(value)
    raise MisuseError(
        f"log({name!r}) got a {type(value).__name__}; log a number, a tensor with one element, or a torchmetrics Metric"
        + (" (and several with log_dict)" if hasattr(value, "items") else "")
    )


def _not_one_number(name: str, value: Tensor) -> MisuseError:
    return MisuseError(f"log({name!r}) got a tensor of shape {tuple(value.shape)}; log one number")

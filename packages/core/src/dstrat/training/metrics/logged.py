"""What ``self.log`` keeps: values stay tensors on their device until somebody reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.errors import MisuseError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.training.metrics.reduction import reduce_over_processes

if TYPE_CHECKING:
    from dstrat.interfaces.strategy import Strategy

REDUCTIONS = ("mean", "sum", "max", "min")


class LoggedValue:
    """One name that is logged: its options, its latest value, and its running total over the epoch."""

    __slots__ = (
        "latest",
        "logger",
        "name",
        "on_epoch",
        "on_step",
        "prog_bar",
        "reduce_fx",
        "sync_epoch",
        "sync_step",
        "total",
        "weight",
    )

    def __init__(
        self,
        name: str,
        *,
        on_step: bool,
        on_epoch: bool,
        prog_bar: bool,
        logger: bool,
        reduce_fx: str,
        sync_dist: bool | None,
    ) -> None:
        if reduce_fx not in REDUCTIONS:
            raise MisuseError(f"reduce_fx {reduce_fx!r} of {name!r} is not one of {', '.join(REDUCTIONS)}")
        self.name = name
        self.on_step, self.on_epoch = on_step, on_epoch
        self.prog_bar, self.logger = prog_bar, logger
        self.reduce_fx = reduce_fx
        self.sync_step, self.sync_epoch = sync_dist is True, sync_dist is not False
        self.latest: Tensor | float = 0.0
        self.total: Tensor | float | None = None
        self.weight = 0.0

    @property
    def step_name(self) -> str:
        """Name of the value of a step."""
        return f"{self.name}_step" if self.on_epoch else self.name

    @property
    def epoch_name(self) -> str:
        """Name of the value over the epoch."""
        return f"{self.name}_epoch" if self.on_step else self.name

    def add(self, value: Tensor | float, weight: float) -> None:
        """Take a value into the epoch's total."""
        if self.reduce_fx in ("mean", "sum"):
            factor = weight if self.reduce_fx == "mean" else 1.0
            self.weight += factor
            if self.total is None:
                self.total = _exact(value) * factor
            elif isinstance(self.total, Tensor) and isinstance(value, Tensor):
                self.total.add_(value, alpha=factor)
            else:
                self.total = self.total + value * factor
        else:
            self.total = _copy(value) if self.total is None else _extreme(self.reduce_fx, self.total, value)

    def reset(self) -> None:
        """Begin another epoch."""
        self.total, self.weight = None, 0.0


class LoggedValues:
    """All values of one stage of a run (train, validate, test).

    Attributes:
        in_step: Whether a step of the module runs, which decides the defaults of ``on_step`` and ``on_epoch``.
        batch: The batch of that step, whose size weighs means.
        dataloader_idx: Index of the loader where there are several; the name gets a suffix then.
    """

    def __init__(self, *, training: bool) -> None:
        self._training = training
        self._values: dict[str, LoggedValue] = {}
        self.in_step = False
        self.batch: Any = None
        self.dataloader_idx: int | None = None

    def log(
        self,
        name: str,
        value: Any,
        *,
        prog_bar: bool,
        logger: bool,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: str,
        sync_dist: bool | None,
        batch_size: int | None,
    ) -> None:
        """Keep a value; see :meth:`TrainModule.log`."""
        if self.dataloader_idx is not None:
            name = f"{name}/dataloader_idx_{self.dataloader_idx}"
        entry = self._values.get(name)
        if entry is None:
            of_steps = self._training and self.in_step
            entry = self._values[name] = LoggedValue(
                name,
                on_step=of_steps if on_step is None else on_step,
                on_epoch=not of_steps if on_epoch is None else on_epoch,
                prog_bar=prog_bar,
                logger=logger,
                reduce_fx=reduce_fx,
                sync_dist=sync_dist,
            )
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise MisuseError(f"log({name!r}) got a tensor of shape {tuple(value.shape)}; log one number")
            value = value.detach()
        elif not isinstance(value, int | float):
            raise MisuseError(f"log({name!r}) got a {type(value).__name__}; log a number or a tensor with one element")
        entry.latest = value
        if entry.on_epoch:
            entry.add(value, self._weight(entry, batch_size))

    def _weight(self, entry: LoggedValue, batch_size: int | None) -> float:
        if batch_size is not None:
            return batch_size
        if not self.in_step or entry.reduce_fx != "mean":
            return 1.0
        return size_of(self.batch)

    def step_values(self, strategy: Strategy) -> dict[str, Tensor | float]:
        """Return the step's values that loggers write, by name; collective where one of them is synchronised."""
        chosen = [entry for entry in self._values.values() if entry.on_step and entry.logger]
        return {e.step_name: _synchronised(e, strategy) if e.sync_step else e.latest for e in chosen}

    def take_epoch_values(self, strategy: Strategy) -> dict[str, Tensor | float]:
        """Return what was logged over the epoch, reduced over all processes, by name, and forget it; collective."""
        logged = [entry for entry in self._values.values() if entry.total is not None]
        values = reduce_over_processes(logged, strategy)
        self.start_epoch()
        return values

    def latest_values(self) -> dict[str, Tensor | float]:
        """Return the values of the latest step in this process, by name."""
        return {entry.step_name: entry.latest for entry in self._values.values() if entry.on_step}

    def latest_shown(self) -> dict[str, Tensor | float]:
        """Return those of them that the progress bar shows."""
        return {entry.name: entry.latest for entry in self._values.values() if entry.on_step and entry.prog_bar}

    def names_for_logger(self) -> set[str]:
        """Return the names of the values over the epoch that loggers write."""
        return {entry.epoch_name for entry in self._values.values() if entry.on_epoch and entry.logger}

    def plain_names(self) -> dict[str, str]:
        """Return the name without suffix of each value over the epoch that has one."""
        return {entry.epoch_name: entry.name for entry in self._values.values() if entry.on_step and entry.on_epoch}

    def names_for_progress_bar(self) -> set[str]:
        """Return the names of the values over the epoch that the progress bar shows."""
        return {entry.epoch_name for entry in self._values.values() if entry.on_epoch and entry.prog_bar}

    def start_epoch(self) -> None:
        """Forget the totals of the last epoch."""
        for entry in self._values.values():
            entry.reset()


def size_of(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor in a batch, 1 where there is none."""
    sizes: list[int] = []
    apply_to_tensors(batch, lambda tensor: sizes.append(tensor.shape[0] if tensor.dim() else 1))
    return sizes[0] if sizes else 1


def _synchronised(entry: LoggedValue, strategy: Strategy) -> Tensor:
    latest = torch.as_tensor(entry.latest, dtype=torch.float32, device=strategy.root_device)
    reduced: Tensor = strategy.reduce(latest, reduce_op=entry.reduce_fx)
    return reduced


def _exact(value: Tensor | float) -> Tensor | float:
    if not isinstance(value, Tensor):
        return value
    return value.to(torch.float32 if value.device.type == "mps" else torch.float64)


def _copy(value: Tensor | float) -> Tensor | float:
    return value.clone() if isinstance(value, Tensor) else value


def _extreme(reduce_fx: str, one: Tensor | float, other: Tensor | float) -> Tensor | float:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.maximum(one, other) if reduce_fx == "max" else torch.minimum(one, other)
    return max(one, other) if reduce_fx == "max" else min(one, other)

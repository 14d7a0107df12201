"""Average of the weights of a strategy in this process, of sharded ones the shards."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.parallel.shards import local_tensor, with_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat.interfaces.strategy import Strategy

    Average = Callable[[Tensor, Tensor, Tensor | int], Tensor]
    MultiAverage = Callable[[list[Tensor], list[Tensor], Tensor | int], None]


class AveragedWeights:
    """Average of the weights of a strategy, element by element, which can be swapped with them.

    An average of weights in 16 bits is in float32, as the change of an update would be lost in their rounding.

    Args:
        strategy: Has set up the module.
        device: Of the average; None for that of the weights.
        use_buffers: Whether buffers are averaged too; otherwise they are copied.
        avg_fn: Function of an average, a weight and the number of updates, which returns the new average.
        multi_avg_fn: Function of lists of averages and weights and the number of updates, which changes the averages.

    Raises:
        ConflictError: The strategy has no weights that can be averaged.

    Attributes:
        num_updates: Number of updates until now.
        is_swapped: Whether the module has the average.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        device: torch.device | None,
        use_buffers: bool,
        avg_fn: Average | None,
        multi_avg_fn: MultiAverage | None,
    ) -> None:
        self._use_buffers, self._avg_fn, self._multi_avg_fn = use_buffers, avg_fn, multi_avg_fn
        weights = strategy.local_weights()
        self._names = _one_name_each(weights)  # by each name, also of tied parameters
        self._buffer_names = {name for name, _ in strategy.module.named_buffers(remove_duplicate=False)}
        self._averages = {
            name: _average_like(local_tensor(weight), device)
            for name, weight in weights.items()
            if self._names[name] == name
        }
        self._rounded: dict[str, Tensor] = {}  # weights of the training, while the module has a rounded average
        self.num_updates = 0
        self.is_swapped = False

    @torch.no_grad()
    def update(self, strategy: Strategy) -> None:
        """Add the current weights to the average; collective."""
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for name, current in self._current(strategy).items():
            average = self._averages[name]
            if self.num_updates == 0 or (name in self._buffer_names and not self._use_buffers):
                average.copy_(current)
                continue
            if (average.device, average.dtype) != (current.device, current.dtype):
                self._update_group([average], [current.to(average)])  # one copy at a time, for memory
                continue
            averages, currents = groups[average.device, average.dtype]
            averages.append(average)
            currents.append(current)
        for averages, currents in groups.values():
            self._update_group(averages, currents)
        self.num_updates += 1

    def _update_group(self, averages: list[Tensor], currents: list[Tensor]) -> None:
        # A tensor, as from torch's AveragedModel; on the CPU, where reading it waits for no device.
        num_updates = torch.tensor(self.num_updates)
        if self._multi_avg_fn is not None:
            self._multi_avg_fn(averages, currents, num_updates)
        elif self._avg_fn is not None:
            for average, current in zip(averages, currents, strict=True):
                average.copy_(self._avg_fn(average, current, num_updates))
        else:
            move_towards(averages, currents, 1.0 / (self.num_updates + 1))

    @torch.no_grad()
    def swap(self, strategy: Strategy) -> None:
        """Swap the values of the weights and of the average, in place; collective."""
        for name, current in self._current(strategy).items():
            average = self._averages[name]
            # One at a time, for memory; in place, as the strategy and the optimizers refer to these tensors.
            if average.dtype == current.dtype:
                saved = current.to(average.device, copy=True)
                current.copy_(average)
                average.copy_(saved)
            elif self.is_swapped:
                current.copy_(self._rounded.pop(name))
            else:
                self._rounded[name] = current.to(average.device, copy=True)
                current.copy_(average)
        strategy.accept_local_weights()
        self.is_swapped = not self.is_swapped

    def _current(self, strategy: Strategy) -> dict[str, Tensor]:
        weights = strategy.local_weights()
        return {name: local_tensor(weights[name]) for name in self._averages}

    @torch.no_grad()
    def share_buffers(self, strategy: Strategy) -> None:
        """Broadcast the averaged buffers of global rank 0, which are those in checkpoints; collective."""
        buffers = {name: average for name, average in self._averages.items() if name in self._buffer_names}
        if buffers and strategy.world_size > 1:
            # From the CPU: tensors on a GPU would be unpickled on rank 0's GPU on every rank.
            values = strategy.broadcast({name: buffer.cpu() for name, buffer in buffers.items()})
            for name, buffer in buffers.items():
                buffer.copy_(values[name])

    def states(self, strategy: Strategy) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the average and the weights of the training by name, where they are not the module's; collective.

        The tensors are sharded like the strategy's weights.
        """
        weights = strategy.local_weights()
        averages, rounded = (
            {
                name: with_local(weight, values[self._names[name]])
                for name, weight in weights.items()
                if self._names.get(name) in values
            }
            for values in (self._averages, self._rounded)
        )
        if not self.is_swapped:
            return averages, {}
        in_module = {name for name in averages if name not in rounded}
        return {name: averages[name] for name in rounded}, {**{name: averages[name] for name in in_module}, **rounded}

    def restore(self, strategy: Strategy, load: Callable[[dict[str, Any]], None], num_updates: int) -> None:
        """Load an average from a checkpoint; collective.

        Args:
            strategy: Of the run.
            load: Loads it into tensors by name, which are sharded like the strategy's weights.
            num_updates: Number of its updates.
        """
        self.update(strategy)  # what the checkpoint lacks, such as buffers that are not saved, begins as it is
        targets, _ = self.states(strategy)
        load(targets)
        for name, target in targets.items():  # a target may be a copy on the device of the shards
            self._averages[self._names[name]].copy_(local_tensor(target))
        self.num_updates = num_updates

    def buffers_of_training(self) -> dict[str, Tensor]:
        """Return the buffers of this process's training by name, while the module has the average."""
        values = {**self._averages, **self._rounded}
        return {name: values[name] for name in self._averages if name in self._buffer_names}

    def to_host(self) -> None:
        """Move the average to the CPU, after the run."""
        self._averages = {name: average.cpu() for name, average in self._averages.items()}
        self._rounded = {name: tensor.cpu() for name, tensor in self._rounded.items()}


def move_towards(averages: list[Tensor], currents: list[Tensor], share: float) -> None:
    """Move averages by a share of their distance to other tensors, in place; counts and indices are copied."""
    # torch has no public name for operations on lists of tensors; torch.optim.swa_utils uses these too.
    if averages[0].is_floating_point() or averages[0].is_complex():
        torch._foreach_lerp_(averages, currents, share)
    else:  # counts and indices have no average
        torch._foreach_copy_(averages, currents)


def _average_like(weight: Tensor, device: torch.device | None) -> Tensor:
    is_rounded = weight.is_floating_point() and weight.dtype.itemsize < torch.float32.itemsize
    return torch.empty_like(weight, device=device, dtype=torch.float32 if is_rounded else None)


def _one_name_each(weights: dict[str, Any]) -> dict[str, str]:
    """Return the first name of each weight, by all its names."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(weight), name) for name, weight in weights.items()}

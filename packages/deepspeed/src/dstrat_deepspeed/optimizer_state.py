"""The state of an optimizer that has flat partitions in the place of parameters, by the names of these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.errors import CheckpointError, MisuseError
from dstrat.interfaces.checkpoint_io import FlatShard, OptionalTensors
from dstrat.interfaces.state_dict import groups_misfit
from dstrat.parallel.optimizer_checks import state_after_one_step

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch.optim import Optimizer

    from dstrat_deepspeed.partitions import Extent, Partition

MASTER = "fp32_weights"
"""The key of the weights that the optimizer updates, where the module's are rounded copies of them."""


class PartitionedState:
    """State that an optimizer keeps of partitions, handed out and taken back parameter by parameter.

    Nothing is gathered: each rank has views of its own elements.

    Args:
        optimizer: The user's, in which DeepSpeed has put the partitions.
        partitions: This rank's.
        group_names: The names of the parameters that the user has put into each group, frozen ones too; None where
            DeepSpeed has made the groups.

    Attributes:
        group_names: The same.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        partitions: Sequence[Partition],
        group_names: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._partitions = partitions
        self.group_names = _names_of(partitions) if group_names is None else group_names
        # DeepSpeed counts groups that have parameters only.
        self._group_numbers = [number for number, names in enumerate(self.group_names) if names]
        self._buffers: dict[tuple[int, str], Tensor] = {}

    @property
    def parts(self) -> dict[str, FlatShard]:
        """Which elements this rank has of each parameter, by name."""
        return {
            extent.name: FlatShard(
                local=partition.weights.detach().view(-1)[extent.offset : extent.offset + extent.length],
                start=extent.start,
                shape=extent.shape,
            )
            for partition in self._partitions
            for extent in partition.extents
        }

    def get(self) -> dict[str, Any]:
        """Return the state as it is, in views; empty for parameters that have not been updated yet."""
        entries: dict[str, Any] = {}
        for partition in self._partitions:
            state = partition.state(self._optimizer)
            if state:
                for extent in partition.extents:
                    entries[extent.name] = {key: _part(value, partition, extent) for key, value in state.items()}
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": list(names)}
            for group, names in zip(self._optimizer.param_groups, self.group_names, strict=True)
        ]
        return {"state": entries, "param_groups": groups, **self._masters()}

    def template(self) -> OptionalTensors:
        """Return the tensors that a checkpoint can be loaded into; :meth:`load` makes them the state."""
        entries: dict[str, Any] = {}
        for number, partition in enumerate(self._partitions):
            buffers = {key: self._buffer(number, key, like) for key, like in self._kept(partition).items()}
            for extent in partition.extents:
                entries[extent.name] = {key: partition.part(buffer, extent) for key, buffer in buffers.items()}
        return OptionalTensors({"state": entries, **self._masters()})

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`get` returned, with views of :meth:`template` or whole tensors in it.

        The weights are those of the module, unless the state has more exact ones.

        Raises:
            CheckpointError: It is the state of other parameters, or of another optimizer.
        """
        self._check_names(state)
        for group, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for number, partition in enumerate(self._partitions):
            self._load_state(number, partition, state["state"])
            self._load_weights(partition, state.get(MASTER, {}))
        self._buffers.clear()

    def begin_with(self, entries: Mapping[str, Any]) -> None:
        """Let the optimizer begin with the state that it had of parameters before DeepSpeed had put in the partitions.

        Adagrad makes one in its constructor.

        Args:
            entries: By the names of parameters, with whole tensors; those of parameters that were sharded already are
                empty, and count as what the constructor makes.

        Raises:
            MisuseError: What the constructor makes cannot be found out.
        """
        for number, partition in enumerate(self._partitions):
            of_partition = {extent: entries.get(extent.name, {}) for extent in partition.extents}
            first = next(filter(None, of_partition.values()), None)
            if first is None:
                continue
            kept = self._kept(partition)
            state = {key: _converted(value, None) for key, value in first.items() if key not in kept}
            if any(isinstance(value, Tensor) and value.dim() > 0 for value in state.values()):
                raise MisuseError(
                    f"{type(self._optimizer).__name__} had a state of the parameters before they were sharded, which "
                    f"cannot be divided as these are ({', '.join(sorted(first))}): let it make its state in its first "
                    "step, as the optimizers of torch do, or choose stage 0"
                )
            for key, like in kept.items():
                whole = {e: {key: v[key]} for e, v in of_partition.items() if key in v and v[key].numel()}
                state[key] = _filled(self._buffer(number, key, like), whole, key)
            partition.set_state(self._optimizer, state)
        self._buffers.clear()

    def take_weights(self, names: Collection[str] | None = None) -> None:
        """Let the optimizer go on with the module's weights, which were loaded or changed.

        Args:
            names: Of parameters; None is all.
        """
        for partition in self._partitions:
            self._load_weights(partition, {}, names)

    # What there is

    def _masters(self) -> dict[str, Any]:
        masters = {
            extent.name: partition.part(partition.weights, extent)
            for partition in self._partitions
            if partition.tensor.dtype != partition.extents[0].parameter.dtype
            for extent in partition.extents
        }
        return {MASTER: masters} if masters else {}

    def _kept(self, partition: Partition) -> dict[str, Tensor]:
        """Return the tensors that the optimizer keeps of the weights' elements: those there are, or smaller ones."""
        state = partition.state(self._optimizer)
        if state:
            return {key: value for key, value in state.items() if _is_like(value, partition.weights)}
        found = self._first_state(partition)
        return {key: value for key, value in found.items() if isinstance(value, Tensor) and value.shape == (2,)}

    def _first_state(self, partition: Partition) -> dict[str, Any]:
        """Return what a first step would make of two elements; empty where that is not known."""
        if type(self._optimizer).__name__ == "DeepSpeedCPUAdam":  # which cannot be copied
            moments = {key: torch.zeros(2, dtype=partition.weights.dtype) for key in ("exp_avg", "exp_avg_sq")}
            return {"step": 0, **moments}
        return state_after_one_step(self._optimizer, self._group_numbers[partition.group], partition.weights)

    def _buffer(self, number: int, key: str, like: Tensor) -> Tensor:
        """Return the memory of a part of the state: the optimizer's, or what will be that."""
        partition = self._partitions[number]
        weights, files = partition.weights.detach(), partition.files
        if like.shape == weights.shape:
            return like
        if (number, key) not in self._buffers:
            value = like[0].item()
            self._buffers[number, key] = (
                torch.full_like(weights, value, dtype=like.dtype) if files is None else files.buffer(key, value)
            )
        return self._buffers[number, key]

    # Loading

    def _check_names(self, state: Mapping[str, Any]) -> None:
        frozen = {name for names in self.group_names for name in names} - self.parts.keys()  # DeepSpeed leaves them out
        here = [sorted(set(names) - frozen) for names in self.group_names]
        saved = [sorted(set(group["params"]) - frozen) for group in state["param_groups"]]
        if here != saved:
            all_here, all_saved = ({name for names in groups for name in names} for groups in (here, saved))
            missing, left_over = sorted(all_here - all_saved), sorted(all_saved - all_here)
            how = f"missing are {', '.join(missing) or 'none'}; left over are {', '.join(left_over) or 'none'}"
            if not missing and not left_over:
                found = groups_misfit(self._optimizer, here, saved)
                if found is not None:
                    raise CheckpointError(found)
                how = "they are in other groups"
            raise CheckpointError(
                f"the optimizer's state in the checkpoint is of other parameters than those of this one: {how}"
            )

    def _load_state(self, number: int, partition: Partition, saved: Mapping[str, Any]) -> None:
        entries = {extent: saved.get(extent.name) or {} for extent in partition.extents}
        kept = self._kept(partition)
        found: dict[str, Any] = {}
        for entry in entries.values():
            found.update(entry)
        if not found:
            partition.set_state(self._optimizer, {})
            return
        missing = sorted(kept.keys() - found.keys())
        if missing:
            raise CheckpointError(
                f"the optimizer's state in the checkpoint has {', '.join(sorted(found))}, and "
                f"{type(self._optimizer).__name__} needs {', '.join(missing)}: it is the state of another optimizer"
            )
        state = {key: value for key, value in found.items() if not _is_element_wise(key, value, kept)}
        example = self._first_state(partition)
        new = {key: _converted(value, example.get(key)) for key, value in state.items()}
        for key, value in found.items():
            if key not in state:
                like = kept.get(key, torch.zeros(2, dtype=value.dtype))
                new[key] = _filled(self._buffer(number, key, like), entries, key)
        partition.set_state(self._optimizer, new)

    def _load_weights(
        self, partition: Partition, masters: Mapping[str, Any], names: Collection[str] | None = None
    ) -> None:
        weights = partition.weights
        for extent in partition.extents:
            if names is not None and extent.name not in names:
                continue
            if extent.name in masters and weights.dtype != extent.parameter.dtype:
                _copy(weights, extent, masters[extent.name], repr(extent.name))
            else:
                mine = weights.detach().view(-1)[extent.offset : extent.offset + extent.length]
                used = extent.weights
                if mine.data_ptr() == used.data_ptr():
                    continue
                if names is None or mine.dtype == used.dtype:
                    mine.copy_(used)
                else:  # elements that were not changed keep what rounding has left out of the module's
                    mine.copy_(torch.where(mine.to(used) == used, mine, used.to(mine)))


def _names_of(partitions: Sequence[Partition]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for partition in partitions:
        groups.setdefault(partition.group, []).extend(extent.name for extent in partition.extents)
    return [groups[number] for number in sorted(groups)]


def _part(value: Any, partition: Partition, extent: Extent) -> Any:
    if _is_like(value, partition.weights):
        return partition.part(value, extent)
    return value.clone() if isinstance(value, Tensor) else value  # or all parameters would share one count of steps


def _is_like(value: Any, weights: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == weights.shape


def _is_element_wise(key: str, value: Any, kept: Mapping[str, Tensor]) -> bool:
    return key in kept or isinstance(value, FlatShard) or (isinstance(value, Tensor) and value.dim() > 0)


def _converted(value: Any, example: Any) -> Any:
    """Return a number as the optimizer wants it: some count steps in a tensor, some in an int."""
    if isinstance(value, Tensor):
        return type(example)(value.item()) if isinstance(example, int | float) else value.clone()
    return torch.tensor(float(value)) if isinstance(example, Tensor) else value


def _filled(buffer: Tensor, entries: Mapping[Extent, Any], key: str) -> Tensor:
    for extent, entry in entries.items():
        if key in entry:
            _copy(buffer, extent, entry[key], f"{extent.name!r} of {key}")
    return buffer


def _copy(target: Tensor, extent: Extent, value: Tensor | FlatShard, what: str) -> None:
    """Copy a parameter's elements to where they are in the partition; those of a template are there already."""
    if tuple(value.shape) != extent.shape:
        raise CheckpointError(f"{what} has the shape {tuple(value.shape)}, and {extent.shape} is expected")
    mine = target.detach().view(-1)[extent.offset : extent.offset + extent.length]
    if isinstance(value, FlatShard):
        given = value.local
    else:
        given = value.reshape(-1)[extent.start : extent.start + extent.length]
    if given.data_ptr() != mine.data_ptr():
        mine.copy_(given)

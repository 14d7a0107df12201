"""An optimizer's flat partitions of the weights, and their state by the names of the parameters in them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import FlatShard, OptionalTensors
from dstrat.interfaces.state_dict import groups_misfit
from dstrat.parallel.optimizer_checks import state_after_one_step
from dstrat_deepspeed.nvme import GroupInFiles, group_in_files, shard_elements

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from torch.nn import Parameter
    from torch.optim import Optimizer

MASTER = "fp32_weights"
"""The key of master weights, which the optimizer updates; the module's are rounded copies of them."""


# Partitions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Extent:
    """Consecutive elements of a parameter in a partition."""

    name: str  # of the parameter in the user's module
    parameter: Parameter
    shape: tuple[int, ...]  # of the full parameter
    start: int  # position of the first element in the flattened parameter
    offset: int  # its position in the partition
    length: int  # 0 if the partition has none of the parameter

    @property
    def weights(self) -> Tensor:
        """A view of these elements of the module's parameter."""
        if hasattr(self.parameter, "ds_tensor"):
            return shard_elements(self.parameter)[: self.length]
        return self.parameter.detach().view(-1)[self.start : self.start + self.length]

    def of(self, partition: Tensor) -> Tensor:
        """Return a view of the elements in a tensor with the partition's layout."""
        return partition.detach().view(-1)[self.offset : self.offset + self.length]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Partition:
    """Elements of several parameters in one flat tensor, which the optimizer steps in place of the parameters."""

    tensor: Tensor  # possibly padded at its end
    group: int  # of the optimizer
    extents: tuple[Extent, ...]  # on each rank, even if empty, of each parameter of the group
    is_replicated: bool = False  # whether every rank has all elements
    files: GroupInFiles | None = None  # of the elements and their state; None if they are in memory

    @property
    def weights(self) -> Tensor:
        """The elements."""
        return self.tensor if self.files is None else self.files.weights

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state of the partition; empty before its first step."""
        if self.files is not None:
            return self.files.state(optimizer)
        state: dict[str, Any] = optimizer.state.get(self.tensor, {})
        return state

    def set_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Set the optimizer's state of the partition."""
        if self.files is None:
            optimizer.state[self.tensor] = state
        else:
            self.files.set_state(optimizer, state)

    def shard(self, like_weights: Tensor, extent: Extent) -> Tensor | FlatShard:
        """Return a view of a parameter's elements in a tensor with the layout of the weights."""
        local = extent.of(like_weights)
        if self.is_replicated:
            return local.view(extent.shape)
        return FlatShard(local=local, start=extent.start, shape=extent.shape)


def partitions_of(optimizer: Any, names: Mapping[int, str]) -> list[Partition] | None:
    """Return this rank's partitions; None if the optimizer has the parameters themselves, as in stage 0.

    Args:
        optimizer: DeepSpeed's wrapper of the user's optimizer.
        names: Names of the parameters, by ``id``.
    """
    # Each wrapper of DeepSpeed has its own attributes, by which it is recognized.
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        return list(_of_stage_3(optimizer, names))
    offsets: Any = None
    if hasattr(optimizer, "single_partition_of_fp32_groups"):  # stages 1 and 2
        flats, groups = optimizer.single_partition_of_fp32_groups, optimizer.round_robin_bit16_groups
        offsets = optimizer.round_robin_bit16_offsets
    elif hasattr(optimizer, "fp32_groups_flat_partition"):  # stage 1 with weights of 16 bits and gradients of 32
        flats, groups = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups
    elif hasattr(optimizer, "fp32_groups_flat"):  # stage 0 in 16 bits, with an optimizer of DeepSpeed's
        flats, groups = optimizer.fp32_groups_flat, optimizer.fp16_groups
    elif hasattr(optimizer, "fp32_groups"):  # stage 0 in 16 bits, with a copy of each parameter
        return [
            Partition(
                tensor=copy, group=group, extents=_extents([parameter], copy.numel(), 0, names), is_replicated=True
            )
            for group, (copies, parameters) in enumerate(zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True))
            for copy, parameter in zip(copies, parameters, strict=True)
        ]
    else:
        return None
    ranks = getattr(optimizer, "real_dp_process_group", None)
    return [
        Partition(
            tensor=flat,
            group=group,
            extents=_extents(
                parameters,
                flat.numel(),
                0 if ranks is None else ranks[group].rank(),
                names,
                None if offsets is None else offsets[group],
            ),
            is_replicated=ranks is None,
        )
        for group, (flat, parameters) in enumerate(zip(flats, groups, strict=True))
    ]


def _extents(
    parameters: Sequence[Parameter],
    size: int,
    rank: int,
    names: Mapping[int, str],
    offsets: Iterable[int] | None = None,
) -> tuple[Extent, ...]:
    """Return a rank's extents of parameters in a flat tensor, of which each rank has a partition of a size."""
    if offsets is None:
        offsets = [0, *accumulate(parameter.numel() for parameter in parameters)][:-1]
    extents = []
    for parameter, offset in zip(parameters, offsets, strict=True):
        low = min(max(rank * size, offset), offset + parameter.numel())
        high = max(low, min((rank + 1) * size, offset + parameter.numel()))
        extents.append(
            Extent(
                name=names[id(parameter)],
                parameter=parameter,
                shape=tuple(parameter.shape),
                start=low - offset,
                offset=low - rank * size if high > low else 0,
                length=high - low,
            )
        )
    return tuple(extents)


def _of_stage_3(optimizer: Any, names: Mapping[int, str]) -> Iterator[Partition]:
    groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
    for number, (flat, parameters) in enumerate(groups):
        extents, offset = [], 0
        for parameter in parameters:
            shard = shard_of_stage_3(parameter)
            extents.append(
                Extent(
                    name=names[id(parameter)],
                    parameter=parameter,
                    shape=shard.shape,
                    start=shard.start,
                    offset=offset,
                    length=shard.local.numel(),
                )
            )
            offset += parameter.partition_numel()
        yield Partition(
            tensor=flat,
            group=optimizer.sub_group_to_group_id[number],
            extents=tuple(extents),
            files=group_in_files(optimizer, number),
        )


def shard_of_stage_3(parameter: Any) -> FlatShard:
    """Return this rank's shard of a parameter of stage 3, without the padding."""
    size, numel = parameter.partition_numel(), parameter.ds_numel
    start = min(parameter.ds_process_group.rank() * size, numel)
    local = shard_elements(parameter)[: min(size, numel - start)]
    return FlatShard(local=local, start=start, shape=tuple(parameter.ds_shape))


# State


class PartitionedState:
    """State of an optimizer's partitions, saved and loaded by the names of parameters.

    Nothing is gathered: each rank has views of its elements.

    Args:
        optimizer: The user's, in which DeepSpeed has replaced the parameters by partitions.
        partitions: This rank's.
        group_names: Names of all parameters in each group, also frozen ones; None if DeepSpeed has made the groups.
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
        # DeepSpeed's numbers skip groups without parameters.
        self._group_numbers = [number for number, names in enumerate(self.group_names) if names]
        self._buffers: dict[tuple[int, str], Tensor] = {}

    def init_adagrad(self) -> None:
        """Initialize Adagrad's state for the partitions; its constructor has done so for the parameters."""
        optimizer = self._optimizer
        if not isinstance(optimizer, torch.optim.Adagrad):
            return  # other optimizers initialize their state in the first step
        optimizer.state.clear()
        for number, partition in enumerate(self._partitions):
            group = optimizer.param_groups[self._group_numbers[partition.group]]
            initial = torch.full((2,), group["initial_accumulator_value"], dtype=partition.weights.dtype)
            partition.set_state(optimizer, {"step": torch.tensor(0.0), "sum": self._buffer(number, "sum", initial)})
        self._buffers.clear()

    @property
    def shards(self) -> dict[str, FlatShard]:
        """This rank's shard of each parameter, by name."""
        return {
            extent.name: FlatShard(local=extent.of(partition.weights), start=extent.start, shape=extent.shape)
            for partition in self._partitions
            for extent in partition.extents
        }

    def get(self) -> dict[str, Any]:
        """Return views of the state; parameters that have not been updated yet have none."""
        entries: dict[str, Any] = {}
        for partition in self._partitions:
            state = partition.state(self._optimizer)
            if state:
                tensors = self._tensors_of(partition)
                for extent in partition.extents:
                    entries[extent.name] = {
                        key: partition.shard(value, extent) if key in tensors else _copied(value)
                        for key, value in state.items()
                    }
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": list(names)}
            for group, names in zip(self._optimizer.param_groups, self.group_names, strict=True)
        ]
        return {"state": entries, "param_groups": groups, **self._masters()}

    def template(self) -> OptionalTensors:
        """Return tensors to load a checkpoint into, which :meth:`load` makes the optimizer's state."""
        entries: dict[str, Any] = {}
        for number, partition in enumerate(self._partitions):
            examples = self._tensors_of(partition).items()
            buffers = {key: self._buffer(number, key, example) for key, example in examples}
            for extent in partition.extents:
                entries[extent.name] = {key: partition.shard(buffer, extent) for key, buffer in buffers.items()}
        return OptionalTensors({"state": entries, **self._masters()})

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`get`, with the tensors of :meth:`template` or full ones.

        The optimizer's weights become the module's, or the state's master weights if it has some.

        Raises:
            CheckpointError: The state is of other parameters, or of another optimizer.
        """
        self._check_names(state)
        for group, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for number, partition in enumerate(self._partitions):
            self._load_state(number, partition, state["state"])
            self._load_weights(partition, state.get(MASTER, {}))
        self._buffers.clear()

    def sync_weights(self, names: Collection[str] | None = None) -> None:
        """Copy the module's weights, which were loaded or changed, to the optimizer's; all of them, or those named."""
        for partition in self._partitions:
            self._load_weights(partition, {}, names)

    def _masters(self) -> dict[str, Any]:
        masters = {
            extent.name: partition.shard(partition.weights, extent)
            for partition in self._partitions
            if partition.tensor.dtype != partition.extents[0].parameter.dtype
            for extent in partition.extents
        }
        return {MASTER: masters} if masters else {}

    def _tensors_of(self, partition: Partition) -> dict[str, Tensor]:
        """Return the element-wise tensors of the state by key; before the first step examples of two elements."""
        state = partition.state(self._optimizer)
        if not state:
            example = self._example(partition)
            return {key: value for key, value in example.items() if _has_shape(value, (2,))}
        weights = partition.weights
        tensors = {key: value for key, value in state.items() if _has_shape(value, weights.shape)}
        if weights.numel() == 1:  # of tensors of one element the shape does not tell whether they are numbers
            example = self._example(partition)
            tensors = {key: value for key, value in tensors.items() if _has_shape(example.get(key, value), (2,))}
        return tensors

    def _example(self, partition: Partition) -> dict[str, Any]:
        """Return the state of two elements after a step; empty if it is not known."""
        if type(self._optimizer).__name__ == "DeepSpeedCPUAdam":  # which cannot be copied
            moments = {key: torch.zeros(2, dtype=partition.weights.dtype) for key in ("exp_avg", "exp_avg_sq")}
            return {"step": 0, **moments}
        return state_after_one_step(self._optimizer, self._group_numbers[partition.group], partition.weights)

    def _buffer(self, number: int, key: str, example: Tensor) -> Tensor:
        """Return a tensor of the state: the optimizer's, or a new one that :meth:`load` gives to the optimizer."""
        partition = self._partitions[number]
        weights, files = partition.weights.detach(), partition.files
        if example.shape == weights.shape:
            return example
        if (number, key) not in self._buffers:
            value = example[0].item()
            self._buffers[number, key] = (
                torch.full_like(weights, value, dtype=example.dtype) if files is None else files.buffer(key, value)
            )
        return self._buffers[number, key]

    # Loading

    def _check_names(self, state: Mapping[str, Any]) -> None:
        trained = {extent.name for partition in self._partitions for extent in partition.extents}
        frozen = {name for names in self.group_names for name in names} - trained  # not in DeepSpeed's partitions
        expected = [sorted(set(names) - frozen) for names in self.group_names]
        saved = [sorted(set(group["params"]) - frozen) for group in state["param_groups"]]
        if expected == saved:
            return
        all_expected, all_saved = ({name for names in groups for name in names} for groups in (expected, saved))
        missing, unexpected = sorted(all_expected - all_saved), sorted(all_saved - all_expected)
        difference = f"missing are {', '.join(missing) or 'none'}; unexpected are {', '.join(unexpected) or 'none'}"
        if not missing and not unexpected:
            mismatch = groups_misfit(self._optimizer, expected, saved)
            if mismatch is not None:
                raise CheckpointError(mismatch)
            difference = "they are in other groups"
        raise CheckpointError(
            f"the optimizer's state in the checkpoint is of other parameters than those of this one: {difference}"
        )

    def _load_state(self, number: int, partition: Partition, saved: Mapping[str, Any]) -> None:
        entries = {extent: saved.get(extent.name) or {} for extent in partition.extents}
        tensors = self._tensors_of(partition)
        merged: dict[str, Any] = {}
        for entry in entries.values():
            merged.update(entry)
        if not merged:
            partition.set_state(self._optimizer, {})
            return
        missing = sorted(tensors.keys() - merged.keys())
        if missing:
            raise CheckpointError(
                f"the optimizer's state in the checkpoint has {', '.join(sorted(merged))}, and "
                f"{type(self._optimizer).__name__} needs {', '.join(missing)}: it is the state of another optimizer"
            )
        example = self._example(partition)
        state: dict[str, Any] = {}
        for key, value in merged.items():
            is_number = key in example and not _has_shape(example[key], (2,))
            has_elements = isinstance(value, FlatShard) or (isinstance(value, Tensor) and value.dim() > 0)
            if key in tensors or (has_elements and not is_number):
                buffer = self._buffer(number, key, tensors.get(key, torch.zeros(2, dtype=value.dtype)))
                for extent, entry in entries.items():
                    if key in entry:
                        _copy(buffer, extent, entry[key], f"{extent.name!r} of {key}")
                state[key] = buffer
            else:
                state[key] = _converted(value, example.get(key))
        partition.set_state(self._optimizer, state)

    def _load_weights(
        self, partition: Partition, masters: Mapping[str, Any], names: Collection[str] | None = None
    ) -> None:
        weights = partition.weights
        for extent in partition.extents:
            if names is not None and extent.name not in names:
                continue
            if extent.name in masters and weights.dtype != extent.parameter.dtype:
                _copy(weights, extent, masters[extent.name], repr(extent.name))
                continue
            target, used = extent.of(weights), extent.weights
            if target.data_ptr() == used.data_ptr():
                continue
            if names is None or target.dtype == used.dtype:
                target.copy_(used)
            else:  # unchanged elements keep the precision that the module's rounded ones have lost
                target.copy_(torch.where(target.to(used) == used, target, used.to(target)))


def _names_of(partitions: Sequence[Partition]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for partition in partitions:
        groups.setdefault(partition.group, []).extend(extent.name for extent in partition.extents)
    return [groups[number] for number in sorted(groups)]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value  # all parameters would share one step tensor


def _has_shape(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape)


def _converted(value: Any, example: Any) -> Any:
    """Return a number in the optimizer's type: some count steps in a tensor, of one dimension too, some in an int."""
    if isinstance(value, Tensor) and isinstance(example, int | float):
        return type(example)(value.item())
    if isinstance(example, Tensor):
        number = value if isinstance(value, Tensor) else torch.tensor(float(value))
        return number.clone().reshape(example.shape)
    return _copied(value)


def _copy(target: Tensor, extent: Extent, value: Tensor | FlatShard, name: str) -> None:
    """Copy a parameter's elements into a partition, unless they are the partition's own memory, as in a template."""
    if tuple(value.shape) != extent.shape:
        raise CheckpointError(f"{name} has the shape {tuple(value.shape)}, and {extent.shape} is expected")
    elements = extent.of(target)
    if isinstance(value, FlatShard):
        source = value.local
    else:
        source = value.reshape(-1)[extent.start : extent.start + extent.length]
    if source.data_ptr() != elements.data_ptr():
        elements.copy_(source)

"""Weights that a hook or a callback has changed: the optimizer goes on with these, and does not bring the old ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import MisuseError
from dstrat_deepspeed.partitions import shard_of_stage_3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor
    from torch.nn import Parameter

    from dstrat_deepspeed.optimizer_state import PartitionedState


class OutsideChanges:
    """Changes of a module's parameters between the steps of its optimizer.

    To look for them costs two numbers per parameter.

    Args:
        parameters: Of the module, by name.
        state: Of the optimizer that has partitions in their place.
    """

    def __init__(self, parameters: Mapping[str, Parameter], state: PartitionedState) -> None:
        self._state = state
        self._watched = [
            (_ShardedParameter if hasattr(parameter, "ds_id") else _WholeParameter)(name, parameter)
            for name, parameter in parameters.items()
        ]
        self._marks: list[Callable[[], Any]] = [watched.mark for watched in self._watched]
        self.ignore()

    def ignore(self) -> None:
        """Take the weights as they are for those that the optimizer has."""
        for watched in self._watched:
            watched.remember()
        self._seen = [mark() for mark in self._marks]

    def accept(self, *, moves: bool = True) -> None:
        """Let the optimizer go on with the weights that were changed.

        Raises:
            MisuseError: A change is lost, as stage 3 has not gathered the parameter where it was made.
        """
        now = [mark() for mark in self._marks]
        if now == self._seen:
            return
        pairs = zip(now, self._seen, strict=True)
        changed = [watched for watched, (new, old) in zip(self._watched, pairs, strict=True) if new != old]
        taken = changed if moves else [watched for watched in changed if not watched.is_elsewhere]
        for watched in taken:
            watched.keep()
        self._state.take_weights({watched.name for watched in taken})
        if len(taken) == len(changed):
            self.ignore()


class FixedFlags:
    """Which parameters require gradients, which DeepSpeed asks for once, when it shards what is trained.

    Args:
        parameters: Of the module, by name.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._flags = [parameter.requires_grad for parameter in self._parameters]

    def check(self) -> None:
        """Refuse to go on with other flags.

        Raises:
            MisuseError: A parameter has been frozen or unfrozen since.
        """
        now = [parameter.requires_grad for parameter in self._parameters]
        if now != self._flags:
            [name, flag] = next(
                (name, new) for name, new, old in zip(self._names, now, self._flags, strict=True) if new != old
            )
            raise MisuseError(
                f"{name}.requires_grad has become {flag} in the course of the training, which ZeRO does not follow: "
                "freeze parameters before fit, and let those that are to be trained later have a group of the "
                "optimizer whose learning rate (and weight decay) is 0 until then, or choose stage 0"
            )


class _WholeParameter:
    """A parameter of stages 0 to 2, whose memory is a part of the memory that all ranks exchange."""

    def __init__(self, name: str, parameter: Parameter) -> None:
        self.name = name
        self._parameter = parameter
        self._place = parameter.data

    def mark(self) -> tuple[int, int]:
        return self._parameter._version, self._parameter.data_ptr()  # noqa: SLF001 - torch has no other name for it

    @property
    def is_elsewhere(self) -> bool:
        return self._parameter.data_ptr() != self._place.data_ptr()

    def remember(self) -> None:
        """There is nothing else to compare with."""

    def keep(self) -> None:
        """Bring values to where they belong if the parameter has got other memory."""
        if self._parameter.data_ptr() != self._place.data_ptr():
            self._place.copy_(self._parameter.data)
            self._parameter.data = self._place


class _ShardedParameter:
    """A parameter of stage 3, of which each rank holds some elements, and all of them only where it is gathered."""

    def __init__(self, name: str, parameter: Any) -> None:
        self.name = name
        self._parameter = parameter
        self._version_held = 0
        self.is_elsewhere = False

    def mark(self) -> tuple[int, int]:
        return self._parameter._version, self._parameter.ds_tensor._version  # noqa: SLF001 - torch has no other name

    def remember(self) -> None:
        self._version_held = self._parameter.ds_tensor._version  # noqa: SLF001 - the same

    def keep(self) -> None:
        """Bring values from where the parameter is gathered to what this rank holds.

        Raises:
            MisuseError: It is not gathered any more, and nobody has done that.
        """
        shard = shard_of_stage_3(self._parameter)
        if self._parameter.ds_status.name == "AVAILABLE":
            with torch.no_grad():
                shard.local.copy_(shard.taken_from(self._parameter))
        elif self._parameter.ds_tensor._version == self._version_held and shard.local.numel():  # noqa: SLF001 - the same
            raise MisuseError(
                f"{self.name} was changed where this has no effect: stage 3 of ZeRO has its values only within the "
                "forward of its layer, and drops changes of them; change it in a with block of "
                "deepspeed.zero.GatheredParameters(parameters, modifier_rank=0), or choose stage 2"
            )


def share_memory(optimizer: Any) -> None:
    """Let the optimizer of stages 1 and 2 update the module's own weights, of which it else has an equal copy.

    A change of the weights is then one of what the optimizer goes on with, and the memory of the copy is free.

    Args:
        optimizer: What DeepSpeed has made of the user's optimizer.
    """
    flats: Iterable[Tensor] = getattr(optimizer, "single_partition_of_fp32_groups", ())
    if not flats or optimizer.cpu_offload:
        return
    for flat, parts, group in zip(
        flats, optimizer.parallel_partitioned_bit16_groups, optimizer.real_dp_process_group, strict=True
    ):
        own = parts[group.rank()]
        if own.dtype == flat.dtype and own.device == flat.device:
            flat.data = own.data
    optimizer._link_all_hp_params()  # noqa: SLF001 - which gives access to the weights by parameter

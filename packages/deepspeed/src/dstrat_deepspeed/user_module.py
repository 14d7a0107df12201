"""The user's module around a run: weights that hooks change, and the module given back as it was before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dstrat.errors import MisuseError
from dstrat_deepspeed import internals
from dstrat_deepspeed.nvme import release_elements, release_unused
from dstrat_deepspeed.partitions import shard_of_stage_3

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch.nn import Module, Parameter

    from dstrat_deepspeed.optimizer_state import PartitionedState


class ModuleSnapshot:
    """The attributes of a module's parameters before DeepSpeed has set its own.

    Args:
        module: The user's; parameters may have been sharded as they were made.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._attributes: list[tuple[Any, set[str]]] = [
            (parameter, set() if hasattr(parameter, "ds_id") else set(vars(parameter)))
            for parameter in module.parameters()
        ]
        self._lost: dict[int, torch.Size] = {}

    def gather(self, *, keeps: bool) -> None:
        """Gather the parameters one after the other; collective.

        Args:
            keeps: Whether this rank has them on the CPU afterwards.
        """
        release_unused(parameter for parameter, _ in self._attributes)
        for parameter, _ in self._attributes:
            if hasattr(parameter, "ds_id"):
                parameter.all_gather(param_list=[parameter])
                # A copy on CPUs too: a view would keep the whole buffer that it was gathered into.
                parameter.data = parameter.data.to("cpu", copy=True) if keeps else parameter.data.new_empty(0)
                release_elements(parameter)
                if keeps:
                    parameter.ds_tensor = None

    def remove(self) -> None:
        """Remove the marks of DeepSpeed; gradients are gone with it, and shards that are not gathered."""
        for parameter, attributes in self._attributes:
            parameter.grad = None
            if getattr(parameter, "ds_tensor", None) is not None:
                self._lost[id(parameter)] = parameter.ds_shape
                parameter.data = parameter.data.new_empty(0)
            for name in set(vars(parameter)) - attributes:
                delattr(parameter, name)
        internals.remove_marks(self._module)

    def leave_shapes(self) -> None:
        """Put the parameters that are not here on the meta device, where they keep their shapes without memory."""

        def shape_of(parameter: Parameter) -> Tensor | None:
            shape = self._lost.get(id(parameter))
            return None if shape is None else torch.empty(shape, dtype=parameter.dtype, device="meta")

        if self._lost:
            _replace_parameters(self._module, shape_of)


def rematerialize(module: Module, *, is_global_zero: bool) -> None:
    """Give memory to the parameters that a run of stage 3 has left on rank 0 alone; their values come from there.

    Raises:
        MisuseError: This is rank 0, and does not have them either.
    """
    if is_global_zero and any(parameter.is_meta for parameter in module.parameters()):
        raise MisuseError(
            f"parameters of {type(module).__name__} are on the meta device, without values, such as after a run of "
            "stage 3 that failed: build the module anew, and load a checkpoint of it"
        )
    _replace_parameters(module, lambda old: torch.empty_like(old, device="cpu") if old.is_meta else None)


def _replace_parameters(module: Module, make: Callable[[Parameter], Tensor | None]) -> None:
    """Set parameters anew, tied ones once, where the function returns values."""
    made: dict[Parameter, Parameter] = {}
    for layer in module.modules():
        for name, parameter in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                values = make(parameter)
                made[parameter] = parameter if values is None else nn.Parameter(values, parameter.requires_grad)
            if made[parameter] is not parameter:
                setattr(layer, name, made[parameter])


# Changes in the course of a training


class OutsideChanges:
    """Changes of a module's parameters between the steps of its optimizer, with which the optimizer goes on.

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
        self._get_marks: list[Callable[[], Any]] = [watched.mark for watched in self._watched]
        self.ignore()

    def ignore(self) -> None:
        """Take the weights as they are for those that the optimizer has."""
        for watched in self._watched:
            watched.remember()
        self._marks = [mark() for mark in self._get_marks]

    def accept(self, *, moves: bool = True) -> None:
        """Let the optimizer go on with the weights that were changed.

        Raises:
            MisuseError: A change is lost, as stage 3 has not gathered the parameter where it was made.
        """
        marks = [mark() for mark in self._get_marks]
        if marks == self._marks:
            return
        pairs = zip(marks, self._marks, strict=True)
        changed = [watched for watched, (new, old) in zip(self._watched, pairs, strict=True) if new != old]
        taken = changed if moves else [watched for watched in changed if not watched.has_moved]
        for watched in taken:
            watched.keep()
        self._state.take_weights({watched.name for watched in taken})
        if len(taken) == len(changed):
            self.ignore()


class FixedFlags:
    """The parameters that require gradients, which DeepSpeed reads once, when it shards what is trained."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._flags = [parameter.requires_grad for parameter in self._parameters]

    def check(self) -> None:
        """Refuse to go on with other flags.

        Raises:
            MisuseError: A parameter has been frozen or unfrozen since.
        """
        flags = [parameter.requires_grad for parameter in self._parameters]
        if flags != self._flags:
            name, flag = next(
                (name, new) for name, new, old in zip(self._names, flags, self._flags, strict=True) if new != old
            )
            raise MisuseError(
                f"{name}.requires_grad has become {flag} in the course of the training, which ZeRO does not follow: "
                "freeze parameters before fit, and let those that are to be trained later have a group of the "
                "optimizer whose learning rate (and weight decay) is 0 until then, or choose stage 0"
            )


class _WholeParameter:
    """A parameter of stages 0 to 2, a view of the memory that all ranks exchange."""

    def __init__(self, name: str, parameter: Parameter) -> None:
        self.name = name
        self._parameter = parameter
        self._exchanged = parameter.data

    def mark(self) -> tuple[int, int]:
        return self._parameter._version, self._parameter.data_ptr()  # noqa: SLF001 - torch has no other name for it

    @property
    def has_moved(self) -> bool:
        return self._parameter.data_ptr() != self._exchanged.data_ptr()

    def remember(self) -> None:
        """There is nothing else to compare with."""

    def keep(self) -> None:
        """Bring values back into the exchanged memory, if the parameter has got another."""
        if self.has_moved:
            self._exchanged.copy_(self._parameter.data)
            self._parameter.data = self._exchanged


class _ShardedParameter:
    """A parameter of stage 3, of which each rank holds some elements, and all of them only where it is gathered."""

    has_moved = False

    def __init__(self, name: str, parameter: Any) -> None:
        self.name = name
        self._parameter = parameter
        self._shard_version = 0

    def mark(self) -> tuple[int, int]:
        return self._parameter._version, self._parameter.ds_tensor._version  # noqa: SLF001 - torch has no other name

    def remember(self) -> None:
        self._shard_version = self._parameter.ds_tensor._version  # noqa: SLF001 - the same

    def keep(self) -> None:
        """Bring values from where the parameter is gathered to this rank's shard.

        Raises:
            MisuseError: It is not gathered any more, and the shard was not changed.
        """
        shard = shard_of_stage_3(self._parameter)
        if self._parameter.ds_status.name == "AVAILABLE":
            with torch.no_grad():
                shard.local.copy_(shard.taken_from(self._parameter))
        elif self._parameter.ds_tensor._version == self._shard_version and shard.local.numel():  # noqa: SLF001 - the same
            raise MisuseError(
                f"{self.name} was changed where this has no effect: stage 3 of ZeRO has its values only within the "
                "forward of its layer, and drops changes of them; change it in a with block of "
                "deepspeed.zero.GatheredParameters(parameters, modifier_rank=0), or choose stage 2"
            )

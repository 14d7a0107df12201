"""The user's module in a run: weights that hooks change, and its restoration after the run."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dstrat.errors import MisuseError
from dstrat.parallel.replicas import is_compared
from dstrat_deepspeed import internals
from dstrat_deepspeed.nvme import has_file, release_elements, release_unused
from dstrat_deepspeed.optimizer_state import shard_of_stage_3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module, Parameter

    from dstrat_deepspeed.optimizer_state import PartitionedState


class ModuleSnapshot:
    """The attributes of a module's parameters before DeepSpeed sets its own; they may be sharded already."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._attributes: list[tuple[Any, set[str]]] = [
            (parameter, set() if hasattr(parameter, "ds_id") else set(vars(parameter)))
            for parameter in module.parameters()
        ]
        self._lost: dict[int, torch.Size] = {}

    def gather(self, *, keeps: bool) -> None:
        """Gather the parameters one by one, to the CPU of the ranks that keep them; collective."""
        release_unused(parameter for parameter, _ in self._attributes)
        for parameter, _ in self._attributes:
            if hasattr(parameter, "ds_id"):
                parameter.all_gather(param_list=[parameter])
                # A copy on CPUs too: a view would keep the full buffer alive that it was gathered into.
                parameter.data = parameter.data.to("cpu", copy=True) if keeps else parameter.data.new_empty(0)
                release_elements(parameter)
                if keeps:
                    parameter.ds_tensor = None

    def remove(self) -> None:
        """Remove DeepSpeed's attributes, the gradients, and shards that were not gathered."""
        for parameter, attributes in self._attributes:
            parameter.grad = None
            if getattr(parameter, "ds_tensor", None) is not None:
                self._lost[id(parameter)] = parameter.ds_shape
                parameter.data = parameter.data.new_empty(0)
            for name in set(vars(parameter)) - attributes:
                delattr(parameter, name)
        internals.remove_marks(self._module)

    def move_lost_to_meta(self) -> None:
        """Put parameters that this rank has lost on the meta device, where they keep their shapes without memory."""
        lost = self._lost
        if lost:
            _replace_parameters(
                self._module,
                lambda old: torch.empty(lost[id(old)], dtype=old.dtype, device="meta") if id(old) in lost else None,
            )


def rematerialize(module: Module, *, is_global_zero: bool) -> None:
    """Allocate the parameters on the meta device, which a run of stage 3 has gathered on rank 0 only.

    Their values are broadcast from rank 0 later; a MisuseError if it has none either.
    """
    if is_global_zero and any(parameter.is_meta for parameter in module.parameters()):
        raise MisuseError(
            f"parameters of {type(module).__name__} are on the meta device, without values, such as after a run of "
            "stage 3 that failed: create a new module and load a checkpoint"
        )
    _replace_parameters(module, lambda old: torch.empty_like(old, device="cpu") if old.is_meta else None)


def _replace_parameters(module: Module, make: Callable[[Parameter], Tensor | None]) -> None:
    """Replace the parameters for which a function returns values; tied parameters stay tied."""
    replaced: dict[Parameter, Parameter] = {}
    for layer in module.modules():
        for name, parameter in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in replaced:
                values = make(parameter)
                replaced[parameter] = parameter if values is None else nn.Parameter(values, parameter.requires_grad)
            if replaced[parameter] is not parameter:
                setattr(layer, name, replaced[parameter])


# Reads of parameters that are not gathered


_ALLOWS_EMPTY: ContextVar[bool] = ContextVar("allows_empty", default=False)


@contextmanager
def empty_parameters_allowed() -> Iterator[None]:
    """Allow state dicts with the empty tensors of parameters that are not gathered, in a ``with`` block."""
    token = _ALLOWS_EMPTY.set(True)
    try:
        yield
    finally:
        _ALLOWS_EMPTY.reset(token)


@contextmanager
def empty_parameters_refused(module: Module) -> Iterator[None]:
    """Refuse state dicts and copies of layers whose parameters are not gathered, in a ``with`` block.

    They would have empty tensors, which a program would save or average.
    """
    layers = [
        (name or type(module).__name__, layer)
        for name, layer in module.named_modules()
        if any(hasattr(parameter, "ds_id") for parameter in layer.parameters(recurse=False))
    ]
    handles = []
    for name, layer in layers:
        handles.append(layer.register_state_dict_pre_hook(partial(_check_gathered, name)))
        vars(layer)["__deepcopy__"] = partial(_copy, layer, name)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for _, layer in layers:
            vars(layer).pop("__deepcopy__", None)


def _check_gathered(name: str, layer: Module, *_: Any) -> None:
    parameters = layer.parameters(recurse=False)
    if _ALLOWS_EMPTY.get() or not any(internals.is_partitioned(parameter) for parameter in parameters):
        return
    raise MisuseError(
        f"a state dict or copy of {name} would have empty tensors: stage 3 of ZeRO has its values only within its "
        "forward. To save weights take trainer.save_checkpoint(path), or with accelerate save what "
        "accelerator.get_state_dict(model) returns; strategy.module_state_dict() has them on rank 0, and all ranks "
        "call it; EMAWeightAveraging of dstrat.callbacks averages them; for anything else use a with block of "
        "deepspeed.zero.GatheredParameters(list(module.parameters()))"
    )


def _copy(layer: Module, name: str, memo: dict[int, Any]) -> Any:
    _check_gathered(name, layer)
    refusal = vars(layer).pop("__deepcopy__")  # so that the copy has none
    try:
        return copy.deepcopy(layer, memo)
    finally:
        vars(layer)["__deepcopy__"] = refusal


# Changes during a training


class OutsideChanges:
    """Detection of changes of a module's parameters between the steps of its optimizer, such as by hooks.

    The optimizer has copies of the weights, which must change too, or the next step would undo the change.  A check
    compares two numbers per parameter.
    """

    def __init__(self, parameters: Mapping[str, Parameter], state: PartitionedState) -> None:
        self._state = state
        self._watched = [
            (_ShardedParameter if hasattr(parameter, "ds_id") else _ReplicatedParameter)(name, parameter)
            for name, parameter in parameters.items()
        ]
        self._get_versions: list[Callable[[], tuple[int, int]]] = [watched.version for watched in self._watched]
        self._sharded = {id(one.parameter): one for one in self._watched if isinstance(one, _ShardedParameter)}
        self._persistent = [one for one in self._sharded.values() if one.parameter.ds_persist]
        self._compared: dict[int, _ShardedParameter] = {}
        self._num_steps = 0
        self._replaces_gathered = False
        self.ignore()

    @contextmanager
    def replacing_gathered(self) -> Iterator[None]:
        """Expect gathered values to differ from their shards, which have changed, in a ``with`` block."""
        self._replaces_gathered = True
        try:
            yield
        finally:
            self._replaces_gathered = False

    @contextmanager
    def observed_shards(self, optimizer: Any) -> Iterator[None]:
        """Detect assignments to ``parameter.data`` in stage 3, of which no version counter tells, in a ``with`` block.

        Args:
            optimizer: DeepSpeed's of stage 3.
        """
        internals.observe_gathers(optimizer, self._check_before_gather)
        sharded = self._sharded.items()
        self._compared = {key: one for key, one in sharded if internals.gathers_exactly(optimizer, one.parameter)}
        with internals.observed_releases(optimizer, self._check_before_release, self._remember_memory):
            yield

    def after_step(self) -> None:
        """Expect the memory that a step of the optimizer has gathered small parameters in."""
        self._num_steps += 1
        for sharded in self._persistent:
            sharded.remember_memory()

    def check_shards(self) -> None:
        """Raise a MisuseError if a parameter that stage 3 has not gathered was assigned to."""
        for sharded in self._sharded.values():
            sharded.check_unassigned()

    def _check_before_gather(self, parameters: Sequence[Any]) -> None:
        for parameter in parameters:
            if id(parameter) in self._sharded:
                self._sharded[id(parameter)].check_unassigned()

    def _check_before_release(self, parameter: Any) -> None:
        # In the first step only, as this takes a pass over all shards.
        if not (self._num_steps or self._replaces_gathered) and id(parameter) in self._compared:
            self._compared[id(parameter)].check_equals_shard()

    def _remember_memory(self, parameter: Any) -> None:
        if id(parameter) in self._sharded:
            self._sharded[id(parameter)].remember_memory()

    def ignore(self) -> None:
        """Treat the current weights as those of the optimizer."""
        for sharded in self._persistent:
            sharded.remember_memory()
        self._versions = [get_version() for get_version in self._get_versions]

    def accept(self, *, moves: bool = True) -> None:
        """Copy changed weights to the optimizer's; a MisuseError if stage 3 had not gathered a changed parameter.

        Args:
            moves: Whether parameters that have got other memory (``parameter.data = ...``) are moved back to that which
                ranks exchange.
        """
        versions = [get_version() for get_version in self._get_versions]
        assigned = [sharded for sharded in self._persistent if sharded.is_assigned]
        if versions == self._versions and not assigned:
            return
        triples = zip(self._watched, self._versions, versions, strict=True)
        changed = [(watched, old) for watched, old, new in triples if new != old or watched in assigned]
        accepted = [(watched, old) for watched, old in changed if moves or not watched.has_moved]
        for watched, old in accepted:
            watched.write_back(old)
        self._state.sync_weights({watched.name for watched, _ in accepted})
        if len(accepted) == len(changed):
            self.ignore()

    def compare_gathered(self) -> None:
        """Raise a MisuseError if small parameters, which stay gathered, have other values than their shards.

        A change of ``parameter.data`` in place, such as ``parameter.data.clamp_(-1, 1)``, increases no counter.  Of
        other parameters there is nothing that it could change, so that a hook that changes all of them is detected by
        the small ones.  They are compared in some steps only, as that waits for the device.
        """
        if is_compared(self._num_steps + 1):
            for sharded in self._persistent:
                if id(sharded.parameter) in self._compared:
                    sharded.check_equals_shard()


class FixedFlags:
    """Check that ``requires_grad`` does not change: DeepSpeed reads it once, when it shards the optimizer."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._flags = [(name, parameter, parameter.requires_grad) for name, parameter in parameters.items()]

    def check(self) -> None:
        """Raise a MisuseError if a parameter was frozen or unfrozen during the training."""
        for name, parameter, flag in self._flags:
            if parameter.requires_grad == flag:
                continue
            raise MisuseError(
                f"{name}.requires_grad has become {not flag} in the course of the training, which ZeRO does not "
                "follow: freeze parameters before fit, and let those that are to be trained later have a group of the "
                "optimizer whose learning rate (and weight decay) is 0 until then, or choose stage 0"
            )


class _ReplicatedParameter:
    """A parameter of stages 0 to 2: a view of the flat memory that ranks gather after a step."""

    def __init__(self, name: str, parameter: Parameter) -> None:
        self.name = name
        self._parameter = parameter
        self._exchanged = parameter.data

    def version(self) -> tuple[int, int]:
        # _version counts changes in place, the address shows another tensor as parameter.data.
        return self._parameter._version, self._parameter.data_ptr()  # noqa: SLF001 - torch has no public name

    @property
    def has_moved(self) -> bool:
        return self._parameter.data_ptr() != self._exchanged.data_ptr()

    def write_back(self, _: tuple[int, int]) -> None:
        """Copy the values into the exchanged memory, if the parameter has moved out of it."""
        if self.has_moved:
            self._exchanged.copy_(self._parameter.data)
            self._parameter.data = self._exchanged


class _ShardedParameter:
    """A parameter of stage 3: each rank holds a shard, and the full parameter only while it is gathered.

    Small parameters (``ds_persist``) stay gathered between steps.
    """

    has_moved = False

    def __init__(self, name: str, parameter: Any) -> None:
        self.name = name
        self.parameter = parameter
        self.remember_memory()

    def version(self) -> tuple[int, int]:
        return self.parameter._version, self.parameter.ds_tensor._version  # noqa: SLF001 - torch has no public name

    def remember_memory(self) -> None:
        """Take the memory that the parameter has now for that of DeepSpeed, until it is gathered or released."""
        self._memory = self.parameter.ds_status, self.parameter.untyped_storage()

    @property
    def is_assigned(self) -> bool:
        """Whether the parameter has other memory than DeepSpeed gave it, by ``parameter.data = tensor``."""
        status, storage = self._memory
        # torch returns the same object for a storage.
        return self.parameter.ds_status is status and self.parameter.untyped_storage() is not storage

    def check_unassigned(self) -> None:
        """Raise a MisuseError if the parameter was assigned to while it was not gathered."""
        if self.parameter.ds_status.name == "NOT_AVAILABLE" and self.is_assigned:
            raise self._lost()

    def check_equals_shard(self) -> None:
        """Raise a MisuseError if the gathered values, which are going to be freed, are not those of the shard."""
        parameter = self.parameter
        if (
            parameter.ds_status.name != "AVAILABLE"
            or has_file(parameter)
            or parameter.numel() != parameter.ds_numel
            or parameter.ds_tensor.dtype != parameter.dtype
        ):
            return
        shard = shard_of_stage_3(parameter)
        values = shard.taken_from(parameter.detach()).to(shard.local.device)
        if not torch.equal(values.view(torch.uint8), shard.local.view(torch.uint8)):  # NaN is equal to itself
            raise self._lost()

    def write_back(self, old_version: tuple[int, int]) -> None:
        """Copy the values to this rank's shard; a MisuseError if the parameter is not gathered, and they are lost."""
        shard = shard_of_stage_3(self.parameter)
        if self.parameter.ds_status.name == "AVAILABLE":
            with torch.no_grad():
                shard.local.copy_(shard.taken_from(self.parameter))
        # A changed shard is right already: GatheredParameters has written the change to it.
        elif self.version()[1] == old_version[1] and shard.local.numel():
            raise self._lost()

    def _lost(self) -> MisuseError:
        return MisuseError(
            f"{self.name} was changed where this has no effect: stage 3 of ZeRO has its values only within the "
            "forward of its layer, and drops changes of them; change it in a with block of "
            "deepspeed.zero.GatheredParameters(parameters, modifier_rank=0), or choose stage 2"
        )

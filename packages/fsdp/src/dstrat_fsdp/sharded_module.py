"""A module that is sharded with torch's ``fully_shard``."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dstrat.errors import MisuseError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.state_dict import canonical_parameters
from dstrat.parallel.replicas import is_compared
from dstrat.parallel.step_module import StepModule
from dstrat_fsdp import internals
from dstrat_fsdp.checks import (
    OutputGuard,
    check_dtypes,
    check_replicas,
    check_same_use,
    check_split_shapes,
    explain_shards,
    refuse_copy,
)
from dstrat_fsdp.gradients import drop_accumulated, pending_gradients, restore_gradients
from dstrat_fsdp.options import changes_dtypes
from dstrat_fsdp.parameters import accept_full_tensors
from dstrat_fsdp.replicated import ReplicatedParameters
from dstrat_fsdp.shard_access import AssignmentGuard, ChangesInForward, ParameterGuard, PassedParameters, SliceGuard
from dstrat_fsdp.wrap_policy import keeps_statistics, layers_with_statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How a module is sharded.

    Attributes:
        mesh: The processes: ``(shards,)``, or ``(replicas, shards)``.
        reshard_after_forward: Whether blocks are freed between their forward and backward passes; an int keeps the
            shards of a smaller mesh of that size.
        precision_policy: The dtypes in which parameters are gathered, gradients summed, and outputs of steps returned.
        offload_policy: The device of the shards.
        prefetches_backward: Whether a block is gathered while the gradients of the next one are still computed.
        input_dtype: The dtype to which a step's floating-point tensors are cast; None leaves them as they are.
        buffer_dtype: The dtype of floating-point buffers in steps; None leaves them as they are.
        sums_gradients: Whether gradients are summed and then divided, for backends without a mean.
        meshes: The processes for some layers instead, such as experts, whose other parts are on other processes.  They
            cast their inputs themselves.
        tensor_mesh: The processes over which the module has split some layers; None if there are none.
    """

    mesh: DeviceMesh
    reshard_after_forward: bool | int
    precision_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    prefetches_backward: bool = True
    input_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    sums_gradients: bool = False
    meshes: Mapping[Module, DeviceMesh] = field(default_factory=dict)
    tensor_mesh: DeviceMesh | None = None

    @property
    def replicates_all(self) -> bool:
        """Whether a rank has all of each parameter, on its device and in its dtype, so that nothing is gathered."""
        divides_nothing = self.mesh.size() == 1 and not self.meshes
        return (
            divides_nothing
            and not changes_dtypes(self.precision_policy)
            and not isinstance(self.offload_policy, CPUOffloadPolicy)
        )

    def apply_to(self, layer: Module, *, is_root: bool = False) -> FSDPModule:
        """Shard the parameters of a layer that are not sharded yet, as one unit that is gathered together.

        Those of the root are outside of blocks, and gathered for a full step.
        """
        self.prepare_parameters(layer)
        unit = fully_shard(
            layer,
            mesh=self.meshes.get(layer, self.mesh),
            reshard_after_forward=None if is_root else self.reshard_after_forward,
            mp_policy=self._policy_of(layer, is_root=is_root),
            offload_policy=self.offload_policy,
            ignored_params=_scalars_of(layer),
        )
        if not (self.prefetches_backward or is_root):
            unit.set_modules_to_backward_prefetch([unit])  # gathered already, so nothing is prefetched
        return unit

    def prepare_parameters(self, layer: Module) -> None:
        """Prepare the parameters that are not sharded yet: they are contiguous, and on the mesh's device."""
        unsharded = [tensor for tensor in layer.parameters() if not isinstance(tensor, DTensor)]
        strided = [tensor for tensor in unsharded if not tensor.is_contiguous()]
        for tensor in strided:  # transposed ones, or those of convolutions in channels_last, which fully_shard refuses
            tensor.data = tensor.detach().contiguous()
        if strided:
            _logger.info("%d parameters of a %s are stored contiguously", len(strided), type(layer).__name__)
        # As fully_shard does on most devices.
        device = internals.device_of(self.mesh)
        if device.type != "cpu":
            internals.move((tensor for tensor in unsharded if not tensor.is_meta), device)

    def _policy_of(self, layer: Module, *, is_root: bool) -> MixedPrecisionPolicy:
        if keeps_statistics(layer):  # torch computes in the dtype of their buffers, and accepts inputs of any dtype
            return dataclasses.replace(self.precision_policy, param_dtype=None, output_dtype=None)
        # ShardedModule casts inputs and outputs of steps: in any kind of batch, and also without a sharded root.
        # A block that casts its outputs would pass another dtype to the next layers than these compute in.
        casts = self.precision_policy.cast_forward_inputs and not is_root and layer not in self.meshes
        return dataclasses.replace(self.precision_policy, cast_forward_inputs=casts, output_dtype=None)


class ShardedModule:
    """Runs the steps of a module whose parameters are sharded in units.

    Args:
        module: The user's module, which may have sharded some layers itself.
        sharding: How the other parameters are sharded.
        blocks: The layers that become units, inner ones first.  If the policy computes in another dtype, layers with
            running statistics, such as batch norm, become units too, and stay in the dtype of the parameters.
        gathers_root: Whether the parameters outside of blocks are gathered for a full step; False with manual
            optimization, where the blocks contain all parameters.

    Attributes:
        root: The module that runs steps.
    """

    def __init__(self, module: Module, sharding: Sharding, blocks: Sequence[Module], *, gathers_root: bool) -> None:
        check_split_shapes(module)
        has_units = any(isinstance(layer, FSDPModule) for layer in module.modules())
        replicates_all = sharding.replicates_all and not has_units
        if replicates_all:
            sharding.prepare_parameters(module)
        self._replicated = ReplicatedParameters(
            module,
            sharding.mesh,
            sharding.offload_policy,
            blocks if replicates_all else None,
            has_several_passes=not gathers_root,
        )
        blocks = [] if replicates_all else blocks
        names = {id(submodule): name or "the module itself" for name, submodule in module.named_modules()}
        if sharding.precision_policy.param_dtype is not None:
            blocks = [*(layer for layer in layers_with_statistics(module) if layer not in blocks), *blocks]
        # Their hooks come before torch's, which then sees the copies.
        self._output_guards = [OutputGuard(block, names[id(block)]) for block in blocks]
        units = [sharding.apply_to(block) for block in blocks]
        self._module = module
        self.root: Any = (_SelfShardedSteps if isinstance(module, FSDPModule) else StepModule)(module)
        if gathers_root and not replicates_all:
            sharding.apply_to(self.root, is_root=True)
        self._units = [unit for unit in self.root.modules() if isinstance(unit, FSDPModule)]
        self._unit_names = [names.get(id(unit), "the module itself") for unit in self._units]
        self._computed: list[str] = []  # blocks of the last forward pass, in their order, in steps that compare them
        for unit in self._units:
            unit.__dict__["__deepcopy__"] = refuse_copy  # torch's own raises without a reason
        if sharding.sums_gradients:
            for unit in self._units:
                unit.set_force_sum_reduction_for_comms(True)
        check_dtypes(self._units, module)
        # Training keeps these gathered for the backward pass; evaluation has none, and frees them.
        self._gathered_in_training = units if sharding.reshard_after_forward is False else []
        self._guard: ParameterGuard | None = None
        self._assignments: AssignmentGuard | None = None
        self._gradients: AssignmentGuard | None = None
        self._slices: SliceGuard | None = None
        self._passed: list[PassedParameters] = []
        self._load_hooks: Sequence[RemovableHandle] = ()
        self._step_hooks: Sequence[RemovableHandle] = ()
        self._gathers_root = gathers_root
        self._synchronizes, self._has_accumulated = True, False
        self._mesh, self._tensor_mesh, self._num_steps = sharding.mesh, sharding.tensor_mesh, 0
        self._input_dtype, self._output_dtype = sharding.input_dtype, sharding.precision_policy.output_dtype
        self._buffers = _BuffersInSteps(module, sharding.buffer_dtype)

    def guard_shards(self) -> None:
        """Let the module load full tensors, and detect writes that would be lost; shards have their memory now."""
        self._load_hooks = accept_full_tensors(self._module)
        named = ((f"parameter {name!r}", parameter) for name, parameter in self._module.named_parameters())
        self._assignments, self._slices = AssignmentGuard(named), SliceGuard(self._module)
        # Of all optimizers, as a wrapper that does not call torch's constructor has no hooks of its own.
        self._step_hooks = (
            register_optimizer_step_pre_hook(_weak_hook(self._begin_optimizer_step)),
            register_optimizer_step_post_hook(_weak_hook(self._end_optimizer_step)),
        )
        units = zip(self._units, self._unit_names, strict=True)
        self._passed = [PassedParameters(unit, name) for unit, name in units if unit is not self.root]

    def train(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a training step of the module, which a backward pass follows, unless the step has no loss.

        Raises:
            MisuseError: A parameter was replaced, changed while it was gathered, or used while it was sharded; or a
                backward pass was not that of the strategy.
        """
        if self._assignments is not None and self._is_comparing:
            self._assignments.check()
        if self._slices is not None:
            self._slices.drop_copies()
        if self._guard is None:
            return self._train_first(step, *args, **kwargs)
        try:
            self._guard.check_not_replaced()
        except MisuseError:  # also if the step before had no backward pass, which frees the gathered parameters
            self.free()
            self._guard.check_not_replaced()
        self._guard.check_not_changed()
        if not self._has_accumulated:
            self._replicated.check_reduced()
        return self.run(step, *args, **kwargs)

    def _train_first(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.free()  # the guard takes the sharded parameters for those that the module must keep
        self._guard = ParameterGuard(self._module, internals.fsdp_params(self._units))
        # In this step only, as the sums take a pass over all parameters.
        changes = ChangesInForward(self._guard, self._units)
        try:
            outputs = self.run(step, *args, **kwargs)
        finally:
            changes.end()
        self._guard.check_not_changed()  # for the first time, which only records versions
        return outputs

    def evaluate(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the module without gradients, and free all units after it."""
        self.free()  # a training step without a backward pass has left values of before the optimizer's step
        self._free_after_forward(True)
        try:
            return self.run(step, *args, **kwargs)
        finally:
            self._free_after_forward(False)
            self.free()

    def run(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass; further ones of a training step, as for microbatches, while units may be gathered."""
        # An optimizer may compute the loss within its step.
        is_stepping, SliceGuard.is_stepping, SliceGuard.watches_all = SliceGuard.is_stepping, False, False
        self._buffers.cast()
        self._replicated.make_plain()
        if self._input_dtype is not None:
            args, kwargs = _in_dtype((args, kwargs), self._input_dtype)
        try:
            with explain_shards():
                output = self.root(step, *args, **kwargs)
        finally:
            SliceGuard.is_stepping = is_stepping
        if self._is_comparing and self._gathers_root and self._units:
            self._computed = [self._unit_names[index] for index in internals.forward_order(self.root, self._units)]
        return output if self._output_dtype is None else _in_dtype(output, self._output_dtype)

    def free(self) -> None:
        """Free all gathered units."""
        for unit in self._units:
            unit.reshard()
        self._replicated.make_sharded()

    def leave_low_precision(self) -> None:
        """Convert buffers back to their original dtype, until the next step."""
        self._buffers.restore()

    def set_gradient_sync(self, enabled: bool) -> None:
        """Set whether backward passes reduce gradients, or accumulate them without communication."""
        if enabled == self._synchronizes:
            return
        self._synchronizes, self._has_accumulated = enabled, self._has_accumulated or not enabled
        self._replicated.set_gradient_sync(enabled)
        for unit in self._units:
            unit.set_requires_gradient_sync(enabled, recurse=False)

    def reduce_gradients(self) -> None:
        """Reduce what a backward pass without synchronization has accumulated; collective over the ranks of a shard."""
        if self._units:
            internals.reduce_gradients(self.root)

    def accumulate_gradients(self) -> None:
        """Accumulate in their dtype what the engine has added to gathered parameters beside a backward pass of units.

        The next passes neither synchronize nor free units.
        """
        internals.accumulate_gradients(self._units)

    def set_free_after_backward(self, enabled: bool) -> None:
        """Set whether backward passes free units, or leave them gathered for a further microbatch."""
        for unit in self._units:
            unit.set_reshard_after_backward(enabled, recurse=False)

    def begin_backward(self) -> None:
        """Let a backward pass compute the gradients of those parameters that require them now."""
        SliceGuard.watches_all = False
        self._replicated.make_plain()
        internals.set_gradient_dtypes(self._units)

    def end_backward(self) -> None:
        """Reduce the gradients of scalars after a backward pass, which has reduced all others; collective.

        Raises:
            MisuseError: Ranks have computed other blocks, or ranks of split layers have different gradients of another
                parameter, which all of them have.
        """
        if self._synchronizes:
            self._replicated.reduce_gradients()
        self._replicated.make_sharded()
        SliceGuard.watches_all = not SliceGuard.is_stepping  # in the hooks that follow
        if not self._synchronizes:
            return
        # In a few steps only, as the results take a wait for the device.
        if self._is_comparing:
            number = self._num_steps + 1
            if self._mesh.size() > 1:
                check_same_use(self._module, self._computed, self._mesh, number)
            if self._tensor_mesh is not None:
                check_replicas(self._module, self._mesh, self._tensor_mesh, number)
            if not SliceGuard.is_stepping:
                gradients = ((f"the gradient of {name!r}", one.grad) for name, one in self._module.named_parameters())
                self._gradients = AssignmentGuard(gradients, "parameter.grad")
        self._num_steps += 1

    def _begin_optimizer_step(self) -> None:
        """Check that gradients have not been assigned to, where they were remembered.

        Raises:
            MisuseError: One was.
        """
        SliceGuard.is_stepping, SliceGuard.watches_all = True, False
        if self._gradients is not None:
            self._gradients.check()
            self._gradients = None

    def _end_optimizer_step(self) -> None:
        """Watch writes to all sharded tensors, in the hooks that follow."""
        SliceGuard.is_stepping, SliceGuard.watches_all = False, True

    @property
    def _is_comparing(self) -> bool:
        return is_compared(self._num_steps + 1)

    def pending_gradients(self) -> dict[str, Any]:
        """Return this rank's gradients that are pending for an optimizer step; empty if there are none."""
        self.free()
        pending = pending_gradients(self._units, self._module, has_shards=not self._gathers_root)
        replicated, placements = self._replicated.pending_gradients(self._names())
        if not (pending or replicated):
            return {}
        return {**pending, "scalars": replicated, "placements": {**pending.get("placements", {}), **placements}}

    def restore_gradients(self, saved: Mapping[str, Any]) -> None:
        """Restore the gradients that :meth:`pending_gradients` returned on the same mesh; collective."""
        restore_gradients(self._units, self._module, saved)
        replicated, placements = saved.get("scalars", {}), saved.get("placements", {})
        self._replicated.restore_gradients(replicated, placements, self._names())
        self._has_accumulated = True  # so that zero_grad clears them, too

    def drop_accumulated(self, optimizer: Optimizer) -> None:
        """Clear the unsharded gradients of an optimizer's parameters."""
        if self._has_accumulated:
            parameters = {id(shard) for group in optimizer.param_groups for shard in group["params"]}
            drop_accumulated(self._units, parameters)
            self._replicated.drop_gradients(parameters)

    def undo(self) -> None:
        """Turn the units into plain modules again; their parameters stay sharded."""
        for unit in self._units:
            internals.end_step(unit)
        self.free()
        self.leave_low_precision()
        for unit in self._units:
            unit.__dict__.pop("__deepcopy__", None)
            internals.unwrap(unit)
        for guard in self._output_guards:
            guard.remove()
        for passed in self._passed:
            passed.remove()
        for hook in (*self._load_hooks, *self._step_hooks):
            hook.remove()
        if self._slices is not None:
            self._slices.remove()
        self._gradients = None
        self._replicated.remove_hooks()
        self._units, self._gathered_in_training = [], []

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in canonical_parameters(self._module).items()}

    def _free_after_forward(self, frees: bool) -> None:
        for unit in self._gathered_in_training:
            unit.set_reshard_after_forward(frees, recurse=False)


def _weak_hook(method: Callable[[], None]) -> Callable[..., None]:
    """Return a hook that calls a method, and keeps nothing alive: an owner may be freed without being released."""
    reference = WeakMethod(method)

    def hook(*_: Any) -> None:
        if (living := reference()) is not None:
            living()

    return hook


def _scalars_of(layer: Module) -> set[Parameter]:
    return {parameter for parameter in layer.parameters() if parameter.dim() == 0}


def _in_dtype(values: Any, dtype: torch.dtype) -> Any:
    return apply_to_tensors(values, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


class _BuffersInSteps:
    """Converter of floating-point buffers to another dtype for steps, but not for checkpoints and between runs."""

    def __init__(self, module: Module, dtype: torch.dtype | None) -> None:
        self._module, self._dtype = module, dtype
        self._cast: list[tuple[Tensor, torch.dtype]] = []

    def cast(self) -> None:
        if self._dtype is None or self._cast:
            return
        for layer in self._module.modules():
            if keeps_statistics(layer):
                continue
            for buffer in layer.buffers(recurse=False):
                if buffer.is_floating_point() and buffer.dtype is not self._dtype:
                    self._cast.append((buffer, buffer.dtype))
                    # By data, so that the buffer stays the same object for whoever refers to it.
                    buffer.data = buffer.data.to(self._dtype)

    def restore(self) -> None:
        for buffer, dtype in self._cast:
            buffer.data = buffer.data.to(dtype)
        self._cast = []


class _SelfShardedSteps(StepModule):
    """Step module of a user's module that is itself a unit: torch gathers that for ``forward`` only, not for steps."""

    def forward(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.module.unshard()  # type: ignore[operator]  # an FSDPModule
        return super().forward(step, *args, **kwargs)

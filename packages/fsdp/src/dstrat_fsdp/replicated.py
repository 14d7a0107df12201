"""Replicated parameters, which ``fully_shard`` does not shard: scalars, and on one rank all."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate

from dstrat.errors import MisuseError
from dstrat.parallel.matrix_exchange import with_placements_of
from dstrat.parallel.shards import local_tensor
from dstrat_fsdp import internals
from dstrat_fsdp.checks import untraced
from dstrat_fsdp.gradients import deserialize_gradient, serialize_placements

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import OffloadPolicy
    from torch.nn import Module


class ReplicatedParameters:
    """Parameters of a module of which each process of a mesh has all elements.

    They are scalars, which ``fully_shard`` refuses, or all parameters on a mesh of one process, where ``fully_shard``
    would copy them in each pass.

    Between steps they are DTensors, as sharded parameters are: so optimizers, clipping and checkpoints take all
    parameters alike.  Within steps they are tensors with which layers can compute, in the same memory.

    Args:
        module: A module that is not sharded yet; its parameters are replaced by replicated DTensors, unless it has
            split them itself.
        mesh: The processes.
        offload_policy: The device of parameters between steps.
        blocks: The layers that may compute outside of steps too, or after a backward pass in the same step, if the
            module has all its parameters here; None for its scalars, which any layer may have.
        has_several_passes: Whether a step may have several backward passes, as with manual optimization.
    """

    def __init__(
        self,
        module: Module,
        mesh: DeviceMesh,
        offload_policy: OffloadPolicy,
        blocks: Iterable[Module] | None,
        *,
        has_several_passes: bool,
    ) -> None:
        self._mesh = mesh
        self._is_plain, self._synchronizes = False, True
        device = internals.device_of(mesh)
        stays_on = torch.device("cpu") if isinstance(offload_policy, CPUOffloadPolicy) else device
        replicas: dict[int, _Replica] = {}  # layers may share one
        for layer in module.modules():
            for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
                if blocks is None and (parameter.dim() or isinstance(parameter, DTensor)):
                    continue
                if id(parameter) not in replicas:
                    replicas[id(parameter)] = _Replica(parameter, mesh, stays_on=stays_on, computes_on=device)
                replicas[id(parameter)].add_use(layer, name)
        self._replicas = list(replicas.values())
        if mesh.size() == 1:
            for replica in self._replicas:
                replica.after_backward = self._after_backward
        by_shard = {id(replica.sharded): replica for replica in self._replicas}
        self._hooks = []
        for layer in module.modules() if blocks is None else blocks:
            within = [by_shard[id(parameter)] for parameter in layer.parameters() if id(parameter) in by_shard]
            if within:
                # Between two passes, other parameters may be chosen to require gradients.
                hook = partial(self._before_forward, within if has_several_passes else ())
                self._hooks.append(layer.register_forward_pre_hook(untraced(hook)))

    def make_plain(self) -> None:
        """Let layers compute with plain tensors until :meth:`make_sharded`; they require gradients if DTensors do."""
        for replica in self._replicas:
            if not self._is_plain:
                replica.make_plain()
            replica.match_requires_grad()
        self._is_plain = True

    def make_sharded(self) -> None:
        """Let the module have DTensors."""
        if self._is_plain:
            for replica in self._replicas:
                replica.make_sharded()
            self._is_plain = False

    def _before_forward(self, within: Iterable[_Replica], layer: Module, args: Any) -> None:  # noqa: ARG002 - as torch calls it
        if not self._is_plain:
            self.make_plain()
        for replica in within:
            replica.match_requires_grad()

    def set_gradient_sync(self, enabled: bool) -> None:
        """Set whether gradients are those of the DTensors after a backward pass, or accumulate beside them."""
        self._synchronizes = enabled

    def _after_backward(self, replica: _Replica) -> None:
        # As fully_shard does it, also of a loss.backward() that the strategy does not know of.
        if self._synchronizes:
            replica.take_gradient()

    def reduce_gradients(self) -> None:
        """Average the gradients of all backward passes since the last call over the processes; collective."""
        by_dtype: dict[torch.dtype, list[_Replica]] = {}
        for replica in self._replicas:
            if not replica.sharded.requires_grad:
                continue
            if self._mesh.size() == 1:
                replica.take_gradient()
            else:
                by_dtype.setdefault(replica.sharded.dtype, []).append(replica)
        for replicas in by_dtype.values():
            self._reduce(replicas)

    @torch.no_grad()
    def _reduce(self, scalars: list[_Replica]) -> None:
        has_gradient = [scalar.gradient is not None for scalar in scalars]
        values = [scalar.zero if scalar.gradient is None else scalar.gradient for scalar in scalars]
        counts = [torch.full_like(value, float(present)) for value, present in zip(values, has_gradient, strict=True)]
        sums = torch.stack([*values, *counts])
        sums = sums.to(torch.promote_types(sums.dtype, torch.float32))
        for dimension in range(self._mesh.ndim):
            dist.all_reduce(sums, group=self._mesh.get_group(dimension))
        # Only a process that lacks a gradient reads the counts, because reading synchronizes a GPU.
        anywhere = has_gradient if all(has_gradient) else sums[len(scalars) :].abs().tolist()
        for scalar, total, is_used in zip(scalars, sums, anywhere, strict=False):
            if is_used:  # with zeros an optimizer would apply weight decay to an unused parameter
                scalar.add_reduced(total / self._mesh.size())

    def check_reduced(self) -> None:
        """Check that no gradient is left from the step before.

        Raises:
            MisuseError: One is, as of ``loss.backward()``, after which nothing reduces it.
        """
        if any(replica.gradient is not None for replica in self._replicas):
            raise MisuseError(
                "a backward pass left the gradients of scalar parameters as those of one rank: call "
                "self.manual_backward(loss) instead of loss.backward(), and in a loop of yours loop.backward(loss)"
            )

    # Gradients that accumulate without communication

    def pending_gradients(self, names: Mapping[int, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return this rank's gradients that are not reduced yet, and placements of those of split layers, by name.

        Args:
            names: The names of the module's parameters by their ids.
        """
        gradients = {names[id(one.sharded)]: one.gradient for one in self._replicas if one.gradient is not None}
        placements = {name: serialize_placements(one) for name, one in gradients.items() if isinstance(one, DTensor)}
        return {name: local_tensor(gradient) for name, gradient in gradients.items()}, placements

    def restore_gradients(
        self, saved: Mapping[str, Tensor], placements: Mapping[str, Any], names: Mapping[int, str]
    ) -> None:
        """Restore the gradients that :meth:`pending_gradients` returned."""
        self.make_plain()
        for replica in self._replicas:
            name = names[id(replica.sharded)]
            if name in saved:
                replica.restore_gradient(saved[name], placements.get(name))
        self.make_sharded()

    def drop_gradients(self, parameters: Container[int]) -> None:
        """Clear the gradients that are not reduced yet, of the parameters with these ids."""
        for replica in self._replicas:
            if id(replica.sharded) in parameters:
                replica.gradient = None

    def remove_hooks(self) -> None:
        """Leave the layers alone; the parameters stay DTensors."""
        for hook in self._hooks:
            hook.remove()
        for replica in self._replicas:
            replica.after_backward = None  # with the replica, it is part of a cycle
            replica.free()


class _Replica:
    """A parameter as a DTensor, and as a tensor for steps, in the same memory unless it is offloaded.

    Of a split layer both are DTensors, of this rank's part.

    Attributes:
        after_backward: Called with the replica when a backward pass has added a gradient; None for nothing.
    """

    after_backward: Callable[[_Replica], None] | None = None

    def __init__(
        self, parameter: nn.Parameter, mesh: DeviceMesh, *, stays_on: torch.device, computes_on: torch.device
    ) -> None:
        self._is_split = isinstance(parameter, DTensor)
        self.sharded: Any = parameter
        if not self._is_split:
            replica: Any = DTensor.from_local(parameter.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
            if not parameter.is_meta:
                replica = replica.to(stays_on)  # from_local has moved it to the mesh's device
            self.sharded = nn.Parameter(replica, parameter.requires_grad)
        self._is_offloaded = stays_on != computes_on
        self._device = computes_on
        self._plain: Any = None  # made when a parameter of the meta device has its memory
        self._before: Any = None  # the value with which a step began, of an offloaded one
        self._uses: list[tuple[dict[str, Any], str]] = []

    def add_use(self, layer: Module, name: str) -> None:
        store = internals.parameter_store(layer)
        self._uses.append((store, name))
        store[name] = self.sharded

    @torch.no_grad()
    def make_plain(self) -> None:
        shard = internals.shard_of(self.sharded)
        if self._plain is None:
            value = self.sharded.detach() if self._is_split else shard.to(self._device)
            has_gradients = shard.is_floating_point() or shard.is_complex()  # a quantized layer has integers too
            self._plain = nn.Parameter(value, has_gradients)  # also of a frozen one, which may be unfrozen
            if has_gradients and self.after_backward is not None:
                self._plain.register_post_accumulate_grad_hook(lambda _: self.after_backward(self))
        elif self._is_offloaded or internals.shard_of(self._plain).data_ptr() != shard.data_ptr():
            self._plain.data = self.sharded.detach() if self._is_split else shard.to(self._device)
        self._before = shard.clone() if self._is_offloaded else None
        self._replace(self.sharded, self._plain)

    def match_requires_grad(self) -> None:
        if self._plain.requires_grad != self.sharded.requires_grad:
            self._plain.requires_grad_(self.sharded.requires_grad)

    @torch.no_grad()
    def make_sharded(self) -> None:
        shard = internals.shard_of(self.sharded)
        now = internals.shard_of(self._plain)
        if self._is_offloaded:
            now = now.to(shard.device)
            # What the step did not change, an optimizer may have changed since.
            shard.copy_(torch.where(now == self._before, shard, now))
        elif now.data_ptr() != shard.data_ptr():  # a step has replaced its data
            shard.copy_(now)
        self._replace(self._plain, self.sharded)

    def free(self) -> None:
        """Drop the tensor for steps, whose memory another one may have when the module is moved."""
        self._plain = None

    def _replace(self, current: Any, parameter: Any) -> None:
        for store, name in self._uses:
            if store.get(name) is current:  # otherwise a step has replaced it, which ParameterGuard reports
                store[name] = parameter

    @property
    def gradient(self) -> Tensor | None:
        return None if self._plain is None else self._plain.grad

    @gradient.setter
    def gradient(self, gradient: Tensor | None) -> None:
        if self._plain is not None:
            self._plain.grad = gradient

    def restore_gradient(self, local: Tensor, placements: Sequence[Any] | None) -> None:
        local = local.to(self._device, self.sharded.dtype)
        self.gradient = local if placements is None else deserialize_gradient(local, placements, self.sharded)

    @property
    def zero(self) -> Tensor:
        return torch.zeros((), dtype=self.sharded.dtype, device=self._device)

    @torch.no_grad()
    def take_gradient(self) -> None:
        """Let the DTensor have the gradient, if there is one; collective over ranks that have summands of it."""
        gradient = self.gradient
        if gradient is not None:
            if self._is_split:
                gradient = with_placements_of(gradient, self.sharded)
            self.add_reduced(internals.shard_of(gradient))

    def add_reduced(self, gradient: Tensor) -> None:
        local = gradient.to(self.sharded.device, self.sharded.dtype)
        if self.sharded.grad is None:
            self.sharded.grad = internals.like_shard(self.sharded, local)
        else:
            local_tensor(self.sharded.grad).add_(local)
        self.gradient = None

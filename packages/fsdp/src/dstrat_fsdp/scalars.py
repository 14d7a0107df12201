"""Scalar parameters: replicas on all ranks, beside parameters that ``fully_shard`` shards."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate

from dstrat.errors import MisuseError
from dstrat.parallel.shards import local_tensor, with_local
from dstrat_fsdp import internals
from dstrat_fsdp.checks import untraced

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import OffloadPolicy
    from torch.nn import Module


class ScalarParameters:
    """Scalar parameters of a module, which ``fully_shard`` refuses; each rank has all of them.

    Between steps they are DTensors, as sharded parameters are: so optimizers, clipping and checkpoints take all
    parameters alike.  Within steps they are plain tensors, with which layers can compute.

    Args:
        module: A module that is not sharded yet; its scalars are replaced by replicated DTensors.
        mesh: The processes.
        offload_policy: The device of parameters between steps.
    """

    def __init__(self, module: Module, mesh: DeviceMesh, offload_policy: OffloadPolicy) -> None:
        self._mesh = mesh
        device = internals.device_of(mesh)
        stays_on = torch.device("cpu") if isinstance(offload_policy, CPUOffloadPolicy) else device
        scalars: dict[int, _Scalar] = {}  # layers may share one
        for layer in module.modules():
            for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
                if parameter.dim() or isinstance(parameter, DTensor):
                    continue
                if id(parameter) not in scalars:
                    scalars[id(parameter)] = _Scalar(parameter, mesh, stays_on=stays_on, computes_on=device)
                scalars[id(parameter)].add_use(layer, name)
        self._scalars = list(scalars.values())
        # After a backward pass of manual optimization, the same step may use them again.
        by_shard = {id(scalar.sharded): scalar for scalar in self._scalars}
        self._hooks = []
        for layer in module.modules():
            within = [by_shard[id(parameter)] for parameter in layer.parameters() if id(parameter) in by_shard]
            if within:
                self._hooks.append(layer.register_forward_pre_hook(untraced(partial(_before_forward, within))))

    def make_plain(self) -> None:
        """Let layers compute with plain tensors until :meth:`make_sharded`; they require gradients if DTensors do."""
        for scalar in self._scalars:
            scalar.make_plain()

    def make_sharded(self) -> None:
        """Let the module have DTensors."""
        for scalar in self._scalars:
            scalar.make_sharded()

    def reduce_gradients(self) -> None:
        """Average the gradients of all backward passes since the last call over the processes; collective."""
        by_dtype: dict[torch.dtype, list[_Scalar]] = {}
        for scalar in self._scalars:
            if scalar.sharded.requires_grad:
                by_dtype.setdefault(scalar.sharded.dtype, []).append(scalar)
        for scalars in by_dtype.values():
            self._reduce(scalars)

    @torch.no_grad()
    def _reduce(self, scalars: list[_Scalar]) -> None:
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
        if any(scalar.gradient is not None for scalar in self._scalars):
            raise MisuseError(
                "a backward pass left the gradients of scalar parameters as those of one rank: call "
                "self.manual_backward(loss) instead of loss.backward(), and in a loop of yours loop.backward(loss)"
            )

    # Gradients that accumulate without communication

    def pending_gradients(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Return this rank's gradients that are not reduced yet, by the names of parameters.

        Args:
            names: The names of the module's parameters by their ids.
        """
        return {names[id(s.sharded)]: s.gradient for s in self._scalars if s.gradient is not None}

    def restore_gradients(self, saved: Mapping[str, Tensor], names: Mapping[int, str]) -> None:
        """Restore the gradients that :meth:`pending_gradients` returned."""
        for scalar in self._scalars:
            if names[id(scalar.sharded)] in saved:
                scalar.make_plain()
                scalar.gradient = saved[names[id(scalar.sharded)]].to(scalar.zero)
                scalar.make_sharded()

    def drop_gradients(self, parameters: Container[int]) -> None:
        """Clear the gradients that are not reduced yet, of the parameters with these ids."""
        for scalar in self._scalars:
            if id(scalar.sharded) in parameters:
                scalar.gradient = None

    def remove_hooks(self) -> None:
        """Leave the layers alone; the parameters stay DTensors."""
        for hook in self._hooks:
            hook.remove()


class _Scalar:
    """A scalar parameter as a DTensor, and as a plain tensor in the same memory unless it is offloaded."""

    def __init__(
        self, parameter: nn.Parameter, mesh: DeviceMesh, *, stays_on: torch.device, computes_on: torch.device
    ) -> None:
        replica: Any = DTensor.from_local(parameter.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        if not parameter.is_meta:
            replica = replica.to(stays_on)  # from_local has moved it to the mesh's device
        self.sharded: Any = nn.Parameter(replica, parameter.requires_grad)
        self._device = computes_on
        self._plain: Any = None  # made when a parameter of the meta device has its memory
        self._before: Any = None  # the value with which a step began
        self._is_plain = False
        self._uses: list[tuple[dict[str, Any], str]] = []

    def add_use(self, layer: Module, name: str) -> None:
        self._uses.append((internals.parameter_store(layer), name))
        self._set(self.sharded)

    @torch.no_grad()
    def make_plain(self) -> None:
        if not self._is_plain:
            shard = local_tensor(self.sharded)
            local = shard.to(self._device)
            if self._plain is None:
                self._plain = nn.Parameter(local)
            self._plain.data, self._before = local, shard.clone()
            self._set(self._plain)
            self._is_plain = True
        self._plain.requires_grad_(self.sharded.requires_grad)

    @torch.no_grad()
    def make_sharded(self) -> None:
        if not self._is_plain:
            return
        shard = local_tensor(self.sharded)
        if self._plain.data_ptr() != shard.data_ptr():  # it is offloaded, or a step has replaced its data
            now = self._plain.to(shard.device)
            # What the step did not change, an optimizer may have changed since.
            shard.copy_(torch.where(now == self._before, shard, now))
        self._set(self.sharded)
        self._is_plain = False

    def _set(self, parameter: Any) -> None:
        for store, name in self._uses:
            store[name] = parameter

    @property
    def gradient(self) -> Tensor | None:
        return None if self._plain is None else self._plain.grad

    @gradient.setter
    def gradient(self, gradient: Tensor | None) -> None:
        if self._plain is not None:
            self._plain.grad = gradient

    @property
    def zero(self) -> Tensor:
        return torch.zeros((), dtype=self.sharded.dtype, device=self._device)

    def add_reduced(self, gradient: Tensor) -> None:
        local = gradient.to(self.sharded.device, self.sharded.dtype)
        if self.sharded.grad is None:
            self.sharded.grad = with_local(self.sharded, local)
        else:
            local_tensor(self.sharded.grad).add_(local)
        self.gradient = None


def _before_forward(scalars: Iterable[_Scalar], layer: Module, args: Any) -> None:  # noqa: ARG001 - torch's signature
    for scalar in scalars:
        scalar.make_plain()

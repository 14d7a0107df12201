"""Outer weights of replica groups that train apart: those of the latest exchange, and SGD on the means of changes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import CheckpointError, RequestError
from dstrat.interfaces.state_dict import canonical_name, canonical_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor
    from torch.nn import Module


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterSettings:
    """Settings of the outer optimization.

    Attributes:
        every: Optimizer steps of a round, at the end of which the groups exchange.
        lr: Learning rate of the outer SGD.
        momentum: Its Nesterov momentum; 0 for none.

    Raises:
        RequestError: A value is out of range.
    """

    every: int
    lr: float
    momentum: float

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise RequestError(f"every={self.every!r} is not a whole number from 1")
        if not self.lr > 0:
            raise RequestError(f"outer_lr={self.lr!r} is not above 0: DiLoCo's is 0.7, and 1.0 averages the weights")
        if not 0 <= self.momentum < 1:
            raise RequestError(f"outer_momentum={self.momentum!r} is not from 0 to below 1")


class OuterWeights:
    """Outer weights and momentum of a module's parameters, the same in all groups.

    Args:
        module: The module; its parameters are changed in place.
        settings: The settings.

    Attributes:
        weights: Outer weights of the parameters that are or have been trained, by name.
        buffers: Floating-point buffers, such as statistics of batch norm, of the latest exchange, by name.
    """

    def __init__(self, module: Module, settings: OuterSettings) -> None:
        self._settings = settings
        self._module = module
        self._parameters = canonical_parameters(module)
        self.weights: dict[str, Tensor] = {}
        self.buffers = {name: buffer.clone() for name, buffer in self._present_buffers().items()}
        self._momentum: dict[str, Tensor] = {}
        self.add_trained()

    @torch.no_grad()
    def add_trained(self) -> None:
        """Begin to count the changes of parameters that are trainable and new, from their present values."""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and name not in self.weights:
                self._add(name, parameter)

    def _present_buffers(self) -> dict[str, Tensor]:
        """Return the floating-point buffers that the module has now; it may have others than before."""
        named = self._module.named_buffers()
        return {canonical_name(name): buffer for name, buffer in named if buffer.is_floating_point()}

    @property
    def _names(self) -> list[str]:
        """Names of the parameters with outer weights, in an order that is the same in all groups."""
        return [name for name in self._parameters if name in self.weights]

    def _add(self, name: str, value: Tensor) -> None:
        parameter = self._parameters[name]
        # At least in float32: small outer steps would be lost in the rounding of 16 bits.
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.weights[name] = value.detach().to(parameter.device, dtype, copy=True)
        if self._settings.momentum:
            self._momentum[name] = torch.zeros_like(self.weights[name])

    # An exchange

    @torch.no_grad()
    def changes(self, *, are_zero: bool) -> Tensor:
        """Return what the round has changed, and the buffers, in one new tensor.

        Args:
            are_zero: Whether the group gives zeros instead, as it has copied the weights of another one.
        """
        pieces = [self.weights[name] - self._parameters[name] for name in self._names]
        pieces += self._present_buffers().values()
        dtype = functools.reduce(torch.promote_types, (piece.dtype for piece in pieces), torch.float32)
        changes = torch.cat([piece.reshape(-1).to(dtype) for piece in pieces]) if pieces else torch.zeros(0)
        return changes.zero_() if are_zero else changes

    @torch.no_grad()
    def apply(self, changes: Tensor, *, averages: bool) -> None:
        """Take the outer step with the mean of the changes, and let the module have the result.

        Args:
            changes: The mean over the groups, of :meth:`changes`.
            averages: Whether the result is the mean of the groups' weights, without the outer optimizer.
        """
        momentum, lr = self._settings.momentum, self._settings.lr
        names, buffers = self._names, self._present_buffers()
        tensors = [*(self.weights[name] for name in names), *buffers.values()]
        pieces = changes.split([tensor.numel() for tensor in tensors])
        for name, piece in zip(names, pieces, strict=False):  # those of buffers follow
            weight = self.weights[name]
            change = piece.view_as(weight).to(weight.dtype)
            if averages:
                weight.sub_(change)
                continue
            if momentum:
                velocity = self._momentum[name].mul_(momentum).add_(change)
                change = change.add(velocity, alpha=momentum)
            weight.add_(change, alpha=-lr)
        self.buffers = {
            name: piece.view_as(buffer).to(buffer.dtype, copy=True)
            for (name, buffer), piece in zip(buffers.items(), pieces[len(names) :], strict=True)
        }
        self.write(self.weights | self.buffers)

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Let the module have other weights and buffers, by name."""
        targets = self._parameters | self._present_buffers()
        for name, value in values.items():
            targets[canonical_name(name)].copy_(value)  # older checkpoints have the names of torch's wrappers

    def inner_values(self) -> dict[str, Tensor]:
        """Return copies of the group's own weights and buffers, by name."""
        inner = {name: self._parameters[name] for name in self._names} | self._present_buffers()
        return {name: value.detach().clone() for name, value in inner.items()}

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return outer weights, momentum and buffers, by name."""
        return {"weights": dict(self.weights), "momentum": dict(self._momentum), "buffers": dict(self.buffers)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state_dict`.

        Raises:
            CheckpointError: It is the state of other parameters.
        """
        weights, momentum, buffers = (
            {canonical_name(name): one for name, one in state[key].items()}
            for key in ("weights", "momentum", "buffers")
        )
        self._check_names(weights)
        self.weights, self._momentum = {}, {}
        for name, weight in weights.items():
            self._add(name, weight)
            if name in momentum and self._settings.momentum:
                self._momentum[name].copy_(momentum[name])
        for name, buffer in buffers.items():
            self.buffers[name].copy_(buffer)

    def _check_names(self, names: Iterable[str]) -> None:
        if unknown := [name for name in names if name not in self._parameters]:
            raise CheckpointError(f"the outer weights have {unknown[0]!r}, which is no parameter of the module")

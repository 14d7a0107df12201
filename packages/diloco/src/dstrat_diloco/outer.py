"""Outer optimization: deltas of the weights since the last exchange, in fragments, and SGD on their means."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dstrat.errors import CheckpointError, ConflictError, RequestError
from dstrat.parallel.full_state import copy_full
from dstrat.parallel.shards import local_tensor, with_local

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from torch import Tensor

    from dstrat_diloco.average import DeltaDtype


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterSettings:
    """Settings of the outer optimization.

    Attributes:
        every: Optimizer steps of a round, in which each fragment is sent once.
        lr: Learning rate of the outer SGD.
        momentum: Its Nesterov momentum; 0 for none.
        fragments: Number of fragments, sent in turn.
        delay: Optimizer steps between the sending of a fragment and its outer step.
        mixing: Share of a group's own weights after a delayed outer step.
        delta_dtype: Dtype in which deltas are sent; None for float32.

    Raises:
        RequestError: A value is out of range.
        ConflictError: Two values exclude each other.
    """

    every: int
    lr: float
    momentum: float
    fragments: int
    delay: int
    mixing: float
    delta_dtype: DeltaDtype | None

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise RequestError(f"{name}={value!r} is not a whole number from {least}")
        if not self.lr > 0:
            raise RequestError(f"outer_lr={self.lr!r} is not above 0: DiLoCo's is 0.7, and 1.0 averages the weights")
        for name, value in (("outer_momentum", self.momentum), ("mixing", self.mixing)):
            if not 0 <= value < 1:
                raise RequestError(f"{name}={value!r} is not from 0 to below 1")
        if self.delta_dtype not in (None, "bfloat16", "int8"):
            raise RequestError(
                f"delta_dtype={self.delta_dtype!r} is not 'bfloat16' or 'int8', or None, which sends float32"
            )
        if self.fragments > self.every:
            raise ConflictError(
                f"fragments={self.fragments} are more than the every={self.every} steps in which each is sent once: "
                "give fewer fragments, or a larger every"
            )
        if self.delay >= self.every:
            raise ConflictError(
                f"delay={self.delay} is not below every={self.every}, after which the fragment is sent again"
            )

    def fragments_sent(self, step: int) -> list[int]:
        """Return the fragments that are sent after an optimizer step, counted from 1."""
        position = (step - 1) % self.every + 1
        return [
            fragment
            for fragment in range(self.fragments)
            if -(-self.every * (fragment + 1) // self.fragments) == position
        ]


class _Mean(Protocol):
    """Mean of deltas that is received, or will be."""

    def advance(self) -> None: ...

    def wait(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Received:
    """Mean from a checkpoint."""

    mean: Tensor

    def advance(self) -> None:
        pass

    def wait(self) -> Tensor:
        return self.mean


@dataclass(frozen=True, slots=True)
class _Sent:
    """A fragment in flight: its parameters, the mean of its deltas, and the optimizer step after which it is due."""

    names: Sequence[str]
    due: int
    mean: _Mean


class OuterOptimizer:
    """Outer optimization of the parameters of one inner optimizer, each rank of its shards.

    Args:
        settings: The settings.
        begin_average: Begins the mean of a flat tensor over the groups.

    Attributes:
        steps: Number of steps of the inner optimizer.
        in_sync: Whether all groups have the same weights.
    """

    def __init__(
        self,
        settings: OuterSettings,
        begin_average: Callable[[Tensor, DeltaDtype | None], _Mean],
    ) -> None:
        self._settings, self._begin_average = settings, begin_average
        self.steps = 0
        self.in_sync = True
        self._parameters: dict[str, Any] = {}  # those that are trained, as the inner optimizer has them
        self._frozen: list[Any] = []
        self._anchors: dict[str, Tensor] = {}
        self._fragments: dict[str, int] = {}
        self._sgd: torch.optim.SGD | None = None
        self._sent: list[_Sent] = []

    @property
    def names(self) -> Iterable[str]:
        """Names of the parameters that are trained."""
        return self._parameters

    def is_complete(self, num_parameters: int) -> bool:
        """Return whether no parameter has come to those of the inner optimizer, or been unfrozen."""
        if len(self._parameters) + len(self._frozen) != num_parameters:
            return False
        return not any(parameter.requires_grad for parameter in self._frozen)

    @torch.no_grad()
    def add_parameters(self, parameters: Mapping[str, Any], trained: Container[str] = ()) -> None:
        """Begin to count the changes of those parameters that are trainable and new, from their present values.

        Args:
            parameters: All parameters of the inner optimizer by name, in its order.
            trained: Names of those that count although they are frozen now.
        """
        new = {name: one for name, one in parameters.items() if name not in self._parameters}
        added = {name: one for name, one in new.items() if one.requires_grad or name in trained}
        self._frozen = [one for name, one in new.items() if name not in added]
        if not added:
            return
        for name, parameter in added.items():
            local = local_tensor(parameter)
            # At least in float32: small outer steps would be lost in the rounding of 16 bits.
            self._anchors[name] = local.to(torch.promote_types(local.dtype, torch.float32), copy=True)
        self._parameters |= added
        self._divide(added)
        anchors = [self._anchors[name] for name in added]
        if self._sgd is None:
            momentum = self._settings.momentum
            self._sgd = torch.optim.SGD(anchors, lr=self._settings.lr, momentum=momentum, nesterov=momentum > 0)
        else:
            self._sgd.add_param_group({"params": anchors})

    def after_step(self) -> None:
        """Count a step of the inner optimizer; send the fragments whose turn it is, and apply those that are due."""
        self.steps += 1
        self.in_sync = False
        for sent in self._sent:
            sent.mean.advance()
        due = [sent for sent in self._sent if sent.due <= self.steps]
        self._sent = [sent for sent in self._sent if sent.due > self.steps]
        for sent in due:
            self._apply(sent)
        for fragment in self._settings.fragments_sent(self.steps):
            self._send(fragment)
        if self._settings.fragments == 1 and self._settings.delay == 0:
            self.in_sync = self.steps % self._settings.every == 0

    @torch.no_grad()
    def _send(self, fragment: int) -> None:
        # After a resume with other fragments some of these may be in flight: their changes are sent in the next round.
        in_flight = {name for sent in self._sent for name in sent.names}
        names = [name for name in self._parameters if self._fragments[name] == fragment and name not in in_flight]
        if not names:
            return
        mean = self._begin_average(self._deltas(names), self._settings.delta_dtype)
        sent = _Sent(names, self.steps + self._settings.delay, mean)
        if self._settings.delay:
            self._sent.append(sent)
        else:
            self._apply(sent)

    def _deltas(self, names: Sequence[str]) -> Tensor:
        """Return what has changed since the last exchange, in one new tensor."""
        anchors = [self._anchors[name] for name in names]
        dtype = functools.reduce(torch.promote_types, (anchor.dtype for anchor in anchors))
        deltas = anchors[0].new_empty(sum(anchor.numel() for anchor in anchors), dtype=dtype)
        for name, anchor, delta in zip(names, anchors, deltas.split([one.numel() for one in anchors]), strict=True):
            torch.sub(anchor, local_tensor(self._parameters[name]), out=delta.view(anchor.shape))
        return deltas

    def _divide(self, added: Mapping[str, Any]) -> None:
        """Give parameters to fragments: consecutive ones, so that fragments have about equal sizes.

        Parameters keep their fragment when others come: one that changed it could be sent twice in a round, while its
        first change is in flight, or not at all.
        """
        # Full sizes, as shards of a rank may be smaller than those of another.
        sizes = {name: one.numel() for name, one in added.items() if name not in self._fragments}
        total, begin = sum(sizes.values()), 0
        for name, size in sizes.items():
            self._fragments[name] = (2 * begin + size) * self._settings.fragments // (2 * total or 1)
            begin += size

    @torch.no_grad()
    def _apply(self, sent: _Sent) -> None:
        assert self._sgd is not None  # noqa: S101 - there are parameters
        for name, delta in self._pieces(sent):
            self._anchors[name].grad = delta
        self._sgd.step()  # skips those without a gradient
        share = self._settings.mixing if self._settings.delay else 0.0
        for name in sent.names:
            anchor, local = self._anchors[name], local_tensor(self._parameters[name])
            anchor.grad = None
            local.copy_(torch.lerp(anchor, local.to(anchor.dtype), share) if share else anchor)

    def _pieces(self, sent: _Sent) -> list[tuple[str, Tensor]]:
        anchors = [self._anchors[name] for name in sent.names]
        pieces = sent.mean.wait().split([anchor.numel() for anchor in anchors])
        return [
            (name, piece.view(anchor.shape).to(anchor.dtype))
            for name, anchor, piece in zip(sent.names, anchors, pieces, strict=True)
        ]

    def abandon_exchange(self) -> None:
        """Forget the fragments in flight, and that the groups differ, as nothing can be exchanged any more."""
        self._sent, self.in_sync = [], True

    # State: the same in all groups, sharded as the parameters

    def state_dict(self) -> dict[str, Any]:
        """Return the state by the names of parameters; it waits for fragments in flight."""
        momentum = {} if self._sgd is None else {name: self._sgd.state.get(a) for name, a in self._anchors.items()}
        return {
            "steps": self.steps,
            "num_fragments": self._settings.fragments,
            "fragments": {name: self._fragments[name] for name in self._parameters},
            "weights": {name: self._as_shard(name, anchor) for name, anchor in self._anchors.items()},
            "momentum": {
                name: self._as_shard(name, state["momentum_buffer"])
                for name, state in momentum.items()
                if state and state.get("momentum_buffer") is not None
            },
            "sent": [
                {"due": sent.due, "deltas": {name: self._as_shard(name, delta) for name, delta in self._pieces(sent)}}
                for sent in self._sent
            ],
        }

    def _as_shard(self, name: str, local: Tensor) -> Any:
        return with_local(self._parameters[name], local)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state_dict` with full tensors.

        Args:
            state: The state.
            parameters: All parameters of the inner optimizer by name, in its order.

        Raises:
            CheckpointError: It is the state of other parameters.
        """
        if unknown := [name for name in state["weights"] if name not in parameters]:
            raise CheckpointError(f"the outer optimizer's state has {unknown[0]!r}, which no optimizer has here")
        self.steps = state["steps"]
        if state.get("num_fragments") == self._settings.fragments:  # absent in older checkpoints
            self._fragments |= state["fragments"]
        self.add_parameters(parameters, trained=state["weights"])
        for name, full in state["weights"].items():
            self._copy(name, self._anchors[name], full)
        for name, full in state["momentum"].items():
            assert self._sgd is not None  # noqa: S101 - there are weights
            buffer = torch.zeros_like(self._anchors[name])
            self._copy(name, buffer, full)
            self._sgd.state[self._anchors[name]]["momentum_buffer"] = buffer
        self._sent = [self._load_sent(sent) for sent in state["sent"]]

    def _load_sent(self, sent: Mapping[str, Any]) -> _Sent:
        deltas = []
        for name, full in sent["deltas"].items():
            deltas.append(torch.zeros_like(self._anchors[name]))
            self._copy(name, deltas[-1], full)
        flat = torch.cat([delta.reshape(-1) for delta in deltas])
        return _Sent(list(sent["deltas"]), sent["due"], _Received(flat))

    def _copy(self, name: str, local: Tensor, full: Tensor) -> None:
        copy_full(self._as_shard(name, local), full.to(local.device))

"""Schedules of a pipeline: the order of passes, and the tensors between stages."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dstrat.errors import MisuseError, RequestError
from dstrat.interfaces.batch import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

SCHEDULES = ("1F1B", "GPipe")

_REFUSED = ("zerobubble", "zbv", "dualpipe")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
_MOST_DIMENSIONS = 8


def checked_schedule(name: str) -> str:
    """Return the name of a schedule.

    Raises:
        RequestError: There is none, or it is not offered.
    """
    if name in SCHEDULES:
        return name
    possible = " or ".join(map(repr, SCHEDULES))
    if any(word in str(name).lower() for word in _REFUSED):
        raise RequestError(
            f"schedule={name!r} computes gradients of weights without autograd's hooks, so that they would not be "
            f"averaged over the data-parallel ranks (pytorch issue 144530): choose {possible}"
        )
    raise RequestError(f"schedule={name!r} is not known: choose {possible}")


def bubble(stages: int, microbatches: int) -> float:
    """Return the share of time in which a rank is idle, if all passes of a microbatch take the same time."""
    return (stages - 1) / (microbatches + stages - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Communication of a stage with its neighbours.

    Attributes:
        stage: Index of this stage.
        ranks: The rank of each stage.
        forward: The group of the stages that activations are sent in.
        backward: Another one for gradients: with NCCL, one group would wait for messages in the wrong order.
        device: The device of this rank.
    """

    stage: int
    ranks: Sequence[int]
    forward: ProcessGroup
    backward: ProcessGroup
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.stage == len(self.ranks) - 1

    def from_last(self, tensor: Tensor) -> Tensor:
        """Return the last stage's tensor of the same shape and dtype; collective over the stages."""
        dist.broadcast(tensor, self.ranks[-1], group=self.forward)
        return tensor

    def from_stage(self, tensor: Tensor, stage: int) -> None:
        """Overwrite a tensor by that of a stage; collective over the stages."""
        dist.broadcast(tensor, self.ranks[stage], group=self.forward)


@dataclass(frozen=True, slots=True)
class _Outline:
    """Shape, dtype and whether gradients are wanted, of the tensor between two stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Any, stage: int) -> _Outline:
        if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
            raise MisuseError(
                f"stage {stage} of the pipeline returned a {type(tensor).__name__}, and stages send one plain tensor: "
                "let the last layer of a stage return one"
            )
        if tensor.dtype not in _DTYPES or tensor.dim() > _MOST_DIMENSIONS:
            raise MisuseError(f"stage {stage} of the pipeline returned {tensor.dtype} of shape {tuple(tensor.shape)}")
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def header(self, device: torch.device) -> Tensor:
        facts = [_DTYPES.index(self.dtype), int(self.requires_grad), len(self.shape), *self.shape]
        return torch.tensor([*facts, *[0] * (3 + _MOST_DIMENSIONS - len(facts))], device=device)

    @classmethod
    def from_header(cls, header: Tensor) -> _Outline:
        dtype, requires_grad, dimensions, *shape = header.tolist()
        return cls(tuple(shape[:dimensions]), _DTYPES[dtype], bool(requires_grad))


class StageRunner:
    """Passes of one stage over the microbatches of a batch, in the order of a schedule.

    Args:
        links: The neighbours.
        schedule: One of :data:`SCHEDULES`.
        forward: Computes the stage's layers for an input and a microbatch; in training the last stage returns the loss.
    """

    def __init__(self, links: Links, schedule: str, forward: Callable[[Any, Any], Any]) -> None:
        self._links, self._schedule, self._forward = links, schedule, forward
        # By the shapes of a microbatch, which all stages know: so they agree on when headers are sent.
        self._received: dict[Any, _Outline] = {}
        self._sent: dict[Any, _Outline] = {}
        self._evaluated: dict[Any, _Outline] = {}
        self._sends: list[tuple[Any, Tensor]] = []

    def train(
        self,
        inputs: Sequence[Any],
        microbatches: Sequence[Any],
        factors: Sequence[float | Tensor],
        scale: Callable[[Tensor], Tensor],
        before_backward: Callable[[bool], None],
    ) -> Tensor:
        """Run forward and backward passes of all microbatches; return the loss of the batch on every stage.

        Args:
            inputs: Input of the first stage for each microbatch.
            microbatches: The microbatches.
            factors: Factor of each microbatch's loss in that of the batch.
            scale: Scales the loss for the precision.
            before_backward: Called before each backward pass, with whether it is the last.
        """
        links, count = self._links, len(microbatches)
        # One forward pass more on each earlier stage, so that the last one alternates from the beginning.
        ahead = count if self._schedule == "GPipe" else min(count, len(links.ranks) - 1 - links.stage)
        total = torch.zeros((), device=links.device)
        pending: deque[tuple[Tensor | None, Any]] = deque()
        done = 0

        def run_backward() -> None:
            nonlocal done
            done += 1
            before_backward(done == count)
            self._run_backward(*pending.popleft())

        for index in range(count):
            received = inputs[index] if links.is_first else self._receive(microbatches[index])
            output = self._forward(received, microbatches[index])
            if links.is_last:
                loss, factor = _checked_loss(output), factors[index]
                if isinstance(factor, Tensor):  # 0 for a microbatch without labels, whose mean loss may be nan
                    loss = torch.where(factor > 0, loss, 0.0)
                loss = loss * factor
                total += loss.detach()
                output = scale(loss)
            else:
                self._send(output, microbatches[index])
            pending.append((None if links.is_first else received, output))
            if index >= ahead:
                run_backward()
        while pending:
            run_backward()
        self.finish()
        return links.from_last(total)

    def finish(self) -> None:
        """Wait until the neighbours have received everything."""
        for work, _ in self._sends:
            work.wait()
        self._sends = []

    def evaluate(self, value: Any, batch: Any) -> Tensor:
        """Return the output of all stages for an input, on every stage; collective over the stages.

        Args:
            value: Input of the first stage.
            batch: The batch, whose shapes determine those of the output.
        """
        links, key = self._links, _shapes(batch)
        received = value if links.is_first else self._receive(batch)
        output = self._forward(received, batch)
        if not links.is_last:
            self._send(output, batch)
        self.finish()
        if key not in self._evaluated:
            outline = _Outline.of(output, links.stage)
            self._evaluated[key] = _Outline.from_header(links.from_last(outline.header(links.device)))
        outline = self._evaluated[key]
        if not links.is_last:
            output = torch.empty(outline.shape, dtype=outline.dtype, device=links.device)
        else:
            self._check_same(outline, _Outline.of(output, links.stage), "the pipeline")
        return links.from_last(output.contiguous())

    # Tensors between stages

    def _receive(self, microbatch: Any) -> Tensor:
        links = self._links
        source, key = links.ranks[links.stage - 1], _shapes(microbatch)
        if key not in self._received:
            header = torch.empty(3 + _MOST_DIMENSIONS, dtype=torch.int64, device=links.device)
            dist.recv(header, source, group=links.forward)
            self._received[key] = _Outline.from_header(header)
        outline = self._received[key]
        tensor = torch.empty(outline.shape, dtype=outline.dtype, device=links.device)
        dist.recv(tensor, source, group=links.forward)
        return tensor.requires_grad_(outline.requires_grad)

    def _send(self, output: Any, microbatch: Any) -> None:
        links = self._links
        outline, key = _Outline.of(output, links.stage), _shapes(microbatch)
        if key not in self._sent:
            self._sent[key] = outline
            self._isend(outline.header(links.device), links.stage + 1, links.forward)
        self._check_same(self._sent[key], outline, f"stage {links.stage} of the pipeline")
        self._isend(output.detach(), links.stage + 1, links.forward)

    def _check_same(self, earlier: _Outline, outline: _Outline, subject: str) -> None:
        if earlier != outline:
            raise MisuseError(
                f"{subject} returned {outline.dtype} of shape {outline.shape}, and {earlier.dtype} of shape "
                f"{earlier.shape} for an earlier microbatch of the same shapes: other stages must know shapes before "
                "they receive, so they may depend on the shapes of a batch only"
            )

    def _isend(self, tensor: Tensor, stage: int, group: ProcessGroup) -> None:
        tensor = tensor.contiguous()
        # The tensor must stay in memory until it is sent.
        self._sends.append((dist.isend(tensor, self._links.ranks[stage], group=group), tensor))

    def _run_backward(self, received: Tensor | None, output: Tensor) -> None:
        links = self._links
        if links.is_last:
            output.backward()
        elif output.requires_grad:
            gradient = torch.empty_like(output, memory_format=torch.contiguous_format)
            dist.recv(gradient, links.ranks[links.stage + 1], group=links.backward)
            output.backward(gradient)
        if received is not None and received.requires_grad:
            gradient = torch.zeros_like(received) if received.grad is None else received.grad
            self._isend(gradient, links.stage - 1, links.backward)


def _checked_loss(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise MisuseError(f"the loss of the pipeline returned {shown}: return a scalar tensor, such as a mean")


def _shapes(value: Any) -> tuple[Any, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(value))

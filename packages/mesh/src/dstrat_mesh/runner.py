"""Passes of the stages on a rank, and the tensors between stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dstrat.errors import MisuseError
from dstrat.interfaces.batch import tensors_in
from dstrat.parallel.collectives import stored_elements
from dstrat_mesh.schedule import Pass, PassKind, numbers_of_passes
from dstrat_mesh.split_backward import backward_to_input

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch.distributed import ProcessGroup

    from dstrat_mesh.schedule import Schedule

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
_MOST_DIMENSIONS = 8
_HEADER_SIZE = 4 + _MOST_DIMENSIONS
_IS_HEADER = 0x5AFE_0DD5_7A6E_0001  # unlike what any activation has in its first eight bytes
# Gradients that were sent to the previous rank may be unconfirmed for as many of its passes.
_PASSES_BEHIND = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Communication of a rank with its neighbours in a pipeline.

    Stage ``s`` is on the rank at position ``s % len(ranks)``, so that the last rank sends to the first one where each
    has several stages.

    Attributes:
        position: Position of this rank.
        ranks: The ranks in order.
        groups: Groups of these ranks: of activations and of gradients; and of both again between the last and the
            first rank, if each has several stages.  With NCCL, one group would wait for messages in the wrong order.
        collective_group: Group of these ranks for what all of them take part in.
        device: The device of this rank.
    """

    position: int
    ranks: Sequence[int]
    groups: Sequence[ProcessGroup]
    collective_group: ProcessGroup
    device: torch.device

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.position == len(self.ranks) - 1

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage."""
        return self.ranks[stage % len(self.ranks)]

    def group(self, origin: int, target: int) -> ProcessGroup:
        """Return the group of messages from a stage to the next or the previous one."""
        goes_around = min(origin, target) % len(self.ranks) == len(self.ranks) - 1
        return self.groups[2 * goes_around + (target < origin)]

    def connect(self) -> None:
        """Send a message along each way that messages of steps take; collective over the ranks.

        NCCL connects two ranks in a group by their first message.  Both wait there, and its allocations may wait for
        messages on their way, which in a step may wait for one of the two.
        """
        last = len(self.ranks) - 1
        ways = [(0, position, position + 1) for position in range(last)]
        ways += [(1, position + 1, position) for position in range(last)]
        if len(self.groups) > 2:
            ways += [(2, last, 0), (3, 0, last)]
        message = torch.zeros(1, device=self.device)
        for group, origin, target in ways:  # in the same order on each rank
            if self.position == origin:
                dist.send(message, self.ranks[target], group=self.groups[group])
            elif self.position == target:
                dist.recv(message, self.ranks[origin], group=self.groups[group])

    def from_position(self, tensor: Tensor, position: int) -> Tensor:
        """Return a tensor, overwritten by that of the rank at a position, -1 for the last; collective over them."""
        elements = stored_elements(tensor)
        values = elements.contiguous()  # as a broadcast reads and writes them, of whatever strides
        dist.broadcast(values, self.ranks[position], group=self.collective_group)
        if values is not elements:
            elements.copy_(values)
        return tensor


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
        facts = [_IS_HEADER, _DTYPES.index(self.dtype), int(self.requires_grad), len(self.shape), *self.shape]
        return torch.tensor([*facts, *[0] * (_HEADER_SIZE - len(facts))], device=device)

    @classmethod
    def from_header(cls, header: Tensor) -> _Outline:
        mark, dtype, requires_grad, dimensions, *shape = header.tolist()
        if mark != _IS_HEADER:
            raise MisuseError(
                "a stage of the pipeline got an activation where it expected the shape of one: ranks of the pipeline "
                "have loaded batches of other sizes. Let all of them load the same data, as a sampler with "
                "num_replicas and rank of strategy.distributed_sampler_kwargs does"
            )
        return cls(tuple(shape[:dimensions]), _DTYPES[dtype], bool(requires_grad))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Send:
    """A tensor on its way to another rank, which must stay in memory until it has arrived.

    Attributes:
        work: Waits for it.
        tensor: The tensor.
        rank: The rank that receives it.
        number: Number of the pass in which that rank receives it.
    """

    work: Any
    tensor: Tensor
    rank: int
    number: int


class StageRunner:
    """Passes of the stages of a rank over the microbatches of a batch, in the order of a schedule.

    What a rank sends is freed as soon as an answer shows that it has arrived: each rank has the same order of passes in
    every batch, and before it sends anything in one of them, it has received all that it needed for those before.
    After the last forward pass nothing answers to gradients: there a rank waits until the one before it has received
    all but the latest of them; the first rank, to whose gradients the last one would have to answer, keeps all.

    Args:
        links: The neighbours.
        schedule: The schedule.
        loss_dtype: The dtype of the sum of losses, which all ranks have to know.
        forward: Computes the layers of a stage of the rank for an input and a microbatch; in training the last stage
            returns the loss.
    """

    def __init__(
        self, links: Links, schedule: Schedule, loss_dtype: torch.dtype, forward: Callable[[int, Any, Any], Any]
    ) -> None:
        self._links, self._schedule, self._loss_dtype, self._forward = links, schedule, loss_dtype, forward
        # By the stage, and what all ranks know of a microbatch: so they agree on when headers are sent.
        self._received: dict[Any, _Outline] = {}
        self._sent: dict[Any, _Outline] = {}
        self._evaluated: dict[Any, _Outline] = {}
        self._sends: list[_Send] = []

    def train(
        self,
        schedule: Schedule,
        inputs: Sequence[Any],
        microbatches: Sequence[Any],
        factors: Sequence[float | Tensor],
        scale: Callable[[Tensor], Tensor],
        before_backward: Callable[[bool, bool], None],
        after_weights: Callable[[], None],
        trainable: Hashable,
    ) -> Tensor:
        """Run forward and backward passes of all microbatches; return the loss of the batch on every rank.

        Args:
            schedule: The schedule, with the same stages as that of other batches.
            inputs: Input of the first stage for each microbatch.
            microbatches: The microbatches.
            factors: Factor of each microbatch's loss in that of the batch.
            scale: Scales the loss for the precision.
            before_backward: Called before each backward pass that computes gradients, with whether it is the last one,
                and whether the rank before waits for its result.  None is the last if gradients of weights have passes.
            after_weights: Called after each pass that computes gradients of weights only.
            trainable: Which parameters of all stages are trained, by which tensors between stages have gradients.
        """
        self._schedule = schedule
        links, keys = self._links, [(_shapes(microbatch), trainable) for microbatch in microbatches]
        total = torch.zeros((), dtype=self._loss_dtype, device=links.device)
        pending: dict[tuple[int, int], tuple[Tensor | None, Any]] = {}
        weights: dict[tuple[int, int], Callable[[], None] | None] = {}  # what computes their gradients
        trained: set[int] = set()  # the stages with gradients, known before the first backward pass
        num_computed, num_forward = 0, len(microbatches) * self._schedule.stages_per_rank
        for step in self._schedule.passes(links.position):
            stage, index = self._stage(step.chunk), step.microbatch
            if step.kind is PassKind.WEIGHTS:
                if (compute_weights := weights.pop((stage, index))) is not None:
                    compute_weights()
                    after_weights()
                del compute_weights
                continue
            if step.kind is PassKind.BACKWARD:
                received, output = pending.pop((stage, index))
                if stage in trained:
                    num_computed += 1
                    is_awaited = received is not None and received.requires_grad
                    is_last = num_computed == len(trained) * len(microbatches) and not self._schedule.splits_backward
                    before_backward(is_last, is_awaited)
                weights[stage, index] = self._run_backward(stage, index, received, output)
                del received, output  # which would keep activations for longer than the pass of weights
                if not num_forward:
                    self._wait_for_previous(stage, index)
                continue
            num_forward -= 1
            received = inputs[index]
            if stage:
                received = self._receive(stage, keys[index])
                self._free_sends(links.rank_of(stage - 1), self._pass_number(stage - 1, index))
            output = self._forward(step.chunk, _changeable(received) if stage else received, microbatches[index])
            if self._is_last(stage):
                loss = _weighted_loss(output, factors[index])
                total += loss.detach()
                output = scale(loss)
            else:
                self._send(stage, output, keys[index], self._pass_number(stage + 1, index))
            if output.requires_grad:
                trained.add(stage)
            pending[stage, index] = received if stage else None, output
        self.finish()
        return self._share_loss(total)

    def _share_loss(self, loss: Tensor) -> Tensor:
        """Return the loss that the last rank has, on every rank; collective over the ranks."""
        links = self._links
        group = links.collective_group
        if not links.is_last:
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, loss, links.ranks[-1], group=group)]):
                work.wait()
            return loss
        # No broadcast: the last rank would wait for the last pass of the first one, and steps in that time instead.
        sent, first = loss.clone(), links.ranks[0]
        exchange = [dist.P2POp(dist.isend, sent, rank, group=group) for rank in links.ranks[:-1]]
        for work in dist.batch_isend_irecv(exchange):
            self._sends.append(_Send(work=work, tensor=sent, rank=first, number=-1))  # the first one receives it last
        return loss

    def finish(self) -> None:
        """Wait until the neighbours have received everything."""
        for send in self._sends:
            send.work.wait()
        self._sends = []

    def _wait_for_previous(self, stage: int, microbatch: int) -> None:
        """Wait until gradients for the previous stage have been received, but for the latest, and free them."""
        # Ranks before this one have done their forward passes too, so that none of them waits for this one.  The last
        # rank receives from the first one only when it has done all passes of its own later stages: that may take until
        # this one goes on.
        if stage % len(self._links.ranks):
            number = self._pass_number(stage - 1, microbatch, PassKind.BACKWARD)
            self._free_sends(self._links.rank_of(stage - 1), number - _PASSES_BEHIND)

    def _free_sends(self, rank: int, number: int) -> None:
        """Free all that a rank receives up to the pass with a number; wait for it, if it is on its way."""
        remaining = []
        for send in self._sends:
            if send.rank == rank and send.number <= number:
                send.work.wait()
            else:
                remaining.append(send)
        self._sends = remaining

    def _pass_number(self, stage: int, microbatch: int, kind: PassKind = PassKind.FORWARD) -> int:
        """Return the number of a pass with messages in the order of its rank, a neighbour."""
        chunk, position = divmod(stage, len(self._links.ranks))
        return numbers_of_passes(self._schedule, position)[Pass(chunk, microbatch, kind)]

    def evaluate(self, value: Any, batch: Any) -> Tensor:
        """Return the output of all stages for an input, on every rank; collective over the ranks.

        Args:
            value: Input of the first stage.
            batch: The batch, whose shapes and numbers determine the shape of the output.
        """
        links, key = self._links, (_shapes(batch), _integers_in(batch))
        output: Any = None
        for chunk in range(self._schedule.stages_per_rank):
            stage = self._stage(chunk)
            output = self._forward(chunk, self._receive(stage, key) if stage else value, batch)
            if not self._is_last(stage):
                self._send(stage, output, key, 0)
        self.finish()
        last = self._schedule.num_stages - 1
        if key not in self._evaluated:
            # Of the other ranks, each offers the output of its own last stage, which is overwritten.
            header = _Outline.of(output, last).header(links.device)
            self._evaluated[key] = _Outline.from_header(links.from_position(header, -1))
        outline = self._evaluated[key]
        if not links.is_last:
            output = torch.empty(outline.shape, dtype=outline.dtype, device=links.device)
        else:
            self._check_same(outline, _Outline.of(output, last), "the pipeline")
        return links.from_position(output.contiguous(), -1)

    def _stage(self, chunk: int) -> int:
        return chunk * len(self._links.ranks) + self._links.position

    def _is_last(self, stage: int) -> bool:
        return stage == self._schedule.num_stages - 1

    # Tensors between stages

    def _receive(self, stage: int, known: Hashable) -> Tensor:
        links, key = self._links, (stage, known)
        source, group = links.rank_of(stage - 1), links.group(stage - 1, stage)
        if key not in self._received:
            header = torch.empty(_HEADER_SIZE, dtype=torch.int64, device=links.device)
            dist.recv(header, source, group=group)
            self._received[key] = _Outline.from_header(header)
        outline = self._received[key]
        tensor = torch.empty(outline.shape, dtype=outline.dtype, device=links.device)
        dist.recv(tensor, source, group=group)
        return tensor.requires_grad_(outline.requires_grad)

    def _send(self, stage: int, output: Any, known: Hashable, number: int) -> None:
        outline, key = _Outline.of(output, stage), (stage, known)
        if key not in self._sent:
            self._sent[key] = outline
            self._isend(outline.header(self._links.device), stage, stage + 1, number)
        self._check_same(self._sent[key], outline, f"stage {stage} of the pipeline")
        self._isend(output.detach(), stage, stage + 1, number)

    def _check_same(self, earlier: _Outline, outline: _Outline, subject: str) -> None:
        if earlier != outline:
            raise MisuseError(
                f"{subject} returned {outline.dtype} of shape {outline.shape}, and {earlier.dtype} of shape "
                f"{earlier.shape} for an earlier microbatch of the same shapes: other stages must know shapes before "
                "they receive, so they may depend on the shapes of a batch only"
            )

    def _isend(self, tensor: Tensor, origin: int, target: int, number: int) -> None:
        tensor, rank = tensor.contiguous(), self._links.rank_of(target)
        work = dist.isend(tensor, rank, group=self._links.group(origin, target))
        self._sends.append(_Send(work=work, tensor=tensor, rank=rank, number=number))

    def _run_backward(
        self, stage: int, microbatch: int, received: Tensor | None, output: Tensor
    ) -> Callable[[], None] | None:
        """Run a backward pass; return the function that computes gradients of weights, if they have another pass."""
        gradient = self._receive_gradient(stage, microbatch, output)
        awaited = received if received is not None and received.requires_grad else None
        compute_weights: Callable[[], None] | None = None
        if output.requires_grad or self._is_last(stage):
            if not self._schedule.splits_backward:
                output.backward(gradient)
            elif awaited is None:
                compute_weights = partial(output.backward, gradient)
            else:
                compute_weights = backward_to_input(output, gradient, awaited).compute
        if awaited is not None:
            sent = torch.zeros_like(awaited) if awaited.grad is None else awaited.grad
            self._isend(sent, stage, stage - 1, self._pass_number(stage - 1, microbatch, PassKind.BACKWARD))
        return compute_weights

    def _receive_gradient(self, stage: int, microbatch: int, output: Tensor) -> Tensor | None:
        """Return the gradient of a stage's output; None for a loss, and if nothing before it is trained."""
        links = self._links
        if self._is_last(stage):
            return None
        if not output.requires_grad:  # nothing answers to it
            self._free_sends(links.rank_of(stage + 1), self._pass_number(stage + 1, microbatch))
            return None
        gradient = torch.empty_like(output, memory_format=torch.contiguous_format)
        dist.recv(gradient, links.rank_of(stage + 1), group=links.group(stage + 1, stage))
        self._free_sends(links.rank_of(stage + 1), self._pass_number(stage + 1, microbatch, PassKind.BACKWARD))
        return gradient


def _changeable(received: Tensor) -> Tensor:
    """Return what a stage has received as a tensor that its first layer may change in place, such as a ReLU.

    Autograd refuses to change a leaf, whose gradient the rank before waits for; that keeps no values.
    """
    if not received.requires_grad:
        return received
    value = received.clone()
    received.untyped_storage().resize_(0)
    return value


def _weighted_loss(loss: Any, factor: float | Tensor) -> Tensor:
    if not isinstance(loss, Tensor) or loss.dim():
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise MisuseError(f"the loss of the pipeline returned {shown}: return a scalar tensor, such as a mean")
    value: Tensor = loss.full_tensor() if isinstance(loss, DTensor) else loss  # a DTensor over split logits
    if isinstance(factor, Tensor):  # 0 for a microbatch without labels, whose mean loss may be nan
        return torch.where(factor > 0, value, 0.0) * factor
    return value * factor


def _integers_in(batch: Any) -> tuple[tuple[str, int], ...]:
    """Return the integers in a batch, such as the number of tokens whose output is wanted."""
    if isinstance(batch, tuple):  # several positional arguments
        batch = {str(index): value for index, value in enumerate(batch)}
    if not isinstance(batch, Mapping):
        return ()
    return tuple((name, value) for name, value in batch.items() if isinstance(value, int))


def _shapes(value: Any) -> tuple[Any, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(value))

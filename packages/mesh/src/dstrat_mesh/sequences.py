"""Sequences of a batch, of which each rank of ``cp`` computes a part."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import MisuseError
from dstrat.interfaces.batch import apply_to_tensors, tensors_in
from dstrat.parallel.collectives import gather_tensors
from dstrat_mesh.attention import DividedAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module

    from dstrat.interfaces.strategy import StepName

_SEQUENCE = 1  # dimension of the tensors of a batch
_CUT, _JOIN, _JOIN_IN_TRAINING = "cut_sequences", "join_sequences", "join_training_sequences"


def check_sequences(module: Module, shapes: Iterable[tuple[int, ...]], size: int, method: str) -> None:
    """Check that the sequences of a batch can be divided, before anything runs.

    A module may define ``check_divided_sequences()``, which raises an error if they cannot.

    Args:
        module: The module.
        shapes: Shapes of the tensors of a batch.
        size: Number of ranks.
        method: The method of attention.

    Raises:
        MisuseError: The tensors have other lengths, or ranks do not divide them.
    """
    check: Callable[[], None] | None = getattr(module, "check_divided_sequences", None)
    if check is not None:
        check()
    if not hasattr(module, _CUT):
        _check_length(_one_length(module, [shape for shape in shapes if len(shape) > _SEQUENCE]), size, method)
        return
    # Which tensors a module cuts by itself is not known, unless all with samples and tokens have the same length.
    lengths = {shape[_SEQUENCE] for shape in shapes if len(shape) == _SEQUENCE + 1}
    if len(lengths) == 1:
        _check_length(lengths.pop(), size, method)


def _one_length(module: Module, shapes: Sequence[tuple[int, ...]]) -> int:
    if len({shape[_SEQUENCE] for shape in shapes}) != 1:
        raise MisuseError(
            f"a batch with tensors of the shapes {[*shapes]} has no one length of sequences, their second dimension, "
            f"which cp divides: define {_CUT}(self, batch, cut) in {type(module).__name__}, which returns "
            "the batch with cut(tensor) for each tensor with a part for each token"
        )
    return shapes[0][_SEQUENCE]


def _check_length(length: int, size: int, method: str) -> None:
    count = _num_chunks(size, method)
    if length % count:
        balanced = ", with two parts for each" if method == "ring" else ""
        raise MisuseError(
            f"sequences of {length} tokens cannot be divided over the {size} ranks of cp{balanced}: "
            f"pad them to a multiple of {count}, such as {length + -length % count} tokens"
        )


def _num_chunks(size: int, method: str) -> int:
    return size * (2 if method == "ring" else 1)


class Sequences:
    """The sequences of a run's batches: cut before each step, and attended to as wholes in it.

    A module may define ``cut_sequences(batch, cut)``, which returns the batch with what ``cut`` returns for its
    tensors; ``cut(tensor)`` is this rank's part along dimension 1, and ``cut(tensor, dim)`` along another one.
    Otherwise all tensors with two or more dimensions are cut.  A module that predicts tensors defines
    ``join_sequences(outputs, join)``, which returns the outputs with what ``join`` returns for those that are parts.
    One whose loss is computed from its outputs, outside of ``training_step``, defines ``join_training_sequences``
    likewise: gradients flow back through ``join``.

    Args:
        module: The user's module.
        group: The ranks, in the order of the parts.
        method: The method of attention; of a ring, each rank has a part from the head and one from the tail.

    Attributes:
        attention: The attention to whole sequences.
    """

    def __init__(self, module: Module, group: ProcessGroup, method: str) -> None:
        self._module, self.group, self._method = module, group, method
        self.attention = DividedAttention(method, group)
        self._checked: set[StepName] = set()

    def cut(self, tensor: Tensor, dim: int = _SEQUENCE) -> Tensor:
        """Return this rank's part of a tensor.

        Raises:
            MisuseError: The ranks do not divide its length.
        """
        _check_length(tensor.shape[dim], self.group.size(), self._method)
        rank, chunks = self.group.rank(), tensor.chunk(_num_chunks(self.group.size(), self._method), dim)
        if self._method == "ring":
            return torch.cat([chunks[rank], chunks[-1 - rank]], dim)
        return chunks[rank].contiguous()

    def join(self, tensor: Tensor, dim: int = _SEQUENCE) -> Tensor:
        """Return the whole of a tensor that was cut; collective, and again in a backward pass."""
        pieces = gather_tensors(tensor.contiguous(), group=self.group, sync_grads=True).unbind()
        if self._method == "ring":
            halves = [piece.chunk(2, dim) for piece in pieces]
            pieces = (*(half[0] for half in halves), *(half[1] for half in reversed(halves)))
        return torch.cat(pieces, dim)

    def cut_batch(self, batch: Any) -> Any:
        """Return this rank's part of a batch.

        Raises:
            MisuseError: Its tensors have other lengths, or ranks do not divide them.
        """
        if hasattr(self._module, _CUT):
            cut_sequences: Callable[..., Any] = getattr(self._module, _CUT)
            return cut_sequences(batch, self.cut)
        shapes: list[tuple[int, ...]] = []

        def cut(tensor: Tensor) -> Tensor:
            if tensor.dim() <= _SEQUENCE:
                return tensor
            shapes.append(tuple(tensor.shape))
            return self.cut(tensor)

        local = apply_to_tensors(batch, cut)
        _one_length(self._module, shapes)
        return local

    def cut_arguments(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return this rank's part of the arguments of a function: a batch, or a batch of several arguments."""
        if len(arguments) == 1:
            return (self.cut_batch(arguments[0]),)
        cut: tuple[Any, ...] = self.cut_batch(arguments)
        return cut

    def join_outputs(self, name: StepName, outputs: Any) -> Any:
        """Return the outputs of a step, with those of whole sequences where they are wanted; collective there.

        Args:
            name: Name of the step.
            outputs: Its outputs on this rank.

        Raises:
            MisuseError: Predictions have tensors, and the module does not say which of them are parts.
        """
        method = {"predict_step": _JOIN, "training_step": _JOIN_IN_TRAINING}.get(name)
        if method is not None and hasattr(self._module, method):
            join_sequences: Callable[..., Any] = getattr(self._module, method)
            return join_sequences(outputs, self.join)
        if name == "predict_step" and tensors_in(outputs):
            raise MisuseError(
                f"predict_step of {type(self._module).__name__} returned tensors, of which a rank of cp has those of "
                f"its part of the sequences or whole ones: define {_JOIN}(self, outputs, join), which returns the "
                "outputs with join(tensor) for each tensor with a part for each token"
            )
        return outputs

    @contextmanager
    def attending(self, name: StepName, any_rank: Callable[[bool], bool]) -> Iterator[None]:
        """In this context a step attends to whole sequences; collective in the first step of a name.

        Args:
            name: Name of the step.
            any_rank: Returns whether any rank passes True, as the layers of a stage may be without attention.

        Raises:
            MisuseError: It is the first step of the name, and has called no attention.
        """
        earlier = self.attention.num_calls
        with self.attention.replacing():
            yield
        if name not in self._checked and not any_rank(self.attention.num_calls > earlier):
            raise MisuseError(
                f"a {name.replace('_', ' ')} of {type(self._module).__name__} has called no attention as "
                "torch.nn.functional.scaled_dot_product_attention, so that its tokens would see those of their own "
                "rank only: call it by that name, as a name imported from the module is torch's own function, or "
                "leave cp out"
            )
        self._checked.add(name)

"""Communication of a rank whose module is sharded with ``fully_shard``, or split over ranks that share a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrat.interfaces.communication import Collective
from dstrat_fsdp.memory import once_per_module

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import Tensor
    from torch.nn import Module

    from dstrat.interfaces.memory import TrainingSize
    from dstrat_fsdp.memory import Division, ShardedTraining


def sharded_collectives(sharded: ShardedTraining) -> tuple[Collective, ...]:
    """Return the collectives that gather parameters, and that sum gradients over shards and then over replicas.

    Blocks are gathered in each forward pass, and in each backward pass if they were freed between; parameters outside
    of blocks stay gathered for a full step.  Gradients are summed once in an optimizer step.
    """
    batches, policy, units, collectives = sharded.training.accumulate_grad_batches, sharded.policy, sharded.units, []
    for division in dict.fromkeys(division for _, division, _ in units):
        gathered = summed = num_gathers = num_sums = 0
        for unit, of_unit, count in units:
            if of_unit == division:
                gathers = count * sharded.gathers(unit)
                gathered += gathers * _full_bytes(unit.parameters, division, policy.param_dtype)
                num_gathers += gathers
                summed += count * _full_bytes(unit.trainable, division, policy.reduce_dtype or policy.param_dtype)
                num_sums += count * bool(unit.trainable)
        gather = Collective(
            kind="all_gather",
            bytes=batches * gathered,
            messages=batches * num_gathers,
            ranks=division.shards,
            stride=division.stride,
            overlaps=True,
            in_each_batch=True,
        )
        scatter = Collective(
            kind="reduce_scatter",
            bytes=summed,
            messages=num_sums,
            ranks=division.shards,
            stride=division.stride,
            overlaps=True,
        )
        reduction = Collective(
            kind="all_reduce",
            bytes=summed // division.shards,
            messages=num_sums,
            ranks=sharded.num_replicas,
            stride=division.shards * division.stride,
            overlaps=True,
        )
        collectives += [gather, scatter, reduction]
    return tuple(one for one in collectives if one.ranks > 1)


def python_hooks(sharded: ShardedTraining, *, microbatches: int = 1) -> int:
    """Return what ``fully_shard`` and DTensor do in Python in a step, in hooks of a layer.

    Measured with torch 2.13 on a CPU: gathering, freeing or reducing a block takes as long as ten, the collective for
    it as long again, and the optimizer's step of a sharded parameter as long as 2.5.  Both passes of a gathered block
    take as long as 4.5, and those of a matrix that is split as 9.  ``microbatches`` is the number of parts of each
    batch, for all of which a block is gathered once.  On one rank nothing is gathered.
    """
    batches = sharded.training.accumulate_grad_batches
    passes, total = batches * microbatches, 0
    for unit, division, count in sharded.units:
        matrices = sum(parameter.dim() > 1 for parameter in unit.parameters) if division.splits > 1 else 0
        total += count * (9 * passes * matrices + 5 * len(unit.trainable) // 2)
        if sharded.replicates_all:
            continue
        total += count * (9 * (passes - batches) // 2)
        gathers = batches * sharded.gathers(unit)
        sums = int(bool(unit.trainable))
        collectives = (gathers + sums if division.shards > 1 else 0) + (sums if sharded.num_replicas > 1 else 0)
        total += count * 10 * (gathers + sums + collectives)
    return total


def bytes_from_host(sharded: ShardedTraining) -> int:
    """Return the bytes of shards on the host that torch copies to the device in a step, after a first time.

    It copies a shard for each gather.
    """
    total = 0
    for unit, division, count in sharded.units if sharded.offloads else ():
        gathers = sharded.training.accumulate_grad_batches * sharded.gathers(unit)
        shard = sum(division.shard(parameter) * parameter.element_size() for parameter in unit.parameters)
        total += count * (gathers - 1) * shard
    return total


def copied_bytes(collectives: Iterable[Collective]) -> int:
    """Return the bytes that torch reads and writes for the collectives of shards.

    Shards are copied into the input of a gather, and its output into parameters; gradients into the input of a
    reduction, whose output is scaled.
    """
    packed = (one for one in collectives if one.kind in ("all_gather", "reduce_scatter"))
    return sum(2 * one.bytes + 2 * one.bytes // one.ranks for one in packed)


def _full_bytes(unit: Iterable[Tensor], division: Division, dtype: torch.dtype | None) -> int:
    """Return the bytes of gathered parameters, whose shards are padded to equal sizes; None is their own dtype."""
    return sum(division.shards * division.shard(parameter) * (dtype or parameter.dtype).itemsize for parameter in unit)


def split_collectives(
    training: TrainingSize, blocks: Sequence[Module], num_splits: int, *, unsplit: Iterable[Module] = ()
) -> tuple[Collective, ...]:
    """Return the all-reduces of blocks whose matrices are split by columns and rows in turn, as in Megatron-LM.

    Each pair of matrices sums its output in the forward pass, and the gradient of its input in the backward pass
    (https://arxiv.org/abs/1909.08053).  A block has a pair for attention and one for its feed-forward layers; one of
    two matrices has one pair.

    Args:
        training: Sizes of the training on one device, with the outputs of layers.
        blocks: The layers that are split.
        num_splits: Number of neighbouring ranks that each matrix is split over.
        unsplit: Layers in them whose matrices are not split, such as experts.
    """
    if num_splits == 1:
        return ()
    pairs = [block.pairs for block in _split_blocks(training.module, tuple(blocks), tuple(unsplit))]
    sizes = block_outputs(training, blocks)
    return (
        Collective(
            kind="all_reduce",
            bytes=2 * training.accumulate_grad_batches * sum(map(math.prod, zip(pairs, sizes, strict=True))),
            messages=2 * training.accumulate_grad_batches * sum(pairs),
            ranks=num_splits,
        ),
    )


def split_activation_share(
    training: TrainingSize, blocks: Sequence[Module], num_splits: int, *, unsplit: Iterable[Module] = ()
) -> float:
    """Return the share of a device's activations that a rank has, if matrices are split as for the all-reduces.

    What norms save, and the sum after each pair of matrices, is in all ranks.  The rest of what blocks save is divided,
    and what is outside of blocks is not.

    Args:
        training: Sizes of the training on one device, with what layers save.
        blocks: The layers that are split.
        num_splits: Number of ranks that each matrix is split over.
        unsplit: Layers in them whose matrices are not split, and whose tokens are divided: experts.
    """
    if num_splits == 1 or not training.activations:
        return 1.0
    divided = 0
    for block, output in zip(
        _split_blocks(training.module, tuple(blocks), tuple(unsplit)), block_outputs(training, blocks), strict=True
    ):
        replicated = block.pairs * output + sum(training.saved.get(name, 0) for name in block.norms)
        divided += max(0, training.saved.get(block.name, 0) - replicated)
    return 1 - (1 - 1 / num_splits) * divided / training.activations


@dataclass(frozen=True, slots=True)
class _SplitBlock:
    """A layer whose matrices are split.

    Attributes:
        name: Its name in the module.
        norms: Names of the norms in it.
        pairs: Number of its pairs of matrices.
    """

    name: str
    norms: tuple[str, ...]
    pairs: int


@once_per_module
def _split_blocks(module: Module, blocks: tuple[Module, ...], unsplit: tuple[Module, ...]) -> list[_SplitBlock]:
    """Return the blocks of a module with what split layers depend on.

    Args:
        module: The module.
        blocks: The layers that are split.
        unsplit: Layers in them whose matrices are not split.
    """
    names = {id(layer): name for name, layer in module.named_modules()}
    parameters = {id(parameter) for layer in unsplit for parameter in layer.parameters()}
    return [
        _SplitBlock(
            name=names[id(block)],
            norms=tuple(names[id(layer)] for layer in block.modules() if _is_norm(layer)),
            pairs=_pairs(one for one in block.parameters() if id(one) not in parameters),
        )
        for block in blocks
    ]


def _is_norm(layer: Module) -> bool:
    parameters = [parameter.dim() for parameter in layer.parameters()]
    return bool(parameters) and max(parameters) == 1


def _pairs(parameters: Iterable[Tensor]) -> int:
    """Return the number of pairs of matrices among the parameters of a block."""
    return min(2, math.ceil(sum(one.dim() > 1 for one in parameters) / 2))


def block_outputs(training: TrainingSize, blocks: Sequence[Module]) -> list[int]:
    """Return the bytes that each block returns in a forward pass; 0 where that is not known."""
    return [training.outputs.get(block.name, 0) for block in _split_blocks(training.module, tuple(blocks), ())]

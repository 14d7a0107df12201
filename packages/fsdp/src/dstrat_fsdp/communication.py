"""Communication of a rank whose module is sharded with ``fully_shard``, or split over ranks that share a batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dstrat.interfaces.communication import Collective
from dstrat_fsdp.memory import divide_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from torch import Tensor
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.nn import Module

    from dstrat.interfaces.memory import TrainingSize
    from dstrat_fsdp.memory import Division


def sharded_collectives(
    training: TrainingSize,
    blocks: Sequence[Module],
    *,
    division_of: Callable[[Tensor], Division],
    num_replicas: int = 1,
    policy: MixedPrecisionPolicy,
    frees_blocks: bool,
) -> tuple[Collective, ...]:
    """Return the collectives that gather parameters, and that sum gradients over shards and then over replicas.

    Blocks are gathered in each forward pass, and in each backward pass if they were freed between; parameters outside
    of blocks stay gathered for a full step.  Gradients are summed once in an optimizer step.

    Args:
        training: Sizes of the training on one device.
        blocks: The layers that are gathered together, inner ones before those that contain them.
        division_of: Returns the division of a parameter, which is the same for all of a block.
        num_replicas: Number of groups of the ranks that shard parameters.
        policy: The dtypes in which parameters are gathered and gradients summed.
        frees_blocks: Whether blocks are freed between their forward and backward passes.
    """
    blocks_of_parameters, root = divide_parameters(blocks, training.module.parameters())
    units = [(unit, 2 if frees_blocks else 1) for unit in blocks_of_parameters] + [(root, 1)]  # and how often gathered
    batches, collectives = training.accumulate_grad_batches, []
    for division in dict.fromkeys(division_of(unit[0]) for unit, _ in units if unit):
        gathered = summed = num_gathers = num_sums = 0
        for unit, times in units:
            if unit and division_of(unit[0]) == division:
                trained = [parameter for parameter in unit if parameter.requires_grad]
                gathered += times * _full_bytes(unit, division, policy.param_dtype)
                num_gathers += times
                summed += _full_bytes(trained, division, policy.reduce_dtype or policy.param_dtype)
                num_sums += bool(trained)
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
            ranks=num_replicas,
            stride=division.shards * division.stride,
            overlaps=True,
        )
        collectives += [gather, scatter, reduction]
    return tuple(one for one in collectives if one.ranks > 1)


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
    pairs = _pairs(blocks, unsplit)
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
    names = {layer: name for name, layer in training.module.named_modules()}

    def saved(layer: Module) -> int:
        return training.saved.get(names[layer], 0)

    divided = 0
    for block, output, pairs in zip(blocks, block_outputs(training, blocks), _pairs(blocks, unsplit), strict=True):
        replicated = pairs * output + sum(saved(layer) for layer in block.modules() if _is_norm(layer))
        divided += max(0, saved(block) - replicated)
    return 1 - (1 - 1 / num_splits) * divided / training.activations


def _is_norm(layer: Module) -> bool:
    parameters = [parameter.dim() for parameter in layer.parameters()]
    return bool(parameters) and max(parameters) == 1


def _pairs(blocks: Iterable[Module], unsplit: Iterable[Module]) -> list[int]:
    """Return the number of pairs of matrices of each block, without those of some layers."""
    excluded = {id(parameter) for layer in unsplit for parameter in layer.parameters()}
    matrices = [sum(one.dim() > 1 and id(one) not in excluded for one in block.parameters()) for block in blocks]
    return [min(2, math.ceil(count / 2)) for count in matrices]


def block_outputs(training: TrainingSize, blocks: Sequence[Module]) -> list[int]:
    """Return the bytes that each block returns in a forward pass; 0 where that is not known."""
    names = {id(layer): name for name, layer in training.module.named_modules()}
    return [training.outputs.get(names[id(block)], 0) for block in blocks]

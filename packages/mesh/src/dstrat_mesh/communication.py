"""Communication of a rank along the axes of a mesh that divide sequences and layers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dstrat.interfaces.communication import Collective
from dstrat_fsdp.communication import block_outputs, split_collectives

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.nn import Module

    from dstrat.interfaces.memory import TrainingSize
    from dstrat_mesh.axes import Axes
    from dstrat_mesh.schedule import Schedule


def activation_collectives(
    training: TrainingSize, blocks: Sequence[Module], axes: Axes, method: str
) -> tuple[Collective, ...]:
    """Return the collectives of split layers and of divided sequences, of which split layers have the rank's part.

    Args:
        training: Sizes of the training on one device, with the outputs of layers for whole sequences.
        blocks: The layers that are split, with an attention each.
        axes: The sizes of the mesh.
        method: Method of attention.
    """
    split = split_collectives(training, blocks, axes.tp)
    return (
        *(dataclasses.replace(one, bytes=one.bytes // axes.cp) for one in split),
        *_sequence_collectives(training, blocks, axes, method),
    )


def _sequence_collectives(
    training: TrainingSize, blocks: Sequence[Module], axes: Axes, method: str
) -> tuple[Collective, ...]:
    """Return what attention to divided sequences sends, if each block has one, with as many keys as queries.

    ``"ulysses"`` exchanges queries, keys, values and outputs in both directions.  A ring sends keys and values to all
    ranks but the last in the forward pass, and in the backward pass to all, with their gradients.
    """
    if axes.cp == 1:
        return ()
    batches, shards = training.accumulate_grad_batches, axes.cp * axes.tp
    output = sum(block_outputs(training, blocks)) // shards
    if method == "ulysses":
        tensors, messages = 8, 8
    else:
        tensors, messages = 2 * (axes.cp - 1) + 4 * axes.cp, 3 * axes.cp - 1
    return (
        Collective(
            kind="all_to_all" if method == "ulysses" else "send",
            bytes=batches * tensors * output,
            messages=batches * messages * len(blocks),
            ranks=axes.cp,
            stride=axes.tp,
        ),
    )


def stage_collectives(
    training: TrainingSize,
    blocks: Sequence[Module],
    axes: Axes,
    schedule: Schedule,
    *,
    of_parameters: Iterable[Collective],
    of_activations: Iterable[Collective],
) -> tuple[Collective, ...]:
    """Return the communication of one of the stages, if they have equal shares of the blocks.

    Args:
        training: Sizes of the training on one device, with the outputs of layers.
        blocks: The layers that stages divide.
        axes: The sizes of the mesh.
        schedule: The schedule of the pipeline.
        of_parameters: Collectives of parameters and gradients of a rank with all layers, in all its microbatches.
        of_activations: Collectives of activations of such a rank, in whole batches.
    """
    if axes.pp == 1:
        return (*of_parameters, *of_activations)
    output = max(block_outputs(training, blocks), default=0) // axes.cp
    passes = 2 * training.accumulate_grad_batches * schedule.stages_per_rank  # forward and backward
    between_stages = Collective(
        kind="send",
        bytes=passes * output,  # activations, and their gradients
        messages=passes * schedule.microbatches,
        ranks=axes.pp,
        stride=axes.dp_replicate * axes.dp_shard * axes.cp * axes.tp,
    )
    in_microbatches = (
        dataclasses.replace(one, messages=schedule.microbatches * one.messages) for one in of_activations
    )
    of_stage = (
        dataclasses.replace(one, bytes=one.bytes // axes.pp, messages=-(-one.messages // axes.pp))
        for one in (*of_parameters, *in_microbatches)
    )
    return (*of_stage, between_stages)

"""Communication of a rank along the axes of a mesh that divide sequences, layers and experts."""

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
    training: TrainingSize,
    blocks: Sequence[Module],
    axes: Axes,
    method: str,
    experts: Sequence[Module],
    *,
    recomputes: bool,
) -> tuple[Collective, ...]:
    """Return the collectives of split layers and of divided sequences, of which split layers have the rank's part.

    Args:
        training: Sizes of the training on one device, with the outputs of layers for whole sequences.
        blocks: The layers that are split, with an attention each.
        axes: The sizes of the mesh.
        method: Method of attention.
        experts: Layers of experts, which ``ep`` divides.
        recomputes: Whether the forward pass of each block is computed once more before its backward pass.
    """
    split = split_collectives(training, blocks, axes.tp, unsplit=experts)
    in_both_passes = (
        *(dataclasses.replace(one, bytes=one.bytes // axes.cp) for one in split),
        *_expert_collectives(training, experts, axes),
    )
    if recomputes:  # those of the forward pass, which are half of them, once more
        in_both_passes = tuple(
            dataclasses.replace(one, bytes=one.bytes * 3 // 2, messages=one.messages * 3 // 2) for one in in_both_passes
        )
    return (*in_both_passes, *_sequence_collectives(training, blocks, axes, method, forward_passes=1 + recomputes))


def _sequence_collectives(
    training: TrainingSize, blocks: Sequence[Module], axes: Axes, method: str, forward_passes: int
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
        tensors = messages = 4 * forward_passes + 4
    else:
        tensors = 2 * forward_passes * (axes.cp - 1) + 4 * axes.cp
        messages = forward_passes * (axes.cp - 1) + 2 * axes.cp
    return (
        Collective(
            kind="all_to_all" if method == "ulysses" else "send",
            bytes=batches * tensors * output,
            messages=batches * messages * len(blocks),
            ranks=axes.cp,
            stride=axes.tp,
        ),
    )


def _expert_collectives(training: TrainingSize, layers: Sequence[Module], axes: Axes) -> tuple[Collective, ...]:
    """Return what layers of experts send, if each expert gets as many tokens; without the numbers of tokens.

    In both directions tokens go to their experts, once for each choice, and outputs come back.  Of ranks that have the
    same tokens, each sends a part of them, and gathers the outputs, and in the backward pass the gradients of tokens
    and factors.

    Args:
        training: Sizes of the training on one device, with the inputs and outputs of layers.
        layers: The layers, which are called with tokens, the experts of each, and factors.
        axes: The sizes of the mesh.
    """
    if not layers:
        return ()
    names = {id(layer): name for name, layer in training.module.named_modules()}
    called = [names[id(layer)] for layer in layers if names[id(layer)] in training.inputs]
    batches, rows, gathered = training.accumulate_grad_batches, 0, 0
    for name in called:
        tokens, index, *_ = training.inputs[name]
        output = training.outputs[name] // axes.cp
        rows += 4 * output * index[1] // axes.tp
        gathered += 2 * output + output * index[1] // tokens[1]
    exchange = Collective(
        kind="all_to_all",
        bytes=batches * rows,
        messages=batches * 5 * len(called),  # one of the numbers of tokens
        ranks=axes.ep,
    )
    gather = Collective(kind="all_gather", bytes=batches * gathered, messages=batches * 3 * len(called), ranks=axes.tp)
    return tuple(one for one in (exchange, gather) if one.ranks > 1 and called)


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

"""Memory and communication of a training on a mesh, before anything runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrat.interfaces.communication import CommunicationLayout
from dstrat.interfaces.memory import Stage
from dstrat_fsdp.communication import (
    bytes_from_host,
    copied_bytes,
    python_hooks,
    sharded_collectives,
    split_activation_share,
)
from dstrat_fsdp.memory import MATRICES_SPLIT, Division, Divisions, ShardedTraining, once_per_module, sharded_layout
from dstrat_mesh.axes import SHARD
from dstrat_mesh.communication import activation_collectives, stage_collectives
from dstrat_mesh.experts import with_experts
from dstrat_mesh.pipeline import estimated_layers, estimated_stages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.nn import Module

    from dstrat.interfaces.memory import MemoryLayout, TrainingSize
    from dstrat_mesh.axes import Axes
    from dstrat_mesh.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshEstimate:
    """Estimate of a training on a mesh.

    Attributes:
        training: Sizes of the training on one device.
        axes: The sizes of the mesh.
        schedule: The schedule of the pipeline.
        blocks: The layers that are gathered together, inner ones before those that contain them.
        experts: Layers of experts, which ``ep`` divides.
        policy: The dtypes in which parameters are gathered and gradients summed.
        frees_blocks: Whether blocks are freed between their forward and backward passes.
        offloads: Whether shards and the optimizer's state are on the host.
        attention: Method of attention to divided sequences.
        recomputes: Whether the forward pass of each block is computed once more before its backward pass.
    """

    training: TrainingSize
    axes: Axes
    schedule: Schedule
    blocks: tuple[Module, ...]
    experts: tuple[Module, ...]
    policy: MixedPrecisionPolicy
    frees_blocks: bool
    offloads: bool
    attention: str
    recomputes: bool

    def stages(self) -> Sequence[Stage]:
        """Return the stages of a pipeline, with the memory of a rank of each."""
        axes, ranks = self.axes, self.axes.pp
        pipeline = self.training.module, ranks, self.schedule.stages_per_rank
        names = estimated_stages(*pipeline).names
        saved = [sum(self.training.saved.get(name, 0) for name in stage) for stage in names]
        ranks_of_stage = self.training.world_size // ranks  # the outermost axis
        share, stages = self._split_share / axes.cp, []
        for position, layers in enumerate(estimated_layers(*pipeline)):
            saved_by_rank = saved[position::ranks]
            held = self.schedule.batch_share(position, saved_by_rank) * sum(saved_by_rank) / max(sum(saved), 1)
            stages.append(
                Stage(
                    layers=tuple(name for stage in names[position::ranks] for name in stage),
                    ranks=range(position * ranks_of_stage, (position + 1) * ranks_of_stage),
                    memory=dataclasses.replace(
                        sharded_layout(self._sharded(layers)),
                        activation_share=share * held,
                        assumption=self._assumption(has_equal_stages=False),
                    ),
                )
            )
        return stages

    def memory_layout(self) -> MemoryLayout:
        """Return the memory of a rank, of which stages have equal parts."""
        axes = self.axes
        layout = sharded_layout(self._sharded(), num_stages=axes.pp)
        return dataclasses.replace(
            layout,
            parameters=layout.parameters // axes.pp,
            gradients=layout.gradients // axes.pp,
            optimizer_state=layout.optimizer_state // axes.pp,
            host=layout.host // axes.pp,
            activation_share=self._split_share * self.schedule.activation_share / axes.cp,
            assumption=self._assumption(),
        )

    def communication_layout(self) -> CommunicationLayout:
        """Return what a rank sends along each axis."""
        training, axes, microbatches = self.training, self.axes, self.schedule.microbatches
        sharded = self._sharded()
        gathers_once = axes.pp > 1 and not self.frees_blocks
        if gathers_once:
            sharded = dataclasses.replace(sharded, training=training)
        of_parameters = sharded_collectives(sharded)
        of_activations = activation_collectives(
            training, self.blocks, axes, self.attention, self.experts, recomputes=self.recomputes
        )
        return CommunicationLayout(
            collectives=stage_collectives(
                training,
                self.blocks,
                axes,
                self.schedule,
                of_parameters=of_parameters,
                of_activations=of_activations,
            ),
            ranks_per_batch=axes.tp * axes.cp * axes.pp,
            operation_share=microbatches / axes.pp,
            passes=microbatches,
            weight_share=self._weight_share,
            activation_share=self._split_share / (axes.cp * axes.pp),
            copied=copied_bytes(of_parameters) // axes.pp,
            copied_from_host=bytes_from_host(sharded) // axes.pp,
            hooks=python_hooks(sharded, microbatches=microbatches if gathers_once else 1) // axes.pp,
            idle=self.schedule.bubble,
            assumption=self._assumption(),
        )

    def _sharded(self, layers: Module | None = None) -> ShardedTraining:
        """Return the training of a rank with some layers, or with all, which gathers them for each microbatch."""
        training, axes = self.training, self.axes
        module = training.module if layers is None else layers
        present = _ids_of_layers(module)
        of_experts = (parameter for layer in self.experts for parameter in layer.parameters())
        return ShardedTraining(
            training=training.for_steps_of(training.accumulate_grad_batches * self.schedule.microbatches),
            blocks=with_experts(self.experts, module, [block for block in self.blocks if id(block) in present]),
            divisions=Divisions(
                usual=Division(shards=axes.mesh[SHARD], splits=axes.tp),
                of_experts=Division(shards=axes.mesh_of_experts[SHARD], experts=axes.ep),
                experts=frozenset(map(id, of_experts)),
            ),
            policy=self.policy,
            frees_blocks=self.frees_blocks,
            offloads=self.offloads,
            num_replicas=axes.dp_replicate,
            layers=layers,
        )

    @property
    def _split_share(self) -> float:
        """Share of a device's activations that a rank has, as it splits layers."""
        return split_activation_share(self.training, self.blocks, self.axes.tp, unsplit=self.experts)

    @property
    def _weight_share(self) -> float:
        """Share of a module's weights with which a rank computes."""
        axes = self.axes
        total, of_experts = max(1, _numel(self.training.module)), sum(map(_numel, self.experts))
        return ((total - of_experts) / axes.tp + of_experts / axes.ep) / (axes.pp * total)

    def _assumption(self, *, has_equal_stages: bool = True) -> str:
        axes = self.axes
        clauses = [MATRICES_SPLIT.format(axes.tp)] if axes.tp > 1 else []
        clauses += [f"{axes.pp} stages have equal layers"] if axes.pp > 1 and has_equal_stages else []
        clauses += ["all experts get as many tokens"] if axes.ep > 1 else []
        return "; ".join(clauses)


@once_per_module
def _ids_of_layers(module: Module) -> frozenset[int]:
    return frozenset(map(id, module.modules()))


@once_per_module
def _numel(module: Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

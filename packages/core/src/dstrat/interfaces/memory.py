"""Memory of a training on one device, and how a strategy divides it over ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.precision import Precision


_TEMPORARIES = 3  # most tensors of a parameter's size that torch's optimizers need to step it


class SavedActivations(Protocol):
    """Protocol of how the layers of a module save activations for the backward pass; hashable, as options are."""

    def select(
        self, module: Module, device: torch.device, *, has_streams: bool = False, host: str = "cpu"
    ) -> Callable[[], Callable[[], None]]:
        """Select the layers of a module; return a function that changes how they save activations.

        That one returns a function that undoes it.

        Args:
            module: The module, before a strategy wraps its layers.
            device: Device of the training.
            has_streams: Whether copies to the host run beside computation there.
            host: Device type to which activations are offloaded; ``"meta"`` in an estimate.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Amount of computation.

    Attributes:
        flops: Floating-point operations of matrix products, convolutions and attention.
        operands: Bytes that these read and write.
        moved: Bytes that all other operations read and write.
        operations: Number of all operations.
    """

    flops: int = 0
    operands: int = 0
    moved: int = 0
    operations: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSize:
    """Sizes of a training on one device, and the ranks that are to share it; nothing of it exists.

    All sizes are in bytes.  A strategy reads them in :meth:`~dstrat.interfaces.strategy.Strategy.memory_layout`.

    Attributes:
        module: The module; its parameters have shapes and dtypes, and no values.
        precision: The dtypes.
        device_type: Type of the devices, such as ``"cuda"``.
        world_size: Number of devices of the job, at least 1.
        ranks_per_machine: Number of them on each machine.
        parameters: All parameters, in the precision's dtype.
        trainable_parameters: Those that require a gradient; their gradients are as large.
        trainable_numel: Number of elements of the trainable parameters.
        largest_parameter: The largest parameter.
        module_buffers: The module's buffers, such as running statistics.
        optimizer_state: The optimizers' state after the first step.
        optimizer_temporaries: Largest temporary memory in an optimizer step.
        timeline: After each operation of a step, what lives of activations (saved and temporary tensors, the batch)
            and of gradients, ``(activations, gradients)``.
        offloaded_activations: Largest memory of activations on the host, to which layers offload them.
        batch_size: Number of samples of a batch; 0 if a batch has no tensor with a first dimension.
        accumulate_grad_batches: Number of batches of an optimizer step.
        outputs: Bytes of the tensors that each layer returns in a forward pass, by its name in the module.
        saved: Bytes of activations that the forward pass of each layer leaves for the backward pass, likewise.
        inputs: Shapes of the tensors that each layer is called with, by its name in the module.
        heads: Numbers of heads of torch's attention, of queries and of keys; empty without attention, or where a layer
            returns its weights.
        mesh_dimension: Name of the mesh dimension that ``configure_model`` asked for, ``""`` if it reached for the mesh
            otherwise, and None if it did not, so that it splits no layers.
        batch_shapes: Shapes of the tensors of a batch.
        optimizers: The optimizers, of parameters without values.
        unused: Names of trainable parameters on which the loss does not depend; of layers that repeat, those of some.
        work: Computation of a forward and a backward pass.
        optimizer_work: Computation of an optimizer step.
    """

    module: Module
    precision: Precision
    device_type: str
    world_size: int
    ranks_per_machine: int
    parameters: int
    trainable_parameters: int
    trainable_numel: int
    largest_parameter: int
    module_buffers: int
    optimizer_state: int
    optimizer_temporaries: int
    timeline: tuple[tuple[int, int], ...]
    offloaded_activations: int = 0
    batch_size: int = 0
    accumulate_grad_batches: int = 1
    outputs: Mapping[str, int] = field(default_factory=dict)
    saved: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    heads: frozenset[int] = frozenset()
    mesh_dimension: str | None = None
    batch_shapes: tuple[tuple[int, ...], ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    unused: tuple[str, ...] = ()
    work: Work = Work()
    optimizer_work: Work = Work()

    def for_steps_of(self, batches: int) -> TrainingSize:
        """Return the size of the training with so many batches in an optimizer step."""
        return dataclasses.replace(self, accumulate_grad_batches=batches)

    def temporaries_of(self, share: float) -> int:
        """Return the temporary memory of an optimizer step over a share of the trainable parameters.

        An optimizer that steps one parameter after the other needs as much for the largest one alone.
        """
        steps_singly = self.optimizer_temporaries <= _TEMPORARIES * self.largest_parameter
        return self.optimizer_temporaries if steps_singly else int(share * self.optimizer_temporaries)

    @property
    def frozen_parameters(self) -> int:
        """Bytes of the parameters that do not require a gradient."""
        return self.parameters - self.trainable_parameters

    @property
    def activations(self) -> int:
        """Largest memory of activations in a step."""
        return max((activations for activations, _ in self.timeline), default=0)

    def host(self, layout: MemoryLayout) -> int:
        """Return the memory of a rank on the host."""
        return layout.host + int(layout.activation_share * self.offloaded_activations)

    @property
    def replicated(self) -> MemoryLayout:
        """The layout of a rank that holds everything, as a single device does."""
        return MemoryLayout(
            parameters=self.parameters + self.module_buffers,
            gradients=self.trainable_parameters,
            optimizer_state=self.optimizer_state,
            optimizer_temporaries=self.optimizer_temporaries,
            accumulated=self.trainable_parameters if self.accumulate_grad_batches > 1 else 0,
        )

    def peak(self, layout: MemoryLayout) -> int:
        """Return the largest memory of a rank's device, from the second step on."""
        # Gradients that the rank shards, or frees early, grow in a backward pass as all of them do on one device.
        always = layout.parameters + layout.optimizer_state + layout.buffers
        share = layout.gradients / self.trainable_parameters if self.trainable_parameters else 0.0
        live = (
            layout.activation_share * activations
            + max(layout.accumulated, share * gradients)
            + (layout.reduction_buffer if gradients >= layout.reduction_buffer else 0)
            for activations, gradients in self.timeline
        )
        backward = max(live, default=0.0)
        # Activations are freed before the optimizer steps, so that the two phases do not add up.
        step = layout.gradients + layout.optimizer_temporaries
        return always + max(int(backward) + layout.step_buffers, step)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLayout:
    """Memory of one rank under a strategy besides its activations, in bytes.

    Attributes:
        parameters: Parameters and buffers that stay on the device.
        gradients: Gradients on the device, when all of them are computed.
        optimizer_state: State of the optimizers on the device, with copies of parameters that are optimized.
        optimizer_temporaries: Temporary memory of an optimizer step on the device.
        accumulated: Gradients of a step's earlier batches, which are there in all passes but the first.
        buffers: What a strategy keeps besides from the first step on, such as buckets of gradients.
        step_buffers: What it needs in forward and backward passes only, such as layers that are gathered.
        reduction_buffer: Gradients of a layer that it reduces while others are computed, once as many bytes of them are
            computed.
        host: Memory on the host, to which something is offloaded.
        activation_share: Share of a batch's activations that the rank has.
        assumption: A clause that holds only in some trainings, such as "each weight matrix is split"; shown to users.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    optimizer_temporaries: int = 0
    accumulated: int = 0
    buffers: int = 0
    step_buffers: int = 0
    reduction_buffer: int = 0
    host: int = 0
    activation_share: float = 1.0
    assumption: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Layers that some ranks have and others have not, such as a stage of a pipeline.

    Attributes:
        layers: Their names in the module.
        ranks: The ranks that have them.
        memory: Memory of each of these ranks; its ``activation_share`` is that of the activations of all layers.
    """

    layers: tuple[str, ...]
    ranks: Sequence[int]
    memory: MemoryLayout

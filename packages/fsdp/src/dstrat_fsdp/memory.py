"""Memory of a rank whose module is sharded with ``fully_shard``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from dstrat.interfaces.memory import MemoryLayout
from dstrat_fsdp.wrap_policy import blocks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.nn import Module

    from dstrat.interfaces.memory import TrainingSize
    from dstrat_fsdp.wrap_policy import WrapPolicy

# Of modules that are estimated for many layouts, and do not change.
_blocks: WeakKeyDictionary[Module, dict[WrapPolicy | None, list[Module]]] = WeakKeyDictionary()

MATRICES_SPLIT = "configure_model splits each weight matrix over {} ranks"
"""Assumption of layouts with tensor parallelism, for its number of ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Numbers of ranks that divide a parameter.

    Attributes:
        shards: Ranks that have different rows, and gather them.
        splits: Neighbouring ranks that a matrix is split over before it is sharded, by tensor parallelism.
        experts: Neighbouring ranks that have different rows before that, and never gather them.
    """

    shards: int
    splits: int = 1
    experts: int = 1

    @property
    def stride(self) -> int:
        """Distance between neighbouring ranks that gather rows."""
        return self.splits * self.experts

    def gathered(self, parameter: Tensor) -> int:
        """Return the number of elements that a rank gathers."""
        return self._split(math.ceil(parameter.numel() / self.experts), parameter)

    def shard(self, parameter: Tensor) -> int:
        """Return the number of elements of the largest shard."""
        if parameter.dim() == 0:
            return 1
        rows, *columns = parameter.shape
        return self._split(math.ceil(math.ceil(rows / self.experts) / self.shards) * math.prod(columns), parameter)

    def _split(self, numel: int, parameter: Tensor) -> int:
        # Biases and norms are in each rank.
        return math.ceil(numel / self.splits) if parameter.dim() > 1 else numel


def estimated_blocks(training: TrainingSize, policy: WrapPolicy | None) -> list[Module]:
    """Return the blocks of a training that is estimated, as :func:`~dstrat_fsdp.wrap_policy.blocks_of` does.

    Args:
        training: Sizes of the training on one device.
        policy: The policy of the strategy.
    """
    of_module = _blocks.setdefault(training.module, {})
    if policy not in of_module:
        of_module[policy] = blocks_of(training.module, policy)
    return of_module[policy]


def sharded_layout(
    training: TrainingSize,
    blocks: Sequence[Module],
    *,
    division_of: Callable[[Tensor], Division],
    policy: MixedPrecisionPolicy,
    frees_blocks: bool,
    offloads: bool,
    num_stages: int = 1,
) -> MemoryLayout:
    """Return the memory of a rank that keeps a shard of each parameter, and gathers blocks of them.

    With several backward passes before an optimizer step, gradients stay whole until the last one reduces them.

    Args:
        training: Sizes of the training on one device.
        blocks: The layers that are gathered and freed together, inner ones before those that contain them.
        division_of: Returns the division of a parameter, which is the same for all of a block.
        policy: The dtypes in which parameters are gathered and gradients summed.
        frees_blocks: Whether blocks are freed between their forward and backward passes.
        offloads: Whether shards and the optimizer's state are on the host.
        num_stages: Number of stages among which the caller divides the layout, and which accumulate gradients, and keep
            blocks gathered, of their own layers only.
    """
    parameters = list(training.module.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    shards = sum(_shard_bytes(parameter, division_of) for parameter in parameters)
    gradients = sum(_shard_bytes(parameter, division_of) for parameter in trainable)
    share = gradients / training.trainable_parameters if training.trainable_parameters else 0.0
    step_buffers = _gathered(
        blocks, parameters, policy, frees_blocks=frees_blocks, division_of=division_of, num_stages=num_stages
    )
    accumulated = 0
    if training.accumulate_grad_batches > 1:
        accumulated = _bytes_in(trainable, "summed", policy=policy, division_of=division_of) // num_stages
    layout = MemoryLayout(
        parameters=shards + training.module_buffers,
        gradients=gradients,
        optimizer_state=int(share * training.optimizer_state),
        optimizer_temporaries=int(share * training.optimizer_temporaries),
        accumulated=accumulated,
        step_buffers=step_buffers,
    )
    if not offloads or training.device_type == "cpu":  # a CPU is the host
        return layout
    return MemoryLayout(
        parameters=training.module_buffers,
        gradients=0,
        optimizer_state=0,
        accumulated=accumulated,
        step_buffers=layout.step_buffers,
        host=shards + gradients + layout.optimizer_state + layout.optimizer_temporaries,
    )


def _shard_bytes(parameter: Tensor, division_of: Callable[[Tensor], Division]) -> int:
    return division_of(parameter).shard(parameter) * parameter.element_size()


def _gathered(
    blocks: Sequence[Module],
    parameters: Iterable[Tensor],
    policy: MixedPrecisionPolicy,
    *,
    frees_blocks: bool,
    division_of: Callable[[Tensor], Division],
    num_stages: int,
) -> int:
    """Return the memory of gathered parameters and of gradients that are not reduced yet, at the worst time.

    That is in the backward pass of the largest block: its parameters and gradients, the buffer in which they are
    summed, and the parameters of the block that is gathered next.  Parameters outside of blocks are gathered for a
    full step, and their gradients reduced at its end.
    """
    units, root = divide_parameters(blocks, parameters)
    bytes_in = partial(_bytes_in, policy=policy, division_of=division_of)
    gathered = [bytes_in(unit, "gathered") for unit in units]
    working = [
        bytes_in(unit, "gradients") + bytes_in(unit, "summed") + (2 if frees_blocks else 0) * size
        for unit, size in zip(units, gathered, strict=True)
    ]
    resident = bytes_in(root, "gathered") + (0 if frees_blocks else sum(gathered) // num_stages)
    return resident + bytes_in(root, "gradients") + max(working, default=bytes_in(root, "summed"))


def divide_parameters(
    blocks: Sequence[Module], parameters: Iterable[Tensor]
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return the parameters that are gathered together with each block, and those outside of blocks."""
    seen: set[int] = set()
    units: list[list[Tensor]] = []
    for block in blocks:
        unit: list[Tensor] = [parameter for parameter in block.parameters() if id(parameter) not in seen]
        seen.update(map(id, unit))
        units.append(unit)
    return units, [parameter for parameter in parameters if id(parameter) not in seen]


def _bytes_in(
    unit: Iterable[Tensor], stage: str, *, policy: MixedPrecisionPolicy, division_of: Callable[[Tensor], Division]
) -> int:
    """Return the bytes of a unit's parameters as they are gathered, or of their gradients as computed or summed."""
    total = 0
    for parameter in unit:
        if stage != "gathered" and not parameter.requires_grad:
            continue
        computed = policy.param_dtype or parameter.dtype
        dtype = (policy.reduce_dtype or computed) if stage == "summed" else computed
        total += division_of(parameter).gathered(parameter) * dtype.itemsize
    return total

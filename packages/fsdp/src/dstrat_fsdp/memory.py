"""Memory of a rank whose module is sharded with ``fully_shard``."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from dstrat.interfaces.memory import MemoryLayout
from dstrat_fsdp.options import changes_dtypes
from dstrat_fsdp.wrap_policy import blocks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from torch import Tensor
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.nn import Module

    from dstrat.interfaces.memory import TrainingSize
    from dstrat_fsdp.wrap_policy import WrapPolicy

_Function = TypeVar("_Function", bound="Callable[..., Any]")

MATRICES_SPLIT = "configure_model splits each weight matrix over {} ranks"
"""Assumption of layouts with tensor parallelism, for its number of ranks."""


def once_per_module(function: _Function) -> _Function:
    """Return a function of a module that computes each result once, while the module exists.

    It is for modules that are estimated for many layouts, and do not change.  Other arguments are hashable.  Neither
    they nor results may refer to the module, which would then exist for ever.
    """
    results: WeakKeyDictionary[Module, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()

    @functools.wraps(function)
    def remembering(module: Module, *rest: Any) -> Any:
        of_module = results.setdefault(module, {})
        if rest not in of_module:
            of_module[rest] = function(module, *rest)
        return of_module[rest]

    return remembering  # type: ignore[return-value]  # of the same signature


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        parameters: The parameters.
        shapes: Their shapes and dtypes, and whether they are trained: units that have the same ones need as much.
        is_root: Whether they are those outside of blocks.
    """

    parameters: tuple[Tensor, ...]
    shapes: tuple[tuple[torch.Size, torch.dtype, bool], ...]
    is_root: bool = False

    @property
    def trainable(self) -> tuple[Tensor, ...]:
        """The parameters that require a gradient."""
        return tuple(parameter for parameter in self.parameters if parameter.requires_grad)


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


@dataclass(frozen=True, slots=True)
class Divisions:
    """Divisions of the parameters of a module; equal ones share what depends on them.

    Attributes:
        usual: That of most parameters.
        of_experts: That of the experts' parameters.
        experts: Identities of these.
    """

    usual: Division
    of_experts: Division | None = None
    experts: frozenset[int] = frozenset()

    def of(self, parameter: Tensor) -> Division:
        """Return the division of a parameter."""
        if self.of_experts is not None and id(parameter) in self.experts:
            return self.of_experts
        return self.usual


@once_per_module
def estimated_blocks(module: Module, policy: WrapPolicy | None) -> tuple[Module, ...]:
    """Return the blocks of a module that is estimated, as :func:`~dstrat_fsdp.wrap_policy.blocks_of` does.

    Args:
        module: The module.
        policy: The policy of the strategy.
    """
    return tuple(blocks_of(module, policy))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedTraining:
    """A training that is estimated, whose ranks keep a shard of each parameter, and gather blocks of them.

    Attributes:
        training: Sizes of the training on one device.
        blocks: The layers that are gathered and freed together, inner ones before those that contain them.
        divisions: The divisions of the parameters, the same for all of a block.
        policy: The dtypes in which parameters are gathered and gradients summed.
        frees_blocks: Whether blocks are freed between their forward and backward passes.
        offloads: Whether shards and the optimizer's state are on the host.
        num_replicas: Number of groups of the ranks that shard parameters.
        layers: The layers of a rank that has not all of them; None for the module.
    """

    training: TrainingSize
    blocks: tuple[Module, ...]
    divisions: Divisions
    policy: MixedPrecisionPolicy
    frees_blocks: bool
    offloads: bool = False
    num_replicas: int = 1
    layers: Module | None = None

    @property
    def units(self) -> list[tuple[Unit, Division, int]]:
        """Units of parameters, one of equal ones, each with its division and the number of them."""
        module = self.training.module if self.layers is None else self.layers
        return _divided_units(module, self.blocks, self.divisions)

    @property
    def replicates_all(self) -> bool:
        """Whether nothing is gathered, as :attr:`~dstrat_fsdp.sharded_module.Sharding.replicates_all` decides it."""
        divides_nothing = self.divisions.usual.shards == self.num_replicas == 1 and not self.divisions.experts
        return divides_nothing and not changes_dtypes(self.policy) and not self.offloads

    def gathers(self, unit: Unit) -> int:
        """Return how often a unit is gathered for a batch; parameters outside of blocks stay for a full step."""
        return 2 if self.frees_blocks and not unit.is_root else 1


def sharded_layout(sharded: ShardedTraining, *, num_stages: int = 1) -> MemoryLayout:
    """Return the memory of a rank.

    With several backward passes before an optimizer step, gradients stay whole until the last one reduces them.

    Args:
        sharded: The training.
        num_stages: Number of stages among which the caller divides the layout, and which accumulate gradients, step the
            optimizer, and keep blocks gathered, of their own layers only.
    """
    training, layers, policy, units = sharded.training, sharded.layers, sharded.policy, sharded.units
    module_buffers = training.module_buffers if layers is None else sum(buffer.nbytes for buffer in layers.buffers())
    shards = gradients = summed = undivided = 0
    for unit, division, count in units:
        undivided += count * sum(one.nbytes for one in unit.trainable)
        shards += count * _shard_bytes(unit.parameters, division)
        gradients += count * _shard_bytes(unit.trainable, division)
        summed += count * _bytes_in(unit, division, "summed", policy)
    share = gradients / training.trainable_parameters if training.trainable_parameters else 0.0
    of_layers = undivided / (num_stages * training.trainable_parameters) if training.trainable_parameters else 0.0
    accumulates = training.accumulate_grad_batches > 1
    if not sharded.replicates_all:
        step_buffers, reduction_buffer = _buffers(
            units, policy, frees_blocks=sharded.frees_blocks, num_stages=num_stages, accumulates=accumulates
        )
    else:
        of_units = (_unit_gradients(unit, division, policy, accumulates=True) for unit, division, _ in units)
        step_buffers, reduction_buffer = max(of_units, default=0) if accumulates else 0, 0
    accumulated = summed // num_stages if accumulates else 0
    layout = MemoryLayout(
        parameters=shards + module_buffers,
        gradients=gradients,
        optimizer_state=int(share * training.optimizer_state),
        optimizer_temporaries=int(gradients / undivided * training.temporaries_of(of_layers)) if undivided else 0,
        accumulated=accumulated,
        step_buffers=step_buffers,
        reduction_buffer=reduction_buffer,
    )
    if not sharded.offloads:
        return layout
    return MemoryLayout(
        parameters=module_buffers,
        gradients=0,
        optimizer_state=0,
        accumulated=accumulated,
        step_buffers=layout.step_buffers,
        reduction_buffer=layout.reduction_buffer,
        host=shards + gradients + layout.optimizer_state + layout.optimizer_temporaries,
    )


@once_per_module
def _divided_units(
    module: Module, blocks: tuple[Module, ...], divisions: Divisions
) -> list[tuple[Unit, Division, int]]:
    equal: dict[tuple[Any, ...], list[Unit]] = {}
    for unit in _units_of(module, blocks):
        key = (unit.shapes, unit.is_root, divisions.of(unit.parameters[0]))
        equal.setdefault(key, []).append(unit)
    return [(several[0], division, len(several)) for (_, _, division), several in equal.items()]


@once_per_module
def _units_of(module: Module, blocks: tuple[Module, ...]) -> list[Unit]:
    """Return the units of parameters of blocks, and the one outside of blocks; those that have none are left out."""
    seen: set[int] = set()
    units = []
    for block in (*blocks, module):
        parameters = tuple(parameter for parameter in block.parameters() if id(parameter) not in seen)
        seen.update(map(id, parameters))
        shapes = tuple((one.shape, one.dtype, one.requires_grad) for one in parameters)
        if parameters:
            units.append(Unit(parameters, shapes, is_root=block is module))
    return units


def _shard_bytes(parameters: Iterable[Tensor], division: Division) -> int:
    return sum(division.shard(parameter) * parameter.element_size() for parameter in parameters)


def _buffers(
    units: Sequence[tuple[Unit, Division, int]],
    policy: MixedPrecisionPolicy,
    *,
    frees_blocks: bool,
    num_stages: int,
    accumulates: bool,
) -> tuple[int, int]:
    """Return the memory of gathered parameters and of gradients that are not reduced yet, and of those being reduced.

    The first is largest in the backward pass of the largest block: its parameters and gradients, and the parameters of
    the block that is gathered next.  The gradients of the block before it are summed in a buffer meanwhile.  Parameters
    outside of blocks are gathered for a full step, and their gradients reduced at its end.
    """
    resident = of_blocks = summed_of_root = 0
    working = []
    for unit, division, count in units:
        gathered, summed = (_bytes_in(unit, division, stage, policy) for stage in ("gathered", "summed"))
        gradients = _unit_gradients(unit, division, policy, accumulates=accumulates)
        if unit.is_root:
            resident += gathered + gradients
            summed_of_root = summed
        else:
            of_blocks += 0 if frees_blocks else count * gathered
            working.append((gradients + (2 if frees_blocks else 0) * gathered, summed))
    largest, summed = max(working, key=sum, default=(summed_of_root, 0))
    return resident + of_blocks // num_stages + largest, summed


def _unit_gradients(unit: Unit, division: Division, policy: MixedPrecisionPolicy, *, accumulates: bool) -> int:
    """Return the bytes of a unit's gradients besides those that all units' gradients count already."""
    gradients = _bytes_in(unit, division, "gradients", policy)
    if not accumulates:
        return max(0, gradients - _shard_bytes(unit.trainable, division))
    if _bytes_in(unit, division, "summed", policy) != gradients:  # those of a unit are converted, and then added
        return gradients
    # Each gradient is added to the one of earlier batches at once.
    return max((division.gathered(one) * one.element_size() for one in unit.trainable), default=0)


def _bytes_in(unit: Unit, division: Division, stage: str, policy: MixedPrecisionPolicy) -> int:
    """Return the bytes of a unit's parameters as they are gathered, or of their gradients as computed or summed."""
    total = 0
    for parameter in unit.parameters if stage == "gathered" else unit.trainable:
        computed = policy.param_dtype or parameter.dtype
        dtype = (policy.reduce_dtype or computed) if stage == "summed" else computed
        total += division.gathered(parameter) * dtype.itemsize
    return total

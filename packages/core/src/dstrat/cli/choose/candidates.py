"""Candidates of ``dstrat choose``: every installed strategy and its layouts, with micro-batch sizes that fit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dstrat.cli.choose.cost import step_time
from dstrat.cli.estimate.command import MOST_OF_MEMORY, Cases, measure_factory
from dstrat.errors import DstratError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from dstrat.cli.choose.cost import StepTime
    from dstrat.cli.measure.machine import Machine
    from dstrat.interfaces.communication import CommunicationLayout
    from dstrat.interfaces.memory import MemoryLayout, TrainingSize
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog

T = TypeVar("T")

SAME_TIME = 0.02
"""Largest difference of two times, as a share, that the model of the time cannot tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The training and the devices that a layout is chosen for.

    Attributes:
        model: Name of the function that returns the training.
        machine: The machines.
        devices: Number of devices of the workload.
        batch_size: Samples of an optimizer step of all ranks; None for the batch of the function on each device.
        precision: Flag of the precision.
        memory: Memory of a device in bytes.
    """

    model: str
    machine: Machine
    devices: int
    batch_size: int | None
    precision: str
    memory: int

    @property
    def ranks_per_machine(self) -> int:
        """Number of ranks on each machine."""
        return min(self.devices, self.machine.devices)

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self.devices // self.ranks_per_machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout that fits, with its predicted memory and time.

    Attributes:
        strategy: Alias with its options.
        training: Sizes of the training with the batch of a rank.
        memory: What a rank holds.
        communication: What a rank communicates.
        peak: Largest memory of a device, in bytes.
        time: Time of an optimizer step.
    """

    strategy: str
    training: TrainingSize
    memory: MemoryLayout
    communication: CommunicationLayout
    peak: int
    time: StepTime

    def on(self, machine: Machine) -> Candidate:
        """Return the candidate with its time on another machine."""
        time = step_time(machine, self.training, self.memory, self.communication)
        return dataclasses.replace(self, time=time)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutRanking:
    """The layouts of a workload.

    Attributes:
        candidates: Those that fit, in the order of :func:`in_order`.
        refused: Those that do not fit, or cannot train the module, by name with the reason.
        unusable: Strategies that cannot run on the devices, or are not installed completely, likewise.
    """

    candidates: tuple[Candidate, ...]
    refused: dict[str, str]
    unusable: dict[str, str]


class Candidates:
    """The layouts of a workload.

    Args:
        catalog: The catalog.
        workload: The training and the devices.
    """

    def __init__(self, catalog: Catalog, workload: Workload) -> None:
        self._catalog, self._workload = catalog, workload
        self._cases = Cases(
            catalog, workload.machine.device_type, workload.ranks_per_machine, workload.num_nodes, workload.precision
        )
        self._sizes: dict[Any, TrainingSize] = {}

    def rank(self, aliases: Sequence[str]) -> LayoutRanking:
        """Return the ranking of the layouts.

        Args:
            aliases: Strategies to compare; empty for all that are installed.
        """
        candidates: list[Candidate] = []
        unusable: dict[str, str] = {}
        refused: dict[str, str] = {}
        for alias, make_strategy in self._strategies(aliases):
            strategy = _value_or_reason(make_strategy)
            if isinstance(strategy, str):
                unusable[alias] = strategy
                continue
            candidate = _value_or_reason(partial(self._fitting, alias, strategy))
            if isinstance(candidate, str):
                refused[alias] = candidate
            else:
                candidates.append(candidate)
        priorities = {offer.component.alias: offer.component.auto or 0 for offer in self._catalog.offers("strategy")}
        ranked = tuple(in_order(_distinct(candidates), priorities))
        return LayoutRanking(candidates=ranked, refused=refused, unusable=unusable)

    def _strategies(self, aliases: Sequence[str]) -> Iterator[tuple[str, Callable[[], Strategy]]]:
        for alias, make_strategy in self._cases.strategies(aliases):
            offer = self._catalog.find("strategy", alias)
            if "(" in alias or self._catalog.missing_requirements(offer):
                yield alias, make_strategy
                continue
            options = self._catalog.load(offer).layout_options(self._workload.devices, self._workload.ranks_per_machine)
            named = [f"{alias}({', '.join(f'{name}={value!r}' for name, value in one.items())})" for one in options]
            yield from self._cases.strategies([name.removesuffix("()") for name in named])

    def _fitting(self, alias: str, strategy: Strategy) -> Candidate:
        """Return the candidate with the fewest batches of a step that fits.

        Raises:
            DstratError: None fits, or the strategy cannot train so, or does not say what it needs.
        """
        too_large = ""
        for training in self._trainings(strategy):
            problem = _value_or_reason(partial(strategy.check_training, training))
            if problem is not None:  # smaller batches are tried for their memory only
                raise RequestError(too_large or problem)
            memory, communication = strategy.memory_layout(training), strategy.communication_layout(training)
            if memory is None or communication is None:
                missing = "memory_layout" if memory is None else "communication_layout"
                raise RequestError(f"it does not declare its {missing}")
            peak = training.peak(memory)
            if peak <= MOST_OF_MEMORY * self._workload.memory:
                return Candidate(
                    strategy=alias,
                    training=training,
                    memory=memory,
                    communication=communication,
                    peak=peak,
                    time=step_time(self._workload.machine, training, memory, communication),
                )
            too_large = _too_large(training, memory, peak)
        raise RequestError(too_large or "a step has no sample")

    def _trainings(self, strategy: Strategy) -> Iterator[TrainingSize]:
        """Yield the training with batches of a rank from the largest to one sample."""
        first = self._size(strategy, None)
        communication = strategy.communication_layout(first)
        groups = self._workload.devices // (1 if communication is None else communication.ranks_per_batch)
        batch_size = self._workload.batch_size or first.batch_size * self._workload.devices
        if batch_size % groups:
            raise RequestError(f"{batch_size} samples do not divide among {groups} groups of ranks")
        of_group = batch_size // groups
        for batches in (count for count in range(1, of_group + 1) if of_group % count == 0):
            yield self._size(strategy, of_group // batches).for_steps_of(batches)

    def _size(self, strategy: Strategy, batch_size: int | None) -> TrainingSize:
        precision = strategy.precision_for(self._workload.precision) or self._cases.new_precision()
        saved = strategy.saved_activations
        key = precision.param_dtype, precision.compute_dtype, saved, batch_size
        if key not in self._sizes:
            self._sizes[key] = measure_factory(
                self._workload.model,
                self._cases.device_type,
                self._workload.ranks_per_machine,
                self._workload.num_nodes,
                batch_size,
                precision,
                saved,
            )
        return dataclasses.replace(self._sizes[key], precision=precision)


def _value_or_reason(function: Callable[[], T]) -> T | str:
    """Return the result of a function, or the text of its error about the request."""
    try:
        return function()
    except DstratError as error:
        return str(error)


def _too_large(training: TrainingSize, memory: MemoryLayout, peak: int) -> str:
    sizes = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer_state,
        "activations": int(memory.activation_share * training.activations),
        "other": memory.buffers + memory.step_buffers,
    }
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in sizes.items() if size)
    return f"it needs {peak / 2**30:.1f} GiB with batches of {training.batch_size} ({parts})"


def in_order(candidates: Iterable[Candidate], priorities: Mapping[str, int]) -> Iterator[Candidate]:
    """Yield candidates from the fastest on; among those that take as long, by priority, and then by their memory.

    Args:
        candidates: The candidates.
        priorities: Priorities of automatic choice, by alias.
    """
    remaining = sorted(candidates, key=lambda one: one.time.total)
    while remaining:
        equal = [one for one in remaining if one.time.total <= (1 + SAME_TIME) * remaining[0].time.total]
        remaining = remaining[len(equal) :]
        yield from sorted(equal, key=lambda one: (-priorities.get(one.strategy.partition("(")[0], 0), one.peak))


def _distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return one candidate of those with the same memory, communication and time: the first, such as of variants."""
    first: dict[Any, Candidate] = {}
    for one in candidates:
        key = one.memory, one.communication, one.training.batch_size, one.training.accumulate_grad_batches
        first.setdefault(key, one)
    return [*first.values()]

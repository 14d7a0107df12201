"""Candidates of ``dstrat choose``: every installed strategy and its layouts, with micro-batch sizes that fit."""

from __future__ import annotations

import dataclasses
import inspect
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from dstrat.cli.choose.cost import step_time
from dstrat.cli.choose.sizes import TrainingSizes
from dstrat.cli.estimate.command import MOST_OF_MEMORY, Cases, measure_factory
from dstrat.cli.estimate.ranks import host_of_machine, memory_of_ranks
from dstrat.errors import DstratError, RequestError
from dstrat.plugins.options import check_keywords, options_text, parse_alias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from dstrat.cli.choose.cost import StepTime
    from dstrat.cli.estimate.ranks import RankMemory
    from dstrat.cli.measure.machine import Machine
    from dstrat.interfaces.communication import CommunicationLayout
    from dstrat.interfaces.memory import MemoryLayout, SavedActivations, TrainingSize
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.offer import Offer

T = TypeVar("T")

SAME_TIME = 0.02
"""Largest difference of two times, as a share, that the model of the time cannot tell."""
_WITH_SIMILAR = 10
"""Number of the fastest layouts whose similar ones are compared too: all of them would take minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The training and the devices that a layout is chosen for.

    Attributes:
        model: Name of the function that returns the training.
        machine: The machines.
        devices: Number of devices of the workload.
        batch_size: Samples of an optimizer step of all ranks; None for the batch of the function on each device.
        precisions: Flags of the precisions that are compared.
        memory: Memory of a device in bytes.
        devices_per_machine: Number of devices that are used of each machine; None for all.
    """

    model: str
    machine: Machine
    devices: int
    batch_size: int | None
    precisions: Sequence[str]
    memory: int
    devices_per_machine: int | None = None

    @property
    def ranks_per_machine(self) -> int:
        """Number of ranks on each machine."""
        return self.devices_per_machine or min(self.devices, self.machine.devices)

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self.devices // self.ranks_per_machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout that fits, with its predicted memory and time.

    Attributes:
        strategy: Alias with its options.
        precision: Flag of the precision.
        training: Sizes of the training with the batch of a rank.
        memory: What the rank holds that needs most.
        communication: What a rank communicates.
        peak: Largest memory of a device, in bytes.
        host: Largest memory of the host of a machine, of all its ranks, in bytes.
        time: Time of an optimizer step.
    """

    strategy: str
    precision: str
    training: TrainingSize
    memory: MemoryLayout
    communication: CommunicationLayout
    peak: int
    host: int
    time: StepTime

    @property
    def alias(self) -> str:
        """Alias without options."""
        return self.strategy.partition("(")[0]

    def on(self, machine: Machine) -> Candidate:
        """Return the candidate with its time on another machine."""
        time = step_time(machine, self.training, self.memory, self.communication)
        return dataclasses.replace(self, time=time)


@dataclass(frozen=True, kw_only=True, slots=True)
class TooLarge:
    """The memory of a layout that does not fit, with the batches of those that its training allows that need least.

    Attributes:
        peak: Largest memory of a device, in bytes.
        batch_size: Samples of a batch.
        sizes: What it consists of, in bytes, by name; activations are not there at the same time as all gradients.
    """

    peak: int
    batch_size: int
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in self.sizes.items() if size)
        return f"it needs {self.peak / 2**30:.1f} GiB with batches of {self.batch_size} ({parts})"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutRanking:
    """The layouts of a workload.

    Attributes:
        candidates: Those that fit, in the order of :func:`in_order`.
        refused: Those that do not fit, or cannot train the module, by name with the reason.
        unusable: Strategies that cannot run on the devices, or are not installed completely, likewise.
    """

    candidates: tuple[Candidate, ...]
    refused: dict[str, str | TooLarge]
    unusable: dict[str, str]


class Candidates:
    """The layouts of a workload.

    Args:
        catalog: The catalog.
        workload: The training and the devices.
    """

    def __init__(self, catalog: Catalog, workload: Workload) -> None:
        self._catalog, self._workload = catalog, workload
        self._sizes: dict[Any, TrainingSizes] = {}
        self._stepped: dict[Any, TrainingSize] = {}  # whose optimizers have stepped, by dtype of the parameters
        self._layouts: dict[tuple[str, str], list[_Layout]] = {}  # by alias with options, and precision

    def rank(self, aliases: Sequence[str], memory: int | None = None) -> LayoutRanking:
        """Return the ranking of the layouts.  What one has measured of the training, another does not measure again.

        Args:
            aliases: Strategies to compare; empty for all that are installed, but for those that are legacy, and those
                whose losses are not those of one device.
            memory: Memory of a device in bytes; None for that of the workload.

        Raises:
            DstratError: The training cannot be measured, with any strategy.
        """
        self._check_training()
        limit = MOST_OF_MEMORY * (self._workload.memory if memory is None else memory)
        candidates: list[Candidate] = []
        unusable: dict[str, str] = {}
        refused: dict[str, str | TooLarge] = {}
        offers = self._catalog.offers("strategy")
        preferences = {self._catalog.name_of(offer): _preference(offer) for offer in offers}
        for precision in self._workload.precisions:
            cases = self._cases(precision)
            fitting: list[Candidate] = []
            divided: dict[str, Offer] = {}
            for alias, make_strategy, offer in self._strategies(cases, aliases, refused):
                strategy = value_or_reason(make_strategy)
                if isinstance(strategy, str):
                    unusable[alias] = strategy
                    continue
                candidate = value_or_reason(partial(self._fitting, alias, strategy, cases, limit))
                if isinstance(candidate, Candidate):
                    fitting.append(candidate)
                    divided |= {} if offer is None else {alias: offer}
                else:
                    refused[alias] = _closer(refused.get(alias), candidate)
            fastest = [one for one in in_order(fitting, preferences) if one.strategy in divided][:_WITH_SIMILAR]
            candidates += [*fitting, *self._similar(fastest, divided, cases, limit, refused)]
        # What fits in one of the precisions is neither refused nor unusable.
        names = {one.strategy for one in candidates}
        refused = {name: reason for name, reason in refused.items() if name not in names}
        unusable = {name: reason for name, reason in unusable.items() if name not in names | refused.keys()}
        ranked = _distinct(in_order(candidates, preferences))
        return LayoutRanking(candidates=tuple(ranked), refused=refused, unusable=unusable)

    def _similar(
        self,
        fastest: Sequence[Candidate],
        offers: Mapping[str, Offer],
        cases: Cases,
        limit: float,
        refused: dict[str, str | TooLarge],
    ) -> Iterator[Candidate]:
        """Yield the layouts like the fastest ones that fit; refuse those of a strategy that does not name them."""
        compared = set(offers)
        for one in fastest:
            offer, options = offers[one.strategy], parse_alias(one.strategy).options
            strategy_class = self._catalog.load(offer)
            similar = value_or_reason(partial(strategy_class.similar_options, options, one.training.module))
            if isinstance(similar, str):
                refused[f"layouts like {one.strategy}"] = similar
                continue
            if not similar:
                continue
            names = [f"{one.alias}{options_text(each)}" for each in similar]
            for name, (_, make_strategy) in zip(names, cases.strategies(names), strict=True):
                strategy = value_or_reason(make_strategy)
                if name not in compared and not isinstance(strategy, str):
                    compared.add(name)
                    candidate = value_or_reason(partial(self._fitting, name, strategy, cases, limit))
                    if isinstance(candidate, Candidate):
                        yield candidate

    def _check_training(self) -> None:
        errors: list[DstratError] = []
        for precision in self._workload.precisions:
            cases = self._cases(precision)
            plugin = cases.new_precision()
            try:
                self._sizes_with(plugin, cases.new_precision, None, plugin.param_dtype).of_training()
            except DstratError as error:
                errors.append(error)
        if len(errors) == len(self._workload.precisions):
            raise errors[0]

    def _cases(self, precision: str) -> Cases:
        workload = self._workload
        return Cases(
            self._catalog, workload.machine.device_type, workload.ranks_per_machine, workload.num_nodes, precision
        )

    def _strategies(
        self, cases: Cases, aliases: Sequence[str], refused: dict[str, str | TooLarge]
    ) -> Iterator[tuple[str, Callable[[], Strategy], Offer | None]]:
        """Yield the layouts, each with a function that constructs its strategy; refuse those that must be named.

        Those with options that the strategy has chosen come with its offer.
        """
        for offer, make_strategy in cases.strategies(aliases):
            alias = self._catalog.name_of(offer)
            reason = offer.component.legacy or offer.component.approximation
            if reason and not aliases:
                refused[alias] = f"{reason} (--strategy compares it)"
                continue
            if offer.options or self._catalog.missing_requirements(offer):
                yield alias, make_strategy, None
                continue
            layouts = value_or_reason(partial(self._layout_options, offer, cases))
            if isinstance(layouts, str):
                refused[alias] = _closer(refused.get(alias), layouts)
                continue
            names = [f"{alias}{options_text(options)}" for options in layouts]
            for name, (_, make_layout) in zip(names, cases.strategies(names), strict=True):
                yield name, make_layout, offer

    def _layout_options(self, offer: Offer, cases: Cases) -> list[Mapping[str, Any]]:
        precision = cases.new_precision()
        sizes = self._sizes_with(precision, cases.new_precision, None, precision.param_dtype)
        module, workload = sizes.of_training().module, self._workload
        strategy_class = self._catalog.load(offer)
        try:
            layouts: Sequence[Mapping[str, Any]] = strategy_class.layout_options(
                module, workload.devices, workload.ranks_per_machine
            )
        except DstratError:
            raise
        except Exception as error:  # of a strategy of anyone, or a hook of the module: others are compared all the same
            raise RequestError(f"its layout_options raised {type(error).__name__}: {error}") from error
        parameters = [*inspect.signature(strategy_class).parameters.values()]

        def accepts(options: Mapping[str, Any]) -> bool:
            """Return whether the constructor has options that a subclass has inherited the layouts of, but may lack."""
            return value_or_reason(partial(check_keywords, parameters, options, offer.title)) is None

        # Another alias presets an option differently.
        presets = offer.component.options.keys()
        return [options for options in layouts if not options.keys() & presets and accepts(options)]

    def _fitting(self, alias: str, strategy: Strategy, cases: Cases, limit: float) -> Candidate | TooLarge:
        """Return the candidate with the fewest batches of a step that fits, or the memory that it needs at least.

        Args:
            alias: Alias with its options.
            strategy: The strategy.
            cases: The precision.
            limit: Most memory that a rank may need, in bytes.

        Raises:
            DstratError: The strategy cannot train so, or does not say what it needs.
        """
        if (alias, cases.precision) not in self._layouts:
            self._layouts[alias, cases.precision] = self._layouts_of(strategy, cases)
        layouts = self._layouts[alias, cases.precision]
        first, last = layouts[0], layouts[-1]
        if first.problem is not None:
            raise RequestError(first.problem)
        # More batches need less memory, but for the second one, with which gradients are accumulated.
        smallest, host_memory = 0, self._workload.machine.host_memory

        def fits(layout: _Layout) -> bool:
            return layout.peak <= limit and host_problem(layout.host, host_memory) is None

        if not fits(first):
            # Of a module that cannot train on one sample it is not known.
            may_fit = value_or_reason(lambda: fits(last)) is not False
            smallest = bisect_left(layouts, True, 1, key=fits) if may_fit else len(layouts)
        problem = "a step has no sample"
        if smallest < len(layouts):
            fitting = layouts[smallest]
            if fitting.problem is not None:
                problem = fitting.problem
            else:
                return Candidate(
                    strategy=alias,
                    precision=cases.precision,
                    training=fitting.training,
                    memory=fitting.memory,
                    communication=fitting.communication,
                    peak=fitting.peak,
                    host=fitting.host,
                    time=step_time(self._workload.machine, fitting.training, fitting.memory, fitting.communication),
                )
        # Smaller batches were tried for their memory only.
        for layout in reversed(layouts[:smallest]):
            if layout.problem is None:
                # Without gradients that are accumulated, the largest batch may need less.
                least = min(layout, first, key=lambda one: one.peak)
                too_large = host_problem(layout.host, host_memory) if least.peak <= limit else None
                if too_large is None:
                    return _too_large(least)
                raise RequestError(f"{too_large}, with batches of {layout.training.batch_size}")
        raise RequestError(problem)

    def _layouts_of(self, strategy: Strategy, cases: Cases) -> list[_Layout]:
        """Return the layouts with batches of a rank from the largest to one sample.

        Raises:
            DstratError: The strategy does not say what it needs, or the samples do not divide.
        """
        workload = self._workload

        def make_precision() -> Precision:
            return strategy.precision_for(cases.precision) or cases.new_precision()

        precision = make_precision()
        saved, forward_dtype = strategy.saved_activations, strategy.forward_dtype(precision)
        sizes = self._sizes_with(precision, make_precision, saved, forward_dtype)
        first = dataclasses.replace(sizes.of_training(), precision=precision)
        communication = strategy.communication_layout(first)
        groups = workload.devices // (1 if communication is None else communication.ranks_per_batch)
        batch_size = workload.batch_size or first.batch_size * workload.devices
        if batch_size % groups:
            raise RequestError(f"{batch_size} samples do not divide among {groups} groups of ranks")
        of_group = batch_size // groups
        if not of_group:
            raise RequestError("a step has no sample: give --batch, or a batch whose tensors have a first dimension")
        return [
            _Layout(strategy=strategy, sizes=sizes, precision=precision, batch_size=of_group // count, batches=count)
            for count in range(1, of_group + 1)
            if of_group % count == 0
        ]

    def _sizes_with(
        self,
        precision: Precision,
        make_precision: Callable[[], Precision],
        saved: SavedActivations | None,
        forward_dtype: torch.dtype,
    ) -> TrainingSizes:
        """Return the sizes of the training, which depend on a precision by its dtypes only."""
        workload, dtypes = self._workload, (precision.param_dtype, precision.compute_dtype, forward_dtype)

        def measure(batch_size: int | None) -> TrainingSize:
            size = measure_factory(
                workload.model,
                workload.machine.device_type,
                workload.ranks_per_machine,
                workload.num_nodes,
                batch_size,
                make_precision(),
                saved,
                forward_dtype,
                same_optimizers=self._stepped.get(precision.param_dtype),
            )
            self._stepped.setdefault(precision.param_dtype, size)
            return size

        usual = None if saved is None else self._sizes.get((dtypes, None))
        return self._sizes.setdefault((dtypes, saved), TrainingSizes(measure, usual))


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """A layout with one batch size; computed when it is needed.

    Attributes:
        strategy: The strategy.
        sizes: Sizes of the training.
        precision: The precision.
        batch_size: Number of samples of a batch.
        batches: Number of batches of a step.
    """

    strategy: Strategy
    sizes: TrainingSizes
    precision: Precision
    batch_size: int
    batches: int

    @cached_property
    def training(self) -> TrainingSize:
        size = self.sizes.of(self.batch_size).for_steps_of(self.batches)
        return dataclasses.replace(size, precision=self.precision)

    @cached_property
    def problem(self) -> str | None:
        """Why the strategy cannot train so; None if it can."""
        return value_or_reason(partial(self.strategy.check_training, self.training))

    @cached_property
    def of_ranks(self) -> list[RankMemory]:
        return memory_of_ranks(self.strategy, self.training)

    @cached_property
    def fullest(self) -> RankMemory:
        """Memory of the rank that needs most."""
        return _declared(max(self.of_ranks, key=lambda one: one.peak, default=None), "memory_layout")

    @property
    def memory(self) -> MemoryLayout:
        return self.fullest.memory

    @cached_property
    def communication(self) -> CommunicationLayout:
        return _declared(self.strategy.communication_layout(self.training), "communication_layout")

    @property
    def peak(self) -> int:
        return self.fullest.peak

    @cached_property
    def host(self) -> int:
        return host_of_machine(self.of_ranks, self.training.ranks_per_machine)


def _declared(layout: T | None, name: str) -> T:
    if layout is None:
        raise RequestError(f"it does not declare its {name}")
    return layout


def _preference(offer: Offer) -> tuple[int, int]:
    """Return a key that is smaller for strategies that are chosen automatically, and for those that need no library."""
    component = offer.component
    return -(component.auto or 0), len(component.requires)


def value_or_reason(function: Callable[[], T]) -> T | str:
    """Return the result of a function, or the text of its error."""
    try:
        return function()
    except DstratError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - of a strategy of anyone, or a hook of the module: others are compared
        return f"it raised {type(error).__name__}: {error}"


def host_problem(host: int, memory: int | None) -> str | None:
    """Return why the ranks of a machine need more than most of the memory of its host; None if they do not.

    Args:
        host: What its ranks have on the host, in bytes.
        memory: Memory of the host; None if it is not known.
    """
    if memory is None or host <= MOST_OF_MEMORY * memory:
        return None
    limit = f"{MOST_OF_MEMORY:.0%} of its {memory / 2**30:.1f} GiB are {MOST_OF_MEMORY * memory / 2**30:.1f}"
    return f"all ranks of a machine need {host / 2**30:.1f} GiB of its host, and {limit}"


def _closer(first: str | TooLarge | None, second: str | TooLarge) -> str | TooLarge:
    """Return the reason, of those in two precisions, that is closer to what fits."""
    if isinstance(first, TooLarge) and not (isinstance(second, TooLarge) and second.peak < first.peak):
        return first
    return second


def _too_large(layout: _Layout) -> TooLarge:
    memory = layout.memory
    return TooLarge(
        peak=layout.peak,
        batch_size=layout.training.batch_size,
        sizes={
            "parameters": memory.parameters,
            "gradients": max(memory.gradients, memory.accumulated),
            "optimizer": memory.optimizer_state,
            "activations": layout.fullest.activations,
            "other": memory.buffers + max(memory.step_buffers + memory.reduction_buffer, memory.optimizer_temporaries),
        },
    )


def in_order(candidates: Iterable[Candidate], preferences: Mapping[str, tuple[int, int]]) -> Iterator[Candidate]:
    """Yield candidates from the fastest on; among those that take as long the usual and simple ones, which need less.

    Those that offload are last of these: what they save in memory is a reason only where the others do not fit.

    Args:
        candidates: The candidates.
        preferences: Sort keys of the strategies, by alias.
    """

    def key(one: Candidate) -> tuple[Any, ...]:
        offloads = one.time.offload > 0
        return offloads, preferences.get(one.alias, (0, 0)), len(parse_alias(one.strategy).options), one.peak

    remaining = sorted(candidates, key=lambda one: one.time.total)
    while remaining:
        equal = [one for one in remaining if one.time.total <= (1 + SAME_TIME) * remaining[0].time.total]
        remaining = remaining[len(equal) :]
        yield from sorted(equal, key=key)


def undominated(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that need less memory than all layouts of the same strategy before them."""
    smallest: dict[str, int] = {}
    remaining = []
    for one in candidates:
        if one.peak < smallest.get(one.alias, one.peak + 1):
            smallest[one.alias] = one.peak
            remaining.append(one)
    return remaining


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the first candidate of those with the same memory, communication and time, such as variants of one."""
    first: dict[Any, Candidate] = {}
    for one in candidates:
        key = (
            one.precision,
            one.memory,
            one.communication,
            one.training.batch_size,
            one.training.accumulate_grad_batches,
            one.peak,
            one.time,
        )
        first.setdefault(key, one)
    return [*first.values()]

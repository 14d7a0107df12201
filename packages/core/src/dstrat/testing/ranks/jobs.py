"""Functions run in several ranks: a value from each, or a report of the failure.

A custom test uses them as the kit does::

    def mean(rank_context, numbers):
        with open_strategy(rank_context, subject) as strategy: ...


    run_job(mean, 2, numbers=[1, 2])

The function is at the top of a module that the ranks can import.  It gets a
:class:`~dstrat.testing.ranks.team.RankContext`, whose ``cluster`` is the cluster environment for a strategy, and the
arguments, which must pickle.  :func:`run_ranks` is for tests in which ranks may fail: it returns the
:class:`~dstrat.testing.ranks.team.RankResult` of each, which :func:`primary_failure`, :func:`describe_end` and
:func:`format_failure` describe.
"""

from __future__ import annotations

import atexit
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dstrat.errors import CatalogError
from dstrat.plugins.catalog import get_catalog
from dstrat.resolve import Request, resolve_request
from dstrat.testing.plugin import constructor_parameters
from dstrat.testing.ranks.team import SECONDS_AFTER_FAILURE, RankResult, Team
from dstrat.testing.suite import fail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.component import Component
    from dstrat.testing.ranks.team import RankContext
    from dstrat.training.module.train_module import TrainModule


DEFAULT_SECONDS = 60.0
_teams: dict[tuple[str, int], Team] = {}


def run_job(
    function: Callable[..., Any], world_size: int, *, seconds: float = DEFAULT_SECONDS, **arguments: Any
) -> list[Any]:
    """Return what the function returned in each of some new ranks; fail the test where one raised, died or hung.

    Args:
        function: At the top of a module; it gets a RankContext and the arguments.
        world_size: Number of ranks.
        seconds: How long the job may take on an idle machine; it may take longer where the machine is busy.
        **arguments: Passed to the function; they must pickle.
    """
    __tracebackhide__ = True
    return _values(run_ranks(function, world_size, seconds=seconds, arguments=arguments), seconds)


def run_in_team(
    function: Callable[..., Any],
    world_size: int,
    *,
    seconds: float = DEFAULT_SECONDS,
    team: str = "cpu",
    **arguments: Any,
) -> list[Any]:
    """Do the same in reused ranks, which takes a fraction of the time.

    Where one fails the function runs once more in new ranks, and that result counts.

    Args:
        function: At the top of a module; it gets a RankContext and the arguments.
        world_size: Number of ranks.
        seconds: How long the job may take on an idle machine; it may take longer where the machine is busy.
        team: Functions of different teams never run in the same ranks.
        **arguments: Passed to the function; they must pickle.
    """
    __tracebackhide__ = True
    return _values(_ended_in_team(function, (team, world_size), seconds, arguments), seconds)


def run_ranks(
    function: Callable[..., Any], world_size: int, *, seconds: float, arguments: dict[str, Any]
) -> list[RankResult]:
    """Run a function in new ranks; return how each ended."""
    team = Team(world_size)
    try:
        return team.run(function, seconds=seconds, arguments=arguments)
    finally:
        team.close()


@atexit.register
def end_teams() -> None:
    """End the ranks that wait for another function."""
    while _teams:
        _teams.popitem()[1].close()


def primary_failure(ended: Sequence[RankResult]) -> RankResult | None:
    """Return the failure that most probably caused all others; None where no rank failed."""
    return min((end for end in ended if end.has_failed), key=_failure_order, default=None)


def describe_end(end: RankResult, seconds: float) -> str:
    """Describe in a few words how a rank failed."""
    if end.report is not None:
        return f"raised {end.report.headline}"
    if end.exit_code is None:
        after_failure = f"{SECONDS_AFTER_FAILURE:.0f} s after another rank had failed"
        return f"did not return in {seconds:.0f} s of an idle machine, or in {after_failure}, and was killed"
    return f"died with exit code {end.exit_code}"


def format_failure(end: RankResult) -> str:
    """Return the lines that show why a rank failed."""
    if end.report is not None:
        lines = end.report.failure.splitlines()
        return "\n".join(line for line in lines if line.strip(" ~^"))  # without marks below lines of code
    return end.stack or end.output[-2000:]


def _failure_order(end: RankResult) -> tuple[int, int]:
    """Return a sort key of failures: a rank's own first, then those without a report, then lost connections."""
    if end.report is None:
        return (1, 0)
    return (0 if end.report.kind == "error" else 2, end.report.time_ns)


def _values(ended: Sequence[RankResult], seconds: float) -> list[Any]:
    __tracebackhide__ = True
    failure = primary_failure(ended)
    if failure is not None:
        fail(f"rank {failure.rank} of {len(ended)} {describe_end(failure, seconds)}", details=format_failure(failure))
    return [end.report.value for end in ended if end.report is not None]


def _ended_in_team(
    function: Callable[..., Any], key: tuple[str, int], seconds: float, arguments: dict[str, Any]
) -> list[RankResult]:
    has_waited = key in _teams
    team = _teams.pop(key) if has_waited else Team(key[1])  # back only if it can run another function
    try:
        ended = team.run(function, seconds=seconds, arguments=arguments)
    except BaseException:  # its ranks would wait for ever, and this process at its exit for them
        team.close()
        raise
    if team.is_as_before:
        _teams[key] = team
        return ended
    team.close()
    has_failed = primary_failure(ended) is not None
    # In used ranks the cause may be what another function has left there.
    return _ended_in_team(function, key, seconds, arguments) if has_failed and has_waited else ended


# The tested component, as it is sent to ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A strategy, by its record rather than by its class, so that it can be sent to ranks that have not imported it.

    Attributes:
        component: The record.
        options: Constructor arguments, beside those of the record.
        devices_per_process: Devices that each process drives.
        configure_model: What the module does in its ``configure_model``, such as splitting layers.
    """

    component: Component
    options: Mapping[str, Any] = field(default_factory=dict)
    devices_per_process: int = 1
    configure_model: Callable[[TrainModule], None] | None = None

    @property
    def key(self) -> str:
        """A text that identifies it."""
        return repr(self)

    def with_options(self, **options: Any) -> Subject:
        """Return the same strategy with further constructor arguments."""
        return replace(self, options={**self.options, **options})

    def takes(self, name: str) -> bool:
        """Return whether the constructor has such an argument."""
        return name in self.component.options or name in constructor_parameters(self.cls)

    @property
    def cls(self) -> type[Any]:
        """The class; it is imported."""
        catalog = get_catalog()
        try:
            return catalog.load(catalog.find(self.component.kind, self.component.alias))
        except CatalogError:
            return catalog.load(catalog.register(self.component, override=True))

    @property
    def replicates_state(self) -> bool:
        """Whether each rank holds the whole state; with some strategies it depends on their options."""
        return bool(self.make().replicates_state)

    def make(self) -> Any:
        """Construct the strategy."""
        return self.cls(**{**self.component.options, **self.options})


# A strategy in a rank, with the components that the Trainer would give it


def build_strategy(
    rank_context: RankContext,
    subject: Subject,
    accelerator: str = "cpu",
    precision: str = "32-true",
    plugins: tuple[Any, ...] = (),
) -> Strategy:
    """Return the strategy with all its components, before any communication is opened."""
    cluster = (rank_context.cluster,) if subject.component.starts_processes else ()
    request = Request(
        strategy=subject.make(),
        accelerator=accelerator,
        devices=rank_context.world_size * subject.devices_per_process,
        precision=precision,
        plugins=(*cluster, *plugins),
    )
    return resolve_request(request)[1]


@contextmanager
def open_strategy(
    rank_context: RankContext, subject: Subject, accelerator: str = "cpu", plugins: tuple[Any, ...] = ()
) -> Iterator[Strategy]:
    """Open the communication of a strategy, and close it afterwards."""
    strategy = build_strategy(rank_context, subject, accelerator, plugins=plugins)
    strategy.setup_environment()
    try:
        yield strategy
    finally:
        strategy.teardown()

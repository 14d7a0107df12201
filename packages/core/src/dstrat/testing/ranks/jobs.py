"""Functions run in several ranks: a value from each, or advice on what went wrong.

A test of one's own does the same as the kit::

    def mean(place, numbers):
        with opened(place, subject) as strategy: ...


    run_job(mean, 2, numbers=[1, 2])

A function is at the top of a module that the ranks can import.  It gets a
:class:`~dstrat.testing.ranks.team.Place`, whose ``cluster`` is the cluster environment to give to a strategy, and the
arguments, which must pickle.  :func:`run_ranks`
is for tests in which ranks may fail: it returns how each ended, and :func:`first_culprit`, :func:`what_happened` and
:func:`story` say it in words.
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
from dstrat.testing.ranks.team import Ended, Team
from dstrat.testing.suite import fail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.component import Component
    from dstrat.testing.ranks.team import Place
    from dstrat.training.module.train_module import TrainModule


DEFAULT_SECONDS = 60.0
_teams: dict[tuple[str, int], Team] = {}


def run_job(
    function: Callable[..., Any], world_size: int, *, seconds: float = DEFAULT_SECONDS, **arguments: Any
) -> list[Any]:
    """Return what the function returned in each of some new ranks; fail the test where one raised, died or hung.

    Args:
        function: At the top of a module; it gets a Place and the arguments.
        world_size: Ranks.
        seconds: How long the job may take.
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
    """Do the same in ranks that may have run other functions, and that stay for more; it takes a fraction of the time.

    Where one fails the function runs once more in new ranks, and what comes of that counts.

    Args:
        function: At the top of a module; it gets a Place and the arguments.
        world_size: Ranks.
        seconds: How long the job may take.
        team: Functions of different teams never run in the same ranks.
        **arguments: Passed to the function; they must pickle.
    """
    __tracebackhide__ = True
    return _values(_ended_in_team(function, (team, world_size), seconds, arguments), seconds)


def run_ranks(
    function: Callable[..., Any], world_size: int, *, seconds: float, arguments: dict[str, Any]
) -> list[Ended]:
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


def first_culprit(ended: Sequence[Ended]) -> Ended | None:
    """Return the rank that most probably caused the failure of all others; None where all have ended well."""
    return min((end for end in ended if end.has_failed), key=_remoteness, default=None)


def what_happened(end: Ended, seconds: float) -> str:
    """Say how a rank failed, in a few words."""
    if end.report is not None:
        return f"raised {end.report.headline}"
    if end.exit_code is None:
        return f"was not done after {seconds:.0f} s, and had to be ended"
    return f"died with exit code {end.exit_code}"


def format_failure(end: Ended) -> str:
    """Return the lines that show why a rank failed."""
    if end.report is not None:
        lines = end.report.failure.splitlines()
        return "\n".join(line for line in lines if line.strip(" ~^"))  # without marks below lines of code
    return end.stack or end.output[-2000:]


def _remoteness(end: Ended) -> tuple[int, int]:
    """Order failures: a rank's own first, then those without a word, then those that follow from another's."""
    if end.report is None:
        return (1, 0)
    return (0 if end.report.kind == "error" else 2, end.report.time_ns)


def _values(ended: Sequence[Ended], seconds: float) -> list[Any]:
    __tracebackhide__ = True
    culprit = first_culprit(ended)
    if culprit is not None:
        fail(f"rank {culprit.rank} of {len(ended)} {what_happened(culprit, seconds)}", details=format_failure(culprit))
    return [end.report.value for end in ended if end.report is not None]


def _ended_in_team(
    function: Callable[..., Any], key: tuple[str, int], seconds: float, arguments: dict[str, Any]
) -> list[Ended]:
    has_waited = key in _teams
    team = _teams.pop(key) if has_waited else Team(key[1])
    try:
        ended = team.run(function, seconds=seconds, arguments=arguments)
    except BaseException:  # its ranks would wait for ever, and this process at its exit for them
        team.close()
        raise
    if team.is_as_before:
        _teams[key] = team
        return ended
    team.close()
    has_failed = first_culprit(ended) is not None
    return _ended_in_team(function, key, seconds, arguments) if has_failed and has_waited else ended


# The component that is tested, as its ranks get it.


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A strategy, by its record rather than by its class, so that it can be sent to ranks that know nothing yet.

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
        """Tells it from others."""
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


# A strategy that is ready to communicate in a rank, with the parts that the Trainer would give it.


def built(
    place: Place, subject: Subject, accelerator: str = "cpu", precision: str = "32-true", plugins: tuple[Any, ...] = ()
) -> Strategy:
    """Return the strategy with all its parts; nothing is opened yet."""
    cluster = (place.cluster,) if subject.component.starts_processes else ()
    request = Request(
        strategy=subject.make(),
        accelerator=accelerator,
        devices=place.world_size * subject.devices_per_process,
        precision=precision,
        plugins=(*cluster, *plugins),
    )
    return resolve_request(request)[1]


@contextmanager
def opened(
    place: Place, subject: Subject, accelerator: str = "cpu", plugins: tuple[Any, ...] = ()
) -> Iterator[Strategy]:
    """Give a strategy whose ranks can communicate, and close it."""
    strategy = built(place, subject, accelerator, plugins=plugins)
    strategy.setup_environment()
    try:
        yield strategy
    finally:
        strategy.teardown()

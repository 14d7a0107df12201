"""Base of the strategy suite: the strategy, its declarations, jobs of ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pytest

from dstrat.testing.ranks import communication
from dstrat.testing.ranks.jobs import DEFAULT_SECONDS, Subject, end_teams, run_in_team, run_job
from dstrat.testing.ranks.team import begin_loading
from dstrat.testing.suite import Suite, not_declared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dstrat.testing.ranks.team import RankContext
    from dstrat.training.module.train_module import TrainModule

T = TypeVar("T")

_USUAL_PRECISIONS = ("64-true", "bf16-mixed")

_PAIR = 2

_shared: dict[str, Any] = {}  # results of jobs, of all test classes: their keys name the strategy and its options


class StrategyTests(Suite):
    """The base of the strategy suite, with the declarations that a record does not have.

    Attributes:
        world_sizes: Numbers of processes to try.
        accelerator: Where everything runs.
        devices_per_process: Devices that each process drives.
        environ: Environment variables that ranks set before they run anything, such as those of a simulator; libraries
            that ranks have loaded by then have read theirs before.  ``{job}`` in a value is another number for each
            team of ranks, which stays for many tests: such as for the folder of simulated devices that processes hold.
        gives_losses_of_one_device: Whether the training is that of one device with the same global batches; not so for
            an algorithm that lets its ranks drift apart.
        is_deterministic: Whether the same training gives the same values again; not so for an algorithm whose exchanges
            depend on time.  It implies that a training that resumes equals one that never stopped.
        needs_even_batches: Why the strategy cannot train on batches and groups of different sizes; empty if it can.
        tolerance: Largest relative difference of losses.
        seconds: How long a job of a few steps may take on an idle machine.
    """

    kind = "strategy"
    settings = Suite.settings | {
        "accelerator",
        "configure_model",
        "devices_per_process",
        "environ",
        "gives_losses_of_one_device",
        "is_deterministic",
        "needs_even_batches",
        "seconds",
        "tolerance",
        "world_sizes",
    }

    world_sizes: ClassVar[tuple[int, ...]] = (1, 2, 4)
    accelerator: ClassVar[str] = "cpu"
    devices_per_process: ClassVar[int] = 1
    environ: ClassVar[Mapping[str, str]] = {}
    gives_losses_of_one_device: ClassVar[bool] = True
    is_deterministic: ClassVar[bool] = True
    needs_even_batches: ClassVar[str] = ""
    tolerance: ClassVar[float] = 1e-5
    seconds: ClassVar[float] = DEFAULT_SECONDS

    @staticmethod
    def configure_model(module: TrainModule) -> None:
        """Do what a module does in its ``configure_model``, as a static method; for strategies that split layers."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Try each number of processes that the author declares."""
        super().pytest_generate_tests(metafunc)
        if "world_size" in metafunc.fixturenames:
            metafunc.parametrize("world_size", metafunc.cls.world_sizes)
        # Without several processes, one case that need_processes skips: no case at all would be skipped by pytest,
        # without the reason.
        several = [size for size in metafunc.cls.world_sizes if size > 1] or [_PAIR]
        if "several" in metafunc.fixturenames:
            metafunc.parametrize("several", several)
        if "pair" in metafunc.fixturenames:
            metafunc.parametrize("pair", several[:1])
        if "checkpoint_format" in metafunc.fixturenames:
            metafunc.parametrize("checkpoint_format", ("portable", "torch"))
        if "precision" in metafunc.fixturenames:
            metafunc.parametrize("precision", metafunc.cls().component.precisions or _USUAL_PRECISIONS)

    @property
    def subject(self) -> Subject:
        """The strategy that is tested, as ranks get it."""
        configure = type(self).configure_model
        return Subject(
            component=self.component,
            options=dict(self.options),
            devices_per_process=self.devices_per_process,
            # None, where it is not the author's: ranks would set device_mesh for it.
            configure_model=None if configure is StrategyTests.configure_model else configure,
        )

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _teams(cls) -> Iterator[None]:
        begin_loading(cls().component.target_name.partition(":")[0])  # in the background, while the first tests run
        yield
        end_teams()

    def job(
        self, function: Callable[..., T], world_size: int, *, needs_new_ranks: bool = False, **arguments: Any
    ) -> list[T]:
        """Return the value of a function in each rank; skip the test where the strategy cannot have so many."""
        __tracebackhide__ = True
        self.need_processes(world_size)
        team = self.accelerator
        if self.environ:
            team = f"{team} {dict(self.environ)}"  # ranks keep what they have set, so that others run no test in them
            arguments = {"task": function, "environ": dict(self.environ), "arguments": arguments}
            function = run_with_environ
        if needs_new_ranks:
            return run_job(function, world_size, seconds=self.seconds, **arguments)
        return run_in_team(function, world_size, seconds=self.seconds, team=team, **arguments)

    def shared_job(self, function: Callable[..., T], world_size: int, **arguments: Any) -> list[T]:
        """Return the cached values of a job, which runs once for all tests."""
        __tracebackhide__ = True
        return _shared_result(f"{_key(function, arguments)} {world_size}", self.job, function, world_size, arguments)

    def reference_job(self, function: Callable[..., T], **arguments: Any) -> T:
        """Return the cached value of a function on one device."""
        # On the CPU, in a rank of its own: torch looks for devices in its first backward pass, and some accelerators
        # cannot be used after it.
        __tracebackhide__ = True
        result: T = _shared_result(f"{_key(function, arguments)} reference", run_in_team, function, 1, arguments)[0]
        return result

    def collected(self, name: str, world_size: int) -> list[Any]:
        """Return the cached values of a function of the module ``communication``, one per rank."""
        __tracebackhide__ = True
        self.need_processes(world_size)
        return self.shared_job(
            getattr(communication, name), world_size, subject=self.subject, accelerator=self.accelerator
        )

    def readers(self, world_size: int) -> int:
        """Return the number of ranks that read different data."""
        __tracebackhide__ = True
        readers: int = self.collected("positions", world_size)[0]["sampler"].get("num_replicas", 1)
        return readers

    @property
    def fewest(self) -> int:
        """The smallest number of processes that the author declares."""
        return min(self.world_sizes)

    def need_processes(self, world_size: int) -> None:
        """Skip the test where the record does not allow this number of processes."""
        facts = self.component
        if world_size not in {1, *self.world_sizes}:
            not_declared(f"{type(self).__name__} declares world_sizes = {self.world_sizes}")
        if world_size > 1 and not facts.starts_processes:
            not_declared(f"{self.alias} runs in one process (starts_processes=False)")
        if facts.max_devices is not None and world_size > facts.max_devices:
            not_declared(f"{self.alias} uses at most {facts.max_devices} devices (max_devices)")

    def need_losses_of_one_device(self) -> None:
        """Skip the test where the strategy declares another algorithm."""
        if not self.gives_losses_of_one_device:
            not_declared(f"{self.alias} declares gives_losses_of_one_device = False")

    def need_determinism(self) -> None:
        """Skip the test where two equal trainings may differ."""
        if not self.is_deterministic:
            not_declared(f"{self.alias} declares is_deterministic = False")


def run_with_environ(
    rank_context: RankContext, task: Callable[..., T], environ: dict[str, str], arguments: dict[str, Any]
) -> T:
    """Run a function in a rank that has these environment variables."""
    job = str(rank_context.cluster.main_port)
    os.environ.update({name: value.replace("{job}", job) for name, value in environ.items()})
    return task(rank_context, **arguments)


def _key(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    return f"{function.__module__}.{function.__qualname__} {arguments}"


def _shared_result(
    key: str, run: Callable[..., list[T]], function: Callable[..., T], world_size: int, arguments: dict[str, Any]
) -> list[T]:
    """Return the cached result of a job, which runs once per key."""
    __tracebackhide__ = True
    if key not in _shared:
        try:
            _shared[key] = run(function, world_size, **arguments)
        except pytest.fail.Exception as failure:  # so that what hangs is waited for once
            _shared[key] = failure
    result: list[T] | BaseException = _shared[key]
    if isinstance(result, BaseException):
        raise result
    return result

"""Running a suite without a test file, or from one, and what came of each standard test."""

from __future__ import annotations

import contextlib
import io
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from dstrat.errors import RequestError
from dstrat.testing.suite import CAPABILITIES, Suite, standard_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dstrat.plugins.component import Kind
    from dstrat.testing.suite import Standard, Tier

Outcome = Literal["passed", "failed", "expected failure", "not declared"]

_SUITES: dict[Kind, str] = {
    "strategy": "StrategySuite",
    "accelerator": "AcceleratorSuite",
    "precision": "PrecisionSuite",
    "checkpoint_io": "CheckpointIOSuite",
    "cluster_environment": "ClusterEnvironmentSuite",
    "launcher": "LauncherSuite",
}
_FILE = """
from dstrat.testing import {suite}


class Test({suite}):
    alias = {alias!r}
"""
_NEVER_RUN = (
    "it was not run: the project of the test file deselects it, in a conftest.py or in pytest's addopts; take that away"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of one standard test in one case.

    Attributes:
        name: The test, with its case in brackets.
        tier: What it needs.
        capability: What it proves.
        outcome: How it ended; "not declared" is skipped, as the component does not declare what it proves.
        message: The advice of a failure, or the reason why it was expected or skipped.
        seconds: How long it took.
    """

    name: str
    tier: Tier
    capability: str
    outcome: Outcome
    message: str
    seconds: float


def run_suite(
    kind: Kind,
    alias: str,
    *,
    tiers: Collection[str],
    path: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """Run the standard tests of a component.

    Args:
        kind: What it is.
        alias: Its name.
        tiers: Which tests.
        path: The author's test file or folder, with what it declares; None declares nothing.
        on_progress: Called after each test with the number of tests done and of all tests.

    Raises:
        RequestError: The file has no test class for the alias, or cannot be collected.
    """
    collector = _Collector(alias, tiers, on_progress or (lambda _done, _total: None))
    with tempfile.TemporaryDirectory(prefix="dstrat_test_") as folder:
        file = Path(folder) / f"{Path(folder).name}.py"  # a name that no earlier run has imported
        file.write_text(_FILE.format(suite=_SUITES[kind], alias=alias))
        settings = Path(folder) / "pytest.ini"  # an empty one, so that no project above is configured
        settings.write_text("[pytest]\n")
        isolation = ["--rootdir", folder, "-c", str(settings), "--import-mode=importlib"] if path is None else []
        # An author's project keeps its settings, which its test file may need, but for those that would run fewer
        # tests, or in other processes than that of the collector.
        undone = ["-k", "", "-m", "", "--maxfail=0", "-o", "python_functions=test"]
        undone += ["--numprocesses=0"] if find_spec("xdist") else []
        arguments = [str(path or file), *isolation, "-p", "no:cacheprovider", *undone]
        # Not -p no:terminal: without that plugin pytest would refuse options of it in a project's addopts, such as -ra.
        with contextlib.redirect_stdout(io.StringIO()):
            code = pytest.main(arguments, plugins=[collector])
    if code == pytest.ExitCode.USAGE_ERROR:
        raise RequestError(f"pytest cannot begin with {path or alias}: what it says is above")
    if collector.errors:  # before INTERRUPTED, with which pytest ends then too
        raise RequestError(f"{path or alias} cannot be collected: {collector.errors[0]}")
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if not collector.tests:
        raise RequestError(f"there is no test class with alias = {alias!r} in {path}: derive one from {_SUITES[kind]}")
    return sorted([*collector.results, *collector.never_run()], key=lambda one: CAPABILITIES.index(one.capability))


class _Collector:
    """A plugin of pytest that selects the standard tests of an alias and records their results."""

    def __init__(self, alias: str, tiers: Collection[str], on_progress: Callable[[int, int], None]) -> None:
        self.alias, self.tiers, self.on_progress = alias, tiers, on_progress
        self.results: list[Result] = []
        self.errors: list[str] = []
        self.tests: dict[str, Standard] = {}
        self._ended: set[str] = set()

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Record the requested tests before any of them is deselected, so that :meth:`never_run` misses none."""
        cls, test = getattr(item, "cls", None), standard_of(getattr(item, "function", None))
        if cls is None or test is None or not issubclass(cls, Suite) or cls.alias != self.alias:
            return
        if test.tier in self.tiers:
            self.tests[item.nodeid] = test

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Select the requested tests, in the order of capabilities."""
        selected = [item for item in items if item.nodeid in self.tests]
        items[:] = sorted(selected, key=lambda item: CAPABILITIES.index(self.tests[item.nodeid].capability))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record an error of collection."""
        if report.failed:
            self.errors.append(str(report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the result of a test: of its call, or of a set-up or teardown that failed or was skipped."""
        if report.when != "call" and report.passed:
            return
        self._ended.add(report.nodeid)
        self.results.append(self._result(report.nodeid, _outcome(report), _message(report), report.duration))
        self.on_progress(len(self.results), len(self.tests))

    def never_run(self) -> list[Result]:
        """Return a failure for each test that was collected and did not run."""
        missing = [nodeid for nodeid in self.tests if nodeid not in self._ended]
        return [self._result(nodeid, "failed", _NEVER_RUN, 0.0) for nodeid in missing]

    def _result(self, nodeid: str, outcome: Outcome, message: str, seconds: float) -> Result:
        test = self.tests[nodeid]
        return Result(
            name=nodeid.rpartition("::")[2],
            tier=test.tier,
            capability=test.capability,
            outcome=outcome,
            message=message,
            seconds=seconds,
        )


def _outcome(report: pytest.TestReport) -> Outcome:
    if hasattr(report, "wasxfail"):  # pytest's sign of an expected failure, which it reports as skipped
        return "failed" if report.passed else "expected failure"
    outcomes: dict[str, Outcome] = {"passed": "passed", "failed": "failed", "skipped": "not declared"}
    return outcomes[report.outcome]


def _message(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail)
    if report.skipped:
        reason: Any = report.longrepr  # of a path, a line, and "NotDeclared: ..."
        return str(reason[2]).partition(": ")[2]
    return str(report.longrepr or "")

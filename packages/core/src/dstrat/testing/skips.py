"""Standard tests are skipped by the kit alone, and a plugin of pytest makes a failure of every other way of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import pytest

from dstrat.errors import MisuseError
from dstrat.testing.standard import check_complete, expected_failure, standard_of

if TYPE_CHECKING:
    from collections.abc import Generator

_SELECTING_MARKS = {"skip", "skipif", "xfail"}
_CURE = 'what fails for a good reason is declared with expected_failures = {"the test": "the reason"}'


class NotDeclared(pytest.skip.Exception):  # type: ignore[name-defined,misc]  # it has no public name of its own
    """A test that is skipped by the kit, as the component does not declare what it proves."""

    __module__ = "builtins"  # as pytest's own, whose summary would show a path here


def not_declared(reason: str) -> NoReturn:
    """End a standard test that does not apply."""
    __tracebackhide__ = True
    raise NotDeclared(reason)


class KeepsStandardTests:
    """The plugin; the first suite that pytest collects registers it, so that an author does nothing for it."""

    def __init__(self) -> None:
        self._checked: set[type] = set()

    @classmethod
    def of(cls, config: pytest.Config) -> KeepsStandardTests:
        """Return the plugin of a run."""
        name = "dstrat-keeps-standard-tests"
        found = config.pluginmanager.get_plugin(name)
        if found is None:
            found = cls()
            config.pluginmanager.register(found, name)
        return found

    def check(self, test: pytest.Function, settings: frozenset[str]) -> None:
        """Refuse a test of a suite whose class, mixins or module would drop it.

        Raises:
            CollectError: It says what to do.
        """
        try:
            if test.cls not in self._checked:  # again, as a class can be changed after it was made
                self._checked.add(test.cls)
                check_complete(test.cls, settings)
            if standard_of(test.function) is not None:
                _check_marks(test)
        except MisuseError as error:
            raise pytest.Collector.CollectError(str(error)) from error

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Turn what somebody else skipped into a failure."""
        report = yield
        if report.skipped and standard_of(getattr(item, "function", None)) is not None:
            by = _somebody_else(item, call)
            if by is not None:
                report.outcome = "failed"
                report.longrepr = f"{by}, and a standard test cannot be skipped: take that away; {_CURE}"
                vars(report).pop("wasxfail", None)
        return report


def _check_marks(test: pytest.Function) -> None:
    for node, mark in test.iter_markers_with_node():
        if mark.name in _SELECTING_MARKS:
            raise MisuseError(
                f"{node.name} is marked {mark.name}, which would drop standard tests of {test.cls.__name__}: "
                f"take the mark away; {_CURE}"
            )


def _somebody_else(item: pytest.Item, call: pytest.CallInfo[None]) -> str | None:
    """Return who ended a test that did not fail; None where the kit did."""
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, NotDeclared):
        return None
    if isinstance(error, pytest.skip.Exception):
        return f"skipped with {error.msg!r}"
    declared = expected_failure(item.cls, item.name)  # type: ignore[attr-defined]  # a standard test has a class
    if isinstance(error, pytest.xfail.Exception) or declared is None:
        return "expected to fail by a mark or a call of pytest.xfail"
    return None

"""Base of every suite: declarations of the author, and checks that no standard test disappears."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeVar

try:
    import pytest
except ImportError as error:
    raise ImportError('dstrat.testing needs pytest: pip install "dstrat[testing]"') from error

from dstrat.errors import CatalogError, MisuseError
from dstrat.plugins.catalog import get_catalog
from dstrat.plugins.facts import declares_all, with_class_facts

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from dstrat.plugins.component import Component, Kind
    from dstrat.plugins.offer import Offer


_EVERY_SETTING = frozenset({"alias", "options", "expected_failures", "pytestmark"})


class Collected(type):
    """The metaclass of suites, which refuses what would stop pytest from collecting one."""

    # Where __test__ is set after a class was made, pytest does not collect it, and so calls no hook of the kit.

    def __setattr__(cls, name: str, value: object) -> None:
        __tracebackhide__ = True
        super().__setattr__(name, value)
        if name == "__test__":
            check_collected(cls)


class Suite(metaclass=Collected):
    """Standard tests of a component.

    A test class derives from the suite of its kind and sets :attr:`alias`.  It may add tests of its own; it cannot
    drop, replace or skip a standard one.

    Attributes:
        alias: The name that users write.
        options: Constructor arguments, beside those that the alias presets.
        expected_failures: Standard tests that fail, and why: ``{"test_x": "reason"}``, or ``{"test_x[2]": "reason"}``
            for one of its cases.  One that passes all the same is a failure.
        kind: What the suite tests.
        settings: Names that a test class may set.
    """

    alias: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    expected_failures: ClassVar[Mapping[str, str]] = {}
    kind: ClassVar[Kind]
    settings: ClassVar[frozenset[str]] = _EVERY_SETTING

    def __init_subclass__(cls, **kwargs: Any) -> None:
        __tracebackhide__ = True
        super().__init_subclass__(**kwargs)
        check_complete(cls, cls.settings)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Check that the test is not dropped; suites also set its cases here."""
        # pytest calls it once for each test of a class, before -k, -m and conftest.py may deselect any.
        KeepsStandardTests.of(metafunc.config).check(metafunc.definition, self.settings)

    @pytest.fixture(autouse=True)
    def _expect_failures(self, request: pytest.FixtureRequest) -> None:
        """Mark a test that is declared to fail."""
        reason = expected_failure(type(self), request.node.name)
        if reason is not None:
            request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    @property
    def offer(self) -> Offer:
        """The component that is tested, and who offers it."""
        if not self.alias:
            raise MisuseError(
                f'{type(self).__name__} tests nothing yet: set alias = "..." to the name that users write'
            )
        return get_catalog().find(self.kind, self.alias)

    @property
    def component(self) -> Component:
        """The record of the component that is tested, with the facts that its class adds."""
        record = self.offer.component
        if declares_all(record):
            return record
        try:
            return with_class_facts(record, get_catalog().load(self.offer))
        except CatalogError:  # the test of the record says why
            return record


# Standard tests, and the check that a test class keeps all of them
#
# No standard test may disappear.  There are four moments at which one can, and each is seen at that moment only:
#
# 1. A class is made: it replaces a test, or has what keeps pytest from collecting it.  __init_subclass__ raises.
# 2. A class is changed later: Collected.__setattr__ sees __test__, KeepsStandardTests.check all the rest.
# 3. pytest collects a test: marks that skip it.  KeepsStandardTests.check makes one error of the file.
# 4. A test runs: a fixture, a set-up or a mark that comes late skips it.  Its report becomes a failure.
#
# What pytest is told on its command line to leave out is left out; only `dstrat test` counts all (run.py).


Tier = Literal["basic", "optional", "processes", "device"]
"""What a test needs: nothing, a declared capability, several processes, or hardware."""

TIERS: tuple[Tier, ...] = ("basic", "optional", "processes", "device")

CAPABILITIES = (
    "record",
    "life cycle",
    "collectives",
    "gradients",
    "training",
    "precision",
    "evaluation",
    "checkpoints",
    "moving",
    "failures",
    "sessions",
    "hardware",
    "devices",
    "random numbers",
    "dtypes",
    "steps",
    "state",
    "round trip",
    "errors",
    "removal",
    "evidence",
    "ranks",
)
"""The capabilities that tests prove, in the order of the table: those that others depend on come first."""

_Test = TypeVar("_Test", bound=Callable[..., None])

_OURS = "dstrat.testing."


@dataclass(frozen=True, kw_only=True, slots=True)
class Standard:
    """The tier and capability of a standard test.

    Attributes:
        tier: What it needs.
        capability: What it proves, as one line of the table names it: ``"collectives"``.
    """

    tier: Tier
    capability: str


def standard(tier: Tier, capability: str) -> Callable[[_Test], _Test]:
    """Mark a method as a standard test."""

    def mark(test: _Test) -> _Test:
        test.standard = Standard(tier=tier, capability=capability)  # type: ignore[attr-defined]  # read again below
        return test

    return mark


def standard_of(test: object) -> Standard | None:
    """Return the mark of a standard test; None for an author's own."""
    return getattr(test, "standard", None)


def standard_tests(cls: type[Any]) -> dict[str, Standard]:
    """Return the standard tests of a suite by name."""
    return {name: test for name, member in _members(cls) if (test := standard_of(member)) is not None}


def check_complete(cls: type[Any], settings: frozenset[str]) -> None:
    """Refuse a test class that drops or replaces standard tests.

    Args:
        cls: Derived from a suite.
        settings: Names that a test class may set.

    Raises:
        MisuseError: The class overrides a part of the suite, or names a test that does not exist.
    """
    __tracebackhide__ = True  # here and below, so that pytest shows the author's class alone
    if cls.__module__.startswith(_OURS):  # the suites themselves, which derive from each other
        return
    for name, member in _members(cls):
        # Static, as a property or a fixture would be another object each time.
        if name not in settings and inspect.getattr_static(cls, name, None) is not member:
            raise MisuseError(_why_not(cls, name, member))
    check_collected(cls)
    _check_expected(cls)


def expected_failure(cls: type[Any], name: str) -> str | None:
    """Return why a standard test of a class is declared to fail, by its name with or without its case."""
    reason: str | None = cls.expected_failures.get(name) or cls.expected_failures.get(name.partition("[")[0])
    return reason


def _members(cls: type[Any]) -> Iterator[tuple[str, object]]:
    """Yield the members that the suites define, each name from the first class that has it."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith(_OURS):
            continue
        for name, member in vars(base).items():
            if name not in seen and not name.startswith("__"):
                seen.add(name)
                yield name, member


def _why_not(cls: type[Any], name: str, member: object) -> str:
    if standard_of(member) is None:
        return f"{cls.__name__}.{name} replaces a part of the conformance kit: choose another name"
    return (
        f"{cls.__name__}.{name} replaces a standard test, which may not be dropped or changed: remove it; "
        f'what fails for a good reason is declared with expected_failures = {{"{name}": "the reason"}}'
    )


def check_collected(cls: type[Any]) -> None:
    """Refuse a class that pytest would not collect, about which it says little or nothing.

    Raises:
        MisuseError: It says what to remove.
    """
    __tracebackhide__ = True
    if not getattr(cls, "__test__", True):
        raise MisuseError(
            f"{cls.__name__}.__test__ is {cls.__test__}, which would drop its standard tests: remove it; a class that "
            "only declares what others inherit gets a name that does not begin with Test"
        )
    for name in ("__init__", "__new__"):
        if getattr(cls, name) is not getattr(object, name):
            raise MisuseError(
                f"{cls.__name__} has {name}, and pytest collects no class that has: set class attributes, "
                "or write a fixture"
            )


def _check_expected(cls: type[Any]) -> None:
    __tracebackhide__ = True
    tests = standard_tests(cls)
    for name, reason in cls.expected_failures.items():
        if name.partition("[")[0] not in tests:
            raise MisuseError(
                f"{cls.__name__}.expected_failures names {name!r}, not a standard test: possible are "
                f"{', '.join(sorted(tests))}"
            )
        if not isinstance(reason, str) or not reason.strip():
            raise MisuseError(f"{cls.__name__}.expected_failures gives no reason for {name!r}: say why it fails")


# Plugin of pytest that fails a standard test which anything but the kit skips


_SELECTING_MARKS = {"skip", "skipif", "xfail"}
_FIX = 'what fails for a good reason is declared with expected_failures = {"the test": "the reason"}'


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
        plugin = config.pluginmanager.get_plugin(name)
        if plugin is None:
            plugin = cls()
            config.pluginmanager.register(plugin, name)
        return plugin

    def check(self, test: pytest.Function, settings: frozenset[str]) -> None:
        """Refuse a test of a suite whose class, mixins or module would drop it.

        Raises:
            CollectError: It says what to do.
        """
        try:
            if test.cls not in self._checked:  # it takes 3 ms, and a class has 60 tests
                self._checked.add(test.cls)
                check_complete(test.cls, settings)
            if standard_of(test.function) is not None:
                _check_marks(test)
        except MisuseError as error:
            raise pytest.Collector.CollectError(str(error)) from error

    # The outermost wrapper, so that it sees the report as pytest's own plugin for skipping has left it.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Turn a skip that is not the kit's into a failure."""
        report = yield
        if report.skipped and standard_of(getattr(item, "function", None)) is not None:
            by = _skipped_by(item, call)
            if by is not None:
                report.outcome = "failed"
                report.longrepr = f"{by}, and a standard test cannot be skipped: take that away; {_FIX}"
                vars(report).pop("wasxfail", None)  # else pytest shows an expected failure, whatever the outcome
        return report


def _check_marks(test: pytest.Function) -> None:
    for node, mark in test.iter_markers_with_node():
        if mark.name in _SELECTING_MARKS:
            raise MisuseError(
                f"{node.name} is marked {mark.name}, which would drop standard tests of {test.cls.__name__}: "
                f"take the mark away; {_FIX}"
            )


def _skipped_by(item: pytest.Item, call: pytest.CallInfo[None]) -> str | None:
    """Return what ended a test that did not fail; None for the kit."""
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, NotDeclared):
        return None
    if isinstance(error, pytest.skip.Exception):
        return f"skipped with {error.msg!r}"
    declared = expected_failure(item.cls, item.name)  # type: ignore[attr-defined]  # a standard test has a class
    if isinstance(error, pytest.xfail.Exception) or declared is None:
        return "expected to fail by a mark or a call of pytest.xfail"
    return None


# Failure messages: observed, expected, fix


_WIDTH = 110


def fail(observed: str, *, expected: str = "", fix: str = "", details: str = "") -> NoReturn:
    """Fail the test with a message of up to three paragraphs.

    Args:
        observed: The problem, one sentence without a full stop.
        expected: The expected behavior, as a sentence.
        fix: The change that the author has to make.
        details: Further lines as they are, such as a traceback.
    """
    __tracebackhide__ = True
    paragraphs = [observed, *(f"{name}: {text}" for name, text in (("expected", expected), ("fix", fix)) if text)]
    lines = [textwrap.fill(paragraph, _WIDTH, subsequent_indent="    ") for paragraph in paragraphs]
    pytest.fail("\n".join([*lines, *([textwrap.indent(details.rstrip(), "  | ")] if details else [])]), pytrace=False)

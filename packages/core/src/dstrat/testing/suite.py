"""The base of every suite: which component is tested, and what its author declares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

try:
    import pytest
except ImportError as error:
    raise ImportError('dstrat.testing needs pytest: pip install "dstrat[testing]"') from error

from dstrat.errors import CatalogError, MisuseError
from dstrat.plugins.catalog import get_catalog
from dstrat.plugins.facts import declares_all, with_class_facts
from dstrat.testing.skips import KeepsStandardTests
from dstrat.testing.standard import check_collected, check_complete, expected_failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.plugins.component import Component, Kind
    from dstrat.plugins.offer import Offer

_EVERY_SETTING = frozenset({"alias", "options", "expected_failures", "pytestmark"})


class Collected(type):
    """The type of suites, which sees to it that pytest goes on collecting one."""

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
        """See to it that the test is kept; suites also give its cases here."""
        KeepsStandardTests.of(metafunc.config).check(metafunc.definition, self.settings)

    @pytest.fixture(autouse=True)
    def _expect_failures(self, request: pytest.FixtureRequest) -> None:
        """Mark what is declared to fail."""
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

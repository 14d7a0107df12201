"""Marking the standard tests, and seeing to it that a test class keeps all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
"""What tests can prove, in the order of the table: what others rest on comes first."""

_Test = TypeVar("_Test", bound=Callable[..., None])

_OURS = "dstrat.testing."


@dataclass(frozen=True, kw_only=True, slots=True)
class Standard:
    """What a standard test is about.

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
    """Return what a test is about; None where it is an author's own."""
    return getattr(test, "standard", None)


def standard_tests(cls: type[Any]) -> dict[str, Standard]:
    """Return the standard tests of a suite by name."""
    return {name: found for name, member in _members(cls) if (found := standard_of(member)) is not None}


def check_complete(cls: type[Any], settings: frozenset[str]) -> None:
    """Refuse a test class that drops or replaces standard tests.

    Args:
        cls: Derived from a suite.
        settings: Names that a test class may set.

    Raises:
        MisuseError: The class overrides a part of the suite, or names a test that does not exist.
    """
    __tracebackhide__ = True  # here and below, so that pytest shows the author's class alone
    if cls.__module__.startswith(_OURS):
        return
    for name, member in _members(cls):
        if name not in settings and inspect.getattr_static(cls, name, None) is not member:
            raise MisuseError(_why_not(cls, name, member))
    check_collected(cls)
    _check_expected(cls)


def expected_failure(cls: type[Any], name: str) -> str | None:
    """Return why a standard test of a class is declared to fail, by its name with or without its case."""
    reason: str | None = cls.expected_failures.get(name) or cls.expected_failures.get(name.partition("[")[0])
    return reason


def _members(cls: type[Any]) -> Iterator[tuple[str, object]]:
    """Yield what the suites themselves define, each name as the first of them does."""
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
    """Refuse what keeps pytest from collecting a class, of which it says little or nothing.

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
    known = standard_tests(cls)
    for name, reason in cls.expected_failures.items():
        if name.partition("[")[0] not in known:
            raise MisuseError(
                f"{cls.__name__}.expected_failures names {name!r}, which is no standard test: possible are "
                f"{', '.join(sorted(known))}"
            )
        if not isinstance(reason, str) or not reason.strip():
            raise MisuseError(f"{cls.__name__}.expected_failures gives no reason for {name!r}: say why it fails")

"""Checking requirements against installed metadata, without importing what is required."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from dstrat.errors import InvalidComponentError, MissingRequirementError
from dstrat.plugins.known import pip_command

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dstrat.plugins.offer import Offer


def missing_requirements(offer: Offer) -> tuple[str, ...]:
    """Return the requirements of the component that nothing installed satisfies, as its record spells them.

    A requirement whose marker does not hold here is not missing.

    Raises:
        InvalidComponentError: One of them is not a requirement.
    """
    return tuple(text for text, _ in _missing(offer))


def check_requirements(offer: Offer) -> None:
    """Raise MissingRequirementError, with the command that helps, unless all requirements are satisfied."""
    missing = list(_missing(offer))
    if not missing:
        return
    states = ", and ".join(f"{text}, {state}" for text, state in missing)
    bare = [text.partition(";")[0].strip() for text, _ in missing]
    command = pip_command(*bare, options=offer.component.pip_options)
    raise MissingRequirementError(f"{offer.title} needs {states}: {command}")


def _missing(offer: Offer) -> Iterable[tuple[str, str]]:
    for text in offer.component.requires:
        state = _problem(text, offer)
        if state is not None:
            yield text, state


def _problem(text: str, offer: Offer) -> str | None:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise InvalidComponentError(f"{offer.title} requires {text!r}, which is not a requirement: {error}") from error
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    try:
        installed: str | None = version(requirement.name)
    except PackageNotFoundError:
        installed = None
    if installed is None:  # also where the metadata of an interrupted installation names no version
        return "which is not installed"
    if not requirement.specifier.contains(installed, prereleases=True):
        return f"but {installed} is installed"
    return None

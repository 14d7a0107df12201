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

    A requirement whose marker does not hold here is not missing; a text that is no requirement is.
    """
    return tuple(text for text in offer.component.requires if _is_missing(text, offer))


def _is_missing(text: str, offer: Offer) -> bool:
    try:
        return _problem(text, offer) is not None
    except InvalidComponentError:
        return True


def check_requirements(offer: Offer) -> None:
    """Raise MissingRequirementError, with the command that helps, unless all requirements are satisfied.

    Raises:
        InvalidComponentError: One of them is not a requirement.
    """
    missing = list(_missing(offer))
    if not missing:
        return
    states = ", and ".join(f"{text}, {state}" for text, state in missing)
    bare = [text.partition(";")[0].strip() for text, _ in missing]
    command = pip_command(*bare, options=offer.component.pip_options)
    note = offer.component.requires_note
    raise MissingRequirementError(f"{offer.title} needs {states}: {command}{f' ({note})' if note else ''}")


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

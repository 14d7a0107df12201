"""The names in a new package, and which of them are possible."""

from __future__ import annotations

import keyword
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrat.cli.new.kinds import KIND_FACTS
from dstrat.errors import RequestError
from dstrat.plugins.names import normalized

if TYPE_CHECKING:
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Kind

_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")  # as PyPI has it
_ALIAS = re.compile(r"[a-z][a-z0-9]*([_.-][a-z0-9]+)*")
_TAKEN = frozenset({"dstrat", "pytest", "test", "tests", "torch", *sys.stdlib_module_names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """What is called how.

    Attributes:
        distribution: What users write after ``pip install``.
        package: What they import.
        alias: What they choose the component by.
        class_name: Its class.
    """

    distribution: str
    package: str
    alias: str
    class_name: str


def make_names(kind: Kind, folder_name: str, alias: str | None) -> Names:
    """Return the names for a package in a folder of that name.

    Args:
        kind: What the package offers.
        folder_name: The distribution is called the same.
        alias: None takes the name of the folder, without a ``dstrat-`` in front.

    Raises:
        RequestError: A name is not possible.
    """
    package = _package(folder_name)
    alias = package.removeprefix("dstrat_") if alias is None else alias
    if not _ALIAS.fullmatch(alias):
        raise RequestError(
            f"alias {alias!r} is not possible here: it must begin with a lower-case letter and consist of such and "
            "digits, with single '_', '-' or '.' between them; choose one with --alias"
        )
    return Names(
        distribution=normalized(folder_name), package=package, alias=alias, class_name=_class_name(kind, alias)
    )


def check_free(kind: Kind, names: Names, catalog: Catalog) -> None:
    """Raise an error where another distribution has the alias, as a user of both could choose neither.

    Raises:
        RequestError: It is taken.
    """
    from dstrat.plugins.known import known_requirement

    owners = [
        offer.owner_label
        for offer in catalog.offers(kind)
        if names.alias in (*offer.names, *offer.component.groups) and normalized(offer.owner) != names.distribution
    ]
    known = known_requirement(kind, names.alias)
    if known is not None and not owners and normalized(known) != names.distribution:
        owners = [known]
    if owners:
        raise RequestError(
            f"alias {names.alias!r} belongs to {owners[0]}, and who has both packages could use neither by that name: "
            "choose another one with --alias"
        )


def _package(folder_name: str) -> str:
    package = re.sub(r"[-.]+", "_", folder_name).lower()
    if not _DISTRIBUTION.fullmatch(folder_name) or not package.isidentifier() or keyword.iskeyword(package):
        raise RequestError(
            f"{folder_name!r} cannot be the name of a package: begin with a letter and use letters, digits, '-' and "
            "'_', as in 'dstrat-ring'"
        )
    if package in _TAKEN:
        raise RequestError(
            f"{folder_name!r} cannot be the name of a package, as Python has a module {package!r} already: choose "
            f"another one, such as 'dstrat-{package}'"
        )
    return package


def _class_name(kind: Kind, alias: str) -> str:
    ending = KIND_FACTS[kind].ending
    words = re.split(r"[_.-]", alias)
    for count in range(1, len(words)):
        if "".join(words[-count:]) == ending.lower():  # so that my_strategy is MyStrategy
            words = words[:-count]
            break
    return "".join(word[0].upper() + word[1:] for word in words) + ending

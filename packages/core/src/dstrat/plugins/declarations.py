"""Reading which installed distributions declare plugins.

``importlib.metadata.entry_points()`` is not used for it: one malformed line in the metadata of any distribution makes
it raise for all of them, and it parses the entry points of everything that is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution, distributions
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_FILE = "entry_points.txt"
_GROUP_PREFIX = "dstrat."


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """A distribution that declares plugins.

    Attributes:
        name: Its name.
        version: Its version.
        entry_points: The entry points in groups of dstrat, in the order of group, name and value.
        problem: Why they cannot be read; None when they can.
    """

    name: str
    version: str
    entry_points: tuple[EntryPoint, ...] = ()
    problem: Exception | None = None


def read_declarations() -> Iterator[Declaration]:
    """Yield the distributions that declare plugins, each once, in no particular order."""
    seen: set[str] = set()
    for found in distributions():
        if not _declares_plugins(found):
            continue
        name, _ = _name_and_version(found)
        if name not in seen:
            seen.add(name)
            active = _first_on_path(name)
            if active is None:
                yield _declaration(found)
            elif _declares_plugins(active):
                yield _declaration(active)


def _declares_plugins(found: Distribution) -> bool:
    try:
        return f"[{_GROUP_PREFIX}" in (found.read_text(_FILE) or "")
    except (OSError, ValueError):  # nobody can tell what is in it
        return False


def _first_on_path(name: str) -> Distribution | None:
    """Return the distribution that an import would use, where several versions lie on the path."""
    try:
        return distribution(name)
    except PackageNotFoundError:  # its folder is named otherwise than its metadata
        return None


def _declaration(found: Distribution) -> Declaration:
    name, version = _name_and_version(found)
    try:
        entries = [entry for entry in found.entry_points if entry.group.startswith(_GROUP_PREFIX)]
    except Exception as error:  # noqa: BLE001 - malformed text raises TypeError or other things, by version of Python
        return Declaration(name=name, version=version, problem=error)
    entries.sort(key=lambda entry: (entry.group, entry.name, entry.value))
    return Declaration(name=name, version=version, entry_points=tuple(entries))


def _name_and_version(found: Distribution) -> tuple[str, str]:
    """Read both from the header; ``Distribution.metadata`` parses the whole text as an e-mail each time."""
    text = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    header = dict(line.split(": ", 1) for line in text.partition("\n\n")[0].splitlines() if ": " in line)
    return header.get("Name", "unknown"), header.get("Version", "")

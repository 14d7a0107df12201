"""Writing a package from the template, completely or not at all."""

from __future__ import annotations

import importlib.util
import re
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from dstrat.cli.new.kinds import KIND_FACTS
from dstrat.errors import MissingRequirementError, RequestError
from dstrat.plugins.known import pip_command
from dstrat.plugins.offer import kind_label

if TYPE_CHECKING:
    from dstrat.cli.new.names import Names
    from dstrat.plugins.component import Kind

_TEMPLATE = Path(__file__).with_name("template")


def check_can_write(folder: Path) -> None:
    """Raise an error unless a package can be written to the folder.

    Raises:
        MissingRequirementError: The template library is not installed.
        RequestError: There is something at that place.
    """
    if importlib.util.find_spec("copier") is None:
        raise MissingRequirementError(f"dstrat new needs copier, which is not installed: {pip_command('dstrat[new]')}")
    if folder.is_dir():
        found = next(iter(sorted(folder.iterdir())), None)
        if found is not None:
            raise RequestError(f"{str(folder)!r} is not empty (it has {found.name!r}): choose a folder that is new")
    elif folder.exists() or folder.is_symlink():
        raise RequestError(f"{str(folder)!r} is a file: choose a folder that is new")


def write_package(kind: Kind, names: Names, folder: Path) -> None:
    """Write the package.

    Args:
        kind: What it offers.
        names: What is called how.
        folder: An absolute path to nothing, or to an empty folder.

    Raises:
        RequestError: The folder cannot be written.
    """
    beside = next(parent for parent in folder.parents if parent.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".dstrat-new-", dir=beside) as temporary:
            finished = Path(temporary, folder.name)
            _render(kind, names, finished)
            if folder.is_dir():
                _fill(folder, finished)
            else:
                folder.parent.mkdir(parents=True, exist_ok=True)
                finished.rename(folder)
    except OSError as error:
        raise RequestError(
            f"{str(folder)!r} cannot be written ({error.strerror or error}): choose another place"
        ) from error


def _fill(folder: Path, finished: Path) -> None:
    """Move what is in the finished folder to an empty one, which may be where the user is."""
    parts = list(finished.iterdir())
    try:
        for part in parts:
            part.rename(folder / part.name)
    except OSError:
        for part in parts:
            if not part.exists():
                (folder / part.name).rename(part)
        raise


def _render(kind: Kind, names: Names, folder: Path) -> None:
    from copier import run_copy

    facts = KIND_FACTS[kind]
    answers = {
        "kind": kind,
        "kind_label": kind_label(kind),
        "distribution": names.distribution,
        "package": names.package,
        "alias": names.alias,
        "class_name": names.class_name,
        "variable": re.sub(r"[^A-Z0-9]", "_", names.alias.upper()),
        "module": kind.partition("_")[0],
        "base": facts.base,
        "suite": facts.suite,
        "summary": facts.summary,
        "usage": facts.usage.format(names.alias),
        "dstrat_versions": _compatible_versions(),
    }
    run_copy(str(_TEMPLATE), folder, data=answers, defaults=True, quiet=True)


def _compatible_versions() -> str:
    """Return the versions of dstrat that the package can rely on: from this one on, as v1 of the contract stays."""
    here = Version(version("dstrat"))
    return f">={here.major}.{here.minor}"

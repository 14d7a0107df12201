"""``dstrat new``: write a package with the author's own component."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import click
from packaging.version import Version

from dstrat.cli.components import loaded_catalog
from dstrat.errors import MissingRequirementError, RequestError
from dstrat.plugins.component import KINDS
from dstrat.plugins.known import pip_command, quoted
from dstrat.plugins.offer import kind_label
from dstrat.plugins.settings import normalized

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Kind


@click.command(short_help="Write a package with your own strategy or other component.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--kind", type=click.Choice(KINDS), default="strategy", show_default=True, help="Kind of its component.")
@click.option("--alias", help="Alias of the component; by default the name of the folder without 'dstrat-'.")
def new(path: Path, kind: Kind, alias: str | None) -> None:
    """Write a package to the folder PATH, which is also its name, such as dstrat-ring.

    It has a class that works, the entry point by which dstrat finds it, tests that inherit dstrat's conformance kit, a
    README and a workflow for GitHub.  It needs copier: pip install "dstrat[new]".
    """
    folder = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links, which have other names
    names = make_names(kind, folder.name, alias)
    check_free(kind, names, loaded_catalog())
    check_can_write(folder)
    write_package(kind, names, folder)
    editable = quoted(f"{path}[dev]")
    click.echo(f"{path} has the {kind_label(kind)} {names.alias!r}, {names.package}.{names.class_name}. To test it:")
    click.echo(f"  pip install -e {editable}")
    click.echo(f"  pytest {quoted(str(path))}")


# Texts of packages by kind of component


@dataclass(frozen=True, kw_only=True, slots=True)
class KindFacts:
    """The texts that differ in packages for components of one kind.

    Attributes:
        interface: Name of the kind's interface, a public class of dstrat.
        summary: Line of the component in tables.
        usage: Arguments of a Trainer that choose it, with ``{}`` for the alias.
        more_specific_base: Name of its base class; empty for the interface itself.
    """

    interface: str
    summary: str
    usage: str
    more_specific_base: str = ""


KIND_FACTS: Mapping[Kind, KindFacts] = {
    "strategy": KindFacts(
        interface="Strategy",
        summary="one process per device, gradients averaged after the backward pass",
        usage='strategy="{}", accelerator="cpu", devices=2',
        more_specific_base="GradientSyncStrategy",
    ),
    "accelerator": KindFacts(
        interface="Accelerator",
        summary="hardware that the processor stands in for",
        usage='accelerator="{}", devices=1',
    ),
    "precision": KindFacts(
        interface="Precision",
        summary="everything in float32",
        usage='precision="{}"',
    ),
    "checkpoint_io": KindFacts(
        interface="CheckpointIO",
        summary="one file for each checkpoint",
        usage='plugins="{}"',
    ),
    "cluster_environment": KindFacts(
        interface="ClusterEnvironment",
        summary="processes that something else has started",
        usage='plugins="{}"',
        more_specific_base="ExternalEnvironment",
    ),
    "launcher": KindFacts(
        interface="Launcher",
        summary="one process of multiprocessing for each rank",
        usage='strategy="ddp", accelerator="cpu", devices=2, plugins="{}"',
    ),
}


# Names in a new package, and their checks


_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")  # as PyPI has it
_ALIAS = re.compile(r"[a-z][a-z0-9]*([_.-][a-z0-9]+)*")
_RESERVED = frozenset({"dstrat", "pytest", "test", "tests", "torch", *sys.stdlib_module_names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The names in a package.

    Attributes:
        distribution: Name for ``pip install``.
        package: Name for ``import``.
        alias: Alias of the component.
        class_name: Name of its class.
    """

    distribution: str
    package: str
    alias: str
    class_name: str


def make_names(kind: Kind, folder_name: str, alias: str | None) -> Names:
    """Return the names in a package.

    Args:
        kind: Kind of its component.
        folder_name: Name of its folder, and of the distribution.
        alias: Alias of the component; None is the name of the folder without ``dstrat-``.

    Raises:
        RequestError: A name is not possible.
    """
    package = _package(folder_name)
    alias = package.removeprefix("dstrat_") if alias is None else alias
    if not _ALIAS.fullmatch(alias):
        raise RequestError(
            f"alias {alias!r} is not possible here: begin with a lower-case letter, and use lower-case letters and "
            "digits, with single '_', '-' or '.' between them; choose another one with --alias"
        )
    return Names(
        distribution=normalized(folder_name), package=package, alias=alias, class_name=_class_name(kind, alias)
    )


def check_free(kind: Kind, names: Names, catalog: Catalog) -> None:
    """Check that no other distribution has the alias: a user of both could choose neither.

    Raises:
        RequestError: It is taken.
    """
    from dstrat.plugins.known import known_requirement

    owners = [
        offer.owner_label
        for offer in catalog.offers(kind)
        if names.alias in (*offer.names, *offer.component.groups) and normalized(offer.owner) != names.distribution
    ]
    requirement = known_requirement(kind, names.alias)
    if requirement is not None and not owners and normalized(requirement) != names.distribution:
        owners = [requirement]
    if owners:
        raise RequestError(
            f"alias {names.alias!r} belongs to {owners[0]}, and with both packages installed neither could be used by "
            "it: choose another one with --alias"
        )


def _package(folder_name: str) -> str:
    package = re.sub(r"[-.]+", "_", folder_name).lower()
    if not _DISTRIBUTION.fullmatch(folder_name) or not package.isidentifier() or keyword.iskeyword(package):
        raise RequestError(
            f"{folder_name!r} cannot be the name of a package: begin with a letter and use letters, digits, '-' and "
            "'_', as in 'dstrat-ring'"
        )
    if package in _RESERVED:
        raise RequestError(
            f"{folder_name!r} cannot be the name of a package, as Python has a module {package!r} already: choose "
            f"another one, such as 'dstrat-{package}'"
        )
    return package


def _class_name(kind: Kind, alias: str) -> str:
    ending = KIND_FACTS[kind].interface.removeprefix("Cluster")  # SLURMEnvironment, not SLURMClusterEnvironment
    names = re.split(r"[_.-]", alias)
    for count in range(1, len(names)):
        if "".join(names[-count:]) == ending.lower():  # so that my_strategy is MyStrategy
            names = names[:-count]
            break
    return "".join(word[0].upper() + word[1:] for word in names) + ending


# Rendering of the template, atomically


_TEMPLATE = Path(__file__).with_name("template")


def check_can_write(folder: Path) -> None:
    """Check that a package can be written to the folder.

    Raises:
        MissingRequirementError: copier is not installed.
        RequestError: The path is a file, or a folder that is not empty.
    """
    if importlib.util.find_spec("copier") is None:
        raise MissingRequirementError(f"dstrat new needs copier, which is not installed: {pip_command('dstrat[new]')}")
    if folder.is_dir():
        entry = next(iter(sorted(folder.iterdir())), None)
        if entry is not None:
            raise RequestError(f"{str(folder)!r} is not empty (it has {entry.name!r}): choose a new folder")
    elif folder.exists() or folder.is_symlink():
        raise RequestError(f"{str(folder)!r} is a file: choose a new folder")


def write_package(kind: Kind, names: Names, folder: Path) -> None:
    """Write the package.

    Args:
        kind: Kind of its component.
        names: The names in it.
        folder: An absolute path, of an empty folder or one that does not exist.

    Raises:
        RequestError: The folder cannot be written.
    """
    # Rendered beside the folder, and then renamed, so that an error leaves no half package; on the same file system.
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
    """Move the content of the finished folder to an empty one."""
    # The folder itself is not replaced: it may be the working directory of the user's shell.
    entries = list(finished.iterdir())
    try:
        for entry in entries:
            entry.rename(folder / entry.name)
    except OSError:
        for entry in entries:
            if not entry.exists():  # it was moved
                (folder / entry.name).rename(entry)
        raise


def _render(kind: Kind, names: Names, folder: Path) -> None:
    from copier import run_copy

    facts, dstrat = KIND_FACTS[kind], Version(version("dstrat"))
    answers = {
        "kind": kind,
        "kind_label": kind_label(kind),
        "distribution": names.distribution,
        "package": names.package,
        "alias": names.alias,
        "class_name": names.class_name,
        "variable": re.sub(r"[^A-Z0-9]", "_", names.alias.upper()),
        "module": kind.partition("_")[0],
        "base": facts.more_specific_base or facts.interface,
        "suite": f"{facts.interface}Suite",
        "summary": facts.summary,
        "usage": facts.usage.format(names.alias),
        "dstrat_versions": f">={dstrat.major}.{dstrat.minor}",  # no upper limit, as v1 of the plugin contract stays
    }
    run_copy(str(_TEMPLATE), folder, data=answers, defaults=True, quiet=True)

"""``dstrat new``: write a package with a component of the author's own."""

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


@click.command(short_help="Write a package with a strategy of your own.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--kind", type=click.Choice(KINDS), default="strategy", show_default=True, help="What it offers.")
@click.option("--alias", help="What users write; by default the name of the folder, without 'dstrat-'.")
def new(path: Path, kind: Kind, alias: str | None) -> None:
    """Write a package to the folder PATH, which is also its name, such as dstrat-ring.

    It has a class that works, the entry point by which dstrat finds it, tests that inherit dstrat's conformance kit, a
    README and a workflow for GitHub.  It needs copier: pip install "dstrat[new]".
    """
    folder = Path(os.path.abspath(path))  # noqa: PTH100 - without following links, which have names of their own
    names = make_names(kind, folder.name, alias)
    check_free(kind, names, loaded_catalog())
    check_can_write(folder)
    write_package(kind, names, folder)
    editable = quoted(f"{path}[dev]")
    click.echo(f"{path} has the {kind_label(kind)} {names.alias!r}, {names.package}.{names.class_name}. To test it:")
    click.echo(f"  pip install -e {editable}")
    click.echo(f"  pytest {quoted(str(path))}")


# Differences between package templates by kind of component.


@dataclass(frozen=True, kw_only=True, slots=True)
class KindFacts:
    """What the package for a component of one kind is made of.

    Attributes:
        interface: What a component of the kind is, a public class of dstrat's.
        summary: Its line in tables.
        usage: How a user asks for it, after ``Trainer(``; the alias takes the place of ``{}``.
        more_specific_base: What its class derives from, where that is not the interface itself.
    """

    interface: str
    summary: str
    usage: str
    more_specific_base: str = ""

    @property
    def base(self) -> str:
        """What its class derives from."""
        return self.more_specific_base or self.interface

    @property
    def suite(self) -> str:
        """The standard tests."""
        return f"{self.interface}Suite"

    @property
    def ending(self) -> str:
        """How the name of its class ends."""
        return self.interface.removeprefix("Cluster")


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
    requirement = known_requirement(kind, names.alias)
    if requirement is not None and not owners and normalized(requirement) != names.distribution:
        owners = [requirement]
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
    if package in _RESERVED:
        raise RequestError(
            f"{folder_name!r} cannot be the name of a package, as Python has a module {package!r} already: choose "
            f"another one, such as 'dstrat-{package}'"
        )
    return package


def _class_name(kind: Kind, alias: str) -> str:
    ending = KIND_FACTS[kind].ending
    names = re.split(r"[_.-]", alias)
    for count in range(1, len(names)):
        if "".join(names[-count:]) == ending.lower():  # so that my_strategy is MyStrategy
            names = names[:-count]
            break
    return "".join(word[0].upper() + word[1:] for word in names) + ending


# Rendering of the template, atomically


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
        entry = next(iter(sorted(folder.iterdir())), None)
        if entry is not None:
            raise RequestError(f"{str(folder)!r} is not empty (it has {entry.name!r}): choose a folder that is new")
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
    entries = list(finished.iterdir())
    try:
        for entry in entries:
            entry.rename(folder / entry.name)
    except OSError:
        for entry in entries:
            if not entry.exists():
                (folder / entry.name).rename(entry)
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
    installed = Version(version("dstrat"))
    return f">={installed.major}.{installed.minor}"

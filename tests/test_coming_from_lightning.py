"""Lightning's public names are there, with arguments and defaults, or docs/coming-from-lightning.md has a row.

lightning_names.json is made by record_lightning_names.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.record_lightning_names import RECORD, arguments

import dstrat
from dstrat import accelerators, callbacks, loggers, plugins, profilers, strategies
from dstrat.errors import DstratError

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE = Path(__file__).parents[1] / "docs" / "coming-from-lightning.md"
CHECKS_ITS_FIRST_ARGUMENT = {"SLURMEnvironment"}  # the variables, while that of Lightning is True or False
SET_BY_CONSTRUCTORS = {  # attributes here, and properties in Lightning
    "OnExceptionCheckpoint": {"ckpt_path"},
    "Strategy": {"model", "optimizers"},
    "TQDMProgressBar": {"process_position"},
}
NAMES: dict[str, dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))["names"]


def renamed() -> dict[str, str]:
    """The new names of what is only called otherwise: the first table of the page."""
    before, _, _ = PAGE.read_text(encoding="utf-8").partition("## Differences")
    return dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|$", before, re.MULTILINE))


def rows(of: str = "") -> set[str]:
    """The names that have a row: the code in the first column of the table of names, where the second begins so."""
    table = PAGE.read_text(encoding="utf-8").partition("## Names")[2]
    cells = re.findall(rf"^\| (.*?) \| {of}", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def ours(name: str) -> Any:
    """The class of that name, or of its new name; None where there is none."""
    for home in (dstrat, callbacks, loggers, profilers, strategies, accelerators, plugins):
        with contextlib.suppress(AttributeError, DstratError):
            return getattr(home, renamed().get(name, name))
    return None


def differences() -> list[str]:
    """What is not as it is in Lightning: `Name`, `Name(argument)`, `Name.method(argument)`, `Name.attribute`."""
    differ = []
    for name, recorded in NAMES.items():
        kind = ours(name)
        if kind is None:
            differ.append(name)
            continue
        differ += [f"{name}({argument})" for argument in different(recorded["arguments"], kind)]
        if "methods" in recorded:
            differ += different_members(name, recorded, kind)
        members = set(recorded.get("members", ())) - SET_BY_CONSTRUCTORS.get(name, set())
        differ += [f"{name}.{member}" for member in sorted(members) if not explains(kind, member)]
    return differ


def explains(kind: type, member: str) -> bool:
    """Whether a class has a member, or says what to do instead."""
    return hasattr(kind, member) or member in getattr(kind, "retired_members", {})


def different_members(name: str, recorded: dict[str, Any], kind: Any) -> list[str]:
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False} if name == "Trainer" else {}
    there = dir(kind(**options))
    differ = [f"{name}.{member}" for member in (*recorded["attributes"], *recorded["methods"]) if member not in there]
    for method, wanted in recorded["methods"].items():
        if callable(function := getattr(kind, method, None)):
            differ += [f"{name}.{method}({argument})" for argument in different(wanted, function)]
    return differ


def different(wanted: dict[str, str], function: Any) -> list[str]:
    """The arguments that the function lacks, or has with another default.

    What a function passes on (``**kwargs``) takes every name, and its own tests say which.
    """
    has, new = arguments(function), renamed()
    if any(name.startswith("**") for name in has):
        wanted = {name: default for name, default in wanted.items() if not name.startswith("**")}
        has = {**{new.get(name, name): default for name, default in wanted.items()}, **has}
    named = {name: default for name, default in wanted.items() if name not in ("*", "*args")}
    return [name for name, default in named.items() if not same(default, has.get(new.get(name, name)))]


def same(wanted: str, default: str | None) -> bool:
    """Whether two texts of defaults have the same meaning: 0.0 is 0."""
    try:
        return bool(wanted == default or float(wanted) == float(str(default)))
    except ValueError:
        return False


def test_each_name_of_lightning_is_there_or_has_a_row() -> None:
    missing = sorted(set(differences()) - rows())
    assert not missing, f"add the names, or rows to {PAGE.name}, for these {len(missing)}:\n" + "\n".join(missing)


def test_no_row_is_about_a_name_that_is_as_in_lightning() -> None:
    stale = sorted(rows() - rows("not there yet") - set(differences()))
    assert not stale, f"these are as in Lightning, take them out of {PAGE.name}:\n" + "\n".join(stale)


def by_position(names: Iterable[str]) -> list[str]:
    """The arguments before the first that is passed by name."""
    return list(itertools.takewhile(lambda name: not name.startswith("*"), names))


@pytest.mark.parametrize("name", sorted(NAMES.keys() - CHECKS_ITS_FIRST_ARGUMENT))
def test_arguments_have_the_positions_of_lightning_or_are_passed_by_name(name: str) -> None:
    kind, recorded = ours(name), NAMES[name]
    if kind is None:
        return
    functions = {"__init__": (recorded["arguments"], kind)}
    methods = recorded.get("methods", {})
    functions |= {method: (wanted, getattr(kind, method, None)) for method, wanted in methods.items()}
    for method, (wanted, function) in functions.items():
        if callable(function):
            theirs = [renamed().get(argument, argument) for argument in by_position(wanted)]
            here = by_position(arguments(function))[: len(theirs)]
            assert here == theirs[: len(here)], f"{name}.{method}"


def test_classes_whose_later_arguments_have_names_only_are_listed() -> None:
    found = set()
    for name in NAMES.keys() - CHECKS_ITS_FIRST_ARGUMENT:
        if (kind := ours(name)) is not None:
            has, theirs = arguments(kind), by_position(NAMES[name]["arguments"])
            later = theirs[len(by_position(has)) :]
            found |= {name for argument in later if renamed().get(argument, argument) in has}
    listed = re.search(r"The later arguments of (.*) are passed by name only", PAGE.read_text(encoding="utf-8"))
    assert found == (set(re.findall(r"`(\w+)`", listed[1])) if listed else set())

"""``dstrat test``: the conformance kit on a component, capability by capability."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dstrat.cli.components import loaded_catalog
from dstrat.cli.output import json_option, print_json, print_table
from dstrat.errors import NotInstalledError
from dstrat.plugins.component import KINDS
from dstrat.plugins.known import pip_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.plugins.component import Kind
    from dstrat.testing.run import Result

_TIERS = ("basic", "optional", "processes", "device")
_INDENT, _VERBATIM = "    ", "  |"  # begin continued lines and details, in messages of the kit
_MAX_WIDTH = 110  # characters of a line
_NUMBER = re.compile(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?")
_OF_PYTEST = re.compile(r"^E  ", re.MULTILINE)
_OUTCOMES = ("passed", "failed", "expected failure", "not declared")


@click.command(short_help="Run the conformance kit on an alias; with --config, test a module.")
@click.argument("alias")
@click.argument("path", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--kind", type=click.Choice(KINDS), default="strategy", show_default=True, help="Kind of the component.")
@click.option("--tier", "tiers", type=click.Choice(_TIERS), multiple=True, help="Run only these tests; by default all.")
@json_option
@click.pass_context
def test(ctx: click.Context, alias: str, path: Path | None, kind: Kind, tiers: tuple[str, ...], as_json: bool) -> None:
    """Run the standard tests on what ALIAS names; exit with 1 if one of them fails.

    PATH is the author's own test file or folder: its test class with that alias is run, with the capabilities that it
    declares.

    With the options of 'dstrat fit', such as --config, a module is tested instead.
    """
    offer = loaded_catalog().find(kind, alias)  # an unknown alias is an error before pytest starts
    results = _run(kind, alias, path, tiers or _TIERS)
    failed = [result for result in results if result.outcome == "failed"]
    if as_json:
        print_json({"alias": alias, "kind": kind, "owner": offer.owner_label, "tests": [asdict(r) for r in results]})
    else:
        _print(results, failed)
    ctx.exit(1 if failed else 0)


def _run(kind: Kind, alias: str, path: Path | None, tiers: Sequence[str]) -> list[Result]:
    try:
        from dstrat.testing.run import run_suite
    except ImportError as error:
        raise NotInstalledError(f"dstrat test needs pytest ({error}): {pip_command('dstrat[testing]')}") from error
    return run_suite(kind, alias, tiers=tiers, path=path, on_progress=_print_progress)


def _print_progress(done: int, total: int) -> None:
    """Print the number of tests that are done, on a line that the next one overwrites, in terminals only."""
    if sys.stderr.isatty():
        click.echo(f"\r{done} of {total} " if done < total else "\r" + " " * 20 + "\r", err=True, nl=False)


def _print(results: Sequence[Result], failed: Sequence[Result]) -> None:
    rows = []
    for capability in dict.fromkeys(result.capability for result in results):
        of_it = [result for result in results if result.capability == capability]
        counts = [sum(result.outcome == outcome for result in of_it) for outcome in _OUTCOMES]
        rows.append((capability, *(str(count or "") for count in counts), f"{sum(r.seconds for r in of_it):.1f}"))
    print_table(rows, ["capability", *_OUTCOMES, "seconds"])
    for alike in _alike(failed):
        names = [click.style(result.name, fg="red", bold=True) for result in alike]
        click.echo("\n".join(["", *names, _fitted(alike[0].message)]))
    _print_reasons("expected to fail", results, "expected failure")
    _print_reasons("not declared", results, "not declared")
    if failed:
        click.echo(
            f"\n{len(failed)} of {len(results)} tests failed: begin with {failed[0].capability!r}, "
            "as later ones rest on earlier ones"
        )


def _print_reasons(heading: str, results: Sequence[Result], outcome: str) -> None:
    """Print each reason once, with its tests, and the cases of a parametrized test on one line."""
    cases: dict[str, dict[str, str]] = {}
    for result in results:
        if result.outcome == outcome:
            test, bracket, case = result.name.partition("[")
            of_reason = cases.setdefault(result.message, {})
            of_reason[test] = f"{of_reason.get(test, '')}{bracket}{case}"
    if cases:
        click.echo(f"\n{heading}:")
    for reason, tests in cases.items():  # test[a][b] are the cases a and b of one test
        click.echo("\n".join([_fitted(f"  {reason}"), *(f"{_INDENT}{test}{case}" for test, case in tests.items())]))


def _alike(failed: Sequence[Result]) -> list[list[Result]]:
    """Group results whose messages differ in numbers only, as one defect fails several tests."""
    groups: dict[str, list[Result]] = {}
    for result in failed:
        groups.setdefault(" ".join(_NUMBER.sub("0", result.message).split()), []).append(result)
    return list(groups.values())


def _fitted(message: str) -> str:
    """Return a message wrapped to the terminal's width; a traceback of pytest stays as it is."""
    if _OF_PYTEST.search(message):
        return message
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    return "\n".join(
        line if line.startswith(_VERBATIM) else textwrap.fill(line, width, subsequent_indent=_INDENT)
        for line in message.replace(f"\n{_INDENT}", " ").splitlines()
    )

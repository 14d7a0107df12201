"""``dstrat test``: what a component proves of itself, capability by capability."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dstrat.cli.catalog import loaded_catalog
from dstrat.cli.output import json_option, print_json, print_table
from dstrat.errors import NotInstalledError
from dstrat.plugins.component import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.plugins.component import Kind
    from dstrat.testing.run import Result

_TIERS = ("basic", "optional", "processes", "device")
_OUTCOMES = ("passed", "failed", "expected failure", "not declared")


@click.command(short_help="Run the conformance kit on an alias.")
@click.argument("alias")
@click.argument("path", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--kind", type=click.Choice(KINDS), default="strategy", show_default=True, help="What the alias names.")
@click.option("--tier", "tiers", type=click.Choice(_TIERS), multiple=True, help="Only these tests; by default all.")
@json_option
@click.pass_context
def test(ctx: click.Context, alias: str, path: Path | None, kind: Kind, tiers: tuple[str, ...], as_json: bool) -> None:
    """Run the standard tests on what ALIAS names; exit with 1 if one of them fails.

    PATH is the author's own test file or folder: then its test class with that alias is run, with what it declares.
    """
    offer = loaded_catalog().find(kind, alias)
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
        raise NotInstalledError(f"dstrat test needs pytest ({error})") from error
    return run_suite(kind, alias, tiers=tiers, path=path, tell=_tell)


def _tell(done: int, total: int) -> None:
    """Show how far it is, on a line that the next one overwrites."""
    if sys.stderr.isatty():
        click.echo(f"\r{done} of {total} " if done < total else "\r" + " " * 20 + "\r", err=True, nl=False)


def _print(results: Sequence[Result], failed: Sequence[Result]) -> None:
    rows = []
    for capability in dict.fromkeys(result.capability for result in results):
        of_it = [result for result in results if result.capability == capability]
        counts = [sum(result.outcome == outcome for result in of_it) for outcome in _OUTCOMES]
        rows.append((capability, *(str(count or "") for count in counts), f"{sum(r.seconds for r in of_it):.1f}"))
    print_table(rows, ["capability", *_OUTCOMES, "seconds"])
    for result in failed:
        click.echo(f"\n{click.style(result.name, fg='red', bold=True)}\n{result.message}")
    expected = [result for result in results if result.outcome == "expected failure"]
    if expected:
        click.echo("\nexpected to fail:")
        print_table([(f"  {result.name}", result.message) for result in expected])

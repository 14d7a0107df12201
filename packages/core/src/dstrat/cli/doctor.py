"""``dstrat doctor``: whether training would work here, and if not, why."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from dstrat.cli.catalog import loaded_catalog
from dstrat.cli.output import json_option, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dstrat.cli.diagnosis.finding import Finding

_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


@click.command(short_help="Check whether training would work here.")
@click.option("--seconds", default=60.0, show_default=True, help="Time limit of the all-reduce.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, seconds: float, as_json: bool) -> None:
    """Check versions, devices, ranks, plugins, an all-reduce and leftovers; exit with 1 if there is a problem."""
    findings = list(_findings(seconds))
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        print_table([(_MARKS[finding.state], finding.subject, finding.text) for finding in findings])
    ctx.exit(1 if any(finding.state == "problem" for finding in findings) else 0)


def _findings(seconds: float) -> Iterator[Finding]:
    from rich.console import Console

    from dstrat.cli.diagnosis.all_reduce import check_all_reduce
    from dstrat.cli.diagnosis.broken import check_plugins
    from dstrat.cli.diagnosis.devices import check_devices
    from dstrat.cli.diagnosis.evidence import check_evidence
    from dstrat.cli.diagnosis.leftovers import check_leftovers
    from dstrat.cli.diagnosis.versions import check_versions

    catalog = loaded_catalog()
    yield from check_plugins(catalog)
    yield from check_versions(catalog)
    yield from check_devices(catalog)
    yield from check_evidence(catalog, os.environ)
    with Console(stderr=True).status("two processes add their numbers ..."):  # shown in terminals only
        yield from list(check_all_reduce(seconds))
    yield from check_leftovers()

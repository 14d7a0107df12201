"""``dstrat explain``: the plan for given options, with the reason for each choice, without running anything."""

from __future__ import annotations

import click

from dstrat.cli.catalog import loaded_catalog
from dstrat.cli.output import json_option, print_json, print_table


@click.command(short_help="Explain what would run, and why.")
@click.option("--strategy", default="auto", show_default=True, help="Alias of a strategy.")
@click.option("--accelerator", default="auto", show_default=True, help='Alias of an accelerator, or "gpu".')
@click.option("--devices", default="auto", show_default=True, help='How many or which: "4", "0,1", "-1".')
@click.option("--num-nodes", default=1, show_default=True, help="Number of machines.")
@click.option("--precision", default=None, help='Such as "bf16-mixed".')
@json_option
def explain(
    strategy: str, accelerator: str, devices: str, num_nodes: int, precision: str | None, as_json: bool
) -> None:
    """Explain what a Trainer with these options would run, and why."""
    from dstrat.resolve import Request, make_plan

    request = Request(
        strategy=strategy, accelerator=accelerator, devices=devices, num_nodes=num_nodes, precision=precision
    )
    plan = make_plan(request, catalog=loaded_catalog())
    if as_json:
        print_json(plan.to_dict())
    else:
        print_table([(choice.subject, choice.value, choice.reason, choice.owner) for choice in plan.choices])

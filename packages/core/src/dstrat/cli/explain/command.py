"""``dstrat explain``: the plan for some options, with the reason for each choice."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dstrat.cli.components import loaded_catalog
from dstrat.cli.estimate.command import in_order, make_estimates, memory_text, read_size, recommendation
from dstrat.cli.output import json_option, print_json, print_table
from dstrat.errors import ConflictError, RequestError

if TYPE_CHECKING:
    from dstrat.cli.measure.machine import Machine
    from dstrat.plugins.catalog import Catalog
    from dstrat.resolve import Plan, Request

_GIB = 2**30


@click.command(short_help="Explain what would run, and why.")
@click.option(
    "--strategy",
    default="auto",
    show_default=True,
    help='Alias of a strategy, "alias(option=value)", or "auto(memory)", which shards least of those that fit.',
)
@click.option("--accelerator", default="auto", show_default=True, help='Alias of an accelerator, or "gpu".')
@click.option("--devices", default="auto", show_default=True, help='How many or which: "4", "0,1", "-1".')
@click.option("--num-nodes", default=1, show_default=True, help="Number of machines.")
@click.option("--precision", default=None, help='Such as "bf16-mixed".')
@click.option("--model", help="Function that returns the training, as package.module:factory: shows memory per rank.")
@click.option(
    "--memory",
    help="Memory of a device, such as 80GiB.  By default that of this machine's, or in a dry run --machine's.",
)
@click.option("--host-memory", help="In a dry run, memory of a machine besides its devices.  By default --machine's.")
@click.option(
    "--nodes",
    type=click.IntRange(1),
    help="Dry run on so many machines, with --devices of all of them together; none need be there.",
)
@click.option("--batch", type=click.IntRange(1), help="In a dry run, samples of a step of all ranks.")
@click.option(
    "--machine",
    help="A machine of dstrat choose, such as h100x8 or a file: a dry run shows the time of a step, and whether it "
    'fits; for "auto" the recommended strategy is the one that dstrat choose ranks first.',
)
@json_option
def explain(
    strategy: str,
    accelerator: str,
    devices: str,
    num_nodes: int,
    precision: str | None,
    model: str | None,
    memory: str | None,
    host_memory: str | None,
    nodes: int | None,
    batch: int | None,
    machine: str | None,
    as_json: bool,
) -> None:
    """Explain what a Trainer with these options would run, and why.

    The function of --model is that of dstrat estimate.  With it the plan has the memory of a rank, and for "auto" the
    strategy that is recommended, by the memory of a device, or with --machine by the time of a step.

    --nodes shows a job on machines that are not there: the groups of ranks, the layers and the memory of each stage,
    what ranks send in a step inside machines and between them, and what would be refused.  Nothing is computed and no
    process is started, so that this takes seconds for any model on any machine.  Exits with 1 if something is refused.
    """
    if nodes is not None:
        from dstrat.cli.explain.dry_run import show_dry_run
        from dstrat.cli.measure.machine import read_machine
        from dstrat.resolve.strategies import AUTO_BY_MEMORY

        if num_nodes != 1:
            raise ConflictError("--nodes and --num-nodes are both numbers of machines: leave --num-nodes out")
        if model is None or not devices.isdecimal() or int(devices) == 0:
            raise RequestError("--nodes needs --model package.module:factory, and --devices with a number above 0")
        if strategy in ("auto", AUTO_BY_MEMORY):
            raise RequestError('--nodes needs a --strategy, such as "mesh(pp=2, tp=2)": `dstrat choose` ranks layouts')
        described = None if machine is None else read_machine(machine)
        usual = "cuda" if described is None else described.device_type
        accepted = show_dry_run(
            loaded_catalog(),
            strategy=strategy,
            accelerator=usual if accelerator == "auto" else accelerator,
            devices=int(devices),
            num_nodes=nodes,
            precision=precision or "32-true",
            model=model,
            batch_size=batch,
            memory=None if memory is None else read_size(memory, "--memory"),
            host_memory=None if host_memory is None else read_size(host_memory, "--host-memory"),
            machine=described,
            as_json=as_json,
        )
        sys.exit(0 if accepted else 1)
    for option, value in (("--batch", batch), ("--host-memory", host_memory)):
        if value is not None:
            raise ConflictError(f"{option} is for a dry run: give --nodes, or leave it out")
    if machine is not None and (strategy != "auto" or model is None):
        raise ConflictError("--machine is for a dry run, with --nodes, or for --strategy auto with --model")
    _explain_plan(strategy, accelerator, devices, num_nodes, precision, model, memory, machine, as_json=as_json)


def _explain_plan(
    strategy: str,
    accelerator: str,
    devices: str,
    num_nodes: int,
    precision: str | None,
    model: str | None,
    memory: str | None,
    machine_name: str | None,
    *,
    as_json: bool,
) -> None:
    from dstrat.cli.measure.machine import read_machine
    from dstrat.resolve import Request, make_plan
    from dstrat.resolve.strategies import AUTO_BY_MEMORY

    by_memory = strategy == AUTO_BY_MEMORY
    if model is None and (by_memory or memory is not None):
        raise RequestError(f"{'--strategy auto(memory)' if by_memory else '--memory'} needs --model: name the function")
    request = Request(
        strategy="auto" if by_memory else strategy,
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        precision=precision,
    )
    catalog = loaded_catalog()
    plan = make_plan(request, catalog=catalog)
    recommended = reason = None
    if model is not None and request.strategy == "auto":
        limit = _memory_of_device(plan) if memory is None else read_size(memory, "--memory")
        if machine_name is None:
            recommended, reason = _recommend(plan, catalog, model, limit)
        else:
            recommended, reason = _recommend_fastest(plan, catalog, model, limit, read_machine(machine_name))
        if by_memory:
            plan = _with_strategy(recommended, reason, request, catalog)
    rows = [(row.subject, row.value, row.reason, row.owner) for row in plan.choices]
    answer = plan.to_dict()
    if recommended is not None and reason is not None and not by_memory:
        rows.append(("recommended", recommended, reason, model or ""))
        answer["recommended"] = {"strategy": recommended, "reason": reason}
    if model is not None:
        estimates, reasons = make_estimates(
            catalog,
            model,
            [plan.to_dict()["catalog_names"]["strategy"]],
            accelerator=plan.accelerator,
            devices=plan.num_devices,
            num_nodes=plan.num_nodes,
            precision=plan.precision,
            limit=None if memory is None else read_size(memory, "--memory"),
        )
        value, text = memory_text(estimates[0]) if estimates else ("unknown", *reasons.values())
        if estimates and estimates[0].fits is not None:
            value += f", {'fits' if estimates[0].fits else 'does not fit'} into {memory}"
        rows.append(("memory per rank", value, text, model))
        answer["memory_per_rank"] = asdict(estimates[0]) if estimates else None
    if as_json:
        print_json(answer)
    else:
        print_table(rows)


# ``auto`` and ``auto(memory)`` for a model


def _memory_of_device(plan: Plan) -> int:
    """Return the memory of a device of this machine, which has those of the plan."""
    import torch

    from dstrat.cli.measure.benchmarks import device_memory

    return device_memory(torch.device(_type_of_device(plan)), plan.num_devices)


def _type_of_device(plan: Plan) -> str:
    from dstrat.plugins.catalog import get_catalog
    from dstrat.resolve.compatibility import device_type_of
    from dstrat.resolve.selection import select_offer

    catalog = get_catalog()
    selection = select_offer(catalog.find("accelerator", plan.to_dict()["catalog_names"]["accelerator"]), catalog)
    return device_type_of(selection)


def _recommend(plan: Plan, catalog: Catalog, model: str, limit: int) -> tuple[str, str]:
    """Return the strategy that shards least of those that fit, with the reason.

    Raises:
        RequestError: None fits.
    """
    estimates, _ = make_estimates(
        catalog,
        model,
        (),
        accelerator=plan.accelerator,
        devices=plan.num_devices,
        num_nodes=plan.num_nodes,
        precision=plan.precision,
        limit=limit,
    )
    estimates = in_order(estimates, limit, catalog)
    recommended = recommendation(estimates, limit)
    sizes = {one.strategy: f"{one.peak / _GIB:.1f} GiB" for one in estimates}
    if recommended is None:
        possible = (one for one in estimates if not one.problem)
        smallest = min(possible, key=lambda one: one.peak, default=None)
        least = "" if smallest is None else f"; {smallest.strategy} needs {sizes[smallest.strategy]}"
        raise RequestError(
            f"no strategy fits into {limit / _GIB:.1f} GiB with a tenth to spare{least}: give more --devices or "
            "--memory, or a smaller model or batch"
        )
    reason = f"shards least of those that fit: it needs {sizes[recommended]} of {limit / _GIB:.1f} GiB"
    if plan.strategy in sizes and plan.strategy != recommended:
        reason += f", and {plan.strategy} {sizes[plan.strategy]}"
    return recommended, reason


def _recommend_fastest(plan: Plan, catalog: Catalog, model: str, limit: int, machine: Machine) -> tuple[str, str]:
    """Return the layout that ``dstrat choose`` ranks first on a machine, with the reason.

    Raises:
        RequestError: The machine has other devices, or nothing fits.
    """
    from dstrat.cli.choose.candidates import Candidates, Workload

    if machine.devices < plan.num_devices or machine.device_type != _type_of_device(plan):
        raise RequestError(
            f"--machine {machine.name} has {machine.devices} devices of type {machine.device_type}, and the plan "
            f"{plan.num_devices} of {plan.accelerator}: give the machine of the plan, or --nodes for a dry run"
        )
    workload = Workload(
        model=model,
        machine=machine,
        devices=plan.num_devices * plan.num_nodes,
        batch_size=None,
        precisions=(plan.precision,),
        memory=limit,
        devices_per_machine=plan.num_devices,
    )
    candidates = Candidates(catalog, workload).rank(()).candidates
    if not candidates:
        raise RequestError(f"no layout fits into {limit / _GIB:.1f} GiB: `dstrat choose` says what each needs")
    first = candidates[0]
    reason = f"dstrat choose ranks it first: a step takes {1000 * first.time.total:.1f} ms by its model"
    of_plan = next((one for one in candidates if one.strategy == plan.strategy), first)
    if of_plan is not first:
        reason += f", and {1000 * of_plan.time.total:.1f} ms with {plan.strategy}"
    return first.strategy, reason


def _with_strategy(strategy: str, reason: str, request: Request, catalog: Catalog) -> Plan:
    """Return the plan of a request with another strategy."""
    from dstrat.resolve import make_plan

    plan = make_plan(dataclasses.replace(request, strategy=strategy), catalog=catalog)
    rows: Any = (dataclasses.replace(row, reason=reason) if row.subject == "strategy" else row for row in plan.choices)
    return dataclasses.replace(plan, choices=tuple(rows))

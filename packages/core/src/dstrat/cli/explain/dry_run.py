"""Dry run of a job: groups, stages, memory and traffic of its ranks, of which none exists."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dstrat.cli.choose.candidates import host_problem, value_or_reason
from dstrat.cli.choose.cost import step_time
from dstrat.cli.estimate.command import MOST_OF_MEMORY, Cases, measure_factory, training_maker
from dstrat.cli.estimate.fake_step import measure_module
from dstrat.cli.estimate.ranks import host_of_machine, memory_of_ranks
from dstrat.cli.output import print_json, print_table
from dstrat.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dstrat.cli.choose.cost import StepTime
    from dstrat.cli.estimate.ranks import RankMemory
    from dstrat.cli.measure.machine import Machine
    from dstrat.interfaces.communication import Collective, CommunicationLayout
    from dstrat.interfaces.memory import TrainingSize
    from dstrat.plugins.catalog import Catalog

_GIB = 2**30
_MOST_LAYERS = 2
"""Names of consecutive layers that are shown in full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """A job that is not there.

    Attributes:
        rows: Rows of the plan: the processes, and what the strategy describes.
        training: Sizes of the training with the batch of a rank.
        memory: Memory of the ranks, one entry for each stage.
        host: Memory of the host of a machine, of all its ranks, in bytes.
        host_is_known: Whether it is known what memory the host has.
        communication: What a rank communicates in a step; None if that is not known.
        refused: Reasons why the job would not run.
    """

    rows: Sequence[tuple[str, str, str]]
    training: TrainingSize
    memory: Sequence[RankMemory]
    host: int
    host_is_known: bool
    communication: CommunicationLayout | None
    refused: Sequence[str]


def show_dry_run(
    catalog: Catalog,
    *,
    strategy: str,
    accelerator: str,
    devices: int,
    num_nodes: int,
    precision: str,
    model: str,
    batch_size: int | None,
    memory: int | None,
    host_memory: int | None,
    machine: Machine | None,
    as_json: bool,
) -> bool:
    """Print a dry run, and return whether the job would run.

    Args:
        catalog: The catalog.
        strategy: Alias with options.
        accelerator: Alias of the accelerator.
        devices: Number of devices of all machines together.
        num_nodes: Number of machines.
        precision: Flag of the precision.
        model: Name of the function that returns the training.
        batch_size: Samples of an optimizer step of all ranks; None for the function's batch on each group of ranks.
        memory: Memory of a device in bytes; None for that of the machine, or any without one.
        host_memory: Memory of a machine besides its devices, likewise.
        machine: The machine, for the time of a step; None for none.
        as_json: Whether JSON is printed.
    """
    if devices % num_nodes:
        raise RequestError(f"--devices {devices} do not divide among --nodes {num_nodes}: give a multiple of it")
    per_machine = devices // num_nodes
    if machine is not None and per_machine > machine.devices:
        fewest = next(n for n in range(num_nodes, devices + 1) if devices % n == 0 and devices // n <= machine.devices)
        raise RequestError(
            f"--devices {devices} are {per_machine} on each of {num_nodes} machines, and {machine.name} has "
            f"{machine.devices}: give --nodes {fewest}"
        )
    if machine is not None and memory is None:
        memory = machine.memory
    if machine is not None and host_memory is None:
        host_memory = machine.host_memory
    cases = Cases(catalog, accelerator, per_machine, num_nodes, precision)
    _check_device_type(machine, accelerator, cases.device_type)
    ((offer, make_strategy),) = cases.strategies([strategy])
    planned = make_strategy()
    described = planned.describe_layout(devices, per_machine)
    plugin = planned.precision_for(precision) or cases.new_precision()
    refused: list[str] = []
    ranks: Any = {"device_type": cases.device_type, "world_size": devices, "ranks_per_machine": per_machine}
    of_module = planned.communication_layout(measure_module(training_maker(model), plugin, **ranks))
    groups = devices // (1 if of_module is None else of_module.ranks_per_batch)
    if batch_size is not None and batch_size % groups:
        refused.append(
            f"{batch_size} samples do not divide among {groups} groups of ranks: give a multiple of {groups}"
        )
        batch_size = None
    batch_of_group = None if batch_size is None else batch_size // groups
    training = measure_factory(
        model,
        cases.device_type,
        per_machine,
        num_nodes,
        batch_of_group,
        plugin,
        planned.saved_activations,
        planned.forward_dtype(plugin),
    )
    communication, samples = planned.communication_layout(training), training.batch_size * groups
    problem = value_or_reason(partial(planned.check_training, training))
    if problem is not None:
        refused.append(problem)
    of_ranks = memory_of_ranks(planned, training)
    peak = max((one.peak for one in of_ranks), default=0)
    if memory is not None and peak > MOST_OF_MEMORY * memory:
        limit = f"{MOST_OF_MEMORY:.0%} of a device's {memory / _GIB:.1f} GiB are {MOST_OF_MEMORY * memory / _GIB:.1f}"
        refused.append(f"a rank needs {peak / _GIB:.1f} GiB, and {limit}")
    host = host_of_machine(of_ranks, per_machine)
    of_host = host_problem(host, host_memory)
    if of_host is not None:
        refused.append(of_host)
    run = DryRun(
        rows=[
            ("strategy", offer.alias_text, offer.owner_label),
            ("processes", str(devices), f"{per_machine} on each of {num_nodes} machines"),
            *described,
            ("batch", f"{samples} samples", f"{training.batch_size} for each of {groups} groups of ranks"),
        ],
        training=training,
        memory=of_ranks,
        host=host,
        host_is_known=host_memory is not None,
        communication=communication,
        refused=refused,
    )
    time = None if machine is None else _time(run, machine)
    if as_json:
        print_json(_as_dict(run, time))
    else:
        _print(run, per_machine, time)
    return not refused


# Time, and traffic


def _check_device_type(machine: Machine | None, accelerator: str, device_type: str) -> None:
    if machine is not None and machine.device_type != device_type:
        raise RequestError(
            f"--machine {machine.name} has devices of type {machine.device_type}, and --accelerator {accelerator} "
            f"those of type {device_type}: leave --accelerator out, or give another machine"
        )


def _time(run: DryRun, machine: Machine) -> StepTime | None:
    """Return the time of a step on a machine; None if it is not known."""
    if run.communication is None or not run.memory:
        return None
    fullest = max(run.memory, key=lambda one: one.peak)
    return step_time(machine, run.training, fullest.memory, run.communication)


def traffic(collectives: Iterable[Collective], ranks_per_machine: int) -> dict[str, float]:
    """Return the bytes that a rank sends in a step, by the scope of its groups.

    Args:
        collectives: The collectives of a rank.
        ranks_per_machine: Number of ranks on each machine.
    """
    sent = {"between machines": 0.0, "inside a machine": 0.0}
    for one in collectives:
        share = one.share_between_machines(ranks_per_machine)
        sent["between machines"] += share * one.sent
        sent["inside a machine"] += (1 - share) * one.sent
    return {scope: size for scope, size in sent.items() if size}


def _scope(collective: Collective, ranks_per_machine: int) -> str:
    return "between machines" if collective.crosses_machines(ranks_per_machine) else "inside a machine"


# The result


def _as_dict(run: DryRun, time: StepTime | None) -> dict[str, Any]:
    sent = {} if run.communication is None else traffic(run.communication.collectives, run.training.ranks_per_machine)
    return {
        "plan": [{"subject": subject, "value": value, "reason": reason} for subject, value, reason in run.rows],
        "memory": [
            {
                "layers": one.layers,
                "ranks": [one.ranks[0], one.ranks[-1]],
                **asdict(one.memory),
                "activations": one.activations,
                "host": one.host,
                "peak": one.peak,
            }
            for one in run.memory
        ],
        "host_of_machine": run.host,
        "not_checked": _not_checked(run),
        "communication": None if run.communication is None else asdict(run.communication),
        "sent": sent,
        "seconds": None if time is None else {**asdict(time), "total": time.total},
        "refused": run.refused,
    }


def _print(run: DryRun, ranks_per_machine: int, time: StepTime | None) -> None:
    print_table(run.rows)
    if run.memory:
        click.echo()
        headers = ["GiB of a rank", "ranks", "params", "grads", "optim", "activ", "other", "host", "peak"]
        print_table([_memory_row(number, one) for number, one in enumerate(run.memory)], headers, unbroken=headers[1:])
    communication = run.communication
    if communication is not None and communication.collectives:
        click.echo()
        headers = ["a rank sends in a step", "messages", "GiB", "to a group of", "its first", "where"]
        rows = [_traffic_row(one, ranks_per_machine) for one in communication.collectives]
        print_table(rows, headers, unbroken=headers[1:])
        for scope, size in sorted(traffic(communication.collectives, ranks_per_machine).items()):
            click.echo(
                f"{size / _GIB:.2f} GiB {scope}, {ranks_per_machine * size / _GIB:.1f} GiB by all ranks of a machine"
            )
    for sentence in _sentences(run, time):
        click.echo(textwrap.fill(sentence, shutil.get_terminal_size().columns, subsequent_indent="  "))


def _sentences(run: DryRun, time: StepTime | None) -> Iterable[str]:
    if time is not None:
        parts = {name: value for name, value in asdict(time).items() if value}
        listed = ", ".join(f"{name} {1000 * value:.0f}" for name, value in parts.items())
        yield f"a step takes {1000 * time.total:.0f} ms: {listed}"
    if not run.memory:
        yield "the strategy does not declare its memory"
    if run.communication is None:
        yield "the strategy does not declare what it communicates"
    assumptions = {one.memory.assumption for one in run.memory}
    assumptions |= set() if run.communication is None else {run.communication.assumption}
    for assumption in sorted(assumptions):
        # What memory assumes is often a part of what communication assumes.
        if assumption and not any(assumption != other and assumption in other for other in assumptions):
            yield f"if {assumption}"
    yield from _not_checked(run)
    for reason in run.refused:
        yield f"refused: {reason}"


def _not_checked(run: DryRun) -> list[str]:
    """Return a sentence about the memory of the host, if the job uses it and it is not known what there is."""
    if run.host_is_known or not run.host:
        return []
    note = (
        f"not checked: all ranks of a machine need {run.host / _GIB:.1f} GiB of its host; --host-memory, or a "
        "--machine that has host_memory, checks whether it has them"
    )
    return [note]


def _memory_row(number: int, one: RankMemory) -> tuple[str, ...]:
    memory = one.memory
    in_step = memory.step_buffers + memory.reduction_buffer
    other = memory.buffers + in_step + max(0, memory.accumulated - memory.gradients)
    sizes = (memory.parameters, memory.gradients, memory.optimizer_state, one.activations, other, one.host, one.peak)
    name = f"{number}: {_layer_names(one.layers)}" if one.layers else "all layers"
    ranks = f"{one.ranks[0]}-{one.ranks[-1]}"
    return name, ranks, *(f"{size / _GIB:.2f}" if size else "" for size in sizes)


def _layer_names(names: Sequence[str]) -> str:
    """Return names of layers, of several numbered ones in a row the first and the last."""
    texts: list[str] = []
    rows: list[list[str]] = []
    for name in names:
        stem, _, last = name.rpartition(".")
        if rows and last.isdecimal() and rows[-1][-1].rpartition(".")[::2] == (stem, str(int(last) - 1)):
            rows[-1].append(name)
        else:
            rows.append([name])
    for row in rows:
        texts += row if len(row) <= _MOST_LAYERS else [f"{row[0]} to {row[-1].rpartition('.')[2]}"]
    return ", ".join(texts)


def _traffic_row(one: Collective, ranks_per_machine: int) -> tuple[str, ...]:
    ranks = [str(one.stride * position) for position in range(one.ranks)]
    shown = ", ".join(ranks) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
    return (
        one.kind,
        f"{one.messages:.3f}".rstrip("0").rstrip("."),
        f"{one.sent / _GIB:.2f}",
        f"{one.ranks} ranks",
        shown,
        _scope(one, ranks_per_machine),
    )

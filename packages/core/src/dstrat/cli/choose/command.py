"""``dstrat choose``: a ranking of the layouts of a training on a machine, before anything runs."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import re
import shutil
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dstrat.cli.components import loaded_catalog
from dstrat.cli.estimate.command import MOST_OF_MEMORY, read_size
from dstrat.cli.output import json_option, print_json, print_table
from dstrat.cli.runs.charts import check_picture
from dstrat.errors import DstratError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dstrat.cli.choose.candidates import Candidate, LayoutRanking, TooLarge, Workload
    from dstrat.cli.measure.machine import Machine

_SHOWN = 10
_MOST_NAMES = 2  # of strategies with the same reason
_GIB = 2**30
_NUMBER = re.compile(r"\d+(\.\d+)?")
_VERBS = {
    "compute": "computes",
    "communication": "communicates",
    "idle": "waits",
    "optimizer": "steps the optimizer",
    "offload": "copies from and to the host",
}


@click.command(short_help="Choose the layout for a model and a machine.")
@click.argument("training", metavar="TRAINING")
@click.option("--devices", required=True, type=click.IntRange(1), help="Number of devices, of all machines together.")
@click.option(
    "--machine",
    "machine_name",
    help="Known machine such as h100x8, or a file.  By default this one, which is measured.",
)
@click.option("--device-memory", help="Memory of a device, such as 80GiB.  By default the machine's.")
@click.option("--host-memory", help="Memory of a machine besides its devices, such as 1TiB.  By default the machine's.")
@click.option("--batch", type=click.IntRange(1), help="Samples of a step.  By default the factory's on each device.")
@click.option("--precision", help='Such as "bf16-mixed".  By default 32-true and bf16-mixed are compared.')
@click.option(
    "--strategy",
    "aliases",
    multiple=True,
    help='Alias, or "alias(option=value)"; several times for several.  By default all.',
)
@click.option("--plot", type=click.Path(path_type=Path), help="Write a picture: .png, .svg, .pdf or .html.")
@json_option
def choose(
    training: str,
    devices: int,
    machine_name: str | None,
    device_memory: str | None,
    host_memory: str | None,
    batch: int | None,
    precision: str | None,
    aliases: tuple[str, ...],
    plot: Path | None,
    as_json: bool,
) -> None:
    """Rank the layouts of a training on a machine by the predicted time of an optimizer step, before anything runs.

    TRAINING is script.py:factory or package.module:factory, the function of dstrat estimate.  Every installed strategy
    and every mesh of the devices is compared, with the largest batch that fits.  The time is that of a model: work of a
    step on tensors without values, over rates of the machine, and what each strategy says that it communicates.
    Machines are known by datasheets, or described by a file of dstrat measure; without --machine this one is measured.
    The table has the fastest layouts, of each strategy those that need less memory than its faster ones.  Exits with 1
    if nothing fits.
    """
    from dstrat.cli.choose.candidates import Candidates, TooLarge, Workload, undominated
    from dstrat.cli.measure.machine import read_machine

    if plot is not None:
        check_picture(plot, "--plot")
    machine = _measured_machine(devices) if machine_name is None else read_machine(machine_name)
    if host_memory is not None:
        machine = dataclasses.replace(machine, host_memory=read_size(host_memory, "--host-memory"))
    if devices > machine.devices and devices % machine.devices:
        raise RequestError(
            f"--devices {devices} are no number of whole machines: {machine_name} has {machine.devices} devices, so "
            f"that --devices {machine.devices * (devices // machine.devices)} is possible"
        )
    if machine_name is not None and machine_name.endswith(".json") and machine.unmeasured:
        click.echo(
            f"{machine_name} has no {' and no '.join(machine.unmeasured)}, which counts as nothing: `dstrat measure "
            f"--output {machine_name}` measures it",
            err=True,
        )
    workload = Workload(
        model=training,
        machine=machine,
        devices=devices,
        batch_size=batch,
        precisions=_precisions(machine) if precision is None else (precision,),
        memory=machine.memory if device_memory is None else read_size(device_memory, "--device-memory"),
    )
    compared = Candidates(loaded_catalog(), workload)
    smaller: Sequence[Candidate] = ()
    with contextlib.redirect_stdout(sys.stderr):  # what hooks of the module print does not get into JSON
        ranking = compared.rank(aliases)
        if ranking.candidates:
            less = int((ranking.candidates[0].peak - 1) / MOST_OF_MEMORY)
            smaller = compared.rank(aliases, less).candidates
    if plot is not None and ranking.candidates:
        from dstrat.cli.choose.picture import save_picture

        save_picture(plot, undominated(ranking.candidates)[:_SHOWN], workload)
    if as_json:
        listed = [_as_dict(one, workload) for one in ranking.candidates]
        refused = {name: str(reason) for name, reason in ranking.refused.items()}
        too_large = {name: asdict(one) for name, one in ranking.refused.items() if isinstance(one, TooLarge)}
        why = reasons(ranking.candidates, smaller, workload) if ranking.candidates else []
        print_json(
            {
                "candidates": listed,
                "reasons": why,
                "refused": refused,
                "too_large": too_large,
                "unusable": ranking.unusable,
                "not_checked": _not_checked(ranking.candidates, machine),
            }
        )
    else:
        _print(ranking, smaller, workload)
    if not ranking.candidates:
        sys.exit(1)


def _measured_machine(devices: int) -> Machine:
    """Measure this machine.

    Raises:
        RequestError: It does not have so many devices.
    """
    from dstrat.cli.measure import benchmarks
    from dstrat.cli.measure.machine import known_machines
    from dstrat.launch.job import usable_processors
    from dstrat.own_loop.loop import OwnLoop, build
    from dstrat.parallel.strategy import ParallelStrategy

    try:
        strategy = build(strategy=ParallelStrategy(start_method="fork"), devices=devices)
        has_them = strategy.root_device.type != "cpu" or devices <= usable_processors()
    except DstratError:
        has_them = False
    if not has_them:
        raise RequestError(
            f"this machine, which is measured without --machine, does not have --devices {devices}: give --machine, "
            f"one of {', '.join(known_machines())}, or a file of `dstrat measure`"
        )
    click.echo("measuring this machine; `dstrat measure --output machine.json` keeps what is measured", err=True)
    return OwnLoop(strategy).launch(benchmarks.measure, platform.node())


def _precisions(machine: Machine) -> tuple[str, ...]:
    """Return the precisions that keep parameters in float32, of those whose products the machine has a rate of."""
    dtypes = {"32-true": "float32", "bf16-mixed": "bfloat16"}
    flags = tuple(flag for flag, dtype in dtypes.items() if dtype in machine.flops)
    if not flags:
        raise RequestError(
            f"machine {machine.name!r} has no rate of float32 or bfloat16: give a --precision that computes in "
            f"{' or '.join(machine.flops) or 'something else'}, or add a rate to its file"
        )
    return flags


def _as_dict(candidate: Candidate, workload: Workload) -> dict[str, Any]:
    communication = asdict(candidate.communication)
    return {
        "strategy": candidate.strategy,
        "precision": candidate.precision,
        "batch_size": candidate.training.batch_size,
        "accumulate_grad_batches": candidate.training.accumulate_grad_batches,
        "memory": asdict(candidate.memory) | {"peak": candidate.peak, "host_of_machine": candidate.host},
        "seconds": asdict(candidate.time) | {"total": candidate.time.total},
        "communication": communication,
        "trainer": trainer_line(candidate, workload),
    }


# The text


def _print(ranking: LayoutRanking, smaller: Sequence[Candidate], workload: Workload) -> None:
    from dstrat.cli.choose.candidates import TooLarge, undominated

    candidates = ranking.candidates
    width = shutil.get_terminal_size().columns
    if candidates:
        headers = ["ms of a step", "total", "compute", "comm", "idle", "optim", "host", "batch", "GiB"]
        shown = undominated(candidates)[:_SHOWN]
        rows = [_row(one) for one in shown]
        if len(workload.precisions) > 1:
            headers.append("precision")
            rows = [(*row, one.precision) for row, one in zip(rows, shown, strict=True)]
        print_table(rows, headers, unbroken=headers[1:])
        if len(candidates) > len(shown):
            click.echo(f"and {len(candidates) - len(shown)} more that fit")
        click.echo()
        notes = (*_assumptions(candidates[0]), *_not_checked(candidates, workload.machine))
        for sentence in (*reasons(candidates, smaller, workload), *notes):
            click.echo(textwrap.fill(sentence, width))
    _print_refused(ranking, width)
    if candidates:
        click.echo(f"\n{trainer_line(candidates[0], workload)}")
    elif any(isinstance(reason, TooLarge) for reason in ranking.refused.values()):
        click.echo("no layout fits: take more devices, a smaller --batch or a lower --precision")
    else:
        click.echo("no layout can be compared, for the reasons above")


def _row(one: Candidate) -> tuple[str, ...]:
    time, batches = one.time, one.training.accumulate_grad_batches
    seconds = (time.total, time.compute, time.communication, time.idle, time.optimizer, time.offload)
    size = f"{one.training.batch_size}" + (f" x {batches}" if batches > 1 else "")
    return one.strategy, *map(_milliseconds, seconds), size, _gib(one.peak)


def _gib(size: int) -> str:
    value = size / _GIB
    return f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"  # a small model does not need 0.0


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value else ""


def reasons(candidates: Sequence[Candidate], smaller: Sequence[Candidate], workload: Workload) -> list[str]:
    """Return sentences that say why the first candidate wins, and what would change the choice.

    Args:
        candidates: The candidates in order.
        smaller: Those for devices on which the first one does not fit, in order.
        workload: The training and the devices.
    """
    from dstrat.cli.choose.candidates import SAME_TIME, undominated

    def name(one: Candidate) -> str:
        return f"{one.strategy} with {one.precision}" if len(workload.precisions) > 1 else one.strategy

    first, fastest = candidates[0], _fastest(candidates)
    # One of another strategy says more than the same one in another precision.
    remaining = [one for one in undominated(candidates) if one.strategy != first.strategy] or candidates[1:]
    if not remaining:
        return [f"{name(first)} is the only layout that fits.", *_with_less_memory(first, smaller, name)]
    second = remaining[0]
    slower = second.time.total / first.time.total - 1
    saved = {name: getattr(second.time, name) - getattr(first.time, name) for name in _VERBS}
    slowest = max(saved, key=lambda name: saved[name])
    if fastest.time.total < first.time.total:
        less = f"{1 - fastest.time.total / first.time.total:.1%}"
        compared = "as long" if less == "0.0%" else f"{less} less"
        why = f"{name(fastest)} takes {compared}, and is not simpler"
        sentences = [f"{name(first)} is as fast as any layout, to {SAME_TIME:.0%}: {why}."]
    elif slower <= SAME_TIME:
        sentences = [f"{name(first)} is the fastest; {name(second)} takes as long, to {SAME_TIME:.0%}."]
    else:
        more = f"it {_VERBS[slowest]} {_milliseconds(saved[slowest])} ms more"
        sentences = [f"{name(first)} is the fastest; {name(second)} takes {slower:.1%} longer: {more}."]
    sentences += _with_less_memory(first, smaller, name)
    for factor, change in ((0.5, "half as fast"), (2.0, "twice as fast")):
        machine = _with_links(workload.machine, factor)
        faster = _fastest([one.on(machine) for one in candidates])
        if name(faster) != name(first) and (1 + SAME_TIME) * faster.time.total < first.on(machine).time.total:
            sentences.append(f"With links {change}, {name(faster)} is the fastest.")
    return sentences


def _with_less_memory(
    first: Candidate, smaller: Sequence[Candidate], name: Callable[[Candidate], str]
) -> Iterator[str]:
    if smaller:
        batches = smaller[0].training.accumulate_grad_batches
        of_several = f" with {batches} batches of {smaller[0].training.batch_size}" if batches > 1 else ""
        needed = first.peak / MOST_OF_MEMORY
        size = f"{needed / _GIB:.1f} GiB" if needed >= 0.1 * _GIB else f"{needed / 2**20:.1f} MiB"
        yield f"With less than {size} on each device the choice is {name(smaller[0])}{of_several}."


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda one: one.time.total)


def _with_links(machine: Machine, factor: float) -> Machine:
    links = [dataclasses.replace(link, bandwidth=factor * link.bandwidth) for link in machine.links]
    return dataclasses.replace(machine, links=links)


def _assumptions(candidate: Candidate) -> list[str]:
    assumption = candidate.memory.assumption or candidate.communication.assumption
    return [f"{candidate.strategy} if {assumption}."] if assumption else []


def _not_checked(candidates: Sequence[Candidate], machine: Machine) -> list[str]:
    """Return a sentence about the memory of the host, if layouts use it and the machine does not say what it has."""
    largest = max((one.host for one in candidates), default=0)
    if machine.host_memory is not None or not largest:
        return []
    note = (
        f"Memory of the host, of which layouts that offload need up to {largest / _GIB:.1f} GiB on a machine, is not "
        f"checked: {machine.name} has no host_memory, so give --host-memory, or a file of `dstrat measure`."
    )
    return [note]


# What is not compared


def _print_refused(ranking: LayoutRanking, width: int) -> None:
    """Print what does not fit as a table, and other reasons as sentences; strategies that have the same are one."""
    from dstrat.cli.choose.candidates import TooLarge

    too_large = {name: reason for name, reason in ranking.refused.items() if isinstance(reason, TooLarge)}
    refused = {name: str(reason) for name, reason in ranking.refused.items() if name not in too_large}
    if too_large:
        click.echo()
        headers = ["does not fit, GiB", "peak", "params", "grads", "optim", "activ", "other", "batch"]
        print_table(_memory_rows(too_large), headers, unbroken=headers[1:])
    lines = [f"not compared: {names}: {reason}" for reason, names in _grouped(refused)]
    if ranking.unusable:
        names = ", ".join(dict.fromkeys(name.partition("(")[0] for name in ranking.unusable))
        lines.append(f"cannot run here: {names} (--json says why)")
    if lines:
        click.echo()
    for line in lines:
        click.echo(textwrap.fill(line, width, subsequent_indent="  "))


def _memory_rows(too_large: Mapping[str, TooLarge]) -> list[tuple[str, ...]]:
    """Return the rows of layouts that do not fit: of each strategy the one that needs least, from the smallest on."""
    layouts: dict[str, list[TooLarge]] = {}
    for name, one in too_large.items():
        layouts.setdefault(name.partition("(")[0], []).append(one)
    groups: dict[tuple[Any, ...], list[str]] = {}
    for alias, several in sorted(layouts.items(), key=lambda item: min(one.peak for one in item[1])):
        least = min(several, key=lambda one: one.peak)
        groups.setdefault((len(several), least.batch_size, least.peak, *least.sizes.values()), []).append(alias)
    return [
        (
            _names(aliases) + (f" ({count} layouts)" if count > 1 else ""),
            *(f"{size / _GIB:.1f}" if size else "" for size in sizes),
            str(batch_size),
        )
        for (count, batch_size, *sizes), aliases in groups.items()
    ]


def _grouped(refused: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return reasons with the names that they are for, those of layouts of a strategy that differ in numbers as one."""
    similar: dict[tuple[str, str], list[str]] = {}
    for name, reason in refused.items():
        kind = _NUMBER.sub("", reason.partition("(")[0])
        similar.setdefault((name.partition("(")[0], kind), []).append(name)
    groups: dict[str, list[str]] = {}
    for (alias, _), names in similar.items():
        shown = names[0] if len(names) == 1 else f"{alias} ({len(names)} layouts, such as {names[0]})"
        groups.setdefault(refused[names[0]], []).append(shown)
    return [(reason, _names(names)) for reason, names in groups.items()]


def _names(names: Sequence[str]) -> str:
    """Return a few names, or the shortest of many."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{min(names, key=len)} and {len(names) - 1} like it"


def trainer_line(candidate: Candidate, workload: Workload) -> str:
    """Return the call of a Trainer that trains with a candidate."""
    batches = candidate.training.accumulate_grad_batches
    options = {
        "strategy": candidate.strategy,
        "accelerator": workload.machine.device_type,
        "devices": workload.ranks_per_machine,
        **({"num_nodes": workload.num_nodes} if workload.num_nodes > 1 else {}),
        **({"precision": candidate.precision} if candidate.precision != "32-true" else {}),
        **({"accumulate_grad_batches": batches} if batches > 1 else {}),
    }
    arguments = ", ".join(f"{name}={_literal(value)}" for name, value in options.items())
    return f"Trainer({arguments})  # batches of {candidate.training.batch_size}"


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)

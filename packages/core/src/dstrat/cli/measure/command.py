"""``dstrat measure``: a file with the speed of this machine, for ``dstrat choose``."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dstrat.cli.output import json_option, print_table
from dstrat.errors import RequestError

if TYPE_CHECKING:
    from dstrat.cli.measure.machine import Machine

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@click.command(short_help="Measure the speed of this machine.")
@click.option("--accelerator", default="auto", show_default=True, help='Alias of an accelerator, or "gpu".')
@click.option("--devices", default="auto", show_default=True, help='How many or which: "4", "0,1", "-1".')
@click.option("--num-nodes", default=1, show_default=True, type=click.IntRange(1), help="Number of machines.")
@click.option("--name", help="Name of the machine.  By default its host name.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File for the result, as JSON.")
@json_option
def measure(
    accelerator: str, devices: str, num_nodes: int, name: str | None, output: Path | None, as_json: bool
) -> None:
    """Measure matrix products, copies and collectives on all devices at once, in under a minute.

    The file of --output describes the machine for dstrat choose --machine.  Measure with as many devices as a training
    will have on each machine, as they share processors, memory and links.  Links between machines are measured where
    the command runs on several, with --num-nodes, by torchrun or a scheduler.
    """
    from dstrat.cli.measure import benchmarks
    from dstrat.own_loop.loop import OwnLoop, build
    from dstrat.parallel.strategy import ParallelStrategy

    strategy = build(
        strategy=ParallelStrategy(start_method="fork"), accelerator=accelerator, devices=devices, num_nodes=num_nodes
    )
    if output is not None and not output.absolute().parent.is_dir():
        raise RequestError(f"--output {output}: there is no folder {output.parent}, so create it first")
    begin = time.monotonic()
    machine = OwnLoop(strategy).launch(benchmarks.measure, name or platform.node())
    if output is not None and strategy.is_global_zero:
        output.write_text(machine.to_json(), encoding="utf-8")
    if not strategy.is_global_zero:
        return
    if as_json:
        click.echo(machine.to_json(), nl=False)
        return
    _print(machine)
    written = f", written to {output}" if output else "; --output machine.json writes it"
    click.echo(f"\nmeasured in {time.monotonic() - begin:.0f} s{written}")


def _print(machine: Machine) -> None:
    rows = [
        ("devices", f"{machine.devices} x {machine.device}", f"{machine.memory / 2**30:.1f} GiB of each"),
        *(("matrix product", f"{short_rate(rate)}FLOP/s", dtype) for dtype, rate in machine.flops.items()),
        ("copy", f"{short_rate(machine.memory_bandwidth)}B/s", "read and written"),
        ("copy from host", f"{short_rate(machine.host_bandwidth)}B/s", ""),
        *(() if machine.host_memory is None else (("host", f"{machine.host_memory / 2**30:.1f} GiB", "of all ranks"),)),
        ("operation", f"{machine.operation_latency * 1e6:.1f} us", "on 16 elements"),
    ]
    if machine.operand_overlap is not None:
        rows.append(("operands", f"{machine.operand_overlap:.0%}", "of their time hidden by products"))
    if machine.hook_latency:
        rows.append(("hooks", f"{machine.hook_latency * 1e6:.1f} us", "of a layer, in both passes"))
    if machine.page_latency:
        rows.append(("new memory", f"{machine.page_latency * 1e6:.2f} us", "of a page of 4 KiB, when first written"))
    for link in machine.links:
        span = "ranks" if link.scope == "machine" else "machines"
        rows.append(
            (
                link.kind,
                f"{short_rate(link.bandwidth)}B/s",
                f"{link.ranks} {span}, {link.latency * 1e6:.0f} us at least",
            )
        )
    if machine.links:
        rows.append(("overlap", f"{machine.overlap:.0%}", "of an all-reduce hidden by products"))
    print_table(rows)


def short_rate(value: float) -> str:
    """Return a rate per second with three digits and a prefix, such as ``"1.35 G"``."""
    factor, prefix = next(((factor, prefix) for factor, prefix in _UNITS if value >= factor), (1.0, ""))
    return f"{value / factor:.3g} {prefix}"

"""``dstrat verify``: whether a strategy computes the same as one device, on CPU processes."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dstrat.cli.components import loaded_catalog
from dstrat.cli.output import json_option, print_json, print_table
from dstrat.errors import DstratError, MisuseError
from dstrat.plugins.options import parse_alias

if TYPE_CHECKING:
    from dstrat.cli.verify.compare import Comparison
    from dstrat.cli.verify.training import VerifiedTraining
    from dstrat.interfaces.strategy import Strategy

_MOST_NAMES = 5


@click.command(short_help="Compare a training with a strategy with one device.")
@click.argument("training", metavar="TRAINING")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS...]")
@click.option("--strategy", "alias", required=True, help='Alias, or "alias(option=value)".')
@click.option("--devices", default=2, show_default=True, type=click.IntRange(1), help="Number of CPU processes.")
@click.option("--steps", default=3, show_default=True, type=click.IntRange(1), help="Number of training steps.")
@click.option(
    "--layers", "num_layers", type=click.IntRange(1), help="Keep this many of the layers that repeat.  By default all."
)
@click.option("--tolerance", default=1e-5, show_default=True, help="Largest relative difference that counts as none.")
@json_option
def verify(
    training: str,
    arguments: tuple[str, ...],
    alias: str,
    devices: int,
    steps: int,
    num_layers: int | None,
    tolerance: float,
    as_json: bool,
) -> None:
    """Train a few steps on one device and with a strategy, on CPU processes, and print what differs and where first.

    TRAINING is a script, which is run up to its first trainer.fit with the ARGUMENTS after "--", and whose Trainer gets
    one CPU here in place of its hardware, strategy and precision; or package.module:factory, a function that returns
    (module, batch), with a batch for all processes together.  The outputs of layers, sample by sample, and the
    gradients of a step are compared, and the losses of all steps with the module's own optimizer.  Dropout is off, of
    layers and of functions, as random numbers depend on the layout.  Exits with 1 if something differs.

    With --layers a module is reduced before its parameters are in memory: of equal layers that follow one another in a
    ModuleList, Sequential or ModuleDict the first ones are kept; of a model of transformers, those of its config.
    """
    from dstrat.cli.verify.training import read

    read_training = read(training, steps, num_layers, arguments)  # first, as it may register the strategy
    comparisons, draws = _compare(read_training, alias, devices, tolerance)
    differs = any(one.differing for one in comparisons)
    if as_json:
        values = [asdict(one) for one in comparisons]
        result = {"strategy": alias, "devices": devices, "same": not differs, "reduced": read_training.reduced}
        print_json({**result, "draws_random_numbers": draws, "comparisons": values})
    else:
        for name, (before, after) in read_training.reduced.items():
            click.echo(f"{name}: {after} of {before} layers")
        _print(comparisons, f"{alias} on {devices} CPU processes", tolerance)
        if differs and draws:
            click.echo(
                f"{type(read_training.module).__name__} draws random numbers in a step, not for dropout, which is off: "
                "they depend on the layout, and may be all that differs"
            )
    sys.exit(1 if differs else 0)


def _compare(training: VerifiedTraining, alias: str, devices: int, tolerance: float) -> tuple[list[Comparison], bool]:
    """Return the comparisons, and whether a step on one device draws random numbers."""
    from dstrat.cli.verify import compare
    from dstrat.cli.verify.training import record

    with tempfile.TemporaryDirectory(prefix="dstrat_verify_") as folder:
        records = {}
        for shows_gradients in (True, False):
            paths = {name: Path(folder, f"{name}-{shows_gradients}") for name in ("one", "other")}
            for path in paths.values():
                path.mkdir()
            _record_one_device(training, alias, paths["one"], shows_gradients=shows_gradients)
            record(training, _strategy(alias), devices, paths["other"], shows_gradients=shows_gradients)
            for name, path in paths.items():
                records[name, shows_gradients] = compare.read_records(path)
    (one,), ranks = records["one", True], records["other", True]
    comparisons = [
        compare.compare_values(one, ranks[0], tolerance),
        compare.compare_outputs(one, ranks, tolerance),
        compare.compare_gradients(one, ranks[0], tolerance),
        compare.compare_losses(records["one", False][0], records["other", False][0], tolerance),
    ]
    return comparisons, one["draws_random_numbers"]


def _record_one_device(training: VerifiedTraining, alias: str, folder: Path, *, shows_gradients: bool) -> None:
    """Train on one device, and write a record into a folder."""
    from dstrat.cli.verify.training import record_in_child
    from dstrat.training.hooks import overrides
    from dstrat.training.module.train_module import TrainModule

    try:
        record_in_child(training, "single_device", folder, shows_gradients=shows_gradients)
    except MisuseError:
        if not overrides(training.module, "configure_model", TrainModule):
            raise
        # It may split layers over a mesh, which no single device has; that of the strategy has one rank on each axis.
        named = parse_alias(alias)
        without_options = named.alias if named.owner is None else f"{named.alias}@{named.owner}"
        record_in_child(training, _strategy(without_options), folder, shows_gradients=shows_gradients)
    except DstratError:
        raise
    except Exception as error:
        if not training.reduced:
            raise
        raise MisuseError(
            f"{type(training.module).__name__} with fewer layers ({', '.join(training.reduced)}) raised "
            f"{type(error).__name__}: {error}.  If it counts its layers elsewhere, define keep_layers(self, count) in "
            "it, which changes that number too"
        ) from error


def _strategy(alias: str) -> Strategy:
    """Return a new strategy, whose processes are forked: they have everything that this process has read."""
    from dstrat.resolve.selection import select_offer

    catalog = loaded_catalog()
    strategy: Strategy = select_offer(catalog.find("strategy", alias), catalog).instance
    if strategy.start_method is not None:
        strategy.start_method = "fork"
    strategy.compares_replicas = False  # the run goes on to its end, and the comparison tells more
    return strategy


def _print(comparisons: list[Comparison], run: str, tolerance: float) -> None:
    rows = []
    for one in comparisons:
        verdict = "differ" if one.differing else "same" if one.compared else "not compared"
        counted = f"{one.compared}" if one.compared == one.total else f"{one.compared} of {one.total}"
        rows.append((one.subject, counted, verdict, f"{one.largest:.1e}" if one.compared else ""))
    print_table(rows, ["", "compared", "", "largest difference"])
    differing = [one for one in comparisons if one.differing]
    if not differing:
        click.echo(f"\n{run} is the same as one device, up to {tolerance:g}")
        return
    for one in differing:
        names = [f"  {name} ({difference:.1e})" for name, difference in one.differing[:_MOST_NAMES]]
        more = len(one.differing) - len(names)
        names += [f"  and {more} more"] if more > 0 else []
        click.echo("\n".join(["", f"{one.subject} that differ, in the order of computation:", *names]))
    first = differing[0]
    click.echo(f"\n{run} is not the same as one device, first in {first.subject}: {first.differing[0][0]!r}")

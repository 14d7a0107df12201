"""``dstrat estimate``: memory of a training per rank, for each strategy, before anything runs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
import shutil
import sys
import textwrap
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dstrat.cli.components import loaded_catalog
from dstrat.cli.estimate.ranks import memory_of_ranks
from dstrat.cli.output import json_option, print_json
from dstrat.errors import ConflictError, DstratError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from dstrat.cli.estimate.fake_step import TrainingSetup
    from dstrat.cli.estimate.ranks import RankMemory
    from dstrat.interfaces.memory import SavedActivations, TrainingSize
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.offer import Offer
    from dstrat.resolve.selection import Selection

_UNITS = {"": 1, "B": 1, **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_COLUMNS = ("params", "grads", "optim", "activ", "other", "peak", "host")
_GIB = 1024**3
MOST_OF_MEMORY = 0.9
"""Share of a device's memory for a training: the rest is for the CUDA context and what torch's allocator reserves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Memory of a rank with a strategy, of the one that needs most; all sizes in bytes.

    Attributes:
        strategy: Its alias, with its options.
        same_as: Further aliases with the same sizes.
        parameters: Parameters and buffers on the device.
        gradients: Gradients, when all are computed.
        optimizer_state: State of the optimizers, with copies of parameters that are optimized.
        activations: Largest memory of activations in a step.
        other: Buckets, gathered layers and temporary memory.
        peak: Largest memory of the device at one time: less than the sum, since activations are freed before all
            gradients exist.
        host: Memory on the host, to which a strategy offloads.
        fits: Whether the peak fits into ``--memory``; None without it.
        assumption: Condition of the sizes, for a message; empty without one.
        problem: Why the module cannot be trained so as it is, so that this is not recommended; empty if it can.
    """

    strategy: str
    same_as: tuple[str, ...] = ()
    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    other: int
    peak: int
    host: int
    fits: bool | None = None
    assumption: str = ""
    problem: str = ""


@click.command(short_help="Estimate memory per rank, for each strategy.")
@click.option("--model", required=True, help="Function that returns the training, as package.module:factory.")
@click.option(
    "--strategy",
    "aliases",
    multiple=True,
    help='Alias, or "alias(option=value)"; several times for several.  By default all.',
)
@click.option("--accelerator", default="cuda", show_default=True, help="Alias of an accelerator; none need be there.")
@click.option("--devices", default=1, show_default=True, type=click.IntRange(1), help="Devices of a machine.")
@click.option("--num-nodes", default=1, show_default=True, type=click.IntRange(1), help="Number of machines.")
@click.option("--precision", default="32-true", show_default=True, help='Such as "bf16-mixed".')
@click.option("--batch-size", type=click.IntRange(1), help="Of a rank; by default that of the factory's batch.")
@click.option("--memory", help="Memory of a device, such as 24GiB: says which strategies fit.")
@json_option
def estimate(
    model: str,
    aliases: tuple[str, ...],
    accelerator: str,
    devices: int,
    num_nodes: int,
    precision: str,
    batch_size: int | None,
    memory: str | None,
    as_json: bool,
) -> None:
    """Estimate the memory of a rank for a training, for each installed strategy, in GiB.

    The function of --model returns a module with example_input_array; (module, batch), where the module has a
    training_step or returns its loss; or (module, batch, make_optimizers).  Optimizers are those of the module's
    configure_optimizers, or AdamW.  Nothing is computed: tensors have shapes and no values, so that a model of any size
    can be estimated anywhere.  Strategies that fit are first, from the one that shards least, as it communicates least.
    Those that offload, or need changes of the module, follow.  Exits with 1 if no strategy fits into --memory.
    """
    limit = None if memory is None else read_size(memory)
    catalog = loaded_catalog()
    estimates, silent = make_estimates(
        catalog,
        model,
        aliases,
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        precision=precision,
        batch_size=batch_size,
        limit=limit,
    )
    estimates = in_order(_merged(estimates), limit, catalog)
    recommended = None if limit is None else recommendation(estimates, limit)
    if as_json:
        listed = [asdict(one) for one in estimates]
        print_json({"memory": limit, "recommended": recommended, "estimates": listed, "not_estimated": silent})
    else:
        _print(estimates, silent, limit, recommended)
    if estimates and limit is not None and not any(one.fits for one in estimates):
        sys.exit(1)


def make_estimates(
    catalog: Catalog,
    model: str,
    aliases: Sequence[str],
    *,
    accelerator: str,
    devices: int,
    num_nodes: int,
    precision: str,
    batch_size: int | None = None,
    limit: int | None = None,
) -> tuple[list[Estimate], dict[str, str]]:
    """Return estimates, and the reasons why there is none, by alias.

    Args:
        catalog: The catalog.
        model: Name of the function that returns the training.
        aliases: The strategies, of which one that is not possible is an error; empty for all that are installed.
        accelerator: Alias of the accelerator.
        devices: Number of devices of a machine.
        num_nodes: Number of machines.
        precision: The flag, such as ``"bf16-mixed"``.
        batch_size: Of a rank; None for that of the function's batch.
        limit: Memory of a device in bytes; None if it is unknown.
    """
    cases = Cases(catalog, accelerator, devices, num_nodes, precision)
    measure = partial(measure_factory, model, cases.device_type, devices, num_nodes, batch_size)
    sizes: dict[Any, TrainingSize] = {}
    estimates: list[Estimate] = []
    silent: dict[str, str] = {}
    for offer, make_strategy in cases.strategies(aliases):
        alias = catalog.name_of(offer)
        try:
            strategy = make_strategy()
            plugin = strategy.precision_for(precision) or cases.new_precision()
            forward_dtype = strategy.forward_dtype(plugin)
        except DstratError as error:
            if aliases:  # without --strategy an alias that does not fit is left out, not an error
                raise
            silent[alias] = str(error)
            continue
        # A step depends on the strategy by this only, and is measured once for each combination.
        key = (plugin.param_dtype, plugin.compute_dtype, forward_dtype, strategy.saved_activations)
        if key not in sizes:
            sizes[key] = measure(plugin, strategy.saved_activations, forward_dtype)
        training = dataclasses.replace(sizes[key], precision=plugin)
        fullest = max(memory_of_ranks(strategy, training), key=lambda rank: rank.peak, default=None)
        if fullest is None:
            silent[alias] = "it does not declare its memory_layout"
        else:
            one = _estimate(alias, fullest, limit)
            estimates.append(dataclasses.replace(one, problem=_problem(strategy, training)))
    return estimates, silent


def _problem(strategy: Strategy, training: TrainingSize) -> str:
    try:
        strategy.check_training(training)
    except DstratError as error:
        return str(error)
    return ""


def read_size(text: str, argument: str = "--memory") -> int:
    """Return the bytes of a size such as ``24GiB``, ``80 GB`` or ``500000000``.

    Args:
        text: The size.
        argument: Where it was given, for messages.

    Raises:
        RequestError: It is no size.
    """
    units = {name.lower(): factor for name, factor in _UNITS.items()}
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise RequestError(f"{argument} {text!r} is no size: give a number with a unit, such as 24GiB, 80GB or 500MiB")
    size = int(float(match[1]) * units[match[2].lower()])
    if not match[2] and size < 2**20:
        raise RequestError(f"{argument} {text!r} are {size} bytes: give a number with a unit, such as {size or 24}GiB")
    return size


def in_order(estimates: Sequence[Estimate], limit: int | None, catalog: Catalog) -> list[Estimate]:
    """Return the estimates in the order of :func:`ranked`, legacy strategies last."""
    components = {catalog.name_of(offer): offer.component for offer in catalog.offers("strategy")}
    priorities = {alias: component.auto or 0 for alias, component in components.items()}
    legacy = {alias for alias, component in components.items() if component.legacy}
    return sorted(ranked(estimates, limit, priorities), key=lambda one: one.strategy.partition("(")[0] in legacy)


def recommendation(estimates: Iterable[Estimate], limit: int) -> str | None:
    """Return the first strategy that fits with memory to spare, of estimates in order; None without one."""
    return next((one.strategy for one in estimates if _has_room(one, limit) and not one.problem), None)


# The training


def measure_factory(
    model: str,
    device_type: str,
    devices: int,
    num_nodes: int,
    batch_size: int | None,
    precision: Precision,
    saved_activations: SavedActivations | None = None,
    forward_dtype: torch.dtype | None = None,
    same_optimizers: TrainingSize | None = None,
) -> TrainingSize:
    """Return the sizes of the training of a factory.

    Args:
        model: Name of the factory.
        device_type: Type of the devices.
        devices: Number of devices of a machine.
        num_nodes: Number of machines.
        batch_size: Of a rank; None for that of the factory's batch.
        precision: The dtypes; it is connected to the module.
        saved_activations: How layers save activations; None for all of them, as they are.
        forward_dtype: Dtype that parameters have in a forward pass; None for their own.
        same_optimizers: Sizes of the training with the same parameters, whose optimizer step is not measured again.
    """
    from dstrat.cli.estimate.fake_step import measure_training

    return measure_training(
        training_maker(model),
        precision,
        device_type=device_type,
        world_size=devices * num_nodes,
        ranks_per_machine=devices,
        batch_size=batch_size,
        saved_activations=saved_activations,
        forward_dtype=forward_dtype,
        same_optimizers=same_optimizers,
    )


def training_maker(model: str) -> Callable[[], TrainingSetup]:
    """Return a function that makes the training of a factory.

    Args:
        model: Name of the factory.
    """
    from dstrat.cli.estimate.fake_step import read_training

    factory = load_factory(model)
    return lambda: read_training(factory(), f"--model {model!r}")


def load_factory(name: str, argument: str = "--model") -> Callable[[], Any]:
    """Return the function of ``package.module:function``, or of ``folder/script.py:function``.

    Modules in the working directory are found, and a script is imported under its name.

    Args:
        name: The name.
        argument: Where it was given, for messages.

    Raises:
        RequestError: There is none.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise RequestError(f"{argument} {name!r} must look like package.module:factory, a function without arguments")
    folder = str(Path.cwd())
    if module_name.endswith(".py"):
        folder, module_name = str(Path(module_name).resolve().parent), Path(module_name).stem
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as python -m does
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the module prints does not get into JSON
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise RequestError(f"{argument} {name!r}: {module_name} cannot be imported from here ({error})") from error
    factory: Any = getattr(module, attribute, None)
    if not callable(factory):
        problem = "is no function" if factory is not None else "does not exist"
        raise RequestError(f"{argument} {name!r}: {attribute!r} {problem} in {module.__file__}")
    return factory  # type: ignore[no-any-return]  # checked on the line above


# The strategies


def _select_accelerator(name: str, catalog: Catalog) -> Selection[Any]:
    """Return an accelerator, or the best usable one of a group, whether or not this machine has its devices."""
    from dstrat.resolve.selection import select_offer, usable

    members = [offer for offer in catalog.offers("accelerator") if name in offer.component.groups]
    members.sort(key=lambda offer: -(offer.component.auto or 0))  # as automatic choice ranks them
    selection = next(usable(members, catalog), None)
    return selection or select_offer(catalog.find("accelerator", name), catalog)


class Cases:
    """The strategies that run with some devices and a precision.

    Attributes:
        device_type: Type of the accelerator's devices.
        precision: Flag of the precision.
    """

    def __init__(self, catalog: Catalog, accelerator: str, devices: int, num_nodes: int, precision: str) -> None:
        from dstrat.resolve.cluster import LOCAL
        from dstrat.resolve.compatibility import Constraints, device_type_of
        from dstrat.resolve.selection import select_offer

        selection = _select_accelerator(accelerator, catalog)
        self.device_type = device_type_of(selection)
        self._catalog, self.precision = catalog, precision
        self._constraints = Constraints(
            accelerator=selection,
            precision=self._select_precision(),
            num_devices=devices,
            num_nodes=num_nodes,
            cluster=select_offer(catalog.find_default("cluster_environment", LOCAL), catalog, {}),
            num_started=1,
            interactive=False,
        )

    def _select_precision(self) -> Selection[Precision]:
        from dstrat.resolve.selection import select_offer

        return select_offer(self._catalog.find("precision", self.precision), self._catalog)

    def new_precision(self) -> Precision:
        """Return a new object of the precision, as each is connected to a module."""
        return self._select_precision().instance

    def strategies(self, aliases: Sequence[str]) -> Iterator[tuple[Offer, Callable[[], Strategy]]]:
        """Yield offers, each with a function that constructs the strategy.

        The function raises ConflictError if the strategy does not fit the devices or the precision.

        Args:
            aliases: The requested aliases; empty for all that are installed.
        """
        for offer in self._offers(aliases):
            yield offer, partial(self._strategy, offer)

    def _offers(self, aliases: Sequence[str]) -> Iterable[Offer]:
        if aliases:
            return [self._catalog.find("strategy", alias) for alias in aliases]
        return self._catalog.offers("strategy")

    def _strategy(self, offer: Offer) -> Strategy:
        from dstrat.resolve.compatibility import incompatibility
        from dstrat.resolve.selection import select_offer

        problem = incompatibility(self._catalog.facts(offer), self._constraints)
        if problem is not None:
            raise ConflictError(f"{offer.title} {problem.problem}: {problem.hint}")
        strategy: Strategy = select_offer(offer, self._catalog).instance
        return strategy


# The result


def _estimate(alias: str, rank: RankMemory, limit: int | None) -> Estimate:
    layout = rank.memory
    return Estimate(
        strategy=alias,
        parameters=layout.parameters,
        gradients=layout.gradients,
        optimizer_state=layout.optimizer_state,
        activations=rank.activations,
        other=layout.buffers + max(layout.step_buffers + layout.reduction_buffer, layout.optimizer_temporaries),
        peak=rank.peak,
        host=rank.host,
        fits=None if limit is None else rank.peak <= limit,
        assumption=layout.assumption,
    )


def _merged(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Return one estimate for aliases with the same sizes, that of the first one."""
    groups: dict[tuple[Any, ...], list[Estimate]] = {}
    for one in estimates:
        groups.setdefault(tuple(asdict(one).values())[1:], []).append(one)  # without the first field, the alias
    return [
        Estimate(**{**asdict(same[0]), "same_as": tuple(one.strategy for one in same[1:])}) for same in groups.values()
    ]


def ranked(estimates: Sequence[Estimate], limit: int | None, priorities: Mapping[str, int]) -> list[Estimate]:
    """Return the estimates in the order of recommendation, those that do not fit last.

    Args:
        estimates: The estimates.
        limit: Memory of the device in bytes; None if all may fit.
        priorities: Priorities of automatic choice, by alias, for strategies that shard the same.
    """

    def key(one: Estimate) -> tuple[Any, ...]:
        if one.fits is False:
            return 2, one.peak
        resident = float(f"{one.parameters + one.gradients + one.optimizer_state:.2g}")  # counters differ by bytes
        is_tight = limit is not None and not _has_room(one, limit)
        return is_tight, one.host > 0, bool(one.assumption), -resident, -priorities.get(one.strategy, 0), one.peak

    return sorted(estimates, key=key)


def _has_room(one: Estimate, limit: int) -> bool:
    return one.peak <= MOST_OF_MEMORY * limit


def _print(estimates: Sequence[Estimate], silent: dict[str, str], limit: int | None, recommended: str | None) -> None:
    headers = ("GiB of a rank", *_COLUMNS, *(["fits"] if limit is not None else []))
    rows = [headers, *(_row(one, limit) for one in estimates)]
    first = max(len(row[0]) for row in rows)
    for row in rows:
        click.echo(" ".join([row[0].ljust(first), *(cell.rjust(6 if limit is None else 5) for cell in row[1:])]))
    width = min(shutil.get_terminal_size().columns, 80)
    if estimates:
        click.echo(textwrap.fill(_advice(limit, recommended), width, subsequent_indent="  "))
    for one in estimates:
        if one.same_as:
            click.echo(textwrap.fill(f"as {one.strategy}: {', '.join(one.same_as)}", width, subsequent_indent="  "))
        if one.assumption:
            click.echo(textwrap.fill(f"{one.strategy}: if {one.assumption}", width, subsequent_indent="  "))
    for one in estimates:
        if one.problem:
            text = f"{one.strategy} cannot train this module: {one.problem}"
            click.echo(textwrap.fill(text, width, subsequent_indent="  "))
    if silent:
        names = f"not estimated: {', '.join(silent)} (--json says why)"
        click.echo(textwrap.fill(names, width, subsequent_indent="  "))


def memory_text(one: Estimate) -> tuple[str, str]:
    """Return the peak of an estimate, and of what it consists, for a table."""
    sizes = {
        "parameters": one.parameters,
        "gradients": one.gradients,
        "optimizer": one.optimizer_state,
        "activations": one.activations,
        "other": one.other,
        "host": one.host,
    }
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items() if size)
    return f"{_gib(one.peak)} GiB", f"estimated peak: {parts}{one.assumption and f'; if {one.assumption}'}"


def _advice(limit: int | None, recommended: str | None) -> str:
    if limit is None:
        return "the first that fits is usually the fastest: --memory 24GiB tells which"
    if recommended is None:
        return (
            "none fits with a tenth of the memory to spare, which CUDA and torch's allocator need: take more devices, "
            "a smaller batch, activation checkpointing or a lower precision"
        )
    return f"recommended: {recommended}, which shards least of those that fit with a tenth to spare"


def _row(one: Estimate, limit: int | None) -> tuple[str, ...]:
    sizes = (one.parameters, one.gradients, one.optimizer_state, one.activations, one.other, one.peak, one.host)
    fits = () if limit is None else ("no" if not one.fits else "yes" if _has_room(one, limit) else "tight",)
    return one.strategy, *map(_gib, sizes), *fits


def _gib(size: int) -> str:
    value = size / _GIB
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"

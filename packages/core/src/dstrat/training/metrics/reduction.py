"""Reduction of logged values over ranks, with a check that all have logged the same names."""

from __future__ import annotations

import zlib
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dstrat.errors import MisuseError
from dstrat.interfaces.strategy import gather_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dstrat.interfaces.strategy import Strategy


# Values in the first gather.  Its size is fixed: ranks that have logged different names would otherwise hang in a
# collective of different sizes, or mix up their values.
FIRST_ROWS = 62
_HEADER = 3  # digest, number of values, and data of the rank: 0 is none, 1 is some
_OF_EVERY_LOADER = 2.0


class Contribution(NamedTuple):
    """The contribution of a rank to a reduced value.

    Attributes:
        name: Of the reduced value.
        reduction: mean, sum, max or min.
        total: The rank's value, for a mean times its weight.
        weight: Weight in a mean; 0 if the rank has no value.
        group: The process group to reduce over; None is all ranks.
        of_batches: Whether it comes from steps; a value of a hook says nothing on a rank that has had no batch.
    """

    name: str
    reduction: str
    total: Tensor | float
    weight: Tensor | float
    group: Any = None
    of_batches: bool = True


class LocalSummary(NamedTuple):
    """The values of a rank that are to be reduced.

    Attributes:
        names: The options of each logged name.
        shares: The contributions, in an order that is the same on all ranks.
        had_data: Whether the rank has had a batch of every loader.  Otherwise it may lack names, to whose values it
            contributes nothing.
        had_batch: Whether it has had a batch of any loader.
    """

    names: Mapping[str, Options]
    shares: Sequence[Contribution]
    had_data: bool = True
    had_batch: bool = True

    @property
    def digest(self) -> int:
        """A hash of the names and options; 0 without names.

        Options of display and loggers are excluded, since only rank 0 uses them.
        """
        same = [(name, *_common(options)) for name, options in sorted(self.names.items())]
        # Not hash(), which differs between processes; 24 bits are exact as a float32 too.
        return zlib.crc32(repr(same).encode()) % (2**24 - 1) + 1 if same else 0


def _common(options: Options) -> Options:
    return options._replace(prog_bar=False, logger=True)


class ReducedValues(NamedTuple):
    """The result of a reduction, which is equal on all ranks.

    Attributes:
        names: The options of each name; a rank that lacks names gets those of its peers.
        values: The reduced values, by name.
    """

    names: Mapping[str, Options]
    values: dict[str, float]


def exchange_steps(summary: LocalSummary, strategy: Strategy) -> dict[str, float]:
    """Return the reduced values of a step; collective.

    Raises:
        MisuseError: Ranks have logged different names.
    """
    gathered = _gather_first(summary, strategy)
    if not summary.names:  # without reading the result, which would wait for the device
        return {}
    table = gathered.cpu()
    digests, counts = table[:, 0].tolist(), table[:, 1].tolist()
    if 0 in digests:
        lacking = [str(rank) for rank, digest in enumerate(digests) if digest == 0]
        raise _mismatch_error(strategy.global_rank, sorted(summary.names), f"{', '.join(lacking)} did not")
    if len(set(digests)) > 1:
        _raise_mismatch(summary, list(range(strategy.world_size)), strategy)
    return _reduce_all(table, summary.shares, int(max(counts)), strategy)


def exchange_epoch(summary: LocalSummary, strategy: Strategy) -> ReducedValues:
    """Return the reduced values of an epoch; collective.

    Raises:
        MisuseError: Ranks have logged different names.
    """
    table = _gather_first(summary, strategy).cpu()
    digests, counts, data = (table[:, column].tolist() for column in range(_HEADER))
    complete = [rank for rank in range(strategy.world_size) if data[rank] == _OF_EVERY_LOADER]
    if len({digests[rank] for rank in complete}) > 1:
        _raise_mismatch(summary, complete, strategy)
    # A rank without data may lack names, so that they are those of a rank with data.
    source = max(complete or range(strategy.world_size), key=lambda rank: (digests[rank] > 0, counts[rank]))
    if len(set(digests)) > 1:
        summary = _completed(summary, source, strategy)
        if set(digests) - {0, digests[source]}:  # some ranks have sent fewer values, in other columns
            table = _gather_first(summary, strategy).cpu()
    return ReducedValues(summary.names, _reduce_all(table, summary.shares, int(max(counts)), strategy))


def _completed(summary: LocalSummary, source: int, strategy: Strategy) -> LocalSummary:
    """Return the summary of a rank, completed by empty contributions to the names that it lacks; collective.

    Args:
        summary: The summary of this rank.
        source: A rank with all names.
        strategy: Has the collectives.
    """
    outline = [(share.name, share.reduction, share.of_batches) for share in summary.shares]
    names, outline = strategy.broadcast((summary.names, outline), src=source)
    if any(options.sync_dist_group for options in names.values()):
        raise MisuseError(
            "sync_dist_group cannot be used where a process has no data: leave it out, or use fewer processes"
        )
    for name, options in summary.names.items():
        if name not in names or _common(options) != _common(names[name]):
            raise _mismatch_error(strategy.global_rank, [name], f"{source} did not")
    shares_by_name = {share.name: share for share in summary.shares}
    shares = [
        shares_by_name.get(name, Contribution(name, reduction, 0.0, 0.0, of_batches=of_batches))
        for name, reduction, of_batches in outline
    ]
    return summary._replace(names=names, shares=shares)


# Gathering


def _gather_first(summary: LocalSummary, strategy: Strategy) -> Tensor:
    data = _OF_EVERY_LOADER if summary.had_data else float(summary.had_batch)
    header = [summary.digest, len(summary.shares), data]
    # Values of groups are reduced within these, and have empty rows here.
    first_shares = [
        share if share.group is None else share._replace(total=0.0) for share in summary.shares[:FIRST_ROWS]
    ]
    return _gather(header, first_shares, FIRST_ROWS, strategy)


def _gather(
    header: Sequence[float], shares: Sequence[Contribution], rows: int, strategy: Strategy, group: Any = None
) -> Tensor:
    if group is None and not strategy.is_first_reader:  # ranks that read the same data count once
        shares = [share._replace(total=0.0, weight=0.0) for share in shares]
    # Tensors are copied on the device below: reading them would wait for the device.
    numbers = [0.0 if isinstance(x, Tensor) else x for s in shares for x in (s.total, s.weight)]
    padding = [0.0] * (2 * rows - len(numbers))
    dtype = torch.float64 if strategy.accelerator.supports_dtype(torch.float64) else torch.float32
    sent = strategy.from_host(torch.tensor([*header, *numbers, *padding], dtype=dtype))
    for index, value in enumerate(x for s in shares for x in (s.total, s.weight)):
        if isinstance(value, Tensor):
            sent[len(header) + index] = value
    return strategy.gather_from_processes(sent, group)


# Reducing


def _reduce_all(table: Tensor, shares: Sequence[Contribution], count: int, strategy: Strategy) -> dict[str, float]:
    rows, had_batch = table[:, _HEADER : _HEADER + 2 * count], table[:, _HEADER - 1] > 0
    if count > FIRST_ROWS:
        remaining = _gather((), shares[FIRST_ROWS:], count - FIRST_ROWS, strategy)
        rows = torch.cat([rows, remaining.cpu()], dim=1)
    values = {}
    for index, share in enumerate(shares):
        # What a hook computes on a rank without data is no value: the default of a metric, or a mean of nothing.
        counted = slice(None) if share.of_batches or share.reduction == "sum" or not had_batch.any() else had_batch
        values[share.name] = _combine(share, rows[counted, 2 * index], rows[counted, 2 * index + 1])
    # The shares are sorted by name, and groups may alternate: each run of one group is a collective of its own.
    for group, members in groupby([share for share in shares if share.group is not None], lambda share: share.group):
        group_shares = list(members)
        rows = _gather((), group_shares, len(group_shares), strategy, group).cpu()
        values |= {
            share.name: _combine(share, rows[:, 2 * i], rows[:, 2 * i + 1]) for i, share in enumerate(group_shares)
        }
    return values


def _combine(share: Contribution, totals: Tensor, weights: Tensor) -> float:
    """Return the reduced value from the totals and weights of all ranks."""
    if share.reduction == "mean":
        return float(totals.sum() / weights.sum())
    if share.reduction == "sum":
        return float(totals.sum())
    present = totals[weights > 0]  # a rank without a value has sent a zero
    return float(present.max() if share.reduction == "max" else present.min())


# Errors


def _raise_mismatch(summary: LocalSummary, ranks: list[int], strategy: Strategy) -> None:
    """Raise an error with the ranks and names that differ; collective."""
    # The digests say only that names differ.  All ranks come here, as they all have the same table.
    names_of = gather_objects(strategy, dict(summary.names))
    first = ranks[0]
    for rank in ranks[1:]:
        for one, other in ((first, rank), (rank, first)):
            if missing := sorted(names_of[one].keys() - names_of[other].keys()):
                raise _mismatch_error(one, missing, f"{other} did not")
        for name in names_of[first]:
            options, theirs = _common(names_of[first][name]), _common(names_of[rank][name])
            if differing := [field for field in options._fields if getattr(options, field) != getattr(theirs, field)]:
                raise _mismatch_error(first, [name], f"{rank} did so with another {' and '.join(differing)}")
    raise AssertionError("the names are equal, and their digests differ")


def _mismatch_error(rank: int, names: Sequence[str], difference: str) -> MisuseError:
    return MisuseError(
        f"rank {rank} logged {', '.join(map(repr, names))} and rank {difference}: values that are reduced over all "
        "processes must be logged by all of them with the same options (or with sync_dist=False or rank_zero_only=True)"
    )


# Options of one logged name


REDUCTIONS = ("mean", "sum", "max", "min")
_NAMES_BY_ARGUMENT: dict[Any, str] = {
    **{name: name for name in REDUCTIONS},
    "avg": "mean",
    torch.mean: "mean",
    torch.sum: "sum",
    torch.max: "max",
    torch.amax: "max",
    torch.min: "min",
    torch.amin: "min",
    sum: "sum",
    max: "max",
    min: "min",
}


class Options(NamedTuple):
    """The arguments of ``log`` as the user passed them, in its order."""

    prog_bar: bool
    logger: bool
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: str | Callable[..., Any]
    enable_graph: bool
    sync_dist: bool | None
    sync_dist_group: Any
    add_dataloader_idx: bool
    metric_attribute: str | None
    rank_zero_only: bool

    def reduction(self, name: str) -> str:
        """Return the name of the reduction.

        Raises:
            MisuseError: The result of the function would depend on how data is divided into batches and ranks.
        """
        reduce_fx = self.reduce_fx.lower() if isinstance(self.reduce_fx, str) else self.reduce_fx
        try:
            return _NAMES_BY_ARGUMENT[reduce_fx]
        except (KeyError, TypeError):  # a TypeError for objects without a hash
            shown = repr(reduce_fx) if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", repr(reduce_fx))
            raise MisuseError(
                f"reduce_fx {shown} of {name!r} is not one of {', '.join(REDUCTIONS)}: the result of another would "
                "depend on how data is divided into batches and processes; log a torchmetrics Metric, or compute the "
                "value at the end of the epoch"
            ) from None

    def check(self, name: str, *, in_step: bool) -> None:
        """Check the options of a name.

        Raises:
            MisuseError: Two options contradict each other, or one is not possible.
        """
        if self.enable_graph:
            raise MisuseError(
                f"log({name!r}, enable_graph=True): what is logged has no gradients; return it as the loss"
            )
        if self.on_step is False and self.on_epoch is False:
            raise MisuseError(f"log({name!r}, on_step=False, on_epoch=False) would be lost: set one of them")
        if self.on_step and not in_step:
            raise MisuseError(f"log({name!r}, on_step=True) works in steps; here, use on_epoch=True")
        if self.rank_zero_only and self.sync_dist:
            raise MisuseError(
                f"log({name!r}) cannot reduce over all processes what only rank 0 logs: set sync_dist=False"
            )


def changed_options_error(name: str, before: Options, now: Sequence[Any]) -> MisuseError:
    """Return the error about a name whose options have changed."""
    pairs = [(field, old, new) for field, old, new in zip(Options._fields, before, now, strict=True) if old != new]
    had = ", ".join(f"{field}={old!r}" for field, old, _ in pairs)
    has = ", ".join(f"{field}={new!r}" for field, _, new in pairs)
    return MisuseError(
        f"log({name!r}) was called with {had} before, and now with {has}: use the same options each time, or two names"
    )

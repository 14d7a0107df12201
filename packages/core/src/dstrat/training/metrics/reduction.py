"""Reducing the logged values of an epoch over all processes, in one collective for each kind of reduction."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.metrics.logged import LoggedValue


def reduce_over_processes(entries: Sequence[LoggedValue], strategy: Strategy) -> dict[str, Tensor | float]:
    """Return the value of each entry over the epoch and all processes, by its name.

    A mean is weighted by batch sizes, so that it does not depend on how the data was spread.

    Raises:
        MisuseError: The processes logged different names.
    """
    local = [entry for entry in entries if not entry.sync_epoch]
    results = {entry.epoch_name: _finish(entry, entry.total, entry.weight) for entry in local}
    shared = sorted((entry for entry in entries if entry.sync_epoch), key=lambda entry: entry.name)
    if strategy.world_size == 1:
        return results | {e.epoch_name: _finish(e, e.total, e.weight) for e in shared}
    shared = _agreed(shared, strategy)
    for operation in ("sum", "max", "min"):
        chosen = [entry for entry in shared if _operation(entry) == operation]
        if chosen:
            results |= _reduce_stacked(chosen, operation, strategy)
    return results


def _operation(entry: LoggedValue) -> str:
    return "sum" if entry.reduce_fx in ("mean", "sum") else entry.reduce_fx


def _reduce_stacked(entries: Sequence[LoggedValue], operation: str, strategy: Strategy) -> dict[str, Tensor | float]:
    device = strategy.root_device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    neutral = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}[operation]
    totals = torch.stack(
        [
            torch.as_tensor(neutral if entry.total is None else entry.total, dtype=dtype, device=device).reshape(())
            for entry in entries
        ]
    )
    weights = torch.tensor([entry.weight for entry in entries], dtype=dtype, device=device)
    if operation == "sum":
        totals, weights = strategy.reduce(torch.stack([totals, weights]), reduce_op="sum")
    else:
        totals = strategy.reduce(totals, reduce_op=operation)
    return {
        entry.epoch_name: _finish(entry, total, weight)
        for entry, total, weight in zip(entries, totals, weights, strict=True)
    }


def _finish(entry: LoggedValue, total: Tensor | float | None, weight: Tensor | float) -> Tensor | float:
    assert total is not None  # noqa: S101 - callers leave out what was not logged
    return total / weight if entry.reduce_fx == "mean" else total


def _agreed(entries: list[LoggedValue], strategy: Strategy) -> list[LoggedValue]:
    """Check that all processes logged the same names; one that had no data takes part with nothing.

    Evaluation may leave a process without a batch: it has no names, and its peers' are what counts.
    """
    from dstrat.training.metrics.logged import LoggedValue

    mine = {entry.name: (entry.on_step, entry.on_epoch, entry.reduce_fx) for entry in entries}
    digest = torch.tensor([zlib.crc32(repr(mine).encode())], device=strategy.root_device)
    if len(set(strategy.all_gather(digest).flatten().tolist())) == 1:
        return entries
    everyone = [strategy.broadcast(mine, src=rank) for rank in range(strategy.world_size)]
    names = sorted(set().union(*everyone))
    for rank, theirs in enumerate(everyone):
        missing = [name for name in names if name not in theirs]
        if theirs and missing:
            has = next(r for r, other in enumerate(everyone) if missing[0] in other)
            raise MisuseError(
                f"rank {has} logged {', '.join(map(repr, missing))} and rank {rank} did not: values that are reduced "
                "over all processes must be logged by all of them (or with sync_dist=False)"
            )
    known = {entry.name: entry for entry in entries}
    for name in names:
        if name not in known:
            on_step, on_epoch, reduce_fx = next(theirs[name] for theirs in everyone if name in theirs)
            known[name] = LoggedValue(
                name,
                on_step=on_step,
                on_epoch=on_epoch,
                prog_bar=False,
                logger=True,
                reduce_fx=reduce_fx,
                sync_dist=None,
            )
    return [known[name] for name in names]

"""Results of a strategy's collectives in the kit's ranks, which tests compare with a reference."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from dstrat.parallel.collectives import reduce_tensor
from dstrat.parallel.process_group import close_process_group, open_process_group
from dstrat.testing.ranks.jobs import Subject, open_strategy

if TYPE_CHECKING:
    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.component import Component
    from dstrat.testing.ranks.team import RankContext

OPERATIONS = ("mean", "avg", "sum", "max", "min")
_DELAY = 0.08  # seconds by which the last rank is late


def rank_values(shard: int) -> list[float]:
    """Return the numbers that the reader of a shard reduces; the largest are not always those of the last rank."""
    return [float(shard * 3 + 1), float(-((shard - 1) ** 2)), 0.5]


def sum_over_ranks(rank_context: RankContext, component: Component, options: dict[str, Any]) -> float:
    """Return the sum of 1, 2 ... over the ranks, by the accelerator's backend on its devices."""
    accelerator: Accelerator = Subject(component=component, options=options).make()
    device = accelerator.get_parallel_devices(accelerator.parse_devices(rank_context.world_size))[rank_context.rank]
    accelerator.setup(device)
    backend = accelerator.process_group_backend
    open_process_group(rank_context.cluster, backend=backend, timeout=timedelta(seconds=60))
    try:
        number = torch.tensor([rank_context.rank + 1.0], device=accelerator.device_in_process(device))
        return float(reduce_tensor(number, reduce_op="sum"))
    finally:
        close_process_group()
        accelerator.teardown()


def positions(rank_context: RankContext, subject: Subject, accelerator: str) -> dict[str, Any]:
    """Return the ranks, sizes and device that a strategy reports."""
    with open_strategy(rank_context, subject, accelerator) as strategy:
        names = ("world_size", "global_rank", "local_rank", "node_rank", "is_global_zero")
        return {name: getattr(strategy, name) for name in names} | {
            "sampler": dict(strategy.distributed_sampler_kwargs),
            "device": str(strategy.root_device),
        }


def reductions(rank_context: RankContext, subject: Subject, accelerator: str) -> dict[str, Any]:
    """Return the result of each reduction, and its argument afterwards."""
    with open_strategy(rank_context, subject, accelerator) as strategy:
        results: dict[str, Any] = {}
        # Not the rank: those that share a batch have the same value, and are reduced as one.
        shard = strategy.distributed_sampler_kwargs.get("rank", 0)
        for operation in OPERATIONS:
            tensor = _tensor(strategy, rank_values(shard))
            reduced = strategy.reduce(tensor, reduce_op=operation)
            results[operation] = {"reduced": reduced.tolist(), "argument": tensor.tolist()}
        results["integers"] = float(strategy.reduce(torch.tensor(shard, device=strategy.root_device)))
        results["other"] = strategy.reduce("not a tensor")
        return results


def gathering(rank_context: RankContext, subject: Subject, accelerator: str) -> dict[str, Any]:
    """Return the result of gathering, and the gradient through it."""
    with open_strategy(rank_context, subject, accelerator) as strategy:
        reader, readers = _reader(strategy)
        plain = strategy.all_gather(_tensor(strategy, [rank_values(reader)] * 2))
        leaf = _tensor(strategy, [float(reader), 1.0]).requires_grad_()
        weights = torch.arange(1.0, readers + 1, device=strategy.root_device)[:, None]
        (strategy.all_gather(leaf, sync_grads=True) * weights).sum().backward()
        return {
            "reader": (reader, readers),
            "values": plain.tolist(),
            "scalars": _gathered_scalars(strategy, reader),
            "of_processes": strategy.gather_from_processes(_tensor(strategy, [float(rank_context.rank)])).tolist(),
            "needs_gradient": plain.requires_grad,
            "gradient": None if leaf.grad is None else leaf.grad.tolist(),
        }


def _reader(strategy: Strategy) -> tuple[int, int]:
    """Return which of the ranks that read different data a rank is, and their number."""
    share = strategy.distributed_sampler_kwargs
    if share.get("num_replicas", strategy.world_size) < strategy.world_size:  # some share each batch
        return share["rank"], share["num_replicas"]
    return strategy.global_rank, strategy.world_size


def _gathered_scalars(strategy: Strategy, rank: int) -> Any:
    """Return the gathered value of a tensor without dimensions; an error as a text."""
    try:
        return strategy.all_gather(_tensor(strategy, float(rank))).tolist()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test tells of it
        return f"{type(error).__name__}: {error}"


def broadcasts(rank_context: RankContext, subject: Subject, accelerator: str) -> list[Any]:
    """Return the object that each rank in turn broadcasts."""
    with open_strategy(rank_context, subject, accelerator) as strategy:
        return [
            strategy.broadcast({"from": rank_context.rank, "text": "x" * rank_context.rank}, src=source)
            for source in range(rank_context.world_size)
        ]


def barriers(rank_context: RankContext, subject: Subject, accelerator: str) -> list[tuple[float, float]] | str:
    """Return the times at which a rank entered and left each barrier; each rank in turn is the last.

    An error is returned as a text.
    """
    with open_strategy(rank_context, subject, accelerator) as strategy:
        try:
            return [_barrier(rank_context, strategy, last) for last in range(rank_context.world_size)]
        except Exception as error:  # noqa: BLE001 - whatever it is, the test tells of it
            return f"{type(error).__name__}: {error}"
        finally:
            rank_context.meet("through")  # a rank that no barrier holds would close the connections of the others


def _barrier(rank_context: RankContext, strategy: Strategy, last: int) -> tuple[float, float]:
    strategy.barrier("before")
    time.sleep(_DELAY if rank_context.rank == last else 0.0)
    entered = time.monotonic()  # the same clock in all processes of a machine
    strategy.barrier(f"rank {last} comes last")
    return entered, time.monotonic()


def decisions(rank_context: RankContext, subject: Subject, accelerator: str) -> dict[str, bool]:
    """Return the decisions of the ranks where none, the last one, or each of them votes for it."""
    with open_strategy(rank_context, subject, accelerator) as strategy:
        is_last = rank_context.rank == rank_context.world_size - 1
        votes = {"nobody": False, "the last rank": is_last, "everybody": True}
        return {
            f"{way} of {who}": strategy.reduce_boolean_decision(vote, all=way == "all")
            for who, vote in votes.items()
            for way in ("all", "any")
        }


def _tensor(strategy: Strategy, values: Any) -> torch.Tensor:
    return torch.tensor(values, device=strategy.root_device)

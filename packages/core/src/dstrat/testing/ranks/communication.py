"""Results of a strategy's collectives in the kit's ranks, which tests compare with a reference."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from dstrat.parallel.collectives import reduce_tensor
from dstrat.parallel.process_group import close_process_group, open_process_group
from dstrat.testing.ranks.jobs import Subject, opened

if TYPE_CHECKING:
    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.component import Component
    from dstrat.testing.ranks.team import Place

OPERATIONS = ("mean", "avg", "sum", "max", "min")
_NAP = 0.08  # seconds that each rank comes later than the one before


def own_values(part: int) -> list[float]:
    """Return the numbers that the reader of a part of the data brings along; the largest is not always the last's."""
    return [float(part * 3 + 1), float(-((part - 1) ** 2)), 0.5]


def sum_over_ranks(place: Place, component: Component, options: dict[str, Any]) -> float:
    """Return the sum of 1, 2 ... that an accelerator's own backend finds on its devices, one for each rank."""
    accelerator: Accelerator = Subject(component=component, options=options).make()
    device = accelerator.get_parallel_devices(accelerator.parse_devices(place.world_size))[place.rank]
    accelerator.setup(device)
    backend = accelerator.process_group_backend
    open_process_group(place.cluster, backend=backend, timeout=timedelta(seconds=60))
    try:
        number = torch.tensor([place.rank + 1.0], device=accelerator.device_in_process(device))
        return float(reduce_tensor(number, reduce_op="sum"))
    finally:
        close_process_group()
        accelerator.teardown()


def positions(place: Place, subject: Subject, accelerator: str) -> dict[str, Any]:
    """Return where a rank says that it is."""
    with opened(place, subject, accelerator) as strategy:
        names = ("world_size", "global_rank", "local_rank", "node_rank", "is_global_zero")
        return {name: getattr(strategy, name) for name in names} | {
            "sampler": dict(strategy.distributed_sampler_kwargs),
            "device": str(strategy.root_device),
        }


def reductions(place: Place, subject: Subject, accelerator: str) -> dict[str, Any]:
    """Return what each reduction gives, and what it leaves of its argument."""
    with opened(place, subject, accelerator) as strategy:
        found: dict[str, Any] = {}
        part = strategy.distributed_sampler_kwargs.get("rank", 0)  # ranks that share a batch are reduced as one
        for operation in OPERATIONS:
            tensor = _tensor(strategy, own_values(part))
            reduced = strategy.reduce(tensor, reduce_op=operation)
            found[operation] = {"reduced": reduced.tolist(), "argument": tensor.tolist()}
        found["integers"] = float(strategy.reduce(torch.tensor(part, device=strategy.root_device)))
        found["other"] = strategy.reduce("not a tensor")
        return found


def gathering(place: Place, subject: Subject, accelerator: str) -> dict[str, Any]:
    """Return what gathering gives, and the gradient that flows back through it."""
    with opened(place, subject, accelerator) as strategy:
        plain = strategy.all_gather(_tensor(strategy, [own_values(place.rank)] * 2))
        leaf = _tensor(strategy, [float(place.rank), 1.0]).requires_grad_()
        weights = torch.arange(1.0, place.world_size + 1, device=strategy.root_device)[:, None]
        (strategy.all_gather(leaf, sync_grads=True) * weights).sum().backward()
        return {
            "values": plain.tolist(),
            "scalars": _gathered_scalars(strategy, place.rank),
            "needs_gradient": plain.requires_grad,
            "gradient": None if leaf.grad is None else leaf.grad.tolist(),
        }


def _gathered_scalars(strategy: Strategy, rank: int) -> Any:
    """Return what gathering gives for a tensor without dimensions; an error as a text."""
    try:
        return strategy.all_gather(_tensor(strategy, float(rank))).tolist()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test tells of it
        return f"{type(error).__name__}: {error}"


def broadcasts(place: Place, subject: Subject, accelerator: str) -> list[Any]:
    """Return what each rank in turn sends to all."""
    with opened(place, subject, accelerator) as strategy:
        return [
            strategy.broadcast({"from": place.rank, "text": "x" * place.rank}, src=source)
            for source in range(place.world_size)
        ]


def barriers(place: Place, subject: Subject, accelerator: str) -> list[tuple[float, float]] | str:
    """Return when a rank came to each barrier and when it went on; each rank in turn is the last.

    An error is returned as a text.
    """
    with opened(place, subject, accelerator) as strategy:
        try:
            return [_barrier(place, strategy, last) for last in range(place.world_size)]
        except Exception as error:  # noqa: BLE001 - whatever it is, the test tells of it
            return f"{type(error).__name__}: {error}"
        finally:
            place.meet("through")  # a rank that no barrier holds would close the connections of the others


def _barrier(place: Place, strategy: Strategy, last: int) -> tuple[float, float]:
    strategy.barrier("before")
    time.sleep(_NAP if place.rank == last else 0.0)
    came = time.monotonic()  # the same clock in all processes of a machine
    strategy.barrier(f"rank {last} comes last")
    return came, time.monotonic()


def decisions(place: Place, subject: Subject, accelerator: str) -> dict[str, bool]:
    """Return what the ranks decide together where none, the last one, or each of them is for it."""
    with opened(place, subject, accelerator) as strategy:
        is_last = place.rank == place.world_size - 1
        votes = {"nobody": False, "the last rank": is_last, "everybody": True}
        return {
            f"{way} of {who}": strategy.reduce_boolean_decision(vote, all=way == "all")
            for who, vote in votes.items()
            for way in ("all", "any")
        }


def _tensor(strategy: Strategy, values: Any) -> torch.Tensor:
    return torch.tensor(values, device=strategy.root_device)

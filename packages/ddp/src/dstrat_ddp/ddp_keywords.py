"""Checking the keywords that are passed through to DistributedDataParallel."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from dstrat.errors import MisuseError
from dstrat.plugins.names import nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_CHOSEN_BY_STRATEGY = ("device_ids", "output_device")


def check_ddp_keywords(keywords: Mapping[str, Any], owner: type) -> None:
    """Raise MisuseError for a keyword that DistributedDataParallel does not have, or that follows from the devices.

    Args:
        keywords: What is to be passed through.
        owner: The strategy's class, one of whose own arguments may be meant.
    """
    known = [*inspect.signature(DistributedDataParallel).parameters][1:]
    for name in keywords:
        if name in _CHOSEN_BY_STRATEGY:
            raise MisuseError(f"{owner.__name__} sets {name!r} itself, by parallel_devices or the Trainer's devices")
        if name not in known:
            raise MisuseError(
                f"{owner.__name__} got {name!r}, which neither it nor torch's DistributedDataParallel knows; "
                f"{_advice(name, known, inspect.signature(owner).parameters)}"
            )


def _advice(name: str, known: Collection[str], own: Collection[str]) -> str:
    near = nearest(name, [*known, *own])
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"possible are {', '.join(known)}"

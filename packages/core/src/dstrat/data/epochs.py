"""Telling samplers which epoch comes."""

from __future__ import annotations

from typing import Any

from dstrat.data.combined_loader import CombinedLoader


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell each sampler and dataset of a loader which epoch comes, where it wants to know."""
    if isinstance(loader, CombinedLoader):
        for part in loader.flattened:
            set_epoch(part, epoch)
        return
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None)
    targets: list[Any] = [loader, sampler, batches, getattr(batches, "sampler", None), getattr(loader, "dataset", None)]
    for target in {id(target): target for target in targets}.values():  # each once: a sampler may be found twice
        if hasattr(target, "set_epoch"):
            target.set_epoch(epoch)

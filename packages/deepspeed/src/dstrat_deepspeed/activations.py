"""DeepSpeed's own activation checkpointing, which has its settings in globals."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_GLOBALS = (
    "CONTIGUOUS_CHECKPOINTING",
    "CPU_CHECKPOINT",
    "PARTITION_ACTIVATIONS",
    "PROFILE_TIME",
    "SYNCHRONIZE",
    "deepspeed_checkpointing_enabled",
    "num_layers",
)


@contextmanager
def activation_checkpointing(deepspeed: Any, section: Mapping[str, Any]) -> Iterator[None]:
    """Let ``deepspeed.checkpointing.checkpoint`` follow a configuration in a ``with`` block.

    Args:
        deepspeed: The library.
        section: ``activation_checkpointing`` of a configuration.
    """
    checkpointing = deepspeed.checkpointing
    before = {name: getattr(checkpointing, name) for name in _GLOBALS}
    try:
        checkpointing.configure(
            None,
            partition_activations=section.get("partition_activations"),
            contiguous_checkpointing=section.get("contiguous_memory_optimization"),
            num_checkpoints=section.get("number_checkpoints"),
            checkpoint_in_cpu=section.get("cpu_checkpointing"),
            synchronize=section.get("synchronize_checkpoint_boundary"),
            profile=section.get("profile"),
        )
        yield
    finally:
        checkpointing.reset()
        vars(checkpointing).update(before)

"""Compiled training steps: forward and backward passes and optimizer steps in one call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledSteps:
    """What one call of a strategy's ``training_step`` does, where the backend has compiled whole training steps.

    Attributes:
        batches: Number of batches that the call consumes, at least 1: so many are in an item of the loader that
            ``process_dataloader`` returned.  Epochs, limits and intervals count these batches.
        optimizer_steps: Number of optimizer steps in the call, at least 1, each after as many batches as the Trainer's
            ``accumulate_grad_batches``.
        clips_gradients: Whether the call clips gradients as the Trainer's ``gradient_clip_val`` says.
    """

    batches: int = 1
    optimizer_steps: int = 1
    clips_gradients: bool = False

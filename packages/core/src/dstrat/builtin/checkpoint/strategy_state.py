"""What a strategy has to save of a training, and how it takes it back, on any number of processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.strategy import Strategy


def module_entries(strategy: Strategy) -> dict[str, Any]:
    """Return the module's state as a checkpoint has it; collective."""
    is_sharded = strategy.checkpoint_io.is_collective and not strategy.replicates_state
    state = strategy.sharded_module_state() if is_sharded else strategy.module_state_dict()
    if not strategy.is_global_zero:  # buffers, which may differ, are those of global rank 0
        buffers = {name for name, _ in strategy.module.named_buffers(remove_duplicate=False)}
        state = {name: value for name, value in state.items() if name not in buffers}
    return {"state_dict": state}


def optimization_entries(strategy: Strategy) -> dict[str, Any]:
    """Return the state of optimizers, schedulers and precision as a checkpoint has it; collective."""
    optimizers: dict[str, Any]
    if strategy.checkpoint_io.is_collective:
        optimizers = {"optimizers": [strategy.sharded_optimizer_state(optimizer) for optimizer in strategy.optimizers]}
    else:
        optimizers = {"optimizer_states": [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers]}
    return {
        **optimizers,
        "world_size": strategy.world_size,
        "lr_schedulers": [config.scheduler.state_dict() for config in strategy.lr_schedulers],
        "precision": strategy.precision_plugin.state_dict(),
        "strategy": {"name": type(strategy).__name__, "state": strategy.state_dict()},
    }


def read_checkpoint(strategy: Strategy, io: CheckpointIO, path: str | Path, *, has_optimizers: bool) -> dict[str, Any]:
    """Read a checkpoint and load the module's state; sharded tensors are filled where they are; collective.

    Args:
        strategy: Has set up the module.
        io: Reads it.
        path: Of the checkpoint.
        has_optimizers: Whether the state of the optimizers is going to be loaded too.
    """
    if io.is_collective and not strategy.replicates_state:
        template: dict[str, Any] = {"state_dict": strategy.sharded_module_state()}
        if has_optimizers:
            template["optimizers"] = [strategy.sharded_optimizer_state(optimizer) for optimizer in strategy.optimizers]
        return io.load_into(path, template)
    checkpoint = io.load_checkpoint(path)
    if "state_dict" not in checkpoint:
        raise CheckpointError(f"{path} has no 'state_dict': it is not a checkpoint of a training")
    strategy.load_module_state_dict(checkpoint["state_dict"])
    return checkpoint


def restore_optimization(strategy: Strategy, checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Load the state of optimizers, schedulers and precision; collective.

    Raises:
        CheckpointError: Their numbers differ.
    """
    is_named = "optimizers" in checkpoint
    states = checkpoint["optimizers" if is_named else "optimizer_states"]
    check_same_number("optimizers", strategy.optimizers, states, path)
    check_same_number("schedulers", strategy.lr_schedulers, checkpoint["lr_schedulers"], path)
    for optimizer, state in zip(strategy.optimizers, states, strict=True):
        load = strategy.load_sharded_optimizer_state if is_named else strategy.load_optimizer_state
        load(optimizer, state)
    for config, state in zip(strategy.lr_schedulers, checkpoint["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    strategy.precision_plugin.load_state_dict(checkpoint["precision"])
    if is_of_same_strategy(strategy, checkpoint):
        strategy.load_state_dict(checkpoint["strategy"]["state"])


def is_of_same_strategy(strategy: Strategy, checkpoint: Mapping[str, Any]) -> bool:
    """Return whether a strategy of the same class has saved the checkpoint; another one begins without its state."""
    saved: str = checkpoint.get("strategy", {}).get("name", "")
    return saved == type(strategy).__name__


def check_same_number(what: str, here: list[Any], saved: list[Any], path: str | Path) -> None:
    """Raise CheckpointError unless there are as many as were saved."""
    if len(here) != len(saved):
        raise CheckpointError(f"{path} has {len(saved)} {what}, and this training has {len(here)}")

"""Training state of a strategy in checkpoints, saved and loaded by any number of processes."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.checkpoint.async_io import AsyncCheckpointIO
from dstrat.checkpoint.formats import find_occupied, portable_io
from dstrat.checkpoint.portable.format import checksum
from dstrat.errors import CheckpointError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.checkpoint_io import OptionalTensors
from dstrat.interfaces.state_dict import (
    canonical_buffers,
    canonical_name,
    check_names,
    is_extra_state,
    named_weights,
)
from dstrat.interfaces.strategy import gather_if_different, gather_objects
from dstrat.parallel.shards import local_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from dstrat.interfaces.checkpoint_io import CheckpointIO, FlatShard
    from dstrat.interfaces.strategy import Strategy


CURRENT_WEIGHTS = "current_model_state"
"""Key of the weights with which a training resumes, if those of ``"state_dict"`` are an average."""

_SHARDED = ("state_dict", CURRENT_WEIGHTS, "optimizers")
"""Keys of a checkpoint below which tensors may be sharded."""

_MISMATCH_ADVICE = (
    ". Make the optimizers as they were trained; or load the weights alone into the module (load_from_checkpoint does) "
    "and begin a new training"
)

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def writable_path(strategy: Strategy, path: str | Path) -> Iterator[str | Path]:
    """Yield the path for a checkpoint: another one beside it if what is there cannot be moved; collective.

    A checkpoint on a disk is moved beside its path when the new one is complete.  Both are logged.

    Raises:
        CheckpointError: The path is that of a checkpoint in a store or of another program, and the block has written
            this one beside it.
    """
    checkpoint_io = strategy.checkpoint_io
    if isinstance(checkpoint_io, AsyncCheckpointIO) and checkpoint_io.written_path == str(path):
        checkpoint_io.wait()  # for what is at the path
    # Never an error before the block: the training may have ended, and its state be lost if the save was refused.
    occupied = None
    if strategy.is_global_zero:
        with contextlib.suppress(OSError):  # raised by the save, on all ranks
            occupied = find_occupied(path, checkpoint_io)
    occupied = strategy.broadcast(occupied)
    if occupied is None or (io := portable_io(checkpoint_io)) is None:
        yield path
        return
    if occupied.is_movable:
        io.move_existing(path)
        yield path
        return
    yield occupied.other
    if occupied.is_checkpoint:  # an error, since whoever loads it by this path would get the other one
        raise CheckpointError(
            f"checkpoint {str(path)!r} exists already, and is not replaced, so this one is {occupied.other!r}: rename "
            "it, and choose another path for the next one, or pass Trainer(plugins='torch'), whose single files are "
            "replaced"
        )
    if strategy.is_global_zero:
        _log.warning(
            "%s is a folder with other files, so the checkpoint is %s: load it by this path", path, occupied.other
        )


def gather_on_host(strategy: Strategy, value: Any) -> list[Any]:
    """Return a value of each rank, with its tensors on the CPU; collective."""
    # Those of all ranks may be larger than the device.
    return gather_objects(strategy, apply_to_tensors(value, strategy.to_host))


def rank_entries(strategy: Strategy, rank_state: dict[str, Any]) -> dict[str, Any]:
    """Return the entry with the states of all ranks, or of this rank only if every rank saves; collective."""
    if strategy.checkpoint_io.is_collective:
        return {"per_rank": rank_state}
    return {"ranks": gather_on_host(strategy, rank_state)}


def module_entries(strategy: Strategy) -> dict[str, Any]:
    """Return the module's entries of a checkpoint; collective."""
    shards = _shards(strategy, strategy.checkpoint_io)
    state = strategy.sharded_module_state() if shards else strategy.module_state_dict()
    if not strategy.is_global_zero:
        # A plain tensor must be the same on every rank, and buffers may differ: those of global rank 0 are saved, the
        # others by rank_buffers.
        buffers = canonical_buffers(strategy.module)
        state = {name: value for name, value in state.items() if canonical_name(name) not in buffers}
    return {"state_dict": state}


def replaced_weights(strategy: Strategy, state: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the module's state in a checkpoint with other weights; collective where the state is sharded.

    Args:
        strategy: Of the run.
        state: The module's state in the checkpoint.
        weights: The other weights by name, sharded as those of ``strategy.local_weights()``.
    """
    if not (strategy.checkpoint_io.is_collective or strategy.replicates_state):
        from dstrat.parallel.full_state import gather_entries

        weights = gather_entries(weights, strategy)
    return {name: weights.get(canonical_name(name), value) for name, value in state.items()}


def optimization_entries(strategy: Strategy) -> dict[str, Any]:
    """Return the entries of optimizers, schedulers, precision and strategy in a checkpoint; collective."""
    is_named = strategy.checkpoint_io.is_collective
    state_of = strategy.sharded_optimizer_state if is_named else strategy.optimizer_state
    return {
        "optimizers" if is_named else "optimizer_states": list(map(state_of, strategy.optimizers)),
        "world_size": strategy.world_size,
        "readers": _num_readers(strategy),
        "lr_schedulers": [config.scheduler.state_dict() for config in strategy.lr_schedulers],
        "precision": strategy.precision_plugin.state_dict(),
        "strategy": {"name": type(strategy).__name__, "state": strategy.state_dict()},
    }


# Sizes of jobs, and states of ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSize:
    """The number of ranks of a job, and of the shards of its training data.

    Attributes:
        world_size: Number of ranks.
        readers: Number of shards: ranks that share each batch read one.
    """

    world_size: int
    readers: int


def job_sizes(strategy: Strategy, checkpoint: Mapping[str, Any]) -> tuple[JobSize, JobSize]:
    """Return the sizes of the job that saved a checkpoint and of this one; a resumption is exact if they are equal.

    Older checkpoints lack the number of readers: then each rank counts as one, in both.
    """
    saved, now = checkpoint["world_size"], strategy.world_size
    if "readers" not in checkpoint:
        return JobSize(world_size=saved, readers=saved), JobSize(world_size=now, readers=now)
    readers = checkpoint["readers"]
    return JobSize(world_size=saved, readers=readers), JobSize(world_size=now, readers=_num_readers(strategy))


def describe_move(saved: JobSize, now: JobSize) -> str:
    """Return what a log message says of a checkpoint that a job of another size continues."""
    if saved.world_size != now.world_size:
        return f"{saved.world_size} processes and is continued by {now.world_size}"
    data = "shard" if saved.readers == 1 else "shards"
    return (
        f"{saved.world_size} processes with {saved.readers} {data} of the data and is continued by {now.world_size} "
        f"with {now.readers}"
    )


def _num_readers(strategy: Strategy) -> int:
    return strategy.training_sampler_kwargs.get("num_replicas", 1)


def reader_index(strategy: Strategy) -> int:
    """Return the index of the shard of the training data that this rank reads."""
    return strategy.training_sampler_kwargs.get("rank", 0)


def state_to_follow(
    strategy: Strategy, io: CheckpointIO, path: str | Path, states: Sequence[dict[str, Any]], same: dict[str, Any]
) -> dict[str, Any]:
    """Return the saved state whose data and random numbers this rank goes on with; collective.

    The job has the size of the one that saved.  It is the state of the same rank, unless other ranks share a batch now:
    then it is that of the first rank that has read this rank's shard, so that all that share a batch load the same
    samples.

    Args:
        strategy: Of the run.
        io: Reads the checkpoint.
        path: Of the checkpoint.
        states: Those of all saved ranks; empty if the checkpoint io reads each by itself.
        same: That of the same rank.
    """
    reader, saved_reader = reader_index(strategy), same.get("reader")  # absent in older checkpoints
    readers = gather_if_different(strategy, saved_reader, differs=saved_reader not in (None, reader))
    if readers is None:
        return same
    rank = readers.index(reader) if reader in readers else strategy.global_rank
    if states:
        return states[rank]
    return io.load_rank(path, rank) or same  # in every rank, as it may be collective


def rank_buffers(strategy: Strategy, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return this rank's buffers that differ from those of global rank 0, by name, on the CPU; collective.

    Running statistics of batch-norm layers differ: each rank computes them from its own batches.  Ranks exchange
    checksums only, so that buffers that are equal everywhere cost little.

    Args:
        strategy: Broadcasts the checksums.
        values: The values of buffers by name, by default those of the module.
    """
    if strategy.world_size == 1:
        return {}
    values = values or {}
    buffers = {name: values.get(name, buffer).detach().cpu() for name, buffer in _plain_buffers(strategy.module)}
    checksums = {name: checksum(buffer.reshape(-1).view(torch.uint8).numpy().data) for name, buffer in buffers.items()}
    saved = strategy.broadcast(checksums)
    return {name: buffer.clone() for name, buffer in buffers.items() if checksums[name] != saved.get(name)}


@torch.no_grad()
def load_rank_buffers(strategy: Strategy, buffers: Mapping[str, Tensor]) -> None:
    """Load the result of :func:`rank_buffers`, after the buffers of global rank 0 have been loaded."""
    saved = {canonical_name(name): buffer for name, buffer in buffers.items()}  # older checkpoints have wrappers' names
    for name, buffer in _plain_buffers(strategy.module):
        if name in saved:
            buffer.copy_(saved[name])


def _plain_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the persistent buffers of a module that are not sharded, by name."""
    for path, submodule in module.named_modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            is_saved = name not in submodule._non_persistent_buffers_set  # noqa: SLF001 - torch has no public name
            if is_saved and type(buffer) is Tensor and buffer.layout is torch.strided and not buffer.is_meta:
                yield canonical_name(f"{path}.{name}".lstrip(".")), buffer


def read_checkpoint(strategy: Strategy, io: CheckpointIO, path: str | Path, *, has_optimizers: bool) -> dict[str, Any]:
    """Read a checkpoint and load the module's state, sharded tensors in place; collective.

    Args:
        strategy: Has set up the module.
        io: Reads the checkpoint.
        path: Of the checkpoint.
        has_optimizers: Whether :func:`restore_optimization` will be called with the result.
    """
    return load_module(strategy, io, path, read_values(strategy, io, path), has_optimizers=has_optimizers)


def read_values(strategy: Strategy, io: CheckpointIO, path: str | Path) -> dict[str, Any]:
    """Read a checkpoint before the strategy has set up the module, without the tensors that will be sharded.

    Raises:
        CheckpointError: The checkpoint cannot be read, or is not a checkpoint of a training.
    """
    # Below None no tensor is read: sharded ones are read once, by load_module, when each rank has its shards.
    checkpoint = io.load_into(path, dict.fromkeys(_SHARDED)) if _shards(strategy, io) else io.load_checkpoint(path)
    if "state_dict" not in checkpoint:
        raise CheckpointError(
            f"checkpoint {str(path)!r} has no 'state_dict', so it is not one of a training: pass another path"
        )
    return checkpoint


def load_module(
    strategy: Strategy,
    io: CheckpointIO,
    path: str | Path,
    values: Mapping[str, Any],
    *,
    has_optimizers: bool,
    key: str = "state_dict",
) -> dict[str, Any]:
    """Load the module's state, and return the checkpoint for :func:`restore_optimization`; collective.

    Args:
        strategy: Has set up the module.
        io: Reads the checkpoint.
        path: Of the checkpoint.
        values: The result of :func:`read_values`.
        has_optimizers: Whether :func:`restore_optimization` will be called with the result.
        key: Of the module's state in the checkpoint.

    Raises:
        CheckpointError: The state does not fit the module; missing and unexpected names are logged instead if the
            module's ``strict_loading`` is False.
    """
    strict = getattr(strategy.module, "strict_loading", True)
    if not _shards(strategy, io):
        with _naming_checkpoint(path):
            strategy.load_module_state_dict(values[key], strict=strict)
        return dict(values)
    state = strategy.sharded_module_state()
    # Tensors on the meta device are those of other ranks, which read them.
    weights = named_weights(strategy.module).items()
    foreign = {name for name, value in weights if value.is_meta} - set(map(canonical_name, state))
    tensors = OptionalTensors({name: value for name, value in state.items() if not is_extra_state(name)})
    tensors.update(dict.fromkeys(foreign))
    # None for all other values, which read_values has read already.
    template: dict[str, Any] = {**dict.fromkeys(values), key: tensors}
    if has_optimizers and "optimizers" in values:
        check_same_number("optimizers", strategy.optimizers, values["optimizers"], path)
        template["optimizers"] = [strategy.optimizer_template(optimizer) for optimizer in strategy.optimizers]
    filled = io.load_into(path, template)  # one pass over the files for module and optimizers
    with _naming_checkpoint(path):
        _check_all_names(strategy, state, filled[key], strict=strict)
    strategy.load_sharded_module_state(filled[key])
    tensors_of_module = named_weights(strategy.module)
    extra = {name: value for name, value in filled[key].items() if canonical_name(name) not in tensors_of_module}
    if extra:  # extra states, and what a layer's state_dict computes: load_into could not fill the originals
        strategy.module.load_state_dict(extra, strict=False)
    return {**values, **{name: filled[name] for name in _SHARDED if name in filled}}


@torch.no_grad()
def load_weights_into(
    strategy: Strategy,
    io: CheckpointIO,
    path: str | Path,
    values: Mapping[str, Any],
    targets: Mapping[str, Tensor | FlatShard],
) -> None:
    """Load the weights of a checkpoint into other tensors than the module's, each process its shards.

    Args:
        strategy: Of the run.
        io: Reads the checkpoint.
        path: Of the checkpoint.
        values: The result of :func:`read_values`.
        targets: Tensors by name, sharded as those of ``strategy.local_weights()``; those that the checkpoint lacks
            stay as they are.
    """
    if _shards(strategy, io):
        io.load_into(path, {**dict.fromkeys(values), "state_dict": OptionalTensors(targets)})
        return
    from dstrat.parallel.full_state import copy_full

    for name, target in targets.items():
        if name in values["state_dict"]:
            full = values["state_dict"][name]
            copy_full(target, full.to(local_tensor(target).device))


def _check_all_names(strategy: Strategy, targets: Mapping[str, Any], saved: Mapping[str, Any], *, strict: bool) -> None:
    """Compare the names in a checkpoint with those of all ranks; collective."""
    names_of_ranks = gather_if_different(strategy, set(targets), differs=targets.keys() != saved.keys())
    if names_of_ranks is None:
        return
    names = set[str]().union(*names_of_ranks)  # ranks of a pipeline have different layers
    missing, unexpected = sorted(names - saved.keys()), sorted(saved.keys() - names)
    check_names(strategy.module, missing, unexpected, strict=strict, logs=strategy.is_global_zero)


@contextlib.contextmanager
def _naming_checkpoint(path: str | Path, which: str = "", advice: str = "") -> Iterator[None]:
    """Add the checkpoint's path and the advice to errors of the block."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {str(path)!r} cannot be loaded: {which}{error}{advice}") from error


def _shards(strategy: Strategy, io: CheckpointIO) -> bool:
    return io.is_collective and not strategy.replicates_state


def restore_optimization(strategy: Strategy, checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Load the state of optimizers, schedulers, precision and strategy; collective.

    Raises:
        CheckpointError: The optimizers or schedulers do not match those that were saved.
    """
    is_named = "optimizers" in checkpoint
    states = checkpoint["optimizers" if is_named else "optimizer_states"]
    check_same_number("optimizers", strategy.optimizers, states, path)
    check_same_number("schedulers", strategy.lr_schedulers, checkpoint["lr_schedulers"], path)
    load = strategy.load_sharded_optimizer_state if is_named else strategy.load_optimizer_state
    for number, (optimizer, state) in enumerate(zip(strategy.optimizers, states, strict=True)):
        which = f"of optimizer {number}, " if len(states) > 1 else ""
        with _naming_checkpoint(path, which, _MISMATCH_ADVICE):
            # Before the load, which replaces the groups by those that were saved.
            options = [name for name in optimizer.defaults if all(name in group for group in optimizer.param_groups)]
            load(optimizer, state)
            _check_options(optimizer, options)
    for config, state in zip(strategy.lr_schedulers, checkpoint["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    strategy.precision_plugin.load_state_dict(checkpoint["precision"])
    if is_of_same_strategy(strategy, checkpoint):
        strategy.load_state_dict(checkpoint["strategy"]["state"])
    elif checkpoint.get("strategy", {}).get("state") and strategy.is_global_zero:
        saved, current = checkpoint["strategy"]["name"], type(strategy).__name__
        _log.warning(
            "checkpoint %r has a state of %s, which %s cannot load: it begins without", str(path), saved, current
        )


def _check_options(optimizer: Optimizer, options: list[str]) -> None:
    """Raise a CheckpointError if the loaded groups lack options of the optimizer, which its step would read."""
    missing = [name for name in options if any(name not in group for group in optimizer.param_groups)]
    if missing:
        raise CheckpointError(
            f"the optimizer's state in the checkpoint has no {', '.join(missing)}, which {type(optimizer).__name__} "
            "needs: it is the state of another kind of optimizer"
        )


def is_of_same_strategy(strategy: Strategy, checkpoint: Mapping[str, Any]) -> bool:
    """Return whether a strategy of the same class saved the checkpoint; only that one can load the strategy's state."""
    saved: str = checkpoint.get("strategy", {}).get("name", "")
    return saved == type(strategy).__name__


def check_same_number(kind: str, current: list[Any], saved: list[Any], path: str | Path) -> None:
    """Raise a CheckpointError unless a training has as many optimizers or schedulers as were saved."""
    if len(current) != len(saved):
        raise CheckpointError(
            f"checkpoint {str(path)!r} has {len(saved)} {kind}, and this training has {len(current)}: it needs "
            "as many to resume"
        )

"""States of torchmetrics' metric objects, gathered from all ranks by a strategy.

torchmetrics gathers the states of a metric tensor by tensor, with a collective for each: ranks whose lists have
different lengths wait for each other forever, a rank without data mixes up the bytes of its defaults with the states
of others, and only torch.distributed is known.  Evaluation divides batches unevenly, so both are everyday cases.
"""

from __future__ import annotations

import functools
import io
import itertools
import pickle
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dstrat.interfaces.strategy import Strategy

UPDATED_BY_PEERS = True
"""An update count of a metric that only other ranks have updated: 1 for torchmetrics, and replaced by an int later."""


@contextmanager
def states_gathered_by(strategy: Strategy) -> Iterator[None]:
    """Let metric objects gather their states from all ranks by a strategy in a ``with`` block.

    A metric that has its own ``dist_sync_fn``, ``distributed_available_fn``, or a class of the user with ``sync`` or
    ``_sync_dist``, keeps these.  torchmetrics must be imported before; where it is not, there are no metrics.
    """
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        yield
        return
    original = torchmetrics.Metric.sync

    @functools.wraps(original)
    def sync(
        metric: Any,
        dist_sync_fn: Any = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:
        has_custom_sync = dist_sync_fn or distributed_available or _syncs_by_itself(metric)
        if has_custom_sync or not should_sync or metric._is_synced or strategy.world_size == 1:  # noqa: SLF001 - as below
            original(metric, dist_sync_fn, process_group, should_sync, distributed_available)
            return
        # What torchmetrics (1.x) does around its gathering; unsync restores the cache.
        copy = getattr(metric, "_copy_state_dict", None)  # torchmetrics 1.1 and newer
        metric._cache = _states(metric) if copy is None else copy()  # noqa: SLF001
        for name, value in _merged_state(metric, strategy, process_group or metric.process_group).items():
            setattr(metric, name, value)
        metric._is_synced = True  # noqa: SLF001

    # On the class, as metrics are cloned, pickled, and made within a run.
    torchmetrics.Metric.sync = sync
    try:
        yield
    finally:
        torchmetrics.Metric.sync = original


def _states(metric: Any) -> dict[str, Any]:
    """Return the states of a metric by name; the public property is of torchmetrics 1.1 and newer."""
    return {name: getattr(metric, name) for name in metric._defaults}  # noqa: SLF001


def _syncs_by_itself(metric: Any) -> bool:
    """Return whether a user has chosen how a metric gathers its states; torchmetrics' own classes have no such need."""
    default = sys.modules["torchmetrics.metric"].jit_distributed_available
    gathers_like = type(metric)._sync_dist.__module__.partition(".")[0]  # noqa: SLF001 - users override it (1.x)
    return metric.distributed_available_fn is not default or gathers_like != "torchmetrics"


class _RankState(NamedTuple):
    """The state of a metric on a rank that has updated it."""

    update_count: int
    values: dict[str, Any]


def _merged_state(metric: Any, strategy: Strategy, group: Any) -> dict[str, Any]:
    """Return the state of a metric that has seen the data of all ranks; collective.

    Ranks without an update are left out: defaults are no values for a mean, a maximum or a minimum.

    A value that is computed in a step (``dist_sync_on_step=True``) may be a loss.  It is the same on all ranks, and
    each has the gradient of its own data only, times the number of ranks: their mean is the gradient of one device.
    """
    local = _RankState(max(int(metric.update_count), 1), _states(metric))
    was_updated = _was_updated(metric)
    # Ranks that read the same data count once.
    reader = strategy.first_reader if group is None else strategy.global_rank
    counts = was_updated and reader == strategy.global_rank
    messages = _gather_bytes(_pack((reader, local if counts else None)), strategy, group)
    of_ranks = [_unpack(message, metric.device) for message in messages]
    num_readers = len({reader for reader, _ in of_ranks})
    states = [
        _with_gradients(state, local, num_readers) if was_updated and sender == reader else state
        for sender, state in of_ranks
        if state is not None
    ]
    if not states:
        return {}
    takes_turns = _has_an_item_for_each_update(metric, states)
    return {
        name: _merged(reduction, [state.values[name] for state in states], states, takes_turns=takes_turns)
        for name, reduction in metric._reductions.items()  # noqa: SLF001 - torchmetrics (1.x) has no public name
    }


def _with_gradients(sent: _RankState, local: _RankState, factor: int) -> _RankState:
    """Return a state that was sent, with the gradients of the local one multiplied by a factor."""

    # Not by a collective in the backward pass, which some ranks may not run.
    def with_gradient(value: Any, source: Any) -> Any:
        if isinstance(source, list):
            return [with_gradient(item, source_item) for item, source_item in zip(value, source, strict=True)]
        if not isinstance(source, Tensor) or not source.requires_grad:
            return value
        copied = source.clone()
        copied.register_hook(lambda gradient: gradient * factor)
        return copied

    return sent._replace(values={name: with_gradient(value, local.values[name]) for name, value in sent.values.items()})


def _was_updated(metric: Any) -> bool:
    if metric.update_called and metric.update_count is not UPDATED_BY_PEERS:
        return True
    # A user's method other than update may have changed the state.
    defaults = metric._defaults  # noqa: SLF001 - torchmetrics (1.x) has no public name
    return not all(_is_default(value, defaults[name]) for name, value in _states(metric).items())


def _is_default(value: Any, default: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(default, Tensor):
        return not isinstance(value, Tensor) and not value
    value, default = value.cpu(), default.cpu()
    return value.shape == default.shape and bool(((value == default) | (value.isnan() & default.isnan())).all())


def _has_an_item_for_each_update(metric: Any, states: Sequence[_RankState]) -> bool:
    """Return whether all lists have an item for each update, so that they can be in the order of the batches."""
    is_list = [isinstance(default, list) for default in metric._defaults.values()]  # noqa: SLF001 - as above
    return all(is_list) and all(
        isinstance(value, list) and len(value) == state.update_count
        for state in states
        for value in state.values.values()
    )


def _merged(reduction: Any, values: Sequence[Any], states: Sequence[_RankState], *, takes_turns: bool) -> Any:
    """Return a state from those of several ranks, as one device would have it."""
    name = getattr(reduction, "__name__", None)
    if any(isinstance(value, list) for value in values):
        lists = [value if isinstance(value, list) else [value] for value in values]
        # Batches are divided in turns: one device would have the first of each rank, then the second of each.
        turns = itertools.zip_longest(*lists, fillvalue=_NOTHING) if takes_turns else lists
        items = [item for turn in turns for item in turn if item is not _NOTHING]
        return items if reduction is None or name == "dim_zero_cat" or not items else reduction(items)
    if name == "dim_zero_cat":
        return torch.cat([torch.atleast_1d(value) for value in values])
    if reduction is None and len(values) == 1:
        return values[0]
    stacked = torch.stack(list(values))
    if name == "dim_zero_mean":  # over the updates, as torchmetrics merges the states of batches
        weights = torch.tensor([float(state.update_count) for state in states], device=stacked.device)
        return torch.tensordot(weights.to(stacked.dtype), stacked, dims=1) / weights.sum()
    return stacked if reduction is None else reduction(stacked)


_NOTHING = object()


# Any state as bytes, which ranks exchange in two collectives


def _pack(value: Any) -> bytes:
    """Return a picklable value, which may have tensors at any depth, as bytes."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> Any:
            if not isinstance(item, Tensor):
                return None
            # torch would pickle all of the storage of a view.  A clone, since contiguous keeps strides of one element.
            copied = item.detach().cpu().clone(memory_format=torch.contiguous_format)
            values = copied.reshape(-1).view(torch.uint8).numpy().tobytes()
            return item.dtype, item.shape, item.is_cpu, values

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _unpack(message: bytes, device: Any) -> Any:
    """Return the value that :func:`_pack` has packed, with tensors on the CPU or on the device, as they were."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Tensor:
            dtype, shape, is_cpu, values = pid
            # frombuffer refuses empty buffers.
            flat = (
                torch.frombuffer(bytearray(values), dtype=dtype)
                if values
                else torch.empty(0, dtype=dtype, device="cpu")
            )
            return flat.reshape(shape).to("cpu" if is_cpu else device)

    return Unpickler(io.BytesIO(message)).load()


def _gather_bytes(message: bytes, strategy: Strategy, group: Any) -> list[bytes]:
    """Return the messages of all ranks; collective."""
    device = strategy.root_device
    lengths = strategy.gather_from_processes(torch.tensor([len(message)], device=device), group).flatten().tolist()
    padded = torch.frombuffer(bytearray(message.ljust(max(lengths))), dtype=torch.uint8).to(device)
    gathered = strategy.gather_from_processes(padded, group).cpu()
    return [row[:length].numpy().tobytes() for row, length in zip(gathered, lengths, strict=True)]

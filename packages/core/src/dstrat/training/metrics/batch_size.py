"""Finding the size of a batch, which weighs the means over an epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Tuples of types are tested faster than unions.
_NUMBERS = (int, float)
_SEQUENCES = (list, tuple)


def size_of(batch: Any) -> int | None:
    """Return the length of the first dimension of the first array or tensor in a batch; None where there is none.

    Goes into mappings, sequences and dataclasses in their order.  A number, as a tensor without dimensions, is one.
    """
    kind = type(batch)
    if kind is list or kind is tuple:  # what most batches are, and the quickest to tell
        parts = batch
    else:
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return int(shape[0]) if shape else 1
        if isinstance(batch, _NUMBERS):
            return 1
        parts = _parts(batch)
    for part in parts:
        size = size_of(part)
        if size is not None:
            return size
    return None


def _parts(batch: Any) -> Any:
    if isinstance(batch, _SEQUENCES):  # named tuples
        return batch
    if isinstance(batch, Mapping):
        return batch.values()
    if dataclasses.is_dataclass(batch):
        return (getattr(batch, field.name) for field in dataclasses.fields(batch))
    return ()

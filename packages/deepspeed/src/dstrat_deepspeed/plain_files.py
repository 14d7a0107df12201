"""Reading files that torch.save has written of DeepSpeed's state, without running code from them."""

from __future__ import annotations

import pickle
import re
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

_REFUSED = re.compile(r"GLOBAL (\S+)|(?:unsupported class|but got <class) '?([\w.]+)")


class Attributes:
    """Stands for an object that holds plain attributes only, such as a loss scaler."""


class Number(int):
    """Stands for a member of an enumeration of numbers."""


_STAND_INS = [
    (Attributes, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Attributes, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Attributes, "deepspeed.utils.tensor_fragment.fragment_address"),
    (Attributes, "deepspeed.runtime.bf16_optimizer.fragment_address"),
    (Number, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def read_plain(path: Path) -> Any:
    """Return what is in a file: tensors on the CPU, plain values, stand-ins for DeepSpeed's own classes.

    Raises:
        CheckpointError: It cannot be read, or holds something else, which could run code.
    """
    try:
        with torch.serialization.safe_globals(_STAND_INS):  # type: ignore[arg-type]  # pairs are allowed too
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        found = _REFUSED.search(str(error))
        what = (found.group(1) or found.group(2)) if found else "something else"
        raise CheckpointError(
            f"{str(path)!r} holds {what}, and only tensors, plain values and DeepSpeed's own are read without running "
            f"code; to trust that class, call torch.serialization.add_safe_globals([{what}]) first"
        ) from error
    except Exception as error:  # bytes that are no checkpoint raise whatever they look like
        raise CheckpointError(f"{str(path)!r} is damaged, or was not written by torch.save") from error

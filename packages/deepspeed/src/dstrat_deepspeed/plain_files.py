"""Reading files that torch.save has written of DeepSpeed's state, without running code from them."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch

from dstrat.builtin.checkpoint.portable.marks import split
from dstrat.builtin.checkpoint.stand_ins import stand_ins, without_stand_ins
from dstrat.builtin.checkpoint.torch_file import refused_name
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


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
_NEEDED = ("", "module", "optimizer", "optimizer_state_dict", "param", "param_groups", "state")
"""The keys of a file below which nothing is left out."""


def read_plain(path: Path) -> Any:
    """Return what is in a file: tensors on the CPU, plain values, stand-ins for DeepSpeed's own classes.

    Objects of other classes, which users have put there, are left out.

    Raises:
        CheckpointError: It cannot be read, or holds something that would run code.
    """
    known = {name for _, name in _STAND_INS}
    others = [pair for pair in stand_ins(path) if pair[1] not in known]
    try:
        with torch.serialization.safe_globals([*_STAND_INS, *others]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{str(path)!r} is not read: it holds {refused_name(str(error)) or 'something'} that cannot be read "
            "without running code; save it again without that"
        ) from error
    except Exception as error:  # bytes that are no checkpoint raise whatever they look like
        raise CheckpointError(f"{str(path)!r} is damaged, or was not written by torch.save") from error
    plain, unknown = without_stand_ins(content)
    for name, kind in unknown.items():
        if split(name)[0] in _NEEDED:
            raise CheckpointError(
                f"{str(path)!r} is not read: {name!r} in it is of {kind}, which cannot be read without running code; "
                "save it again without that"
            )
    return plain

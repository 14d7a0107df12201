"""The micro-batch size that a configuration has to state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError, RequestError
from dstrat.interfaces.batch import apply_to_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from dstrat_deepspeed.config_source import GivenConfig

_MICRO, _GLOBAL = "train_micro_batch_size_per_gpu", "train_batch_size"
SIZES = (_MICRO, _GLOBAL, "gradient_accumulation_steps")
"""What a configuration says of the number of samples."""


class MicroBatch:
    """Number of samples in a batch of one rank, which DeepSpeed uses for figures of its own only.

    Args:
        asked: The option ``logging_batch_size_per_gpu``: a number, or ``"auto"``.
        given: The user's configuration.
    """

    def __init__(self, asked: int | str, given: GivenConfig) -> None:
        if asked != "auto" and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
            raise RequestError(
                f"logging_batch_size_per_gpu {asked!r} is not possible: give a whole number from 1 on, or 'auto'"
            )
        self._asked = asked
        self._given = given
        self._stated: tuple[str, int] | None = None

    def complete(self, config: dict[str, Any], *, world_size: int) -> None:
        """Write the size into a whole configuration.

        Raises:
            RequestError: The global size that the user has given cannot be divided.
            ConflictError: Two sizes contradict each other.
        """
        accumulate = config["gradient_accumulation_steps"]
        if _MICRO in config:
            self._state(f"{self._given.place} says {_MICRO}", config[_MICRO], config)
        if _GLOBAL in config:
            whole, share = config.pop(_GLOBAL), world_size * accumulate
            if not isinstance(whole, int) or whole % share:
                raise RequestError(
                    f"{self._given.place} says {_GLOBAL}: {whole!r}, which is no multiple of {world_size} ranks times "
                    f"accumulate_grad_batches={accumulate}: give one that is, or leave it out"
                )
            self._state(f"{self._given.place} says {_GLOBAL}", whole // share, config)
        if self._asked != "auto":
            self._state(f"logging_batch_size_per_gpu={self._asked!r}", int(self._asked), config)
        config.setdefault(_MICRO, 1)

    def _state(self, place: str, size: int, config: dict[str, Any]) -> None:
        if self._stated is not None and self._stated[1] != size:
            raise ConflictError(
                f"{place}, which makes {size} samples in each batch of a rank, and {self._stated[0]}, which makes "
                f"{self._stated[1]}: leave one of them out"
            )
        self._stated = (place, size)
        config[_MICRO] = size

    def check(self, batch: Any) -> None:
        """Compare what the configuration says with the first batch of a training.

        Raises:
            ConflictError: They differ.
        """
        sizes: list[int] = []
        apply_to_tensors(batch, lambda tensor: _note_size(tensor, sizes))
        if self._stated is not None and sizes and self._stated[1] not in sizes:
            place, size = self._stated
            raise ConflictError(
                f"{place}, which makes {size} samples in each batch of a rank, and the first batch of the training "
                f"loader has {sizes[0]}: let both say the same, or leave it out"
            )
        self._stated = None


def _note_size(tensor: Tensor, sizes: list[int]) -> Tensor:
    sizes.extend(tensor.shape[:1])
    return tensor

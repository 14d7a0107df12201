"""The state of the random number generators on the host: python's, numpy's and torch's."""

from __future__ import annotations

import importlib.util
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from typing_extensions import Self


def seed_everything(seed: int) -> int:
    """Let python, numpy (where it is installed) and torch draw the same random numbers in every run; return the seed.

    Args:
        seed: From 0 to 2**32 - 1; the same in every process, so that all of them create the same module.
    """
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise RequestError(f"seed_everything({seed!r}) is not possible: give an int from 0 to {2**32 - 1}")
    random.seed(seed)
    torch.manual_seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        import numpy as np

        np.random.seed(seed)
    return seed


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomState:
    """What the generators would draw next.

    Attributes:
        python: State of the module ``random``.
        numpy: State of numpy's global generator; None where numpy is not loaded.
        torch: State of torch's generator on the CPU.
    """

    python: Any
    numpy: Any
    torch: Tensor

    @classmethod
    def capture(cls) -> Self:
        """Return the state of this process."""
        numpy = sys.modules.get("numpy")
        return cls(
            python=random.getstate(),
            numpy=numpy.random.get_state() if numpy is not None else None,
            torch=torch.get_rng_state(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain values and a tensor."""
        return {"python": self.python, "numpy": _plain(self.numpy), "torch": self.torch}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return what :meth:`state_dict` described."""
        return cls(python=_tuples(state["python"]), numpy=_tuples(state["numpy"]), torch=state["torch"])

    def restore(self) -> None:
        """Let this process draw the same numbers."""
        random.setstate(self.python)
        torch.set_rng_state(self.torch)
        if self.numpy is not None:
            import numpy as np

            np.random.set_state(self.numpy)


def _plain(numpy_state: Any) -> Any:
    """Return numpy's state with a list of numbers in place of its array."""
    if numpy_state is None:
        return None
    name, keys, *rest = numpy_state
    return [name, [int(key) for key in keys], *rest]


def _tuples(state: Any) -> Any:
    return tuple(map(_tuples, state)) if isinstance(state, list | tuple) else state

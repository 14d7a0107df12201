"""Random state of a process: that of the host (python's, numpy's and torch's generators), and of its device."""

from __future__ import annotations

import logging
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from dstrat.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from typing_extensions import Self

    from dstrat.interfaces.strategy import Strategy

SEED_VARIABLE = "PL_GLOBAL_SEED"
"""The seed of a call without one; by Lightning's name, so that programs and job scripts stay as they are."""

_LARGEST_SEED = 2**32 - 1
_SPREAD = 0x9E3779B1
"""Multiples of this are far apart in their lower 32 bits, which seed torch's generator on the CPU."""

_log = logging.getLogger(__name__)


def seed_everything(
    seed: int | None = None,
    workers: bool = False,  # noqa: ARG001 - as Lightning has it
    verbose: bool = True,
) -> int:
    """Seed python, numpy and torch, so that every run draws the same numbers; return the seed.

    Args:
        seed: From 0 to 2**32 - 1; the same in every process, so that all of them create the same module.  None takes
            the environment variable ``PL_GLOBAL_SEED``, or 0.
        workers: Changes nothing, and is there for programs from Lightning: workers of loaders always draw numbers that
            follow from the seed, and in a run those of each process draw others.
        verbose: Whether the seed is logged, at the level INFO; where there is none, as a warning.

    Raises:
        RequestError: It is no such number.
    """
    number = _seed_of_environment(verbose=verbose) if seed is None else _read_seed(seed, f"seed_everything({seed!r})")
    if verbose:
        _log.info("seed set to %d", number)
    _seed_generators(number, number)
    return number


def _seed_of_environment(*, verbose: bool) -> int:
    value = os.environ.get(SEED_VARIABLE)
    if value is not None:
        return _read_seed(value, f"{SEED_VARIABLE}={value!r}")
    if verbose:
        _log.warning("seed_everything() was called without a seed, and %s is not set: the seed is 0", SEED_VARIABLE)
    return 0


def _read_seed(seed: Any, source: str) -> int:
    """Convert a seed to an int: numpy's integers, integral floats, and strings."""
    try:
        number = int(seed)
        is_integral = isinstance(seed, str) or number == seed
    except (TypeError, ValueError, OverflowError):
        number, is_integral = -1, False
    if not is_integral or not 0 <= number <= _LARGEST_SEED:
        raise RequestError(f"{source} is not possible: give an int from 0 to {_LARGEST_SEED}")
    return number


def _seed_generators(seed: int, numpy_seed: Any) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(numpy_seed)


class WorkerSeeds:
    """A loader's ``worker_init_fn`` by which the workers of each process draw random numbers of their own.

    Without it they draw the same in every process: torch seeds them by numbers of the process, which begins with the
    seed of the job.  The first process keeps torch's own seeds, so that it draws what a single process would.

    Args:
        rank: Which of the processes that read different data this is.
        worker_init_fn: The loader's own, which is called afterwards.
    """

    def __init__(self, rank: int, worker_init_fn: Callable[[int], Any] | None) -> None:
        self._rank, self._worker_init_fn = rank, worker_init_fn

    def __call__(self, worker_id: int) -> None:
        """Seed the worker in which this is called."""
        info = get_worker_info()
        if info is not None and getattr(info, "worker_method", None) != "thread":  # which shares the generators
            seed = (info.seed + self._rank * _SPREAD) % 2**63
            object.__setattr__(info, "seed", seed)  # for datasets that seed generators by it; read-only in torch
            # A third word, as python and numpy would make the same numbers of the same words.
            _seed_generators(seed, [seed % 2**32, seed >> 32, 1])
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)


def drop_workers(loader: Any) -> bool:
    """Let the next reading of a loader start new workers in place of persistent ones; return whether there are any."""
    if getattr(loader, "_iterator", None) is None:
        return False
    loader._iterator = None  # noqa: SLF001 - DataLoader's (torch 2.9 to 2.13); there is no public way
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomState:
    """The state of the global generators of a process.

    Attributes:
        python: State of the module ``random``.
        numpy: State of numpy's global generator; None in checkpoints of processes that had not loaded numpy.
        torch: State of torch's generator on the CPU.
    """

    python: Any
    numpy: Any
    torch: Tensor

    @classmethod
    def capture(cls) -> Self:
        """Return the state of this process."""
        return cls(python=random.getstate(), numpy=np.random.get_state(), torch=torch.get_rng_state())

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors."""
        # As tensors, because a checkpoint writes each of the 1,249 numbers by itself otherwise.
        version, internal_state, gauss = self.python
        return {
            "python": {"version": version, "words": torch.tensor(internal_state, device="cpu"), "gauss": gauss},
            "numpy": None if self.numpy is None else _numpy_state_dict(self.numpy),
            "torch": self.torch,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the state that :meth:`state_dict` saved."""
        # Older checkpoints, until 2026, have lists of numbers instead of dicts with tensors.
        python, numpy = state["python"], state["numpy"]
        if isinstance(python, dict):
            python = (python["version"], python["words"].tolist(), python["gauss"])
        if isinstance(numpy, dict):
            numpy = (numpy["name"], numpy["words"].tolist(), *numpy["rest"])
        return cls(python=_tuples(python), numpy=_tuples(numpy), torch=state["torch"])

    def restore(self) -> None:
        """Set the global generators to this state."""
        random.setstate(self.python)
        torch.set_rng_state(self.torch)
        if self.numpy is not None:
            np.random.set_state(self.numpy)

    def restore_in_new_process(self) -> None:
        """Set the global generators of a process that was started for this, and seed those of devices alike."""
        inherited = torch.initial_seed()
        self.restore()
        # A fork has inherited the device's generators.  In a new interpreter they have torch's default seed, and would
        # draw the same for each seed of the program.
        if torch.initial_seed() != inherited:
            torch.manual_seed(torch.initial_seed())  # devices are seeded when they are first used
            self.restore()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRandomState:
    """The random state of a rank.

    Attributes:
        host: The state of the host's generators.
        device: The state of its devices' generators; None if they have none.
    """

    host: RandomState
    device: Tensor | None

    @classmethod
    def capture(cls, strategy: Strategy, host: RandomState | None = None) -> Self:
        """Return the state of this rank, with an earlier one of the host if that is passed."""
        return cls(host=RandomState.capture() if host is None else host, device=strategy.get_random_state())

    def restore(self, strategy: Strategy) -> None:
        """Set the generators of this rank to this state."""
        if self.device is not None:
            strategy.set_random_state(self.device)
        self.host.restore()


def _numpy_state_dict(state: Any) -> dict[str, Any]:
    name, keys, *remaining = state
    keys = keys if isinstance(keys, tuple) else keys.tolist()  # a tuple where it has been loaded from a checkpoint
    return {"name": name, "words": torch.tensor(keys, device="cpu"), "rest": remaining}


def _tuples(state: Any) -> Any:
    return tuple(map(_tuples, state)) if isinstance(state, list | tuple) else state

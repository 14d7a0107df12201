"""Jobs that the strategy itself launches, watched from the process that launches them."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from dstrat.errors import DstratError, RankFailedError
from dstrat.testing.fits import Fit, make_trainer
from dstrat.testing.modules import Interrupted, Net
from dstrat.testing.processes import adopt_orphans, left_over, open_to_others
from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from dstrat.testing.place import Place
    from dstrat.testing.subject import Subject

Misdeed = Literal["nothing", "raises", "dies", "hangs"]

_EXIT_CODE = 7
WORDS = "this rank has had enough"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        error: Class and message of what ``fit`` raised; empty where it raised nothing.
        rank: The rank that the error blames; None where it blames none.
        seconds: From the launch to the end.
        left: Processes that still run.
        steps: Optimizer steps, as the process that launched it knows them afterwards.
        has_trained: Whether the user's module has other parameters than before; None where they are sharded.
    """

    error: str
    rank: int | None
    seconds: float
    left: list[str]
    steps: int
    has_trained: bool | None


class Misbehaving(Interrupted):
    """One rank raises, dies or hangs in its third batch."""

    at_batch = 2
    culprit = -1
    misdeed: Misdeed = "nothing"

    def interrupt(self) -> None:
        if self.global_rank != self.culprit:
            return
        if self.misdeed == "raises":
            raise ValueError(WORDS)
        if self.misdeed == "dies":
            os._exit(_EXIT_CODE)
        if self.misdeed == "hangs":
            time.sleep(1000)


class _LooksAtSockets(Callback):
    """Notes on what a rank listens, when training starts and when it ends."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:  # noqa: ARG002 - the hook's
        self.found += open_to_others()

    def on_train_end(self, trainer: Any, module: Any) -> None:  # noqa: ARG002 - the hook's
        self.found += open_to_others()


class LeavesTrace(Callback):
    """Leaves a file for each rank that trains.

    Args:
        folder: Where.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, module: Any) -> None:  # noqa: ARG002 - the hook's
        (self.folder / f"trained-{trainer.global_rank}").touch()


def launch(
    place: Place, subject: Subject, accelerator: str, devices: int, misdeed: Misdeed, times: int = 1
) -> list[Outcome]:
    """Fit several times in this process, which launches the ranks.

    Args:
        place: The only rank of a job.
        subject: Starts processes by a method that needs no script.
        accelerator: Where.
        devices: How many ranks it launches.
        misdeed: What the last of them does.
        times: How often.
    """
    adopt_orphans()
    _be(Path(__file__))
    return [_launch(place, subject, accelerator, devices, misdeed) for _ in range(times)]


def sockets(place: Place, subject: Subject, accelerator: str) -> list[str]:
    """Train in a rank; return on what it listened for others than this machine."""
    looks = _LooksAtSockets()
    work = Fit(samples=16, accelerator=accelerator)
    make_trainer(place, subject, work, [looks]).fit(Net(work, subject.configure_model))
    return list(dict.fromkeys(looks.found))


def at_a_prompt(place: Place, subject: Subject, accelerator: str, devices: int) -> Outcome:
    """Fit as in a notebook, where there is no script that could be run again."""
    adopt_orphans()
    _be(None)
    return _launch(place, subject, accelerator, devices, "nothing")


def _be(script: Path | None) -> None:
    """Let this process look as if it ran a script, or as a prompt, where there is none."""
    main = ModuleType("__main__")
    if script is not None:
        main.__file__ = str(script)
    sys.modules["__main__"] = main


def _launch(place: Place, subject: Subject, accelerator: str, devices: int, misdeed: Misdeed) -> Outcome:
    work = Fit(samples=64, accelerator=accelerator)
    module = Misbehaving(work, subject.configure_model)
    module.culprit, module.misdeed = devices - 1, misdeed
    before = [parameter.detach().clone() for parameter in module.parameters()]
    begun, error, rank, steps = time.monotonic(), "", None, 0
    alone = replace(place, world_size=devices)
    try:
        trainer = make_trainer(alone, subject, work, [_Nothing()], plugins=None)
        trainer.fit(module)
        steps = trainer.global_step
    except (DstratError, ValueError) as raised:
        error = f"{type(raised).__name__}: {raised}"
        rank = raised.rank if isinstance(raised, RankFailedError) else None
    seconds = time.monotonic() - begun
    has_trained = _differ(before, [parameter.data for parameter in module.parameters()])
    return Outcome(error=error, rank=rank, seconds=seconds, left=left_over(), steps=steps, has_trained=has_trained)


def _differ(before: list[Tensor], after: list[Tensor]) -> bool | None:
    """Return whether parameters differ; None where some are sharded."""
    if any(type(new) is not Tensor or new.is_meta for new in after):
        return None
    return any(not new.cpu().equal(old) for old, new in zip(before, after, strict=True))


class _Nothing(Callback):
    """Keeps the Trainer from validating."""

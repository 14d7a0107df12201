"""Base of logged values: options, names, value of the latest step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from dstrat.training.metrics.options import Options


DATALOADER_SUFFIX = "/dataloader_idx_"
"""What stands between a name and the index of the loader, where several are evaluated."""


class Entry:
    """What every kind of logged name has: its options, and the names under which it is known.

    Args:
        name: As the user logs it.
        options: As they were given.
        in_step: Whether it is logged in steps, or around them.
        training: Whether it is logged while training, which decides the defaults.

    Attributes:
        is_fresh: Whether it was logged since the last write of step values.
        was_logged: Whether it was logged in this epoch.
        latest: The value of the last step in this process.
        step_name: Name of the value of a step.
        epoch_name: Name of the value over the epoch.
    """

    __slots__ = (
        "epoch_name",
        "in_step",
        "is_fresh",
        "latest",
        "name",
        "on_epoch",
        "on_step",
        "options",
        "step_name",
        "was_logged",
    )

    def __init__(self, name: str, options: Options, *, in_step: bool, training: bool) -> None:
        options.check(name, in_step=in_step)
        of_steps = training and in_step
        self.name, self.options, self.in_step = name, options, in_step
        self.on_step = of_steps if options.on_step is None else options.on_step
        self.on_epoch = not of_steps if options.on_epoch is None else options.on_epoch
        self.is_fresh = self.was_logged = False
        self.latest: Tensor | float = 0.0
        self.step_name = _extended(name, "_step") if self.on_epoch else name
        self.epoch_name = _extended(name, "_epoch") if self.on_step else name

    @property
    def value_names(self) -> set[str]:
        """Names of its values in logs."""
        asked = {self.step_name: self.on_step, self.epoch_name: self.on_epoch}
        return {name for name, is_asked in asked.items() if is_asked}

    @property
    def is_written(self) -> bool:
        """Whether loggers write it."""
        return self.options.logger is not False

    @property
    def step_value(self) -> Tensor | float | None:
        """The value of the latest step, None where it is not known yet."""
        return self.latest

    @property
    def shown_value(self) -> Tensor | float:
        """The value of the latest step that the progress bar shows."""
        return self.latest

    @property
    def resolved(self) -> Options:
        """The options with every default filled in, without objects that only this process knows."""
        return self.options._replace(
            on_step=self.on_step, on_epoch=self.on_epoch, sync_dist_group=self.options.sync_dist_group is not None
        )

    def start_epoch(self) -> None:
        """Begin another epoch."""
        self.was_logged = False

    def state_dict(self) -> dict[str, Any]:
        """Return what the epoch has brought so far, as plain values and tensors."""
        return {"latest": self.latest, "is_fresh": self.is_fresh, "was_logged": self.was_logged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.latest, self.is_fresh, self.was_logged = state["latest"], state["is_fresh"], state["was_logged"]


def _extended(name: str, ending: str) -> str:
    """Return a name with an ending, which stands before the index of a loader."""
    base, mark, index = name.rpartition(DATALOADER_SUFFIX)
    return f"{base}{ending}{mark}{index}" if mark else f"{name}{ending}"

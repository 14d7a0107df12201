"""The options of one logged name: what was asked, checked, and what follows from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REDUCTIONS = ("mean", "sum", "max", "min")
_SAME: dict[Any, str] = {
    **{name: name for name in REDUCTIONS},
    "avg": "mean",
    torch.mean: "mean",
    torch.sum: "sum",
    torch.max: "max",
    torch.amax: "max",
    torch.min: "min",
    torch.amin: "min",
    sum: "sum",
    max: "max",
    min: "min",
}


class Options(NamedTuple):
    """The arguments of ``log`` as they were given, in its order."""

    prog_bar: bool
    logger: bool
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: str | Callable[..., Any]
    enable_graph: bool
    sync_dist: bool | None
    sync_dist_group: Any
    add_dataloader_idx: bool
    metric_attribute: str | None
    rank_zero_only: bool

    def reduction(self, name: str) -> str:
        """Return the name of the reduction.

        Raises:
            MisuseError: It is none that gives the same value however the data is spread.
        """
        given = self.reduce_fx.lower() if isinstance(self.reduce_fx, str) else self.reduce_fx
        try:
            return _SAME[given]
        except (KeyError, TypeError):
            shown = repr(given) if isinstance(given, str) else getattr(given, "__name__", repr(given))
            raise MisuseError(
                f"reduce_fx {shown} of {name!r} is not one of {', '.join(REDUCTIONS)}: no other can be put together "
                "from batches and processes; log a torchmetrics Metric, or compute the value at the end of the epoch"
            ) from None

    def check(self, name: str, *, in_step: bool) -> None:
        """Refuse what makes no sense.

        Raises:
            MisuseError: It does not.
        """
        if self.enable_graph:
            raise MisuseError(
                f"log({name!r}, enable_graph=True): what is logged has no gradients; return it as the loss"
            )
        if self.on_step is False and self.on_epoch is False:
            raise MisuseError(f"log({name!r}, on_step=False, on_epoch=False) would be lost: set one of them")
        if self.on_step and not in_step:
            raise MisuseError(f"log({name!r}, on_step=True) works in steps; here, use on_epoch=True")
        if self.rank_zero_only and self.sync_dist:
            raise MisuseError(
                f"log({name!r}) cannot reduce over all processes what only rank 0 logs: set sync_dist=False"
            )


def changed(name: str, before: Options, now: Sequence[Any]) -> MisuseError:
    """Return the error for a name whose options are others than before."""
    pairs = [(field, old, new) for field, old, new in zip(Options._fields, before, now, strict=True) if old != new]
    had = ", ".join(f"{field}={old!r}" for field, old, _ in pairs)
    has = ", ".join(f"{field}={new!r}" for field, _, new in pairs)
    return MisuseError(
        f"log({name!r}) was called with {had} before, and now with {has}: use the same options each time, or two names"
    )

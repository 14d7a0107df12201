"""Which checkpoint io reads a checkpoint that another program has written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.cli.catalog import loaded_catalog
from dstrat.cli.checkpoint.lightning import Conversion
from dstrat.errors import CatalogError

if TYPE_CHECKING:
    from typing import Any

    from dstrat.interfaces.checkpoint_io import CheckpointIO


def reader_of(path: str) -> CheckpointIO | None:
    """Return the first checkpoint io in the catalog that recognizes a checkpoint; None where there is none.

    Those that cannot be imported, as something that they require is missing, recognize nothing.
    """
    catalog = loaded_catalog()
    for offer in catalog.offers("checkpoint_io"):
        try:
            kind: type[CheckpointIO] = catalog.load(offer)
        except CatalogError:
            continue
        if kind.recognizes(path):
            return kind(**offer.component.options)
    return None


def as_conversion(checkpoint: dict[str, Any]) -> Conversion:
    """Return what a checkpoint io has converted, with what people want to know of it."""
    taken = [
        f"{len(checkpoint['state_dict'])} weights",
        f"epoch {checkpoint['epoch']}, step {checkpoint['global_step']}",
    ]
    for key, what in (("optimizers", "optimizer"), ("lr_schedulers", "scheduler")):
        count = len(checkpoint.get(key, ()))
        taken += [f"{count} {what}{'s' * (count > 1)}"] if count else []
    return Conversion(checkpoint=checkpoint, taken=taken, left_out=[])

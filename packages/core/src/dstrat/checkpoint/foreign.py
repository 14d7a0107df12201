"""Recognition of checkpoints that other programs have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.errors import CatalogError, CheckpointError
from dstrat.plugins.catalog import get_catalog

if TYPE_CHECKING:
    from pathlib import Path

    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.offer import Offer


def reader_of(path: str | Path, catalog: Catalog) -> tuple[Offer, CheckpointIO] | None:
    """Return the first checkpoint io in the catalog that recognizes a checkpoint; None where there is none.

    Those that cannot be imported, as something that they require is missing, recognize nothing.

    Raises:
        CheckpointError: One recognizes it, and cannot read such a one.
    """
    for offer in catalog.offers("checkpoint_io"):
        try:
            kind: type[CheckpointIO] = catalog.load(offer)
        except CatalogError:
            continue
        if kind.recognizes(path):
            return offer, kind(**offer.component.options)
    return None


def check_not_foreign(path: str | Path) -> None:
    """Raise CheckpointError, which says how to convert it, where another program has written what is at a path."""
    try:
        found = reader_of(path, get_catalog())
    except CatalogError:
        return  # the catalog has its own errors, where it is asked for
    if found is not None:
        offer, _ = found
        raise CheckpointError(
            f"{str(path)!r} was written by another program, as {offer.title} finds: {how_to_convert(path)}"
        ) from None


def how_to_convert(path: str | Path) -> str:
    """Return what to do with a checkpoint of another program."""
    return f"convert it by 'dstrat checkpoint convert {path} NEW', and go on from NEW"

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
    """Return the first checkpoint io in the catalog that recognizes a checkpoint, with its offer; None if none does.

    Raises:
        CheckpointError: A checkpoint io recognizes the checkpoint but cannot read this kind.
    """
    for offer in catalog.offers("checkpoint_io"):
        try:
            kind: type[CheckpointIO] = catalog.load(offer)
        except CatalogError:  # its requirements are missing: another one may still recognize the checkpoint
            continue
        if kind.recognizes(path):
            return offer, kind(**offer.component.options)
    return None


def check_not_foreign(path: str | Path) -> None:
    """Raise a CheckpointError with the conversion command if another program wrote the checkpoint at a path."""
    try:
        match = reader_of(path, get_catalog())
    except CatalogError:
        return  # the caller raises its own error about the checkpoint, which matters more here
    if match is not None:
        offer, _ = match
        raise CheckpointError(
            f"{str(path)!r} was written by another program, as {offer.title} finds: {how_to_convert(path)}"
        ) from None


def how_to_convert(path: str | Path) -> str:
    """Return the advice to convert a checkpoint of another program."""
    return f"convert it by 'dstrat checkpoint convert {path} NEW', and resume from NEW"

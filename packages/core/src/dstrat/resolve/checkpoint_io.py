"""Choosing how checkpoints reach storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.errors import RequestError
from dstrat.resolve.chosen import Chosen, chosen_as_given
from dstrat.resolve.part import automatic_parts

if TYPE_CHECKING:
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.plugins.catalog import Catalog
    from dstrat.resolve.given import Given


def choose_checkpoint_io(given: Given | None, catalog: Catalog) -> Chosen[CheckpointIO]:
    """Choose the checkpoint io.

    Args:
        given: What the user gave; None takes the best that is installed.
        catalog: What there is.

    Raises:
        RequestError: It is no checkpoint io, or none is installed that may be chosen automatically.
        CatalogError: Nothing usable has that alias.
    """
    if given is not None:
        return chosen_as_given("checkpoint_io", given, catalog)
    for part in automatic_parts("checkpoint_io", catalog):
        return Chosen(part=part, reason="the default", live=part.construct())
    raise RequestError("no checkpoint io is installed that may be chosen automatically: give one as a plugin")

"""The catalog as the command line needs it, and its records as JSON."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from dstrat.plugins.catalog import get_catalog

if TYPE_CHECKING:
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.offer import Offer


def loaded_catalog() -> Catalog:
    """Return the catalog of this process; what plugins print while they are loaded does not mix with our output."""
    with contextlib.redirect_stdout(sys.stderr):
        return get_catalog()


def offer_as_dict(offer: Offer, catalog: Catalog) -> dict[str, Any]:
    """Return all that is known of an offer without importing its class."""
    component = offer.component
    facts = {field.name: getattr(component, field.name) for field in fields(component)}
    return {
        **facts,
        "target": component.target_name,
        "owner": offer.owner,
        "version": offer.version,
        "missing_requirements": catalog.missing_requirements(offer),
    }

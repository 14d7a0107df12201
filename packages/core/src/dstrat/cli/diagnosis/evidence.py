"""Evidence in the environment of launchers and schedulers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.cli.diagnosis.finding import Finding
from dstrat.errors import DstratError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.offer import Offer


def check_evidence(catalog: Catalog, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Tell which cluster environments see signs of themselves, and what they make of them."""
    found = [finding for offer in catalog.offers("cluster_environment") for finding in _seen(offer, catalog, environ)]
    yield from found or [Finding(subject="environment", text="nothing else has started this process")]


def _seen(offer: Offer, catalog: Catalog, environ: Mapping[str, str]) -> Iterator[Finding]:
    alias = offer.component.alias
    try:
        cls = catalog.load(offer)
        evidence = cls.evidence(environ)
        if evidence is not None:
            cluster = cls(environ, **offer.component.options)
            place = f"rank {cluster.global_rank} of {cluster.world_size}, machine {cluster.node_rank}"
            yield Finding(subject=alias, text=f"{evidence}: {place}", state="note")
    except DstratError as error:
        yield Finding(subject=alias, text=str(error), state="problem")
    except Exception as error:  # noqa: BLE001 - variables that were set by hand may hold anything
        text = f"{offer.owner_label} raised {type(error).__name__}: {error}"
        yield Finding(subject=alias, text=text, state="problem")

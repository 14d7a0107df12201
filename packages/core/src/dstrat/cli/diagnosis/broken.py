"""Check for plugins that failed or have defects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.cli.diagnosis.finding import Finding
from dstrat.errors import AmbiguousAliasError, DstratError, MissingRequirementError
from dstrat.plugins.component import KINDS
from dstrat.plugins.names import normalized
from dstrat.plugins.offer import kind_label
from dstrat.plugins.settings import DISABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.offer import Offer, Plugin

_SLOW = 0.1  # seconds; a plugin is a few lines


def check_plugins(catalog: Catalog) -> Iterator[Finding]:
    """Tell of broken, disabled and slow plugins, and of components that cannot be used as they are."""
    offers = [offer for kind in KINDS for offer in catalog.offers(kind)]
    findings = [
        *_about_settings(catalog),
        *(finding for plugin in catalog.plugins for finding in _about_plugin(plugin)),
        *(finding for offer in offers for finding in _about_offer(offer, catalog)),
    ]
    yield from findings
    if not findings:
        yield Finding(subject="plugins", text=f"all {len(catalog.plugins)} work, with {len(offers)} components")


def _about_settings(catalog: Catalog) -> Iterator[Finding]:
    absent = catalog.settings.disabled - {normalized(plugin.distribution) for plugin in catalog.plugins}
    if absent:
        text = f"names what is not installed: {', '.join(sorted(absent))}"
        yield Finding(subject=DISABLE, text=text, state="note")


def _about_plugin(plugin: Plugin) -> Iterator[Finding]:
    if plugin.is_broken:
        yield Finding(subject=plugin.label, text=f"{plugin.state}: {plugin.reason}", state="problem")
    elif plugin.state == "disabled":
        yield Finding(subject=plugin.label, text=f"disabled: {plugin.reason}", state="note")
    elif plugin.imported_torch:
        text = "its plugin module imports torch, which makes every listing slow"
        yield Finding(subject=plugin.label, text=text, state="note")
    elif plugin.seconds > _SLOW:
        text = f"its plugin module took {plugin.seconds:.2f} s to load, which makes every listing slow"
        yield Finding(subject=plugin.label, text=text, state="note")


def _about_offer(offer: Offer, catalog: Catalog) -> Iterator[Finding]:
    subject = f"{kind_label(offer.component.kind)} {offer.component.alias}"
    try:
        catalog.find(offer.component.kind, offer.component.alias)
        catalog.check_requirements(offer)
        catalog.load(offer)
    except (AmbiguousAliasError, MissingRequirementError) as error:  # it works, or can, once someone wants it
        yield Finding(subject=subject, text=str(error), state="note")
    except DstratError as error:
        yield Finding(subject=subject, text=str(error), state="problem")

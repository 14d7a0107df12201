"""Devices that each accelerator finds on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.cli.diagnosis.finding import Finding
from dstrat.errors import DstratError, MissingRequirementError
from dstrat.plugins.component import NO_BACKEND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.offer import Offer


def check_devices(catalog: Catalog) -> Iterator[Finding]:
    """Ask every accelerator what it finds."""
    for offer in catalog.offers("accelerator"):
        yield _found(offer, catalog)


def _found(offer: Offer, catalog: Catalog) -> Finding:
    subject = f"accelerator {offer.component.alias}"
    try:
        catalog.check_requirements(offer)
        return Finding(subject=subject, text=_devices(catalog.load(offer)(**offer.component.options)))
    except MissingRequirementError as error:
        return Finding(subject=subject, text=str(error), state="note")
    except DstratError as error:
        return Finding(subject=subject, text=str(error), state="problem")
    except Exception as error:  # noqa: BLE001 - a driver that does not fit raises many things
        text = f"{offer.owner_label} raised {type(error).__name__}: {error}"
        return Finding(subject=subject, text=text, state="problem")


def _devices(accelerator: Accelerator) -> str:
    if not accelerator.is_available():
        hint = accelerator.hint_unavailable()
        return f"not on this machine: {hint}" if hint else "not on this machine"
    indices = accelerator.parse_devices("auto")
    devices = ", ".join(str(device) for device in accelerator.get_parallel_devices(indices))
    backend = accelerator.process_group_backend
    collectives = "no collectives between processes" if backend == NO_BACKEND else f"collectives by {backend}"
    by_default = f"{len(indices)} by default ({devices}), {collectives}"
    description = accelerator.describe()
    return f"{by_default}; {description}" if description else by_default

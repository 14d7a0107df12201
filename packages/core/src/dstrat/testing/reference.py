"""Reference results of one device, computed once."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dstrat.plugins.catalog import get_catalog
from dstrat.testing.jobs import run_in_team
from dstrat.testing.subject import Subject

if TYPE_CHECKING:
    from dstrat.testing.fits import Fitted

ONE_DEVICE = "single_device"


def one_device() -> Subject:
    """Return the strategy that everything is compared with."""
    return Subject(component=get_catalog().find("strategy", ONE_DEVICE).component)


@lru_cache
def on_one_device(**options: Any) -> Fitted:
    """Return what a training gives on one device.

    Args:
        **options: Of :class:`~dstrat.testing.fits.Fit`; all of them can be hashed.
    """
    from dstrat.testing.fits import Fit, fit

    fitted: Fitted = run_in_team(fit, 1, subject=one_device(), work=Fit(**options))[0]
    return fitted

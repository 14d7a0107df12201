"""Choosing the precision, and checking that the hardware computes in its dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError, DstratError, RequestError
from dstrat.resolve.chosen import Chosen, chosen_as_given
from dstrat.resolve.given import Given
from dstrat.resolve.part import part_of_offer, usable_parts

if TYPE_CHECKING:
    import torch

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.precision import Precision
    from dstrat.plugins.catalog import Catalog
    from dstrat.resolve.choice import Choice
    from dstrat.resolve.part import Part

DEFAULT = "32-true"


def choose_precision(given: Given | None, accelerator: Chosen[Accelerator], catalog: Catalog) -> Chosen[Precision]:
    """Choose the precision.

    Args:
        given: What the user gave; None is ``"32-true"``.
        accelerator: The hardware.
        catalog: What there is.

    Raises:
        ConflictError: The hardware does not compute in one of its dtypes.
        RequestError: It is no precision.
        CatalogError: Nothing usable has that flag.
    """
    chosen = _chosen(given, catalog)
    unsupported = _unsupported(chosen.live, accelerator.live)
    if unsupported is not None:
        others = ", ".join(repr(name) for name in _supported_flags(accelerator.live, catalog))
        raise ConflictError(
            f"precision {chosen.part.name!r} needs {unsupported}, in which {accelerator.part.title} does not compute "
            f"here: choose another one ({others})"
        )
    return chosen


def flag_of(chosen: Chosen[Precision]) -> str:
    """Return the precision's flag, or the name of its class where the user's own has none."""
    return getattr(chosen.live, "flag", chosen.part.name)


def precision_choice(chosen: Chosen[Precision]) -> Choice:
    """Return the plan's line for the precision."""
    flag = flag_of(chosen)
    return chosen.choice("precision", flag if chosen.part.catalog_name else f"{chosen.part.name} ({flag})")


def _chosen(given: Given | None, catalog: Catalog) -> Chosen[Precision]:
    if given is None:
        default: Part[Precision] = part_of_offer(catalog.find_default("precision", DEFAULT), catalog)
        return Chosen(part=default, reason="the default", live=default.construct())
    value = given.value
    if isinstance(value, bool | float):
        raise RequestError(f"{given.place} is of the type {type(value).__name__}: give a flag such as {DEFAULT!r}")
    if isinstance(value, int):
        given = Given(value=str(value), place=given.place, in_strategy=given.in_strategy)
    return chosen_as_given("precision", given, catalog)


def _unsupported(precision: Precision, hardware: Accelerator) -> torch.dtype | None:
    dtypes = (precision.param_dtype, precision.compute_dtype, precision.reduce_dtype)
    return next((dtype for dtype in dtypes if not hardware.supports_dtype(dtype)), None)


def _supported_flags(hardware: Accelerator, catalog: Catalog) -> list[str]:
    flags = []
    for part in usable_parts(catalog.offers("precision"), catalog):
        precision: Any = _constructed(part)
        if precision is not None and _unsupported(precision, hardware) is None:
            flags.append(part.name)
    return flags


def _constructed(part: Part[Precision]) -> Precision | None:
    try:
        return part.construct()
    except DstratError:  # nobody asked for this one
        return None

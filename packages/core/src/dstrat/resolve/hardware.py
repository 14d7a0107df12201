"""Choice of the accelerator, of its devices, and of a precision in which it computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dstrat.errors import BrokenComponentError, ClusterError, ConflictError, DeviceError, DstratError, RequestError
from dstrat.plugins.facts import contradiction
from dstrat.resolve.compatibility import accelerator_problem, listed, max_devices
from dstrat.resolve.plan import PlanRow
from dstrat.resolve.selection import automatic_offers, select, select_offer, usable
from dstrat.resolve.strategies import suggest_strategies

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.offer import Offer
    from dstrat.resolve.request import Requested
    from dstrat.resolve.selection import Selection
    from dstrat.resolve.strategies import RequestedStrategy


# Accelerator


def choose_accelerator(
    requested: Requested | None, catalog: Catalog, strategy: RequestedStrategy | None
) -> Selection[Accelerator]:
    """Choose the accelerator.

    Args:
        requested: The user's; None takes the best that is available.
        catalog: All components.
        strategy: The strategy that the user requested, on which the automatic choice depends; None fits all.

    Raises:
        DeviceError: It is not available, or none is.
        ConflictError: None of those available fits the strategy.
        RequestError: It is no accelerator.
        CatalogError: No usable accelerator has that alias.
    """
    if requested is None:
        return _best("auto", automatic_offers("accelerator", catalog), catalog, strategy)
    offers, name = catalog.offers("accelerator"), requested.value
    if isinstance(name, str) and not any(name in offer.names for offer in offers):
        members = [offer for offer in offers if name in offer.component.groups]
        members.sort(key=lambda offer: float("inf") if offer.component.auto is None else -offer.component.auto)
        if members:
            return _best(name, members, catalog, strategy)
    selection = select("accelerator", requested, catalog)
    _check_record(selection)
    absence = _absence(selection.instance)
    if absence is not None:
        raise DeviceError(f"{selection.title} {absence}. {_available(catalog)}")
    if strategy is not None and not strategy.has_devices_of(selection):
        raise ConflictError(
            f"{selection.title} has no devices of the type {strategy.device_type!r}, "
            "with which the strategy was constructed: leave one of the two out"
        )
    return selection


def _check_record(accelerator: Selection[Accelerator]) -> None:
    """Refuse an accelerator whose record contradicts it on its collectives."""
    if accelerator.offer is None or accelerator.record is None or accelerator.facts is accelerator.record:
        return  # the facts of the instance are the record itself where they are the same
    difference = contradiction(accelerator.record, accelerator.instance)
    if difference is not None:
        raise BrokenComponentError(f"{accelerator.title} cannot be used: its record {difference}")


def _absence(accelerator: Accelerator) -> str | None:
    """Say why the accelerator is not available; None where it is."""
    try:
        is_available = accelerator.is_available()
        hint = None if is_available else accelerator.hint_unavailable()
    except Exception as error:  # noqa: BLE001 - of a plugin, whose driver may be broken, while others can be used
        return f"cannot tell whether it is available ({type(error).__name__}: {error})"
    if is_available:
        return None
    return f"is not available: {hint}" if hint else "is not available"


def _available(catalog: Catalog) -> str:
    offers = automatic_offers("accelerator", catalog)
    names = [selection.name for selection in usable(offers, catalog) if _absence(selection.instance) is None]
    return f"Available on this machine: {listed(names)}"


def _best(
    requested: str, offers: Sequence[Offer], catalog: Catalog, strategy: RequestedStrategy | None
) -> Selection[Accelerator]:
    # All of them, not only up to the first that fits: the reason and the error name the others.
    candidates = [(selection, _absence(selection.instance)) for selection in usable(offers, catalog)]
    available = [selection for selection, absence in candidates if absence is None]
    for selection in available:
        if strategy is None or strategy.runs_on(selection):
            _check_record(selection)
            return replace(selection, reason=_reason(requested, selection, available))
    if available and strategy is not None:
        raise strategy.error or ConflictError(_nothing_fits(requested, available, strategy, catalog))
    absences = [f"{selection.name!r} {absence}" for selection, absence in candidates if absence is not None]
    reasons = "; ".join(absences) or "none can be loaded"
    raise DeviceError(f"accelerator={requested!r} finds none: {reasons}. {_available(catalog)}")


def _reason(requested: str, best: Selection[Accelerator], available: Sequence[Selection[Accelerator]]) -> str:
    kind = "one" if requested == "auto" else requested
    if len(available) == 1:
        return f"the only {kind} that is available"
    alternatives = ", ".join(selection.name for selection in available if selection is not best)
    if best is available[0]:
        return f"the best {kind} that is available, before {alternatives}"
    return f"the best {kind} that the strategy runs on; {alternatives} would be available too"


def _nothing_fits(
    requested: str, available: Sequence[Selection[Accelerator]], strategy: RequestedStrategy, catalog: Catalog
) -> str:
    names = listed(accelerator.name for accelerator in available)
    machine = f"accelerator={requested!r} can be {names} on this machine"
    if strategy.selection is None or strategy.device_type is not None:
        return f"{machine}, and the strategy was constructed with devices of the type {strategy.device_type!r}"
    facts = strategy.selection.facts
    only = f"runs on {listed(facts.accelerators)} only" if facts.accelerators else None
    problem = only or accelerator_problem(facts, available[0])
    alternatives = suggest_strategies(
        catalog,
        lambda other: any(accelerator_problem(other, accelerator) is None for accelerator in available),
        instead_of=strategy.selection,
    )
    return f"{machine}, and {strategy.selection.title} {problem}: choose another strategy{alternatives}"


# Devices of each machine


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSelection:
    """The devices of each machine.

    Attributes:
        indices: For the accelerator; empty where the strategy was constructed with devices.
        count: How many on each machine.
        reason: Why, a few words.
    """

    indices: tuple[int, ...]
    count: int
    reason: str

    @property
    def row(self) -> PlanRow:
        """The plan's row for them."""
        is_plain = self.indices in ((), tuple(range(self.count)))
        indices = "" if is_plain else f" ({', '.join(map(str, self.indices))})"
        return PlanRow(subject="devices", value=f"{self.count}{indices}", reason=self.reason)


def choose_devices(
    requested: Requested | None,
    accelerator: Accelerator,
    *,
    num_started: int,
    num_nodes: int,
    strategy: Selection[Strategy] | None,
) -> DeviceSelection:
    """Choose the devices.

    Args:
        requested: The user's; None takes as many as there are processes, or else all devices.
        accelerator: The hardware.
        num_started: How many processes of the job exist already; 1 where dstrat starts them.
        num_nodes: Number of machines.
        strategy: The strategy that was requested; None where none was.

    Raises:
        DeviceError: They do not exist, or make no sense.
        ClusterError: The processes cannot be spread evenly over the machines.
    """
    facts = None if strategy is None else strategy.facts
    per_node, uneven = divmod(num_started, num_nodes)
    processes_exist = num_started > 1 and (facts is None or facts.starts_processes)
    if processes_exist:
        visible = _single_visible_devices(requested, accelerator, per_node)
        if visible is not None and not uneven:
            return visible
    if requested is not None and requested.in_strategy:
        return DeviceSelection(indices=(), count=len(requested.value), reason=f"given to {requested.source}")
    if requested is not None:
        if isinstance(requested.value, bool | float):  # int() would take them
            kind = type(requested.value).__name__
            raise DeviceError(f"{requested.source} is of the type {kind}: give a number, indices or 'auto'")
        return _parsed_devices(accelerator, requested.value, requested.source, "asked for")
    # Processes that exist already decide: with more devices some would be idle, with fewer some would be shared.
    if processes_exist:
        if uneven:
            raise ClusterError(f"{num_started} processes were started, which num_nodes={num_nodes} cannot share evenly")
        return _first_devices(accelerator, per_node, "one for each process that was started")
    number = accelerator.auto_device_count()
    limit = None if facts is None else max_devices(facts)
    if strategy is not None and limit is not None and limit < number:
        return _first_devices(accelerator, limit, f"the most that {strategy.name} uses")
    return _first_devices(accelerator, number, "what 'auto' stands for")


def _single_visible_devices(
    requested: Requested | None, accelerator: Accelerator, per_node: int
) -> DeviceSelection | None:
    """Return the first device for each process, if each sees one device only; None where that is not so.

    A scheduler may give each process a device of its own, as SLURM does with ``--gpus-per-task=1``: then it is the
    first one in each process.  Where a machine has only one device for all of them, NCCL says so.
    """
    if per_node == 1 or (requested is not None and requested.value not in (per_node, str(per_node), "auto", -1, "-1")):
        return None
    try:
        accelerator.parse_devices(per_node)
    except DeviceError:
        if accelerator.auto_device_count() == 1:
            reason = "one for each process that was started, which sees its own"
            return DeviceSelection(indices=(0,) * per_node, count=per_node, reason=reason)
    except Exception:  # noqa: BLE001 - of a plugin; it is raised when the devices are parsed
        return None
    return None


def _first_devices(accelerator: Accelerator, number: int, reason: str) -> DeviceSelection:
    return _parsed_devices(accelerator, number, f"devices='auto', here {number},", reason)


def _parsed_devices(accelerator: Accelerator, devices: Any, source: str, reason: str) -> DeviceSelection:
    try:
        indices = tuple(accelerator.parse_devices(devices))
    except DstratError:
        raise
    except Exception as error:  # a plugin's accelerator that leaves wrong words to int()
        raise DeviceError(f"{source} makes no sense to {type(accelerator).__name__}: {error}") from error
    if not indices:
        raise DeviceError(f"{source} names no device: give at least one")
    return DeviceSelection(indices=indices, count=len(indices), reason=reason)


# Precision


DEFAULT_PRECISION = "32-true"


def choose_precision(
    requested: Requested | None, accelerator: Selection[Accelerator], catalog: Catalog
) -> Selection[Precision]:
    """Choose the precision.

    Args:
        requested: The user's; None is ``"32-true"``.
        accelerator: The hardware.
        catalog: All components.

    Raises:
        ConflictError: The hardware does not compute in one of its dtypes.
        RequestError: It is no precision.
        CatalogError: No usable precision has that flag.
    """
    if requested is None:
        offer = catalog.find_default("precision", DEFAULT_PRECISION)
        selection: Selection[Precision] = select_offer(offer, catalog, reason="the default")
    else:
        value = requested.value
        if isinstance(value, bool | float):
            raise RequestError(
                f"{requested.source} is of the type {type(value).__name__}: give a flag such as {DEFAULT_PRECISION!r}"
            )
        if isinstance(value, int):  # 16, 32 and 64 are synonyms of flags
            requested = replace(requested, value=str(value))
        selection = select("precision", requested, catalog)
    unsupported = _unsupported_dtype(selection.instance, accelerator.instance)
    if unsupported is not None:
        hint = selection.instance.hint_unsupported
        alternatives = ", ".join(
            repr(other.name)
            for other in usable(catalog.offers("precision"), catalog)
            if _unsupported_dtype(other.instance, accelerator.instance) is None
        )
        raise ConflictError(
            f"precision {selection.name!r} needs {unsupported}, in which {accelerator.title} does not compute "
            f"here: choose another one ({alternatives}){f', {hint}' if hint else ''}"
        )
    return selection


def _unsupported_dtype(precision: Precision, accelerator: Accelerator) -> torch.dtype | None:
    return next((dtype for dtype in precision.dtypes if not accelerator.supports_dtype(dtype)), None)

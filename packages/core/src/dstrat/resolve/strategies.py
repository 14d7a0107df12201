"""Choice of the strategy: the requested one if it fits, or the best that does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dstrat.errors import CatalogError, ClusterError, ConflictError, DeviceError, DstratError, RequestError
from dstrat.plugins.known import FOR_SEVERAL_DEVICES, known_requirement, pip_command
from dstrat.plugins.options import options_text, parse_alias
from dstrat.resolve.cluster import check_cluster
from dstrat.resolve.compatibility import (
    accelerator_problem,
    device_type_of,
    incompatibility,
    max_devices,
)
from dstrat.resolve.request import from_argument
from dstrat.resolve.selection import automatic_offers, select, select_offer, usable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Component
    from dstrat.plugins.offer import Offer
    from dstrat.resolve.compatibility import Constraints, Incompatibility
    from dstrat.resolve.request import Requested, Subject
    from dstrat.resolve.selection import Selection

AUTO_BY_MEMORY = "auto(memory)"
"""The strategy that shards least of those that fit, where the model is known."""

_MOST_SUGGESTIONS = 4


# The requested strategy, before the accelerator is known


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedStrategy:
    """The strategy that the user requested; an accelerator may serve its alias with another one.

    Attributes:
        names: The requested alias with its synonyms; empty where no accelerator may serve it with another strategy.
        options_text: The options that the user wrote after the alias, which the other strategy gets too.
        selection: The strategy; None where its alias cannot be used.
        error: Why not.
        device_type: The type of the devices that it was constructed with, such as ``"cuda"``; None without devices.
    """

    names: tuple[str, ...]
    selection: Selection[Strategy] | None
    error: CatalogError | None = None
    device_type: str | None = None
    options_text: str = ""

    def with_arguments(self, components: Mapping[Subject, Requested]) -> RequestedStrategy:
        """Return the same, with regard to the components that the strategy's constructor received.

        Raises:
            DeviceError: Its devices are no devices, or of several types.
        """
        if not any(requested.in_strategy for requested in components.values()):
            return self
        # Another strategy would not have these components.
        return replace(self, names=(), device_type=_device_type(components.get("devices")))

    def runs_on(self, accelerator: Selection[Accelerator]) -> bool:
        """Return whether it, or the strategy that serves its alias there, runs on the accelerator."""
        if not self.has_devices_of(accelerator):
            return False
        if self.substitute(accelerator) is not None:
            return True
        return self.selection is not None and accelerator_problem(self.selection.facts, accelerator) is None

    def has_devices_of(self, accelerator: Selection[Accelerator]) -> bool:
        """Return whether the devices that it was constructed with, if any, are the accelerator's."""
        return self.device_type is None or self.device_type == device_type_of(accelerator)

    def substitute(self, accelerator: Selection[Accelerator]) -> str | None:
        """Return the alias of the strategy that serves this one's alias on the accelerator, or None."""
        strategies = accelerator.record.strategies if accelerator.record is not None else {}
        return next((strategies[name] for name in self.names if name in strategies), None)

    def on(self, accelerator: Selection[Accelerator], catalog: Catalog) -> Selection[Strategy]:
        """Return the strategy that runs on the accelerator.

        Raises:
            CatalogError: Its alias, or that of the strategy that serves it there, cannot be used.
            ConflictError: It is a class or an instance, and the accelerator serves its alias with another strategy.
            MisuseError: It cannot be constructed.
        """
        alias = self.substitute(accelerator)
        if alias is not None:
            try:
                served = select("strategy", from_argument("strategy", f"{alias}{self.options_text}"), catalog)
            except CatalogError as error:
                raise type(error)(f"{accelerator.title} lets {alias!r} serve {self.names[0]!r}, and {error}") from error
            return replace(served, reason=f"serves {self.names[0]!r} on accelerator {accelerator.name!r}")
        selection = self.selection
        if selection is None:
            raise self.error or CatalogError(f"strategy {self.names} cannot be used")
        if selection.offer is None and accelerator.record is not None:
            # The class of an alias that is served by another strategy there: it would not work.
            substitute = accelerator.record.strategies.get(selection.alias)
            if substitute is not None:
                raise ConflictError(
                    f"{selection.title} cannot run on {accelerator.title}, where {substitute!r} serves "
                    f"{selection.alias!r}: give strategy={substitute!r}, or an instance of its class"
                )
        return selection


def requested_strategy(value: object, catalog: Catalog) -> RequestedStrategy | None:
    """Return the strategy that the user requested; None for ``"auto"``.

    Raises:
        RequestError: It is of another type.
        CatalogError: No usable strategy has that alias, and no accelerator serves it with another one.
        MisuseError: It cannot be constructed.
    """
    if isinstance(value, str) and value == "auto":
        return None
    if value == AUTO_BY_MEMORY:
        raise RequestError(
            f"strategy={value!r} depends on the model, which is not known before fit: run `dstrat explain --strategy "
            f'"{value}" --model package.module:factory`, and give the strategy that it selects'
        )
    text = parse_alias(value) if isinstance(value, str) else None
    # An owner is insisted on, and a class or an instance is no alias.
    names = () if text is None or text.owner is not None else _all_names(text.alias, catalog)
    options = "" if text is None else options_text(text.options)
    try:
        selection = select("strategy", from_argument("strategy", value), catalog)
    except CatalogError as error:
        records = [offer.component for offer in catalog.offers("accelerator")]
        if not any(name in record.strategies for record in records for name in names):
            raise
        return RequestedStrategy(names=names, selection=None, error=error, options_text=options)
    return RequestedStrategy(names=names, selection=selection, options_text=options)


def _all_names(alias: str, catalog: Catalog) -> tuple[str, ...]:
    """Return the alias that a user wrote, then its synonyms."""
    records = [offer.component for offer in catalog.offers("strategy")]
    synonyms = {
        name
        for record in records
        if alias == record.alias or alias in record.synonyms
        for name in (record.alias, *record.synonyms)
    }
    return (alias, *sorted(synonyms - {alias}))


def _device_type(devices: Requested | None) -> str | None:
    if devices is None or not devices.in_strategy:
        return None
    types = {str(getattr(device, "type", "")) for device in devices.value}
    if len(types) != 1 or "" in types:
        raise DeviceError(f"{devices.source} must be torch.devices of one type, and is {devices.value!r}")
    return types.pop()


# The strategy of the run


def choose_strategy(
    requested: Selection[Strategy] | None, catalog: Catalog, constraints: Constraints
) -> Selection[Strategy]:
    """Choose the strategy.

    Args:
        requested: The one that the user requested; None takes the best that fits.
        catalog: All components.
        constraints: The other choices, which it has to fit.

    Raises:
        ConflictError: It does not fit, or none does.
        ClusterError: It does not fit the processes that were started.
    """
    if requested is None:
        return _automatic(catalog, constraints)
    reason = incompatibility(requested.facts, constraints)
    if reason is None:
        return requested
    if reason.error is ClusterError:
        # An environment that contradicts itself is the first error: then the processes may not even exist.
        per_node = constraints.num_started // constraints.num_nodes
        check_cluster(constraints.cluster, processes_per_node=per_node, num_nodes=constraints.num_nodes)
    instead = suggest_strategies(catalog, lambda facts: _fits(facts, constraints), instead_of=requested)
    raise reason.error(f"{requested.title} {reason.problem}: {reason.hint}{instead}")


def _automatic(catalog: Catalog, constraints: Constraints) -> Selection[Strategy]:
    candidates: list[tuple[Offer, Incompatibility | None]] = []
    for offer in automatic_offers("strategy", catalog):
        try:
            facts = catalog.facts(offer)
        except DstratError:  # its class is needed for a fact, and cannot be imported
            if offer.component.starts_processes is constraints.needs_processes:
                candidates.append((offer, None))  # if nothing else fits, selecting it raises the reason
            continue
        if _is_candidate(facts, constraints):
            candidates.append((offer, incompatibility(facts, constraints)))
    fitting = [offer for offer, reason in candidates if reason is None]
    if not constraints.accelerator.names:
        # Whether a strategy for some accelerators runs on one without a record is not known: it is the last resort.
        fitting.sort(key=lambda offer: bool(offer.component.accelerators))
    if fitting:
        # If none can be imported, the error is that of the best.
        selection = next(usable(fitting, catalog), None) or select_offer(fitting[0], catalog)
        return replace(selection, reason=f"the first choice for {_need(constraints)}")
    for offer, reason in candidates:
        if reason is not None:
            instead = suggest_strategies(catalog, lambda facts: _fits(facts, constraints))
            raise reason.error(
                f"no strategy that is chosen automatically fits: {offer.title} {reason.problem}: {reason.hint}{instead}"
            )
    raise ConflictError(_nothing_installed(constraints))


def _is_candidate(facts: Component, constraints: Constraints) -> bool:
    """Return whether a strategy is one for so many devices and processes."""
    if not constraints.needs_processes:
        return not facts.starts_processes
    drives_several = max_devices(facts) != 1 and accelerator_problem(facts, constraints.accelerator) is None
    return facts.starts_processes is True or drives_several


def _fits(facts: Component, constraints: Constraints) -> bool:
    return _is_candidate(facts, constraints) and incompatibility(facts, constraints) is None


def _nothing_installed(constraints: Constraints) -> str:
    if not constraints.needs_processes:
        return "no strategy for one device is installed that may be chosen automatically: give one as strategy="
    hint = pip_command(known_requirement("strategy", FOR_SEVERAL_DEVICES) or "")
    fewer = "start the script once" if constraints.num_started > 1 else "ask for devices=1"
    return (
        f"{_need(constraints)} need a strategy that runs one process per device, and none is installed: "
        f"{hint}, or {fewer}"
    )


def _need(constraints: Constraints) -> str:
    if constraints.num_started > 1:
        return f"{constraints.num_started} processes"
    devices = f"{constraints.num_devices} device{'s' if constraints.num_devices > 1 else ''}"
    return devices if constraints.num_nodes == 1 else f"{devices} on each of {constraints.num_nodes} machines"


# Suggestions instead of a strategy that does not fit


def suggest_strategies(
    catalog: Catalog, fits: Callable[[Component], bool], *, instead_of: Selection[Strategy] | None = None
) -> str:
    """Return aliases of strategies that can be used, in parentheses for the end of a message; empty where none fits.

    Those of the same package come first, then automatic choices and those that require little.

    Args:
        catalog: All components.
        fits: Returns whether a strategy with these facts would do.
        instead_of: The strategy that does not fit.
    """
    package = None
    if instead_of is not None:
        record = instead_of.record
        module = type(instead_of.instance).__module__ if record is None else record.target_name
        package = module.partition(".")[0].partition(":")[0]
    fitting = [offer.component for offer in catalog.offers("strategy") if _is_usable(offer, catalog, fits)]
    fitting.sort(key=lambda c: (not c.target_name.startswith(f"{package}."), c.auto is None, len(c.requires)))
    plain = [component for component in fitting if not any(_extends(component, other) for other in fitting)]
    aliases = ", ".join(repr(component.alias) for component in plain[:_MOST_SUGGESTIONS])
    return f" ({aliases})" if aliases else ""


def _is_usable(offer: Offer, catalog: Catalog, fits: Callable[[Component], bool]) -> bool:
    try:
        return fits(catalog.facts(offer)) and not catalog.missing_requirements(offer)
    except DstratError:  # its class or its requirements are wrong, which is an error where it is requested
        return False


def _extends(component: Component, other: Component) -> bool:
    """Return whether the component is the other one with further options."""
    options = component.options
    presets_all = all(key in options and options[key] is value for key, value in other.options.items())
    return component.target == other.target and len(options) > len(other.options) and presets_all

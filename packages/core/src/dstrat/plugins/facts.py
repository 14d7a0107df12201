"""Facts of a component: declared by its record, or else derived from its class.

Attributes of the class are read by name, because this layer may not import the interfaces.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dstrat.plugins.component import NO_BACKEND

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.plugins.component import Component

_STRATEGY_FACTS = (
    "starts_processes",
    "notebook_safe",
    "multi_node",
    "uses_torch_distributed",
    "drives_several_devices",
)
_ACCELERATOR_FACTS = ("process_group_backend", "supports_torch_distributed", "devices_share_process")
_INTERFACES = "dstrat.interfaces."
_FROM_MEMORY = frozenset({None, "fork"})
"""Start methods that need no script, because the new processes inherit the objects of this one."""


def declares_all(record: Component) -> bool:
    """Return whether a record declares all facts, so that its class need not be imported."""
    return all(getattr(record, name) is not None for name in _names(record))


def with_class_facts(record: Component, cls: type) -> Component:
    """Return the record completed by the facts of its class."""
    undeclared = [name for name in _names(record) if getattr(record, name) is None]
    if not undeclared:
        return record
    derived = derived_facts(record, cls)
    return dataclasses.replace(record, **{name: derived[name] for name in undeclared})


def derived_facts(record: Component, cls: type) -> dict[str, Any]:
    """Return the facts of a strategy or accelerator that follow from its class and its preset arguments."""
    if record.kind == "strategy":
        return strategy_facts(cls, start_method(cls, record.options), record.max_devices)
    return accelerator_facts(cls) if record.kind == "accelerator" else {}


def with_options(record: Component, options: Mapping[str, Any]) -> Component:
    """Return the record with further constructor arguments, and the facts that follow from them."""
    method = options.get("start_method")
    is_safe = method in _FROM_MEMORY if isinstance(method, str) else record.notebook_safe
    return dataclasses.replace(record, options={**record.options, **options}, notebook_safe=is_safe)


def strategy_facts(cls: type, method: str | None, max_devices: int | None = None) -> dict[str, Any]:
    """Return the facts of a strategy class with a start method; None starts no processes."""
    drives_several = getattr(cls, "drives_several_devices", False) is True
    return {
        "starts_processes": method is not None,
        "notebook_safe": method in _FROM_MEMORY,
        "multi_node": method is not None,
        "uses_torch_distributed": getattr(cls, "uses_torch_distributed", False) is True,
        "drives_several_devices": drives_several or (max_devices or 1) > 1,
    }


def accelerator_facts(accelerator: Any) -> dict[str, Any]:
    """Return the facts of an accelerator, from its class or from an instance."""
    backend = getattr(accelerator, "process_group_backend", NO_BACKEND)
    backend = backend if isinstance(backend, str) and backend else None  # a class may have a property
    supports = getattr(accelerator, "supports_torch_distributed", True)
    return {
        "process_group_backend": backend,
        "supports_torch_distributed": None if backend is None else backend != NO_BACKEND and supports is not False,
        "devices_share_process": getattr(accelerator, "devices_share_process", True) is not False,
    }


def facts_of_subclass(record: Component, cls: type) -> Component:
    """Return the record of a class's nearest base, with the facts that the class changes."""
    settled = {name: fact for name in _names(record) if (fact := _fact_of_class(name, record, cls)) is not None}
    return dataclasses.replace(record, **settled)


def start_method(cls: type, options: Mapping[str, Any]) -> str | None:
    """Return the start method of a strategy class, with the arguments that its alias presets."""
    method = options.get("start_method", getattr(cls, "start_method", None))
    return method if isinstance(method, str) else None


def contradiction(record: Component, component: Any) -> str | None:
    """Return the fact in which a record contradicts its class, or an instance of it; None if there is none."""
    cls = component if isinstance(component, type) else type(component)
    for name in _names(record):
        declared, real = getattr(record, name), _fact_of_class(name, record, component)
        if declared is not None and real is not None and declared != real:
            shown = (
                f"start_method={start_method(cls, record.options)!r}"
                if name == "starts_processes"
                else f"{name}={real!r}"
            )
            return f"says {name}={declared!r}, and {cls.__name__} has {shown}"
    return None


def _fact_of_class(name: str, record: Component, component: Any) -> Any:
    """Return a fact that the class or instance determines; None if only the record can declare it."""
    cls = component if isinstance(component, type) else type(component)
    if name == "starts_processes":
        # Without a start method it may still run one process per device, if a scheduler starts them.
        return True if start_method(cls, record.options) is not None else None
    if name in ("notebook_safe", "multi_node"):
        return None
    if component is not cls:
        return accelerator_facts(component)[name]
    definer = next((base for base in cls.__mro__ if name in vars(base)), None)
    if definer is None or definer.__module__.startswith(_INTERFACES):
        return None
    value = vars(definer)[name]
    return value if isinstance(value, bool | str) else None


def _names(record: Component) -> tuple[str, ...]:
    if record.kind == "strategy":
        return _STRATEGY_FACTS
    return _ACCELERATOR_FACTS if record.kind == "accelerator" else ()

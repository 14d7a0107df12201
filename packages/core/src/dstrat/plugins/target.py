"""Importing the class behind a component, and checking that it is what its kind demands."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dstrat.errors import BrokenComponentError
from dstrat.plugins.facts import contradiction
from dstrat.plugins.offer import Offer, kind_label
from dstrat.plugins.requirements import check_requirements
from dstrat.plugins.slow_import import named_import

if TYPE_CHECKING:
    from dstrat.plugins.component import Kind

_SLOW_IMPORT = 60.0  # seconds; torch and a backend may take half of it on a slow disk

# By name, as this layer lies below the interfaces.
_INTERFACES: dict[Kind, str] = {
    "strategy": "dstrat.interfaces.strategy:Strategy",
    "accelerator": "dstrat.interfaces.accelerator:Accelerator",
    "precision": "dstrat.interfaces.precision:Precision",
    "checkpoint_io": "dstrat.interfaces.checkpoint_io:CheckpointIO",
    "cluster_environment": "dstrat.interfaces.cluster:ClusterEnvironment",
}


def load_class(offer: Offer) -> type[Any]:
    """Import and return the class of an offered component.

    Raises:
        MissingRequirementError: It cannot be imported, and something that it requires is missing.
        BrokenComponentError: It cannot be imported, is not a complete class of its kind, or contradicts its record.
    """
    target = offer.component.target
    found = _imported(offer, target) if isinstance(target, str) else target
    problem = _problem(found, offer.component.kind)
    if problem is not None:
        raise BrokenComponentError(f"{offer.title} cannot be used: {offer.component.target_name} {problem}")
    if (difference := contradiction(offer.component, found)) is not None:
        raise BrokenComponentError(f"{offer.title} cannot be used: its record {difference}")
    return found


def is_of_kind(value: object, kind: Kind) -> bool:
    """Return whether the value is a class that implements the interface of that kind."""
    return isinstance(value, type) and issubclass(value, _attribute(_INTERFACES[kind]))


def _imported(offer: Offer, target: str) -> Any:
    try:
        with named_import(target, offer.owner, seconds=_SLOW_IMPORT):
            return _attribute(target)
    except (Exception, SystemExit) as error:
        if isinstance(error, ImportError):
            check_requirements(offer)
        cause = f"{type(error).__name__}: {error}"
        raise BrokenComponentError(f"{offer.title} cannot be used: importing {target} raised {cause}") from error


def _attribute(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def _problem(found: Any, kind: Kind) -> str | None:
    if not isinstance(found, type):
        return f"is not a class but {type(found).__name__} {found!r}"
    interface = _attribute(_INTERFACES[kind])
    if not issubclass(found, interface):
        return f"is not a subclass of {interface.__name__}, which every {kind_label(kind)} must be"
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    return f"does not implement {', '.join(missing)}" if missing else None

"""Request of the user, before it is resolved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dstrat.errors import CatalogError, ConflictError, MisuseError, PluginError, RequestError, UnknownAliasError
from dstrat.interfaces.strategy import Components
from dstrat.plugins.offer import kind_label
from dstrat.plugins.options import parse_alias
from dstrat.plugins.settings import nearest
from dstrat.resolve.selection import INTERFACES, counterpart_advice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.interfaces.accelerator import Accelerator, Devices
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Kind
    from dstrat.resolve.selection import Selection


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Arguments of a user, as written: each component as an alias, a class or an instance.

    Nothing is checked here; :func:`~dstrat.resolve.resolve_request` does.

    Attributes:
        strategy: How the training is distributed.  An alias of any component may be followed by options for its
            constructor, ``"fsdp(cpu_offload=True)"``.
        accelerator: The hardware; a group such as ``"gpu"`` takes the best member that is available.
        devices: Which devices of each machine, or how many.
        num_nodes: Number of machines.
        precision: The dtypes; None is ``"32-true"``.
        plugins: At most one each of Precision, ClusterEnvironment, CheckpointIO and Launcher.
        max_restarts: How often all ranks are started again after one of them has failed.
        elastic: Whether the others go on in their processes when a rank was killed; ``"replace"`` if a new one joins.
        preemption_deadline: Seconds from SIGTERM or SIGUSR1 until a scheduler ends the job; None where none does.
    """

    strategy: str | Strategy | type[Strategy] = "auto"
    accelerator: str | Accelerator | type[Accelerator] = "auto"
    devices: Devices = "auto"
    num_nodes: int = 1
    precision: str | int | Precision | type[Precision] | None = None
    plugins: Any = ()  # one or several; a tuple of them afterwards
    max_restarts: int = 0
    elastic: bool | Literal["replace"] = False
    preemption_deadline: float | None = None

    def __post_init__(self) -> None:
        plugins = () if self.plugins is None else self.plugins
        plugins = tuple(plugins) if isinstance(plugins, list | tuple) else (plugins,)
        object.__setattr__(self, "plugins", plugins)


# Components that the user requested, each at most once


Subject = Literal["accelerator", "devices", "cluster environment", "precision", "checkpoint io", "launcher"]

_ARGUMENTS_OF_STRATEGIES: dict[str, Subject] = {
    "accelerator": "accelerator",
    "parallel_devices": "devices",
    "cluster_environment": "cluster environment",
    "checkpoint_io": "checkpoint io",
    "precision_plugin": "precision",
}
_PLUGIN_KINDS: dict[Kind, Subject] = {
    "precision": "precision",
    "cluster_environment": "cluster environment",
    "checkpoint_io": "checkpoint io",
    "launcher": "launcher",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Requested:
    """A component that the user requested.

    Attributes:
        value: An alias, a class or an instance; devices may be of any type.
        source: Where the user wrote it, as in ``"precision='16-mixed'"`` or ``"DDPStrategy(checkpoint_io=...)"``.
        in_strategy: Whether the strategy's constructor received it.
    """

    value: Any
    source: str
    in_strategy: bool = False


def from_argument(argument: str, value: object) -> Requested:
    """Return a component that the user requested by an argument, as in ``strategy="ddp"``."""
    return Requested(value=value, source=f"{argument}={_shown(value)}")


def requested_components(request: Request, catalog: Catalog) -> dict[Subject, Requested]:
    """Return the components that the user requested beside the strategy, by subject.

    Args:
        request: The user's request.
        catalog: Where the aliases of plugins are looked up.

    Raises:
        ConflictError: A component was requested twice.
        RequestError: A plugin is of another type.
        CatalogError: No usable component has a plugin's alias.
    """
    components: dict[Subject, Requested] = {}
    if not _is_auto(request.accelerator):
        components["accelerator"] = from_argument("accelerator", request.accelerator)
    if not _is_auto(request.devices):
        components["devices"] = from_argument("devices", request.devices)
    if request.precision is not None:
        components["precision"] = from_argument("precision", request.precision)
    for plugin in request.plugins:
        kind = _kind_of_alias(plugin, catalog) if isinstance(plugin, str) else _kind_of_object(plugin)
        _add(components, _PLUGIN_KINDS[kind], Requested(value=plugin, source=f"plugins=[{_shown(plugin)}]"))
    return components


def with_components_of(
    strategy: Selection[Strategy] | None, components: Mapping[Subject, Requested]
) -> Mapping[Subject, Requested]:
    """Return the requested components with those that the strategy's constructor has received.

    Raises:
        ConflictError: A component was requested twice.
        MisuseError: The constructor does not call that of its base class.
    """
    if strategy is None:
        return components
    arguments = getattr(strategy.instance, "constructor_components", None)
    if not isinstance(arguments, Components):
        name = type(strategy.instance).__name__
        raise MisuseError(f"{name} is not ready: its __init__ must call super().__init__()")
    merged = dict(components)
    for argument, subject in _ARGUMENTS_OF_STRATEGIES.items():
        value = getattr(arguments, argument)
        if value is not None and not (subject == "accelerator" and _is_auto(value)):  # as in the Trainer's argument
            owner = f"alias {strategy.name!r} " if strategy.offer is not None else strategy.name
            _add(merged, subject, Requested(value=value, source=f"{owner}({argument}=...)", in_strategy=True))
    return merged


def _add(components: dict[Subject, Requested], subject: Subject, requested: Requested) -> None:
    if subject in components:
        raise ConflictError(
            f"{components[subject].source} and {requested.source} both give the {subject}: leave one of the two out"
        )
    components[subject] = requested


def _kind_of_object(plugin: object) -> Kind:
    cls = plugin if isinstance(plugin, type) else type(plugin)
    for kind, interface in INTERFACES.items():
        if issubclass(cls, interface) and kind in _PLUGIN_KINDS:
            return kind
        if issubclass(cls, interface):
            raise RequestError(f"plugins=[{_shown(plugin)}] is no plugin: give it as {kind}={_shown(plugin)}")
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    advice = counterpart_advice(cls, "dstrat.plugins")
    raise RequestError(
        f"plugins=[{_shown(plugin)}] is of the type {module}{cls.__qualname__}: "
        f"a plugin is a Precision, a ClusterEnvironment, a CheckpointIO or a Launcher{advice}"
    )


def _kind_of_alias(alias: str, catalog: Catalog) -> Kind:
    kinds = [kind for kind in _PLUGIN_KINDS if _is_known(kind, alias, catalog)]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        labels = " and of a ".join(kind_label(kind) for kind in kinds)
        raise ConflictError(f"plugins=[{alias!r}] is the name of a {labels}: give the class instead")
    known = sorted({name for kind in _PLUGIN_KINDS for offer in catalog.offers(kind) for name in offer.names})
    near = " or ".join(repr(name) for name in nearest(parse_alias(alias).alias, known))
    hint = f"did you mean {near}?" if near else f"available are {', '.join(known) or 'none'}"
    raise UnknownAliasError(f"plugins=[{alias!r}] is not known: {hint}")


def _is_known(kind: Kind, alias: str, catalog: Catalog) -> bool:
    """Return whether the alias means something of this kind, be it retired, not installed or offered by two."""
    try:
        catalog.find(kind, alias)
    except PluginError:
        raise
    except UnknownAliasError:
        return False
    except CatalogError:  # its message says more where the component is looked up
        return True
    return True


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def _shown(value: object) -> str:
    """Return how the user wrote a value, the same in every process."""
    if isinstance(value, type):
        return value.__name__
    is_object = isinstance(value, tuple(INTERFACES.values()))
    return f"{type(value).__name__}()" if is_object else repr(value)

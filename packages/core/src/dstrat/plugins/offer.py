"""Offers of the catalog: components with their owner, their requirements, and their classes."""

from __future__ import annotations

import dataclasses
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

from dstrat.errors import BrokenComponentError, InvalidComponentError, MissingRequirementError
from dstrat.plugins.facts import contradiction, with_options
from dstrat.plugins.known import pip_command
from dstrat.plugins.options import check_options, options_text
from dstrat.plugins.settings import DISABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dstrat.plugins.component import Adapter, Component, Kind, Tombstone


THIS_PROCESS = "this process"
"""Owner of components that were registered in the running process."""

CORE = "dstrat"
"""The distribution of the core's own components."""

PluginState = Literal["loaded", "disabled", "failed", "unsupported"]


def kind_label(kind: Kind) -> str:
    """Return a kind for display: ``"checkpoint io"``."""
    return kind.replace("_", " ")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)  # equal by identity, so that offers can be keys
class Offer:
    """A component, and the distribution that offers it.

    Attributes:
        component: The record.
        owner: Name of the distribution, or ``"this process"`` for in-process registration.
        version: Version of the distribution; empty for in-process registration.
        options: The options that the user wrote after the alias; the component has them too.
        presets: The arguments that the alias itself presets, where there are options.
    """

    component: Component
    owner: str
    version: str
    options: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Any] = field(default_factory=dict)

    def with_options(self, options: Mapping[str, Any]) -> Offer:
        """Return the same offer with options that the user wrote after its alias."""
        return dataclasses.replace(
            self,
            component=with_options(self.component, options),
            options=options,
            presets=self.component.options,
        )

    @property
    def owner_label(self) -> str:
        """The owner with its version: ``"dstrat-ddp 0.1.0"``."""
        return f"{self.owner} {self.version}".rstrip()

    @property
    def names(self) -> tuple[str, ...]:
        """The alias, then its synonyms."""
        return (self.component.alias, *self.component.synonyms)

    @property
    def full_alias(self) -> str:
        """The alias with its owner, which is never ambiguous: ``"ddp@dstrat-ddp"``; options follow it."""
        return f"{self.component.alias}@{self.owner}{options_text(self.options)}"

    @property
    def alias_text(self) -> str:
        """The alias with the options that the user wrote: ``"fsdp(cpu_offload=True)"``."""
        return f"{self.component.alias}{options_text(self.options)}"

    @property
    def title(self) -> str:
        """The offer as error messages name it: ``"strategy 'ddp' from dstrat-ddp 0.1.0"``."""
        return f"{kind_label(self.component.kind)} {self.alias_text!r} from {self.owner_label}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """One entry point, and the result of loading it.

    Attributes:
        distribution: Name of the distribution that declares it.
        version: Version of that distribution.
        entry_point: Its name.
        group: Its group, ``"dstrat.v1"`` for this version of the plugin API.
        value: The module that it points at.
        state: ``"loaded"``; ``"disabled"`` by the user; ``"failed"`` to load or to validate; ``"unsupported"``, as
            it is written for another version of the plugin API.
        reason: Why it is not loaded, one sentence without a full stop; empty when it is.
        traceback: For a failed plugin, the traceback as text.
        components: Its components.
        tombstones: The aliases that it has retired.
        adapters: Its conversions of other libraries' objects.
        seconds: How long it took to load.
        imported_torch: Whether loading it imported torch, which makes every listing slow.
    """

    distribution: str
    version: str
    entry_point: str
    group: str
    value: str
    state: PluginState
    reason: str = ""
    traceback: str = ""
    components: tuple[Component, ...] = ()
    tombstones: tuple[Tombstone, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    seconds: float = 0.0
    imported_torch: bool = False

    @property
    def label(self) -> str:
        """The distribution with its version: ``"dstrat-ddp 0.1.0"``."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def is_broken(self) -> bool:
        """Whether it must be repaired or upgraded before it works."""
        return self.state in ("failed", "unsupported")


# Requirements, checked against installed metadata without imports


def missing_requirements(offer: Offer) -> tuple[str, ...]:
    """Return the requirements of a component that no installed distribution satisfies, as in its record.

    A requirement whose marker is false is not missing; a text that cannot be parsed is.
    """
    missing: list[str] = []
    for text in offer.component.requires:
        try:
            if _problem(text, offer) is None:
                continue
        except InvalidComponentError:
            pass
        missing.append(text)
    return tuple(missing)


def check_requirements(offer: Offer) -> None:
    """Raise MissingRequirementError, with the install command, unless all requirements are satisfied.

    Raises:
        InvalidComponentError: One of them is not a requirement.
    """
    problems = ((text, _problem(text, offer)) for text in offer.component.requires)
    missing = [(text, problem) for text, problem in problems if problem is not None]
    if not missing:
        return
    states = ", and ".join(f"{text}, {problem}" for text, problem in missing)
    bare = [text.partition(";")[0].strip() for text, _ in missing]
    command = pip_command(*bare, options=offer.component.pip_options)
    note = offer.component.requires_note
    raise MissingRequirementError(f"{offer.title} needs {states}: {command}{f' ({note})' if note else ''}")


def _problem(text: str, offer: Offer) -> str | None:
    """Say why a requirement is not satisfied, following its text; None where it is."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise InvalidComponentError(f"{offer.title} requires {text!r}, which is not a requirement: {error}") from error
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    try:
        installed: str | None = version(requirement.name)
    except PackageNotFoundError:
        installed = None
    if installed is None:  # also where the metadata of an interrupted installation names no version
        return "which is not installed"
    if not requirement.specifier.contains(installed, prereleases=True):
        return f"but {installed} is installed"
    return None


# Notes on stderr about slow and interrupted imports


@contextmanager
def named_import(module: str, distribution: str, *, seconds: float) -> Iterator[None]:
    """Print the plugin that is being imported to stderr, if the import is slow or interrupted."""
    begun = f"dstrat: importing {module} of {distribution}"
    hint = f"{DISABLE}={distribution} leaves it out"
    timer = threading.Timer(seconds, _say, [f"{begun} has taken {seconds:g} s and continues; {hint}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        _say(f"{begun} was interrupted; {hint}")
        raise
    finally:
        timer.cancel()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# Import and check of a component's class


_SLOW_IMPORT = 60.0  # seconds; torch and a backend may take half of it on a slow disk

# By name, because this layer may not import the interfaces.
_INTERFACES: dict[Kind, str] = {
    "strategy": "dstrat.interfaces.strategy:Strategy",
    "accelerator": "dstrat.interfaces.accelerator:Accelerator",
    "precision": "dstrat.interfaces.precision:Precision",
    "checkpoint_io": "dstrat.interfaces.checkpoint_io:CheckpointIO",
    "cluster_environment": "dstrat.interfaces.cluster:ClusterEnvironment",
    "launcher": "dstrat.interfaces.launcher:Launcher",
}


def load_class(offer: Offer) -> type[Any]:
    """Import and return the class of an offered component.

    Raises:
        MissingRequirementError: It cannot be imported, and something that it requires is missing.
        BrokenComponentError: It cannot be imported, is not a complete class of its kind, or contradicts its record.
        MisuseError: Its constructor has no argument of the name of an option.
        ConflictError: An option is preset by the alias.
    """
    target = offer.component.target
    loaded = _import_target(offer, target) if isinstance(target, str) else target
    problem = _target_problem(loaded, offer.component.kind)
    if problem is not None:
        raise BrokenComponentError(f"{offer.title} cannot be used: {offer.component.target_name} {problem}")
    if offer.options:
        check_options(loaded, offer.title, offer.options, offer.presets)
    if (difference := contradiction(offer.component, loaded)) is not None:
        raise BrokenComponentError(f"{offer.title} cannot be used: its record {difference}")
    return loaded


def is_of_kind(value: object, kind: Kind) -> bool:
    """Return whether the value is a class that implements the interface of that kind."""
    return isinstance(value, type) and issubclass(value, _attribute(_INTERFACES[kind]))


def _import_target(offer: Offer, target: str) -> Any:
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


def _target_problem(target: Any, kind: Kind) -> str | None:
    if not isinstance(target, type):
        return f"is not a class but {type(target).__name__} {target!r}"
    interface = _attribute(_INTERFACES[kind])
    if not issubclass(target, interface):
        return f"is not a subclass of {interface.__name__}, which every {kind_label(kind)} must be"
    missing = sorted(getattr(target, "__abstractmethods__", ()))
    return f"does not implement {', '.join(missing)}" if missing else None


# Conversion of other libraries' objects


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOffer:
    """A conversion, and the plugin that offers it.

    Attributes:
        adapter: The record.
        plugin: Offers it.
    """

    adapter: Adapter
    plugin: Plugin

    def convert(self, value: object) -> Any:
        """Return the object that the plugin makes of another library's.

        Raises:
            BrokenComponentError: The plugin's function cannot be imported.
            Exception: Any error of the function, such as of an object that it cannot convert.
        """
        target = self.adapter.target
        try:
            with named_import(target, self.plugin.distribution, seconds=_SLOW_IMPORT):
                function = _attribute(target)
        except (ImportError, AttributeError) as error:
            cause = f"{type(error).__name__}: {error}"
            raise BrokenComponentError(
                f"{self.plugin.label} cannot convert a {type(value).__name__}: importing {target} raised {cause}"
            ) from error
        return function(value)


def class_names(cls: type) -> tuple[str, ...]:
    """Return a class and its bases as ``"package.module:Class"``, the nearest first."""
    return tuple(f"{base.__module__}:{base.__qualname__}" for base in cls.__mro__)

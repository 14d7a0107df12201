"""Offers of the catalog: components with their owner, and plugins with their state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dstrat.plugins.component import Component, Kind, Tombstone

THIS_PROCESS = "this process"
"""The owner of what was registered in the running process."""

CORE = "dstrat"
"""The distribution of the core's own components."""

PluginState = Literal["loaded", "disabled", "failed", "unsupported"]


def kind_label(kind: Kind) -> str:
    """Return a kind as people read it: ``"checkpoint io"``."""
    return kind.replace("_", " ")


def owner_label(distribution: str, version: str) -> str:
    """Return a distribution as people read it: ``"dstrat-ddp 0.1.0"``."""
    return f"{distribution} {version}".rstrip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A component, and the distribution that offers it.

    Attributes:
        component: The record.
        owner: Name of the distribution, or ``"this process"`` for what was registered in-process.
        version: Version of the distribution; empty for what was registered in-process.
    """

    component: Component
    owner: str
    version: str

    @property
    def owner_label(self) -> str:
        """The owner with its version."""
        return owner_label(self.owner, self.version)

    @property
    def names(self) -> tuple[str, ...]:
        """The alias, then its synonyms."""
        return (self.component.alias, *self.component.synonyms)

    @property
    def full_alias(self) -> str:
        """The alias with its owner, which is never ambiguous: ``"ddp@dstrat-ddp"``."""
        return f"{self.component.alias}@{self.owner}"

    @property
    def title(self) -> str:
        """The offer as error messages name it: ``"strategy 'ddp' from dstrat-ddp 0.1.0"``."""
        return f"{kind_label(self.component.kind)} {self.component.alias!r} from {self.owner_label}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """One entry point, and what came of loading it.

    Attributes:
        distribution: Name of the distribution that declares it.
        version: Version of that distribution.
        entry_point: Its name.
        group: Its group, ``"dstrat.v1"`` for the version that this dstrat speaks.
        value: The module that it points at.
        state: ``"loaded"``; ``"disabled"`` by the user; ``"failed"`` to load or to validate; ``"unsupported"``, as
            it speaks another version of the plugin API.
        reason: Why it is not loaded, one sentence without a full stop; empty when it is.
        traceback: For a failed plugin, the traceback as text.
        components: What it offers.
        tombstones: The aliases that it has retired.
        seconds: How long it took to load.
        imported_torch: Whether loading it brought torch into the process, which makes every listing slow.
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
    seconds: float = 0.0
    imported_torch: bool = False

    @property
    def label(self) -> str:
        """The distribution with its version."""
        return owner_label(self.distribution, self.version)

    @property
    def is_broken(self) -> bool:
        """Whether somebody has to repair or upgrade something before it works."""
        return self.state in ("failed", "unsupported")

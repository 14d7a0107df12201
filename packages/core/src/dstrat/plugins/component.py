"""The record behind an alias: what a plugin says of one component without importing it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from dstrat.errors import InvalidComponentError

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["strategy", "accelerator", "precision", "checkpoint_io", "cluster_environment"]
"""The kinds of component that a plugin can offer."""

KINDS: tuple[Kind, ...] = get_args(Kind)

_ALIAS = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One thing that a user can choose by its alias, described by facts.

    Facts answer every question that dstrat has about a component before its class is imported, so that listing all
    of them stays light.  Attributes that do not concern the component's kind keep their default.

    Attributes:
        kind: What it is.
        alias: The name that a user writes: lower-case letters, digits, ``_``, ``-`` and ``.``.
        target: Where the class is, as ``"package.module:Class"``.  In-process registration may give the class itself.
        summary: One line for tables.
        synonyms: Further names for the same component.
        requires: Requirement strings (``"acme-runtime>=1.2"``), checked against installed metadata.
        pip_options: What ``pip install`` of the requirements needs besides (``"--index-url=https://..."``).
        options: Constructor arguments that the alias presets.
        auto: Rank for the automatic choice, the highest available one wins; None is never chosen automatically.
        groups: Names that stand for several accelerators (``"gpu"``); the available one with the highest
            ``auto`` is taken.
        accelerators: For a strategy, the accelerators or groups that it runs on; empty means any.
        precisions: For a strategy, the precision aliases that it can run; empty means any.
        starts_processes: For a strategy, whether it runs one process per device.
        notebook_safe: For a strategy, whether it starts from an interactive session.
        max_devices: For a strategy, the most devices that it uses on one machine; None is no limit.
        multi_node: For a strategy, whether it runs on more than one machine.
    """

    kind: Kind
    alias: str
    target: str | type
    summary: str
    synonyms: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    pip_options: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    auto: int | None = None
    groups: tuple[str, ...] = ()
    accelerators: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    starts_processes: bool = False
    notebook_safe: bool = True
    max_devices: int | None = None
    multi_node: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidComponentError(f"kind {self.kind!r} of {self.alias!r} is not one of {', '.join(KINDS)}")
        for name in (self.alias, *self.synonyms):
            check_alias(name)
        if isinstance(self.target, str) and not _TARGET.fullmatch(self.target):
            raise InvalidComponentError(
                f"target {self.target!r} of {self.kind} {self.alias!r} must look like 'package.module:Class'"
            )
        for name in ("synonyms", "requires", "pip_options", "groups", "accelerators", "precisions"):
            if not isinstance(getattr(self, name), tuple):
                raise InvalidComponentError(f"{name} of {self.kind} {self.alias!r} must be a tuple of strings")

    @property
    def target_name(self) -> str:
        """The target as ``"package.module:Class"``, also for a class that was registered in the process."""
        if isinstance(self.target, str):
            return self.target
        return f"{self.target.__module__}:{self.target.__qualname__}"

    def variant(self, alias: str, summary: str | None = None, **options: Any) -> Component:
        """Return the same component under another alias, with further preset options.

        Facts of the variant that differ are set with :func:`dataclasses.replace`.
        """
        return dataclasses.replace(
            self,
            alias=alias,
            summary=summary or self.summary,
            synonyms=(),
            auto=None,
            options={**self.options, **options},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tombstone:
    """An alias that is no longer offered, and what replaces it.

    Attributes:
        kind: What it was.
        alias: The name that users used to write.
        replacement: What to write instead; None when nothing replaces it.
        reason: Why it went, one sentence without a full stop.
    """

    kind: Kind
    alias: str
    replacement: str | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        check_alias(self.alias)


def check_alias(alias: str) -> None:
    """Raise InvalidComponentError unless the text can be an alias."""
    if not isinstance(alias, str) or not _ALIAS.fullmatch(alias):
        raise InvalidComponentError(
            f"alias {alias!r} must consist of lower-case letters, digits, '_', '-' and '.', "
            "and begin with a letter or digit"
        )

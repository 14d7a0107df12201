"""Component records and the hook through which plugins offer them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import pluggy

from dstrat.errors import InvalidComponentError

if TYPE_CHECKING:
    from collections.abc import Sequence


Kind = Literal["strategy", "accelerator", "precision", "checkpoint_io", "cluster_environment", "launcher"]
"""The kinds of component that a plugin can offer."""

KINDS: tuple[Kind, ...] = get_args(Kind)

NO_BACKEND = "none"
"""The ``process_group_backend`` of an accelerator without collectives."""

_ALIAS = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _is_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


def _is_fact(value: object) -> bool:
    return value is None or isinstance(value, bool)


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: object) -> bool:
    return value is None or (isinstance(value, str) and bool(value))


def _is_options(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _is_redirections(value: object) -> bool:
    return _is_options(value) and all(isinstance(item, str) for item in cast("Mapping[str, Any]", value).values())


def _is_target(value: object) -> bool:
    return isinstance(value, str | type)


_TEXTS = (_is_texts, "a tuple of strings")
_FACT = (_is_fact, "True, False or None")
_NUMBER = (_is_number, "a whole number or None")
_FIELD_TYPES: dict[str, tuple[Callable[[object], bool], str]] = {
    "target": (_is_target, "a string or a class"),
    "summary": (_is_text, "a string"),
    "requires_note": (_is_text, "a string"),
    "legacy": (_is_text, "a string"),
    "approximation": (_is_text, "a string"),
    "options": (_is_options, "a dict of arguments by their names"),
    "strategies": (_is_redirections, "a dict of aliases by aliases"),
    "auto": _NUMBER,
    "max_devices": _NUMBER,
    "device_type": (_is_text_or_none, "a string or None"),
    "process_group_backend": (_is_text_or_none, f"a string ({NO_BACKEND!r} where there is none) or None"),
    **dict.fromkeys(
        (
            "synonyms",
            "requires",
            "pip_options",
            "groups",
            "accelerators",
            "device_types",
            "precisions",
            "evidence_variables",
        ),
        _TEXTS,
    ),
    **dict.fromkeys(
        (
            "supports_torch_distributed",
            "devices_share_process",
            "uses_torch_distributed",
            "drives_several_devices",
            "starts_processes",
            "notebook_safe",
            "multi_node",
        ),
        _FACT,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """Record of a component that users select by its alias, described by facts.

    Facts are known without importing the class, so listing all components is fast.  Attributes that do not concern the
    component's kind keep their default.

    Attributes:
        kind: Kind of the component.
        alias: The name that a user writes: lower-case letters, digits, ``_``, ``-`` and ``.``.
        target: The class as ``"package.module:Class"``, or for in-process registration the class itself.
        summary: One line for tables.
        synonyms: Further names for the same component.
        requires: Requirement strings (``"acme-runtime>=1.2"``), checked against installed metadata.
        pip_options: Options of ``pip install`` for the requirements (``"--index-url=https://..."``).
        requires_note: Note for users who lack a requirement, a sentence without a full stop; shown after the command.
        legacy: Why new programs should use something else, a clause without a full stop; empty where they need not.
            Nothing recommends such a component; whoever asks for it gets it.
        approximation: For a strategy whose losses are not those of one device, why, a clause without a full stop.
            ``dstrat choose`` compares it only if it is named.
        options: Constructor arguments that the alias presets.
        auto: Rank for the automatic choice, the highest available one wins; None is never chosen automatically.
        groups: Names that stand for several accelerators (``"gpu"``); the available one with the highest
            ``auto`` is used.
        device_type: For an accelerator, the type of its torch devices, such as ``"cuda"``.
        process_group_backend: For an accelerator, the backend of its collectives, such as ``"gloo"``, ``"nccl"`` or
            ``"hccl"``; ``"none"`` if it has none.
        supports_torch_distributed: For an accelerator, whether torch.distributed can use that backend.
        devices_share_process: For an accelerator, whether one process can drive several of its devices.
        strategies: For an accelerator, the strategies that serve general aliases on it:
            ``{"ddp_spawn": "tpu_spawn"}``.
        accelerators: For a strategy that is written for some accelerators, these or their groups; empty means any
            that fits the other facts.
        device_types: For a strategy, the types of torch devices that it can use; empty means any.
        precisions: For a strategy, the precision aliases that it can run; empty means any.
        uses_torch_distributed: For a strategy, whether it needs an accelerator that torch.distributed supports.
        drives_several_devices: For a strategy without processes, whether its one process drives several devices;
            otherwise it has one on each machine.
        starts_processes: For a strategy, whether it runs one process per device.
        notebook_safe: For a strategy, whether it starts from an interactive session.
        max_devices: For a strategy, the most devices that it uses on one machine; None is no limit.
        multi_node: For a strategy, whether it runs on more than one machine.
        evidence_variables: For a cluster environment, the environment variables of which one is set wherever there is
            evidence for it, so that its class is imported only there; empty imports it in each process.
    """

    kind: Kind
    alias: str
    target: str | type
    summary: str
    synonyms: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    pip_options: tuple[str, ...] = ()
    requires_note: str = ""
    legacy: str = ""
    approximation: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    auto: int | None = None
    groups: tuple[str, ...] = ()
    device_type: str | None = None
    process_group_backend: str | None = None
    supports_torch_distributed: bool | None = None
    devices_share_process: bool | None = None
    strategies: Mapping[str, str] = field(default_factory=dict)
    accelerators: tuple[str, ...] = ()
    device_types: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    uses_torch_distributed: bool | None = None
    drives_several_devices: bool | None = None
    starts_processes: bool | None = None
    notebook_safe: bool | None = None
    max_devices: int | None = None
    multi_node: bool | None = None
    evidence_variables: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidComponentError(f"kind {self.kind!r} of {self.alias!r} is not one of {', '.join(KINDS)}")
        check_alias(self.alias)
        for name, (is_right, expected) in _FIELD_TYPES.items():
            value = getattr(self, name)
            if not is_right(value):
                raise InvalidComponentError(
                    f"{name} of {self.kind} {self.alias!r} must be {expected}, and is {value!r}"
                )
        for synonym in self.synonyms:
            check_alias(synonym)
        if isinstance(self.target, str) and not _TARGET.fullmatch(self.target):
            raise InvalidComponentError(
                f"target {self.target!r} of {self.kind} {self.alias!r} must look like 'package.module:Class'"
            )

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
    """An alias that is no longer offered, and its replacement.

    Attributes:
        kind: Kind of the component.
        alias: The name that users used to write.
        replacement: The alias to use instead; None if there is none.
        reason: Why it was retired, one sentence without a full stop.
    """

    kind: Kind
    alias: str
    replacement: str | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        check_alias(self.alias)
        if self.kind not in KINDS:
            raise InvalidComponentError(f"kind {self.kind!r} of {self.alias!r} is not one of {', '.join(KINDS)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Record of a conversion: objects of another library that a Trainer takes all the same.

    Whoever passes such an object to a Trainer gets it converted.  The other library is imported by nobody for that: an
    object is recognized by the names of its class and their bases.

    Attributes:
        foreign: Classes of the other library as ``"package.module:Class"``, by the module that defines each; objects of
            these and of their subclasses are converted.
        target: The function as ``"package.module:function"``.  It takes the object and returns a TrainModule, a
            DataModule, a Callback or a Logger, whichever the object is passed for; called again with the same object it
            returns an equivalent one.
        summary: One line for tables.
    """

    foreign: tuple[str, ...]
    target: str
    summary: str

    def __post_init__(self) -> None:
        if not (_is_texts(self.foreign) and self.foreign):
            raise InvalidComponentError(
                f"foreign of an Adapter must be a tuple of classes by their names, and is {self.foreign!r}"
            )
        for name in (*self.foreign, self.target):
            if not (isinstance(name, str) and _TARGET.fullmatch(name)):
                raise InvalidComponentError(
                    f"{name!r} of the Adapter for {self.foreign[0]!r} must look like 'package.module:Name'"
                )


def check_alias(alias: str) -> None:
    """Raise InvalidComponentError unless the text can be an alias."""
    if not isinstance(alias, str) or not _ALIAS.fullmatch(alias):
        raise InvalidComponentError(
            f"alias {alias!r} must consist of lower-case letters, digits, '_', '-' and '.', "
            "and begin with a letter or digit"
        )


# Hook of plugins, and its marker


API_VERSION = "v1"
ENTRY_POINT_GROUP = f"dstrat.{API_VERSION}"

hookspec = pluggy.HookspecMarker("dstrat")
hookimpl = pluggy.HookimplMarker("dstrat")


@hookspec
def dstrat_components() -> Sequence[Component | Tombstone | Adapter]:
    """Return the components of this plugin, the aliases that it has retired, and its conversions.

    Called once per process.  The module that implements it must not import torch or a backend.
    """
    raise NotImplementedError  # a specification is never called

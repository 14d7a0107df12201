"""Registration of components in the running process, through the same catalog."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from dstrat.errors import CatalogError, InvalidComponentError, MisuseError
from dstrat.plugins.catalog import get_catalog
from dstrat.plugins.component import Component
from dstrat.plugins.facts import facts_of_subclass, with_class_facts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Kind
    from dstrat.plugins.offer import Offer


C = TypeVar("C", bound=type)

_OTHER_ARGUMENTS = frozenset({"kind", "alias", "target", "summary", "options"})
_FACTS = tuple(field.name for field in fields(Component) if field.name not in _OTHER_ARGUMENTS)


class RegistryItem(Mapping[str, Any]):
    """Record of a component, with its facts as attributes, and its class, description and arguments as items.

    The items have the keys of Lightning's registry: the class under its kind (``"strategy"``), imported on access,
    ``"description"`` and ``"init_params"``.
    """

    def __init__(self, offer: Offer, record: Component) -> None:
        self._offer = offer
        self._record = record

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # unpickling asks for such names before there is a record
            raise AttributeError(name)
        return getattr(self._record, name)

    def __getitem__(self, name: str) -> Any:
        if name == self._record.kind:
            return get_catalog().load(self._offer)
        return {"description": self._record.summary, "init_params": dict(self._record.options)}[name]

    def __iter__(self) -> Iterator[str]:
        return iter((self._record.kind, "description", "init_params"))

    def __len__(self) -> int:
        return 3

    def __repr__(self) -> str:
        return f"RegistryItem({self._record!r})"


class _Registry(Mapping[str, RegistryItem]):
    """Mapping of aliases to the components of one kind, in the catalog of this process."""

    kind: Kind
    plural: str

    def __str__(self) -> str:
        return f"Registered {self.plural}: {', '.join(self)}"

    def get(self, name: str, default: Any = None) -> Any:  # the known name, of an object rather than of the item
        """Return a new object of the component's class, made with the arguments that its alias presets.

        Args:
            name: The alias.
            default: Result if no component has that name; None raises instead.

        Raises:
            CatalogError: No usable component has that name.
        """
        if default is not None and name not in self:
            return default
        catalog = get_catalog()
        offer = catalog.find(self.kind, name)
        return catalog.load(offer)(**offer.component.options)

    def remove(self, name: str) -> None:
        """Remove a component that was registered in this process."""
        get_catalog().unregister(self.kind, name)

    def __contains__(self, name: object) -> bool:
        try:
            get_catalog().find(self.kind, str(name))
        except CatalogError:
            return False
        return True

    def __getitem__(self, name: str) -> RegistryItem:
        """Return the record of a component: its summary, preset arguments and facts.

        Raises:
            CatalogError: No usable component has that name; a KeyError too if it does not exist.
        """
        offer = get_catalog().find(self.kind, name)
        record, target = offer.component, offer.component.target
        return RegistryItem(offer, with_class_facts(record, target) if isinstance(target, type) else record)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> list[str]:
        return sorted({offer.component.alias for offer in get_catalog().offers(self.kind)})

    def _register(
        self,
        name: str,
        cls: C | None,
        description: str | None,
        override: bool,
        facts: Mapping[str, Any] | None,
        init_params: dict[str, Any],
    ) -> Any:
        def add(cls: C) -> C:
            if not isinstance(cls, type):
                raise MisuseError(f"{self.kind} {name!r} must be registered with a class, not with {cls!r}")
            component = _component(self.kind, name, cls, description, facts or {}, init_params)
            get_catalog().register(component, override=override)
            return cls

        return add if cls is None else add(cls)


class _StrategyRegistry(_Registry):
    kind = "strategy"
    plural = "Strategies"

    def register(
        self,
        name: str,
        strategy: type | None = None,
        description: str | None = None,
        override: bool = False,
        facts: Mapping[str, Any] | None = None,
        **init_params: Any,
    ) -> Any:
        """Register a strategy class under an alias in this process; without the class, return a decorator.

        Args:
            name: The alias.
            strategy: The class.
            description: One line for tables; by default the first line of the class's docstring.
            override: Whether it may take an alias that is offered already.
            facts: Facts of the :class:`~dstrat.plugins.component.Component` that differ from those of the class's
                own record, or from that of its nearest base that has one.
            **init_params: Arguments that the alias presets.

        Returns:
            The class.

        Raises:
            InvalidComponentError: The alias is in use or invalid, or a fact does not exist.
            BrokenComponentError: The class lacks an abstract method of its interface.
            MisuseError: It is not a class.
        """
        return self._register(name, strategy, description, override, facts, init_params)

    def available_strategies(self) -> list[str]:
        """Return the aliases of all strategies, sorted by name."""
        return self._names()


class _AcceleratorRegistry(_Registry):
    kind = "accelerator"
    plural = "Accelerators"

    def register(
        self,
        name: str,
        accelerator: type | None = None,
        description: str | None = None,
        override: bool = False,
        facts: Mapping[str, Any] | None = None,
        **init_params: Any,
    ) -> Any:
        """Register an accelerator class under an alias in this process, as :meth:`StrategyRegistry.register` does."""
        return self._register(name, accelerator, description, override, facts, init_params)

    def available_accelerators(self) -> list[str]:
        """Return the aliases of all accelerators, sorted by name."""
        return self._names()


StrategyRegistry = _StrategyRegistry()
"""The strategies that can be named in this process."""

AcceleratorRegistry = _AcceleratorRegistry()
"""The accelerators that can be named in this process."""


def _component(
    kind: Kind,
    alias: str,
    cls: type,
    description: str | None,
    facts: Mapping[str, Any],
    init_params: dict[str, Any],
) -> Component:
    unknown = sorted(set(facts) - set(_FACTS))
    if unknown:
        raise InvalidComponentError(f"facts {unknown} of {kind} {alias!r} do not exist: there are {', '.join(_FACTS)}")
    base = inherited_record(get_catalog(), kind, cls, init_params)
    if base is not None:
        base = facts_of_subclass(dataclasses.replace(base, options=init_params), cls)
    inherited = {name: getattr(base, name) for name in _FACTS} if base else {}
    return Component(
        kind=kind,
        alias=alias,
        target=cls,
        summary=description or (cls.__doc__ or "").strip().partition("\n")[0] or cls.__name__,
        options=init_params,
        **{**inherited, "synonyms": (), "auto": None, **facts},
    )


# Existing record of a class, whose facts a registration inherits


def inherited_record(catalog: Catalog, kind: Kind, cls: type, arguments: Mapping[str, Any]) -> Component | None:
    """Return the record of the class, or of the nearest of its bases that has one; None if there is none.

    Of several records of a class, the one that shares the most preset arguments is used: a strategy that is registered
    with ``start_method="fork"`` has the facts of its family's alias for fork.  A record for some accelerators only
    describes the class on these, so records for any accelerator come first.
    """
    records = [offer.component for offer in catalog.offers(kind)]
    for base in cls.__mro__:
        of_base = [record for record in records if is_target(record.target, base)]
        if of_base:
            return max(of_base, key=lambda record: (_agreement(record.options, arguments), not record.accelerators))
    return None


def is_target(target: str | type, cls: type) -> bool:
    """Return whether a record's target is that class."""
    if not isinstance(target, str):
        return target is cls
    module, _, name = target.partition(":")
    if name != cls.__name__ or module not in sys.modules:
        return False
    return getattr(sys.modules[module], name, None) is cls


def _agreement(options: Mapping[str, Any], arguments: Mapping[str, Any]) -> int:
    """Return the number of options that are among the arguments; negative if one is missing."""
    agreeing = sum(
        bool(type(arguments.get(key)) is type(value) and arguments[key] == value) for key, value in options.items()
    )
    return agreeing if agreeing == len(options) else agreeing - len(options)

"""The component that is tested, as its ranks get it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dstrat.errors import CatalogError
from dstrat.plugins.catalog import get_catalog
from dstrat.testing.signatures import constructor_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dstrat.plugins.component import Component
    from dstrat.training.module.train_module import TrainModule


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A strategy, by its record rather than by its class, so that it can be sent to ranks that know nothing yet.

    Attributes:
        component: The record.
        options: Constructor arguments, beside those of the record.
        devices_per_process: Devices that each process drives.
        configure_model: What the module does in its ``configure_model``, such as splitting layers.
    """

    component: Component
    options: Mapping[str, Any] = field(default_factory=dict)
    devices_per_process: int = 1
    configure_model: Callable[[TrainModule], None] | None = None

    @property
    def key(self) -> str:
        """Tells it from others."""
        return repr(self)

    def with_options(self, **options: Any) -> Subject:
        """Return the same strategy with further constructor arguments."""
        return replace(self, options={**self.options, **options})

    def takes(self, name: str) -> bool:
        """Return whether the constructor has such an argument."""
        return name in self.component.options or name in constructor_parameters(self.cls)

    @property
    def cls(self) -> type[Any]:
        """The class; it is imported."""
        catalog = get_catalog()
        try:
            return catalog.load(catalog.find(self.component.kind, self.component.alias))
        except CatalogError:
            return catalog.load(catalog.register(self.component, override=True))

    @property
    def replicates_state(self) -> bool:
        """Whether each rank holds the whole state; with some strategies it depends on their options."""
        return bool(self.make().replicates_state)

    def make(self) -> Any:
        """Construct the strategy."""
        return self.cls(**{**self.component.options, **self.options})

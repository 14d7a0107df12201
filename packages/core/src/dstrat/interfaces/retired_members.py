"""Explanations of methods and attributes that only Lightning's classes have."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = logging.getLogger(__name__)


class RetiredMembers:
    """Base of interfaces that name the successors of members that only Lightning's classes have.

    An override of such a method would never be called, which is logged as a warning when the subclass is defined.
    Reading one is an AttributeError with its successor.

    Attributes:
        retired_members: What to do instead, as a text, by the member's name.
    """

    retired_members: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in sorted(cls.retired_members.keys() & vars(cls).keys()):
            _log.warning(
                "%s.%s has no effect, as Lightning calls it and dstrat does not: %s",
                *(cls.__qualname__, name, cls.retired_members[name]),
            )

    if not TYPE_CHECKING:  # which would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            if (instead := self.retired_members.get(name)) is not None:
                raise AttributeError(f"{type(self).__name__} has no {name}, unlike Lightning's: {instead}")
            # A further base class may have attributes of this kind too, as torch's Module has.
            look_up = getattr(super(), "__getattr__", None) or super().__getattribute__
            return look_up(name)  # raises again what a property has raised

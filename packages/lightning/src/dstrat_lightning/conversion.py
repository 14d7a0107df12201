"""Classes of users with the methods of ours in front of Lightning's."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from dstrat_lightning.internals import take_hyperparameters

T = TypeVar("T")


def convert(instance: Any, bridge: type[T]) -> T:
    """Give an object a class that derives from its class and from a bridge, and return it.

    What the user's classes define stays in front; the bridge comes before Lightning's base class.  So a hook that the
    user does not override is ours, and ``super().hook()`` in one that he does leads to ours.

    Args:
        instance: An object of a subclass of one of Lightning's base classes.
        bridge: A subclass of our base class.
    """
    converted: Any = instance
    if not isinstance(instance, bridge):
        user_class: Any = type(instance)
        bridging: Any = bridge
        converted.__class__ = converted_class(user_class, bridging)
        take_hyperparameters(converted)
    return converted  # type: ignore[no-any-return]  # of the bridge now


@cache
def converted_class(user_class: Any, bridge: Any) -> type:
    """Return the class that an object of a user's class gets."""
    # Python would put the bridge behind Lightning's class, as both derive from nn.Module and Lightning's comes first.
    metaclass = type(
        type(user_class).__name__, (type(user_class),), {"mro": lambda cls: [cls, *order(user_class, bridge)]}
    )

    def reduce_to_user_class(self: Any, protocol: Any) -> Any:
        # The class has no name that pickle could import.  Protocol 2 is the first that takes the state apart.
        reduced: Any = object.__reduce_ex__(self, max(protocol, 2))
        _, _, *state = reduced
        return make_empty, (user_class, bridge), *state

    namespace = {
        "__module__": user_class.__module__,
        "__qualname__": user_class.__qualname__,
        "__doc__": user_class.__doc__,
        "__reduce_ex__": reduce_to_user_class,
        **{name: wrap(getattr(user_class, name)) for name, wrap in getattr(bridge, "wrappers", {}).items()},
    }
    return metaclass(user_class.__name__, (user_class, bridge), namespace)  # type: ignore[no-any-return]  # a class


def make_empty(user_class: type, bridge: type) -> Any:
    """Return an object of the converted class without a state, which pickle and deepcopy give it."""
    cls: Any = converted_class(user_class, bridge)
    return cls.__new__(cls)


def order(user_class: type, bridge: type) -> list[type]:
    """Return the method resolution order: the user's classes, the bridge with ours, Lightning's, torch's."""
    bases = list(user_class.__mro__)
    ours = [base for base in bridge.__mro__ if base not in bases]
    # Of Lightning's classes the one that users derive from comes first in this order; others are its own bases.
    first = next(index for index, base in enumerate(bases) if is_of_lightning(base, *_BASE_CLASSES))
    return [*bases[:first], *ours, *bases[first:]]


_BASE_CLASSES = ("core.module:LightningModule", "core.datamodule:LightningDataModule")


def is_of_lightning(cls: type, *names: str) -> bool:
    """Return whether a class is one of Lightning's, named as ``"core.module:LightningModule"``."""
    full = f"{cls.__module__}:{cls.__qualname__}"
    # The last condition: a user's module may be called core.module too.
    return full.removeprefix("lightning.pytorch.").removeprefix("pytorch_lightning.") in names and full not in names

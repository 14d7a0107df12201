"""Suggestions for misspelled keyword arguments."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self

from dstrat.errors import MisuseError
from dstrat.plugins.options import check_keywords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_UNEXPECTED = re.compile(r"([\w.]+)\(\) got an unexpected keyword argument '(\w+)'$")


class _SignatureOfInit:
    """The signature of a class with a ``__new__`` for any arguments, which ``inspect.signature`` would show."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None:  # which has a signature only if it can be called, and that is another one
            raise AttributeError("__signature__")
        return inspect.Signature(_parameters(owner))


class NamedArguments:
    """Base of classes whose constructor explains a misspelled or retired keyword argument.

    Subclasses have this too, also those of users, unless their constructor has ``**kwargs``: what it does with these is
    not known, and a base class that gets them raises Python's own error.

    Attributes:
        retired_arguments: The successor of each argument that Lightning had, as a text.
    """

    retired_arguments: ClassVar[Mapping[str, str]] = {}
    __signature__ = _SignatureOfInit()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        make: Callable[..., Self] = super().__new__
        if make is not object.__new__ and cls.__init__ is object.__init__:
            return make(cls, *args, **kwargs)  # the arguments are for the __new__ of a further base class
        if args or kwargs:
            # A decorator with functools.wraps may take more than what it wraps.
            parameters = _parameters(cls, follow_wrapped=False)
            check_keywords(parameters, kwargs, cls.__name__, cls.retired_arguments)
            if args and not parameters:
                # object.__init__ ignores arguments where a class has a __new__.
                raise MisuseError(f"{cls.__name__} takes no arguments, and got {', '.join(map(repr, args))}")
        return make(cls) if make is object.__new__ else make(cls, *args, **kwargs)


def _parameters(cls: type[Any], *, follow_wrapped: bool = True) -> list[inspect.Parameter]:
    """Return the parameters of a class's constructor."""
    if cls.__init__ is object.__init__:
        return []  # its signature has *args and **kwargs
    return list(inspect.signature(cls.__init__, follow_wrapped=follow_wrapped).parameters.values())[1:]


def refuse_keywords(method: Callable[..., Any], unknown: Mapping[str, Any], retired: Mapping[str, str]) -> None:
    """Explain the keyword arguments that a method has collected because it has no such parameters.

    A decorator would check them too, and add a frame to every traceback of the method.

    Args:
        method: The method, which collects them as ``**_unknown: Never``, so that type checkers refuse them.
        unknown: The arguments.
        retired: The successor of each argument that the method had, as a text.

    Raises:
        MisuseError: There is one; the message has the nearest names.
    """
    if unknown:
        parameters = [
            each for each in inspect.signature(method).parameters.values() if each.kind is not each.VAR_KEYWORD
        ]
        check_keywords(parameters, unknown, method.__name__, retired)


def explain_keyword(error: BaseException, owners: Iterable[type]) -> None:
    """Add the nearest names to Python's error about a keyword argument of a method.

    A check in the method itself would cost time in each call, such as of ``log``.

    Args:
        error: Any exception; changed if it is such an error.
        owners: Classes with the methods.
    """
    unexpected = _UNEXPECTED.search(str(error)) if type(error) is TypeError else None
    if unexpected is None:
        return
    name = unexpected[1].rpartition(".")[2]
    for owner in owners:
        method = inspect.getattr_static(owner, name, None)
        # Not a static method, which has no self, or another descriptor.
        if inspect.isfunction(method) and method.__qualname__ == unexpected[1]:
            parameters = list(inspect.signature(method).parameters.values())[1:]
            try:
                check_keywords(parameters, [unexpected[2]], name)
            except MisuseError as explained:
                error.args = (str(explained),)
            return

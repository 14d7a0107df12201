"""Hyperparameters of modules and data modules: collection, loggers, checkpoints."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dstrat.errors import MisuseError
from dstrat.training.module.plain_values import (
    AttributeDict,
    changed_items,
    fields_of,
    from_plain,
    is_container,
    standard_types,
    to_plain,
    type_hints,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

    from typing_extensions import Self


# Constructor arguments, of running calls and of classes


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

_FRAMEWORK = ("dstrat", "torch", "builtins")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A running call of an ``__init__``.

    Attributes:
        named: The arguments by name, including those in ``**kwargs``.
        unnamed: The arguments in ``*args``.
    """

    named: dict[str, Any]
    unnamed: tuple[Any, ...]


def running_calls(owner: object, frame: FrameType | None) -> list[Call]:
    """Return the running calls of an object's constructors, base classes first.

    Args:
        owner: The object under construction.
        frame: The innermost frame of the search.
    """
    calls = []
    while frame is not None:
        code = frame.f_code
        # By the first argument, as the name alone is that of every constructor.
        if code.co_name == "__init__" and code.co_argcount > 0 and frame.f_locals.get(code.co_varnames[0]) is owner:
            calls.append(_call_of(frame))
        frame = frame.f_back
    return calls


def _call_of(frame: FrameType) -> Call:
    # A frame has current values only: an argument that __init__ has assigned anew is saved with its new value.
    names, args, kwargs, values = inspect.getargvalues(frame)
    named = {name: values[name] for name in names[1:] if name in values}
    return Call(
        named=named | (values.get(kwargs, {}) if kwargs else {}),
        unnamed=tuple(values.get(args, ())) if args else (),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Constructor:
    """The constructor arguments of a class, including those that ``**kwargs`` passes to base classes.

    Attributes:
        required: Names of the arguments without a default.
        names: Names of all arguments.
        takes_any: Whether it accepts arguments of any other name.
        annotations: The types of the arguments by name, as far as they can be resolved.
        defaults: The default values by name.
    """

    required: tuple[str, ...]
    names: tuple[str, ...]
    takes_any: bool
    annotations: dict[str, Any]
    defaults: dict[str, Any]

    @classmethod
    def of(cls, constructed: type) -> Constructor:
        """Return the constructor arguments of a class."""
        required: tuple[str, ...] | None = None
        names: dict[str, None] = {}
        annotations: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
        takes_any = False
        for index, init in enumerate(_inits(constructed)):
            parameters = list(inspect.signature(init).parameters.values())[1:]
            names |= {parameter.name: None for parameter in parameters if parameter.kind in _NAMED}
            annotations = type_hints(init) | annotations  # those of subclasses come first, and stay
            defaults = {p.name: p.default for p in parameters if p.default is not p.empty} | defaults
            if required is None:  # of the subclass only, which passes those of its base classes
                required = tuple(p.name for p in parameters if p.kind in _NAMED and p.default is p.empty)
            has_kwargs = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
            if index == 0:
                takes_any = has_kwargs  # a class may read its kwargs itself, whatever its base classes take
            if not has_kwargs:
                break  # base classes get only what this one passes
        return cls(
            required=required or (),
            names=tuple(names),
            takes_any=takes_any,
            annotations=annotations,
            defaults=defaults,
        )


def _inits(constructed: type) -> list[Any]:
    """Return the constructors of users' classes, subclasses first."""
    # Framework classes accept none of the user's arguments: **kwargs at that level are for the user's class itself.
    written = (base for base in constructed.__mro__ if base.__module__.partition(".")[0] not in _FRAMEWORK)
    return [base.__dict__["__init__"] for base in written if "__init__" in base.__dict__]


_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """The keys of a checkpoint for the hyperparameters of a module or a data module.

    Attributes:
        values: The hyperparameters that are plain values.
        argument: The constructor's argument with all of them.
        omitted: Descriptions of the hyperparameters that are not plain values, and not in the checkpoint, by name.
        containers: Names of the hyperparameters that were containers of omegaconf.
        types: Standard types of hyperparameters and their items, by name; ``""`` is the argument with all of them.
    """

    values: str
    argument: str
    omitted: str
    containers: str
    types: str


MODULE_KEYS = Keys(
    values="hyper_parameters",
    argument="hparams_name",
    omitted="hparams_left_out",
    containers="hparams_containers",
    types="hparams_types",
)
DATAMODULE_KEYS = Keys(
    values="datamodule_hyper_parameters",
    argument="datamodule_hparams_name",
    omitted="datamodule_hparams_left_out",
    containers="datamodule_hparams_containers",
    types="datamodule_hparams_types",
)


@dataclass(kw_only=True, slots=True)
class Saved:
    """The hyperparameters saved by :meth:`HyperparametersMixin.save_hyperparameters`.

    Attributes:
        current: The hyperparameters, which the user may change.
        initial: A copy from the time of the call.
        argument: The constructor's argument with all of them; None if each is an argument.
        argument_is_container: Whether that argument was a container of omegaconf.
        argument_type: Name of the argument's class, if it was a dict, a namespace or a dataclass.
        is_logged: Whether loggers write them.
    """

    current: AttributeDict = field(default_factory=AttributeDict)
    initial: AttributeDict = field(default_factory=AttributeDict)
    argument: str | None = None
    argument_is_container: bool = False
    argument_type: str = ""
    is_logged: bool = False


class HyperparametersMixin:
    """``save_hyperparameters`` and ``hparams`` of modules, data modules and any subclass.

    Loggers and checkpoints have the hyperparameters of a run's module and data module.
    """

    _hyperparameters: Saved

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: ARG004 - the arguments are for __init__
        new = super().__new__(cls)
        # Not in __init__: users may call save_hyperparameters() before super().__init__().
        new.__dict__["_hyperparameters"] = Saved()
        return new

    def save_hyperparameters(
        self,
        *names: Any,
        ignore: str | Iterable[str] = (),
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save the arguments of the calling ``__init__`` as :attr:`hparams`.

        Loggers write them when a run starts, and each checkpoint has them, so that ``load_from_checkpoint`` can
        construct the object again.  Checkpoints support numbers, str, paths, None, and lists, dicts, namespaces and
        omegaconf's containers of them; also dataclasses, named tuples and Enums, if the annotation of the argument
        names their class: ``blocks: list[Block]``.  Other values, such as modules, are not in checkpoints: a warning
        names them when a run with checkpoints starts, and ``load_from_checkpoint`` requires them as arguments.

        Args:
            *names: The arguments to save; by default all, including those of subclasses.  Or one dict, namespace or
                dataclass, whose fields are saved.
            ignore: Arguments or fields to exclude, also if a base class has saved them.
            frame: The frame of a call inside ``__init__``; by default the caller's.
            logger: Whether loggers write them.

        Raises:
            MisuseError: A name is not an argument, or the caller is not ``__init__``.
        """
        caller = frame or inspect.currentframe().f_back  # type: ignore[union-attr]  # CPython has frames
        saved = self._hyperparameters
        collected, argument = self._collect(names, caller)
        ignored = {ignore} if isinstance(ignore, str) else set(ignore)
        saved.current.update(collected)
        for name in ignored & saved.current.keys():
            del saved.current[name]
        saved.initial = _copied(saved.current)
        if argument is not None:
            saved.argument, saved.argument_is_container = argument, is_container(names[0])
            # The name, since a class that is defined in a function could not be pickled with the module.
            cls = type(names[0])
            saved.argument_type = cls.__name__ if cls is dict or not issubclass(cls, Mapping) else ""
        saved.is_logged = logger

    @property
    def hparams(self) -> AttributeDict:
        """The hyperparameters, by key or as attributes; later checkpoints have the user's changes."""
        return self._hyperparameters.current

    @property
    def hparams_initial(self) -> AttributeDict:
        """A copy of the hyperparameters from the time of ``save_hyperparameters``."""
        return _copied(self._hyperparameters.initial)

    def _collect(self, names: tuple[Any, ...], caller: FrameType | None) -> tuple[dict[str, Any], str | None]:
        calls = running_calls(self, caller)
        if len(names) == 1 and (fields := fields_of(names[0])) is not None:
            named = calls[0].named if calls else {}
            return fields, next((name for name, value in named.items() if value is names[0]), None)
        if not calls:
            raise MisuseError(
                f"save_hyperparameters() takes the arguments of {type(self).__name__}.__init__, which is not running: "
                "call it in __init__, or pass it a dict"
            )
        arguments: dict[str, Any] = {}
        for call in calls:
            arguments |= call.named
        if names:
            return self._select(names, arguments), None
        unnamed = [value for value in calls[0].unnamed if not any(value is saved for saved in self.hparams.values())]
        if unnamed:
            _log.warning(
                "%s.__init__ has arguments without a name in *args, which are not kept as hyperparameters: %r",
                type(self).__name__,
                unnamed,
            )
        return arguments, None

    def _select(self, names: tuple[Any, ...], arguments: Mapping[str, Any]) -> dict[str, Any]:
        wrong = [name for name in names if not (isinstance(name, str) and name in arguments)]
        if wrong:
            raise MisuseError(
                f"save_hyperparameters got {', '.join(map(repr, wrong))}, and {type(self).__name__}.__init__ "
                f"has the arguments {', '.join(arguments) or 'self alone'}: pass names of these, or one dict, "
                "namespace or dataclass"
            )
        return {name: arguments[name] for name in names}


def _copied(values: AttributeDict) -> AttributeDict:
    """Return a copy of dicts and lists at all levels; other values are shared."""
    return AttributeDict({name: _copy_of(value) for name, value in values.items()})


def _copy_of(value: Any) -> Any:
    if is_container(value):
        return copy.deepcopy(value)
    if isinstance(value, dict):
        return {key: _copy_of(item) for key, item in value.items()}
    return [_copy_of(item) for item in value] if isinstance(value, list) else value


def checkpoint_entries(owner: HyperparametersMixin | None, keys: Keys) -> dict[str, Any]:
    """Return the entries of a checkpoint for an object's hyperparameters; an empty dict if it has none.

    Args:
        owner: A module or a data module.
        keys: :data:`MODULE_KEYS` or :data:`DATAMODULE_KEYS`.
    """
    if owner is None or not owner.hparams:
        return {}
    saved = owner._hyperparameters  # noqa: SLF001 - of a class in this file
    constructor = Constructor.of(type(owner))
    of_argument = constructor.annotations.get(saved.argument or "")
    annotations = constructor.annotations if saved.argument is None else type_hints(of_argument)
    if saved.argument_type == "dict":  # which it stays, though its annotation may be a dataclass
        annotations = {}
    plain: dict[str, Any] = {}
    omitted: dict[str, str] = {}
    types: dict[str, str] = {}
    for name, value in saved.current.items():
        refused: dict[str, Any] = {}
        plain[name] = to_plain(value, name, refused.__setitem__)
        descriptions = [f"{path} ({type(item).__name__})" for path, item in refused.items()]
        if not refused:
            types |= standard_types(value, name)
            restored = _restore(plain[name], annotations.get(name), name, types)
            changed = changed_items(value, restored, name)
            descriptions = [f"{path} ({_changed(item, restored)})" for path, item in changed.items()]
        if descriptions:
            del plain[name]
            if not _is_default(constructor, name, value):  # the constructor supplies its defaults itself
                omitted[name] = ", ".join(descriptions)
    containers = [name for name in plain if is_container(saved.current[name])]
    if saved.argument is not None and saved.argument_is_container:
        containers.append(saved.argument)
    if saved.argument is not None and saved.argument_type:
        types[""] = saved.argument_type  # from_plain ignores a name that is not standard
        is_dict = saved.argument_type == "dict"
        if not is_dict and type(_restore(plain, of_argument, "", types)).__name__ != saved.argument_type:
            omitted[saved.argument] = f"{saved.argument} ({saved.argument_type}, which is not annotated)"
    metadata = {
        keys.argument: saved.argument,
        keys.omitted: omitted,
        keys.containers: containers,
        keys.types: types,
    }
    return {keys.values: plain, **{key: value for key, value in metadata.items() if value}}


def _restore(plain: Any, annotation: Any, name: str, types: Mapping[str, str]) -> Any:
    """Return the value that a loaded checkpoint gives; None if it cannot be constructed."""
    try:
        return from_plain(plain, annotation, name, types)
    except Exception:  # noqa: BLE001 - a user's dataclass may refuse its own fields, such as those with init=False
        return None


def _changed(item: Any, restored: Any) -> str:
    """Return the type of an item that a loaded checkpoint gives as another value, and why."""
    lacks_annotation = restored is not None and type(item) not in (list, tuple, dict)
    return f"{type(item).__name__}, which {'is not annotated' if lacks_annotation else 'would not come back the same'}"


def _is_default(constructor: Constructor, name: str, value: Any) -> bool:
    defaults = constructor.defaults
    return name in defaults and defaults[name] is value  # "==" of arrays and tensors is no bool


def logged_hyperparameters(owners: Sequence[HyperparametersMixin], *, warns: bool) -> dict[str, Any]:
    """Return the hyperparameters of module and data module for the loggers.

    Args:
        owners: Module and data module.
        warns: Whether to log a warning about those that checkpoints do not hold.

    Raises:
        MisuseError: Module and data module have different values of one name.
    """
    if warns:
        for owner in owners:
            omitted = checkpoint_entries(owner, MODULE_KEYS).get(MODULE_KEYS.omitted, {})
            if omitted:
                _warn_of(owner, omitted)
    return _shown([owner for owner in owners if owner._hyperparameters.is_logged])  # noqa: SLF001 - as above


def _warn_of(owner: HyperparametersMixin, omitted: Mapping[str, str]) -> None:
    _log.warning(
        "checkpoints do not hold these hyperparameters of %s, which are no plain values: %s; "
        "load_from_checkpoint(path, %s) takes them, and save_hyperparameters(ignore=%r) keeps them out of hparams",
        type(owner).__name__,
        ", ".join(omitted.values()),
        ", ".join(f"{name}=..." for name in omitted),
        list(omitted),
    )


def _shown(owners: Iterable[HyperparametersMixin]) -> dict[str, Any]:
    """Return the hyperparameters of several objects as plain values, with names for other values."""
    shown: dict[str, Any] = {}
    for owner in owners:
        for name, value in owner.hparams_initial.items():
            plain = to_plain(
                value, name, lambda _, other: str(getattr(other, "__qualname__", type(other).__qualname__))
            )
            if name in shown and shown[name] != plain:
                raise MisuseError(
                    f"module and data module both have a hyperparameter {name!r}, {shown[name]!r} and {plain!r}, and "
                    "loggers know one: rename it, or call save_hyperparameters(logger=False) in one of them"
                )
            shown[name] = plain
    return shown

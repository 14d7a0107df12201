"""The settings that a module or a data module was made with: kept, given to loggers, and written to checkpoints."""

from __future__ import annotations

import copy
import inspect
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dstrat.errors import MisuseError
from dstrat.training.module.constructor import Constructor, running_calls
from dstrat.training.module.plain_values import AttributeDict, fields_of, is_container, to_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import FrameType

    from typing_extensions import Self

    from dstrat.training.trainer import Trainer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """Where a checkpoint has the settings of a module or of a data module.

    Attributes:
        values: The settings that are plain values.
        argument: The constructor's argument that held all of them.
        left_out: What the checkpoint does not hold, as it is not plain: a description by name.
        containers: Names of the settings that were containers of omegaconf.
    """

    values: str
    argument: str
    left_out: str
    containers: str


MODULE_KEYS = Keys(
    values="hyper_parameters",
    argument="hparams_name",
    left_out="hparams_left_out",
    containers="hparams_containers",
)
DATAMODULE_KEYS = Keys(
    values="datamodule_hyper_parameters",
    argument="datamodule_hparams_name",
    left_out="datamodule_hparams_left_out",
    containers="datamodule_hparams_containers",
)


@dataclass(kw_only=True, slots=True)
class Saved:
    """What :meth:`HyperparametersMixin.save_hyperparameters` has kept.

    Attributes:
        current: The settings, which the user may change.
        initial: The settings as they were saved.
        argument: The constructor's argument that held all of them; None where each was an argument.
        argument_is_container: Whether that was a container of omegaconf.
        is_logged: Whether loggers get them.
    """

    current: AttributeDict = field(default_factory=AttributeDict)
    initial: AttributeDict = field(default_factory=AttributeDict)
    argument: str | None = None
    argument_is_container: bool = False
    is_logged: bool = False


class HyperparametersMixin:
    """``save_hyperparameters`` and ``hparams`` of modules and data modules, and of any class that inherits this.

    Loggers and checkpoints get those of the module and the data module of a run.
    """

    _hyperparameters: Saved

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: ARG004 - the arguments are for __init__
        new = super().__new__(cls)
        new.__dict__["_hyperparameters"] = Saved()  # here, so that they may be saved before super().__init__()
        return new

    def save_hyperparameters(
        self,
        *names: Any,
        ignore: str | Iterable[str] = (),
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of ``__init__``, in which this is called, as :attr:`hparams`.

        Loggers get them when a run starts, and each checkpoint holds them, so that ``load_from_checkpoint`` can make
        the object again.  A checkpoint takes numbers, strings, paths, None, and lists, dicts, namespaces, dataclasses
        and omegaconf's containers of them.  Others, such as modules, are kept here alone: a line in the log names them
        when a run starts that saves checkpoints, and ``load_from_checkpoint`` asks for them.

        Args:
            *names: The arguments to keep; by default all, also those of subclasses.  Or one dict, namespace or
                dataclass, whose fields are kept.
            ignore: Arguments or fields to leave out, also where a base class has saved them.
            frame: The frame of a call inside ``__init__``; by default the caller's.
            logger: Whether loggers get them.

        Raises:
            MisuseError: A name is not one of the arguments, or this is not called in ``__init__``.
        """
        caller = frame or inspect.currentframe().f_back  # type: ignore[union-attr]  # CPython has frames
        saved = self._hyperparameters
        found, argument = self._found(names, caller)
        ignored = {ignore} if isinstance(ignore, str) else set(ignore)
        saved.current.update(found)
        for name in ignored & saved.current.keys():
            del saved.current[name]
        saved.initial = _copied(saved.current)
        if argument is not None:
            saved.argument, saved.argument_is_container = argument, is_container(names[0])
        saved.is_logged = logger

    @property
    def hparams(self) -> AttributeDict:
        """The settings, by key or as attributes; changes of them are in the checkpoints that follow."""
        return self._hyperparameters.current

    @property
    def hparams_initial(self) -> AttributeDict:
        """A copy of the settings as they were saved."""
        return _copied(self._hyperparameters.initial)

    def _found(self, names: tuple[Any, ...], caller: FrameType | None) -> tuple[dict[str, Any], str | None]:
        calls = running_calls(self, caller)
        if len(names) == 1 and (fields := fields_of(names[0])) is not None:
            arguments = calls[0].named if calls else {}
            return fields, next((name for name, value in arguments.items() if value is names[0]), None)
        if not calls:
            raise MisuseError(
                f"save_hyperparameters() takes the arguments of {type(self).__name__}.__init__, which is not running: "
                "call it in __init__, or pass it a dict"
            )
        known: dict[str, Any] = {}
        for call in calls:
            known |= call.named
        if names:
            return self._chosen(names, known), None
        unnamed = [value for value in calls[0].unnamed if not any(value is other for other in self.hparams.values())]
        if unnamed:
            _log.warning(
                "%s.__init__ has arguments without a name in *args, which are not kept as hyperparameters: %r",
                type(self).__name__,
                unnamed,
            )
        return known, None

    def _chosen(self, names: tuple[Any, ...], known: Mapping[str, Any]) -> dict[str, Any]:
        wrong = [name for name in names if not (isinstance(name, str) and name in known)]
        if wrong:
            raise MisuseError(
                f"save_hyperparameters was given {', '.join(map(repr, wrong))}, and {type(self).__name__}.__init__ "
                f"has the arguments {', '.join(known) or 'self alone'}: pass names of these, or one dict, namespace "
                "or dataclass"
            )
        return {name: known[name] for name in names}


def _copied(values: AttributeDict) -> AttributeDict:
    """Return a copy that later changes of dicts and lists leave as it is; what else they hold is not copied."""
    return AttributeDict({name: _copy_of(value) for name, value in values.items()})


def _copy_of(value: Any) -> Any:
    if is_container(value):
        return copy.deepcopy(value)
    if isinstance(value, dict):
        return {key: _copy_of(part) for key, part in value.items()}
    return [_copy_of(part) for part in value] if isinstance(value, list) else value


def checkpoint_entries(owner: HyperparametersMixin | None, keys: Keys) -> dict[str, Any]:
    """Return what a checkpoint holds of an object's settings; nothing where it has saved none.

    Args:
        owner: A module or a data module.
        keys: :data:`MODULE_KEYS` or :data:`DATAMODULE_KEYS`.
    """
    if owner is None or not owner.hparams:
        return {}
    saved = owner._hyperparameters  # noqa: SLF001 - the other half of the class
    plain: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, value in saved.current.items():
        refused: dict[str, Any] = {}
        plain[name] = to_plain(value, name, refused.__setitem__)
        if refused:
            del plain[name]
            if not _is_default(owner, name, value):  # with which the constructor makes the same
                left_out[name] = ", ".join(f"{part} ({type(refused[part]).__name__})" for part in refused)
    containers = [name for name in plain if is_container(saved.current[name])]
    if saved.argument is not None and saved.argument_is_container:
        containers.append(saved.argument)
    others = {keys.argument: saved.argument, keys.left_out: left_out, keys.containers: containers}
    return {keys.values: plain, **{key: value for key, value in others.items() if value}}


def _is_default(owner: HyperparametersMixin, name: str, value: Any) -> bool:
    defaults = Constructor.of(type(owner)).defaults
    return name in defaults and defaults[name] is value


def log_hyperparameters(trainer: Trainer) -> None:
    """Give the loggers the settings of module and data module; called when a run starts, in every process.

    Raises:
        MisuseError: Both have a setting of one name with different values.
    """
    owners = [owner for owner in (trainer.module, trainer.datamodule) if owner is not None]
    if trainer.is_fitting and trainer.checkpoint_callbacks and trainer.is_global_zero:
        for owner in owners:
            left_out = checkpoint_entries(owner, MODULE_KEYS).get(MODULE_KEYS.left_out, {})
            if left_out:
                _warn_of(owner, left_out)
    settings = _shown([owner for owner in owners if owner._hyperparameters.is_logged])  # noqa: SLF001 - as above
    trainer.publisher.log_hyperparams(settings)


def _warn_of(owner: HyperparametersMixin, left_out: Mapping[str, str]) -> None:
    _log.warning(
        "checkpoints do not hold these hyperparameters of %s, which are no plain values: %s; "
        "load_from_checkpoint(path, %s) takes them, and save_hyperparameters(ignore=%r) keeps them out of hparams",
        type(owner).__name__,
        ", ".join(left_out.values()),
        ", ".join(f"{name}=..." for name in left_out),
        list(left_out),
    )


def _shown(owners: Iterable[HyperparametersMixin]) -> dict[str, Any]:
    """Return the settings of several objects as plain values; of what is not plain its name."""
    shown: dict[str, Any] = {}
    for owner in owners:
        for name, value in owner.hparams_initial.items():
            plain = to_plain(value, name, _name_of)
            if name in shown and shown[name] != plain:
                raise MisuseError(
                    f"module and data module both have a hyperparameter {name!r}, {shown[name]!r} and {plain!r}, and "
                    "loggers know one: rename it, or call save_hyperparameters(logger=False) in one of them"
                )
            shown[name] = plain
    return shown


def _name_of(_: str, value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))

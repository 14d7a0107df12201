"""The settings that a module or a data module was made with: kept, given to loggers, and written to checkpoints."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dstrat.errors import CheckpointError, MisuseError
from dstrat.training.module.constructor import running_calls
from dstrat.training.module.plain_values import AttributeDict, fields_of, to_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import FrameType

    from typing_extensions import Self

    from dstrat.training.trainer import Trainer

_log = logging.getLogger(__name__)

MODULE_KEYS = ("hyper_parameters", "hparams_name")
"""The keys of a checkpoint that hold a module's settings, and the argument that took them all."""

DATAMODULE_KEYS = ("datamodule_hyper_parameters", "datamodule_hparams_name")
"""The same of a data module."""


@dataclass(kw_only=True, slots=True)
class Saved:
    """What :meth:`HyperparameterMethods.save_hyperparameters` has kept.

    Attributes:
        current: The settings, which the user may change.
        initial: The settings as they were saved.
        argument: The constructor's argument that held all of them; None where each was an argument.
        is_logged: Whether loggers get them.
    """

    current: AttributeDict = field(default_factory=AttributeDict)
    initial: AttributeDict = field(default_factory=AttributeDict)
    argument: str | None = None
    is_logged: bool = False


class HyperparameterMethods:
    """``save_hyperparameters`` and ``hparams`` of a module or a data module."""

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
        the object again.  A checkpoint takes numbers, strings, paths, None, and lists, dicts, namespaces and
        dataclasses of them; leave others out by ``ignore``.

        Args:
            *names: The arguments to keep; by default all, also those of subclasses.  Or one dict, namespace or
                dataclass, whose fields are kept.
            ignore: Arguments or fields to leave out.
            frame: The frame of a call inside ``__init__``; by default the caller's.
            logger: Whether loggers get them.

        Raises:
            MisuseError: A name is not one of the arguments, or this is not called in ``__init__``.
        """
        caller = frame or inspect.currentframe().f_back  # type: ignore[union-attr]  # CPython has frames
        saved = self._hyperparameters
        found, argument = self._found(names, caller)
        ignored = {ignore} if isinstance(ignore, str) else set(ignore)
        saved.current.update({name: value for name, value in found.items() if name not in ignored})
        saved.initial = _copied(saved.current)
        saved.argument = argument or saved.argument
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
    if isinstance(value, dict):
        return {key: _copy_of(part) for key, part in value.items()}
    return [_copy_of(part) for part in value] if isinstance(value, list) else value


def checkpoint_entries(owner: HyperparameterMethods | None, keys: tuple[str, str]) -> dict[str, Any]:
    """Return what a checkpoint holds of an object's settings; nothing where it has saved none.

    Args:
        owner: A module or a data module.
        keys: :data:`MODULE_KEYS` or :data:`DATAMODULE_KEYS`.

    Raises:
        CheckpointError: One of them is not plain; the message names it.
    """
    if owner is None or not owner.hparams:
        return {}
    refused: dict[str, Any] = {}
    entries = {keys[0]: to_plain(owner.hparams, "", refused.__setitem__)}
    if refused:
        raise _refusal(owner, refused)
    argument = owner._hyperparameters.argument  # noqa: SLF001 - the other half of the class
    return entries if argument is None else entries | {keys[1]: argument}


def _refusal(owner: HyperparameterMethods, refused: Mapping[str, Any]) -> CheckpointError:
    listed = ", ".join(f"{name} ({type(value).__name__})" for name, value in refused.items())
    names = list(dict.fromkeys(name.partition(".")[0].partition("[")[0] for name in refused))
    return CheckpointError(
        f"a checkpoint holds hyperparameters that are numbers, strings, None, or lists, dicts and dataclasses of them, "
        f"and {type(owner).__name__} has {listed}: leave out what is not, by save_hyperparameters(ignore={names!r})"
    )


def log_hyperparameters(trainer: Trainer) -> None:
    """Give the loggers the settings of module and data module; called when a run starts, in every process.

    Raises:
        CheckpointError: The run writes checkpoints, and could not write the settings.
        MisuseError: Both have a setting of one name with different values.
    """
    owners = [owner for owner in (trainer.module, trainer.datamodule) if owner is not None]
    if trainer.is_fitting and trainer.checkpoint_callbacks:
        for owner in owners:
            checkpoint_entries(owner, MODULE_KEYS)
    settings = _shown([owner for owner in owners if owner._hyperparameters.is_logged])  # noqa: SLF001 - as above
    trainer.publisher.log_hyperparams(settings)


def _shown(owners: Iterable[HyperparameterMethods]) -> dict[str, Any]:
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

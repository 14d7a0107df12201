"""Construction of a module or a data module from a checkpoint."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from dstrat.checkpoint.formats import io_for
from dstrat.checkpoint.paths import home_path
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.errors import CheckpointError, MisuseError, RequestError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.state_dict import check_names, load_by_names
from dstrat.training.module.hyperparameters import DATAMODULE_KEYS, MODULE_KEYS, Constructor
from dstrat.training.module.plain_values import from_plain, to_container

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import IO

    import torch
    from torch import nn
    from typing_extensions import Self

    from dstrat.training.module.hyperparameters import Keys

    MapLocation: TypeAlias = (
        torch.device | str | int | Mapping[str, str] | Callable[[torch.UntypedStorage, str], Any] | None
    )

T = TypeVar("T")

_log = logging.getLogger(__name__)


class ModuleLoading:
    """``load_from_checkpoint`` of a module.

    Attributes:
        strict_loading: Whether missing and unexpected weights are an error when a run loads a checkpoint.  A module
            that removes weights from its checkpoints, such as frozen ones, sets it to False: the names are then logged.
    """

    strict_loading: bool = True

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: MapLocation = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,  # without effect
        **overrides: Any,
    ) -> Self:
        """Construct the module with the hyperparameters of a checkpoint, and load its weights.

        No code of the checkpoint is run.

        Args:
            checkpoint_path: A checkpoint of a Trainer, or a binary file object with one of ``torch.save``.
            map_location: The device of the module; by default the CPU.  Or an argument of ``torch.load`` for tensors on
                the CPU: a function of a storage and ``"cpu"`` that returns a storage, or a dict with the key ``"cpu"``.
            hparams_file: A JSON file of hyperparameters, written by a logger, that replaces those of the checkpoint.
            strict: Whether missing and unexpected weights are an error; otherwise they are logged.  None is the
                module's ``strict_loading``.
            weights_only: Accepted for compatibility with Lightning, without effect.
            **overrides: Arguments of ``__init__``, which override the checkpoint's.

        Raises:
            CheckpointError: The checkpoint cannot be read, or its weights do not fit the module.
            MisuseError: An argument of ``__init__`` is missing, or an override is not an argument.
            RequestError: The file of hyperparameters is not a JSON object.
        """
        checkpoint = _read(checkpoint_path, hparams_file, MODULE_KEYS)
        module: Any = construct(cls, checkpoint, MODULE_KEYS, overrides, checkpoint_path)
        configure_for(module, checkpoint["state_dict"])
        if module.on_load_checkpoint is not None:  # users may set any hook to None
            module.on_load_checkpoint(checkpoint)
        is_strict = module.strict_loading if strict is None else strict
        load_weights(module, checkpoint["state_dict"], checkpoint_path, strict=is_strict)
        loaded: Self = module if map_location is None else module.to(_device_of(map_location))
        return loaded


class DataModuleLoading:
    """``load_from_checkpoint`` of a data module."""

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: MapLocation = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,  # without effect
        **overrides: Any,
    ) -> Self:
        """Construct the data module with the hyperparameters of a checkpoint, and load its state.

        Args:
            checkpoint_path: A checkpoint of a Trainer, or a binary file object with one of ``torch.save``.
            map_location: The device of tensors in the state, as for a module.
            hparams_file: A JSON file of hyperparameters, written by a logger, that replaces those of the checkpoint.
            weights_only: Accepted for compatibility with Lightning, without effect.
            **overrides: Arguments of ``__init__``, which override the checkpoint's.

        Raises:
            CheckpointError: The checkpoint cannot be read.
            MisuseError: An argument of ``__init__`` is missing, or an override is not an argument.
            RequestError: The file of hyperparameters is not a JSON object.
        """
        checkpoint = _read(checkpoint_path, hparams_file, DATAMODULE_KEYS)
        datamodule: Any = construct(cls, checkpoint, DATAMODULE_KEYS, overrides, checkpoint_path)
        state = checkpoint.get("datamodule", {})
        if map_location is not None:
            device = _device_of(map_location)
            state = apply_to_tensors(state, lambda tensor: tensor.to(device))
        datamodule.load_state_dict(state)
        loaded: Self = datamodule
        return loaded


def _read(path: str | Path | IO[bytes], hparams_file: str | Path | None, keys: Keys) -> dict[str, Any]:
    """Return a checkpoint, with the hyperparameters of a file if there is one."""
    checkpoint = read_checkpoint(path)
    if hparams_file is not None:
        checkpoint = {**checkpoint, keys.values: _read_json(home_path(hparams_file)), keys.omitted: {}}
    return checkpoint


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        values = None
    if not isinstance(values, dict):
        # Such as a hparams.yaml of Lightning.
        raise RequestError(
            f"hparams_file={str(path)!r} has no JSON object, which is what loggers write as hparams.json: pass the "
            "hyperparameters by name instead, load_from_checkpoint(..., name=value)"
        )
    return values


def _device_of(map_location: MapLocation) -> Any:
    """Return the device to which a ``map_location`` of ``torch.load`` maps tensors on the CPU."""
    import torch

    if isinstance(map_location, Mapping):
        if "cpu" not in map_location:
            _log.warning(
                "map_location=%r does not say where tensors on 'cpu' go, and a checkpoint has all of them there: "
                "the module stays on the CPU",
                map_location,
            )
        return map_location.get("cpu", "cpu")
    if isinstance(map_location, torch.device) or not callable(map_location):
        return map_location
    storage = torch.empty(1, device="cpu").untyped_storage()  # torch.load calls such a function with each storage
    mapped = map_location(storage, "cpu")
    return (storage if mapped is None else mapped).device


def configure_for(module: Any, state: Mapping[str, Any]) -> None:
    """Call ``configure_model`` outside of a run if the module lacks layers of a state."""
    # Otherwise configure_model may only shard, which needs the device mesh of a run.
    if _shapes(module.state_dict()) != _shapes(state):
        module.configure_model()


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in state.items()}


def read_checkpoint(path: str | Path | IO[bytes]) -> dict[str, Any]:
    """Return a Trainer's checkpoint, a file or a portable folder, with tensors on the CPU.

    Args:
        path: The checkpoint, or a binary file object with one of ``torch.save``.

    Raises:
        CheckpointError: The checkpoint cannot be read, or is not a Trainer's.
    """
    if isinstance(path, str | os.PathLike):
        checkpoint = io_for(path, TorchCheckpointIO()).load_checkpoint(path)
    else:
        checkpoint = _read_file_object(path)
    if not isinstance(checkpoint.get("state_dict"), Mapping):
        raise CheckpointError(
            f"{str(path)!r} has no 'state_dict', and so is no checkpoint of a Trainer: if it holds weights alone, make "
            "the module and call its load_state_dict"
        )
    return checkpoint


def _read_file_object(file: Any) -> dict[str, Any]:
    """Return the checkpoint in a file object, copied to a file for the same checks and errors."""
    is_readable = callable(getattr(file, "read", None))
    if not is_readable or isinstance(file, io.TextIOBase):
        raise RequestError(
            f"{file!r} is no checkpoint: give its path as a str or Path, or a file object that is open in binary mode"
        )
    with tempfile.NamedTemporaryFile(prefix="dstrat-") as copy:
        shutil.copyfileobj(file, copy)
        copy.flush()
        try:
            return TorchCheckpointIO().load_checkpoint(copy.name)
        except CheckpointError as error:  # names the copy, which the user does not know
            raise CheckpointError(str(error).replace(repr(copy.name), repr(file))) from error


def construct(
    cls: type[T], checkpoint: Mapping[str, Any], keys: Keys, overrides: Mapping[str, Any], path: str | Path | IO[bytes]
) -> T:
    """Construct an object with the hyperparameters of a checkpoint.

    Args:
        cls: The class.
        checkpoint: The content of the checkpoint.
        keys: The checkpoint's keys of hyperparameters.
        overrides: Arguments that override the checkpoint's.
        path: Of the checkpoint, for messages.

    Raises:
        MisuseError: An argument of the class is missing, or an override is not an argument.
    """
    constructor = Constructor.of(cls)
    saved, argument = dict(checkpoint.get(keys.values, {})), checkpoint.get(keys.argument)
    types = checkpoint.get(keys.types, {})
    containers = checkpoint.get(keys.containers, ())
    if argument not in overrides:  # which has the omitted values too
        omitted = {
            name: description for name, description in checkpoint.get(keys.omitted, {}).items() if name not in overrides
        }
        _check_complete(cls, constructor, omitted, path, takes_fields=argument in constructor.names)
    # The class takes all hyperparameters as one argument: overrides replace single fields of it.
    if argument in constructor.names and argument not in overrides:
        fields = {name: value for name, value in overrides.items() if name not in constructor.names}
        overrides = {name: value for name, value in overrides.items() if name not in fields}
        saved = {argument: saved | fields}
    _check_accepted(cls, constructor, overrides)
    accepted = {name: value for name, value in saved.items() if name in constructor.names or constructor.takes_any}
    arguments = {
        name: to_container(value)
        if name in containers
        else from_plain(value, constructor.annotations.get(name), "" if name == argument else name, types)
        for name, value in accepted.items()
        if name not in overrides
    }
    arguments |= overrides
    missing = [name for name in constructor.required if name not in arguments]
    if missing:
        example = ", ".join(f"{name}=..." for name in missing)
        raise MisuseError(
            f"{cls.__name__}.__init__ needs {', '.join(map(repr, missing))}, and the hyperparameters in {str(path)!r} "
            f"are {', '.join(saved) or 'none'}: call {cls.__name__}.load_from_checkpoint(..., {example}), or call "
            "save_hyperparameters() in __init__ and write the checkpoint again"
        )
    return _call(cls, arguments, constructor, overrides)


_REFUSED = re.compile(r"unexpected keyword argument '(\w+)'|multiple values for (?:keyword )?argument '(\w+)'")


def _call(
    cls: type[T],
    arguments: Mapping[str, Any],
    constructor: Constructor,
    overrides: Mapping[str, Any],
    refused: tuple[str, ...] = (),
) -> T:
    """Construct an object, without the saved hyperparameters that its ``**kwargs`` refuse."""
    try:
        constructed = cls(**arguments)
    except TypeError as error:
        # Not all hyperparameters are arguments: a base class may have saved those that its subclass computes.
        match = _REFUSED.search(str(error)) if constructor.takes_any else None
        name = str(match[1] or match[2]) if match else ""
        if name in overrides and name not in constructor.names:
            raise _not_accepted(cls, constructor, [name]) from error
        if name not in arguments or name in constructor.required:
            raise
        accepted = {other: value for other, value in arguments.items() if other != name}
        return _call(cls, accepted, constructor, overrides, (*refused, name))
    if refused:
        _log.warning(
            "load_from_checkpoint constructs %s without the hyperparameters %s of the checkpoint, which its "
            "constructor refuses",
            *(cls.__name__, ", ".join(map(repr, refused))),
        )
    return constructed


def _check_complete(
    cls: type, constructor: Constructor, omitted: Mapping[str, str], path: str | Path | IO[bytes], *, takes_fields: bool
) -> None:
    """Raise a MisuseError if the class has arguments whose values are omitted from the checkpoint."""
    takes_all = takes_fields or constructor.takes_any
    omitted = {name: description for name, description in omitted.items() if takes_all or name in constructor.names}
    if omitted:
        example = ", ".join(f"{name}=..." for name in omitted)
        raise MisuseError(
            f"{cls.__name__} was made with {', '.join(omitted.values())}, which {str(path)!r} does not hold, as it is "
            f"no plain value: call {cls.__name__}.load_from_checkpoint(..., {example})"
        )


def _check_accepted(cls: type, constructor: Constructor, overrides: Mapping[str, Any]) -> None:
    wrong = [name for name in overrides if name not in constructor.names and not constructor.takes_any]
    if wrong:
        raise _not_accepted(cls, constructor, wrong)


def _not_accepted(cls: type, constructor: Constructor, wrong: list[str]) -> MisuseError:
    return MisuseError(
        f"load_from_checkpoint got {', '.join(map(repr, wrong))}, and {cls.__name__}.__init__ takes "
        f"{', '.join(constructor.names) or 'no arguments'}: leave it out, or correct the name"
    )


def load_weights(module: nn.Module, state: Mapping[str, Any], path: str | Path | IO[bytes], *, strict: bool) -> None:
    """Load weights into a module.

    Args:
        module: On any device.
        state: Tensors by name.
        path: Of the checkpoint, for messages.
        strict: Whether missing and unexpected weights are an error; otherwise they are logged.

    Raises:
        CheckpointError: The weights do not fit.
    """
    label = f"the weights in {str(path)!r}"
    missing, unexpected = load_by_names(module, state, label=label)
    check_names(module, missing, unexpected, strict=strict, label=label, advice="pass strict=False")

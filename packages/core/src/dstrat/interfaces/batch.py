"""Nested batches: functions applied to every tensor, and transfer to a device."""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from functools import lru_cache
from logging import Logger
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


def apply_to_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return the batch with the function applied to each tensor in it.

    It traverses mappings, lists, tuples, named tuples and dataclasses, also frozen ones and subclasses, and keeps their
    types.  Other objects, and collections in which the function changes nothing, are returned unchanged.
    """
    return _apply(batch, _classify, function, lambda other: other)


def apply_to_columns(batch: Any, is_column: Callable[[Any], bool], function: Callable[[Any], Any]) -> Any:
    """Return the batch with the function applied to each tensor, and to each other value that is a column.

    Args:
        batch: The batch, as for :func:`apply_to_tensors`; itself no column.
        is_column: Whether a collection or object has a value for each sample.
        function: Function of a tensor or column.
    """

    def convert(value: Any) -> Any:
        return function(value) if is_column(value) else apply_to_columns(value, is_column, function)

    kind = _classify(type(batch))  # type: ignore[arg-type]  # a class is hashable
    if kind is _TENSOR:
        return function(batch)
    if kind in (_PLAIN, _OBJECT):
        return batch
    names, values, rebuild = _unpack(batch, kind)
    changed = {name: convert(value) for name, value in zip(names, values, strict=True)}
    # The same object where nothing has changed, as in _apply.
    return (
        batch
        if all(changed[name] is value for name, value in zip(names, values, strict=True))
        else rebuild(batch, changed)
    )


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors in a batch, in the order in which :func:`apply_to_tensors` comes to them."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    apply_to_tensors(batch, note)
    return tensors


def tensors_in_objects(batch: Any) -> list[Tensor]:
    """Return the tensors that objects in a batch hold in their attributes, such as those of ``torch.distributions``.

    :func:`apply_to_tensors` leaves these objects alone.  Modules, classes, functions and loggers hold no tensors of a
    batch.
    """
    from torch.nn import Module

    tensors: list[Tensor] = []
    objects: list[Any] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    def note_object(other: Any) -> Any:
        objects.append(other)
        return other

    _apply(batch, _classify, lambda tensor: tensor, note_object)
    seen: set[int] = set()  # objects may refer to each other
    for other in objects:  # which grow: a chain of objects may be longer than Python's stack
        is_other = isinstance(other, Module | ModuleType | Logger | type) or inspect.isroutine(other)
        if not is_other and id(other) not in seen:
            seen.add(id(other))
            for value in list(getattr(other, "__dict__", {}).values()):
                _apply(value, _classify, note, note_object)
    return tensors


def numbers_to_tensors(batch: Any, device: torch.device) -> Any:
    """Return the batch with each number, and each array of numpy, as a tensor on the device."""
    import torch

    def convert(other: Any) -> Any:
        is_numeric = isinstance(other, _NUMBERS) or type(other).__module__ == "numpy"
        return torch.as_tensor(other, device=device) if is_numeric else other

    return _apply(batch, _classify_numeric, lambda tensor: tensor, convert)


def move_to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Return the batch with each tensor, and each object with a ``to`` for devices, on the device.

    A batch that is on the device already is returned unchanged.  Copies from pinned memory do not wait for the device.

    Args:
        batch: Nested tensors and objects.
        device: The device.
        non_blocking: Whether objects copy without waiting too.  What reads the copies must come after them in a stream
            of the device; on a device without streams they could be read before they are complete.

    Raises:
        MisuseError: An object in the batch holds tensors and cannot be moved.
    """
    return mover_to(device, non_blocking=non_blocking)(batch)


def mover_to(device: torch.device, *, non_blocking: bool = False, pins: bool = False) -> Callable[[Any], Any]:
    """Return a function that moves batches as :func:`move_to_device` does, for many calls.

    On the CPU most batches are plain lists or tuples of tensors that need no move, which a fast path recognizes.

    Args:
        device: The device.
        non_blocking: Whether objects copy without waiting too.
        pins: Whether what is on the host is copied from pinned memory, as by :func:`pin_memory`.
    """
    from torch import Tensor

    def move_tensor(tensor: Tensor) -> Tensor:
        if tensor.device == device:
            return tensor
        if pins:
            tensor = _pin(tensor)
        return tensor.to(device, non_blocking=tensor.is_pinned())

    def move_object(other: Any) -> Any:
        return _move_object(_pin_object(other) if pins else other, device, non_blocking)

    def move(batch: Any) -> Any:
        return _apply(batch, _classify_movable, move_tensor, move_object)

    def look_and_move(batch: Any) -> Any:
        # Exact types: a subclass may have a method ``to`` of its own.
        if type(batch) is list or type(batch) is tuple:
            for value in batch:
                if type(value) is not Tensor or not value.is_cpu:
                    break
            else:
                return batch
        return batch if _is_on_device(batch, device) else move(batch)

    return look_and_move if device.type == "cpu" else move


def pin_memory(batch: Any) -> Any:
    """Return the batch with its CPU tensors in pinned memory.

    Of objects that move themselves, those with a method ``pin_memory`` and mappings are pinned, as torch's DataLoader
    does; from other ones the host waits for each copy.
    """
    return _apply(batch, _classify_movable, _pin, _pin_object)


def _pin(tensor: Tensor) -> Tensor:
    import torch

    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return tensor.pin_memory() if is_plain else tensor


def _pin_object(other: Any) -> Any:
    method = getattr(other, "pin_memory", None)
    if callable(method):
        return method()
    if not isinstance(other, MutableMapping):  # such as the batches of tokenizers
        return other
    keys, values, rebuild = _unpack(other, _MAPPING)
    return rebuild(other, {key: pin_memory(value) for key, value in zip(keys, values, strict=True)})


class _NodeKind(enum.Enum):
    """Kinds of objects in a batch."""

    TENSOR = enum.auto()
    PLAIN = enum.auto()
    SEQUENCE = enum.auto()
    MAPPING = enum.auto()
    DATACLASS = enum.auto()
    OBJECT = enum.auto()


_NUMBERS = (bool, int, float, complex)
# For functions that see each batch: looking a member up in the class of an enum is slow.
_TENSOR, _PLAIN, _OBJECT = _NodeKind.TENSOR, _NodeKind.PLAIN, _NodeKind.OBJECT
_SEQUENCE, _MAPPING = _NodeKind.SEQUENCE, _NodeKind.MAPPING


@lru_cache(maxsize=1024)  # with a limit, as a program may make classes without end, and the cache keeps them alive
def _classify(cls: type) -> _NodeKind:
    """Return the kind of a class's objects."""
    from torch import Tensor

    if issubclass(cls, Tensor):
        return _NodeKind.TENSOR
    if cls in {str, bytes, int, float, complex, bool, type(None)}:
        return _NodeKind.PLAIN
    if issubclass(cls, list | tuple):
        return _NodeKind.SEQUENCE
    if issubclass(cls, Mapping):
        return _NodeKind.MAPPING
    return _NodeKind.DATACLASS if dataclasses.is_dataclass(cls) else _NodeKind.OBJECT


@lru_cache(maxsize=1024)
def _classify_movable(cls: type) -> _NodeKind:
    """Return the kind for moving: a collection with a method ``to`` is an object that moves itself."""
    node_kind = _classify(cls)
    moves_itself = node_kind not in {_NodeKind.TENSOR, _NodeKind.PLAIN} and _to_method(cls) is not None
    return _NodeKind.OBJECT if moves_itself else node_kind


def _classify_numeric(cls: type) -> _NodeKind:
    """Return the kind for conversion: numbers are objects to convert."""
    return _NodeKind.OBJECT if issubclass(cls, _NUMBERS) else _classify(cls)  # type: ignore[arg-type]  # a class is hashable


def _is_on_device(batch: Any, device: torch.device) -> bool:
    """Return whether all tensors of a batch, in plain collections or not, are on the device."""
    kind = _classify_movable(type(batch))  # type: ignore[arg-type]  # a class is hashable
    if kind is _TENSOR:
        return bool(batch.device == device)
    if kind is _SEQUENCE:
        values = batch
    elif kind is _MAPPING:
        values = batch.values()
    else:
        return kind is _PLAIN
    for value in values:  # noqa: SIM110 - a generator expression takes twice as long
        if not _is_on_device(value, device):
            return False
    return True


def _apply(
    batch: Any,
    classify: Callable[[type], _NodeKind],
    to_tensor: Callable[[Tensor], Any],
    to_object: Callable[[Any], Any],
) -> Any:
    """Apply one function to the tensors, and another to objects that are neither tensors nor collections."""
    kind = classify(type(batch))
    if kind is _TENSOR:
        return to_tensor(batch)
    if kind is _PLAIN:
        return batch
    if kind is _OBJECT:
        return to_object(batch)
    names, values, rebuild = _unpack(batch, kind)
    changed = [_apply(value, classify, to_tensor, to_object) for value in values]
    for new, old in zip(changed, values, strict=True):
        if new is not old:
            return rebuild(batch, dict(zip(names, changed, strict=True)))
    return batch  # the same object: a copy would lose attributes, and not all collections can be rebuilt


def _unpack(batch: Any, kind: _NodeKind) -> tuple[Sequence[Any], Sequence[Any], Callable[[Any, dict[Any, Any]], Any]]:
    """Return the keys and values of a collection, and the function that rebuilds it with other values."""
    if kind is _SEQUENCE:
        return range(len(batch)), batch, _rebuild_sequence
    if kind is _MAPPING:
        # Not the keys by iteration: that of a TensorDict gives rows.
        return list(batch.keys()), list(batch.values()), _rebuild_mapping
    names = [field.name for field in dataclasses.fields(batch) if hasattr(batch, field.name)]
    return names, [getattr(batch, name) for name in names], _rebuild_dataclass


def _rebuild_sequence(original: Any, values: dict[int, Any]) -> Any:
    if isinstance(original, list):
        copied = copy.copy(original)  # keeps the attributes of a subclass
        copied[:] = values.values()
        return copied
    return type(original)(*values.values()) if hasattr(original, "_fields") else type(original)(values.values())


def _rebuild_mapping(original: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return values
    if not isinstance(original, MutableMapping):
        try:
            return type(original)(values)  # type: ignore[call-arg]  # by convention
        except TypeError as error:
            raise _cannot_be_moved(original, f"cannot be made from a dict ({error})") from error
    copied = copy.copy(original)  # keeps attributes, and does not call the constructor, whose arguments are unknown
    for key, value in values.items():
        copied[key] = value
    return copied


def _rebuild_dataclass(original: Any, values: dict[str, Any]) -> Any:
    """Return a copy with other fields, without ``__init__``, which could compute or check them again."""
    copied = object.__new__(type(original))
    if hasattr(original, "__dict__"):
        copied.__dict__.update(original.__dict__)
    for name, value in values.items():
        object.__setattr__(copied, name, value)  # also where it is frozen
    return copied


def _move_object(batch: Any, device: torch.device, non_blocking: bool) -> Any:
    """Move an object by its method ``to``; refuse one without it that holds tensors on another device."""
    method = _to_method(type(batch))  # type: ignore[arg-type]  # a class is hashable
    if method is not None:
        options = {"non_blocking": True} if method.takes_non_blocking and non_blocking else {}
        try:
            moved = batch.to(device, **options)
        except (TypeError, ValueError) as error:
            reason = f"cannot be moved by its method to({str(device)!r}) ({error})"
            raise _cannot_be_moved(batch, reason) from error
        return batch if moved is None else moved  # many move in place and return None
    held = {} if isinstance(batch, type) else getattr(batch, "__dict__", {})
    elsewhere = [
        name
        for name, value in held.items()
        if _classify(type(value)) is _TENSOR and value.device != device  # type: ignore[arg-type]  # a class is hashable
    ]
    if elsewhere:
        raise _cannot_be_moved(batch, f"holds tensors ({', '.join(elsewhere)}) and has no method to(device)")
    return batch


def _cannot_be_moved(batch: Any, reason: str) -> MisuseError:
    kind = type(batch)
    return MisuseError(
        f"the batch is or contains a {kind.__module__}.{kind.__qualname__}, which {reason}: "
        "override transfer_batch_to_device(self, batch, device, dataloader_idx) in the module or the data module"
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _ToMethod:
    """The method ``to`` of a class, and whether it takes ``non_blocking``."""

    takes_non_blocking: bool


@lru_cache(maxsize=1024)
def _to_method(cls: type) -> _ToMethod | None:
    method = getattr(cls, "to", None)
    if not callable(method):  # a named tuple's field may have that name too
        return None
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:  # written in C
        return _ToMethod(takes_non_blocking=False)
    takes = any(parameter.name == "non_blocking" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return _ToMethod(takes_non_blocking=takes)

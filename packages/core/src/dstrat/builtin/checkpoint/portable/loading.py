"""Loading: a checkpoint as nested values with whole tensors, or into tensors that are there already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from dstrat.builtin.checkpoint.portable.damage import damaged
from dstrat.builtin.checkpoint.portable.decoding import decode
from dstrat.builtin.checkpoint.portable.dtypes import dtype_name
from dstrat.builtin.checkpoint.portable.filling import empty_tensor, fill
from dstrat.builtin.checkpoint.portable.layout import INDEX, PER_RANK, STATE, rank_file
from dstrat.builtin.checkpoint.portable.marks import insert, joined, split, without_tensors
from dstrat.builtin.checkpoint.portable.parts import local_parts
from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import OptionalTensors
from dstrat.interfaces.flat_shard import FlatShard

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping

    from dstrat.builtin.checkpoint.portable.index import TensorEntry
    from dstrat.builtin.checkpoint.portable.opened_folder import OpenedFolder

_OWN = joined(PER_RANK, "")


def load(
    folder: OpenedFolder, *, rank: int, world_size: int, advance: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Return the whole checkpoint, its tensors on the CPU, and this rank's own values if the world is as large.

    Raises:
        CheckpointError: It is damaged.
    """
    index = folder.index()
    tensors = read_tensors(folder, _of_the_job(index), advance)
    checkpoint = _decoded(folder, STATE, tensors)
    return _with_own(checkpoint, folder, index, rank=rank, world_size=world_size)


def load_into(folder: OpenedFolder, template: Mapping[str, Any], *, rank: int, world_size: int) -> dict[str, Any]:
    """Fill the tensors of a template, each process what it holds, and return the checkpoint with them in it.

    Args:
        folder: The checkpoint.
        template: Nested dicts and lists with tensors at the places where the checkpoint has them; of any placements.
            Tensors of the checkpoint that it does not have are returned whole; below a place where it has None none
            is read, and the result has none.
        rank: Of this process.
        world_size: Of this job.

    Raises:
        CheckpointError: It is damaged, lacks a tensor of the template, or has it in another shape or dtype.
    """
    index = folder.index()
    targets, optional, skipped = _targets(template)
    targets = {name: tensor for name, tensor in targets.items() if name in index or name not in optional}
    check_fits(folder, index, targets, converted=optional)
    fill(folder, [(_stored(index, name), local_parts(tensor, name)) for name, tensor in targets.items()])
    rest = [name for name in _of_the_job(index) if name not in targets and not name.startswith(skipped)]
    tensors = {**read_tensors(folder, rest), **targets}
    checkpoint = _decoded(folder, STATE, tensors, skips=bool(skipped))
    return _with_own(checkpoint, folder, index, rank=rank, world_size=world_size)


def _of_the_job(index: Mapping[str, TensorEntry]) -> list[str]:
    return [name for name in index if not name.startswith(_OWN)]


def _targets(template: Mapping[str, Any]) -> tuple[dict[str, Any], set[str], tuple[str, ...]]:
    """Return the tensors of a template by name, which are optional, and what the names begin with that are unwanted."""
    targets: dict[str, Any] = {}
    optional: set[str] = set()
    skipped = []
    places: list[tuple[str, Any, bool]] = [("", template, False)]
    while places:
        path, value, is_optional = places.pop()
        is_optional = is_optional or isinstance(value, OptionalTensors)
        if isinstance(value, (Tensor, FlatShard)):
            targets[path] = value
            if is_optional:
                optional.add(path)
        elif value is None:
            skipped.append(joined(path, ""))
        elif isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            places += [(joined(path, key), item, is_optional) for key, item in items]
    return targets, optional, tuple(skipped)


def check_fits(
    folder: OpenedFolder,
    index: Mapping[str, TensorEntry],
    targets: Mapping[str, Any],
    *,
    converted: Container[str] = (),
) -> None:
    """Raise :class:`CheckpointError` where tensors are missing from the checkpoint, or are of another kind in it.

    Args:
        folder: The checkpoint.
        index: Its tensors.
        targets: Where they are wanted.
        converted: Names of targets that may have another dtype.
    """
    missing = sorted(name for name in targets if name not in index)
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(f"checkpoint {str(folder.path)!r} has no tensor {', '.join(missing[:5])}{more}")
    for name, tensor in targets.items():
        entry = index[name]
        fits = name in converted or entry.dtype == dtype_name(tensor.dtype)
        if not fits or entry.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"tensor {name!r} is {entry.dtype} of shape {entry.shape} in checkpoint {str(folder.path)!r}, and "
                f"{dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)} here"
            )


def load_own(folder: OpenedFolder, rank: int) -> Any:
    """Return what one rank of the job that saved had under ``"per_rank"``.

    Raises:
        CheckpointError: It is damaged, or was saved by fewer ranks.
    """
    if not 0 <= rank < folder.manifest.world_size:
        raise CheckpointError(
            f"checkpoint {str(folder.path)!r} was saved by {folder.manifest.world_size} ranks: it has no rank {rank}"
        )
    return _own(folder, folder.index(), rank)


def _with_own(
    checkpoint: dict[str, Any], folder: OpenedFolder, index: Mapping[str, TensorEntry], *, rank: int, world_size: int
) -> dict[str, Any]:
    if world_size == folder.manifest.world_size:
        checkpoint[PER_RANK] = _own(folder, index, rank)
    return checkpoint


def _own(folder: OpenedFolder, index: Mapping[str, TensorEntry], rank: int) -> Any:
    prefix = joined(joined(PER_RANK, rank), "")
    tensors = read_tensors(folder, [name for name in index if name.startswith(prefix)])
    return _decoded(folder, rank_file(rank, "json"), tensors, below=prefix)


def read_tensors(
    folder: OpenedFolder, names: Iterable[str], advance: Callable[[int], None] | None = None
) -> dict[str, Tensor]:
    """Return whole tensors by name; those that share their memory are one.

    Args:
        folder: The checkpoint.
        names: Of tensors that it has.
        advance: Is told how many bytes more were read, in any thread.

    Raises:
        CheckpointError: It is damaged.
    """
    index, names = folder.index(), list(names)
    stored: dict[str, Tensor] = {}
    for name in names:
        first = index[name].same_as or name
        if first not in stored:
            stored[first] = _memory(folder, first, index[first])
    fill(folder, [(index[name], local_parts(tensor)) for name, tensor in stored.items()], advance)
    return {name: stored[index[name].same_as or name] for name in names}


def _memory(folder: OpenedFolder, name: str, entry: TensorEntry) -> Tensor:
    try:
        return empty_tensor(entry)
    except (RuntimeError, ValueError) as error:
        raise damaged(folder.path, f"{INDEX}: tensor {name[:200]!r}: {str(error).splitlines()[0]}") from error


def _stored(index: Mapping[str, TensorEntry], name: str) -> TensorEntry:
    return index[index[name].same_as or name]


def _decoded(
    folder: OpenedFolder, name: str, tensors: Mapping[str, Tensor], *, below: str = "", skips: bool = False
) -> Any:
    """Return the values of a JSON file.

    Args:
        folder: The checkpoint.
        name: Of the file.
        tensors: What they refer to.  Those that they do not refer to (other ranks have them) are put where their
            names say.
        below: What the names of the tensors begin with.
        skips: Whether the file may refer to more tensors, which are then left out.
    """
    value = folder.document(name)
    used = set()

    def tensor(name: str) -> Tensor:
        if name not in tensors:
            raise ValueError(f"there is no tensor {name[:200]!r}")
        used.add(name)
        return tensors[name]

    try:
        decoded = decode(without_tensors(value, keep=tensors) if skips else value, tensor)
        if not isinstance(decoded, dict):
            raise ValueError(f"its values are a {type(decoded).__name__} and no dict")  # noqa: TRY004, TRY301 - about the file, as decode's
        for unused in tensors.keys() - used:
            insert(decoded, split(unused.removeprefix(below)), tensors[unused])
    except (ValueError, RecursionError) as error:
        raise damaged(folder.path, f"{name}: {error}") from error
    return decoded

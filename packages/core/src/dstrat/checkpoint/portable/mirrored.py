"""Checkpoints in the memory of several machines: each has the files of its ranks, and copies of another machine's."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from dstrat.checkpoint.paths import as_path
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.portable.format import BLOCK, INDEX, MANIFEST, STATE, dump_json, parse_json
from dstrat.checkpoint.portable.machines import Machines, Transfer, transfer_files
from dstrat.checkpoint.portable.memory_files import (
    ended_in_memory,
    is_attempt,
    make_memory_root,
    memory_root,
)
from dstrat.checkpoint.portable.newest import step_of
from dstrat.checkpoint.portable.reader import CheckpointReader, read_manifest
from dstrat.checkpoint.portable.save import complete, write_rank_files
from dstrat.checkpoint.portable.storage import storage_of
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dstrat.checkpoint.portable.save import Prepared
    from dstrat.checkpoint.portable.storage import Unfinished

_FETCHED = ".part"
"""Suffix of a file of which only what this machine reads is here."""
_DOCUMENT = ".json"
_KINDS = (_DOCUMENT, ".safetensors")


# Saving


def write_mirrored(prepared: Prepared, target: Path, machines: Machines) -> None:
    """Write the files of every rank to its machine and to the next one, then give the checkpoint its path; collective.

    A machine or rank that is lost meanwhile leaves the checkpoint before it.

    Raises:
        CheckpointError: A rank failed; then all ranks raise, and unfinished folders are removed.
    """
    ranks, storage = machines.ranks, storage_of(target)
    folder: Unfinished | None = None
    try:
        with ranks.on_all_ranks(f"create checkpoint {str(target)!r}"):
            folder = storage.begin_checkpoint(target) if machines.is_leader else None
        names = ranks.exchange(b"" if folder is None else folder.path.name.encode())
        path = target.parent / names[machines.member(machines.current, 0)].decode()
        with ranks.on_all_ranks(f"write checkpoint {str(target)!r}"):
            report = write_rank_files(prepared, path, ranks.rank, storage)
        sizes = {name: size for name, (size, _) in report["files"].items()}
        transfer_files(ranks, _mirroring(machines, sizes), read_from=path, write_to=lambda name: path / name)
        reports = ranks.gather(dump_json(report))
        manifest = index = b""
        with ranks.on_all_ranks(f"complete checkpoint {str(target)!r}"):
            if ranks.rank == 0:
                manifest = complete(prepared, path, [report, *map(parse_json, reports[1:])], storage)
                index = (path / INDEX).read_bytes()
        documents = {STATE: ranks.broadcast(prepared.state), INDEX: ranks.broadcast(index)}
        manifest = ranks.broadcast(manifest)
        with ranks.on_all_ranks(f"complete checkpoint {str(target)!r}"):
            if folder is not None and ranks.rank != 0:
                for name, data in documents.items():
                    storage.write_file(path / name, data)
        # Only when all machines have all files; a rank returns when all machines have committed.
        with ranks.on_all_ranks(f"commit checkpoint {str(target)!r}"):
            if folder is not None:
                folder.commit(manifest)
    finally:
        if folder is not None:
            folder.close()


def _mirroring(machines: Machines, sizes: dict[str, int]) -> list[Transfer]:
    """Return the transfers of each rank's files to the next machine; collective."""
    return [
        Transfer(source=rank, target=machines.next_in_ring(rank), name=name, size=size, begin=0, end=size)
        for rank, message in enumerate(machines.ranks.exchange(dump_json(sizes)))
        for name, size in parse_json(message).items()
    ]


# Searching


@dataclass(frozen=True, kw_only=True, slots=True)
class MirroredCheckpoint:
    """A checkpoint of which all files are in the memory of some machine.

    Attributes:
        name: Its path below the root of each machine.
        step: Number of optimizer steps before it was saved.
        created_ns: Time of its completion, in nanoseconds since the epoch.
    """

    name: str
    step: int
    created_ns: int

    @property
    def path(self) -> Path:
        """Its path on this machine, which may have none of its files."""
        return memory_root() / self.name


def search_memories(machines: Machines, folders: Sequence[str], job_id: str | None) -> list[MirroredCheckpoint]:
    """Return the checkpoints that the machines of a job have together; collective.

    If earlier attempts of the job have some, they are the only ones, on whatever machine they are.

    Args:
        machines: Of the job.
        folders: The folders of checkpoints to which those in memory belong, the same on all ranks.
        job_id: Of the job; None if it is not known.
    """
    # Of all jobs: a machine that has none of this job's does not know whether another one has.
    jobs = ended_in_memory(map(as_path, folders))
    listed = [_description(path) for job in jobs for path in sorted(job.glob("*.ckpt"))]
    present: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    num_files: dict[tuple[str, int, int], int] = {}
    for message in machines.ranks.exchange(dump_json([each for each in listed if each is not None])):
        for name, step, created_ns, count, files in parse_json(message):
            present[name, step, created_ns].update(files)
            num_files[name, step, created_ns] = count
    complete_ones = [
        MirroredCheckpoint(name=name, step=step, created_ns=created_ns)
        for (name, step, created_ns), files in present.items()
        if len(files) == num_files[name, step, created_ns]
    ]
    return [each for each in complete_ones if is_attempt(each.path.parent, job_id)] or complete_ones


def _description(path: Path) -> list[object] | None:
    """Return the name, step, time, number of files, and names of files that are here; None if it is not complete."""
    try:
        sizes, manifest, step = storage_of(path).file_sizes(path), read_manifest(path), step_of(path)
    except (CheckpointError, FileNotFoundError):
        return None
    files = [name for name, record in manifest.files.items() if sizes.get(name) == record.size]
    name = str(path.relative_to(memory_root()))
    return None if step is None else [name, step, manifest.created_ns, len(manifest.files), files]


# Loading


class MirroredCheckpointIO(PortableCheckpointIO):
    """Checkpoint io that reads a checkpoint from the memory of all machines; each of its methods is collective.

    A machine gets the plain values, and of the other files those blocks that its ranks read and that it has not.

    Args:
        machines: Of the job.
        verify: Whether checksums are verified.
    """

    def __init__(self, machines: Machines, *, verify: bool = True) -> None:
        super().__init__(verify=verify)
        self._all_machines = machines

    @override
    def _open(self, path: str | Path) -> CheckpointReader:
        folder = Path(path)
        files = _AllFiles(folder, self._all_machines)
        files.fetch_documents()
        return MirroredReader(folder, files, verifies=self.verify)


class _AllFiles:
    """The files of a checkpoint in the memory of all machines; collective.

    Args:
        folder: The checkpoint.
        machines: Of the job.

    Attributes:
        present: Names of those in this machine's memory.
    """

    def __init__(self, folder: Path, machines: Machines) -> None:
        self._folder, self._ranks, self._machines = folder, machines.ranks, machines
        sizes = storage_of(folder).file_sizes(folder) if folder.is_dir() else {}
        self.present = {name for name in sizes if name.endswith(_KINDS)}
        self._sizes: dict[str, int] = {}
        self._holders: dict[str, list[int]] = {}
        # One rank of each machine: the others have the same folder.
        listed = {name: sizes[name] for name in self.present} if machines.is_leader else {}
        for rank, message in enumerate(self._ranks.exchange(dump_json(listed))):
            for name, size in sorted(parse_json(message).items()):
                self._holders.setdefault(name, []).append(machines.of_ranks[rank])
                self._sizes[name] = size

    def fetch_documents(self) -> None:
        """Receive the JSON files that this machine has not; collective."""
        names = [name for name in self._sizes if name.endswith(_DOCUMENT)]
        every = range(self._machines.count)
        requests = [(machine, name, 0, self._sizes[name]) for name in names for machine in every]
        missing = [name for name in names if name not in self.present]
        if missing:
            make_memory_root()  # private, before folders below it
            self._folder.mkdir(parents=True, exist_ok=True)
        self._fetch([request for request in requests if request[0] not in self._holders[request[1]]])
        with self._ranks.on_all_ranks("read a checkpoint in the memory of other machines"):
            if self._machines.is_leader:
                # The manifest is last: without it, the folder is not a checkpoint after a crash.
                for name in sorted(missing, key=lambda name: name == MANIFEST):
                    self.path_of(name).rename(self._folder / name)
        self.present.update(missing)

    def fetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Receive the blocks with some ranges of files that this machine has not; collective."""
        missing: dict[str, set[int]] = {}
        for name, begin, end in ranges:
            if name not in self.present and begin < end:
                missing.setdefault(name, set()).update(range(begin // BLOCK, -(-end // BLOCK)))
        runs = [[name, first, last] for name, blocks in sorted(missing.items()) for first, last in _runs(blocks)]
        wanted: dict[tuple[int, str], set[int]] = {}
        for rank, message in enumerate(self._ranks.exchange(dump_json(runs))):
            for name, first, last in parse_json(message):
                blocks = wanted.setdefault((self._machines.of_ranks[rank], name), set())
                blocks.update(range(first, last))
        self._fetch(
            [
                (machine, name, first * BLOCK, min(last * BLOCK, self._sizes[name]))
                for (machine, name), blocks in sorted(wanted.items())
                for first, last in _runs(blocks)
            ]
        )
        self._ranks.any_rank(value=False)  # the ranks of a machine read what one of them has received

    def path_of(self, name: str) -> Path:
        """Return the path that this machine reads a file from."""
        return self._folder / (name if name in self.present else f"{name}{_FETCHED}")

    def _fetch(self, requests: Sequence[tuple[int, str, int, int]]) -> None:
        """Send bytes of files to machines; each request is a machine, a file, the first byte and the one after."""
        positions = {name: position for position, name in enumerate(self._sizes)}
        member = self._machines.member
        transfers = [
            Transfer(
                source=member(self._holders[name][0], positions[name]),
                target=member(machine, positions[name]),
                name=name,
                size=self._sizes[name],
                begin=begin,
                end=end,
            )
            for machine, name, begin, end in requests
        ]
        if transfers:
            transfer_files(self._ranks, transfers, read_from=self._folder, write_to=self.path_of)


class MirroredReader(CheckpointReader):
    """A checkpoint in the memory of several machines; what is read is fetched first, collectively.

    Args:
        path: The folder, with at least the JSON files.
        files: The files of all machines.
        verifies: Whether checksums are verified.
    """

    def __init__(self, path: Path, files: _AllFiles, *, verifies: bool) -> None:
        super().__init__(path, verifies=verifies)
        self._all_files = files

    @override
    def fetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        self._all_files.fetch(ranges)

    @override
    def path_of(self, name: str) -> Path:
        return self._all_files.path_of(name)


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number and the one after the last of each run of consecutive numbers."""
    ordered = sorted(blocks)
    first = 0
    for number in range(1, len(ordered) + 1):
        if number == len(ordered) or ordered[number] != ordered[number - 1] + 1:
            yield ordered[first], ordered[number - 1] + 1
            first = number

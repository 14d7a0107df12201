"""Files of checkpoints on a disk and in a store: one protocol for both."""

import time

import pytest

from dstrat.checkpoint.paths import as_path
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.portable.newest import is_zip
from dstrat.checkpoint.portable.storage import storage_of
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.errors import CheckpointError


@pytest.fixture(params=["disk", "store"])
def folder(request, tmp_path):
    path = as_path(tmp_path if request.param == "disk" else f"memory://{tmp_path.name}")
    storage_of(path).write_file(path / "first", b"PK\x03\x04 first")
    return path


def test_files_are_written_and_read(folder):
    storage = storage_of(folder)
    storage.replace_file(folder / "first", b"again")
    with storage.atomic_write(folder / "second") as path:
        path.write_bytes(b"whole")
    bucket = memoryview(b"in buckets")
    assert len(storage.write_buckets(folder / "third", 10, lambda begin: [bucket[begin:]])) == 1
    assert storage.file_sizes(folder) == {"first": 5, "second": 5, "third": 10}
    assert storage.file_size(folder / "third") == 10
    assert [storage.read_start(folder / name, 3) for name in ("first", "second", "third")] == [b"aga", b"who", b"in "]
    assert abs(storage.modified_ns(folder / "third") - time.time_ns()) < 600 * 10**9
    assert storage.is_occupied(folder / "third")
    assert not storage.is_occupied(folder / "fourth")


def test_files_are_worked_on_on_this_machine(folder):
    storage = storage_of(folder)
    with storage.write_local(folder / "file") as path:
        path.write_bytes(b"local")
    with storage.read_local(folder / "file") as path:
        assert path.read_bytes() == b"local"
    with pytest.raises(CheckpointError, match="missing' does not exist"), storage.read_local(folder / "missing"):
        pass


def test_zip_archives_are_recognized(folder):
    storage_of(folder).write_file(folder / "plain", b"none")
    assert [is_zip(folder / name) for name in ("first", "plain", "missing")] == [True, False, False]


@pytest.mark.parametrize("io", [PortableCheckpointIO(), TorchCheckpointIO()], ids=["portable", "torch"])
def test_a_path_that_the_system_refuses_is_a_checkpoint_error(tmp_path, io):
    with pytest.raises(CheckpointError, match="xxx' cannot be read: file name too long"):
        io.load_checkpoint(tmp_path / ("x" * 300))

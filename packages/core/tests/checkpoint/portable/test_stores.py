"""Checkpoints in stores that have neither renames nor locks."""

import os
import time

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from tests.accelerators import make_mesh, process_group
from torch.distributed.tensor import Shard, distribute_tensor

from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.checkpoint.async_io import AsyncCheckpointIO
from dstrat.checkpoint.paths import RemotePath, as_path
from dstrat.checkpoint.portable import remote_files
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.portable.newest import newest_checkpoint
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.errors import CheckpointError, MissingRequirementError, RequestError
from dstrat.launch.local import LocalLauncher
from dstrat.training.callbacks.checkpoint_name import UnusedPaths

MIB = 1024 * 1024
DAY = 24 * 3600 * 10**9


@pytest.fixture(params=["memory", "s3"])
def folder(request):
    store = "memory://checkpoints" if request.param == "memory" else request.getfixturevalue("s3")
    return as_path(request.getfixturevalue("new_folder")(store))


def large():
    return torch.arange(9 * MIB, dtype=torch.int64).to(torch.int8)  # more than one bucket


def content(seed=0, **more):
    return {
        "epoch": seed,
        "saved_with": "ddp",
        "state_dict": {"small": torch.ones(3), **more},
        "per_rank": {"seed": seed},
    }


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write_unfinished(target):
    """Leave what a writer leaves that is killed before the manifest is there."""
    writer = remote_files.UnfinishedUpload(target)
    (writer.path / "rank-00000.json").write_bytes(b"{}")


def test_what_is_saved_comes_back(io, folder):
    io.save_checkpoint(content(large=large()), str(folder / "a"))
    loaded = io.load_checkpoint(str(folder / "a"))
    assert torch.equal(loaded["state_dict"]["large"], large())
    assert (loaded["epoch"], loaded["per_rank"]) == (0, {"seed": 0})
    assert names(folder) == ["a", "last"]
    template = {"state_dict": {"large": torch.zeros(9 * MIB, dtype=torch.int8), "small": torch.zeros(3)}}
    io.load_into(str(folder / "last"), template)
    assert torch.equal(template["state_dict"]["large"], large())


def test_what_is_not_asked_for_is_not_read(io, folder, monkeypatch):
    io.save_checkpoint(content(), str(folder / "a"))
    read = []
    whole = RemotePath.read_bytes
    monkeypatch.setattr(RemotePath, "read_bytes", lambda *args: read.append(args) or whole(*args))
    io.load_into(str(folder / "a"), {"state_dict": None})
    assert read
    assert not any(path.suffix == ".safetensors" for path, *_ in read)


def test_no_checkpoint_is_written_over(io, folder, refusal):
    io.save_checkpoint(content(), str(folder / "a"))
    assert "exists already, and none is ever written over" in refusal(io.save_checkpoint, content(1), str(folder / "a"))
    assert io.load_checkpoint(str(folder / "a"))["epoch"] == 0


def test_two_writers_do_not_mix_their_files(folder, refusal):
    first = remote_files.UnfinishedUpload(folder / "a")
    message = refusal(remote_files.UnfinishedUpload, folder / "a")
    assert message.endswith("is being written, or was left by a crash less than a day ago: choose another path, or remove it first")  # fmt: skip # noqa: E501
    (folder / "a" / "manifest.json").write_bytes(b"faster")
    assert "exists already" in refusal(first.commit, b"{}")
    first.close()
    assert (folder / "a" / "manifest.json").read_bytes() == b"faster"
    assert names(folder) == ["a"]


def test_of_two_jobs_that_choose_a_name_the_second_takes_the_next_one(io, folder):
    first, second = UnusedPaths(), UnusedPaths()
    paths = [unused.choose(folder, "step=1") for unused in (first, second)]
    assert [path.rpartition("/")[2] for path in paths] == ["step=1.ckpt", "step=1-v1.ckpt"]
    for number, path in enumerate(paths):
        io.save_checkpoint(content(number), path)
    first.release()
    second.release()
    assert names(folder) == ["last", "step=1-v1.ckpt", "step=1.ckpt"]
    assert [io.load_checkpoint(path)["epoch"] for path in paths] == [0, 1]


def test_a_name_is_reserved_once_and_only_its_owner_releases_it(io, folder):
    owner, other = remote_files.UploadClaim(folder / "a"), remote_files.UploadClaim(folder / "a")
    assert owner.take()
    assert not other.take()
    writer = remote_files.UnfinishedUpload(folder / "a")  # the save of the owner, whose file the claim is now
    owner.release()
    assert names(folder) == [".dstrat-a.writing"]
    writer.close()
    io.save_checkpoint(content(), str(folder / "a"))
    assert not other.take()  # finished between a look and the claim
    assert names(folder) == ["a", "last"]


def test_a_name_that_another_process_has_reserved_is_not_written_to(folder, refusal):
    (folder / ".dstrat-a.writing").write_bytes(b"another process's mark")
    assert "is being written" in refusal(remote_files.UnfinishedUpload, folder / "a")
    remote_files.UploadClaim(folder / "a").release()
    assert names(folder) == [".dstrat-a.writing"]


def test_a_writer_that_comes_when_another_one_ends_does_not_touch_its_checkpoint(io, folder, refusal, monkeypatch):
    create = RemotePath.create

    def create_late(path, data):
        monkeypatch.setattr(RemotePath, "create", create)
        PortableCheckpointIO().save_checkpoint(content(), str(folder / "a"))
        path.create(data)

    monkeypatch.setattr(RemotePath, "create", create_late)
    assert "exists already" in refusal(io.save_checkpoint, content(1), str(folder / "a"))
    assert names(folder) == ["a", "last"]
    assert io.load_checkpoint(str(folder / "a"))["epoch"] == 0


def test_without_its_manifest_a_checkpoint_is_none(io, folder, refusal):
    io.save_checkpoint(content(), str(folder / "a"))
    write_unfinished(folder / "b")
    assert newest_checkpoint(folder) == folder / "a"
    assert "that was never completed" in refusal(io.load_checkpoint, str(folder / "b"))
    assert io.load_checkpoint(str(folder / "last"))["epoch"] == 0


def test_what_a_crash_left_is_removed_a_day_later_and_what_is_being_written_is_not(io, folder, monkeypatch):
    write_unfinished(folder / "dead")
    io.save_checkpoint({}, str(folder / "a"))
    assert names(folder) == [".dstrat-dead.writing", "a", "dead", "last"]
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + DAY + 10**9)
    io.save_checkpoint({}, str(folder / "b"))
    assert names(folder) == ["a", "b", "last"]


def test_a_save_that_fails_leaves_nothing(io, folder, refusal, monkeypatch):
    def break_(*_):
        raise OSError("the line was cut")

    with monkeypatch.context() as patch:
        patch.setattr("dstrat.checkpoint.portable.remote_files.UploadedFile.write", break_)
        assert "could not write checkpoint" in refusal(io.save_checkpoint, content(), str(folder / "a"))
    assert names(folder) == []
    io.save_checkpoint(content(), str(folder / "a"))


def test_any_byte_that_changes_is_found(io, folder, refusal):
    io.save_checkpoint(content(), str(folder / "a"))
    for name in names(folder / "a"):
        file = folder / "a" / name
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
        assert name in refusal(io.load_checkpoint, str(folder / "a"))
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
    io.load_checkpoint(str(folder / "a"))
    (folder / "a" / "rank-00000.json").unlink()
    assert "rank-00000.json: no such file" in refusal(io.load_checkpoint, str(folder / "a"))


def test_the_pointer_follows_what_is_removed(io, folder):
    for seed, name in enumerate("abc"):
        io.save_checkpoint(content(seed), str(folder / name))
    io.remove_checkpoint(str(folder / "c"))
    assert names(folder) == ["a", "b", "last"]
    assert io.load_checkpoint(str(folder / "last"))["epoch"] == 1
    (folder / "last").unlink()
    assert io.load_checkpoint(str(folder / "last"))["epoch"] == 1


def test_a_removal_that_is_cut_short_leaves_no_checkpoint(io, folder, monkeypatch, refusal):
    io.save_checkpoint(content(), str(folder / "a"))

    def break_(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(RemotePath, "remove_below", break_)
    with pytest.raises(KeyboardInterrupt):
        io.remove_checkpoint(str(folder / "a"))
    assert newest_checkpoint(folder) is None
    assert "was never completed" in refusal(io.load_checkpoint, str(folder / "a"))


def test_it_is_written_in_the_background(folder):
    io = AsyncCheckpointIO(PortableCheckpointIO())
    io.save_checkpoint(content(large=large()), str(folder / "a"))
    io.wait()
    assert io.load_checkpoint(str(folder / "a"))["epoch"] == 0
    io.teardown()


def test_single_files_are_there_too(folder, refusal):
    io = TorchCheckpointIO()
    io.save_checkpoint({"weight": torch.ones(3)}, str(folder / "a.ckpt"))
    assert torch.equal(io.load_checkpoint(str(folder / "a.ckpt"))["weight"], torch.ones(3))
    io.remove_checkpoint(str(folder / "a.ckpt"))
    assert refusal(io.load_checkpoint, str(folder / "a.ckpt")).endswith("does not exist: check the path")
    (folder / "b.ckpt").write_bytes(b"no checkpoint")
    assert refusal(io.load_checkpoint, str(folder / "b.ckpt")).startswith(f"checkpoint '{folder}/b.ckpt' is damaged")
    message = refusal(io.save_checkpoint, {"hook": print}, str(folder / "c.ckpt"))
    assert message.startswith(f"checkpoint '{folder}/c.ckpt' is not written, because it could not be read back")


def sharded(folder):
    with process_group(LocalEnvironment(os.environ)):
        size = dist.get_world_size()
        tensor = distribute_tensor(torch.arange(4 * MIB), make_mesh((size,)), [Shard(0)])
        io = PortableCheckpointIO()
        io.save_checkpoint({"weight": tensor, "per_rank": {"rank": dist.get_rank()}}, folder)
        template = torch.zeros_like(tensor)
        io.load_into(folder, {"weight": template})
        assert torch.equal(template.to_local(), tensor.to_local())
        try:
            io.save_checkpoint({}, folder)
        except CheckpointError as error:
            return str(error)


def test_ranks_write_to_one_store_together(io, s3, new_folder):
    path = f"{new_folder(s3)}/a"
    fsspec.filesystem("s3").exists(path)  # so that a forked process inherits a connection that is open
    message = LocalLauncher(num_processes=2, start_method="fork").launch(sharded, path)
    assert message.startswith("rank 0 could not create checkpoint")
    assert names(as_path(path)) == [
        "manifest.json", "rank-00000.json", "rank-00000.safetensors",
        "rank-00001.json", "rank-00001.safetensors", "state.json", "tensors.json",
    ]  # fmt: skip
    assert torch.equal(io.load_checkpoint(path)["weight"], torch.arange(4 * MIB))
    assert io.load_rank(path, 1) == {"rank": 1}


def test_a_store_that_cannot_be_reached_is_named(io, s3, refusal):
    message = refusal(io.save_checkpoint, {}, "s3://no-such-bucket/a")
    assert "s3://no-such-bucket" in message
    assert "bucket does not exist" in message


def test_what_reaches_a_store_has_to_be_installed(io):
    with pytest.raises(MissingRequirementError, match=r"^.gs://b/a. needs gcsfs, which is not installed: pip install "):
        io.save_checkpoint({}, "gs://b/a")


def test_a_protocol_that_nobody_knows_is_refused(io):
    with pytest.raises(RequestError, match=r"'s4://b/a' begins with a protocol that fsspec does not know"):
        io.load_checkpoint("s4://b/a")


@pytest.mark.parametrize(
    ("folder", "below"),
    [
        ("memory://", "memory://x"),
        ("hdfs:///", "hdfs:///x"),
        ("memory://a", "memory://a/x"),
        ("s3://a/b//", "s3://a/b/x"),
    ],
)
def test_what_is_below_a_folder_has_it_as_parent_also_at_the_root(folder, below):
    path = RemotePath(folder) / "x"
    assert (str(path), path.name) == (below, "x")
    assert path.parent == RemotePath(folder)
    assert path.parent / "y" == RemotePath(f"{below[:-1]}y")
    assert RemotePath("memory://").parent == RemotePath("memory://")


def test_the_root_of_a_store_has_checkpoints_too(io, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    for seed, name in enumerate("ab"):
        io.save_checkpoint(content(seed), f"memory://{name}")
    root = as_path("memory://")
    assert names(root) == ["a", "b", "last"]
    assert newest_checkpoint(root) == root / "b"
    io.remove_checkpoint(str(root / "b"))
    assert io.load_checkpoint("memory://last")["epoch"] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_url_of_a_file_is_a_path(tmp_path):
    assert as_path(f"file://{tmp_path}/a") == tmp_path / "a"
    assert as_path("s3 is a name") == as_path(as_path("s3 is a name"))

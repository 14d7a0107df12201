"""Processes that are killed while they save, disks that are full, and leftovers."""

import errno
import multiprocessing
import os
import random
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.warm_program import WarmProgram

from dstrat.checkpoint.formats import recover_checkpoint
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.portable.local_files import Claim, UnfinishedFolder, remove_stale
from dstrat.checkpoint.portable.newest import newest_checkpoint

NUMBERS = 400_000
MOMENTS = 50

INTO_A_FULL_DISK = """
import resource, sys, torch
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.errors import CheckpointError
weight = torch.ones(3_000_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))
try:
    PortableCheckpointIO().save_checkpoint({"weight": weight}, sys.argv[1])
except CheckpointError as error:
    print(error)
print(bool((weight == 1).all()))
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def save_on_and_on(folder, first):
    io = PortableCheckpointIO()
    for step in range(first, first + 1000):
        io.save_checkpoint({"step": step, "weight": torch.full((NUMBERS,), float(step))}, folder / f"step={step}")


@pytest.fixture(scope="module")
def processes():
    """Processes that need not import torch again."""
    return multiprocessing.get_context("forkserver")


def kill_while_it_saves(processes, folder, first, delay):
    """Start saving, and kill it some time after the first checkpoint is there."""
    process = processes.Process(target=save_on_and_on, args=(folder, first))
    process.start()
    deadline = time.monotonic() + 300
    while not (folder / f"step={first}").exists() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay)
    assert process.is_alive()
    process.kill()
    process.join()


@pytest.mark.slow
def test_whenever_it_is_killed_the_newest_checkpoint_is_whole(processes, tmp_path, io):
    generator = random.Random(4)
    step, were_interrupted = 0, 0  # a kill between two saves does not count
    while were_interrupted < MOMENTS:
        kill_while_it_saves(processes, tmp_path, step, generator.uniform(0, 0.04))
        were_interrupted += any(path.name.startswith(".") for path in tmp_path.iterdir())
        steps = sorted(int(path.name[5:]) for path in tmp_path.glob("step=*"))
        assert steps[-1] >= step
        for step in steps:
            loaded = io.load_checkpoint(tmp_path / f"step={step}")
            assert loaded["step"] == step
            assert torch.equal(loaded["weight"], torch.full((NUMBERS,), float(step)))
        assert newest_checkpoint(tmp_path) == tmp_path / f"step={step}"
        assert io.load_checkpoint(tmp_path / "last")["step"] in (step, step - 1)
        for old in steps:
            io.remove_checkpoint(tmp_path / f"step={old}")
        step += 1
    io.save_checkpoint({}, tmp_path / "final")
    assert names(tmp_path) == ["final", "last"]


def test_leftovers_of_a_crash_are_removed_and_those_of_a_writer_are_not(tmp_path):
    live = UnfinishedFolder(tmp_path / "live")
    dead = UnfinishedFolder(tmp_path / "dead")
    (dead.path / "state.json").write_text("{}")
    os.close(dead._lock)  # as the system does when a process ends
    (tmp_path / "mine.tmp").mkdir()
    (tmp_path / ".dstrat-file.tmp").write_text("no folder")
    assert remove_stale(tmp_path) == [dead.path]
    assert live.path.exists()
    assert remove_stale(tmp_path) == []
    live.close()
    assert names(tmp_path) == [".dstrat-file.tmp", "mine.tmp"]


def test_a_path_that_was_taken_meanwhile_is_not_written_over(tmp_path, refusal):
    folder = UnfinishedFolder(tmp_path / "c")
    (tmp_path / "c").mkdir()
    assert "exists already, and none is ever written over" in refusal(folder.commit, b"{}")
    folder.close()
    assert names(tmp_path) == ["c"]


def test_a_link_that_looks_like_a_leftover_is_not_followed(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / ".dstrat-0123.tmp").symlink_to(tmp_path / "precious")
    assert remove_stale(tmp_path) == []
    assert (tmp_path / "precious").exists()


def test_a_claim_neither_follows_a_link_nor_blocks_on_a_pipe(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    for name, plant in (
        ("a", lambda path: path.symlink_to(tmp_path / "elsewhere")),
        ("b", os.mkfifo),
        ("c", lambda path: path.symlink_to(path)),
    ):
        claim = Claim(folder / name)
        plant(claim._file)
        taker = threading.Thread(target=claim.take, daemon=True)
        taker.start()
        taker.join(300)
        assert not taker.is_alive()
        claim.release()
    assert not (tmp_path / "elsewhere").exists()


def test_a_restart_removes_the_claims_of_the_killed_attempt_and_no_others(tmp_path):
    killed, other = Claim(tmp_path / "step=5.ckpt"), Claim(tmp_path / "best.ckpt")
    assert killed.take()
    assert other.take()
    os.close(killed._descriptor)  # as the system does when a process ends
    assert remove_stale(tmp_path) == []
    assert len(names(tmp_path)) == 2  # a save waits, since an owner may be about to lock its new claim
    assert not recover_checkpoint(str(tmp_path / "step=5.ckpt"), 5, io=PortableCheckpointIO())
    assert names(tmp_path) == [other._file.name]
    other.release()
    assert names(tmp_path) == []


def test_claims_that_come_and_go_do_not_disturb_a_save(tmp_path):
    def claim_on_and_on():
        claim = Claim(tmp_path / "c")
        while not is_over.is_set():
            assert claim.take()
            claim.release()

    is_over = threading.Event()
    claimer = threading.Thread(target=claim_on_and_on)
    claimer.start()
    try:
        for _ in range(5000):
            assert remove_stale(tmp_path) == []
    finally:
        is_over.set()
        claimer.join()


def test_what_another_user_left_does_not_disturb_a_save():
    with tempfile.TemporaryDirectory() as shared:  # tmp_path is closed to other users
        Path(shared).chmod(0o1777)  # as /tmp: nobody removes files of others
        folder = UnfinishedFolder(Path(shared) / "of another")
        folder.path.chmod(0o000)
        claim = Path(shared) / ".dstrat-0123.claim"
        claim.touch()
        os.utime(claim, (0, 0))
        before = os.geteuid()
        if before == 0:  # who may read everything
            os.seteuid(65534)
        try:
            assert remove_stale(Path(shared)) == []
        finally:
            os.seteuid(before)
        assert folder.path.exists()
        folder.path.chmod(0o700)
        folder.close()


def test_without_locks_checkpoints_are_saved_and_leftovers_stay(tmp_path, io, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    leftover = UnfinishedFolder(tmp_path / "dead")
    os.close(leftover._lock)
    monkeypatch.setattr("fcntl.flock", refuse)
    io.save_checkpoint({"epoch": 1}, tmp_path / "c")
    assert io.load_checkpoint(tmp_path / "last") == {"epoch": 1, "per_rank": {}}
    assert leftover.path.exists()


def test_an_unfinished_checkpoint_is_never_the_newest(tmp_path, io):
    io.save_checkpoint({"epoch": 0}, tmp_path / "a")
    io.save_checkpoint({"epoch": 1, "w": torch.ones(9)}, tmp_path / "b")
    io.save_checkpoint({"epoch": 2, "w": torch.ones(9)}, tmp_path / "c")
    io.save_checkpoint({"epoch": 3}, tmp_path / "d")
    (tmp_path / "b" / "rank-00000.safetensors").unlink()
    (tmp_path / "c" / "rank-00000.safetensors").write_bytes(b"short")
    (tmp_path / "d" / "manifest.json").unlink()
    assert newest_checkpoint(tmp_path) == tmp_path / "a"


def test_there_is_no_newest_where_there_is_none(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "nowhere") is None


def test_a_full_disk_is_said_to_be_full_and_harms_nothing(tmp_path, io):
    io.save_checkpoint({"epoch": 1}, tmp_path / "before")
    (script := tmp_path.with_name(f"{tmp_path.name}.py")).write_text(INTO_A_FULL_DISK)
    assert (
        WarmProgram(script, str(tmp_path / "c")).run()
        == f"could not write checkpoint {str(tmp_path / 'c')!r}: file too large\nTrue\n"
    )
    assert names(tmp_path) == ["before", "last"]
    assert io.load_checkpoint(tmp_path / "last")["epoch"] == 1


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], capture_output=True, check=False, timeout=20
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=20)


def test_no_space_left_is_said_and_harms_nothing(small_disk, io, refusal):
    io.save_checkpoint({"epoch": 1, "w": torch.ones(1000)}, small_disk / "before")
    weight = torch.ones(3_000_000)
    message = refusal(io.save_checkpoint, {"w": weight}, small_disk / "c")
    assert message == f"could not write checkpoint {str(small_disk / 'c')!r}: no space left on device"
    assert names(small_disk) == ["before", "last"]
    assert io.load_checkpoint(small_disk / "before")["epoch"] == 1
    io.save_checkpoint({"w": torch.ones(1000)}, small_disk / "c")


def test_a_folder_that_may_not_be_written_is_named(tmp_path, io, refusal):
    (tmp_path / "file").write_text("")
    message = refusal(io.save_checkpoint, {}, tmp_path / "file" / "c")
    assert message.startswith("could not create checkpoint ")
    assert "not a directory" in message or "file exists" in message

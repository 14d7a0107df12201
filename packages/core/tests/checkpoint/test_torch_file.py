"""Checkpoints in one file each."""

import os
import pathlib
import pkgutil
import re
import signal
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.warm_program import WarmProgram

from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.errors import CheckpointError

CHECKPOINT = {"epoch": 3, "state_dict": {"weight": torch.arange(1000.0)}, "names": ("a", "b")}
INTO_A_FULL_DISK = """
import pathlib, resource, sys, torch
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.errors import CheckpointError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    TorchCheckpointIO().save_checkpoint({"weight": torch.ones(1_000_000)}, sys.argv[1])
except CheckpointError as error:
    print(error)
"""
KILLED_WHILE_WRITING = """
import os, signal, sys, torch
from dstrat.checkpoint.torch_file import TorchCheckpointIO

class Killer:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)

TorchCheckpointIO().save_checkpoint({"weight": torch.ones(1_000_000), "last": Killer()}, sys.argv[1])
"""


class Custom:
    pass


def refusal(function, *arguments):
    with pytest.raises(CheckpointError) as caught:
        function(*arguments)
    return str(caught.value)


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "epoch=3.ckpt"
    TorchCheckpointIO().save_checkpoint(CHECKPOINT, path)
    return path


def test_what_was_written_comes_back(written):
    loaded = TorchCheckpointIO().load_checkpoint(written)
    assert torch.equal(loaded["state_dict"]["weight"], CHECKPOINT["state_dict"]["weight"])
    assert (loaded["epoch"], loaded["names"]) == (3, ("a", "b"))


def test_numbers_of_numpy_are_written_as_numbers(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=np.float64(0.1), momentum=np.float32(0.5))
    TorchCheckpointIO().save_checkpoint({"optimizer": optimizer.state_dict(), "best": np.bool_(True)}, tmp_path / "a")
    read = TorchCheckpointIO().load_checkpoint(tmp_path / "a")
    [group] = read["optimizer"]["param_groups"]
    assert (group["lr"], group["momentum"], read["best"]) == (0.1, 0.5, True)
    assert (type(group["lr"]), type(read["best"])) == (float, bool)
    assert type(optimizer.param_groups[0]["lr"]) is np.float64  # as the user has it


def test_paths_may_be_text_and_folders_are_made(tmp_path):
    path = str(tmp_path / "a" / "b" / "last.ckpt")
    TorchCheckpointIO().save_checkpoint(CHECKPOINT, path)
    assert TorchCheckpointIO().load_checkpoint(path)["epoch"] == 3


def test_nothing_else_is_left_beside_it(written):
    assert list(written.parent.iterdir()) == [written]


def test_a_newer_one_takes_the_place_of_an_older_one(written):
    TorchCheckpointIO().save_checkpoint({"epoch": 4}, written)
    assert TorchCheckpointIO().load_checkpoint(written) == {"epoch": 4}


def test_removing_it_twice_is_no_error(written):
    TorchCheckpointIO().remove_checkpoint(written)
    TorchCheckpointIO().remove_checkpoint(written)
    assert not written.exists()


@pytest.mark.cuda
def test_tensors_come_back_on_the_cpu(tmp_path):
    TorchCheckpointIO().save_checkpoint({"weight": torch.ones(3, device="cuda")}, tmp_path / "gpu.ckpt")
    assert TorchCheckpointIO().load_checkpoint(tmp_path / "gpu.ckpt")["weight"].device.type == "cpu"


@pytest.mark.parametrize("before", [None, {"epoch": 1}])
def test_a_disk_that_is_full_leaves_what_was_there(tmp_path, before):
    path = tmp_path / "last.ckpt"
    if before is not None:
        TorchCheckpointIO().save_checkpoint(before, path)
    (script := tmp_path.with_name(f"{tmp_path.name}.py")).write_text(INTO_A_FULL_DISK)
    assert WarmProgram(script, str(path)).run() == f"checkpoint {str(path)!r} cannot be written: file too large\n"
    assert list(tmp_path.iterdir()) == ([path] if before else [])
    assert not before or TorchCheckpointIO().load_checkpoint(path) == before


def test_being_killed_while_writing_leaves_what_was_there(written, tmp_path):
    (script := written.with_name("script.py")).write_text(KILLED_WHILE_WRITING)
    program = WarmProgram(script, str(written))
    program.communicate()
    assert program.returncode == -signal.SIGKILL
    assert TorchCheckpointIO().load_checkpoint(written)["epoch"] == 3
    assert len(list(tmp_path.glob(".dstrat-*/*"))) == 1
    TorchCheckpointIO().save_checkpoint(CHECKPOINT, tmp_path / "next.ckpt")  # which removes what the other has left
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_made_is_said_to_be_so(tmp_path):
    (tmp_path / "file").touch()
    message = refusal(TorchCheckpointIO().save_checkpoint, CHECKPOINT, tmp_path / "file" / "last.ckpt")
    assert message.endswith(f"cannot be written: file exists ('{tmp_path / 'file'}')")


def test_a_missing_checkpoint_is_answered_with_those_that_are_there(written):
    path = written.with_name("epoch=4.ckpt")
    assert refusal(TorchCheckpointIO().load_checkpoint, path) == (
        f"checkpoint {str(path)!r} does not exist, and its folder holds epoch=3.ckpt: check the path"
    )


def test_a_missing_folder_is_said_to_be_so(tmp_path):
    assert "does not exist, and neither does its folder" in refusal(
        TorchCheckpointIO().load_checkpoint, tmp_path / "a" / "b.ckpt"
    )


@pytest.mark.parametrize(
    ("name", "missing"), [("b.ckpt", "no other .ckpt file"), ("b", "no other name without a suffix")]
)
def test_a_folder_without_checkpoints_is_said_to_be_so(tmp_path, name, missing):
    message = refusal(TorchCheckpointIO().load_checkpoint, tmp_path / name)
    assert f"does not exist, and its folder holds {missing}: " in message


def test_a_folder_is_no_checkpoint(tmp_path):
    assert "is a folder, and a file was expected" in refusal(TorchCheckpointIO().load_checkpoint, tmp_path)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no file here fails when it is read")
def test_a_disk_that_fails_is_no_damage(tmp_path):
    (tmp_path / "a.ckpt").symlink_to("/proc/self/mem")
    message = refusal(TorchCheckpointIO().load_checkpoint, tmp_path / "a.ckpt")
    assert message.endswith("a.ckpt' cannot be read: input/output error")


def test_a_checkpoint_that_was_cut_short_is_damaged(written):
    written.write_bytes(written.read_bytes()[:-500])
    assert "is damaged, or was not written by torch.save" in refusal(TorchCheckpointIO().load_checkpoint, written)


@pytest.mark.parametrize(
    "content", [b"", b"hello world, this is no checkpoint", b"PK\x03\x04" + bytes(100), bytes(range(256))]
)
def test_another_file_is_no_checkpoint(tmp_path, content):
    path = tmp_path / "other.ckpt"
    path.write_bytes(content)
    assert f"({len(content)} bytes): load another one" in refusal(TorchCheckpointIO().load_checkpoint, path)


def test_one_changed_bit_in_a_tensor_is_noticed(written):
    data = bytearray(written.read_bytes())
    data[data.index(torch.arange(1000.0).numpy().tobytes()) + 100] ^= 1
    written.write_bytes(data)
    assert torch.load(written, weights_only=True) is not None, "torch alone notices nothing"
    assert "is damaged" in refusal(TorchCheckpointIO().load_checkpoint, written)


def test_any_changed_byte_is_noticed_or_harmless(tmp_path):
    path = tmp_path / "small.ckpt"
    TorchCheckpointIO().save_checkpoint({"weight": torch.arange(4.0)}, path)
    whole = path.read_bytes()
    outcomes = {"noticed": 0, "harmless": 0}
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        try:
            loaded = TorchCheckpointIO().load_checkpoint(path)
        except CheckpointError:
            outcomes["noticed"] += 1
        else:
            assert torch.equal(loaded["weight"], torch.arange(4.0))
            outcomes["harmless"] += 1
    assert min(outcomes.values()) > 0


def test_what_could_not_be_read_back_is_refused_by_name_before_it_replaces_anything(written):
    message = refusal(TorchCheckpointIO().save_checkpoint, {"hyper_parameters": pathlib.PurePosixPath("x")}, written)
    assert "is not written, because it could not be read back: it holds pathlib.PurePosixPath, and only" in message
    assert "torch.serialization.add_safe_globals([pathlib.PurePosixPath])" in message
    assert TorchCheckpointIO().load_checkpoint(written)["epoch"] == 3
    assert list(written.parent.iterdir()) == [written]


def test_all_classes_that_could_not_be_read_back_are_named_at_once(tmp_path):
    content = {"path": pathlib.PurePosixPath("x"), "layer": torch.nn.Linear(1, 1), "names": {"a"}}
    message = refusal(TorchCheckpointIO().save_checkpoint, content, tmp_path / "a.ckpt")
    assert "it holds pathlib.PurePosixPath, torch.nn.modules.linear.Linear, and only tensors" in message
    assert "to trust these classes" in message
    trusted = re.search(r"add_safe_globals\(\[(.+)\]\)", message).group(1).split(", ")
    with torch.serialization.safe_globals([pkgutil.resolve_name(name) for name in trusted]):
        TorchCheckpointIO().save_checkpoint(content, tmp_path / "a.ckpt")
        assert TorchCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")["path"] == content["path"]


def test_what_the_user_trusts_is_written_and_read(tmp_path):
    with torch.serialization.safe_globals([pathlib.PurePosixPath]):
        TorchCheckpointIO().save_checkpoint({"path": pathlib.PurePosixPath("x")}, tmp_path / "a.ckpt")
        assert TorchCheckpointIO().load_checkpoint(tmp_path / "a.ckpt") == {"path": pathlib.PurePosixPath("x")}
    assert "cannot be read: it holds pathlib.PurePosixPath" in refusal(
        TorchCheckpointIO().load_checkpoint, tmp_path / "a.ckpt"
    )


@pytest.mark.parametrize(
    ("value", "name"),
    [(os.getcwd, "posix.getcwd"), (Custom(), "Custom"), (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear")],
)
def test_a_checkpoint_of_someone_else_runs_no_code_and_the_reason_is_named(tmp_path, value, name):
    torch.save({"value": value}, tmp_path / "theirs.ckpt")
    message = refusal(TorchCheckpointIO().load_checkpoint, tmp_path / "theirs.ckpt")
    assert "cannot be read: it holds " in message
    assert name in message


@pytest.mark.parametrize("value", [lambda: 0, threading.Lock()])
def test_what_cannot_be_pickled_is_refused(tmp_path, value):
    message = refusal(TorchCheckpointIO().save_checkpoint, {"value": value}, tmp_path / "a.ckpt")
    assert "cannot be written, because it holds something that cannot be pickled" in message
    assert list(tmp_path.iterdir()) == []


def test_something_else_than_a_dict_is_refused(tmp_path):
    torch.save(torch.ones(1), tmp_path / "tensor.ckpt")
    assert "holds a Tensor and not a dict" in refusal(TorchCheckpointIO().load_checkpoint, tmp_path / "tensor.ckpt")


def test_a_file_in_torchs_older_format_is_read(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert not zipfile.is_zipfile(tmp_path / "old.ckpt")
    assert TorchCheckpointIO().load_checkpoint(tmp_path / "old.ckpt") == {"epoch": 3}


def test_a_path_that_is_not_utf_8_is_refused_by_its_reason(tmp_path):
    with pytest.raises(CheckpointError, match="could not be read back: torch reads no file whose path is not UTF-8"):
        TorchCheckpointIO().save_checkpoint({"epoch": 1}, tmp_path / os.fsdecode(b"c\xff.ckpt"))
    assert list(tmp_path.iterdir()) == []

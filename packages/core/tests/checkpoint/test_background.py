"""Saving in the background."""

import threading
import time
from collections import Counter

import pytest
import torch
from tests.warm_program import WarmProgram

from dstrat.checkpoint.async_io import AsyncCheckpointIO
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import CheckpointIO

SAVES_AND_ENDS = """
import sys, torch
from dstrat.checkpoint.async_io import AsyncCheckpointIO
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
AsyncCheckpointIO(PortableCheckpointIO()).save_checkpoint({"w": torch.ones(20_000_000)}, sys.argv[1])
"""


class SlowCheckpointIO(CheckpointIO):
    """Writes when it is allowed to."""

    def __init__(self, error=None):
        self.may_write = threading.Event()
        self.error = error
        self.written, self.removed = {}, []

    def save_checkpoint(self, checkpoint, path):
        assert self.may_write.wait(300)
        if self.error is not None:
            raise self.error
        self.written[path] = checkpoint

    def load_checkpoint(self, path):
        return self.written[path]

    def remove_checkpoint(self, path):
        assert self.written
        self.removed.append(path)


@pytest.fixture
def slow():
    return SlowCheckpointIO()


@pytest.mark.parametrize("inner", [PortableCheckpointIO, TorchCheckpointIO])
def test_what_is_written_is_what_it_was_when_save_returned(tmp_path, inner):
    weight = torch.nn.Parameter(torch.arange(3_000_000.0))
    checkpoint = {"state_dict": {"w": weight, "t": weight.data.reshape(3, -1).t()}, "losses": [1.0], "pair": (1, 2)}
    io = AsyncCheckpointIO(inner())
    for step in range(3):
        before = weight.detach().clone()
        io.save_checkpoint(checkpoint, tmp_path / f"c{step}")
        weight.data.mul_(2).add_(1)
        checkpoint["losses"].append(2.0)
        loaded = io.load_checkpoint(tmp_path / f"c{step}")
        assert torch.equal(loaded["state_dict"]["w"], before)
        assert torch.equal(loaded["state_dict"]["t"], before.reshape(3, -1).t())
        assert loaded["losses"] == [1.0] + [2.0] * step
        assert loaded["pair"] == (1, 2)


def test_a_state_dict_is_copied_tensor_by_tensor(slow):
    model = torch.nn.Linear(2, 2)
    state = model.state_dict()
    state["of a graph"] = model.weight * 2  # which copy.deepcopy refuses
    state["tied"] = state["weight"]
    io = AsyncCheckpointIO(slow)
    io.save_checkpoint({"state_dict": state, "counts": Counter("aab")}, "c")
    slow.may_write.set()
    saved = io.load_checkpoint("c")
    assert saved["counts"] == Counter("aab")
    copied = saved["state_dict"]
    assert type(copied) is type(state)
    assert copied._metadata == state._metadata
    assert torch.equal(copied["of a graph"], model.weight * 2)
    assert copied["weight"].data_ptr() != model.weight.data_ptr()
    assert copied["tied"].data_ptr() == copied["weight"].data_ptr()


def test_portable_folders_are_written_unless_another_is_passed(tmp_path):
    io = AsyncCheckpointIO()
    io.save_checkpoint({"w": torch.ones(2)}, tmp_path / "it.ckpt")
    io.wait()
    assert (tmp_path / "it.ckpt").is_dir()
    assert torch.equal(io.load_checkpoint(tmp_path / "it.ckpt")["w"], torch.ones(2))


def test_saving_returns_before_it_is_written(slow):
    io = AsyncCheckpointIO(slow)
    io.save_checkpoint({"epoch": 1}, "a")
    assert io.is_writing
    assert slow.written == {}
    slow.may_write.set()
    io.wait()
    assert not io.is_writing
    assert slow.written == {"a": {"epoch": 1}}


def test_what_a_rank_kept_for_itself_is_read_when_it_is_written(slow, tmp_path):
    io = AsyncCheckpointIO(PortableCheckpointIO())
    io.save_checkpoint({"per_rank": {"seed": 1}}, tmp_path / "c")
    assert io.load_rank(tmp_path / "c", 0) == {"seed": 1}
    assert AsyncCheckpointIO(slow).load_rank("a", 0) is None


def test_only_one_is_in_flight(slow):
    io = AsyncCheckpointIO(slow)
    io.save_checkpoint({"epoch": 1}, "a")
    threading.Timer(0.2, slow.may_write.set).start()
    io.save_checkpoint({"epoch": 2}, "b")
    assert "a" in slow.written
    io.wait()


def test_what_is_removed_meanwhile_stays_until_the_new_one_is_there(slow):
    io = AsyncCheckpointIO(slow)
    io.save_checkpoint({"epoch": 1}, "new")
    io.remove_checkpoint("old")
    assert slow.removed == []
    slow.may_write.set()
    io.wait()
    assert slow.removed == ["old"]
    io.remove_checkpoint("other")
    assert slow.removed == ["old", "other"]


@pytest.mark.parametrize(
    "call",
    [
        lambda io: io.wait(),
        lambda io: io.check(),
        lambda io: io.save_checkpoint({}, "b"),
        lambda io: io.load_checkpoint("a"),
        lambda io: io.teardown(),
    ],
    ids=["wait", "check", "save", "load", "teardown"],
)
def test_an_error_of_the_write_is_raised_by_the_next_call_and_only_once(caplog, call):
    slow = SlowCheckpointIO(OSError("the disk is full"))
    io = AsyncCheckpointIO(slow)
    io.save_checkpoint({}, "a")
    io.remove_checkpoint("old")
    slow.may_write.set()
    deadline = time.monotonic() + 300
    while io.is_writing and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(CheckpointError, match="checkpoint 'a' was not written in the background: the disk is full"):
        call(io)
    assert slow.removed == []
    assert "checkpoint 'a' was not written in the background: the disk is full" in caplog.text
    io.check()
    io.wait()


def test_checking_does_not_wait(slow):
    io = AsyncCheckpointIO(slow)
    io.save_checkpoint({}, "a")
    io.check()
    assert io.is_writing
    slow.may_write.set()
    io.teardown()


def test_a_process_that_ends_waits_for_the_write(tmp_path):
    (script := tmp_path / "script.py").write_text(SAVES_AND_ENDS)
    WarmProgram(script, str(tmp_path / "c")).run()
    assert torch.equal(PortableCheckpointIO().load_checkpoint(tmp_path / "c")["w"], torch.ones(20_000_000))


def test_what_cannot_be_saved_is_said_at_once(tmp_path):
    io = AsyncCheckpointIO(PortableCheckpointIO())
    with pytest.raises(CheckpointError, match="'hook' is a builtins"):
        io.save_checkpoint({"hook": print}, tmp_path / "c")
    io.wait()
    assert list(tmp_path.iterdir()) == []

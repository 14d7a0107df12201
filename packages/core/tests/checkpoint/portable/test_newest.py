"""Which checkpoint of a folder is the newest."""

from __future__ import annotations

import os
import shutil

from dstrat.checkpoint.portable.newest import newest_checkpoint, resolve


def test_it_is_the_one_that_was_completed_last_whatever_it_is_called_and_whenever_it_was_touched(io, tmp_path):
    for name in ("b", "c", "a"):
        io.save_checkpoint({"name": name}, tmp_path / name)
    os.utime(tmp_path / "b")
    assert newest_checkpoint(tmp_path) == tmp_path / "a"
    (tmp_path / "last").unlink()
    assert io.load_checkpoint(tmp_path / "last")["name"] == "a"
    io.remove_checkpoint(tmp_path / "a")
    assert newest_checkpoint(tmp_path) == tmp_path / "c"


def test_a_removal_that_is_cut_short_leaves_nothing_that_looks_like_one(io, tmp_path, monkeypatch):
    io.save_checkpoint({"epoch": 1}, tmp_path / "a")
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # the process is killed there
    io.remove_checkpoint(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert newest_checkpoint(tmp_path) is None


def test_a_name_that_is_not_utf_8_can_be_pointed_to(tmp_path, io):
    path = tmp_path / os.fsdecode(b"step=1\xff")
    io.save_checkpoint({"epoch": 1}, path)
    assert resolve(tmp_path / "last") == path
    assert io.load_checkpoint(tmp_path / "last")["epoch"] == 1

"""What has reached the disk when a checkpoint gets its name, and when a save returns."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dstrat.checkpoint.torch_file import TorchCheckpointIO


@pytest.fixture
def recorded(monkeypatch):
    """The names of what is flushed and renamed, in turn."""
    done = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def note_fsync(descriptor):
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    def note(function):
        def call(path, target):
            done.append((path, Path(target)))
            return function(path, target)

        return call

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note(rename))
    monkeypatch.setattr(Path, "replace", note(replace))
    return done


pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files have no names here")


def test_all_files_and_the_folder_are_flushed_before_it_gets_its_name_and_that_after(io, tmp_path, recorded):
    io.save_checkpoint({"weight": torch.ones(3), "epoch": 1}, tmp_path / "c")
    named = recorded.index(next(done for done in recorded if isinstance(done, tuple) and done[1] == tmp_path / "c"))
    temporary = recorded[named][0]
    flushed = recorded[:named]
    assert flushed[-1] == temporary
    assert sorted(path.name for path in flushed[:-1]) == sorted(path.name for path in (tmp_path / "c").iterdir())
    assert recorded[named + 1] == tmp_path
    content, pointing, folder = recorded[named + 2 :]
    assert (content, folder) == (pointing[0], tmp_path)
    assert pointing[1] == tmp_path / "last"


def test_a_single_file_is_flushed_before_it_gets_its_name_and_that_after(tmp_path, recorded):
    TorchCheckpointIO().save_checkpoint({"epoch": 1}, tmp_path / "c")
    written, (renamed, target), folder = recorded
    assert written == renamed
    assert (target, folder) == (tmp_path / "c", tmp_path)

"""Which checkpoint is named when a run is stopped."""

from __future__ import annotations

import os
import uuid
from types import SimpleNamespace

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dstrat.checkpoint.paths import as_path
from dstrat.training.callbacks.run_messages import newest_checkpoint


def trainer(**paths):
    return SimpleNamespace(checkpoint_callbacks=[SimpleNamespace(**{name: str(path) for name, path in paths.items()})])


@pytest.fixture
def older(tmp_path):
    path = tmp_path / "older.ckpt"
    path.write_bytes(b"1")
    os.utime(path, ns=(10**18, 10**18))
    return path


def test_one_in_a_store_is_the_newest(older):
    newer = as_path(f"memory://{uuid.uuid4().hex}/newer.ckpt")
    newer.write_bytes(b"2")
    assert newest_checkpoint(trainer(best_model_path=newer, last_model_path=older)) == str(newer)


def test_one_that_cannot_be_asked_for_is_left_out(older, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("403: not for you")

    monkeypatch.setattr(MemoryFileSystem, "info", refuse)
    paths = {"best_model_path": "memory://a/b.ckpt", "last_model_path": tmp_path / "gone.ckpt"}
    assert newest_checkpoint(trainer(**paths)) is None
    assert newest_checkpoint(trainer(**paths, ckpt_path=older)) == str(older)

"""Which checkpoints are uploaded, and that those of a store are."""

from __future__ import annotations

import uuid
from types import SimpleNamespace

import pytest

from dstrat.builtin.checkpoint.place import place
from dstrat.training.loggers.uploads import Uploads


@pytest.fixture
def sent():
    return []


@pytest.fixture
def upload(sent):
    def upload_(path, names):
        content = {file.name: file.read_bytes() for file in path.iterdir()} if path.is_dir() else path.read_bytes()
        sent.append((path.name, content, names))

    return upload_


def saved(best, last=""):
    return SimpleNamespace(best_model_path=str(best), last_model_path=str(last))


def test_what_is_in_a_store_is_uploaded_as_what_is_on_the_disk(sent, upload, tmp_path):
    url = f"memory://{uuid.uuid4().hex}"
    for where in (place(url), tmp_path):
        if where is tmp_path:
            (where / "folder.ckpt").mkdir()
        for name in ("one.ckpt", "folder.ckpt/a", "folder.ckpt/b"):
            (where / name).write_bytes(name.encode())
        uploads = Uploads("all", upload)
        uploads.take(saved(where / "folder.ckpt", where / "one.ckpt"))
        uploads.finish()
    folder = {"a": b"folder.ckpt/a", "b": b"folder.ckpt/b"}
    once = [("one.ckpt", b"one.ckpt", ["latest"]), ("folder.ckpt", folder, ["latest", "best"])]
    assert sent == once + once


def test_only_the_best_is_uploaded_at_the_end(sent, upload, tmp_path):
    (tmp_path / "best").write_bytes(b"1")
    uploads = Uploads(True, upload)
    uploads.take(saved(tmp_path / "best", tmp_path / "last"))
    assert sent == []
    uploads.finish()
    assert sent == [("best", b"1", ["latest", "best"])]

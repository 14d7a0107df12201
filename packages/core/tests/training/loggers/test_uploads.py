"""Which checkpoints are uploaded, and that those of a store are."""

from __future__ import annotations

import uuid
from types import SimpleNamespace

import pytest
from tests.accelerators import ACCELERATOR

from dstrat import Logger, ModelCheckpoint, Trainer
from dstrat.checkpoint.paths import as_path
from dstrat.training.loggers.logger import Uploads


@pytest.fixture
def sent():
    return []


@pytest.fixture
def upload(sent):
    def upload_(path, names):
        content = {file.name: file.read_bytes() for file in path.iterdir()} if path.is_dir() else path.read_bytes()
        sent.append((path.name, content, names))

    return upload_


def saved(*paths, best):
    return SimpleNamespace(best_model_path=str(best), saved_paths=[str(path) for path in paths])


def test_what_is_in_a_store_is_uploaded_as_what_is_on_the_disk(sent, upload, tmp_path):
    url = f"memory://{uuid.uuid4().hex}"
    for where in (as_path(url), tmp_path):
        if where is tmp_path:
            (where / "folder.ckpt").mkdir()
        for name in ("one.ckpt", "folder.ckpt/a", "folder.ckpt/b"):
            (where / name).write_bytes(name.encode())
        uploads = Uploads("all", upload)
        uploads.take(saved(where / "one.ckpt", where / "folder.ckpt", best=where / "folder.ckpt"))
        uploads.finish()
    folder = {"a": b"folder.ckpt/a", "b": b"folder.ckpt/b"}
    once = [("one.ckpt", b"one.ckpt", ["latest"]), ("folder.ckpt", folder, ["latest", "best"])]
    assert sent == once + once


def test_only_the_best_is_uploaded_at_the_end(sent, upload, tmp_path):
    (tmp_path / "best").write_bytes(b"1")
    uploads = Uploads(True, upload)
    uploads.take(saved(tmp_path / "best", tmp_path / "last", best=tmp_path / "best"))
    assert sent == []
    uploads.finish()
    uploads.finish()  # of an evaluation that follows
    assert sent == [("best", b"1", ["latest", "best"])]


def test_of_several_callbacks_each_ones_best_is_uploaded_and_the_latest_last(sent, upload, tmp_path):
    first, second = (saved(tmp_path / name, best=tmp_path / name) for name in "ab")
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    uploads = Uploads(True, upload)
    for callback in (first, second, first):
        uploads.take(callback)
    uploads.finish()
    assert [name for name, *_ in sent] == ["b", "a"]


def test_a_best_one_that_was_written_anew_is_uploaded_again(sent, upload, tmp_path):
    uploads = Uploads(True, upload)
    for content in (b"1", b"2"):
        (tmp_path / "best").write_bytes(content)
        uploads.take(saved(tmp_path / "best", best=tmp_path / "best"))
        uploads.finish()
    assert [content for _, content, _ in sent] == [b"1", b"2"]


class SendingAll(Logger):
    def __init__(self, upload):
        self.uploads = Uploads("all", upload)

    def log_metrics(self, metrics, step):
        pass

    def after_save_checkpoint(self, checkpoint_callback):
        self.uploads.take(checkpoint_callback)

    def finalize(self, status):
        self.uploads.finish()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("save_last", [False, True, "link"])
def test_all_are_those_that_a_model_checkpoint_saves_also_the_worse_and_the_replaced(
    sent, upload, tmp_path, line, loader, save_last, is_async
):
    callback = ModelCheckpoint(
        tmp_path, "{epoch}", monitor="val_loss", mode="max", save_top_k=-1, save_last=save_last, async_save=is_async
    )
    trainer = Trainer(
        accelerator=ACCELERATOR, devices=1, max_epochs=3, logger=SendingAll(upload), callbacks=callback,
        plugins="torch",
        default_root_dir=tmp_path, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(line, loader(), loader())
    expected = []
    for epoch in range(3):
        expected.append((f"epoch={epoch}.ckpt", ["latest", "best"] if epoch == 0 else ["latest"]))
        expected += [("last.ckpt", ["latest"])] if save_last is True else []
    assert [(name, names) for name, _, names in sent] == expected
    lasts = [content for name, content, _ in sent if name == "last.ckpt"]
    assert len(set(lasts)) == len(lasts)  # each is what was saved then

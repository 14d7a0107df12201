"""Checkpoints of a Trainer in a store; the format there is tested with a server that speaks S3."""

from __future__ import annotations

import uuid

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dstrat import ModelCheckpoint, OnExceptionCheckpoint, TorchCheckpointIO
from dstrat.checkpoint.paths import as_path
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.portable.reader import read_manifest
from dstrat.errors import CheckpointError, StoreError
from dstrat.training.checkpoint.path import written_ns
from dstrat.training.module.loading import read_checkpoint

IOS = [PortableCheckpointIO, TorchCheckpointIO]


@pytest.fixture
def url():
    """A folder of the store in this process's memory."""
    return f"memory://training/{uuid.uuid4().hex}"


@pytest.fixture
def fit(quiet_trainer, make_line, loader):
    """Fits for some epochs."""

    def fit_(max_epochs, callback=None, ckpt_path=None, resume=None, **options):
        trainer = quiet_trainer(max_epochs=max_epochs, callbacks=callback, enable_checkpointing=True, **options)
        trainer.fit(make_line(), loader(), loader(), ckpt_path=ckpt_path, resume=resume)
        return trainer

    return fit_


def names(url):
    return sorted(path.name for path in as_path(url).iterdir())


@pytest.mark.parametrize("io", IOS)
def test_the_best_are_kept_and_training_goes_on_from_them(fit, url, line_class, io):
    def callback():
        return ModelCheckpoint(url, "{epoch}", monitor="val_loss", save_top_k=2)

    first = callback()
    fit(4, first, plugins=[io()])
    assert [name for name in names(url) if name != "last"] == ["epoch=2.ckpt", "epoch=3.ckpt"]
    assert first.best_model_path == f"{url}/epoch=3.ckpt"
    assert fit(5, callback(), ckpt_path=f"{url}/epoch=3.ckpt", plugins=[io()]).global_step == 30
    assert fit(6, callback(), ckpt_path="last", plugins=[io()]).global_step == 36
    assert fit(7, callback(), ckpt_path="best", plugins=[io()]).global_step == 42
    assert fit(8, callback(), resume="auto", plugins=[io()]).global_step == 48
    assert [name for name in names(url) if name != "last"] == ["epoch=6.ckpt", "epoch=7.ckpt"]
    line_class.load_from_checkpoint(f"{url}/epoch=7.ckpt")


def test_training_starts_anew_where_the_store_has_nothing(fit, url):
    assert fit(1, ModelCheckpoint(url), resume="auto").global_step == 6


def test_training_does_not_start_anew_where_the_store_refuses_to_be_read(fit, url, monkeypatch):
    fit(1, ModelCheckpoint(url))

    def refuse(*_, **__):
        raise PermissionError("403: not for you")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", refuse)
    with pytest.raises(CheckpointError, match=r"no checkpoint could be looked for: .*memory://.* 403: not for you"):
        fit(2, ModelCheckpoint(url), resume="auto")


def test_a_folder_of_somebody_elses_is_not_taken_for_one_whose_store_fails(fit, url, monkeypatch):
    fit(1, ModelCheckpoint(url, "{epoch}"))
    found = as_path(url) / "epoch=0.ckpt"
    assert written_ns(found) == read_manifest(found).created_ns
    (found / "manifest.json").unlink()
    with pytest.raises(OSError, match=r"0\.ckpt"):
        written_ns(found)  # the memory store knows no times of folders

    def refuse(*_, **__):
        raise PermissionError("403: not for you")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", refuse)
    (found / "manifest.json").write_bytes(b"{}")
    with pytest.raises(StoreError, match="403: not for you"):
        written_ns(found)


def test_the_root_of_a_run_may_be_in_a_store(fit, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(2, default_root_dir=url, logger=True)
    assert names(f"{url}/checkpoints") == ["epoch=1-step=12.ckpt", "last"]
    assert [path.name for path in tmp_path.iterdir()] == ["dstrat_logs"]
    assert fit(3, default_root_dir=url, resume="auto").global_step == 18


def test_what_was_cut_short_is_not_gone_on_from_and_its_name_is_not_taken(fit, url):
    fit(2, ModelCheckpoint(url, "{epoch}", save_top_k=-1))
    (as_path(url) / "epoch=1.ckpt" / "manifest.json").unlink()
    trainer = fit(2, ModelCheckpoint(url, "{epoch}", save_top_k=-1), resume="auto")
    assert trainer.global_step == 12
    assert names(url) == ["epoch=0.ckpt", "epoch=1-v1.ckpt", "epoch=1.ckpt", "last"]


def test_an_exception_leaves_a_checkpoint_there(fit, url, line_class, loader, quiet_trainer):
    class Breaks(line_class):
        def training_step(self, batch, batch_idx):
            if self.global_step == 3:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    callback = OnExceptionCheckpoint(url)
    with pytest.raises(RuntimeError, match="broken"):
        quiet_trainer(callbacks=callback).fit(Breaks(), loader())
    assert callback.ckpt_path == f"{url}/on_exception.ckpt"
    assert read_checkpoint(callback.ckpt_path)["global_step"] == 3


def test_it_is_written_in_the_background_there_too(fit, url):
    callback = ModelCheckpoint(url, "{epoch}", save_top_k=1, async_save=True)
    fit(3, callback)
    assert names(url) == ["epoch=2.ckpt", "last"]
    assert read_checkpoint(callback.best_model_path)["epoch"] == 2

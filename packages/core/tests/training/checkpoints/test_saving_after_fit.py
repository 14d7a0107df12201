"""Saving a checkpoint when ``fit`` has returned."""

from __future__ import annotations

import socket
import uuid

import pytest
import torch
from tests.warm_program import WarmProgram
from torch import nn

from dstrat import Callback, EMAWeightAveraging
from dstrat.checkpoint.async_io import AsyncCheckpointIO
from dstrat.errors import CheckpointError, MisuseError

TRAIN = """
import os
import sys

rank, port, path, plugin = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

import torch
from torch.utils.data import DataLoader, TensorDataset

from dstrat import GradientSyncStrategy, Trainer, TrainModule


class Averaging(GradientSyncStrategy):
    def synchronize_gradients(self, gradients):
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient))


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(epochs, seed, ckpt_path=None):
    torch.manual_seed(seed)
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(5)))
    accelerator = os.environ.get("DSTRAT_TEST_ACCELERATOR", "cpu")
    trainer = Trainer(strategy=Averaging(), devices=2, accelerator=accelerator, max_epochs=epochs, logger=False,
        plugins=plugin, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    module = Net()
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), ckpt_path=ckpt_path)
    return trainer, module.state_dict().values()


_, whole = fit(2, 3)
trainer, _ = fit(1, 3)
torch.rand(1)
trainer.save_checkpoint(path)
assert not torch.distributed.is_initialized()
_, resumed = fit(2, 9, path)
print(all(map(torch.equal, whole, resumed)))
"""


@pytest.fixture
def net(line_class):
    class Net(line_class):
        """Has what is not in its weights: momentum, and random numbers."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 1))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

        def on_save_checkpoint(self, checkpoint):
            checkpoint["saved at step"] = self.trainer.global_step

    return Net


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("plugin", ["torch", "portable"])
def test_a_fit_goes_on_from_its_end_as_if_it_had_not_ended(quiet_trainer, make_line, net, loader, tmp_path, plugin):
    def fit(module, epochs, ckpt_path=None):
        average = EMAWeightAveraging(decay=0.5)  # keeps the weights as trained beside those that the fit leaves
        trainer = quiet_trainer(max_epochs=epochs, plugins=plugin, callbacks=average)
        trainer.fit(module, loader(shuffle=True), ckpt_path=ckpt_path)
        return trainer

    whole = make_line(net)
    fit(whole, 2)
    trainer = fit(make_line(net), 1)
    torch.rand(1)
    trainer.save_checkpoint(tmp_path / "end")
    assert trainer.strategy.load_checkpoint(tmp_path / "end")["saved at step"] == 6
    resumed = net()
    fit(resumed, 2, tmp_path / "end")
    assert same(resumed, whole)


@pytest.mark.parametrize("in_run", [True, False])
def test_a_used_path_loses_no_finished_training(quiet_trainer, line, line_class, loader, tmp_path, caplog, in_run):
    class Saving(Callback):
        def on_train_end(self, trainer, module):
            if in_run:
                trainer.save_checkpoint(tmp_path / "final.ckpt")

    def fit(module):
        trainer = quiet_trainer(max_epochs=1, callbacks=Saving())
        trainer.fit(module, loader())
        if not in_run:
            trainer.save_checkpoint(str(tmp_path / "final.ckpt"))

    earlier = line_class()
    fit(earlier)
    fit(line)
    assert same(line_class.load_from_checkpoint(tmp_path / "final.ckpt"), line)
    assert same(line_class.load_from_checkpoint(tmp_path / "final-v1.ckpt"), earlier)
    assert not same(earlier, line)
    assert f"{tmp_path / 'final-v1.ckpt'} now" in caplog.text
    assert (tmp_path / "last").read_text() == "final.ckpt\n"


@pytest.mark.parametrize("in_background", [True, False])
def test_a_run_replaces_the_checkpoint_that_it_saved_itself(
    quiet_trainer, line_class, loader, tmp_path, caplog, in_background
):
    class Saving(Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "latest.ckpt")

    for _ in range(2):
        module = line_class()
        plugins = AsyncCheckpointIO() if in_background else None
        quiet_trainer(max_epochs=3, callbacks=Saving(), plugins=plugins).fit(module, loader())
    assert same(line_class.load_from_checkpoint(tmp_path / "latest.ckpt"), module)
    assert sorted(path.name for path in tmp_path.glob("latest*")) == ["latest-v1.ckpt", "latest.ckpt"]
    assert caplog.text.count("what was there before") == 1


@pytest.mark.parametrize("kind", ["file", "empty folder", "folder", "link"])
def test_what_is_at_the_path_of_a_checkpoint_stays(quiet_trainer, line, line_class, loader, tmp_path, caplog, kind):
    path, other = tmp_path / "final", tmp_path / "final-v1"
    if kind == "link":
        (tmp_path / "target").mkdir()
        path.symlink_to(tmp_path / "target")
    elif kind == "file":
        path.write_text("text")
    else:
        path.mkdir()
    if kind == "folder":
        (path / "notes").write_text("text")
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(line, loader())
    trainer.save_checkpoint(path)
    saved, kept = (other, path) if kind == "folder" else (path, other)
    assert same(line_class.load_from_checkpoint(saved), line)
    is_kept = {
        "file": lambda: kept.read_text() == "text",
        "empty folder": lambda: not any(kept.iterdir()),
        "folder": lambda: (kept / "notes").read_text() == "text",
        "link": lambda: kept.readlink() == tmp_path / "target" and not any(kept.iterdir()),
    }
    assert is_kept[kind]()
    assert f"{other}" in caplog.text


def test_a_checkpoint_may_be_named_as_the_pointer_is(quiet_trainer, line, line_class, loader, tmp_path):
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(line, loader())
    for name in ("last", "other", "last"):
        trainer.save_checkpoint(tmp_path / name)
        assert same(line_class.load_from_checkpoint(tmp_path / name), line)


def test_a_failed_save_leaves_the_checkpoint_at_its_path(quiet_trainer, line_class, loader, tmp_path):
    class Unsavable(Callback):
        value = 1

        def state_dict(self):
            return {"value": self.value}

    callback, earlier = Unsavable(), line_class()
    trainer = quiet_trainer(max_epochs=1, callbacks=callback)
    trainer.fit(earlier, loader())
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    callback.value = object()
    with pytest.raises(CheckpointError):
        trainer.save_checkpoint(tmp_path / "final.ckpt")
    assert [path.name for path in tmp_path.glob("final*")] == ["final.ckpt"]
    assert same(line_class.load_from_checkpoint(tmp_path / "final.ckpt"), earlier)


def test_a_checkpoint_in_a_store_is_saved_beside_another(quiet_trainer, line, line_class, loader):
    folder = f"memory://{uuid.uuid4().hex}"
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(line, loader())
    trainer.save_checkpoint(f"{folder}/final.ckpt")
    with pytest.raises(CheckpointError, match=rf"exists already, .* this one is '{folder}/final-v1.ckpt'"):
        trainer.save_checkpoint(f"{folder}/final.ckpt")
    assert same(line_class.load_from_checkpoint(f"{folder}/final-v1.ckpt"), line)


def test_single_files_are_replaced_after_a_fit(quiet_trainer, line, loader, tmp_path):
    trainer = quiet_trainer(max_epochs=1, plugins="torch")
    trainer.fit(line, loader())
    for _ in range(2):
        trainer.save_checkpoint(tmp_path / "final.ckpt")
    assert [path.name for path in tmp_path.glob("final*")] == ["final.ckpt"]


def test_weights_alone_are_saved_after_a_fit_too(quiet_trainer, line, line_class, loader, tmp_path):
    trainer = quiet_trainer()
    trainer.fit(line, loader())
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    assert "optimizer_states" not in trainer.strategy.load_checkpoint(tmp_path / "weights")
    assert same(line_class.load_from_checkpoint(tmp_path / "weights"), line)


@pytest.mark.parametrize("plugin", ["torch", "portable"])
def test_several_ranks_save_together_and_leave_no_process_group(tmp_path, plugin):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [WarmProgram(script, str(rank), port, str(tmp_path / "end"), plugin) for rank in range(2)]
    assert [rank.run() for rank in ranks] == ["True\n", "True\n"]


def test_a_state_that_cannot_be_saved_is_an_error_only_where_it_is_saved(
    quiet_trainer, make_line, line_class, loader, tmp_path
):
    class Stateless(torch.optim.SGD):
        def state_dict(self):
            raise TypeError("nobody can have it")

    class Net(line_class):
        def configure_optimizers(self):
            return Stateless(self.parameters(), lr=0.1)

    trainer = quiet_trainer(max_epochs=1, plugins="torch")
    trainer.fit(make_line(Net), loader())
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    with pytest.raises(TypeError, match="nobody can have it"):
        trainer.save_checkpoint(tmp_path / "end")


def test_there_is_nothing_to_save_before_a_fit(quiet_trainer, tmp_path):
    with pytest.raises(MisuseError, match="and there has been none: call it after fit"):
        quiet_trainer().save_checkpoint(tmp_path / "end")


@pytest.mark.parametrize("plugin", ["torch", "portable"])
def test_a_fit_goes_on_from_what_is_saved_after_a_test(quiet_trainer, make_line, net, loader, tmp_path, plugin):
    def trainer(epochs):
        return quiet_trainer(max_epochs=epochs, plugins=plugin)

    whole = make_line(net)
    trainer(2).fit(whole, loader(shuffle=True))
    fitted, first = trainer(1), make_line(net)
    fitted.fit(first, loader(shuffle=True))
    fitted.test(first, loader())
    fitted.save_checkpoint(tmp_path / "end")
    resumed = net()
    trainer(2).fit(resumed, loader(shuffle=True), ckpt_path=tmp_path / "end")
    assert same(resumed, whole)


def test_weights_that_a_test_has_loaded_are_saved_with_a_warning(
    quiet_trainer, line, line_class, loader, tmp_path, caplog
):
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(line, loader())
    trainer.save_checkpoint(tmp_path / "end")
    loaded = line_class.load_from_checkpoint(tmp_path / "end")
    with torch.no_grad():
        line.layer.weight.zero_()
    trainer.test(line, loader(), ckpt_path=tmp_path / "end")
    trainer.validate(line, loader())
    trainer.save_checkpoint(tmp_path / "after", weights_only=True)
    assert same(line_class.load_from_checkpoint(tmp_path / "after"), loaded)
    assert f"after gets the weights of {tmp_path / 'end'}, which test has loaded into the module" in caplog.text


def test_a_run_of_another_module_ends_the_time_for_saving(quiet_trainer, make_line, loader, tmp_path):
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(make_line(), loader())
    trainer.test(make_line(), loader())
    with pytest.raises(
        MisuseError, match="the last run was test with a module that no fit has trained: call it after fit"
    ):
        trainer.save_checkpoint(tmp_path / "end")


def test_processes_that_are_gone_cannot_save(quiet_trainer, line, loader, averaging, tmp_path):
    trainer = quiet_trainer(max_epochs=1, strategy=averaging(), devices=2)
    trainer.fit(line, loader())
    with pytest.raises(MisuseError, match=r"was in other processes \(start_method='fork'\), .*call it in on_train_end"):
        trainer.save_checkpoint(tmp_path / "end")


def test_a_sharded_state_is_gone_after_the_fit(quiet_trainer, line, loader, tmp_path):
    trainer = quiet_trainer(max_epochs=1)
    trainer.strategy.replicates_state = False
    trainer.fit(line, loader())
    with pytest.raises(MisuseError, match="SingleDeviceStrategy has freed its shards of the state"):
        trainer.save_checkpoint(tmp_path / "end")


def test_a_broken_fit_has_no_end(quiet_trainer, line, loader, tmp_path):
    class Breaking(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            raise ValueError("broken")

    trainer = quiet_trainer(callbacks=Breaking())
    with pytest.raises(ValueError, match="broken"):
        trainer.fit(line, loader())
    with pytest.raises(
        MisuseError, match=r"the last fit did not complete: use ModelCheckpoint\(save_on_exception=True\)"
    ):
        trainer.save_checkpoint(tmp_path / "end")

"""Strategies that read values, batches and state from and to their devices in their own way."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.accelerators import ACCELERATOR
from torch import nn

from dstrat import Callback, OwnLoop, SingleDeviceStrategy, build
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.loggers import Logger
from dstrat.training.metrics.publisher import Metrics

MARK = 7.0  # what a strategy puts into tensors, so that a test sees where they come from


# Values


class Reader(SingleDeviceStrategy):
    """Notes how many values it reads at once."""

    def __init__(self):
        super().__init__()
        self.read = []

    def read_values(self, tensors):
        self.read.append(len(tensors))
        return [MARK] * len(tensors)


class Written(Logger):
    def __init__(self):
        self.values = []

    def log_metrics(self, metrics, step=None):
        self.values.append({name: value for name, value in metrics.items() if name != "epoch"})


def test_values_of_one_element_are_read_by_default():
    tensors = [torch.tensor(1), torch.tensor([2.5]), torch.tensor([[True]]), torch.tensor(3.0, dtype=torch.bfloat16)]
    assert SingleDeviceStrategy().read_values(tensors) == [1.0, 2.5, 1.0, 3.0]
    assert SingleDeviceStrategy().read_values([]) == []


def test_a_value_is_read_once_until_it_changes():
    strategy, total = Reader(), torch.zeros(1)
    metrics = Metrics(strategy)
    for _ in range(2):
        assert metrics.as_numbers({"loss": total, "loss_epoch": total, "step": 3}) == {
            "loss": MARK,
            "loss_epoch": MARK,
            "step": 3.0,
        }
    total += 1
    metrics.as_numbers({"loss": total, "error": torch.ones(())})
    assert strategy.read == [1, 2]


def test_values_on_a_device_are_read_by_the_strategy_when_they_are_due(quiet_trainer, make_line, line_class, loader):
    class OnDevice(line_class):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            for name in ("loss", "error"):
                self.log(name, loss.detach().to("meta"), on_step=True, on_epoch=True)  # which nothing else can read
            return loss

    strategy, written = Reader(), Written()
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, logger=written, log_every_n_steps=3)
    trainer.fit(make_line(OnDevice), loader())
    of_step = [values for values in written.values if "loss_step" in values]
    assert of_step == [{"loss_step": MARK, "error_step": MARK}] * 2
    assert strategy.read == [2, 2, 2]  # after steps 3 and 6, and at the end of the epoch


# Devices and the end of a run


@pytest.mark.parametrize("device", ["cuda", torch.device("mps"), "cuda:1", "cpu"])
def test_a_device_without_an_index_is_the_first_one(device):
    expected = {"cuda": torch.device("cuda", 0), "cuda:1": torch.device("cuda", 1), "cpu": torch.device("cpu")}
    assert SingleDeviceStrategy(device).root_device == expected.get(device, torch.device("mps", 0))


class Broken(nn.Linear):
    """A layer from whose device nothing can be read after an error."""

    def _apply(self, function, recurse=True):
        raise RuntimeError("CUDA error: device-side assert triggered")


class NotesEnd(PortableCheckpointIO):
    has_ended = False

    def teardown(self):
        super().teardown()
        self.has_ended = True


def test_everything_is_closed_where_the_module_cannot_be_copied_from_its_device():
    io = NotesEnd()
    strategy = build(strategy=SingleDeviceStrategy(checkpoint_io=io), accelerator=ACCELERATOR, devices=1)
    strategy.connect(Broken(2, 2))
    with pytest.raises(RuntimeError, match="device-side assert"):
        strategy.teardown()
    assert io.has_ended


# Batches


# A fork in a thread could take over locks that other threads of the tests hold.
IN_WORKER = {"num_workers": 1, "multiprocessing_context": "forkserver"}


class Ahead(SingleDeviceStrategy):
    """Reads and moves all batches in a thread, before the first one is used."""

    def __init__(self):
        super().__init__()
        self.threads = []

    def prefetch(self, items, move):
        moved = []

        def read():
            self.threads.append(threading.current_thread())
            moved.extend(map(move, items))

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        return iter(moved)


class Losses(Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(float(outputs["loss"]))


def fit_losses(quiet_trainer, module, loader, **options):
    losses = Losses()
    quiet_trainer(max_epochs=1, callbacks=[losses], **options).fit(module, loader)
    return losses.values


def test_a_strategy_prefetches_what_workers_load(quiet_trainer, make_line, loader):
    strategy = Ahead()
    found = fit_losses(quiet_trainer, make_line(), loader(**IN_WORKER), strategy=strategy)
    assert len(strategy.threads) == 1
    assert strategy.threads[0] is not threading.main_thread()
    assert found == fit_losses(quiet_trainer, make_line(), loader())


def test_an_own_loop_prefetches_what_workers_load(loader):
    strategy = Ahead()

    def train(loop):
        module = nn.Linear(8, 1)
        loop.setup(module, lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
        return len(list(loop.training_loader(loader(**IN_WORKER))))

    assert OwnLoop(build(strategy=strategy, accelerator=ACCELERATOR, devices=1)).launch(train) == 6
    assert len(strategy.threads) == 1


def test_batches_that_are_read_here_are_not_prefetched(quiet_trainer, line, loader):
    strategy = Ahead()
    fit_losses(quiet_trainer, line, loader(shuffle=True), strategy=strategy)
    assert strategy.threads == []


def test_batches_with_a_hook_of_the_users_are_not_prefetched(quiet_trainer, make_line, line_class, loader):
    class Hooked(line_class):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    strategy = Ahead()
    fit_losses(quiet_trainer, make_line(Hooked), loader(**IN_WORKER), strategy=strategy)
    assert strategy.threads == []


# State


class Marking(SingleDeviceStrategy):
    """Brings tensors to the host with values that show it."""

    def to_host(self, tensor):
        return torch.full_like(tensor, MARK)


def test_what_is_kept_of_a_fit_is_brought_to_the_host_by_the_strategy(
    quiet_trainer, make_line, line_class, loader, tmp_path
):
    class Adam(line_class):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    trainer = quiet_trainer(strategy=Marking(), max_epochs=1)
    trainer.fit(make_line(Adam), loader())
    trainer.save_checkpoint(tmp_path / "saved")
    (optimizer,) = PortableCheckpointIO().load_checkpoint(tmp_path / "saved")["optimizers"]
    assert optimizer["state"]["layer.weight"]["exp_avg"].tolist() == [[MARK] * 8]


def test_predictions_are_kept_on_the_host(quiet_trainer, line, loader):
    (first, *_) = quiet_trainer(strategy=Marking()).predict(line, loader())
    assert set(first.tolist()) == {MARK}


class SharesRankState(Marking):
    """Notes the objects that it sends to other ranks."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def broadcast(self, obj, src=0):
        self.sent.append(obj)
        return obj


class Accumulates(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 0:  # of two, whose gradients make one step
            trainer.save_checkpoint(self.path)


def test_states_of_ranks_are_sent_from_the_host(quiet_trainer, line, loader, tmp_path):
    strategy = SharesRankState()
    options = {"plugins": "torch", "accumulate_grad_batches": 2, "callbacks": Accumulates(tmp_path / "saved")}
    quiet_trainer(strategy=strategy, max_epochs=1, **options).fit(line, loader())
    (state,) = [one for one in strategy.sent if isinstance(one, dict) and "gradients" in one]
    assert state["gradients"]["layer.weight"].tolist() == [[MARK] * 8]


def test_an_own_loop_sends_states_of_ranks_from_the_host(tmp_path):
    strategy = SharesRankState()
    strategy.rank_state = lambda: {"kept": torch.zeros(2)}

    def train(loop):
        loop.setup(nn.Linear(8, 1), lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
        loop.save_checkpoint(tmp_path / "saved", {})

    OwnLoop(build(strategy=strategy, accelerator=ACCELERATOR, devices=1, plugins="torch")).launch(train)
    (state,) = [one for one in strategy.sent if isinstance(one, dict) and "strategy" in one]
    assert state["strategy"]["kept"].tolist() == [MARK, MARK]


class Copying(SingleDeviceStrategy):
    """Gives copies of its state to a checkpoint, as where the device is none that files are read into."""

    replicates_state = False  # or the whole state would be loaded

    def sharded_module_state(self):
        return {name: value.clone() for name, value in super().sharded_module_state().items()}

    def load_sharded_module_state(self, state):
        self.module.load_state_dict(state)


class Saves(Callback):
    saves_checkpoints = True

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 2:
            trainer.save_checkpoint(self.path)


class InPlace(SingleDeviceStrategy):
    """Lets checkpoints be read into the module itself."""

    replicates_state = False


@pytest.mark.parametrize("strategy", [Copying, InPlace])
def test_a_checkpoint_reaches_the_module_through_copies_too(quiet_trainer, make_line, loader, tmp_path, strategy):
    whole, resumed = make_line(), make_line()
    nn.init.zeros_(resumed.layer.weight)
    options = {"max_epochs": 1, "plugins": PortableCheckpointIO()}
    quiet_trainer(strategy=strategy(), callbacks=Saves(tmp_path / "saved"), **options).fit(whole, loader())
    quiet_trainer(strategy=strategy(), **options).fit(resumed, loader(), ckpt_path=tmp_path / "saved")
    assert torch.equal(resumed.layer.weight, whole.layer.weight)

"""What a strategy has of its own is in checkpoints, and evaluation sees the weights that count."""

from __future__ import annotations

import logging
from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, ParallelStrategy, SingleDeviceStrategy, TorchCheckpointIO, TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO

ROUND = 3


class Apart(ParallelStrategy):
    """Averages parameters in every third step, and is different in each process until then."""

    start_method = "fork"
    steps = 0

    def optimizer_step(self, optimizer, closure, model=None, **kwargs):
        loss = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.steps += 1
        if self.steps % ROUND == 0:
            for parameter in self.module.parameters():
                parameter.data = self.reduce(parameter)
        return loss

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

    def rank_state(self):
        return {"weights": dict(self.module.state_dict())}

    def load_rank_state(self, state):
        self.module.load_state_dict(state["weights"])


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SavesAt(Callback):
    saves_checkpoints = runs_last = True

    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class NotesState(Callback):
    """Notes the first weight of each process and the steps of the strategy when training starts."""

    def on_train_start(self, trainer, module):
        weights = trainer.strategy.all_gather(module.layer.weight.detach()[0, 0])
        self.first_weights, self.steps = weights.tolist(), trainer.strategy.steps

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)


@pytest.fixture
def fit(quiet_trainer):
    def run(strategy, *callbacks, steps=5, devices=2, io=PortableCheckpointIO, ckpt_path=None):
        torch.manual_seed(0)
        module = Line()
        x = torch.randn(24, 4)
        trainer = quiet_trainer(
            strategy=strategy, devices=devices, max_steps=steps, callbacks=list(callbacks), plugins=[io()]
        )
        trainer.fit(module, DataLoader(TensorDataset(x), batch_size=2), ckpt_path=ckpt_path)
        return module.layer.weight.detach()

    return run


@pytest.mark.parametrize(("io", "stops"), [(PortableCheckpointIO, [1, 3, 5]), (TorchCheckpointIO, [5])])
def test_processes_that_train_apart_go_on_exactly(fit, tmp_path, io, stops):
    whole = fit(Apart(), steps=8, io=io)
    for step in stops:
        saved = tmp_path / f"{step}"
        fit(Apart(), SavesAt(saved, step), steps=step, io=io)
        assert torch.equal(fit(Apart(), steps=8, ckpt_path=saved, io=io), whole), step


def test_on_another_number_of_processes_only_the_common_state_is_loaded(fit, tmp_path):
    fit(Apart(), SavesAt(tmp_path / "saved", 5))
    noted = NotesState()
    fit(Apart(), noted, devices=3, steps=6, ckpt_path=tmp_path / "saved")
    assert noted.steps == 5
    assert len(set(noted.first_weights)) == 1


class Following(SingleDeviceStrategy):
    """Has a state, and notes when it is asked for what."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def state_dict(self):
        return {"rounds": 1}

    @contextmanager
    def evaluation_context(self):
        self.calls.append("evaluation begins")
        yield
        self.calls.append("evaluation ends")

    def finish_training(self):
        self.calls.append("finish_training")


class NotesHooks(Callback):
    def __init__(self, calls):
        for name in ("on_validation_start", "on_validation_end", "on_train_end", "on_fit_end"):
            setattr(self, name, lambda *_, name=name: calls.append(name))


def fit_here(quiet_trainer, strategy, *callbacks, **options):
    trainer = quiet_trainer(strategy=strategy, callbacks=list(callbacks), max_epochs=1, num_sanity_val_steps=0)
    loader = DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=2)
    trainer.fit(Line(), loader, loader, **options)


def test_evaluation_with_its_hooks_is_within_the_context_and_training_is_finished_after_its_last_hook(quiet_trainer):
    strategy = Following()
    fit_here(quiet_trainer, strategy, NotesHooks(strategy.calls))
    validation = ["evaluation begins", "on_validation_start", "on_validation_end", "evaluation ends"]
    assert strategy.calls == [*validation, "on_train_end", "finish_training", "on_fit_end"]


class Breaks(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        raise ValueError("broken")


def test_a_broken_training_is_not_finished(quiet_trainer):
    strategy = Following()
    with pytest.raises(ValueError, match="broken"):
        fit_here(quiet_trainer, strategy, Breaks())
    assert strategy.calls == []


def test_another_strategy_begins_without_the_state_and_says_so(quiet_trainer, tmp_path, caplog):
    fit_here(quiet_trainer, Following(), SavesAt(tmp_path / "saved", 1))
    with caplog.at_level(logging.WARNING, "dstrat"):
        fit_here(quiet_trainer, SingleDeviceStrategy(), ckpt_path=tmp_path / "saved")
    assert "has a state of Following, which SingleDeviceStrategy cannot load: it begins without" in caplog.text

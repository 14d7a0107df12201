"""Rounds, their outer step, and what of them is in checkpoints."""

from __future__ import annotations

import copy
import itertools

import dstrat
import pytest
import torch
from dstrat import Callback, Trainer, TrainModule
from dstrat.errors import RankFailedError, RequestError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from acme_diloco import DiLoCoStrategy

ROUND, LR, MOMENTUM = 3, 0.7, 0.9
BATCH = 4


class Net(TrainModule):
    """Fits a sum; its buffer, which it subtracts, is a running mean of what this process has seen."""

    def __init__(self, optimizer=torch.optim.SGD):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
        self.register_buffer("center", torch.zeros(4))
        self.optimizer = optimizer

    def loss(self, batch):
        return nn.functional.mse_loss(self.layers(batch[0] - self.center), batch[0].sum(1, keepdim=True))

    def training_step(self, batch, batch_idx):
        self.center.lerp_(batch[0].mean(0), 0.3)
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.1)


class Plain(Net):
    """The same without random numbers and running mean."""

    def __init__(self, optimizer=torch.optim.SGD):
        super().__init__(optimizer)
        del self.layers[2]

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


def numbers(samples=96):
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(2))


def fit(module, *callbacks, strategy=None, devices=2, steps=8, batch=BATCH, ckpt_path=None, **options):
    trainer = Trainer(
        strategy=strategy or DiLoCoStrategy(inner_steps=ROUND, start_method="fork"),
        accelerator="cpu",
        devices=devices,
        max_steps=steps,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    data = TensorDataset(numbers())
    trainer.fit(module, DataLoader(data, batch), DataLoader(data, 2 * batch), ckpt_path=ckpt_path)
    return trainer


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def by_hand(module, steps, *, ranks=2, accumulate=1, clip=None):
    """Train with torch alone: replicas one after the other, torch's SGD outside."""
    outer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True)
    replicas = [copy.deepcopy(module) for _ in range(ranks)]
    inner = [replica.configure_optimizers() for replica in replicas]
    for step in range(1, steps + 1):
        for rank, (replica, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            optimizer.zero_grad()
            for index in range((step - 1) * accumulate, step * accumulate):
                batch = numbers()[rank::ranks][index * BATCH : (index + 1) * BATCH]
                (replica.loss([batch]) / accumulate).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(replica.parameters(), clip)
            optimizer.step()
        if step % ROUND == 0 or step == steps:
            parameters = [module.parameters(), *(replica.parameters() for replica in replicas)]
            for parameter, *others in zip(*parameters, strict=True):
                parameter.grad = parameter.detach() - torch.stack([other.detach() for other in others]).mean(0)
            outer.step()
            for replica in replicas:
                for parameter, other in zip(module.parameters(), replica.parameters(), strict=True):
                    other.data.copy_(parameter.data)
    return weights(module)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("steps", [6, 8])
def test_rounds_are_those_of_the_paper_and_the_last_is_joined_at_the_end(optimizer, steps):
    module = Plain(optimizer)
    expected = by_hand(copy.deepcopy(module), steps)
    fit(module, steps=steps)
    torch.testing.assert_close(weights(module), expected, rtol=1e-5, atol=1e-6)


def test_accumulation_and_clipping_are_those_of_each_replica():
    module = Plain()
    expected = by_hand(copy.deepcopy(module), 5, accumulate=2, clip=0.05)
    fit(module, steps=5, accumulate_grad_batches=2, gradient_clip_val=0.05)
    torch.testing.assert_close(weights(module), expected, rtol=1e-5, atol=1e-6)


def test_with_rounds_of_one_step_and_no_momentum_it_is_plain_data_parallelism():
    module = Plain()
    alone = copy.deepcopy(module)
    fit(alone, strategy="single_device", devices=1, batch=2 * BATCH)
    plain = DiLoCoStrategy(inner_steps=1, outer_lr=1.0, outer_momentum=0.0, start_method="fork")
    fit(module, strategy=plain)
    torch.testing.assert_close(weights(module), weights(alone), rtol=1e-5, atol=1e-6)


class Watches(Callback):
    """Compares the replicas after each step, and what is evaluated with their mean."""

    def __init__(self):
        self.apart = []
        self.evaluated_mean = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.replicas = trainer.strategy.all_gather(weights(module))
        centers = trainer.strategy.all_gather(module.center)
        self.apart.append([bool((values != values[0]).any()) for values in (self.replicas, centers)])

    def on_validation_start(self, trainer, module):
        evaluated = weights(module)
        self.evaluated_mean.append(torch.allclose(evaluated, self.replicas.mean(0)))
        saved = trainer.strategy.module_state_dict()
        assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())

    def on_train_end(self, trainer, module):
        assert torch.equal(weights(module), self.replicas[trainer.global_rank])

    def state_dict(self):
        return {"apart": self.apart, "evaluated_mean": self.evaluated_mean}

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)


def test_replicas_drift_within_a_round_and_their_mean_is_evaluated():
    watches = Watches()
    fit(Net(), watches, val_check_interval=2, num_sanity_val_steps=0)
    assert watches.apart == [[step % ROUND != 0] * 2 for step in range(1, 9)]
    assert watches.evaluated_mean == [True] * 4


class SavesAt(Callback):
    saves_checkpoints = runs_last = True

    def __init__(self, path, step, hook):
        self.path, self.step = path, step
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("step", "hook", "plugins"),
    [
        (2, "on_train_batch_end", None),
        (2, "on_train_batch_end", "torch"),
        (3, "on_train_batch_end", None),
        (4, "on_validation_end", None),
        (5, "on_train_batch_end", None),
    ],
)
def test_training_goes_on_exactly_within_a_round_and_between_two(tmp_path, step, hook, plugins):
    options = {"val_check_interval": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "plugins": plugins}
    whole, module = Net(torch.optim.AdamW), Net(torch.optim.AdamW)
    trainer = fit(whole, **options)
    fit(Net(torch.optim.AdamW), SavesAt(tmp_path / "saved", step, hook), steps=step, **options)
    resumed = fit(module, ckpt_path=tmp_path / "saved", **options)
    assert torch.equal(weights(module), weights(whole))
    assert torch.equal(module.center, whole.center)
    assert resumed.callback_metrics == trainer.callback_metrics


class NotesReplicas(Callback):
    def on_train_start(self, trainer, module):
        self.replicas = trainer.strategy.all_gather(weights(module))
        self.steps = trainer.strategy.state_dict()["steps"]

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)


def test_on_another_number_of_processes_all_go_on_from_the_mean(tmp_path):
    notes = NotesReplicas()
    fit(Plain(torch.optim.AdamW), SavesAt(tmp_path / "saved", 5, "on_train_batch_end"))
    fit(Plain(torch.optim.AdamW), notes, devices=3, steps=9, ckpt_path=tmp_path / "saved")
    assert notes.steps == 5 - ROUND
    assert notes.replicas.shape[0] == 3
    assert (notes.replicas == notes.replicas[0]).all()


def test_the_weights_of_a_checkpoint_are_the_mean(tmp_path):
    class Compares(SavesAt):
        def save(self, trainer, module, *_):
            super().save(trainer)
            if trainer.global_step == self.step:
                mean = trainer.strategy.all_gather(weights(module)).mean(0)
                saved = Plain.load_from_checkpoint(self.path)
                assert torch.allclose(weights(saved), mean)

    fit(Plain(), Compares(tmp_path / "saved", 5, "on_train_batch_end"))


def train_by_hand(loop):
    module = Plain()
    loop.setup(module, lambda module: module.configure_optimizers())
    for batch in itertools.islice(loop.training_loader(DataLoader(TensorDataset(numbers()), BATCH)), 2 * ROUND):
        loop.backward(loop.compute(module.loss, batch))
        loop.step()
    return weights(module)


def test_in_a_hand_written_loop_it_trains_as_in_the_trainer():
    strategy = dstrat.build(
        strategy=DiLoCoStrategy(inner_steps=ROUND, start_method="fork"), accelerator="cpu", devices=2
    )
    module = Plain()
    fit(module, steps=2 * ROUND)
    assert torch.equal(dstrat.OwnLoop(strategy).launch(train_by_hand), weights(module))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inner_steps": 0}, "inner_steps 0 must be a number of steps, at least 1"),
        ({"outer_lr": 0.0}, "outer_lr=0.0 must be above 0"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0 from 0 to below 1"),
    ],
)
def test_numbers_out_of_range_are_refused(options, words):
    with pytest.raises(RequestError, match=words):
        DiLoCoStrategy(**options)


class Grows(Plain):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.more = nn.Parameter(torch.ones(3))
            self.optimizers().add_param_group({"params": [self.more]})


def test_a_parameter_that_comes_within_a_round_is_refused():
    with pytest.raises(RankFailedError, match="more parameters within a round of DiLoCo"):
        fit(Grows())

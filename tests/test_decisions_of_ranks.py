"""Decisions that change the training are the same on two ranks, also where their values differ."""

from __future__ import annotations

import time

import pytest
import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import BaseFinetuning, Callback, StochasticWeightAveraging, Timer, TrainModule, WeightAveraging
from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.errors import DstratError, MisuseError

LIMIT = 1000  # epochs, which no test reaches


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.head(self.body(batch[0])).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.01)


def data():
    return DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)


def fitted(cluster, callbacks, strategy="ddp", **options):
    """Return the steps of a fit, and the weights after it on this rank; or the message of its error."""
    module = Net()
    trainer = quiet_trainer(strategy, cluster, callbacks=callbacks, **options)
    try:
        trainer.fit(module, data(), data())
    except MisuseError as error:
        return str(error)
    weights = [value.tolist() for value in module.state_dict().values()]
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return trainer.global_step, weights, rates


# Stops


def stop(callback, trainer, *args):
    if trainer.global_rank == 1 and trainer.current_epoch == 1:
        trainer.should_stop = True


def stopped(cluster, hook):
    """Fit until rank 1 wishes to stop, in a hook of the second epoch."""
    stops = type("Stops", (Callback,), {hook: stop})()
    steps, weights, _ = fitted(cluster, [stops], max_epochs=LIMIT)
    return steps, weights


def test_should_stop_of_one_rank_ends_all_at_the_same_step():
    hooks = ("on_train_epoch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end")
    one, other = in_ranks(each, function=stopped, cases={hook: {"hook": hook} for hook in hooks})
    assert one == other
    assert all(2 < steps < 2 * LIMIT for steps, _ in one.values())


class Waits(Callback):
    def on_train_batch_end(self, trainer, *args):
        time.sleep(0.02 * trainer.global_rank)


def timed(cluster, **options):
    callbacks = [Waits(), *options.pop("callbacks", [])]
    steps, weights, _ = fitted(cluster, callbacks, max_epochs=LIMIT, **options)
    return steps, weights


def test_limits_of_time_end_all_ranks_at_the_same_step():
    limit = {"seconds": 0.2}
    cases = {
        "max_time": {"max_time": limit},
        "timer of epochs": {"callbacks": [Timer(limit, interval="epoch")]},
        "no time": {"max_time": {"milliseconds": 1}},
    }
    one, other = in_ranks(each, function=timed, cases=cases)
    assert one == other
    assert all(0 <= steps < 2 * LIMIT for steps, _ in one.values())


# Averages of weights


class ByRank(WeightAveraging):
    """Rank 1 has another opinion about the second step."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def should_update(self, step_idx=None, epoch_idx=None):
        return step_idx == 0 or (step_idx == 1 and self.rank == 1)


class InTurns(ByRank):
    """Each rank updates once, after a step of its own."""

    def should_update(self, step_idx=None, epoch_idx=None):
        return step_idx == self.rank


def averaged(cluster, kind, **options):
    rank = cluster.global_rank
    kinds = {
        "by rank": lambda: ByRank(rank),
        "in turns": lambda: InTurns(rank),
        "swa": lambda: StochasticWeightAveraging(0.05, 0.5),
    }
    return fitted(cluster, [kinds[kind]()], **options)


def test_averages_of_different_steps_are_an_error_on_all_ranks():
    cases = {
        "validation": {"kind": "by rank"},
        "end": {"kind": "by rank", "limit_val_batches": 0},
    }
    for rank, found in enumerate(in_ranks(each, function=averaged, cases=cases)):
        for message in found.values():
            assert f"ByRank.should_update has returned True {1 + rank} times on rank {rank} of 2" in message


def test_as_many_averages_of_different_steps_are_an_error():
    expected = (
        "InTurns.should_update has returned True 1 times on rank {} of 2, and after other steps on others: decide"
    )
    for rank, found in enumerate(in_ranks(each, function=averaged, cases={"": {"kind": "in turns"}})):
        assert expected.format(rank) in found[""]


def test_stochastic_averages_begin_in_the_same_epoch():
    cases = {name: {"kind": "swa", "max_epochs": 4, "strategy": name} for name in ("ddp",)}
    one, other = in_ranks(each, function=averaged, cases=cases)
    assert one == other


# Finetuning


class Unfreezes(BaseFinetuning):
    def __init__(self, rank, differs):
        super().__init__()
        self.rank, self.differs = rank, differs

    def freeze_before_training(self, module):
        self.freeze(module.body)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1 and (self.differs != "parameters" or self.rank == 1):
            rate = 0.01 * (1 + self.rank) if self.differs == "rates" else 0.01
            self.unfreeze_and_add_param_group(module.body, optimizer, lr=rate)


def finetuned(cluster, differs, strategy):
    return fitted(cluster, [Unfreezes(cluster.global_rank, differs)], max_epochs=3, strategy=strategy)


@pytest.mark.parametrize("differs", ["parameters", "rates"])
def test_layers_that_one_rank_unfreezes_are_an_error(differs):
    with pytest.raises(
        pytest.fail.Exception, match=r"Unfreezes.finetune_function has set .* 'body.weight' otherwise on rank 1 than"
    ):
        in_ranks(raises, differs=differs)


def raises(cluster, differs):
    message = finetuned(cluster, differs, "ddp")
    if isinstance(message, str):
        raise DstratError(message)


def test_ranks_that_unfreeze_alike_have_the_same_weights_and_rates():
    one, other = in_ranks(each, function=finetuned, cases={"ddp": {"differs": "", "strategy": "ddp"}})
    assert one == other
    assert one["ddp"][2] == [0.01, 0.01]


# Steps that a loss scale skips


class Overflows(Net):
    """The gradient of one number is infinite in the second step: that of a shard of rank 1."""

    def on_after_backward(self):
        gradient = self.body.weight.grad
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        self.before = [value.detach().clone() for value in self.local_values()]
        if self.trainer.fit_loop.batches_seen == 1 and self.global_rank == 1:
            local[-1, -1] = float("inf")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        equal = [torch.equal(a, b) for a, b in zip(self.before, self.local_values(), strict=True)]
        self.skipped.append(all(equal))

    def local_values(self):
        return [p.to_local() if hasattr(p, "to_local") else p for p in self.parameters()]


def scaled(cluster, strategy):
    module = Overflows()
    module.skipped = []
    precision = MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    quiet_trainer(strategy, cluster, plugins=[precision], max_epochs=2).fit(module, data())
    return module.skipped


def test_a_step_that_overflows_in_one_shard_is_skipped_by_all_ranks():
    one, other = in_ranks(each, function=scaled, cases={"fsdp": {"strategy": "fsdp"}})
    assert one == other == {"fsdp": [False, True, False, False]}

"""Callbacks that change what is trained: several ranks train as one device does."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import Losses, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import BackboneFinetuning, Callback, ModelPruning, TrainModule, Tuner
from dstrat.errors import ConflictError, MisuseError
from dstrat.strategies import SingleDeviceStrategy

DATA = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)
        self.lr = 0.05

    def training_step(self, batch, batch_idx):
        return (self.head(self.backbone(batch[0])) - batch[0].sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=self.lr)


class Masks(Callback):
    """Keeps the masks of each epoch."""

    def __init__(self):
        self.masks = []

    def on_train_epoch_start(self, trainer, module):
        self.masks.append([value.clone() for name, value in module.named_buffers() if name.endswith("_mask")])


def loader(batch_size):
    return DataLoader(TensorDataset(DATA), batch_size)


def losses_of(strategy, callback, cluster=None):
    losses, ranks = Losses(), 1 if cluster is None else cluster.world_size
    trainer = quiet_trainer(strategy, cluster, callbacks=[callback, losses], max_epochs=4)
    trainer.fit(Net(), loader(8 // ranks))
    return losses.losses


def tuned(strategy, cluster=None):
    """What a search finds, and what a fit after it comes to."""
    torch.manual_seed(5)
    ranks = 1 if cluster is None else cluster.world_size
    trainer, module = quiet_trainer(strategy, cluster), Net()
    weights = copy.deepcopy(module.state_dict())
    curve = Tuner(trainer).lr_find(module, loader(8 // ranks), min_lr=1e-4, max_lr=0.1, num_training=20)
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    trainer.fit(module, loader(8 // ranks))
    return curve.results["loss"], module.lr


def test_a_backbone_is_unfrozen_on_several_ranks_as_on_one_device():
    expected = losses_of("single_device", BackboneFinetuning(unfreeze_backbone_at_epoch=2))
    cases = {name: {"strategy": name} for name in ("ddp", "fsdp")}
    for of_cases in in_ranks(each, 2, function=unfrozen, cases=cases):
        for losses in of_cases.values():
            assert losses == pytest.approx(expected, rel=1e-5)


def unfrozen(cluster, strategy):
    return losses_of(strategy, BackboneFinetuning(unfreeze_backbone_at_epoch=2), cluster)


class Switch(Callback):
    """Trains on with another optimizer from an epoch on, or from a batch of it."""

    def __init__(self, epoch=2, batch=None):
        self.epoch, self.batch = epoch, batch

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == self.epoch and self.batch is None:
            trainer.strategy.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == self.epoch and self.batch == batch_idx:
            trainer.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]


def by_hand(switch):
    """The losses of the same training in a loop of torch."""
    module, losses = Net(), []
    optimizer = module.configure_optimizers()
    for epoch in range(4):
        for index, batch in enumerate(loader(8)):
            if (epoch, index) == (switch.epoch, switch.batch or 0):
                optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            optimizer.zero_grad()
            loss = module.training_step(batch, index)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("switch", [Switch(), Switch(epoch=1, batch=1)], ids=["epoch", "batch"])
def test_an_optimizer_that_a_callback_sets_steps_from_then_on(switch):
    assert losses_of("single_device", switch) == pytest.approx(by_hand(switch), rel=1e-5)


def test_ranks_go_on_with_an_optimizer_that_a_callback_sets():
    expected = by_hand(Switch())
    cases = {name: {"strategy": name} for name in ("ddp", "fsdp")}
    for of_cases in in_ranks(each, 2, function=switched, cases=cases):
        for losses in of_cases.values():
            assert losses == pytest.approx(expected, rel=1e-5)


def switched(cluster, strategy):
    return losses_of(strategy, Switch(), cluster)


def test_a_strategy_that_keeps_its_optimizer_refuses_another_one():
    class Keeping(SingleDeviceStrategy):
        allows_new_optimizers = False

    with pytest.raises(MisuseError, match="Keeping trains with the optimizers of configure_optimizers to its end"):
        losses_of(Keeping(), Switch())


def test_optimizers_are_not_set_outside_of_a_fit():
    with pytest.raises(MisuseError, match=r"trainer\.optimizers was set outside of a fit"):
        quiet_trainer("single_device").optimizers = []


def test_pruned_ranks_train_as_one_device():
    expected = losses_of("single_device", ModelPruning("l1_unstructured", amount=0.3))
    for losses in in_ranks(pruned, 2):
        assert losses == pytest.approx(expected, rel=1e-5)


def pruned(cluster):
    return losses_of("ddp", ModelPruning("l1_unstructured", amount=0.3), cluster)


def test_masks_that_are_drawn_are_the_same_in_all_ranks():
    first, second = in_ranks(drawn, 2)
    assert [len(masks) for masks in first] == [0, 4, 4, 4]
    assert all(all(map(torch.equal, *epochs)) for epochs in zip(first, second, strict=True))


def drawn(cluster):
    masks = Masks()
    trainer = quiet_trainer(
        "ddp", cluster, callbacks=[ModelPruning("random_unstructured", amount=0.3), masks], max_epochs=4
    )
    module = Net()
    torch.manual_seed(cluster.global_rank)
    trainer.fit(module, loader(4))
    return masks.masks


def test_sharded_parameters_are_not_pruned():
    assert in_ranks(refused, 2) == [True, True]


def refused(cluster):
    with pytest.raises(ConflictError, match="ModelPruning needs the whole parameters in each process"):
        losses_of("fsdp", ModelPruning("l1_unstructured"), cluster)
    return True


def test_several_ranks_find_the_learning_rate_of_one_device():
    losses, rate = tuned("single_device")
    for of_cases in in_ranks(
        each, 2, function=found_rate, cases={name: {"strategy": name} for name in ("ddp", "fsdp")}
    ):
        for found, found_lr in of_cases.values():
            assert found == pytest.approx(losses, rel=1e-5)
            assert found_lr == pytest.approx(rate)


def found_rate(cluster, strategy):
    return tuned(strategy, cluster)

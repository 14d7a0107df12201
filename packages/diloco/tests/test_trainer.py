"""Options of the Trainer within groups: the losses of a loop written by hand, and exact resumes."""

from __future__ import annotations

import pytest
import torch
from tests.hand_loop import Net as HandNet
from tests.hand_loop import parts, start
from tests.ranks import each, in_ranks
from tests.trainer_runs import Losses, Saves, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat_diloco import DiLoCoStrategy

GROUPS, EVERY, BATCHES, BATCH_SIZE, ACCUMULATED, CLIP = 2, 2, 12, 8, 2, 0.3


class Net(TrainModule):
    """Has a frozen layer, and a rate that falls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 6))
        self.net[0].requires_grad_(requires_grad=False)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.2, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def dataset():
    inputs = torch.randn(BATCHES * BATCH_SIZE, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.roll(1, 1) - inputs)


def losses_by_hand():
    """Return the losses of groups that train by themselves, and of the outer SGD with Nesterov momentum."""
    nets = [Net() for _ in range(GROUPS)]
    made = [net.configure_optimizers() for net in nets]
    outer = [parameter.detach().clone() for parameter in nets[0].parameters()]
    momenta = [torch.zeros_like(parameter) for parameter in outer]
    losses = []
    for number in range(BATCHES):
        of_groups = []
        for group, net in enumerate(nets):
            rows = torch.arange(group, BATCHES * BATCH_SIZE, GROUPS)
            size = BATCH_SIZE // GROUPS
            loss = net.training_step(dataset()[rows[number * size : (number + 1) * size]], number) / ACCUMULATED
            loss.backward()
            of_groups.append(loss.item())
        losses.append(sum(of_groups) / GROUPS)
        step, is_incomplete = divmod(number + 1, ACCUMULATED)
        if is_incomplete:
            continue
        for net, ([optimizer], [scheduler]) in zip(nets, made, strict=True):
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            scheduler["scheduler"].step()
        if step % EVERY == 0:
            with torch.no_grad():
                for weights, momentum, *of_nets in zip(
                    outer, momenta, *(net.parameters() for net in nets), strict=True
                ):
                    change = sum(weights - one for one in of_nets) / GROUPS
                    momentum.mul_(0.9).add_(change)
                    weights.sub_(0.7 * (change + 0.9 * momentum))
                    for one in of_nets:
                        one.copy_(weights)
    return losses


def fit(cluster, inner, *, callbacks=(), ckpt_path=None):
    losses = Losses()
    trainer = quiet_trainer(
        DiLoCoStrategy(inner=inner, groups=GROUPS, every=EVERY),
        cluster,
        plugins=[PortableCheckpointIO()],
        callbacks=[losses, *callbacks],
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=CLIP,
    )
    trainer.fit(Net(), DataLoader(dataset(), batch_size=BATCH_SIZE // GROUPS), ckpt_path=ckpt_path)
    return losses.losses


def outcome(cluster, inner, folder, moments):
    """Return the losses of a run, and of those that resume it after some batches."""
    run = fit(cluster, inner, callbacks=[Saves(folder, moments)])
    return run, {moment: fit(cluster, inner, ckpt_path=folder / str(moment)) for moment in moments}


def test_schedules_clipping_accumulation_and_frozen_layers_are_those_by_hand(tmp_path):
    expected = losses_by_hand()
    # Within an accumulation, within a round, and after one.
    cases = {inner: {"inner": inner, "folder": tmp_path / inner, "moments": (3, 6, 8)} for inner in ("ddp", "fsdp")}
    for found in in_ranks(each, function=outcome, cases=cases):
        for inner, (run, resumed) in found.items():
            assert run == pytest.approx(expected, rel=1e-6, abs=0), inner
            assert resumed == {moment: run[moment:] for moment in resumed}, inner


class Replaces(Callback):
    """Sets another optimizer after the third step, within a round; notes in which batches the groups differ."""

    def __init__(self):
        self.differences = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        strategy = trainer.strategy
        gathered = strategy.all_gather(weights_of(module))
        self.differences.append(bool((gathered[0] != gathered[1]).any()))
        if trainer.global_step == 3 and batch_idx % ACCUMULATED:
            before = strategy.optimizers[0]
            strategy.optimizers = [torch.optim.SGD(before.param_groups[0]["params"], lr=0.2, momentum=0.5)]
            strategy.optimizers[0].load_state_dict(before.state_dict())
            strategy.lr_schedulers[0].scheduler.optimizer = strategy.optimizers[0]


def weights_of(module):
    return torch.cat([one.detach().flatten() for one in module.parameters()])


def replaced(cluster):
    callback = Replaces()
    return fit(cluster, "ddp", callbacks=[callback]), callback.differences


def test_an_optimizer_that_replaces_another_goes_on_in_its_round():
    expected = losses_by_hand()
    for losses, differences in in_ranks(replaced):
        assert losses == pytest.approx(expected, rel=1e-6, abs=0)
        assert differences == [(batch + 1) // ACCUMULATED % EVERY > 0 for batch in range(BATCHES)]


def divided(cluster):
    """Return after which steps the groups differ, with two optimizers from the fourth step on."""
    strategy, module, differences = DiLoCoStrategy(every=2), HandNet(), []
    start(strategy, module, parts(cluster))
    for number in range(9):
        if number == 3:
            strategy.optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in module.layers[::2]]
        generator = torch.Generator().manual_seed(10 * number + cluster.global_rank)
        batch = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
        strategy.backward(strategy.training_step(batch, number))
        for optimizer in strategy.optimizers:
            strategy.optimizer_step(optimizer, lambda: None)
            optimizer.zero_grad()
        gathered = strategy.all_gather(weights_of(module))
        differences.append(bool((gathered[0] != gathered[1]).any()))
    strategy.teardown()
    return differences


def test_optimizers_that_divide_the_parameters_of_another_begin_a_round():
    for differences in in_ranks(divided):
        assert differences == [True, False, True, True, False, True, False, True, False]

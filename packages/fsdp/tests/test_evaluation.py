"""Evaluation: sharded like training, and nothing stays gathered."""

import pytest
import torch
from tests.hand_loop import BlockNet, batches, parts, share, start, train
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer, shuffled_loader
from torch import nn
from torch.distributed.tensor import DTensor

from dstrat import Callback, TrainModule
from dstrat_fsdp import FSDPStrategy

STEPS = ("validation_step", "test_step", "predict_step")


class Watching(BlockNet):
    """Notes how many parameters are gathered while its last layer runs."""

    def __init__(self):
        super().__init__()
        self.gathered = []
        self.last.register_forward_pre_hook(self.note)

    def note(self, layer, args):
        self.gathered.append(sum(p.numel() for p in self.parameters() if not isinstance(p, DTensor)))

    def test_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)


def evaluated(cluster, is_fitting, options):
    strategy = FSDPStrategy(**options)
    module = Watching()
    start(strategy, module, parts(cluster), is_fitting=is_fitting)
    losses = []
    for step in STEPS:
        with torch.no_grad():
            mine = [getattr(strategy, step)(share(strategy, batch), 0) for batch in batches(3)]
        losses.append([float(strategy.reduce(loss)) for loss in mine])
        assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    outside = sum(p.numel() for layer in (module.first, module.last) for p in layer.parameters())
    if is_fitting:
        losses.append(train(strategy, steps=3))
    strategy.teardown()
    return losses, max(module.gathered[:9]), outside


def test_values_are_those_of_one_device_and_the_module_is_never_gathered_whole():
    alone = BlockNet()
    with torch.no_grad():
        expected = [float(alone.validation_step(batch, 0)) for batch in batches(3)]
    cases = {
        (is_fitting, sharding): {"is_fitting": is_fitting, "options": {"sharding_strategy": sharding}}
        for is_fitting in (False, True)
        for sharding in ("FULL_SHARD", "SHARD_GRAD_OP")
    }
    for found in in_ranks(each, function=evaluated, cases=cases):
        for (is_fitting, _), (losses, gathered, outside) in found.items():
            assert losses[:3] == [pytest.approx(expected, rel=1e-6)] * 3
            assert gathered == outside
            if is_fitting:
                assert losses[3][0] == pytest.approx(expected[0], rel=1e-6)


class Normalized(TrainModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


class StatisticsBefore(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.mean = module.layers[0].running_mean.clone()


def normalized(cluster):
    """Return what a validation in a fit comes to, and rank 0's module by hand; whether statistics differed before."""
    torch.manual_seed(0)
    data, module, before = shuffled_loader(64, batch_size=4).dataset, Normalized(), StatisticsBefore()
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    strategy = FSDPStrategy(state_dict_type="full")
    trainer = quiet_trainer(strategy, cluster, callbacks=before, num_sanity_val_steps=0)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4), loader)
    by_hand = module.eval().training_step(data.tensors, 0).item()
    return float(trainer.callback_metrics["val_loss"]), by_hand, before.mean.tolist()


def test_a_validation_has_the_statistics_of_rank_zero_on_every_rank():
    (found, expected, mean), (other, _, other_mean) = in_ranks(normalized)
    assert mean != other_mean
    assert found == other == pytest.approx(expected, rel=1e-5)

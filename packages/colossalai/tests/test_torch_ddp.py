"""Colossal-AI's booster with DistributedDataParallel: the losses of one device, and checkpoints that move."""

import pytest
import torch
from tests.hand_loop import BlockNet, losses_of, parts
from tests.ranks import each, in_ranks
from tests.ways_of_training import WAYS, losses_of_one_device
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule

pytest.importorskip("colossalai", reason="needs colossalai")

from dstrat_colossalai import ColossalAITorchDDPStrategy


def losses(cluster, training):
    return losses_of(ColossalAITorchDDPStrategy(), BlockNet(), parts(cluster), **training)


@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_are_those_of_one_device(world_size):
    cases = {way: {"training": training} for way, training in WAYS.items()}
    expected = losses_of_one_device(BlockNet)
    for found in in_ranks(each, world_size, function=losses, cases=cases):
        assert found == expected


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        [inputs] = batch
        loss = (self.layers(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Saving(Callback):
    saves_checkpoints = True

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.path is not None and trainer.global_step == 5:
            trainer.save_checkpoint(self.path)


def train(cluster, strategy, steps, save=None, resume=None):
    from dstrat_ddp import DDPStrategy

    made = ColossalAITorchDDPStrategy() if strategy == "colossalai" else DDPStrategy()
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(strategy=made, accelerator="cpu", devices=2, plugins=[cluster], max_epochs=2, max_steps=steps,
                      enable_model_summary=False, callbacks=[Saving(save)], **options)  # fmt: skip
    net = Net()
    trainer.fit(net, loader, ckpt_path=resume)
    return net.losses


def test_it_resumes_to_the_last_bit_and_checkpoints_move_to_and_from_ddp(tmp_path):
    [unbroken, _] = in_ranks(train, strategy="colossalai", steps=10)
    for name in ("colossalai", "ddp"):
        [begun, _] = in_ranks(train, strategy=name, steps=5, save=tmp_path / name)
        assert begun == pytest.approx(unbroken[:5], rel=1e-6)
        for other in ("colossalai", "ddp"):
            [resumed, _] = in_ranks(train, strategy=other, steps=10, resume=tmp_path / name)
            assert resumed == (unbroken[5:] if name == other == "colossalai" else pytest.approx(unbroken[5:], rel=1e-6))

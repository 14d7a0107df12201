"""The plugins that need CUDA train and save where a GPU is."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Trainer, TrainModule

pytest.importorskip("colossalai", reason="needs colossalai")
pytestmark = pytest.mark.cuda


class Net(TrainModule):
    def __init__(self, optimizer):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        self.make_optimizer, self.losses = optimizer, []

    def training_step(self, batch, batch_idx):
        [inputs] = batch
        loss = (self.layers(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


def hybrid_adam(parameters):
    from colossalai.nn.optimizer import HybridAdam

    return HybridAdam(parameters, lr=0.01)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.mark.parametrize(
    ("alias", "precision", "optimizer"),
    [
        ("colossalai", "16-mixed", hybrid_adam),
        ("colossalai", "bf16-mixed", hybrid_adam),
        ("colossalai_low_level_zero", "32-true", adam),
        ("colossalai_low_level_zero", "bf16-mixed", adam),
        ("colossalai_torch_ddp", "32-true", adam),
        ("colossalai_torch_fsdp", "32-true", adam),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_trains_saves_and_resumes_on_a_gpu(tmp_path, alias, precision, optimizer, accumulate):
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(256, 16)), batch_size=16)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "gpu",
               "devices": 1, "precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0,
               "strategy": alias}  # fmt: skip
    begun, resumed = Net(optimizer), Net(optimizer)
    trainer = Trainer(max_epochs=2, **options)
    trainer.fit(begun, loader)
    assert begun.losses[-1] < begun.losses[0]
    trainer.save_checkpoint(tmp_path / "saved")
    Trainer(max_epochs=4, **options).fit(resumed, loader, ckpt_path=tmp_path / "saved")
    assert resumed.losses[-1] < begun.losses[0]

"""A second run in a process communicates through its own groups, though its mesh equals that of the first one."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ranks import in_ranks
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Trainer, TrainModule
from dstrat_fsdp import mesh
from dstrat_mesh import MeshStrategy


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.losses = []

    def configure_model(self):
        plan = {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()}
        parallelize_module(self, self.device_mesh["tp"], plan)

    def training_step(self, batch, batch_idx):
        loss = functional.mse_loss(self.layers(self.first(batch[0])), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def losses_of_two_runs(cluster, accelerator):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    losses = []
    for num_groups in (0, 3):  # torch numbers the groups of a process: those of the second mesh get other names

        def opened(*arguments, number=num_groups, **options):
            for _ in range(number):
                dist.new_group([0, 1])
            return torch.distributed.init_device_mesh(*arguments, **options)

        trainer = Trainer(
            strategy=MeshStrategy(tp=2),
            accelerator=accelerator,
            devices=2,
            plugins=[cluster],
            max_epochs=1,
            gradient_clip_val=0.5,
            **quiet,
        )
        module = Net()
        with mock.patch.object(mesh, "init_device_mesh", opened):
            trainer.fit(module, DataLoader(TensorDataset(inputs, inputs[:, :3]), batch_size=2))
        losses.append([float(loss) for loss in module.losses])
    return losses


@pytest.mark.parametrize("accelerator", ["simulated_gpu", "cpu"])
def test_a_second_run_uses_groups_of_its_own(accelerator):
    for first, second in in_ranks(losses_of_two_runs, accelerator=accelerator):
        assert len(first) == 4
        assert first == second

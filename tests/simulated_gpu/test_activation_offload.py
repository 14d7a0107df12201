"""Activations on the host: losses stay, the device's memory falls, and no copy is awaited by the host."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.ranks import in_ranks
from tests.simulated_gpu.test_training import DEVICE, equal, make_trainer, weights
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dstrat import SingleDeviceStrategy, TrainModule
from dstrat.parallel.activation_memory import ActivationMemory
from dstrat.testing import simulated_gpu
from dstrat_ddp import DDPStrategy
from dstrat_fsdp import FSDPStrategy
from dstrat_mesh import MeshStrategy

WIDTH, BATCH = 32, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        others = torch.cat([0 * x, 2 * x, x])
        x = x + 0.1 * others[-len(x) :].square()  # a view of the end of what it saves
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), 0.1)


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))

    def training_step(self, batch, batch_idx):
        return self.blocks(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader():
    inputs = torch.randn(4 * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs), batch_size=BATCH)


def trained(strategy, cluster=None, **options):
    net = Net()
    plugins = {} if cluster is None else {"plugins": [cluster]}
    torch.manual_seed(2)
    make_trainer(cluster, strategy=strategy, max_epochs=1, **plugins, **options).fit(net, loader())
    return weights(net)


OFFLOAD = {"activation_offload": True}
WAYS = {
    "offload": OFFLOAD,
    "of what is not computed again": OFFLOAD | {"activation_checkpointing": "full"},
    "beside saved products": OFFLOAD | {"activation_checkpointing": "selective"},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str)
def test_weights_are_bit_for_bit_those_without(options, settings):
    assert equal(trained(SingleDeviceStrategy(**options), **settings), trained(SingleDeviceStrategy(), **settings))


def ranks_are_equal(cluster, strategies):
    return {
        name: equal(trained(make(**OFFLOAD), cluster), trained(make(), cluster)) for name, make in strategies.items()
    }


def test_weights_of_ranks_are_so_too():
    strategies = {
        "ddp": DDPStrategy,
        "fsdp": partial(FSDPStrategy, state_dict_type="full"),
        "mesh": partial(MeshStrategy, state_dict_type="full"),
    }
    assert in_ranks(ranks_are_equal, strategies=strategies) == [dict.fromkeys(strategies, True)] * 2


def largest_in_a_step(memory):
    module = Net().to(DEVICE)
    if memory is not None:
        memory.select(module, torch.device(DEVICE), has_streams=True)()
    batch = torch.zeros(BATCH * 8, WIDTH, device=DEVICE)
    module.training_step([batch], 0).backward()  # gradients exist then
    torch.simgpu.reset_peak_memory_stats()
    before = torch.simgpu.memory_allocated()
    with simulated_gpu.synchronizations() as waits:
        module.training_step([batch], 0).backward()
    return torch.simgpu.max_memory_allocated() - before, waits


def test_less_memory_of_the_device_is_used_and_the_host_never_waits():
    plain, _ = largest_in_a_step(None)
    offloaded, waits = largest_in_a_step(ActivationMemory(offloads=True))
    assert offloaded < 0.75 * plain
    assert waits == []


def test_an_interrupted_backward_pass_leaves_no_memory():
    module = Net().to(DEVICE)
    ActivationMemory(offloads=True).select(module, torch.device(DEVICE), has_streams=True)()
    batch = torch.zeros(BATCH, WIDTH, device=DEVICE)
    before = torch.simgpu.memory_allocated()

    def fail(_gradient):
        raise ValueError("in the middle")

    def hook(_layer, _inputs, output):
        output.register_hook(fail)

    handle = module.blocks[2].register_forward_hook(hook)
    with pytest.raises(ValueError, match="in the middle"):
        module.training_step([batch], 0).backward()
    handle.remove()
    module.zero_grad()
    assert torch.simgpu.memory_allocated() <= before + sum(p.nbytes for p in module.parameters())

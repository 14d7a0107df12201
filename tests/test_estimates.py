"""``dstrat estimate`` beside what ranks on the CPU really have in memory."""

import ctypes
from pathlib import Path

import pytest
import torch
from tests.hand_loop import Block, Run, parts
from tests.ranks import in_ranks
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dstrat.builtin.precision.true import TruePrecision
from dstrat.cli.estimate.fake_step import TrainingSetup, measure_training
from dstrat.plugins.catalog import get_catalog
from dstrat.resolve.selection import select_offer

WIDTH, BATCH = 1024, 512
HALF, ALL = 7, 14  # blocks: buffers of a fixed size are more than a tenth of half the model in some strategies
MMAP_THRESHOLD = -3  # of mallopt
MIB = 2**20

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says how large a process is")


class Wide(nn.Module):
    """Four million parameters in each of equal blocks."""

    def __init__(self, num_blocks):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(num_blocks)))

    def training_step(self, batch, batch_idx):
        return self.blocks(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def strategy_of(alias):
    catalog = get_catalog()
    return select_offer(catalog.find("strategy", alias), catalog).instance


def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def largest_in_training(cluster, alias, num_blocks, batches):
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 65536)  # what is freed is not kept for later
    torch.set_num_threads(1)
    strategy = strategy_of(alias)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    train_a_small_block()  # loads modules and kernels: up to 100 MiB, which differ between machines
    before = resident("VmRSS")
    with strategy.model_sharded_context():
        module = Wide(num_blocks)
    if alias == "model_parallel":
        for block in module.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, strategy.device_mesh["tensor_parallel"], plan)
    strategy.connect(module)
    strategy.setup(Run(module))
    batch = torch.zeros(BATCH, WIDTH)
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        step(strategy, batch, batches)
    peak = resident("VmHWM") - before
    strategy.teardown()
    return peak


def train_a_small_block():
    block = Block(8)
    optimizer = Wide.configure_optimizers(block)
    block(torch.zeros(1, 8)).square().mean().backward()
    optimizer.step()


def step(strategy, batch, batches):
    (optimizer,) = strategy.optimizers
    optimizer.zero_grad()
    for _ in range(batches - 1):
        with strategy.no_backward_sync():
            strategy.backward(strategy.training_step(batch, 0))

    def closure():
        loss = strategy.training_step(batch, 0)
        strategy.backward(loss)
        return loss

    strategy.optimizer_step(optimizer, closure)


def estimated(alias, world_size, num_blocks, batches):
    def make():
        module = Wide(num_blocks)
        return TrainingSetup(module=module, batch=torch.zeros(BATCH, WIDTH), make_optimizers=Wide.configure_optimizers)

    size = measure_training(
        make, TruePrecision(), device_type="cpu", world_size=world_size, ranks_per_machine=world_size
    )
    size = size.for_steps_of(batches)
    return size.peak(strategy_of(alias).memory_layout(size))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alias", "world_size", "num_blocks", "batches"),
    [
        pytest.param("ddp", 2, HALF, 1, marks=pytest.mark.variant),
        ("fsdp", 2, HALF, 1),
        pytest.param("ddp", 2, HALF, 2, marks=pytest.mark.variant),
        pytest.param("fsdp", 2, HALF, 2, marks=pytest.mark.variant),
        pytest.param("mesh(dp_replicate=2)", 2, 4, 1, marks=pytest.mark.variant),
        pytest.param("model_parallel", 2, ALL, 1, marks=pytest.mark.variant),
        pytest.param("single_device", 1, ALL, 1, marks=pytest.mark.variant),
        pytest.param("deepspeed_stage_0", 2, ALL, 1, marks=pytest.mark.variant),
        pytest.param("deepspeed_stage_2", 2, ALL, 1, marks=pytest.mark.variant),
        pytest.param("deepspeed_stage_1", 2, ALL, 2, marks=pytest.mark.variant),
        pytest.param("deepspeed_stage_2", 2, ALL, 2, marks=pytest.mark.variant),
        pytest.param("deepspeed_stage_3", 2, ALL, 1, marks=pytest.mark.variant),
        pytest.param("ddp_sharded", 2, ALL, 1, marks=pytest.mark.variant),
        pytest.param("bagua", 2, ALL, 1, marks=pytest.mark.variant),
    ],
)
def test_the_estimate_is_near_what_a_rank_has(alias, world_size, num_blocks, batches):
    peak = max(in_ranks(largest_in_training, world_size, alias=alias, num_blocks=num_blocks, batches=batches))
    estimate = estimated(alias, world_size, num_blocks, batches)
    print(f"{alias}: estimated {estimate / MIB:.0f} MiB, measured {peak / MIB:.0f} MiB")
    assert estimate == pytest.approx(peak, rel=0.05)

"""Memory that DeepSpeed allocates anew in each step, of which a CPU's system provides every page again."""

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dstrat
from dstrat import OwnLoop
from dstrat.cli.measure.machine import PAGE
from dstrat_deepspeed import DeepSpeedStrategy

STEPS = 4
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def train(loop):
    """Return the bytes of new pages of a step, and those that the strategy declares."""
    net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
    numel = sum(parameter.numel() for parameter in net.parameters())
    training = SimpleNamespace(
        module=net,
        world_size=loop.world_size,
        trainable_parameters=4 * numel,
        trainable_numel=numel,
        accumulate_grad_batches=1,
    )
    declared = loop.strategy.communication_layout(training).allocated
    loop.setup(net, lambda module: torch.optim.AdamW(module.parameters(), lr=1e-4))
    before = 0
    for step in range(2 + STEPS):
        if step == 2:  # the first steps allocate what stays
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        loop.backward(loop.compute(net, torch.ones(8, 1024)).square().mean())
        loop.step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * PAGE / STEPS, declared


def in_a_rank(cluster, stage):
    torch.set_num_threads(1)
    strategy = DeepSpeedStrategy(stage=stage)
    built = dstrat.build(strategy=strategy, accelerator="cpu", devices=cluster.world_size, plugins=[cluster])
    return OwnLoop(built).launch(train)


@pytest.mark.skipif(
    HUGE_PAGES.exists() and "[always]" in HUGE_PAGES.read_text(), reason="a page fault is of 2 MiB here"
)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_writes_about_as_much_new_memory_as_is_declared(ranks, stage):
    for written, declared in ranks(in_a_rank, stage=stage):
        # malloc returns some other memory to the system, which is new again then.
        assert 0.9 * declared <= written <= 3 * declared

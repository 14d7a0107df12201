"""Eight faults of a stage, of which each ends the job in a bounded time, and the error names the stage's rank."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
from packages.mesh.tests.pipeline_fits import Net, data
from tests.accelerators import ACCELERATOR
from torch import nn
from torch.utils.data import DataLoader

from dstrat import Trainer
from dstrat.errors import RankFailedError
from dstrat_mesh import MeshStrategy


class Faulty(nn.Linear):
    """Has a fault in its third forward pass, or in the backward pass of that one."""

    fault, passes = "", 0

    def forward(self, x):
        self.passes += 1
        output = super().forward(x)
        return output if self.passes < 3 else FAULTS[self.fault](output)


def fail(output):
    raise ValueError("no more")


def die(output):
    os.kill(os.getpid(), signal.SIGKILL)


def hang(output):
    time.sleep(600)


def in_backward(fault):
    def attach(output):
        output.register_hook(fault)
        return output

    return attach


FAULTS = {
    "raises": fail,
    "raises in its backward pass": in_backward(fail),
    "dies": die,
    "hangs": hang,
    "hangs in its backward pass": in_backward(hang),
    "returns another shape": lambda output: torch.cat([output, output]),
    "returns another dtype": torch.Tensor.double,
    "returns no tensor": lambda output: (output, output),
}


def fit(fault, layer, timeout=timedelta(minutes=1)):
    module = Net()
    module.net[layer] = Faulty(16, 16)
    module.net[layer].fault = fault
    trainer = Trainer(
        strategy=MeshStrategy(pp=2, start_method="forkserver", timeout=timeout),
        accelerator=ACCELERATOR,
        devices=2,
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data(), batch_size=8))


STAGES = {0: "2", 1: "4"}  # by rank: the name of a layer of its stage


@pytest.mark.parametrize("rank", STAGES)
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raises", "ValueError: no more"),
        ("raises in its backward pass", "ValueError: no more"),
        ("dies", "SIGKILL"),
    ],
)
def test_the_rank_of_a_failed_stage_is_named(fault, text, rank):
    with pytest.raises(RankFailedError) as failure:
        fit(fault, int(STAGES[rank]))
    assert failure.value.rank == rank
    assert text in str(failure.value)


@pytest.mark.parametrize("fault", ["returns another shape", "returns another dtype", "returns no tensor"])
def test_a_stage_that_sends_something_else_is_named(fault):
    with pytest.raises(RankFailedError) as failure:
        fit(fault, 2)  # the last layer of the first stage
    assert failure.value.rank == 0
    assert "MisuseError: stage 0 of the pipeline returned" in str(failure.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        ("hangs", 1),
        ("hangs in its backward pass", 0),
        pytest.param("hangs", 0, marks=pytest.mark.variant),
        pytest.param("hangs in its backward pass", 1, marks=pytest.mark.variant),
    ],
)
def test_a_stage_that_hangs_is_waited_for_as_long_as_was_asked(fault, rank):
    begun = time.monotonic()
    with pytest.raises(RankFailedError) as failure:
        fit(fault, int(STAGES[rank]), timeout=timedelta(seconds=5))
    assert time.monotonic() - begun < 60
    assert failure.value.rank == rank, failure.value

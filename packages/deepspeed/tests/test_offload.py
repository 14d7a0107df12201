"""Offloading, with what DeepSpeed compiles for it: run where that has been compiled before, as it takes minutes."""

import logging
import os

import pytest
import torch
from deepspeed_loop import Net, losses_of, parts, single_device_losses

from dstrat_deepspeed import DeepSpeedStrategy
from dstrat_deepspeed.prerequisites import build_folder, is_compiled

pytestmark = [
    pytest.mark.builds,
    pytest.mark.skipif(
        not is_compiled("cpu_adam", os.environ),
        reason=f"cpu_adam has not been compiled in {build_folder('cpu_adam', os.environ)}: "
        "train once with deepspeed_stage_2_offload",
    ),
]
TRAINING = {"plain": {}, "accumulation and clipping": {"accumulate": 2, "clip": 0.05}}
WHERE = {
    "stage 1": {"stage": 1, "offload_optimizer": True},
    "stage 2": {"stage": 2, "offload_optimizer": True},
    "stage 3": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}


class Scheduled(Net):
    """Its learning rate becomes smaller with each step."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return optimizer

    def training_step(self, batch, batch_idx):
        if batch_idx:
            self.scheduler.step()
        return super().training_step(batch, batch_idx)


def offloaded(cluster, options):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("dstrat_deepspeed")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    found = {
        way: losses_of(DeepSpeedStrategy(**options), Net(), parts(cluster), **training)
        for way, training in TRAINING.items()
    }
    found["scheduled"] = losses_of(DeepSpeedStrategy(**options), Scheduled(), parts(cluster))
    return found, {record.getMessage() for record in records}


@pytest.mark.parametrize("where", WHERE)
def test_losses_are_those_of_one_device_and_adamw_becomes_that_of_the_cpu(ranks, where):
    expected = {way: single_device_losses(**training) for way, training in TRAINING.items()}
    expected["scheduled"] = single_device_losses(Scheduled())
    for found, logged in ranks(offloaded, options=WHERE[where]):
        for way, losses in expected.items():
            assert found[way] == pytest.approx(losses, rel=1e-5, abs=0), way
        assert logged == {"AdamW becomes DeepSpeedCPUAdam, as its state is on the CPU (offload_optimizer)"}

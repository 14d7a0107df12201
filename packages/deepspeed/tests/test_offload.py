"""Offloading to the CPU, with what DeepSpeed compiles for it: run where that has been compiled before."""

import logging

import pytest
import torch
from compiled import needs_compiled, use_compiled
from deepspeed_loop import Net, losses_of, parts, single_device_losses
from tests.ranks import each

from dstrat_deepspeed import DeepSpeedStrategy

pytestmark = needs_compiled("cpu_adam")
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
    logger = logging.getLogger("dstrat_deepspeed.optimizers")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    found = {
        way: losses_of(DeepSpeedStrategy(**options), Net(), parts(cluster), **training)
        for way, training in TRAINING.items()
    }
    found["scheduled"] = losses_of(DeepSpeedStrategy(**options), Scheduled(), parts(cluster))
    return found, {record.getMessage() for record in records}


def offloaded_in_each(cluster, stages):
    use_compiled("cpu_adam")
    return each(cluster, offloaded, {stage: {"options": WHERE[stage]} for stage in stages})


@pytest.mark.parametrize(
    "stages", [["stage 3"], pytest.param(["stage 1", "stage 2"], marks=pytest.mark.slow)], ids=" and ".join
)
def test_losses_are_those_of_one_device_and_adamw_becomes_that_of_the_cpu(ranks, stages):
    expected = {way: single_device_losses(**training) for way, training in TRAINING.items()}
    expected["scheduled"] = single_device_losses(Scheduled())
    for everywhere in ranks(offloaded_in_each, stages=stages):
        for where, (found, logged) in everywhere.items():
            for way, losses in expected.items():
                assert found[way] == pytest.approx(losses, rel=1e-5, abs=0), (where, way)
            assert logged == {"AdamW becomes DeepSpeedCPUAdam, as its state is on the CPU (offload_optimizer)"}

"""Weights of losses with parameters of 16 bits, whose gradients each stage and configuration stores elsewhere."""

import pytest
from deepspeed_fit import Model, fit
from tests.ranks import each
from torch import nn

from dstrat_deepspeed import DeepSpeedStrategy

WEIGHTS = (1, 5, 2, 7)
CASES = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    **{
        f"stage {stage}, 32 bits": {"stage": stage, "config": {"data_types": {"grad_accum_dtype": "fp32"}}}
        for stage in (1, 2)
    },
    "stage 2, contiguous": {"stage": 2, "contiguous_gradients": False},
}


class Weighted(Model):
    """The Trainer accumulates two batches."""

    def training_step(self, batch, batch_idx):
        return {"loss": self.mean(batch), "weight": self.weight(batch_idx)}

    def mean(self, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net.layers(inputs).float(), targets.float())

    def weight(self, batch_idx):
        return WEIGHTS[(batch_idx + self.global_rank) % 4]


class ByHand(Weighted):
    """It accumulates two batches by itself."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss, optimizer = self.mean(batch), self.optimizers()
        self.manual_backward(loss, weight=self.weight(batch_idx))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss.detach() / 2}  # as the Trainer divides it


def both(cluster, **options):
    training = {"precision": "bf16-true", "max_epochs": 2}
    accumulated = fit(Weighted(), DeepSpeedStrategy(**options), cluster, accumulate_grad_batches=2, **training)
    return accumulated, fit(ByHand(), DeepSpeedStrategy(**options), cluster, **training)


def test_weights_count_by_hand_as_in_batches_that_the_trainer_accumulates(ranks):
    for found in ranks(each, function=both, cases=CASES):
        for case, (accumulated, by_hand) in found.items():
            assert by_hand == pytest.approx(accumulated, rel=4e-3), case

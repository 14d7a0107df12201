"""Stage 1 with weights of 16 bits and gradients of 32, for which DeepSpeed has an optimizer of its own."""

import pytest
from deepspeed_fit import fit
from test_branches import Unequal
from test_manual_steps import SAVED_AFTER, Saves
from torch import nn

from dstrat_deepspeed import DeepSpeedStrategy


class Half(Unequal):
    def loss_of(self, batch, which):
        inputs, targets = batch
        return nn.functional.mse_loss(self.branches[which % 2](self.net.layers(inputs)).float(), targets.float())


def strategy():
    return DeepSpeedStrategy(stage=1, config={"data_types": {"grad_accum_dtype": "fp32"}})


def clipped(cluster):
    training = {"precision": "bf16-true", "max_epochs": 2, "gradient_clip_val": 0.05}
    return fit(Half(), strategy(), cluster, **training), fit(Half(), DeepSpeedStrategy(stage=1), cluster, **training)


def test_clipping_is_by_the_norm_of_all_gradients_where_ranks_use_different_parameters(ranks):
    for found, expected in ranks(clipped):
        assert found == pytest.approx(expected, rel=2e-4)


def whole_and_resumed(cluster, path):
    training = {"precision": "bf16-true", "accumulate_grad_batches": 3}
    whole = fit(Half(), strategy(), cluster, callbacks=[Saves(path)], **training)
    return whole, fit(Half(), strategy(), cluster, ckpt_path=path, **training)


def test_a_run_that_goes_on_between_the_batches_of_a_step_is_the_one_that_was_not_stopped(ranks, tmp_path):
    for whole, resumed in ranks(whole_and_resumed, path=str(tmp_path / "saved")):
        assert resumed == whole[SAVED_AFTER:]

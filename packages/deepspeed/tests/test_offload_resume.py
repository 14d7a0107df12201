"""Checkpoints of a training whose optimizer is on the CPU; run where that has been compiled before."""

import pytest
import torch
from compiled import needs_compiled, use_compiled
from deepspeed_fit import Model, fit
from test_manual_steps import Late

from dstrat import Callback
from dstrat_deepspeed import DeepSpeedStrategy

pytestmark = [pytest.mark.slow, *needs_compiled("cpu_adam")]
WHERE = {
    "stage 1": {"stage": 1, "offload_optimizer": True},
    "stage 2": {"stage": 2, "offload_optimizer": True},
    "stage 3": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}


class Decaying(Model):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Saves(Callback):
    """Saves after each of the first three batches, two of which make up a step."""

    saves_checkpoints = True

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.batches_seen < 4:
            trainer.save_checkpoint(f"{self.folder}/{trainer.fit_loop.batches_seen}")


def stopped_and_resumed(cluster, folder):
    use_compiled("cpu_adam")
    found = {}
    for name, options in WHERE.items():
        saves = Saves(f"{folder}/{name}")
        training = {"accumulate_grad_batches": 2, "max_epochs": 2}
        whole = fit(Decaying(), DeepSpeedStrategy(**options), cluster, callbacks=[saves], **training)
        found[name] = (
            whole,
            [
                fit(Decaying(), DeepSpeedStrategy(**options), cluster, ckpt_path=f"{saves.folder}/{at}", **training)
                for at in (1, 2, 3)
            ],
        )
    return found


class Early(Late):
    """Applies gradients in the batch that computes them."""

    def compute_gradients(self, loss):
        super().compute_gradients(loss)
        self.optimizers().step()


def begun_with_a_step(cluster, folder):
    """Return losses of a whole run, and of one that goes on after a step with another one, before a backward pass."""
    use_compiled("cpu_adam")
    options = {"stage": 2, "offload_optimizer": True}
    saves = Saves(folder)
    whole = fit(Early(), DeepSpeedStrategy(**options), cluster, callbacks=[saves])
    return whole, fit(Early(), DeepSpeedStrategy(**options), cluster, ckpt_path=f"{folder}/2")


def test_gradients_of_a_step_that_was_made_are_not_applied_again_by_a_run_that_goes_on(ranks, tmp_path):
    for whole, resumed in ranks(begun_with_a_step, folder=str(tmp_path)):
        assert resumed == whole[2:]


def test_a_run_that_goes_on_is_the_run_that_was_not_stopped_and_one_device_goes_on_too(ranks, tmp_path):
    for found in ranks(stopped_and_resumed, folder=str(tmp_path)):
        for whole, resumed in found.values():
            assert resumed == [whole[at:] for at in (1, 2, 3)]
    for name, (whole, _) in found.items():
        at = tmp_path / name / "2"
        alone = fit(Decaying(), "single_device", ckpt_path=at, accumulate_grad_batches=2, max_epochs=2)
        assert alone == pytest.approx(whole[2:], rel=1e-5)

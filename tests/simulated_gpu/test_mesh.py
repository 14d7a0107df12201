"""A mesh on simulated GPUs: no step waits for the device, and losses are those of processors.

Experts are not here: their layers read in each step how many tokens each rank gets.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from packages.mesh.tests import context_fits
from tests.ranks import each, in_ranks
from tests.simulated_gpu.test_budget import Watch, stacks
from torch.utils.data import DataLoader

from dstrat import Trainer, build
from dstrat.errors import ConflictError
from dstrat.testing.simulated_gpu import synchronizations
from dstrat_mesh import MeshStrategy

LAYOUTS = {
    "stages": {"pp": 2, "microbatches": 2},
    "stages in turn": {"pp": 2, "microbatches": 2, "schedule": "Interleaved1F1B"},
    "split layers": {"tp": 2},
    "sequences": {"cp": 2},
    "a ring of sequences": {"cp": 2, "context_parallel": "ring"},
}


class Net(context_fits.Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].detach().clone())  # read after the fit


def fit(cluster, accelerator, options):
    """Return the losses of the steps, and what waited for the device in those that are watched."""
    module, watch = Net(), Watch()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(
        strategy=MeshStrategy(**options),
        accelerator=accelerator,
        devices=cluster.world_size,
        plugins=[cluster],
        callbacks=[watch] if accelerator == "simulated_gpu" else [],
        log_every_n_steps=1000,
        max_epochs=1,
        gradient_clip_val=0.5,
        **quiet,
    )
    trainer.fit(module, DataLoader(context_fits.data(), 2))
    return [float(loss) for loss in module.losses], stacks(watch.waits)


def fits(cluster, accelerator):
    return each(cluster, fit, {name: {"accelerator": accelerator, "options": LAYOUTS[name]} for name in LAYOUTS})


@pytest.fixture(scope="module")
def on_devices():
    return in_ranks(fits, accelerator="simulated_gpu")


def test_a_step_of_a_mesh_never_waits_for_the_device(on_devices):
    for found in on_devices:
        assert {name: waits for name, (_, waits) in found.items()} == {name: [] for name in LAYOUTS}


def test_losses_of_a_mesh_are_those_of_processors(on_devices):
    for found, expected in zip(on_devices, in_ranks(fits, accelerator="cpu"), strict=True):
        for name, (losses, _) in found.items():
            assert len(losses) == len(context_fits.data()) // 2
            assert losses == pytest.approx(expected[name][0], rel=1e-6), name


# Over gloo, which sends from the memory of the host only


class Unsharded(MeshStrategy):
    """Communicates nothing in its setup: gloo has no collectives of tensors of this type of device."""

    def wrap_model(self, trainer):
        pass


def over_gloo(cluster, **options):
    strategy = Unsharded(process_group_backend="gloo", **options)
    return build(strategy=strategy, accelerator="simulated_gpu", devices=cluster.world_size, plugins=[cluster])


def compared_over_gloo(cluster):
    """Return what waits for the device while two batches are compared, and what sending tensors over gloo raises."""
    strategy = over_gloo(cluster, tp=2)
    strategy.connect(Net())
    strategy.setup_environment()
    strategy.setup(SimpleNamespace(is_fitting=False))
    with synchronizations() as waits:
        for _ in range(2):
            strategy.check_same_batch("validation_step", torch.ones(2))
        strategy.finish_training()
    strategy.teardown()
    refused = []
    for options in ({"pp": 2}, {"cp": 2, "context_parallel": "ring"}):
        with pytest.raises(ConflictError, match="leave process_group_backend='gloo' out") as raised:
            over_gloo(cluster, **options).setup_environment()
        refused.append(str(raised.value))
    return stacks(waits), refused


def test_over_gloo_batches_are_compared_on_the_host_and_layouts_that_send_are_refused():
    for waits, refused in in_ranks(compared_over_gloo):
        assert waits == []
        assert [message.partition(" sends")[0] for message in refused] == ["pp=2", "context_parallel='ring'"]

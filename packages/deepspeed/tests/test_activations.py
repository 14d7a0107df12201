"""DeepSpeed's own activation checkpointing in a module."""

import pytest
from deepspeed_fit import Model, fit

from dstrat_deepspeed import DeepSpeedStrategy
from dstrat_deepspeed.internals import activation_checkpointing

NUMBER = {"activation_checkpointing": {"number_checkpoints": 2}}
OPTIONS = {
    "without options": {"stage": 2},
    "stage 2": {"stage": 2, "partition_activations": True, "synchronize_checkpoint_boundary": True},
    "stage 3": {
        "stage": 3,
        "partition_activations": True,
        "contiguous_memory_optimization": True,
        "config": NUMBER,
    },
}


class Checkpointed(Model):
    """Computes what is in its blocks again in the backward pass."""

    settings = ()

    def training_step(self, batch, batch_idx):
        import deepspeed

        checkpointing = deepspeed.checkpointing
        self.settings = (checkpointing.PARTITION_ACTIVATIONS, checkpointing.CONTIGUOUS_CHECKPOINTING)
        inputs, targets = batch
        x = self.net.first(inputs)
        for block in self.net.blocks:
            x = checkpointing.checkpoint(block, x)
        return ((self.net.last(x) * self.net.scale - targets) ** 2).mean()


def train(cluster):
    import deepspeed

    found = {}
    for name, options in OPTIONS.items():
        module = Checkpointed()
        losses = fit(module, DeepSpeedStrategy(**options), cluster)
        left = (deepspeed.checkpointing.PARTITION_ACTIVATIONS, deepspeed.checkpointing.is_configured())
        found[name] = losses, module.settings, left
    return found


def test_it_follows_the_options_while_training_and_gives_the_losses_of_one_device(ranks):
    expected = fit(Model(), "single_device")
    for found in ranks(train):
        assert {name: settings for name, (_, settings, _) in found.items()} == {
            "without options": (False, False),
            "stage 2": (True, False),
            "stage 3": (True, True),
        }
        for name, (losses, _, left) in found.items():
            assert losses == pytest.approx(expected, rel=1e-6, abs=0), name
            assert left == (False, False)


def refuse(cluster):
    import deepspeed

    with (
        pytest.raises(AssertionError),
        activation_checkpointing(deepspeed, {"partition_activations": True, "contiguous_memory_optimization": True}),
    ):
        pass
    checkpointing = deepspeed.checkpointing
    return checkpointing.PARTITION_ACTIVATIONS, checkpointing.CONTIGUOUS_CHECKPOINTING, checkpointing.is_configured()


def test_settings_that_deepspeed_refuses_leave_nothing(ranks):
    assert ranks(refuse, 1) == [(False, False, False)]

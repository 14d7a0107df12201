"""Random numbers of a device are where they were when training goes on."""

from __future__ import annotations

import torch

from dstrat import Callback
from dstrat.builtin.accelerators.cpu import CPUAccelerator
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.data.random_state import RandomState


class Dice(CPUAccelerator):
    """A device with random numbers of its own."""

    def __init__(self):
        super().__init__()
        self.thrown = 0

    def get_random_state(self, device):
        return torch.tensor(self.thrown)

    def set_random_state(self, device, state):
        self.thrown = int(state)


class Throws(Callback):
    saves_checkpoints = runs_last = True

    def __init__(self, path=None):
        self.path, self.seen = path, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.strategy.accelerator.thrown += 1
        self.seen.append(trainer.strategy.accelerator.thrown)
        if self.path is not None and len(self.seen) == 2:
            trainer.save_checkpoint(self.path)


def test_they_go_on_in_the_middle_of_an_epoch(quiet_trainer, make_line, loader, tmp_path):
    path, throws = tmp_path / "saved", Throws()
    quiet_trainer(accelerator=Dice(), max_epochs=1, callbacks=Throws(path)).fit(make_line(), loader())
    quiet_trainer(accelerator=Dice(), max_epochs=1, callbacks=throws).fit(make_line(), loader(), ckpt_path=path)
    assert throws.seen == [3, 4, 5, 6]


class ThrowsInValidation(Throws):
    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.strategy.accelerator.thrown += 100


class SavesInValidation(ThrowsInValidation):
    saves_checkpoints = False

    def on_validation_epoch_end(self, trainer, module):
        trainer.save_checkpoint(self.target)


def test_those_of_a_sanity_check_do_not_change_the_training(quiet_trainer, line, loader):
    throws = ThrowsInValidation()
    trainer = quiet_trainer(accelerator=Dice(), max_epochs=1, num_sanity_val_steps=2, callbacks=throws)
    trainer.fit(line, loader(), loader())
    assert throws.seen == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_within_a_validation_has_those_of_its_start(quiet_trainer, line, loader, tmp_path):
    callback = SavesInValidation()
    callback.target = tmp_path / "saved"
    options = {"num_sanity_val_steps": 0, "callbacks": callback}
    quiet_trainer(accelerator=Dice(), max_epochs=1, **options).fit(line, loader(), loader())
    saved = PortableCheckpointIO().load_rank(tmp_path / "saved", 0)
    assert int(saved["device_random"]) == 6


def test_devices_of_a_new_process_are_seeded_as_those_of_its_parent():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    state = RandomState.capture()
    torch.manual_seed(8)  # as if in a new interpreter
    calls = torch.cuda._lazy_seed_tracker  # what CUDA will do first, which this test sees without a GPU
    calls.manual_seed_all_cb = None
    state.restore_in_new_process()
    assert calls.manual_seed_all_cb is not None
    assert torch.equal(torch.rand(1), expected)
    calls.manual_seed_all_cb = None
    state.restore_in_new_process()  # as in a fork, which has the generators already
    assert calls.manual_seed_all_cb is None

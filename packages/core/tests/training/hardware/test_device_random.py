"""Random numbers of a device are where they were when training goes on."""

from __future__ import annotations

import torch

from dstrat import Callback
from dstrat.builtin.accelerators.cpu import CPUAccelerator


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

"""Two processes with one XLA device each, which average gradients on the host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from xla_fit import ON_CPU, Regression, data, trainer

from dstrat import seed_everything

PROGRAM = """
import sys
import torch
from xla_fit import Regression, data, trainer
from dstrat import Callback, seed_everything
from dstrat_xla import XLAStrategy


class Keeping(Callback):
    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            torch.save(trainer.strategy.module_state_dict(), sys.argv[1])


if __name__ == "__main__":
    seed_everything(3, verbose=False)
    fit = trainer(
        strategy=XLAStrategy(reduce_on_host=True), devices=2, accumulate_grad_batches=2, gradient_clip_val=0.5,
        callbacks=[Keeping()],
    )
    fit.fit(Regression(scheduled=True), data(batch_size=4, shuffle=False), data(24, shuffle=False, batch_size=4))
"""


def test_two_processes_train_as_one_device(tmp_path):
    seed_everything(3, verbose=False)
    module = Regression(scheduled=True)
    trainer(**ON_CPU, accumulate_grad_batches=2, gradient_clip_val=0.5).fit(module, data(shuffle=False))
    program = tmp_path / "program.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{PROGRAM}")
    subprocess.run([sys.executable, program, tmp_path / "parameters"], check=True, timeout=170)
    found = torch.load(tmp_path / "parameters", weights_only=True)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)

"""What works at a prompt, where there is no script to run again: the same as in a notebook."""

from __future__ import annotations

from tests.warm_program import WarmProgram

PROMPT = """
import code, os, sys
os.dup2(os.open("typed", os.O_RDONLY), 0)
sys.stdin = open(0, closefd=False)
sys.ps1 = ">>> "
main = sys.modules["__main__"]
del main.__file__
code.InteractiveConsole(vars(main)).interact(banner="", exitmsg="")
"""
TYPED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from dstrat import Trainer, TrainModule
class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def training_step(self, batch):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

options = dict(accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False)
net = Net()
before = net.layer.weight.clone()
trainer = Trainer(**options)
print("chosen:", trainer.plan.strategy)
trainer.fit(net, DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2))
print("trained:", trainer.global_step, not torch.equal(before, net.layer.weight))
Trainer(strategy="ddp", **options)
"""


def test_at_a_prompt_the_notebook_form_trains_and_ddp_says_why_it_cannot(tmp_path):
    (tmp_path / "typed").write_text(TYPED)
    (tmp_path / "prompt.py").write_text(PROMPT)
    out, err = WarmProgram(tmp_path / "prompt.py").communicate()
    assert "chosen: ddp_notebook" in out, err
    assert "trained: 2 True" in out, err
    assert "strategy 'ddp' from dstrat-ddp" in err
    assert "starts its processes from a script, and here is none (a notebook, a prompt, python -c, or a worker" in err
    assert "'ddp_notebook'" in err.rsplit("ConflictError", 1)[-1]

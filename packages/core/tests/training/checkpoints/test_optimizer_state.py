"""State of optimizers in checkpoints that torch's own do not have."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch.optim import SGD, Optimizer

from dstrat import ModelCheckpoint
from dstrat.errors import CheckpointError


class Lookahead(SGD):
    """Has nested values and tensors beside ``state`` and ``param_groups``."""

    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)
        self.extra = {"steps": 0, "slow": [p.detach().clone() for group in self.param_groups for p in group["params"]]}

    def step(self, closure=None):
        result = super().step(closure)
        self.extra["steps"] += 1
        for slow, parameter in zip(self.extra["slow"], self.param_groups[0]["params"], strict=True):
            slow.lerp_(parameter.detach(), 0.5)
            parameter.data.copy_(slow * (1 + 0.01 * self.extra["steps"]))
        return result

    def state_dict(self):
        return {**super().state_dict(), "extra": self.extra}

    def load_state_dict(self, state):
        extra = state["extra"]
        slow = [
            one.to(p.device, copy=True) for one, p in zip(extra["slow"], self.param_groups[0]["params"], strict=True)
        ]
        self.extra = {"steps": extra["steps"], "slow": slow}
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


class Counting(SGD):
    """Has a state of all parameters under a string."""

    def step(self, closure=None):
        result = super().step(closure)
        shared = self.state.setdefault("shared", {"steps": 0, "sum": torch.zeros(2)})
        shared["steps"] += 1
        shared["sum"] += shared["steps"]
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(0.001 * float(shared["sum"][0]))
        return result


class Wrapper(Optimizer):
    """Has a layout of its own."""

    def __init__(self, params, **kwargs):
        self.base = SGD(params, **kwargs)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        return self.base.step(closure)

    def state_dict(self):
        return {"base": self.base.state_dict()}

    def load_state_dict(self, state):
        self.base.load_state_dict(state["base"])


@pytest.mark.parametrize(
    ("plugins", "devices"),
    [
        (None, 2),
        ("torch", 1),
        pytest.param(None, 1, marks=pytest.mark.variant),
        pytest.param("torch", 2, marks=pytest.mark.variant),
    ],
)
@pytest.mark.parametrize("optimizer", [Lookahead, Counting, Wrapper])
def test_everything_in_the_state_of_an_optimizer_is_resumed(
    quiet_trainer, make_line, line_class, loader, averaging, tmp_path, optimizer, plugins, devices
):
    class Net(line_class):
        def configure_optimizers(self):
            return optimizer(self.parameters(), lr=0.05, momentum=0.9)

    def fit(folder, ckpt_path=None):
        processes = {"strategy": averaging(), "devices": 2} if devices == 2 else {}
        checkpoint = ModelCheckpoint(tmp_path / folder, "{epoch}", save_top_k=-1)
        trainer = quiet_trainer(
            callbacks=checkpoint, max_epochs=3, plugins=plugins, enable_checkpointing=True, **processes
        )
        net = make_line(Net)
        trainer.fit(net, loader(), ckpt_path=ckpt_path)
        return net.state_dict()

    uninterrupted = fit("a")
    resumed = fit("b", ckpt_path=tmp_path / "a" / "epoch=0.ckpt")
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)


class Remembering(SGD):
    """Has a value of a type that checkpoints do not hold."""

    def state_dict(self):
        return {**super().state_dict(), "losses": deque([1.0])}


def test_a_state_that_cannot_be_saved_is_an_error_before_the_first_step(quiet_trainer, make_line, line_class, loader):
    class Net(line_class):
        def training_step(self, batch, batch_idx):
            raise AssertionError("a step was trained")

        def configure_optimizers(self):
            return Remembering(self.parameters(), lr=0.05)

    class Trained(line_class):
        def configure_optimizers(self):
            return Remembering(self.parameters(), lr=0.05)

    weights_only = ModelCheckpoint(save_weights_only=True)
    quiet_trainer(max_epochs=1, callbacks=weights_only, enable_checkpointing=True).fit(make_line(Trained), loader())
    with pytest.raises(CheckpointError, match=r"'optimizers/0/losses' is a collections\.deque"):
        quiet_trainer(callbacks=ModelCheckpoint(), enable_checkpointing=True).fit(make_line(Net), loader())

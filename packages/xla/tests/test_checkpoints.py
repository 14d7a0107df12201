"""Checkpoints: a training goes on bit for bit, and under other strategies and another torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from xla_fit import ON_CPU, Regression, data, trainer

from dstrat import seed_everything
from dstrat_xla import XLACheckpointIO

NEWER = "DSTRAT_TEST_NEWER_TORCH"
STOP, STEPS = 25, 40


def trained(steps, *, ckpt_path=None, save=None, shuffle=True, **arguments):
    """Train up to a number of steps, and return the parameters."""
    seed_everything(3, verbose=False)
    module = Regression(dropout=arguments.pop("dropout", 0.0), scheduled=True)
    fit = trainer(max_epochs=-1, max_steps=steps, **arguments)
    fit.fit(module, data(shuffle=shuffle), ckpt_path=ckpt_path)
    if save is not None:
        fit.save_checkpoint(save)
    return {name: value.cpu() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("checkpoint_io", [None, XLACheckpointIO])
def test_a_resumed_training_is_equal_to_the_last_bit(tmp_path, checkpoint_io):
    path = tmp_path / "checkpoint"
    whole = trained(STEPS, dropout=0.2)
    trained(STOP, dropout=0.2, save=path, plugins=checkpoint_io and checkpoint_io())
    resumed = trained(STEPS, dropout=0.2, ckpt_path=path, plugins=checkpoint_io and checkpoint_io())
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_file_of_xla_loads_without_it(tmp_path):
    trained(2, save=tmp_path / "checkpoint.ckpt", plugins=XLACheckpointIO())
    saved = torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)
    tensors = [value for value in saved["state_dict"].values() if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


def go_on(python, **arguments):
    asked = [word for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = Path(__file__).with_name("goes_on.py")
    subprocess.run([python, program, *asked], check=True, env=environ, timeout=170)


def pythons():
    newer = os.environ.get(NEWER)
    reason = f"{NEWER} names no Python with another torch: python3 noxfile.py -s xla"
    return [
        pytest.param(sys.executable, id="same torch"),
        pytest.param(newer, id="newer torch", marks=[] if newer else pytest.mark.skip(reason=reason)),
    ]


@pytest.mark.parametrize("python", pythons())
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_training_moves_to_other_strategies_and_back(tmp_path, python, strategy):
    reference = trained(STEPS, shuffle=False, **ON_CPU)
    trained(15, shuffle=False, save=tmp_path / "first")
    others = {"strategy": strategy, "devices": 2, "start": tmp_path / "first", "checkpoint": tmp_path / "second"}
    go_on(python, max_steps=STOP, **others)
    back = trained(STEPS, shuffle=False, ckpt_path=tmp_path / "second")
    for name, value in reference.items():
        torch.testing.assert_close(back[name], value, rtol=1e-5, atol=1e-6)

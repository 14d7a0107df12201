"""Checkpoints: a training goes on bit for bit, and under other strategies and another torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packages.xla.tests.rank_fits import begin
from tests.ranks import in_ranks
from xla_fit import ON_CPU, Regression, Saving, data, trainer

from dstrat import seed_everything
from dstrat_xla import XLACheckpointIO, XLASPMDStrategy

PYTHON = os.environ.get("DSTRAT_TEST_NEWER_TORCH", sys.executable)
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


# To strategies of torch.distributed, on a newer torch where there is one, and back

FIRST, SECOND, LAST = 5, 12, 24  # optimizer steps; an epoch has 20
OF_XLA = {
    "single_xla": ("single_xla", 1),
    "xla_spmd": (XLASPMDStrategy(mesh_shape={"data": 2, "fsdp": 2}), 4),
    "xla_fsdp": ("xla_fsdp", 1),
}
MOVES = [
    ("single_xla", "ddp", "xla_spmd"),
    ("xla_spmd", "fsdp", "xla_fsdp"),
    ("xla_fsdp", "deepspeed", "single_xla"),
]
IPU_SIMULATOR = Path(__file__).parents[2] / "ipu" / "tests" / "simulator"
HPU_SIMULATOR = os.environ.get("DSTRAT_TEST_HPU_SIMULATOR")  # compiled for the torch of the other Python
if HPU_SIMULATOR:
    MOVES.append(("xla_spmd", "hpu_fsdp", "single_xla"))
MOVES.append(("single_xla", "ipu_strategy", "xla_fsdp"))  # the last, as autograd cannot be forked after it


def on_xla(cluster, name, max_steps, start, save):
    """Train up to a step, from a checkpoint to another; return parameters and losses."""
    strategy, devices = OF_XLA[name]
    begin(devices)
    seed_everything(3, verbose=False)
    module = Regression(scheduled=True)
    fit = trainer(
        strategy=strategy,
        devices=devices,
        max_epochs=-1,
        max_steps=max_steps,
        callbacks=[Saving(save)] if save else [],
    )
    fit.fit(module, data(shuffle=False), ckpt_path=start)
    parameters = {name: value.tolist() for name, value in module.state_dict().items()}
    return parameters, torch.stack([loss.cpu() for loss in module.losses]).tolist()


def trained_on_cpu(steps):
    """Train on one device of the CPU; return parameters and losses."""
    seed_everything(3, verbose=False)
    module = Regression(scheduled=True)
    trainer(max_epochs=-1, max_steps=steps, **ON_CPU).fit(module, data(shuffle=False))
    return module.state_dict(), torch.stack(module.losses).tolist()


def go_on(moves, machine):
    """Train in two processes, or on two simulated devices, from checkpoints to others."""
    asked = {"max_steps": SECOND, "moves": moves}
    simulators = os.pathsep.join(map(str, filter(None, [IPU_SIMULATOR, HPU_SIMULATOR])))
    environ = {"PYTHONPATH": simulators, "POPTORCH_SIMULATED_IPUS": "2", "HABANA_SIMULATOR_MACHINE": str(machine)}
    environ |= {"PT_HPU_LAZY_MODE": "1", "DS_ACCELERATOR": "cpu"}
    program = [PYTHON, Path(__file__).with_name("goes_on.py"), json.dumps(asked)]
    subprocess.run(program, check=True, env={**os.environ, **environ}, timeout=300)


# In one test, as the other torch loads once: each strategy writes a checkpoint and goes on from another's.
def test_a_training_moves_to_other_strategies_and_back(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for origin in OF_XLA:
        in_ranks(on_xla, 1, name=origin, max_steps=FIRST, start=None, save=f"{first} {origin}")
    go_on(
        [
            {"strategy": other, "start": f"{first} {origin}", "checkpoint": f"{second} {other}"}
            for origin, other, _ in MOVES
        ],
        machine=tmp_path / "machine",
    )
    never_moved, losses = trained_on_cpu(LAST)
    for origin, other, last in MOVES:
        of_other = json.loads(Path(f"{second} {other}.losses").read_text())
        ((ended, of_last),) = in_ranks(on_xla, 1, name=last, max_steps=LAST, start=f"{second} {other}", save=None)
        assert [*of_other, *of_last] == pytest.approx(losses[FIRST:], rel=1e-5), f"{origin}, {other} and {last}"
        for name, value in never_moved.items():
            message = f"{name} after {origin}, {other} and {last}"
            torch.testing.assert_close(torch.tensor(ended[name]), value, rtol=1e-5, atol=1e-6, msg=message)

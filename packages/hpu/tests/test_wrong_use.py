"""Requests that cannot work end with an error that says what to do; doctor and explain show what is there."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from hpu_fit import ON_HPU, trainer

from dstrat.errors import ConflictError, DeviceError, MissingRequirementError, RequestError
from dstrat.resolve import Request, make_plan


def plan(environ=None, **asked):
    return make_plan(Request(**asked), environ=environ or {})


def run(program, **environ):
    """Return what a program in a process of its own prints as its last line."""
    begin = "from dstrat.resolve import Request, make_plan\nfrom dstrat.errors import DstratError\n"
    ended = subprocess.run(
        [sys.executable, "-c", begin + program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    return (ended.stdout or ended.stderr).strip().splitlines()[-1]


PLAN = """
try:
    make_plan(Request(strategy="hpu_single", accelerator="hpu", devices=1), environ={})
except DstratError as error:
    print(type(error).__name__, error)
"""


def test_without_devices_the_driver_is_named():
    said = run(PLAN, HABANA_SIMULATOR_DEVICES="0")
    assert "DeviceError" in said
    assert "the driver shows no device: see hl-smi" in said


def test_another_torch_is_named():
    said = run(PLAN, HABANA_SIMULATOR_TORCH="2.5.1")
    assert "cannot be loaded with torch" in said
    assert "Compile-time major/minor PyTorch version 2.5.1" in said
    assert "install the vendor's torch and plugin of one release" in said


def test_a_torch_that_lazy_mode_refuses_is_named():
    assert "set PT_HPU_LAZY_MODE=0" in run(PLAN, HABANA_SIMULATOR_STOCK_TORCH="1")


HOLDING = """
import sys, torch, habana_frameworks.torch
torch.ones(1, device="hpu")
print("holds", flush=True)
sys.stdin.read()
"""
ACQUIRE = """
from dstrat_hpu import runtime
try:
    runtime.acquire(2)
except DstratError as error:
    print(type(error).__name__, error)
else:
    try:
        runtime.acquire(3)
    except DstratError as error:
        print(type(error).__name__, error)
"""


def test_a_device_in_use_is_named(tmp_path):
    machine = {"HABANA_SIMULATOR_MACHINE": str(tmp_path)}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDING],
        env={**os.environ, **machine, "HLS_MODULE_ID": "2"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout.readline() == b"holds\n"
        said = run(ACQUIRE, **machine)
        assert said.startswith("DeviceError hpu 2 cannot be acquired (synStatus=8 [Device not found] Device acquire")
        assert "another process holds it, as hl-smi shows" in said
    finally:
        holder.communicate()
    assert "holds hpu 2 until it ends, and cannot take hpu 3" in run(ACQUIRE, **machine)


def test_more_devices_than_there_are_are_refused():
    with pytest.raises(DeviceError, match="at most 8 hpu devices"):
        plan(strategy="hpu_parallel", accelerator="hpu", devices=9)


def test_a_single_device_strategy_takes_no_two():
    with pytest.raises(ConflictError, match="at most 1 device"):
        plan(strategy="hpu_single", accelerator="hpu", devices=2)


@pytest.mark.parametrize("precision", ["16-mixed", "64-true"])
def test_other_precisions_are_refused(precision):
    with pytest.raises(ConflictError, match=r"choose another one|only with '32-true'"):
        plan(**ON_HPU, precision=precision)


def test_fp8_needs_the_engine_of_the_vendor():
    with pytest.raises(RequestError, match="needs Gaudi's transformer engine, which cannot be loaded"):
        plan(**ON_HPU, precision="fp8")


def test_other_hardware_is_refused():
    with pytest.raises(ConflictError, match="cannot run on accelerator 'cpu', only on 'hpu'"):
        plan(strategy="hpu_parallel", accelerator="cpu", devices=2)


def test_general_aliases_are_served_by_those_of_gaudi():
    assert plan(strategy="single_device", accelerator="hpu", devices=1).strategy == "hpu_single"
    assert plan(strategy="ddp", accelerator="hpu", devices=2).strategy == "hpu_parallel"
    assert plan(strategy="hpu_ddp", accelerator="hpu", devices=2).strategy == "hpu_parallel"
    assert plan(strategy="fsdp", accelerator="hpu", devices=2).strategy == "hpu_fsdp"
    assert plan(strategy="hpu_deepspeed", accelerator="hpu", devices=2).strategy == "deepspeed"


def test_gaudi_is_chosen_where_there_is_one():
    chosen = plan()
    assert (chosen.accelerator, chosen.strategy, chosen.num_devices) == ("hpu", "hpu_parallel", 8)
    assert trainer().strategy.root_device.index == 0


@pytest.mark.without_habana
@pytest.mark.skipif(find_spec("habana_frameworks") is not None, reason="the simulator is installed here")
def test_without_the_plugin_of_the_vendor_it_is_named():
    with pytest.raises(MissingRequirementError, match="needs habana-torch-plugin, which is not installed"):
        plan(strategy="hpu_single", accelerator="hpu", devices=1)

"""Requests that cannot work end with an error that says what to do; doctor and explain show what is there."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from hpu_fit import ON_HPU, trainer
from processes import run
from torch import nn

from dstrat.errors import ConflictError, DeviceError, MissingRequirementError, RequestError
from dstrat.resolve import Request, make_plan
from dstrat_ddp import DDPStrategy
from dstrat_fsdp import FSDPStrategy
from dstrat_hpu import HPUFSDPStrategy, HPUParallelStrategy, HPUPrecisionPlugin, SingleHPUStrategy, precision


def plan(environ=None, **asked):
    return make_plan(Request(**asked), environ=environ or {})


def said_by(program, **environ):
    """Return what a program in a process of its own prints as its last line."""
    begin = "from dstrat.resolve import Request, make_plan\nfrom dstrat.errors import DstratError\n"
    return run(begin + program, **environ).last_line


PLAN = """
try:
    make_plan(Request(strategy="hpu_single", accelerator="hpu", devices=1), environ={})
except DstratError as error:
    print(type(error).__name__, error)
"""


def test_without_devices_the_driver_is_named():
    said = said_by(PLAN, HABANA_SIMULATOR_DEVICES="0")
    assert "DeviceError" in said
    assert "the driver shows no device: see hl-smi" in said


def test_another_torch_is_named():
    said = said_by(PLAN, HABANA_SIMULATOR_TORCH="2.5.1")
    assert "cannot be loaded with torch" in said
    assert "Compile-time major/minor PyTorch version 2.5.1" in said
    assert "install the vendor's torch and plugin of one release" in said


def test_a_torch_that_lazy_mode_refuses_is_named():
    assert "set PT_HPU_LAZY_MODE=0" in said_by(PLAN, HABANA_SIMULATOR_STOCK_TORCH="1")


ACQUIRE = """
from dstrat_hpu import runtime
try:
    runtime.acquire({index})
except DstratError as error:
    print(type(error).__name__, error)
else:
    try:
        runtime.acquire({other})
    except DstratError as error:
        print(type(error).__name__, error)
"""


def test_a_device_in_use_is_named(tmp_path):
    from habana_frameworks import simulation

    torch.ones(1, device="hpu")
    held = simulation.module_id()  # by this process, as long as it runs
    said = said_by(ACQUIRE.format(index=held, other=held))
    assert said.startswith(f"DeviceError hpu {held} cannot be acquired (synStatus=8 [Device not found] Device acquire")
    assert "another process holds it, as hl-smi shows" in said
    said = said_by(ACQUIRE.format(index=2, other=3), HABANA_SIMULATOR_MACHINE=str(tmp_path))
    assert "holds hpu 2 until it ends, and cannot take hpu 3" in said


TAKE = """
import os, sys
{before}
from dstrat_hpu import runtime
from habana_frameworks import simulation
try:
    runtime.acquire({index})
except DstratError as error:
    print(type(error).__name__, error)
else:
    with torch.hpu.device(0):
        pass
    print(simulation.module_id(), os.environ.get("HLS_MODULE_ID"))
"""
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
USED = 'torch.ones(1, device="hpu")'


def take(machine, index, before="", **environ):
    program = TAKE.format(
        index=index, before=f"import torch, habana_frameworks.torch\n{before}" if before else "import torch"
    )
    return said_by(program, HABANA_SIMULATOR_MACHINE=str(machine), **environ)


@pytest.mark.parametrize(
    ("index", "environ", "module"),
    [
        (4, {**RANK, "PT_HPU_LAZY_MODE": "0"}, "4 None"),
        (4, RANK, "4 None"),
        (1, {"HABANA_VISIBLE_MODULES": "2,6"}, "6 None"),
        (0, {"HLS_MODULE_ID": "3"}, "3 3"),
        (5, {**RANK, "HLS_MODULE_ID": "5"}, "5 5"),
        (0, {**RANK, "HABANA_SIMULATOR_DEVICES": "4"}, "0 None"),
    ],
)
def test_the_requested_module_is_taken(tmp_path, index, environ, module):
    assert take(tmp_path, index, **environ) == module


def test_a_module_of_the_launcher_that_contradicts_is_named(tmp_path):
    said = take(tmp_path, 4, **RANK, HLS_MODULE_ID="3")
    assert said.startswith("DeviceError HLS_MODULE_ID is 3 in this process, and hpu 4 is module 4")


def test_a_device_that_was_used_before_is_not_taken_for_another(tmp_path):
    assert "is not known to be hpu 2: make no tensors" in take(tmp_path, 2, USED)
    assert take(tmp_path, 0, USED) == "7 None"
    assert take(tmp_path, 1, USED, **{**RANK, "LOCAL_RANK": "1", "PT_HPU_LAZY_MODE": "0"}) == "1 1"


def test_a_plugin_that_is_loaded_too_late_is_named(tmp_path):
    before = "import torch\ntorch.ones(1, requires_grad=True).sum().backward()"
    program = TAKE.format(index=0, before=before)
    said = said_by(program, HABANA_SIMULATOR_MACHINE=str(tmp_path))
    assert "a backward pass ran before habana_frameworks was loaded" in said


def test_a_backward_pass_before_forking_is_named(tmp_path):
    before = """import torch, habana_frameworks.torch
torch.ones(1, requires_grad=True).sum().backward()
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))"""
    said = said_by(TAKE.format(index=0, before=before), HABANA_SIMULATOR_MACHINE=str(tmp_path))
    assert "a backward pass ran in the process that this one was forked from; choose another start_method" in said


def test_an_unknown_module_needs_the_visible_ones(tmp_path):
    assert "set HABANA_VISIBLE_MODULES" in take(tmp_path, 2, HABANA_SIMULATOR_DEVICES="4")
    assert "hpu 9 is not there" in take(tmp_path, 9)


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


@pytest.fixture
def engine(monkeypatch):
    """A module with the name of the vendor's engine, whose autocast cannot start."""
    engine = SimpleNamespace(fp8_autocast=None, Linear=nn.Linear)
    monkeypatch.setitem(sys.modules, precision._ENGINE, engine)
    return engine


def test_fp8_is_refused_where_layers_are_sharded(engine):
    with pytest.raises(ConflictError, match=r"'hpu_fsdp' .* cannot run with precision 'fp8', only with"):
        plan(strategy="hpu_fsdp", accelerator="hpu", devices=2, precision="fp8")


def test_autocast_ends_when_fp8_cannot_start(engine):
    plugin = HPUPrecisionPlugin("fp8")
    for _ in range(2):
        with pytest.raises(TypeError), plugin.forward_context():
            pass
        assert not torch.is_autocast_enabled("hpu")


def test_the_recipe_reaches_the_engine_within_autocast(engine):
    entered = []

    @contextmanager
    def fp8_autocast(enabled, fp8_recipe):
        entered.append((enabled, fp8_recipe, torch.is_autocast_enabled("hpu"), torch.get_autocast_dtype("hpu")))
        yield

    engine.fp8_autocast = fp8_autocast
    with HPUPrecisionPlugin("fp8", recipe="delayed").forward_context():
        pass
    assert entered == [(True, "delayed", True, torch.bfloat16)]


def test_options_of_fp8_are_refused_in_other_precisions():
    for options in ({"recipe": "delayed"}, {"replace_layers": True}):
        with pytest.raises(ConflictError, match="need precision='fp8', not 'bf16-mixed'"):
            HPUPrecisionPlugin("bf16-mixed", **options)


def test_layers_of_the_engine_must_have_all_weights(engine):
    class Scaled(nn.Linear):
        def get_extra_state(self):
            return {}

    class Other(nn.Linear):
        def __init__(self, inputs, outputs, *, bias):
            super().__init__(inputs, outputs, bias=bias)
            self.scale = nn.Parameter(torch.ones(1))

    plugin, net = HPUPrecisionPlugin("fp8", replace_layers=True), nn.Sequential(nn.Linear(2, 3))
    weight, engine.Linear = net[0].weight, Scaled
    plugin.connect(net)
    assert type(net[0]) is Scaled
    assert torch.equal(net[0].weight, weight)
    engine.Linear = Other
    with pytest.raises(RequestError, match=r"layer '0' cannot become the engine's: missing \['scale'\]"):
        plugin.connect(nn.Sequential(nn.Linear(2, 3)))


def test_other_hardware_is_refused():
    with pytest.raises(ConflictError, match="cannot run on accelerator 'cpu', only on 'hpu'"):
        plan(strategy="hpu_parallel", accelerator="cpu", devices=2)


def test_general_aliases_have_a_strategy_on_gaudi():
    assert plan(strategy="single_device", accelerator="hpu", devices=1).strategy == "single_device"
    assert plan(strategy="ddp", accelerator="hpu", devices=2).strategy == "ddp"
    assert plan(strategy="hpu_ddp", accelerator="hpu", devices=2).strategy == "hpu_parallel"
    assert plan(strategy="fsdp", accelerator="hpu", devices=2).strategy == "fsdp"
    assert plan(strategy="hpu_deepspeed", accelerator="hpu", devices=2).strategy == "deepspeed"


def test_names_of_gaudi_and_general_ones_are_the_same_classes():
    assert (HPUParallelStrategy, HPUFSDPStrategy) == (DDPStrategy, FSDPStrategy)
    for device in (2, "hpu:2"):
        assert str(trainer(strategy=SingleHPUStrategy(device), devices="auto").strategy.assigned_device) == "hpu:2"
    for strategy in (FSDPStrategy(), HPUFSDPStrategy(), DDPStrategy()):
        assert trainer(strategy=strategy, devices=2).plan.num_devices == 2


def test_gaudi_is_chosen_where_there_is_one():
    planned = plan()
    assert (planned.accelerator, planned.strategy, planned.num_devices) == ("hpu", "hpu_parallel", 8)
    assert trainer().strategy.root_device.index == 0


@pytest.mark.without_habana
@pytest.mark.skipif(find_spec("habana_frameworks") is not None, reason="the simulator is installed here")
def test_without_the_plugin_of_the_vendor_it_is_named():
    for strategy in ("hpu_single", "hpu_parallel"):
        with pytest.raises(MissingRequirementError, match="needs habana-torch-plugin, which is not installed") as error:
            plan(strategy=strategy, accelerator="hpu", devices=1)
        assert "--no-index --find-links=FOLDER_OF_GAUDIS_SOFTWARE habana-torch-plugin" in str(error.value)

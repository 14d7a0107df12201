"""Hardware of somebody else's package runs with every strategy that fits, and these know nothing of it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from tests.warm_program import WarmProgram

if TYPE_CHECKING:
    from pathlib import Path

PLUGIN = """
from dstrat import Component, hookimpl


@hookimpl
def dstrat_components():
    return [
        Component(
            kind="accelerator",
            alias="bead",
            target="acme_beads.hardware:BeadAccelerator",
            summary="beads, which the processor moves",
            device_type="cpu",
            process_group_backend="gloo",
            supports_torch_distributed=True,
            devices_share_process=False,
        ),
        Component(
            kind="accelerator",
            alias="tally",
            target="acme_beads.tally:TallyAccelerator",
            summary="beads whose collectives count and have no mean",
            device_type="cpu",
            process_group_backend="tally",
            supports_torch_distributed=True,
            devices_share_process=False,
        ),
        Component(
            kind="accelerator",
            alias="abacus",
            target="acme_beads.hardware:AbacusAccelerator",
            summary="rows of beads, without collectives",
            device_type="cpu",
            process_group_backend="none",
            supports_torch_distributed=False,
            devices_share_process=True,
            strategies={"ddp": "rows", "ddp_spawn": "rows", "gone": "no_such_strategy"},
        ),
        Component(
            kind="strategy",
            alias="rows",
            target="acme_beads.rows:RowsStrategy",
            summary="one process, each batch split among the rows",
            accelerators=("abacus",),
            auto=110,
            uses_torch_distributed=False,
            drives_several_devices=True,
            starts_processes=False,
            notebook_safe=True,
            multi_node=False,
        ),
    ]
"""

HARDWARE = """
import torch

from dstrat import Accelerator, parse_devices


class BeadAccelerator(Accelerator):
    process_group_backend = "gloo"
    devices_share_process = False

    def is_available(self):
        return True

    def auto_device_count(self):
        return 8

    def parse_devices(self, devices):
        return parse_devices(devices, everything=8, limit=8, name="bead")

    def get_parallel_devices(self, indices):
        return [torch.device("cpu") for _ in indices]


class AbacusAccelerator(BeadAccelerator):
    process_group_backend = "none"
    devices_share_process = True
"""

TALLY = """
import torch.distributed as dist

from acme_beads.hardware import BeadAccelerator

COLLECTIVES = {
    **{name: name for name in ("allreduce", "allreduce_coalesced", "allgather", "broadcast", "barrier")},
    **{name: name for name in ("_allgather_base", "_reduce_scatter_base", "gather", "scatter", "reduce_scatter")},
    "all_gather_single": "_allgather_base",  # what newer torch calls the two
    "reduce_scatter_single": "_reduce_scatter_base",
}


class TallyGroup(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo, self.name, self.description = dist.ProcessGroupGloo(store, rank, size, timeout), "", ""

    def getBackendName(self):
        return "tally"

    def setGroupName(self, name):
        self.name = name

    def getGroupName(self):
        return self.name

    def setGroupDesc(self, description):
        self.description = description

    def getGroupDesc(self):
        return self.description

    def allgather_into_tensor_coalesced(self, outputs, inputs, options):
        for output, tensor in zip(outputs, inputs):
            work = self.gloo._allgather_base(output, tensor)
            work.wait()
        return work


def collective(name):
    def call(self, *arguments, **options):
        for operation in (getattr(argument, "reduceOp", None) for argument in arguments):
            if operation is not None and operation == dist.ReduceOp.AVG:
                raise RuntimeError("tally has no mean")
        return getattr(self.gloo, name)(*arguments, **options)

    return call


for name, of_gloo in COLLECTIVES.items():
    setattr(TallyGroup, name, collective(of_gloo))
dist.Backend.register_backend("tally", TallyGroup, devices=["cpu"])


class TallyAccelerator(BeadAccelerator):
    process_group_backend = "tally"
    averages_in_collectives = False
"""

ROWS = '''
import torch

from dstrat import SingleDeviceStrategy


class RowsStrategy(SingleDeviceStrategy):
    """Gives each row a part of the batch; a step's loss is the mean of theirs."""

    drives_several_devices = True

    def training_step(self, batch, batch_idx):
        rows = len(self.components.parallel_devices)
        parts = zip(*(tensor.chunk(rows) for tensor in batch))
        return torch.stack([super(RowsStrategy, self).training_step(part, batch_idx) for part in parts]).mean()
'''

PROGRAM = """
import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dstrat
from dstrat import Callback, Trainer, TrainModule
from dstrat.errors import DstratError
from dstrat.resolve import Request, make_plan


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Losses(Callback):
    def __init__(self):
        self.losses, self.world_size = [], None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"])))
        self.world_size = trainer.strategy.world_size

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)


x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.sum(1, keepdim=True))


def fit(strategy, accelerator, devices, batch_size):
    losses = Losses()
    trainer = Trainer(
        strategy=strategy, accelerator=accelerator, devices=devices, max_epochs=3, callbacks=[losses], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(data, batch_size))
    return {"losses": losses.losses, "world_size": losses.world_size, "strategy": trainer.plan.strategy}


def plan(**words):
    try:
        plan = make_plan(Request(**words), environ={}, interactive=False)
    except DstratError as error:
        return f"{type(error).__name__}: {error}"
    rows = {choice.subject: f"{choice.value}: {choice.reason}" for choice in plan.choices}
    return {name: rows[name] for name in ("strategy", "accelerator", "devices", "processes")}


if __name__ == "__main__":
    print(json.dumps(EXPRESSION))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed distribution acme-beads."""
    folder = tmp_path_factory.mktemp("site")
    texts = {"__init__": "", "plugin": PLUGIN, "hardware": HARDWARE, "rows": ROWS, "tally": TALLY}
    for name, text in texts.items():
        (folder / "acme_beads").mkdir(exist_ok=True)
        (folder / "acme_beads" / f"{name}.py").write_text(text)
    info = folder / "acme_beads-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-beads\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dstrat.v1]\nbeads = acme_beads.plugin\n")
    return folder


def ask(site: Path, expression: str) -> dict:
    """Run the program in an environment that has the distribution; return what the expression is worth."""
    script = site / "program.py"  # whose folder is the first that Python looks for distributions in
    script.write_text(PROGRAM.replace("EXPRESSION", expression))
    return json.loads(WarmProgram(script).run(timeout=300).splitlines()[-1])


@pytest.fixture(scope="module")
def fitted(site: Path) -> dict:
    """Trainings on one device, and on two with strategies of others, all from one program."""
    names = {"ddp": "dstrat_ddp:DDPStrategy", "fsdp": "dstrat_fsdp:FSDPStrategy"}
    if find_spec("deepspeed"):
        names["deepspeed"] = "dstrat_deepspeed:DeepSpeedStrategy"
    imports = {alias: f'getattr(__import__("{n.split(":")[0]}"), "{n.split(":")[1]}")' for alias, n in names.items()}
    on_beads = {alias: f'fit({cls}(start_method="fork"), "bead", 2, 8)' for alias, cls in imports.items()}
    on_tally = {f"{name} on tally": on_beads[name].replace('"bead"', '"tally"') for name in ("ddp", "fsdp")}
    several = ", ".join(f'"{name}": {training}' for name, training in {**on_beads, **on_tally}.items())
    return ask(site, f'{{"alone": fit("single_device", "bead", 1, 16), {several}}}')


def check_losses(trainings: dict, alone: dict) -> None:
    assert len(alone["losses"]) == 18
    for name, training in trainings.items():
        assert training["world_size"] == 2, name
        assert training["losses"] == pytest.approx(alone["losses"], rel=1e-5), name


def test_it_trains_with_strategies_of_others_on_two_processes_to_the_losses_of_one_device(fitted: dict) -> None:
    on_beads = {name: training for name, training in fitted.items() if name != "alone" and "tally" not in name}
    assert len(on_beads) >= 2
    check_losses(on_beads, fitted["alone"])


def test_strategies_sum_and_divide_where_collectives_have_no_mean(fitted: dict) -> None:
    check_losses({name: fitted[name] for name in ("ddp on tally", "fsdp on tally")}, fitted["alone"])


def test_one_process_for_several_devices_is_chosen_by_itself_and_trains_as_one_device(site: Path) -> None:
    found = ask(site, '{"rows": fit("auto", "abacus", 8, 16), "alone": fit("single_device", "cpu", 1, 16)}')
    assert (found["rows"]["strategy"], found["rows"]["world_size"]) == ("rows", 1)
    assert found["rows"]["losses"] == pytest.approx(found["alone"]["losses"], rel=1e-5)


def test_plans_follow_from_what_hardware_and_strategies_declare(site: Path) -> None:
    requests = {
        "general": 'strategy="ddp", accelerator="bead", devices=2',
        "automatic": 'accelerator="bead", devices=2',
        "one process": 'accelerator="abacus", devices=8',
        "one device": 'accelerator="abacus", devices=1',
        "redirected": 'strategy="ddp_spawn", accelerator="abacus", devices=8',
        "of one owner": 'strategy="ddp_spawn@dstrat-ddp", accelerator="abacus", devices=2',
        "without collectives": 'strategy="fsdp", accelerator="abacus", devices=2',
        "shared": 'strategy="dp", accelerator="bead", devices=2',
        "redirected to nothing": 'strategy="gone", accelerator="abacus", devices=2',
        "not redirected": 'strategy="gone", accelerator="cpu", devices=2',
        "elsewhere": 'strategy="ddp_spawn", accelerator="cpu", devices=2',
    }
    found = ask(site, "{" + ", ".join(f'"{name}": plan({words})' for name, words in requests.items()) + "}")
    assert found["general"]["strategy"] == "ddp: asked for"
    assert found["automatic"]["strategy"] == "ddp: the first choice for 2 devices"
    assert found["one process"] == {
        "strategy": "rows: the first choice for 8 devices",
        "accelerator": "abacus: asked for",
        "devices": "8: asked for",
        "processes": "1: the strategy needs no others",
    }
    assert found["one device"]["strategy"] == "rows: the first choice for 1 device"
    assert found["redirected"]["strategy"] == "rows: serves 'ddp_spawn' on accelerator 'abacus'"
    assert found["redirected"]["processes"] == "1: the strategy needs no others"
    start = "ConflictError: strategy 'ddp_spawn' from dstrat-ddp 0.1.0 communicates through torch.distributed, which "
    assert found["of one owner"].startswith(start + "does not support accelerator 'abacus' (its collectives: none): ")
    assert "choose another accelerator, or a strategy for 'abacus' ('rows'" in found["without collectives"]
    assert "drives 2 devices from one process, which accelerator 'bead' cannot: ask for devices=1" in found["shared"]
    assert found["redirected to nothing"].startswith(
        "UnknownAliasError: accelerator 'abacus' from acme-beads 1.0 lets 'no_such_strategy' serve 'gone', and "
    )
    assert found["not redirected"].startswith("UnknownAliasError: strategy 'gone' is not known")
    assert found["elsewhere"]["strategy"] == "ddp_spawn: asked for"

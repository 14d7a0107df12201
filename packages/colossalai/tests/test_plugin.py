"""The aliases of the distribution, and how light it is to list them."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from dstrat import Trainer
from dstrat.errors import ConflictError
from dstrat.plugins.known import known_requirement
from dstrat_colossalai.plugin import dstrat_components

RECORDS = {record.alias: record for record in dstrat_components()}


def test_every_alias_is_offered_once():
    assert {alias: record.target.partition(":")[2] for alias, record in RECORDS.items()} == {
        "colossalai": "ColossalAIStrategy",
        "colossalai_low_level_zero": "ColossalAILowLevelZeroStrategy",
        "colossalai_torch_ddp": "ColossalAITorchDDPStrategy",
        "colossalai_torch_fsdp": "ColossalAITorchFSDPStrategy",
    }


@pytest.mark.parametrize("alias", RECORDS)
def test_who_lacks_the_package_gets_its_name(alias):
    assert known_requirement("strategy", alias) == "dstrat-colossalai"


def test_none_of_them_is_chosen_automatically():
    assert not [alias for alias, record in RECORDS.items() if record.auto is not None]


def test_the_entry_point_leads_to_the_plugin():
    [point] = [point for point in entry_points(group="dstrat.v1") if point.dist.name == "dstrat-colossalai"]
    assert point.value == "dstrat_colossalai.plugin"


@pytest.mark.parametrize("alias", [alias for alias in RECORDS if alias != "colossalai_torch_ddp"])
def test_what_needs_cuda_is_refused_by_the_plan_and_torch_ddp_is_named(alias):
    pytest.importorskip("colossalai", reason="needs colossalai")
    with pytest.raises(ConflictError, match=r"uses devices of the type 'cuda'.*'colossalai_torch_ddp'"):
        Trainer(strategy=alias, accelerator="cpu", devices=2, logger=False)


def test_listing_imports_neither_torch_nor_colossalai():
    code = (
        "import json, sys, dstrat_colossalai, dstrat_colossalai.plugin as plugin\n"
        "plugin.dstrat_components()\n"
        "print(json.dumps([sorted({'torch', 'colossalai'} & {*sys.modules}), dir(dstrat_colossalai)]))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True)
    heavy, names = json.loads(printed.stdout)
    assert heavy == []
    assert "ColossalAIStrategy" in names

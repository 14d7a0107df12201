"""The aliases of the distribution, and how light it is to list them."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

from dstrat.plugins.known import known_requirement
from dstrat_torchft.plugin import dstrat_components

RECORDS = {record.alias: record for record in dstrat_components()}


def test_every_alias_is_offered_once():
    assert [*RECORDS] == ["torchft_ddp", "torchft_diloco"]


def test_who_lacks_the_package_gets_its_name():
    assert {known_requirement("strategy", alias) for alias in RECORDS} == {"dstrat-torchft"}


def test_it_is_never_chosen_automatically():
    assert [record.auto for record in RECORDS.values()] == [None, None]


def test_groups_that_train_apart_have_other_losses_than_one_device():
    assert {alias: bool(record.approximation) for alias, record in RECORDS.items()} == {
        "torchft_ddp": False,
        "torchft_diloco": True,
    }


def test_the_entry_point_leads_to_the_plugin():
    [point] = [point for point in entry_points(group="dstrat.v1") if point.dist.name == "dstrat-torchft"]
    assert point.value == "dstrat_torchft.plugin"


def test_listing_imports_neither_torch_nor_torchft():
    code = (
        "import json, sys, dstrat_torchft, dstrat_torchft.plugin as plugin\n"
        "plugin.dstrat_components()\n"
        "print(json.dumps([sorted({'torch', 'torchft'} & {*sys.modules}), dir(dstrat_torchft)]))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True)
    heavy, names = json.loads(printed.stdout)
    assert heavy == []
    assert {"TorchFTStrategy", "TorchFTDiLoCoStrategy"} <= {*names}

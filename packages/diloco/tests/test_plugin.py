"""The alias of the distribution, and how light it is to list it."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

from dstrat.plugins.known import known_requirement
from dstrat_diloco.plugin import dstrat_components

RECORDS = {record.alias: record for record in dstrat_components()}


def test_every_alias_is_offered_once():
    assert [*RECORDS] == ["diloco"]


def test_who_lacks_the_package_gets_its_name():
    assert known_requirement("strategy", "diloco") == "dstrat-diloco"


def test_it_is_never_chosen_automatically():
    assert RECORDS["diloco"].auto is None


def test_the_entry_point_leads_to_the_plugin():
    [point] = [point for point in entry_points(group="dstrat.v1") if point.dist.name == "dstrat-diloco"]
    assert point.value == "dstrat_diloco.plugin"


def test_listing_does_not_import_torch():
    code = (
        "import json, sys, dstrat_diloco, dstrat_diloco.plugin as plugin\n"
        "plugin.dstrat_components()\n"
        "print(json.dumps(['torch' in sys.modules, dir(dstrat_diloco)]))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True)
    has_torch, names = json.loads(printed.stdout)
    assert not has_torch
    assert "DiLoCoStrategy" in names

"""The aliases of the distribution, and how light it is to list them."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from dstrat.plugins.known import known_requirement
from dstrat_hivemind.plugin import dstrat_components

RECORDS = {record.alias: record for record in dstrat_components()}


def test_every_alias_is_offered_once():
    assert [*RECORDS] == ["hivemind"]
    assert RECORDS["hivemind"].synonyms == ("collaborative",)


@pytest.mark.parametrize("alias", ["hivemind", "collaborative"])
def test_who_lacks_the_package_gets_its_name(alias):
    assert known_requirement("strategy", alias) == "dstrat-hivemind"


def test_it_is_never_chosen_automatically():
    assert RECORDS["hivemind"].auto is None


def test_the_entry_point_leads_to_the_plugin():
    [point] = [point for point in entry_points(group="dstrat.v1") if point.dist.name == "dstrat-hivemind"]
    assert point.value == "dstrat_hivemind.plugin"


def test_listing_imports_neither_torch_nor_hivemind():
    code = (
        "import json, sys, dstrat_hivemind, dstrat_hivemind.plugin as plugin\n"
        "plugin.dstrat_components()\n"
        "print(json.dumps([sorted({'torch', 'hivemind'} & {*sys.modules}), dir(dstrat_hivemind)]))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True)
    heavy, names = json.loads(printed.stdout)
    assert heavy == []
    assert {"CollaborationMonitor", "HivemindStrategy"} <= {*names}

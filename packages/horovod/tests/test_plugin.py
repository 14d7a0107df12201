"""The records of the distribution, and how light it is to list them."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from dstrat.interfaces.strategy import Strategy
from dstrat.plugins.known import known_class, known_requirement
from dstrat_horovod import HorovodStrategy
from dstrat_horovod.plugin import dstrat_components

pytestmark = pytest.mark.without_horovod
RECORDS = {record.alias: record for record in dstrat_components()}


def test_the_aliases_are_known_to_the_core():
    assert [*RECORDS] == ["horovod", "horovodrun"]
    assert known_requirement("strategy", "horovod") == "dstrat-horovod"
    assert known_class("strategy", "HorovodStrategy") == "dstrat-horovod"


def test_the_alias_constructs_its_strategy():
    strategy = HorovodStrategy(**RECORDS["horovod"].options)
    assert isinstance(strategy, Strategy)
    assert strategy.start_method == "popen"


def test_it_is_never_chosen_automatically():
    assert RECORDS["horovod"].auto is None


def test_the_entry_point_leads_to_the_plugin():
    [found] = [point for point in entry_points(group="dstrat.v1") if point.dist.name == "dstrat-horovod"]
    assert found.value == "dstrat_horovod.plugin"


def test_listing_imports_neither_torch_nor_horovod():
    code = (
        "import json, sys, dstrat_horovod, dstrat_horovod.plugin as plugin\n"
        "aliases = [record.alias for record in plugin.dstrat_components()]\n"
        "print(json.dumps([aliases, sorted({'torch', 'horovod'} & {*sys.modules})]))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True
    ).stdout
    assert json.loads(printed) == [["horovod", "horovodrun"], []]

"""What the distribution offers, and how light it is to list."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from dstrat.plugins.component import Component
from dstrat.plugins.known import KNOWN
from dstrat_deepspeed import DeepSpeedStrategy
from dstrat_deepspeed.plugin import dstrat_components

STRATEGIES = [record for record in dstrat_components() if isinstance(record, Component) and record.kind == "strategy"]
RECORDS = {record.alias: record for record in STRATEGIES}


def test_every_alias_that_core_knows_is_offered_once():
    known = {alias for alias, package in KNOWN["strategy"].items() if package == "dstrat-deepspeed"}
    assert {*RECORDS} == known
    assert len(RECORDS) == len(STRATEGIES)


@pytest.mark.parametrize(
    ("alias", "stage"),
    [("deepspeed", 2), *((f"deepspeed_stage_{stage}", stage) for stage in range(4))]
    + [(f"deepspeed_stage_{stage}_offload", stage) for stage in (1, 2, 3)]
    + [("deepspeed_stage_3_offload_nvme", 3)],
)
def test_an_alias_constructs_the_strategy_of_its_stage(alias, stage):
    strategy = DeepSpeedStrategy(**RECORDS[alias].options)
    assert strategy.stage == stage
    assert strategy.start_method == "popen"


def test_none_of_them_is_chosen_automatically():
    assert not [alias for alias, record in RECORDS.items() if record.auto is not None]


def test_the_entry_point_leads_to_the_plugin():
    [found] = [point for point in entry_points(group="dstrat.v1") if point.dist.name == "dstrat-deepspeed"]
    assert found.value == "dstrat_deepspeed.plugin"


def test_listing_imports_neither_torch_nor_deepspeed():
    code = (
        "import json, sys, dstrat_deepspeed, dstrat_deepspeed.plugin as plugin\n"
        "plugin.dstrat_components()\n"
        "print(json.dumps([name for name in ('torch', 'deepspeed') if name in sys.modules] + dir(dstrat_deepspeed)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True)
    found = json.loads(done.stdout)
    assert "DeepSpeedStrategy" in found
    assert not {"torch", "deepspeed"} & {*found}


def test_the_package_has_only_the_names_that_it_has():
    import dstrat_deepspeed

    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        dstrat_deepspeed.Nothing  # noqa: B018 - the look-up is what is tested

"""What the distribution offers, and how light it is to list."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from dstrat.interfaces.strategy import Strategy
from dstrat.plugins.component import Component, Tombstone
from dstrat.plugins.known import known_requirement
from dstrat_ddp import DataParallelStrategy, DDP2Strategy, DDPSpawnStrategy, DDPStrategy
from dstrat_ddp.plugin import dstrat_components

STARTS = {"ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}
RECORDS = {record.alias: record for record in dstrat_components() if isinstance(record, Component)}


def test_every_alias_is_offered_once():
    searches = [f"{alias}_find_unused_parameters_{value}" for alias in STARTS for value in ("true", "false")]
    assert sorted(RECORDS) == sorted([*STARTS, *searches, "dp", "ddp2"])
    assert len(RECORDS) == sum(isinstance(record, Component) for record in dstrat_components())


@pytest.mark.parametrize("alias", RECORDS)
def test_who_lacks_the_package_is_told_its_name(alias):
    assert known_requirement("strategy", alias) == "dstrat-ddp"


@pytest.mark.parametrize("alias", RECORDS)
def test_an_alias_constructs_its_strategy(alias):
    record = RECORDS[alias]
    module, _, name = record.target.partition(":")
    strategy = getattr(__import__(module, fromlist=[name]), name)(**record.options)
    assert isinstance(strategy, Strategy)
    assert record.starts_processes == (alias not in ("dp", "ddp2"))


@pytest.mark.parametrize(("alias", "method"), STARTS.items())
@pytest.mark.parametrize("search", ["", "_find_unused_parameters_true", "_find_unused_parameters_false"])
def test_an_alias_presets_how_processes_start(alias, method, search):
    record = RECORDS[alias + search]
    assert DDPStrategy(**record.options).start_method == method
    assert record.notebook_safe == (method == "fork")
    searches = {"": None, "_find_unused_parameters_true": True, "_find_unused_parameters_false": False}
    assert record.options.get("find_unused_parameters") is searches[search]


def test_ddp_is_chosen_automatically_and_in_a_notebook_its_notebook_form():
    ranks = {alias: record.auto for alias, record in RECORDS.items() if record.auto is not None}
    assert ranks.keys() == {"ddp", "ddp_notebook"}
    assert ranks["ddp"] > ranks["ddp_notebook"]
    assert RECORDS["ddp_notebook"].notebook_safe
    assert not RECORDS["ddp"].notebook_safe


def test_the_retired_alias_says_what_to_write():
    [tombstone] = [record for record in dstrat_components() if isinstance(record, Tombstone)]
    assert (tombstone.alias, tombstone.replacement) == ("ddp_cpu", "ddp")
    assert 'accelerator="cpu"' in tombstone.reason


def test_the_entry_point_leads_to_the_plugin():
    [found] = [point for point in entry_points(group="dstrat.v1") if point.dist.name == "dstrat-ddp"]
    assert found.value == "dstrat_ddp.plugin"


def test_listing_imports_no_torch():
    code = (
        "import json, sys, dstrat_ddp, dstrat_ddp.plugin as plugin\n"
        "aliases = [record.alias for record in plugin.dstrat_components()]\n"
        "print(json.dumps([len(aliases), 'torch' in sys.modules, dir(dstrat_ddp)]))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True
    ).stdout
    number, torch_came, names = json.loads(printed)
    assert number == len(dstrat_components())
    assert not torch_came
    assert {"DDPStrategy", "DDPSpawnStrategy", "DDP2Strategy", "DataParallelStrategy"} <= {*names}


def test_the_package_has_only_the_names_that_it_has():
    import dstrat_ddp

    assert dstrat_ddp.DDPStrategy is DDPStrategy
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        dstrat_ddp.Nothing  # noqa: B018 - the look-up is what is tested


def test_the_spawning_class_spawns_unless_told_otherwise():
    assert DDPSpawnStrategy().start_method == "spawn"
    assert DDPSpawnStrategy(start_method="fork", static_graph=True).start_method == "fork"
    assert DDPStrategy().start_method == "popen"


def test_strategies_of_one_process_start_none():
    assert DataParallelStrategy().start_method is None
    assert DDP2Strategy().start_method is None

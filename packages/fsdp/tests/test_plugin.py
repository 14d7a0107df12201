"""What the distribution offers, and how light it is to list."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from dstrat import Trainer
from dstrat.interfaces.strategy import Strategy
from dstrat.plugins.known import known_requirement
from dstrat_fsdp import DDPFullyShardedNativeStrategy, FSDPStrategy, ModelParallelStrategy
from dstrat_fsdp.plugin import dstrat_components

RECORDS = {record.alias: record for record in dstrat_components()}
NATIVE = {
    "fsdp": {},
    "fsdp_native": {},
    "fsdp_cpu_offload": {"cpu_offload": True},
    "fsdp_native_full_shard_offload": {"cpu_offload": True},
    "fsdp_hybrid_shard": {"sharding_strategy": "HYBRID_SHARD"},
    "model_parallel": {},
}


def test_every_alias_is_offered_once():
    assert NATIVE.keys() == RECORDS.keys()
    assert len(RECORDS) == len(dstrat_components())


@pytest.mark.parametrize("alias", RECORDS)
def test_who_lacks_the_package_is_told_its_name(alias):
    assert known_requirement("strategy", alias) == "dstrat-fsdp"


@pytest.mark.parametrize("alias", NATIVE)
def test_an_alias_constructs_its_strategy(alias):
    record = RECORDS[alias]
    module, _, name = record.target.partition(":")
    strategy = getattr(__import__(module, fromlist=[name]), name)(**record.options)
    assert isinstance(strategy, Strategy)
    assert strategy.start_method == "popen"
    assert {key: value for key, value in record.options.items() if key != "start_method"} == NATIVE[alias]


@pytest.mark.parametrize("alias", RECORDS)
def test_every_alias_runs_on_cpus(alias):
    assert Trainer(strategy=alias, accelerator="cpu", devices=2, logger=False).plan.accelerator == "cpu"


def test_none_of_them_is_chosen_automatically():
    assert not [alias for alias, record in RECORDS.items() if record.auto is not None]


def test_the_entry_point_leads_to_the_plugin():
    [found] = [point for point in entry_points(group="dstrat.v1") if point.dist.name == "dstrat-fsdp"]
    assert found.value == "dstrat_fsdp.plugin"


def test_listing_imports_no_torch():
    code = (
        "import json, sys, dstrat_fsdp, dstrat_fsdp.plugin as plugin\n"
        "aliases = [record.alias for record in plugin.dstrat_components()]\n"
        "print(json.dumps([len(aliases), 'torch' in sys.modules, dir(dstrat_fsdp)]))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True
    ).stdout
    number, torch_came, names = json.loads(printed)
    assert number == len(dstrat_components())
    assert not torch_came
    assert {"FSDPStrategy", "DDPFullyShardedNativeStrategy", "ModelParallelStrategy"} <= {*names}


def test_the_package_has_only_the_names_that_it_has():
    import dstrat_fsdp

    assert dstrat_fsdp.FSDPStrategy is FSDPStrategy is DDPFullyShardedNativeStrategy
    assert dstrat_fsdp.ModelParallelStrategy is ModelParallelStrategy
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        dstrat_fsdp.Nothing  # noqa: B018 - the look-up is what is tested

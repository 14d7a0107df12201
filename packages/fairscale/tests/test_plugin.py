"""The aliases of the distribution, and how light it is to list them."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from dstrat import Trainer
from dstrat.errors import ConflictError
from dstrat.plugins.known import known_requirement
from dstrat_fairscale.plugin import dstrat_components

RECORDS = {record.alias: record for record in dstrat_components()}


def test_every_alias_is_offered_once():
    assert [*RECORDS] == [
        "ddp_sharded",
        "ddp_sharded_find_unused_parameters_false",
        "ddp_sharded_spawn",
        "ddp_sharded_spawn_find_unused_parameters_false",
        "ddp_fully_sharded",
    ]
    assert len(RECORDS) == len(dstrat_components())
    assert RECORDS["ddp_sharded_spawn"].options == {"start_method": "spawn"}
    assert RECORDS["ddp_sharded_find_unused_parameters_false"].options["find_unused_parameters"] is False


@pytest.mark.parametrize("alias", RECORDS)
def test_who_lacks_the_package_is_told_its_name(alias):
    assert known_requirement("strategy", alias) == "dstrat-fairscale"


def test_ddp_fully_sharded_alone_is_for_cuda_only_as_the_plan_says():
    pytest.importorskip("fairscale", reason="needs fairscale")
    assert Trainer(strategy="ddp_sharded", accelerator="cpu", devices=2, logger=False).plan.accelerator == "cpu"
    with pytest.raises(ConflictError, match="uses devices of the type 'cuda', and those of accelerator 'cpu' are"):
        Trainer(strategy="ddp_fully_sharded", accelerator="cpu", devices=2, logger=False)


def test_none_of_them_is_chosen_automatically():
    assert not [alias for alias, record in RECORDS.items() if record.auto is not None]


def test_the_entry_point_leads_to_the_plugin():
    [found] = [point for point in entry_points(group="dstrat.v1") if point.dist.name == "dstrat-fairscale"]
    assert found.value == "dstrat_fairscale.plugin"


def test_listing_imports_neither_torch_nor_fairscale():
    code = (
        "import json, sys, dstrat_fairscale, dstrat_fairscale.plugin as plugin\n"
        "plugin.dstrat_components()\n"
        "print(json.dumps([sorted({'torch', 'fairscale'} & {*sys.modules}), dir(dstrat_fairscale)]))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True)
    heavy, names = json.loads(printed.stdout)
    assert heavy == []
    assert {"DDPFullyShardedStrategy", "DDPShardedStrategy", "DDPSpawnShardedStrategy"} <= {*names}

"""Strategies that resolved requests give, with their components."""

from __future__ import annotations

import pytest
import torch

from dstrat.builtin.accelerators.cpu import CPUAccelerator
from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import MisuseError
from dstrat.interfaces.strategy import Parts
from dstrat.launch.external import ExternalLauncher
from dstrat.launch.local import LocalLauncher
from dstrat.plugins.component import Component
from dstrat.resolve import Request, make_plan, resolve_request

FARM = {"FARM": "2", "FARM_RANK": "1"}


@pytest.fixture
def built(catalog):
    def plan_and_build(environ=FARM, **words):
        return resolve_request(Request(**words), catalog=catalog, environ=environ, interactive=False)[1]

    return plan_and_build


def test_a_strategy_by_alias_has_all_its_parts(built, parts):
    strategy = built({}, strategy="many", accelerator="cpu", devices=2, precision="bf16", plugins=("shelf",))
    assert type(strategy) is parts["many"]
    assert type(strategy.accelerator) is parts["cpu"]
    assert type(strategy.checkpoint_io) is parts["shelf"]
    assert type(strategy.cluster_environment) is parts["local"]
    assert strategy.precision_plugin.flag == "bf16-mixed"
    assert strategy.parallel_devices == (torch.device("cpu"), torch.device("cpu"))


def test_an_alias_gives_its_options_to_the_constructor(built):
    assert built({}, strategy="many_spawn", devices=2).start_method == "spawn"


def test_options_after_an_alias_are_arguments_of_each_kind(built):
    strategy = built(
        {"FARM": "2", "FARM_RANK": "1"},
        strategy="many(process_group_backend='gloo')",
        accelerator="cpu()",
        precision="scaled(scale=3.0)",
        plugins=["drawer@this process(depth=2)", "farm()"],
    )
    assert (strategy.process_group_backend, strategy.checkpoint_io.depth) == ("gloo", 2)
    assert (strategy.precision_plugin.scale, strategy.global_rank) == (3.0, 1)


def test_an_option_replaces_a_preset_that_is_the_default(built, catalog):
    strategy = built({}, strategy="many(start_method='fork')", devices=2)
    assert strategy.start_method == "fork"
    assert catalog.find("strategy", "many(start_method='fork')").component.notebook_safe
    assert not catalog.find("strategy", "many").component.notebook_safe


def test_options_go_to_the_strategy_that_serves_an_alias(catalog):
    catalog.register(
        Component(
            kind="accelerator",
            alias="rows",
            target=CPUAccelerator,
            summary="",
            groups=("chips",),
            strategies={"many": "many_spawn"},
        )
    )
    try:
        request = Request(strategy="many(process_group_backend='x')", accelerator="rows", devices=2)
        plan, strategy = resolve_request(request, catalog=catalog, environ={}, interactive=False)
    finally:
        catalog.unregister("accelerator", "rows")
    assert plan.choices[0].value == "many_spawn(process_group_backend='x')"
    assert (strategy.process_group_backend, strategy.start_method) == ("x", "spawn")


def test_the_plan_shows_options(catalog):
    request = Request(
        strategy="many(process_group_backend='gloo')", accelerator="cpu", devices=2, plugins=("drawer(depth=2)",)
    )
    plan = make_plan(request, catalog=catalog, environ={}, interactive=False)
    shown = {row.subject: row.value for row in plan.choices}
    assert (shown["strategy"], shown["checkpoint io"]) == ("many(process_group_backend='gloo')", "drawer(depth=2)")
    assert (plan.strategy, plan.checkpoint_io) == ("many", "drawer")
    assert dict(plan.catalog_names)["strategy"] == "many@this process(process_group_backend='gloo')"


def test_a_cluster_environment_reads_the_given_variables(built):
    strategy = built(FARM, strategy="many", accelerator="cpu")
    assert (strategy.world_size, strategy.global_rank) == (2, 1)


def test_a_class_of_the_users_own_is_constructed_and_completed(built, parts):
    class Mine(parts["many"]):
        pass

    strategy = built({}, strategy=Mine, accelerator=parts["slow"], plugins=[parts["odd"]], devices=2)
    assert type(strategy) is Mine
    assert type(strategy.accelerator) is parts["slow"]
    assert type(strategy.precision_plugin) is parts["odd"]


def test_a_strategy_of_the_users_own_receives_what_it_lacks_once_and_keeps_what_it_has(built, parts):
    class Counting(parts["many"]):
        received = 0

        def receive(self, parts):
            self.received += 1
            super().receive(parts)

    shelf, odd = parts["shelf"](), parts["odd"]()
    mine = Counting(checkpoint_io=shelf, precision_plugin=odd)
    strategy = built({}, strategy=mine, accelerator="cpu", devices=2)
    assert strategy is mine
    assert mine.received == 1
    assert (mine.checkpoint_io, mine.precision_plugin) == (shelf, odd)
    assert type(mine.accelerator) is parts["cpu"]


@pytest.mark.parametrize("kind", ["alias", "class"])
def test_parts_that_its_constructor_names_are_constructed_for_it(built, parts, kind):
    aliases = {
        "accelerator": "slow",
        "checkpoint_io": "shelf",
        "precision_plugin": "odd",
        "cluster_environment": "farm",
    }
    named = {name: alias if kind == "alias" else parts[alias] for name, alias in aliases.items()}
    strategy = built(FARM, strategy=parts["many"](**named))
    assert {name: type(getattr(strategy, name)) for name in aliases} == {
        name: parts[alias] for name, alias in aliases.items()
    }


def test_an_alias_that_nobody_resolved_is_an_error(parts):
    with pytest.raises(MisuseError, match=r"Many\(checkpoint_io='shelf'\) needs an instance here"):
        parts["many"](checkpoint_io="shelf").receive(Parts())


def test_a_strategy_that_is_used_twice_has_the_parts_of_the_second_time(built, parts):
    mine = parts["many"]()
    built({}, strategy=mine, accelerator="fast", devices=3)
    built({}, strategy=mine, accelerator="cpu", devices=2)
    assert type(mine.accelerator) is parts["cpu"]
    assert len(mine.parallel_devices) == 2


def test_devices_of_a_strategy_of_the_users_own_stay(built, parts):
    devices = (torch.device("cpu"),) * 3
    strategy = built({}, strategy=parts["many"](parallel_devices=devices))
    assert strategy.parallel_devices == devices


def test_a_precision_is_the_strategys_then_the_accelerators_then_the_catalogs(built, parts):
    class Particular(parts["many"]):
        def precision_for(self, flag):
            return parts["bf16-mixed"]("16-mixed") if flag == "16-mixed" else None

    own = built({}, strategy=Particular(), accelerator="fast", precision="bf16-true").precision_plugin
    assert type(own).__name__ == "FastPrecision"
    assert type(built({}, accelerator="cpu", precision="bf16-true").precision_plugin) is parts["bf16-true"]

    theirs = Particular()
    theirs.precision_for = {"bf16-true": parts["odd"]()}.get
    assert type(built({}, strategy=theirs, accelerator="fast", precision="bf16-true").precision_plugin) is parts["odd"]


def test_a_precision_that_the_user_made_is_nobody_elses_to_choose(built, parts):
    class Particular(parts["many"]):
        def precision_for(self, flag):
            raise AssertionError

    mine = parts["odd"]()
    assert built({}, strategy=Particular(), accelerator="cpu", precision=mine).precision_plugin is mine


def test_the_launcher_follows_from_who_starts_the_processes(built):
    assert built({}, accelerator="cpu").launcher is None
    assert isinstance(built(FARM, accelerator="cpu").launcher, ExternalLauncher)
    local = built({}, strategy="many_spawn", accelerator="cpu", devices=3).launcher
    assert isinstance(local, LocalLauncher)
    assert (local.settings.num_processes, local.settings.num_nodes, local.settings.start_method) == (3, 1, "spawn")


def test_a_strategy_with_one_process_per_device_needs_no_launcher_for_one_device(built):
    strategy = built({}, strategy="many", accelerator="cpu", devices=1)
    assert strategy.launcher is None
    assert (strategy.world_size, strategy.global_rank) == (1, 0)


def test_a_strategy_with_parts_by_name_has_its_device_before_they_are_constructed():
    assert SingleDeviceStrategy("cpu", accelerator="cpu").root_device == torch.device("cpu")

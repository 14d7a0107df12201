"""What each request is taken to mean, and why."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re

import pytest
import torch

from dstrat import parse_devices
from dstrat.builtin.clusters.plain import PlainEnvironment
from dstrat.errors import DeviceError
from dstrat.interfaces.accelerator import Accelerator
from dstrat.plugins.catalog import Catalog
from dstrat.plugins.component import Component
from dstrat.resolve import Request, make_plan

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
MACHINES = {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "NODE_RANK": "1"}


def subclass(base):
    """A class of the user's own, which no catalog knows."""
    return type("Mine", (base,), {})


GOOD = {
    "nothing": ({}, {}, {"strategy": "many", "accelerator": "fast", "devices": "4", "processes": "4 by popen"}),
    "one device": (
        {"accelerator": "cpu"},
        {},
        {
            "strategy": "single_device",
            "accelerator": "cpu",
            "devices": "1",
            "cluster": "local",
            "processes": "1",
            "precision": "32-true",
            "checkpoint io": "portable",
        },
    ),
    "devices as text": ({"devices": "2"}, {}, {"strategy": "many", "devices": "2"}),
    "devices as indices": ({"accelerator": "cpu", "devices": [1, 3]}, {}, {"devices": "2 (1, 3)", "strategy": "many"}),
    "all devices": ({"accelerator": "cpu", "devices": -1}, {}, {"devices": "1"}),
    "the first devices": ({"accelerator": "cpu", "devices": "0,1"}, {}, {"devices": "2"}),
    "a group": ({"accelerator": "chips"}, {}, {"accelerator": "fast"}),
    "a strategy for one accelerator": ({"strategy": "many_plain", "devices": 2}, {}, {"accelerator": "cpu"}),
    "a strategy for two devices": ({"strategy": "pair"}, {}, {"devices": "2", "processes": "1"}),
    "torchrun": (
        {},
        TORCHRUN,
        {"cluster": "torchelastic", "devices": "2", "processes": "2", "strategy": "many", "accelerator": "fast"},
    ),
    "torchrun, told again": ({"devices": 2, "strategy": "many"}, TORCHRUN, {"cluster": "torchelastic"}),
    "torchrun, and one process that needs no others": (
        {"strategy": "pair", "accelerator": "cpu"},
        {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {"processes": "1", "devices": "1"},
    ),
    "a cluster by alias": ({"plugins": ("local",)}, TORCHRUN, {"cluster": "local", "processes": "4 by popen"}),
    "a cluster of a plugin": ({}, {"FARM": "3", "FARM_RANK": "2"}, {"cluster": "farm", "processes": "3"}),
    "several machines": (
        {"strategy": "many", "devices": 2, "num_nodes": 3},
        MACHINES,
        {"nodes": "3", "processes": "6 by popen"},
    ),
    "one device on each of several machines": ({"devices": 1, "num_nodes": 2}, MACHINES, {"processes": "2 by popen"}),
    "a precision by its number": ({"precision": 16}, {}, {"precision": "16-mixed"}),
    "a precision by its number as text": ({"precision": "64", "accelerator": "cpu"}, {}, {"precision": "64-true"}),
    "a precision by its short name": ({"precision": "bf16"}, {}, {"precision": "bf16-mixed"}),
    "a precision among the plugins": ({"plugins": ["bf16-true"]}, {}, {"precision": "bf16-true"}),
    "a checkpoint io among the plugins": ({"plugins": ("shelf",)}, {}, {"checkpoint io": "shelf"}),
    "an alias that presets a checkpoint io": ({"strategy": "many_shelved"}, {}, {"checkpoint io": "Shelf"}),
    "a full alias": ({"strategy": "many@this process"}, {}, {"strategy": "many"}),
}


@pytest.mark.parametrize(("words", "environ", "rows"), GOOD.values(), ids=GOOD)
def test_a_request_means(words, environ, rows, catalog):
    plan = make_plan(Request(**words), catalog=catalog, environ=environ, interactive=False)
    assert {choice.subject: choice.value for choice in plan.choices} | rows == {
        choice.subject: choice.value for choice in plan.choices
    }


@pytest.mark.parametrize(("words", "environ", "rows"), GOOD.values(), ids=GOOD)
def test_a_plan_pickles_and_becomes_json(words, environ, rows, catalog):
    plan = make_plan(Request(**words), catalog=catalog, environ=environ, interactive=False)
    assert pickle.loads(pickle.dumps(plan)) == plan
    content = json.loads(json.dumps(plan.to_dict()))
    assert content["choices"][0]["subject"] == "strategy"
    assert all(alias.startswith(content[kind]) for kind, alias in content["catalog_names"].items() if kind in content)
    assert [line.split("  ")[0] for line in str(plan).splitlines()] == [choice.subject for choice in plan.choices]


def test_each_choice_says_why_and_whose_it_is(core_catalog):
    plan = make_plan(Request(accelerator="cpu", precision="bf16"), catalog=core_catalog, environ={}, interactive=False)
    choices = {choice.subject: choice for choice in plan.choices}
    assert choices["strategy"].reason == "the first choice for 1 device"
    assert choices["accelerator"].reason == "asked for"
    assert choices["devices"].reason == "what 'auto' stands for"
    assert choices["cluster"].reason == "nothing else started this process"
    assert choices["processes"].reason == "the strategy needs no others"
    assert choices["precision"].reason == "asked for"
    assert choices["checkpoint io"].reason == "the default, folders"
    owners = {subject for subject, choice in choices.items() if choice.owner.startswith("dstrat 0.")}
    assert owners == {"strategy", "accelerator", "cluster", "precision", "checkpoint io"}


def test_the_reason_for_an_accelerator_names_the_others(catalog):
    plan = make_plan(Request(devices=1), catalog=catalog, environ={}, interactive=False)
    assert plan.choices[1].reason.startswith("the best one that is available, before ")
    plan = make_plan(Request(strategy="many_plain"), catalog=catalog, environ={}, interactive=False)
    assert "the best one that the strategy runs on; fast" in plan.choices[1].reason


def test_evidence_of_a_cluster_is_the_reason_for_it(catalog):
    plan = make_plan(Request(), catalog=catalog, environ=TORCHRUN, interactive=False)
    cluster = next(choice for choice in plan.choices if choice.subject == "cluster")
    assert (cluster.value, cluster.reason) == ("torchelastic", "TORCHELASTIC_RUN_ID is set")


def test_a_cluster_is_asked_for_evidence_only_where_one_of_its_variables_is_set():
    class Sure(PlainEnvironment):
        @classmethod
        def evidence(cls, environ):
            return "always"

    record = Component(kind="cluster_environment", alias="sure", target=Sure, summary="", auto=990)
    catalog = Catalog({})
    catalog.register(dataclasses.replace(record, evidence_variables=("SURE", "RANK")))
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    plans = [
        make_plan(Request(accelerator="cpu"), catalog=catalog, environ=environ, interactive=False)
        for environ in ({}, rank)
    ]
    assert [plan.cluster_environment for plan in plans] == ["local", "sure"]


def test_a_table_of_a_plan_is_aligned(core_catalog):
    plan = make_plan(Request(accelerator="cpu"), catalog=core_catalog, environ={}, interactive=False)
    lines = str(plan).splitlines()
    assert lines[0].startswith("strategy       single_device  the first choice for 1 device ")
    assert lines[-1].startswith("checkpoint io  portable       the default, folders ")
    assert lines[0].index("dstrat 0.") == lines[-1].index("dstrat 0.")
    assert not any(line.endswith(" ") for line in lines)


def test_a_notebook_shows_a_plan_as_a_table_with_escaped_cells(core_catalog):
    plan = make_plan(Request(accelerator="cpu"), catalog=core_catalog, environ={}, interactive=False)
    words = re.sub(r"<[^>]*>", " ", plan._repr_html_()).split()
    assert words[:6] == ["strategy", "single_device", "the", "first", "choice", "for"]
    row = dataclasses.replace(plan.choices[0], value="<b>")
    assert ">&lt;b&gt;</td>" in dataclasses.replace(plan, choices=(row,))._repr_html_()


def test_facts_for_whoever_runs_the_plan(catalog):
    request = Request(strategy="many", accelerator="cpu", devices=[0, 2], num_nodes=2, precision=16)
    plan = make_plan(request, catalog=catalog, environ=MACHINES, interactive=False)
    assert (plan.strategy, plan.accelerator, plan.cluster_environment) == ("many", "cpu", "local")
    assert (plan.precision, plan.checkpoint_io) == ("16-mixed", "portable")
    assert (plan.num_devices, plan.num_nodes, plan.processes_per_node, plan.world_size) == (2, 2, 2, 4)
    assert plan.device_indices == (0, 2)
    assert (plan.started_by, plan.start_method) == ("dstrat", "popen")


def test_a_notebook_gets_a_strategy_that_works_there(catalog):
    asked = Request(devices=2)
    assert make_plan(asked, catalog=catalog, environ={}, interactive=False).strategy == "many"
    assert make_plan(asked, catalog=catalog, environ={}, interactive=True).strategy == "many_fork"


def test_one_device_needs_no_processes_in_a_notebook(catalog):
    plan = make_plan(Request(strategy="many", devices=1), catalog=catalog, environ={}, interactive=True)
    assert (plan.world_size, plan.started_by, plan.start_method) == (1, "nobody", None)


def test_classes_and_instances_are_as_good_as_aliases(catalog, parts):
    for made in (lambda cls: cls, lambda cls: cls()):
        request = Request(
            strategy=made(parts["many"]),
            accelerator=made(parts["fast"]),
            devices=2,
            plugins=(made(parts["shelf"]), made(parts["odd"])),
        )
        with pytest.raises(ValueError, match=r"precision 'Odd' needs torch\.float64"):  # the fast accelerator has none
            make_plan(request, catalog=catalog, environ={}, interactive=False)
        request = Request(strategy=made(parts["many"]), accelerator=made(parts["cpu"]), plugins=(made(parts["odd"]),))
        plan = make_plan(request, catalog=catalog, environ={}, interactive=False)
        assert (plan.strategy, plan.accelerator, plan.precision) == ("Many", "CPUAccelerator", "odd")


def test_classes_that_no_catalog_knows_are_taken_as_they_are(catalog, parts, core_catalog):
    """Without a record the class speaks: a start method means processes, and nothing is ruled out."""
    request = Request(strategy=subclass(parts["many"]), accelerator=subclass(parts["fast"]), devices=3)
    plan = make_plan(request, catalog=core_catalog, environ={}, interactive=False)
    assert (plan.strategy, plan.accelerator, plan.world_size) == ("Mine", "Mine", 3)
    assert (plan.start_method, plan.started_by) == ("popen", "dstrat")


@pytest.mark.parametrize("made", [lambda cls: cls, lambda cls: cls()], ids=["class", "instance"])
def test_the_alias_of_a_class_that_no_catalog_knows_is_its_name(catalog, parts, made):
    def alias(cls):
        request = Request(strategy=made(cls), accelerator="cpu", devices=1)
        return make_plan(request, catalog=catalog, environ={}, interactive=False).strategy_alias

    assert alias(parts["many"]) == "many"
    assert alias(subclass(parts["many"])) == "Mine"


def test_a_subclass_has_the_facts_of_its_nearest_known_base(catalog, parts):
    with pytest.raises(ValueError, match="strategy Mine uses at most 1 device"):
        make_plan(
            Request(strategy=subclass(parts["single_device"]), accelerator="cpu", devices=2),
            catalog=catalog,
            environ={},
            interactive=False,
        )


def test_the_start_method_of_an_instance_decides_what_it_can_do(catalog, parts):
    request = Request(strategy=parts["many"](start_method="fork"), devices=2)
    assert make_plan(request, catalog=catalog, environ={}, interactive=True).start_method == "fork"
    with pytest.raises(ValueError, match=r"here is none \(a notebook, a prompt"):
        make_plan(Request(strategy=parts["many"](), devices=2), catalog=catalog, environ={}, interactive=True)


def test_devices_of_a_strategy_decide_the_accelerator(catalog, parts):
    """The fast accelerator would be preferred, but the devices are of the processor."""
    strategy = parts["many"](parallel_devices=[torch.device("cpu")] * 3)
    plan = make_plan(Request(strategy=strategy), catalog=catalog, environ={}, interactive=False)
    assert (plan.accelerator, plan.num_devices, plan.device_indices) == ("cpu", 3, ())
    assert plan.choices[2].reason == "given to Many(parallel_devices=...)"


def test_parts_of_a_strategy_say_where_they_come_from(catalog, parts):
    strategy = parts["many"](accelerator=parts["slow"](), precision_plugin=parts["odd"]())
    plan = make_plan(Request(strategy=strategy, devices=2), catalog=catalog, environ={}, interactive=False)
    choices = {choice.subject: choice for choice in plan.choices}
    assert (choices["accelerator"].value, choices["accelerator"].reason) == ("Slow", "given to Many(accelerator=...)")
    assert choices["precision"].value == "Odd (odd)"


@pytest.mark.parametrize("device", [None, "cpu"])
def test_accelerator_of_a_strategy_may_be_chosen_automatically(catalog, parts, device):
    devices = None if device is None else [torch.device(device)] * 2
    strategy = parts["many"](accelerator="auto", parallel_devices=devices)
    plan = make_plan(Request(strategy=strategy), catalog=catalog, environ={}, interactive=False)
    assert plan.accelerator == (device or "fast")


def test_a_class_says_how_it_starts_and_what_it_has_when_it_is_constructed(catalog, parts):
    """Both are in its constructor, where nobody sees them before."""

    class Mine(parts["many"]):
        def __init__(self):
            super().__init__(start_method="fork", precision_plugin=parts["odd"]())

    for interactive in (True, False):
        request = Request(strategy=Mine, accelerator="cpu", devices=2)
        plan = make_plan(request, catalog=catalog, environ={}, interactive=interactive)
        assert (plan.start_method, plan.precision) == ("fork", "odd")


def test_a_strategy_whose_record_says_nothing_of_processes_starts_them(parts):
    """Its class starts one per device; it is asked where the record leaves it out."""
    others = {plugin.distribution for plugin in Catalog({}).plugins} - {"dstrat"}
    catalog = Catalog({"DSTRAT_DISABLE_PLUGINS": ",".join(others)})
    catalog.register(Component(kind="strategy", alias="quiet", target=subclass(parts["many"]), summary="", auto=1))
    for strategy in ("quiet", "auto"):
        request = Request(strategy=strategy, accelerator="cpu", devices=2)
        plan = make_plan(request, catalog=catalog, environ={}, interactive=False)
        assert (plan.strategy, plan.world_size, plan.started_by) == ("quiet", 2, "dstrat")


def test_a_strategy_without_processes_has_one_device_unless_it_says_more(core_catalog, parts):
    class Rows(parts["pair"]):
        drives_several_devices = True

    request = Request(strategy=Rows, accelerator="cpu", devices=3)
    plan = make_plan(request, catalog=core_catalog, environ={}, interactive=False)
    assert (plan.num_devices, plan.world_size) == (3, 1)
    with pytest.raises(ValueError, match="strategy Pair uses at most 1 device on a machine, and not 3"):
        make_plan(
            Request(strategy=parts["pair"], accelerator="cpu", devices=3),
            catalog=core_catalog,
            environ={},
            interactive=False,
        )


def test_an_accelerator_without_a_record_gets_no_strategy_for_other_hardware(parts):
    class Own(Accelerator):
        is_available = staticmethod(lambda: True)
        auto_device_count = staticmethod(lambda: 1)
        parse_devices = staticmethod(lambda devices: [0])
        get_parallel_devices = staticmethod(lambda indices: [torch.device("cpu")])

    others = {plugin.distribution for plugin in Catalog({}).plugins} - {"dstrat"}
    catalog = Catalog({"DSTRAT_DISABLE_PLUGINS": ",".join(others)})
    facts = {"auto": 900, "accelerators": ("chip",)}
    catalog.register(Component(kind="strategy", alias="on_chip", target=parts["pair"], summary="", **facts))
    plan = make_plan(Request(accelerator=Own(), devices=1), catalog=catalog, environ={}, interactive=False)
    assert plan.strategy == "single_device"


def test_a_plugin_that_offers_the_names_of_defaults_changes_nothing_for_others(site, monkeypatch):
    site.add(
        "namesake",
        site.component("32-true", "namesake.nothing:Own", kind="precision"),
        site.component("local", "namesake.nothing:Own", kind="cluster_environment"),
    )
    monkeypatch.syspath_prepend(site.folder)
    plan = make_plan(Request(accelerator="cpu"), catalog=Catalog({}), environ={}, interactive=False)
    owners = {choice.subject: choice.owner.split()[0] for choice in plan.choices if choice.owner}
    assert (owners["precision"], owners["cluster"]) == ("dstrat", "dstrat")


class OneEach(Accelerator):
    """A device of which each process sees its own."""

    process_group_backend = "gloo"

    def is_available(self):
        return True

    def auto_device_count(self):
        return 1

    def parse_devices(self, devices):
        return parse_devices(devices, everything=1, limit=1, name="own")

    def get_parallel_devices(self, indices):
        return [torch.device("meta", index) for index in indices]


@pytest.mark.parametrize("devices", [None, 2, "auto"])
def test_processes_that_see_one_device_each_use_their_first_one(devices, catalog):
    asked = {} if devices is None else {"devices": devices}
    request = Request(accelerator=OneEach(), strategy="many", **asked)
    plan = make_plan(request, catalog=catalog, environ=TORCHRUN, interactive=False)
    assert (plan.device_indices, plan.world_size) == ((0, 0), 2)
    reasons = {choice.subject: choice.reason for choice in plan.choices}
    assert reasons["devices"] == "one for each process that was started, which sees its own"


def test_more_devices_than_there_are_stay_an_error_where_dstrat_starts_the_processes(catalog):
    with pytest.raises(DeviceError, match="devices=2 is more than there are"):
        make_plan(Request(accelerator=OneEach(), devices=2), catalog=catalog, environ={}, interactive=False)

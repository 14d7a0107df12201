"""What each request that cannot be done is answered."""

from __future__ import annotations

import re
from types import FunctionType

import pytest
import torch

from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import (
    BrokenComponentError,
    ClusterError,
    ConflictError,
    DeviceError,
    MissingRequirementError,
    MisuseError,
    NotInstalledError,
    PluginError,
    RequestError,
    UnknownAliasError,
)
from dstrat.plugins.catalog import Catalog
from dstrat.plugins.component import Component
from dstrat.plugins.known import pip_command
from dstrat.resolve import Request, make_plan, resolve_request

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SBATCH = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}


def _asleep(accelerator):
    class Asleep(accelerator):
        def hint_unavailable(self):
            return "the key is off; turn it"

    return Asleep()


# words, environment, error, what its message says
BAD = {
    # aliases
    "a misspelled strategy": (
        {"strategy": "manny"},
        {},
        UnknownAliasError,
        "'manny' is not known: did you mean 'many'",
    ),
    "a misspelled option": (
        {"strategy": "many(timeuot=1)"},
        {},
        MisuseError,
        "strategy 'many(timeuot=1)' from this process: Many has no argument 'timeuot': did you mean 'timeout'?",
    ),
    "an option that the constructor refuses": (
        {"plugins": ("drawer(width=1)",)},
        {},
        MisuseError,
        "checkpoint io 'drawer(width=1)' from this process: Drawer has no ['width']",
    ),
    "a misspelled option of an accelerator": (
        {"accelerator": "cpu(threads=1)"},
        {},
        MisuseError,
        "accelerator 'cpu(threads=1)' from dstrat 0.1.0: CPUAccelerator has no argument 'threads': it has none",
    ),
    "an option that the alias presets": (
        {"strategy": "many_spawn(start_method='fork')"},
        {},
        ConflictError,
        "gives the option 'start_method' twice, as the alias presets start_method='spawn': leave it out, or choose",
    ),
    "an option of a choice": (
        {"accelerator": "chips(x=1)"},
        {},
        RequestError,
        "accelerator 'chips(x=1)': 'chips' stands for a choice, and has no options of its own: give them to a",
    ),
    "options that are no literals": (
        {"plugins": ["shelf(x=y)"]},
        {},
        RequestError,
        "'shelf(x=y)' is not understood: y is no literal of Python, write x='y'",
    ),
    "options of a misspelled plugin": (
        {"plugins": ["shef(x=1)"]},
        {},
        UnknownAliasError,
        "plugins=['shef(x=1)'] is not known: did you mean 'shelf'?",
    ),
    "a strategy of nobody": ({"strategy": "?"}, {}, UnknownAliasError, "strategy '?' is not known: available are"),
    # Where its package is installed beside the tests, the message says that they have disabled it.
    "a strategy that is not in the catalog": ({"strategy": "hivemind"}, {}, NotInstalledError, "dstrat-hivemind"),
    "an accelerator that is not in the catalog": ({"accelerator": "hpu"}, {}, NotInstalledError, "dstrat-hpu"),
    "a launcher that is not in the catalog": ({"plugins": "ray"}, {}, NotInstalledError, "dstrat-ray"),
    "a precision of nobody": (
        {"precision": 8},
        {},
        UnknownAliasError,
        "precision '8' is not known: available are 16, ",
    ),
    "a misspelled plugin": (
        {"plugins": ("shelff",)},
        {},
        UnknownAliasError,
        "plugins=['shelff'] is not known: did you mean 'shelf'?",
    ),
    "something that is required is missing": (
        {"strategy": "needy"},
        {},
        MissingRequirementError,
        'needs no-such-distribution>=3, which is not installed: pip install "no-such-distribution>=3"',
    ),
    # types
    "a number as strategy": ({"strategy": 3}, {}, RequestError, "strategy=3 is of the type int: give an alias"),
    "nothing as strategy": ({"strategy": None}, {}, RequestError, "strategy=None is of the type NoneType"),
    "a number as accelerator": ({"accelerator": 1}, {}, RequestError, "accelerator=1 is of the type int"),
    "a fraction of a precision": ({"precision": 1.5}, {}, RequestError, "precision=1.5 is of the type float"),
    "truth as precision": ({"precision": True}, {}, RequestError, "precision=True is of the type bool"),
    "a number as plugin": ({"plugins": (3,)}, {}, RequestError, "plugins=[3] is of the type int: a plugin is a"),
    "no machines": ({"num_nodes": 0}, {}, RequestError, "num_nodes=0 is not a number of machines"),
    "half a machine": ({"num_nodes": 0.5}, {}, RequestError, "num_nodes=0.5 is not a number of machines"),
    "truth as machines": ({"num_nodes": True}, {}, RequestError, "num_nodes=True is not a number of machines"),
    # devices
    "no devices": ({"accelerator": "cpu", "devices": 0}, {}, DeviceError, "devices=0 is not a number of cpu devices"),
    "an empty list of devices": ({"accelerator": "cpu", "devices": []}, {}, DeviceError, "devices=[] names no device"),
    "no devices, to a plugin": ({"devices": "0"}, {}, DeviceError, "devices='0' names no device: give at least one"),
    "one and a half devices": ({"devices": 1.5}, {}, DeviceError, "devices=1.5 is of the type float"),
    "truth as devices": ({"devices": True}, {}, DeviceError, "devices=True is of the type bool"),
    "words as devices": (
        {"devices": "some"},
        {},
        DeviceError,
        "devices='some' makes no sense to Fast: invalid literal",
    ),
    "nothing as devices": ({"devices": None}, {}, DeviceError, "devices=None makes no sense to Fast"),
    "more devices than there are": (
        {"accelerator": "cpu", "devices": 4000},
        {},
        DeviceError,
        "devices=4000 is more than there are",
    ),
    "devices of several types": (
        {"strategy": lambda parts: parts["many"](parallel_devices=[torch.device("cpu"), torch.device("meta")])},
        {},
        DeviceError,
        "Many(parallel_devices=...) must be torch.devices of one type",
    ),
    "devices that are none": (
        {"strategy": lambda parts: parts["many"](parallel_devices=["cpu", 3])},
        {},
        DeviceError,
        "Many(parallel_devices=...) must be torch.devices of one type, and is ('cpu', 3)",
    ),
    # accelerators
    "an accelerator that is not there": (
        {"accelerator": "gone"},
        {},
        DeviceError,
        "accelerator 'gone' from this process is not available. Available on this machine: 'fast', ",
    ),
    "an accelerator that says why it is not there": (
        {"accelerator": lambda parts: _asleep(parts["gone"])},
        {},
        DeviceError,
        "accelerator Asleep is not available: the key is off; turn it. Available on this machine: 'fast', ",
    ),
    "an accelerator that cannot tell": (
        {"accelerator": "cracked"},
        {},
        DeviceError,
        "accelerator 'cracked' from this process cannot tell whether it is available (RuntimeError: driver too old)",
    ),
    "a group of which nothing is there": (
        {"accelerator": "ruins"},
        {},
        DeviceError,
        (
            "accelerator='ruins' finds none: 'cracked' cannot tell whether it is available "
            "(RuntimeError: driver too old); 'gone' is not available. Available on this machine: 'fast'"
        ),
    ),
    "a strategy that the accelerator cannot run": (
        {"strategy": "many_plain", "accelerator": "fast", "devices": 2},
        {},
        ConflictError,
        (
            "strategy 'many_plain' from this process cannot run on accelerator 'fast', only on 'cpu': "
            "choose one of these, or a strategy for 'fast' ('many', 'many_fork'"
        ),
    ),
    "a strategy for nothing that is there": (
        {"strategy": "lost"},
        {},
        ConflictError,
        "on this machine, and strategy 'lost' from this process runs on 'gone' only: choose another strategy",
    ),
    "devices of another accelerator": (
        {"strategy": lambda parts: parts["many"](parallel_devices=[torch.device("meta", 0)]), "accelerator": "cpu"},
        {},
        ConflictError,
        "accelerator 'cpu' from dstrat 0.1.0 has no devices of the type 'meta'",
    ),
    "devices of no accelerator": (
        {"strategy": lambda parts: parts["many"](parallel_devices=[torch.device("vulkan", 0)])},
        {},
        ConflictError,
        "and the strategy was constructed with devices of the type 'vulkan'",
    ),
    # precision
    "a precision that the device cannot do": (
        {"accelerator": "fast", "precision": 64},
        {},
        ConflictError,
        (
            "precision '64-true' needs torch.float64, in which accelerator 'fast' from this process does not compute "
            "here: choose another one ('16-mixed', '16-true', '32-true', 'bf16-mixed', 'bf16-true', 'scaled')"
        ),
    ),
    "a precision that the strategy cannot do": (
        {"strategy": "picky", "precision": "16-mixed"},
        {},
        ConflictError,
        "strategy 'picky' from this process cannot run with precision '16-mixed', only with 'bf16-mixed', 'bf16-true'",
    ),
    # numbers of devices and machines
    "more devices than the strategy uses": (
        {"strategy": "pair", "devices": 3},
        {},
        ConflictError,
        (
            "strategy 'pair' from this process uses at most 2 devices on a machine, and not 3: ask for devices=2, "
            "or choose a strategy for more ('many', 'many_fork'"
        ),
    ),
    "two devices with a strategy for one": (
        {"strategy": "single_device", "accelerator": "cpu", "devices": 2},
        {},
        ConflictError,
        "uses at most 1 device on a machine, and not 2: ask for devices=1",
    ),
    "machines for a strategy that stays on one": (
        {"strategy": "many_here", "num_nodes": 2},
        {},
        ConflictError,
        "strategy 'many_here' from this process runs on one machine only, and not on num_nodes=2",
    ),
    "machines that nothing connects": (
        {"strategy": "many", "num_nodes": 2},
        {},
        ClusterError,
        "MASTER_ADDR is not set: with num_nodes above 1",
    ),
    "a start method that does not exist": (
        {"strategy": "many_timeless", "devices": 2},
        {},
        RequestError,
        "start_method 'magic' of strategy 'many_timeless' from this process does not exist: choose one of popen, spawn",
    ),
    # the environment
    "one process where two were started": (
        {"strategy": "single_device"},
        TORCHRUN,
        ClusterError,
        (
            "strategy 'single_device' from dstrat 0.1.0 runs in one process on each machine, and 2 were started "
            "(torchelastic: TORCHELASTIC_RUN_ID is set): start the script once on each machine, or choose a strategy "
            "for several processes ('many', 'many_fork'"
        ),
    ),
    "four devices where two processes were started": (
        {"strategy": "many", "devices": 4},
        TORCHRUN,
        ClusterError,
        "WORLD_SIZE is 2, and devices=4 with num_nodes=1 needs 4: start with torchrun --nnodes=1 --nproc-per-node=4",
    ),
    "the same, by a cluster that does not check": (
        {"strategy": "many", "devices": 4},
        {"FARM": "2", "FARM_RANK": "0"},
        ClusterError,
        "farm started 2 processes, and 4 on each of num_nodes=1 are needed: start 4, or ask for devices='auto'",
    ),
    "processes that machines cannot share": (
        {"num_nodes": 2},
        {"FARM": "3", "FARM_RANK": "0"},
        ClusterError,
        "3 processes were started, which num_nodes=2 cannot share evenly",
    ),
    "python without srun": ({"strategy": "many"}, SBATCH, ClusterError, "put srun before python"),
    "python without srun, with a strategy for one process": (
        {"strategy": "single_device"},
        SBATCH,
        ClusterError,
        "put srun before python",
    ),
    "a world size that is no number": (
        {},
        {**TORCHRUN, "WORLD_SIZE": "two"},
        ClusterError,
        "WORLD_SIZE is 'two', and must be a whole number",
    ),
    "variables that a plugin did not expect": (
        {},
        {"FARM": "two"},
        ClusterError,
        (
            "cluster environment 'farm' from this process cannot make sense of the environment variables "
            "(ValueError: invalid literal for int() with base 10: 'two'): correct them, or give another"
        ),
    ),
    "evidence that a plugin did not expect": (
        {},
        {"BLIND": "2"},
        ClusterError,
        "cluster environment 'blind' from this process cannot make sense of the environment variables (KeyError: '2')",
    ),
    # twice
    "the accelerator twice": (
        {"strategy": lambda parts: parts["many"](accelerator=parts["cpu"]()), "accelerator": "cpu"},
        {},
        ConflictError,
        "accelerator='cpu' and Many(accelerator=...) both give the accelerator: leave one of the two out",
    ),
    "the devices twice": (
        {"strategy": lambda parts: parts["many"](parallel_devices=[torch.device("cpu")]), "devices": 1},
        {},
        ConflictError,
        "devices=1 and Many(parallel_devices=...) both give the devices",
    ),
    "the precision twice": (
        {"strategy": lambda parts: parts["many"](precision_plugin=parts["odd"]()), "precision": "bf16"},
        {},
        ConflictError,
        "precision='bf16' and Many(precision_plugin=...) both give the precision",
    ),
    "the precision as an argument and a plugin": (
        {"precision": 16, "plugins": ("bf16-mixed",)},
        {},
        ConflictError,
        "precision=16 and plugins=['bf16-mixed'] both give the precision",
    ),
    "two plugins of one kind": (
        {"plugins": lambda parts: (parts["shelf"], parts["shelf"]())},
        {},
        ConflictError,
        "plugins=[Shelf] and plugins=[Shelf()] both give the checkpoint io",
    ),
    "a cluster twice": (
        {
            "strategy": lambda parts: parts["many"](cluster_environment=parts["local"]()),
            "plugins": lambda parts: [parts["local"]],
        },
        {},
        ConflictError,
        "plugins=[LocalEnvironment] and Many(cluster_environment=...) both give the cluster environment",
    ),
    "a checkpoint io that the alias presets": (
        {"strategy": "many_shelved", "plugins": ("torch",)},
        {},
        ConflictError,
        "plugins=['torch'] and alias 'many_shelved' (checkpoint_io=...) both give the checkpoint io",
    ),
    "an accelerator among the plugins": (
        {"plugins": lambda parts: (parts["cpu"](),)},
        {},
        RequestError,
        "plugins=[CPUAccelerator()] is no plugin: give it as accelerator=CPUAccelerator()",
    ),
    # classes
    "an instance of another kind": (
        {"strategy": lambda parts: parts["cpu"]()},
        {},
        RequestError,
        "strategy=CPUAccelerator() is of the type CPUAccelerator: give an alias, a subclass of Strategy or an instance",
    ),
    "an alias of a class that needs arguments": (
        {"strategy": "demanding"},
        {},
        MisuseError,
        "strategy 'demanding' from this process cannot be constructed (Demanding.__init__() missing 1 required",
    ),
    "a class that needs arguments": (
        {"strategy": lambda parts: parts["demanding"], "accelerator": "cpu"},
        {},
        MisuseError,
        (
            "strategy Demanding cannot be constructed (Demanding.__init__() missing 1 required positional argument: "
            "'size'): construct it yourself, and give the instance"
        ),
    ),
    "a strategy that does not call its base": (
        {"strategy": lambda parts: parts["many"].__new__(parts["many"])},
        {},
        MisuseError,
        "Many is not ready: its __init__ must call super().__init__()",
    ),
}


def request_of(words, parts):
    """The request, its classes and instances taken from the catalog."""
    return Request(
        **{name: value(parts) if isinstance(value, FunctionType) else value for name, value in words.items()}
    )


@pytest.mark.parametrize(("words", "environ", "error", "message"), BAD.values(), ids=BAD)
def test_a_request_is_refused(words, environ, error, message, catalog, parts):
    with pytest.raises(error, match=re.escape(message)):
        make_plan(request_of(words, parts), catalog=catalog, environ=environ, interactive=False)


def test_options_of_a_precision_that_other_classes_serve_are_refused(catalog):
    request = Request(strategy="many", accelerator="fast", devices=2, precision="scaled(scale=2.0)")
    with pytest.raises(ConflictError) as error:
        resolve_request(request, catalog=catalog, environ={}, interactive=False)
    assert str(error.value) == (
        "precision 'scaled(scale=2.0)' from this process: many on fast computes 'bf16-true' with its own "
        "FastPrecision, which these options do not reach: leave them out, or construct the precision that is to be "
        "used, and give the instance"
    )


@pytest.mark.parametrize("strategy", [SingleDeviceStrategy, SingleDeviceStrategy()])
def test_the_class_of_an_alias_that_another_strategy_serves_is_refused(strategy, parts):
    catalog = Catalog({})
    own = {"device_type": "meta", "strategies": {"single_device": "pair"}}
    catalog.register(Component(kind="accelerator", alias="lazy", target=parts["fast"], summary="", **own))
    message = "strategy SingleDeviceStrategy cannot run on accelerator 'lazy' from this process, where 'pair' serves "
    with pytest.raises(ConflictError, match=re.escape(f"{message}'single_device': give strategy='pair'")):
        make_plan(Request(strategy=strategy, accelerator="lazy", devices=1), catalog=catalog, environ={})


@pytest.mark.parametrize("strategy", ["many", "many_spawn"])
def test_a_notebook_is_told_what_works_there(strategy, catalog):
    message = (
        f"strategy '{strategy}' from this process starts its processes from a script, and here is none "
        "(a notebook, a prompt, python -c, or a worker of another program): run a script, ask for devices=1, or choose "
        "a strategy that works here ('many_fork', 'pair')"
    )
    with pytest.raises(ConflictError, match=re.escape(message)):
        make_plan(Request(strategy=strategy, devices=2), catalog=catalog, environ={}, interactive=True)


def test_several_devices_without_a_strategy_for_them_name_what_to_install(core_catalog):
    message = (
        "2 devices need a strategy that runs one process per device, and none is installed: "
        f"{pip_command('dstrat-ddp')}, or ask for devices=1"
    )
    with pytest.raises(ConflictError, match=re.escape(message)):
        make_plan(Request(accelerator="cpu", devices=2), catalog=core_catalog, environ={}, interactive=False)


def test_several_processes_without_a_strategy_for_them_name_what_to_install(core_catalog):
    message = "2 processes need a strategy that runs one process per device, and none is installed: pip install "
    with pytest.raises(ConflictError, match=re.escape(message)):
        make_plan(Request(accelerator="cpu"), catalog=core_catalog, environ=TORCHRUN, interactive=False)


def test_an_automatic_choice_that_cannot_be_loaded_says_why(site, monkeypatch):
    facts = {"starts_processes": True, "multi_node": True, "auto": 1}
    site.add(
        "frail", site.component(alias="frail", target="frail.strategy:Frail", requires=("nothing-like-it",), **facts)
    )
    monkeypatch.syspath_prepend(site.folder)
    others = {plugin.distribution for plugin in Catalog({}).plugins} - {"dstrat", "frail"}
    catalog = Catalog({"DSTRAT_DISABLE_PLUGINS": ",".join(others)})
    with pytest.raises(MissingRequirementError, match=r"strategy 'frail' from frail 1\.0 needs nothing-like-it"):
        make_plan(Request(accelerator="cpu", devices=2), catalog=catalog, environ={}, interactive=False)


def test_an_automatic_choice_that_fails_names_the_best_candidate(catalog):
    message = (
        "no strategy that is chosen automatically fits: strategy 'many' from this process cannot run on accelerator "
        "'lonely', only on 'cpu', 'chips': choose one of these, or a strategy for 'lonely'"
    )
    with pytest.raises(ConflictError, match=re.escape(message)):
        make_plan(Request(accelerator="lonely", devices=2), catalog=catalog, environ={}, interactive=False)


def test_a_broken_component_that_nobody_asked_for_stands_in_nobodys_way(site, monkeypatch):
    """It would be the first choice for its rank."""
    site.add("acme", site.component(alias="acme", target="acme.no_such_module:Acme", auto=10_000))
    monkeypatch.syspath_prepend(site.folder)
    catalog = Catalog({})
    plan = make_plan(Request(accelerator="cpu"), catalog=catalog, environ={}, interactive=False)
    assert plan.strategy == "single_device"
    with pytest.raises(BrokenComponentError, match=r"strategy 'acme' from acme 1\.0 cannot be used"):
        make_plan(Request(strategy="acme"), catalog=catalog, environ={}, interactive=False)


def test_strict_mode_refuses_every_request_while_a_plugin_is_broken(site, monkeypatch):
    site.add("shaky", plugin="raise RuntimeError('no')")
    monkeypatch.syspath_prepend(site.folder)
    catalog = Catalog({"DSTRAT_STRICT_PLUGINS": "1"})
    for words in ({}, {"plugins": ("torch",)}, {"strategy": "single_device"}):
        with pytest.raises(PluginError, match="RuntimeError: no"):
            make_plan(Request(**words), catalog=catalog, environ={}, interactive=False)


def test_restarts_of_processes_that_torchrun_has_started_are_torchruns(catalog):
    message = (
        "max_restarts=3 restarts processes that dstrat starts, and torchelastic has started these: leave it out, "
        "and use torchrun --max-restarts with fit(resume='auto')"
    )
    request = Request(strategy="many", accelerator="cpu", devices=2, max_restarts=3)
    with pytest.raises(ConflictError, match=re.escape(message)):
        make_plan(request, catalog=catalog, environ=TORCHRUN)


def test_restarts_of_a_strategy_without_processes_are_refused(catalog):
    message = (
        "max_restarts=3 restarts processes that dstrat starts, and strategy 'single_device' from dstrat 0.1.0 runs in "
        "this one: choose a strategy that starts processes, such as strategy='ddp', or leave max_restarts out"
    )
    request = Request(strategy="single_device", accelerator="cpu", devices=1, max_restarts=3)
    with pytest.raises(ConflictError, match=re.escape(message)):
        make_plan(request, catalog=catalog, environ={})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "elastic=True goes on after at most max_restarts deaths of ranks, and max_restarts=0: pass it too"),
        (
            {"max_restarts": 3},
            "Many cannot be set up again in them for fewer ranks: leave elastic out, and max_restarts",
        ),
    ],
)
def test_elastic_job_needs_restarts_and_a_strategy_that_allows_it(catalog, words, message):
    request = Request(strategy="many", accelerator="cpu", devices=2, elastic=True, **words)
    with pytest.raises(ConflictError, match=message):
        resolve_request(request, catalog=catalog, environ={})


@pytest.mark.parametrize("max_restarts", [0, 3])
@pytest.mark.parametrize("elastic", [True, "replace"])
def test_elastic_job_of_torchrun_is_refused(catalog, elastic, max_restarts):
    message = (
        f"elastic={elastic!r} needs the processes that dstrat starts, and torchelastic has started these: leave "
        "elastic and max_restarts out, and use torchrun --max-restarts with fit(resume='auto')"
    )
    request = Request(strategy="many", accelerator="cpu", devices=2, elastic=elastic, max_restarts=max_restarts)
    with pytest.raises(ConflictError, match=re.escape(message)):
        make_plan(request, catalog=catalog, environ=TORCHRUN)


def test_elastic_job_on_several_machines_is_refused(catalog):
    machines = {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "NODE_RANK": "0"}
    request = Request(strategy="many", accelerator="cpu", devices=2, num_nodes=2, elastic=True, max_restarts=3)
    with pytest.raises(ConflictError, match="elastic=True works on one machine, and num_nodes=2: leave elastic and"):
        make_plan(request, catalog=catalog, environ=machines)


def test_restarts_on_several_machines_are_refused(catalog):
    machines = {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "NODE_RANK": "0"}
    message = "restarts the processes of one machine, and num_nodes=2: leave it out, and start the script with torchrun"
    with pytest.raises(ConflictError, match=message):
        make_plan(
            Request(strategy="many", accelerator="cpu", devices=2, num_nodes=2, max_restarts=1),
            catalog=catalog,
            environ=machines,
        )

# ruff: noqa: SIM905 - lists of words are easier to read as one text
"""Whatever is asked in whatever environment, the outcome is a plan or a DstratError, and the same again."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrat.errors import DstratError
from dstrat.resolve import Request, resolve_request

# Requests.  What a user has made is drawn by its name here, and made once from the parts of the catalog.

MADE = {
    "Many": lambda parts: parts["many"],
    "Many()": lambda parts: parts["many"](),
    "Many(fork)": lambda parts: parts["many"](start_method="fork"),
    "Many(cpu,odd)": lambda parts: parts["many"](accelerator=parts["cpu"](), precision_plugin=parts["odd"]()),
    "Many(local,shelf)": lambda parts: parts["many"](
        cluster_environment=parts["local"]({}), checkpoint_io=parts["shelf"]()
    ),
    "Many(two)": lambda parts: parts["many"](parallel_devices=parts["cpu"]().get_parallel_devices([0, 1])),
    "Many(none)": lambda parts: parts["many"](parallel_devices=[]),
    "Many(3)": lambda parts: parts["many"](parallel_devices=[3]),
    "Single(cpu)": lambda parts: parts["single_device"]("cpu"),
    "Demanding": lambda parts: parts["demanding"],
    "Own": lambda parts: type("Own", (parts["many"],), {}),
    "Own(alone)": lambda parts: type("Own", (parts["many"],), {"start_method": None})(),
    "unready": lambda parts: parts["many"].__new__(parts["many"]),
    "CPU": lambda parts: parts["cpu"],
    "CPU()": lambda parts: parts["cpu"](),
    "Fast": lambda parts: parts["fast"],
    "Gone()": lambda parts: parts["gone"](),
    "Cracked()": lambda parts: parts["cracked"](),
    "Odd": lambda parts: parts["odd"],
    "Odd()": lambda parts: parts["odd"](),
    "Mixed(16)": lambda parts: parts["bf16-mixed"]("16-mixed"),
    "Shelf": lambda parts: parts["shelf"],
    "Shelf()": lambda parts: parts["shelf"](),
    "Local": lambda parts: parts["local"],
    "Farm": lambda parts: parts["farm"],
    "Farm(2)": lambda parts: parts["farm"]({"FARM": "2", "FARM_RANK": "1"}),
}

SENSIBLE = {
    "strategy": [
        *"many many many many_spawn many_fork many_plain many_here many_shelved pair picky single_device".split(),
        *"demanding Demanding Many Many() Many(fork) Many(cpu,odd) Many(local,shelf) Many(two) Single(cpu) Own".split(),
        "many@this process",
    ],
    "accelerator": "cpu cpu cpu cpu fast chips slow lonely CPU CPU() Fast".split(),
    "devices": [1, 2, 2, 4, "1", "2", [0], [0, 1], (0,), "0,1", -1],
    "num_nodes": [1, 2, 2, 3],
    "precision": [16, 32, 64, *"32-true 16-mixed bf16-mixed bf16-true 64-true bf16 odd Odd Odd() Mixed(16)".split()],
    "plugins": [
        *[("local",), ("torch",), ("shelf",), ("Shelf",), ("Local",), ("farm",), ("Farm(2)",), ("slurm",)],
        *[["bf16-mixed"], ("Odd()", "Shelf()"), ["Mixed(16)", "Local", "shelf"]],
    ],
}
FLAWED = {
    "strategy": "many_timeless lost needy fsdp maany Many(none) Many(3) Own(alone) unready CPU()".split(),
    "accelerator": "gpu gone cracked ruins Gone() Cracked() tpu cp Many()".split(),
    "devices": [0, [], [0, 0], 9, 4000, "-2", "3,", [1, 2]],
    "num_nodes": [0, -1],
    "precision": [8, "16-tru"],
    "plugins": [("shelff",), ("CPU()",), ("Many",), ("Odd", "bf16-mixed"), ("Shelf", "shelf"), ("env", "Farm")],
}
GARBAGE = st.one_of(
    st.sampled_from(
        [
            *[None, True, False, -1, 0, 7, 10**30, 1.5, float("nan"), b"auto", {}, {"a": 1}, {1}, object, int, print],
            *["", "@", "many@", "@dstrat", "a\nb", "cpu\0", "16 ", "\u00b2", "\udc80"],
            *[..., ("auto",), [None], [[0]], range(2)],
        ]
    ),
    st.text(max_size=6),
)
MENTIONED = st.sets(st.sampled_from(sorted(SENSIBLE)), max_size=3)


@st.composite
def words(draw):
    """The arguments of a request: sensible ones, and in one of three requests a flawed one or garbage."""
    asked = {name: draw(st.sampled_from(SENSIBLE[name])) for name in sorted(draw(MENTIONED))}
    flaw = draw(st.sampled_from([None] * 8 + ["flawed", "flawed", "garbage"]))
    if flaw is not None:
        name = draw(st.sampled_from(sorted(SENSIBLE)))
        asked[name] = draw(st.sampled_from(FLAWED[name]) if flaw == "flawed" else GARBAGE)
    return asked


# Environments: what a launcher would set, then some variables lost or spoilt.

ODD_VALUES = [
    *[
        "",
        " 2",
        "-1",
        "two",
        "1.0",
        "1e3",
        "\u00b2",
        "\uff19",
        "2(x2)",
        "10" * 40,
        "\udc80",
        "nan",
        "0",
        "1",
        "3",
        "99999",
    ],
    *["a..b", "x" * 70, "n[1-", "n[1-2][", "[", "\0", "n[2-1]", "n[1-999999999999]", "127.0.0.1", "/"],
]


def torchrun(rank, size, local):
    elastic = {"TORCHELASTIC_RUN_ID": "job", "GROUP_RANK": str(rank // local)}
    return {**plain(rank, size, local), **elastic}


def plain(rank, size, local):
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(local), "NODE_RANK": str(rank // local)}
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank % local)}
    return {**sizes, **ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def slurm(rank, size, local):
    nodes = size // local
    return {
        "SLURM_JOB_ID": "70",
        "SLURM_JOB_NAME": "train",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": f"{local}(x{nodes})" if nodes > 1 else str(local),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % local),
        "SLURM_NODEID": str(rank // local),
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NODELIST": f"127.0.0.[1-{nodes}]" if nodes > 1 else "127.0.0.1",
    }


def batch(rank, size, local):
    return {name: value for name, value in slurm(0, size, local).items() if not name.startswith("SLURM_STEP")}


def openmpi(rank, size, local):
    prefix = "OMPI_COMM_WORLD_"
    numbers = {"SIZE": size, "RANK": rank, "LOCAL_RANK": rank % local, "LOCAL_SIZE": local}
    return {"MASTER_ADDR": "127.0.0.1", **{prefix + name: str(number) for name, number in numbers.items()}}


def hydra(rank, size, local):
    numbers = {"PMI_SIZE": size, "PMI_RANK": rank, "MPI_LOCALRANKID": rank % local, "MPI_LOCALNRANKS": local}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def lsf(rank, size, local):
    return {
        "LSB_JOBID": "70",
        "LSB_HOSTS": " ".join(["batch", *(f"n{index // local}" for index in range(size))]),
        "LSB_MCPU_HOSTS": "batch 1 " + " ".join(f"n{node} {local}" for node in range(size // local)),
        "LSB_DJOB_RANKFILE": os.devnull,
        "JSM_NAMESPACE_SIZE": str(size),
        "JSM_NAMESPACE_RANK": str(rank),
        "JSM_NAMESPACE_LOCAL_RANK": str(rank % local),
        "JSM_NAMESPACE_LOCAL_SIZE": str(local),
    }


def kubeflow(rank, size, local):
    return {"KUBERNETES_PORT": "tcp://10.0.0.1:443", **plain(rank, size, 1)}


def farm(rank, size, local):
    return {"FARM": str(size), "FARM_RANK": str(rank)}


def blind(rank, size, local):
    return {"BLIND": "1", **farm(rank, size, local)}


def a_rank_of_another_job(rank, size, local):
    return {"DSTRAT_JOB": "/tmp/no-such-job", "DSTRAT_RANK_PID": "1", **plain(rank, size, local)}


def several_machines(rank, size, local):
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": str(rank // local)}


def nothing(rank, size, local):
    return {}


JOBS = [
    *[nothing, nothing, nothing, torchrun, torchrun, plain, slurm, batch, openmpi, hydra, lsf, kubeflow, farm, blind],
    *[a_rank_of_another_job, several_machines, several_machines],
]


@st.composite
def environs(draw):
    """What a launcher would set, now and then inside of another one, some of it spoilt."""
    local, nodes = draw(st.sampled_from([(1, 1), (2, 1), (2, 1), (4, 1), (2, 2), (1, 2)]))
    rank = draw(st.sampled_from([0, local * nodes - 1]))
    environ = draw(st.sampled_from(JOBS))(rank, local * nodes, local)
    spoil = draw(st.sampled_from([None] * 5 + ["nest", "lose", "change", "change"]))
    if spoil == "nest":
        environ = {**draw(st.sampled_from(JOBS))(rank % local, local, local), **environ}
    elif spoil is not None and environ:
        name = draw(st.sampled_from(sorted(environ)))
        environ[name] = draw(st.sampled_from(ODD_VALUES))
        if spoil == "lose":
            del environ[name]
    return environ


def outcome(request, **circumstances):
    """The plan, whose strategy is complete, or the type and message of the DstratError."""
    try:
        plan, strategy = resolve_request(request, **circumstances)
    except DstratError as error:
        return type(error).__name__, str(error)
    check_strategy(strategy, plan)
    return plan


def check_plan(plan):
    """Send the plan elsewhere, and show it."""
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert len(str(plan).splitlines()) == len(plan.choices)
    json.dumps(plan.to_dict())


def check_strategy(strategy, plan):
    """The strategy has all components, as the plan says."""
    missing = [name for name in ("accelerator", "precision_plugin", "checkpoint_io") if not getattr(strategy, name)]
    assert not missing
    assert len(strategy.components.parallel_devices) == plan.num_devices
    assert (strategy.launcher is None) == (plan.started_by == "nobody")


@pytest.fixture(scope="module")
def made(parts):
    return {name: make(parts) for name, make in MADE.items()}


def looked_up(value, made):
    """The value, with the names of what a user has made replaced by that."""
    if isinstance(value, tuple | list):
        return type(value)(looked_up(item, made) for item in value)
    return made.get(value, value) if isinstance(value, str) else value


@pytest.mark.slow
def test_any_request_gives_a_plan_or_an_explanation_and_the_same_again(catalog, core_catalog, made):
    """With the made-up components, and where only the core is installed."""
    met = Counter()

    @settings(derandomize=True, database=None, max_examples=1000)
    @given(asked=words(), environ=environs(), interactive=st.booleans())
    def ask(asked, environ, interactive):
        request = Request(**{name: looked_up(value, made) for name, value in asked.items()})
        for there in (catalog, core_catalog):
            first = outcome(request, catalog=there, environ=environ, interactive=interactive)
            assert outcome(request, catalog=there, environ=environ, interactive=interactive) == first
            met[first[0] if isinstance(first, tuple) else first.strategy] += 1
            if not isinstance(first, tuple):
                check_plan(first)

    ask()
    refused = {name: number for name, number in met.items() if name.endswith("Error")}
    assert sum(met.values()) - sum(refused.values()) > 500, "too few examples are sensible"
    assert {"ClusterError", "ConflictError", "DeviceError", "MisuseError", "RequestError"} < refused.keys()
    assert {"many", "many_fork", "single_device", "Many"} < met.keys()


EVERYTHING = """
import itertools, sys
from dstrat.errors import DstratError
from dstrat.resolve import Request, make_plan

elastic = dict(TORCHELASTIC_RUN_ID="1", RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2",
               GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
nested = {**elastic, "SLURM_NTASKS": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
for strategy, accelerator, devices, plugins, environ in itertools.product(
    ["auto", "single_device", "ddp", "singledevice"], ["auto", "cpu", "gpu", "gpuu"], ["auto", 2, "x"],
    [(), ("torch", "16-mixed", "local"), ("tortch", "16")], [{}, nested],
):
    request = Request(strategy=strategy, accelerator=accelerator, devices=devices, plugins=plugins)
    try:
        print(make_plan(request, environ=environ, interactive=False))
    except DstratError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_plans_and_messages_do_not_depend_on_the_hash_seed():
    running = [
        subprocess.Popen(
            [sys.executable, "-c", EVERYTHING],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate(timeout=400)[0] for process in running)
    assert all(process.returncode == 0 for process in running)
    assert first.count("\nstrategy ") > 20
    assert first.count("Error ") > 100
    assert first == second

"""``dstrat measure``, and machines as data."""

import dataclasses
import json
import re
import socket

import pytest
import torch
from click.testing import CliRunner
from tests.warm_program import WarmProgram

from dstrat.cli.main import commands
from dstrat.cli.measure import benchmarks
from dstrat.cli.measure.benchmarks import fit_link, host_memory, overlap_of
from dstrat.cli.measure.command import short_rate
from dstrat.cli.measure.machine import Link, known_machines, read_machine
from dstrat.errors import RequestError

# Of the benchmarks, whose times do not matter here: measured with them is less exact, and takes a tenth of the time.
SMALL = {
    "_SIZES": (2**12, 2**16, 2**20),
    "_COPIED": 2**22,
    "_PRODUCT_SECONDS": 0.002,
    "_FLAT_PRODUCTS": ((512, 32, 128), (256, 128, 16), (32, 256, 128), (1024, 16, 64)),
}
KINDS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"}


@pytest.fixture
def machine():
    return known_machines()["h100x8"]


def test_known_machines_have_rates_links_and_sources():
    for machine in known_machines().values():
        assert machine.flops["bfloat16"] > machine.flops["float32"] > 1e13, machine.name
        assert {link.scope for link in machine.links} == {"machine", "network"}, machine.name
        assert machine.host_memory > machine.devices * machine.memory, machine.name
        assert "datasheet" in machine.source
        assert "Assumed" in machine.source


def test_a_file_of_a_machine_is_read_as_it_was_written(machine, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(machine.to_json())
    assert read_machine(str(path)) == machine


def test_a_machine_that_is_not_known_is_an_error_with_near_names():
    with pytest.raises(RequestError, match=r"machine 'h100' is not known: did you mean 'h100x8'\? choose from h100x8"):
        read_machine("h100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ('{"speed": 1}', "has 'speed', which a machine does not have: it has name"),
        ('{"name": "mine", "links": []}', r"describes no machine .*missing"),
        ("[]", "describes no machine"),
    ],
)
def test_a_file_of_no_machine_is_an_error(text, message, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=message):
        read_machine(str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": "80GiB"}, "has '80GiB' as memory, which must be a whole number of at least 1, without a unit"),
        ({"devices": 0}, "has 0 as devices, which must be a whole number of at least 1"),
        ({"memory_bandwidth": 0}, "has 0 as memory_bandwidth, which must be a number above 0"),
        ({"flops": 1e12}, "has flops of 1000000000000.0, which must be rates by dtype"),
        ({"flops": {"float32": "fast"}}, "has 'fast' as flops of float32"),
    ],
)
def test_a_file_with_an_impossible_value_is_an_error(machine, changes, message, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**json.loads(machine.to_json()), **changes}))
    with pytest.raises(RequestError, match=message):
        read_machine(str(path))


def test_whole_numbers_may_be_written_with_a_point(machine, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**json.loads(machine.to_json()), "devices": 8.0, "memory": 8e9}))
    read = read_machine(str(path))
    assert [type(value) for value in (read.devices, read.memory)] == [int, int]


def test_a_link_of_an_unknown_kind_is_an_error(machine, tmp_path):
    path, values = tmp_path / "machine.json", json.loads(machine.to_json())
    values["links"] = [{"kind": "allreduce", "scope": "machine", "ranks": 2, "latency": 0.0, "bandwidth": 1e9}]
    path.write_text(json.dumps(values))
    with pytest.raises(RequestError, match=r"has a link whose kind is 'allreduce': it can be all_reduce, all_gather"):
        read_machine(str(path))


def test_the_folder_of_the_output_is_checked_before_anything_is_measured():
    shown = CliRunner().invoke(commands, ["measure", "--accelerator", "cpu", "--output", "missing/machine.json"])
    assert "there is no folder missing" in str(shown.exception)


def test_a_missing_file_is_an_error_that_says_how_to_write_it():
    with pytest.raises(RequestError, match=r"`dstrat measure --output missing\.json` writes such a file"):
        read_machine("missing.json")


def test_a_dtype_without_a_rate_is_an_error_that_names_the_others(machine):
    assert machine.rate("bfloat16") == pytest.approx(0.6 * 989.4e12)
    with pytest.raises(RequestError, match="no rate of float64: choose a precision that computes in float32 or"):
        machine.rate("float64")


def test_a_link_of_the_kind_and_the_nearest_number_of_ranks_is_taken(machine):
    links = [
        Link(kind=kind, scope="machine", ranks=ranks, latency=1e-5, bandwidth=1e9)
        for kind in ("any", "all_reduce")
        for ranks in (2, 8)
    ]
    measured = dataclasses.replace(machine, links=links)
    assert measured.link("all_reduce", 6, crosses_machines=False) is links[3]
    assert measured.link("all_gather", 2, crosses_machines=False) is links[0]
    assert measured.link("all_reduce", 2, crosses_machines=True) is None


def test_a_reduction_to_one_rank_takes_the_link_of_one_to_all(machine):
    broadcast, reduction, both = (
        Link(kind=kind, scope="machine", ranks=2, latency=1e-5, bandwidth=1e9)
        for kind in ("broadcast", "all_reduce", "any")
    )
    for links, expected in (([both, broadcast, reduction], reduction), ([both, broadcast], both)):
        assert dataclasses.replace(machine, links=links).link("reduce", 2, crosses_machines=False) is expected


def test_time_grows_with_bytes_and_with_the_messages_of_a_ring():
    link = Link(kind="any", scope="machine", ranks=2, latency=1e-3, bandwidth=1e6)
    assert link.seconds(1e6, ranks=2) == pytest.approx(1.001)
    assert link.seconds(0, ranks=8) == pytest.approx(7e-3)


def test_latency_and_bandwidth_are_those_of_the_line_through_times():
    latency, bandwidth = fit_link([(size, 2e-3 + size / 5e8) for size in (1e3, 1e6, 1e8)])
    assert (latency, bandwidth) == (pytest.approx(2e-3), pytest.approx(5e8))


@pytest.mark.parametrize("seconds", [(3e-3, 2e-3, 1e-3), (1e-3, 1e-3, 1e-3)])
def test_the_bandwidth_of_times_that_do_not_grow_is_that_of_the_largest_size(seconds):
    latency, bandwidth = fit_link([*zip((1e3, 1e6, 1e8), seconds, strict=True)])
    assert latency >= 0
    assert bandwidth == pytest.approx(1e8 / seconds[-1])


@pytest.mark.parametrize(
    ("both", "share"),
    [(3.0, 1.0), (4.0, 0.0), (3.5, 0.5), (4.5, -0.5), (9.0, -1.0)],
    ids=["hidden", "one after the other", "half hidden", "both slower", "at most all of it"],
)
def test_overlap_is_what_a_collective_and_products_lose_at_once(both, share):
    assert overlap_of(1.0, 3.0, both) == share
    assert overlap_of(3.0, 1.0, both) == share


@pytest.mark.parametrize(("rate", "text"), [(9.894e14, "989 T"), (1.35e9, "1.35 G"), (2.0, "2 ")])
def test_rates_have_three_digits(rate, text):
    assert short_rate(rate) == text


def test_the_limit_of_a_container_is_the_memory_of_its_host(tmp_path):
    process, job = tmp_path / "cgroup", tmp_path / "groups/slurm/job_1"
    process.write_text("1:name=systemd:/\n0::/slurm/job_1\n")
    job.mkdir(parents=True)
    everything = host_memory(process, tmp_path / "groups")
    assert everything > 2**27
    (job / "memory.max").write_text("max\n")
    assert host_memory(process, tmp_path / "groups") == everything
    (job.parent / "memory.max").write_text("1048576\n")
    (tmp_path / "memory.max").write_text("1\n")  # of no group
    assert host_memory(process, tmp_path / "groups") == 2**20


@pytest.mark.slow
def test_two_ranks_measure_products_copies_and_all_kinds_of_collectives(monkeypatch, tmp_path):
    for name, value in SMALL.items():
        monkeypatch.setattr(benchmarks, name, value)
    path = tmp_path / "machine.json"
    options = ["--accelerator", "cpu", "--devices", "2", "--name", "mine", "--output", str(path)]
    shown = CliRunner().invoke(commands, ["measure", *options], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "all_to_all" in shown.output
    machine = read_machine(str(path))
    assert (machine.name, machine.device_type, machine.devices) == ("mine", "cpu", 2)
    assert {link.kind for link in machine.links} == KINDS
    assert {(link.scope, link.ranks) for link in machine.links} == {("machine", 2)}
    assert all(link.latency < 1 and 1e6 < link.bandwidth < 1e12 for link in machine.links)
    assert 1e8 < machine.flops["float32"] < 1e14
    assert 1e7 < machine.memory_bandwidth < 1e13
    assert -1 <= machine.overlap <= 1
    assert machine.host_memory // 2 == machine.memory > 2**27
    assert 0 < machine.operation_latency < machine.hook_latency < 0.1
    assert 0 <= machine.page_latency < 1e-3
    assert 0 <= machine.operand_overlap <= 1
    assert machine.unmeasured == []


@pytest.mark.slow
def test_links_between_two_machines_are_measured(tmp_path):
    path = tmp_path / "machine.json"
    script = tmp_path / "main.py"
    script.write_text(
        "from dstrat.cli.main import main\n"
        "from dstrat.cli.measure import benchmarks\n"
        f"vars(benchmarks).update({SMALL})\n"
        "main()\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = ("measure", "--accelerator", "cpu", "--devices", "1", "--num-nodes", "2", "--output", str(path))
    # Both are this machine, and take each other for another one; the variables are those that torchrun sets.
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": port}
    job |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    machines = [
        WarmProgram(script, *program, environ={**job, "RANK": str(rank), "GROUP_RANK": str(rank)}) for rank in range(2)
    ]
    printed = [machine.communicate(timeout=400) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], printed
    assert re.search(r"all_to_all .* 2 machines, \d+ us at least", printed[0][0]), printed
    measured = read_machine(str(path))
    assert measured.devices == 1
    assert {(link.kind, link.scope, link.ranks) for link in measured.links} == {(kind, "network", 2) for kind in KINDS}
    assert measured.link("all_reduce", 16, crosses_machines=True) is not None


@pytest.mark.variant
def test_a_device_without_products_of_float32_is_measured(monkeypatch):
    monkeypatch.setattr(benchmarks, "_DTYPES", (torch.bfloat16,))
    shown = CliRunner().invoke(commands, ["measure", "--accelerator", "cpu", "--devices", "1", "--json"])
    assert shown.exit_code == 0, shown.output
    measured = json.loads(shown.stdout)
    assert (*measured["flops"], measured.get("operand_overlap")) == ("bfloat16", None)


@pytest.mark.variant
def test_one_rank_is_measured_without_links():
    shown = CliRunner().invoke(commands, ["measure", "--accelerator", "cpu", "--devices", "1", "--json"])
    assert shown.exit_code == 0, shown.output
    measured = json.loads(shown.stdout)
    assert (measured["links"], measured["overlap"]) == ([], 0.0)

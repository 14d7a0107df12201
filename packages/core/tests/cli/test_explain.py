"""``dstrat explain``."""

import json
import re

import pytest
import torch
from click.testing import CliRunner

from dstrat import Trainer
from dstrat.cli.explain.dry_run import _traffic_row
from dstrat.cli.main import commands
from dstrat.cli.measure.machine import Link, Machine
from dstrat.errors import ConflictError, RequestError
from dstrat.interfaces.communication import Collective


def explain(*options):
    return CliRunner().invoke(commands, ["explain", "--accelerator", "cpu", *options])


def factory():
    return torch.nn.Linear(1024, 1024, bias=False), torch.zeros(1, 1024)


def test_memory_of_a_rank_is_shown_for_a_model():
    options = ("--strategy", "single_device", "--model", f"{__name__}:factory")
    memory = json.loads(explain(*options, "--json").stdout)["memory_per_rank"]
    assert (memory["strategy"], memory["parameters"], memory["gradients"]) == ("single_device", 2**22, 2**22)
    *_, row = explain(*options).stdout.splitlines()
    assert row.startswith("memory per rank  0.02 GiB ")
    assert "estimated peak: parameters 0.00, gradients 0.00, optimizer 0.01" in row


@pytest.mark.parametrize(("memory", "fits"), [("1GiB", "fits into 1GiB"), ("1MiB", "does not fit into 1MiB")])
def test_memory_of_a_named_strategy_is_compared_with_that_of_a_device(memory, fits):
    options = ("--strategy", "single_device", "--model", f"{__name__}:factory", "--memory", memory)
    *_, row = explain(*options).stdout.splitlines()
    assert f"GiB, {fits} " in row


@pytest.mark.parametrize(("messages", "shown"), [(1234567, "1234567"), (100, "100"), (2.5, "2.5"), (1 / 3, "0.333")])
def test_numbers_of_messages_are_shown_in_full(messages, shown):
    row = _traffic_row(Collective(kind="all_reduce", bytes=4, messages=messages, ranks=2), 2)
    assert row[1] == shown


def test_the_plan_is_printed_with_reasons_and_owners():
    shown = explain("--strategy", "single_device", "--precision", "bf16")
    rows = {line.split("  ")[0]: line for line in shown.stdout.splitlines()}
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "single_device" in rows["strategy"]
    assert "asked for" in rows["strategy"]
    assert "dstrat " in rows["strategy"]
    assert "bf16-mixed" in rows["precision"]


def test_options_after_the_alias_are_in_the_plan_and_its_memory():
    shown = explain("--strategy", "ddp(gradient_as_bucket_view=True)", "--devices", "2").stdout
    assert "ddp(gradient_as_bucket_view=True)  asked for" in shown
    model = ("--devices", "2", "--model", f"{__name__}:factory", "--json")
    by_default, in_buckets = (
        json.loads(explain("--strategy", strategy, *model).stdout)["memory_per_rank"]
        for strategy in ("ddp", "ddp(gradient_as_bucket_view=True)")
    )
    assert in_buckets["strategy"] == "ddp(gradient_as_bucket_view=True)"
    assert in_buckets["peak"] < by_default["peak"]


def test_json_holds_the_plan():
    plan = json.loads(explain("--json").stdout)
    assert (plan["accelerator"], plan["world_size"]) == ("cpu", 1)
    assert {"subject", "value", "reason", "owner"} == set(plan["choices"][0])


def test_a_plan_that_cannot_be_is_one_line_on_stderr_and_exits_with_2(installed_dstrat):
    shown = installed_dstrat("explain", "--strategy", "single_device", "--accelerator", "cpu", "--devices", "2")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.startswith("dstrat: ")
    assert "Traceback" not in shown.stderr
    assert shown.stderr.count("\n") == 1


GPUS = ("--accelerator", "cuda")


def dry_run(*options):
    model = ("--model", f"{__name__}:factory", "--nodes", "2", "--devices", "4")
    return CliRunner().invoke(commands, ["explain", "--accelerator", "cpu", *model, *options])


def test_a_dry_run_shows_processes_memory_and_traffic():
    pytest.importorskip("dstrat_ddp")
    shown = json.loads(dry_run("--strategy", "ddp", "--json").stdout)
    plan = {row["subject"]: row for row in shown["plan"]}
    assert (plan["processes"]["value"], plan["processes"]["reason"]) == ("4", "2 on each of 2 machines")
    assert (plan["batch"]["value"], plan["batch"]["reason"]) == ("4 samples", "1 for each of 4 groups of ranks")
    (memory,) = shown["memory"]
    assert (memory["ranks"], memory["parameters"]) == ([0, 3], 2**22)
    # Around a ring of two ranks on each machine, half of them send to the other machine.
    assert shown["sent"] == {"between machines": 3 / 4 * 2**22, "inside a machine": 3 / 4 * 2**22}
    text = dry_run("--strategy", "ddp").stdout
    assert "all layers" in text
    assert re.search(r"all_reduce +2 +0\.01 +4 ranks +0, 1, 2, 3 +between machines", text)
    assert re.search(r"GiB between machines, .* GiB by all ranks of a machine", text)


def test_a_dry_run_has_the_time_of_a_known_machine():
    pytest.importorskip("dstrat_ddp")
    shown = dry_run("--strategy", "ddp", "--machine", "h100x8", *GPUS).stdout
    assert re.search(r"a step takes \d+ ms: compute \d+", shown)


def test_a_dry_run_refuses_what_does_not_fit_into_most_of_a_device():
    pytest.importorskip("dstrat_ddp")
    peak = json.loads(dry_run("--strategy", "ddp", "--json").stdout)["memory"][0]["peak"]
    assert dry_run("--strategy", "ddp", "--memory", str(peak / 0.89)).exit_code == 0
    shown = dry_run("--strategy", "ddp", "--memory", str(peak / 0.91))
    assert shown.exit_code == 1
    assert "refused: a rank needs 0.0 GiB, and 90% of a device's 0.0 GiB are 0.0" in shown.stdout


def enormous():
    with torch.device("meta"):
        return torch.nn.Linear(2**16, 2**16, bias=False), torch.zeros(1, 2**16)  # 16 GiB


def test_a_dry_run_refuses_what_the_machine_does_not_have():
    pytest.importorskip("dstrat_ddp")
    shown = dry_run("--strategy", "ddp", "--model", f"{__name__}:enormous", "--machine", "h100x8", *GPUS)
    assert shown.exit_code == 1
    assert "and 90% of a device's 74.5 GiB are 67.1" in shown.stdout
    many = dry_run("--strategy", "ddp", "--devices", "20", "--machine", "h100x8", *GPUS)
    assert isinstance(many.exception, RequestError)
    assert str(many.exception) == ("--devices 20 are 10 on each of 2 machines, and h100x8 has 8: give --nodes 4")


def test_a_dry_run_refuses_what_the_host_does_not_have():
    pytest.importorskip("dstrat_fsdp")
    options = ("--accelerator", "cuda", "--strategy", "fsdp_cpu_offload")
    free = json.loads(dry_run(*options, "--json").stdout)
    assert free["host_of_machine"] == 2 * free["memory"][0]["host"] > 0
    assert "not checked: all ranks of a machine need 0.0 GiB of its host;" in dry_run(*options).stdout
    assert dry_run(*options, "--host-memory", str(free["host_of_machine"] / 0.89)).exit_code == 0
    shown = dry_run(*options, "--host-memory", str(free["host_of_machine"] / 0.91))
    assert shown.exit_code == 1
    assert "refused: all ranks of a machine need 0.0 GiB of its host, and 90% of its 0.0 GiB" in shown.stdout
    assert json.loads(dry_run(*options, "--machine", "h100x8", "--json").stdout)["not_checked"] == []


def test_a_dry_run_refuses_a_batch_that_does_not_divide():
    pytest.importorskip("dstrat_ddp")
    shown = dry_run("--strategy", "ddp", "--batch", "6")
    assert shown.exit_code == 1
    assert "refused: 6 samples do not divide among 4 groups of ranks: give a multiple of 4" in shown.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nodes", "3", "--strategy", "single_device"), "--devices 4 do not divide among --nodes 3"),
        (("--num-nodes", "2"), "--nodes and --num-nodes are both numbers of machines"),
        ((), "--nodes needs a --strategy"),
        (("--strategy", "auto(memory)"), "--nodes needs a --strategy"),
        (("--devices", "0", "--nodes", "1"), "--nodes needs --model package.module:factory, and --devices with a num"),
        (("--strategy", "single_device", "--machine", "h100x8"), "--machine h100x8 has devices of type cuda, and"),
        (("--devices", "auto"), "--nodes needs --model package.module:factory, and --devices with a number"),
    ],
)
def test_contradictory_options_of_a_dry_run_are_refused(options, message):
    shown = dry_run(*options)
    assert isinstance(shown.exception, RequestError)
    assert str(shown.exception).startswith(message)


def test_the_batch_of_a_dry_run_needs_its_machines():
    shown = explain("--batch", "8")
    assert isinstance(shown.exception, ConflictError)
    assert "--batch is for a dry run: give --nodes" in str(shown.exception)


def deep():
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8))), torch.zeros(1, 512)


MODEL = ("--devices", "2", "--model", f"{__name__}:deep")  # 8 MiB of parameters, 40 MiB of ddp


def test_the_plan_of_auto_recommends_a_strategy_by_memory():
    pytest.importorskip("dstrat_fsdp")
    shown = json.loads(explain(*MODEL, "--memory", "36MiB", "--json").stdout)
    assert shown["strategy"] == "ddp"
    assert shown["recommended"]["strategy"] not in ("ddp", "single_device")
    assert shown["recommended"]["reason"].startswith("shards least of those that fit: it needs 0.0 GiB of 0.0 GiB")
    assert json.loads(explain(*MODEL, "--json").stdout)["recommended"]["strategy"] == "ddp"


def test_a_strategy_that_cannot_train_the_model_is_not_recommended():
    pytest.importorskip("dstrat_fsdp")
    shown = explain(*MODEL, "--memory", "22MiB")  # into which model_parallel would fit
    assert isinstance(shown.exception, RequestError)
    assert "no strategy fits into 0.0 GiB with a tenth to spare; fsdp needs" in str(shown.exception)


def test_auto_by_memory_takes_the_recommended_strategy():
    pytest.importorskip("dstrat_fsdp")
    shown = explain("--strategy", "auto(memory)", *MODEL, "--memory", "36MiB")
    recommended = json.loads(explain(*MODEL, "--memory", "36MiB", "--json").stdout)["recommended"]
    assert (shown.exit_code, shown.stdout.split()[:2]) == (0, ["strategy", recommended["strategy"]])
    assert recommended["reason"] in shown.stdout.splitlines()[0]
    none = explain("--strategy", "auto(memory)", *MODEL, "--memory", "1MiB")
    assert isinstance(none.exception, RequestError)
    assert "no strategy fits into 0.0 GiB with a tenth to spare" in str(none.exception)


def test_the_plan_of_auto_recommends_the_fastest_on_a_machine(tmp_path):
    pytest.importorskip("dstrat_fsdp")
    path = tmp_path / "machine.json"
    link = Link(kind="any", scope="machine", ranks=2, latency=0.0, bandwidth=1e6)
    machine = Machine(
        name="two",
        device="made up",
        device_type="cpu",
        devices=2,
        memory=2**30,
        flops={"float32": 1e9},
        memory_bandwidth=1e9,
        operation_latency=0.0,
        host_bandwidth=1e8,
        overlap=0.5,
        links=(link,),
        source="this test",
    )
    path.write_text(machine.to_json())
    on_two = json.loads(explain(*MODEL, "--machine", str(path), "--json").stdout)["recommended"]
    arguments = ["choose", f"{__name__}:deep", "--devices", "2", "--machine", str(path), "--precision", "32-true"]
    ranked = json.loads(CliRunner().invoke(commands, [*arguments, "--json"]).stdout)["candidates"]
    assert on_two["strategy"] == ranked[0]["strategy"]
    assert on_two["reason"].startswith("dstrat choose ranks it first: a step takes ")
    several = ["explain", "--accelerator", "cpu", *MODEL, "--devices", "1", "--num-nodes", "2", "--machine", str(path)]
    of_first = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0"}
    of_two_machines = CliRunner().invoke(commands, several, env=of_first)
    assert "no layout fits" in str(of_two_machines.exception)  # as ranks of two machines have no link
    for options, message in (
        ((*MODEL, "--machine", "h100x8"), "h100x8 has 8 devices of type cuda, and the plan 2 of cpu"),
        (("--machine", "h100x8"), "--machine is for a dry run, with --nodes, or for --strategy auto with --model"),
    ):
        assert message in str(explain(*options).exception)


def test_auto_by_memory_needs_the_model():
    assert "needs --model" in str(explain("--strategy", "auto(memory)").exception)
    with pytest.raises(RequestError, match="depends on the model, which is not known before fit: run `dstrat explain"):
        Trainer(strategy="auto(memory)", accelerator="cpu", devices=2)

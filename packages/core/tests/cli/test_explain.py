"""``dstrat explain``."""

import json

import torch
from click.testing import CliRunner

from dstrat.cli.main import commands


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

"""The shapes of Llama 3 and DeepSeek-V3 in dry runs and rankings, and small ones that train."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from dstrat.cli.estimate.command import Cases
from dstrat.cli.estimate.fake_step import measure_training, read_training
from dstrat.cli.main import commands
from dstrat.plugins.catalog import get_catalog

pytest.importorskip("dstrat_mesh")
from dstrat_fsdp.communication import split_activation_share

HERE = Path(__file__).parents[1] / "examples" / "layouts"
sys.path.insert(0, str(HERE))
SEVENTY = "mesh(pp=8, tp=8, microbatches=32)"


def run(*arguments):
    shown = CliRunner().invoke(commands, [*arguments, "--json"])
    assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception
    return shown.exit_code, json.loads(shown.stdout)


def dry_run(factory, strategy, *options):
    model = ("--model", f"{HERE / 'llama.py'}:{factory}", "--precision", "bf16-mixed")
    return run("explain", *model, "--strategy", strategy, *options)


@pytest.mark.slow
def test_seventy_billion_parameters_on_512_devices_are_explained_in_seconds():
    begin = time.process_time()
    code, shown = dry_run("llama_70b", SEVENTY, "--devices", "512", "--nodes", "64", "--batch", "256")
    assert time.process_time() - begin < 30  # the goal is 10 on an idle machine
    assert (code, shown["refused"]) == (0, [])
    plan = {row["subject"].strip(): row for row in shown["plan"]}
    assert plan["mesh"]["value"] == "pp 8 x dp_shard 8 x tp 8"
    assert plan["tp"]["reason"].endswith("inside a machine")
    assert plan["pp"]["reason"].endswith("between machines")
    stages = shown["memory"]
    assert [stage["ranks"] for stage in stages[:2]] == [[0, 63], [64, 127]]
    assert [stages[0]["layers"][0], *stages[-1]["layers"][-2:]] == ["tokens", "norm", "head"]
    assert sum(stage["parameters"] for stage in stages) == pytest.approx(4 * 70.55e9 / 64, rel=0.01)
    assert stages[0]["activations"] > stages[-2]["activations"]  # more microbatches are on their way
    assert all(stage["peak"] > stage["parameters"] + stage["optimizer_state"] for stage in stages)
    assert shown["sent"]["inside a machine"] > shown["sent"]["between machines"] > 0


@pytest.mark.slow
def test_layouts_that_would_fail_are_refused_before_anything_is_paid_for():
    refused = {
        strategy: dry_run("llama_8b", strategy, "--devices", devices, "--nodes", "1", *options)
        for strategy, devices, *options in (
            ("mesh(tp=16)", "16"),
            ("mesh(pp=64)", "64"),
            ("mesh(pp=2)", "8", "--batch", "6"),
        )
    }
    assert all(code == 1 for code, _ in refused.values())
    heads, stages, batch = (" ".join(shown["refused"]) for _, shown in refused.values())
    assert "tp=16 does not divide the 8 heads of Llama: choose smaller sizes" in heads
    assert "the pipeline has 35 layers, and each of its 64 stages needs one" in stages
    assert "6 samples do not divide among 4 groups of ranks: give a multiple of 4" in batch


@pytest.mark.variant
def test_layouts_of_seventy_billion_parameters_are_ranked():
    begin = time.process_time()
    training = f"{HERE / 'llama.py'}:llama_70b"
    options = ("--devices", "64", "--machine", "h100x8", "--batch", "64", "--precision", "bf16-mixed")
    _, shown = run("choose", training, "--strategy", "mesh", "--device-memory", "400GiB", *options)
    assert time.process_time() - begin < 600  # two minutes on an idle machine, half of them for recomputation
    first = shown["candidates"][0]
    assert first["strategy"].startswith("mesh")
    assert first["memory"]["peak"] <= 0.9 * 400 * 2**30


def test_a_small_shape_learns():
    from llama import Llama

    torch.manual_seed(0)
    model = Llama(32, 2, 4, 2, 64, vocabulary=50)
    optimizer, tokens = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.arange(40)[None] % 50
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model.training_step(tokens, 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_a_small_shape_with_experts_learns():
    from deepseek import DeepSeek, Shape

    torch.manual_seed(0)
    sizes = {"width": 32, "layers": 3, "dense_layers": 1, "heads": 2, "head_size": 8, "rotary_size": 4}
    sizes |= {"query_rank": 12, "key_rank": 8, "hidden": 64, "experts": 4, "choices": 2, "expert_hidden": 16}
    model = DeepSeek(Shape(**sizes, vocabulary=50))
    optimizer, tokens = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.arange(40)[None] % 50
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model.training_step(tokens, 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("crowded", [False, True])
def test_each_token_gets_the_outputs_of_its_experts(crowded):
    from deepseek import Experts

    torch.manual_seed(0)
    experts = Experts(4, 6, 5)
    tokens, weights = torch.randn(8, 6), torch.rand(8, 2)
    index = torch.tensor([[0, 1]]).expand(8, 2) if crowded else torch.arange(16).view(8, 2) % 4

    def output(token, choice):
        one = index[token, choice]
        gate, up, down = experts.gate[one], experts.up[one], experts.down[one]
        hidden = nn.functional.silu(tokens[token] @ gate) * (tokens[token] @ up)
        return weights[token, choice] * (hidden @ down)

    taken = 4 if crowded else 8  # an expert takes 8 * 2 / 4 tokens
    expected = torch.zeros(8, 6)
    expected[:taken] = torch.stack([output(token, 0) + output(token, 1) for token in range(taken)])
    torch.testing.assert_close(experts(tokens, index, weights), expected, atol=1e-6, rtol=0)


@pytest.mark.variant
def test_a_model_of_671_billion_parameters_with_experts_is_explained():
    model = ("--model", f"{HERE / 'deepseek.py'}:deepseek_v3", "--precision", "bf16-mixed")
    strategy = ("--strategy", "mesh(pp=16, ep=64, microbatches=120)")
    code, shown = run("explain", *model, *strategy, "--devices", "2048", "--nodes", "256", "--batch", "15360")
    assert (code, shown["refused"]) == (0, [])
    plan = {row["subject"].strip(): row for row in shown["plan"]}
    assert plan["mesh"]["value"] == "pp 16 x dp_shard 128"
    assert plan["ep"]["reason"].startswith("parts of the experts")
    assert sum(stage["parameters"] for stage in shown["memory"]) == pytest.approx(4 * 671.03e9 / 128, rel=0.01)


@pytest.mark.parametrize("flag", ["32-true", "bf16-mixed", pytest.param("bf16-true", marks=pytest.mark.variant)])
def test_activations_of_split_layers_are_predicted(flag):
    def measure(splits):
        model = split_llama(splits)
        setup = (model, torch.zeros(2, 512, dtype=torch.long))
        precision = Cases(get_catalog(), "cuda", 4, 1, flag).new_precision()
        devices = {"device_type": "cuda", "world_size": 4, "ranks_per_machine": 4}
        return measure_training(lambda: read_training(setup, "a test"), precision, **devices)

    whole, quarter = measure(1), measure(4)
    share = split_activation_share(whole, list(whole.module.blocks), 4)
    assert share == pytest.approx(quarter.activations / whole.activations, rel=0.05)


def split_llama(splits):
    """Make a model with the layers of one rank of several."""
    from llama import Llama

    width, keys, hidden = 256, 4 * 32 // splits, 896 // splits
    model = Llama(width, 4, 8, 4, hidden, vocabulary=500)
    for block in model.blocks:
        block.queries, block.output = (
            nn.Linear(width, width // splits, bias=False),
            nn.Linear(width // splits, width, bias=False),
        )
        block.keys, block.values = nn.Linear(width, keys, bias=False), nn.Linear(width, keys, bias=False)
    return model

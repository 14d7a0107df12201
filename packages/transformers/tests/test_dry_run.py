"""Dry runs of models of transformers, which take no step and no Trainer."""

import json

import pytest
import torch
from click.testing import CliRunner

from dstrat.cli.main import commands
from dstrat_transformers import HFModule

pytest.importorskip("dstrat_mesh")
transformers = pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")


def llama():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, use_cache=False
    )
    tokens = torch.zeros(4, 16, dtype=torch.long)
    return HFModule(transformers.LlamaForCausalLM(config), scheduler=None), {"input_ids": tokens, "labels": tokens}


def test_stages_of_a_model_are_known_before_a_run():
    options = ("--strategy", "mesh(pp=2, tp=2)", "--devices", "8", "--nodes", "2", "--accelerator", "cpu")
    shown = CliRunner().invoke(commands, ["explain", "--model", f"{__name__}:llama", *options, "--json"])
    assert shown.exit_code == 0, shown.output
    first, last = json.loads(shown.stdout)["memory"]
    assert first["layers"][0] == "model.model.embed_tokens"
    assert last["layers"][-1] == "model.lm_head"
    assert (first["ranks"], last["ranks"]) == ([0, 3], [4, 7])

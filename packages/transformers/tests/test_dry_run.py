"""Dry runs of models of transformers, which take no step and no Trainer."""

import json

import pytest
import torch
from click.testing import CliRunner

from dstrat.cli.main import commands
from dstrat_transformers import HFModule

pytest.importorskip("dstrat_mesh")
transformers = pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


def _batch(**more):
    tokens = torch.zeros(4, 16, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens, **more}


def llama():
    config = transformers.LlamaConfig(**SMALL, use_cache=False)
    return HFModule(transformers.LlamaForCausalLM(config), scheduler=None), _batch()


def plain_llama():
    """A model by itself, which a Trainer converts."""
    config = transformers.LlamaConfig(**SMALL)
    return transformers.LlamaForCausalLM(config), _batch(attention_mask=torch.ones(4, 16, dtype=torch.long))


def test_stages_of_a_model_are_known_before_a_run():
    options = ("--strategy", "mesh(pp=2, tp=2)", "--devices", "8", "--nodes", "2", "--accelerator", "cpu")
    shown = CliRunner().invoke(commands, ["explain", "--model", f"{__name__}:llama", *options, "--json"])
    assert shown.exit_code == 0, shown.output
    first, last = json.loads(shown.stdout)["memory"]
    assert first["layers"][0] == "model.model.embed_tokens"
    assert last["layers"][-1] == "model.lm_head"
    assert (first["ranks"], last["ranks"]) == ([0, 3], [4, 7])


def choose(factory, *strategies, precision="32-true", devices=2):
    options = [option for strategy in strategies for option in ("--strategy", strategy)]
    devices = ("--machine", "h100x8", "--devices", str(devices), "--precision", precision)
    shown = CliRunner().invoke(commands, ["choose", f"{__name__}:{factory}", *devices, *options, "--json"])
    assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception
    return json.loads(shown.stdout)


def mixtral():
    config = transformers.MixtralConfig(**SMALL, num_local_experts=4, num_key_value_heads=4)
    return HFModule(transformers.MixtralForCausalLM(config)), _batch()


def few_key_heads():
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config), _batch(attention_mask=torch.ones(4, 16, dtype=torch.long))


def odd_features():
    config = transformers.LlamaConfig(**SMALL | {"intermediate_size": 66})
    return transformers.LlamaForCausalLM(config), _batch()


def odd_tokens():
    model, _ = plain_llama()
    return model, {name: tensor[:, :15] for name, tensor in _batch().items()}


@pytest.mark.parametrize(
    ("factory", "strategy", "reason"),
    [
        ("mixtral", "mesh(tp=2)", "the style 'packed_colwise' of "),
        ("mixtral", "model_parallel(tensor_parallel_size=2)", "the style 'packed_colwise' of "),
        ("few_key_heads", "mesh(tp=4)", "self_attn.k_proj has 2 heads, which the 4 ranks"),
        ("odd_features", "mesh(tp=4)", "mlp.gate_proj has 66 features, which the 4 ranks"),
        ("odd_tokens", "mesh(cp=2)", "sequences of 15 tokens cannot be divided over the 2 ranks of cp"),
    ],
)
def test_what_a_trainer_refuses_of_a_model_is_not_ranked(factory, strategy, reason):
    assert reason in choose(factory, strategy, devices=4)["refused"][strategy]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_layers_are_split_beside_divided_experts(precision):
    assert choose("mixtral", "mesh(tp=2, ep=2)", precision=precision, devices=4)["refused"] == {}


@pytest.mark.parametrize("strategy", ["fsdp(activation_checkpointing='full')", "mesh(pp=2)", "mesh(tp=2)"])
def test_a_model_is_ranked_as_a_trainer_converts_it(strategy):
    assert choose("plain_llama", strategy)["refused"] == {}

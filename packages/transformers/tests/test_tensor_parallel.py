"""Plans of transformers as styles of torch: more architectures, and what cannot be split."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")

import torch
import transformers
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dstrat.errors import RankFailedError
from dstrat_fsdp import ModelParallelStrategy

sys.path.insert(0, str(Path(__file__).parent))

import small

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("llama")]

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


ONE_EPOCH = {"trainer_options": {"max_epochs": 1}}


def strategy(data=1, tensor=2):
    return ModelParallelStrategy(data, tensor, start_method="fork")


def models():
    torch.manual_seed(1)
    return {
        "qwen3": transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8)),
        "phi3": transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES)),
        "odd vocabulary": small.llama(vocab_size=65),
        "gpt2 by a plan": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
        ),
    }


@pytest.mark.parametrize("name", ["qwen3", "phi3", "odd vocabulary"])
def test_a_split_model_has_the_losses_of_one_device(tmp_path, name):
    reference = small.train(tmp_path / "one", model=models()[name], **ONE_EPOCH)
    seen = small.train(tmp_path / "split", strategy(), 2, model=models()[name], **ONE_EPOCH)
    assert seen["losses"] == pytest.approx(reference["losses"], abs=1e-5)


def test_tensor_and_data_parallelism_go_together(tmp_path):
    reference = small.train(tmp_path / "one", **ONE_EPOCH)
    seen = small.train(tmp_path / "split", strategy(2, 2), 4, **ONE_EPOCH)
    assert seen["losses"] == pytest.approx(reference["losses"], abs=1e-5)


def test_a_plan_of_ones_own_has_styles_of_torch_or_of_transformers(tmp_path):
    plan = {
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
    }
    reference = small.train(tmp_path / "one", **ONE_EPOCH)
    seen = small.train(tmp_path / "split", strategy(), 2, tensor_parallel_plan=plan, **ONE_EPOCH)
    assert seen["losses"] == pytest.approx(reference["losses"], abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "plan", "message"),
    [
        ({}, {"model.layers.*.mlp": "moe_tp_experts"}, "style 'moe_tp_experts' of 'model.layers.*.mlp'"),
        (
            {"num_key_value_heads": 1},
            None,
            "k_proj has 1 heads, which the 2 ranks of tensor_parallel_size do not divide",
        ),
    ],
)
def test_what_cannot_be_split_is_an_error_that_says_so(tmp_path, changes, plan, message):
    with pytest.raises(RankFailedError) as failure:
        small.train(tmp_path, strategy(), 2, model=small.llama(**changes), tensor_parallel_plan=plan)
    assert message in str(failure.value)


def test_a_model_without_a_plan_is_an_error_that_says_so(tmp_path):
    with pytest.raises(RankFailedError) as failure:
        small.train(tmp_path, strategy(), 2, model=models()["gpt2 by a plan"])
    assert "GPT2LMHeadModel has no tensor-parallel plan in transformers" in str(failure.value)

"""Models of transformers with experts over ranks: losses of one device, written folders, and other axes."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")

import torch
import transformers
from transformers import AutoModelForCausalLM

from dstrat.errors import MisuseError, RequestError
from dstrat_fsdp import FSDPStrategy
from dstrat_mesh import MeshStrategy
from dstrat_transformers import HFModule, parallelize

sys.path.insert(0, str(Path(__file__).parent))

import small

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("llama")]

OPTIONS = {"trainer_options": {"max_epochs": 1, "gradient_clip_val": 0.5}}


def sizes():
    values = small.config(num_hidden_layers=3).to_dict()
    return {name: value for name, value in values.items() if name not in ("model_type", "architectures")}


def new(name):
    """Return a function that makes a model."""
    if name == "mixtral":
        return partial(transformers.MixtralForCausalLM, transformers.MixtralConfig(**sizes(), num_local_experts=4))
    config = transformers.Qwen3MoeConfig(
        **{**sizes(), "head_dim": 8},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_only_layers=[1],
    )
    return partial(transformers.Qwen3MoeForCausalLM, config)


def model(name):
    torch.manual_seed(1)
    return new(name)()


def strategy(**sizes):
    return MeshStrategy(start_method="fork", **sizes)


def check_same(folder, devices, made, **sizes):
    """Train on one device and on several, and compare losses and written models."""
    reference = small.train(folder / "one", model=made(), **OPTIONS)
    seen = small.train(folder / "several", strategy(**sizes), devices, model=made(), **OPTIONS)
    assert seen["losses"] == pytest.approx(reference["losses"], rel=1e-6)
    assert seen["val"] == pytest.approx(reference["val"], rel=1e-6)
    expected, written = (
        AutoModelForCausalLM.from_pretrained(folder / name / "model").state_dict() for name in ("one", "several")
    )
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(written[name], value, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_experts_have_the_losses_of_one_device(tmp_path, name):
    check_same(tmp_path, 2, partial(model, name), ep=2)


def test_a_model_that_is_made_sharded_has_the_first_values_of_one_device(tmp_path):
    check_same(tmp_path, 2, partial(new, "qwen3"), ep=2)


def with_adapters():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model("qwen3"), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def test_experts_of_a_model_with_adapters_have_the_losses_of_one_device(tmp_path):
    reference = small.train(tmp_path / "one", model=with_adapters(), **OPTIONS)
    seen = small.train(tmp_path / "several", strategy(ep=2), 2, model=with_adapters(), **OPTIONS)
    assert seen["losses"] == pytest.approx(reference["losses"], rel=1e-6)


def test_the_loss_of_balance_is_that_of_a_sharded_run(tmp_path):
    # Each rank computes it for its own batch, so that it is not that of one device with the batches of both.
    reference = small.train(
        tmp_path / "fsdp", FSDPStrategy(start_method="fork"), 2, model=small.balanced_experts(), **OPTIONS
    )
    seen = small.train(tmp_path / "experts", strategy(ep=2), 2, model=small.balanced_experts(), **OPTIONS)
    assert seen["losses"] == pytest.approx(reference["losses"], rel=1e-6)
    assert seen["val"] == pytest.approx(reference["val"], rel=1e-6)


def test_the_loss_of_balance_of_ranks_that_share_a_batch_is_that_of_one_device(tmp_path):
    check_same(tmp_path, 2, small.balanced_experts, ep=2, tp=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [pytest.param({"tp": 2}, marks=pytest.mark.variant), {"tp": 2, "ep": 4}, {"pp": 2}, {"cp": 2}], ids=str
)
def test_experts_go_together_with_other_axes(tmp_path, sizes):
    check_same(tmp_path, 4, partial(model, "qwen3"), **{"ep": 2, **sizes})


def test_a_model_without_experts_is_refused():
    with pytest.raises(MisuseError) as error:
        HFModule(small.llama()).configure_experts()
    assert str(error.value).startswith("LlamaForCausalLM has no plan of experts in transformers (ep_plan)")


def test_a_plan_that_splits_experts_names_the_option_that_divides_them():
    with pytest.raises(RequestError) as error:
        parallelize(model("mixtral"), mesh=None)  # which is not needed so far
    assert "the style 'packed_colwise' of 'model.layers.*.mlp.experts.gate_up_proj'" in str(error.value)
    assert "divide experts by 'mesh(tp=2, ep=2)'" in str(error.value)

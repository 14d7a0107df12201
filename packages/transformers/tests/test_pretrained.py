"""Weights of from_pretrained in a model that is made sharded: read by each rank, the same values, clear errors."""

from __future__ import annotations

import gc
import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from dstrat import Callback
from dstrat.errors import MisuseError
from dstrat.parallel.meta_device import parameters_on_meta
from dstrat_fsdp.parameters import materialize
from dstrat_mesh import MeshStrategy
from dstrat_transformers import initialization, pretrained
from dstrat_transformers.initialization import assign
from dstrat_transformers.pretrained import PretrainedWeights, load_pretrained

sys.path.insert(0, str(Path(__file__).parent))

import small
from test_module import architectures
from test_strategies import strategy

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("llama")]


def load_without_memory(factory):
    with parameters_on_meta():
        model = load_pretrained(factory)
    assert all(parameter.is_meta for parameter in model.parameters())
    materialize(model, torch.device("cpu"))
    return model


@pytest.mark.parametrize("max_shard_size", ["5GB", "10KB"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "vit", "mixtral"])  # of the last two, files have other tensors
def test_a_model_without_memory_gets_the_weights_of_from_pretrained(tmp_path, name, max_shard_size):
    cls, config, _ = {**architectures(), "mixtral": (transformers.MixtralForCausalLM, experts().config, None)}[name]
    cls(config).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    expected = cls.from_pretrained(tmp_path)
    values = dict(load_without_memory(partial(cls.from_pretrained, tmp_path)).named_parameters())
    for parameter_name, value in expected.named_parameters():  # of shared ones the first, which strategies tie again
        assert torch.equal(values[parameter_name], value), parameter_name


def test_dtype_and_config_of_generation_are_those_of_from_pretrained(tmp_path):
    model = small.llama().to(torch.bfloat16)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path)
    for options in ({}, {"dtype": torch.float32}):
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        loaded = load_without_memory(partial(AutoModelForCausalLM.from_pretrained, tmp_path, **options))
        assert loaded.dtype == expected.dtype
        assert torch.equal(loaded.model.embed_tokens.weight, expected.model.embed_tokens.weight)
        assert loaded.generation_config.max_new_tokens == 7


def test_the_name_may_be_passed_by_keyword(tmp_path):
    model = small.llama()
    model.save_pretrained(tmp_path)
    loaded = load_without_memory(partial(LlamaForCausalLM.from_pretrained, pretrained_model_name_or_path=tmp_path))
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("alias", ["ddp", "fsdp", "model_parallel", "deepspeed_stage_3"])
def test_a_run_from_a_function_is_that_from_the_loaded_model(tmp_path, alias):
    small.llama().save_pretrained(tmp_path / "weights")
    factory = partial(LlamaForCausalLM.from_pretrained, tmp_path / "weights")
    expected = small.train(tmp_path / "whole", model=factory())
    seen = small.train(tmp_path / "sharded", strategy(alias), 2, model=factory)
    assert seen["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert seen["val"] == pytest.approx(expected["val"], abs=1e-5)


def test_a_parameter_under_two_names_is_an_error_that_names_the_files(tmp_path):
    cls, config, _ = architectures()["bert"]
    cls(config).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = next(key for key in state if key.endswith("LayerNorm.weight"))
    old_name = name.replace("weight", "gamma")  # which transformers reads as the new one
    (tmp_path / "model.safetensors").rename(tmp_path / "new.safetensors")
    save_file({old_name: state[name]}, tmp_path / "old.safetensors")
    files = {**dict.fromkeys(state, "new.safetensors"), old_name: "old.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    with pytest.raises(MisuseError, match="more than once") as caught:
        load_without_memory(partial(cls.from_pretrained, tmp_path))
    assert f"{old_name!r} in old.safetensors and {name!r} in new.safetensors" in str(caught.value)


def test_each_layer_is_read_when_it_is_sharded_and_not_before(tmp_path, monkeypatch):
    small.llama().save_pretrained(tmp_path)
    read = []
    read_one = PretrainedWeights.read
    monkeypatch.setattr(
        PretrainedWeights, "read", lambda self, key, *box: read.append(key) or read_one(self, key, *box)
    )
    with parameters_on_meta():
        model = load_pretrained(partial(LlamaForCausalLM.from_pretrained, tmp_path))
    assert read == []
    materialize(model, torch.device("cpu"))
    assert sorted(read) == sorted(dict(small.llama().named_parameters()))  # each once


def experts():
    """Return a model whose files have a tensor for each of its four experts."""
    sizes = {
        name: value for name, value in small.config().to_dict().items() if name not in ("model_type", "architectures")
    }
    torch.manual_seed(1)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4))


@pytest.mark.parametrize(
    ("options", "divided"), [({"ep": 2}, r"experts\.(\d)\."), ({"pp": 2}, r"layers\.(\d)\.")], ids=["experts", "stages"]
)
def test_a_rank_reads_its_own_experts_and_layers_only(tmp_path, monkeypatch, options, divided):
    model = experts()
    model.save_pretrained(tmp_path / "weights")
    total = sum(parameter.numel() for parameter in model.parameters())
    factory = partial(transformers.MixtralForCausalLM.from_pretrained, tmp_path / "weights")
    expected = small.train(tmp_path / "whole", model=factory())
    read, read_one = {}, PretrainedWeights.read

    def watched(self, key, *box):
        tensor = read_one(self, key, *box)
        read[key] = tensor.numel()
        return tensor

    class Notes(Callback):
        def on_fit_start(self, trainer, module):
            (tmp_path / f"rank-{trainer.global_rank}").write_text(json.dumps(read))

    monkeypatch.setattr(PretrainedWeights, "read", watched)
    mesh = MeshStrategy(start_method="fork", **options)
    seen = small.train(tmp_path / "run", mesh, 2, model=factory, callbacks=[Notes()])
    assert seen["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    ranks = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    first, last = ({match[1] for key in keys if (match := re.search(divided, key))} for keys in ranks)
    assert first
    assert last
    assert not first & last
    assert max(sum(keys.values()) for keys in ranks) < 0.6 * total


@pytest.mark.parametrize("is_new", [False, True])
def test_no_rank_of_stage_3_holds_more_than_a_layer_while_the_model_is_made(tmp_path, monkeypatch, is_new):
    config = {"num_hidden_layers": 6, "tie_word_embeddings": False}
    model = small.llama(**config)
    model.save_pretrained(tmp_path / "weights")
    held = []

    def watched(layer, name, value):
        sharded = [each for each in gc.get_objects() if type(each) is torch.nn.Parameter and hasattr(each, "ds_id")]
        held.append(sum(parameter.numel() for parameter in sharded))  # 0, but for gathered ones
        assign(layer, name, value)

    class Notes(Callback):
        def on_fit_start(self, trainer, module):
            (tmp_path / f"rank-{trainer.global_rank}").write_text(f"{len(held)} {max(held)}")

    monkeypatch.setattr(initialization, "assign", watched)
    monkeypatch.setattr(pretrained, "assign", watched)
    factory = partial(LlamaForCausalLM.from_pretrained, tmp_path / "weights")
    factory = small.new_llama(**config) if is_new else factory
    small.train(tmp_path / "run", strategy("deepspeed_stage_3"), 2, model=factory, callbacks=[Notes()])
    for rank in range(2):
        fills, most = map(int, (tmp_path / f"rank-{rank}").read_text().split())
        assert fills == len(list(model.parameters()))
        assert most == 0


def test_what_cannot_be_made_sharded_is_an_error_that_says_so(tmp_path):
    small.llama().model.save_pretrained(tmp_path / "base")
    small.llama().save_pretrained(tmp_path / "whole")
    (tmp_path / "empty").mkdir()
    small.config().save_pretrained(tmp_path / "empty")
    with parameters_on_meta():
        for folder, options, message in (
            ("base", {}, r"has no tensor 'model.embed_tokens.weight' of shape \(64, 32\) for LlamaForCausalLM"),
            ("whole", {"device_map": "auto"}, "from_pretrained with device_map is not possible"),
            ("empty", {}, "has no model.safetensors and no model.safetensors.index.json"),
        ):
            factory = partial(LlamaForCausalLM.from_pretrained, tmp_path / folder, **options)
            with pytest.raises(MisuseError, match=message):
                load_pretrained(factory)


def test_outside_of_sharding_it_is_from_pretrained_itself(tmp_path):
    small.llama().model.save_pretrained(tmp_path)  # without a head, which is made anew
    model = load_pretrained(
        partial(transformers.LlamaForSequenceClassification.from_pretrained, tmp_path, num_labels=3)
    )
    assert model.score.weight.shape[0] == 3

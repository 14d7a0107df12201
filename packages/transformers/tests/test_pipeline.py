"""Models of transformers with stages: losses of one device, shared weights, written folders."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")

import torch
import transformers
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from dstrat import Trainer
from dstrat.errors import MisuseError
from dstrat_mesh import MeshStrategy
from dstrat_transformers import HFModule
from dstrat_transformers.reduction import keep_config_layers

sys.path.insert(0, str(Path(__file__).parent))

import small

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("llama")]

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPTIONS = {"trainer_options": {"max_epochs": 1, "gradient_clip_val": 0.5}}


def strategy(**sizes):
    return MeshStrategy(start_method="fork", **sizes)


def models():
    torch.manual_seed(1)
    gemma = transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=4, attn_implementation="eager")
    return {
        "llama": small.llama(num_hidden_layers=3, tie_word_embeddings=False),
        "llama with shared embeddings": small.llama(num_hidden_layers=3),
        "qwen3": transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8)),
        "gemma2": transformers.Gemma2ForCausalLM(gemma),
    }


def written(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()


def check_same(seen, reference, folder, reference_folder):
    assert seen["losses"] == pytest.approx(reference["losses"], rel=1e-6)
    assert seen["val"] == pytest.approx(reference["val"], rel=1e-6)
    expected = written(reference_folder)
    assert written(folder).keys() == expected.keys()
    for name, value in written(folder).items():
        torch.testing.assert_close(value, expected[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "llama with shared embeddings", "qwen3", "gemma2"])
def test_stages_have_the_losses_of_one_device(tmp_path, name):
    reference = small.train(tmp_path / "one", model=models()[name], **OPTIONS)
    seen = small.train(tmp_path / "two", strategy(pp=2), 2, model=models()[name], **OPTIONS)
    check_same(seen, reference, tmp_path / "two", tmp_path / "one")


LAYOUTS = [{"pp": 2, "dp_shard": 2, "microbatches": 4}, {"pp": 2, "tp": 2}, {"pp": 4}]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_stages_go_together_with_other_axes(tmp_path, sizes):
    name = "llama with shared embeddings"
    reference = small.train(tmp_path / "one", model=models()[name], **OPTIONS)
    seen = small.train(tmp_path / "four", strategy(**sizes), 4, model=models()[name], **OPTIONS)
    check_same(seen, reference, tmp_path / "four", tmp_path / "one")


def test_a_model_that_is_made_in_stages_has_the_first_values_of_one_device(tmp_path):
    accumulate = {"trainer_options": {"max_epochs": 1, "accumulate_grad_batches": 2}}
    reference = small.train(tmp_path / "one", model=small.new_llama(), **accumulate)
    seen = small.train(tmp_path / "two", strategy(pp=2), 2, model=small.new_llama(), **accumulate)
    check_same(seen, reference, tmp_path / "two", tmp_path / "one")


class ReadsOutput(HFModule):
    def validation_step(self, batch, batch_idx):
        self.log("perplexity", self.model(**batch).loss.exp())
        text = self.model.generate(batch["input_ids"][:, :3], max_new_tokens=4, do_sample=False, use_cache=False)
        self.log("text", (text * torch.arange(text.shape[1])).float().mean())
        self.log("logits", self.model(batch["input_ids"]).logits.square().mean())
        self.log("masked", self.model(batch["input_ids"], batch["input_ids"] > 5).logits.square().mean())


def test_a_validation_step_reads_the_output_of_the_model_and_generates():
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    values = []
    for alias, devices in (("auto", 1), (strategy(pp=2), 2)):
        module = ReadsOutput(models()["llama"])
        loader = DataLoader(small.rows(8, padded=False), batch_size=8)
        values += Trainer(strategy=alias, devices=devices, **options).validate(module, loader)
    assert values[1] == pytest.approx(values[0], rel=1e-6)


def test_a_cache_in_stages_is_refused():
    pipeline = HFModule(models()["llama"]).configure_pipeline()
    tokens = torch.ones(1, 3, dtype=torch.long)
    batch = {"input_ids": tokens, "past_key_values": transformers.DynamicCache()}
    with pytest.raises(MisuseError, match=r"no rank of a pipeline has that of all layers: call model.generate\("):
        pipeline.compute(pipeline.chain[:2], tokens, batch)


def granite():
    torch.manual_seed(1)
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, embedding_multiplier=12.0))


def test_what_a_model_does_to_its_embeddings_is_done_in_the_first_stage(tmp_path):
    reference = small.train(tmp_path / "one", model=granite(), **OPTIONS)
    seen = small.train(tmp_path / "two", strategy(pp=2), 2, model=granite(), **OPTIONS)
    check_same(seen, reference, tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("computes_again", [True, False])
@pytest.mark.parametrize("boundary", [1, 2, 4])
def test_a_stage_begins_with_what_it_receives(boundary, computes_again):
    batch = {name: value[None] for name, value in small.rows(1, padded=False)[0].items()}
    expected, model = granite().train(), granite().train()
    expected(**batch).loss.backward()
    if computes_again:
        model.gradient_checkpointing_enable()
    pipeline = HFModule(model).configure_pipeline()
    chain = pipeline.chain
    value = pipeline.compute(chain[:boundary], batch["input_ids"], batch)
    pipeline.loss(pipeline.compute(chain[boundary:], value, batch), batch).backward()
    for (name, one), other in zip(expected.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, msg=name)


def test_layers_of_other_stages_keep_a_replaced_forward():
    model = granite()
    pipeline = HFModule(model).configure_pipeline()
    layers, batch = pipeline.chain, {name: value[None] for name, value in small.rows(1)[0].items()}
    calls = []

    def counted(*args, **kwargs):  # as a strategy replaces it to compute activations again
        calls.append(None)
        return forward(*args, **kwargs)

    forward, layers[2].forward = layers[2].forward, counted
    pipeline.compute(layers[:2], batch["input_ids"], batch)
    assert not calls
    assert [name for name, layer in model.named_modules() if "forward" in vars(layer)] == ["model.layers.1"]
    pipeline.compute(layers[:3], batch["input_ids"], batch)
    assert len(calls) == 1


def others():
    sizes = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2}
    opt = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    return {
        "OPTForCausalLM has the layers decoder, and a pipeline is known": transformers.OPTForCausalLM(
            transformers.OPTConfig(**opt, ffn_dim=48, word_embed_proj_dim=32)
        ),
        "BloomForCausalLM has the layers word_embeddings, word_embeddings_layernorm, h, ln_f, and a pipeline is known "
        "for an embedding": transformers.BloomForCausalLM(transformers.BloomConfig(**sizes)),
        "LlamaForSequenceClassification is no model ...ForCausalLM": transformers.LlamaForSequenceClassification(
            small.config()
        ),
        "MixtralForCausalLM has config.output_router_logits=True, and": small.balanced_experts(),
    }


@pytest.mark.parametrize("message", others())
def test_a_model_with_other_layers_is_refused(message):
    with pytest.raises(MisuseError) as error:
        HFModule(others()[message]).configure_pipeline()
    assert str(error.value).startswith(message)


class Weighted(HFModule):
    def loss_and_weight(self, batch):
        loss, labels = super().loss_and_weight(batch)
        return 2 * loss, labels


class Doubled(HFModule):
    def loss(self, batch):
        return 2 * super().loss(batch)


class WithPipeline(Doubled):
    def configure_pipeline(self):
        pipeline = super().configure_pipeline()
        return dataclasses.replace(pipeline, loss=lambda *values: 2 * pipeline.loss(*values))


@pytest.mark.parametrize(("module_class", "method"), [(Weighted, "loss_and_weight"), (Doubled, "loss")])
def test_another_loss_without_its_pipeline_is_refused(module_class, method):
    with pytest.raises(MisuseError, match=f"{module_class.__name__} overrides {method} of HFModule, which stages do"):
        module_class(small.llama()).configure_pipeline()


def test_another_loss_with_its_pipeline_is_a_pipeline():
    assert WithPipeline(small.llama()).configure_pipeline().chain


@pytest.mark.parametrize("stage", [slice(1), slice(2), slice(1, 3), slice(2, 5)], ids=str)
def test_blocks_that_return_tuples_are_refused(stage):
    config = transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    pipeline = HFModule(transformers.FalconForCausalLM(config)).configure_pipeline()
    batch = {name: torch.stack([row[name] for row in small.rows(2)]) for name in small.rows(1)[0]}
    value = batch["input_ids"] if not stage.start else torch.zeros(2, small.LENGTH, 32)
    with pytest.raises(MisuseError, match="blocks of FalconForCausalLM return tuples, and a pipeline is known for"):
        pipeline.compute(pipeline.chain[stage], value, batch)


def test_batches_that_stages_cannot_train_on_say_what_to_change():
    module = HFModule(models()["llama"])
    pipeline = module.configure_pipeline()
    batch = {name: torch.stack([row[name] for row in small.rows(2)]) for name in small.rows(1)[0]}
    divided = {**batch, "num_items_in_batch": torch.tensor(7)}
    for step in (module.loss_and_weight, lambda one: pipeline.loss(torch.zeros(2, 8, 64), one)):
        with pytest.raises(MisuseError, match="LlamaForCausalLM got a batch with num_items_in_batch: leave it out"):
            step(divided)
    with pytest.raises(MisuseError, match="got a batch with inputs_embeds, and its first stage takes input_ids"):
        pipeline.inputs({"inputs_embeds": torch.zeros(2, 8, 32)})


def training():
    rows = small.rows(8)
    return HFModule(models()["llama"]), {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.slow
def test_verify_compares_the_layers_of_each_stage():
    from click.testing import CliRunner

    from dstrat.cli.main import commands

    shown = CliRunner().invoke(commands, ["verify", f"{__name__}:training", "--strategy", "mesh(pp=2)", "--json"])
    assert shown.exit_code == 0, shown.output
    compared = {one["subject"]: one["compared"] for one in json.loads(shown.stdout)["comparisons"]}
    assert compared["gradients"] > 20
    assert compared["outputs of layers"] > 20


def deep():
    return small.config(num_hidden_layers=9, attention_dropout=0.3)


def deep_training():
    options = {name: value for name, value in deep().to_dict().items() if name not in ("model_type", "architectures")}
    config = transformers.Gemma2Config(**{**options, "head_dim": 8})
    return HFModule(transformers.Gemma2ForCausalLM(config)), training()[1]


@pytest.mark.slow
def test_verify_reduces_a_model_and_its_config():
    from click.testing import CliRunner

    from dstrat.cli.main import commands

    options = ["--strategy", "mesh(pp=2)", "--layers", "2", "--json"]
    shown = CliRunner().invoke(commands, ["verify", f"{__name__}:deep_training", *options])
    assert shown.exit_code == 0, shown.output
    result = json.loads(shown.stdout)
    assert result["reduced"] == {"config.num_hidden_layers": [9, 2], "model.model.layers": [9, 2]}
    assert 10 < result["comparisons"][2]["compared"] < 30


def test_layers_of_a_config_inside_of_another_and_their_types_are_kept(tmp_path):
    config = transformers.Gemma3Config(
        text_config={"num_hidden_layers": 6, "hidden_size": 32}, vision_config={"num_hidden_layers": 1}
    )
    assert keep_config_layers(config, 2) == {"config.text_config.num_hidden_layers": (6, 2)}
    assert len(config.text_config.layer_types) == 2
    deep().save_pretrained(tmp_path)
    module = HFModule(partial(transformers.AutoModelForCausalLM.from_pretrained, tmp_path))  # which has no weights
    assert module.keep_layers(3) == {"config.num_hidden_layers": (9, 3)}
    assert len(module._factory().model.layers) == 3
    assert HFModule(lambda: None).keep_layers(3) == {}

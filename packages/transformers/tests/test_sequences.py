"""Models of transformers with divided sequences: losses of one device, also of packed documents and windows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")

import torch
import transformers
from torch.utils.data import DataLoader

from dstrat import Trainer
from dstrat.errors import MisuseError, RankFailedError
from dstrat_mesh import MeshStrategy
from dstrat_transformers import HFModule
from dstrat_transformers.models import count_labels

sys.path.insert(0, str(Path(__file__).parent))

import small

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("llama")]

OPTIONS = {"trainer_options": {"max_epochs": 1, "gradient_clip_val": 0.5}}
LENGTH = 12


def strategy(**sizes):
    return MeshStrategy(start_method="fork", **sizes)


def rows(kind):
    """Sequences of twelve tokens: packed documents, padding at the end, or neither."""
    made = []
    for index in range(24):
        tokens = torch.randint(3, 64, (LENGTH,), generator=torch.Generator().manual_seed(index))
        row, split = {"input_ids": tokens, "labels": tokens.clone()}, 2 + index % 8
        if kind == "packed":
            row["position_ids"] = torch.cat([torch.arange(split), torch.arange(LENGTH - split)])
        if kind == "padded":
            row["attention_mask"] = (torch.arange(LENGTH) < split + 2).long()
        row["labels"][split:] = small.IGNORED if kind != "packed" else row["labels"][split:]
        made.append(row)
    return made


def windowed():
    """Return a model whose layers see four tokens, every second one."""
    torch.manual_seed(1)
    sizes = {name: getattr(small.config(), name) for name in SIZES}
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**sizes, head_dim=8, sliding_window=4, layer_types=TYPES, query_pre_attn_scalar=8)
    )


SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
SIZES += ["num_key_value_heads", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"]
TYPES = ["sliding_attention", "full_attention"]
CASES = {
    "windows": (windowed, "packed", {"cp": 2}),
    "padded": (small.llama, "padded", {"cp": 2}),
    "ring": (small.llama, "plain", {"cp": 2, "context_parallel": "ring"}),
}


@pytest.mark.parametrize("name", CASES)
def test_divided_sequences_have_the_losses_of_one_device(tmp_path, name):
    model, kind, sizes = CASES[name]
    options = {"data": rows(kind), "validation": rows(kind)[:8], **OPTIONS}
    reference = small.train(tmp_path / "one", model=model(), **options)
    seen = small.train(tmp_path / "two", strategy(**sizes), 2, model=model(), **options)
    assert seen["losses"] == pytest.approx(reference["losses"], rel=1e-6)
    assert seen["val"] == pytest.approx(reference["val"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"cp": 2, "pp": 2}, {"cp": 2, "tp": 2, "context_parallel": "ring"}], ids=str)
def test_divided_sequences_go_together_with_other_axes(tmp_path, sizes):
    kind = "plain" if "context_parallel" in sizes else "packed"
    options = {"data": rows(kind), "validation": rows(kind)[:8], **OPTIONS}
    reference = small.train(tmp_path / "one", model=small.llama(), **options)
    seen = small.train(tmp_path / "four", strategy(**sizes), 4, model=small.llama(), **options)
    assert seen["losses"] == pytest.approx(reference["losses"], rel=1e-6)
    assert seen["val"] == pytest.approx(reference["val"], rel=1e-6)


@pytest.mark.parametrize(
    ("model", "kind", "sizes", "message"),
    [
        (lambda: small.llama(attn_implementation="eager"), "plain", {}, "has attn_implementation='eager', and cp"),
        (small.llama, "padded", {"context_parallel": "ring"}, "got a mask, and context_parallel='ring'"),
    ],
)
def test_what_divided_sequences_cannot_do_is_refused(tmp_path, model, kind, sizes, message):
    with pytest.raises(RankFailedError) as error:
        small.train(
            tmp_path, strategy(cp=2, **sizes), 2, model=model(), data=rows(kind), validation=rows(kind), **OPTIONS
        )
    assert message in str(error.value)


def test_a_model_with_a_loss_of_its_experts_is_refused():
    batch = {name: value[None] for name, value in rows("plain")[0].items()}
    with pytest.raises(MisuseError) as error:
        HFModule(small.balanced_experts()).cut_sequences(batch, lambda tensor: tensor)
    assert str(error.value).startswith("MixtralForCausalLM has config.output_router_logits=True, and")


def test_a_model_without_torchs_attention_is_refused_without_advice_that_fails():
    config = transformers.Gemma2Config(**{**small.config().to_dict(), "head_dim": 8, "model_type": "gemma2"})
    batch = {name: value[None] for name, value in rows("plain")[0].items()}
    with pytest.raises(MisuseError) as error:
        HFModule(transformers.Gemma2ForCausalLM(config)).cut_sequences(batch, lambda tensor: tensor)
    assert str(error.value) == (
        "Gemma2ForCausalLM has attn_implementation='eager', and cp divides the sequences of 'sdpa' only: leave cp out"
    )


def convolved():
    sizes = {name: getattr(small.config(), name) for name in SIZES}
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**sizes, layer_types=["conv", "full_attention"]))


def stretched():
    factors = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    return small.llama(rope_parameters={**factors, "original_max_position_embeddings": 8})


def without_positions():
    sizes = {"vocab_size": 64, "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    return transformers.BartForCausalLM(transformers.BartConfig(**sizes))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (convolved, "Lfm2ForCausalLM has layers of the type 'conv', of which cp gives each rank a part"),
        (stretched, "LlamaForCausalLM has rotary embeddings of the type 'longrope', which depend on the length of a"),
        (without_positions, "BartForCausalLM takes no position_ids, so that each part of a sequence would begin at"),
    ],
)
def test_a_model_that_joins_tokens_elsewhere_is_refused(model, message):
    with pytest.raises(MisuseError, match=message):
        HFModule(model()).check_divided_sequences()


class CallsModel(HFModule):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        loss = self.model(**batch, use_cache=False).loss
        self.log("own_loss", loss, batch_size=int(count_labels(self.model, batch)))


def logit_of_next_tokens(output, batch):
    return output.logits[:, :-1].gather(-1, batch["labels"][:, 1:, None]).mean()


def test_metrics_and_calls_of_the_model_in_a_step_are_of_whole_sequences():
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    values = []
    for alias, devices in (("auto", 1), (strategy(cp=2), 2)):
        module = CallsModel(small.llama(), metrics={"logit": logit_of_next_tokens})
        trainer = Trainer(strategy=alias, devices=devices, **options)
        values += trainer.validate(module, DataLoader(rows("packed")[:8], batch_size=8))
    assert values[1] == pytest.approx(values[0], rel=1e-6)
    assert values[0]["own_loss"] == values[0]["val_loss"]


class CallsWithTokens(HFModule):
    def predict_step(self, batch, *_):
        return self.model(batch["input_ids"])


def test_a_call_of_the_model_without_the_positions_of_a_part_is_refused():
    with pytest.raises(RankFailedError, match=r"was called with a part of a batch whose sequences cp divides"):
        predict(CallsWithTokens(small.llama()), strategy(cp=2), 2)


class Tokens(HFModule):
    def predict_step(self, batch, *_):
        return super().predict_step(batch).logits.argmax(-1)


def predict(module, strategy="auto", devices=1):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=devices, **quiet)
    return trainer.predict(module, DataLoader(rows("packed")[:4], batch_size=4))


def test_predictions_are_those_of_whole_sequences():
    (expected,) = predict(HFModule(small.llama()))
    (found,) = predict(HFModule(small.llama()), strategy(cp=2), 2)
    torch.testing.assert_close(found.logits, expected.logits)


def test_other_predictions_need_a_method_that_joins_them():
    with pytest.raises(RankFailedError) as error:
        predict(Tokens(small.llama()), strategy(cp=2), 2)
    assert "predict_step of Tokens returned a Tensor, not the model's output: define join_sequences" in str(error.value)


def test_documents_are_those_of_the_model_that_computes():
    batch = {name: value[None] for name, value in rows("packed")[2].items()}
    modules = [HFModule(small.llama()) for _ in range(2)]
    expected = modules[0].predict_step(batch).logits
    parts = [module.cut_sequences(batch, lambda tensor: tensor) for module in modules]
    for module, part in zip(modules, parts, strict=True):
        torch.testing.assert_close(module.predict_step(part).logits, expected)

"""Folders for from_pretrained, adapters of peft, and generated text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import dstrat
from dstrat.errors import MisuseError
from dstrat_fsdp import FSDPStrategy
from dstrat_mesh import MeshStrategy
from dstrat_transformers import GenerationCallback, HFModule, PretrainedCheckpoint, save_pretrained

sys.path.insert(0, str(Path(__file__).parent))

import small

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("transformers")]


def equal(model, other):
    state, expected = model.state_dict(), other.state_dict()
    return state.keys() == expected.keys() and all(torch.equal(state[name], value) for name, value in expected.items())


def test_a_large_model_is_written_in_several_files(tmp_path):
    model = small.llama(tie_word_embeddings=False)
    save_pretrained(model, tmp_path, max_shard_size=10_000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert set(index["weight_map"].values()) == set(files)
    assert equal(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    save_pretrained(HFModule(model), tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert equal(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_the_files_are_those_of_transformers(tmp_path):
    model = small.llama()
    save_pretrained(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    names = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == names
    for name in names:
        if name.endswith(".json"):
            assert json.loads((tmp_path / "ours" / name).read_text()) == json.loads(
                (tmp_path / "theirs" / name).read_text()
            )


def test_a_model_whose_files_have_other_tensors_is_written_too(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, max_position_embeddings=16,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    save_pretrained(model, tmp_path)
    assert equal(AutoModelForCausalLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("alias", ["single_device", "fsdp"])
def test_adapters_are_written_by_themselves_and_peft_loads_them(tmp_path, alias):
    peft = pytest.importorskip("peft", reason="this environment has no peft")
    base = small.llama()
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=True)
    torch.manual_seed(2)
    model = peft.get_peft_model(base, config)
    strategy, devices = (FSDPStrategy(start_method="fork"), 2) if alias == "fsdp" else (alias, 1)
    seen = small.train(tmp_path / "run", strategy, devices, model=model)
    assert seen["losses"][-1] < seen["losses"][0]
    folder = tmp_path / "run" / "model"
    assert not (folder / "model.safetensors").exists()
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 8  # two layers with two projections of two matrices
    assert any(bool(value.any()) for name, value in tensors.items() if "lora_B" in name)  # which begins with zeros
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder)
    batch = {name: value[None] for name, value in small.rows()[0].items()}
    with torch.no_grad():
        assert loaded(**batch).loss < base_loss(tmp_path / "base", batch)


def test_resized_embeddings_are_written_with_adapters_as_by_peft(tmp_path):
    peft = pytest.importorskip("peft", reason="this environment has no peft")
    from safetensors.torch import load_file

    small.llama().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(70)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    small.train(tmp_path / "run", FSDPStrategy(start_method="fork"), 2, model=model)
    model.save_pretrained(tmp_path / "expected")
    shapes = [
        {name: value.shape for name, value in load_file(folder / "adapter_model.safetensors").items()}
        for folder in (tmp_path / "run" / "model", tmp_path / "expected")
    ]
    assert shapes[0] == shapes[1]
    assert torch.Size([70, 32]) in shapes[0].values()


def base_loss(folder, batch):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(**batch).loss


def test_shards_of_an_ended_run_cannot_be_written_and_the_error_says_what_can(tmp_path):
    from torch.distributed.tensor import DTensor  # noqa: F401 - what the check looks for

    model = small.llama()
    model.lm_head.weight = torch.nn.Parameter(torch.empty(64, 32, device="meta"))
    with pytest.raises(MisuseError, match="PretrainedCheckpoint"):
        save_pretrained(model, tmp_path)


def test_a_folder_is_written_every_few_epochs(tmp_path):
    callback = PretrainedCheckpoint(tmp_path / "epochs", every_n_epochs=2)
    small.train(tmp_path, callbacks=[callback], trainer_options={"max_epochs": 4})
    assert sorted(path.name for path in (tmp_path / "epochs").iterdir()) == ["epoch-1", "epoch-3"]


@pytest.mark.parametrize("is_first", [True, False])
def test_the_folder_of_an_epoch_has_the_average_of_the_weights(tmp_path, is_first):
    callbacks = [PretrainedCheckpoint(tmp_path / "epochs", every_n_epochs=1), dstrat.EMAWeightAveraging(decay=0.9)]
    model = small.llama()
    callbacks = callbacks if is_first else callbacks[::-1]
    small.train(tmp_path, "single_device", model=model, callbacks=callbacks, trainer_options={"max_epochs": 2})
    assert equal(AutoModelForCausalLM.from_pretrained(tmp_path / "epochs" / "epoch-1"), model)  # which ends with it
    assert not equal(AutoModelForCausalLM.from_pretrained(tmp_path / "epochs" / "epoch-0"), model)


class Characters:
    """A tokenizer of the least kind: each character is a token."""

    def __call__(self, text, return_tensors):
        from transformers import BatchEncoding

        return BatchEncoding({"input_ids": torch.tensor([[ord(character) % 60 + 3 for character in text]])})

    def decode(self, tokens, skip_special_tokens):
        return "".join(chr(int(token) - 3 + 60) for token in tokens)


def test_text_is_generated_alike_on_every_strategy_and_changes_no_loss(tmp_path):
    options = {"max_new_tokens": 5, "do_sample": True}
    texts = {}
    losses = {}
    pytest.importorskip("deepspeed", reason="this environment has no DeepSpeed")
    from dstrat_deepspeed import DeepSpeedStrategy

    strategies = {
        "one": ("auto", 1),
        "fsdp": (FSDPStrategy(start_method="fork"), 2),
        "deepspeed": (DeepSpeedStrategy(stage=3, start_method="fork"), 2),
        "stages": (MeshStrategy(pp=2, start_method="fork"), 2),
        "sequences": (MeshStrategy(cp=2, start_method="fork"), 2),
    }
    for name, (strategy, devices) in strategies.items():
        callback = GenerationCallback(["ab", "cde"], Characters(), **options)
        writer = TextWriter(tmp_path / f"{name}.json", callback)
        losses[name] = small.train(tmp_path / name, strategy, devices, callbacks=[callback, writer])["losses"]
        texts[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert texts == dict.fromkeys(texts, texts["one"])
    assert [len(text) for text in texts["one"]] == [7, 8]
    assert losses["one"] == pytest.approx(small.train(tmp_path / "without")["losses"], abs=1e-7)


class TextWriter(small.Callback):
    """Writes what was generated, in rank 0."""

    def __init__(self, path, callback):
        self.path, self.callback = path, callback

    def on_validation_end(self, trainer, module):
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(self.callback.texts))


def test_loggers_with_text_get_what_is_generated(tmp_path):
    from dstrat import CSVLogger

    class TextLogger(CSVLogger):
        def log_text(self, key, text, step=None):
            seen.append((key, step))

    seen = []
    callback = GenerationCallback("ab", Characters(), max_new_tokens=2)
    small.train(tmp_path, callbacks=[callback], logger=TextLogger(tmp_path))
    assert seen == [("generated", 6), ("generated", 12)]


def test_a_plain_model_can_be_saved_in_a_loop_of_ones_own(tmp_path):
    import dstrat

    strategy = dstrat.build(strategy=FSDPStrategy(start_method="fork"), accelerator="cpu", devices=2)
    dstrat.OwnLoop(strategy).launch(save_in_loop, tmp_path)
    assert equal(LlamaForCausalLM.from_pretrained(tmp_path), small.llama())


def save_in_loop(loop, folder):
    model = small.llama()
    loop.setup(model, lambda model: torch.optim.AdamW(model.parameters()))
    save_pretrained(model, folder, strategy=loop.strategy)

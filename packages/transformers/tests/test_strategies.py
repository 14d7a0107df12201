"""A Llama on every strategy: the losses of one device and of transformers' Trainer, resumed runs, written models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from dstrat.callbacks import ModelCheckpoint
from dstrat_fsdp import FSDPStrategy, ModelParallelStrategy

sys.path.insert(0, str(Path(__file__).parent))

import small

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the libraries
    pytest.mark.xdist_group("llama"),
]

EXACT = {"ddp": 1e-6, "fsdp": 1e-6, "model_parallel": 1e-5, "deepspeed_stage_2": 1e-5, "deepspeed_stage_3": 1e-5}
"""Strategies, and by how much their losses may differ from those of one device."""


def strategy(alias):
    """A strategy whose ranks are forked from this process, which has imported everything."""
    if alias == "ddp":
        return "ddp_fork"
    if alias == "fsdp":
        return FSDPStrategy(start_method="fork")
    if alias == "model_parallel":
        return ModelParallelStrategy(1, 2, start_method="fork")
    pytest.importorskip("deepspeed", reason="this environment has no DeepSpeed")
    from dstrat_deepspeed import DeepSpeedStrategy

    return DeepSpeedStrategy(stage=int(alias[-1]), start_method="fork")


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return small.train(folder), small.train(folder / "new", model=small.new_llama()), folder


@pytest.mark.parametrize("alias", EXACT)
def test_losses_and_the_written_model_are_those_of_one_device(tmp_path, one_device, alias):
    reference, _, folder = one_device
    seen = small.train(tmp_path, strategy(alias), 2)
    assert seen["losses"] == pytest.approx(reference["losses"], abs=EXACT[alias])
    assert seen["val"] == pytest.approx(reference["val"], abs=EXACT[alias])
    assert seen["rates"] == pytest.approx(reference["rates"])
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    expected = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(written[name], value, atol=1e-4, rtol=0)


@pytest.mark.parametrize("alias", ["fsdp", "model_parallel", "deepspeed_stage_3"])
def test_a_model_that_is_made_sharded_has_the_first_values_of_one_device(tmp_path, one_device, alias):
    _, reference, _ = one_device
    seen = small.train(tmp_path, strategy(alias), 2, model=small.new_llama())
    assert seen["losses"] == pytest.approx(reference["losses"], abs=EXACT[alias])


@pytest.mark.parametrize("alias", ["ddp", "fsdp", "model_parallel", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path, alias):
    options: dict[str, Any] = {"devices": 2, "shuffle": True}
    checkpoints = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    saving = {"callbacks": [checkpoints], "trainer_options": {"enable_checkpointing": True}}
    full = small.train(tmp_path / "full", strategy(alias), **saving, **options)
    rest = small.train(tmp_path / "rest", strategy(alias), ckpt_path=tmp_path / "step=4.ckpt", **options)
    assert rest["losses"] == full["losses"][4:]
    assert rest["rates"] == full["rates"][4:]
    models = [LlamaForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("full", "rest")]
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_losses_and_rates_are_those_of_transformers_own_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    rates, losses = [], []

    class Seen(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                losses.append(logs["loss"])
                rates.append(logs["learning_rate"])

    arguments = TrainingArguments(
        output_dir=tmp_path / "peer",
        per_device_train_batch_size=small.GLOBAL_BATCH,
        num_train_epochs=2,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        weight_decay=0.1,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    peer = Trainer(model=small.llama(), args=arguments, train_dataset=small.rows(), callbacks=[Seen()])
    peer.train()
    data = torch.utils.data.DataLoader(small.rows(), batch_size=small.GLOBAL_BATCH)
    seen = small.train(tmp_path / "ours", data=data, trainer_options={"gradient_clip_val": 1.0})
    assert seen["losses"] == pytest.approx(losses, abs=1e-4)  # which it rounds
    assert seen["rates"] == pytest.approx(rates)
    trained = LlamaForCausalLM.from_pretrained(tmp_path / "ours" / "model")
    for ours, theirs in zip(trained.parameters(), peer.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_accumulated_batches_of_different_lengths_train_as_with_transformers_own_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    data = small.rows(44)  # the last step of an epoch has two batches
    arguments = TrainingArguments(
        output_dir=tmp_path / "peer",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        num_train_epochs=2,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    peer = Trainer(model=small.llama(), args=arguments, train_dataset=data)
    peer.train()
    options = {
        "optimizer": "sgd",
        "scheduler": None,
        "learning_rate": 0.05,
        "weight_decay": 0.0,
        "trainer_options": {"accumulate_grad_batches": 4},
    }
    for alias, devices in (("auto", 1), ("ddp_fork", 2)):
        loader = torch.utils.data.DataLoader(data, batch_size=2 // devices)
        small.train(tmp_path / alias, alias, devices, data=loader, **options)
        trained = LlamaForCausalLM.from_pretrained(tmp_path / alias / "model")
        for ours, theirs in zip(trained.parameters(), peer.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)

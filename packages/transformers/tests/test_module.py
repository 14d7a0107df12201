"""HFModule: optimizers, schedules, labels, other architectures, loops of one's own, and errors."""

from __future__ import annotations

import json
import math
import runpy
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")

import torch
import transformers
from tests.live_bytes import LiveBytes
from torch.utils.data import DataLoader
from transformers.trainer_utils import SchedulerType

import dstrat
from dstrat import Trainer
from dstrat.errors import MisuseError, RequestError
from dstrat_fsdp import FSDPStrategy
from dstrat_transformers import HFModule, make_optimizer, make_scheduler, weight_decay_groups

sys.path.insert(0, str(Path(__file__).parent))

import small

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("transformers")]

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def architectures():
    """Models with random values, each with a batch of two."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 50, (4, 8), generator=generator)
    gpt2 = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    bert = transformers.BertConfig(vocab_size=50, max_position_embeddings=16, num_labels=3, **TINY, **NO_DROPOUT)
    t5 = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0)
    t5.decoder_start_token_id = 0
    vit = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **TINY, **NO_DROPOUT)
    images = torch.randn(4, 3, 8, 8, generator=generator)
    classes = torch.tensor([0, 1, 2, 1])
    return {
        "gpt2": (transformers.GPT2LMHeadModel, gpt2, {"input_ids": tokens, "labels": tokens}),
        "bert": (transformers.BertForSequenceClassification, bert, {"input_ids": tokens, "labels": classes}),
        "bert_mlm": (transformers.BertForMaskedLM, bert, {"input_ids": tokens, "labels": tokens}),
        "t5": (transformers.T5ForConditionalGeneration, t5, {"input_ids": tokens, "labels": tokens}),
        "vit": (transformers.ViTForImageClassification, vit, {"pixel_values": images, "labels": classes}),
    }


def language_models():
    """Language models with random values; some predict the next token, others the token itself."""
    models = {
        name: cls(config) for name, (cls, config, _) in architectures().items() if name in ("gpt2", "bert_mlm", "t5")
    }
    bert = transformers.BertConfig(vocab_size=50, max_position_embeddings=16, is_decoder=True, **TINY, **NO_DROPOUT)
    xlnet = transformers.XLNetConfig(vocab_size=50, d_model=16, n_layer=2, n_head=2, d_inner=24, dropout=0.0)
    llama = transformers.LlamaConfig(vocab_size=50, **TINY)
    return models | {
        "bert": transformers.BertLMHeadModel(bert),
        "llama": transformers.LlamaForCausalLM(llama),
        "xlnet": transformers.XLNetLMHeadModel(xlnet),
    }


@pytest.mark.parametrize("name", ["gpt2", "bert_mlm", "t5", "bert", "llama", "xlnet"])
def test_losses_of_parts_have_the_mean_of_the_whole_by_their_weights(name):
    torch.manual_seed(0)
    module = HFModule(language_models()[name])
    tokens = torch.randint(3, 50, (4, 8))
    labels = tokens.masked_fill(torch.arange(8) >= torch.tensor([[2], [8], [3], [2]]), -100)
    parts = [{"input_ids": tokens[part], "labels": labels[part]} for part in ([0], [1, 2], [3], [0, 1, 2, 3])]
    with torch.no_grad():
        *losses, (whole, total) = [module.loss_and_weight(part) for part in parts]
    assert sum(weight for _, weight in losses) == total
    torch.testing.assert_close(sum(loss * weight for loss, weight in losses) / total, whole)


def examples(batch):
    return [{name: value[index] for name, value in batch.items()} for index in range(4)] * 4


@pytest.mark.parametrize("name", ["gpt2", "bert", "bert_mlm", "t5", "vit"])
def test_an_architecture_trains_sharded_as_in_a_loop_by_hand(tmp_path, name):
    cls, config, batch = architectures()[name]
    torch.manual_seed(0)
    model = cls(config)
    by_hand = loop_by_hand(cls, config, examples(batch))
    strategy = FSDPStrategy(start_method="fork")
    data = DataLoader(examples(batch), batch_size=2)
    losses = small.Losses(tmp_path / "losses.json")
    trainer = Trainer(strategy=strategy, devices=2, max_epochs=1, callbacks=losses, enable_checkpointing=False, **QUIET)
    trainer.fit(HFModule(model, learning_rate=1e-2, weight_decay=0.01, scheduler="linear"), data)
    assert json.loads((tmp_path / "losses.json").read_text())["losses"] == pytest.approx(by_hand, abs=2e-6)


def test_a_batch_without_labels_counts_nothing(tmp_path):
    """The second step has no labels, and the third none on the last of two ranks, which has every other row."""
    rows = small.rows(24)
    for index in (*range(8, 16), 17, 19, 21, 23):
        rows[index]["labels"][:] = small.IGNORED
    seen = []
    for strategy, devices in (("auto", 1), ("ddp_fork", 2)):
        path = tmp_path / f"{devices}.json"
        loaders = [DataLoader(rows, batch_size=small.GLOBAL_BATCH // devices) for _ in range(2)]
        module = HFModule(small.llama(), scheduler=None, learning_rate=1e-2)
        options = {**QUIET, "max_epochs": 1, "enable_checkpointing": False, "callbacks": small.Losses(path)}
        Trainer(strategy=strategy, devices=devices, **options).fit(module, *loaders)
        seen.append(json.loads(path.read_text()))
    one, two = seen
    assert one["losses"][1] == 0
    assert all(math.isfinite(value) for value in one["losses"] + one["val"])
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-6)
    assert two["val"] == pytest.approx(one["val"], abs=1e-6)


def test_accumulated_batches_of_different_lengths_are_one_large_batch(tmp_path):
    """In the Trainer, and in a loop of one's own."""
    found = {}
    for name, options in {
        "one": {"batch_size": 8},
        "accumulated": {"batch_size": 2, "accumulate_grad_batches": 4},
        "ranks": {"batch_size": 2, "accumulate_grad_batches": 2, "strategy": "ddp_fork", "devices": 2},
    }.items():
        data = DataLoader(small.rows(20), batch_size=options.pop("batch_size"))
        module = HFModule(small.llama(), scheduler=None, learning_rate=1e-2, optimizer="sgd")
        path = tmp_path / name
        callbacks = SavesWeights(path)
        trainer = Trainer(**QUIET, max_epochs=2, enable_checkpointing=False, callbacks=callbacks, **options)
        trainer.fit(module, data)
        found[name] = torch.load(path)
    for name in ("accumulated", "ranks"):
        torch.testing.assert_close(
            found[name], found["one"], rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name} {text}"
        )

    def own_loop(loop):
        module = HFModule(small.llama(), scheduler=None, learning_rate=1e-2, optimizer="sgd")
        module.prepare(loop.strategy)
        loop.setup(module, HFModule.configure_optimizers, accumulate_grad_batches=4)
        loader = loop.training_loader(DataLoader(small.rows(16), batch_size=2))
        for batch in loader:
            loop.backward(*loop.compute(module.loss_and_weight, batch))
            loop.step()
        return module.state_dict()

    trained = dstrat.OwnLoop(dstrat.build(accelerator="cpu", devices=1)).launch(own_loop)
    module, path = HFModule(small.llama(), scheduler=None, learning_rate=1e-2, optimizer="sgd"), tmp_path / "whole"
    trainer = Trainer(**QUIET, max_epochs=1, enable_checkpointing=False, callbacks=SavesWeights(path))
    trainer.fit(module, DataLoader(small.rows(16), batch_size=8))
    torch.testing.assert_close(trained, torch.load(path), rtol=1e-6, atol=1e-6)


class SavesWeights(dstrat.Callback):
    """Writes the weights of rank 0 after a fit."""

    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            torch.save(module.state_dict(), self.path)


def test_an_evaluation_without_labels_is_nan_with_a_warning(caplog):
    rows = small.rows(8)
    for row in rows:
        row["labels"][:] = small.IGNORED
    (values,) = Trainer(**QUIET).validate(HFModule(small.llama()), DataLoader(rows, batch_size=4), verbose=False)
    assert math.isnan(values["val_loss"])
    assert "val_loss is nan: every label of this evaluation is -100" in caplog.text


class LogsItsOwn(HFModule):
    def validation_step(self, batch, batch_idx):
        self.log("perplexity", self.model(**batch).loss.exp())


def test_evaluation_steps_of_a_subclass_are_not_taken_for_ones_without_labels(caplog):
    Trainer(**QUIET).validate(LogsItsOwn(small.llama()), DataLoader(small.rows(8), batch_size=4), verbose=False)
    assert "val_loss" not in caplog.text


def loop_by_hand(cls, config, rows):
    """The losses of four samples in each step, with AdamW and a linear schedule, as users of transformers write it."""
    torch.manual_seed(0)
    model = cls(config).train()
    optimizer = torch.optim.AdamW(weight_decay_groups(model, 0.01), lr=1e-2)
    schedule = transformers.get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=4)
    losses = []
    for batch in DataLoader(rows, batch_size=4):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "vit"])
def test_first_values_of_a_model_without_memory_are_those_with_memory(name):
    from dstrat.parallel.meta_device import parameters_on_meta
    from dstrat_fsdp.parameters import materialize
    from dstrat_transformers.initialization import make_model

    cls, config, _ = architectures()[name]
    torch.manual_seed(3)
    whole = make_model(lambda: cls(config))
    torch.manual_seed(3)
    with parameters_on_meta():
        later = make_model(lambda: cls(config))
    assert all(parameter.is_meta for parameter in later.parameters())
    torch.rand(5)  # numbers that are drawn in between change nothing
    materialize(later, torch.device("cpu"))
    values = dict(later.named_parameters())
    for parameter_name, expected in whole.named_parameters():
        assert torch.equal(values[parameter_name], expected), parameter_name


def test_first_values_of_one_layer_at_a_time_are_in_memory_once():
    from dstrat.parallel.meta_device import parameters_on_meta
    from dstrat_fsdp.parameters import materialize
    from dstrat_transformers.initialization import make_model

    config = transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=64, n_layer=3, n_head=2)
    with parameters_on_meta():
        model = make_model(partial(transformers.GPT2LMHeadModel, config))
    with LiveBytes() as live:
        materialize(model, torch.device("cpu"))
    sizes = [sum(parameter.nbytes for parameter in layer.parameters(recurse=False)) for layer in model.modules()]
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert total + max(sizes) <= live.largest < total + 1.1 * max(sizes)


def test_first_values_have_the_spread_of_the_models_own(tmp_path):
    from dstrat_transformers.initialization import make_model

    cls, _, _ = architectures()["gpt2"]
    config = transformers.GPT2Config(vocab_size=500, n_positions=64, n_embd=128, n_layer=2, n_head=2)
    ours, theirs = make_model(lambda: cls(config)), cls(config)
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert float(parameter.std()) == pytest.approx(float(other.std()), rel=0.1), name


def test_groups_of_weight_decay_are_those_of_transformers_trainer():
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    for cls, config, _ in architectures().values():
        model = cls(config)
        decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = {group["weight_decay"]: group["params"] for group in weight_decay_groups(model, 0.1)}
        assert {names[id(parameter)] for parameter in groups[0.1]} == decayed & set(names.values())
        assert sum(map(len, groups.values())) == len(names)


@pytest.mark.parametrize("name", sorted(kind.value for kind in SchedulerType))
def test_learning_rates_are_those_of_get_scheduler(name):
    if name in ("reduce_lr_on_plateau", "greedy"):
        pytest.skip("it follows a logged value")
    kwargs = (
        {"min_lr_rate": 0.1} if "min_lr" in name else {"num_decay_steps": 3} if name == "warmup_stable_decay" else {}
    )
    rates = []
    for make in (make_scheduler, transformers.get_scheduler):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        if make is make_scheduler:
            schedule = make(optimizer, name, num_training_steps=10, warmup_steps=0.25, scheduler_kwargs=kwargs)
        else:
            schedule = make(name, optimizer, 3, 10, kwargs)
        rates.append([])
        for _ in range(9):
            rates[-1].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    assert rates[0] == rates[1]


def test_a_scheduler_that_follows_the_validation_loss_does(tmp_path):
    seen = small.train(
        tmp_path,
        scheduler="reduce_lr_on_plateau",
        scheduler_kwargs={"patience": 0, "threshold": 10.0, "factor": 0.5},
        trainer_options={"max_epochs": 3},
    )
    assert [seen["rates"][index] for index in (0, 6, 12)] == [1e-2, 5e-3, 2.5e-3]


def test_a_loop_of_ones_own_gives_the_losses_of_the_trainer(tmp_path):
    data = DataLoader(small.rows(), batch_size=4)
    seen = small.train(tmp_path, FSDPStrategy(start_method="fork"), 2, model=small.new_llama(), data=data)
    strategy = dstrat.build(strategy=FSDPStrategy(start_method="fork"), accelerator="cpu", devices=2)
    dstrat.seed_everything(7, verbose=False)
    assert dstrat.OwnLoop(strategy).launch(train_by_hand, data) == pytest.approx(seen["losses"], abs=1e-6)


def train_by_hand(loop, data):
    module = HFModule(
        small.new_llama(),
        scheduler="cosine",
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=3,
        num_training_steps=12,
    )
    with loop.strategy.model_sharded_context():
        module.prepare(loop.strategy)
    loop.setup(module, HFModule.configure_optimizers)
    loader, losses = loop.training_loader(data), []
    while loader.epoch < 2:
        for batch in loader:
            loss = loop.compute(module.loss, batch)
            loop.backward(loss)
            loop.step()
            loop.schedulers[0].step()
            losses.append(float(loop.all_reduce(loss.detach())))
    return losses


def test_the_example_trains_and_writes_a_model(tmp_path, monkeypatch):
    example = Path(__file__).parents[3] / "examples" / "transformers"
    monkeypatch.syspath_prepend(str(example))
    options = ["--small", "--steps", "2", "--strategy", "ddp_fork", "--devices", "2", "--accelerator", "cpu"]
    monkeypatch.setattr(sys, "argv", ["train.py", *options, "--out", str(tmp_path)])
    runpy.run_path(str(example / "train.py"), run_name="__main__")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model(**tokenizer("def run():", return_tensors="pt")).logits.shape[-1] == len(tokenizer) == 512


def test_gradient_checkpointing_changes_no_loss(tmp_path):
    plain = small.train(tmp_path / "plain")
    for strategy, devices in (("auto", 1), (FSDPStrategy(start_method="fork"), 2)):
        checkpointed = small.train(tmp_path / f"{devices}", strategy, devices, gradient_checkpointing=True)
        assert checkpointed["losses"] == pytest.approx(plain["losses"], abs=1e-6)


def test_a_trainer_takes_a_model_as_it_is(tmp_path):
    model = small.llama()
    before = model.lm_head.weight.detach().clone()
    trainer = Trainer(max_steps=3, default_root_dir=tmp_path, **QUIET)
    trainer.fit(model, DataLoader(small.rows(), batch_size=8))
    assert math.isfinite(trainer.callback_metrics["train_loss"])
    assert not torch.equal(model.lm_head.weight, before)


def test_a_loaded_model_is_trained_in_training_mode(tmp_path):
    small.llama().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not model.training
    assert HFModule(model).model.training


def test_metrics_are_logged_by_their_names(tmp_path):
    def accuracy(output, batch):
        counted = batch["labels"][:, 1:] != small.IGNORED
        right = output.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]
        return (right & counted).sum() / counted.sum()

    module = HFModule(small.llama(), metrics={"accuracy": accuracy})
    trainer = Trainer(default_root_dir=tmp_path, **QUIET)
    (values,) = trainer.validate(module, DataLoader(small.rows(), batch_size=8), verbose=False)
    (one_batch,) = trainer.validate(module, DataLoader(small.rows(), batch_size=small.SAMPLES), verbose=False)
    assert values == pytest.approx(one_batch, abs=1e-6)  # as each token counts the same
    assert values.keys() == {"val_loss", "val_accuracy"}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"input_ids": torch.ones(2, 4, dtype=torch.long)},
            "LlamaForCausalLM returned no loss for a batch with input_ids",
        ),
        ([torch.ones(2, 4)], "a batch is a mapping of the arguments of LlamaForCausalLM"),
    ],
)
def test_a_batch_without_a_loss_is_an_error_that_says_so(batch, message):
    with pytest.raises(MisuseError, match=message):
        HFModule(small.llama()).loss(batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adamv"}, "'adamv' is not a class of torch.optim: name one of .*adamw"),
        ({"scheduler": "cosin"}, "'cosin' is unknown to transformers, which has .*cosine"),
        ({"scheduler": "cosine"}, "needs the number of training steps.*num_training_steps"),
    ],
)
def test_wrong_options_are_errors_that_name_what_is_possible(options, message):
    with pytest.raises(RequestError, match=message):
        HFModule(small.llama(), **options).configure_optimizers()


def test_a_config_is_no_model():
    with pytest.raises(RequestError, match=r"functools.partial\(AutoModelForCausalLM.from_config, config\)"):
        HFModule(small.config())


def test_a_frozen_model_cannot_be_trained():
    model = small.llama().requires_grad_(False)
    with pytest.raises(RequestError, match="LlamaForCausalLM has no parameter that requires a gradient"):
        make_optimizer(model)


def test_values_that_would_be_lost_are_an_error(tmp_path):
    from dstrat.parallel.meta_device import parameters_on_meta

    small.llama().save_pretrained(tmp_path)
    module = HFModule(lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    with parameters_on_meta(), pytest.raises(MisuseError, match="pass the model itself to HFModule"):
        module.prepare(dstrat.build(strategy="single_device", accelerator="cpu"))


class Plain(torch.nn.Module):
    """A model whose output is what a function makes of its loss."""

    def __init__(self, output):
        super().__init__()
        self.layer, self.output = torch.nn.Linear(2, 1), output

    def forward(self, input_ids, labels):
        return self.output((self.layer(input_ids) - labels).square().mean())


def test_outputs_are_any_objects_with_a_loss_and_no_tuples():
    batch = {"input_ids": torch.ones(3, 2), "labels": torch.ones(3, 1)}
    assert HFModule(Plain(lambda loss: SimpleNamespace(loss=loss))).loss(batch).requires_grad
    with pytest.raises(MisuseError) as error:
        HFModule(Plain(lambda loss: (loss,))).loss(batch)
    assert str(error.value) == (
        "Plain returned a tuple, and HFModule reads the loss of an output by its name: leave out return_dict=False"
    )

"""A program that trains T5 with Seq2SeqTrainer, its own or with a strategy, and writes losses and generated tokens.

python translate.py OUT STRATEGY DEVICES

STRATEGY is ``own`` for the Trainer itself, under torchrun.
"""

import json
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

OUT, STRATEGY, DEVICES = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

if STRATEGY != "own":
    import dstrat_transformers

    dstrat_transformers.use(STRATEGY, accelerator="cpu", devices=DEVICES)

import numpy as np  # noqa: E402 - the process that starts others needs none of these
import torch  # noqa: E402
from transformers import (  # noqa: E402
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

Trainer = Seq2SeqTrainer if STRATEGY == "own" else dstrat_transformers.with_strategy(Seq2SeqTrainer)


def rows(number):
    """Sequences, and their first tokens in reverse; of the latter different numbers count."""
    made = []
    for index in range(number):
        tokens = torch.randint(3, 32, (8,), generator=torch.Generator().manual_seed(index))
        labels = tokens[:6].flip(0).clone()
        labels[2 + index % 5 :] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def t5():
    torch.manual_seed(1)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **special, dropout_rate=0.0))


def accuracy(prediction):
    tokens, labels = prediction.predictions[:, 1:7], prediction.label_ids
    width = min(tokens.shape[1], labels.shape[1])
    counts = labels[:, :width] != -100
    return {"accuracy": float((tokens[:, :width] == labels[:, :width])[counts].mean())}


def main():
    options = Seq2SeqTrainingArguments(
        str(OUT),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        num_train_epochs=2,
        logging_steps=1,
        predict_with_generate=True,
        generation_config=GenerationConfig(max_length=8, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0),
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=t5(), args=options, train_dataset=rows(32), eval_dataset=rows(13), compute_metrics=accuracy)
    trainer.train()
    predictions = trainer.predict(rows(7), max_length=7, num_beams=2)
    history = trainer.state.log_history
    logged = {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "evaluations": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "accuracies": [entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry],
        "generated": np.asarray(predictions.predictions).tolist(),
    }
    if torch.distributed.get_rank() == 0:
        (OUT / "result.json").write_text(json.dumps(logged))


main()
if STRATEGY == "own":
    sys.stdout.flush()
    os._exit(0)  # a thread of torch's own process group may abort the process while it ends

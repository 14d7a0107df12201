"""A program that trains with trl's Trainers, as they are or with a strategy, and writes what they have logged.

python with_trl.py OUT STRATEGY DEVICES

STRATEGY is ``own`` for the Trainers themselves, under torchrun.
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

import torch  # noqa: E402 - the process that starts others needs none of these
import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer  # noqa: E402

WORDS = [f"w{number}" for number in range(60)]
VOCABULARY = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
# Processes of a mesh read the same batch.
OPTIONS = {
    "per_device_train_batch_size": 8 if STRATEGY.startswith("mesh") else 4,
    "learning_rate": 1e-2,
    "max_steps": 4,
    "logging_steps": 1,
    "bf16": False,
    "max_length": 32,
    "pad_to_multiple_of": 4,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def tokenizer():
    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def llama():
    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True))


def text(seed, length):
    return " ".join(WORDS[(seed * 7 + index * (seed % 5 + 1)) % 60] for index in range(length)) + " "


def trainer_of(trainer_class, **arguments):
    trainer_class = trainer_class if STRATEGY == "own" else dstrat_transformers.with_strategy(trainer_class)
    return trainer_class(model=llama(), processing_class=tokenizer(), **arguments)


def main():
    texts = [{"prompt": text(i, 3 + i % 4), "completion": text(i + 1, 4 + i % 5)} for i in range(48)]
    answers = [
        {"prompt": text(i, 3 + i % 4), "chosen": text(i + 1, 4 + i % 5), "rejected": text(i + 2, 3 + i % 6)}
        for i in range(48)
    ]
    trainers = {
        "sft": trainer_of(SFTTrainer, args=SFTConfig(str(OUT), **OPTIONS), train_dataset=Dataset.from_list(texts)),
        "dpo": trainer_of(
            DPOTrainer, ref_model=llama(), args=DPOConfig(str(OUT), **OPTIONS), train_dataset=Dataset.from_list(answers)
        ),
    }
    logged = {}
    for name, trainer in trainers.items():
        trainer.train()
        logged[name] = [
            {key: value for key, value in entry.items() if isinstance(value, float) and "/s" not in key}
            for entry in trainer.state.log_history
            if "loss" in entry
        ]
    if torch.distributed.get_rank() == 0:
        (OUT / "result.json").write_text(json.dumps(logged))


main()
if STRATEGY == "own":
    sys.stdout.flush()
    os._exit(0)  # a thread of torch's own process group may abort the process while it ends

"""Train a small Llama model with transformers' own Trainer and a strategy of dstrat.

For example::

    pip install ./packages/core ./packages/transformers ./packages/ddp ./packages/fsdp transformers accelerate
    python examples/transformers/hf_trainer.py --strategy ddp --devices 2
    python examples/transformers/hf_trainer.py --strategy fsdp --devices 2 --resume out/checkpoint-20

The result in ``<out>/model`` can be loaded by ``AutoModelForCausalLM.from_pretrained``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import dstrat_transformers


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="ddp", help="such as ddp, fsdp, deepspeed_stage_2 or mesh(tp=2)")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--resume", help="a checkpoint of this program, of any strategy")
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    """Train, evaluate, and save the model."""
    # In the processes that train only: the one that starts them needs none of these.
    from data import Windows, texts, train_tokenizer
    from torch.utils.data import Subset
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

    set_seed(1)
    documents = texts(256)
    tokenizer = train_tokenizer(documents, 512)
    windows = Windows(documents, tokenizer, 64)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    arguments = TrainingArguments(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        report_to="none",
    )
    trainer = dstrat_transformers.DstratTrainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Subset(windows, range(64, len(windows))),
        eval_dataset=Subset(windows, range(64)),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.out / "model"))


if __name__ == "__main__":
    chosen = read_options()
    dstrat_transformers.use(chosen.strategy, accelerator=chosen.accelerator, devices=chosen.devices)
    main(chosen)

"""Train a Llama model on the source code of Python's standard library, with any strategy.

For example::

    pip install ./packages/core ./packages/transformers ./packages/ddp ./packages/fsdp ./packages/deepspeed transformers
    python examples/transformers/train.py --strategy ddp --devices 2
    python examples/transformers/train.py --strategy fsdp --devices 2
    python examples/transformers/train.py --strategy deepspeed_stage_3 --devices 2
    python examples/transformers/train.py --strategy fsdp --devices 2 --own-loop

Or, with ``./packages/mesh`` too, with each axis of parallelism: replicas, shards, split layers, stages, divided
sequences and divided experts, and any of them together::

    python examples/transformers/train.py --strategy "mesh(dp_replicate=2)" --devices 2
    python examples/transformers/train.py --strategy "mesh(tp=2)" --devices 2
    python examples/transformers/train.py --strategy "mesh(pp=2, microbatches=4)" --devices 2
    python examples/transformers/train.py --strategy "mesh(cp=2)" --devices 2
    python examples/transformers/train.py --strategy "mesh(ep=2)" --experts 4 --devices 2
    python examples/transformers/train.py --strategy "mesh(pp=2, tp=2)" --devices 4

The model has 20 million parameters, or 100,000 with ``--small``, which trains in seconds on a laptop.  With every
strategy, the result in ``<out>/model`` can be loaded by ``AutoModelForCausalLM.from_pretrained``.  On several processes
strategies have the same losses where as many of them read different data; one device shuffles in another order.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from data import Windows, texts, train_tokenizer
from torch.utils.data import DataLoader, Subset
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import dstrat
from dstrat_transformers import GenerationCallback, HFModule, PretrainedCheckpoint, save_pretrained

SIZES: dict[bool, dict[str, int]] = {
    # 20 million parameters, and --small
    False: {"hidden_size": 384, "intermediate_size": 960, "num_hidden_layers": 10, "num_attention_heads": 6},
    True: {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
VOCABULARY = {False: 8192, True: 512}
KILOBYTES = {False: 4096, True: 256}
HELD_OUT = 64
"""Number of windows for validation only."""


def main() -> None:
    """Train, and save the model."""
    options = read_options()
    dstrat.seed_everything(options.seed, verbose=False)
    documents = texts(KILOBYTES[options.small])
    tokenizer = train_tokenizer(documents, VOCABULARY[options.small])
    windows = Windows(documents, tokenizer, options.length)
    training = Subset(windows, range(len(windows) - HELD_OUT))
    held_out = Subset(windows, range(len(windows) - HELD_OUT, len(windows)))
    if options.own_loop:
        strategy = dstrat.build(strategy=options.strategy, accelerator=options.accelerator, devices=options.devices)
        dstrat.OwnLoop(strategy).launch(train_by_hand, training, options, len(tokenizer))
        return
    trainer = dstrat.Trainer(
        strategy=options.strategy,
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
        max_steps=options.steps,
        val_check_interval=max(1, options.steps // 4),
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        callbacks=[
            GenerationCallback("def ", tokenizer, max_new_tokens=24, do_sample=True),
            PretrainedCheckpoint(options.out / "model", processing_class=tokenizer),
        ],
        default_root_dir=options.out,
    )
    trainer.fit(make_module(options, len(tokenizer)), Loaders(training, held_out, options.batch_size))
    if trainer.is_global_zero:
        print(f"validation loss {float(trainer.callback_metrics['val_loss']):.4f} nats per token")


class Loaders(dstrat.DataModule):
    """Loaders whose batches have a process's part of the windows of a step.

    Args:
        training: Windows for training.
        held_out: Windows for validation.
        batch_size: Windows of a step, over all processes.
    """

    def __init__(self, training: Any, held_out: Any, batch_size: int) -> None:
        super().__init__()
        self._training, self._held_out, self._batch_size = training, held_out, batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(self._training, batch_size=self._share(), shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self._held_out, batch_size=self._share())

    def _share(self) -> int:
        return divided(self._batch_size, self.trainer.strategy)


def train_by_hand(loop: dstrat.OwnLoop, training: Any, options: argparse.Namespace, vocabulary: int) -> None:
    """Train the same model in a custom loop, in each process of the job."""
    module = make_module(options, vocabulary)
    with loop.strategy.model_sharded_context():
        module.prepare(loop.strategy)
    loop.setup(module, HFModule.configure_optimizers, gradient_clip_val=1.0)
    batch_size = divided(options.batch_size, loop.strategy)
    loader = loop.training_loader(DataLoader(training, batch_size=batch_size, shuffle=True))
    while loop.steps_done < options.steps:
        for batch in loader:
            loss, labels = loop.compute(module.loss_and_weight, batch)
            loop.backward(loss, weight=labels)
            loop.step()
            loop.schedulers[0].step()
            if loop.steps_done % 10 == 0:
                loop.print(f"step {loop.steps_done}: loss {float(loop.all_reduce(loss.detach())):.4f}")
            if loop.steps_done == options.steps:
                break
    save_pretrained(module, options.out / "model", strategy=loop.strategy)


def make_module(options: argparse.Namespace, vocabulary: int) -> HFModule:
    """Return the module; each process creates its model, sharded if the strategy supports it."""
    sizes = dict(
        vocab_size=vocabulary,
        max_position_embeddings=options.length,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        **SIZES[options.small],
    )
    model: Any = partial(LlamaForCausalLM, LlamaConfig(**sizes))
    if options.experts:
        heads = sizes["num_attention_heads"]
        config = MixtralConfig(**sizes, num_key_value_heads=heads, num_local_experts=options.experts)
        model = partial(MixtralForCausalLM, config)
    return HFModule(
        model,
        scheduler="cosine",
        learning_rate=options.learning_rate,
        weight_decay=0.1,
        warmup_steps=0.1,
        num_training_steps=options.steps,
        gradient_checkpointing=options.gradient_checkpointing,
    )


def divided(batch_size: int, strategy: Any) -> int:
    """Return the batch size per process: those that split layers, stages or sequences read the same batch."""
    readers: int = strategy.distributed_sampler_kwargs.get("num_replicas", 1)
    if batch_size % readers:
        raise SystemExit(f"--batch-size {batch_size} cannot be divided between {readers} processes")
    return batch_size // readers


def read_options(*parents: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options of the command line, with those of further parsers."""
    parser = argparse.ArgumentParser(
        description="Train a Llama on the source code of Python's standard library.",
        parents=parents,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--strategy", default="auto", help="alias of a strategy; `dstrat strategies` lists them")
    add("--accelerator", default="auto", help="cpu, gpu, auto ...")
    add("--devices", default="auto", help="number or indices of the devices: 2, or 0,1, or auto")
    add("--precision", default="32-true", help="32-true, bf16-mixed, 16-mixed ...")
    add("--small", action="store_true", help="100,000 parameters instead of 20 million")
    add("--experts", type=int, default=0, help="experts of each layer, as in Mixtral; 0 for a Llama")
    add("--own-loop", action="store_true", help="use a custom training loop instead of the Trainer")
    add("--steps", type=int, default=400, help="optimizer steps")
    add("--batch-size", type=int, default=8, help="text windows per step, over all processes")
    add("--length", type=int, default=128, help="tokens per window")
    add("--learning-rate", type=float, default=1e-3, help="highest learning rate, after the warm-up")
    add("--gradient-checkpointing", action="store_true", help="recompute activations in the backward pass")
    add("--seed", type=int, default=0, help="random seed of the weights and of the data order")
    add("--out", type=Path, default=Path("runs/transformers"), help="folder for logs, checkpoints and the model")
    return parser.parse_args()


if __name__ == "__main__":
    main()

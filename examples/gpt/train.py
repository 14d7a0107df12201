"""Train a small GPT on the source code of Python's standard library, with any installed strategy.

For example::

    python examples/gpt/train.py --strategy ddp --devices 2
    python examples/gpt/train.py --strategy ddp_spawn --devices 2
    python examples/gpt/train.py --strategy fsdp --devices 2
    torchrun --nproc-per-node 2 examples/gpt/train.py --strategy ddp --devices 2
    python examples/gpt/train.py --accelerator gpu --precision bf16-mixed --steps 5000 --width 384

All output is written to ``runs/gpt``, or to the folder ``--out``.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from pathlib import Path

import torch
from data import LARGER_IN_VALIDATION, StandardLibrary
from model import GPT, Shape
from report import LossCurve, TokensPerSecond

from dstrat import CSVLogger, Logger, TensorBoardLogger, Trainer

VALIDATIONS = 8
"""Maximum number of validations in a training."""
VALIDATION_BYTES = 32 * 1024


def main() -> None:
    """Train, and print the results with a generated text."""
    options = read_options()
    started = time.perf_counter()
    torch.manual_seed(options.seed)
    shape = Shape(layers=options.layers, width=options.width, heads=options.heads, context=options.context)
    trainer = make_trainer(options)
    model = GPT(shape, learning_rate=options.learning_rate, steps=options.steps)
    data = StandardLibrary(context=shape.context, batch_size=options.batch_size)

    check_batch_size(options.batch_size, trainer.plan.world_size)
    trainer.print(trainer.plan)
    if not writes_tensorboard():
        trainer.print("no TensorBoard logs: tensorboard is not installed (pip install tensorboard)")
    trainer.fit(model, datamodule=data)
    # With strategy="ddp" every rank runs the lines from here on; with ddp_spawn only this process does.
    if trainer.is_global_zero:
        show(model, trainer, options, seconds=time.perf_counter() - started)


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the source code of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--strategy", default="auto", help="alias of a strategy; `dstrat strategies` lists them")
    add("--accelerator", default="auto", help="cpu, gpu, auto ...")
    add("--devices", default="auto", help="number or indices of the devices of each machine: 2, or 0,1, or auto")
    add("--num-nodes", type=int, default=1, help="number of machines")
    add("--precision", default="32-true", help="32-true, bf16-mixed, 16-mixed ...")
    add("--steps", type=int, default=800, help="optimizer steps")
    add("--batch-size", type=int, default=8, help="text windows per step, over all processes")
    add("--learning-rate", type=float, default=1.5e-3, help="highest learning rate, after the warm-up")
    add("--layers", type=int, default=4, help="number of transformer blocks")
    add("--width", type=int, default=192, help="embedding size")
    add("--heads", type=int, default=6, help="attention heads per block")
    add("--context", type=int, default=64, help="context length in bytes")
    add("--seed", type=int, default=0, help="random seed of the weights and of the data order")
    add("--out", type=Path, default=Path("runs/gpt"), help="folder for logs, checkpoint and loss curve")
    return parser.parse_args()


def make_trainer(options: argparse.Namespace) -> Trainer:
    """Return the Trainer for the options."""
    steps, batch_bytes = options.steps, options.batch_size * options.context
    return Trainer(
        strategy=options.strategy,
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        precision=options.precision,
        max_steps=steps,
        val_check_interval=math.ceil(steps / VALIDATIONS),
        limit_val_batches=math.ceil(VALIDATION_BYTES / (LARGER_IN_VALIDATION * batch_bytes)),
        log_every_n_steps=10,
        gradient_clip_val=1.0,
        callbacks=[TokensPerSecond(batch_bytes), LossCurve(options.out / "loss.png")],
        logger=loggers(options.out),
        default_root_dir=options.out,
    )


def loggers(out: Path) -> list[Logger]:
    """Return the loggers whose libraries are installed."""
    tensorboard = [TensorBoardLogger(out, name="tensorboard")] if writes_tensorboard() else []
    return [CSVLogger(out, name="csv"), *tensorboard]


def writes_tensorboard() -> bool:
    """Return whether tensorboard is installed."""
    return importlib.util.find_spec("tensorboard") is not None


def check_batch_size(batch_size: int, processes: int) -> None:
    """Exit unless the batch can be split evenly between the processes."""
    if batch_size < 1 or batch_size % processes:
        raise SystemExit(f"--batch-size {batch_size} cannot be divided between {processes} processes")


def show(model: GPT, trainer: Trainer, options: argparse.Namespace, *, seconds: float) -> None:
    """Print the results, and a text that the model generates."""
    checkpoint = trainer.checkpoint_callback.best_model_path
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"\n{parameters:,} parameters, {trainer.global_step} steps, {seconds:.0f} s")
    print(f"validation loss {float(trainer.callback_metrics['val_loss']):.3f} nats per byte")
    print(f"logs and loss.png are in {options.out}, the checkpoint is {checkpoint}")
    print("\nGenerated text after 'def ':\n")
    # From the checkpoint, because after a sharding strategy the module of each rank has only its shards.
    written = GPT.load_from_checkpoint(
        checkpoint, shape=model.shape, learning_rate=model.learning_rate, steps=model.steps
    ).write(b"def ", 400)
    print(written.decode(errors="replace"))


if __name__ == "__main__":
    main()

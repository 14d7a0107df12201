"""Keep a second process's model up to date while a Llama is trained with any strategy, as engines for sampling need it.

For example::

    python examples/transformers/engine.py --strategy fsdp --devices 2 --small
    python examples/transformers/engine.py --strategy "mesh(pp=2)" --devices 2 --small

Every ``--every`` steps the first process sends the weights to the engine, one tensor after the other, and the engine
generates text with them.  No process gathers the whole model.  At the end the engine writes its model to
``<out>/engine``, which equals that of ``<out>/model``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any

from data import Windows, texts, train_tokenizer
from safetensors.torch import load, save
from torch.utils.data import DataLoader
from train import KILOBYTES, VOCABULARY, make_module, read_options
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import dstrat
from dstrat_transformers import PretrainedCheckpoint, stream_pretrained

if TYPE_CHECKING:
    from pathlib import Path


class Engine(dstrat.Callback):
    """Starts the engine, and sends it the weights every so many steps."""

    def __init__(self, folder: Path, tokenizer: Any, every_n_steps: int) -> None:
        self.folder, self.tokenizer, self.every_n_steps = folder, tokenizer, every_n_steps

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Start the engine beside the first process, with the configuration of the model and its tokenizer."""
        if not trainer.is_global_zero:
            return
        self.tokenizer.save_pretrained(self.folder)
        module.model.config.save_pretrained(self.folder)
        with tempfile.TemporaryDirectory() as place, Listener(f"{place}/engine") as listener:
            arguments = [sys.executable, __file__, "--engine", f"{place}/engine", "--out", str(self.folder)]
            self.process = subprocess.Popen(arguments)
            self.connection = listener.accept()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - the hook's
        """Send the weights."""
        if trainer.global_step % self.every_n_steps == 0:
            self.send(trainer, module)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Send the last weights, and let the engine write its model."""
        self.send(trainer, module)
        if trainer.is_global_zero:
            self.connection.close()
            self.process.wait()

    def send(self, trainer: Any, module: Any) -> None:
        """Send each tensor as soon as it is gathered; every process takes part, and the first one gets them."""
        for name, tensor in stream_pretrained(module, trainer.strategy):
            self.connection.send_bytes(save({name: tensor.cpu().contiguous()}))
        if trainer.is_global_zero:
            self.connection.send_bytes(b"")
            print(f"step {trainer.global_step}: {self.connection.recv()!r}")


def run_engine(connection: Connection, folder: Path) -> None:
    """Generate text with the newest weights until the training ends, then write the model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).eval()
    prompt = tokenizer("def ", return_tensors="pt")
    while True:
        try:
            content = connection.recv_bytes()
        except EOFError:
            break
        if content:
            unexpected = model.load_state_dict(load(content), strict=False).unexpected_keys  # tied weights follow
            if unexpected:
                raise SystemExit(f"the engine's model has no {', '.join(unexpected)}")
        else:
            tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)
            connection.send(tokenizer.decode(tokens[0]))
    model.save_pretrained(folder)


def main(options: argparse.Namespace) -> None:
    """Train with an engine beside."""
    dstrat.seed_everything(options.seed, verbose=False)
    documents = texts(KILOBYTES[options.small])
    tokenizer = train_tokenizer(documents, VOCABULARY[options.small])
    trainer = dstrat.Trainer(
        strategy=options.strategy,
        accelerator=options.accelerator,
        devices=options.devices,
        max_steps=options.steps,
        callbacks=[
            Engine(options.out / "engine", tokenizer, options.every),
            PretrainedCheckpoint(options.out / "model"),
        ],
        default_root_dir=options.out,
    )
    loader = DataLoader(Windows(documents, tokenizer, options.length), batch_size=4, shuffle=True)
    trainer.fit(make_module(options, len(tokenizer)), loader)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--every", type=int, default=10, help="steps between two updates of the engine")
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # the address at which the engine gets the weights
    options = read_options(parser)
    if options.experts:  # their files have other tensors than the module: an engine converts them
        parser.error("the engine of this example runs a Llama without experts: leave --experts out")
    if options.engine:
        with Client(options.engine) as connection:
            run_engine(connection, options.out)
    else:
        main(options)

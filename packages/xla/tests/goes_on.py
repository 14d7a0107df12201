"""A program that trains up to a step, from a checkpoint of another strategy or torch, and saves one."""

import argparse

from xla_fit import QUIET, Regression, data

from dstrat import Callback, Trainer, seed_everything


class Saving(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, module):
        trainer.save_checkpoint(self.path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--start", required=True)
    parser.add_argument("--checkpoint", required=True)
    asked = parser.parse_args()
    seed_everything(3, verbose=False)
    trainer = Trainer(
        **QUIET,
        strategy=asked.strategy,
        accelerator="cpu",
        devices=asked.devices,
        max_epochs=-1,
        max_steps=asked.max_steps,
        callbacks=[Saving(asked.checkpoint)],
    )
    trainer.fit(Regression(scheduled=True), data(batch_size=8 // asked.devices, shuffle=False), ckpt_path=asked.start)


if __name__ == "__main__":
    main()

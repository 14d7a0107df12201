"""One peer of a collaboration, as a program; it prints a JSON line for each batch."""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule
from dstrat_hivemind import HivemindStrategy


class Net(TrainModule):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def samples(seed, count=4096):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=generator)
    weights = torch.linspace(-1, 1, 8).unsqueeze(1)
    return inputs, torch.tanh(inputs @ weights)


def loader(seed, batch_size=16):
    return DataLoader(TensorDataset(*samples(seed)), batch_size=batch_size, shuffle=True)


def test_loss(net):
    inputs, targets = samples(1000)
    with torch.no_grad():
        return float(nn.functional.mse_loss(net.layers(inputs), targets))


class Report(Callback):
    """Prints the progress, slows the training down, and ends it at an epoch, or when a file is there."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.end = time.monotonic() + 90

    def on_train_start(self, trainer, module):
        print(json.dumps({"addresses": trainer.strategy.visible_addresses}), flush=True)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        strategy = trainer.strategy
        line = {
            "loss": float(outputs["loss"] if isinstance(outputs, dict) else outputs),
            "epoch": strategy.collaboration_epoch,
            "peers": strategy.num_peers,
            "step": trainer.global_step,
            "failed": strategy.num_failed_averagings,
            "test_loss": test_loss(module),
        }
        print(json.dumps(line), flush=True)
        if trainer.global_step == self.arguments.raise_at:
            raise ZeroDivisionError
        time.sleep(self.arguments.seconds)
        is_done = strategy.collaboration_epoch >= self.arguments.until or self.arguments.stop_file.exists()
        trainer.should_stop = is_done or time.monotonic() > self.end


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--until", type=int, default=10**6)
    parser.add_argument("--target", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=0.04, help="of a batch")
    parser.add_argument("--raise-at", type=int, default=-1, help="a step")
    parser.add_argument("--stop-file", type=Path, default=Path("no such file"))
    parser.add_argument("--peers", default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    strategy = HivemindStrategy(
        target_batch_size=arguments.target,
        matchmaking_time=0.7,
        averaging_timeout=4.0,
        initial_peers=arguments.peers,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
    )
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Report(arguments)],
    )
    net = Net(arguments.seed)
    trainer.fit(net, loader(arguments.seed))
    print(json.dumps({"final": test_loss(net)}), flush=True)


if __name__ == "__main__":
    main()

"""One replica group, as a program; rank 0 prints a JSON line for each batch and one at the end."""

import argparse
import hashlib
import json
import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, ModelCheckpoint, Trainer, TrainModule, seed_everything
from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat_torchft import TorchFTDiLoCoStrategy, TorchFTStrategy
from dstrat_torchft.internals import StateTransport
from dstrat_torchft.replicas import Replicas


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets, indices = batch
        self.indices = indices.tolist()
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(count):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 8, generator=generator)
    targets = torch.tanh(inputs @ torch.linspace(-1, 1, 8).unsqueeze(1))
    return DataLoader(TensorDataset(inputs, targets, torch.arange(count)), batch_size=8, shuffle=True)


def checksum(trainer):
    """Of what groups have in common: with DiLoCo this is the state of the outer optimizer, not of the inner one."""
    outer = trainer.strategy.state_dict().get("outer")
    optimizer = trainer.optimizers[0].state_dict()["state"] if outer is None else [outer["weights"], outer["momentum"]]
    state = [trainer.strategy.module.state_dict(), optimizer]
    digest = hashlib.sha256()
    for tensor in _tensors(state):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


class Normed(Net):
    """A network with batch norm, and a mask, whose learning rate depends on the validation."""

    def __init__(self):
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(32))
        self.register_buffer("mask", torch.tensor([torch.finfo(torch.float32).min, 1 / 3]))

    def validation_step(self, batch, batch_idx):
        inputs, targets, _ = batch
        self.log("validated", nn.functional.mse_loss(self.layers(inputs), targets))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "validated"}}


class Report(Callback):
    """Prints the progress, and slows the training down: the more while a group is missing, so that it can join."""

    def __init__(self, seconds, seconds_alone):
        self.seconds, self.seconds_alone = seconds, seconds_alone

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        line = {
            "pid": os.getpid(),
            "time": time.time(),
            "step": trainer.global_step,
            "common": getattr(trainer.strategy, "current_step", None),
            "groups": getattr(trainer.strategy, "num_live_groups", None),
            "loss": float(outputs["loss"]),
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "scheduled": trainer.strategy.lr_schedulers[0].scheduler.last_epoch,
            "epoch": trainer.current_epoch,
            "indices": module.indices,
            "state": checksum(trainer),
            "bytes": Sent.bytes,
            "validated": float(trainer.callback_metrics.get("validated", 0)),
            "mask": module.mask.tolist() if hasattr(module, "mask") else [],
            "scale": trainer.strategy.precision_plugin.state_dict().get("scale"),
        }
        if trainer.is_global_zero:
            print(json.dumps(line), flush=True)
        strategy = trainer.strategy
        is_complete = self.seconds_alone is None or strategy.num_live_groups == strategy.options.num_groups
        time.sleep(self.seconds if is_complete else self.seconds_alone)


class Sent:
    """The bytes that this process has given to averages over the groups."""

    bytes = 0

    @classmethod
    def count(cls):
        average = Replicas.average

        def counted(replicas, tensor):
            cls.bytes += tensor.nbytes
            average(replicas, tensor)

        Replicas.average = counted


def die_in_exchange(number):
    """Kill this process in an exchange, after the groups have met, and while the others average with it."""
    average = Replicas.average

    def average_unless_dying(replicas, tensor):
        if replicas.current_step + 1 == number and tensor.numel() > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        average(replicas, tensor)

    Replicas.average = average_unless_dying


def refuse_at(step):
    """Let this group vote against a step, after its gradients were averaged with those of the others."""
    commit, refused = Replicas.commit, []

    def commit_unless_refused(replicas):
        if replicas.current_step + 1 == step and not refused:
            refused.append(step)
            replicas._manager.report_error(RuntimeError("refused for a test"))
        return commit(replicas)

    Replicas.commit = commit_unless_refused


def fail_transfer(number, rank):
    """Let a transfer of the state to this process fail, as if its sender had died."""
    receive, received = StateTransport.recv_checkpoint, []

    def receive_unless_failing(transport, *args, **options):
        received.append(number)
        if len(received) == number and int(os.environ.get("LOCAL_RANK", "0")) == rank:
            raise ConnectionResetError("failed for a test")
        return receive(transport, *args, **options)

    StateTransport.recv_checkpoint = receive_unless_failing


class Hold(Callback):
    """Stops the process after a step, or the training until a file exists."""

    def __init__(self, stop_at, wait_at, file):
        self.stop_at, self.wait_at, self.file = stop_at, wait_at, file

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        while trainer.global_step == self.wait_at and not self.file.exists():
            time.sleep(0.02)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="torchft_ddp")
    parser.add_argument("--every", type=int, default=5, help="of torchft_diloco")
    parser.add_argument("--die-in", type=int, default=-1, help="an exchange")
    parser.add_argument("--refuse-at", type=int, default=-1, help="a step or exchange, once")
    parser.add_argument("--fail-transfer", type=int, default=0, help="the number of one, from 1")
    parser.add_argument("--failing-rank", type=int, default=0, help="of --fail-transfer")
    parser.add_argument("--stop-at", type=int, default=-1, help="a step after which the process stops")
    parser.add_argument("--wait-at", type=int, default=-1, help="a step after which it waits for --file")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--validate-every", type=int, default=0, help="batches, with batch norm")
    parser.add_argument("--scales-losses", action="store_true", help="trains by 16-mixed")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--group", type=int)
    parser.add_argument("--groups", type=int)
    parser.add_argument("--lighthouse")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=0.0, help="after a batch")
    parser.add_argument("--seconds-alone", type=float, help="instead, while a group is missing")
    parser.add_argument("--min-replica-size", type=int, default=1)
    parser.add_argument("--quorum-timeout", type=float, default=20.0)
    parser.add_argument("--folder", type=Path, help="of checkpoints, from which the training goes on")
    parser.add_argument("--max-restarts", type=int, default=0)
    arguments = parser.parse_args()
    refuse_at(arguments.refuse_at)
    die_in_exchange(arguments.die_in)
    Sent.count()
    fail_transfer(arguments.fail_transfer, arguments.failing_rank)
    seed_everything(arguments.seed, verbose=False)
    torch.set_num_threads(1)
    strategy = arguments.strategy
    if strategy != "ddp":
        is_diloco = strategy == "torchft_diloco"
        cls = partial(TorchFTDiLoCoStrategy, every=arguments.every) if is_diloco else TorchFTStrategy
        strategy = cls(
            lighthouse=arguments.lighthouse,
            replica_group=arguments.group,
            num_replica_groups=arguments.groups,
            min_replica_size=arguments.min_replica_size,
            replica_timeout=timedelta(seconds=20),
            quorum_timeout=timedelta(seconds=arguments.quorum_timeout),
        )
    precision = None
    if arguments.scales_losses:  # the scale grows every few steps
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        precision = MixedPrecision("16-mixed", scaler=scaler)
    checkpoints = []
    if arguments.folder is not None:
        folder = arguments.folder / os.environ["REPLICA_GROUP_ID"]
        checkpoints.append(ModelCheckpoint(dirpath=folder, every_n_train_steps=5, save_top_k=-1))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=arguments.devices,
        max_steps=arguments.steps,
        max_epochs=-1,
        max_restarts=arguments.max_restarts,
        accumulate_grad_batches=arguments.accumulate,
        val_check_interval=arguments.validate_every or 1.0,
        num_sanity_val_steps=0,
        precision=precision,
        logger=False,
        enable_checkpointing=arguments.folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            Report(arguments.seconds, arguments.seconds_alone),
            Hold(arguments.stop_at, arguments.wait_at, arguments.file),
            *checkpoints,
        ],
    )
    net, validation = Net(), None
    if arguments.validate_every:
        net, validation = Normed(), DataLoader(loader(64).dataset, batch_size=64)
    trainer.fit(net, loader(arguments.samples), validation, resume="auto" if checkpoints else None)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()[:16]
    print(json.dumps({"rank": trainer.global_rank, "weights": digest}), flush=True)
    if trainer.is_global_zero:
        print(json.dumps({"final": digest}), flush=True)
        print(json.dumps({"values": [value for p in net.parameters() for value in p.flatten().tolist()]}), flush=True)


if __name__ == "__main__":
    main()

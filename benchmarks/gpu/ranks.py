"""Strategies of several processes on one GPU: NCCL with one rank, and two ranks over gloo on the same device."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from checks import Device, Figure, Net, NotHereError, figure, make_loader, run_checks
from torch import nn

import dstrat
from dstrat.checkpoint.torch_file import TorchCheckpointIO

LARGE = 2**29  # parameters of the module whose memory is watched: 2 GiB


class _FailsOnce(dstrat.Callback):
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the known signature
        raise RuntimeError("a step that fails")


def _fit_fail_and_fit_again(device: Device, strategy: str) -> str:
    device.trainer(strategy=strategy).fit(Net(), make_loader(), make_loader())
    try:
        device.trainer(strategy=strategy, callbacks=[_FailsOnce()]).fit(Net(), make_loader())
    except Exception as error:  # noqa: BLE001 - of the rank's process or of this one
        assert "a step that fails" in str(error), error  # noqa: PT017 - there is no pytest here
    else:
        raise AssertionError("the failure did not arrive")
    trainer = device.trainer(strategy=strategy)
    trainer.fit(Net(), make_loader())
    return f"over {trainer.strategy.accelerator.process_group_backend}"


def ddp(device: Device) -> str:
    """With ddp and one rank: a fit, one that fails, and another one in the same process."""
    return _fit_fail_and_fit_again(device, "ddp")


def fsdp(device: Device) -> str:
    """With fsdp and one rank: a fit, one that fails, and another one in the same process."""
    return _fit_fail_and_fit_again(device, "fsdp")


def deepspeed(device: Device) -> str:
    """deepspeed_stage_3 with one rank: a fit, one that fails, and another one in the same process."""
    device.require("cuda", "cpu")
    if not importlib.util.find_spec("deepspeed"):
        raise NotHereError("it needs deepspeed")
    return _fit_fail_and_fit_again(device, "deepspeed_stage_3")


def _two_ranks(device: Device, **options: Any) -> dstrat.Trainer:
    """Return a Trainer with two ranks: on the one GPU, as NCCL refuses that, over gloo."""
    from dstrat_ddp import DDPStrategy

    if device.type != "cuda":
        return device.trainer(strategy=DDPStrategy(start_method="spawn"), devices=2, **options)
    devices = [device.first, device.first]
    strategy = DDPStrategy(parallel_devices=devices, process_group_backend="gloo", start_method="spawn")
    return device.trainer(strategy=strategy, devices="auto", **options)


class _Saves(dstrat.Callback):
    """Saves at the end of training, and prints which processes have memory on the GPU."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, module: Any) -> None:  # noqa: ARG002 - the known signature
        trainer.save_checkpoint(self.path)
        if trainer.is_global_zero and shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
            print("processes on the GPU:", subprocess.run(query, capture_output=True, text=True, check=False).stdout)


def two_ranks(device: Device) -> str:
    """Two ranks on one device: fit, a checkpoint in one file, its resumption, predictions on the host."""
    with tempfile.TemporaryDirectory() as folder:
        path, net = Path(folder) / "saved.ckpt", Net()
        trainer = _two_ranks(device, plugins=[TorchCheckpointIO()], callbacks=[_Saves(path)])
        trainer.fit(net, make_loader(), make_loader())
        resumed = _two_ranks(device, plugins=[TorchCheckpointIO()], max_epochs=2)
        resumed.fit(net, make_loader(), ckpt_path=path)
        predictions: Any = resumed.predict(net, make_loader())
        assert {batch.device.type for batch in predictions} == {"cpu"}
        return f"{resumed.global_step} steps, {len(predictions)} batches of predictions"


def seeds(device: Device) -> str:
    """Dropout of spawned ranks follows the program's seed."""
    drawn = []
    for seed in (1, 1, 2):
        net = Net()
        dstrat.seed_everything(seed)
        trainer = _two_ranks(device, limit_train_batches=1)
        trainer.fit(net, make_loader())
        drawn.append([parameter.detach().cpu() for parameter in net.parameters()])
    one, again, other = drawn
    assert all(map(torch.equal, one, again)), "the same seed gives other masks"
    assert not all(map(torch.equal, one, other)), "another seed gives the same masks"
    return "seeds 1, 1 and 2"


class _Peak(dstrat.Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:  # noqa: ARG002 - the known signature
        if trainer.strategy.root_device.type != "cpu":
            self.bytes = torch.accelerator.max_memory_allocated(trainer.strategy.root_device)


def peak_of_setup(device: Device) -> list[Figure]:
    """With fsdp a module is sharded without a second copy of it on the device."""
    device.require("cuda", "simulated_gpu")
    from dstrat_fsdp import FSDPStrategy

    width = int((LARGE / 16) ** 0.5) if device.type == "cuda" else 64
    net, peak = Net(), _Peak()
    net.layers = nn.Sequential(nn.Linear(64, width), *(nn.Linear(width, width) for _ in range(16)), nn.Linear(width, 8))
    size = sum(parameter.nbytes for parameter in net.parameters())
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device.first)
    before = torch.accelerator.memory_allocated(device.first)
    strategy = FSDPStrategy(auto_wrap_policy={nn.Linear})
    device.trainer(strategy=strategy, callbacks=[peak], limit_train_batches=1).fit(net, make_loader())
    return [
        figure(
            "fsdp: most memory of the setup, over the module's",
            (peak.bytes - before) / size,
            "x",
            1.25,
            f"{size >> 20} MiB",
        )
    ]


if __name__ == "__main__":
    run_checks(ddp, fsdp, two_ranks, seeds, peak_of_setup, deepspeed)

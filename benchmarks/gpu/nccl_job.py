"""A training whose ranks share one GPU over NCCL, for nccl.py.

``python nccl_job.py --strategy "mesh(pp=2)" --devices 2 --out out.json``; it needs no GPU with ``--accelerator cpu``.
"""

from __future__ import annotations

import os

# NCCL refuses two ranks of one host on a GPU.  Ranks of several hosts it connects by sockets.
os.environ["NCCL_HOSTID"] = f"rank-{os.environ.get('RANK', '0')}"

import argparse
import json
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from typing_extensions import override

import dstrat
from dstrat.builtin.accelerators.cuda import CUDAAccelerator
from dstrat.testing.ranks.layouts import Attention, LayoutNet

if TYPE_CHECKING:
    from collections.abc import Sequence

FAULTY_RANK, FAULTY_STEP, SAVED_AT = 1, 3, 3


class OneGPU(CUDAAccelerator):
    """The first GPU, as often as there are ranks."""

    def parse_devices(self, devices: Any) -> list[int]:
        """Return an index for each rank."""
        return list(range(int(devices)))

    def get_parallel_devices(self, indices: Sequence[int]) -> list[torch.device]:
        """Return the first GPU for each of them."""
        return [torch.device("cuda", 0) for _ in indices]


class Net(LayoutNet):
    """A language model of which every axis of parallelism has something to divide."""

    def __init__(self) -> None:
        super().__init__(_split_heads, seed=1)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)


def _split_heads(module: Any) -> None:
    strategy = module.trainer.strategy
    if getattr(strategy, "tensor_parallel_size", 1) == 1:
        return
    plan = {**dict.fromkeys(("query", "key", "value"), ColwiseParallel()), "out": RowwiseParallel()}
    for layer in module.modules():
        if isinstance(layer, Attention):
            parallelize_module(layer, strategy.device_mesh["tp"], plan)


class Fails(dstrat.Callback):
    """Lets one rank raise, die, or sleep in a step."""

    def __init__(self, fault: str | None) -> None:
        self.fault = fault

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - the hook's
        """Fail in one step of one rank."""
        if self.fault is None or (trainer.global_rank, batch_idx) != (FAULTY_RANK, FAULTY_STEP):
            return
        if self.fault == "raises":
            raise RuntimeError("a step that fails")
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


class Saves(dstrat.Callback):
    """Saves in the middle of an epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - likewise
        """Save after one step."""
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.path)


def main() -> None:
    """Train, resume from the middle, and write the losses of both."""
    parser = argparse.ArgumentParser(description="Train with ranks that share one GPU.")
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--accelerator", default="cuda")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--fault", choices=["raises", "killed", "sleeps"])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    options = parser.parse_args()
    if options.accelerator == "simulated_gpu":
        from dstrat.testing import simulated_gpu

        simulated_gpu.load()
    folder = options.out.with_suffix("")
    settings: dict[str, Any] = {
        "accelerator": OneGPU() if options.accelerator == "cuda" else options.accelerator,
        "devices": options.devices,
        "precision": options.precision,
    }
    limit = timedelta(seconds=10 if options.fault else 120)

    def fit(*callbacks: dstrat.Callback, ckpt_path: Path | None = None) -> list[float]:
        net, strategy = Net(), dstrat.build(strategy=options.strategy, **settings)
        strategy.timeout = limit
        trainer = dstrat.Trainer(
            strategy=strategy,
            **settings,
            max_epochs=1,
            gradient_clip_val=0.2,
            callbacks=list(callbacks),
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(net, ckpt_path=ckpt_path)
        return net.losses

    losses = fit(Fails(options.fault), Saves(folder / "middle"))
    resumed = fit(ckpt_path=folder / "middle")
    if os.environ.get("RANK", "0") == "0":
        peak = torch.cuda.max_memory_allocated() / 2**20 if options.accelerator == "cuda" else 0.0
        options.out.write_text(json.dumps({"losses": losses, "resumed": resumed, "peak": peak}), encoding="utf-8")


if __name__ == "__main__":
    main()

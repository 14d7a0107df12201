"""Each path of a run once, on one device: evaluation, predictions, overflow, memory that runs out, a failed kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch
from checks import Device, Net, NotHereError, make_loader, run_checks
from torch import nn

SECONDS = 170  # of a program that should end by itself

FAILED_KERNEL = """
import torch
from checks import Device, Net, make_loader
import dstrat

class Broken(Net):
    def training_step(self, batch, batch_idx):
        table = torch.zeros(2, 2, device=self.device)
        return self.loss(batch) + table[torch.full((4,), 1000, device=self.device)].sum()

class Says(dstrat.Callback):
    def on_exception(self, trainer, module, exception):
        print("hook of the failure", flush=True)
    def teardown(self, trainer, module, stage):
        print("hook of the teardown", flush=True)

if {simulated}:
    from dstrat.testing import simulated_gpu
    simulated_gpu.load()
Device(accelerator={accelerator!r}, type={type!r}).trainer(callbacks=[Says()]).fit(Broken(), make_loader())
"""


def every_entry_point(device: Device) -> str:
    """fit, validate, test and predict; predictions are on the host."""
    trainer, net = device.trainer(), Net()
    trainer.fit(net, make_loader(), make_loader())
    for evaluate in (trainer.validate, trainer.test):
        [metrics] = evaluate(net, make_loader())
        assert metrics, metrics
    predictions: Any = trainer.predict(net, make_loader())
    assert {batch.device.type for batch in predictions} == {"cpu"}, predictions[0].device
    return f"{len(predictions)} batches of predictions"


def device_without_index(device: Device) -> str:
    """SingleDeviceStrategy of a type of device without an index."""
    from dstrat.builtin.single_device import SingleDeviceStrategy

    trainer = device.trainer(strategy=SingleDeviceStrategy(device=device.type), devices="auto")
    trainer.fit(Net(), make_loader())
    assert trainer.strategy.root_device == device.first, trainer.strategy.root_device
    return str(trainer.strategy.root_device)


def determinism(device: Device) -> str:
    """deterministic=True after a run without it, twice with the same weights."""
    device.trainer().fit(Net(), make_loader())
    weights = []
    for _ in range(2):
        net = Net()
        device.trainer(deterministic=True).fit(net, make_loader())
        weights.append([parameter.detach().cpu() for parameter in net.parameters()])
    assert all(map(torch.equal, *weights))
    return f"CUBLAS_WORKSPACE_CONFIG={os.environ.get('CUBLAS_WORKSPACE_CONFIG')}"


class _Overflows(Net):
    def __init__(self, *, fused: bool) -> None:
        super().__init__(fused=fused)
        self.kept: list[bool] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - the known signature
        self.before = self.layers[0].weight.detach().clone()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - likewise
        self.kept.append(torch.equal(self.before, self.layers[0].weight))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 2 else loss


def overflow(device: Device) -> str:
    """An overflow with 16-mixed skips its step alone, fused and not."""
    device.require("cuda", "simulated_gpu")
    for fused in (False, True):
        net = _Overflows(fused=fused)
        device.trainer(precision="16-mixed").fit(net, make_loader())
        assert net.kept == [False, False, True, False, False, False], (fused, net.kept)
    return "the third of six steps"


class _Large(Net):
    num_bytes = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.held = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        return super().training_step(batch, batch_idx)


def memory_that_runs_out(device: Device) -> str:
    """After an error of memory the next run has it again."""
    device.require("cuda", "simulated_gpu")
    from dstrat.testing import simulated_gpu

    net = _Large()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device.first)
        net.num_bytes = 2 * total
    else:
        net.num_bytes = 2**30
    limit = simulated_gpu.limited_memory(2**20) if device.type == "simgpu" else torch.no_grad()
    try:
        with limit:
            device.trainer().fit(net, make_loader())
    except torch.OutOfMemoryError as error:
        notes = [str(error).partition("\n")[0], *getattr(error, "__notes__", ())]
    else:
        raise AssertionError("there was no error")
    device.trainer().fit(Net(), make_loader())
    if device.type == "cuda":
        assert torch.cuda.mem_get_info(device.first)[0] > 0.8 * free
    return "; ".join(notes)[:200]


def failed_kernel(device: Device) -> str:
    """An error on the device ends the program, and hooks of failure and teardown run."""
    program = FAILED_KERNEL.format(simulated=device.type == "simgpu", accelerator=device.accelerator, type=device.type)
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - for PYTHONPATH
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    last = done.stderr.strip().splitlines()[-1:] or ["no output"]
    assert done.returncode == 1, (done.returncode, last)
    assert done.stdout.split("\n")[:2] == ["hook of the failure", "hook of the teardown"], done.stdout + done.stderr
    return last[0][:150]


def compiled_with_graphs(device: Device) -> str:
    """A logged loss outlives the replay of its CUDA graph."""
    device.require("cuda")
    if torch.version.hip:
        raise NotHereError("it needs CUDA graphs")
    net = Net()
    net.layers = torch.compile(net.layers, mode="reduce-overhead")  # type: ignore[assignment]  # it is called alike
    trainer = device.trainer(log_every_n_steps=3)
    trainer.fit(net, make_loader(9))
    return f"loss {float(trainer.logged_metrics['loss_epoch']):.4f}"


def matrix_products(device: Device) -> str:
    """float32 products are as precise as the program asks, before and after a run."""
    before = torch.get_float32_matmul_precision()
    device.trainer(precision="32-true").fit(Net(), make_loader())
    assert torch.get_float32_matmul_precision() == before
    x = torch.randn(512, 512, device=device.first)
    exact = (x.double().cpu() @ x.double().cpu()).float()
    errors = {}
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            errors[precision] = float(((x @ x).cpu() - exact).abs().max())
    finally:
        torch.set_float32_matmul_precision(before)
    return ", ".join(f"{precision}: largest error {error:.2g}" for precision, error in errors.items())


def layers_that_share_a_norm(device: Device) -> str:
    """A layer of batch norm with two names stays one when it is synchronized."""
    device.require("cuda")
    net = Net()
    norm = nn.BatchNorm1d(128)
    net.layers = nn.Sequential(nn.Linear(64, 128), norm, nn.Linear(128, 128), norm, nn.Linear(128, 8))
    device.trainer(strategy="ddp", sync_batchnorm=True).fit(net, make_loader())
    first, second = net.layers[1], net.layers[3]
    assert first is second, (first, second)
    return type(first).__name__


if __name__ == "__main__":
    run_checks(
        every_entry_point,
        device_without_index,
        overflow,
        memory_that_runs_out,
        failed_kernel,
        determinism,
        matrix_products,
        layers_that_share_a_norm,
        compiled_with_graphs,
    )

"""Trainings on a CUDA device, and the same on the CPU where that has the operations."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tests.warm_program import WarmProgram
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule
from dstrat.builtin.accelerators.cpu import CPUAccelerator
from dstrat.builtin.accelerators.cuda import CUDAAccelerator

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
DEVICES = ["cpu", CUDA]
STEPS, BATCH, WIDTH = 6, 16, 32
PROGRAM = Path(__file__).with_name("two_ranks_on_a_device.py")
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
HAS_FAIRSCALE = importlib.util.find_spec("fairscale") is not None


class Net(TrainModule):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.losses = []

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self(x).float(), x.float())
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader(steps=STEPS, **options):
    x = torch.randn(steps * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size=BATCH, **options)


def trainer_on(device, strategy="single_device", **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    quiet |= {"enable_model_summary": False, "max_steps": STEPS, "devices": 1, "accelerator": device}
    return Trainer(strategy=strategy, **quiet | options)


def losses_on(device, strategy="single_device", net=None, **options):
    net = net or Net()
    trainer_on(device, strategy, **options).fit(net, loader())
    return [float(loss) for loss in net.losses]


def losses_by_hand(net=None):
    net, losses = net or Net(), []
    optimizer = net.configure_optimizers()
    for (x,) in loader():
        loss = nn.functional.mse_loss(net(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class NetWithSGD(Net):
    """For float16, in which the squares of gradients that Adam keeps become zero."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def deepspeed(alias):
    return pytest.param(alias, marks=pytest.mark.skipif(not HAS_DEEPSPEED, reason="deepspeed is not installed"))


ON_CUDA = [
    "single_device",
    "ddp",
    "fsdp",
    "fsdp_cpu_offload",
    "model_parallel",
    *(deepspeed(f"deepspeed_stage_{stage}") for stage in range(4)),
    *(deepspeed(f"deepspeed_stage_{stage}_offload") for stage in (1, 2, 3)),
    pytest.param("ddp_fully_sharded", marks=pytest.mark.skipif(not HAS_FAIRSCALE, reason="fairscale is not installed")),
]
ON_CPU = ["single_device", "ddp", "fsdp", "model_parallel"]  # the families test the rest on the CPU


@pytest.mark.parametrize("strategy", ON_CPU)
def test_losses_on_the_cpu_are_those_of_a_hand_written_loop(strategy):
    assert losses_on("cpu", strategy) == pytest.approx(losses_by_hand(), rel=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("strategy", ON_CUDA)
def test_losses_on_a_gpu_are_those_of_a_hand_written_loop(strategy):
    assert losses_on("cuda", strategy) == pytest.approx(losses_by_hand(), rel=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "16-true", "bf16-true"])
@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp", deepspeed("deepspeed_stage_2")])
def test_lower_precisions_come_close_to_float32_on_a_gpu(strategy, precision):
    if "deepspeed" in strategy and precision == "16-true":
        pytest.skip("DeepSpeed has no 16-true")
    losses = losses_on("cuda", strategy, NetWithSGD(), precision=precision)
    assert losses == pytest.approx(losses_by_hand(NetWithSGD()), rel=0.05)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-true", "bf16-true"])
def test_lower_precisions_come_close_to_float32_on_the_cpu(precision):
    losses = losses_on("cpu", net=NetWithSGD(), precision=precision)
    assert losses == pytest.approx(losses_by_hand(NetWithSGD()), rel=0.05)


class CompilesInHook(Net):
    """Compiles its layers when the strategy is known, before it wraps the module."""

    def configure_model(self):
        self.layers.compile(backend="aot_eager" if self.trainer.strategy.root_device.type == "cpu" else "inductor")


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # the losses are those of float32
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before the fit", "in configure_model"])
def test_a_compiled_module_gives_the_same_losses(device, strategy, is_before):
    net = Net() if is_before else CompilesInHook()
    if is_before:
        net.compile(backend="aot_eager" if device == "cpu" else "inductor")
    assert losses_on(device, strategy, net) == pytest.approx(losses_by_hand(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "device"),
    [
        ("ddp", "cpu"),
        pytest.param("fsdp", "cpu", marks=pytest.mark.variant),
        pytest.param("ddp", "cuda", marks=pytest.mark.cuda),
        pytest.param("fsdp", "cuda", marks=pytest.mark.cuda),
    ],
)
def test_two_ranks_share_a_device_over_gloo(device, strategy, tmp_path):
    out = tmp_path / "losses.json"
    WarmProgram(PROGRAM, strategy, device, str(out)).run(timeout=400)
    assert json.loads(out.read_text()) == pytest.approx(losses_by_hand(), rel=1e-3)


# Synchronization and overlap


class NoSynchronization(Callback):
    """Lets torch raise where a training step waits for the device."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx > 1:  # the first ones make the optimizer's state and load kernels
            set_sync_debug_mode(trainer, "error")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        set_sync_debug_mode(trainer, "default")


def set_sync_debug_mode(trainer, mode):
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp", "model_parallel"])
def test_a_step_does_not_wait_for_the_device(device, strategy, tmp_path):
    options = {"logger": True, "enable_progress_bar": True, "log_every_n_steps": 2, "default_root_dir": tmp_path}
    try:
        losses = losses_on(device, strategy, callbacks=[NoSynchronization()], **options)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert len(losses) == STEPS


@pytest.mark.cuda
def test_batches_are_copied_while_the_step_before_is_computed():
    class Large(Net):
        def training_step(self, batch, batch_idx):
            x = batch[0]
            for _ in range(20):
                x = x @ x / 64
            return self(x[:, :WIDTH]).square().mean()

    x = torch.randn(8 * 2048, 2048)
    batches = DataLoader(TensorDataset(x), batch_size=2048, pin_memory=True, num_workers=2)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        trainer_on("cuda", max_steps=8).fit(Large(), batches)
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    copies = [span for span in spans if "HtoD" in span[0] and "Pinned" in span[0]]
    kernels = [span for span in spans if "Mem" not in span[0]]
    overlapping = [c for c in copies if any(k[1] < c[2] and c[1] < k[2] for k in kernels)]
    assert len(overlapping) >= 4, f"{len(overlapping)} of {len(copies)} pinned copies overlap with a kernel"


# Checkpoints and random states


class SaveAtEnd(Callback):
    """Saves while shards are there."""

    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, module):
        trainer.save_checkpoint(self.path)


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_a_resumed_training_is_bit_identical_with_dropout(device, strategy, tmp_path, deterministic):
    through, stopped, resumed = Net(0.3), Net(0.3), Net(0.3)
    torch.manual_seed(5)
    trainer_on(device, strategy, deterministic=True).fit(through, loader())
    torch.manual_seed(5)
    saving = {"callbacks": [SaveAtEnd(tmp_path / "half")], "max_steps": STEPS // 2}
    trainer_on(device, strategy, deterministic=True, **saving).fit(stopped, loader())
    torch.manual_seed(99)  # the state of the generators comes from the checkpoint
    trainer_on(device, strategy, deterministic=True).fit(resumed, loader(), ckpt_path=tmp_path / "half")
    assert [float(x) for x in stopped.losses + resumed.losses] == [float(x) for x in through.losses]


MOVES = [("cpu", "cpu"), ("cpu", "cuda"), ("cuda", "cpu")]


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"), [pytest.param(*move, marks=[pytest.mark.cuda] * ("cuda" in move)) for move in MOVES]
)
@pytest.mark.parametrize("strategy", ["single_device", "fsdp"])
def test_checkpoints_move_between_cpu_and_gpu(saved_on, loaded_on, strategy, tmp_path):
    saving = {"callbacks": [SaveAtEnd(tmp_path / "half")], "max_steps": STEPS // 2}
    trainer_on(saved_on, strategy, **saving).fit(Net(), loader())
    resumed = Net()
    trainer_on(loaded_on, "single_device").fit(resumed, loader(), ckpt_path=tmp_path / "half")
    assert [float(x) for x in resumed.losses] == pytest.approx(losses_by_hand()[STEPS // 2 :], rel=1e-4)


@pytest.mark.cuda
def test_the_random_state_of_a_gpu_is_set_again():
    cuda, device = CUDAAccelerator(), torch.device("cuda", 0)
    state = cuda.get_random_state(device)
    first = torch.rand(8, device=device)
    cuda.set_random_state(device, state)
    assert torch.equal(torch.rand(8, device=device), first)


# Out of memory


class TooLarge(Net):
    def training_step(self, batch, batch_idx):
        if batch[0].is_cuda:
            return torch.empty(1 << 45, device=batch[0].device).sum()
        raise torch.OutOfMemoryError("CPU out of memory: as the device says it")


class Summarized(CPUAccelerator):
    def memory_summary(self, device):
        return f"the summary of {device}"


def test_running_out_of_memory_is_logged_with_rank_and_summary(caplog):
    with pytest.raises(torch.OutOfMemoryError):
        trainer_on(Summarized()).fit(TooLarge(), loader())
    (message,) = [record.getMessage() for record in caplog.records if "ran out of memory" in record.getMessage()]
    assert message == "rank 0 ran out of memory on cpu\nthe summary of cpu"


@pytest.mark.cuda
def test_running_out_of_memory_on_a_gpu_is_logged_with_its_summary(caplog):
    with pytest.raises(torch.OutOfMemoryError):
        trainer_on("cuda").fit(TooLarge(), loader())
    assert "rank 0 ran out of memory on cuda:0" in caplog.text
    assert "PyTorch CUDA memory summary" in caplog.text

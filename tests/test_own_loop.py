"""A strategy in a loop that is written by hand: the same losses, resumed, moved and supervised, without the Trainer."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.warm_program import WITHOUT_DSTRAT, WarmProgram
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import dstrat
from dstrat import Callback, OwnLoop, Trainer
from dstrat.errors import MisuseError, RankFailedError
from dstrat_ddp import DDPStrategy
from dstrat_fsdp import FSDPStrategy, ModelParallelStrategy

if TYPE_CHECKING:
    from types import ModuleType

    from dstrat import Strategy

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "examples" / "own_loop" / "train.py"
STEPS, GLOBAL_BATCH = 12, 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def data() -> TensorDataset:
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3] - x[:, 3:])


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def train(
    loop: OwnLoop,
    *,
    path: Path | None = None,
    save_at: tuple[int, ...] = (),
    load: int = 0,
    shuffle: bool = False,
    accumulate: int = 1,
    clip: float | None = None,
) -> list[float]:
    """Train for some steps in epochs of four; return the loss of each step over all processes.

    Checkpoints, by the number of their step, are in the folder ``path``.
    """
    strategy, net = loop.strategy, Net()
    torch.manual_seed(3)  # the order of the data
    size = GLOBAL_BATCH // accumulate // strategy.distributed_sampler_kwargs.get("num_replicas", 1)
    loop.setup(net, adam, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    loader = loop.training_loader(DataLoader(data(), batch_size=size, shuffle=shuffle))
    losses, group = [], []
    if load:
        assert path is not None
        losses = loop.load_checkpoint(path / str(load))["losses"]
    while loop.steps_done < STEPS:
        for x, y in loader:
            loss = loop.compute(net.loss, x, y)
            loop.backward(loss)
            group.append(loss.detach())
            if not loop.step():
                continue
            losses.append(strategy.reduce(torch.stack(group).mean()).item())
            group = []
            if loop.steps_done in save_at:
                assert path is not None
                loop.save_checkpoint(path / str(loop.steps_done), {"losses": losses})
            if loop.steps_done == STEPS:
                break
    return losses


STRATEGIES = ["ddp", "fsdp"]


def strategy_of(name: str) -> Strategy | str:
    """Return the strategy, such that a test can launch it."""
    if name == "ddp":
        return DDPStrategy(start_method="fork")
    if name == "fsdp":
        return FSDPStrategy(start_method="fork")
    if name == "model_parallel":
        return ModelParallelStrategy(tensor_parallel_size=2, start_method="fork")
    if name == "deepspeed_stage_3":
        pytest.importorskip("deepspeed")
        from dstrat_deepspeed import DeepSpeedStrategy

        return DeepSpeedStrategy(stage=3, start_method="forkserver")
    return name


def loop_of(name: str, devices: int, **options: Any) -> OwnLoop:
    return OwnLoop(dstrat.build(strategy=strategy_of(name), accelerator="cpu", devices=devices, **options))


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return loop_of("single_device", 1).launch(train)


def test_with_accumulation_and_clipping_the_losses_are_those_of_one_device() -> None:
    expected = loop_of("single_device", 1).launch(train, clip=0.05)
    for name in STRATEGIES:
        assert loop_of(name, 2).launch(train, accumulate=2, clip=0.05) == pytest.approx(expected, rel=1e-5), name


def test_an_engine_that_steps_and_clips_by_itself_has_the_losses_of_one_device_and_resumes(tmp_path: Path) -> None:
    expected = loop_of("single_device", 1).launch(train, clip=0.05)
    engine: dict[str, Any] = {"accumulate": 2, "clip": 0.05, "path": tmp_path}
    losses = loop_of("deepspeed_stage_3", 2).launch(train, save_at=(6,), **engine)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert loop_of("deepspeed_stage_3", 2).launch(train, load=6, **engine) == losses


def train_split(loop: OwnLoop) -> list[float]:
    """Train with layers that are split over the processes that share a batch."""
    net, losses = Net(), []
    plan = {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()}
    parallelize_module(net, loop.strategy.device_mesh["tensor_parallel"], plan)
    loop.setup(net, adam)
    for x, y in loop.training_loader(DataLoader(data(), batch_size=GLOBAL_BATCH)):
        loss = loop.compute(net.loss, x, y)
        loop.backward(loss)
        loop.step()
        losses.append(loss.item())
    return losses


def test_layers_are_split_by_the_mesh_of_the_strategy(expected: list[float]) -> None:
    assert loop_of("model_parallel", 2).launch(train_split) == pytest.approx(expected[:4], rel=1e-5)


def count(loop: OwnLoop, samples: int) -> tuple[float, float, bool]:
    """Return how many samples were evaluated, and the sum of their numbers, over all processes."""
    net = Net()
    loop.setup(net)
    numbers = torch.arange(samples, dtype=torch.float32)
    loader = loop.evaluation_loader(DataLoader(TensorDataset(numbers), batch_size=2))
    seen = torch.zeros(2)
    with loop.evaluation():
        for (batch,) in loader:
            assert not loop.compute(net.layers, batch[:, None].expand(-1, 6)).requires_grad
            seen += torch.stack((torch.tensor(float(len(batch))), batch.sum()))
    seen = loop.strategy.reduce(seen, reduce_op="sum")
    return seen[0].item(), seen[1].item(), loader.is_divided


@pytest.mark.parametrize(("name", "samples", "is_divided"), [("ddp", 9, True), ("fsdp", 9, False), ("fsdp", 8, True)])
def test_evaluation_weighs_each_sample_alike(name: str, samples: int, is_divided: bool) -> None:
    number, total, divided = loop_of(name, 2).launch(count, samples)
    assert divided == is_divided
    assert number == (samples if divided else 2 * samples)
    assert total / number == (samples - 1) / 2


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_mixed_precision_stays_near_the_losses_of_one_device(name: str, precision: str, expected: Any) -> None:
    losses = loop_of(name, 2, precision=precision).launch(train)
    assert losses == pytest.approx(expected, rel=0.05)
    assert losses != pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resumed_loop_has_the_same_losses_to_the_last_bit(name: str, tmp_path: Path) -> None:
    moments = (4, 6)  # at the end of an epoch, and in the middle of one
    whole = loop_of(name, 2).launch(train, path=tmp_path, shuffle=True, save_at=moments)
    assert len(whole) == STEPS
    for moment in moments:
        assert loop_of(name, 2).launch(train, path=tmp_path, shuffle=True, load=moment) == whole


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(("ddp", 2), ("single_device", 1), marks=pytest.mark.variant),
        (("single_device", 1), ("fsdp", 2)),
        (("fsdp", 2), ("ddp", 4)),
    ],
)
def test_a_loop_moves_between_strategies_in_the_middle_of_an_epoch(
    first: tuple[str, int], second: tuple[str, int], tmp_path: Path, expected: list[float]
) -> None:
    loop_of(*first).launch(train, path=tmp_path, save_at=(6,))
    moved = loop_of(*second).launch(train, path=tmp_path, load=6)
    assert moved == pytest.approx(expected, rel=1e-5)


class Normed(nn.Module):
    """A plain module with buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]  # torch's modules return Any


def train_compiled(loop: OwnLoop, compiles: str, path: Path, loads: Path | None = None) -> tuple[list[float], set[str]]:
    """Return the losses of two steps, and the names in the module's state."""
    net: Any = Normed()
    if compiles == "layers":  # the second one within the first one
        net.layers[1][0] = torch.compile(net.layers[1][0], backend="eager")
        net.layers[1] = torch.compile(net.layers[1], backend="eager")
    elif compiles == "module":
        net = torch.compile(net, backend="eager")
    loop.setup(net, adam)
    if loads is not None:
        loop.load_checkpoint(loads)
    losses = []
    for x, y in (data()[:24], data()[24:]):
        loss = nn.functional.mse_loss(loop.compute(net, x), y)
        loop.backward(loss)
        loop.step()
        losses.append(loss.item())
    loop.save_checkpoint(path)
    names = set(loop.strategy.module.state_dict())
    net.load_state_dict({f"_orig_mod.{name}": value for name, value in net.state_dict().items()})
    return losses, names


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch's compiler
@pytest.mark.parametrize(("name", "devices"), [("single_device", 1), ("ddp", 2), ("fsdp", 2)])
def test_compiled_and_plain_modules_load_the_checkpoints_of_each_other(name: str, devices: int, tmp_path: Path) -> None:
    def train(compiles: str, loads: Path | None = None) -> Any:
        path = tmp_path / f"{compiles} after {loads and loads.name}"
        return path, *loop_of(name, devices).launch(train_compiled, compiles, path, loads)

    path, losses, names = train("no")
    _, resumed, _ = train("no", path)
    for compiles in ("layers", "module"):
        compiled_path, *result = train(compiles)
        assert result == [pytest.approx(losses, rel=1e-5), names]
        for _, further, _ in (train("no", compiled_path), train(compiles, path)):
            assert further == pytest.approx(resumed, rel=1e-5)


def fails(loop: OwnLoop, how: str) -> None:
    loop.setup(Net(), adam)
    if loop.strategy.global_rank == 1:
        if how == "dies":
            os._exit(7)
        raise ValueError("what is this batch?")
    loop.strategy.barrier()


@pytest.mark.parametrize(("how", "message"), [("raises", "ValueError: what is this batch"), ("dies", "code 7")])
def test_a_rank_that_fails_ends_the_job_and_is_named(how: str, message: str) -> None:
    with pytest.raises(RankFailedError, match=message) as caught:
        loop_of("ddp", 2).launch(fails, how)
    assert caught.value.rank == 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_loop_has_the_losses_of_one_device_also_when_it_is_launched_again(name: str, expected: list[float]) -> None:
    loop = loop_of(name, 2)
    assert loop.launch(train) == loop.launch(train) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_example_runs_its_script_in_each_rank_and_goes_on_on_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--strategy", "ddp", "--accelerator", "cpu", "--devices", "2", "--epochs", "1"]
    printed = WarmProgram(PROGRAM, *arguments, "--folder", str(tmp_path)).run()
    assert printed.startswith("epoch 1, step 64: ")
    loop_of("single_device", 1).launch(runpy.run_path(str(PROGRAM))["train"], 2, tmp_path)
    assert capsys.readouterr().out.startswith("epoch 2, step 128: ")


def test_nothing_of_an_own_loop_imports_the_trainer(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        f"{WITHOUT_DSTRAT}import runpy\n"
        f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"
        "print([name for name in sys.modules if name.startswith('dstrat')])"
    )
    printed = WarmProgram(script, "--accelerator", "cpu", "--devices", "1", "--epochs", "1").run()
    loaded = printed.splitlines()[-1]
    assert "'dstrat.own_loop." in loaded
    assert "'dstrat.training" not in loaded


# The GPT of the demo


@pytest.fixture
def gpt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "gpt"))
    import model

    return model  # type: ignore[no-any-return]  # mypy does not know the folder


def make_gpt(gpt: ModuleType) -> Any:
    torch.manual_seed(0)
    return gpt.GPT(gpt.Shape(layers=2, width=32, heads=2, context=16), learning_rate=1e-2, steps=10, warmup=3)


def text() -> DataLoader[Any]:
    text = (Path(torch.__file__).parent / "optim" / "adam.py").read_bytes()[: 17 * 40]
    return DataLoader(torch.frombuffer(bytearray(text), dtype=torch.uint8).view(40, 17), batch_size=4, shuffle=True)


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(trainer.strategy.reduce(outputs["loss"]).item())

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: Any) -> None:
        self.losses = state_dict["losses"]


def train_gpt(loop: OwnLoop, net: Any) -> list[float]:
    loop.setup(net, type(net).configure_optimizers, gradient_clip_val=1.0)
    loader, losses = loop.training_loader(text()), []
    while loader.epoch < 2:
        for windows in loader:
            loss = loop.compute(net.loss, windows)
            loop.backward(loss)
            loop.step()
            loop.schedulers[0].step()
            losses.append(loop.strategy.reduce(loss.detach()).item())
    return losses


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_gpt_of_the_demo_has_the_losses_of_the_trainer_to_the_last_bit(gpt: ModuleType, precision: str) -> None:
    losses = Losses()
    trainer = Trainer(
        strategy="ddp_fork",
        accelerator="cpu",
        devices=2,
        precision=precision,
        max_epochs=2,
        gradient_clip_val=1.0,
        callbacks=losses,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(make_gpt(gpt), text())
    net = make_gpt(gpt)
    own = OwnLoop(dstrat.build(strategy="ddp_fork", accelerator="cpu", devices=2, precision=precision))
    by_hand = own.launch(train_gpt, net)
    assert len(by_hand) == 10
    assert by_hand == losses.losses


def step_early(loop: OwnLoop) -> list[str]:
    """Step optimizers that were made before and after the module was set up; return the error of the first."""
    net = Net()
    early = torch.optim.SGD(net.parameters(), lr=0.1)
    loop.setup(net, adam)
    late = torch.optim.SGD(net.parameters(), lr=0.1)
    loop.backward(loop.compute(net.loss, *data()[:4]))
    late.step()
    try:
        early.step()
    except MisuseError as error:
        return [str(error)]
    finally:
        loop.barrier()
    return []


def test_an_optimizer_made_before_sharding_raises_in_its_step() -> None:
    (message,) = loop_of("fsdp", 2).launch(step_early)
    assert message.startswith(
        "the SGD steps 'layers.0.weight' and 5 other parameters, in place of which Net has others"
    )


def test_an_optimizer_made_before_ddp_steps() -> None:
    assert loop_of("ddp", 2).launch(step_early) == []

"""Several modules that take turns in a loop of one's own, as the two of a GAN: exact losses on each strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dstrat
from dstrat import OwnLoop
from dstrat.errors import RankFailedError
from dstrat_ddp import DDPStrategy
from dstrat_fsdp import FSDPStrategy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dstrat import Strategy

STEPS, GLOBAL_BATCH = 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


def network(seed: int, inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 10), Block(), Block(), nn.Linear(10, outputs))


def data(batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    real, noise = (torch.randn(STEPS * GLOBAL_BATCH, size, generator=generator) for size in (3, 4))
    return DataLoader(TensorDataset(real, noise), batch_size=batch_size)


def optimizers(generator: nn.Module, discriminator: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(module.parameters(), lr=0.01) for module in (generator, discriminator)]


def score(output: torch.Tensor, label: float) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(output, torch.full_like(output, label))


def step(
    compute: Callable[..., Any],
    backward: Any,
    step: Any,
    pair: Any,
    chosen: Any,
    real: torch.Tensor,
    noise: torch.Tensor,
) -> torch.Tensor:
    """Train both for one batch, as DCGAN does: the generator's forward pass serves both."""
    generator, discriminator = pair
    of_generator, of_discriminator = chosen
    real_loss = score(compute(discriminator, real), 1.0)
    backward(real_loss)
    fake = compute(generator, noise)
    fake_loss = score(compute(discriminator, fake.detach()), 0.0)
    backward(fake_loss)
    step(of_discriminator)
    loss = score(compute(discriminator, fake), 1.0)
    backward(loss)
    step(of_generator)
    return torch.stack([real_loss, fake_loss, loss]).detach()


def train(loop: OwnLoop, path: Path | None = None, save_at: int = 0) -> list[list[float]]:
    pair = network(0, 4, 3), network(1, 3, 1)
    loop.setup({"generator": pair[0], "discriminator": pair[1]}, optimizers)
    size = GLOBAL_BATCH // loop.strategy.distributed_sampler_kwargs.get("num_replicas", 1)
    losses = []
    loader = loop.training_loader(data(size))
    if path is not None and not save_at:
        losses = loop.load_checkpoint(path)["losses"]
    for real, noise in loader:
        found = step(loop.compute, loop.backward, loop.step, pair, loop.optimizers, real, noise)
        losses.append(loop.all_reduce(found).tolist())
        if len(losses) == save_at:
            loop.save_checkpoint(path, {"losses": losses})  # type: ignore[arg-type]  # given with save_at
    return losses


@pytest.fixture(scope="module")
def by_hand() -> list[list[float]]:
    """The losses of plain torch."""
    pair = network(0, 4, 3), network(1, 3, 1)
    both, losses = optimizers(*pair), []

    def update(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        pair[0 if optimizer is both[0] else 1].zero_grad()

    def compute(module: nn.Module, x: torch.Tensor) -> Any:
        return module(x)

    for real, noise in data(GLOBAL_BATCH):
        pair[1].zero_grad()  # the generator's loss has left gradients there
        losses.append(step(compute, torch.Tensor.backward, update, pair, both, real, noise).tolist())
    return losses


def loop_of(strategy: Strategy | str, devices: int = 2) -> OwnLoop:
    return OwnLoop(dstrat.build(strategy=strategy, accelerator="cpu", devices=devices))


def test_on_one_device_the_losses_are_those_of_plain_torch_to_the_last_bit(by_hand: Any) -> None:
    assert loop_of("single_device", 1).launch(train) == by_hand


@pytest.mark.parametrize("cls", [DDPStrategy, FSDPStrategy])
def test_two_modules_have_the_losses_of_one_device_and_resume(
    cls: type[Strategy], tmp_path: Path, by_hand: Any
) -> None:
    losses = loop_of(cls(start_method="fork")).launch(train, tmp_path / "saved", save_at=3)
    assert torch.tensor(losses).allclose(torch.tensor(by_hand), rtol=1e-5, atol=0)
    assert loop_of(cls(start_method="fork")).launch(train, tmp_path / "saved") == losses
    moved = loop_of("single_device", 1).launch(train, tmp_path / "saved")
    assert torch.tensor(moved[3:]).allclose(torch.tensor(by_hand[3:]), rtol=1e-4, atol=0)


def test_a_strategy_with_one_optimizer_says_what_is_possible() -> None:
    pytest.importorskip("deepspeed")
    from dstrat_deepspeed import DeepSpeedStrategy

    with pytest.raises(
        RankFailedError, match="where modules take turns as in a GAN, choose a strategy that steps each"
    ):
        loop_of(DeepSpeedStrategy(stage=1, start_method="forkserver")).launch(train)

"""The modules that the kit trains, and their data: small, quick to learn, and each with one thing that can go wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typing_extensions import override

from dstrat.training.module.train_module import TrainModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

GLOBAL_BATCH = 8
_WIDTH = 6
_OUTPUTS = 3


class Net(TrainModule):
    """A regression of which every batch is noted: which samples, and what loss.

    The steps note them, as that is what a strategy runs; hooks do where a backend compiles whole steps.

    Args:
        shape: The samples, the optimizer and the like, see :class:`~dstrat.testing.ranks.fits.Fit`.
        configure: What the author wants done in ``configure_model``.
        rank: Which rank makes it.
    """

    def __init__(self, shape: Any, configure: Callable[[TrainModule], None] | None, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(self.seed_in(rank))  # also of the random numbers in steps, such as those of dropout
        self.shape = shape
        self.configure = configure
        self.losses: list[float] = []
        self.seen: list[list[int]] = []
        self.make_layers()

    def seed_in(self, rank: int) -> int:  # noqa: ARG002 - modules derived from it use it
        """Return the seed of a rank: by default all ranks create the same parameters."""
        return 0

    def make_layers(self) -> None:
        """Create the layers."""
        self.layers = nn.Sequential(nn.Linear(_WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``(batch, 6)`` to ``(batch, 3)``."""
        outputs: Tensor = self.layers(inputs)
        return outputs

    def configure_model(self) -> None:
        if self.configure is not None:
            self.configure(self)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, numbers = batch
        loss = nn.functional.mse_loss(self(inputs), targets)
        if not self.is_traced:
            self.note_losses(loss, numbers)
        return loss

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.is_traced:
            self.note_losses(outputs["loss"] * self.trainer.accumulate_grad_batches, batch[2])

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets, numbers = batch
        if not self.is_traced:
            self.seen.append(numbers.tolist())
        self.log("mean_loss", nn.functional.mse_loss(self(inputs), targets), batch_size=len(numbers))
        self.log("samples", torch.ones_like(numbers).sum().float(), reduce_fx="sum")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, _, numbers = batch
        if not self.is_traced:
            self.seen.append(numbers.tolist())
        self(inputs)
        predicted: Tensor = numbers
        return predicted

    @override
    def on_validation_batch_end(
        self,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self.is_traced:
            self.seen.append(batch[2].tolist())

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    @property
    def is_traced(self) -> bool:
        """Whether steps run once and without values, so that hooks note what they would."""
        trainer = self._trainer  # None for a module in plain torch
        return trainer is not None and trainer.strategy.compiled_steps() is not None

    def note_losses(self, loss: Tensor, numbers: Tensor) -> None:
        """Note the loss of a batch and its samples, or of each of the equal batches of a compiled call."""
        losses = loss.detach().reshape(-1).tolist()
        self.losses += losses
        self.seen += [chunk.tolist() for chunk in numbers.chunk(len(losses))]

    def configure_optimizers(self) -> Any:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.shape.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=1.0)
        # In float16 the usual eps is 0, and so the root of a small second moment.
        return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4 if self.shape.precision == "16-true" else 1e-8)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.shape.samples, shuffle=self.shape.shuffle)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.shape.evaluated, shuffle=False)

    test_dataloader = predict_dataloader = val_dataloader

    def _loader(self, samples: int, *, shuffle: bool) -> DataLoader[Any]:
        strategy = self.trainer.strategy
        readers = strategy.distributed_sampler_kwargs.get("num_replicas", 1) * strategy.replicas_per_process
        return DataLoader(dataset(samples), batch_size=max(1, GLOBAL_BATCH // readers), shuffle=shuffle)


class Tied(Net):
    """Two layers share their weight."""

    def make_layers(self) -> None:
        first, second = nn.Linear(16, 16), nn.Linear(16, 16)
        second.weight = first.weight
        self.layers = nn.Sequential(nn.Linear(_WIDTH, 16), nn.Tanh(), first, nn.Tanh(), second, nn.Linear(16, 3))


class Unused(Net):
    """One layer never takes part."""

    def make_layers(self) -> None:
        super().make_layers()
        self.never_used = nn.Linear(2, 2)


class Frozen(Net):
    """The first layer is not trained."""

    def make_layers(self) -> None:
        super().make_layers()
        self.layers[0].requires_grad_(requires_grad=False)


class Random(Net):
    """Draws random numbers in each step, as dropout does."""

    def make_layers(self) -> None:
        super().make_layers()
        self.layers.insert(2, nn.Dropout(0.2))


class SeededByRank(Net):
    """Each rank initializes it in its own way, parameters and buffer."""

    scale: Tensor

    def seed_in(self, rank: int) -> int:
        return rank

    def make_layers(self) -> None:
        super().make_layers()
        self.register_buffer("scale", 0.5 + torch.rand(_WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs * self.scale)


class Normed(Net):
    """Has a layer whose statistics are those of the batch that a rank reads."""

    def make_layers(self) -> None:
        self.layers = nn.Sequential(
            nn.Linear(_WIDTH, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, _OUTPUTS)
        )


class Scheduled(Net):
    """Two groups of parameters, each with learning rates of its own, which are noted with every batch."""

    def make_layers(self) -> None:
        super().make_layers()
        self.rates: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.is_traced:
            self.note_rates()
        return super().training_step(batch, batch_idx)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.is_traced:
            self.note_rates()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.rates += self.rates[-1:] * (len(self.losses) - len(self.rates))  # of all batches of a compiled call

    def note_rates(self) -> None:
        """Note the learning rates as they are."""
        self.rates.append([float(group["lr"]) for group in self.trainer.strategy.optimizers[0].param_groups])

    def configure_optimizers(self) -> Any:
        first, *remaining_layers = self.layers
        remaining = [parameter for layer in remaining_layers for parameter in layer.parameters()]
        groups: list[dict[str, Any]] = [{"params": list(first.parameters()), "lr": 0.02}, {"params": remaining}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.8**step, lambda step: 1 / (1 + step)])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Manual(Net):
    """Optimizes by itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


class ActingNet(Net):
    """Does something in a batch: in its step, or, where a compiled step runs no Python again, before the next one."""

    at_batch = 1

    def make_layers(self) -> None:
        super().make_layers()
        self.runs_of_step = 0

    def interrupt(self) -> None:
        """Do what the module is for."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.runs_of_step += 1
        if self.runs_of_step == self.at_batch + 1:  # in a compiled step it stays 1
            self.interrupt()
        return super().training_step(batch, batch_idx)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.runs_of_step <= self.at_batch < batch_idx:
            self.interrupt()


class Breaking(ActingNet):
    """Raises in its second batch, in every rank."""

    def interrupt(self) -> None:
        raise ValueError("every rank breaks here")


class Linear(Net):
    """A single layer, so that gradients are easy to compare."""

    def make_layers(self) -> None:
        self.layers = nn.Sequential(nn.Linear(_WIDTH, _OUTPUTS))


class Skipping(Linear):
    """Its second batch has no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.seen.append([])
            return None
        return super().training_step(batch, batch_idx)


class Weighted(Linear):
    """Its losses have weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "weight": weight_of(batch[2].tolist())}


def weight_of(numbers: Sequence[int]) -> float:
    """Return the weight of a batch with these samples, in which batches differ."""
    return 1.0 + sum(numbers) % 5


class Streamed(Linear):
    """Its data has no length, and ranks that read different data have different numbers of batches."""

    def train_dataloader(self) -> DataLoader[Any]:
        sampler = self.trainer.strategy.distributed_sampler_kwargs
        reader, readers = sampler.get("rank", 0), sampler.get("num_replicas", 1)
        return DataLoader(_Stream(self.shape.samples, reader, readers), batch_size=None)


class _Stream(IterableDataset[Any]):
    def __init__(self, samples: int, reader: int, readers: int) -> None:
        self.samples, self.reader, self.readers = samples, reader, readers

    def __iter__(self) -> Iterator[list[Tensor]]:
        tensors, size = dataset(self.samples).tensors, max(1, GLOBAL_BATCH // self.readers)
        for number in range(3 + self.reader):
            first = number * GLOBAL_BATCH + self.reader * size
            yield [tensor[first : first + size] for tensor in tensors]


NETS: dict[str, type[Net]] = {
    "plain": Net,
    "tied": Tied,
    "unused": Unused,
    "frozen": Frozen,
    "random": Random,
    "linear": Linear,
    "skipping": Skipping,
    "streamed": Streamed,
    "weighted": Weighted,
    "own": SeededByRank,
    "normed": Normed,
    "scheduled": Scheduled,
    "manual": Manual,
    "breaking": Breaking,
}


def dataset(samples: int) -> TensorDataset:
    """Return inputs ``(samples, 6)``, targets ``(samples, 3)`` and the samples' numbers; of uneven sizes."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, _WIDTH, generator=generator)
    inputs *= torch.linspace(0.5, 1.5, samples)[:, None]  # so that no two ranks have gradients of one size
    # A linear function, which the nets learn in a few steps.
    return TensorDataset(inputs, inputs[:, :3] - inputs[:, 3:], torch.arange(samples))

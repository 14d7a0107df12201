"""Random divisions of data into batches, groups and ranks, against a loop in one process that knows the right gradient.

A program records which samples are in each batch of each rank.  From this record, :func:`right_result` computes in
double precision what an optimizer step is defined to be: the mean of the batches of all ranks that are in it,
weighted if they have weights.  It also computes the loss of all validation samples.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tests.differential.differences import close, first_difference
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import dstrat
from dstrat import Callback, GradientAccumulationScheduler, OwnLoop, Trainer, TrainModule
from dstrat.plugins.catalog import get_catalog

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

FEATURES = 4
ALIASES = (
    *("ddp", "ddp", "fsdp", "fsdp", "model_parallel", "mesh", "bagua", "ddp_sharded"),
    *(f"deepspeed_stage_{stage}" for stage in range(4)),
)
IN_DOUBLE = ("single_device", "ddp", "fsdp", "model_parallel", "mesh", "bagua")
"""Strategies that train in double precision; DeepSpeed and FairScale do so in single precision."""


def missing_library(alias: str) -> str | None:
    """Return the library that a strategy needs, and this environment does not have."""
    library = {"ddp_sharded": "fairscale"}.get(alias, alias.partition("_stage")[0])
    return library if library in ("deepspeed", "fairscale") and find_spec(library) is None else None


@dataclass
class Comparison:
    """A random program beside the hand-written loop.

    Attributes:
        spec: The program.
        differences: How its result differs from the right one, in words.
        largest: The largest difference of a parameter, relative to the largest parameter if that is above 1.
    """

    spec: dict[str, Any]
    differences: list[str] = field(default_factory=list)
    largest: float = 0.0


def compare_division(seed: int, folder: Path) -> Comparison:
    """Compare the result of a random program with the right one."""
    spec = random_division(seed)
    comparison = Comparison(spec)
    record: list[Batch] = []
    for number, run in enumerate(spec["runs"]):
        try:
            batches, result = _trained(spec, run, folder, resumes=number > 0)
        except Exception as error:
            comparison.differences.append(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
            return comparison
        is_saved = (folder / "saved").exists() and number == 0
        record += batches[: run["kept"]] if is_saved else batches
        if not is_saved:  # also a training that has ended before the checkpoint
            break
    right = right_result(spec, record)
    # Weights of losses are in single precision.
    tolerance = 2e-5 if spec["precision"] != "64-true" else 1e-6 if spec["weights"] else 1e-9
    comparison.differences += _unread_samples(spec, record)
    for name, value in right.items():
        if not close(value, result[name], tolerance):
            comparison.differences.append(f"{name}: {first_difference(value, result[name], tolerance)}")
    pairs = [
        (one, other)
        for name in right["parameters"]
        for one, other in zip(right["parameters"][name], result["parameters"][name], strict=True)
    ]
    comparison.largest = max(abs(one - other) for one, other in pairs) / max(1.0, *(abs(one) for one, _ in pairs))
    return comparison


# Programs


def random_division(seed: int) -> dict[str, Any]:
    """Return a random program: data, its division into batches, ranks and groups, and one or two runs."""
    draw = random.Random(seed)
    world_size = draw.choice((1, 2, 2, 2, 3, 3, 4))
    alias = "single_device" if world_size == 1 else draw.choice(ALIASES)
    in_double = alias in IN_DOUBLE
    source = draw.choice(("table", "table", "table", "stream", "shards"))
    spec: dict[str, Any] = {
        "seed": seed,
        "alias": alias,
        "loop": draw.choice((*["trainer"] * 6, "own", "manual")),
        "precision": "64-true" if in_double else "32-true",
        "optimizer": draw.choice(("sgd", "momentum", "adam") if in_double else ("sgd", "momentum")),
        "decay": draw.choice((None, 0.9)),
        "clip": draw.choice((None, None, 0.05)),
        "source": source,
        "samples": draw.randint(3, 40),
        "batch_size": draw.randint(1, 4),
        "drop_last": draw.random() < 0.3,  # below: of data with a batch for each rank
        "shuffle": draw.random() < 0.5,
        "lengths": [draw.randint(1, 9) for _ in range(4)],  # batches of each rank, of streams and shards
        # Steps without a loss, which are an error on several ranks.
        "skips": sorted(draw.sample(range(8), draw.choice((0, 1, 2)))) if world_size == 1 else [],
        "limit": draw.choice((None, None, draw.randint(1, 6))),
        "max_steps": draw.choice((-1, -1, draw.randint(1, 8))),
        "epochs": draw.randint(1, 3),
    }
    # The weight of a batch is that of its samples, as the number of its tokens; without one each batch counts as one.
    spec["weights"] = draw.choice((None, None, "number", "tensor"))
    spec["validated"] = draw.choice((0, 0, draw.randint(1, 13)))  # samples
    if spec["max_steps"] > 0:  # a training that ends within an epoch does not validate
        spec["validated"] = 0
    spec["layout"] = draw.choice((1, 2)) if world_size == 4 else 1  # replicas of shards, of mesh
    spec["drop_last"] = spec["drop_last"] and spec["samples"] >= 4 * spec["batch_size"]
    spec["groups"] = draw.choice((None, None, {0: draw.randint(1, 4), 1: draw.randint(1, 4)}))
    first = {"world_size": world_size, "accumulate": draw.choice((1, 2, 3, 4)), "kept": None}
    spec["runs"] = [first]
    if spec["loop"] == "own":
        spec |= {"skips": [], "limit": None, "max_steps": -1, "groups": None, "decay": None, "validated": 0}
    if spec["loop"] == "manual":  # which divides by the weights only, and cannot clip by the Trainer's argument
        spec |= {"skips": [], "groups": None, "decay": None, "weights": spec["weights"] or "number"}
    if spec["loop"] != "own" and draw.random() < 0.5:
        first["kept"] = draw.randint(1, 9)
        second = {"world_size": world_size, "accumulate": draw.choice((1, 2, 3, 4)), "kept": None}
        if source == "table" and alias not in ("single_device", "ddp_sharded") and draw.random() < 0.4:
            second["world_size"] = draw.choice((2, 3, 4)) if spec["layout"] == 1 else 4
        spec["runs"].append(second)
        # Sharded gradients within a group are left out on another number of ranks, FairScale's always: both are logged.
        is_resharded = second["world_size"] != world_size and alias not in ("ddp", "bagua")
        if alias == "ddp_sharded" or is_resharded:
            first["accumulate"], spec["groups"] = 1, None
    return spec


class Table(Dataset[Any]):
    """Pairs of samples and their indices."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        x, y = sample(index)
        return x, y, index


def weight_of(indices: Any) -> int:
    """Return the number of tokens of the samples; some have none."""
    return sum(int(index) % 5 for index in indices)


def sample(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
    return x, x.sum(0, keepdim=True).sin() + index % 3


class Stream(IterableDataset[Any]):
    """Some samples of a rank, of unknown number."""

    def __init__(self, table: Sequence[Any]) -> None:
        self.table = table

    def __iter__(self) -> Iterator[Any]:
        return iter(self.table)


def loader_of(spec: dict[str, Any], rank: int) -> DataLoader[Any]:
    options = {"batch_size": spec["batch_size"], "drop_last": spec["drop_last"] and spec["source"] == "table"}
    if spec["source"] == "table":
        return DataLoader(Table(spec["samples"]), shuffle=spec["shuffle"], **options)
    count = spec["lengths"][rank] * spec["batch_size"] - (spec["batch_size"] > 1 and rank % 2)
    own: Any = [Table(100 * (rank + 1))[100 * rank + index] for index in range(count)]
    return DataLoader(Stream(own) if spec["source"] == "stream" else own, **options)


class Net(TrainModule):
    """A small network that writes which samples it has seen to a file."""

    def __init__(self, spec: dict[str, Any], path: Path) -> None:
        super().__init__()
        torch.manual_seed(spec["seed"])
        self.layers = layers()
        self.spec, self.path = spec, path
        self.seen: list[Any] = []

    def train_dataloader(self) -> DataLoader[Any]:
        torch.manual_seed(self.spec["seed"] + 1)
        return loader_of(self.spec, self.global_rank)

    def val_dataloader(self) -> Any:
        return DataLoader(Table(self.spec["validated"]), batch_size=3) if self.spec["validated"] else []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx in self.spec["skips"]:
            return None
        return {"loss": self.loss(batch), **weight_argument(self.spec, batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def loss(self, batch: Any) -> torch.Tensor:
        dtype = self.layers[0].weight.dtype
        return nn.functional.mse_loss(self.layers(batch[0].to(dtype)), batch[1].to(dtype))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append([self.trainer.current_epoch, batch_idx, batch[2].tolist()])

    def on_train_end(self) -> None:
        validation = self.trainer.callback_metrics.get("val_loss")
        ends = [self.seen, self.trainer.global_step, None if validation is None else float(validation)]
        Path(f"{self.path}-{self.global_rank}.json").write_text(json.dumps(ends))

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self.spec, self.parameters())
        if self.spec["decay"] is None:
            return optimizer
        schedule = {"scheduler": scheduler_of(self.spec, optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class ByHand(Net):
    """Steps after some batches, and after the last one of an epoch."""

    def __init__(self, spec: dict[str, Any], path: Path, accumulate: int) -> None:
        super().__init__(spec, path)
        self.automatic_optimization = False
        self.accumulate = accumulate

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        is_due = (batch_idx + 1) % self.accumulate == 0 or self.trainer.is_last_batch
        with self.no_backward_sync(enabled=not is_due):
            self.manual_backward(self.loss(batch), **weight_argument(self.spec, batch))
        if is_due:
            self.clip_gradients(optimizer, self.spec["clip"])
            optimizer.step()
            optimizer.zero_grad()


def weight_argument(spec: dict[str, Any], batch: Any) -> dict[str, Any]:
    weight = weight_of(batch[2])
    return (
        {} if spec["weights"] is None else {"weight": torch.tensor(weight) if spec["weights"] == "tensor" else weight}
    )


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))


def optimizer_of(spec: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
    if spec["optimizer"] == "adam":
        return torch.optim.Adam(parameters, lr=0.02)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if spec["optimizer"] == "momentum" else 0.0)


def scheduler_of(spec: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, spec["decay"])


# Runs with a strategy

Batch = tuple[int, int, bool, int, list[list[int]]]
"""Epoch, index, whether it is the last one of its epoch, accumulated batches, and the samples of each rank."""


def _trained(
    spec: dict[str, Any], run: dict[str, Any], folder: Path, *, resumes: bool
) -> tuple[list[Batch], dict[str, Any]]:
    """Return the batches of a run, and its result."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("second" if resumes else "first")
    parameters = _train_alone(spec, run, path) if spec["loop"] == "own" else _train(spec, run, path, resumes=resumes)
    ranks = [json.loads(Path(f"{path}-{rank}.json").read_text()) for rank in range(run["world_size"])]
    batches: list[Batch] = []
    rows = [seen for seen, *_ in ranks]
    for number, together in enumerate(zip(*rows, strict=True)):
        epoch, index, _ = together[0]
        assert all(one[:2] == [epoch, index] for one in together), together
        is_last = spec["loop"] != "own" and (number + 1 == len(rows[0]) or rows[0][number + 1][0] != epoch)
        groups = spec["groups"]
        accumulate = groups[min(epoch, 1)] if groups else run["accumulate"]
        batches.append((epoch, index, is_last, accumulate, [samples for _, _, samples in together]))
    _, steps, validation = ranks[0]
    return batches, {"parameters": parameters, "optimizer steps": steps, "val_loss": validation}


def _train(spec: dict[str, Any], run: dict[str, Any], path: Path, *, resumes: bool) -> dict[str, Any]:
    callbacks: list[Any] = []
    if spec["groups"]:
        callbacks.append(GradientAccumulationScheduler(spec["groups"]))
    if run["kept"] is not None:
        callbacks.append(Saver(run, path.with_name("saved")))
    trainer = Trainer(
        accelerator="cpu",
        devices=run["world_size"],
        strategy=_strategy(spec, run),
        precision=spec["precision"],
        max_epochs=spec["epochs"],
        max_steps=spec["max_steps"],
        accumulate_grad_batches=1 if spec["groups"] or spec["loop"] == "manual" else run["accumulate"],
        gradient_clip_val=None if spec["loop"] == "manual" else spec["clip"],
        num_sanity_val_steps=0,
        limit_train_batches=spec["limit"],
        use_distributed_sampler=spec["source"] == "table",
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=path.parent,
    )
    module = ByHand(spec, path, run["accumulate"]) if spec["loop"] == "manual" else Net(spec, path)
    trainer.fit(module, ckpt_path=path.with_name("saved") if resumes else None)
    return _plain(module.state_dict())


class Saver(Callback):
    """Saves a checkpoint after some batches, after which the run ends, as if it was interrupted."""

    saves_checkpoints = runs_last = True

    def __init__(self, run: dict[str, Any], path: Path) -> None:
        self.run, self.path = run, path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.batches_seen == self.run["kept"]:
            trainer.save_checkpoint(self.path)


def _train_alone(spec: dict[str, Any], run: dict[str, Any], path: Path) -> dict[str, Any]:
    strategy = dstrat.build(
        strategy=_strategy(spec, run), accelerator="cpu", devices=run["world_size"], precision=spec["precision"]
    )

    def train(loop: OwnLoop) -> Any:
        module = Net(spec, path)
        seen: list[Any] = []
        loop.setup(
            module,
            lambda module: optimizer_of(spec, module.parameters()),
            accumulate_grad_batches=run["accumulate"],
            gradient_clip_val=spec["clip"],
        )
        torch.manual_seed(spec["seed"] + 1)
        loader = loop.training_loader(loader_of(spec, loop.global_rank), distribute=spec["source"] == "table")
        for epoch in range(spec["epochs"]):
            for index, batch in enumerate(loader):
                loop.backward(loop.compute(module.loss, batch), **weight_argument(spec, batch))
                loop.step()
                seen.append([epoch, index, batch[2].tolist()])
        Path(f"{path}-{loop.global_rank}.json").write_text(json.dumps([seen, loop.steps_done, None]))
        return _plain(loop.strategy.module_state_dict())

    weights: dict[str, Any] = OwnLoop(strategy).launch(train)
    return weights


def _strategy(spec: dict[str, Any], run: dict[str, Any]) -> Any:
    if spec["alias"] == "single_device":
        return "single_device"
    offer = get_catalog().find("strategy", spec["alias"])
    options = {"model_parallel": {"tensor_parallel_size": 1}, "mesh": {"dp_replicate": spec["layout"]}}
    return get_catalog().load(offer)(
        **{**offer.component.options, "start_method": "fork", **options.get(spec["alias"], {})}
    )


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(torch.float64).flatten().tolist() for name, value in sorted(state.items())}


# The hand-written loop


def right_result(spec: dict[str, Any], record: Sequence[Batch]) -> dict[str, Any]:
    """Return the parameters after the batches of a record, the number of optimizer steps, and the validation loss.

    A step is due after as many batches as are accumulated, and after the last batch of an epoch.  It takes the mean of
    the gradients of all batches, of all ranks, that have a loss and have come since the last step.
    """
    torch.manual_seed(spec["seed"])
    net = layers().double()  # made in single precision, as by the Trainer
    optimizer = optimizer_of(spec, net.parameters())
    scheduler = scheduler_of(spec, optimizer) if spec["decay"] else None
    in_group, members, weight_sum, steps = 0, 0, 0, 0
    totals = [torch.zeros_like(parameter) for parameter in net.parameters()]
    before, validation = (-1, -1), None
    for epoch, index, is_last, accumulate, samples_of_ranks in record:
        if before[0] == epoch and index == 0:  # on more ranks the resume begins the epoch anew, with all its samples
            in_group, members, weight_sum, totals = 0, 0, 0, [torch.zeros_like(total) for total in totals]
        before = (epoch, index)
        in_group += 1
        for indices in samples_of_ranks if index not in spec["skips"] else ():
            gradients = torch.autograd.grad(_loss(net, indices), list(net.parameters()))
            weight = weight_of(indices) if spec["weights"] else 1
            totals = [total + weight * gradient for total, gradient in zip(totals, gradients, strict=True)]
            members, weight_sum = members + 1, weight_sum + weight
        is_due = (index + 1) % accumulate == 0 if spec["loop"] == "manual" else in_group >= accumulate
        if is_due or is_last:
            if members:  # of the weight 0 all together, the mean is 0
                _step(optimizer, net, [total / (weight_sum or 1) for total in totals], spec["clip"])
            steps += 1  # also without any loss in the group, as docs/trainer.md says
            if scheduler is not None:
                scheduler.step()
            in_group, members, weight_sum, totals = 0, 0, 0, [torch.zeros_like(total) for total in totals]
        if is_last and spec["validated"]:
            validation = float(_loss(net, range(spec["validated"])))
    parameters = _plain({f"layers.{name}": value for name, value in net.state_dict().items()})
    return {"parameters": parameters, "optimizer steps": steps, "val_loss": validation}


def _loss(net: nn.Module, indices: Iterable[int]) -> torch.Tensor:
    x, y = (torch.stack(values) for values in zip(*map(sample, indices), strict=True))
    return nn.functional.mse_loss(net(x), y)


def _step(optimizer: torch.optim.Optimizer, net: nn.Module, gradients: list[torch.Tensor], clip: float | None) -> None:
    if clip is not None:
        norm = torch.stack([(gradient**2).sum() for gradient in gradients]).sum().sqrt()
        gradients = [gradient * min(1.0, clip / (float(norm) + 1e-6)) for gradient in gradients]
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def _unread_samples(spec: dict[str, Any], record: Sequence[Batch]) -> list[str]:
    """Return a text about the samples of a whole epoch that no rank has read."""
    if spec["source"] != "table" or spec["drop_last"] or spec["limit"] or spec["max_steps"] > 0:
        return []
    found = []
    for epoch in range(spec["epochs"]):
        read = {index for batch in record if batch[0] == epoch for samples in batch[4] for index in samples}
        if missing := set(range(spec["samples"])) - read:
            found.append(f"epoch {epoch} lacks the samples {sorted(missing)}")
    return found

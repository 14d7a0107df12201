"""One rank that trains a pipeline by hand and with dstrat in turn, in the same processes."""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Pipeline, Trainer, TrainModule
from dstrat.callbacks import LambdaCallback
from dstrat.interfaces.batch import tensors_in
from dstrat.parallel.shards import local_tensor

WIDTH, BLOCKS, BATCH, MICROBATCHES = 512, 8, 64, 4
TURN = 10  # steps
NARROW, DEEP = 64, 192  # width and number of blocks, of which one is a small share of a rank's
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Block(nn.Module):
    """Two layers with a residual connection."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        computed: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return computed


class Net(TrainModule):
    """A chain of blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def configure_model(self) -> None:
        strategy: Any = self.trainer.strategy
        if strategy.tensor_parallel_size > 1:
            for block in self.net:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, strategy.device_mesh["tp"], plan)

    def configure_pipeline(self) -> Pipeline:
        return Pipeline(model=self.net, loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # noqa: ARG002 - the hook's
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class DeepNet(Net):
    """A longer chain, which is made when its strategy is known."""

    def __init__(self) -> None:
        TrainModule.__init__(self)
        self.net = nn.Sequential()

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*(Block(NARROW) for _ in range(DEEP)))
        super().configure_model()


def main() -> None:
    """Measure, and let rank 0 write what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--subject", choices=("speeds", *MODELS), required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: Any = (
        speeds(options.repeats)
        if options.subject == "speeds"
        else parameters(*MODELS[options.subject](options.out.parent))
    )
    if os.environ["RANK"] == "0":
        options.out.write_text(json.dumps(found))


# Steps by hand and with dstrat


def speeds(repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return steps per second, and per second of this rank's processor time, of each arm in each repeat.

    The arms take turns of a few steps in one fit: what other programs take from one, they take from the next.
    """
    samples: dict[str, dict[str, list[float]]] = {"wall": {}, "processor": {}}
    by_hand: list[ByHand] = []
    began = (0.0, 0.0)

    def start_turn(*_: Any) -> None:
        nonlocal began
        dist.barrier()
        began = time.perf_counter(), time.process_time()

    def end_turn(arm: str, repeat: int) -> None:
        dist.barrier()  # until all ranks have done their steps
        ended = time.perf_counter(), time.process_time()
        if repeat:  # the first repeat is the warm-up
            for clock, start, end in zip(samples, began, ended, strict=True):
                samples[clock].setdefault(arm, []).append(TURN / (end - start))

    def take_turns(_trainer: Trainer, _module: TrainModule, _outputs: Any, _batch: Any, index: int) -> None:
        if (index + 1) % TURN:
            return
        repeat = index // TURN
        end_turn("dstrat", repeat)
        arms = list(zip(("by hand", "by hand again"), by_hand, strict=True))
        for arm, trained in arms if repeat % 2 else reversed(arms):
            start_turn()
            for _ in range(TURN):
                trained.step()
            end_turn(arm, repeat)
        start_turn()

    def start(*_: Any) -> None:
        by_hand.extend(ByHand(loader(readers, share, steps)) for _ in range(2))
        start_turn()

    size, steps = int(os.environ["WORLD_SIZE"]), TURN * (repeats + 1)
    readers = size // 2
    share = int(os.environ["RANK"]) % readers
    trainer = Trainer(
        strategy=f"mesh(pp=2, microbatches={MICROBATCHES})",
        accelerator="cpu",
        devices=size,
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=LambdaCallback(on_train_start=start, on_train_batch_end=take_turns),
        **QUIET,
    )
    trainer.fit(Net(), loader(readers, share, steps))
    return samples


def loader(readers: int, share: int, steps: int, width: int = WIDTH) -> DataLoader[Any]:
    """Return the batches of a reader."""
    inputs = torch.randn(BATCH * steps // readers, width, generator=torch.Generator().manual_seed(share))
    return DataLoader(TensorDataset(inputs, inputs.roll(1, 1)), batch_size=BATCH // readers)


class ByHand:
    """A training as one writes it with torch.distributed.pipelining and FSDP2.

    Blocks stay gathered for a batch, as in torchtitan: to gather them for each microbatch takes longer.
    """

    def __init__(self, batches: DataLoader[Any]) -> None:
        size = dist.get_world_size()
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "dp"))
        self._stage = mesh.get_local_rank("pp")
        layers = Net().net[self._stage * BLOCKS // 2 : (self._stage + 1) * BLOCKS // 2]
        for block in layers:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(layers, mesh=mesh["dp"])
        stage = PipelineStage(layers, self._stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        self._schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        self._optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
        self._batches = iter(batches)

    def step(self) -> None:
        """Train with the next batch."""
        inputs, targets = next(self._batches)
        self._optimizer.zero_grad()
        if self._stage == 0:
            self._schedule.step(inputs)
        else:
            losses: list[torch.Tensor] = []
            self._schedule.step(target=targets, losses=losses)
        self._optimizer.step()


# Parameters with two stages and split layers


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that are made in this context, while they are in memory.

    Attributes:
        bytes: Bytes now.
        largest: Most bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.bytes = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # it calls operations of its shards
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_in(output):
            if type(tensor) is not torch.Tensor or tensor.device.type != "cpu":  # one of a shape only
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata  # noqa: SLF001 - the identity of a storage, which has no public one
            if key not in self._known:
                self._known.add(key)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._forget, key, storage.nbytes())
        self.largest = max(self.largest, self.bytes)
        return output

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


def deep(folder: Path) -> tuple[TrainModule, DataLoader[Any], int]:
    """Return the long chain, its data, and the number of its parameters."""
    del folder
    return DeepNet(), loader(1, 0, 1, NARROW), DEEP * sum(parameter.numel() for parameter in Block(NARROW).parameters())


def llama(folder: Path, *, is_loaded: bool) -> tuple[TrainModule, DataLoader[Any], int]:
    """Return a deep Llama, new or of a folder of ``from_pretrained``, its data, and the number of its parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from dstrat_transformers import HFModule

    warnings.simplefilter("ignore")  # of transformers
    config = LlamaConfig(
        vocab_size=NARROW,
        hidden_size=NARROW,
        intermediate_size=2 * NARROW,
        num_hidden_layers=DEEP // 2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    make: Any = partial(LlamaForCausalLM, config)
    if is_loaded:
        folder /= os.environ["RANK"]
        model.save_pretrained(folder)
        make = partial(LlamaForCausalLM.from_pretrained, folder)
    rows: Any = [{"input_ids": torch.arange(8) + row, "labels": torch.arange(8) + row} for row in range(8)]
    return HFModule(make), DataLoader(rows, batch_size=4), total


MODELS = {
    "deep": deep,
    "new llama": partial(llama, is_loaded=False),
    "loaded llama": partial(llama, is_loaded=True),
}


def parameters(module: TrainModule, batches: DataLoader[Any], total: int) -> dict[str, float]:
    """Return the most bytes of parameters that a rank has while they are made, and after it, and a quarter of all."""
    sizes: list[float] = []
    live = LiveTensors()

    def count(trainer: Any, *_: Any) -> None:
        local = trainer.strategy.local_weights()
        own = sum(local_tensor(local[name]).nbytes for name, _ in module.named_parameters() if name in local)
        largest = trainer.strategy.reduce(torch.tensor([live.largest, own], dtype=torch.float64), reduce_op="max")
        sizes.extend(largest.tolist())

    trainer = Trainer(
        strategy="mesh(pp=2, tp=2)",
        accelerator="cpu",
        devices=4,
        max_steps=1,
        callbacks=LambdaCallback(on_train_start=count),
        **QUIET,
    )
    with live:
        trainer.fit(module, batches)
    return {"while made": sizes[0], "after": sizes[1], "ideal": total * torch.float32.itemsize / 4}


if __name__ == "__main__":
    main()

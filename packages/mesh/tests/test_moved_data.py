"""Resumptions in which other ranks share a batch than in the job that saved: no sample is left out or trained twice."""

import logging

import pytest
import torch
from tests.accelerators import ACCELERATOR
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

import dstrat
from dstrat import OwnLoop, TrainModule, seed_everything
from dstrat.interfaces.pipeline import Pipeline
from dstrat_ddp import DDPStrategy
from dstrat_mesh import MeshStrategy

SAMPLES, BATCH = 48, 4
SHARES = {"ddp": 2, "dp": 2, "tp": 1, "pp": 1, "tp and dp": 2, "pp and dp": 2}
SIZES = {
    "dp": {"dp_shard": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "tp and dp": {"tp": 2, "dp_shard": 2},
    "pp and dp": {"pp": 2, "dp_shard": 2},
}


def strategy_of(layout):
    return DDPStrategy() if layout == "ddp" else MeshStrategy(**SIZES[layout])


class Noisy(Dataset):
    """Adds noise to each sample, and draws more numbers for some samples than for others."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.rand(6 + index % 5)[:6]
        return noise, torch.full((3,), float(index))


def loader():
    return DataLoader(Noisy(), batch_size=BATCH, shuffle=True)


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        self.seen, self.save_at, self.path = [], 0, None

    def configure_model(self):
        self.split(self.trainer.strategy)

    def split(self, strategy):
        if getattr(strategy, "tensor_parallel_size", 1) > 1:
            parallelize_module(self.net, strategy.device_mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def configure_pipeline(self):
        return Pipeline(model=self.net, loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(described(batch))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx + 1 == self.save_at:
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


def described(batch):
    noise, indices = batch
    return [(int(index), values.tolist()) for index, values in zip(indices[:, 0], noise, strict=True)]


class Messages(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def train(cluster, layout, program, save_at=0, path=None, ckpt_path=None):
    """Return this rank's batches, and what was said of the checkpoint."""
    seed_everything(3, verbose=False)
    messages, log = Messages(), logging.getLogger("dstrat")
    log.addHandler(messages)
    try:
        seen = globals()[program](cluster, strategy_of(layout), save_at, path, ckpt_path)
    finally:
        log.removeHandler(messages)
    return seen, [text for text in messages.texts if "was saved by" in text]


def trainer(cluster, strategy, save_at, path, ckpt_path, plugins=()):
    net = Net()
    net.save_at, net.path = save_at, path
    quiet_trainer(strategy, cluster, plugins=plugins).fit(net, loader(), ckpt_path=ckpt_path)
    return net.seen


def trainer_with_files(*arguments):
    return trainer(*arguments, plugins=["torch"])


def own_loop(cluster, strategy, save_at, path, ckpt_path):
    plan = dstrat.build(strategy=strategy, accelerator=ACCELERATOR, devices=cluster.world_size, plugins=[cluster])
    return OwnLoop(plan).launch(steps_of_a_loop, save_at=save_at, path=path, ckpt_path=ckpt_path)


def steps_of_a_loop(loop, save_at, path, ckpt_path):
    net = Net()
    net.split(loop.strategy)
    loop.setup(net, lambda module: torch.optim.SGD(module.parameters(), lr=0.001))
    batches, seen = loop.training_loader(loader()), []
    if ckpt_path is not None:
        loop.load_checkpoint(ckpt_path)
    for number, batch in enumerate(batches):
        seen.append(described(batch))
        loop.backward(loop.compute(lambda inputs, targets: nn.functional.mse_loss(net.net(inputs), targets), *batch))
        loop.step()
        if number + 1 == save_at:
            loop.save_checkpoint(path)
    return seen


def indices(batches):
    return [[index for index, _ in batch] for batch in batches]


def run(ranks, cases):
    """Return, for each case, the batches of all ranks and the messages of rank 0."""
    found = in_ranks(each, ranks, function=train, cases=cases)
    return {name: ([rank[name][0] for rank in found], found[0][name][1]) for name in cases}


MOVES = [("dp", "pp"), ("pp", "dp"), ("ddp", "tp"), ("tp", "ddp"), ("tp", "pp"), ("pp", "tp")]
CASES = [
    *(("trainer", *move) for move in MOVES),
    *((program, *move) for program in ("trainer_with_files", "own_loop") for move in MOVES[:2]),
]


def test_each_sample_is_trained_once_whatever_ranks_share_a_batch(tmp_path):
    done = {2: 3, 1: 8}  # batches before the save, of 6 with two shares of the data and of 12 with one
    cases = {
        (program, saved): {"layout": saved, "program": program, "save_at": done[SHARES[saved]]}
        for program, saved, _ in CASES
    }
    for number, key in enumerate(cases):
        cases[key]["path"] = str(tmp_path / f"saved-{number}")
    saved = run(2, cases)
    resumed = run(
        2,
        {
            (program, before, now): {"layout": now, "program": program, "ckpt_path": cases[program, before]["path"]}
            for program, before, now in CASES
        },
    )
    for program, before, now in CASES:
        case = (program, before, now)
        (old, _), (new, messages) = saved[program, before], resumed[case]
        of_each_shard = [batch for rank in range(SHARES[before]) for batch in old[rank][: done[SHARES[before]]]]
        of_each_shard += [batch for rank in range(SHARES[now]) for batch in new[rank]]
        trained = sorted(index for batch in indices(of_each_shard) for index in batch)
        assert trained == list(range(SAMPLES)), case
        if SHARES[now] == 1:
            assert new[0] == new[1], case
        if SHARES[before] == SHARES[now]:
            assert messages == [], case
            assert new[0] == old[0][done[1] :], case
        else:
            shards = "1 shard" if SHARES[before] == 1 else "2 shards"
            said = f"was saved by 2 processes with {shards} of the data and is continued by 2 with {SHARES[now]}: "
            assert len(messages) == 1, case
            assert said in messages[0], case


@pytest.mark.parametrize(
    "program", ["trainer", pytest.param("trainer_with_files", marks=pytest.mark.variant), "own_loop"]
)
def test_ranks_that_share_a_batch_after_a_move_go_on_with_the_random_numbers_of_their_data(tmp_path, program):
    moves = [("tp and dp", "pp and dp"), ("pp and dp", "tp and dp")]
    layouts = list(dict.fromkeys(before for before, _ in moves))
    paths = {layout: str(tmp_path / layout) for layout in layouts}
    saved = run(
        4, {layout: {"layout": layout, "program": program, "save_at": 3, "path": paths[layout]} for layout in layouts}
    )
    resumed = run(4, {move: {"layout": move[1], "program": program, "ckpt_path": paths[move[0]]} for move in moves})
    firsts = {"tp and dp": [0, 0, 2, 2], "pp and dp": [0, 1, 0, 1]}  # the first rank that reads the same shard
    for before, now in moves:
        (old, _), (new, messages) = saved[before], resumed[before, now]
        assert messages == []
        shards = [old[rank] for rank in dict.fromkeys(firsts[before])]
        assert shards[0] != shards[1]
        readers = {rank: number for number, rank in enumerate(dict.fromkeys(firsts[now]))}
        for rank, first in enumerate(firsts[now]):
            assert new[rank] == shards[readers[first]][3:], (before, now, rank)

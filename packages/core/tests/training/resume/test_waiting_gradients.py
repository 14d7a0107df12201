"""What becomes of gradients that wait for an optimizer step where a checkpoint is continued, and what is said of it."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.accelerators import ACCELERATOR
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, GradientSyncStrategy, SingleDeviceStrategy, TorchCheckpointIO, Trainer, TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO

SAMPLES, GLOBAL_BATCH = 24, 6


class Averaging(GradientSyncStrategy):
    """Averages gradients by hand."""

    def synchronize_gradients(self, gradients):
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient))


class Keeping(Averaging):
    """Has the gradients that wait in its own state."""

    saves_gradients = True

    def rank_state(self):
        return {"gradients": {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}}

    def load_rank_state(self, state):
        for name, parameter in self.module.named_parameters():
            gradient = state["gradients"].get(name)
            parameter.grad = None if gradient is None else self.from_host(gradient)


class Sharding(Averaging):
    """Says that it shards, and saves no gradients."""

    replicates_state = False


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.unused = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))

    def training_step(self, batch, batch_idx):
        rest = 0 * self.unused[self.trainer.global_rank].weight.sum()  # each rank lacks gradients of the others'
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1]) + rest

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Line):
    """Steps in each batch, and leaves its gradients to be cleared by the next one."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


class ManualInPairs(Line):
    """Steps in each second batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Notes(Callback):
    """Saves after the first batch, and notes the warnings of this process."""

    saves_checkpoints = runs_last = True

    def __init__(self, path, told):
        self.path, self.handler = path, logging.Handler(logging.WARNING)
        self.handler.emit = lambda record: told.append(record.getMessage())

    def setup(self, trainer, module, stage):
        logging.getLogger("dstrat").addHandler(self.handler)

    def teardown(self, trainer, module, stage):
        logging.getLogger("dstrat").removeHandler(self.handler)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.path is not None and batch_idx == 0:
            trainer.save_checkpoint(self.path)


def fit(cluster, strategy, *, cls=Line, to=None, ckpt_path=None, io=PortableCheckpointIO):
    """Train an epoch; return the warnings and the weights."""
    told, module, size = [], cls(), 1 if cluster is None else cluster.world_size
    trainer = Trainer(
        accelerator=ACCELERATOR,
        strategy=strategy(),
        devices=size,
        max_epochs=1,
        accumulate_grad_batches=2 if module.automatic_optimization else 1,
        plugins=[part for part in (cluster, io()) if part is not None],
        callbacks=[Notes(to, told)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer.fit(module, DataLoader(data, batch_size=GLOBAL_BATCH // size), ckpt_path=ckpt_path)
    return told, module.layer.weight.detach().flatten().tolist()


def fits(cluster, cases):
    return each(cluster, fit, cases)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def saved(folder):
    """What two ranks say while they save, and the weights that they come to."""
    cases = {
        "averaging": {"strategy": Averaging},
        "keeping": {"strategy": Keeping},
        "sharding": {"strategy": Sharding, "io": TorchCheckpointIO},
        "manual": {"strategy": Keeping, "cls": Manual},
        "sharding manually": {"strategy": Sharding, "cls": Manual, "io": TorchCheckpointIO},
        "sharding in pairs": {"strategy": Sharding, "cls": ManualInPairs, "io": TorchCheckpointIO},
    }
    return in_ranks(fits, cases={name: {**case, "to": folder / name} for name, case in cases.items()})


def check_lines(found, name, line=None):
    """Check that rank 0 says so much of a case, and the others nothing."""
    first, *others = [told for told, _ in (of_rank[name] for of_rank in found)]
    assert [told for told in others if told] == []
    assert len(first) == (line is not None)
    assert line is None or first[0].endswith(line)


LEFT_OUT = "was saved between the batches of one optimizer step, which are left out, as their gradients cannot be taken"
NOT_CLEARED = "has gradients that the module had not cleared, which are left out, as they cannot be taken"
MOVED = "random numbers and running means start anew, and the data resumes at the same part of the epoch"


def test_a_strategy_that_shards_and_saves_none_says_so_while_it_saves(saved):
    check_lines(saved, "averaging")
    check_lines(saved, "keeping")
    for name in ("sharding", "sharding in pairs"):
        check_lines(saved, name, "a run that continues it leaves these batches out")
    check_lines(saved, "sharding manually")


def test_on_as_many_ranks_the_same_strategy_goes_on_and_others_say_what_they_leave_out(saved, folder):
    cases = {
        "averaging": {"strategy": Averaging, "ckpt_path": folder / "averaging"},
        "keeping": {"strategy": Keeping, "ckpt_path": folder / "keeping"},
        "from keeping": {"strategy": Averaging, "ckpt_path": folder / "keeping"},
        "manual": {"strategy": Averaging, "cls": Manual, "ckpt_path": folder / "manual"},
        "sharding": {"strategy": Sharding, "ckpt_path": folder / "sharding", "io": TorchCheckpointIO},
        "to sharding": {"strategy": Sharding, "ckpt_path": folder / "averaging"},
    }
    io = TorchCheckpointIO()
    alone = {name: value for name, value in io.load_checkpoint(folder / "sharding").items() if name != "ranks"}
    io.save_checkpoint(alone, folder / "alone")
    cases["alone"] = {**cases["sharding"], "ckpt_path": folder / "alone"}
    found = in_ranks(fits, cases=cases)
    for name in ("averaging", "keeping"):
        check_lines(found, name)
        assert [rank[name][1] for rank in found] == [rank[name][1] for rank in saved]
    check_lines(found, "from keeping", f"{folder / 'keeping'} {LEFT_OUT}")
    check_lines(found, "manual", f"{folder / 'manual'} {NOT_CLEARED}")
    check_lines(found, "sharding", f"{folder / 'sharding'} {LEFT_OUT}")
    anew = MOVED.replace("same part of the epoch", "beginning of epoch 0")
    check_lines(found, "alone", f"{anew}; it {LEFT_OUT}")
    check_lines(found, "to sharding", "which are left out, as the strategy shards gradients")


def test_on_other_numbers_of_ranks_whole_gradients_go_on_and_a_strategys_own_are_said_to_be_left_out(saved, folder):
    cases = {
        "averaging": {"strategy": Averaging, "ckpt_path": folder / "averaging"},
        "keeping": {"strategy": Keeping, "ckpt_path": folder / "keeping"},
        "sharding": {"strategy": Averaging, "ckpt_path": folder / "sharding", "io": TorchCheckpointIO},
    }
    for found in (
        in_ranks(fits, 3, cases=cases),
        [{"averaging": fit(None, SingleDeviceStrategy, ckpt_path=folder / "averaging")}],
    ):
        check_lines(found, "averaging", MOVED)
        for rank in found:
            assert rank["averaging"][1] == pytest.approx(saved[0]["averaging"][1], rel=1e-6)
        if len(found) > 1:
            check_lines(found, "keeping", f"{MOVED}; it {LEFT_OUT}")
            check_lines(found, "sharding", f"{MOVED}; it {LEFT_OUT}")


class CountsReads(PortableCheckpointIO):
    def load_rank(self, path, rank):
        reads.append(rank)
        return super().load_rank(path, rank)


reads: list[int] = []


@pytest.mark.parametrize(("name", "expected"), [("averaging", [0, 1]), ("keeping", [0])])
def test_what_other_ranks_had_is_read_only_where_gradients_wait(saved, folder, name, expected):
    reads.clear()
    fit(None, SingleDeviceStrategy, ckpt_path=folder / name, io=CountsReads)
    assert reads == expected


class Saved(Callback):
    """Saves between two batches of a step, and takes note of losses."""

    def __init__(self, path=None):
        self.path, self.losses = path, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        if batch_idx == 2 and self.path is not None:
            trainer.save_checkpoint(self.path)


def test_waiting_gradients_may_have_the_names_of_compiled_layers(tmp_path):
    def fit(saved, ckpt_path=None):
        inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
        data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
        module = Line()
        module.layer = torch.compile(module.layer, backend="eager")
        io = TorchCheckpointIO()
        quiet_trainer("single_device", plugins=[io], callbacks=[saved], accumulate_grad_batches=2).fit(
            module, data, ckpt_path=ckpt_path
        )
        return saved.losses

    losses = fit(Saved(tmp_path / "saved.ckpt"))
    checkpoint = torch.load(tmp_path / "saved.ckpt", weights_only=False)
    gradients = checkpoint["ranks"][0]["gradients"]
    assert "layer.weight" in gradients
    for name in ("layer.weight", "layer.bias"):  # as they were in checkpoints before
        gradients[name.replace("layer", "layer._orig_mod")] = gradients.pop(name)
    torch.save(checkpoint, tmp_path / "older.ckpt")
    assert fit(Saved(), tmp_path / "older.ckpt") == losses[3:]

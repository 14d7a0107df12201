"""Checkpoints of every stage: exact on the same ranks, by names, from views, with clear errors."""

import io
import resource
from functools import partial
from pathlib import Path

import pytest
import torch
from deepspeed_loop import parts, start, train
from tests.trainer_runs import quiet_trainer, same_when_resumed, shuffled_loader
from tied_net import Tied, assert_close
from torch import nn

from dstrat import TrainModule
from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.errors import CheckpointError
from dstrat_deepspeed import DeepSpeedStrategy

STAGES = [0, 1, 2, 3]
MORE = {"steps": 3}
OPTIONS = {
    "stage-1": {"stage": 1},
    "stage-2": {"stage": 2},
    "round-robin": {"stage": 2, "config": {"zero_optimization": {"round_robin_gradients": True}}},
    "stage-3": {"stage": 3, "sub_group_size": 300},
}
MOMENTS = {  # batches, of which 3 are a step and 10 an epoch
    "32-true": (6, 11),  # in the middle of an epoch; behind one, in the middle of an accumulation
    "bf16-true": (2, 11),  # in the middle of the first accumulation
}


class WithDropout(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(cluster, folder, stage, precision, *, callbacks=(), ckpt_path=None):
    module = WithDropout()
    trainer = quiet_trainer(
        DeepSpeedStrategy(stage=stage),
        cluster,
        max_epochs=2,
        max_steps=5,
        accumulate_grad_batches=3,
        gradient_clip_val=1.0,
        precision=precision,
        plugins=[PortableCheckpointIO()],
        callbacks=callbacks,
        default_root_dir=folder,
    )
    trainer.fit(module, shuffled_loader(60, batch_size=3), ckpt_path=ckpt_path)
    state = module.state_dict()  # of stage 3 on rank 0 only
    return {name: value.clone() for name, value in state.items() if not value.is_meta}


def stopped_and_resumed(cluster, folder, stage):
    """Stop and resume at some moments; return for each whether it made no difference."""
    return {
        precision: same_when_resumed(partial(fit, cluster, folder, stage, precision), Path(folder, precision), moments)
        for precision, moments in MOMENTS.items()
    }


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_goes_on_is_the_run_that_was_not_stopped(ranks, tmp_path, stage):
    for outcomes in ranks(stopped_and_resumed, folder=str(tmp_path), stage=stage):
        assert outcomes == {precision: dict.fromkeys(moments, True) for precision, moments in MOMENTS.items()}


def checkpoint_of(strategy):
    [optimizer] = strategy.optimizers
    return {
        "state_dict": strategy.sharded_module_state(),
        "optimizers": [strategy.sharded_optimizer_state(optimizer)],
    }


def started(cluster, options, module):
    strategy = DeepSpeedStrategy(**options)
    start(strategy, module, parts(cluster))
    return strategy


def save(strategy, path):
    PortableCheckpointIO().save_checkpoint(checkpoint_of(strategy), path)


def load(strategy, path):
    [optimizer] = strategy.optimizers
    template = {
        "state_dict": strategy.sharded_module_state(),
        "optimizers": [strategy.optimizer_template(optimizer)],
    }
    state = PortableCheckpointIO().load_into(path, template)
    strategy.load_sharded_optimizer_state(optimizer, state["optimizers"][0])


def error_of(attempt, *arguments):
    try:
        attempt(*arguments)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def alone():
    """State of one device after some steps, and its losses in the next ones."""
    strategy = SingleDeviceStrategy()
    start(strategy, Tied(), parts())
    train(strategy, **MORE)
    written = io.BytesIO()
    torch.save({**checkpoint_of(strategy), "whole": strategy.optimizers[0].state_dict()}, written)
    losses = train(strategy, **MORE)
    return torch.load(io.BytesIO(written.getvalue())), losses


def saves_and_loads(cluster, folder, options):
    """Do all that a training can do with checkpoints, in one process; return what came of it."""
    strategy = started(cluster, options, Tied())
    save(strategy, f"{folder}/new")
    first = train(strategy, **MORE)
    save(strategy, f"{folder}/c")
    found = {"views": views(strategy), "error": error_of(save_without_space, strategy, f"{folder}/full/c")}
    written = io.BytesIO()
    torch.save((strategy.module_state_dict(), strategy.optimizer_state(strategy.optimizers[0])), written)
    found["next"] = train(strategy, **MORE)
    load(strategy, f"{folder}/new")  # into an optimizer that has a state by now
    found["began anew"] = train(strategy, **MORE) == first
    strategy.teardown()
    found["dealt out"] = dealt_out(started(cluster, options, Tied()), written.getvalue())
    return {**found, "whole": written.getvalue()}


def views(strategy):
    """Return how many elements of the state this rank has, and how many tensors are not the optimizer's memory."""
    wrapped = strategy.engine.optimizer
    flat = getattr(wrapped, "fp32_partitioned_groups_flat", None) or wrapped.single_partition_of_fp32_groups
    own = [value for part in flat for value in wrapped.optimizer.state[part].values() if value.dim()]
    memory = {tensor.untyped_storage().data_ptr() for tensor in own}
    state = strategy.sharded_optimizer_state(strategy.optimizers[0])["state"]
    given = [entry[key].local for entry in state.values() for key in ("exp_avg", "exp_avg_sq")]
    copied = [shard for shard in given if shard.untyped_storage().data_ptr() not in memory]
    return sum(shard.numel() for shard in given), len(copied)


def save_without_space(strategy, path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if strategy.global_rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        save(strategy, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def dealt_out(strategy, written):
    """Load whole states, which only rank 0 has; return the next losses."""
    state, optimizer = torch.load(io.BytesIO(written)) if strategy.is_global_zero else ({}, {})
    strategy.load_module_state_dict(state)
    strategy.load_optimizer_state(strategy.optimizers[0], optimizer)
    losses = train(strategy, **MORE)
    strategy.teardown()
    return losses


@pytest.fixture(scope="module", params=OPTIONS)
def found(request, ranks, tmp_path_factory):
    """The folder of a training, and what each of its ranks has found."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "full").mkdir()
    return folder, ranks(saves_and_loads, folder=str(folder), options=OPTIONS[request.param])


def test_a_checkpoint_has_the_names_and_values_of_one_device(found, alone):
    state = PortableCheckpointIO().load_checkpoint(found[0] / "c")
    assert_close(state["state_dict"], alone[0]["state_dict"])
    assert state["state_dict"]["blocks.1.up.weight"] is state["state_dict"]["blocks.0.up.weight"]
    [optimizer], [expected] = state["optimizers"], alone[0]["optimizers"]
    assert_close(optimizer["state"], expected["state"])
    assert optimizer["param_groups"] == expected["param_groups"]


def test_nothing_is_copied_or_gathered_for_a_checkpoint(found):
    outcomes = [rank["views"] for rank in found[1]]
    trained = sum(p.numel() for p in Tied().parameters() if p.requires_grad)
    assert [copied for _, copied in outcomes] == [0, 0]
    assert sum(elements for elements, _ in outcomes) == 2 * trained
    assert max(elements for elements, _ in outcomes) < trained + 200


def test_whole_states_are_gathered_on_rank_0_and_dealt_out(found, alone):
    first, other = found[1]
    state, optimizer = torch.load(io.BytesIO(first["whole"]))
    assert_close(state, alone[0]["state_dict"])
    assert_close(optimizer["state"], alone[0]["whole"]["state"])
    assert torch.load(io.BytesIO(other["whole"]))[1] == {}
    assert first["next"] == other["next"] == first["dealt out"] == pytest.approx(alone[1], rel=1e-6)


def test_a_checkpoint_from_before_the_first_step_begins_anew(found):
    assert [rank["began anew"] for rank in found[1]] == [True, True]


def test_a_save_that_fails_on_one_rank_fails_on_all_and_training_goes_on(found, alone):
    folder, by_rank = found
    for rank in by_rank:
        assert rank["error"].startswith("rank 1 could not write checkpoint")
        assert rank["next"] == pytest.approx(alone[1], rel=1e-6)
    assert list((folder / "full").iterdir()) == []


def saved(cluster, path, options):
    strategy = started(cluster, options, Tied())
    train(strategy, **MORE)
    save(strategy, path)
    strategy.teardown()


def went_on(cluster, path):
    losses = {}
    for name, options in OPTIONS.items():
        strategy = started(cluster, options, Tied())
        load(strategy, path)
        losses[name] = train(strategy, **MORE)
        strategy.teardown()
    return losses


def test_other_stages_on_another_number_of_ranks_go_on(ranks, tmp_path, alone):
    ranks(saved, path=str(tmp_path / "c"), options=OPTIONS["stage-2"])
    for by_options in ranks(went_on, 4, path=str(tmp_path / "c")):
        for losses in by_options.values():
            assert losses == pytest.approx(alone[1], rel=1e-6)


class WithSGD(Tied):
    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01, momentum=0.9)


class WithAdamW(Tied):
    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])


class WithOneGroup(Tied):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def refused(cluster, folder):
    """Return what is said of checkpoints of other optimizers."""
    messages = []
    path, of_sgd = f"{folder}/c", f"{folder}/sgd"
    saved(cluster, path, OPTIONS["stage-2"])
    for kind, refuses in ((WithSGD, path), (WithOneGroup, path), (WithAdamW, of_sgd)):
        strategy = started(cluster, OPTIONS["stage-3"], kind())
        messages.append(error_of(load, strategy, refuses))
        if kind is WithSGD:
            train(strategy, steps=1)
            save(strategy, of_sgd)
        strategy.teardown()
    return messages


def test_the_state_of_other_parameters_or_another_optimizer_is_refused_on_every_rank(ranks, tmp_path):
    others = "the optimizer's state in the checkpoint is of other parameters than those of this one: "
    another = (
        "the optimizer's state in the checkpoint has momentum_buffer, and AdamW needs exp_avg, exp_avg_sq: "
        "it is the state of another optimizer"
    )
    groups = (
        "the optimizer's state in the checkpoint is of 2 groups of 5 and 10 parameters, and AdamW has 1 group of 15 "
        "parameters here"
    )
    for messages in ranks(refused, folder=str(tmp_path)):
        assert messages == [others + "missing are none; unexpected are first.bias", groups, another]

"""Checkpoints of every stage: exact on the same ranks, by names, from views, with clear errors."""

import contextlib
import io
import resource
from pathlib import Path

import pytest
import torch
from deepspeed_loop import parts, start, train
from tied_net import Tied, assert_close
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule
from dstrat.builtin.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.builtin.strategies.single_device import SingleDeviceStrategy
from dstrat.errors import CheckpointError
from dstrat_deepspeed import DeepSpeedStrategy

STAGES = [0, 1, 2, 3]
MORE = {"steps": 3}
OPTIONS = {"stage-1": {"stage": 1}, "stage-2": {"stage": 2}, "stage-3": {"stage": 3, "sub_group_size": 300}}
ROUND_ROBIN = {"stage": 2, "config": {"zero_optimization": {"round_robin_gradients": True}}}


class Saves(Callback):
    saves_checkpoints = runs_last = True

    def __init__(self, folder, moments):
        self.folder, self.moments = folder, moments

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.batches_seen in self.moments:
            trainer.save_checkpoint(self.folder / str(trainer.fit_loop.batches_seen))


class WithDropout(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(cluster, folder, options, precision, *, callbacks=(), ckpt_path=None, steps=6, module=None, accumulate=3):
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    module = module or WithDropout()
    trainer = Trainer(
        accelerator="cpu",
        strategy=DeepSpeedStrategy(**options),
        devices=cluster.world_size,
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        precision=precision,
        plugins=[cluster, PortableCheckpointIO()],
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    torch.manual_seed(3)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer.fit(module, DataLoader(data, batch_size=3, shuffle=True), ckpt_path=ckpt_path)
    return {name: value.clone() for name, value in module.state_dict().items()}


def stopped_and_resumed(cluster, folder, stage, precision, moments):
    folder = Path(folder)
    whole = fit(cluster, folder, {"stage": stage}, precision, callbacks=[Saves(folder, moments)])
    outcomes = []
    for moment in moments:
        again = fit(cluster, folder, {"stage": stage}, precision, ckpt_path=folder / str(moment))
        outcomes.append(all(torch.equal(again[name], whole[name]) for name in whole))
    return outcomes


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_goes_on_is_the_run_that_was_not_stopped(ranks, tmp_path, stage, precision):
    # In the middle of an accumulation, of an epoch; behind an epoch of 10 batches in the middle of an accumulation.
    moments = (2, 6, 11)
    for outcomes in ranks(stopped_and_resumed, folder=str(tmp_path), stage=stage, precision=precision, moments=moments):
        assert outcomes == [True] * 3


def checkpoint_of(strategy):
    [optimizer] = strategy.optimizers
    return {
        "state_dict": strategy.sharded_module_state(),
        "optimizers": [strategy.sharded_optimizer_state(optimizer)],
    }


def saved(cluster, target, options):
    strategy = DeepSpeedStrategy(**options)
    start(strategy, Tied(), parts(cluster))
    train(strategy, **MORE)
    PortableCheckpointIO().save_checkpoint(checkpoint_of(strategy), target)
    strategy.teardown()


def load(strategy, path):
    [optimizer] = strategy.optimizers
    template = {
        "state_dict": strategy.sharded_module_state(),
        "optimizers": [strategy.optimizer_template(optimizer)],
    }
    state = PortableCheckpointIO().load_into(path, template)
    strategy.load_sharded_optimizer_state(optimizer, state["optimizers"][0])


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


@pytest.mark.parametrize("options", [*OPTIONS.values(), ROUND_ROBIN], ids=[*OPTIONS, "round-robin"])
def test_a_checkpoint_has_the_names_and_values_of_one_device(ranks, tmp_path, alone, options):
    ranks(saved, target=str(tmp_path / "c"), options=options)
    found = PortableCheckpointIO().load_checkpoint(tmp_path / "c")
    assert_close(found["state_dict"], alone[0]["state_dict"])
    tied = found["state_dict"]["blocks.1.up.weight"]
    assert tied is found["state_dict"]["blocks.0.up.weight"]
    [optimizer], [expected] = found["optimizers"], alone[0]["optimizers"]
    assert_close(optimizer["state"], expected["state"])
    assert optimizer["param_groups"] == expected["param_groups"]


def views(cluster, options):
    strategy = DeepSpeedStrategy(**options)
    start(strategy, Tied(), parts(cluster))
    train(strategy, **MORE)
    wrapped = strategy.engine.optimizer
    flat = getattr(wrapped, "fp32_partitioned_groups_flat", None) or wrapped.single_partition_of_fp32_groups
    own = [value for part in flat for value in wrapped.optimizer.state[part].values() if value.dim()]
    memory = {tensor.untyped_storage().data_ptr() for tensor in own}
    state = strategy.sharded_optimizer_state(strategy.optimizers[0])["state"]
    given = [entry[key].local for entry in state.values() for key in ("exp_avg", "exp_avg_sq")]
    elements = sum(shard.numel() for shard in given)
    copied = [shard for shard in given if shard.untyped_storage().data_ptr() not in memory]
    strategy.teardown()
    return elements, len(copied)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nothing_is_copied_or_gathered_for_a_checkpoint(ranks, options):
    outcomes = ranks(views, 3, options=options)
    trained = sum(p.numel() for p in Tied().parameters() if p.requires_grad)
    assert [copied for _, copied in outcomes] == [0, 0, 0]
    assert sum(elements for elements, _ in outcomes) == 2 * trained
    assert max(elements for elements, _ in outcomes) < 2 * trained / 3 + 200


def went_on(cluster, target, options):
    strategy = DeepSpeedStrategy(**options)
    start(strategy, Tied(), parts(cluster))
    load(strategy, target)
    losses = train(strategy, **MORE)
    strategy.teardown()
    return losses


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_other_stages_on_another_number_of_ranks_go_on(ranks, tmp_path, alone, options):
    ranks(saved, target=str(tmp_path / "c"), options=OPTIONS["stage-2"])
    for losses in ranks(went_on, 4, target=str(tmp_path / "c"), options=options):
        assert losses == pytest.approx(alone[1], rel=1e-6)


def whole_states(cluster, options, state=None, optimizer=None):
    strategy = DeepSpeedStrategy(**options)
    start(strategy, Tied(), parts(cluster))
    if state is None:
        train(strategy, **MORE)
    else:
        strategy.load_module_state_dict(state if strategy.is_global_zero else {})
        strategy.load_optimizer_state(strategy.optimizers[0], optimizer if strategy.is_global_zero else {})
    given = strategy.module_state_dict(), strategy.optimizer_state(strategy.optimizers[0])
    written = io.BytesIO()
    torch.save(given, written)
    losses = train(strategy, **MORE)
    strategy.teardown()
    return written.getvalue(), losses


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_whole_states_are_gathered_on_rank_0_and_dealt_out(ranks, alone, options):
    (first, losses), (other, _) = ranks(whole_states, options=options)
    state, optimizer = torch.load(io.BytesIO(first))
    assert_close(state, alone[0]["state_dict"])
    assert_close(optimizer["state"], alone[0]["whole"]["state"])
    assert torch.load(io.BytesIO(other))[1] == {}
    (_, again), _ = ranks(whole_states, options=options, state=state, optimizer=optimizer)
    assert losses == again == pytest.approx(alone[1], rel=1e-6)


def began(cluster, target, options):
    strategy = DeepSpeedStrategy(**options)
    start(strategy, Tied(), parts(cluster))
    PortableCheckpointIO().save_checkpoint(checkpoint_of(strategy), target)
    losses = train(strategy, **MORE)
    load(strategy, target)  # also into an optimizer that has a state by now
    again = train(strategy, **MORE)
    strategy.teardown()
    return losses, again


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_checkpoint_from_before_the_first_step_begins_anew(ranks, tmp_path, options):
    for losses, again in ranks(began, target=str(tmp_path / "c"), options=options):
        assert losses == again


class WithSGD(Tied):
    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01, momentum=0.9)


class WithOneGroup(Tied):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def refused(cluster, target, options):
    messages = []
    for kind in (WithSGD, WithOneGroup):
        strategy = DeepSpeedStrategy(**options)
        start(strategy, kind(), parts(cluster))
        with contextlib.suppress(CheckpointError):
            load(strategy, target)
            messages.append("nothing")
        try:
            load(strategy, target)
        except CheckpointError as error:
            messages.append(str(error))
        strategy.teardown()
    return messages


def test_the_state_of_other_parameters_is_refused_on_every_rank(ranks, tmp_path):
    ranks(saved, target=str(tmp_path / "c"), options=OPTIONS["stage-2"])
    others = "the optimizer's state in the checkpoint is of other parameters than those of this one: "
    for messages in ranks(refused, target=str(tmp_path / "c"), options=OPTIONS["stage-3"]):
        assert messages == [
            others + "missing are none; left over are first.bias",
            others + "they are in other groups",
        ]


def kinds(cluster, target):
    strategy = DeepSpeedStrategy(stage=2)
    module = WithSGD()
    start(strategy, module, parts(cluster))
    train(strategy, **MORE)
    PortableCheckpointIO().save_checkpoint(checkpoint_of(strategy), target)
    strategy.teardown()
    module.configure_optimizers = lambda: torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
    strategy = DeepSpeedStrategy(stage=2)
    start(strategy, module, parts(cluster))
    try:
        load(strategy, target)
    except CheckpointError as error:
        return str(error)
    finally:
        strategy.teardown()
    return None


def test_the_state_of_another_optimizer_is_refused(ranks, tmp_path):
    for message in ranks(kinds, target=str(tmp_path / "c")):
        assert message == (
            "the optimizer's state in the checkpoint has momentum_buffer, and AdamW needs exp_avg, exp_avg_sq: "
            "it is the state of another optimizer"
        )


def out_of_space(cluster, target):
    strategy = DeepSpeedStrategy(stage=3)
    start(strategy, Tied(), parts(cluster))
    train(strategy, **MORE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if cluster.global_rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        PortableCheckpointIO().save_checkpoint(checkpoint_of(strategy), target)
    except CheckpointError as error:
        return str(error), train(strategy, **MORE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        strategy.teardown()
    return None


def test_a_save_that_fails_on_one_rank_fails_on_all_and_training_goes_on(ranks, tmp_path, alone):
    for message, losses in ranks(out_of_space, target=str(tmp_path / "c")):
        assert message.startswith("rank 1 could not write checkpoint")
        assert losses == pytest.approx(alone[1], rel=1e-6)
    assert list(tmp_path.iterdir()) == []

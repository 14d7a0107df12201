"""What happens when a rank of another group fails or is gone."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from tests.hand_loop import Net, parts, start, train
from tests.ranks import in_ranks
from tests.trainer_runs import quiet_trainer, shuffled_loader
from torch import nn

from dstrat import Callback, EMAWeightAveraging, ModelCheckpoint, ModelPruning, TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.errors import ConflictError
from dstrat_diloco import DiLoCoStrategy

OPTIONS = [{"every": 1}, {"every": 3, "delay": 2}, {"every": 4, "fragments": 2}]


class Failing(Net):
    """Rank 1, which is the other group, breaks in its seventh step."""

    def __init__(self, rank, dies):
        super().__init__()
        self.rank, self.dies = rank, dies

    def training_step(self, batch, batch_idx):
        if (batch_idx, self.rank) == (6, 1):
            if self.dies:
                os._exit(3)
            raise ValueError("rank 1 had enough")
        return super().training_step(batch, batch_idx)


def until_it_breaks(cluster, dies, options):
    """Return what broke, and how long the rest took, from the exception until everything was closed."""
    strategy = DiLoCoStrategy(**options)
    start(strategy, Failing(cluster.global_rank, dies), parts(cluster))
    try:
        train(strategy)
    except Exception as error:
        begun = time.monotonic()
        strategy.on_exception(error)
        still_open = dist.is_initialized()
        strategy.teardown()
        return f"{type(error).__name__}: {error}", time.monotonic() - begun, still_open
    return None


@pytest.mark.parametrize("options", OPTIONS)
def test_when_a_rank_raises_the_other_groups_do_not_wait_for_it(options):
    (other, *closed), (culprit, *also_closed) = in_ranks(until_it_breaks, dies=False, options=options)
    assert culprit == "ValueError: rank 1 had enough"
    assert other.startswith("RuntimeError")
    for seconds, still_open in (closed, also_closed):
        assert seconds < 20
        assert not still_open


@pytest.mark.parametrize("options", OPTIONS)
def test_when_a_rank_dies_the_other_groups_notice_and_can_close(options):
    (message, seconds, still_open), gone = in_ranks(until_it_breaks, may_die=(1,), dies=True, options=options)
    assert gone is None
    assert message.startswith("RuntimeError")
    assert seconds < 20
    assert not still_open


@pytest.mark.parametrize("inner", ["ddp", "single_device"])
def test_teardown_before_setup_and_twice_is_harmless(inner):
    strategy = DiLoCoStrategy(inner=inner)
    strategy.receive(parts())
    strategy.teardown()
    strategy.connect(nn.Linear(1, 1))
    strategy.on_exception(KeyboardInterrupt())
    strategy.teardown()
    strategy.teardown()
    assert strategy.model is strategy.module


# With a Trainer


class Breaks(TrainModule):
    """Fails in its sixth step."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 5:
            raise ValueError("enough")
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_checkpoint_of_a_failed_training_has_the_outer_optimizer(tmp_path):
    saves = ModelCheckpoint(dirpath=tmp_path, save_on_exception=True)
    trainer = quiet_trainer(DiLoCoStrategy(every=2), callbacks=[saves], enable_checkpointing=True)
    with pytest.raises(ValueError, match="enough"):
        trainer.fit(Breaks(), shuffled_loader(16, 2))
    [path] = tmp_path.glob("*.ckpt")
    [outer] = PortableCheckpointIO().load_checkpoint(path)["strategy"]["state"]["outer"]
    assert outer["steps"] == 5
    assert set(outer["weights"]) == {"layer.weight", "layer.bias"}


class SavesInAStep(Breaks):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_after_backward(self):
        if self.trainer.global_step == 2:
            self.trainer.save_checkpoint(self.path)


def saved_in_a_step(cluster, folder):
    trainer = quiet_trainer(DiLoCoStrategy(every=4), cluster, limit_train_batches=4)
    trainer.fit(SavesInAStep(f"{folder}/saved"), shuffled_loader(32, 2))


def test_a_save_within_a_step_is_one_of_all_groups(tmp_path):
    in_ranks(saved_in_a_step, folder=str(tmp_path))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["saved"]
    assert "layer.weight" in PortableCheckpointIO().load_checkpoint(tmp_path / "saved")["state_dict"]


class OwnAverage(Callback):
    """An average that is no WeightAveraging, of another package."""

    averages_weights = True


def average_in_groups(cluster):
    for callback in (EMAWeightAveraging(), OwnAverage()):
        trainer = quiet_trainer(DiLoCoStrategy(), cluster, callbacks=[callback])
        message = f"{type(callback).__name__} averages the weights of each group by itself"
        with pytest.raises(ConflictError, match=message):
            trainer.fit(Breaks(), shuffled_loader(16, 2))


def test_averages_of_each_group_are_refused():
    in_ranks(average_in_groups)


def pruned_in_groups(cluster):
    trainer = quiet_trainer(DiLoCoStrategy(), cluster, callbacks=[ModelPruning("l1_unstructured")])
    with pytest.raises(ConflictError, match="ModelPruning renames parameters during the training"):
        trainer.fit(Breaks(), shuffled_loader(16, 2))


def test_pruning_in_groups_is_refused():
    in_ranks(pruned_in_groups)

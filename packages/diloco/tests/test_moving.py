"""Evaluations and checkpoints within a round have the mean of the groups; checkpoints move to others."""

import copy
import logging
from pathlib import Path

import pytest
import torch
from packages.diloco.tests.test_resume import BATCHES, EVERY, Net, fit
from tests.ranks import in_ranks
from tests.trainer_runs import Saves, quiet_trainer, shuffled_loader

from dstrat import Callback
from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat_ddp import DDPStrategy
from dstrat_diloco import DiLoCoStrategy
from dstrat_fsdp import FSDPStrategy

AT = EVERY + 2  # within the second round


class Validated(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().training_step(batch, batch_idx))


def weights_of(strategy):
    return {name: getattr(one, "_local_tensor", one).detach().clone() for name, one in strategy.local_weights().items()}


class Weights(Callback):
    """The weights before, in and after each validation; those of all groups have the mean in it."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append({"before": weights_of(trainer.strategy)})

    def on_validation_start(self, trainer, module):
        with trainer.strategy.evaluation_context():  # another one within it, which leaves the mean
            pass
        self.seen[-1]["within"] = weights_of(trainer.strategy)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.seen:
            self.seen[-1]["after"] = weights_of(trainer.strategy)


def validated(cluster, inner, groups, folder):
    weights = Weights()
    trainer = quiet_trainer(
        DiLoCoStrategy(inner=inner, groups=groups, every=EVERY),
        cluster,
        callbacks=[weights, Saves(Path(folder), (AT,))],
        val_check_interval=1,
        num_sanity_val_steps=0,
        limit_train_batches=BATCHES,
    )
    module = Validated()
    size = cluster.world_size
    trainer.fit(module, shuffled_loader(2 * BATCHES * size, 2), shuffled_loader(4 * size + 1, 2))
    return weights.seen, float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize(
    ("inner", "groups"), [pytest.param("ddp", 4, marks=pytest.mark.variant), ("ddp", 2), ("fsdp", 2)]
)
def test_a_validation_has_the_mean_of_the_groups_and_the_training_goes_on(inner, groups, tmp_path):
    results = in_ranks(validated, 4, inner=inner, groups=groups, folder=str(tmp_path))
    size = 4 // groups
    for step in range(BATCHES - 1):
        steps = [seen[step] for seen, _ in results]
        for rank, of_step in enumerate(steps):
            for name, within in of_step["within"].items():
                # Statistics of a group are those of its first rank.
                peers = steps[0 if "running" in name else rank % size :: size]
                if "num_batches" not in name:
                    mean = sum(peer["before"][name] for peer in peers) / groups
                    torch.testing.assert_close(within, mean, rtol=1e-6, atol=1e-7)
                if "running" not in name:
                    assert torch.equal(of_step["after"][name], of_step["before"][name]), name
        first, last = (one["before"]["layers.0.weight"] for one in (steps[0], steps[-size]))
        assert torch.equal(first, last) == ((step + 1) % EVERY == 0)
    assert len({loss for _, loss in results}) == 1
    saved = loaded_on_one_device(tmp_path / str(AT))
    if inner == "ddp":
        for name, within in results[0][0][AT - 1]["within"].items():
            assert torch.equal(saved[name], within), name


def loaded_on_one_device(path):
    trainer = quiet_trainer(SingleDeviceStrategy())
    module = Validated()
    trainer.validate(module, shuffled_loader(4, 2), ckpt_path=path)
    return module.state_dict()


# Moving


class Notes(Callback):
    """The state of the outer optimizer when the training begins."""

    def __init__(self):
        self.state, self.weights = None, None

    def on_train_start(self, trainer, module):
        self.weights = {name: one.clone() for name, one in trainer.strategy.module_state_dict().items()}
        state = trainer.strategy.state_dict()
        if state.get("outer"):
            full = trainer.strategy.inner.replicates_state
            self.state = copy.deepcopy(state["outer"][0]) if full else {"steps": state["outer"][0]["steps"]}


def saved_on_four(cluster, folder):
    fit(cluster, folder, callbacks=[Saves(Path(folder), (AT,))], groups=2, fragments=2, delay=1)


def saved_by(cluster, folder, strategy):
    trainer = quiet_trainer(strategy, cluster, callbacks=[Saves(Path(folder), (AT,))])
    trainer.fit(Net(), shuffled_loader(2 * BATCHES * cluster.world_size, 2))


def moved(cluster, folder, strategy):
    notes, messages = Notes(), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("dstrat_diloco").addHandler(handler)
    trainer = quiet_trainer(strategy, cluster, callbacks=[notes])
    trainer.fit(Net(), shuffled_loader(2 * BATCHES * cluster.world_size, 2), ckpt_path=Path(folder) / str(AT))
    return notes.weights, notes.state, messages, trainer.global_step


def test_a_checkpoint_moves_to_other_groups_with_the_outer_optimizer(tmp_path):
    in_ranks(saved_on_four, 4, folder=str(tmp_path))
    saved = torch_state(tmp_path / str(AT))
    for size, options in ((4, {"groups": 4}), (2, {}), (4, {"groups": 2, "inner": "fsdp"}), (1, {})):
        strategy = DiLoCoStrategy(every=EVERY, fragments=2, delay=1, **options)
        results = in_ranks(moved, size, folder=str(tmp_path), strategy=strategy)
        weights, state, messages, _ = results[0]
        for name, value in weights.items():
            assert torch.equal(value, saved["state_dict"][name]), name
        outer = saved["strategy"]["state"]["outer"][0]
        assert state["steps"] == outer["steps"] == AT
        for entry in ("weights", "momentum"):
            for name, value in state.get(entry, {}).items():
                assert torch.equal(value, outer[entry][name]), (entry, name)
        assert len(messages) == (size == 4)
        if size == 4:
            assert "the checkpoint was saved by 2 groups with DDPStrategy, and is continued by" in messages[0]


def torch_state(path):
    from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO

    return PortableCheckpointIO().load_checkpoint(path)


@pytest.mark.parametrize("other", [DDPStrategy, FSDPStrategy])
def test_checkpoints_move_to_and_from_other_strategies(other, tmp_path):
    in_ranks(saved_by, 2, folder=str(tmp_path / "diloco"), strategy=DiLoCoStrategy(every=EVERY))
    in_ranks(saved_by, 2, folder=str(tmp_path / "other"), strategy=other())
    saved = torch_state(tmp_path / "diloco" / str(AT))["state_dict"]
    weights, *_ = in_ranks(moved, 2, folder=str(tmp_path / "diloco"), strategy=other())[0]
    assert all(torch.equal(value, saved[name]) for name, value in weights.items())
    saved = torch_state(tmp_path / "other" / str(AT))["state_dict"]
    weights, *_ = in_ranks(moved, 2, folder=str(tmp_path / "other"), strategy=DiLoCoStrategy(every=EVERY))[0]
    assert all(torch.equal(value, saved[name]) for name, value in weights.items())

"""What comes back to the process that asked for a run, when the run was in others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from tests.warm_program import WarmProgram
from torch import nn

from dstrat import Callback, ModelCheckpoint, TrainModule
from dstrat.errors import MisuseError, RankFailedError

METHODS = ["fork", "forkserver"]  # spawn sends the same, and costs seconds for each rank


class Counting(Callback):
    """Has a state, with a tensor in it."""

    def __init__(self):
        self.batches = torch.zeros(())
        self.processes = set()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches, "process": os.getpid()}

    def load_state_dict(self, state_dict):
        self.batches = state_dict["batches"]
        self.processes.add(state_dict["process"])


@pytest.fixture
def elsewhere(quiet_trainer, averaging):
    """Makes a Trainer whose run is in two other processes."""

    def make(start_method="fork", **kwargs):
        return quiet_trainer(strategy=averaging(start_method=start_method), devices=2, **kwargs)

    return make


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("method", METHODS)
def test_every_result_of_one_device_comes_back_from_other_processes(
    quiet_trainer, elsewhere, make_line, loader, method, tmp_path
):
    here, there = make_line(), make_line()
    counting = Counting()
    checkpoint = ModelCheckpoint(tmp_path / "kept", monitor="val_loss")
    two = elsewhere(method, callbacks=[counting, checkpoint], enable_checkpointing=True)
    two.fit(there, loader(), loader())
    metrics_of_fit = dict(two.callback_metrics)
    evaluations = [getattr(two, run)(there, loader()) for run in ("validate", "test")]
    predictions = two.predict(there, loader())

    one = quiet_trainer(callbacks=[Counting()])  # last, as beside a GPU no process is forked after a backward pass
    one.fit(here, loader(batch_size=16), loader(batch_size=16))
    assert torch.allclose(weights(here), weights(there), atol=1e-6)
    assert (two.global_step, two.current_epoch) == (one.global_step, one.current_epoch) == (6, 2)
    assert metrics_of_fit.keys() == one.callback_metrics.keys()
    assert float(metrics_of_fit["val_loss"]) == pytest.approx(float(one.callback_metrics["val_loss"]), rel=1e-5)
    assert counting.batches == 6
    assert counting.processes
    assert os.getpid() not in counting.processes
    assert Path(checkpoint.best_model_path).exists()

    for run, ours in zip(("validate", "test"), evaluations, strict=True):
        theirs = getattr(one, run)(here, loader(batch_size=16))
        assert [list(values) for values in ours] == [list(values) for values in theirs]
        assert [*ours[0].values()] == pytest.approx([*theirs[0].values()], rel=1e-5)
    assert torch.equal(torch.cat(predictions), torch.cat(one.predict(here, loader())))
    assert all(prediction.device.type == "cpu" for prediction in predictions)


@pytest.mark.parametrize("method", METHODS)
def test_a_second_fit_goes_on_from_the_first(quiet_trainer, elsewhere, make_line, loader, method):
    here, there = make_line(), make_line()
    for _ in range(2):
        elsewhere(method, max_epochs=1).fit(there, loader())
    for _ in range(2):  # after the forks, as above
        quiet_trainer(max_epochs=1).fit(here, loader(batch_size=16))
    assert torch.allclose(weights(here), weights(there), atol=1e-6)


def test_a_run_that_a_signal_ends_leaves_what_it_has_come_to(elsewhere, make_line, line_class, loader):
    class Stopping(line_class):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.trainer.global_step == 2 and self.global_rank == 1:
                os.kill(os.getpid(), signal.SIGINT)

    trainer, module, before = elsewhere(max_epochs=20), make_line(Stopping), weights(make_line())
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(module, loader())
    assert trainer.interrupted
    assert 2 <= trainer.global_step < 60
    assert trainer.num_training_batches == 3
    assert "loss" in {name.removesuffix("_step") for name in trainer.callback_metrics}
    assert not torch.equal(weights(module), before)


def test_a_signal_before_the_run_has_begun_is_known_too(elsewhere, line_class, loader):
    class Stopping(line_class):
        def setup(self, stage):
            os.kill(os.getpid(), signal.SIGINT)

    trainer = elsewhere(max_steps=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Stopping(), loader())
    assert trainer.interrupted
    trainer.fit(line_class(), loader())
    assert not trainer.interrupted


def test_random_numbers_after_a_run_are_those_that_follow_it(elsewhere, line_class, loader):
    class Drawing(line_class):
        def training_step(self, batch, batch_idx):
            self.log("drawn", torch.rand(()), sync_dist=False)
            return super().training_step(batch, batch_idx)

    drawn, modules = [], [Drawing(), Drawing()]
    torch.manual_seed(3)
    for module in modules:
        trainer = elsewhere(max_steps=1)
        trainer.fit(module, loader())
        drawn.append(float(trainer.callback_metrics["drawn"]))
    assert drawn[0] != drawn[1]


def test_hyperparameters_that_the_run_has_changed_come_back(elsewhere, line_class, loader):
    class Tuned(line_class):
        def __init__(self, width, net):
            super().__init__()
            self.save_hyperparameters()

        def on_train_start(self):
            self.hparams.width = [5, {"a": 1.0}]
            self.hparams.found = "here"
            self.hparams.net = nn.Linear(2, 2)

    module = Tuned(3, nn.Linear(1, 1))
    elsewhere(max_steps=1).fit(module, loader())
    assert (module.hparams.width, module.hparams.found) == ([5, {"a": 1.0}], "here")
    assert module.hparams.net.in_features == 1  # what is not plain stays


def test_callbacks_that_the_module_configures_come_back(elsewhere, line_class, loader):
    class Counted(line_class):
        def configure_callbacks(self):
            return Counting()

    trainer = elsewhere(max_epochs=1)
    trainer.fit(Counted(), loader())
    assert [callback.batches for callback in trainer.callbacks if isinstance(callback, Counting)] == [3]


def test_layers_that_configure_model_makes_come_back(elsewhere, line_class, loader):
    class Late(line_class):
        def __init__(self):
            super().__init__()
            del self.layer

        def configure_model(self):
            if not hasattr(self, "layer"):
                self.layer = nn.Linear(8, 1)
                nn.init.constant_(self.layer.weight, 2.0)

    module = Late()
    trainer = elsewhere(max_steps=1)
    trainer.fit(module, loader())
    assert module.layer.weight.std() > 0  # it was trained
    assert trainer.test(module, loader())[0]["test_loss"] > 0


def test_weights_come_back_without_what_only_a_run_can_do_with_the_layers(elsewhere, line_class, loader):
    class Splits(line_class):
        def configure_model(self):
            assert self.trainer.strategy.world_size >= 1  # by which layers are sharded; outside a run there is none

    module = Splits()
    before = weights(module)
    elsewhere(max_steps=1).fit(module, loader())
    assert not weights(module).equal(before)


def test_layers_that_are_made_in_another_hook_are_an_error_after_everything_else_is_back(elsewhere, line_class, loader):
    class Later(line_class):
        def setup(self, stage):
            self.head = nn.Linear(1, 1)

    module = Later()
    before = weights(module)
    trainer = elsewhere(max_steps=1)
    with pytest.raises(
        MisuseError, match=r"made head\.weight, head\.bias in Later.*make layers in __init__ or in conf"
    ):
        trainer.fit(module, loader())
    assert trainer.global_step == 1
    assert not torch.equal(before, weights(module))


def test_a_module_whose_precision_was_converted_comes_back_in_it(elsewhere, line_class, loader):
    class Double(line_class):
        def on_fit_start(self):
            self.double()

        def loss(self, batch):
            return super().loss([part.double() for part in batch])

    module = Double()
    elsewhere(max_steps=1).fit(module, loader())
    assert module.dtype == torch.float64


class Failing(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.fails_in_batch = 1

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == self.fails_in_batch:
            raise ZeroDivisionError("the second batch")
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_comes_back_with_the_traceback_of_its_rank_and_the_trainer_can_run_again(
    elsewhere, loader, method
):
    module, trainer = Failing(), elsewhere(method, max_steps=3)
    with pytest.raises(RankFailedError) as error:
        trainer.fit(module, loader())
    assert error.value.rank == 1
    assert "ZeroDivisionError: the second batch" in error.value.rank_traceback
    assert "in training_step" in error.value.rank_traceback
    module.fails_in_batch = None
    trainer.fit(module, loader())
    assert trainer.global_step == 3


def test_a_state_that_cannot_be_sent_is_an_error_that_names_it(elsewhere, line, loader):
    class Odd(Counting):
        def state_dict(self):
            return {"how": [lambda: None]}

    name = Odd().state_key
    with pytest.raises(RankFailedError) as error:
        elsewhere(max_steps=1, callbacks=[Odd()]).fit(line, loader())
    assert f"result.changes.callbacks[{name!r}]['how'][0] (function) cannot be pickled" in str(error.value)


def test_predictions_of_several_megabytes_come_back(elsewhere, line_class, loader):
    class Wide(line_class):
        def predict_step(self, batch, batch_idx):
            return batch[0].sum(1, keepdim=True).expand(-1, 2**16).contiguous()

    predictions = torch.cat(elsewhere().predict(Wide(), loader()))
    assert predictions.shape == (48, 2**16)
    assert torch.equal(predictions[:, 0], predictions[:, -1])


SCRIPT = r"""
import os
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from dstrat import Trainer, TrainModule, ParallelStrategy

class Plain(ParallelStrategy):
    pass

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, batch):
        return self.layer(batch)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("mean", self.layer(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

sys.stdout.write("started\n")  # at once, as below, so that ranks do not mix their lines
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
module = Net()
trainer = Trainer(
    accelerator=os.environ.get("DSTRAT_TEST_ACCELERATOR", "cpu"), devices=2, strategy=Plain(), max_epochs=1,
    logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
)
trainer.fit(module, loader)
results = trainer.test(module, loader)
predictions = trainer.predict(module, DataLoader(torch.ones(8, 2), batch_size=2))
sys.stdout.write(
    f"rank {trainer.global_rank} steps {trainer.global_step} loss {sorted(trainer.callback_metrics)} "
    f"tested {len(results)} predicted {sum(map(len, predictions))}\n"
)
"""


def test_with_popen_every_rank_runs_the_script_to_its_end_and_has_the_results(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    lines = WarmProgram(script).run().splitlines()
    assert lines.count("started") == 3  # the process that was started, which becomes the supervisor, and two ranks
    ends = sorted(line for line in lines if line.startswith("rank"))
    assert len(ends) == 2
    for rank, end in enumerate(ends):
        assert end.startswith(f"rank {rank} steps 2 loss ")
        assert end.endswith("tested 1 predicted 8")


def test_predictions_that_cannot_be_pickled_are_an_error(quiet_trainer, line_class, loader, averaging):
    class Odd(line_class):
        def predict_step(self, batch, batch_idx):
            return {"scores": lambda: None}

    with pytest.raises(
        RankFailedError, match=r"MisuseError: predictions .* cannot be pickled: let predict_step return"
    ):
        quiet_trainer(strategy=averaging(), devices=2).predict(Odd(), loader())


def test_an_evaluation_of_no_batches_calls_no_hook(quiet_trainer, line_class, loader):
    class Collecting(line_class):
        def __init__(self):
            super().__init__()
            self.losses = []

        def validation_step(self, batch, batch_idx):
            self.losses.append(self.loss(batch))

        test_step = validation_step

        def on_validation_epoch_end(self):
            self.log("mean", torch.stack(self.losses).mean())  # an error for an empty list

        on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    limits = {"limit_val_batches": 0, "limit_test_batches": 0.0, "limit_predict_batches": 0}
    trainer, module = quiet_trainer(**limits), Collecting()
    assert (
        trainer.validate(module, loader()) == trainer.test(module, loader()) == trainer.predict(module, loader()) == []
    )

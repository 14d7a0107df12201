"""What a run records of itself, and how it is seen to have ended."""

import os
import signal

import pytest
from tests.accelerators import ACCELERATOR
from tests.warm_program import WarmProgram

from dstrat import Callback, CSVLogger, ModelCheckpoint
from dstrat.cli.runs.record import read_run
from dstrat.errors import RankFailedError
from dstrat.launch.run_record import RECORD_FILE, append_event, is_running, read_events, this_process


class Act(Callback):
    """Does something in one rank after a step, in the first attempt."""

    def __init__(self, action, rank=0, step=3):
        self.action, self.rank, self.step = action, rank, step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (trainer.global_rank, trainer.global_step, trainer.restart_count) == (self.rank, self.step, 0):
            self.action()


def fail():
    raise ValueError("boom")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def recording_trainer(quiet_trainer, tmp_path):
    """Makes a Trainer that logs to ``tmp_path/log``."""

    def make(**kwargs):
        return quiet_trainer(**({"logger": CSVLogger(tmp_path, "", "log")} | kwargs))

    return make


@pytest.fixture
def recorded(tmp_path):
    return lambda: read_run(tmp_path / "log")


def test_a_run_records_plan_arguments_environment_checkpoints_and_values(recording_trainer, line, loader, recorded):
    trainer = recording_trainer(max_epochs=2, callbacks=ModelCheckpoint(monitor="val_loss", save_top_k=-1))
    trainer.fit(line, loader(), loader())
    trainer.test(line, loader(), verbose=False)
    run = recorded()
    fit, test = run.stages
    assert (fit.stage, fit.status, fit.step, test.stage, test.status) == ("fit", "completed", 12, "test", "completed")
    assert run.plan == {**trainer.plan.to_dict(), "choices": run.plan["choices"]} | {"device_indices": [0]}
    assert {row["subject"] for row in run.plan["choices"]} >= {"strategy", "accelerator", "precision"}
    assert (
        fit.begin["arguments"].items()
        >= {"max_epochs": 2, "accelerator": ACCELERATOR, "callbacks": "ModelCheckpoint"}.items()
    )
    assert "min_epochs" not in fit.begin["arguments"]  # it has its default
    assert fit.begin["environment"]["torch"]
    assert fit.begin["monitor"] == {"name": "val_loss", "mode": "min"}
    assert [event["step"] for event in fit.checkpoints] == [6, 12]
    assert all((run.folder / event["path"]).exists() for event in fit.checkpoints)
    assert not any(event["path"].startswith("/") for event in fit.checkpoints)  # the folder may be moved
    assert [point.step for point in run.curves["val_loss"]] == [6, 12]
    assert run.last_values["test_loss"] == pytest.approx(float(trainer.callback_metrics["test_loss"]))
    (memory,) = fit.end["memory"]
    assert memory["host"] >= memory["host_before"] > 1e6


def test_one_rank_writes_the_memory_of_all(recording_trainer, averaging, line, loader, recorded):
    recording_trainer(strategy=averaging(), devices=2, max_epochs=1).fit(line, loader())
    (fit,) = recorded().stages
    assert [sizes["host"] > 1e6 for sizes in fit.end["memory"]] == [True, True]


def test_an_exception_is_recorded_with_its_traceback(recording_trainer, line, loader, recorded):
    with pytest.raises(ValueError, match="boom"):
        recording_trainer(callbacks=Act(fail)).fit(line, loader())
    (fit,) = recorded().stages
    assert (fit.status, fit.step, fit.reason) == ("failed", 3, "ValueError: boom")
    assert "in fail" in fit.end["traceback"]


@pytest.mark.parametrize(
    ("action", "reason"),
    [(fail, "rank 1 of 2 failed: ValueError: boom"), (die, "rank 1 of 2 was killed by SIGKILL")],
)
def test_the_failure_of_another_rank_is_recorded(recording_trainer, averaging, line, loader, recorded, action, reason):
    with pytest.raises(RankFailedError):
        recording_trainer(strategy=averaging(), devices=2, callbacks=Act(action, rank=1)).fit(line, loader())
    (fit,) = recorded().stages
    assert (fit.status, fit.failure["rank"]) == ("failed", 1)
    assert fit.reason.startswith(reason)


def test_attempts_of_a_restarted_job_are_recorded_in_one_folder(recording_trainer, averaging, line, loader, recorded):
    checkpoints = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)
    trainer = recording_trainer(
        strategy=averaging(), devices=2, max_restarts=1, callbacks=[Act(fail, rank=1), checkpoints], max_epochs=2
    )
    trainer.fit(line, loader())
    first, second = recorded().stages
    assert (first.begin["attempt"], first.status, first.reason) == (1, "failed", "rank 1 of 2 failed: ValueError: boom")
    assert (second.begin["attempt"], second.status, second.step) == (2, "completed", 6)


def test_a_signal_is_recorded(recording_trainer, line, loader, recorded):
    interrupt = Act(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        recording_trainer(callbacks=interrupt).fit(line, loader())
    (fit,) = recorded().stages
    assert (fit.status, fit.reason) == ("interrupted", "SIGINT")


KILLED = """
import os, signal, torch
from dstrat import CSVLogger, Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

options = {"logger": CSVLogger(".", "", "log"), "enable_model_summary": False}
trainer = Trainer(accelerator=os.environ.get("DSTRAT_TEST_ACCELERATOR", "cpu"), devices=1, **options)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(9, 1)))
"""


def test_a_run_whose_process_has_gone_is_killed(tmp_path, recorded):
    script = tmp_path / "program.py"
    script.write_text(KILLED)
    WarmProgram(script).communicate()
    (fit,) = recorded().stages
    assert (fit.status, fit.end) == ("killed", None)


def test_a_process_that_has_the_number_of_an_ended_one_is_another():
    assert is_running(this_process()) is True
    assert is_running({**this_process(), "start": 1}) is False
    assert is_running({**this_process(), "host": "elsewhere"}) is None


@pytest.mark.parametrize("options", [{"logger": False}, {"fast_dev_run": True}])
def test_a_run_without_a_log_folder_records_nothing(recording_trainer, line, loader, tmp_path, options):
    recording_trainer(**options).fit(line, loader(), loader())
    assert list(tmp_path.rglob(RECORD_FILE)) == []


def test_times_of_phases_are_recorded_with_a_profiler_only(recording_trainer, line, loader, recorded):
    recording_trainer(max_epochs=1).fit(line, loader())
    recording_trainer(max_epochs=1, profiler="simple").fit(line, loader())
    without, measured = recorded().stages
    assert without.end["phases"] == {}
    assert measured.end["phases"].keys() >= {"next_batch", "training_step", "backward", "optimizer_step"}


def test_a_record_that_cannot_be_written_ends_no_run(recording_trainer, line, loader, tmp_path, caplog):
    (tmp_path / "log" / RECORD_FILE).mkdir(parents=True)
    recording_trainer(max_epochs=1).fit(line, loader())
    (warning,) = (message for message in caplog.messages if "record" in message)
    assert warning.startswith(f"the record of this run in {tmp_path / 'log'} ends here: ")


def test_a_half_written_line_is_left_out(tmp_path):
    append_event(tmp_path, "begin", number=1)
    with (tmp_path / RECORD_FILE).open("a") as file:
        file.write('{"event": "epo')
    append_event(tmp_path, "end", number=2)
    assert [event.get("number") for event in read_events(tmp_path)] == [1, 2]

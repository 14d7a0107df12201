from __future__ import annotations

import csv

import pytest

from dstrat import Callback, CSVLogger, DeviceStatsMonitor, LearningRateMonitor, Logger, ThroughputMonitor
from dstrat.errors import LoggerError


class Watching(Callback):
    """Remembers what is known in the middle of each validation."""

    def __init__(self):
        self.seen = []

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append((dict(trainer.progress_bar_metrics), dict(trainer.callback_metrics)))


def steps_of(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [row["step"] for row in csv.DictReader(file)]


@pytest.fixture
def shown(make_line):
    class Shown(type(make_line())):
        def training_step(self, batch, batch_idx):
            self.log("index", float(batch_idx), prog_bar=True)
            self.log("hidden", 1.0, logger=False)
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            self.log("val", 2.0, prog_bar=True)

    return make_line(Shown)


def test_values_of_training_stay_known_while_validation_goes_on(quiet_trainer, shown, loader):
    callback = Watching()
    trainer = quiet_trainer(max_epochs=2, callbacks=callback, num_sanity_val_steps=0)
    trainer.fit(shown, loader(), loader())
    first, last = callback.seen[0], callback.seen[-1]
    assert first == ({"index": 5.0}, {"index": 5.0, "hidden": 1.0})
    assert last == ({"val": 2.0, "index": 5.0}, {"val": 2.0, "index": 5.0, "hidden": 1.0})


@pytest.mark.parametrize("on_step", [False, True])
def test_the_newest_value_of_a_name_counts(quiet_trainer, make_line, loader, on_step):
    class SameName(type(make_line())):
        def training_step(self, batch, batch_idx):
            self.log("x", float(batch_idx), prog_bar=True)
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            self.log("x", 9.0, prog_bar=True, on_step=on_step, on_epoch=not on_step)

    class Reading(Callback):
        def __init__(self):
            self.in_training, self.after_validation = [], []

        def read(self, trainer):
            return trainer.callback_metrics["x"].item(), trainer.progress_bar_metrics["x"]

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.in_training.append(self.read(trainer))

        def on_validation_end(self, trainer, module):
            self.after_validation.append(self.read(trainer))

        def on_train_epoch_end(self, trainer, module):
            self.after_validation.append(self.read(trainer))

    callback = Reading()
    options = {"limit_train_batches": 2, "val_check_interval": 1, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(max_epochs=2, callbacks=callback, **options)
    trainer.fit(make_line(SameName), loader(), loader())
    assert callback.in_training == [(0.0, 0.0), (1.0, 1.0)] * 2
    assert callback.after_validation == [(9.0, 9.0)] * 6
    assert trainer.callback_metrics["x"] == 9.0


def test_what_loggers_write_is_known_as_logged_metrics(quiet_trainer, shown, loader):
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(shown, loader(), loader())
    assert trainer.logged_metrics == {"index": 5.0, "val": 2.0}


def test_known_values_are_tensors_as_their_users_expect(quiet_trainer, shown, loader, averaging):
    trainer = quiet_trainer(max_epochs=1, strategy=averaging(), devices=2)  # in other processes
    trainer.fit(shown, loader(), loader())
    assert trainer.callback_metrics["val"].item() == 2.0


class Broken(Logger):
    """Fails at one of its methods."""

    def __init__(self, method):
        self.method = method

    def _fail(self, method):
        if method == self.method:
            raise OSError("no space left")

    def log_metrics(self, metrics, step):
        self._fail("log_metrics")

    def finalize(self, status):
        self._fail("finalize")


@pytest.mark.parametrize("method", ["log_metrics", "finalize"])
def test_a_logger_that_fails_ends_the_run_with_its_name(quiet_trainer, shown, loader, method):
    with pytest.raises(LoggerError, match=rf"^Broken\.{method} failed: OSError\('no space left'\)$") as caught:
        quiet_trainer(logger=Broken(method), log_every_n_steps=1).fit(shown, loader())
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("monitor", [DeviceStatsMonitor, LearningRateMonitor, ThroughputMonitor])
def test_so_does_one_that_a_callback_writes_to(quiet_trainer, line_class, loader, monitor):
    class Silent(line_class):
        def log(self, *args, **kwargs):
            pass

    with pytest.raises(LoggerError, match=r"^Broken\.log_metrics failed"):
        quiet_trainer(logger=Broken("log_metrics"), callbacks=monitor(), log_every_n_steps=1).fit(Silent(), loader())


def test_the_other_loggers_have_their_row_nevertheless(quiet_trainer, shown, loader, tmp_path):
    loggers = [Broken("log_metrics"), CSVLogger(tmp_path, version=0)]
    with pytest.raises(LoggerError):
        quiet_trainer(logger=loggers, log_every_n_steps=1).fit(shown, loader())
    assert steps_of(tmp_path / "dstrat_logs" / "version_0") == ["1"]


def test_several_loggers_write_the_same_on_rank_0_and_know_their_folders_everywhere(
    quiet_trainer, shown, loader, averaging, tmp_path
):
    class Noting(Callback):
        def on_train_start(self, trainer, module):
            folders = [str(logger.log_dir) for logger in trainer.loggers]
            (tmp_path / f"rank_{trainer.global_rank}").write_text(" ".join(folders))
            trainer.logger.log_metrics({"own": 1.0}, 0)  # from every rank

    loggers = [CSVLogger(tmp_path / "a"), CSVLogger(tmp_path / "b", version="mine")]
    quiet_trainer(
        strategy=averaging(), devices=2, logger=loggers, callbacks=Noting(), max_epochs=1, log_every_n_steps=1
    ).fit(shown, loader())
    folders = [tmp_path / "a" / "dstrat_logs" / "version_0", tmp_path / "b" / "dstrat_logs" / "mine"]
    assert {(tmp_path / f"rank_{rank}").read_text() for rank in (0, 1)} == {" ".join(map(str, folders))}
    assert [path.name for path in folders[0].parent.iterdir()] == ["version_0"]
    assert steps_of(folders[0]) == ["0", "1", "2", "3"]
    assert steps_of(folders[1]) == ["1", "2", "3"]

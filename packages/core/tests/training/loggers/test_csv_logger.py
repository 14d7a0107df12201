from __future__ import annotations

import argparse
import collections
import csv
import json
import os
import pickle
import resource
import subprocess
import sys
import types

import pytest
import torch
from tests.accelerators import ACCELERATOR

from dstrat import Trainer
from dstrat.errors import MisuseError, RequestError
from dstrat.training.loggers.csv_logger import CSVLogger, CSVTable
from dstrat.training.loggers.defaults import agree_on_folders


def rows_of(logger):
    with (logger.log_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def open_logger(tmp_path):
    made = []

    def open_(version=None, **options):
        made.append(CSVLogger(tmp_path, version=version, **options))
        return made[-1]

    yield open_
    for logger in made:
        logger.finalize("success")


@pytest.fixture
def logger(open_logger):
    return open_logger()


def test_each_call_becomes_a_row_that_is_in_the_file_at_once(logger):
    logger.log_metrics({"epoch": 0, "loss": 0.5}, step=10)
    logger.log_metrics({"epoch": 0, "loss": 0.25}, step=20)
    assert rows_of(logger) == [
        {"step": "10", "epoch": "0", "loss": "0.5"},
        {"step": "20", "epoch": "0", "loss": "0.25"},
    ]


def test_a_new_name_becomes_a_column_that_is_empty_in_earlier_rows(logger):
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.log_metrics({"val_loss": 0.75, "a, b": 1.0}, step=2)
    logger.log_metrics({"loss": 0.25}, step=3)
    assert rows_of(logger) == [
        {"step": "1", "loss": "0.5", "val_loss": "", "a, b": ""},
        {"step": "2", "loss": "", "val_loss": "0.75", "a, b": "1.0"},
        {"step": "3", "loss": "0.25", "val_loss": "", "a, b": ""},
    ]
    assert [path.name for path in logger.log_dir.iterdir()] == ["metrics.csv"]


def test_numbers_come_back_exactly(logger):
    values = {"third": 1 / 3, "tiny": 5e-324, "nan": float("nan"), "infinite": float("-inf")}
    logger.log_metrics(values, step=1)
    read = {name: float(text) for name, text in rows_of(logger)[0].items()}
    assert {name: repr(read[name]) for name in values} == {name: repr(value) for name, value in values.items()}


def test_rows_go_on_after_the_logger_was_closed(logger):
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.finalize("success")
    logger.log_metrics({"loss": 0.25}, step=1)
    assert len(rows_of(logger)) == 2


def test_a_version_that_exists_keeps_its_rows_and_loses_half_a_row_of_a_killed_run(open_logger):
    first = open_logger(version=0)
    first.log_metrics({"loss": 0.5}, step=1)
    first.finalize("failed")
    with (first.log_dir / "metrics.csv").open("a") as file:
        file.write("2,0.")
    second = open_logger(version=0)
    second.log_metrics({"loss": 0.25}, step=2)
    assert rows_of(second) == [{"step": "1", "loss": "0.5"}, {"step": "2", "loss": "0.25"}]


def test_a_process_that_is_killed_loses_no_row(tmp_path):
    script = (
        "import os, sys; from dstrat.training.loggers.csv_logger import CSVLogger\n"
        "logger = CSVLogger(sys.argv[1], version=0)\n"
        "for step in range(100): logger.log_metrics({'loss': step / 8, **({'late': 1.0} if step > 50 else {})}, step)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=400, check=False)
    assert done.returncode == -9
    assert [row["step"] for row in rows_of(CSVLogger(tmp_path, version=0))] == [str(step) for step in range(100)]


@pytest.fixture
def full_disk():
    """Lets no file of this process grow beyond a size, until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("late", ["a", "late"])
def test_a_full_disk_is_an_error_that_leaves_whole_rows_alone(logger, full_disk, late):
    for step in range(3):
        logger.log_metrics({"a": step / 3}, step)
    before = (logger.log_dir / "metrics.csv").read_bytes()
    full_disk(len(before) + 4)
    with pytest.raises(OSError, match="File too large"):
        logger.log_metrics({late: 1 / 3}, 3)
    logger.finalize("failed")
    assert [path.read_bytes() for path in logger.log_dir.iterdir()] == [before]


def test_rows_go_on_whole_when_a_disk_that_was_full_has_room_again(logger, full_disk):
    logger.log_metrics({"a": 0.5}, 0)
    full_disk((logger.log_dir / "metrics.csv").stat().st_size + 4)
    for _ in range(2):
        with pytest.raises(OSError, match="File too large"):
            logger.log_metrics({"a": 1 / 3}, 1)
    full_disk(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    logger.log_metrics({"a": 0.25}, 2)
    assert (logger.log_dir / "metrics.csv").read_text() == "step,a\n0,0.5\n2,0.25\n"


def test_settings_are_written_as_json_also_those_that_json_does_not_know(logger, tmp_path):
    logger.log_hyperparams({"lr": 0.1, "where": tmp_path})
    assert json.loads((logger.log_dir / "hparams.json").read_text()) == {"lr": 0.1, "where": str(tmp_path)}


def test_it_can_be_pickled_before_its_first_row(logger):
    copy = pickle.loads(pickle.dumps(logger))
    copy.log_metrics({"loss": 0.5}, step=1)
    copy.finalize("success")
    assert rows_of(copy) == [{"step": "1", "loss": "0.5"}]


@pytest.mark.parametrize("every", [1, 10])
def test_a_pickled_copy_goes_on_below_the_rows_that_were_written(open_logger, every):
    logger = open_logger(flush_logs_every_n_steps=every)
    logger.log_metrics({"loss": 0.5}, step=1)
    copy = pickle.loads(pickle.dumps(logger))  # as for processes that are spawned
    copy.log_metrics({"loss": 0.25}, step=2)
    copy.finalize("success")
    assert rows_of(copy) == [{"step": "1", "loss": "0.5"}, {"step": "2", "loss": "0.25"}]


def test_saving_brings_rows_to_the_disk_and_needs_none(logger, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    logger.save()
    assert not synced
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.save()
    assert len(synced) == 1


def test_a_file_without_a_single_whole_row_is_begun_anew(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,lo")
    table = CSVTable(tmp_path / "metrics.csv")
    table.add({"step": 1, "loss": 0.5})
    table.close()
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,loss", "1,0.5"]


def test_a_trainer_writes_a_csv_table_in_its_own_folder_by_default(tmp_path, line, loader):
    trainer = Trainer(
        accelerator=ACCELERATOR, devices=1, max_epochs=2, log_every_n_steps=2, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(line, loader(), loader())
    trainer.test(line, loader())
    assert trainer.logger.log_dir == trainer.log_dir == tmp_path / "dstrat_logs" / "version_0"
    rows = rows_of(trainer.logger)
    assert [row["step"] for row in rows if row["loss_step"]] == ["2", "4", "6", "8", "10", "12"]
    assert [(row["epoch"], row["step"]) for row in rows if row["val_loss"]] == [("0", "6"), ("1", "12")]
    assert [(row["epoch"], row["step"]) for row in rows if row["loss_epoch"]] == [("0", "6"), ("1", "12")]
    assert float(rows[-1]["test_loss"]) == trainer.callback_metrics["test_loss"]


def test_only_rank_0_writes_and_all_processes_know_the_folder(tmp_path, line, loader, averaging):
    trainer = Trainer(
        accelerator=ACCELERATOR, devices=2, strategy=averaging(), max_epochs=1, log_every_n_steps=1,
        default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip

    class Noting(type(line)):
        def on_train_end(self):
            (tmp_path / f"rank_{self.global_rank}").write_text(str(self.trainer.log_dir))

    trainer.fit(Noting(), loader())
    assert {(tmp_path / f"rank_{rank}").read_text() for rank in (0, 1)} == {str(tmp_path / "dstrat_logs/version_0")}
    trainer.test(line, loader())
    assert trainer.log_dir == trainer.logger.log_dir == tmp_path / "dstrat_logs" / "version_0"
    assert [path.name for path in (tmp_path / "dstrat_logs").iterdir()] == ["version_0"]
    rows = rows_of(CSVLogger(tmp_path, version=0))
    assert [row["step"] for row in rows if row["loss_step"]] == ["1", "2", "3"]


def test_where_it_does_not_write_it_takes_the_folder_it_is_told(logger, tmp_path):
    logger.writes = False
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.log_hyperparams({"lr": 0.1})
    logger.save()
    logger.finalize("success")
    assert (logger.log_dir, logger.version) == (None, None)
    logger.join(tmp_path / "dstrat_logs" / "version_3")
    assert (logger.log_dir, logger.version) == (tmp_path / "dstrat_logs" / "version_3", 3)
    assert list(tmp_path.iterdir()) == []


def test_name_and_version_are_known(open_logger):
    logger = open_logger()
    assert (logger.name, logger.version) == ("dstrat_logs", 0)  # before the first row, as for a path with it
    assert logger.log_dir.name == "version_0"
    assert open_logger().version == 1
    assert open_logger(version="trial").version == "trial"


def test_the_version_waits_for_the_folder_of_all_runs(tmp_path):
    logger = CSVLogger()
    assert logger.version is None
    Trainer(accelerator=ACCELERATOR, devices=1, default_root_dir=tmp_path, logger=logger)
    assert (logger.version, logger.log_dir) == (0, tmp_path / "dstrat_logs" / "version_0")


@pytest.mark.parametrize("settings", [argparse.Namespace(lr=0.1), types.SimpleNamespace(lr=0.1)])
def test_settings_may_be_a_namespace(logger, settings):
    logger.log_hyperparams(settings)
    assert json.loads((logger.log_dir / "hparams.json").read_text()) == {"lr": 0.1}


def test_a_process_that_does_not_write_joins_the_folder_of_rank_0(logger, tmp_path):
    class OfRank1:
        is_global_zero = False

        def broadcast(self, obj, src=0):
            assert obj == [None]
            return [tmp_path / "dstrat_logs" / "version_5"]

    assert agree_on_folders([logger], OfRank1()) == logger.log_dir == tmp_path / "dstrat_logs" / "version_5"
    logger.log_metrics({"loss": 0.5}, step=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [None, ""])
def test_without_a_name_versions_are_in_the_folder_itself(tmp_path, name):
    logger = CSVLogger(tmp_path, name=name)
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.finalize("success")
    assert (logger.name, logger.save_dir, logger.log_dir) == ("", tmp_path, tmp_path / "version_0")
    assert len(rows_of(logger)) == 1


def test_a_prefix_comes_before_the_names_of_all_values(open_logger):
    logger = open_logger(prefix="run")
    logger.log_metrics({"epoch": 0, "loss": 0.5}, step=1)
    assert rows_of(logger) == [{"step": "1", "run-epoch": "0", "run-loss": "0.5"}]


def test_values_of_users_may_be_tensors_and_lack_a_step(logger):
    logger.log_metrics({"loss": torch.tensor(0.5)})
    logger.log_metrics({"loss": torch.tensor([0.25])})
    assert rows_of(logger) == [{"step": "0", "loss": "0.5"}, {"step": "1", "loss": "0.25"}]


def test_a_value_with_several_elements_is_an_error_that_names_it(logger):
    message = r"log_metrics\({'matrix': \.\.\.}\) got a value of shape \(2, 2\): pass a number for each name"
    for value in (torch.eye(2), torch.eye(2).numpy()):
        with pytest.raises(MisuseError, match=message):
            logger.log_metrics({"matrix": value}, step=1)


def test_rows_wait_for_others_where_that_is_asked_for(open_logger):
    logger = open_logger(flush_logs_every_n_steps=100)
    for step in (10, 60, 110):
        logger.log_metrics({"loss": step / 4, **({"late": 1.0} if step == 110 else {})}, step)
        assert (logger.log_dir / "metrics.csv").exists() == (step == 110)
    logger.log_metrics({"loss": 0.5}, 120)
    assert [row["step"] for row in rows_of(logger)] == ["10", "60", "110"]
    logger.save()
    logger.log_metrics({"test_loss": 0.5}, 121)
    logger.finalize("failed")
    assert [row["step"] for row in rows_of(logger)] == ["10", "60", "110", "120", "121"]
    with pytest.raises(RequestError, match=r"CSVLogger\(flush_logs_every_n_steps=0\) must be 1, .* or more"):
        CSVLogger(flush_logs_every_n_steps=0)


def test_rows_after_a_bookmark_are_removed_by_another_attempt(open_logger, tmp_path):
    logger = open_logger()
    logger.log_metrics({"loss": 0.5}, 1)
    bookmark = logger.bookmark()
    logger.log_metrics({"loss": 0.25}, 2)
    logger.log_metrics({"val_loss": 0.25}, 2)
    logger.finalize("failed")
    another = CSVLogger(tmp_path)
    another.join(logger.log_dir)
    another.rewind(bookmark)
    another.log_metrics({"loss": 0.75}, 2)
    another.finalize("success")
    assert [(row["step"], row["loss"]) for row in rows_of(another)] == [("1", "0.5"), ("2", "0.75")]


def test_table_is_empty_after_a_return_to_its_beginning(open_logger, tmp_path):
    logger = open_logger()
    assert logger.bookmark() == 0
    logger.log_metrics({"loss": 0.5}, 1)
    logger.finalize("failed")
    another = CSVLogger(tmp_path)
    another.join(logger.log_dir)
    another.rewind(0)
    assert another.bookmark() == 0
    another.log_metrics({"other": 0.75}, 1)
    another.finalize("success")
    assert rows_of(another) == [{"step": "1", "other": "0.75"}]


def test_later_settings_join_the_earlier_ones(logger):
    logger.log_hyperparams({"lr": 0.1, "width": 8})
    logger.log_hyperparams({"lr": 0.2})
    assert json.loads((logger.log_dir / "hparams.json").read_text()) == {"lr": 0.2, "width": 8}


def test_several_loggers_come_in_any_collection_but_a_string(tmp_path):
    loggers = collections.UserList([CSVLogger(tmp_path, name="a"), CSVLogger(tmp_path, name="b")])  # as a ListConfig
    trainer = Trainer(accelerator="cpu", logger=loggers, default_root_dir=tmp_path)
    assert trainer.loggers == list(loggers)
    with pytest.raises(RequestError, match="logger='csv' is not a Logger, True or False"):
        Trainer(accelerator="cpu", logger="csv", default_root_dir=tmp_path)

from __future__ import annotations

import pickle

import pytest

pytest.importorskip("tensorboard", reason="the extra dstrat[tensorboard] is not installed")

from dstrat import Trainer
from dstrat.training.loggers.tensorboard_logger import TensorBoardLogger


def events_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def scalars_of(folder, name):
    return [(event.step, event.value) for event in events_of(folder).Scalars(name)]


@pytest.fixture
def logger(tmp_path):
    return TensorBoardLogger(tmp_path)


def test_values_are_written_by_step(logger):
    logger.log_metrics({"loss": 0.5, "epoch": 0}, step=10)
    logger.log_metrics({"loss": 0.25, "epoch": 1}, step=20)
    logger.finalize("success")
    assert scalars_of(logger.log_dir, "loss") == [(10, 0.5), (20, 0.25)]
    assert scalars_of(logger.log_dir, "epoch") == [(10, 0.0), (20, 1.0)]


def test_saved_values_are_in_the_file_while_the_run_goes_on(logger):
    logger.save()
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.save()
    assert scalars_of(logger.log_dir, "loss") == [(1, 0.5)]
    logger.finalize("success")


def test_settings_of_any_type_are_written(logger, tmp_path):
    logger.log_hyperparams({"lr": 0.1, "name": "a", "where": tmp_path, "sizes": [1, 2]})
    logger.finalize("success")
    assert "_hparams_/session_start_info" in events_of(logger.log_dir).summary_metadata


def test_values_go_on_after_the_logger_was_closed(logger):
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.finalize("success")
    logger.log_metrics({"test_loss": 0.25}, step=1)
    logger.finalize("success")
    assert scalars_of(logger.log_dir, "loss") == [(1, 0.5)]
    assert scalars_of(logger.log_dir, "test_loss") == [(1, 0.25)]


def test_it_can_be_pickled_before_it_writes(logger):
    copy = pickle.loads(pickle.dumps(logger))
    copy.log_metrics({"loss": 0.5}, step=1)
    copy.finalize("success")
    assert scalars_of(copy.log_dir, "loss") == [(1, 0.5)]


def test_a_trainer_writes_to_it(tmp_path, line, loader):
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, logger=TensorBoardLogger(), default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(line, loader(), loader())
    assert trainer.log_dir == tmp_path / "dstrat_logs" / "version_0"
    assert [step for step, _ in scalars_of(trainer.log_dir, "val_loss")] == [6, 12]


def test_the_writer_is_there_for_what_loggers_do_not_offer(logger):
    logger.experiment.add_text("note", "hello", 3)
    logger.finalize("success")
    assert "note/text_summary" in events_of(logger.log_dir).summary_metadata


def test_where_it_does_not_write_nothing_happens(logger, tmp_path):
    logger.writes = False
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.log_hyperparams({"lr": 0.1})
    logger.experiment.add_text("note", "hello", 3)
    logger.finalize("success")
    assert logger.log_dir is None
    assert list(tmp_path.iterdir()) == []


def test_nested_settings_become_flat(logger):
    logger.log_hyperparams({"model": {"width": 8}})
    logger.finalize("success")
    [data] = [
        m.plugin_data.content for name, m in events_of(logger.log_dir).summary_metadata.items() if "start" in name
    ]
    assert b"model/width" in data

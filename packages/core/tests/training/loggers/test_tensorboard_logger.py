from __future__ import annotations

import logging
import pickle

import pytest
import torch
from tests.accelerators import ACCELERATOR
from torch import nn

pytest.importorskip("tensorboard", reason="the extra dstrat[tensorboard] is not installed")

from dstrat import Trainer
from dstrat.errors import RequestError
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


def test_values_after_a_bookmark_are_purged_by_another_attempt(logger, tmp_path):
    logger.log_metrics({"loss": 0.5}, step=10)
    bookmark = logger.bookmark()
    logger.log_metrics({"loss": 0.25}, step=20)
    logger.finalize("failed")
    another = TensorBoardLogger(tmp_path)
    another.join(logger.log_dir)
    another.rewind(bookmark)
    another.log_metrics({"loss": 0.75}, step=15)
    another.finalize("success")
    assert scalars_of(another.log_dir, "loss") == [(10, 0.5), (15, 0.75)]
    another.log_metrics({"test_loss": 1.0}, step=12)  # as a test does after the fit, in a file of its own
    another.finalize("success")
    assert scalars_of(another.log_dir, "loss") == [(10, 0.5), (15, 0.75)]


def test_a_restart_before_the_first_value_hides_nothing_of_an_earlier_job(logger, tmp_path):
    logger.log_metrics({"loss": 0.5}, step=10)
    logger.finalize("success")
    assert TensorBoardLogger(tmp_path).bookmark() == 0
    assert TensorBoardLogger(tmp_path, version=0).bookmark() is None


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


def test_a_copy_of_one_that_has_written_opens_a_file_of_its_own(logger):
    logger.log_metrics({"loss": 0.5}, step=1)
    copy = pickle.loads(pickle.dumps(logger))
    copy.log_metrics({"other": 0.25}, step=2)
    copy.finalize("success")
    logger.finalize("success")
    assert copy.log_dir == logger.log_dir
    assert scalars_of(copy.log_dir, "other") == [(2, 0.25)]


def test_a_trainer_writes_to_it(tmp_path, line, loader):
    trainer = Trainer(
        accelerator=ACCELERATOR, devices=1, max_epochs=2, logger=TensorBoardLogger(), default_root_dir=tmp_path,
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


def hparams_of(folder):
    """Return what was written of settings: the metrics to compare by, and the settings."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    read = {
        name: HParamsPluginData.FromString(metadata.plugin_data.content)
        for name, metadata in events_of(folder).summary_metadata.items()
        if name.startswith("_hparams_")
    }
    if not read:
        return None
    metrics = [info.name.tag for info in read["_hparams_/experiment"].experiment.metric_infos]
    settings = read["_hparams_/session_start_info"].session_start_info.hparams
    return metrics, {name: value.number_value for name, value in settings.items()}


def test_settings_come_with_a_metric_that_runs_are_compared_by(tmp_path):
    for version, options in enumerate([{}, {"default_hp_metric": False}]):
        logger = TensorBoardLogger(tmp_path, version=version, **options)
        logger.log_hyperparams({"lr": 0.5})
        logger.finalize("success")
        assert hparams_of(logger.log_dir) == ((["hp_metric"], {"lr": 0.5}) if version == 0 else None)
        assert (logger.log_dir / "hparams.json").read_text() == '{\n  "lr": 0.5\n}\n'
    assert scalars_of(tmp_path / "dstrat_logs/version_0", "hp_metric") == [(0, -1.0)]


@pytest.mark.parametrize(("metrics", "expected"), [({"hp/acc": torch.tensor(0.5)}, "hp/acc"), (0.5, "hp_metric")])
def test_settings_are_written_with_values_of_their_own(tmp_path, metrics, expected):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    logger.log_hyperparams({"lr": 0.5})
    logger.log_hyperparams({"lr": 0.25}, metrics, step=3)
    logger.finalize("success")
    assert hparams_of(logger.log_dir) == ([expected], {"lr": 0.25})
    assert scalars_of(logger.log_dir, expected) == [(3, 0.5)]


def test_a_prefix_a_sub_folder_and_options_of_the_writer_are_used(tmp_path):
    logger = TensorBoardLogger(tmp_path, name=None, prefix="run", sub_dir="train", filename_suffix=".mine")
    logger.log_metrics({"loss": torch.tensor(0.5)})
    logger.log_metrics({"losses": {"a": 1.0, "b": 2.0}}, step=1)
    logger.finalize("success")
    assert logger.log_dir == tmp_path / "version_0"
    assert scalars_of(logger.log_dir / "train", "run-loss") == [(0, 0.5)]
    assert scalars_of(logger.log_dir / "train" / "run-losses_b", "run-losses") == [(1, 2.0)]
    assert all(path.name.endswith(".mine") for path in logger.log_dir.rglob("events*"))


def test_images_histograms_texts_and_tables_are_written(logger, tmp_path):
    import numpy as np
    from PIL import Image

    Image.new("RGB", (4, 6)).save(tmp_path / "saved.png")
    images = [torch.zeros(3, 6, 4), np.zeros((6, 4, 3), np.uint8), Image.new("L", (4, 6)), tmp_path / "saved.png"]
    logger.log_image("seen", images, step=3)
    logger.log_image("alone", [torch.zeros(6, 4, 3)], step=3, dataformats="HWC")
    logger.log_histogram("weight", torch.arange(10.0), step=3)
    logger.log_text("note", "hello", step=3)
    logger.log_table("table", columns=["a", "b"], data=[[1, "x|y"], [2.5, None]], step=3)
    logger.finalize("success")
    events = events_of(logger.log_dir)
    assert events.Tags()["images"] == ["seen/0", "seen/1", "seen/2", "seen/3", "alone"]
    assert {(e.step, e.height, e.width) for tag in events.Tags()["images"] for e in events.Images(tag)} == {(3, 6, 4)}
    [histogram] = events.Histograms("weight")
    assert (histogram.step, histogram.histogram_value.num) == (3, 10)
    texts = {name: events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0] for name in ("note", "table")}
    assert texts == {"note": b"hello", "table": b"|a|b|\n|---|---|\n|1|x\\|y|\n|2.5|None|"}
    with pytest.raises(RequestError, match=r"log_image\('one'\) takes a list of images, and got PosixPath"):
        logger.log_image("one", tmp_path / "saved.png")


@pytest.fixture
def drawn(tmp_path, make_line, loader):
    """Fits a line with a logger that writes graphs; returns its folder."""

    def drawn_(example, cls, **options):
        module = make_line(cls)
        module.example_input_array = example
        logger = TensorBoardLogger(tmp_path, log_graph=True)
        trainer = Trainer(
            accelerator=ACCELERATOR, devices=1, max_epochs=1, logger=logger, default_root_dir=tmp_path,
            enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip
        trainer.fit(module, loader())
        return logger.log_dir

    return drawn_


class Forward:
    def forward(self, x):
        return nn.functional.dropout(self.layer(x), training=self.training) * self.global_step


def test_the_graph_of_a_module_that_asks_its_trainer_is_written(drawn, line_class):
    folder = drawn(torch.zeros(2, 8), type("Drawn", (Forward, line_class), {}))
    assert any("Linear[layer]" in node.name for node in events_of(folder).Graph().node)


@pytest.mark.parametrize(
    ("example", "reason"),
    [(None, "it has no example_input_array, and no input was passed"), ({"x": 1}, "its example input is a dict")],
)
def test_a_graph_that_cannot_be_traced_is_left_out_with_a_line(drawn, line_class, caplog, example, reason):
    with caplog.at_level(logging.WARNING):
        folder = drawn(example, line_class)
    assert f"TensorBoardLogger(log_graph=True) writes no graph of Line: {reason}" in caplog.text
    assert events_of(folder).Tags()["graph"] is False


def test_no_graph_is_written_unless_it_is_asked_for(logger, line):
    logger.log_graph(line, torch.zeros(2, 8))
    assert logger.log_dir is not None
    assert list(logger.log_dir.iterdir()) == []

"""The logger for Comet, with real offline experiments."""

from __future__ import annotations

import json
import pickle
import zipfile
from importlib.util import find_spec

import pytest
import torch
from tests.accelerators import ACCELERATOR

from dstrat import CometLogger, Trainer

if find_spec("comet_ml") is None:
    pytest.skip("the extra dstrat[comet] is not installed", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")  # Comet's own, and those of what it imports


@pytest.fixture
def open_logger(tmp_path):
    made = []

    def open_(**options):
        made.append(CometLogger(online=False, project="trial", offline_directory=str(tmp_path), **options))
        return made[-1]

    yield open_
    for logger in made:
        if logger._experiment is not None:
            logger.experiment.end()


def read(folder):
    """Return what is in the only archive: metrics, settings, and the names of files by their kind."""
    [path] = folder.glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    metrics, settings, files = [], {}, set()
    for message in messages:
        content = message["payload"]
        if message["type"] == "metric_msg" and not content["metric"]["metricName"].startswith(("sys.", "process")):
            metric = content["metric"]
            metrics.append((metric["metricName"], metric["metricValue"], metric["step"], metric["epoch"]))
        elif message["type"] == "parameter_msg":
            settings[content["param"]["paramName"]] = content["param"]["paramValue"]
        elif message["type"] == "file_upload":
            options = content["additional_params"]
            files.add((content["upload_type"], options.get("figName") or options.get("fileName")))
        elif message["type"] == "graph":
            files.add(("graph", content["graph"].partition("(")[0]))
    return metrics, settings, files


def test_values_settings_and_media_are_written_and_it_stays_open(open_logger, tmp_path):
    logger = open_logger(prefix="run", name="shown")
    assert (logger.name, logger.version) == ("trial", None)
    logger.log_metrics({"loss": torch.tensor(0.5), "epoch": 1}, step=10)
    logger.log_hyperparams({"lr": 0.1, "model": {"width": 8}})
    logger.finalize("success")
    logger.log_metrics({"test_loss": 0.25, "epoch": 1}, step=10)  # a later run goes on in it
    logger.log_image("seen", [torch.zeros(3, 6, 4), torch.ones(3, 6, 4)], step=2)
    logger.log_histogram("weight", torch.arange(10.0), step=2)
    logger.log_text("note", "hello", step=2)
    logger.log_table("table", columns=["a", "b"], data=[[1, 2]], step=2)
    logger.experiment.end()
    metrics, settings, files = read(tmp_path)
    assert metrics == [("run_loss", 0.5, 10, 1), ("run_test_loss", 0.25, 10, 1)]
    assert (settings["lr"], settings["model|width"]) == (0.1, 8)
    assert {("visualization", "seen/0"), ("visualization", "seen/1"), ("histogram3d", "weight")} < files
    assert ("asset", "table-2.csv") in files
    assert "text-sample" in {kind for kind, _ in files}


def test_a_rank_that_was_forked_writes_all_of_its_archive(open_logger, tmp_path, line, loader, averaging):
    trainer = Trainer(
        accelerator=ACCELERATOR, devices=2, strategy=averaging(), max_epochs=1, logger=open_logger(),
        log_every_n_steps=1,
        default_root_dir=tmp_path, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(line, loader())
    metrics, _, files = read(tmp_path)
    assert [step for name, _, step, _ in metrics if name == "loss_step"] == [1, 2, 3]
    assert ("graph", "Line") in files


def test_it_can_be_pickled_while_it_is_open(open_logger, tmp_path):
    logger = open_logger()
    logger.log_metrics({"loss": 0.5}, step=1)
    copy = pickle.loads(pickle.dumps(logger))
    assert (copy.name, copy.version) == ("trial", logger.version)


def test_where_it_does_not_write_nothing_happens(open_logger, tmp_path):
    logger = open_logger()
    logger.writes = False
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_graph(torch.nn.Linear(2, 2))
    logger.experiment.log_other("a", 1)
    logger.finalize("success")
    assert logger.version is None
    assert list(tmp_path.iterdir()) == []

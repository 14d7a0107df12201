from __future__ import annotations

import pickle
import shutil
import socket
from importlib.util import find_spec
from time import time

import pytest
import torch
from tests.accelerators import ACCELERATOR

from dstrat import MLFlowLogger, ModelCheckpoint, Trainer
from dstrat.errors import LoggerError

if any(find_spec(name) is None for name in ("mlflow", "sqlalchemy", "alembic")):
    pytest.skip("the extra dstrat[mlflow] is not installed", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:::mlflow.*", "ignore:::sqlalchemy.*", "ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def no_server(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def client_class():
    """MLflow's, whose import takes a second; so it is not imported where these tests are only collected."""
    from mlflow.tracking import MlflowClient

    return MlflowClient


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory, client_class):
    """A database with MLflow's tables, which take seconds to make."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    client_class(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(autouse=True)
def database(tmp_path, empty_database):
    return shutil.copy(empty_database, tmp_path)


@pytest.fixture
def logger(tmp_path):
    return MLFlowLogger(save_dir=tmp_path)


@pytest.fixture
def client(tmp_path, client_class):
    return client_class(f"sqlite:///{tmp_path / 'mlflow.db'}")


def values(client, logger, name):
    return [(metric.step, metric.value) for metric in client.get_metric_history(logger.version, name)]


def test_values_are_written_by_step(logger, client):
    logger.log_metrics({"loss": 0.5, "val/loss": 1.0}, step=10)
    logger.log_metrics({"loss": 0.25}, step=20)
    logger.finalize("success")
    assert values(client, logger, "loss") == [(10, 0.5), (20, 0.25)]
    assert values(client, logger, "val/loss") == [(10, 1.0)]
    (metric,) = client.get_metric_history(logger.version, "val/loss")
    assert abs(metric.timestamp / 1000 - time()) < 600


@pytest.mark.parametrize(
    ("status", "known_as"), [("success", "FINISHED"), ("interrupted", "KILLED"), ("failed", "FAILED")]
)
def test_the_status_is_known_and_a_later_run_goes_on(logger, client, status, known_as):
    logger.log_metrics({"loss": 0.5}, step=1)
    run_id = logger.version
    assert client.get_run(run_id).info.status == "RUNNING"
    logger.finalize(status)
    assert client.get_run(run_id).info.status == known_as
    logger.log_metrics({"loss": 0.25}, step=2)
    assert client.get_run(run_id).info.status == "RUNNING"
    logger.finalize("success")
    assert values(client, logger, "loss") == [(1, 0.5), (2, 0.25)]


def test_settings_are_written_flat_also_very_many(logger, client, client_class, monkeypatch):
    sizes, log_batch = [], client_class.log_batch

    def noting(*args, params, **options):
        sizes.append(len(params))
        log_batch(*args, params=params, **options)

    monkeypatch.setattr(client_class, "log_batch", noting)
    logger.log_hyperparams({"lr": 0.1, "model": {"width": 8}, **{f"p{index}": index for index in range(150)}})
    logger.finalize("success")
    written = client.get_run(logger.version).data.params
    assert (written["lr"], written["model/width"], written["p149"]) == ("0.1", "8", "149")
    assert sizes == [100, 52]  # a server takes no more at once


def test_runs_of_one_experiment_have_names_and_tags(tmp_path, client):
    for name in ("first", "second"):
        logger = MLFlowLogger("trial", name, save_dir=tmp_path, tags={"kind": name})
        logger.log_metrics({"loss": 0.5}, step=1)
        logger.finalize("success")
    runs = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    assert {(run.info.run_name, run.data.tags["kind"]) for run in runs} == {("first", "first"), ("second", "second")}


def test_a_run_is_gone_on_with_by_its_id(logger, client, tmp_path):
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.finalize("failed")
    resumed = MLFlowLogger(save_dir=tmp_path, run_id=logger.version)
    resumed.log_metrics({"loss": 0.25}, step=2)
    resumed.finalize("success")
    assert values(client, logger, "loss") == [(1, 0.5), (2, 0.25)]


def test_the_variable_of_mlflow_says_where_to_write(tmp_path, empty_database, client_class, monkeypatch):
    uri = f"sqlite:///{shutil.copy(empty_database, tmp_path / 'other.db')}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    logger = MLFlowLogger(save_dir=tmp_path / "unused")
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.finalize("success")
    assert values(client_class(uri), logger, "loss") == [(1, 0.5)]
    assert not (tmp_path / "unused").exists()


def test_where_it_does_not_write_nothing_happens(logger, tmp_path):
    logger.writes = False
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.log_hyperparams({"lr": 0.1})
    logger.experiment.set_tag(logger.version, "a", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]
    assert logger.version is None


def test_it_can_be_pickled_before_it_writes(logger, client):
    copy = pickle.loads(pickle.dumps(logger))
    copy.log_metrics({"loss": 0.5}, step=1)
    copy.finalize("success")
    assert values(client, copy, "loss") == [(1, 0.5)]


def test_a_name_that_mlflow_refuses_is_an_error_that_shows_it(tmp_path, make_line, loader):
    class Odd(type(make_line())):
        def training_step(self, batch, batch_idx):
            self.log("top@5", 1.0)
            return self.loss(batch)

    trainer = Trainer(
        accelerator=ACCELERATOR, devices=1, max_epochs=1, logger=MLFlowLogger(),
        log_every_n_steps=1, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    with pytest.raises(LoggerError, match=r"MLFlowLogger\.log_metrics failed: .*top@5"):
        trainer.fit(make_line(Odd), loader())


def test_a_server_that_is_away_is_waited_for_with_a_line_and_asked_no_more_at_the_end(monkeypatch, caplog):
    from mlflow.exceptions import MlflowException

    monkeypatch.setattr("dstrat.training.loggers.mlflow_logger._SECONDS_OF_SILENCE", 0.2)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        logger = MLFlowLogger(tracking_uri=uri)
        with pytest.raises(MlflowException, match="timed out"):
            logger.log_metrics({"loss": 0.5}, step=1)
    logger.finalize("failed")
    (message,) = (record.getMessage() for record in caplog.records if record.name.startswith("dstrat"))
    assert message.startswith(f"MLFlowLogger waits for an answer of {uri!r}: MLflow gives up after")


@pytest.mark.parametrize("log_model", [False, True, "all"])
def test_a_trainer_writes_to_it_and_sends_checkpoints(tmp_path, line, loader, client, log_model):
    logger = MLFlowLogger(log_model=log_model)
    trainer = Trainer(
        accelerator=ACCELERATOR, devices=1, max_epochs=2, logger=logger, log_every_n_steps=3, default_root_dir=tmp_path,
        callbacks=ModelCheckpoint(tmp_path / "c", monitor="val_loss", filename="best-{epoch}"),
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(line, loader(), loader())
    assert [step for step, _ in values(client, logger, "loss_step")] == [3, 6, 9, 12]
    assert [step for step, _ in values(client, logger, "val_loss")] == [6, 12]
    assert client.get_run(logger.version).info.status == "FINISHED"
    sent = {item.path for item in client.list_artifacts(logger.version, "checkpoints")}
    every = {f"checkpoints/best-epoch={epoch}.ckpt" for epoch in (0, 1)}
    assert sent == {False: set(), True: {"checkpoints/best-epoch=1.ckpt"}, "all": every}[log_model]
    assert client.get_experiment_by_name("dstrat_logs").artifact_location == (tmp_path / "mlartifacts").as_uri()
    best = client.get_run(logger.version).data.tags.get("best_checkpoint")
    assert best == ("best-epoch=1.ckpt" if log_model else None)


def test_a_prefix_tensors_images_and_texts_are_written(tmp_path, client, monkeypatch):
    location = (tmp_path / "kept").as_uri()
    logger = MLFlowLogger("trial", tags={"kind": "a"}, save_dir=tmp_path, prefix="run", artifact_location=location)
    run_id, experiment_id = logger.run_id, logger.experiment_id
    logger.log_metrics({"loss": torch.tensor(0.5)})
    logger.log_image("seen", [torch.zeros(3, 6, 4)], step=2)
    logger.log_text("note", "hello", step=2)
    logger.finalize("success")
    assert (logger.run_id, logger.experiment_id, logger.version) == (run_id, experiment_id, run_id)
    run = client.get_run(run_id)
    assert (run.info.status, run.data.tags["kind"]) == ("FINISHED", "a")
    assert "mlflow.source.name" in run.data.tags
    assert client.get_experiment(experiment_id).artifact_location == location
    assert values(client, logger, "run-loss") == [(0, 0.5)]
    written = [path.relative_to(tmp_path / "kept" / run_id / "artifacts") for path in tmp_path.glob("kept/**/*.*")]
    assert sorted({path.parts[0] for path in written}) == ["images", "note"]
    assert (tmp_path / "kept" / run_id / "artifacts" / "note" / "2.txt").read_text() == "hello"

from __future__ import annotations

import json
import pickle
import re
import struct
from importlib.util import find_spec
from time import monotonic, sleep
from types import SimpleNamespace

import pytest
import torch
from tests.accelerators import ACCELERATOR

from dstrat import ModelCheckpoint, Trainer, WandbLogger
from dstrat.errors import MisuseError

if find_spec("wandb") is None:
    pytest.skip("the extra dstrat[wandb] is not installed", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb.*", "ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.fixture
def open_logger(tmp_path):
    made = []

    def open_(**options):
        made.append(WandbLogger(save_dir=tmp_path, offline=True, **options))
        return made[-1]

    yield open_
    for logger in made:
        logger.finalize("success")


def records(folder):
    """Return what the transaction logs of offline runs hold, oldest first, when W&B's own process has written all."""
    from wandb.proto import wandb_internal_pb2

    deadline = monotonic() + 300
    while True:
        logs = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime_ns)
        found = [wandb_internal_pb2.Record.FromString(data) for log in logs for data in payloads(log.read_bytes())]
        if sum(record.WhichOneof("record_type") == "exit" for record in found) == len(logs):
            return found
        assert monotonic() < deadline
        sleep(0.05)


def payloads(content):
    """Return the records of a log in LevelDB's format, with 7 bytes before it: blocks of 32 KiB with pieces in them."""
    position, pieces = 7, []
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:  # the rest of a block is padding
            position += left
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        pieces.append(content[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield b"".join(pieces)
            pieces = []


def history(folder):
    rows = []
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            rows.append({name: json.loads(value) for name, value in items.items() if not name.startswith("_")})
    return rows


def settings(folder):
    found = {}
    for record in records(folder):
        updates = record.run.config.update if record.WhichOneof("record_type") == "run" else record.config.update
        found |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}
    return found


def sent_artifacts(folder):
    found = records(folder)
    sent = [record.request.log_artifact.artifact for record in found if record.request.HasField("log_artifact")]
    return sent + [record.artifact for record in found if record.WhichOneof("record_type") == "artifact"]


def test_values_are_written_by_the_number_of_optimizer_steps(open_logger, tmp_path):
    logger = open_logger()
    logger.log_metrics({"loss": 0.5, "epoch": 0}, step=10)
    logger.log_metrics({"loss": 0.25, "epoch": 0}, step=20)
    logger.finalize("success")
    assert history(tmp_path) == [
        {"loss": 0.5, "epoch": 0, "trainer/global_step": 10},
        {"loss": 0.25, "epoch": 0, "trainer/global_step": 20},
    ]
    [axis] = [record.metric for record in records(tmp_path) if record.WhichOneof("record_type") == "metric"]
    assert (axis.glob_name, axis.step_metric) == ("*", "trainer/global_step")


def test_arrays_are_written_as_histograms(open_logger, tmp_path):
    logger = open_logger()
    logger.log_metrics({"weights": torch.arange(100.0), "array": torch.arange(100.0).numpy(), "loss": torch.ones(1)})
    logger.finalize("success")
    [row] = history(tmp_path)
    assert row["weights/_type"] == row["array/_type"] == "histogram"
    assert row["loss"] == 1.0


def test_settings_are_written_nested_ones_too(open_logger, tmp_path):
    logger = open_logger(project="p", name="n")
    logger.log_hyperparams({"lr": 0.2, "model": {"width": 8}})
    logger.log_hyperparams({"lr": 0.1})  # as another fit may have
    logger.finalize("success")
    written = settings(tmp_path)
    assert (written["lr"], written["model"]) == (0.1, {"width": 8})
    [run] = [record.run for record in records(tmp_path) if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("p", "n")


def test_a_later_run_goes_on_under_the_same_id(open_logger, tmp_path):
    logger = open_logger()
    assert logger.version is None
    logger.log_metrics({"loss": 0.5}, step=1)
    version = logger.version
    assert logger.experiment.settings.resume == "allow"
    logger.finalize("success")
    logger.log_metrics({"test_loss": 0.25}, step=1)
    assert logger.version == version
    logger.finalize("success")
    assert {record.run.run_id for record in records(tmp_path) if record.WhichOneof("record_type") == "run"} == {version}
    assert [row.get("test_loss") for row in history(tmp_path)] == [None, 0.25]


def test_the_status_is_known_by_the_exit_code_and_a_run_that_failed_sends_no_best_checkpoint(open_logger, tmp_path):
    logger = open_logger(log_model=True)
    best = tmp_path / "best.ckpt"
    best.write_text("")
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.after_save_checkpoint(SimpleNamespace(best_model_path=str(best), saved_paths=[str(best)]))
    logger.finalize("failed")
    assert sent_artifacts(tmp_path) == []
    [code] = [record.exit.exit_code for record in records(tmp_path) if record.WhichOneof("record_type") == "exit"]
    assert code == 1


def test_a_run_of_the_user_is_used_and_not_finished(tmp_path):
    import wandb

    with wandb.init(dir=str(tmp_path), mode="offline", project="own") as run:
        logger = WandbLogger(experiment=run)
        logger.log_metrics({"loss": 0.5}, step=1)
        logger.finalize("success")
        assert logger.experiment is run
        run.log({"mine": 1.0})
    assert [row.get("mine") for row in history(tmp_path)] == [None, 1.0]


def test_where_it_does_not_write_nothing_happens(open_logger, tmp_path):
    logger = open_logger()
    logger.writes = False
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.log_hyperparams({"lr": 0.1})
    logger.experiment.summary["best"] = 1.0
    logger.experiment.config.update({"a": 1})
    assert list(tmp_path.iterdir()) == []


def test_it_can_be_pickled_before_it_writes(open_logger, tmp_path):
    copy = pickle.loads(pickle.dumps(open_logger()))
    copy.log_metrics({"loss": 0.5}, step=1)
    copy.finalize("success")
    assert len(history(tmp_path)) == 1


def test_a_forked_rank_0_writes_everything(tmp_path, line, loader, averaging):
    trainer = Trainer(
        accelerator=ACCELERATOR, devices=2, strategy=averaging(), max_epochs=2, logger=WandbLogger(offline=True),
        log_every_n_steps=1, default_root_dir=tmp_path, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(line, loader(4), loader())
    assert [row["trainer/global_step"] for row in history(tmp_path) if "loss_step" in row] == list(range(1, 13))
    assert [row["epoch"] for row in history(tmp_path) if "val_loss" in row] == [0, 1]


@pytest.mark.parametrize("log_model", [False, True, "all"])
def test_a_trainer_writes_to_it_and_sends_checkpoints(tmp_path, line, loader, log_model):
    trainer = Trainer(
        accelerator=ACCELERATOR, devices=1, max_epochs=2, logger=WandbLogger(offline=True, log_model=log_model),
        log_every_n_steps=3,
        callbacks=ModelCheckpoint(tmp_path / "c", monitor="val_loss", filename="{epoch}"), default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(line, loader(), loader())
    assert [row["trainer/global_step"] for row in history(tmp_path) if "loss_step" in row] == [3, 6, 9, 12]
    assert [row["epoch"] for row in history(tmp_path) if "val_loss" in row] == [0, 1]
    sent = sent_artifacts(tmp_path)
    assert len(sent) == {False: 0, True: 1, "all": 2}[log_model]
    assert all(re.fullmatch(r"model-\w+", artifact.name) for artifact in sent)
    assert all("best" in artifact.aliases for artifact in sent)


def test_names_of_values_have_the_prefix_and_the_axis_has_not(open_logger, tmp_path):
    logger = open_logger(prefix="run")
    logger.log_metrics({"loss": torch.tensor(0.5)}, step=1)
    logger.log_metrics({"loss": 0.25})
    logger.finalize("success")
    first, second = history(tmp_path)
    assert first == {"run-loss": 0.5, "trainer/global_step": 1}
    assert second["run-loss"] == 0.25


def test_arguments_have_the_order_and_names_of_lightning(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    logger = WandbLogger("shown", tmp_path, "an-id", True, tags=["a"])
    assert (logger.name, logger.version, logger.save_dir) == ("mine", "an-id", tmp_path)
    assert WandbLogger(dir=tmp_path, id="b").save_dir == tmp_path
    assert WandbLogger(dir=tmp_path, id="b").version == "b"
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_in_progress_is_used_and_not_finished(tmp_path, caplog):
    import wandb

    with wandb.init(dir=str(tmp_path), mode="offline", project="own") as run:
        logger = WandbLogger()
        logger.log_metrics({"loss": 0.5}, step=1)
        logger.finalize("success")
        run.log({"mine": 1.0})
    assert [row.get("mine") for row in history(tmp_path)] == [None, 1.0]
    assert f"WandbLogger writes to the run {run.id}, which is in progress: call wandb.finish() first" in caplog.text


def test_media_are_written_and_each_takes_its_own_arguments(open_logger, tmp_path):
    logger = open_logger()
    logger.log_image("seen", [torch.zeros(3, 6, 4), torch.ones(3, 6, 4)], step=3, caption=["a", "b"])
    logger.log_table("table", columns=["a", "b"], data=[[1, 2]], step=3)
    logger.log_text("said", columns=["text"], data=[["hello"]], step=3)
    logger.log_histogram("weight", torch.arange(10.0), step=3)
    with pytest.raises(MisuseError, match=r"log_image\('one'\) takes a list, and got Tensor"):
        logger.log_image("one", torch.zeros(3, 6, 4))
    with pytest.raises(MisuseError, match=r"log_image\('one'\) takes one caption for each of the 1, and got 2"):
        logger.log_image("one", [torch.zeros(3, 6, 4)], caption=["a", "b"])
    logger.finalize("success")
    images, table, text, histogram = history(tmp_path)
    assert (images["seen/count"], images["seen/captions"]) == (2, ["a", "b"])
    assert (table["table/ncols"], text["said/nrows"], histogram["weight/_type"]) == (2, 1, "histogram")


def test_a_module_is_watched_from_the_start_of_a_run_to_its_end(tmp_path, line, loader):
    logger = WandbLogger(offline=True)
    logger.watch(line, log_freq=1)
    assert logger.version is None  # it begins with the run
    trainer = Trainer(
        accelerator=ACCELERATOR, devices=1, max_epochs=1, logger=logger, log_every_n_steps=2, default_root_dir=tmp_path,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(line, loader())
    rows = [row for row in history(tmp_path) if "loss_step" in row]
    assert [row["gradients/layer.weight/_type"] for row in rows] == ["histogram"] * 3
    line.layer(torch.zeros(1, 8)).sum().backward()  # and nothing writes to the run that is over

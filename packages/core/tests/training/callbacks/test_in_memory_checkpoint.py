from __future__ import annotations

import ast
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dstrat import Callback, CSVLogger, InMemoryCheckpoint, ModelCheckpoint
from dstrat.checkpoint.portable.memory_files import JobFolder, existing_in_memory, folder_in_memory, recycle_folder
from dstrat.checkpoint.portable.newest import is_complete
from dstrat.errors import CheckpointError, RequestError

ROOT = Path(f"/dev/shm/dstrat-{os.geteuid()}")
pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")


class Break(Callback):
    """Raises after a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            raise RuntimeError("broken")


def paths_of(folder):
    return sorted(Path(f"{ROOT}{folder}").glob("**/*.ckpt"))


def in_memory_of(folder):
    return sorted(path.name for path in paths_of(folder))


@pytest.fixture
def run(quiet_trainer, make_line, loader, tmp_path):
    """Fit for 12 steps with checkpoints in memory after every fourth, until a step."""

    def run(*callbacks, plugins=None, every=4, **options):
        callbacks = [ModelCheckpoint(), InMemoryCheckpoint(every), *callbacks]
        trainer = quiet_trainer(max_steps=12, plugins=plugins, callbacks=callbacks)
        trainer.fit(make_line(), loader(), **options)
        return trainer

    yield run
    shutil.rmtree(f"{ROOT}{tmp_path}", ignore_errors=True)


def test_a_failed_fit_resumes_from_the_newest_checkpoint_in_memory(run, tmp_path, caplog):
    with pytest.raises(RuntimeError, match="broken"):
        run(Break(10))
    assert in_memory_of(tmp_path) == ["step=8.ckpt"]
    steps = []

    class Start(Callback):
        def on_train_start(self, trainer, module):
            steps.append(trainer.global_step)

    with caplog.at_level(logging.WARNING):
        run(Start(), resume="auto")
    assert steps == [8]
    assert f"training resumes from {ROOT}" in caplog.text
    assert in_memory_of(tmp_path) == []


def test_a_checkpoint_that_a_killed_run_has_superseded_is_removed(run, tmp_path):
    with pytest.raises(RuntimeError, match="broken"):
        run(Break(10))
    (path,) = paths_of(tmp_path)
    shutil.copytree(path, path.with_name("step=4.ckpt"))

    class AtTheStart(Callback):
        runs_last = saves_checkpoints = True

        def on_train_start(self, trainer, module):
            self.present = in_memory_of(tmp_path)

    start = AtTheStart()
    run(start, ckpt_path=path)
    assert start.present == ["step=8.ckpt"]


def test_the_memory_is_freed_after_a_resume_from_the_disk(run, tmp_path):
    with pytest.raises(RuntimeError, match="broken"):
        run(ModelCheckpoint(every_n_train_steps=9, state_key="more", save_top_k=-1), Break(10))
    (on_disk,) = tmp_path.glob("checkpoints/*step=9.ckpt")
    run(ckpt_path=on_disk)
    assert in_memory_of(tmp_path) == []


def test_a_completed_fit_frees_the_memory(run, tmp_path):
    trainer = run()
    assert in_memory_of(tmp_path) == []
    assert trainer.callbacks[-1].ckpt_path == ""


def test_an_earlier_run_of_a_logger_is_found_in_memory(quiet_trainer, make_line, loader, tmp_path):
    def run(*callbacks, **options):
        trainer = quiet_trainer(
            max_steps=12, callbacks=[ModelCheckpoint(), InMemoryCheckpoint(4), *callbacks], logger=True
        )
        trainer.fit(make_line(), loader(), **options)
        return trainer

    with pytest.raises(RuntimeError, match="broken"):
        run(Break(6))
    assert "step=4.ckpt" in str(run(resume="auto").ckpt_path)
    assert in_memory_of(tmp_path) == []


def test_checkpoints_of_one_file_are_freed_after_a_resume(run, tmp_path):
    with pytest.raises(RuntimeError, match="broken"):
        run(Break(10), plugins="torch")
    run(plugins="torch", resume="auto")
    assert in_memory_of(tmp_path) == []


def test_a_folder_on_the_disk_of_its_own_is_the_only_one_searched(quiet_trainer, make_line, loader, tmp_path):
    def run(folder):
        callbacks = [ModelCheckpoint(tmp_path / folder), InMemoryCheckpoint(40)]
        trainer = quiet_trainer(max_steps=2, callbacks=callbacks)
        trainer.fit(make_line(), loader(), resume="auto")
        return trainer.ckpt_path

    assert run("checkpoints") is None
    assert run("another") is None


def test_a_checkpoint_on_the_disk_is_complete_when_loggers_are_told(quiet_trainer, make_line, loader, tmp_path):
    complete = []

    class Uploads(CSVLogger):
        def after_save_checkpoint(self, checkpoint_callback):
            complete.append(is_complete(Path(checkpoint_callback.best_model_path)))

    callbacks = [ModelCheckpoint(every_n_train_steps=3), InMemoryCheckpoint(2)]
    quiet_trainer(max_steps=12, callbacks=callbacks, logger=Uploads(tmp_path)).fit(make_line(), loader())
    assert complete == [True] * 4
    shutil.rmtree(f"{ROOT}{tmp_path}", ignore_errors=True)


def test_a_fit_whose_last_save_fails_leaves_the_memory_as_it_is(run, tmp_path):
    class FullDisk(Callback):
        runs_last = saves_checkpoints = True

        def on_train_end(self, trainer, module):
            raise CheckpointError("no space left")

    with pytest.raises(CheckpointError, match="no space left"):
        run(FullDisk())
    assert in_memory_of(tmp_path) == ["step=12.ckpt"]


def test_a_checkpoint_on_the_disk_with_more_steps_is_taken(run, tmp_path):
    with pytest.raises(RuntimeError, match="broken"):
        run(ModelCheckpoint(every_n_train_steps=9, state_key="more", save_top_k=-1), Break(10))
    trainer = run(resume="auto")
    assert "step=9" in str(trainer.ckpt_path)


def test_a_name_that_a_failed_fit_has_used_is_not_written_over(run, tmp_path):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            run(Break(5))
    assert in_memory_of(tmp_path) == ["step=4.ckpt", "step=4.ckpt"]


def test_files_of_a_superseded_checkpoint_are_written_over(run, tmp_path):
    inodes = {}

    class Inodes(Callback):
        runs_last = saves_checkpoints = True

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.strategy.checkpoint_io.wait()
            for path in paths_of(tmp_path):
                (file,) = path.glob("*.safetensors")
                inodes[path.name] = file.stat().st_ino

    run(Inodes(), every=2)
    assert inodes["step=2.ckpt"] == inodes["step=6.ckpt"] == inodes["step=10.ckpt"] != inodes["step=4.ckpt"]


def test_a_failed_fit_frees_all_but_the_newest_checkpoint(run, tmp_path):
    with pytest.raises(RuntimeError, match="broken"):
        run(Break(10))
    assert [path.name for path in paths_of(tmp_path)[0].parent.iterdir() if path.is_dir()] == ["step=8.ckpt"]


def test_a_folder_of_a_job_that_saved_nothing_is_removed(run, tmp_path):
    abandoned = Path(f"{ROOT}{tmp_path}/checkpoints/0123")
    (abandoned / ".dstrat-1.tmp").mkdir(parents=True)
    (abandoned / "owner").touch()
    run()
    assert not abandoned.exists()


def test_two_running_jobs_without_a_logger_resume_from_their_own(run, tmp_path):
    with pytest.raises(RuntimeError, match="broken"):
        run(Break(6))

    class AnotherJob(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 9:
                self.step = run_elsewhere(tmp_path)

    other = AnotherJob()
    run(other)
    assert other.step == 4


def run_elsewhere(folder):
    """Return the step from which a job in another process would resume, in a folder."""
    program = f"""
from pathlib import Path
from dstrat.checkpoint.portable.memory_files import existing_in_memory
print([path.name for job in existing_in_memory([Path({str(folder / "checkpoints")!r})]) for path in job.glob("*.ckpt")])
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    (name,) = ast.literal_eval(printed)
    return int(re.search(r"step=(\d+)", name)[1])


def test_a_restarted_job_takes_its_own_before_those_of_ended_jobs(tmp_path):
    folder = tmp_path / "checkpoints"
    for name in ("slurm-7.aa", "slurm-71.bb", "cc"):
        (job := folder_in_memory(folder) / name).mkdir(parents=True)
        (job / "owner").touch()
        (job / "step=4.ckpt").mkdir()
    names = [[path.name for path in existing_in_memory([folder], job_id)] for job_id in ("slurm-7", "slurm-8", None)]
    shutil.rmtree(folder_in_memory(tmp_path))
    assert names == [["slurm-7.aa"], ["cc", "slurm-7.aa", "slurm-71.bb"], ["cc", "slurm-7.aa", "slurm-71.bb"]]


def test_an_attempt_that_was_killed_in_its_first_save_hides_no_other_job(tmp_path):
    folder = tmp_path / "checkpoints"
    for name in ("slurm-7.aa", "cc"):
        (job := folder_in_memory(folder) / name).mkdir(parents=True)
        (job / "owner").touch()
    (job / "step=4.ckpt").mkdir()
    names = [path.name for path in existing_in_memory([folder], "slurm-7")]
    shutil.rmtree(folder_in_memory(tmp_path))
    assert "cc" in names


CLAIMS = """
import sys, time
from pathlib import Path
from dstrat.checkpoint.portable.memory_files import JobFolder
path, end, count = Path(sys.argv[1]), time.monotonic() + 2, 0
while time.monotonic() < end:
    job = JobFolder(path)
    count += not (path / "owner").is_file()
    job.release(removes=True)
print(count)
"""


def test_no_job_removes_the_folder_that_another_one_is_about_to_claim(tmp_path):
    paths = [folder_in_memory(tmp_path) / name for name in ("aa", "bb")]
    jobs = [
        subprocess.Popen([sys.executable, "-c", CLAIMS, str(path)], stdout=subprocess.PIPE, text=True) for path in paths
    ]
    missing = [job.communicate()[0] for job in jobs]
    shutil.rmtree(folder_in_memory(tmp_path), ignore_errors=True)
    assert missing == ["0\n", "0\n"]


RUNNING_STEP = """
import sys
from pathlib import Path
from dstrat.checkpoint.portable.memory_files import JobFolder
job = JobFolder(Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
"""


def test_ranks_that_free_the_memory_of_a_job_at_once_do_not_fail(tmp_path):
    for number in range(300):
        job = JobFolder(tmp_path / str(number))
        checkpoints = [job.path / f"step={step}.ckpt" for step in range(8)]
        for path in checkpoints:
            path.mkdir()
        other_rank = threading.Thread(target=shutil.rmtree, args=(job.path,), kwargs={"ignore_errors": True})
        other_rank.start()
        for path in checkpoints:
            recycle_folder(path)
        other_rank.join()
        job.release(removes=True)


def test_a_step_of_the_same_job_that_runs_beside_is_left_alone(tmp_path):
    folder = tmp_path / "checkpoints"
    running = folder_in_memory(folder) / "slurm-7.aa"
    for name in ("slurm-7.aa", "slurm-7.bb"):
        (job := folder_in_memory(folder) / name).mkdir(parents=True)
        (job / "owner").touch()
        (job / "step=4.ckpt").mkdir()
    command = [sys.executable, "-c", RUNNING_STEP, str(running)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as beside:
        assert beside.stdout.readline() == "claimed\n"
        found = [[path.name for path in existing_in_memory([folder], job_id)] for job_id in ("slurm-7", None)]
    shutil.rmtree(folder_in_memory(tmp_path))
    assert found == [["slurm-7.bb"], ["slurm-7.bb"]]


def test_a_checkpoint_of_an_earlier_root_is_not_looked_for(tmp_path):
    callback = InMemoryCheckpoint(4)
    callback.load_state_dict({"ckpt_path": str(tmp_path / "step=4.ckpt"), "superseded": ""})
    assert (callback.ckpt_path, callback.state_dict()) == ("", {"ckpt_path": "", "superseded": ""})


def test_another_folder_in_memory_may_be_set(run, tmp_path, monkeypatch):
    monkeypatch.setenv("DSTRAT_MEMORY_DIR", str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()
    with pytest.raises(RuntimeError, match="broken"):
        run(Break(6))
    assert [path.name for path in (tmp_path / "memory").glob("**/*.ckpt")] == ["step=4.ckpt"]


def test_a_root_that_others_may_change_is_refused(monkeypatch, tmp_path, run):
    monkeypatch.setenv("DSTRAT_MEMORY_DIR", str(tmp_path))
    root = tmp_path / ROOT.name
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(CheckpointError, match="another user has created or may change"):
        run()


def test_a_system_without_such_memory_is_refused(monkeypatch, tmp_path, run):
    monkeypatch.setenv("DSTRAT_MEMORY_DIR", str(tmp_path / "missing"))
    with pytest.raises(CheckpointError, match="which this system does not have"):
        run()


def test_the_number_of_steps_must_be_positive():
    with pytest.raises(RequestError, match="every_n_train_steps=0"):
        InMemoryCheckpoint(0)

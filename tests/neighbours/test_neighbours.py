"""Programs that train beside packages that users have installed too: datasets, dill, hydra, peft, transformers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest

pytestmark = pytest.mark.neighbours
LANGUAGE_MODELS = pytest.mark.xdist_group("language models")  # which share the training on one process
HERE = Path(__file__).parent
MINUTES = 600  # seconds; the imports alone take ten


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a training of language_model.py came to on one process, which a terminal shows."""
    return train(tmp_path_factory.mktemp("one"), "auto", 1)


def train(folder: Path, strategy: str, devices: int) -> Any:
    terminal = folder / "terminal"
    with terminal.open("wb") as shown:
        program = pexpect.spawn(
            sys.executable,
            [str(HERE / "language_model.py"), strategy, str(devices), str(folder / "seen.json")],
            logfile=shown,
            timeout=MINUTES,
            dimensions=(40, 120),
            cwd=str(folder),
        )
        program.expect(pexpect.EOF)
        program.close()
    assert program.exitstatus == 0, terminal.read_text()
    assert "Epoch 2/2" in terminal.read_text()
    return json.loads((folder / "seen.json").read_text())


@LANGUAGE_MODELS
@pytest.mark.timeout(MINUTES)
def test_transformers_and_adapters_train_in_a_terminal_with_dill_and_datasets(language_model: Any) -> None:
    for name, seen in language_model.items():
        assert seen["losses"][-1] < seen["losses"][0]
        assert seen["val_loss"] == pytest.approx(seen["fitted"])
        assert (seen["frozen"] > 0) == (name == "lora")
        assert seen["kept"]


@LANGUAGE_MODELS
@pytest.mark.timeout(2 * MINUTES)
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.variant), "fsdp"])
def test_two_processes_train_transformers_and_adapters_as_one_does(
    strategy: str, language_model: Any, tmp_path: Path
) -> None:
    seen = train(tmp_path, strategy, 2)
    for name, alone in language_model.items():
        assert seen[name]["kept"]
        assert seen[name]["frozen"] == alone["frozen"]
        assert seen[name]["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-4)


def run_hydra(folder: Path, *arguments: str) -> set[Path]:
    """Run hydra_program.py on two processes, and return the folders of its jobs."""
    for name in ("hydra_program.py", "config.yaml"):
        shutil.copy(HERE / name, folder)
    notes = folder.with_name("notes of " + folder.name)  # beside it, or hydra takes it for a group of configurations
    notes.mkdir()
    command = [sys.executable, "hydra_program.py", *arguments, f"notes='{notes}'"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=MINUTES, check=False)
    assert done.returncode == 0, done.stderr
    noted = {path.name: path.read_text().splitlines() for path in notes.iterdir()}
    rates = {name.split()[0] for name in noted}
    assert set(noted) == {f"{rate} {rank}" for rate in rates for rank in (0, 1)}
    assert {facts for facts, _ in noted.values()} == {"2 4 True"}
    folders = {Path(job) for _, job in noted.values()}
    assert len(folders) == len(rates)
    assert {path.parent for path in folder.rglob(".hydra")} == folders
    assert all((job / "dstrat_logs" / "version_0" / "checkpoints").is_dir() for job in folders)
    return folders


@pytest.mark.timeout(MINUTES)
def test_all_processes_of_a_hydra_program_use_the_folder_of_its_job(tmp_path: Path) -> None:
    (job,) = run_hydra(tmp_path, "optimizer.lr=0.5")
    assert "optimizer.lr=0.5" in (job / ".hydra" / "overrides.yaml").read_text()


@pytest.mark.timeout(MINUTES)
@pytest.mark.variant  # of the sweep of the guide
def test_a_sweep_of_hydra_trains_each_job_once_in_one_folder(tmp_path: Path) -> None:
    jobs = run_hydra(tmp_path, "--multirun", "optimizer.lr=0.5,0.25")
    assert len({job.parent for job in jobs}) == 1


# The guide to hydra


def run_guide(folder: Path, *arguments: str, code: int = 0) -> str:
    """Run the program of docs/hydra.md with its configuration; return what it printed."""
    page = (HERE.parents[1] / "docs" / "hydra.md").read_text()
    program, config = (
        re.search(rf"^```{kind}\n({begin}.*?)^```", page, re.DOTALL | re.MULTILINE) for kind, begin in GUIDE
    )
    assert program
    assert config
    (folder / "train.py").write_text(program[1])
    (folder / "config.yaml").write_text(config[1])
    quiet = ("+trainer.enable_progress_bar=false", "+trainer.enable_model_summary=false")
    command = [sys.executable, "train.py", *arguments, *quiet]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=MINUTES, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


GUIDE = (("python", "import hydra"), ("text", "seed: 0"))


@pytest.mark.timeout(MINUTES)
def test_the_guide_to_hydra_sweeps_in_one_folder_for_each_job(tmp_path: Path) -> None:
    lines = [line for line in run_guide(tmp_path, "--multirun", "lr=0.5,0.25").splitlines() if line.startswith("loss")]
    assert len(lines) == 2  # each once for the job
    logs = [Path(line.split(" in ")[1]) for line in lines]
    assert [log.parents[1].name for log in logs] == ["0", "1"]
    assert len(list(tmp_path.rglob(".hydra"))) == 2


@pytest.mark.timeout(MINUTES)
def test_logs_go_to_the_folder_of_the_job_without_a_change_of_directory(tmp_path: Path) -> None:
    options = ("hydra.job.chdir=false", "+trainer.default_root_dir=${hydra:runtime.output_dir}")
    out = run_guide(tmp_path, *options)
    (folder,) = (path.parent for path in tmp_path.rglob(".hydra"))
    assert f" in {folder}" in out


@pytest.mark.timeout(MINUTES)
def test_a_job_of_a_sweep_that_fails_is_shown_and_the_others_run(tmp_path: Path) -> None:
    err = run_guide(tmp_path, "--multirun", "lr=-1,0.25", code=1)
    assert "Invalid learning rate" in err
    assert {path.parent.name for path in tmp_path.rglob("dstrat_logs")} == {"0", "1"}

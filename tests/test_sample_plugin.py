"""A package that somebody else might have written, installed from its wheel beside dstrat's, is as good as ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.wheels

SAMPLE = Path(__file__).with_name("sample_plugin")

TRAIN = """
import torch
from dstrat import Trainer, TrainModule


class Regression(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.layer(batch), batch.sum(1, keepdim=True))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = Trainer(strategy="acme_diloco", accelerator="cpu", devices=2, max_steps=5, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False)
    module = Regression()
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(80, 4), batch_size=4))
    print(f"rank {trainer.global_rank} of {trainer.world_size} trained to {float(module.layer.weight.sum()):.6f}")
"""


def start(*command: object, outside: Path) -> subprocess.Popen[str]:
    """Start a program that knows nothing of this workspace."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DSTRAT_", "PYTHON"))}
    pipe = subprocess.PIPE
    return subprocess.Popen(list(map(str, command)), cwd=outside, env=environ, stdout=pipe, stderr=pipe, text=True)


def finish(program: subprocess.Popen[str], seconds: float = 400) -> str:
    """Return what it printed, when it has ended well."""
    try:
        output, errors = program.communicate(timeout=seconds)
    finally:
        program.kill()
    assert program.returncode == 0, output + errors
    return output


def call(*command: object, outside: Path) -> str:
    return finish(start(*command, outside=outside))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel of the sample and what it asks for, on top of dstrat's wheels."""
    if "DSTRAT_TEST_WHEELS" not in os.environ:
        pytest.skip("needs the environment that nox -s wheels tests makes")
    below = Path(os.environ["DSTRAT_TEST_WHEELS"]) / "bin" / "python"
    folder = tmp_path_factory.mktemp("sample")
    build = [sys.executable, "-m", "build", "--quiet", "--wheel", "--no-isolation", "--outdir", folder, SAMPLE]
    call(*build, outside=folder)
    [wheel] = folder.glob("*.whl")
    call(below, "-m", "venv", "--without-pip", folder / "environment", outside=folder)
    programs = folder / "environment" / "bin"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own, shared = (Path(call(python, "-c", where, outside=folder).strip()) for python in (programs / "python", below))
    (own / "wheels_of_dstrat.pth").write_text(f"{shared}\n", encoding="utf-8")
    pip = [below, "-m", "pip", "--python", programs / "python", "install", "--quiet", "--disable-pip-version-check"]
    call(*pip, f"{wheel}[test]", "dstrat[new]", outside=folder)
    return programs


COMMAND = "from dstrat.cli.main import main; main()"


@pytest.fixture
def dstrat(programs: Path, tmp_path: Path):
    """Run the command of that environment."""
    return lambda *arguments: call(programs / "python", "-c", COMMAND, *arguments, outside=tmp_path)


def test_its_alias_is_listed_with_its_owner(dstrat) -> None:
    assert "acme-diloco 0.1.0" in dstrat("show", "acme_diloco")


def test_its_alias_trains(programs: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN, encoding="utf-8")
    lines = [line for line in call(programs / "python", script, outside=tmp_path).splitlines() if "trained to" in line]
    assert sorted(line.split(" trained to ")[0] for line in lines) == ["rank 0 of 2", "rank 1 of 2"]
    assert (
        len({line.split(" trained to ")[1] for line in lines}) == 1
    )  # the last round, which had 5 of 500 steps, was joined


@pytest.fixture
def copied_tests(tmp_path: Path) -> Path:
    """The tests of the sample, far from its sources."""
    shutil.copy(SAMPLE / "pyproject.toml", tmp_path)
    shutil.copytree(SAMPLE / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "tests"


def test_its_own_tests_pass_and_those_of_the_kit(programs: Path, copied_tests: Path) -> None:
    outside, python = copied_tests.parent, programs / "python"
    with start(python, "-c", COMMAND, "test", "acme_diloco", copied_tests, "--json", outside=outside) as kit:
        assert " passed" in call(python, "-m", "pytest", "-q", "tests/test_diloco.py", outside=outside)  # meanwhile
        tests = json.loads(finish(kit))["tests"]
    assert "passed" in {test["outcome"] for test in tests}
    assert not [test for test in tests if test["outcome"] == "failed"]


def test_a_package_is_written_from_the_template_in_the_wheel(dstrat, tmp_path: Path) -> None:
    dstrat("new", tmp_path / "dstrat-ring")
    assert (tmp_path / "dstrat-ring" / "src" / "dstrat_ring" / "strategy.py").is_file()

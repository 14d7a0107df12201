"""The built wheels, installed into an environment with nothing but what they ask for, work outside of the checkout."""

import json
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.wheels

CHECKOUT = Path(__file__).parents[1]

IMPORT_EVERY_MODULE = """
import importlib, pkgutil, sys
import dstrat

families = (
    "bagua", "ddp", "deepspeed", "diloco", "fairscale", "fsdp", "hivemind", "horovod", "hpu", "ipu", "lightning",
    "mesh", "ray", "torchao", "torchft", "transformers",
)
for package in (dstrat, *(importlib.import_module(f"dstrat_{family}") for family in families)):
    assert package.__file__.startswith(sys.prefix), package.__file__
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        extra = module.name.startswith(("dstrat.testing.", "dstrat.cli.training."))  # need pytest and jsonargparse
        if not module.name.endswith("__main__") and not extra:
            importlib.import_module(module.name)
"""

TRAIN_ON_TWO_PROCESSES = """
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
    trainer = Trainer(strategy="ddp", accelerator="cpu", devices=2, max_steps=5, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Regression(), torch.utils.data.DataLoader(torch.randn(80, 4), batch_size=4))
    print(f"rank {trainer.global_rank} of {trainer.world_size} trained {trainer.global_step} steps", flush=True)
"""


@pytest.fixture(scope="module")
def installed() -> Path:
    """The environment that the wheels are installed in."""
    if "DSTRAT_TEST_WHEELS" not in os.environ:
        pytest.skip("needs the environment that nox -s wheels tests makes")
    return Path(os.environ["DSTRAT_TEST_WHEELS"])


@pytest.fixture(scope="module")
def built(installed: Path) -> list[Path]:
    """The wheels and sdists that the environment was made from."""
    return sorted((installed.parent / "dist").iterdir())


def run(installed: Path, outside: Path, program: str, *arguments: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DSTRAT_", "PYTHON"))}
    command = [installed / "bin" / program, *arguments]
    result = subprocess.run(command, cwd=outside, env=environ, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def contents(archive: Path) -> list[str]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.namelist()
    with tarfile.open(archive) as sdist:
        return sdist.getnames()


def test_each_package_has_a_wheel_and_an_sdist(built: list[Path]) -> None:
    packages = [path.parent.name for path in CHECKOUT.glob("packages/*/pyproject.toml")]
    assert sorted(archive.suffix for archive in built) == sorted([".whl", ".gz"] * len(packages))


def test_each_archive_has_its_licence_and_its_type_marker_and_no_caches(built: list[Path]) -> None:
    for archive in built:
        names = contents(archive)
        assert any(name.endswith("/LICENSE") for name in names), archive
        assert any(name.endswith("/py.typed") for name in names), archive
        assert not [name for name in names if "__pycache__" in name], archive


def test_no_requirement_of_the_wheels_is_missing_or_in_conflict(installed: Path, tmp_path: Path) -> None:
    assert run(installed, tmp_path, "python", "-m", "pip", "check") == "No broken requirements found.\n"


def test_every_module_comes_from_the_wheels_and_imports(installed: Path, tmp_path: Path) -> None:
    run(installed, tmp_path, "python", "-c", IMPORT_EVERY_MODULE)


def test_the_command_lists_the_strategies_of_both_packages(installed: Path, tmp_path: Path) -> None:
    listing = run(installed, tmp_path, "dstrat", "strategies")
    assert "single_device" in listing
    assert "ddp_spawn" in listing
    json.loads(run(installed, tmp_path, "dstrat", "strategies", "--json"))


def test_two_processes_train(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN_ON_TWO_PROCESSES, encoding="utf-8")
    lines = run(installed, tmp_path, "python", str(script)).splitlines()
    assert sorted(line for line in lines if line.startswith("rank ")) == [
        "rank 0 of 2 trained 5 steps",
        "rank 1 of 2 trained 5 steps",
    ]

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys; sys.path.insert(0, sys.argv[1])
from importlib import import_module
from dstrat.errors import MissingRequirementError
try:
    getattr(import_module(f"dstrat.training.loggers.{sys.argv[2]}"), sys.argv[3])()
except MissingRequirementError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A folder with dstrat and what it needs at once, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ("dstrat", "packaging", "pluggy", "typing_extensions"):
        origin = Path(importlib.util.find_spec(name).origin)
        origin = origin.parent if origin.name == "__init__.py" else origin
        (folder / origin.name).symlink_to(origin)
    return folder


@pytest.mark.parametrize(
    ("file", "name", "library", "extra"),
    [
        ("comet_logger", "CometLogger", "comet_ml", "comet"),
        ("tensorboard_logger", "TensorBoardLogger", "tensorboard", "tensorboard"),
        ("wandb_logger", "WandbLogger", "wandb", "wandb"),
        ("mlflow_logger", "MLFlowLogger", "mlflow", "mlflow"),
    ],
)
def test_without_its_library_a_logger_says_what_to_install(bare, file, name, library, extra):
    command = [sys.executable, "-I", "-S", "-c", SCRIPT, str(bare), file, name]
    done = subprocess.run(command, timeout=400, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == (f'{name} needs {library}, which is not installed: pip install "dstrat[{extra}]"')

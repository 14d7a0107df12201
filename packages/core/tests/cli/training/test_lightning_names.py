"""Configuration files of Lightning, whose classes have dstrat's names here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packages.core.tests.cli.training import program

from dstrat.cli.training.lightning_names import INSTEAD, RENAMED, translate
from dstrat.errors import RequestError

PROGRAM = program.__name__
PAGE = Path(__file__).parents[5] / "docs" / "coming-from-lightning.md"

# Trainer sections as public programs have them, in small: terratorch, AIDO.ModelGenerator, cellarium-ml, vocos.
TERRATORCH = f"""
# lightning.pytorch==2.1.1
seed_everything: 0
trainer:
  accelerator: cpu
  strategy: auto
  devices: 1
  num_nodes: 1
  precision: 32-true
  logger:
    class_path: TensorBoardLogger
    init_args: {{save_dir: logs, name: fire_scars}}
  callbacks:
    - class_path: RichProgressBar
    - class_path: LearningRateMonitor
      init_args: {{logging_interval: epoch}}
    - class_path: EarlyStopping
      init_args: {{monitor: val_loss, patience: 40}}
  max_epochs: 2
  check_val_every_n_epoch: 1
  log_every_n_steps: 50
  enable_checkpointing: true
  default_root_dir: here
data:
  class_path: {PROGRAM}.Numbers
  init_args: {{batch_size: 8}}
model:
  class_path: {PROGRAM}.Net
  init_args: {{backbone: {{class_path: {PROGRAM}.Backbone, init_args: {{width: 5}}}}}}
optimizer:
  class_path: torch.optim.Adam
  init_args: {{lr: 1.5e-3, weight_decay: 0.05}}
lr_scheduler:
  class_path: ReduceLROnPlateau
  init_args: {{monitor: val_loss}}
"""
VOCOS = """
trainer:
  logger:
    class_path: pytorch_lightning.loggers.TensorBoardLogger
    init_args: {save_dir: logs/}
  callbacks:
    - class_path: pytorch_lightning.callbacks.LearningRateMonitor
    - class_path: pytorch_lightning.callbacks.ModelSummary
      init_args: {max_depth: 2}
    - class_path: pytorch_lightning.callbacks.ModelCheckpoint
      init_args: {monitor: val_loss, filename: "vocos_{epoch}_{step}_{val_loss:.4f}", save_top_k: 3, save_last: true}
  max_steps: 100
  limit_val_batches: 100
  accelerator: cpu
  strategy: auto
  devices: [0]
  log_every_n_steps: 100
"""


def names_of(callbacks):
    return {type(callback).__name__ for callback in callbacks}


def test_a_configuration_of_a_public_program_trains(cli, folder):
    (folder / "c.yaml").write_text(TERRATORCH)
    done = cli("fit", "--config=c.yaml", model=None, data=None, trainer_defaults={})
    assert done.trainer.global_step == 4
    assert (folder / "logs" / "fire_scars" / "version_0" / "config.yaml").exists()
    assert done.trainer.lr_scheduler_configs[0].monitor == "val_loss"


def test_both_packages_of_lightning_are_read_and_one_line_says_so(cli, folder, caplog):
    caplog.set_level("INFO", logger="dstrat.resolve")
    (folder / "c.yaml").write_text(VOCOS)
    made = cli("--config=c.yaml", trainer_defaults={})
    assert {"LearningRateMonitor", "ModelSummary", "ModelCheckpoint"} <= names_of(made.trainer.callbacks)
    (line,) = caplog.messages
    assert line.startswith("the configuration has names of Lightning: pytorch_lightning.loggers.TensorBoardLogger as ")
    caplog.clear()
    cli()
    assert not caplog.messages


def test_options_may_have_names_of_lightning_too(cli):
    made = cli(
        "--trainer.callbacks=lightning.pytorch.callbacks.model_checkpoint.ModelCheckpoint",
        "--trainer.enable_checkpointing=true",
    )
    assert "ModelCheckpoint" in names_of(made.trainer.callbacks)


def test_what_lightning_itself_has_printed_is_read(cli):
    """All arguments of its Trainer and of most of its callbacks and loggers with their defaults, by Lightning 2.6.6."""
    file = Path(__file__).with_name("lightning_config.yaml")
    with pytest.raises(SystemExit) as ended:
        cli("fit", f"--config={file}", "--print_config", model=None, data=None, trainer_defaults={})
    assert ended.value.code == 0


def test_options_of_a_strategy_that_are_passed_on_are_kept():
    spec = {
        "class_path": "lightning.pytorch.strategies.FSDPStrategy",
        "init_args": {"state_dict_type": "full", "new": 1},
    }
    assert translate(spec) == {
        "class_path": "dstrat.strategies.FSDPStrategy",
        "init_args": {"state_dict_type": "full"},
        "dict_kwargs": {"new": 1},
    }
    bare = translate({"class_path": "DDPStrategy", "init_args": {"static_graph": True}})
    assert bare == {"class_path": "dstrat.strategies.DDPStrategy", "init_args": {"static_graph": True}}


def test_arguments_of_lightning_alone_are_left_out_where_they_have_their_defaults():
    trainer = {"max_epochs": 1, "model_registry": None, "enable_autolog_hparams": True}
    assert translate({"trainer": trainer}) == {"trainer": {"max_epochs": 1}}
    assert "model_registry" in translate({"trainer": {"model_registry": "mine"}})["trainer"]


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_a_class_without_a_counterpart_says_what_to_write(name):
    with pytest.raises(RequestError, match=re.escape(INSTEAD[name])):
        translate(f"lightning.pytorch.plugins.{name}")


@pytest.mark.parametrize("name", ["DeepSpeedPrecision", "FSDPPrecision", "XLABf16Precision"])
def test_a_precision_of_one_strategy_of_lightning_says_what_to_write(name):
    with pytest.raises(RequestError, match="has no counterpart in dstrat: write precision: bf16-mixed or another flag"):
        translate(f"lightning.pytorch.plugins.{name}")


def test_an_unknown_class_has_the_nearest_name(refused):
    path = "lightning.pytorch.callbacks.ModelChekpoint"
    assert f"class '{path}' has no counterpart in dstrat; did you mean 'ModelCheckpoint'?" in refused(
        f"--trainer.callbacks={path}"
    )


TRANSLATE = """
from dstrat.cli.training.lightning_names import translate
def message(name):
    try:
        return translate(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


def test_a_class_of_a_package_that_is_not_installed_has_the_command(site):
    message = site.ask(f"{TRANSLATE}\nmessage('pytorch_lightning.strategies.HorovodStrategy')")
    assert message.startswith("NotInstalledError: ")
    assert message.endswith("pip install dstrat-horovod")


def test_other_texts_stay_as_they_are():
    for text in (
        "lightning strikes",
        "lightning.pytorch",
        "my.lightning.pytorch.callbacks.Timer",
        "# lightning.pytorch==2.1",
    ):
        assert translate(text) == text


def test_the_renamed_classes_are_those_of_the_page():
    page = dict(re.findall(r"^\| `([A-Z]\w+)` \| `([A-Z]\w+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert {name: new for name, new in page.items() if not name.endswith(("CLI", "Parser"))} == RENAMED

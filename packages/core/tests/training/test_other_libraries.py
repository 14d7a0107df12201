"""Objects of another library, which an installed plugin converts."""

from __future__ import annotations

import re
import subprocess
import sys
from textwrap import dedent

import pytest
from tests.accelerators import ACCELERATOR

from dstrat import Adapter, Callback, Trainer
from dstrat.errors import AmbiguousAliasError, BrokenComponentError, InvalidComponentError, MisuseError
from dstrat.plugins.catalog import get_catalog, refresh_catalog
from dstrat.training.arguments import adapt

LIBRARY = """
from torch import nn

class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

class Numbers:
    def __init__(self, batches):
        self.batches = batches

class Watcher:
    def __init__(self):
        self.steps = 0

class Book:
    def __init__(self):
        self.lines = []
"""

CONVERSION = """
import torch
from torch import nn
from dstrat import Callback, DataModule, Logger, TrainModule

class LearnerModule(TrainModule):
    def __init__(self, learner):
        super().__init__()
        self.learner = learner

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.learner.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

class NumbersData(DataModule):
    def __init__(self, numbers):
        self.numbers = numbers

    def train_dataloader(self):
        return self.numbers.batches

class WatcherCallback(Callback):
    def __init__(self, watcher):
        self.watcher = watcher

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.watcher.steps += 1

class BookLogger(Logger):
    def __init__(self, book):
        self.book = book

    def log_metrics(self, metrics, step=None):
        self.book.lines.append(step)
"""

PLUGIN = """
from dstrat import Adapter, hookimpl

@hookimpl
def dstrat_components():
    return [
        Adapter(foreign=("foreign_nets.learner:Learner",), target="acme_nets.conversion:LearnerModule", summary="nets"),
        Adapter(foreign=("foreign_nets.learner:Numbers",), target="acme_nets.conversion:NumbersData", summary="data"),
        Adapter(foreign=("foreign_nets.learner:Watcher",), target="acme_nets.conversion:WatcherCallback", summary="w"),
        Adapter(foreign=("foreign_nets.learner:Book",), target="acme_nets.conversion:BookLogger", summary="book"),
    ]
"""


def install(folder, name, plugin=PLUGIN, conversion=CONVERSION):
    """Write a distribution with a plugin."""
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(plugin)
    (package / "conversion.py").write_text(conversion)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dstrat.v1]\nnets = {name}.plugin\n")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """The foreign library, installed with the plugin that converts it."""
    package = tmp_path / "foreign_nets"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "learner.py").write_text(LIBRARY)
    install(tmp_path, "acme_nets")
    monkeypatch.syspath_prepend(tmp_path)
    refresh_catalog()
    import foreign_nets.learner

    yield foreign_nets.learner
    monkeypatch.undo()
    refresh_catalog()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("foreign_nets", "acme_nets", "other_nets")]:
        del sys.modules[name]


def quiet(**options):
    off = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return Trainer(accelerator=ACCELERATOR, devices=1, max_epochs=1, **{"logger": False, **off, **options})


def test_a_foreign_module_with_its_data_callback_and_logger_is_trained(library, loader):
    watcher, book = library.Watcher(), library.Book()
    trainer = quiet(callbacks=watcher, logger=book, log_every_n_steps=1)
    learner = library.Learner()
    before = learner.layer.weight.clone()
    batches = loader()
    trainer.fit(learner, datamodule=library.Numbers(batches))
    assert watcher.steps == len(book.lines) == len(batches)
    assert not learner.layer.weight.equal(before)


def test_a_subclass_is_converted_also_where_loaders_are_expected(library, loader):
    class Mine(library.Learner):
        pass

    trainer = quiet()
    trainer.fit(Mine(), library.Numbers(loader()))
    assert trainer.global_step == len(loader())


def test_what_is_of_another_kind_is_no_callback(library):
    with pytest.raises(Exception, match="is not a Callback"):
        quiet(callbacks=[library.Book()])


def test_what_is_ours_is_not_converted(library):
    callback = Callback()
    assert adapt(callback, Callback) is callback
    assert adapt(None, Callback) is None


def test_two_plugins_for_one_class_are_named_with_the_way_out(library, tmp_path):
    install(tmp_path, "other_nets")
    refresh_catalog()
    said = r"foreign_nets.learner:Learner is converted by acme-nets 1.0 and other-nets 1.0: set DSTRAT_DISABLE_PLUGINS"
    with pytest.raises(AmbiguousAliasError, match=said):
        quiet().fit(library.Learner(), [])


def test_a_conversion_that_cannot_be_imported_names_its_owner(library, tmp_path):
    (tmp_path / "acme_nets" / "conversion.py").write_text("import not_there")
    with pytest.raises(BrokenComponentError, match=r"acme-nets 1.0 cannot convert a Learner: importing .* 'not_there'"):
        quiet().fit(library.Learner(), [])


def test_the_nearest_base_class_decides(library, tmp_path):
    plugin = """
from dstrat import Adapter, hookimpl

@hookimpl
def dstrat_components():
    return [Adapter(foreign=("torch.nn.modules.module:Module",), target="other_nets.conversion:any", summary="any")]
"""
    install(tmp_path, "other_nets", plugin)
    refresh_catalog()
    assert get_catalog().find_adapter(library.Learner).plugin.distribution == "acme-nets"


@pytest.mark.parametrize(
    ("foreign", "target", "said"),
    [
        ((), "a:b", "must be a tuple of classes by their names, and is ()"),
        (("a.B",), "a:b", "'a.B' of the Adapter for 'a.B' must look like 'package.module:Name'"),
        (("a:B",), 1, "1 of the Adapter for 'a:B' must look like"),
    ],
)
def test_a_wrong_record_says_what_is_wrong(foreign, target, said):
    with pytest.raises(InvalidComponentError, match=re.escape(said)):
        Adapter(foreign=foreign, target=target, summary="s")


def test_an_unknown_class_of_a_known_library_gets_the_install_command():
    Other = type("Net", (), {"__module__": "pytorch_lightning.core.module"})  # noqa: N806 - a class
    if get_catalog().find_adapter(Other) is None:
        with pytest.raises(MisuseError, match=r"pip install \S*lightning lets it run as it is"):
            quiet().fit(Other(), [])


def test_listing_plugins_counts_conversions_and_imports_neither_library(library, tmp_path):
    code = dedent(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from dstrat.cli.main import main
        sys.argv = ["dstrat", "plugins"]
        try:
            main()
        except SystemExit:
            pass
        assert not {{"foreign_nets", "acme_nets.conversion", "torch"}} & set(sys.modules), "imported"
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert "adapter 4" in done.stdout

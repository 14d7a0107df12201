from __future__ import annotations

import copy
import functools
import inspect
import logging
import pickle
from argparse import Namespace
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from dstrat import DataModule, TrainModule
from dstrat.errors import MisuseError
from dstrat.training.loggers.logger import Logger
from dstrat.training.module.loading import read_checkpoint
from dstrat.training.module.plain_values import to_plain


class Net(TrainModule):
    def __init__(self, width: int, *, depth: int = 2, **others):
        super().__init__()
        self.save_hyperparameters()


class Deeper(Net):
    def __init__(self, act: str, width: int = 8):
        super().__init__(width * 2, depth=3)
        self.act = act


@dataclass
class Optimizer:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


@dataclass
class Config:
    width: int = 4
    optimizer: Optimizer = field(default_factory=Optimizer)


class Configured(TrainModule):
    def __init__(self, config):
        super().__init__()
        self.save_hyperparameters(config)


class Recorder(Logger):
    def __init__(self):
        self.params = []

    def log_metrics(self, metrics, step):
        pass

    def log_hyperparams(self, params):
        self.params.append(dict(params))


@pytest.fixture
def saved(quiet_trainer, line_class, loader, tmp_path):
    """What is in the checkpoint of a Line that was made so."""

    def save(cls, *args, datamodule=None, **kwargs):
        class Module(cls, line_class):
            def on_train_end(self):
                self.trainer.save_checkpoint(tmp_path / "it.ckpt")

        module = Module(*args, **kwargs)
        module.layer = nn.Linear(8, 1)
        module.lr = 0.1
        data = {"datamodule": datamodule} if datamodule else {"train_dataloaders": loader()}
        quiet_trainer(max_steps=1).fit(module, **data)
        return read_checkpoint(tmp_path / "it.ckpt")

    return save


def test_all_arguments_are_kept_with_their_defaults_and_those_in_kwargs():
    assert Net(3, dropout=0.5).hparams == {"width": 3, "depth": 2, "dropout": 0.5}


def test_settings_are_keys_and_attributes():
    hparams = Net(3).hparams
    hparams.width = 4
    assert hparams["width"] == hparams.width == 4
    with pytest.raises(AttributeError, match=r"there is no 'widht', only 'width', 'depth'"):
        hparams.widht  # noqa: B018


def test_an_inherited_init_that_saves_keeps_the_subclasss_arguments_which_come_first():
    assert Deeper("relu").hparams == {"width": 8, "depth": 3, "act": "relu"}


def test_settings_saved_before_the_modules_own_init_stay():
    class Early(TrainModule):
        def __init__(self, width):
            self.save_hyperparameters()
            super().__init__()

    assert Early(3).hparams == {"width": 3}


def test_some_arguments_are_kept_by_name_and_others_left_out():
    class Some(TrainModule):
        def __init__(self, a, b, c):
            super().__init__()
            self.save_hyperparameters("a", "b")

    class But(TrainModule):
        def __init__(self, a, b, c):
            super().__init__()
            self.save_hyperparameters(ignore=["a", "b"])

    class ButOne(TrainModule):
        def __init__(self, a, bias):
            super().__init__()
            self.save_hyperparameters(ignore="bias")

    assert Some(1, 2, 3).hparams == {"a": 1, "b": 2}
    assert But(1, 2, 3).hparams == {"c": 3}
    assert ButOne(1, 2).hparams == {"a": 1}


@pytest.mark.parametrize("config", [{"width": 4, "lr": 0.1}, Namespace(width=4, lr=0.1)], ids=["a dict", "a namespace"])
def test_the_fields_of_an_argument_that_holds_all_settings_are_kept(config):
    assert Configured(config).hparams == {"width": 4, "lr": 0.1}


def test_the_fields_of_a_dataclass_are_kept_as_they_are():
    config = Config()
    assert Configured(config).hparams == {"width": 4, "optimizer": config.optimizer}


def test_settings_can_be_saved_through_a_function_of_ones_own():
    def save(module, frame):
        module.save_hyperparameters(frame=frame)

    class Indirect(TrainModule):
        def __init__(self, width):
            super().__init__()
            save(self, inspect.currentframe())

    assert Indirect(3).hparams == {"width": 3}


def test_a_dataclass_that_is_a_module_saves_its_fields():
    @dataclass(eq=False)
    class Fields(TrainModule):
        width: int
        depth: int = 2

        def __post_init__(self):
            super().__init__()
            self.save_hyperparameters()

    assert Fields(3).hparams == {"width": 3, "depth": 2}


def test_another_object_that_is_being_made_does_not_give_its_arguments():
    class Outer:
        def __init__(self, act):
            self.net = Net(3)

    assert Outer("relu").net.hparams == {"width": 3, "depth": 2}


def test_a_name_that_is_no_argument_is_an_error_that_lists_them():
    class Wrong(TrainModule):
        def __init__(self, width, depth=2):
            super().__init__()
            self.save_hyperparameters("widht")

    with pytest.raises(MisuseError, match=r"got 'widht', and Wrong\.__init__ has the arguments width, depth"):
        Wrong(3)


def test_saving_outside_of_init_is_an_error_unless_it_is_a_dict():
    module = TrainModule()
    with pytest.raises(MisuseError, match=r"TrainModule\.__init__, which is not running"):
        module.save_hyperparameters()
    module.save_hyperparameters({"width": 3})
    assert module.hparams == {"width": 3}


def test_arguments_without_a_name_are_told_of(caplog):
    class Unnamed(TrainModule):
        def __init__(self, *sizes):
            super().__init__()
            self.save_hyperparameters()

    with caplog.at_level(logging.WARNING):
        assert Unnamed(3, 4).hparams == {}
    assert "arguments without a name in *args, which are not kept as hyperparameters: [3, 4]" in caplog.text


def test_an_argument_in_args_that_a_base_class_has_kept_by_its_name_is_not_told_of(caplog):
    class Passing(Net):
        def __init__(self, *args):
            super().__init__(*args)
            self.save_hyperparameters()

    assert Passing(3).hparams == {"width": 3, "depth": 2}
    assert not caplog.messages


def test_settings_that_are_added_leave_the_argument_that_holds_all(saved):
    class Seeded(Configured):
        def __init__(self, config):
            super().__init__(config)
            self.save_hyperparameters({"seed": 1})

    checkpoint = saved(Seeded, Namespace(width=4))
    assert (checkpoint["hyper_parameters"], checkpoint["hparams_name"]) == ({"width": 4, "seed": 1}, "config")


def test_numbers_and_texts_become_pythons_own():
    plain = to_plain({"i": np.int64(3), "f": np.float32(0.5), "b": True, "t": np.str_("a")}, "", None)
    assert plain == {"i": 3, "f": 0.5, "b": True, "t": "a"}
    assert [type(value) for value in plain.values()] == [int, float, bool, str]


def test_what_was_saved_first_stays_when_settings_are_changed():
    module = Net({"sizes": [1, 2]})
    module.hparams.width["sizes"].append(3)
    module.hparams.depth = 5
    assert module.hparams_initial == {"width": {"sizes": [1, 2]}, "depth": 2}
    module.hparams_initial["depth"] = 7
    assert module.hparams_initial["depth"] == 2


def test_copies_and_pickles_have_settings_of_their_own():
    module = Net(3)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.hparams == {"width": 3, "depth": 2}
        other.hparams.width = 4
    assert module.hparams.width == 3


def test_a_checkpoint_holds_the_settings_of_module_and_data_module_as_plain_values(saved, line_class, loader):
    class Numbers(DataModule):
        def __init__(self, count):
            self.save_hyperparameters()

        def train_dataloader(self):
            return loader(count=self.hparams.count)

    class Annotated(TrainModule):
        def __init__(self, width: int, path: Path, config: Config):
            super().__init__()
            self.save_hyperparameters()

    Annotated.__init__.__annotations__["config"] = Config  # a name of this module, which the class does not see
    checkpoint = saved(Annotated, 3, path=Path("data"), config=Config(), datamodule=Numbers(16))
    assert checkpoint["hyper_parameters"] == {
        "width": 3,
        "path": "data",
        "config": {"width": 4, "optimizer": {"lr": 0.1, "betas": (0.9, 0.99)}},
    }
    assert checkpoint["datamodule_hyper_parameters"] == {"count": 16}


def test_a_checkpoint_names_the_argument_that_held_all_settings(saved):
    checkpoint = saved(Configured, Namespace(width=4))
    assert checkpoint["hparams_name"] == "config"
    assert checkpoint["hyper_parameters"] == {"width": 4}


def test_a_module_without_settings_leaves_no_trace_of_them_in_a_checkpoint(saved):
    class Plain(TrainModule):
        pass

    assert not {"hyper_parameters", "hparams_name", "datamodule_hyper_parameters"} & saved(Plain).keys()


class Size(Enum):
    SMALL = 1


class Level(IntEnum):
    LOW = 1


class Sides(NamedTuple):
    left: int
    right: int


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (nn.Linear(1, 1), "net (Linear)"),
        (nn.ReLU, "net (type)"),
        (functools.partial(nn.Linear, 3), "net (partial)"),
        (Size.SMALL, "net (Size, which is not annotated)"),
        (defaultdict(int, a=1), "net (defaultdict, which is not annotated)"),
        ({"a": [Counter("ab")]}, "net.a[0] (Counter, which is not annotated)"),
        (torch.float16, "net (dtype)"),
        ({1, 2}, "net (set)"),
        (torch.zeros(2), "net (Tensor)"),
        ([1, {"f": len}], "net[1].f (builtin_function_or_method)"),
        ({1: 2}, "net (dict)"),
        (Config(), "net (Config, which is not annotated)"),
        ([Sides(1, 2)], "net[0] (Sides, which is not annotated)"),
        ({"a": [Level.LOW]}, "net.a[0] (Level, which is not annotated)"),
        (Fraction(1, 3), "net (Fraction)"),
        ([PurePosixPath("a")], "net[0] (PurePosixPath, which is not annotated)"),
    ],
)
def test_a_setting_that_is_not_plain_is_left_out_of_checkpoints(saved, value, named):
    checkpoint = saved(Net, 3, net=value)
    assert checkpoint["hyper_parameters"] == {"width": 3, "depth": 2}
    assert checkpoint["hparams_left_out"] == {"net": named}


@dataclass
class Block:
    width: int
    area: int = field(init=False)
    parts: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.area = self.width**2


@dataclass
class Growing:
    parts: list[int]

    def __post_init__(self):
        self.parts.append(1)


@pytest.mark.parametrize(
    ("annotation", "value", "named"),
    [
        (list[Size], ["SMALL"], "net (list, which would not come back the same)"),
        (list[Size], ("SMALL",), None),  # no list: its items are not annotated
        (dict[str, Size], {"a": "SMALL"}, "net (dict, which would not come back the same)"),
        (list[Block], [Block(2)], "net (list, which would not come back the same)"),
        (Sides, [], "net (list, which would not come back the same)"),
        (Growing, Growing([2]), "net.parts (list, which would not come back the same)"),
    ],
)
def test_a_setting_that_its_annotation_does_not_make_again_is_left_out(saved, annotation, value, named):
    class Typed(TrainModule):
        def __init__(self, net):
            super().__init__()
            self.save_hyperparameters()

    Typed.__init__.__annotations__ = {"net": annotation}
    checkpoint = saved(Typed, value)
    assert checkpoint.get("hparams_left_out") == ({"net": named} if named else None)
    assert ("net" in checkpoint["hyper_parameters"]) is (named is None)


def test_one_line_names_the_settings_that_checkpoints_do_not_hold(quiet_trainer, line_class, loader, caplog):
    class Held(line_class):
        def __init__(self, net, act, size=nn.ReLU):
            super().__init__()
            self.save_hyperparameters()

    module = Held(nn.Linear(1, 1), act=nn.GELU)
    quiet_trainer(enable_checkpointing=True, max_epochs=2).fit(module, loader())
    (message,) = caplog.messages
    assert message == (
        "checkpoints do not hold these hyperparameters of Held, which are no plain values: net (Linear), act (type); "
        "load_from_checkpoint(path, net=..., act=...) takes them, and save_hyperparameters(ignore=['net', 'act']) "
        "keeps them out of hparams"
    )
    assert (type(module.hparams.net), module.hparams.act) == (nn.Linear, nn.GELU)


def test_a_subclass_may_leave_out_what_its_base_class_saves():
    class Headed(Net):
        def __init__(self, net, width=3):
            super().__init__(width)
            self.save_hyperparameters(ignore="net")

    module = Headed(nn.Linear(1, 1))
    assert module.hparams == module.hparams_initial == {"width": 3, "depth": 2}


def test_containers_of_omegaconf_are_saved_as_what_they_hold(saved):
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"sizes": [1, 2], "net": {"width": 3, "double": "${mul:2}"}, "lr": "???"})
    checkpoint = saved(Net, 3, config=omegaconf.OmegaConf.create({"sizes": [1, {"a": "${..[0]}"}]}), sizes=config.sizes)
    assert checkpoint["hyper_parameters"] == {
        "width": 3,
        "depth": 2,
        "config": {"sizes": [1, {"a": 1}]},
        "sizes": [1, 2],
    }
    assert checkpoint["hparams_containers"] == ["config", "sizes"]


def test_a_container_of_omegaconf_may_be_what_holds_all_settings(saved):
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"sizes": [1, 2], "net": {"width": 3, "double": "${mul:2}"}, "lr": "???"})
    checkpoint = saved(Configured, config)
    assert checkpoint["hyper_parameters"] == {"sizes": [1, 2]}  # what is missing, or cannot be found, is not
    assert checkpoint["hparams_left_out"] == {"net": "net (DictConfig)"}


def test_a_run_without_checkpoints_keeps_whatever_a_setting_is(quiet_trainer, line_class, loader):
    class Held(line_class):
        def __init__(self, net):
            super().__init__()
            self.save_hyperparameters()

    module = Held(nn.Linear(1, 1))
    quiet_trainer(max_steps=1).fit(module, loader())
    assert isinstance(module.hparams.net, nn.Linear)


def test_loggers_get_the_settings_of_module_and_data_module_once(quiet_trainer, line_class, loader):
    class Width(line_class):
        def __init__(self, width, net):
            super().__init__()
            self.save_hyperparameters()
            self.hparams.width = 5

    class Numbers(DataModule):
        def __init__(self, count):
            self.save_hyperparameters()

        def train_dataloader(self):
            return loader(count=self.hparams.count)

    recorder = Recorder()
    quiet_trainer(max_steps=1, logger=recorder).fit(Width(3, nn.Linear), datamodule=Numbers(16))
    assert recorder.params == [{"width": 3, "net": "Linear", "count": 16}]


def test_settings_may_be_kept_from_loggers(quiet_trainer, line_class, loader):
    class Secret(line_class):
        def __init__(self, width):
            super().__init__()
            self.save_hyperparameters(logger=False)

    recorder = Recorder()
    quiet_trainer(max_steps=1, logger=recorder).fit(Secret(3), loader())
    assert recorder.params == []


def test_different_values_of_one_name_in_module_and_data_module_are_an_error(quiet_trainer, line_class, loader):
    class Sized(line_class):
        def __init__(self, size):
            super().__init__()
            self.save_hyperparameters()

    class Numbers(DataModule):
        def __init__(self, size):
            self.save_hyperparameters()

        def train_dataloader(self):
            return loader(count=self.hparams.size)

    quiet_trainer(max_steps=1, logger=Recorder()).fit(Sized(16), datamodule=Numbers(16))
    with pytest.raises(MisuseError, match="both have a hyperparameter 'size', 3 and 16"):
        quiet_trainer(max_steps=1, logger=Recorder()).fit(Sized(3), datamodule=Numbers(16))

from __future__ import annotations

import io
import logging
import pickle
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag, IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from dstrat import DataModule, HyperparametersMixin, TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.errors import CheckpointError, MisuseError, RequestError
from dstrat.training.module.hyperparameters import MODULE_KEYS, checkpoint_entries
from dstrat.training.module.plain_values import from_plain


class Net(TrainModule):
    def __init__(self, width: int, depth: int = 1):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))


class Act(str, Enum):
    RELU = "relu"


@dataclass
class Sizes:
    width: int = 4
    where: Path = Path("here")


@dataclass
class Config:
    sizes: Sizes = field(default_factory=Sizes)
    betas: tuple[float, float] = (0.9, 0.99)


@pytest.fixture(params=[TorchCheckpointIO, PortableCheckpointIO], ids=["file", "folder"])
def write(request, tmp_path):
    """Writes what a Trainer writes of a module, without training it."""

    def write(module, *, state=None, **entries):
        path = tmp_path / "it.ckpt"
        state = module.state_dict() if state is None else state
        checkpoint = {"state_dict": state, **checkpoint_entries(module, MODULE_KEYS), **entries}
        request.param().save_checkpoint(checkpoint, path)
        return path

    return write


def test_a_module_is_made_again_with_its_settings_and_weights(write):
    module = Net(3, depth=2)
    loaded = Net.load_from_checkpoint(write(module))
    assert loaded.hparams == {"width": 3, "depth": 2}
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True))


def test_a_module_is_made_again_from_what_a_trainer_has_written(quiet_trainer, line_class, loader, tmp_path):
    class Wide(line_class):
        def __init__(self, lr=0.1, *, inside):
            super().__init__(lr=lr)
            self.save_hyperparameters()
            self.inside = inside

        def on_train_end(self):
            self.trainer.save_checkpoint(tmp_path / "it.ckpt", weights_only=True)

    module = Wide(0.02, inside={"a": [1, 2]})
    quiet_trainer(max_steps=2).fit(module, loader())
    loaded = Wide.load_from_checkpoint(tmp_path / "it.ckpt")
    assert (loaded.lr, loaded.inside, loaded.inside.a) == (0.02, {"a": [1, 2]}, [1, 2])
    assert torch.equal(loaded.layer.weight, module.layer.weight)


def test_settings_of_a_file_replace_those_of_the_checkpoint(write, tmp_path):
    class Named(Net):
        def __init__(self, width, depth=1, name="none", act=None):
            super().__init__(width, depth)
            self.save_hyperparameters()

    path, file = write(Named(3, act=nn.GELU)), tmp_path / "hparams.json"
    file.write_text('{"width": 3, "name": "of the file"}')
    loaded = Named.load_from_checkpoint(path, None, file)
    assert loaded.hparams == {"width": 3, "depth": 1, "name": "of the file", "act": None}
    assert Named.load_from_checkpoint(path, hparams_file=file, name="mine").hparams.name == "mine"
    file.write_text("width: 3")
    with pytest.raises(RequestError, match=r"hparams\.json' has no JSON object, .*: pass the hyperparameters by name"):
        Named.load_from_checkpoint(path, hparams_file=file)


def test_no_checkpoint_may_run_code(write, tmp_path):
    class Open(Net):
        def __init__(self, width, **kwargs):
            super().__init__(width)

    path = write(Open(3))
    for weights_only in (True, False, None):
        loaded = Open.load_from_checkpoint(path, None, None, True, weights_only)
        assert loaded.hparams == {"width": 3, "depth": 1}
    torch.save({"state_dict": {}, "hyper_parameters": {"act": nn.GELU()}}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match=r"GELU, and only tensors .* whatever weights_only says; to trust that"):
        Open.load_from_checkpoint(tmp_path / "other.ckpt", weights_only=False)


def test_a_checkpoint_is_read_from_a_file_object(tmp_path):
    buffer, module = io.BytesIO(), Net(3)
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": {"width": 3}}, buffer)
    buffer.seek(0)
    assert torch.equal(next(Net.load_from_checkpoint(buffer).parameters()), next(module.parameters()))
    with pytest.raises(CheckpointError, match="is damaged"):
        Net.load_from_checkpoint(io.BytesIO(b"no checkpoint"))


def test_any_class_keeps_hyperparameters():
    class Encoder(nn.Module, HyperparametersMixin):
        def __init__(self, width, act):
            super().__init__()
            self.save_hyperparameters(ignore=["act"])

    encoder = Encoder(3, nn.GELU())
    encoder.hparams["cls"] = Encoder
    assert encoder.hparams == {"width": 3, "cls": Encoder}


def test_overrides_come_before_the_checkpoint(write):
    class Scaled(Net):
        def __init__(self, width, scale=1.0):
            super().__init__(width)
            self.save_hyperparameters()
            self.scale = scale

    loaded = Scaled.load_from_checkpoint(write(Scaled(3)), scale=2.0)
    assert (loaded.scale, loaded.hparams.scale, loaded.hparams.width) == (2.0, 2.0, 3)


def test_settings_of_a_base_class_that_the_subclass_sets_itself_are_not_passed_to_it(write):
    class Fixed(Net):
        def __init__(self):
            super().__init__(3, depth=2)

    assert Fixed.load_from_checkpoint(write(Fixed())).hparams == {"width": 3, "depth": 2}


def test_settings_go_through_kwargs_to_a_base_class(write):
    class Through(Net):
        def __init__(self, scale, **kwargs):
            super().__init__(**kwargs)
            self.scale = scale

    loaded = Through.load_from_checkpoint(write(Through(2.0, width=3)), scale=4.0)
    assert (loaded.scale, loaded.hparams.width) == (4.0, 3)


def test_a_class_may_read_its_kwargs_by_itself(write):
    class Configured(TrainModule):
        def __init__(self, width, **kwargs):
            super().__init__()
            self.save_hyperparameters("width")
            self.layer = nn.Linear(width, kwargs["outputs"])

    module = Configured(3, outputs=2)
    assert Configured.load_from_checkpoint(write(module), outputs=2).layer.out_features == 2


def test_what_a_subclass_gives_its_base_class_is_not_missing(write):
    class Base(TrainModule):
        def __init__(self, width, depth=1):
            super().__init__()
            self.sizes = width, depth

    class Given(Base):
        def __init__(self, **kwargs):
            super().__init__(3, **kwargs)

    assert Given.load_from_checkpoint(write(Given()), depth=2).sizes == (3, 2)


def test_kwargs_come_back_though_a_base_class_takes_none(write):
    class Base(TrainModule):
        def __init__(self):
            super().__init__()

    class Reading(Base):
        def __init__(self, lr=0.1, **kwargs):
            super().__init__()
            self.save_hyperparameters()
            self.dropout = kwargs.get("dropout", 0.5)

    path = write(Reading(lr=0.2, dropout=0.0))
    loaded = Reading.load_from_checkpoint(path)
    assert (loaded.dropout, loaded.hparams) == (0.0, {"lr": 0.2, "dropout": 0.0})
    assert Reading.load_from_checkpoint(path, dropout=0.1).dropout == 0.1


def test_an_override_that_no_constructor_takes_is_an_error(write):
    class Passing(Net):
        def __init__(self, scale=1, **kwargs):
            super().__init__(**kwargs)

    with pytest.raises(MisuseError, match=r"got 'dept', and Passing\.__init__ takes scale, width, depth"):
        Passing.load_from_checkpoint(write(Passing(width=3)), dept=2)


@pytest.mark.parametrize("kind", [dict, Namespace, Config])
def test_an_argument_that_held_all_settings_is_made_again_as_its_annotation_says(write, kind):
    class Configured(TrainModule):
        def __init__(self, config: kind):
            super().__init__()
            self.save_hyperparameters(config)
            self.config = config

    Configured.__init__.__annotations__ = {"config": kind}
    config = kind() if kind is Config else kind(width=4, path="x")
    loaded = Configured.load_from_checkpoint(write(Configured(config)))
    assert isinstance(loaded.config, kind)
    assert loaded.config == config


class Configured(TrainModule):
    def __init__(self, config):
        super().__init__()
        self.save_hyperparameters(config)
        self.config = config


def test_without_an_annotation_a_dict_has_attributes(write):
    loaded = Configured.load_from_checkpoint(write(Configured({"width": 4})), width=5)
    assert loaded.config.width == loaded.config["width"] == 5


@pytest.mark.parametrize("kind", [Namespace, SimpleNamespace])
def test_without_an_annotation_a_namespace_stays_one(write, kind):
    config = kind(width=4, where=Path("here"), inner=kind(depth=1))
    loaded = Configured.load_from_checkpoint(write(Configured(config)), width=5)
    assert loaded.config == kind(width=5, where=Path("here"), inner=kind(depth=1))


def test_a_dict_with_all_settings_stays_one_though_a_dataclass_is_annotated(write):
    class Typed(TrainModule):
        def __init__(self, config):
            super().__init__()
            self.save_hyperparameters(config)
            self.config = config

    Typed.__init__.__annotations__ = {"config": Sizes}
    loaded = Typed.load_from_checkpoint(write(Typed({"width": 5})), width=6)
    assert isinstance(loaded.config, dict)
    assert loaded.config == {"width": 6}


def test_without_an_annotation_a_dataclass_with_all_settings_is_asked_for(write):
    path = write(Configured(Sizes(5)))
    with pytest.raises(MisuseError, match=r"made with config \(Sizes, which is not annotated\).*config=\.\.\."):
        Configured.load_from_checkpoint(path)
    assert Configured.load_from_checkpoint(path, config=Sizes(6)).hparams.width == 6


class Pair(NamedTuple):
    a: int
    b: int


class Level(IntEnum):
    LOW = 1


class Color(Enum):
    RED = "r"


class Axes(Flag):
    X = 1
    Y = 2


def make_typed(**annotations):
    class Typed(TrainModule):
        def __init__(self, blocks, pair, level, args, path):
            super().__init__()
            self.save_hyperparameters()
            self.given = blocks, pair, level, args, path

    Typed.__init__.__annotations__ = annotations
    given = ([Sizes(2)], Pair(1, 2), Level.LOW, Namespace(a=[Path("x")]), Path("y"))
    return Typed, given


def test_values_come_back_as_what_they_were(write):
    typed, given = make_typed(blocks=list[Sizes], pair=Pair, level=Level)
    loaded = typed.load_from_checkpoint(write(typed(*given))).given
    assert loaded == given
    assert list(map(type, loaded)) == list(map(type, given))


def test_values_that_would_come_back_as_another_type_are_asked_for(write):
    typed, given = make_typed()
    path = write(typed(*given))
    with pytest.raises(MisuseError, match=r"blocks\[0\] \(Sizes, .*pair \(Pair, .*level \(Level, .*\), which '"):
        typed.load_from_checkpoint(path)
    asked_for = dict(zip(("blocks", "pair", "level"), given, strict=False))
    assert typed.load_from_checkpoint(path, **asked_for).given == given


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Color, Color.RED),
        (list[Color] | None, [Color.RED]),
        (dict[str, Axes], {"a": Axes.X | Axes.Y}),
        (Sequence[Sizes], [Sizes(1), Sizes(2)]),
        (Sequence[Sizes], (Sizes(1), Sizes(2))),
        (Iterable[Sizes] | None, [Sizes(1)]),
        (Mapping[str, Sizes], {"a": Sizes(2)}),
        (OrderedDict[str, Sizes], OrderedDict(a=Sizes(2))),
        (Sequence[Sizes] | Mapping[str, list[Sizes]], {"a": [Sizes(2)]}),
        (tuple[int, Sizes], (1, Sizes(2))),
        (list[Sizes], [{"width": 1}]),  # a dict stays one
        (list[Sizes], [{"width": 1, "height": 2}]),
        (Sizes, {"width": 1}),
        (dict[str, Sizes], {"a": {"width": 1}, "b": Sizes(2)}),
    ],
)
def test_an_annotated_container_comes_back_as_it_was(write, annotation, value):
    class Typed(TrainModule):
        def __init__(self, given):
            super().__init__()
            self.save_hyperparameters()
            self.given = given

    Typed.__init__.__annotations__ = {"given": annotation}
    loaded = Typed.load_from_checkpoint(write(Typed(value))).given
    assert loaded == value
    assert isinstance(loaded, type(value))


def test_arguments_are_made_again_as_their_annotations_say(write):
    class Annotated(TrainModule):
        def __init__(self, config: Config, path: Path | str, act: Act | None, sizes: tuple, other: Path | None = None):
            super().__init__()
            self.save_hyperparameters()
            self.given = config, path, act, sizes, other

    Annotated.__init__.__annotations__ = {
        "config": Config, "path": Path, "act": Act | None, "sizes": tuple[int, ...], "other": Path | None,
    }  # fmt: skip
    given = (Config(Sizes(5)), Path("p"), Act.RELU, (1, 2), None)
    loaded = Annotated.load_from_checkpoint(write(Annotated(*given)))
    assert loaded.given == given
    assert type(loaded.given[2]) is Act  # which equals its text


@pytest.mark.parametrize(
    ("annotation", "kind"), [(tuple[int, ...], tuple), (list[int], list), (list | tuple, list), (None, list)]
)
def test_a_list_becomes_a_tuple_where_that_alone_is_allowed(annotation, kind):
    assert from_plain([1, 2], annotation) == kind((1, 2))


def test_the_annotation_of_a_subclass_comes_before_that_of_its_base_class(write):
    class Base(TrainModule):
        def __init__(self, where: str):
            super().__init__()

    class Placed(Base):
        def __init__(self, where: Path, **kwargs):
            super().__init__(where=str(where), **kwargs)
            self.save_hyperparameters()
            self.where = where

    assert Placed.load_from_checkpoint(write(Placed(Path("here")))).where == Path("here")


def test_fields_beside_a_new_argument_that_holds_all_settings_are_an_error(write):
    class Configured(TrainModule):
        def __init__(self, config):
            super().__init__()
            self.save_hyperparameters(config)

    path = write(Configured({"width": 4}))
    assert Configured.load_from_checkpoint(path, config={"width": 5}).hparams == {"width": 5}
    with pytest.raises(MisuseError, match=r"got 'width', and Configured\.__init__ takes config"):
        Configured.load_from_checkpoint(path, config={"width": 5}, width=6)


def test_a_missing_argument_is_an_error_that_says_how_to_pass_it(write):
    class Headed(Net):
        def __init__(self, width, head):
            super().__init__(width)

    path = write(Net(3))
    with pytest.raises(MisuseError, match=r"Headed\.__init__ needs 'head'.* are width, depth: call .*head=\.\.\."):
        Headed.load_from_checkpoint(path)
    assert Headed.load_from_checkpoint(path, head=1).hparams.head == 1


def test_a_setting_that_the_checkpoint_does_not_hold_is_asked_for_by_its_name(write):
    class Acting(Net):
        def __init__(self, width=8, act=nn.ReLU, norm=nn.LayerNorm):
            super().__init__(width)
            self.save_hyperparameters()

    message = r"Acting was made with act \(type\), which '.*' does not hold, .*: call .*load_from_checkpoint\(..., act="
    path = write(Acting(3, act=nn.GELU))
    with pytest.raises(MisuseError, match=message):  # rather than the default, which it was not made with
        Acting.load_from_checkpoint(path)
    loaded = Acting.load_from_checkpoint(path, act=nn.GELU)
    assert (loaded.hparams.act, loaded.hparams.norm) == (nn.GELU, nn.LayerNorm)


def test_a_field_that_the_checkpoint_does_not_hold_is_asked_for_by_its_name(write):
    class Configured(TrainModule):
        def __init__(self, config):
            super().__init__()
            self.save_hyperparameters(config)

    path = write(Configured({"width": 4, "act": nn.GELU}))
    with pytest.raises(MisuseError, match=r"made with act \(type\)"):
        Configured.load_from_checkpoint(path)
    assert Configured.load_from_checkpoint(path, act=nn.GELU).hparams == {"width": 4, "act": nn.GELU}
    assert Configured.load_from_checkpoint(path, config={"width": 5}).hparams == {"width": 5}


def test_containers_of_omegaconf_come_back(write):
    omegaconf = pytest.importorskip("omegaconf")

    class Configured(TrainModule):
        def __init__(self, config):
            super().__init__()
            self.save_hyperparameters(config)
            self.config = config

    config = omegaconf.OmegaConf.create({"net": {"width": 3}})
    assert Configured.load_from_checkpoint(write(Configured(config))).config == config


def test_an_argument_that_was_a_container_of_omegaconf_comes_back_as_one(write):
    omegaconf = pytest.importorskip("omegaconf")

    class Sized(TrainModule):
        def __init__(self, sizes):
            super().__init__()
            self.save_hyperparameters()

    sizes = Sized.load_from_checkpoint(write(Sized(omegaconf.OmegaConf.create([1, 2])))).hparams.sizes
    assert (type(sizes).__name__, sizes) == ("ListConfig", [1, 2])


@pytest.mark.parametrize(
    ("map_location", "device"),
    [
        (lambda storage, _: storage, "cpu"),
        (lambda *_: None, "cpu"),
        (lambda storage, location: torch.empty(1, device={"cpu": "meta"}[location]).untyped_storage(), "meta"),
        ({"cpu": "meta"}, "meta"),
        ({"cpu": "cpu"}, "cpu"),
        (torch.device("meta"), "meta"),
    ],
)
def test_a_map_location_is_what_torch_load_takes(write, map_location, device, caplog):
    loaded = Net.load_from_checkpoint(write(Net(3)), map_location=map_location)
    assert loaded.device.type == device
    assert not caplog.messages


def test_a_map_location_that_says_nothing_of_the_cpu_is_told_of(write, caplog):
    Net.load_from_checkpoint(write(Net(3)), map_location={"cuda:0": "cuda:1"})
    assert "does not say where tensors on 'cpu' go" in caplog.text


def test_an_override_that_is_no_argument_is_an_error_that_lists_them(write):
    with pytest.raises(MisuseError, match=r"got 'widht', and Net\.__init__ takes width, depth"):
        Net.load_from_checkpoint(write(Net(3)), widht=4)


def test_weights_that_are_missing_or_left_over_are_listed_in_one_error(write):
    state = Net(3, depth=2).state_dict()
    del state["layers.0.weight"], state["layers.1.bias"]
    path = write(Net(3, depth=2), state=state | {"head.weight": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"missing layers\.0\.weight, layers\.1\.bias; unexpected head\.weight\."):
        Net.load_from_checkpoint(path)


def test_unless_it_is_strict_the_other_weights_are_loaded_and_that_is_logged(write, caplog):
    module = Net(3, depth=2)
    path = write(module)
    with caplog.at_level(logging.WARNING):
        loaded = Net.load_from_checkpoint(path, strict=False, depth=1)
    assert torch.equal(loaded.layers[0].weight, module.layers[0].weight)
    assert "unexpected layers.1.weight, layers.1.bias; the others are loaded" in caplog.text


@pytest.mark.parametrize("strict", [True, False])
def test_a_weight_of_another_size_is_an_error_that_names_it(write, strict):
    with pytest.raises(CheckpointError, match=r"do not fit Net: size mismatch for layers\.0\.weight"):
        Net.load_from_checkpoint(write(Net(3)), strict=strict, width=4)


def test_layers_that_configure_model_makes_are_loaded(write):
    class Late(TrainModule):
        def configure_model(self):
            if not hasattr(self, "layer"):
                self.layer = nn.Linear(2, 2)

    module = Late()
    module.configure_model()
    assert torch.equal(Late.load_from_checkpoint(write(module)).layer.weight, module.layer.weight)


def test_the_module_reads_the_checkpoint_before_its_weights_are_loaded(write):
    class Grown(TrainModule):
        def on_load_checkpoint(self, checkpoint):
            self.layer = nn.Linear(*checkpoint["sizes"])

    module = Grown()
    module.layer = nn.Linear(2, 3)
    assert torch.equal(Grown.load_from_checkpoint(write(module, sizes=[2, 3])).layer.weight, module.layer.weight)


def test_the_module_is_brought_to_the_device_that_is_asked_for(write):
    path = write(Net(3))
    assert Net.load_from_checkpoint(path, map_location="meta").device.type == "meta"
    assert Net.load_from_checkpoint(path).device.type == "cpu"


def test_a_file_without_weights_of_a_module_is_an_error(tmp_path):
    torch.save({"weight": torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="no 'state_dict', and so is no checkpoint of a Trainer"):
        Net.load_from_checkpoint(tmp_path / "w.pt")


def test_no_code_of_a_file_is_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    for name, payload in {"torch": None, "pickle": {"state_dict": Bomb()}}.items():
        path = tmp_path / f"{name}.ckpt"
        if payload is None:
            torch.save({"state_dict": {}, "hyper_parameters": {"width": Bomb()}}, path)
        else:
            path.write_bytes(pickle.dumps(payload))
        with pytest.raises(CheckpointError):
            Net.load_from_checkpoint(path)
    assert not (tmp_path / "exploded").exists()


def test_a_data_module_is_made_again_with_its_settings_and_state(quiet_trainer, line, loader, tmp_path):
    class Numbers(DataModule):
        def __init__(self, count, scale=1.0):
            self.save_hyperparameters()
            self.seen = 0

        def train_dataloader(self):
            self.seen += 1
            return loader(count=self.hparams.count)

        def state_dict(self):
            return {"seen": torch.tensor(self.seen)}

        def load_state_dict(self, state_dict):
            self.seen = state_dict["seen"]

    line.on_train_end = lambda: line.trainer.save_checkpoint(tmp_path / "it.ckpt")
    quiet_trainer(max_steps=1).fit(line, datamodule=Numbers(16))
    loaded = Numbers.load_from_checkpoint(tmp_path / "it.ckpt", scale=2.0)
    assert (loaded.hparams, loaded.seen) == ({"count": 16, "scale": 2.0}, 1)
    assert Numbers.load_from_checkpoint(tmp_path / "it.ckpt", "meta").seen.device.type == "meta"


def test_a_module_that_configure_model_only_shards_is_loaded_without_a_mesh(write):
    class Sharded(Net):
        def configure_model(self):
            raise AssertionError(self.device_mesh)

    module = Sharded(4)
    assert torch.equal(Sharded.load_from_checkpoint(write(module)).layers[0].weight, module.layers[0].weight)


@pytest.mark.parametrize("value", [None, 3, io.StringIO("text")])
def test_what_is_no_path_and_no_binary_file_is_refused(value):
    with pytest.raises(RequestError, match="a file object that is open in binary mode"):
        Net.load_from_checkpoint(value)


def test_a_damaged_file_object_is_named_as_it_was_given():
    with pytest.raises(CheckpointError, match="BytesIO object at"):
        Net.load_from_checkpoint(io.BytesIO(b"not a checkpoint"))


class HandsOn(TrainModule):
    """Has no names for what it hands on to TrainModule, which takes nothing."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)
        self.hparams["extra"] = 1


def test_names_that_a_class_cannot_hand_on_are_left_out(write, caplog):
    assert HandsOn.load_from_checkpoint(write(HandsOn(3))).layer.in_features == 3
    assert "constructs HandsOn without the hyperparameters 'extra' of the checkpoint" in caplog.text


def test_a_value_that_a_class_gives_its_base_class_itself_is_left_out(write):
    class Computing(Net):
        def __init__(self, scale, **kwargs):
            super().__init__(width=2 * scale, **kwargs)

    assert Computing.load_from_checkpoint(write(Computing(2))).hparams.width == 4

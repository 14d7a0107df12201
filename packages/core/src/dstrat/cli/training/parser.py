"""Parser of a training program's arguments and configuration files."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from jsonargparse import (
    ActionConfigFile,
    ArgumentParser,
    DefaultHelpFormatter,
    class_from_function,
    get_loader,
    set_loader,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override
from yaml import YAMLError

from dstrat.cli.components import base_of
from dstrat.cli.training.lightning_names import translate
from dstrat.cli.training.messages import explain
from dstrat.errors import MisuseError
from dstrat.launch.external import history
from dstrat.plugins.catalog import get_catalog
from dstrat.training.callbacks.callback import Callback
from dstrat.training.module.data_module import DataModule
from dstrat.training.module.train_module import TrainModule
from dstrat.training.trainer import Trainer

if TYPE_CHECKING:
    from argparse import Action

    from dstrat.plugins.component import Kind


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's scheduler of this name, with the name of its metric.

    Args:
        optimizer: The optimizer.
        monitor: Name of a logged value.
        *args: Arguments of torch's scheduler.
        **kwargs: Arguments of torch's scheduler.
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
OptimizerCallable = Callable[[Iterable], Optimizer]  # type: ignore[type-arg]  # as jsonargparse reads it
LRSchedulerCallable = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]

AUTOMATIC = "AUTOMATIC"

# Each text fits into the line of a terminal of 80 columns.
_MOST_USED = (
    ("--config FILE", "the configuration; options after it override it"),
    ("--model CLASS", "the module; its arguments are --model.NAME"),
    ("--data CLASS", "the data module; its arguments are --data.NAME"),
    ("--optimizer CLASS", "such as AdamW, with --optimizer.lr 0.001"),
    ("--trainer.strategy NAME", "such as ddp or fsdp: dstrat strategies lists them"),
    ("--trainer.devices N", "devices of each machine"),
    ("--trainer.precision NAME", "such as bf16-mixed"),
    ("--trainer.max_epochs N", "epochs of training"),
    ("--ckpt_path PATH", "the checkpoint whose state is loaded"),
    ("--resume auto", "continue from the newest checkpoint"),
)

_MODES = ("yaml", "json", "toml", "omegaconf")


class DstratArgumentParser(ArgumentParser):  # type: ignore[misc]  # jsonargparse is an extra
    """A parser of jsonargparse that adds classes of dstrat, optimizers and schedulers.

    Configuration files may have Lightning's names for classes.  Options are written in full.

    Args:
        *args: Arguments of jsonargparse's parser.
        description: Text of ``--help``.
        env_prefix: Prefix of environment variables, which are read with ``default_env=True``.
        parser_mode: Format of configuration files: ``"yaml"``, ``"json"``, ``"toml"``, ``"omegaconf"`` or another one
            of jsonargparse.
        **kwargs: Arguments of jsonargparse's parser.
    """

    def __init__(
        self,
        *args: Any,
        description: str = "Train, validate, test or predict.",
        env_prefix: str = "DSTRAT",
        parser_mode: str = "yaml",
        **kwargs: Any,
    ) -> None:
        options: dict[str, Any] = {"allow_abbrev": False, "formatter_class": HelpFormatter, **kwargs}
        mode = _with_translation(parser_mode) if parser_mode in _MODES else parser_mode
        super().__init__(*args, description=description, env_prefix=env_prefix, parser_mode=mode, **options)
        self.subcommand_parsers: dict[str, DstratArgumentParser] = {}
        self.callback_keys: list[str] = []
        self.optimizers: dict[str, tuple[Any, str]] = {}
        self.lr_schedulers: dict[str, tuple[Any, str]] = {}

    def add_class_args(
        self, cls: Callable[..., Any], nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add the arguments of a Trainer, a module, a data module or a callback.

        Args:
            cls: The class, or a function that is annotated with it as its result.
            nested_key: The name of the arguments' group, such as ``"model"``.
            subclass_mode: Whether any subclass may be named.
            required: Whether one must be.

        Returns:
            The names of the arguments.

        Raises:
            MisuseError: The class is another one.
        """
        cls = cls if isinstance(cls, type) else class_from_function(cls)
        if not issubclass(cls, Trainer | TrainModule | DataModule | Callback):
            raise MisuseError(
                f"{cls!r} is not a Trainer, TrainModule, DataModule or Callback, or a function that returns one"
            )
        if issubclass(cls, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            self.add_subclass_arguments(cls, nested_key, fail_untyped=False, required=required)
            return [nested_key]
        is_trainer = issubclass(cls, Trainer)  # made by instantiate_trainer, after module and data
        names: list[str] = self.add_class_arguments(
            cls, nested_key, fail_untyped=False, instantiate=not is_trainer, sub_configs=True
        )
        return names

    def add_lightning_class_args(self, lightning_class: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
        """Do what :meth:`add_class_args` does, under Lightning's name."""
        return self.add_class_args(lightning_class, *args, **kwargs)

    def add_optimizer_args(
        self, optimizer_class: Any = (Optimizer,), nested_key: str = "optimizer", link_to: str = AUTOMATIC
    ) -> None:
        """Add the arguments of an optimizer.

        Args:
            optimizer_class: The class, or a tuple of base classes whose subclasses may be named.
            nested_key: The name of the arguments' group.
            link_to: The argument that gets class and arguments; by default the optimizer is used for training.
        """
        self._add_without(optimizer_class, nested_key, "params")
        self.optimizers[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(
        self, lr_scheduler_class: Any = LRSchedulerTypeTuple, nested_key: str = "lr_scheduler", link_to: str = AUTOMATIC
    ) -> None:
        """Add the arguments of a scheduler, as :meth:`add_optimizer_args` does for an optimizer."""
        self._add_without(lr_scheduler_class, nested_key, "optimizer")
        if isinstance(lr_scheduler_class, tuple):  # which jsonargparse would show as Python shows a tuple of classes
            self.groups[nested_key].title = "Learning-rate schedulers of the optimizer"
        self.lr_schedulers[nested_key] = (lr_scheduler_class, link_to)

    def _add_without(self, cls: Any, nested_key: str, argument: str) -> None:
        """Add a class that the parser does not instantiate, since one of its arguments is known only later."""
        options: dict[str, Any] = {"instantiate": False, "fail_untyped": False, "skip": {argument}}
        if isinstance(cls, tuple):
            self.add_subclass_arguments(cls, nested_key, **options)
        else:
            self.add_class_arguments(cls, nested_key, sub_configs=True, **options)

    @override
    def format_help(self, *args: Any) -> str:
        # The usage that argparse writes is a line for each of all the options.
        usage, blank, sections = str(super().format_help(*args)).partition("\n\n")
        rows = [(name, text) for name, text in _MOST_USED if name.split()[0] in self._option_string_actions]
        if not blank or "--trainer.strategy" not in self._option_string_actions:
            return f"{usage}{blank}{sections}"
        description, _, details = sections.partition("\n\n")
        first = "\n".join(f"  {name:26}  {text}" for name, text in rows)
        prog = self.prog.replace(" [options]", "")
        return f"usage: {prog} [options]\n\n{description}\n\nmost used:\n{first}\n\n{details}"

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        # In place of jsonargparse's, which prints the usage too: dozens of lines.
        prog = self.prog.replace(" [options]", "")
        usages = [parser.format_usage() for parser in (self, *self.subcommand_parsers.values())]
        text = explain(message, set(re.findall(r"--[\w.]+", "".join(usages))))
        sys.stderr.write(f"{prog}: {text}\n")
        sys.exit(2)


class ConfigFile(ActionConfigFile):  # type: ignore[misc]
    """The option ``--config``, whose file is read once, and not again by ranks that run the script again.

    It may be changed or removed when they start, and a pipe can be read only once.
    """

    @override
    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        super().__call__(parser, cfg, _path_or_text(values), option_string)


def _path_or_text(value: str) -> str:
    """Return the path of a file that has not changed since the program read it first; otherwise its text then."""
    path = Path(value).absolute()
    try:
        # A regular file may have changed since an earlier command line of this process; a pipe can be read only once.
        text = history.remember(f"file {path}", lambda: path.read_text(encoding="utf-8"), again=path.is_file())
        is_unchanged = path.is_file() and path.read_text(encoding="utf-8") == text
    except (OSError, ValueError):  # a URL, or the configuration itself; jsonargparse says what is wrong otherwise
        return value
    return value if is_unchanged else text


def _with_translation(mode: str) -> str:
    """Return a mode of jsonargparse that reads a format, and translates names of Lightning."""
    name = f"dstrat_{mode}"
    if mode == "omegaconf":  # jsonargparse registers its loader at the first use
        reader = ArgumentParser(parser_mode=mode)
        reader.add_argument("--value")
        reader.parse_string("value: text")
    load = get_loader(mode)

    def load_translated(text: str) -> Any:
        return translate(load(text))

    set_loader(name, load_translated, (YAMLError,))
    return name


class HelpFormatter(DefaultHelpFormatter):  # type: ignore[misc]
    """Adds the aliases of installed packages to the help, and removes the marks of code."""

    _LISTED: ClassVar[dict[str, tuple[Kind, str]]] = {
        "trainer.accelerator": ("accelerator", "dstrat accelerators lists what each needs"),
        "trainer.strategy": ("strategy", "dstrat strategies --all lists variants"),
    }

    @override
    def _get_help_string(self, action: Action) -> str:  # the method that formatters of argparse override
        text = str(super()._get_help_string(action)).replace("``", "")
        if action.dest not in self._LISTED:
            return text
        kind, more = self._LISTED[action.dest]
        offers = get_catalog().offers(kind)
        aliases = [name for offer in offers if base_of(offer, offers) is None for name in offer.names]
        return f"{text} Installed: {', '.join(aliases)}; {more}."


def import_named_classes() -> None:
    """Import the classes that a configuration may name without a path."""
    # jsonargparse finds such a name among the imported subclasses.
    for home in ("callbacks", "loggers", "profilers", "plugins"):
        module = import_module(f"dstrat.{home}")
        for name in module.__all__:
            getattr(module, name)

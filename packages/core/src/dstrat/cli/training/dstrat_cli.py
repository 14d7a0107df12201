"""Configurable command line of a training program."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from jsonargparse import Namespace, class_from_function

from dstrat.cli.training.lightning_names import take_translations, translate, translate_argument
from dstrat.cli.training.parser import (
    AUTOMATIC,
    ConfigFile,
    DstratArgumentParser,
    ReduceLROnPlateau,
    import_named_classes,
)
from dstrat.cli.training.save_config_callback import SaveConfigCallback
from dstrat.data.random_state import seed_everything
from dstrat.errors import DstratError, MisuseError
from dstrat.resolve.rank_zero import rank_zero_info
from dstrat.training.hooks import overrides
from dstrat.training.module.data_module import DataModule
from dstrat.training.module.train_module import TrainModule
from dstrat.training.trainer import Trainer

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from dstrat.training.callbacks.callback import Callback

ArgsType: TypeAlias = list[str] | dict[str, Any] | Namespace | None


class DstratCLI:
    """A program with subcommands ``fit``, ``validate``, ``test`` and ``predict``, and arguments from signatures.

    For example::

        if __name__ == "__main__":
            DstratCLI(Net, Digits)

    ``python train.py fit --config run.yaml --trainer.devices 2`` reads the arguments of Trainer, module and data from
    files and the command line, makes the objects, runs the subcommand, and saves the configuration with the logs.

    Args:
        model_class: The module's class, or a function that returns a module; None lets ``--model`` name any subclass.
        datamodule_class: The same for the data, with ``--data``.
        save_config_callback: Class of the callback that saves the configuration; None saves none.
        save_config_kwargs: Further arguments of this callback.
        trainer_class: The Trainer's class, or a function that returns a Trainer.
        trainer_defaults: Defaults of its arguments; ``callbacks`` among them are added to those of the configuration.
        seed_everything_default: The seed; True takes that of :func:`seed_everything`, False seeds nothing.
        parser_kwargs: Arguments of the parser; by subcommand for those of subcommands.
        parser_class: The parser's class.
        subclass_mode_model: Whether ``--model`` may name any subclass of the module's class.
        subclass_mode_data: The same for the data.
        args: Arguments, or a configuration, in place of those of the process.
        run: Whether there are subcommands, of which one is run; False makes the objects only.
        auto_configure_optimizers: Whether ``--optimizer`` and ``--lr_scheduler`` replace ``configure_optimizers``.

    Attributes:
        parser: The parser.
        config: The parsed configuration.
        config_init: The same with objects.
        subcommand: Name of the subcommand; None without one.
        trainer: The Trainer.
        model: The module.
        datamodule: The data; None without.

    Raises:
        SystemExit: ``--help`` or ``--print_config`` was shown, or an argument is wrong.
        DstratError: The request is not possible.
    """

    def __init__(
        self,
        model_class: Callable[..., TrainModule] | None = None,
        datamodule_class: Callable[..., DataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: Callable[..., Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[DstratArgumentParser] = DstratArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
    ) -> None:
        self.save_config_callback, self.save_config_kwargs = save_config_callback, save_config_kwargs or {}
        self.trainer_class, self.trainer_defaults = trainer_class, trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs, self.parser_class = parser_kwargs or {}, parser_class
        self.auto_configure_optimizers = auto_configure_optimizers
        self.model_class, self.datamodule_class = model_class, datamodule_class
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data

        import_named_classes()
        self._method_arguments: dict[str, list[str]] = {}
        self.setup_parser(run)
        self.parse_arguments(self.parser, args)
        self.subcommand: str | None = self.config["subcommand"] if run else None
        self._set_seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run_subcommand(self.subcommand)

    # Override these

    def add_arguments_to_parser(self, parser: DstratArgumentParser) -> None:
        """Add arguments, or link some of them; called for the parser of each subcommand."""

    def before_instantiate_classes(self) -> None:
        """Called after the arguments are parsed."""

    def after_instantiate_classes(self) -> None:
        """Called after Trainer, module and data are made.  ``before_fit``, ``after_fit`` and so on are hooks too."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the Trainer's methods that are subcommands, each with its arguments that are no options."""
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            "validate": {"model", "dataloaders", "datamodule"},
            "test": {"model", "dataloaders", "datamodule"},
            "predict": {"model", "dataloaders", "datamodule"},
        }

    @staticmethod
    def configure_optimizers(module: TrainModule, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:  # noqa: ARG004
        """Return the result of the module's ``configure_optimizers``, if ``--optimizer`` names an optimizer.

        Args:
            module: The module.
            optimizer: The optimizer of its parameters.
            lr_scheduler: The scheduler of the optimizer; None without one.
        """
        if lr_scheduler is None:
            return optimizer
        scheduler: dict[str, Any] = {"scheduler": lr_scheduler}
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            scheduler["monitor"] = lr_scheduler.monitor
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    # Parser

    def setup_parser(self, add_subcommands: bool) -> None:
        """Create the parser, with one for each subcommand, or with all arguments."""
        of_subcommands = {name: self.parser_kwargs.get(name, {}) for name in self.subcommands()}
        options = {name: value for name, value in self.parser_kwargs.items() if name not in of_subcommands}
        self.parser = self.init_parser(**options)
        if not add_subcommands:
            self._add_arguments(self.parser)
            return
        trainer_class = _class_of(self.trainer_class)
        subcommands = self.parser.add_subcommands()
        for name, skipped in self.subcommands().items():
            description = (inspect.getdoc(getattr(trainer_class, name)) or "").partition("\n")[0]
            parser = self.init_parser(**{"description": description, **of_subcommands[name]})
            self._add_arguments(parser)
            self._method_arguments[name] = parser.add_method_arguments(trainer_class, name, skip=set(skipped))
            self.parser.subcommand_parsers[name] = parser
            subcommands.add_subcommand(name, parser, help=description)

    def init_parser(self, **kwargs: Any) -> DstratArgumentParser:
        """Return a parser with the option ``--config``."""
        dstrat = import_module("dstrat")
        parser = self.parser_class(**{"dump_header": [f"dstrat=={dstrat.__version__}"], **kwargs})
        parser.add_argument("-c", "--config", action=ConfigFile, help="Path to a configuration file, YAML or JSON.")
        return parser

    def add_default_arguments_to_parser(self, parser: DstratArgumentParser) -> None:
        """Add the arguments that belong to no class."""
        parser.add_argument(
            "--seed_everything",
            type=bool | int,
            default=self.seed_everything_default,
            help="The seed, set before anything is made; false sets none, true that of PL_GLOBAL_SEED, or 0.",
        )

    def add_core_arguments_to_parser(self, parser: DstratArgumentParser) -> None:
        """Add the arguments of Trainer, module and data."""
        parser.add_class_args(self.trainer_class, "trainer")
        defaults = {name: value for name, value in self.trainer_defaults.items() if name != "callbacks"}
        parser.set_defaults({f"trainer.{name}": value for name, value in defaults.items()})
        parser.add_class_args(self.model_class or TrainModule, "model", subclass_mode=self.subclass_mode_model)
        parser.add_class_args(
            self.datamodule_class or DataModule,
            "data",
            subclass_mode=self.subclass_mode_data,
            required=self.datamodule_class is not None,  # otherwise the module may have the loaders
        )

    def _add_arguments(self, parser: DstratArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser.optimizers:
                parser.add_optimizer_args()
            if not parser.lr_schedulers:
                parser.add_lr_scheduler_args()
        for key, (cls, target) in {**parser.optimizers, **parser.lr_schedulers}.items():
            if target != AUTOMATIC:
                compute = None if isinstance(cls, tuple) else partial(_class_spec, cls)
                parser.link_arguments(key, target, compute_fn=compute)

    def parse_arguments(self, parser: DstratArgumentParser, args: ArgsType) -> None:
        """Read the arguments into ``self.config``."""
        try:
            if isinstance(args, Mapping | Namespace):
                self.config = parser.parse_object(translate(args))
            else:
                arguments = sys.argv[1:] if args is None else args
                self.config = parser.parse_args([translate_argument(argument) for argument in arguments])
        except DstratError as error:  # raised by the translation of Lightning's names
            parser.error(str(error), error)
        if translations := take_translations():
            names = ", ".join(f"{theirs} as {ours}" for theirs, ours in translations.items())
            rank_zero_info("the configuration has names of Lightning: %s", names)

    def _set_seed(self) -> None:
        seed = self._section(self.config).get("seed_everything")
        if seed is not False:
            seed = seed_everything(None if seed is True else seed, workers=True, verbose=False)
            self._section(self.config)["seed_everything"] = seed

    # Objects

    def instantiate_classes(self) -> None:
        """Make module, data, and the Trainer with its components."""
        self.config_init = _instantiate(self.parser, self.config)
        section = self._section(self.config_init)
        self.model, self.datamodule = section.get("model"), section.get("data")
        self._replace_optimizers()
        self.trainer = self.instantiate_trainer()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return the configured Trainer, with further arguments."""
        section = self._section(self.config_init)
        options = {**section.get("trainer", {}), **kwargs}
        configured = [section[key] for key in self._parser.callback_keys]
        persistent = self.trainer_defaults.get("callbacks")
        options["callbacks"] = [*_as_list(options.get("callbacks")), *configured, *_as_list(persistent)]
        if self.save_config_callback is not None and not options.get("fast_dev_run"):
            options["callbacks"].append(
                self.save_config_callback(self._parser, self._section(self.config), **self.save_config_kwargs)
            )
        return self.trainer_class(**options)

    def _replace_optimizers(self) -> None:
        """Let ``--optimizer`` replace the module's ``configure_optimizers``."""
        optimizers = self._automatic(self._parser.optimizers)
        schedulers = self._automatic(self._parser.lr_schedulers)
        if len(optimizers) > 1 or len(schedulers) > 1:
            raise MisuseError(
                f"{', '.join([*optimizers, *schedulers])} would all be used for training: link all but one optimizer "
                "and one scheduler to arguments of the module by link_to, and define configure_optimizers there"
            )
        optimizer = next(iter(optimizers.values()), None)
        scheduler = next(iter(schedulers.values()), None)
        if optimizer is None:
            if scheduler is not None:
                raise MisuseError("--lr_scheduler needs an --optimizer: name one, or leave it out")
            return
        if overrides(self.model, "configure_optimizers", TrainModule):
            rank_zero_info(
                "--optimizer replaces configure_optimizers of %s; auto_configure_optimizers=False turns the option off",
                type(self.model).__name__,
            )
        self.model.configure_optimizers = _ConfiguredOptimizers(
            module=self.model, configure=self.configure_optimizers, optimizer=optimizer, lr_scheduler=scheduler
        )

    def _automatic(self, added: Mapping[str, tuple[Any, str]]) -> dict[str, dict[str, Any]]:
        """Return class and arguments of each that was named and is not linked to an argument."""
        section = self._section(self.config_init)
        specs = {}
        for key, (cls, target) in added.items():
            spec = section.get(key)
            if target == AUTOMATIC and spec is not None and self.auto_configure_optimizers:
                specs[key] = spec if isinstance(cls, tuple) else _class_spec(cls, spec)
        return specs

    # Running

    def _run_subcommand(self, subcommand: str) -> None:
        self._call_hook(f"before_{subcommand}")
        section = self._section(self.config_init)
        options = {name: section[name] for name in self._method_arguments[subcommand]}
        if self.datamodule is not None:
            options["datamodule"] = self.datamodule
        method = getattr(self, subcommand, None) or getattr(self.trainer, subcommand)
        method(model=self.model, **options)
        self._call_hook(f"after_{subcommand}")

    def _call_hook(self, name: str) -> None:
        hook = getattr(self, name, None)
        if callable(hook):
            hook()

    @property
    def _parser(self) -> DstratArgumentParser:
        """The parser of the subcommand."""
        return self.parser if self.subcommand is None else self.parser.subcommand_parsers[self.subcommand]

    def _section(self, config: Any) -> Any:
        """Return the arguments of the subcommand."""
        return config if self.subcommand is None else config[self.subcommand]


@dataclass
class _ConfiguredOptimizers:
    """A module's ``configure_optimizers``, called after the strategy has set up the parameters.

    Attributes:
        module: The module.
        configure: Returns the result.
        optimizer: Class and arguments.
        lr_scheduler: Class and arguments; None without one.
    """

    module: TrainModule
    configure: Callable[..., Any]
    optimizer: dict[str, Any]
    lr_scheduler: dict[str, Any] | None

    def __call__(self) -> Any:
        optimizer = instantiate_class(self.module.parameters(), self.optimizer)
        scheduler = None if self.lr_scheduler is None else instantiate_class(optimizer, self.lr_scheduler)
        return self.configure(self.module, optimizer=optimizer, lr_scheduler=scheduler)


def instantiate_class(args: Any, init: Mapping[str, Any]) -> Any:
    """Return an object of a class.

    Args:
        args: Its first argument, or a tuple of positional arguments.
        init: The class as ``class_path``, and further arguments as ``init_args``.
    """
    module, _, name = init["class_path"].rpartition(".")
    positional = args if isinstance(args, tuple) else (args,)
    return getattr(import_module(module), name)(*positional, **(init.get("init_args") or {}))


def _class_of(factory: Callable[..., Any]) -> type:
    return factory if isinstance(factory, type) else class_from_function(factory)


def _class_spec(cls: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": dict(arguments)}


def _as_list(callbacks: Any) -> list[Callback]:
    return [] if callbacks is None else list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def _instantiate(parser: DstratArgumentParser, config: Namespace) -> Namespace:
    """Return a configuration with objects.

    Raises:
        Exception: The error of a constructor, in place of jsonargparse's list of types that did not match.
    """
    failures: list[Exception] = []

    def instantiate(cls: type, *args: Any, **kwargs: Any) -> Any:
        try:
            _check_untyped(cls, kwargs)
            return cls(*args, **kwargs)
        except Exception as error:
            failures.append(error)
            raise

    try:
        return parser.instantiate(config, instantiators=[(instantiate, object, True)])
    except ValueError:
        if failures:
            raise failures[0] from None
        raise


def _check_untyped(cls: type, arguments: Mapping[str, Any]) -> None:
    """Check that arguments without a type and a default have values.

    Raises:
        MisuseError: One has none; jsonargparse would pass None.
    """
    if not issubclass(cls, TrainModule | DataModule):
        return
    for name, parameter in inspect.signature(cls).parameters.items():
        is_unchecked = parameter.default is parameter.empty and parameter.annotation is parameter.empty
        if is_unchecked and arguments.get(name, ...) is None:
            raise MisuseError(
                f"{cls.__name__} got no {name!r}: pass it, and give it a type in __init__, such as {name}: int, so "
                "that the command line can check it"
            )

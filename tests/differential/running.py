"""Runs of random programs under Lightning or dstrat, with a record of everything that a user sees."""

from __future__ import annotations

import functools
import importlib
import random
from pathlib import Path
from typing import Any

import torch
from tests.differential import modules
from tests.differential.modules import number
from tests.differential.programs import batches_per_epoch

DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "layers": 1,
    "width": 4,
    "bn": False,
    "dropout": 0.0,
    "embed": False,
    "tied": False,
    "frozen": False,
    "loss": "mse",
    "n": 12,
    "bs": 4,
    "drop_last": False,
    "shuffle": False,
    "val_n": 0,
    "val_bs": 4,
    "val_loaders": 1,
    "source": "args",
    "iterable": False,
    "batch": "tuple",
    "train_loaders": 1,
    "combined": "max_size_cycle",
    "test_n": 0,
    "predict_n": 0,
    "optimizer": "sgd",
    "lr": 0.05,
    "momentum": 0.0,
    "groups": 1,
    "manual": 0,
    "manual_clip": None,
    "manual_sched": False,
    "scheduler": None,
    "sched": {},
    "sched_format": "dict",
    "logs": [],
    "mc": [],
    "es": None,
    "lrm": None,
    "swa": None,
    "ema": None,
    "gas": None,
    "stop": None,
    "skip": None,
    "none": None,
    "resume": None,
    "seed_everything": False,
    "loggers": 1,
}

_CALLBACKS = (
    *("EarlyStopping", "EMAWeightAveraging", "GradientAccumulationScheduler", "LearningRateMonitor"),
    *("ModelCheckpoint", "StochasticWeightAveraging"),
)


class Library:
    """The classes of a library, by the same names."""

    def __init__(self, **classes: Any) -> None:
        vars(self).update(classes)

    def __getattr__(self, name: str) -> Any:  # for type checkers: the classes are in __dict__
        raise AttributeError(name)


@functools.cache
def library_of(name: str) -> Library:
    """Return the classes of ``"dstrat"`` or ``"lightning"``."""
    is_lightning = name == "lightning"
    main = importlib.import_module("lightning.pytorch" if is_lightning else "dstrat")
    callbacks = importlib.import_module("lightning.pytorch.callbacks" if is_lightning else "dstrat")
    loggers = importlib.import_module("lightning.pytorch.loggers" if is_lightning else "dstrat")
    combined = importlib.import_module("lightning.pytorch.utilities" if is_lightning else "dstrat")
    return Library(
        Module=main.LightningModule if is_lightning else main.TrainModule,
        DataModule=main.LightningDataModule if is_lightning else main.DataModule,
        Callback=main.Callback,
        Trainer=main.Trainer,
        seed_everything=main.seed_everything,
        Logger=loggers.Logger,
        CombinedLoader=combined.CombinedLoader,
        **{callback: getattr(callbacks, callback) for callback in _CALLBACKS},
    )


class Program:
    """A program of a library, before it runs.

    Args:
        library: ``"lightning"`` or ``"dstrat"``.
        spec: The result of :func:`tests.differential.programs.random_program`.
        folder: For its files.
    """

    def __init__(self, library: str, spec: dict[str, Any], folder: Path) -> None:
        self.library, self.folder = library_of(library), folder
        self.spec = {**DEFAULTS, **spec}
        self.events: list[Any] = []
        if library == "lightning" and not self.spec["manual"]:
            self.spec["factor"] = functools.partial(group_factor, self.spec)  # a documented difference
        if self.spec["seed_everything"]:
            self.library.seed_everything(self.spec["seed"], workers=True)
        torch.manual_seed(self.spec["seed"])
        random.seed(self.spec["seed"])
        self.module = self.new_module()

    def new_module(self) -> Any:
        from_module, validates = self.spec["source"] == "module", bool(self.spec["val_n"])
        module_class = modules.module_class(self.library, has_loaders=from_module, validates=validates)
        return module_class(self.spec, self.events)

    def data(self, *, validates: bool | None = None) -> dict[str, Any]:
        """Return the arguments of ``fit`` with the data."""
        spec = self.spec
        if spec["source"] == "datamodule":
            validates = bool(spec["val_n"]) if validates is None else validates
            return {"datamodule": modules.data_class(self.library, validates=validates)(spec, self.events)}
        if spec["source"] == "module":
            return {}
        loader = modules.train_loader(spec, self.library.CombinedLoader)
        return {"train_dataloaders": loader, "val_dataloaders": modules.val_loader(spec)}

    def prepare(self, name: str = "checkpoints", *more: Any, **changes: Any) -> None:
        """Make the Trainer, with loggers and callbacks."""
        spec, library = self.spec, self.library
        self.loggers = [modules.logger_class(library)() for _ in range(spec["loggers"])]
        self.recorder = recorder_class(library)(spec, self.events)
        self.checkpoints = [
            library.ModelCheckpoint(dirpath=self.folder / f"{name}{index}", **options)
            for index, options in enumerate(spec["mc"])
        ]
        self.stopping = library.EarlyStopping(**spec["es"]) if spec["es"] else None
        callbacks = [self.recorder, *([self.stopping] if self.stopping else [])]
        for option, callback in (("lrm", "LearningRateMonitor"), ("swa", "StochasticWeightAveraging")):
            callbacks += [] if spec[option] is None else [getattr(library, callback)(**spec[option])]
        callbacks += [library.EMAWeightAveraging(**spec["ema"])] if spec["ema"] else []
        if spec["gas"]:
            factors = {int(epoch): factor for epoch, factor in spec["gas"].items()}
            callbacks.append(library.GradientAccumulationScheduler(factors))
        arguments: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "logger": self.loggers,
            "default_root_dir": self.folder,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": bool(spec["mc"]),
            "callbacks": [*callbacks, *self.checkpoints, *more],
            **spec["trainer"],
            **changes,
        }
        self.trainer = library.Trainer(**arguments)

    def fit(self, random_seed: int | None = None, **arguments: Any) -> None:
        torch.manual_seed(self.spec["seed"] + 7 if random_seed is None else random_seed)
        self.trainer.fit(self.module, **self.data(), **arguments)

    def record(self) -> dict[str, Any]:
        """Return what a user sees after the fit."""
        trainer, module, stopping = self.trainer, self.module, self.stopping
        state = module.state_dict()
        return {
            "events": [list(event) for event in self.events],
            "losses": list(module.losses),
            "val_losses": list(module.val_losses),
            "lrs": self.recorder.lrs,
            "outputs": self.recorder.outputs,
            "metrics": list(self.recorder.metrics),
            "rng": [*self.recorder.random_states, int(torch.random.get_rng_state().long().sum())],
            "rows": [logger.rows for logger in self.loggers],
            "weights": {
                name: value.double().flatten().tolist() for name, value in state.items() if "metric" not in name
            },
            "grads": sorted(name for name, parameter in module.named_parameters() if parameter.grad is not None),
            "es": stopping
            and {
                "wait": stopping.wait_count,
                "stopped": stopping.stopped_epoch,
                "best": None if stopping.best_score is None else number(stopping.best_score),
            },
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "batches": trainer.num_training_batches,
            "should_stop": bool(trainer.should_stop),
            "training": module.training,
            **{
                name: {key: number(value) for key, value in sorted(getattr(trainer, name).items())}
                for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics")
            },
            "checkpoints": [_saved(callback) for callback in self.checkpoints],
        }


def _saved(callback: Any) -> dict[str, Any]:
    """Return what a ModelCheckpoint has saved, without the last one, whose name differs."""
    folder = Path(callback.dirpath)
    files = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return {
        "best": Path(callback.best_model_path).name,
        "score": None if callback.best_model_score is None else number(callback.best_model_score),
        "scores": {Path(path).name: number(value) for path, value in callback.best_k_models.items()},
        "next": Path(callback.kth_best_model_path).name,
        "files": sorted(name for name in files if not name.startswith("last")),
    }


def train(library: str, spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a program on one device, and return its record; the text of an error instead, if it has one."""
    program = Program(library, spec, folder)
    try:
        if program.spec["resume"]:
            _train_a_part(program)
        else:
            program.prepare()
            program.fit()
        return {"error": None, **program.record(), **_evaluations(program)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _train_a_part(program: Program) -> None:
    """Train some of the epochs, and resume with another module from the checkpoint."""
    program.prepare("before", max_epochs=program.spec["resume"]["epochs"])
    program.fit()
    path = program.folder / "resume.ckpt"
    program.trainer.save_checkpoint(path)
    program.events.append(("--- resume", ""))
    torch.manual_seed(program.spec["seed"] + 99)
    losses, val_losses = program.module.losses, program.module.val_losses
    program.module = program.new_module()
    program.module.losses, program.module.val_losses = losses, val_losses
    program.prepare()
    program.fit(ckpt_path=path)


def _evaluations(program: Program) -> dict[str, Any]:
    spec, trainer, module = program.spec, program.trainer, program.module
    results: dict[str, Any] = {}
    num_events, num_losses = len(program.events), len(module.val_losses)
    if spec["val_n"] and spec["test_n"]:
        program.events.append(("--- validate", ""))
        data = program.data() if spec["source"] == "datamodule" else {"dataloaders": modules.val_loader(spec)}
        results["validate"] = trainer.validate(module, **data, verbose=False)
    if spec["test_n"]:
        program.events.append(("--- test", ""))
        loader = modules.evaluation_loader(spec, spec["test_n"], 3, 5)
        results["test"] = trainer.test(module, loader, verbose=False)
    if spec["predict_n"]:
        program.events.append(("--- predict", ""))
        outputs = trainer.predict(module, modules.evaluation_loader(spec, spec["predict_n"], 3, 6))
        results["predict"] = [[output.double().flatten().tolist(), output.requires_grad] for output in outputs]
    results["evaluation_events"] = [list(event) for event in program.events[num_events:]]
    results["evaluation_losses"] = [loss for *_, loss in module.val_losses[num_losses:]]
    return results


def group_factor(spec: dict[str, Any], trainer: Any, batch_idx: int) -> float:
    """Return the factor by which dstrat weighs a loss that is accumulated with fewer others than the interval says."""
    accumulate, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
    if accumulate == 1:
        return 1.0
    batches = int(min(batches, batches_per_epoch(spec)))
    first = batch_idx - batch_idx % accumulate
    group = range(first, min(first + accumulate, batches))
    lost = [[trainer.current_epoch, index] in (spec["none"] or []) for index in group]
    return accumulate / (len(group) - sum(lost))


def recorder_class(library: Any) -> Any:
    """Return the class of the callback that records hooks, rates and values."""

    class Recorder(library.Callback):
        def __init__(self, spec: dict[str, Any], events: list[Any]) -> None:
            self.spec, self.events, self.batches = spec, events, 0
            self.lrs: list[Any] = []
            self.metrics: list[Any] = []
            self.random_states: list[int] = []
            self.outputs: list[Any] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.events.append(("callback.on_train_batch_start", batch_idx))
            rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
            self.lrs.append([trainer.current_epoch, trainer.global_step, *rates])
            module.log_in("callback.on_train_batch_start", batch_idx=batch_idx)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.batches += 1
            self.events.append(("callback.on_train_batch_end", [batch_idx, trainer.is_last_batch]))
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self.outputs.append(None if loss is None else number(loss))
            module.log_in("callback.on_train_batch_end", batch_idx=batch_idx)
            self.stop("on_train_batch_end", trainer, self.batches)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.note("train_epoch_end", trainer, module)
            self.random_states.append(int(torch.random.get_rng_state().long().sum()))
            self.stop("on_train_epoch_end", trainer, trainer.current_epoch)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                self.note("validation_end", trainer, module)
                self.stop("on_validation_end", trainer, None)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.note("train_end", trainer, module)

        def note(self, where: str, trainer: Any, module: Any) -> None:
            self.events.append((f"callback.on_{where}", ""))
            values = {name: number(value) for name, value in sorted(trainer.callback_metrics.items())}
            self.metrics.append([where, trainer.current_epoch, trainer.global_step, values])
            module.log_in(f"callback.on_{where}")

        def stop(self, hook: str, trainer: Any, count: int | None) -> None:
            stop = self.spec["stop"]
            if stop and stop["hook"] == hook and count in (None, stop["at"]):
                trainer.should_stop = True

    return Recorder

"""Random training programs: a seed gives always the same one, as a dict of what differs from the simplest program.

The programs have only what the table in ``docs/coming-from-lightning.md`` does not name, so that any difference from
Lightning is a fault, or a row that is missing there.
"""

from __future__ import annotations

import random
from typing import Any

Spec = dict[str, Any]

HOOKS_OF_STEPS = ("on_after_backward", "on_train_batch_start", "on_train_batch_end", "callback.on_train_batch_end")
HOOKS_OF_EPOCHS = (
    *("on_train_start", "on_train_epoch_start", "on_train_epoch_end", "callback.on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end"),
)
OPTIMIZERS = ("sgd", "sgd", "adam", "adamw", "rmsprop", "lbfgs")
SCHEDULERS = ("step", "exp", "lambda", "cosine", "onecycle", "warmup", "plateau")


class Draw:
    """Random choices from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def happens(self, probability: float) -> bool:
        return self._random.random() < probability

    def one_of(self, *values: Any) -> Any:
        return self._random.choice(values)

    def between(self, lowest: int, highest: int) -> int:
        return self._random.randint(lowest, highest)


def random_program(seed: int) -> Spec:
    """Return a program for one device, which both libraries run."""
    draw = Draw(seed)
    spec: Spec = {"seed": seed % 1000, "trainer": {}}
    _draw_module(spec, draw)
    _draw_data(spec, draw)
    _draw_trainer(spec, draw)
    _draw_optimization(spec, draw)
    _draw_logs(spec, draw)
    _draw_scheduler(spec, draw)
    _draw_callbacks(spec, draw)
    return spec


def _draw_module(spec: Spec, draw: Draw) -> None:
    spec["layers"], spec["width"] = draw.one_of(1, 2, 2, 3), draw.one_of(3, 4, 5)
    spec["bn"] = draw.happens(0.3)
    spec["dropout"] = draw.one_of(0.0, 0.0, 0.2, 0.5)
    for name in ("embed", "tied", "frozen"):
        spec[name] = draw.happens(0.2)
    spec["loss"] = draw.one_of("mse", "ce")


def _draw_data(spec: Spec, draw: Draw) -> None:
    spec["bs"] = draw.between(2, 5)
    spec["n"] = draw.between(spec["bs"], 17)
    # A batch with one sample is an error in batch norm.
    spec["drop_last"] = spec["bn"] or draw.happens(0.2)
    spec["source"] = draw.one_of("args", "args", "module", "datamodule")
    spec["iterable"] = draw.happens(0.12)
    spec["shuffle"] = not spec["iterable"] and draw.happens(0.5)
    spec["batch"] = draw.one_of("tuple", "tuple", "dict")
    if draw.happens(0.75):
        spec["val_n"], spec["val_bs"] = draw.between(2, 9), draw.between(2, 4)
        spec["val_loaders"] = draw.one_of(1, 1, 2)
    if spec["source"] != "datamodule":  # which takes part only in the run to which it is passed
        spec["test_n"], spec["predict_n"] = draw.one_of(0, draw.between(1, 7)), draw.one_of(0, 0, draw.between(1, 7))
    if draw.happens(0.1) and not spec["bn"] and not spec["iterable"]:
        spec["train_loaders"], spec["batch"], spec["drop_last"] = 2, "tuple", False
        spec["combined"] = draw.one_of("max_size_cycle", "min_size", "max_size")


def _draw_trainer(spec: Spec, draw: Draw) -> None:
    options = spec["trainer"]
    options["max_epochs"], options["log_every_n_steps"] = draw.between(1, 4), draw.one_of(1, 1, 2, 3, 50)
    options["precision"] = draw.one_of(*["32-true"] * 4, "bf16-mixed", "64-true", "bf16-true")
    batches = spec["n"] // spec["bs"] if spec["drop_last"] else -(-spec["n"] // spec["bs"])
    if spec.get("val_n") and not spec["iterable"]:
        validation = draw.one_of("each epoch", "each epoch", "interval", "second epoch", "across epochs")
        if validation == "interval":
            options["val_check_interval"] = draw.one_of(1, batches, 0.5, 0.25)
        elif validation == "second epoch":
            options["check_val_every_n_epoch"] = 2
        elif validation == "across epochs":
            options["check_val_every_n_epoch"], options["val_check_interval"] = None, draw.between(1, 5)
        options["limit_val_batches"] = draw.one_of(None, None, 1, 2, 1.0)
        options["num_sanity_val_steps"] = draw.one_of(0, 1, 2, -1)
    if draw.happens(0.1):
        options["min_epochs"] = draw.between(1, options["max_epochs"])
    spec["seed_everything"] = draw.happens(0.2)


def _draw_optimization(spec: Spec, draw: Draw) -> None:
    options = spec["trainer"]
    spec["optimizer"] = draw.one_of(*OPTIMIZERS)
    spec["momentum"] = draw.one_of(0.0, 0.9)
    spec["groups"] = draw.one_of(1, 1, 1, 2)
    spec["manual"] = draw.one_of(*[0] * 8, 1, 2)
    if spec["manual"]:
        spec["manual_clip"] = draw.one_of(None, 0.1)
        options["log_every_n_steps"], options["precision"] = 1, "32-true"
        spec["optimizer"] = draw.one_of("sgd", "adam")
    elif spec["optimizer"] != "lbfgs":
        if not spec["iterable"]:
            options["accumulate_grad_batches"] = draw.one_of(1, 1, 2, 3)
        options["gradient_clip_val"] = draw.one_of(None, None, 0.01, 0.1, 1.0)
        options["gradient_clip_algorithm"] = draw.one_of("norm", "value")


def _draw_logs(spec: Spec, draw: Draw) -> None:
    def options(*, of_steps: bool) -> dict[str, Any]:
        chosen: dict[str, Any] = {"on_epoch": True}
        if of_steps:
            chosen["on_step"], chosen["on_epoch"] = draw.one_of((True, True), (True, False), (False, True))
        if draw.happens(0.3):
            chosen["reduce_fx"] = draw.one_of("mean", "sum", "max", "min")
        if draw.happens(0.2):
            chosen["batch_size"] = draw.one_of(1, 2, 7)
        return chosen

    logs = [{"where": "training_step", "name": "train_loss", "value": "loss", "kw": options(of_steps=True)}]
    if draw.happens(0.4):
        value = draw.one_of("float", "int", "bool")
        logs.append({"where": "training_step", "name": "other", "value": value, "kw": options(of_steps=True)})
    if spec.get("val_n"):
        logs.append({"where": "validation_step", "name": "val_loss", "value": "loss", "kw": options(of_steps=False)})
    for hook in dict.fromkeys(draw.one_of(*HOOKS_OF_STEPS, *HOOKS_OF_EPOCHS) for _ in range(draw.between(0, 3))):
        # Lightning loses values of LBFGS's first computation if other hooks log between two computations.
        is_repeated = spec["optimizer"] == "lbfgs" and hook in HOOKS_OF_STEPS
        if (spec.get("val_n") or "validation" not in hook) and not is_repeated:
            value = draw.one_of("float", "int", "loss")
            logs.append({"where": hook, "name": hook, "value": value, "kw": options(of_steps=hook in HOOKS_OF_STEPS)})
    spec["logs"] = logs


def _draw_scheduler(spec: Spec, draw: Draw) -> None:
    kind = draw.one_of(*[None] * len(SCHEDULERS), *SCHEDULERS)
    if kind == "plateau" and (spec["manual"] or not _validates_each_epoch(spec)):
        kind = "step"
    if kind == "onecycle" and (spec["manual"] or spec["iterable"]):
        kind = "exp"
    spec["scheduler"], spec["manual_sched"] = kind, bool(spec["manual"] and kind)
    if kind is not None:
        config: dict[str, Any] = {"interval": "step" if kind == "onecycle" else draw.one_of("step", "epoch")}
        if kind == "plateau":
            config = {"interval": "epoch", "monitor": monitored(spec), "strict": draw.one_of(True, False)}
        if config["interval"] == "epoch":
            config["frequency"] = draw.one_of(1, 1, 2)
        spec["sched"], spec["sched_format"] = config, draw.one_of("dict", "lists")


def _draw_callbacks(spec: Spec, draw: Draw) -> None:
    if draw.happens(0.4):
        options = {"filename": draw.one_of("{epoch}-{step}", "x-{step}"), "save_top_k": draw.one_of(-1, 1, 2)}
        if _validates_each_epoch(spec):
            options |= {"monitor": monitored(spec), "mode": draw.one_of("min", "max"), "every_n_epochs": 1}
        else:
            options |= {"save_top_k": draw.one_of(-1, 1), "every_n_epochs": 1, "save_on_train_epoch_end": True}
        spec["mc"] = [options]
    if draw.happens(0.3) and _validates_each_epoch(spec) and "min_epochs" not in spec["trainer"]:
        stopping = {"monitor": monitored(spec), "patience": draw.between(0, 2), "mode": draw.one_of("min", "max")}
        spec["es"] = stopping | ({"min_delta": draw.one_of(0.01, 0.3)} if draw.happens(0.3) else {})
    if draw.happens(0.08) and not spec["bn"]:
        spec["ema"] = {"decay": draw.one_of(0.5, 0.9)}
    if draw.happens(0.1) and spec["trainer"]["max_epochs"] > 1 and not spec["shuffle"] and not spec["dropout"]:
        spec["resume"] = {"epochs": draw.between(1, spec["trainer"]["max_epochs"] - 1)}
        spec["trainer"]["num_sanity_val_steps"] = 0  # which a resumed fit leaves out


def monitored(spec: Spec) -> str:
    """Return the name of the value of the first validation loader."""
    return "val_loss" if spec.get("val_loaders", 1) == 1 else "val_loss/dataloader_idx_0"


def _validates_each_epoch(spec: Spec) -> bool:
    options = spec["trainer"]
    is_regular = options.get("check_val_every_n_epoch", 1) == 1 and "val_check_interval" not in options
    return bool(spec.get("val_n")) and is_regular


def global_batch_program(seed: int) -> Spec:
    """Return a program whose ranks train on shares of equal size, so that two compute what one device does."""
    spec, draw = random_program(seed), Draw(-seed)
    for name in ("bn", "dropout", "manual", "manual_sched", "iterable", "drop_last", "shuffle", "ema", "resume", "mc"):
        spec.pop(name, None)
    for name in ("es", "train_loaders", "combined", "groups", "test_n", "predict_n", "manual_clip"):
        spec.pop(name, None)
    spec["source"], spec["n"] = "args", 2 * draw.between(2, 9)
    if spec["optimizer"] == "lbfgs":
        spec["optimizer"] = "adamw"
    if spec.get("val_n"):
        spec["val_n"], spec["val_loaders"] = spec["val_n"] + spec["val_n"] % 2, 1
    options = spec["trainer"]
    for name in ("precision", "val_check_interval", "check_val_every_n_epoch", "limit_val_batches"):
        options.pop(name, None)
    options["log_every_n_steps"], options["num_sanity_val_steps"] = 1, 0
    spec["logs"] = [
        {**entry, "kw": {"on_step": False, "on_epoch": True, "sync_dist": True}}
        for entry in spec["logs"]
        if entry["where"] in ("training_step", "validation_step") and entry["value"] == "loss"
    ]
    if spec["scheduler"] == "plateau":
        spec["sched"]["monitor"] = "train_loss"
    return spec

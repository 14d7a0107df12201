"""Random training programs: a seed gives always the same one, as a dict of what differs from the simplest program.

The programs leave out what docs/coming-from-lightning.md names as another course of the training; what it names as
another record of the same training is in :mod:`tests.differential.documented`.  So any other difference from Lightning
is a fault, or a row that is missing there.
"""

from __future__ import annotations

import random
from typing import Any

Spec = dict[str, Any]

HOOKS_OF_STEPS = (
    *("on_after_backward", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"),
    *("on_before_optimizer_step", "callback.on_train_batch_start", "callback.on_train_batch_end"),
)
HOOKS_OF_VALIDATION_STEPS = ("on_validation_batch_start", "on_validation_batch_end")
HOOKS_OF_EPOCHS = (
    *("on_train_start", "on_train_epoch_start", "on_train_epoch_end", "callback.on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end"),
)
OPTIMIZERS = ("sgd", "sgd", "adam", "adamw", "rmsprop", "lbfgs")
SCHEDULERS = ("step", "exp", "lambda", "cosine", "onecycle", "warmup", "plateau")
PRECISIONS = ("32-true", "bf16-mixed", "64-true", "bf16-true", "16-true")
NAMES = ("{epoch}-{step}", "{epoch:02d}-{step}", "x-{step}", "e{epoch}-s{step}", "{epoch}", "fixed")


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
    _draw_optimization(spec, draw)
    _draw_trainer(spec, draw)
    _draw_logs(spec, draw)
    _draw_scheduler(spec, draw)
    _draw_checkpoints(spec, draw)
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
        spec["test_n"] = draw.one_of(0, draw.between(1, 7))
    spec["predict_n"] = draw.one_of(0, 0, draw.between(1, 7))
    if draw.happens(0.1) and not spec["bn"] and not spec["iterable"]:
        spec["train_loaders"], spec["batch"], spec["drop_last"] = 2, "tuple", False
        spec["combined"] = draw.one_of("max_size_cycle", "min_size", "max_size")


def _draw_optimization(spec: Spec, draw: Draw) -> None:
    options = spec["trainer"]
    spec["optimizer"] = draw.one_of(*OPTIMIZERS)
    spec["momentum"] = draw.one_of(0.0, 0.9)
    spec["groups"] = draw.one_of(1, 1, 1, 2)
    spec["manual"] = draw.one_of(*[0] * 8, 1, 2)
    if spec["manual"]:
        spec["manual_clip"] = draw.one_of(None, 0.1)
        spec["optimizer"] = draw.one_of("sgd", "adam")
        return
    if draw.happens(0.3):
        options["gradient_clip_val"] = draw.one_of(0.01, 0.1, 1.0)
        options["gradient_clip_algorithm"] = draw.one_of("norm", "value")
    if spec["optimizer"] != "lbfgs":  # which computes gradients several times
        if draw.happens(0.3):
            options["accumulate_grad_batches"] = draw.between(2, 4)
        elif draw.happens(0.08):
            spec["gas"] = {"0": 1, "1": 2}
        if draw.happens(0.06):
            spec["none"] = [[draw.between(0, 1), draw.between(0, 3)]]
            if options.get("gradient_clip_algorithm") == "value":  # torch has no minimum of no gradients
                options["gradient_clip_algorithm"] = "norm"
        if spec["bn"] and ("none" in spec or spec["optimizer"] not in ("sgd", "lbfgs")):
            # Gradients before it are rounding errors, which Adam scales up, and a mean scales otherwise.
            options.pop("accumulate_grad_batches", None)


def _draw_trainer(spec: Spec, draw: Draw) -> None:
    options = spec["trainer"]
    options["max_epochs"], options["log_every_n_steps"] = draw.between(1, 4), draw.one_of(1, 1, 2, 3, 50)
    options["precision"] = draw.one_of(*["32-true"] * 12, *PRECISIONS)
    if draw.happens(0.15):
        options["max_steps"] = draw.between(1, 9)
        options["max_epochs"] = draw.one_of(options["max_epochs"], -1)
    elif draw.happens(0.15):
        options["min_steps"] = draw.between(1, 8)
    if draw.happens(0.1) and options["max_epochs"] > 0:
        options["min_epochs"] = draw.between(1, options["max_epochs"])
    if spec["manual"] == 2:  # each step of an optimizer counts
        options["log_every_n_steps"] = 1
    batches = batches_per_epoch(spec)
    if spec.get("val_n"):
        validation = draw.one_of("each epoch", "each epoch", "interval", "second epoch", "across epochs")
        if validation == "interval":
            options["val_check_interval"] = draw.between(1, batches)
            if not spec["iterable"]:
                options["val_check_interval"] = draw.one_of(options["val_check_interval"], 0.5, 0.34, 1.0)
        elif validation == "second epoch":
            options["check_val_every_n_epoch"] = draw.between(2, 3)
        elif validation == "across epochs":
            options["check_val_every_n_epoch"], options["val_check_interval"] = None, draw.between(1, 7)
        options["limit_val_batches"] = draw.one_of(None, None, None, 0, 1, 2, 1.0)
        options["num_sanity_val_steps"] = draw.one_of(0, 1, 2, -1)
        if options["limit_val_batches"] == 0:
            options.pop("check_val_every_n_epoch", None)
            options.pop("val_check_interval", None)
    if draw.happens(0.15):
        options["limit_train_batches"] = draw.between(1, batches) if spec["iterable"] else draw.one_of(1, 2, 3, 1.0)
    elif draw.happens(0.07):
        options["overfit_batches"] = draw.between(1, min(2, batches))
        options.pop("limit_val_batches", None)
    if draw.happens(0.1):
        options["reload_dataloaders_every_n_epochs"] = draw.between(1, 2)
    if draw.happens(0.05) and spec["manual"] < 2:
        options["fast_dev_run"] = draw.between(1, min(2, batches))
        options.pop("overfit_batches", None)
    for name, value in (("detect_anomaly", True), ("inference_mode", False)):
        if draw.happens(0.05):
            options[name] = value
    if isinstance(options.get("val_check_interval"), float):  # an interval of less than a batch is an error there
        taken = limited_batches(spec)
        if int(taken * options["val_check_interval"]) < 1:
            options["val_check_interval"] = 1.0
    elif "check_val_every_n_epoch" not in options and options.get("val_check_interval", 0) > limited_batches(spec):
        options["val_check_interval"] = 1
    spec["seed_everything"] = draw.happens(0.2)


def batches_per_epoch(spec: Spec) -> int:
    """Return the number of batches of the training loader."""

    def count(size: int) -> int:
        return size // spec["bs"] if spec.get("drop_last") else -(-size // spec["bs"])

    if spec.get("train_loaders", 1) == 1:
        return count(spec["n"])
    both = count(spec["n"]), count(max(2, spec["n"] // 2))
    return min(both) if spec["combined"] == "min_size" else max(both)


def limited_batches(spec: Spec) -> int:
    """Return the number of training batches of an epoch."""
    options, batches = spec["trainer"], batches_per_epoch(spec)
    for name in ("limit_train_batches", "overfit_batches", "fast_dev_run"):
        limit = options.get(name)
        if limit:
            batches = int(limit * batches) if isinstance(limit, float) else min(int(limit), batches)
    return batches


def _draw_logs(spec: Spec, draw: Draw) -> None:
    def options(*, of_steps: bool) -> dict[str, Any]:
        chosen: dict[str, Any] = {"on_epoch": True}
        if of_steps:
            chosen["on_step"], chosen["on_epoch"] = draw.one_of((True, True), (True, False), (False, True))
        if draw.happens(0.3):
            chosen["reduce_fx"] = draw.one_of("mean", "sum", "max", "min")
        if draw.happens(0.2):
            chosen["batch_size"] = draw.one_of(1, 2, 7)
        rare = (("prog_bar", True, 0.4), ("logger", False, 0.15))
        return chosen | {name: value for name, value, probability in rare if draw.happens(probability)}

    def entry(where: str, name: str, value: str, *, of_steps: bool) -> dict[str, Any]:
        chosen = options(of_steps=of_steps)
        if value == "metric":
            chosen.pop("reduce_fx", None)
        return {"where": where, "name": name, "value": value, "kw": chosen}

    logs = [entry("training_step", "train_loss", "loss", of_steps=True)] if draw.happens(0.9) else []
    if draw.happens(0.4):
        logs.append(entry("training_step", "other", draw.one_of("float", "int", "bool", "metric"), of_steps=True))
    if spec.get("val_n"):
        logs.append(entry("validation_step", "val_loss", "loss", of_steps=draw.happens(0.3)))
        if draw.happens(0.3):
            kinds = ("float", "int", "bool") + (("metric",) if spec["val_loaders"] == 1 else ())
            logs.append(entry("validation_step", "val_other", draw.one_of(*kinds), of_steps=True))
    hooks = (*HOOKS_OF_STEPS, *HOOKS_OF_EPOCHS, *HOOKS_OF_VALIDATION_STEPS)
    for hook in dict.fromkeys(draw.one_of(*hooks) for _ in range(draw.between(0, 3))):
        # Without a loss Lightning steps an optimizer without gradients.
        is_skipped = hook == "on_before_optimizer_step" and spec.get("none")
        if (spec.get("val_n") or "validation" not in hook) and not is_skipped:
            value = draw.one_of("float", "int", "loss")
            of_steps = hook in HOOKS_OF_STEPS or hook in HOOKS_OF_VALIDATION_STEPS
            logs.append(entry(hook, f"{hook}.value", value, of_steps=of_steps))
    spec["logs"] = logs


def _draw_scheduler(spec: Spec, draw: Draw) -> None:
    kind = draw.one_of(*[None] * len(SCHEDULERS), *SCHEDULERS)
    names = epoch_values(spec)
    if kind == "plateau" and (spec["manual"] or not names or spec["trainer"].get("limit_val_batches") == 0):
        kind = "step"
    if kind == "onecycle" and (spec["manual"] or spec["iterable"] or spec.get("gas")):
        kind = "exp"
    spec["scheduler"], spec["manual_sched"] = kind, bool(spec["manual"] and kind)
    if kind is None:
        return
    config: dict[str, Any] = {"interval": "step" if kind == "onecycle" else draw.one_of("step", "epoch")}
    if spec.get("none"):  # a batch without a loss is no step of these
        config = {"interval": "epoch"}
    if kind == "plateau":
        config = {"interval": "epoch", "monitor": draw.one_of(*names), "strict": draw.one_of(True, False)}
    if config["interval"] == "epoch":
        config["frequency"] = draw.one_of(1, 1, 2)
    if draw.happens(0.2) and spec["manual"] < 2:
        config["name"] = "rate"
    spec["sched"], spec["sched_format"] = config, draw.one_of("dict", "lists")
    if draw.happens(0.1) and kind not in ("plateau", "onecycle"):
        spec["sched"], spec["sched_format"] = {}, "bare"


def _draw_checkpoints(spec: Spec, draw: Draw) -> None:
    spec["mc"] = []
    for _ in range(draw.one_of(0, 0, 1, 1, 2)):
        options: dict[str, Any] = {"filename": draw.one_of(*NAMES), "save_top_k": draw.one_of(-1, 0, 1)}
        names = epoch_values(spec)
        if names and draw.happens(0.6):
            options |= {"monitor": draw.one_of(*names), "mode": draw.one_of("min", "max")}
            options["save_top_k"] = draw.one_of(-1, 0, 1, 1, 2, 3)
        when = draw.one_of("epochs", "epochs", "steps", "default")
        if when == "epochs":
            options["every_n_epochs"] = draw.one_of(1, 1, 2)
        elif when == "steps":
            options["every_n_train_steps"] = draw.between(1, 4) * (spec["manual"] or 1)
        for name in ("save_last", "save_weights_only"):
            if draw.happens(0.2):
                options[name] = True
        if draw.happens(0.2):
            options["auto_insert_metric_name"] = False
        key = [options.get(name) for name in ("monitor", "mode", "every_n_train_steps")]
        if all(key != [other.get(name) for name in ("monitor", "mode", "every_n_train_steps")] for other in spec["mc"]):
            spec["mc"].append(options)


def _draw_callbacks(spec: Spec, draw: Draw) -> None:
    options = spec["trainer"]
    names = epoch_values(spec)
    if draw.happens(0.3) and names:
        stopping = {"monitor": draw.one_of(*names), "patience": draw.between(0, 2), "mode": draw.one_of("min", "max")}
        for name, values in (
            ("min_delta", (0.01, 0.3)),
            ("stopping_threshold", (0.3,)),
            ("strict", (False,)),
            ("divergence_threshold", (1.0,)),
        ):
            if draw.happens(0.2):
                stopping[name] = draw.one_of(*values)
        spec["es"] = stopping
    if draw.happens(0.25):
        spec["lrm"] = {"logging_interval": draw.one_of("step", "epoch", None)}
        for name in ("log_momentum", "log_weight_decay"):
            spec["lrm"][name] = draw.happens(0.2) and spec["optimizer"] != "lbfgs"
    if draw.happens(0.08):
        spec["ema"] = {"decay": draw.one_of(0.5, 0.9), "update_every_n_steps": draw.between(1, 2)}
        if spec["manual"] == 2:  # two steps of each batch, so that every second batch would never be averaged
            spec["ema"]["update_every_n_steps"] = 1
    # A stop or the end of an epoch not before the first optimizer step, after which Lightning saves no checkpoint.
    accumulates = spec.get("gas") or "accumulate_grad_batches" in options
    if draw.happens(0.06):
        within = () if accumulates else ("on_validation_end",)
        spec["stop"] = {"hook": draw.one_of("on_train_epoch_end", *within), "at": draw.between(0, 2)}
    if spec.get("stop") or spec.get("es"):  # a stop within an epoch, after these, is at once
        options.pop("min_steps", None)
        options.pop("min_epochs", None)
    if draw.happens(0.05) and spec.get("sched", {}).get("interval") != "step" and not accumulates:
        spec["skip"] = [[draw.between(0, 1), draw.between(1, 3)]]
        # EarlyStopping checks no old values, and an interval across epochs counts no skipped batch.
        if spec.get("es") or options.get("check_val_every_n_epoch", 1) is None:
            del spec["skip"]
        else:  # Lightning drops what a batch logs that the same hook skips
            spec["logs"] = [entry for entry in spec["logs"] if not entry["where"].endswith("on_train_batch_start")]
    spec["loggers"] = draw.one_of(1, 1, 1, 2)
    if draw.happens(0.1) and _can_resume(spec):
        spec["resume"] = {"epochs": draw.between(1, options["max_epochs"] - 1)}
        if options.get("min_epochs", 0) > spec["resume"]["epochs"]:
            del options["min_epochs"]


def _can_resume(spec: Spec) -> bool:
    """Return whether Lightning resumes a program as if it had not stopped: without random numbers and averages."""
    options, others = spec["trainer"], ("shuffle", "dropout", "stop", "ema", "none")
    logs_at_start = any(entry["where"] == "on_train_start" for entry in spec["logs"])
    is_plain = not logs_at_start and not any(spec.get(name) for name in others)
    return is_plain and options["max_epochs"] > 1 and not {"max_steps", "fast_dev_run"} & options.keys()


def monitor_rare_validations(spec: Spec, draw: Draw) -> None:
    """Let callbacks monitor values also where not each epoch has one, or several, which Lightning judges otherwise."""
    if epoch_values(spec):
        return
    names = epoch_values(spec, of_each_epoch=False)
    modes = {"mode": draw.one_of("min", "max")}
    for options in spec["mc"]:
        if names and draw.happens(0.6):
            options |= {"monitor": draw.one_of(*names), **modes}
    if names and draw.happens(0.3) and not spec.get("skip"):
        spec["es"] = {"monitor": draw.one_of(*names), "patience": draw.between(0, 2), "strict": False, **modes}


def epoch_values(spec: Spec, *, of_each_epoch: bool = True) -> list[str]:
    """Return the names of logged values, of those that each epoch has once or of all."""
    options, names = spec["trainer"], []
    # Lightning loses values of LBFGS's first computation if hooks log between two computations.
    is_repeated = spec["optimizer"] == "lbfgs" and any(entry["where"].startswith("on_") for entry in spec["logs"])
    validates = bool(spec.get("val_n")) and options.get("limit_val_batches") != 0
    is_regular = options.get("check_val_every_n_epoch", 1) == 1 and "val_check_interval" not in options
    is_regular |= not of_each_epoch
    for entry in spec["logs"]:
        ending = "_epoch" if entry["kw"].get("on_step") else ""
        if entry["name"] == "val_loss" and validates and is_regular and entry["kw"]["on_epoch"]:
            several = "" if spec["val_loaders"] == 1 else "/dataloader_idx_0"
            names += [f"val_loss{ending}{several}"] * 2
        if entry["name"] == "train_loss" and entry["kw"]["on_epoch"] and is_regular and not is_repeated:
            names.append(f"train_loss{ending}")
    return names


def global_batch_program(seed: int) -> Spec:
    """Return a program whose ranks train on shares of equal size, so that two compute what one device does."""
    spec, draw = random_program(seed), Draw(-seed)
    for name in ("bn", "dropout", "manual", "manual_sched", "iterable", "drop_last", "shuffle", "ema", "resume", "mc"):
        spec.pop(name, None)
    for name in ("es", "train_loaders", "combined", "groups", "test_n", "predict_n", "manual_clip", "none", "skip"):
        spec.pop(name, None)
    spec["source"], spec["n"] = "args", 2 * draw.between(2, 9)
    if spec["optimizer"] == "lbfgs":
        spec["optimizer"] = "adamw"
    if spec.get("val_n"):
        spec["val_n"], spec["val_loaders"] = spec["val_n"] + spec["val_n"] % 2, 1
    options = spec["trainer"]
    for name in ("precision", "val_check_interval", "check_val_every_n_epoch", "limit_val_batches", "fast_dev_run"):
        options.pop(name, None)
    for name in ("limit_train_batches", "overfit_batches", "reload_dataloaders_every_n_epochs", "detect_anomaly"):
        options.pop(name, None)
    options["max_epochs"] = abs(options["max_epochs"])
    options["log_every_n_steps"], options["num_sanity_val_steps"] = 1, 0
    spec["logs"] = [
        {**entry, "kw": {"on_step": False, "on_epoch": True, "sync_dist": True}}
        for entry in spec["logs"]
        if entry["where"] in ("training_step", "validation_step") and entry["value"] == "loss"
    ]
    if spec["scheduler"] == "plateau":
        spec["scheduler"], spec["sched"] = "step", {"interval": "epoch"}
    return spec

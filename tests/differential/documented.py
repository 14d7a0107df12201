"""Differences from Lightning that the documentation names: what they change in the records of a program.

Each function changes two records so that they are equal but for other differences.  Its row is quoted, so that the
tests show that the documentation still has it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Spec = dict[str, Any]
Record = dict[str, Any]
ROWS: dict[str, Any] = {}
"""The functions by the row of the documentation."""

VALUES = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def documented(row: str) -> Any:
    def add(rule: Any) -> Any:
        ROWS[row] = rule
        return rule

    return add


def apply_documented(spec: Spec, theirs: Record, ours: Record) -> None:
    """Remove the documented differences from two records."""
    for rule in ROWS.values():
        rule(spec, theirs, ours)


def _names(spec: Spec, *, where: tuple[str, ...] | str = "", of_steps: bool | None = None) -> set[str]:
    """Return the names that a program logs in some hooks, without the index of a loader."""
    return {
        entry["name"]
        for entry in spec["logs"]
        if entry["where"].removeprefix("callback.").startswith(where)
        and (of_steps is None or bool(entry["kw"].get("on_step")) is of_steps)
    }


def _base(name: str) -> str:
    """Return a name as it was logged."""
    return name.split("/dataloader_idx_", maxsplit=1)[0].removesuffix("_step").removesuffix("_epoch")


def _tables(record: Record) -> Iterator[dict[str, Any]]:
    """Yield all tables of values by name."""
    yield from (entry["values"] for entry in record["metrics"])
    yield from (record[name] for name in VALUES)
    yield record["rows"]


def _drop(table: dict[str, Any], drops: Callable[[str], bool]) -> None:
    for name in [name for name in table if drops(name)]:
        del table[name]


def _has_nan(spec: Spec) -> bool:
    """Return whether a program may compute NaN: with gradients in float16."""
    return bool(spec["trainer"].get("precision") == "16-true")


def _is_rate(spec: Spec, name: str) -> bool:
    named = (spec.get("sched") or {}).get("name", "lr-")
    return name.startswith(("lr-", named)) and _base(name) not in _names(spec)


def _monitors_validation(options: Spec) -> bool:
    return str(options.get("monitor", "")).startswith("val_")


def _follows_validation(spec: Spec) -> bool:
    """Return whether Lightning's callbacks save and check after validations, not at the end of each epoch."""
    options = spec["trainer"]
    is_rare = options.get("check_val_every_n_epoch", 1) != 1 or options.get("limit_val_batches") == 0
    return bool(is_rare or options.get("val_check_interval", 1.0) != 1.0)


# Loggers


@documented("rows of `LearningRateMonitor` have the epoch, one for each optimizer step")
def _rows_of_rates(spec: Spec, theirs: Record, ours: Record) -> None:
    for record in (theirs, ours):
        for name, rows in record["rows"].items():
            if _is_rate(spec, name):
                first = {row["step"]: row for row in reversed(rows)}
                record["rows"][name] = [{**row, "epoch": None} for row in reversed(first.values())]


@documented("loggers use the number of completed optimizer steps as step")
def _steps_of_rows(spec: Spec, theirs: Record, ours: Record) -> None:
    for name, rows in theirs["rows"].items():
        for row, our_row in zip(rows, ours["rows"].get(name, ()), strict=False):
            if spec.get("manual") == 2 or our_row["step"] - row["step"] in (0, 1):
                row["step"] = our_row["step"]


@documented("values that a validation logs per step are in `callback_metrics`")
def _steps_of_validation(spec: Spec, theirs: Record, ours: Record) -> None:
    of_steps = _names(spec, where=("validation", "on_validation"), of_steps=True)
    for record in (theirs, ours):
        for rows in (rows for name, rows in record["rows"].items() if _base(name) in of_steps):
            for row in rows:
                row["epoch"] = None
                if spec["trainer"].get("reload_dataloaders_every_n_epochs") or spec.get("resume"):
                    row["step"] = None
        for table in (*(entry["values"] for entry in record["metrics"]), record["callback_metrics"]):
            _drop(table, lambda name: _base(name) in of_steps and not name.split("/")[0].endswith("_epoch"))


@documented("`progress_bar_metrics` have the step value as `x`")
def _names_of_the_bar(spec: Spec, theirs: Record, ours: Record) -> None:
    both = {entry["name"] for entry in spec["logs"] if entry["kw"].get("on_step") and entry["kw"]["on_epoch"]}
    shown = theirs["progress_bar_metrics"]
    for name in [name for name in shown if _base(name) in both and name.split("/")[0].endswith("_step")]:
        logged, separator, index = name.partition("/dataloader_idx_")
        shown[f"{logged.removesuffix('_step')}{separator}{index}"] = shown.pop(name)


@documented("a resumed run has the `callback_metrics` of its checkpoint")
def _values_before_a_resume(spec: Spec, theirs: Record, ours: Record) -> None:
    if spec.get("resume"):
        for entry, our_entry in zip(theirs["metrics"], ours["metrics"], strict=False):
            _drop(our_entry["values"], lambda name, values=entry["values"]: name not in values)
        for name in VALUES:
            _drop(ours[name], lambda name, values=theirs[name]: name not in values)


@documented("`LearningRateMonitor` without a scheduler writes the rate with steps")
def _rows_of_constant_rates(spec: Spec, theirs: Record, ours: Record) -> None:
    if spec.get("lrm") is not None and not spec["lrm"].get("logging_interval"):
        for record in (theirs, ours):
            _drop(record["rows"], lambda name: _is_rate(spec, name))


@documented("`log_every_n_steps` counts optimizer steps, in manual optimization too")
def _rows_of_several_optimizers(spec: Spec, theirs: Record, ours: Record) -> None:
    if spec.get("manual") == 2 and spec["trainer"]["log_every_n_steps"] > 1:
        of_steps = _names(spec, where=("training_step", "on_train_batch", "on_before", "on_after"), of_steps=True)
        for record in (theirs, ours):
            _drop(record["rows"], lambda name: _is_rate(spec, name) or _base(name) in of_steps)


@documented("skips the sanity check when it resumes from a checkpoint")
def _sanity_check_of_a_resume(spec: Spec, theirs: Record, ours: Record) -> None:
    if spec.get("resume"):
        names = [name for name, _ in theirs["events"]]
        resumed = names.index("--- resume")
        start = names.index("on_train_start", resumed)
        first = next((at for at in range(resumed, start) if names[at] == "on_validation_model_eval"), start)
        num_before = names[:first].count("validation_step")
        num_checked = names[first:start].count("validation_step")
        theirs["val_losses"] = theirs["val_losses"][:num_before] + theirs["val_losses"][num_before + num_checked :]
        theirs["events"] = theirs["events"][:first] + theirs["events"][start:]


# Values for callbacks


@documented('within an epoch, `callback_metrics["x"]` of an `x` logged per step and epoch')
def _names_of_both(spec: Spec, theirs: Record, ours: Record) -> None:
    both = {entry["name"] for entry in spec["logs"] if entry["kw"].get("on_step") and entry["kw"]["on_epoch"]}
    for entry in (*theirs["metrics"], *ours["metrics"]):
        if entry["where"] != "train_end":
            _drop(entry["values"], lambda name: _base(name) in both and not name.split("/")[0].endswith("_step"))


@documented("a value that is logged in a hook at the end of an epoch is in `callback_metrics` after these hooks")
def _values_of_the_end(spec: Spec, theirs: Record, ours: Record) -> None:
    of_hooks = _names(spec, where="on_")
    for entry in (*theirs["metrics"], *ours["metrics"]):
        if entry["where"] != "train_end":
            _drop(entry["values"], lambda name: _base(name) in of_hooks)


@documented("if a step computes several losses")
def _values_of_repeated_steps(spec: Spec, theirs: Record, ours: Record) -> None:
    if spec["optimizer"] == "lbfgs" or spec["manual"] == 2:
        repeated = _names(spec, where=("training_step", "on_after_backward", "on_before"))
        if len(repeated) > len(_names(spec, where="training_step")) or _names(spec, where="on_train_batch"):
            for table in (*_tables(theirs), *_tables(ours)):
                _drop(table, lambda name: _base(name) in repeated)


@documented("results of `validate` and `test` have the values of `logger=False` too")
def _results_without_loggers(spec: Spec, theirs: Record, ours: Record) -> None:
    hidden = {entry["name"] for entry in spec["logs"] if entry["kw"].get("logger") is False}
    for result in ours.get("validate", ()):
        _drop(result, lambda name: _base(name) in hidden)


# Counters and states


@documented("`should_stop` is False again when the next run begins")
def _after_the_run(spec: Spec, theirs: Record, ours: Record) -> None:
    theirs["should_stop"] = ours["should_stop"]
    if theirs["batches"] == math.inf:
        theirs["batches"] = None


@documented("`best_score` is None before the first check, and includes the value that stopped training")
def _score_of_stopping(spec: Spec, theirs: Record, ours: Record) -> None:
    if not theirs["es"]:
        return
    if math.isinf(theirs["es"]["best"] or 0):
        theirs["es"]["best"] = None
    # A value of an epoch that max_steps has ended is not compared with those of whole epochs.
    has_threshold = "stopping_threshold" in spec["es"] or "divergence_threshold" in spec["es"]
    if has_threshold or theirs["epoch"] != ours["epoch"] or _has_nan(spec):
        for record in (theirs, ours):
            record["es"] |= {"best": None, "wait": None}
    if theirs["epoch"] != ours["epoch"]:
        theirs["es"]["stopped"] = ours["es"]["stopped"]


@documented("and `ModelCheckpoint` without `monitor`, work at the end of epochs also where validation is rarer")
def _saves_and_checks_by_epochs(spec: Spec, theirs: Record, ours: Record) -> None:
    if not _follows_validation(spec):
        return
    for saved, our_saved, options in zip(theirs["checkpoints"], ours["checkpoints"], spec["mc"], strict=True):
        if not _monitors_validation(options) and "save_on_train_epoch_end" not in options:
            saved.update(our_saved)
    if spec.get("es") and not _monitors_validation(spec["es"]):
        theirs["es"] = ours["es"]


@documented("with a monitored value of validation saves after the next validation, and with one of a training epoch")
def _saves_when_the_value_is_new(spec: Spec, theirs: Record, ours: Record) -> None:
    for saved, our_saved, options in zip(theirs["checkpoints"], ours["checkpoints"], spec["mc"], strict=True):
        if "monitor" in options and (
            "every_n_train_steps" in options or (spec.get("skip") and _monitors_validation(options))
        ):
            saved.update(our_saved)


@documented("weights at the end of training between two saves are `last`, not in the ranking")
def _saves_within_an_epoch(spec: Spec, theirs: Record, ours: Record) -> None:
    if theirs["epoch"] != ours["epoch"]:
        for saved, our_saved, options in zip(theirs["checkpoints"], ours["checkpoints"], spec["mc"], strict=True):
            if "monitor" in options:
                saved.update(our_saved)


@documented("NaN is never the best value of a `ModelCheckpoint`")
def _nan_in_rankings(spec: Spec, theirs: Record, ours: Record) -> None:
    if _has_nan(spec):
        for saved, our_saved, options in zip(theirs["checkpoints"], ours["checkpoints"], spec["mc"], strict=True):
            if "monitor" in options:
                saved.update(our_saved)


@documented("after training that stopped within an epoch, `current_epoch` is the index of that epoch")
def _epoch_after_a_stop(spec: Spec, theirs: Record, ours: Record) -> None:
    may_stop = "max_steps" in spec["trainer"] or spec.get("stop") or spec.get("es")
    if theirs["epoch"] == ours["epoch"] + 1 and may_stop:
        for row in (row for record in (theirs, ours) for rows in record["rows"].values() for row in rows):
            row["epoch"] = min(row["epoch"] or 0, ours["epoch"])
        theirs["epoch"] = ours["epoch"]
        for entry, our_entry in zip(theirs["metrics"], ours["metrics"], strict=False):
            if entry["where"] == "train_end":
                entry["epoch"] = our_entry["epoch"]


@documented("a stop writes no row of its own")
def _rows_of_stops(spec: Spec, theirs: Record, ours: Record) -> None:
    if spec["trainer"]["log_every_n_steps"] > 1 and (spec.get("stop") or spec.get("es")):
        of_steps = _names(spec, where=("training_step", "on_train", "on_before", "on_after"), of_steps=True)
        for record in (theirs, ours):
            _drop(record["rows"], lambda name: _base(name) in of_steps and not name.endswith("_epoch"))


@documented("does not call `on_validation_model_zero_grad` in manual optimization")
def _gradients(spec: Spec, theirs: Record, ours: Record) -> None:
    if spec.get("manual"):
        theirs["grads"] = ours["grads"]


@documented("a data module takes part only in the run to which it is passed")
def _later_runs(spec: Spec, theirs: Record, ours: Record) -> None:
    for record in (theirs, ours):
        events, seen = [], ""
        for event in record["evaluation_events"]:
            seen = event[0] if event[0].startswith("---") else seen
            if seen == "--- validate" or not event[0].startswith("data."):
                events.append(event)
        record["evaluation_events"] = events


# Callbacks


@documented("`kth_best_model_path` is empty while `save_top_k` is not reached")
def _ranking(spec: Spec, theirs: Record, ours: Record) -> None:
    for options, saved, our_saved in zip(spec["mc"], theirs["checkpoints"], ours["checkpoints"], strict=True):
        if not our_saved["next"] or "monitor" not in options:
            saved["next"] = our_saved["next"]
        if "monitor" not in options:
            saved["scores"] = our_saved["scores"]


@documented("a `ModelCheckpoint` that resumes in another folder keeps the best path with its score")
def _best_before_a_resume(spec: Spec, theirs: Record, ours: Record) -> None:
    if spec.get("resume"):
        for saved, our_saved in zip(theirs["checkpoints"], ours["checkpoints"], strict=True):
            if our_saved["best"] not in our_saved["files"]:
                saved |= {name: our_saved[name] for name in ("best", "score")}


@documented("a save never overwrites a checkpoint: with a fixed name")
def _fixed_names(spec: Spec, theirs: Record, ours: Record) -> None:
    for record in (theirs, ours):
        for saved in record["checkpoints"]:
            saved["files"] = sorted(set(saved["files"]))


@documented("`EMAWeightAveraging` copies integer buffers, such as `num_batches_tracked`")
def _counts_of_averages(spec: Spec, theirs: Record, ours: Record) -> None:
    if spec.get("ema"):
        for record in (theirs, ours):
            _drop(record["weights"], lambda name: name.endswith("num_batches_tracked"))


@documented("`configure_model` is called once")
def _configured_once(spec: Spec, theirs: Record, ours: Record) -> None:
    if spec.get("ema"):
        for record in (theirs, ours):
            record["events"] = [event for event in record["events"] if event[0] != "configure_model"]


@documented("calls neither `on_before_optimizer_step` nor the optimizer's step when `training_step` returned None")
def _steps_without_loss(spec: Spec, theirs: Record, ours: Record) -> None:
    if spec.get("none"):
        for record in (theirs, ours):
            events = [event for event in record["events"] if event[0] != "on_before_optimizer_step"]
            record["events"] = [
                event
                for index, event in enumerate(events)
                if event[0] != "optimizer_step" or event not in events[max(0, index - 2) : index]
            ]
            record["events: cleared"] = None


@documented("with `accumulate_grad_batches`, each optimizer step is the mean of the batches that are in it")
def _losses_of_groups(spec: Spec, theirs: Record, ours: Record) -> None:
    accumulates = spec.get("gas") or spec["trainer"].get("accumulate_grad_batches", 1) > 1
    if accumulates and (spec["iterable"] or spec.get("none")):  # the gradients are scaled, as the number is not known
        for record in (theirs, ours):
            record["outputs"] = None
            record["events"] = [event for event in record["events"] if event[0] != "on_before_backward"]

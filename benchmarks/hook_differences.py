"""The differences from Lightning's order of hooks that are meant, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

Calls = list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A difference that is meant.

    Attributes:
        reason: What differs, and why.
        rewrite: Turns what Lightning calls into what dstrat calls.
    """

    reason: str
    rewrite: Callable[[Calls], Calls]


def name_of(call: str) -> str:
    """Return a call without its arguments."""
    return call.partition("(")[0]


def moved(calls: Calls, block: range, to: int) -> Calls:
    """Return the calls with a block of them in front of what is at another index."""
    rest = [*calls[: block.start], *calls[block.stop :]]
    index = to if to <= block.start else to - len(block)
    return [*rest[:index], *calls[block.start : block.stop], *rest[index:]]


def after(calls: Calls, name: str, start: int = 0) -> int | None:
    """Return the index after the next call of that name; None where there is none."""
    return next((i + 1 for i in range(start, len(calls)) if name_of(calls[i]) == name), None)


def check_names_first(calls: Calls) -> Calls:
    """Add what happens when the Trainer is made."""
    return ["callback.state_dict()", *calls]


def clear_before_the_step(calls: Calls) -> Calls:
    """Move the clearing of gradients from after ``training_step`` to before it."""
    clearing = ("callback.on_before_zero_grad", "module.on_before_zero_grad", "module.optimizer_zero_grad")
    result: Calls = []
    step = 0
    for call in calls:
        if name_of(call) == "module.training_step":
            step = len(result)
        if name_of(call) in clearing:
            result.insert(step, call)
            step += 1
        else:
            result.append(call)
    return result


def clear_before_a_step_that_raises(calls: Calls) -> Calls:
    """Add the clearing that Lightning does not come to."""
    raising = after(calls, "callback.on_exception")
    if raising is None:
        return calls
    stepping = calls[raising - 3]
    clearing = stepping.replace("module.optimizer_step", "module.optimizer_zero_grad")
    before = ["callback.on_before_zero_grad()", "module.on_before_zero_grad()", clearing]
    return [*calls[: raising - 2], *before, *calls[raising - 2 :]]


def name_the_algorithm(calls: Calls) -> Calls:
    """Let clipping have an algorithm by default."""
    clipping = "module.configure_gradient_clipping"
    return [f"{clipping}(norm)" if call == f"{clipping}()" else call for call in calls]


def step_epochs_late(calls: Calls) -> Calls:
    """Move the schedulers that are stepped per epoch behind the end of the epoch."""
    index = 0
    while index + 1 < len(calls):
        end = after(calls, "module.on_train_epoch_end", index)
        if end and name_of(calls[index]) == name_of(calls[index + 1]) == "module.lr_scheduler_step":
            calls = moved(calls, range(index + 1, index + 2), end)
        index += 1
    return calls


def step_nothing_without_a_step(calls: Calls) -> Calls:
    """Leave out the schedulers that Lightning steps after a batch that was left out."""
    before = ["", *map(name_of, calls)]
    return [
        call
        for call, previous in zip(calls, before, strict=False)
        if (name_of(call), previous) != ("module.lr_scheduler_step", "module.on_train_batch_start")
    ]


def skip_without_a_loss(calls: Calls) -> Calls:
    """Leave out the optimizer's step of a ``training_step`` that returned None."""
    index = 0
    while (start := after(calls, "module.training_step", index)) is not None:
        end = after(calls, "module.lr_scheduler_step", start)
        if end and name_of(calls[start]) == "callback.on_before_optimizer_step":
            calls = [*calls[:start], *calls[end - 1 :]]  # schedulers are stepped
        index = start
    return calls


def save_after_the_schedulers(calls: Calls) -> Calls:
    """Move a scheduler that watches a value in front of the checkpoints of the epoch."""
    for index in range(1, len(calls)):
        saved = name_of(calls[index - 1]) == "module.on_save_checkpoint"
        if saved and name_of(calls[index]) == "module.lr_scheduler_step":
            end = max(i for i in range(index) if name_of(calls[i]) == "module.on_train_epoch_end")
            calls = moved(calls, range(index, index + 1), end + 1)
    return calls


def load_together(calls: Calls) -> Calls:
    """Move the later making of the validation loader to that of the training loader."""
    first = after(calls, "data.train_dataloader")
    again = after(calls, "data.train_dataloader", first) if first else None
    loader = after(calls, "data.val_dataloader", again) if again else None
    return moved(calls, range(loader - 1, loader), again) if again and loader else calls


def save_after_the_module(calls: Calls) -> Calls:
    """Move the saving of checkpoints behind what the module does at the end of a validation."""
    index = 0
    while (start := after(calls, "callback.on_validation_end", index)) is not None:
        end = after(calls, "module.on_validation_end", start)
        index = end or start
        if end and end - start > 1:
            calls = moved(calls, range(start, end - 1), end)
    return calls


def restore_when_set_up(calls: Calls) -> Calls:
    """Move the states of callbacks and data behind the making of optimizers, and callbacks before the module."""
    start, end = after(calls, "module.configure_model"), after(calls, "module.configure_optimizers")
    if start is None or end is None or "module.on_load_checkpoint()" not in calls[start:end]:
        return calls
    restoring = [
        *("callback.on_load_checkpoint()", "module.on_load_checkpoint()", "module.configure_optimizers()"),
        *("callback.load_state_dict()", "data.load_state_dict()"),
    ]
    return [*calls[:start], *restoring, *calls[end:]]


def resume_without_a_check(calls: Calls) -> Calls:
    """Leave out the sanity check of a training that goes on."""
    start, end = after(calls, "callback.on_sanity_check_start"), after(calls, "callback.on_sanity_check_end")
    if "module.on_load_checkpoint()" not in calls or start is None or end is None:
        return calls
    return [*calls[: start - 1], "data.val_dataloader()", *calls[end:]]


def restore_to_evaluate(calls: Calls) -> Calls:
    """Let callbacks see a checkpoint before the module where it is evaluated, and take their states after it."""
    if "module.training_step(0)" in calls or "module.on_load_checkpoint()" not in calls:
        return calls
    restoring = [
        *("callback.on_load_checkpoint()", "module.on_load_checkpoint()"),
        *("callback.load_state_dict()", "data.load_state_dict()"),
    ]
    start = min(calls.index(call) for call in restoring if call in calls)
    kept = [call for call in calls if call not in restoring]
    return [*kept[:start], *restoring, *kept[start:]]


def tear_down_always(calls: Calls) -> Calls:
    """Add the teardown after an exception."""
    if name_of(calls[-1]) != "data.on_exception":
        return calls
    return [*calls, *(f"{owner}.teardown(fit)" for owner in ("data", "callback", "module"))]


def train_after_prediction(calls: Calls) -> Calls:
    """Add the hook that Lightning has after validation and test only."""
    end = after(calls, "module.on_predict_end")
    return calls if end is None else [*calls[:end], "module.on_predict_model_train()", *calls[end:]]


def save_last_by_pointing(calls: Calls) -> Calls:
    """Leave out the hooks of a second save of the same."""
    result: Calls = []
    for call in calls:
        result.append(call)
        saves = [index for index, one in enumerate(result) if name_of(one) == "callback.state_dict"][-2:]
        if name_of(call) == "module.on_save_checkpoint" and len(saves) == 2:
            first, second = saves
            if result[first:second] == result[second:]:
                del result[second:]
    return result


def keep_gradients_of_manual_optimization(calls: Calls) -> Calls:
    """Leave out that gradients are freed for validation."""
    if any(name_of(call) == "module.optimizer_zero_grad" for call in calls):
        return calls
    return [call for call in calls if name_of(call) != "module.on_validation_model_zero_grad"]


DIFFERENCES = (
    Difference(
        reason="a Trainer checks when it is made that callbacks with a state have names of their own",
        rewrite=check_names_first,
    ),
    Difference(
        reason="gradients are cleared before training_step rather than after it, because old gradients and new "
        "activations need not be in memory together",
        rewrite=clear_before_the_step,
    ),
    Difference(
        reason="so they are cleared before a training_step that raises, too",
        rewrite=clear_before_a_step_that_raises,
    ),
    Difference(
        reason="gradient_clip_algorithm is 'norm' by default, rather than None for the same",
        rewrite=name_the_algorithm,
    ),
    Difference(
        reason="schedulers that count epochs are stepped after on_train_epoch_end rather than before the last "
        "on_train_batch_end, so that all hooks of an epoch see the learning rate that it had",
        rewrite=step_epochs_late,
    ),
    Difference(
        reason="no scheduler is stepped for a batch that on_train_batch_start left out, as no optimizer is",
        rewrite=step_nothing_without_a_step,
    ),
    Difference(
        reason="a training_step that returns None skips the optimizer's step with its hooks, as there are no gradients",
        rewrite=skip_without_a_loss,
    ),
    Difference(
        reason="a scheduler that watches a value is stepped before the epoch's checkpoint is saved rather than after "
        "it, so that training that goes on from there goes on as if it had never stopped",
        rewrite=save_after_the_schedulers,
    ),
    Difference(
        reason="loaders that are made again are made at the same time, before the epoch",
        rewrite=load_together,
    ),
    Difference(
        reason="a checkpoint of a validation is saved after the module's on_validation_end rather than before it, so "
        "that it knows what the module logged there",
        rewrite=save_after_the_module,
    ),
    Difference(
        reason="save_last points to a checkpoint that was saved just before, rather than saving the same once more",
        rewrite=save_last_by_pointing,
    ),
    Difference(
        reason="in manual optimization validation frees no gradients, which may wait for a step of the module's own",
        rewrite=keep_gradients_of_manual_optimization,
    ),
    Difference(
        reason="states are restored when the strategy has set up module and optimizers, which it may shard, and not "
        "before; callbacks see a checkpoint first",
        rewrite=restore_when_set_up,
    ),
    Difference(
        reason="training that goes on from a checkpoint begins without a sanity check, which its validation has passed",
        rewrite=resume_without_a_check,
    ),
    Difference(
        reason="callbacks see a checkpoint before the module, and take their states after it, in evaluation too",
        rewrite=restore_to_evaluate,
    ),
    Difference(
        reason="teardown follows an exception, too, so that what setup opened is closed",
        rewrite=tear_down_always,
    ),
    Difference(
        reason="on_predict_model_train follows prediction as the others follow validation and test",
        rewrite=train_after_prediction,
    ),
)

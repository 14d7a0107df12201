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


def clear_before_the_step(calls: Calls) -> Calls:
    """Move the clearing of gradients from after ``training_step`` to before it."""
    result: Calls = []
    for call in calls:
        step = next((i for i in range(len(result) - 1, -1, -1) if "module.training_step" in result[i]), None)
        clears = name_of(call) in ("callback.on_before_zero_grad", "module.on_before_zero_grad")
        if step is not None and (clears or name_of(call) == "module.optimizer_zero_grad"):
            result.insert(step, call)
        else:
            result.append(call)
    return result


DIFFERENCES = (
    Difference(
        reason="gradients are cleared before training_step rather than after it, because old gradients and new "
        "activations need not be in memory together",
        rewrite=clear_before_the_step,
    ),
)

"""Differences between two records of a program, as text; those that the documentation names are not among them."""

from __future__ import annotations

import math
from typing import Any

LOADERS = ("train_dataloader", "val_dataloader", "data.train_dataloader", "data.val_dataloader")
ELSEWHERE = {"on_before_zero_grad", "lr_scheduler_step", *LOADERS}
"""Events at another time, as docs/hooks.md says."""


def close(one: Any, other: Any, tolerance: float) -> bool:
    """Return whether two values of plain types are equal, numbers within a tolerance; NaN equals NaN."""
    if isinstance(one, (int, float)) and isinstance(other, (int, float)) and not isinstance(one, bool):
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other)
        return one == other or abs(one - other) <= tolerance * max(1, abs(one), abs(other))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(close(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key], tolerance) for key in one)
    return one == other


def differences(spec: dict[str, Any], theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Return the differences between the records of Lightning and of dstrat."""
    if theirs["error"] or ours["error"]:
        return [] if theirs["error"] and ours["error"] else [f"error: {theirs['error']} | {ours['error']}"]
    is_coarse = spec["trainer"].get("precision", "").startswith("bf16")
    found = []
    for name, their_value in _comparable(spec, theirs, step_offset=1).items():
        our_value = _comparable(spec, ours, step_offset=0)[name]
        if not close(their_value, our_value, 2e-2 if is_coarse else 2e-5):
            found.append(f"{name}: {first_difference(their_value, our_value, 2e-2 if is_coarse else 2e-5)}")
    return found


def first_difference(one: Any, other: Any, tolerance: float) -> str:
    if isinstance(one, list) and isinstance(other, list):
        for index, (a, b) in enumerate(zip(one, other, strict=False)):
            if not close(a, b, tolerance):
                return f"[{index}] {a} | {b}"
        return f"{len(one)} and {len(other)} entries"
    if isinstance(one, dict) and isinstance(other, dict):
        unequal = [key for key in one.keys() | other.keys() if not close(one.get(key), other.get(key), tolerance)]
        return "; ".join(f"{key}: {one.get(key)} | {other.get(key)}"[:160] for key in sorted(unequal)[:3])
    return f"{one} | {other}"


def _comparable(spec: dict[str, Any], record: dict[str, Any], *, step_offset: int) -> dict[str, Any]:
    """Return what both libraries have in the same form: loggers of Lightning count steps from 0."""
    rounded = dict(record)
    dropped = (
        ELSEWHERE
        | {"data.train_dataloader", "data.val_dataloader"}
        | ({"configure_model"} if spec.get("ema") else set())
    )
    rounded["events"] = [event for event in record["events"] if event[0] not in dropped]
    both = {entry["name"] for entry in spec["logs"] if entry["kw"].get("on_step") and entry["kw"]["on_epoch"]}
    # Within an epoch the names of epochs are the last epoch's.
    names = {f"{name}{ending}" for name in both for ending in ("", "_epoch")}
    rounded["metrics"] = [
        [where, step, {name: value for name, value in values.items() if name not in names}]
        for where, _, step, values in record["metrics"]
    ]
    rows: dict[str, list[Any]] = {}
    for step, values in record["rows"]:
        for name, value in values.items():
            if name != "epoch":  # only rows of training steps have a step in both
                is_of_step = name in {"train_loss", "train_loss_step"}
                rows.setdefault(name, []).append([step + step_offset if is_of_step else None, value])
    rounded["rows"] = rows if not spec.get("manual") else {}
    if spec.get("test_n") or spec.get("predict_n") or spec.get("manual"):  # cleared at another time
        rounded["grads"] = None
    return rounded

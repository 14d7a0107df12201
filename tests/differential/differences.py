"""Differences between two records of a program, as text; those that the documentation names are not among them."""

from __future__ import annotations

import math
import re
from typing import Any

from tests.differential.documented import apply_documented

ELSEWHERE = {
    *("on_before_zero_grad", "lr_scheduler_step", "train_dataloader", "val_dataloader"),
    *("data.train_dataloader", "data.val_dataloader"),
}
"""Events at another time, as docs/hooks.md says; schedulers and gradients are compared without their place."""


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


# Callbacks that want a value before it is logged, in the table beside what they check here.
_CHECKS_TOO_EARLY = (
    "RuntimeError: Early stopping conditioned on metric",
    "MisconfigurationException: `ModelCheckpoint(monitor=",
)


def differences(spec: dict[str, Any], theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Return the differences between the records of Lightning and of dstrat."""
    if theirs["error"] and theirs["error"].startswith(_CHECKS_TOO_EARLY) and not ours["error"]:
        return []
    if theirs["error"] or ours["error"]:
        return [] if theirs["error"] and ours["error"] else [f"error: {theirs['error']} | {ours['error']}"]
    is_coarse = spec["trainer"].get("precision", "").startswith(("bf16", "16"))
    tolerance = 2e-2 if is_coarse else 2e-5
    one, other = _comparable(theirs), _comparable(ours)
    apply_documented(spec, one, other)
    return [
        f"{name}: {first_difference(one[name], other[name], tolerance)}"
        for name in one
        if not close(one[name], other[name], tolerance)
    ]


def first_difference(one: Any, other: Any, tolerance: float) -> str:
    if isinstance(one, list) and isinstance(other, list):
        for index, (a, b) in enumerate(zip(one, other, strict=False)):
            if not close(a, b, tolerance):
                inner = first_difference(a, b, tolerance) if isinstance(a, dict) else f"{a} | {b}"
                return f"[{index}] {inner}"
        return f"{len(one)} and {len(other)} entries: {one[len(other) :][:2]} | {other[len(one) :][:2]}"
    if isinstance(one, dict) and isinstance(other, dict):
        unequal = [key for key in one.keys() | other.keys() if not close(one.get(key), other.get(key), tolerance)]
        return "; ".join(f"{key}: {one.get(key)} | {other.get(key)}"[:160] for key in sorted(unequal)[:3])
    return f"{one} | {other}"


def _comparable(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the place of what is elsewhere, and with the values of loggers by name."""
    comparable = {name: value for name, value in record.items() if name not in ("error", "rows")}
    for part in ("events", "evaluation_events"):
        events = record.get(part, ())
        comparable[part] = [event for event in events if event[0] not in ELSEWHERE]
        comparable[f"{part}: schedulers"] = [value for name, value in events if name == "lr_scheduler_step"]
        comparable[f"{part}: cleared"] = sum(name == "on_before_zero_grad" for name, _ in events)
    comparable["metrics"] = [
        {"where": where, "epoch": epoch, "step": step, "values": dict(values)}
        for where, epoch, step, values in record["metrics"]
    ]
    rows: dict[str, list[dict[str, Any]]] = {}
    for step, values in record["rows"][0]:
        for name, value in values.items():
            if name != "epoch":
                rows.setdefault(name, []).append({"value": value, "step": step, "epoch": values.get("epoch")})
    comparable["rows"] = rows
    comparable["weights"] = _with_gradients(record["weights"])
    comparable["equal loggers"] = all(close(logger, record["rows"][0], 0.0) for logger in record["rows"])
    comparable["checkpoints"] = [_without_versions(saved) for saved in record["checkpoints"]]
    return comparable


def _with_gradients(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights without biases before a batch norm, whose gradients are rounding errors.

    Adam and RMSprop scale these up.
    """

    def is_before_norm(name: str) -> bool:
        layer, _, kind = name.rpartition(".")
        prefix, _, index = layer.rpartition(".")
        return kind == "bias" and index.isdigit() and f"{prefix}.{int(index) + 1}.running_mean" in weights

    return {name: value for name, value in weights.items() if not is_before_norm(name)}


def _without_versions(saved: dict[str, Any]) -> dict[str, Any]:
    """Return what a callback has saved, without the suffixes of names that are used again."""

    def plain(name: str) -> str:
        return re.sub(r"-v\d+(?=\.ckpt)", "", name)

    scores = sorted([plain(name), score] for name, score in saved["scores"].items())
    files = sorted(plain(name) for name in saved["files"])
    return {**saved, "best": plain(saved["best"]), "next": plain(saved["next"]), "scores": scores, "files": files}

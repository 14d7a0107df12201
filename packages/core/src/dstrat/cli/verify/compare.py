"""Comparison of the records of two runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dstrat.cli.verify.training import LEARNING_RATE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

_NEGLIGIBLE = 1e-6  # share of the largest row of an output, below which one is 0 but for rounding
# Share of the norm of all gradients, to which the differences of smaller ones are compared: some are 0 but for rounding
# of much larger summands, such as those of the bias of keys in attention.
_SMALL_GRADIENT = 1e-2


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The comparison of one kind of values.

    Attributes:
        subject: The kind.
        compared: Number of values that were compared.
        total: Number of all values; the others have no counterpart, such as outputs of layers that are split.
        largest: Largest relative difference.
        differing: Names of the values that differ, in the order in which they are computed, with the differences.
    """

    subject: str
    compared: int
    total: int
    largest: float
    differing: list[tuple[str, float]]


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the processes, by rank."""
    paths = sorted(folder.glob("*.pt"), key=lambda path: int(path.stem))
    return [torch.load(path, weights_only=True) for path in paths]


def compare_values(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> Comparison:
    """Compare the values of parameters and buffers before the first step."""
    pairs = ((name, other["before"].get(name), value) for name, value in one["before"].items())
    return _comparison("first values", len(one["before"]), _differences(pairs), tolerance)


def compare_gradients(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> Comparison:
    """Compare the gradients of the first step, in the order of the backward pass."""
    expected, actual = _gradients(one), _gradients(other)
    total = float(torch.stack([value.norm() for value in expected.values()]).norm()) if expected else 0.0
    pairs = ((name, actual.get(name), value) for name, value in reversed(expected.items()))
    return _comparison("gradients", len(expected), _differences(pairs, total * _SMALL_GRADIENT), tolerance)


def _gradients(record: Mapping[str, Any]) -> dict[str, Tensor]:
    before, after = record["before"], record["after"]
    return {
        name: (before[name].double() - after[name].double()) / LEARNING_RATE
        for name in record["names"]
        if name in before and name in after
    }


def compare_losses(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> Comparison:
    """Compare the losses of the steps."""
    pairs = (
        (f"step {number}", torch.tensor(actual), torch.tensor(expected))
        for number, (actual, expected) in enumerate(zip(other["losses"], one["losses"], strict=True), 1)
    )
    return _comparison("losses", len(one["losses"]), _differences(pairs), tolerance)


def compare_outputs(one: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], tolerance: float) -> Comparison:
    """Compare the outputs of layers in the first step, sample by sample.

    Args:
        one: The record of one device.
        ranks: Those of all processes with the strategy.
        tolerance: Largest relative difference.
    """
    differences: dict[str, float] = {}
    samples = one["samples"]
    for name, calls in one["outputs"].items():
        if len(calls) != 1:  # it is called several times, in an order that depends on microbatches
            continue
        shape, of_samples, of_tokens = calls[0]
        for other in ranks:
            (first, count), actual = other["share"], other["outputs"].get(name, [])
            shapes = {of_call for of_call, _, _ in actual}
            is_divided = of_tokens is not None and all(_has_fewer_tokens(of_call, shape) for of_call in shapes)
            if other["samples"] * count != samples or len(of_samples) % samples:
                continue
            if not shapes or not (shapes == {shape} or is_divided):  # never called, or split
                continue
            expected = (of_tokens if is_divided else of_samples).unflatten(0, (samples, -1))[first::count].flatten(0, 1)
            checksums = torch.cat([tokens if is_divided else rows for _, rows, tokens in actual])
            if len(checksums) == len(expected):  # otherwise it was computed again in the backward pass, or gathered
                compare = _difference_of_tokens if is_divided else _difference_of_rows
                differences[name] = max(compare(checksums, expected), differences.get(name, 0.0))
    return _comparison("outputs of layers", len(one["outputs"]), differences, tolerance)


def _has_fewer_tokens(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Return whether an output has a part of the sequences of another, by their shapes without samples."""
    return len(shape) == len(full) and shape[1:] == full[1:] and shape[0] < full[0]


def _difference_of_rows(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).abs() / _norms(expected)).nan_to_num(nan=math.inf).max())


def _difference_of_tokens(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference of elements of sequences from the nearest ones: a rank may have any part."""
    largest = 0.0
    for tokens, sequence in zip(actual, expected, strict=True):
        pairs = (tokens.unsqueeze(1) - sequence).abs() / _norms(sequence)
        largest = max(largest, float(pairs.nan_to_num(nan=math.inf).amax(-1).amin(-1).max()))
    return largest


def _norms(expected: Tensor) -> Tensor:
    """Return the norms in checksums, not less than a small share of the largest one."""
    norms = expected[..., :1]
    return norms.clamp(min=float(norms.max()) * _NEGLIGIBLE).clamp(min=1e-30)


def _differences(pairs: Iterable[tuple[str, Tensor | None, Tensor]], least: float = 0.0) -> dict[str, float]:
    """Return the relative differences of found values from expected ones; those of integers are 0 or infinite."""
    differences = {}
    for name, actual, expected in pairs:
        if actual is None or actual.shape != expected.shape:
            differences[name] = math.inf
            continue
        difference = float((actual.double() - expected.double()).norm())
        norm = max(float(expected.double().norm()), least)
        differences[name] = 0.0 if difference == 0 else difference / norm if norm else math.inf
        if math.isnan(differences[name]):
            differences[name] = math.inf
    return differences


def _comparison(subject: str, total: int, differences: Mapping[str, float], tolerance: float) -> Comparison:
    return Comparison(
        subject=subject,
        compared=len(differences),
        total=total,
        largest=max(differences.values(), default=0.0),
        differing=[(name, value) for name, value in differences.items() if not value <= tolerance],
    )

"""Keeping DeepSpeed from loading torch's compiler, which takes a second in each rank, before somebody needs it."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_MUON = "deepspeed.runtime.zero.muon.original_muon"


def compile_muon_late() -> None:
    """Import DeepSpeed's Muon so that its functions are compiled when they are called first.

    DeepSpeed imports it for every optimizer, to see whether it is one, and decorates them with ``torch.compile``.
    """
    compiler: Any = import_module("deepspeed.runtime.compiler")
    before = compiler.compile
    compiler.compile = lambda: _compiled_when_called
    try:
        import_module(_MUON)
    finally:
        compiler.compile = before


def _compiled_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a part of another one, which compiles it too
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function))
        return compiled[0](*args, **kwargs)

    return call

"""Operations that mean something while a model is traced: the final loss, and blocks of a pipeline.

After graphcore/poptorch, python/ops.py and poptorch/source/popart_canonicalization (where losses are looked for).
"""

from __future__ import annotations

import contextlib

import torch
from torch.overrides import TorchFunctionMode

LOSSES = {
    getattr(torch.nn.functional, name)
    for name in (
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cross_entropy",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "mse_loss",
        "nll_loss",
        "poisson_nll_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
    )
}


class Trace(TorchFunctionMode):
    """What a trace of a model has met so far."""

    current: Trace | None = None

    def __init__(self, execution_strategy):
        super().__init__()
        self.execution_strategy = execution_strategy
        self.losses, self.final, self.ipus, self.depth = [], [], [], 0

    def __enter__(self):
        Trace.current = self
        return super().__enter__()

    def __exit__(self, *args):
        Trace.current = None
        return super().__exit__(*args)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        is_loss = func in LOSSES and self.depth == 0
        self.depth += is_loss  # a loss may be computed by another one
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self.depth -= is_loss
        if is_loss:
            self.losses.append(result)
        return result

    def begin_block(self, user_id, ipu_id):
        self.ipus.append(self.execution_strategy.ipu_of(user_id, ipu_id))

    @property
    def num_stages(self):
        """Number of times that the graph goes on to another IPU."""
        changes = sum(after != before for before, after in zip(self.ipus, self.ipus[1:], strict=False))
        return changes + 1

    @property
    def num_ipus(self):
        return max(self.ipus, default=0) + 1


def isRunningOnIpu() -> bool:
    """Return whether the model is being traced for an IPU."""
    return Trace.current is not None


def identity_loss(x, reduction):
    """Mark a tensor as the final loss."""
    if reduction not in ("sum", "mean", "none", 0, 1, 2):
        raise ValueError("Unsupported reduction type.")
    if reduction in ("sum", 0):
        x = x.sum()
    elif reduction in ("mean", 1):
        x = x.mean()
    else:
        x = x * 1  # a tensor of its own
    if Trace.current is not None:
        Trace.current.final.append(x)
    return x


class Block(contextlib.AbstractContextManager):
    """Layers called in a ``with`` block run on one IPU."""

    _next_id = 0

    @staticmethod
    def useAutoId():
        """Give blocks numbers as their ids."""

    def __init__(self, user_id=None, ipu_id=None):
        self._user_id, self._ipu_id = user_id, ipu_id

    def __enter__(self):
        if Trace.current is not None:
            Trace.current.begin_block(self._user_id, self._ipu_id)
        return self

    def __exit__(self, *args):
        return None


def BeginBlock(layer_to_call, user_id=None, ipu_id=None):
    """Let a layer, and what follows it, run on one IPU; returns the same layer, whose class is changed."""
    if not isinstance(layer_to_call, torch.nn.Module):
        raise ValueError("You cannot use BeginBlock as a context manager: it takes a layer")

    class BlockModule(type(layer_to_call)):
        def __call__(self, *args, **kwargs):
            if Trace.current is not None:
                Trace.current.begin_block(user_id, ipu_id)
            return super().__call__(*args, **kwargs)

    layer_to_call.__class__ = BlockModule
    return layer_to_call

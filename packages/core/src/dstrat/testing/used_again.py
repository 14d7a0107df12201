"""Scenario of a module after its training: run without the strategy, retrained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dstrat.testing.fits import Fit, make_trainer, plain
from dstrat.testing.modules import GLOBAL_BATCH, NETS, Net, dataset
from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from dstrat.testing.place import Place
    from dstrat.testing.subject import Subject

_PATIENCE = 30.0  # seconds for a rank that is much slower than others


def use_again(place: Place, subject: Subject, work: Fit) -> tuple[str, list[float]] | None:
    """Train a module, compute its gradients by hand, and train it again.

    Args:
        place: This rank.
        subject: The strategy.
        work: A training.

    Returns:
        What was wrong with it by itself, and the losses of the second training; None where
        the module is sharded, in any rank.
    """
    net = NETS[work.net](work, subject.configure_model)
    make_trainer(place, subject, work, [_Nothing()]).fit(net)
    is_whole = plain(net).keys() == dict(net.named_parameters()).keys()
    if "sharded" in place.meet("trained", "whole" if is_whole else "sharded", seconds=_PATIENCE):
        return None
    problem = _problem_by_itself(net, NETS[work.net](work, None))
    net.losses.clear()
    make_trainer(place, subject, work, [_Nothing()]).fit(net)
    return problem, net.losses


def _problem_by_itself(net: Net, twin: Net) -> str:
    """Compare a module with one of the same values that no strategy has seen."""
    twin.load_state_dict(net.state_dict())
    try:
        found, expected = _gradients(net), _gradients(twin)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test tells of it
        return f"raises {type(error).__name__}: {error}"
    finally:
        net.zero_grad()
    differing = [name for name, gradient in expected.items() if not torch.allclose(found[name], gradient)]
    return f"computes other gradients than a module with the same values, of {differing[0]}" if differing else ""


def _gradients(net: Net) -> dict[str, torch.Tensor]:
    inputs, targets, _ = dataset(GLOBAL_BATCH).tensors
    net.zero_grad()
    torch.nn.functional.mse_loss(net(inputs), targets).backward()
    return {name: value.grad for name, value in net.named_parameters() if value.grad is not None}


class _Nothing(Callback):
    """Keeps the Trainer from validating."""

"""A strategy in a hand-written loop, in a rank of the kit's: no Trainer, and only what the interface promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dstrat.interfaces.optimizers import Optimization
from dstrat.parallel.shards import local_tensor
from dstrat.testing.ranks.fits import numbers, training_size
from dstrat.testing.ranks.jobs import build_strategy
from dstrat.testing.ranks.modules import GLOBAL_BATCH, dataset

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from dstrat.interfaces.precision import ClipAlgorithm
    from dstrat.interfaces.strategy import Strategy
    from dstrat.testing.ranks.jobs import Subject
    from dstrat.testing.ranks.team import RankContext


class Regression(torch.nn.Module):
    """A module that is no TrainModule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

    def training_step(self, batch: Any, _batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])


class Loop:
    """The attributes of ``TrainerLike``, and nothing else."""

    # Slots, so that a strategy cannot keep anything in it either.
    __slots__ = ("_events", "_module", "is_fitting")

    accumulate_grad_batches = 1
    gradient_clip_val = None
    gradient_clip_algorithm: ClipAlgorithm = "norm"

    def __init__(self, module: Callable[[], nn.Module], events: list[str], *, is_fitting: bool) -> None:
        self._module, self._events, self.is_fitting = module, events, is_fitting

    def configure_optimizers(self) -> Optimization:
        """Create an optimizer of the parameters as they are now."""
        self._events.append("configure_optimizers")
        return Optimization(optimizers=(torch.optim.AdamW(self._module().parameters(), lr=0.01),))


def life_cycle(rank_context: RankContext, subject: Subject, accelerator: str, *, is_fitting: bool) -> dict[str, Any]:
    """Run the life cycle of a strategy; return the calls in their order, and the state after each phase."""
    events: list[str] = []
    strategy = build_strategy(rank_context, subject, accelerator)
    _note_calls(strategy, events)
    module = Regression()
    strategy.connect(module)
    events.append("| setup_environment")
    strategy.setup_environment()
    events.append("| setup")
    _configure(subject, strategy)
    # The strategy's module, which it may have replaced by another one.
    strategy.setup(Loop(lambda: strategy.module, events, is_fitting=is_fitting))
    events.append("| steps")
    observed: dict[str, Any] = {"after setup": _view(strategy, module) | _offloaded(rank_context, strategy)}
    if is_fitting:
        before = _weights(strategy)
        observed["error in steps"] = _problem_of("a step", lambda: train(strategy, 3))
        observed["has trained"] = _weights(strategy) != before
    events.append("| teardown")
    strategy.teardown()
    observed["after teardown"] = _view(strategy, module)
    return {**observed, "events": events}


def ends_without_beginning(rank_context: RankContext, subject: Subject, accelerator: str) -> list[str]:
    """End a strategy before it has begun, and twice; return what raised."""
    fresh, used = build_strategy(rank_context, subject, accelerator), build_strategy(rank_context, subject, accelerator)
    fresh.connect(Regression())
    used.connect(Regression())
    used.setup_environment()
    ends: list[tuple[str, Callable[[], Any]]] = [
        ("on_exception before setup_environment", lambda: fresh.on_exception(ValueError("broke before it began"))),
        ("teardown before setup_environment", fresh.teardown),
        ("on_exception between setup_environment and setup", lambda: used.on_exception(ValueError("broke"))),
        ("teardown after on_exception", used.teardown),
        ("a second teardown", used.teardown),
    ]
    return [problem for name, end in ends if (problem := _problem_of(name, end))]


def _problem_of(name: str, end: Callable[[], Any]) -> str:
    try:
        end()
    except Exception as error:  # noqa: BLE001 - the test tells of it
        return f"{name} raised {type(error).__name__}: {error}"
    return ""


def losses_in_a_loop(rank_context: RankContext, subject: Subject, accelerator: str, steps: int) -> list[float]:
    """Train by hand; return the global loss of each step."""
    strategy = build_strategy(rank_context, subject, accelerator)
    strategy.connect(Regression())
    strategy.setup_environment()
    _configure(subject, strategy)
    strategy.setup(Loop(lambda: strategy.module, [], is_fitting=True))
    losses = train(strategy, steps)
    strategy.teardown()
    return losses


def train(strategy: Strategy, steps: int) -> list[float]:
    """Train with a strategy that is set up; return the global loss of each step."""
    sampler = strategy.distributed_sampler_kwargs
    rank, readers = sampler.get("rank", 0), sampler.get("num_replicas", 1)
    data = dataset(steps * GLOBAL_BATCH).tensors
    optimizer = strategy.optimizers[0]
    losses = []
    for step in range(steps):
        rows = slice(step * GLOBAL_BATCH + rank, (step + 1) * GLOBAL_BATCH, readers)
        batch = strategy.batch_to_device([tensor[rows] for tensor in data])
        if strategy.compiled_steps() is not None:  # the whole step is in the call
            losses.append(float(strategy.reduce(strategy.training_step(batch, step))))
            continue

        def closure(batch: Any = batch, step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = strategy.training_step(batch, step)
            strategy.backward(loss)
            strategy.accelerator.end_graph("backward")
            return loss.detach()

        loss = strategy.reduce(strategy.optimizer_step(optimizer, closure, strategy.model))
        strategy.accelerator.end_graph("optimizer_step")
        losses.append(float(loss))
    return losses


def _configure(subject: Subject, strategy: Strategy) -> None:
    """Let the author's function split the module, as ``configure_model`` of a TrainModule would."""
    if subject.configure_model is not None:
        strategy.module.device_mesh = strategy.device_mesh
        subject.configure_model(strategy.module)


def _note_calls(strategy: Strategy, events: list[str]) -> None:
    components = {
        "accelerator": (strategy.accelerator, ("setup", "teardown")),
        "precision_plugin": (strategy.precision_plugin, ("connect", "teardown")),
        "checkpoint_io": (strategy.checkpoint_io, ("teardown",)),
    }
    for component_name, (component, methods) in components.items():
        for method in methods:
            setattr(component, method, _noting(f"{component_name}.{method}", getattr(component, method), events))


def _noting(name: str, method: Callable[..., Any], events: list[str]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        events.append(name)
        return method(*args, **kwargs)

    return noted


def _view(strategy: Strategy, module: nn.Module) -> dict[str, Any]:
    """Return the observable state of a strategy."""
    module_ids = {id(parameter) for parameter in strategy.module.parameters()}
    optimized = [
        parameter
        for optimizer in strategy.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    return {
        "module is the user's": strategy.module is module or type(strategy.module) is type(module),
        "model is the module": strategy.model is strategy.module,
        "devices": sorted({str(parameter.device) for parameter in strategy.module.parameters()}),
        "root device": str(strategy.root_device),
        "optimizers": len(strategy.optimizers),
        "schedulers": len(strategy.lr_schedulers),
        "optimized elsewhere": sum(id(parameter) not in module_ids for parameter in optimized),
        "process group is open": dist.is_available() and dist.is_initialized(),
        "default dtype": str(torch.get_default_dtype()),
        "gradients are on": torch.is_grad_enabled(),
    }


def _offloaded(rank_context: RankContext, strategy: Strategy) -> dict[str, Any]:
    """Return how many bytes of parameters are on the host, and how many the strategy declares."""
    on_host, layout = [], None
    if strategy.root_device.type != "cpu":
        on_host = [local_tensor(parameter) for parameter in strategy.module.parameters() if parameter.is_cpu]
    if on_host:
        module = Regression()
        numels = [parameter.numel() for parameter in module.parameters()]
        layout = strategy.memory_layout(training_size(module, strategy, numels, rank_context.world_size))
    return {
        "bytes on the host": sum(tensor.nbytes for tensor in on_host),
        "declared bytes on the host": 0 if layout is None else layout.host,
    }


def _weights(strategy: Strategy) -> list[float]:
    return [number for value in strategy.module_state_dict().values() for number in numbers(value)]


def reference_losses(_rank_context: RankContext, steps: int) -> list[float]:
    """Return the losses of plain torch."""
    module = Regression()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    data = dataset(steps * GLOBAL_BATCH).tensors
    losses = []
    for step in range(steps):
        rows = slice(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
        loss = module.training_step([tensor[rows] for tensor in data], step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses

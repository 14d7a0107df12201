"""Metric objects of torchmetrics: logged entries that reduce themselves, and their state."""

from __future__ import annotations

import copy
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dstrat.errors import MisuseError
from dstrat.parallel.metric_states import UPDATED_BY_PEERS
from dstrat.training.metrics.values import LoggedValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.metrics.reduction import Options


def is_metric(value: Any) -> bool:
    """Return whether a value is a metric object of torchmetrics."""
    # Without importing torchmetrics: where a metric exists, it is imported already.
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


class MetricEntry(LoggedValue):
    """A logged name whose epoch value a metric object computes, with its own collectives.

    Args:
        name: The name that the user logs.
        options: The arguments of ``log``.
        in_step: Whether it is logged in steps, or around them.
        training: Whether it is logged in training.
        metric: The metric object.
        module: Has the metric as an attribute.

    Raises:
        MisuseError: The metric is not an attribute of the module, or an option is not for metric objects.
    """

    __slots__ = ("attribute", "metric")
    weighs = sync_step = False

    def __init__(
        self, name: str, options: Options, *, in_step: bool, training: bool, metric: Any, module: nn.Module
    ) -> None:
        super().__init__(name, options, in_step=in_step, training=training)
        # sync_dist has no effect, also False: it is Lightning's default, with which a metric reduces itself there too.
        if options.reduction(name) != "mean" or options.sync_dist_group or options.rank_zero_only:
            raise MisuseError(
                f"log({name!r}) got a {type(metric).__name__}, which reduces itself: leave out reduce_fx, "
                "sync_dist_group and rank_zero_only; the metric itself has sync_on_compute and process_group"
            )
        self.metric = metric
        self.attribute = _attribute_of(name, metric, module, options.metric_attribute)

    def take(self, value: Any, weight: float | None) -> None:  # noqa: ARG002 - metrics weigh by themselves
        """Record the value of a batch, which the metric has computed already."""
        if value is not self.metric:
            raise MisuseError(f"log({self.name!r}) got another metric object than before: give each a name of its own")
        self.is_fresh = self.was_logged = True
        self.is_superseded = False
        if self.on_step:
            # The result of the metric's last call, as in Lightning; torchmetrics (1.x) has no public name for it.
            self.latest = self._checked(value._forward_cache, "returned")  # noqa: SLF001

    @property
    def resolved(self) -> Options:
        return super().resolved._replace(metric_attribute=self.attribute, sync_dist=None)

    def compute(self) -> Tensor | float:
        """Return the epoch value over all ranks; collective."""
        # Outside of inference mode, in which an evaluation may call this: training must be able to change the state.
        with torch.inference_mode(mode=False), torch.no_grad(), warnings.catch_warnings():
            if not self.metric.update_called:  # this rank had no data, which is not worth torchmetrics' warning
                warnings.simplefilter("ignore")
            return self._checked(self.metric.compute(), "computed")

    def reset(self) -> None:
        """Reset the metric."""
        with torch.inference_mode(mode=False), torch.no_grad():
            self.metric.reset()

    def state_dict(self) -> dict[str, Any]:
        metric = self.metric
        return {**super().state_dict(), "metric": _state_of(metric), "update_count": metric.update_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        _restore_state(self.metric, state)

    def _checked(self, value: Any, verb: str) -> Tensor | float:
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.item() if value.is_cpu else value.detach().reshape(())
        if isinstance(value, int | float):
            return value
        kind = type(self.metric).__name__
        if value is None:
            raise MisuseError(
                f"log({self.name!r}, on_step=True) needs the value of the step, and the {kind} was only updated: call "
                f"self.{self.attribute}(...) rather than its update, or log with on_step=False"
            )
        description = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        )
        raise MisuseError(
            f"log({self.name!r}): the {kind} {verb} {description}, and one number can be logged: log its parts "
            "with log_dict"
        )


def _attribute_of(name: str, metric: Any, module: nn.Module, attribute: str | None) -> str:
    paths: list[str] = [path for path, submodule in module.named_modules(remove_duplicate=False) if submodule is metric]
    if attribute is not None:  # a nested module names it relative to itself
        matches = [path for path in paths if path == attribute or path.endswith(f".{attribute}")]
        if not matches:
            raise MisuseError(
                f"log({name!r}, metric_attribute={attribute!r}): {type(module).__name__} has no such attribute, or it "
                "is another metric: pass the metric's own attribute, or leave metric_attribute out"
            )
        return matches[0]
    if paths:
        return paths[0]
    raise MisuseError(
        f"log({name!r}) got a {type(metric).__name__} that is no attribute of {type(module).__name__}, so that it "
        f"would stay on its device: set it in __init__, as self.{name.replace('/', '_')} = ..."
    )


# State of metric objects


def metric_states(module: nn.Module, logged: Iterable[MetricEntry]) -> dict[str, dict[str, Any]]:
    """Return the states of a module's metric objects, by their paths, without those that are saved as logged."""
    saved = {id(entry.metric) for entry in logged}
    if torchmetrics := sys.modules.get("torchmetrics"):
        for submodule in module.modules():
            if isinstance(submodule, torchmetrics.MetricCollection):
                # Metrics of a collection that compute from one state get it only when the collection is read.
                submodule.items(copy_state=False)
    return {
        path: {"metric": _state_of(submodule) if submodule.update_count else {}, "update_count": submodule.update_count}
        for path, submodule in module.named_modules()
        if is_metric(submodule) and id(submodule) not in saved and _has_tensors_only(submodule)
    }


def load_metric_states(module: nn.Module, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore the result of :func:`metric_states`; metric objects that the module lacks now are left out."""
    metrics = {path: submodule for path, submodule in module.named_modules() if is_metric(submodule)}
    for path in metrics.keys() & states.keys():
        if states[path]["update_count"]:
            _restore_state(metrics[path], states[path])
        else:
            metrics[path].reset()


def _has_tensors_only(metric: Any) -> bool:
    """Return whether a checkpoint can have the state; a metric may append anything to a list."""
    values = metric.metric_state.values()
    return all(isinstance(one, Tensor) for value in values for one in (value if isinstance(value, list) else [value]))


def _state_of(metric: Any) -> dict[str, Any]:
    # Copied: updates change tensors in place, and append to lists, which reset clears in place.
    return {
        name: list(value) if isinstance(value, list) else value.clone() for name, value in metric.metric_state.items()
    }


def _restore_state(metric: Any, state: Mapping[str, Any]) -> None:
    device = metric.device
    moved = {
        name: [tensor.to(device) for tensor in value] if isinstance(value, list) else value.to(device)
        for name, value in state["metric"].items()
    }
    _set_state(metric, moved, state["update_count"])


@contextmanager
def unchanged_metrics(module: nn.Module) -> Iterator[None]:
    """Undo the updates of a module's metric objects at the end of a ``with`` block."""
    metrics: list[Any] = [submodule for submodule in module.modules() if is_metric(submodule)]
    # Copied deeply, as an update adds to the tensors in place.
    states = [(copy.deepcopy(metric.metric_state), metric.update_count) for metric in metrics]
    try:
        yield
    finally:
        for metric, (state, update_count) in zip(metrics, states, strict=True):
            _set_state(metric, state, update_count)


def share_updates(module: nn.Module, strategy: Strategy) -> None:
    """Mark the metric objects that other ranks have updated as updated on this rank too; collective.

    torchmetrics warns of a computation before an update, and hooks may compute only what was updated: all ranks must
    do the same.  Cached results are dropped for the same reason: a rank may have computed one in a step, with the state
    of a padding step of another.
    """
    metrics: list[Any] = [submodule for submodule in module.modules() if is_metric(submodule)]
    if not metrics:
        return
    updated = torch.tensor([int(m.update_called) for m in metrics], device=strategy.root_device)
    for metric, is_updated in zip(metrics, strategy.reduce(updated, reduce_op="max").tolist(), strict=True):
        _set_state(metric, {}, metric.update_count or (UPDATED_BY_PEERS if is_updated else 0))


def _set_state(metric: Any, state: Mapping[str, Any], update_count: int) -> None:
    for name, value in state.items():
        setattr(metric, name, value)
    # torchmetrics (1.x) has public getters only.  The cached result of compute is of the state before.
    metric._update_count, metric._computed = update_count, None  # noqa: SLF001

"""A logged name whose value is a metric object of torchmetrics, which reduces itself."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dstrat.errors import MisuseError
from dstrat.training.metrics.entry import Entry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.training.metrics.options import Options


def is_metric(value: Any) -> bool:
    """Return whether a value is a metric object; torchmetrics is loaded where one exists, and only there."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


class MetricEntry(Entry):
    """A name whose value over the epoch a metric object computes, over all processes by its own means.

    Args:
        name: As the user logs it.
        options: As they were given.
        in_step: Whether it is logged in steps, or around them.
        training: Whether it is logged while training.
        metric: The object.
        module: Has it as an attribute.

    Raises:
        MisuseError: The module does not, or the options are not for metric objects.
    """

    __slots__ = ("attribute", "metric")
    weighs = sync_step = False

    def __init__(
        self, name: str, options: Options, *, in_step: bool, training: bool, metric: Any, module: nn.Module
    ) -> None:
        super().__init__(name, options, in_step=in_step, training=training)
        if (
            options.reduction(name) != "mean"
            or options.sync_dist is False
            or options.sync_dist_group
            or options.rank_zero_only
        ):
            raise MisuseError(
                f"log({name!r}) got a {type(metric).__name__}, which reduces itself: leave out reduce_fx, sync_dist, "
                "sync_dist_group and rank_zero_only; the metric itself has sync_on_compute and process_group"
            )
        self.metric = metric
        self.attribute = _attribute_of(name, metric, module, options.metric_attribute)

    def take(self, value: Any, weight: float) -> None:  # noqa: ARG002 - metrics weigh by themselves
        """Take the value of a batch, which the metric has computed already."""
        if value is not self.metric:
            raise MisuseError(f"log({self.name!r}) got another metric object than before: give each a name of its own")
        self.is_fresh = self.was_logged = True
        if self.on_step:
            self.latest = self._checked(value._forward_cache, "returned")  # noqa: SLF001 - it has no public name

    @property
    def resolved(self) -> Options:
        return super().resolved._replace(metric_attribute=self.attribute, sync_dist=None)

    def compute(self) -> Tensor | float:
        """Return the value over the epoch and all processes; collective."""
        # Evaluation may have updated it in inference mode; training must be able to change what it holds.
        with torch.inference_mode(mode=False), torch.no_grad(), warnings.catch_warnings():
            if not self.metric.update_called:  # this process had no data
                warnings.simplefilter("ignore")
            return self._checked(self.metric.compute(), "computed")

    def reset(self) -> None:
        """Let the metric forget the epoch."""
        with torch.inference_mode(mode=False), torch.no_grad():
            self.metric.reset()

    def state_dict(self) -> dict[str, Any]:
        metric = self.metric
        count = metric._update_count  # noqa: SLF001 - torchmetrics has no public name for it
        state = {name: list(value) if isinstance(value, list) else value for name, value in metric.metric_state.items()}
        return {**super().state_dict(), "metric": state, "update_count": count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        metric = self.metric
        for name, value in state["metric"].items():
            setattr(metric, name, _moved(value, metric.device))
        metric._update_count, metric._computed = state["update_count"], None  # noqa: SLF001 - nor another way to set it

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
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise MisuseError(
            f"log({self.name!r}): the {kind} {verb} {what}, and one number can be logged: log its parts with log_dict"
        )


def _moved(value: Any, device: torch.device) -> Any:
    """Return a state of a metric on a device: a tensor, or a list of tensors."""
    return [part.to(device) for part in value] if isinstance(value, list) else value.to(device)


def _attribute_of(name: str, metric: Any, module: nn.Module, given: str | None) -> str:
    paths: list[str] = [path for path, part in module.named_modules(remove_duplicate=False) if part is metric]
    if given is not None:  # by a nested module relative to itself
        chosen = [path for path in paths if path == given or path.endswith(f".{given}")]
        if not chosen:
            raise MisuseError(f"log({name!r}): {type(module).__name__} has another or no metric as {given!r}")
        return chosen[0]
    if paths:
        return paths[0]
    raise MisuseError(
        f"log({name!r}) got a {type(metric).__name__} that is no attribute of {type(module).__name__}, so that it "
        f"would stay on its device: set it in __init__, as self.{name.replace('/', '_')} = ..."
    )

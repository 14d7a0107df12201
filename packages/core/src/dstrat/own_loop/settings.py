"""Settings of a hand-written loop that a strategy reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.errors import MisuseError, RequestError
from dstrat.interfaces.optimization import Optimization, read_optimizers
from dstrat.parallel.separate_modules import SeparateModules

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat.interfaces.precision import ClipAlgorithm
    from dstrat.interfaces.strategy import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a module is optimized, as strategies want to know it before they set it up.

    Attributes:
        strategy: Has the module, on its device and wrapped, when optimizers are made.
        make_optimizers: Returns an optimizer, or whatever ``configure_optimizers`` may return, for a module; None
            where the module is only evaluated.
        accumulate_grad_batches: Batches whose gradients make up one optimizer step.
        gradient_clip_val: Largest norm or value of gradients; None does not clip.
        gradient_clip_algorithm: How gradients are clipped.
    """

    strategy: Strategy
    make_optimizers: Callable[..., Any] | None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: ClipAlgorithm = "norm"

    def __post_init__(self) -> None:
        if self.make_optimizers is not None and not callable(self.make_optimizers):
            raise MisuseError(
                f"setup was given a {type(self.make_optimizers).__name__} where it takes a function: optimizers are "
                "made after the module has been sharded, so pass lambda module: torch.optim.AdamW(module.parameters())"
            )
        if self.accumulate_grad_batches < 1:
            raise RequestError(f"accumulate_grad_batches={self.accumulate_grad_batches!r} must be at least 1")
        if self.gradient_clip_algorithm not in ("norm", "value"):
            raise RequestError(f"gradient_clip_algorithm={self.gradient_clip_algorithm!r} is not 'norm' or 'value'")

    @property
    def is_fitting(self) -> bool:
        """Whether the module is going to be trained."""
        return self.make_optimizers is not None

    def configure_optimizers(self) -> Optimization:
        """Create the optimizers of the module as it is now, and their schedulers."""
        assert self.make_optimizers is not None  # noqa: S101 - a strategy asks only where is_fitting is True
        module = self.strategy.module
        modules = module.children() if isinstance(module, SeparateModules) else (module,)
        return read_optimizers(self.make_optimizers(*modules), steps_schedulers=False)

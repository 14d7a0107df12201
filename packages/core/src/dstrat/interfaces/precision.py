"""Interface of precisions: dtypes, conversion, loss scaling, and the optimizer's step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dstrat.interfaces.retired_members import RetiredMembers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

ClipAlgorithm = Literal["norm", "value"]
"""How gradients are clipped: by the norm of all of them together, or each value by itself."""


class Precision(RetiredMembers, ABC):
    """Which dtypes a training uses, and what follows from them.

    Only the flag and the three dtypes must be defined.  No method communicates.  Each process calls, in this order:
    :meth:`tensor_init_context` around ``configure_model``; :meth:`connect`, before the module is moved and wrapped; for
    each batch :meth:`convert_input`, :meth:`forward_context` and :meth:`backward`; for each optimizer step, after the
    backward pass, :meth:`unscale_gradients` and :meth:`clip_gradients`; :meth:`teardown`.  The smallest complete
    subclass::

        class MyPrecision(Precision):
            flag = "32-true"
            param_dtype = compute_dtype = reduce_dtype = property(lambda self: torch.float32)
    """

    retired_members: ClassVar[Mapping[str, str]] = {
        "precision": "it is flag",
        "convert_module": "it is connect",
        "convert_output": "convert it in the step",
        "module_init_context": "it is tensor_init_context",
        **{f"{stage}_step_context": "it is forward_context" for stage in ("train", "val", "test", "predict")},
        "pre_backward": "override backward, or scale_loss",
        "post_backward": "override backward, or unscale_gradients",
        "clip_grad_by_norm": "override clip_gradients",
        "clip_grad_by_value": "override clip_gradients",
        "main_params": "the parameters of an optimizer are in its param_groups",
        "on_save_checkpoint": "override state_dict",
        "on_load_checkpoint": "override load_state_dict",
    }

    flag: str
    """The name that a user writes, such as ``"bf16-mixed"``."""

    hint_unsupported: str = ""
    """Further advice where the hardware lacks one of :attr:`dtypes`, the end of a sentence without a full stop."""

    reduce_overflow: Callable[[Tensor], object] | None = None
    """Takes the maximum over all processes, in place, of a tensor that is 1 where a gradient is not finite; collective.

    A strategy sets it in its setup, if processes have gradients of different parameters or shards: all have to skip the
    same steps.
    """

    peers_have_gradients: bool = False
    """Whether other processes may have gradients where this one has none, such as other stages of a pipeline.

    A strategy sets it with :attr:`reduce_overflow`, which this process then calls for them.
    """

    @property
    @abstractmethod
    def param_dtype(self) -> torch.dtype:
        """Dtype in which parameters are kept and optimized."""

    @property
    @abstractmethod
    def compute_dtype(self) -> torch.dtype:
        """Dtype in which matrix products and convolutions are computed."""

    @property
    @abstractmethod
    def reduce_dtype(self) -> torch.dtype:
        """Dtype in which gradients are summed across ranks."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """All dtypes in which the hardware must compute."""
        return (self.param_dtype, self.compute_dtype, self.reduce_dtype)

    def connect(self, module: Module) -> Module:
        """Convert the module in place, where this precision asks for it; return the module to train."""
        return module

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new floating-point tensors have :attr:`param_dtype`."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of every training, validation, test and prediction step.

        A ``contextlib.nullcontext`` means that no step needs one; whether that is so must not change during a run.
        """
        return nullcontext()

    def convert_input(self, batch: Any) -> Any:
        """Convert the floating-point tensors of a batch to the dtype that the module computes in."""
        return batch

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss (a scalar tensor) that gradients are computed of: larger where this precision scales it."""
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients of a loss (a scalar tensor), scaled where this precision scales them."""
        self.scale_loss(loss).backward(*args, **kwargs)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Undo the loss scale in the gradients of an optimizer, before hooks and clipping read them.

        It may be called several times before an optimizer step, and acts once.
        """

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, which computes the gradients, and the optimizer's step.

        Args:
            optimizer: The optimizer to step.
            closure: Computes loss and gradients and returns the loss.
            **kwargs: Passed to the optimizer's ``step``.

        Returns:
            The result of the closure.
        """
        if not _computes_once(optimizer):
            return optimizer.step(closure=closure, **kwargs)
        loss = closure()  # before step, not within it, where torch would switch gradients off and on again
        optimizer.step(**kwargs)
        return loss

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: ClipAlgorithm = "norm") -> None:
        """Clip the (unscaled) gradients of an optimizer's parameters in place.

        Args:
            optimizer: The optimizer.
            clip_val: The largest norm, or the largest absolute value.
            algorithm: Which of the two.
        """
        from torch.nn.utils import clip_grad_norm_, clip_grad_value_

        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if algorithm == "value":
            clip_grad_value_(parameters, clip_val)
        else:
            clip_grad_norm_(parameters, clip_val)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, such as the loss scale: plain values, the same in every process."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned."""

    def teardown(self) -> None:
        """Undo all changes that this precision made outside of the module, also after an error."""


def _computes_once(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is known to compute the loss once in a step, at its beginning."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ != "LBFGS"

"""Computing gradients in the module's own way within DeepSpeed's ``engine.backward``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ReplacedBackward(TorchFunctionMode):
    """A context in which another function takes the place of a tensor's ``backward``.

    DeepSpeed's engine scales the loss, calls its ``backward``, and does more before and after that, so that the call
    cannot be made elsewhere.

    Args:
        compute: Called with the tensor; what it calls itself is not replaced.
    """

    def __init__(self, compute: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._compute = compute

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is Tensor.backward:
            return self._compute(args[0])
        return function(*args, **(kwargs or {}))

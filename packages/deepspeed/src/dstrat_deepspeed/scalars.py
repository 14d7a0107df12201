"""Parameters without a dimension, such as CLIP's ``logit_scale``, which DeepSpeed cannot send to other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ScalarsAsBytes(TorchFunctionMode):
    """A context in which a tensor without a dimension can be viewed as bytes, as others can."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is Tensor.view and args[1:] == (torch.uint8,) and args[0].dim() == 0:
            return args[0].view(1).view(torch.uint8)
        return function(*args, **(kwargs or {}))

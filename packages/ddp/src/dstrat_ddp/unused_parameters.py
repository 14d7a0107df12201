"""Saying which parameters got no gradient, where DistributedDataParallel gives up on them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

_TORCH_SAYS = "Expected to have finished reduction"
_INDICES = re.compile(r"did not receive grad for rank \d+: ((?:\d+ ?)+)")
_MOST_NAMES = 10


class ExplainedUnusedParameters:
    """A context that turns torch's error about an unfinished reduction into one that names parameters and a way out.

    Args:
        model: Whose reduction may be unfinished; it has just been made.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        # Now, as torch numbers them: later some may be frozen for a while, as toggle_optimizer does.
        self._reduced = [
            name.removeprefix("module.")
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        ]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError) and _TORCH_SAYS in str(error) and not self._model.find_unused_parameters:
            raise MisuseError(_explanation(self._reduced, str(error))) from error


def _explanation(reduced: list[str], message: str) -> str:
    names = _unused_names(reduced, message)
    shown = ", ".join(names[:_MOST_NAMES]) or "some parameters"
    more = " and others" if len(names) > _MOST_NAMES else ""
    return (
        f"the loss does not depend on {shown}{more}, and ddp waits for a gradient of every trainable parameter. "
        'Where that is meant, choose strategy="ddp_find_unused_parameters_true" or '
        "DDPStrategy(find_unused_parameters=True); otherwise use them in the loss, or freeze them before training"
    )


def _unused_names(reduced: list[str], message: str) -> list[str]:
    found = _INDICES.search(message)
    if found is None:
        return []
    return [reduced[index] for index in map(int, found[1].split()) if index < len(reduced)]

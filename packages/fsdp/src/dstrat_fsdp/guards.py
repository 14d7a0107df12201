"""Telling, rather than losing, what a module does to parameters that are sharded."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from dstrat.errors import MisuseError
from dstrat.interfaces.batch import apply_to_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle

_logger = logging.getLogger(__name__)


def refuse_copy(memo: Any) -> Any:  # noqa: ARG001 - Python's signature
    """Raise an error for a ``deepcopy`` of a module that is sharded."""
    raise MisuseError(
        "a module cannot be copied while it is sharded: for an average of its weights (EMA) take EMAWeightAveraging of "
        "dstrat.callbacks, or in a loop of yours keep [p.detach().clone() for p in module.parameters()], which are the "
        "shards of this rank; for other copies, copy it before it is set up"
    )


class OwnOutputs:
    """Copies what a block returns where it is a view of another tensor.

    torch gathers a block for its backward pass by a hook on what it returned, and an in-place operation on a view
    loses that hook.

    Args:
        block: Not sharded yet.
        name: Its name in the user's module, for the log.
    """

    def __init__(self, block: Module, name: str) -> None:
        self._name = name
        self._has_told = False
        self._handle = block.register_forward_hook(self._after_forward)

    def remove(self) -> None:
        """Leave the block alone again."""
        self._handle.remove()

    def _after_forward(self, block: Module, args: Any, output: Any) -> Any:  # noqa: ARG002 - torch's signature
        return apply_to_tensors(output, self._owned) if torch.is_grad_enabled() else output

    def _owned(self, tensor: Tensor) -> Tensor:
        if tensor._base is None or not tensor.requires_grad:  # noqa: SLF001 - torch has no public name for it
            return tensor
        if not self._has_told:
            self._has_told = True
            _logger.info(
                "block %r returns a view, which is copied in each step; a tensor of its own saves that", self._name
            )
        return tensor.clone()


class ParameterGuard:
    """Notices what would be lost: a parameter replaced by another, or changed while it is gathered.

    Args:
        module: The user's module, sharded; nothing of it is gathered.
        kept: What torch keeps of its parameters.
    """

    def __init__(self, module: Module, kept: Iterable[Any]) -> None:
        self._module, self._kept = module, list(kept)
        self._versions: list[int | None] = [None] * len(self._kept)
        self._sharded = [
            (layer, name, parameter)
            for layer in module.modules()
            for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False)
        ]
        self._places = [(layer._parameters, name, parameter) for layer, name, parameter in self._sharded]  # noqa: SLF001 - read in each step

    def check_not_replaced(self) -> None:
        """Look at every parameter; nothing is gathered at this moment.

        Raises:
            MisuseError: One of them is another one.
        """
        for index, (store, name, parameter) in enumerate(self._places):
            if store.get(name) is not parameter:
                raise MisuseError(
                    f"parameter {self._name(index)!r} was replaced after the module was sharded, and the one that it "
                    "had then is what is trained: change its values in place, or replace it in configure_model"
                )

    def check_not_changed(self) -> None:
        """Compare how often each parameter has been changed in place while it was gathered with the last time.

        Torch's gathering does not count as a change, nor does one of ``parameter.data``.

        Raises:
            MisuseError: One of them was changed in between.
        """
        versions = [getattr(getattr(kept, "_unsharded_param", None), "_version", None) for kept in self._kept]
        before, self._versions = self._versions, versions
        for kept, old, new in zip(self._kept, before, versions, strict=True):
            if old not in (None, new):
                index = next(i for i, (_, _, one) in enumerate(self._sharded) if one is kept.sharded_param)
                raise self._lost(index, "in the step before")

    def gathered(self, unit: Module) -> dict[int, Tensor]:
        """Return a sum of each parameter of a unit that is gathered at this moment, by its place."""
        layers = {id(layer) for layer in unit.modules()}
        sums = {}
        for index, (layer, name, parameter) in enumerate(self._sharded):
            current = getattr(layer, name) if id(layer) in layers else parameter
            if current is not parameter:
                local = current.to_local() if isinstance(current, DTensor) else current
                sums[index] = local.detach().sum().nan_to_num()
        return sums

    def check_unchanged(self, before: dict[int, Tensor], after: dict[int, Tensor]) -> None:
        """Compare what :meth:`gathered` returned before and after a forward pass.

        Raises:
            MisuseError: A sum has changed.
        """
        for index, value in before.items():
            if index in after and not torch.equal(value, after[index]):
                raise self._lost(index, "in a forward pass")

    def _lost(self, index: int, when: str) -> MisuseError:
        return MisuseError(
            f"parameter {self._name(index)!r} was changed {when}, while it was gathered: freeing it loses the change; "
            "change it where it is sharded, such as in on_train_batch_end"
        )

    def _name(self, index: int) -> str:
        layer, name, _ = self._sharded[index]
        prefix = next((key for key, part in self._module.named_modules() if part is layer), "")
        return f"{prefix}.{name}".lstrip(".")


class ChangesInForward:
    """Watches units until a first step is over, for changes of parameters that are gathered.

    Args:
        guard: Knows the parameters.
        units: What is gathered together.
    """

    def __init__(self, guard: ParameterGuard, units: Sequence[Module]) -> None:
        self._guard = guard
        self._before: dict[int, dict[int, Tensor]] = {}
        self._handles: list[RemovableHandle] = []
        for unit in units:
            self._handles.append(unit.register_forward_pre_hook(self._remember))
            self._handles.append(unit.register_forward_hook(self._compare, prepend=True))  # before they are freed

    def end(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._before = [], {}

    def _remember(self, unit: Module, args: Any) -> None:  # noqa: ARG002 - torch's signature
        self._before[id(unit)] = self._guard.gathered(unit)

    def _compare(self, unit: Module, args: Any, output: Any) -> None:  # noqa: ARG002 - torch's signature
        self._guard.check_unchanged(self._before.pop(id(unit), {}), self._guard.gathered(unit))

"""A traced graph: the operations of one run, to be repeated with other inputs.

The vendor's tracer runs the model's Python once (graphcore/poptorch, python/_poplar_executor.py,
``_compileWithDispatch``), so that neither its side effects nor its branches are run again.
"""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import Error

_DATA_DEPENDENT = ("aten._local_scalar_dense", "aten.equal.", "aten.nonzero", "aten.masked_select", "aten.unique")


class _Slot:
    """The place of a tensor in a run."""

    def __init__(self, index):
        self.index = index


class Tape(TorchDispatchMode):
    """Records every operation in a ``with`` block.

    Args:
        inputs: Tensors that other runs are given others for.
    """

    def __init__(self, inputs):
        super().__init__()
        self._operations, self._num_inputs = [], len(inputs)
        self._slots, self._kept = {}, []
        self._constants, self._on_host = {}, set()
        for tensor in inputs:
            self._keep(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith(_DATA_DEPENDENT):
            raise Error(
                f"{name} needs a value or a shape that is known on the device only: graphs are static, so that item(), "
                "branches on values and shapes that depend on them cannot be traced"
            )
        arguments = pytree.tree_map(self._slot_of, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        outputs = [self._keep(one) for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
        self._operations.append((func, arguments, outputs))
        used = [one.index for one in pytree.tree_leaves(arguments) if isinstance(one, _Slot)]
        if used and self._on_host.issuperset(used) and not name.startswith("aten.lift_fresh"):
            self._on_host.update(outputs)
        return result

    def _keep(self, tensor):
        index = len(self._kept)
        self._kept.append(tensor)  # which keeps its memory, so that no other tensor gets the same keys
        self._slots[id(tensor)] = self._slots[_memory_of(tensor)] = index
        return index

    def _slot_of(self, value):
        if not isinstance(value, torch.Tensor):
            return value
        index = self._slots.get(id(value), self._slots.get(_memory_of(value)))  # autograd unpacks copies of outputs
        if index is None:
            index = self._keep(value)
            self._constants[index] = value
            self._on_host.add(index)
        return _Slot(index)

    def is_on_host(self, tensor):
        """Return whether a tensor follows from others alone that the model had before it was traced."""
        return self._slot_of(tensor).index in self._on_host

    def finish(self, outputs):
        """Forget the tensors of the recorded run; return a function of inputs, which returns outputs like these."""
        wanted = [None if one is None else self._slot_of(one).index for one in outputs]
        operations, constants, size = self._operations, self._constants, len(self._kept)
        self._slots, self._kept = {}, []

        def run(inputs):
            tensors = [*inputs, *[None] * (size - len(inputs))]
            for index, value in constants.items():
                tensors[index] = value

            def fill(one):  # a third of the time of pytree's functions: arguments of operations are lists at most
                if isinstance(one, _Slot):
                    return tensors[one.index]
                return type(one)(map(fill, one)) if type(one) in {list, tuple} else one

            for func, (args, kwargs), targets in operations:
                result = func(*map(fill, args), **{name: fill(value) for name, value in kwargs.items()})
                values = [result] if isinstance(result, torch.Tensor) else pytree.tree_leaves(result)
                results = [one for one in values if isinstance(one, torch.Tensor)]
                for index, value in zip(targets, results, strict=True):
                    tensors[index] = value
            return [None if index is None else tensors[index] for index in wanted]

        return run


def _memory_of(tensor):
    """Return what tells the memory of a tensor from that of others that live at the same time."""
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)

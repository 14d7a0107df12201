"""Replay of equal layers in a fake step: a few of them run, and the others repeat what these have counted."""

from __future__ import annotations

import types
import weakref
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from dstrat.interfaces.batch import apply_to_tensors, tensors_in
from dstrat.interfaces.memory import Work
from dstrat.parallel.activation_memory import LayerLabel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from dstrat.cli.estimate.fake_step import RecordedLayers
    from dstrat.cli.estimate.live_memory import LiveMemory
    from dstrat.cli.estimate.work import CountedWork

T = TypeVar("T")

_REAL = 3
"""Number of layers that run at each end of a run of equal ones: of the first and the last one the neighbours differ,
and two others show whether all count the same."""
_FEWEST = 2 * _REAL + 2
_PLAIN = (bool, int, float, str, type(None), torch.dtype, types.BuiltinFunctionType, types.CodeType, type)
_DEPTH = 3  # of objects in the attributes of a layer, such as configurations
_OF_MODULES = vars(nn.Module()).keys() - {"training"}


class NotEqualLayers(Exception):  # noqa: N818 - not an error: the step runs again with all layers
    """Layers that look equal do not count the same, or are not called one after the other."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """The forward or backward pass of a layer.

    Attributes:
        entries: Its entries of the timeline, less memory at its beginning.
        work: Its work.
        tensor: Shape, strides and dtype of its result: the output, or the gradient of the input.
    """

    entries: tuple[tuple[int, int], ...]
    work: Work
    tensor: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """What a call of a layer was like.

    Attributes:
        inputs: Shapes, strides, dtypes and requirements of gradients of its tensors, and the names of its arguments.
        output: Its output, with :class:`Tensor` for the tensor.
        saved: Bytes that it leaves in memory, without the output.
        saved_on_host: Bytes that it leaves on the host.
    """

    inputs: tuple[Any, ...]
    output: Any
    saved: int
    saved_on_host: int


@dataclass(slots=True)
class _ReplayedTensors:
    """Tensors that a replayed layer holds until its backward pass."""

    of_layer: list[Tensor] = field(default_factory=list)
    input: Tensor | None = None
    output: Tensor | None = None


class ReplayedLayers:
    """The layers of a module that repeat what equal ones have counted.

    A step on fake tensors takes a millisecond for each operation of Python, and a large model has a hundred equal
    layers.  Memory, work and the timeline are those of a step in which all of them run.

    Args:
        module: The module, before anything is registered on its layers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._runs = [_Run(layers, counters) for layers, counters in _equal_layers(module)]

    def start(self, memory: LiveMemory, work: CountedWork) -> None:
        """Replace the layers' forward in this step.

        Args:
            memory: Counter of the memory.
            work: Counter of the work.
        """
        for run in self._runs:
            run.start(memory, work)

    @property
    def skipped_parameters(self) -> frozenset[int]:
        """Identities of the parameters of layers that do not run, and get no gradients."""
        return frozenset(id(one) for run in self._runs for layer in run.skipped for one in layer.parameters())

    def complete(self, recorded: RecordedLayers) -> None:
        """Check that all layers which ran have counted the same, and record the layers within the others.

        Raises:
            NotEqualLayers: They have not.
        """
        for run in self._runs:
            run.complete(recorded)


class _Run:
    """Equal layers that are called one after the other.

    Args:
        layers: The layers, by name.
        counters: Module inside the layer and name of attributes that are the number of the layer.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]], counters: Iterable[tuple[str, str]]) -> None:
        self._names, self._layers = zip(*layers, strict=True)
        self._counters = tuple(counters)
        self._reads_counters = False
        self._calls: dict[int, _LayerCall] = {}
        self._forward: dict[int, _Pass] = {}
        self._backward: dict[int, _Pass] = {}
        self._trained: dict[int, tuple[bool, ...]] = {}
        self._saved: dict[int, _ReplayedTensors] = {}
        self._inputs: dict[int, Any] = {}  # weak references to storages
        self._outputs: dict[int, Any] = {}
        self._undo: list[Callable[[], Any]] = []
        self._next = 0
        self._keeps_input = self._keeps_output = False

    @property
    def skipped(self) -> Sequence[nn.Module]:
        """The layers that repeat what others have counted."""
        return self._layers[_REAL : len(self._layers) - _REAL]

    @property
    def _last_template(self) -> int:
        return len(self._layers) - 2

    def start(self, memory: LiveMemory, work: CountedWork) -> None:
        self._memory, self._work = memory, work
        for index, layer in enumerate(self._layers):
            if not _REAL <= index < len(self._layers) - _REAL:
                self._watch_counters(layer)
            if index == 0:
                self._undo += [layer.register_forward_pre_hook(self._begin).remove]
                self._undo += [layer.register_forward_hook(self._end).remove]
            elif _REAL <= index < len(self._layers) - _REAL:
                self._undo += [partial(_restore_forward, layer, vars(layer).get("forward"))]
                layer.forward = partial(self._replay, index)
            else:
                watch = _Watch(self, index)
                self._undo += [layer.register_forward_pre_hook(watch.begin_forward, with_kwargs=True).remove]
                self._undo += [layer.register_forward_hook(watch.end_forward, with_kwargs=True).remove]

    # The layers that run

    def _watch_counters(self, layer: nn.Module) -> None:
        """Note whether a layer reads its number: for that of a layer which does not run it may do something else."""
        attributes: dict[str, list[str]] = {}
        for name, attribute in self._counters:
            attributes.setdefault(name, []).append(attribute)
        for name, counters in attributes.items():
            inner = layer.get_submodule(name)
            kind = type(inner)
            self._undo.append(partial(_set_class, inner, kind))
            properties = {attribute: property(partial(self._read_counter, attribute)) for attribute in counters}
            _set_class(inner, type(kind.__name__, (kind,), properties))

    def _read_counter(self, attribute: str, inner: nn.Module) -> Any:
        self._reads_counters = True
        return vars(inner)[attribute]

    def _begin(self, _layer: nn.Module, _args: Any) -> None:
        self._require(self._next == 0)  # which is called once
        self._next = 1

    def _end(self, _layer: nn.Module, _args: Any, returned: Any) -> None:
        tensors = [tensor for tensor in tensors_in(returned) if tensor.requires_grad]
        self._require(len(tensors) == 1)
        self._outputs[0] = weakref.ref(tensors[0].untyped_storage())

    def begin_forward(self, index: int, trained: Tensor) -> None:
        self._require(index == self._next)
        self._next += 1
        self._inputs[index] = weakref.ref(trained.untyped_storage())

    def end_forward(self, index: int, call: _LayerCall, counted: _Pass, output: Tensor) -> None:
        self._calls[index], self._forward[index] = call, counted
        self._outputs[index] = weakref.ref(output.untyped_storage())
        if index == _REAL - 1:
            # The caller has dropped these, unless some layer has saved them.
            self._keeps_input = self._inputs[index - 1]() is not None
            self._keeps_output = self._outputs[index - 2]() is not None

    def begin_backward(self, index: int) -> None:
        if index == self._last_template - 1 and self._outputs[index]() is None:
            # The layer after it had saved its output, as an input.
            for saved in self._saved.values():
                saved.output = None

    def end_backward(self, index: int, counted: _Pass) -> None:
        self._backward[index] = counted
        self._trained[index] = tuple(parameter.grad is not None for parameter in self._layers[index].parameters())

    def _require(self, condition: bool) -> None:
        if not condition:
            raise NotEqualLayers

    # The others

    def _replay(self, index: int, *args: Any, **kwargs: Any) -> Any:
        call = _equal(self._calls, _REAL - 2, _REAL - 1)
        self._require(_described(args, kwargs) == call.inputs)
        (trained,) = (tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad)
        self.begin_forward(index, trained)
        before = self._memory.live, self._memory.live_gradients
        with self._memory.unwatched(), self._work.uncounted():
            output = _Replay.apply(trained, self, index)  # type: ignore[no-untyped-call]  # of torch
        self._repeat(self._forward[_REAL - 1], before)
        return output if call.output is Tensor else tuple(output if one is Tensor else one for one in call.output)

    def make_output(self, index: int, received: Tensor) -> Tensor:
        """Return the output of a layer, and allocate what it saves."""
        call = self._calls[_REAL - 1]
        self._saved[index] = saved = _ReplayedTensors()
        for size, device in ((call.saved, "cpu"), (call.saved_on_host, "meta")):
            if size:
                saved.of_layer.append(torch.empty(size, dtype=torch.uint8, device=device))
        shape, strides, dtype = self._forward[_REAL - 1].tensor
        output = torch.empty_strided(shape, strides, dtype=dtype)
        saved.input = received.detach() if self._keeps_input else None
        saved.output = output.detach() if self._keeps_output else None
        return output

    def make_gradient(self, index: int) -> Tensor:
        """Return the gradient of a layer's input, set those of its parameters, and free what it has saved."""
        template = _equal(self._backward, self._last_template - 1, self._last_template)
        before = self._memory.live, self._memory.live_gradients
        with self._memory.unwatched(), self._work.uncounted():
            parameters = self._layers[index].parameters()
            for parameter, is_trained in zip(parameters, self._trained[self._last_template], strict=True):
                if is_trained:
                    parameter.grad = torch.empty_like(parameter)
                    self._memory.count_gradient(parameter)
            shape, strides, dtype = template.tensor
            gradient = torch.empty_strided(shape, strides, dtype=dtype)
            del self._saved[index]
        self._repeat(template, before)
        return gradient

    def _repeat(self, counted: _Pass, before: tuple[int, int]) -> None:
        live, gradients = before
        self._memory.timeline += [
            (live - gradients + activations, gradients + more) for activations, more in counted.entries
        ]
        self._work.add(counted.work)

    # The end

    def complete(self, recorded: RecordedLayers) -> None:
        for undo in self._undo:
            undo()
        count = len(self._layers)
        self._require(self._next == count and not self._reads_counters)
        real = [index for index in range(1, count - 1) if index in self._calls]
        of_layers: tuple[dict[int, Any], ...] = (self._calls, self._forward, self._backward)
        for counted in of_layers:
            self._require(all(counted.get(index) == counted.get(real[0]) for index in real))
        template = f"{self._names[_REAL - 1]}."
        every: tuple[dict[str, Any], ...] = (recorded.inputs, recorded.outputs, recorded.saved)
        for sizes in every:
            inner = {name.removeprefix(template): size for name, size in sizes.items() if name.startswith(template)}
            for name in self._names[_REAL : count - _REAL]:
                sizes.update({f"{name}.{layer}": size for layer, size in inner.items()})

    def counted_since(self, state: _State, tensor: Tensor) -> _Pass:
        """Return the pass that began with a state and ends now.

        Args:
            state: The state.
            tensor: Result of the pass.
        """
        now = self._work.counted
        work = Work(
            flops=now.flops - state.work.flops,
            operands=now.operands - state.work.operands,
            moved=now.moved - state.work.moved,
            operations=now.operations - state.work.operations,
        )
        # A view of a larger tensor could not be allocated alike.
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self._require(tensor.untyped_storage().nbytes() == extent * tensor.itemsize)
        activations, gradients = state.live - state.gradients, state.gradients
        entries = tuple((one - activations, other - gradients) for one, other in self._memory.timeline[state.length :])
        return _Pass(entries, work, (tensor.shape, tensor.stride(), tensor.dtype))

    def state(self) -> _State:
        """Return the state of the counters."""
        memory = self._memory
        return _State(len(memory.timeline), memory.live, memory.live_gradients, memory.live_on_host, self._work.counted)

    def alias_of(self, tensor: Tensor) -> Tensor:
        """Return an alias of a tensor, whose gradient is that of this use of it only."""
        with self._memory.unwatched(), self._work.uncounted():
            alias: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]  # of torch
        return alias

    def call_since(self, state: _State, inputs: tuple[Any, ...], returned: Any) -> tuple[_LayerCall, Tensor]:
        """Return the call that began with a state, and its output.

        Raises:
            NotEqualLayers: It returned other than one new tensor that requires a gradient.
        """
        values = (returned,) if isinstance(returned, Tensor) else returned
        self._require(isinstance(values, tuple) and all(isinstance(one, (Tensor, *_PLAIN)) for one in values))
        tensors = tensors_in(values)
        self._require(len(tensors) == 1 and tensors[0].requires_grad)
        (output,) = tensors
        saved = self._memory.live - state.live - output.untyped_storage().nbytes()
        self._require(saved >= 0)
        without = (
            Tensor if isinstance(returned, Tensor) else tuple(Tensor if one is output else one for one in returned)
        )
        return _LayerCall(inputs, without, saved, self._memory.live_on_host - state.host), output


@dataclass(frozen=True, slots=True)
class _State:
    """State of the counters: length of the timeline, bytes that live, of gradients and on the host, and work."""

    length: int
    live: int
    gradients: int
    host: int
    work: Work


def _restore_forward(layer: nn.Module, forward: Any) -> None:
    if forward is None:
        del layer.forward
    else:
        layer.forward = forward


def _set_class(module: nn.Module, kind: type) -> None:
    module.__class__ = kind


def _equal(values: Mapping[int, T], first: int, second: int) -> T:
    """Return the value of two layers.

    Raises:
        NotEqualLayers: One has none, or another one.
    """
    value = values.get(first)
    if value is None or value != values.get(second):
        raise NotEqualLayers
    return value


class _Watch:
    """Watches the passes of a layer that runs.

    Args:
        run: The run of the layer.
        index: Its position there.
    """

    def __init__(self, run: _Run, index: int) -> None:
        self._run, self._index = run, index
        self._state: Any = None
        self._inputs: tuple[Any, ...] = ()

    def begin_forward(self, _layer: nn.Module, args: Any, kwargs: Any) -> Any:
        self._inputs = _described(args, kwargs)
        trained = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if len(trained) != 1:
            raise NotEqualLayers
        self._run.begin_forward(self._index, trained[0])
        alias = self._run.alias_of(trained[0])
        alias.register_hook(self._end_backward)
        self._state = self._run.state()
        return apply_to_tensors((args, kwargs), lambda tensor: alias if tensor is trained[0] else tensor)

    def end_forward(self, _layer: nn.Module, args: Any, kwargs: Any, returned: Any) -> None:
        call, output = self._run.call_since(self._state, self._inputs, returned)
        if any(output.untyped_storage() is tensor.untyped_storage() for tensor in tensors_in((args, kwargs))):
            raise NotEqualLayers
        self._run.end_forward(self._index, call, self._run.counted_since(self._state, output), output)
        output.register_hook(self._begin_backward)

    def _begin_backward(self, _gradient: Tensor) -> None:
        self._state = self._run.state()
        self._run.begin_backward(self._index)

    def _end_backward(self, gradient: Tensor) -> None:
        self._run.end_backward(self._index, self._run.counted_since(self._state, gradient))


class _Alias(torch.autograd.Function):
    """The same tensor."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Replay(torch.autograd.Function):
    """A layer that does not run."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, run: _Run, index: int) -> Tensor:
        ctx.run, ctx.index = run, index
        return run.make_output(index, received)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Any:
        return ctx.run.make_gradient(ctx.index), None, None


def _described(args: Any, kwargs: Any) -> tuple[Any, ...]:
    tensors = (
        (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in tensors_in((args, kwargs))
    )
    return len(args), tuple(kwargs), *tensors


# Equal layers


def _equal_layers(module: nn.Module) -> Iterator[tuple[list[tuple[str, nn.Module]], set[Any]]]:
    """Yield runs of equal layers, by their names, that are long enough, each with its counters."""
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    inside: set[nn.Module] = set()
    for name, container in module.named_modules():
        if container in inside:
            continue
        children = [(f"{name}.{child}" if name else child, layer) for child, layer in container.named_children()]
        for run, counters in _runs(children, uses):
            yield run, counters
            inside.update(inner for _, layer in run for inner in layer.modules())


def _runs(
    children: Sequence[tuple[str, nn.Module]], uses: Counter[int]
) -> Iterator[tuple[list[tuple[str, nn.Module]], set[Any]]]:
    """Yield the runs of equal layers among the children of a module, if all of a layer's parameters are its only.

    Each has the keys of the values that are the number of the layer.
    """
    run: list[tuple[str, nn.Module]] = []
    last: dict[Any, Any] = {}
    counters: set[Any] | None = None
    for name, layer in [*children, ("", nn.Identity())]:
        values = _values(layer)
        differing = {key for key in values.keys() | last.keys() if values.get(key) != last.get(key)}
        is_alone = any(True for _ in layer.parameters()) and all(
            uses[id(parameter)] == 1 and not _has_hooks(parameter) for parameter in layer.parameters()
        )
        follows = bool(run) and is_alone and _count_up(differing, last, values) and counters in (None, differing)
        if not follows:
            if len(run) >= _FEWEST:
                yield run, counters or set()
            run, counters = [], None
        elif len(run) >= 1:
            counters = differing
        if is_alone:
            run.append((name, layer))
        last = values


def _count_up(differing: Iterable[Any], last: dict[Any, Any], values: dict[Any, Any]) -> bool:
    """Return whether values differ only as the number of a layer does, which is the next one in each."""
    return all(type(values.get(key)) is int and last.get(key) == values[key] - 1 for key in differing)


def _values(layer: nn.Module) -> dict[Any, Any]:
    """Return what the work of a layer may depend on, but for its inputs."""
    values: dict[Any, Any] = {}
    for name, inner in layer.named_modules():
        values[name, ""] = type(inner), inner.extra_repr(), *(len(hooks) for hooks in _hooks(inner))
        for attribute, value in vars(inner).items():
            if attribute not in _OF_MODULES:
                values[name, attribute] = _comparable(value, _DEPTH)
        for tensor_name, tensor in (*inner.named_parameters(recurse=False), *inner.named_buffers(recurse=False)):
            values[name, tensor_name] = tensor.shape, tensor.dtype, tensor.requires_grad
    if any(any(_hooks(inner)) for inner in layer.modules()):
        values["hooks"] = id(layer)  # which see real calls only: equal to no other layer
    return values


def _comparable(value: Any, depth: int) -> Any:
    """Return a value that is equal for objects which say the same, as far as Python shows it."""
    if isinstance(value, _PLAIN):
        return LayerLabel if isinstance(value, LayerLabel) else value
    if depth == 0 or isinstance(value, Tensor | nn.Module):
        return type(value), getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(value, list | tuple | set | frozenset):
        return [type(value), *(_comparable(one, depth - 1) for one in value)]
    state = value if isinstance(value, dict) else _state_of(value)
    if state is None:
        return value
    return type(value), {str(key): _comparable(one, depth - 1) for key, one in state.items()}


def _state_of(value: Any) -> dict[str, Any] | None:
    """Return what an object consists of, by name; None if Python does not show it."""
    if isinstance(value, types.FunctionType):  # which may be made for each layer
        names = ("__code__", "__defaults__", "__kwdefaults__")
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return {**vars(value), **{name: getattr(value, name) for name in names}, "__closure__": cells}
    # Members of other types that are not written in Python may be less than their state.
    members = {
        name: getattr(value, name)
        for kind in type(value).__mro__
        if "__slots__" in vars(kind) or kind in (partial, types.MethodType)
        for name, member in vars(kind).items()
        if isinstance(member, types.MemberDescriptorType) and hasattr(value, name)
    }
    if not members and not hasattr(value, "__dict__"):
        return None
    return {**members, **getattr(value, "__dict__", {})}


def _hooks(layer: nn.Module) -> tuple[Any, ...]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return tuple(getattr(layer, name) for name in names)


def _has_hooks(parameter: Tensor) -> bool:
    hooks: Any = parameter
    return bool(hooks._backward_hooks or getattr(hooks, "_post_accumulate_grad_hooks", None))  # noqa: SLF001 - torch has no public ones

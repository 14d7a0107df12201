"""Flat buckets of parameters, and the exchange of their gradients during the backward pass."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.nn import Parameter

FIRST_BUCKET = 2**20  # bytes; small, so that the exchange begins early in the backward pass
BUCKET = 10 * 2**20  # bytes, as in Bagua


class Work(Protocol):
    """Protocol of an exchange under way, such as torch's ``Work``."""

    def wait(self) -> object:
        """Wait until the exchange has finished."""


class Bucket:
    """One flat tensor for values of several parameters of one dtype and device.

    Args:
        parameters: The parameters.

    Attributes:
        parameters: The parameters.
        flat: Tensor of one dimension with the values of all parameters, in their order.
        views: For each parameter, the elements of ``flat`` in its shape.
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self.parameters = list(parameters)
        sizes = [parameter.numel() for parameter in self.parameters]
        self.flat = torch.empty(sum(sizes), dtype=self.parameters[0].dtype, device=self.parameters[0].device)
        self.views = [
            values.view(parameter.shape)
            for values, parameter in zip(self.flat.split(sizes), self.parameters, strict=True)
        ]

    # torch._foreach_* are what torch.optim uses (torch 2.9 to 2.13): one kernel for all parameters of a bucket.

    @torch.no_grad()
    def load_weights(self) -> None:
        """Copy the values of the parameters into the bucket."""
        torch._foreach_copy_(self.views, [*self.parameters])

    @torch.no_grad()
    def store_weights(self) -> None:
        """Copy the values of the bucket into the parameters."""
        torch._foreach_copy_([*self.parameters], self.views)

    @torch.no_grad()
    def add_to_weights(self) -> None:
        """Add the values of the bucket to the parameters."""
        torch._foreach_add_([*self.parameters], self.views)

    @torch.no_grad()
    def load_gradients(self) -> None:
        """Copy the gradients into the bucket, zeros where a parameter has none."""
        targets, sources = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr():  # unless it is the view, as with flatten=True
                targets.append(view)
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)

    def replace_gradients(self) -> None:
        """Let gradients that were loaded be views of the bucket, which frees their memory."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not None:
                parameter.grad = view

    @torch.no_grad()
    def store_gradients(self, *, as_views: bool) -> None:
        """Set the gradients of the parameters to the values of the bucket.

        Args:
            as_views: Whether gradients become views of the bucket; otherwise its values are copied into them.
        """
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if as_views or parameter.grad is None:
                parameter.grad = view
            elif parameter.grad is not view:
                parameter.grad.copy_(view)


def divide_into_buckets(parameters: Iterable[Parameter], *, size: int = BUCKET) -> list[Bucket]:
    """Return buckets of parameters, in their order, each of one dtype and device.

    Args:
        parameters: The parameters.
        size: Bytes after which a bucket is complete; the first of a dtype has at most one MiB, unless one parameter
            alone has more.
    """
    buckets: list[Bucket] = []
    pending: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        members = pending.setdefault(key, [])
        members.append(parameter)
        if sum(member.numel() for member in members) * parameter.element_size() >= limits.get(key, FIRST_BUCKET):
            buckets.append(Bucket(pending.pop(key)))
            limits[key] = size
    return [*buckets, *(Bucket(members) for members in pending.values())]


class _Lane:
    """Buckets that are exchanged in their order, those of one module.

    Args:
        buckets: The buckets.

    Attributes:
        buckets: The buckets.
        started: Exchanges of the current pass, in order.
        missing: For each bucket, the parameters whose gradients the current pass has not computed yet.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self.reset()

    def reset(self) -> None:
        """Prepare for a backward pass."""
        self.started: list[tuple[Bucket, Work]] = []
        self.missing = [{id(parameter) for parameter in bucket.parameters} for bucket in self.buckets]


class GradientExchange:
    """Exchange of gradients, bucket by bucket, while the backward pass computes the next ones.

    All ranks start the exchanges in the same order, so that they match: a bucket waits for those before it, and at the
    end of the pass those that are incomplete follow.

    Args:
        modules: For each module, its trainable parameters by name.  A pass may leave out all parameters of a module, as
            it does where several modules take turns.
        start: Starts the exchange of a loaded bucket.
        flatten: Whether gradients become views of the buckets; otherwise they are copied back.
        find_unused: Returns for each of some flags whether it is set on any rank; None if parameters without a gradient
            are an error.
    """

    def __init__(
        self,
        modules: Iterable[Sequence[tuple[str, Parameter]]],
        start: Callable[[Bucket], Work],
        *,
        flatten: bool,
        find_unused: Callable[[list[bool]], list[bool]] | None,
    ) -> None:
        self._start, self._flatten, self._find_unused = start, flatten, find_unused
        self._names: dict[int, str] = {}
        self._lanes: list[_Lane] = []
        self._accumulated: set[int] = set()
        self._is_open = False
        self.is_accumulating = False
        self.outside: str | None = None
        self._handles = []
        for named in modules:
            self._names |= {id(parameter): name for name, parameter in named}
            # The backward pass computes gradients in about the reversed order.
            lane = _Lane(divide_into_buckets(parameter for _, parameter in reversed(named)))
            self._lanes.append(lane)
            for index, bucket in enumerate(lane.buckets):
                # After accumulation, as the gradient in .grad may have earlier batches in it.
                hook = partial(self._on_gradient, lane, index)
                self._handles += [one.register_post_accumulate_grad_hook(hook) for one in bucket.parameters]

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._lanes = [], []

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Exchange the gradients of the backward pass that runs in this context, and those accumulated before it."""
        for lane in self._lanes:
            lane.reset()
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
        self._finish()

    def check_synchronized(self) -> None:
        """Raise MisuseError if gradients were computed outside of the strategy's ``backward``.

        Raises:
            MisuseError: They were, so that each rank would apply other ones.
        """
        if self.outside is not None:
            raise MisuseError(
                f"the gradient of {self.outside!r} was computed without the strategy, so that it was not exchanged: "
                "call self.manual_backward(loss) in a module, or loop.backward(loss) in a hand-written loop"
            )

    def _on_gradient(self, lane: _Lane, index: int, parameter: Parameter) -> None:
        if not self._is_open:
            if self.is_accumulating:
                self._accumulated.add(id(parameter))
            else:
                self.outside = self._names[id(parameter)]
            return
        if index < len(lane.started):  # its bucket is on the way, and may be overwritten at any time
            raise MisuseError(
                f"the gradient of {self._names[id(parameter)]!r} was computed twice in one backward pass, and had been "
                "exchanged before the second time: use activation checkpointing with use_reentrant=False"
            )
        lane.missing[index].discard(id(parameter))
        while len(lane.started) < len(lane.buckets) and not lane.missing[len(lane.started)]:
            self._exchange(lane, lane.buckets[len(lane.started)])

    def _exchange(self, lane: _Lane, bucket: Bucket) -> None:
        for parameter in bucket.parameters:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise MisuseError(
                    f"the gradient of {self._names[id(parameter)]!r} is sparse, and buckets hold dense ones: create "
                    'the layer with sparse=False, or choose strategy="ddp"'
                )
        bucket.load_gradients()
        if self._flatten:
            bucket.replace_gradients()  # while the backward pass computes others
        lane.started.append((bucket, self._start(bucket)))

    def _finish(self) -> None:
        """Exchange incomplete buckets, wait for all, and set the gradients."""
        used, unused = self._used_lanes()
        if unused and self._find_unused is None:
            raise self._unused_error(unused)
        previous = [None if parameter.grad is None else parameter.grad.clone() for parameter in unused]
        for parameter in unused:
            parameter.grad = None  # zeros are sent for it
        for lane in used:
            self._exchange_remaining(lane)
        nowhere = self._unused_on_all_ranks(used, unused)
        for lane in used:
            for bucket, work in lane.started:
                work.wait()
                bucket.store_gradients(as_views=self._flatten)
            lane.started = []
        for parameter, before in zip(unused, previous, strict=True):
            if id(parameter) in nowhere:
                parameter.grad = before  # not zeros, with which an optimizer would apply weight decay
            elif before is not None and parameter.grad is not None:
                parameter.grad += before
        self._accumulated.clear()

    def _exchange_remaining(self, lane: _Lane) -> None:
        """Exchange incomplete buckets, without parameters that are frozen now."""
        for bucket in lane.buckets[len(lane.started) :]:
            members = [parameter for parameter in bucket.parameters if parameter.requires_grad]
            if members:
                self._exchange(lane, bucket if len(members) == len(bucket.parameters) else Bucket(members))

    def _used_lanes(self) -> tuple[list[_Lane], list[Parameter]]:
        """Return the lanes of modules that the pass has used, and their trainable parameters without a gradient."""
        used, unused = [], []
        for lane in self._lanes:
            expected = [one for bucket in lane.buckets for one in bucket.parameters if one.requires_grad]
            missing = set().union(*lane.missing)
            lacking = [one for one in expected if id(one) in missing and not self._has_accumulated(one)]
            # Of several modules, such as in a GAN, a pass uses one; a single one is named in an error.
            if len(self._lanes) == 1 or len(lacking) < len(expected):
                used.append(lane)
                unused += lacking
        return used, unused

    def _has_accumulated(self, parameter: Parameter) -> bool:
        return id(parameter) in self._accumulated and parameter.grad is not None

    def _unused_on_all_ranks(self, used: Sequence[_Lane], unused: Sequence[Parameter]) -> set[int]:
        if self._find_unused is None:
            return set()
        lacking = {id(parameter) for parameter in unused}
        parameters = [id(one) for lane in used for bucket, _ in lane.started for one in bucket.parameters]
        is_used = self._find_unused([one not in lacking for one in parameters])
        return {one for one, has_gradient in zip(parameters, is_used, strict=True) if not has_gradient}

    def _unused_error(self, unused: Sequence[Parameter]) -> MisuseError:
        return MisuseError(unused_parameters_text([self._names[id(parameter)] for parameter in unused]))


def unused_parameters_text(names: Sequence[str]) -> str:
    """Return what is wrong with parameters on which a loss does not depend, and what to do."""
    more = f" and {len(names) - 10} others" if len(names) > 10 else ""
    return (
        f"the loss does not depend on {', '.join(names[:10])}{more}, and bagua exchanges a gradient of every "
        "trainable parameter. If that is intended, choose BaguaStrategy(find_unused_parameters=True); otherwise "
        "use them in the loss, or freeze them before training"
    )

"""Optimizers of libraries that need whole parameters, such as SOAP, on shards as on one device."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from dstrat.errors import MisuseError, RequestError
from dstrat.parallel.matrix_exchange import MatrixExchange, Route, extents_of, plan_routes, with_placements_of
from dstrat.parallel.optimizer_checks import find_coupling
from dstrat.parallel.shards import TensorOutline, is_distributed, local_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


class GatheredOptimizer(Optimizer):
    """An optimizer that needs whole parameters, such as SOAP or Shampoo of a library, on shards.

    Where ranks have shards, each owns some of the parameters: it gathers them with their gradients, steps them by the
    optimizer, whose state of them only it has, and sends the results back.  So the optimizer trains as on one device
    with every strategy that keeps the shape of parameters::

        def configure_optimizers(self):
            return GatheredOptimizer(pytorch_optimizer.SOAP, self.parameters(), lr=3e-3)

    Where each process has whole parameters, it is the optimizer itself.  Its state dict has the optimizer's layout, so
    that checkpoints move, also to the optimizer without this class.

    Args:
        optimizer: The class of the optimizer.
        params: What its constructor takes first: parameters, or groups of them.
        **options: Those of its constructor.

    Raises:
        RequestError: ``optimizer`` is no class of an optimizer.
        MisuseError: Parameters are sharded, and the optimizer cannot step some of them without the others, or draws
            random numbers.
    """

    steps_shards = True
    """Whether steps of sharded parameters have the results of full ones, so that no check needs to try it."""

    def __init__(self, optimizer: type[Optimizer], params: Iterable[Any], **options: Any) -> None:
        if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
            raise RequestError(
                f"GatheredOptimizer takes the class of an optimizer first, not {optimizer!r}, and then what its "
                "constructor takes: GatheredOptimizer(SOAP, self.parameters(), lr=3e-3)"
            )
        self._optimizer = optimizer(params, **options)
        self._routes: dict[int, Route] = {}  # by the identity of the sharded parameter
        self._dtypes: list[torch.dtype] | None = None  # of the sharded parameters of all ranks
        self._state_is_sharded = True
        super().__init__(self._optimizer.param_groups, self._optimizer.defaults)
        self.state.update(self._optimizer.state)
        if self._sharded_parameters():
            self._check_independence()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_optimizer": self._optimizer,
            "_routes": {},
            "_dtypes": None,
            "_state_is_sharded": True,
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient; collective where they are sharded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._is_sharded():
            self._step_full({})
            return loss
        self._prepare()
        exchanges = self._gather_parameters()
        owned = {}
        for exchange in exchanges:
            for index, value in exchange.values.full.items():
                owned[exchange.parameters[index]] = parameter = nn.Parameter(value)
                parameter.grad = exchange.gradients.full[index]
        self._step_full(owned)
        for exchange in exchanges:
            for index, value in exchange.values.full.items():
                stepped = owned[exchange.parameters[index]].detach()
                if stepped.data_ptr() != value.data_ptr():  # the optimizer has replaced its data
                    value.copy_(stepped)
            exchange.values.scatter()
        return loss

    def _step_full(self, owned: Mapping[Tensor, Tensor]) -> None:
        """Step the parameters that are not sharded, and the full ones of those that this rank owns.

        Args:
            owned: The full parameters by the sharded ones.
        """
        optimizer, full = self._optimizer, dict(owned)
        full.update({one: one for one in self._parameters() if not (is_distributed(one) or one.is_meta)})
        optimizer.state = defaultdict(dict)
        for key, value in self.state.items():
            if value and (key in full or not isinstance(key, Tensor)):
                optimizer.state[full.get(key, key)] = value
        optimizer.param_groups = [
            {**group, "params": [full[one] for one in group["params"] if one in full]} for group in self.param_groups
        ]
        optimizer.step()
        for group, stepped in zip(self.param_groups, optimizer.param_groups, strict=True):
            group.update({name: value for name, value in stepped.items() if name != "params"})
        sources = {stepped: parameter for parameter, stepped in full.items()}
        for key, value in optimizer.state.items():
            # As a checkpoint restores it: products of matrices with other strides, such as of SOAP, round differently.
            self.state[sources.get(key, key)] = _map_leaves(value, _contiguous)
        optimizer.state, optimizer.param_groups = defaultdict(dict), []  # frees the full parameters

    def _parameters(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(group["params"] for group in self.param_groups)

    def _sharded_parameters(self) -> list[Any]:
        return [parameter for parameter in self._parameters() if is_distributed(parameter)]

    def _is_sharded(self) -> bool:
        """Return whether ranks have shards; those of other stages of a pipeline are on the meta device."""
        if not dist.is_available() or not dist.is_initialized():
            return False
        return any(is_distributed(one) or (one.is_meta and dist.get_world_size() > 1) for one in self._parameters())

    def _prepare(self) -> None:
        """Decide which rank owns which parameter, and let only it have the state of it; collective."""
        sharded = self._sharded_parameters()
        if self._dtypes is None or any(id(parameter) not in self._routes for parameter in sharded):
            self._plan(sharded)
        if self._state_is_sharded:
            self._gather_state(sharded)

    def _check_independence(self) -> None:
        reason = find_coupling(self._optimizer)
        if reason is not None:
            name = type(self._optimizer).__name__
            raise MisuseError(
                f"{name} cannot step parameters that are divided among ranks ({reason}): take another optimizer, or "
                f"a strategy that does not shard parameters, such as strategy='ddp'"
            )

    def _plan(self, sharded: Sequence[Any]) -> None:
        routes = dict(zip(map(id, sharded), plan_routes(sharded), strict=True))
        if any(self._routes[key].rank != routes[key].rank for key in routes.keys() & self._routes.keys()):
            raise MisuseError(
                "the groups of a GatheredOptimizer have parameters in another order than before, and ranks keep the "
                "state of some of them: add parameters at the end (add_param_group)"
            )
        self._routes = routes
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, {parameter.dtype for parameter in sharded})
        self._dtypes = sorted(set().union(*gathered), key=str)

    def _gather_parameters(self) -> list[_Exchange]:
        """Return the parameters that have a gradient, in full where this rank owns them; collective."""
        stepped, device, exchanges = self._sharded_parameters(), self._device(), []
        for dtype in self._dtypes or ():
            parameters = [one for one in stepped if one.dtype is dtype and one.grad is not None]
            gradients = [with_placements_of(one.grad, one) for one in parameters]
            routes = [self._routes[id(one)] for one in parameters]
            exchange = _Exchange(
                parameters=parameters,
                values=MatrixExchange(parameters, routes, dtype, device),
                gradients=MatrixExchange(gradients, routes, dtype, device),
            )
            exchange.values.gather()
            exchange.gradients.gather()
            exchanges.append(exchange)
        return exchanges

    def _device(self) -> torch.device:
        """Return the device of this rank's shards."""
        device: torch.device | None = next((local_tensor(p).device for p in self._parameters() if not p.is_meta), None)
        if device is None:
            raise RequestError(
                "this GatheredOptimizer has only parameters of other stages of the pipeline, and steps those of all "
                "stages together: give one optimizer all parameters of the module"
            )
        return device

    # State: each rank has that of the parameters that it owns; in a state dict it is sharded as they are

    def _gather_state(self, sharded: Sequence[Any]) -> None:
        """Gather a state that was loaded; collective."""
        for parameter in sharded:
            owns = self._routes[id(parameter)].rank == dist.get_rank()
            state = _map_leaves(self.state[parameter], _full) if parameter in self.state else {}
            self.state[parameter] = state if owns else {}
        self._state_is_sharded = False

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state, of which each rank has shards where those of parameters are sharded; collective then."""
        if not self._is_sharded():
            return super().state_dict()
        self._prepare()
        state = self.state
        self.state = self._shard_state()
        try:
            return super().state_dict()
        finally:
            self.state = state

    def _shard_state(self) -> defaultdict[Tensor, Any]:
        """Return the state with shards of that of sharded parameters; let all ranks have the owners' options."""
        parameters, rank = list(self._parameters()), dist.get_rank()
        owned = {
            number: _map_leaves(self.state[parameter], _outline)
            for number, parameter in enumerate(parameters)
            if is_distributed(parameter) and self._routes[id(parameter)].rank == rank and self.state[parameter]
        }
        # A rank without parameters of a group may not have counted its steps.
        options = [
            {name: value for name, value in group.items() if name != "params" and not isinstance(value, Tensor)}
            if any(is_distributed(one) and self._routes[id(one)].rank == rank for one in group["params"])
            else {}
            for group in self.param_groups
        ]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (owned, options))
        for number, group in enumerate(self.param_groups):
            group.update(next((shared[number] for _, shared in gathered if shared[number]), {}))
        transfers: list[_Transfer] = []
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for number, parameter in enumerate(parameters):
            if not is_distributed(parameter):
                if self.state.get(parameter) and not parameter.is_meta:
                    state[parameter] = self.state[parameter]
                continue
            route = self._routes[id(parameter)]
            outline = gathered[route.rank][0].get(number)
            if outline:
                state[parameter] = _map_leaves(outline, partial(_empty_shard, parameter=parameter))
                shards = filter(is_distributed, _leaves(state[parameter]))
                owned_tensors = _tensors(self.state[parameter]) if route.rank == rank else itertools.repeat(None)
                transfers += [
                    _Transfer(shard=shard, rank=route.rank, full=full)
                    for shard, full in zip(shards, owned_tensors, strict=False)
                ]
        dtypes = {
            leaf.dtype for outlines, _ in gathered for leaf in _leaves(outlines) if isinstance(leaf, TensorOutline)
        }
        for dtype in sorted(dtypes, key=str):
            _scatter([one for one in transfers if one.shard.dtype is dtype], dtype, self._device())
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; its tensors may be sharded, or full on each rank."""
        super().load_state_dict(state_dict)
        self._state_is_sharded = True


@dataclass(frozen=True, kw_only=True, slots=True)
class _Exchange:
    """Parameters of one dtype, and the exchanges of their values and gradients."""

    parameters: Sequence[Any]
    values: MatrixExchange
    gradients: MatrixExchange


@dataclass(frozen=True, kw_only=True, slots=True)
class _Transfer:
    """The way of a tensor of the state to its shards.

    Attributes:
        shard: A DTensor with this rank's elements.
        rank: The owner.
        full: The full tensor, on the owner.
    """

    shard: Any
    rank: int
    full: Tensor | None


def _scatter(transfers: Sequence[_Transfer], dtype: torch.dtype, device: torch.device) -> None:
    """Fill the shards of tensors from their owners; collective over all ranks of the job."""
    routes = [Route(rank=one.rank, extents=extents_of(one.shard)) for one in transfers]
    exchange = MatrixExchange([one.shard for one in transfers], routes, dtype, device)
    for index, target in exchange.full.items():
        source = transfers[index].full
        if source is not None:  # this rank is the owner
            target.copy_(source)
    exchange.scatter()


def _map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nested value with other leaves."""
    if isinstance(value, dict):
        return {key: _map_leaves(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_map_leaves(inner, change) for inner in value])
    return change(value)


def _contiguous(leaf: Any) -> Any:
    return leaf.contiguous() if isinstance(leaf, Tensor) else leaf


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def _tensors(state: Any) -> Iterator[Tensor]:
    """Yield the tensors that are sharded in a state dict."""
    return (leaf for leaf in _leaves(state) if isinstance(leaf, Tensor) and leaf.dim() and leaf.numel())


def _outline(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    # Scalars, such as counts of steps, are the same on all ranks.
    return TensorOutline(shape=tuple(leaf.shape), dtype=leaf.dtype) if leaf.dim() and leaf.numel() else leaf.cpu()


def _full(leaf: Any) -> Any:
    """Return the full tensor of a DTensor; collective over its mesh."""
    from dstrat.parallel.full_state import full_tensor

    return full_tensor(leaf) if is_distributed(leaf) else leaf


def _empty_shard(leaf: Any, parameter: Any) -> Any:
    """Return a DTensor in place of an outline, sharded by rows over the ranks that have shards of a parameter."""
    from torch.distributed.tensor import Replicate, Shard, zeros

    if not isinstance(leaf, TensorOutline):
        return leaf
    placements = [Replicate() if placement.is_replicate() else Shard(0) for placement in parameter.placements]
    shard = zeros(leaf.shape, dtype=leaf.dtype, device_mesh=parameter.device_mesh, placements=placements)
    return shard.to(local_tensor(parameter).device)

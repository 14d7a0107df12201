"""Muon for matrices with AdamW for all other parameters, in one optimizer, on shards as on one device."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import Self, override

from dstrat.errors import RequestError
from dstrat.parallel.matrix_exchange import MatrixExchange, Route, plan_routes, with_placements_of
from dstrat.parallel.shards import is_distributed, local_tensor, with_local

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch.nn import Module

_BATCH = 2**22
"""Largest number of elements of matrices that are orthogonalized together, unless one has more; larger ones would
take more memory, and no less time."""


class Muon(Optimizer):
    """Muon for matrices, and AdamW for all other parameters.

    Muon orthogonalizes the momentum of a matrix, for which it needs all of it.  Where ranks have shards, each gathers
    some of the matrices, orthogonalizes them, and sends the results back; the momentum stays sharded.  So it trains
    as on one device with every strategy that keeps the shape of parameters.

    Matrices that Muon is not meant for, such as the last layer, belong to AdamW::

        def configure_optimizers(self):
            return Muon.of_module(self, adamw_layers=["head"], lr=0.02, adamw={"lr": 3e-4})

    The algorithm and the arguments up to ``adjust_lr_fn`` are those of torch.optim.Muon.

    Args:
        params: Parameters, with or without names, or groups of them.  A group says with ``"use_muon"`` whether it
            gets Muon or AdamW; without, parameters with two dimensions get Muon, and the others a group with AdamW.
        lr: Learning rate of Muon.
        weight_decay: Its weight decay, decoupled as in AdamW.
        momentum: Its momentum.
        nesterov: Whether the momentum is that of Nesterov.
        ns_coefficients: Coefficients of the Newton-Schulz iteration, a polynomial of degree 5.
        eps: Smallest norm that a matrix is divided by.
        ns_steps: Number of iterations.
        adjust_lr_fn: How the rate depends on a matrix's shape: ``"original"``, or ``"match_rms_adamw"`` for rates of
            AdamW; None for the first.
        adamw: Options of torch.optim.AdamW for all other parameters.
        ns_dtype: The dtype of the iterations, in which matrices are sent too.  They amplify the rounding of gradients,
            and so differences between one device and several: see the guide for how much, in bfloat16 and float32.

    Raises:
        RequestError: A group with Muon has a parameter that is no matrix, no parameter is a matrix, or an option is
            unknown.
    """

    steps_shards = True
    """Whether steps of sharded parameters have the results of full ones, so that no check needs to try it."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if adjust_lr_fn not in (None, *_RATES):
            raise RequestError(f"adjust_lr_fn {adjust_lr_fn!r} is not one of {', '.join(map(repr, _RATES))}")
        self.ns_dtype = ns_dtype
        self._muon_options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        self._adamw = AdamW([torch.empty(0)], **(adamw or {}))  # steps the groups without Muon
        self._excluded: Collection[Tensor] = ()  # matrices that get AdamW, also if a callback adds them later
        self._routes: tuple[tuple[int, ...], list[Route]] = ((), [])
        listed = list(params)
        super().__init__(listed, {"lr": lr})
        if not all(isinstance(one, dict) and "use_muon" in one for one in listed):
            _check_has_muon(self.param_groups)

    @classmethod
    def of_module(cls, module: Module, *, adamw_layers: Iterable[str] = (), **options: Any) -> Self:
        """Return an optimizer of a module's trained parameters, with Muon for the matrices of all but some layers.

        Args:
            module: The module, where optimizers are made.
            adamw_layers: Names of layers for AdamW, with all that they contain; embeddings are so without that.
            **options: Those of the constructor.

        Raises:
            RequestError: The module has no layer of such a name.
        """
        layers = dict(module.named_modules())
        names = [adamw_layers] if isinstance(adamw_layers, str) else list(adamw_layers)
        unknown = [name for name in names if name not in layers]
        if unknown:
            raise RequestError(
                f"adamw_layers has {unknown[0]!r}, and {type(module).__name__} has no such layer: name one of "
                f"{', '.join(name for name, _ in module.named_children())}, or one in them"
            )
        embeddings = [layer for layer in layers.values() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
        excluded = {
            parameter for layer in (*embeddings, *map(layers.get, names)) if layer for parameter in layer.parameters()
        }
        groups = _split([parameter for parameter in module.parameters() if parameter.requires_grad], excluded)
        _check_has_muon(groups)
        optimizer = cls(groups, **options)
        # Weakly, as a strategy may replace the parameters by shards.
        optimizer._excluded = WeakIdKeyDictionary(dict.fromkeys(excluded))
        return optimizer

    def __getstate__(self) -> dict[str, Any]:
        private = {name: vars(self)[name] for name in ("ns_dtype", "_muon_options", "_adamw")}
        return {**super().__getstate__(), **private, "_excluded": set(self._excluded), "_routes": ((), [])}

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; without ``"use_muon"`` one of its matrices, and one of all others.

        Raises:
            RequestError: A group with Muon has a parameter that is no matrix; then none is added.
        """
        groups, params = [param_group], param_group["params"]
        if "use_muon" not in param_group:
            listed = [params] if isinstance(params, Tensor) else params
            groups = [{**param_group, **group} for group in _split(listed, self._excluded)]
        before = len(self.param_groups)
        try:
            for group in groups:
                options = self._muon_options if group["use_muon"] else self._adamw.defaults
                super().add_param_group({**options, **group})
                if group["use_muon"]:
                    _check_matrices(self.param_groups[-1]["params"])
        except Exception:
            del self.param_groups[before:]
            raise

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient; collective where they are sharded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_matrices()
        self._adamw.state = self.state
        self._adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        self._adamw.step()
        return loss

    def _step_matrices(self) -> None:
        matrices = [
            (parameter, group)
            for group in self.param_groups
            if group["use_muon"]
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        _check_matrices([parameter for parameter, _ in matrices])
        updates = [self._update_momentum(parameter, group) for parameter, group in matrices]
        is_sharded = self._is_sharded()
        _orthogonalize(
            [
                (local_tensor(update), group)
                for update, (parameter, group) in zip(updates, matrices, strict=True)
                if not (is_sharded and is_distributed(parameter))
            ]
        )
        if is_sharded:
            shards = [index for index, (parameter, _) in enumerate(matrices) if is_distributed(parameter)]
            self._orthogonalize_shards([updates[index] for index in shards], [matrices[index] for index in shards])
        for update, (parameter, group) in zip(updates, matrices, strict=True):
            local, rate = local_tensor(parameter), float(group["lr"])
            local.mul_(1 - rate * group["weight_decay"])
            scale = _RATES[group["adjust_lr_fn"] or "original"](*parameter.shape)
            local.add_(local_tensor(update), alpha=-rate * scale)

    def _update_momentum(self, parameter: Tensor, group: Mapping[str, Any]) -> Any:
        """Update the momentum of a matrix; return what is to be orthogonalized, sharded as the matrix is."""
        assert parameter.grad is not None  # noqa: S101 - selected by the caller
        state, gradient = self.state[parameter], with_placements_of(parameter.grad, parameter)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        gradient, momentum = local_tensor(gradient), local_tensor(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        if group["nesterov"]:
            update = gradient.lerp(momentum, group["momentum"]).to(self.ns_dtype)
        else:
            update = momentum.to(self.ns_dtype, copy=True)
        return with_local(parameter, update)

    def _is_sharded(self) -> bool:
        """Return whether ranks have shards; those of other stages of a pipeline are on the meta device."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return False
        return any(
            is_distributed(parameter) or parameter.is_meta
            for group in self.param_groups
            for parameter in group["params"]
        )

    def _orthogonalize_shards(self, updates: Sequence[Any], matrices: Sequence[tuple[Any, dict[str, Any]]]) -> None:
        """Replace updates of sharded matrices by orthogonalized ones; collective over all ranks of the job."""
        ids = tuple(id(parameter) for parameter, _ in matrices)
        if self._routes[0] != ids:
            self._routes = ids, plan_routes([parameter for parameter, _ in matrices])
        device = self._device()
        exchange = MatrixExchange(updates, self._routes[1], self.ns_dtype, device)
        exchange.gather()
        _orthogonalize([(full, matrices[index][1]) for index, full in exchange.full.items()])
        exchange.scatter()

    def _device(self) -> torch.device:
        """Return the device of this rank's shards."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        device: torch.device | None = next((one.device for one in parameters if not one.is_meta), None)
        if device is None:
            raise RequestError(
                "this Muon has only parameters of other stages of the pipeline, and steps those of all stages "
                "together: give one Muon all parameters of the module"
            )
        return device


# Groups of parameters


def _split(parameters: Iterable[Any], excluded: Collection[Tensor]) -> list[dict[str, Any]]:
    """Return a group of the matrices for Muon, and one of all others; the excluded ones are among these."""
    if isinstance(parameters, set):
        return [{"params": parameters, "use_muon": False}]  # torch refuses it, as its order differs between ranks
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for one in parameters:
        parameter = one[1] if isinstance(one, tuple) else one  # with its name
        groups[parameter.dim() == 2 and parameter not in excluded].append(one)
    return [{"params": group, "use_muon": uses_muon} for uses_muon, group in groups.items() if group]


def _check_has_muon(groups: Sequence[Mapping[str, Any]]) -> None:
    if groups and not any(group["use_muon"] for group in groups):
        raise RequestError(
            f"Muon is for matrices, and none of {sum(len(group['params']) for group in groups)} parameters is one for "
            "it.  A strategy that joins parameters in flat tensors has none: choose one that shards each parameter; "
            "for a module without matrices take torch.optim.AdamW"
        )


def _check_matrices(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        if parameter.dim() != 2:
            raise RequestError(
                f"Muon is for matrices, and a parameter has the shape {tuple(parameter.shape)}: put it into a group "
                'with "use_muon": False, which AdamW steps'
            )


# Orthogonalization


def _original_rate(rows: int, columns: int) -> float:
    return math.sqrt(max(1, rows / columns))


def _rate_of_adamw(rows: int, columns: int) -> float:
    return 0.2 * math.sqrt(max(rows, columns))


_RATES = {"original": _original_rate, "match_rms_adamw": _rate_of_adamw}
"""Factors of the learning rate by a matrix's shape, as torch.optim.Muon has them."""


@dataclass(frozen=True, slots=True)
class _Iteration:
    """Options of the iteration, and the shape of matrices that are computed together."""

    shape: torch.Size
    coefficients: tuple[float, float, float]
    steps: int
    eps: float


def _orthogonalize(matrices: Iterable[tuple[Tensor, Mapping[str, Any]]]) -> None:
    """Orthogonalize matrices in place, those of one shape together.

    Args:
        matrices: Each with the options of its group.
    """
    batches: dict[_Iteration, list[Tensor]] = defaultdict(list)
    for matrix, group in matrices:
        coefficients = tuple(map(float, group["ns_coefficients"]))  # a list, from a checkpoint
        batches[_Iteration(matrix.shape, coefficients, group["ns_steps"], group["eps"])].append(matrix)  # type: ignore[arg-type]  # three of them
    for iteration, same in batches.items():
        size = max(1, _BATCH // max(1, iteration.shape.numel()))
        for start in range(0, len(same), size):
            batch = same[start : start + size]
            for matrix, result in zip(batch, _newton_schulz(torch.stack(batch), iteration), strict=True):
                matrix.copy_(result)


def _newton_schulz(matrices: Tensor, iteration: _Iteration) -> Tensor:
    """Return approximations of the nearest orthogonal matrices, by the iteration of Jordan et al., 2024 (Muon).

    Args:
        matrices: ``(batch, rows, columns)``.
        iteration: The options.
    """
    a, b, c = iteration.coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=iteration.eps)  # so that no singular value is above 1
    for _ in range(iteration.steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x

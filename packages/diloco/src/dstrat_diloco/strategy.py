"""DiLoCo: groups train apart, and average what they have changed every few hundred steps."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.errors import ConflictError
from dstrat.interfaces.checkpoint_io import FlatShard
from dstrat.interfaces.communication import Collective, CommunicationLayout
from dstrat.interfaces.state_dict import canonical_buffers, canonical_name, has_standard_layout
from dstrat.parallel.collectives import broadcast_object, broadcast_tensors
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat.parallel.shards import is_sharded, local_tensor, with_local
from dstrat_diloco.average import GroupAverage, average, digest, find_differing
from dstrat_diloco.grouped import GroupedStrategy
from dstrat_diloco.outer import OuterOptimizer, OuterSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import timedelta

    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import MemoryLayout, TrainingSize
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import Strategy, TrainerLike
    from dstrat_diloco.average import DeltaDtype

_STATE = "diloco"
"""Key of a rank's state in a checkpoint."""

_logger = logging.getLogger(__name__)


class DiLoCoStrategy(GroupedStrategy):
    """Training of groups of ranks that communicate rarely (DiLoCo, https://arxiv.org/abs/2311.08105).

    Each group trains by another strategy as if it were alone, on its share of the data.  Every ``every`` optimizer
    steps the mean of what the groups have changed is the gradient of an outer SGD with Nesterov momentum, from whose
    weights all groups go on.  With ``fragments`` and ``delay`` parts of the weights are sent in turn, while the groups
    train on (https://arxiv.org/abs/2501.18512).  ``outer_lr=1.0, outer_momentum=0.0`` is post-local SGD.

    Within a round the groups have different weights.  An evaluation, a checkpoint and the module after a training have
    their mean; floating-point buffers, and frozen parameters that the module changes by itself, are averaged in each
    round.  Gradients are clipped in each group.

    Args:
        inner: The strategy of each group, as an alias (``"fsdp(cpu_offload=True)"``) or an instance.
        groups: Number of groups; None for one for each machine, or on a single one for each device.
        every: Optimizer steps between two exchanges.
        outer_lr: Learning rate of the outer SGD.
        outer_momentum: Its Nesterov momentum; 0 for none.
        fragments: Number of fragments of the weights, each of which is sent once in ``every`` steps.
        delay: Optimizer steps for which the groups train on while a fragment is in flight.
        mixing: With a delay, the share of a group's own weights after it has received the outer ones.
        delta_dtype: Dtype in which changes are sent, ``"bfloat16"`` or ``"int8"``; None for float32.
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        cluster_environment: The cluster that the job runs on.
        checkpoint_io: The format of checkpoints.
        precision_plugin: The dtypes.
        process_group_backend: Backend of torch.distributed; None takes the accelerator's.
        timeout: How long a rank waits for the others before the job fails.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.

    Raises:
        RequestError: A value is out of range.
        ConflictError: Two values exclude each other, or the inner strategy cannot train a group.
        MisuseError: The inner strategy is no strategy, or has components.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        inner: str | Strategy = "ddp",
        groups: int | None = None,
        every: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
        mixing: float = 0.5,
        delta_dtype: DeltaDtype | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: str = "popen",
    ) -> None:
        super().__init__(
            inner,
            groups,
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            process_group_backend,
            timeout,
            start_method,
        )
        self._settings = OuterSettings(
            every=every,
            lr=outer_lr,
            momentum=outer_momentum,
            fragments=fragments,
            delay=delay,
            mixing=mixing,
            delta_dtype=delta_dtype,
        )
        self._outer: list[tuple[Optimizer, OuterOptimizer]] = []  # in the order of the optimizers
        self._group_weights: dict[str, Tensor] = {}  # this rank's, while the module has the mean of the groups
        self._shown: dict[str, Tensor] = {}  # digests of that mean

    # Layouts

    def memory_layout(self, training: TrainingSize) -> MemoryLayout | None:
        layout = self.inner.memory_layout(self._of_group(training))
        if layout is None:
            return None
        share, offloads = _share_of_rank(training, layout)
        delta = int(share * max(4 * training.trainable_numel, training.trainable_parameters))
        outer = (2 if self._settings.momentum else 1) * delta
        # The delta and what a reduction needs; compressed, also the values in both dtypes.
        copies_sent = 2 if self._settings.delta_dtype is None else 3
        temporaries = copies_sent * delta // self._settings.fragments
        if offloads:
            return dataclasses.replace(layout, host=layout.host + outer + temporaries)
        return dataclasses.replace(
            layout,
            buffers=layout.buffers + outer,
            optimizer_temporaries=max(layout.optimizer_temporaries, temporaries),
        )

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        of_group = self._of_group(training)
        layout, memory = self.inner.communication_layout(of_group), self.inner.memory_layout(of_group)
        if layout is None or memory is None:
            return None
        division = self._division(training.world_size, training.ranks_per_machine)
        share, _ = _share_of_rank(training, memory)
        in_float32 = max(4 * training.trainable_numel, training.trainable_parameters)
        sent = int(in_float32 * (1 / division.size if self.inner.replicates_state else share)) // self._settings.every
        width = {None: 1.0, "bfloat16": 1 / 2, "int8": (1 + 4 / 1024) / 4}[self._settings.delta_dtype]
        outer = Collective(
            kind="all_reduce",  # compressed, an exchange and a gathering, which send as much
            bytes=int(width * sent),
            messages=self._settings.fragments / self._settings.every,
            ranks=division.num_groups,
            stride=division.size,
            overlaps=self._settings.delay > 0,
        )
        return dataclasses.replace(
            layout,
            collectives=(*layout.collectives, outer),
            assumption=f"the groups' exchange is that of a step, on average of {self._settings.every}",
        )

    # The life cycle

    def setup(self, trainer: TrainerLike) -> None:
        self._check_callbacks(trainer)
        super().setup(trainer)
        self._begin_anew()
        # Inner strategies have made the ranks of a group the same.
        broadcast_tensors([local_tensor(one) for one in _distinct(self.local_weights()).values()], self.groups.peers)

    def _check_callbacks(self, trainer: TrainerLike) -> None:
        averages = [one for one in getattr(trainer, "callbacks", ()) if getattr(one, "averages_weights", False)]
        if averages and self.groups.division.num_groups > 1:
            raise ConflictError(
                f"{type(averages[0]).__name__} averages the weights of each group by itself, which differ between "
                "exchanges: leave it out, as the outer weights are an average already"
            )
        renaming = [one for one in getattr(trainer, "callbacks", ()) if getattr(one, "renames_parameters", False)]
        if renaming and self.groups.division.num_groups > 1:
            raise ConflictError(
                f"{type(renaming[0]).__name__} renames parameters during the training, by whose names groups exchange "
                "and save what they have changed: leave it out, or use a strategy whose ranks have the same weights, "
                "such as 'ddp'"
            )

    def _begin_anew(self) -> None:
        self._outer, self._group_weights, self._shown = [], {}, {}

    def finish_training(self) -> None:
        super().finish_training()
        self._show_average()

    def on_exception(self, exception: BaseException) -> None:
        self._group_weights, self._shown = {}, {}
        for _, outer in self._outer:  # which a checkpoint that saves the failed training still has
            outer.abandon_exchange()
        super().on_exception(exception)

    def teardown(self) -> None:
        self._begin_anew()
        super().teardown()

    # Steps

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Module | None = None, **kwargs: Any
    ) -> Any:
        outer = self._outer_of(optimizer)
        if not outer.is_complete(sum(len(group["params"]) for group in optimizer.param_groups)):
            parameters = self._parameters_of(optimizer)
            # A frozen parameter, or one of another optimizer, may differ between groups.
            added = {name: one for name, one in parameters.items() if name not in outer.names and one.requires_grad}
            self._average_differing(added)
            outer.add_parameters(parameters)
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        # Whether or not it was skipped, such as after an overflow: the groups count alike.
        outer.after_step()
        if outer is self._outer[0][1] and outer.steps % self._settings.every == 0:
            self._average_untrained()
        return output

    def _outer_of(self, optimizer: Optimizer) -> OuterOptimizer:
        self._match_optimizers()
        return next(outer for one, outer in self._outer if one is optimizer)

    def _match_optimizers(self) -> None:
        """Let each optimizer have an outer one, in the first step, and after a change of optimizers.

        One that replaces another goes on with its outer optimizer.  Where parameters were divided or joined, outer
        optimizers begin anew, from the mean of the groups.
        """
        if [one for one, _ in self._outer] == self.optimizers:
            return
        known = {id(one): outer for one, outer in self._outer}
        replaced = [outer for one, outer in self._outer if not any(one is other for other in self.optimizers)]
        names = {id(one): self._parameters_of(one) for one in self.optimizers if id(one) not in known}
        sources = {
            key: [outer for outer in replaced if any(name in of_new for name in outer.names)]
            for key, of_new in names.items()
        }
        for key, of_new in sources.items():
            if len(of_new) == 1 and sum(of_new[0] in outers for outers in sources.values()) == 1:
                known[key] = of_new[0]
            elif of_new and self.is_global_zero:
                _logger.warning(
                    "new optimizers divide or join the parameters of others: the outer optimizer of their parameters "
                    "begins anew, from the mean of the groups and without momentum"
                )
        self._outer = [
            (one, known.get(id(one)) or OuterOptimizer(self._settings, self._begin_average)) for one in self.optimizers
        ]

    def _begin_average(self, deltas: Tensor, dtype: DeltaDtype | None) -> GroupAverage:
        return GroupAverage(deltas, self.groups, is_shared=self.replicates_state, dtype=dtype)

    def _parameters_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the parameters of an optimizer by name, in its order."""
        names = itertools.chain.from_iterable(self.parameter_names(optimizer))
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return dict(zip(names, parameters, strict=True))

    @torch.no_grad()
    def _average_differing(self, parameters: Mapping[str, Any]) -> None:
        """Let all groups have the mean of those parameters in which they differ; collective."""
        tensors = [local_tensor(one) for one in parameters.values()]
        flags = find_differing(tensors, self.groups, self.root_device)
        tensors = [*itertools.compress(tensors, flags)]
        means = average(tensors, self.groups, is_shared=self.replicates_state)
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean)
        if tensors:  # the same on all ranks
            self.accept_local_weights()

    @torch.no_grad()
    def _average_untrained(self) -> None:
        """Let all groups have the mean of buffers, and of parameters that change without an optimizer; collective."""
        buffers = _distinct({name: one for name, one in self.module.named_buffers() if one.is_floating_point()})
        for buffer, mean in zip(
            buffers.values(), average([*buffers.values()], self.groups, is_shared=False), strict=True
        ):
            buffer.copy_(mean)
        trained = {name for _, outer in self._outer for name in outer.names}
        names = canonical_buffers(self.module).keys() | trained
        untrained = {name: one for name, one in self._floating_weights().items() if name not in names}
        self._average_differing(untrained)

    # The mean of the groups, for evaluations, checkpoints, and after the training

    @property
    def trains_apart(self) -> bool:  # type: ignore[override]  # it depends on the number of groups
        """Whether there are several groups, whose weights differ between exchanges."""
        return self.groups.division.num_groups > 1

    @property
    def _may_differ(self) -> bool:
        """Whether the groups may have different weights or buffers, which they can compare."""
        return self._groups is not None and self.trains_apart and bool(self._outer) and not self._group_weights

    def _floating_weights(self) -> dict[str, Any]:
        """Return weights and buffers of floating-point numbers, by one name each; collective in the group."""
        weights = _distinct(self.local_weights())
        return {name: one for name, one in weights.items() if local_tensor(one).is_floating_point()}

    def _differing(self) -> dict[str, Any]:
        """Return the weights and buffers in which groups differ, by one name each; collective.

        Trained parameters do within a round.  Others are compared: modules change buffers, and some change frozen
        parameters, such as those of a target network or a momentum encoder.
        """
        weights = self._floating_weights()
        trained = {name for _, outer in self._outer if not outer.in_sync for name in outer.names}
        compared = [name for name in weights if name not in trained]
        flags = find_differing([local_tensor(weights[name]) for name in compared], self.groups, self.root_device)
        differing = trained.union(itertools.compress(compared, flags))
        return {name: one for name, one in weights.items() if name in differing}

    @torch.no_grad()
    def _average_weights(self, differing: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return this rank's shards of the means of weights and buffers; collective."""
        buffers = canonical_buffers(self.module).keys()
        means: dict[str, Tensor] = {}
        for is_shared in (False, True):  # ranks of a group may differ in buffers
            names = [name for name in differing if (name not in buffers and self.replicates_state) == is_shared]
            tensors = [local_tensor(differing[name]) for name in names]
            means |= zip(names, average(tensors, self.groups, is_shared=is_shared), strict=True)
        return means

    @torch.no_grad()
    def _show_average(self) -> None:
        """Let the module have the mean of the groups, until :meth:`_show_group`; collective."""
        if not self._may_differ:
            return
        differing = self._differing()
        means = self._average_weights(differing)
        self._group_weights = {name: local_tensor(differing[name]).clone() for name in means}
        self._set_weights(means)
        self._shown = {name: digest(local_tensor(one)) for name, one in differing.items()}

    def _show_group(self) -> None:
        """Let the module have the weights of this rank's group again."""
        if self._group_weights:
            weights = self._unchanged_weights()
            self._group_weights, self._shown = {}, {}
            self._set_weights(weights)

    def _unchanged_weights(self) -> dict[str, Tensor]:
        """Return this rank's weights of the group, where nothing has changed the mean that the module has.

        What a hook of a validation changes, such as a buffer that counts them, stays so, as on one device.
        """
        weights = self.local_weights()
        names = [name for name in self._group_weights if name in weights]  # a hook may have removed a parameter
        if not names:
            return {}
        changed = [digest(local_tensor(weights[name])) != self._shown[name] for name in names]
        flags = torch.stack([one.to(self.root_device) for one in changed]).tolist()
        return {name: self._group_weights[name] for name, flag in zip(names, flags, strict=True) if not flag}

    @torch.no_grad()
    def _set_weights(self, values: Mapping[str, Tensor]) -> None:
        weights = self.local_weights()
        for name, value in values.items():
            local_tensor(weights[name]).copy_(value)
        self.accept_local_weights()

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Return the context of an evaluation, in which the module has the mean of the groups; collective."""
        with super().evaluation_context():
            is_shown = bool(self._group_weights)  # after the end of a training, and in another evaluation
            self._show_average()
            try:
                yield
            finally:
                if not is_shown:
                    self._show_group()

    # State: the module's is the mean of the groups, and that of an inner optimizer the first group's

    def sharded_module_state(self) -> dict[str, Any]:
        state = super().sharded_module_state()
        if not self._may_differ:
            return state
        weights, means = self.local_weights(), self._average_weights(self._differing())
        by_id = {id(weights[name]): mean for name, mean in means.items()}
        averaged = {name: with_local(one, by_id[id(one)]) for name, one in weights.items() if id(one) in by_id}
        return {name: averaged.get(canonical_name(name), value) for name, value in state.items()}

    def load_sharded_module_state(self, state: dict[str, Any]) -> None:
        self._begin_anew()
        # While groups differ, sharded_module_state gives means, and they have been loaded.
        weights = self.local_weights()
        named = {canonical_name(name): one for name, one in state.items()}
        loaded = {name: one for name, one in named.items() if name in weights and one is not weights[name]}
        self._set_weights({name: local_tensor(one) for name, one in loaded.items()})
        super().load_sharded_module_state(state)

    def load_module_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        self._begin_anew()  # before the weights are overwritten, which the mean would replace
        super().load_module_state_dict(state, strict)

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().sharded_optimizer_state(optimizer)
        return state if self._is_of_first_group else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.replicates_state:
            return super().optimizer_state(optimizer)
        from dstrat.parallel.full_state import gather_optimizer_state

        # Each group gathers its state, of which rank 0 receives that of the first.
        return gather_optimizer_state(super().sharded_optimizer_state(optimizer), self)

    @property
    def _is_of_first_group(self) -> bool:
        return self._groups is None or self._groups.index == 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the outer optimizers, which all groups have; collective."""
        if self._outer:
            self._match_optimizers()
        outer = [outer.state_dict() for _, outer in self._outer]
        if not self.checkpoint_io.is_collective and not self.replicates_state:
            from dstrat.parallel.full_state import gather_state

            outer = [gather_state(state, self) for state in outer]
        with self._in_group():
            return {"inner": self.inner.state_dict(), "outer": outer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state_dict`, of any number of groups."""
        with self._in_group():
            self.inner.load_state_dict(state["inner"])
        for optimizer, saved in zip(self.optimizers, state["outer"], strict=False):  # none before the first step
            self._outer_of(optimizer).load_state_dict(saved, self._parameters_of(optimizer))

    def rank_state(self) -> dict[str, Any]:
        """Return what differs between groups: weights within a round, optimizers and loss scales; collective."""
        with self._in_group():
            inner = self.inner.rank_state()
        if self._groups is None:  # closed after an error
            return inner
        buffers = canonical_buffers(self.module).keys()
        weights = self._unchanged_weights()
        if self._may_differ:
            weights = {name: local_tensor(one) for name, one in self._differing().items()}
        of_group: dict[str, Any] = {"weights": {}, "optimizers": [], "precision": {}}
        if not self._is_of_first_group:
            optimizers = [super(DiLoCoStrategy, self).sharded_optimizer_state(one) for one in self.optimizers]
            of_group["optimizers"] = [_local_values(optimizer) for optimizer in optimizers]
            of_group["precision"] = self.precision_plugin.state_dict()
        of_group["weights"] = {name: one for name, one in weights.items() if name not in buffers}
        if self.replicates_state and self.groups.rank:  # the first rank of the group has the same
            of_group = {}
        return {
            **inner,
            _STATE: {
                "layout": self._layout,
                "buffers": {name: one for name, one in weights.items() if name in buffers},
                "of_group": of_group,
            },
        }

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        saved = state.get(_STATE)
        with self._in_group():
            self.inner.load_rank_state(state)
        if saved is None or saved["layout"] != self._layout:
            self._log_layout(saved)
            # Global rank 0 has their mean; the others have loaded those of the groups that they were in.
            self.broadcast_tensors(one for one in self.module.buffers() if one.is_floating_point())
            return
        with self._in_group():
            of_group = broadcast_object(saved["of_group"]) if self.replicates_state else saved["of_group"]
        self._set_weights({**of_group["weights"], **saved["buffers"]})
        # Decided together: a rank may have no shard of any weight.
        for _, outer in self._outer:
            differs = any(name in of_group["weights"] for name in outer.names)
            outer.in_sync = not self.reduce_boolean_decision(differs, all=False)
        if of_group["precision"]:
            self.precision_plugin.load_state_dict(of_group["precision"])
        for optimizer, values in zip(self.optimizers, of_group["optimizers"], strict=False):
            self._load_local_values(optimizer, values)

    def takes_gradients(self, state: Mapping[str, Any]) -> bool:
        """Return whether the strategy of a group restores the gradients in a state."""
        return self.inner.takes_gradients(state)

    @property
    def _layout(self) -> dict[str, Any]:
        return {
            "groups": self.groups.division.num_groups,
            "inner": type(self.inner).__name__,
            "mesh": None if self.replicates_state else list(self.device_mesh.shape),
        }

    def _log_layout(self, saved: Mapping[str, Any] | None) -> None:
        if saved is not None and self.is_global_zero:
            _logger.warning(
                "the checkpoint was saved by %s, and is continued by %s: all groups go on with the mean of the groups' "
                "weights, and the inner optimizer of the first",
                *(f"{layout['groups']} groups with {layout['inner']}" for layout in (saved["layout"], self._layout)),
            )

    def _load_local_values(self, optimizer: Optimizer, values: dict[str, Any]) -> None:
        """Load the local values of an inner optimizer's state, sharded as the state that it has now."""
        super().load_sharded_optimizer_state(
            optimizer,
            _with_values(super().sharded_optimizer_state(optimizer), values, self._parameters_of(optimizer)),
        )


def _share_of_rank(training: TrainingSize, layout: MemoryLayout) -> tuple[float, bool]:
    """Return the share of the parameters that a rank of the inner strategy has, and whether it is on the host.

    Outer weights and momentum are divided as the parameters are, and so is a delta.
    """
    on_device = layout.parameters / (training.parameters + training.module_buffers or 1)
    replicated = training.replicated
    state = replicated.gradients + replicated.optimizer_state + replicated.optimizer_temporaries
    on_host = layout.host / (training.parameters + state or 1)  # with gradients and the optimizer's state
    return min(1.0, max(on_device, on_host)), on_host > on_device


def _distinct(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors by their first names."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return {name: tensors[name] for name in first.values()}


def _local_values(value: Any) -> Any:
    """Return a nested state with this rank's values of its tensors."""
    if isinstance(value, dict):
        return {key: _local_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):  # of an optimizer such as SOAP
        return type(value)(_local_values(inner) for inner in value)
    return local_tensor(value) if isinstance(value, Tensor | FlatShard) else value


def _with_values(state: dict[str, Any], values: dict[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with other local values, which are sharded as its tensors or parameters."""
    if not has_standard_layout(values):
        return values
    entries: dict[str, Any] = {}
    for name, entry in values["state"].items():
        before = state["state"].get(name, {})
        entries[name] = {key: _like(before.get(key, parameters.get(name)), value) for key, value in entry.items()}
    return {**values, "state": entries}


def _like(sharded: Any, local: Any) -> Any:
    """Return local values sharded like other tensors, or as they are where those have another shape."""
    if isinstance(local, list | tuple):
        before = sharded if isinstance(sharded, list | tuple) and len(sharded) == len(local) else [None] * len(local)
        return type(local)(_like(one, value) for one, value in zip(before, local, strict=True))
    if not isinstance(local, Tensor) or not isinstance(sharded, Tensor | FlatShard):
        return local
    if not is_sharded(sharded) or local_tensor(sharded).shape != local.shape:
        return local
    return with_local(sharded, local.to(local_tensor(sharded).device))
